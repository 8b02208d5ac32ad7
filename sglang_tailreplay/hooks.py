"""Every place where SGLang is hooked, in two tables, and the hooked functions.

ENTRY hooks are in every process that loads the plugin and do nothing unless the backend is chosen. SERVING hooks are
installed in the scheduler process when it is. A hook that cannot be attached stops the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_tailreplay import compat, guard, request_settings, runtime, scheduling, state_slots
from sglang_tailreplay import step as steps
from sglang_tailreplay.errors import TailReplayError

_STEP = "tail_replay_step"  # attribute that carries a Step on a ScheduleBatch and on its ForwardBatch


class Hook(NamedTuple):
    target: str  # key of compat's table
    kind: str  # before, after, around or replace (sglang.srt.plugins.hook_registry.HookType)
    function: Callable


def install(hooks: tuple[Hook, ...]) -> None:
    """Register, apply and verify. TailReplayError names the first target that did not take its hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    targets = [compat.target(hook.target) for hook in hooks]
    for target in targets:
        problem = compat.signature_problem(target)
        if problem:
            raise TailReplayError(f"tail_replay: SGLang {compat.installed_version()} cannot be hooked: {problem}")
    originals = [compat.resolve(target.path) for target in targets]
    for target, hook in zip(targets, hooks, strict=True):
        HookRegistry.register(target.path, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()  # logs failures and goes on, hence:
    for target, original in zip(targets, originals, strict=True):
        if compat.resolve(target.path) is original:
            raise TailReplayError(f"tail_replay: no hook attached to {target.path}; another plugin may have taken it")


# ---- entry hooks ----


def resolve_arguments(original: Callable, server_args: Any) -> None:
    """Around ServerArgs.__post_init__."""
    if not guard.is_active(server_args):
        return original(server_args)
    guard.prepare(server_args)
    original(server_args)
    guard.check(server_args)


def allow_overlap(original: Callable, server_args: Any, view: Any, model_arch: str) -> None:
    """Around the check that no_buffer runs without overlap scheduling.

    Its reason is that a finished request's state slot goes to the tree while the next step still writes it. Here no
    slot ever goes to the tree. What else it checks, guard.check checks too.
    """
    if not guard.is_active(server_args):
        original(server_args, view, model_arch)


def check_request(result: Any, tokenizer_manager: Any, obj: Any, input_ids: Any, *args: Any, **kwargs: Any) -> None:
    """After a request was validated: its own replay ratio must be one, its token ids tokens.

    A TailReplayError here is an HTTP 400. SGLang 0.5.17 lets ids below 0 and prompts without tokens pass, and its
    scheduler ends with them.
    """
    if guard.is_active(tokenizer_manager.server_args):
        params = getattr(obj, "sampling_params", None)
        if isinstance(params, dict):
            request_settings.check(params.get("custom_params"))
        if getattr(obj, "input_ids", None) is not None:
            request_settings.check_tokens(input_ids)


def start_scheduler(original: Callable, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Around Scheduler.__init__: the backend is chosen or not, and stays so."""
    if not guard.is_active(server_args):
        return original(scheduler, server_args, *args, **kwargs)
    state = runtime.activate(server_args)
    install(SERVING)
    original(scheduler, server_args, *args, **kwargs)
    state.on_ready(scheduler)


ENTRY = (
    Hook("server_args_post_init", "around", resolve_arguments),
    Hook("validate_no_buffer", "around", allow_overlap),
    Hook("validate_request", "after", check_request),
    Hook("scheduler_init", "around", start_scheduler),
)


# ---- serving hooks: start ----


def choose_state_slots(original: Callable, configurator: Any, rest_gb: float) -> float:
    """Around the division of GPU memory between states and KV: states for running requests only, the rest is KV."""
    if compat.chosen_state_slots() is None:
        rest_bytes = int(rest_gb * (1 << 30))
        wanted = compat.chosen_max_running_requests()
        slots = state_slots.choose_state_slots(wanted, rest_bytes, compat.state_bytes(configurator))
        compat.choose_state_slots(slots)
    return original(configurator, rest_gb)


def pools_ready(result: Any, model_runner: Any) -> None:
    runtime.current().on_pools_ready(model_runner)


# ---- serving hooks: scheduling ----


def plan_extend(batch: Any, reqs: list) -> None:
    """Before SGLang collects (and forgets) which of a prefill batch's slots are fresh."""
    state = runtime.current()
    step = state.planner.plan_extend(reqs)
    if step.hits and state.replay_ahead(step.hits):
        # By slot: rids are the clients' to choose, and are unique within each of SGLang's tokenizer workers only.
        begun = {id(hit.slot) for hit in step.hits}
        for req in reqs:
            if id(req.mamba_pool_idx) in begun:
                req.mamba_needs_clear = False  # it was; now it holds what the replay writes
        step = dataclasses.replace(step, hits=())
    setattr(batch, _STEP, step)


def plan_decode(result: Any, batch: Any) -> None:
    setattr(batch, _STEP, runtime.current().planner.plan_decode(batch.reqs))


def mix(result: Any, batch: Any, running_batch: Any) -> None:
    setattr(batch, _STEP, steps.mix(getattr(batch, _STEP, None), getattr(running_batch, _STEP, None)))


def carry(forward_batch: Any, cls: type, batch: Any, *args: Any, **kwargs: Any) -> None:
    """After a ForwardBatch was made of a ScheduleBatch."""
    step = None if batch.forward_mode.is_idle() else getattr(batch, _STEP, None)
    tokens = len(batch.out_cache_loc)
    assert step is None or len(step.rows) == tokens, f"{len(step.rows)} rows for a pass over {tokens} tokens"
    setattr(forward_batch, _STEP, step)


# ---- serving hooks: forward ----


def forward(original: Callable, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward: what the pass computes for its tokens is stored."""
    state = runtime.current()
    step = getattr(forward_batch, _STEP, None)
    state.forward_begins(step, forward_batch)
    try:
        output = original(model_runner, forward_batch, *args, **kwargs)
    except BaseException:
        state.forward_abandoned()
        raise
    pending = getattr(forward_batch, _STEP, None)
    assert pending is None or not pending.hits, "a batch with cached prefixes ran without its replay"
    state.forward_ended(output.can_run_graph, pending)
    if pending is not None and pending.samples:
        state.answered(pending.samples, output.logits_output.next_token_logits)
    return output


def capture_layer(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Around a GDN layer's forward: the first one of a group hands over what enters it."""
    sink = runtime.current().sink_for(layer.layer_id)
    if sink is not None:
        assert kwargs.get("captured_last_layer_outputs") is None, "someone else captures this layer's input"
        kwargs["captured_last_layer_outputs"] = sink
    return original(layer, *args, **kwargs)


def attend_in_graph(
    original: Callable, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around a GDN layer's attention: in a prefill graph it is captured instead of breaking the graph.

    In a pass that is to save states inside of it, it runs where they can be had."""
    state = runtime.current()
    state.gates_made(layer, a)
    graphs = state.prefill_graphs
    if graphs is None or not compat.in_prefill_graph():
        state.states_wanted()
        if state.pass_anchors is not None and state.pass_anchors.active:
            return state.pass_anchors.attend(layer, mixed_qkv, a, b)
        return original(layer, forward_batch, mixed_qkv, a, b, *args, **kwargs)
    return graphs.attend(layer, mixed_qkv, a, b)


def prefill_graph_capture(graph_runner: Any, size: int, *args: Any, **kwargs: Any) -> None:
    graphs = runtime.current().prefill_graphs
    if graphs is not None:
        graphs.load_for_capture(size)


def prefill_graph_fits(original: Callable, graph_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> bool:
    state = runtime.current()
    saves = state.pass_anchors is not None and state.pass_anchors.active  # states that no graph gives away
    fits = not saves and (state.prefill_graphs is None or state.prefill_graphs.fits(forward_batch))
    return fits and original(graph_runner, forward_batch, *args, **kwargs)


def prefill_graph_launch(backend: Any, *args: Any, **kwargs: Any) -> None:
    """Before a prefill graph is launched, when all that its pass needs is prepared."""
    state = runtime.current()
    state.states_wanted(behind_gates=state.prefill_graphs is not None)


def prefill_graph_run(graph_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    graphs = runtime.current().prefill_graphs
    if graphs is not None:
        graphs.load(forward_batch)


def states_cleared(result: Any, model_runner: Any, forward_batch: Any) -> None:
    """After a prefill batch's fresh slots were zeroed, on the forward stream, before the pass reads them. Replays what
    was not replayed ahead."""
    state = runtime.current()
    state.prefill_begins(model_runner)
    step = getattr(forward_batch, _STEP, None)
    if step is not None and step.hits:
        state.replay(step.hits)
        setattr(forward_batch, _STEP, dataclasses.replace(step, hits=()))


# ---- serving hooks: reporting, idle time, other weights ----


def add_details(details: dict | None, streamer: Any, req: Any) -> dict | None:
    """After the breakdown of an answer's cached tokens (meta_info["cached_tokens_details"]) was made.

    SGLang counts what a request found when it was first admitted, and makes none where that was nothing. A request that
    was retracted may have found what it had computed itself, and an approximate replay of that must be told, too.
    """
    ours = scheduling.report(req)
    return {**(details or {"device": 0, "host": 0}), **ours} if ours else details


def idle_check(result: Any, checker: Any) -> None:
    runtime.current().on_idle()


def memory_released(updater: Any, recv_req: Any) -> None:
    """Before SGLang, which must be idle, gives the memory of weights, KV or graphs back."""
    runtime.current().memory_leaves()


def weights_updated(result: Any, updater: Any, recv_req: Any) -> None:
    """After any update of the weights; the request may have SGLang keep its cache."""
    runtime.current().forget_hits()


SERVING = (
    Hook("state_slots", "around", choose_state_slots),
    Hook("slots_per_request", "replace", lambda configurator: 1),
    Hook("pools_ready", "after", pools_ready),
    Hook("plan_extend", "before", plan_extend),
    Hook("plan_decode", "after", plan_decode),
    Hook("mix", "after", mix),
    Hook("carry", "after", carry),
    Hook("forward", "around", forward),
    Hook("gdn_layer_qwen3_5", "around", capture_layer),
    Hook("gdn_layer_qwen3_next", "around", capture_layer),
    Hook("gdn_layer_olmo_hybrid", "around", capture_layer),
    Hook("states_cleared", "after", states_cleared),
    Hook("gdn_attention", "around", attend_in_graph),
    Hook("prefill_graph_capture", "before", prefill_graph_capture),
    Hook("prefill_graph_fits", "around", prefill_graph_fits),
    Hook("prefill_graph_run", "before", prefill_graph_run),
    Hook("prefill_graph_launch", "before", prefill_graph_launch),
    Hook("cached_tokens_details", "after", add_details),
    Hook("idle_check", "after", idle_check),
    Hook("memory_released", "before", memory_released),
    Hook("weights_updated", "after", weights_updated),
)
