"""The hook tables against the installed SGLang, and what the plugin does to a process that loads it.

Functions without `test_` run in a sandbox: what they patch stays there.
"""

import inspect
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_tailreplay import compat, guard, hooks, runtime, state_slots
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.hooks import ENTRY, SERVING, Hook
from sglang_tailreplay.radix.rows import RequestRows
from sglang_tailreplay.request_settings import RATIO_PARAM
from sglang_tailreplay.step import Step

TABLE = ENTRY + SERVING

# ---- tables ----


@pytest.mark.parametrize("version", compat.VERSIONS)
def test_every_target_has_exactly_one_hook(version):
    assert Counter(hook.target for hook in TABLE) == Counter(compat.VERSIONS[version].keys())
    paths = [target.path for target in compat.VERSIONS[version].values()]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("hook", TABLE, ids=lambda hook: hook.target)
def test_a_hook_takes_what_its_target_gets(hook):
    extra = {"before": 0, "replace": 0, "around": 1, "after": 1}[hook.kind]
    for targets in compat.VERSIONS.values():
        inspect.signature(hook.function).bind(*range(extra + len(targets[hook.target].parameters)))


def target_problems() -> dict:
    targets = compat.VERSIONS[compat.installed_version()]
    return {name: problem for name, target in targets.items() if (problem := compat.signature_problem(target))}


def test_every_target_exists_with_its_parameters(sandbox):
    assert sandbox(target_problems) == {}


# ---- install ----


def install(path: str, parameters: list[str], applies: bool) -> dict:
    """Install one hook on path; what install said, and whether path is hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    compat.VERSIONS[compat.installed_version()]["fake"] = compat.Target(path, tuple(parameters))
    if not applies:
        HookRegistry.apply_hooks = classmethod(lambda cls: None)
    try:
        hooks.install((Hook("fake", "around", lambda original, *args, **kwargs: original(*args, **kwargs)),))
        said = None
    except TailReplayError as error:
        said = str(error)
    return {"said": said, "hooked": hasattr(compat.resolve(path), "__wrapped__") if said is None else False}


INIT_NEW = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"  # a class method


@pytest.mark.parametrize("parameters", [["cls"], ["cls", "batch", "model_runner"]])
def test_a_hook_attaches(parameters, sandbox):
    assert sandbox(install, INIT_NEW, parameters, True) == {"said": None, "hooked": True}


@pytest.mark.parametrize(
    "path, parameters, applies, said",
    [
        ("sglang.srt.server_args.ServerArgs.no_such", ["self"], True, "ServerArgs.no_such does not exist"),
        ("sglang.srt.no_such_module.f", ["self"], True, "no_such_module.f does not exist"),
        (INIT_NEW, ["cls", "model_runner"], True, "expected ('cls', 'model_runner') first"),
        (INIT_NEW, ["cls", "batch"], False, "no hook attached to"),
    ],
)
def test_install_fails_with_the_target(path, parameters, applies, said, sandbox):
    result = sandbox(install, path, parameters, applies)
    assert result["said"].startswith("tail_replay: ") and path in result["said"] and said in result["said"]
    assert "\n" not in result["said"]


def install_all() -> list:
    """Targets that have no hook after both tables are installed, as in a scheduler process."""
    before = {hook.target: compat.resolve(compat.target(hook.target).path) for hook in TABLE}
    hooks.install(ENTRY)
    hooks.install(SERVING)
    return [name for name, original in before.items() if compat.resolve(compat.target(name).path) is original]


def test_both_tables_attach(sandbox):
    assert sandbox(install_all) == []


# ---- the plugin in a process of SGLang ----


def resolved(model: str, **settings) -> dict:
    """What SGLang makes of its arguments, as text, without what differs from run to run."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=model, device="cpu", attention_backend="torch_native", random_seed=1, nccl_port=1, **settings
    )
    return {key: repr(value) for key, value in vars(args).items() if key != "model_config"}


def stock(model: str, load: bool) -> dict:
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    if load:
        load_plugins()
    values = resolved(model)
    ours = {target.path for target in compat.VERSIONS[compat.installed_version()].values()}
    return {
        "values": values,
        "backend": "tail_replay" in registered_radix_cache_backends(),
        "hooked": sorted(ours & HookRegistry._patched),
        "runtime": runtime._runtime is not None,
    }


def paths(table: tuple[Hook, ...]) -> list[str]:
    targets = next(iter(compat.VERSIONS.values()))
    return sorted(targets[hook.target].path for hook in table)


@pytest.fixture(scope="module")
def stock_values(tiny_model, sandbox) -> dict:
    return sandbox(stock, tiny_model, False)["values"]


def test_without_the_backend_sglang_is_untouched(tiny_model, stock_values, sandbox):
    loaded = sandbox(stock, tiny_model, True)
    assert loaded["values"] == stock_values
    assert loaded["backend"] and loaded["hooked"] == paths(ENTRY) and not loaded["runtime"]


def test_disabled_means_not_there(tiny_model, sandbox):
    disabled = sandbox(stock, tiny_model, True, TAILREPLAY_DISABLE="1")
    assert not disabled["backend"] and disabled["hooked"] == []
    assert sandbox(stock, tiny_model, True, TAILREPLAY_DISABLE="0")["backend"]


def register_twice() -> list:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_tailreplay import plugin

    plugin.register()
    first = {path: compat.resolve(path) for path in paths(ENTRY)}
    plugin.register()
    again = [path for path in paths(ENTRY) if compat.resolve(path) is not first[path]]
    return [again, [len(HookRegistry._hooks[path]) for path in paths(ENTRY)]]


def test_registering_twice_is_registering_once(sandbox):
    assert sandbox(register_twice) == [[], [1] * len(ENTRY)]


def broken(model: str, how: str) -> dict:
    """A plugin whose entry hooks cannot be installed: a stock start, and what a start with the backend says."""
    from sglang.srt.plugins import load_plugins

    if how == "version":
        compat.installed_version = lambda: "0.4.1"
    else:
        targets = compat.VERSIONS[compat.installed_version()]
        targets[how] = compat.Target(targets[how].path + "_renamed", targets[how].parameters)
    load_plugins()
    values = resolved(model)
    try:
        resolved(model, radix_cache_backend="tail_replay")
    except TailReplayError as error:
        return {"values": values, "said": str(error)}
    return {"values": values, "said": None}


@pytest.mark.parametrize(
    "how, said",
    [
        ("version", "SGLang 0.4.1 is not supported"),
        ("server_args_post_init", "cannot be hooked"),  # the first one: no hook of ours attaches
        ("scheduler_init", "cannot be hooked"),  # the last one: all others do
    ],
)
def test_hooks_that_fail_leave_sglang_alone_and_refuse_the_backend(how, said, tiny_model, stock_values, sandbox):
    found = sandbox(broken, tiny_model, how)
    assert found["said"] is not None and said in found["said"] and "\n" not in found["said"]
    assert found["values"] == stock_values


def no_buffer_check(backends: list) -> list[bool]:
    """For every backend, whether SGLang refuses no_buffer beside overlap scheduling."""
    from sglang.srt.server_args import ServerArgs

    from sglang_tailreplay import plugin

    plugin.register()
    view = SimpleNamespace(page_size=1, disable_overlap_schedule=False, attention_backend="triton")

    def refused(backend) -> bool:
        args = SimpleNamespace(radix_cache_backend=backend)
        try:
            ServerArgs._validate_mamba_no_buffer(args, view, "Qwen3_5ForCausalLM")
        except AssertionError:
            return True
        return False

    return [refused(backend) for backend in backends]


def test_only_the_backend_may_have_overlap_without_buffers(sandbox):
    assert sandbox(no_buffer_check, [None, "other", "tail_replay"]) == [True, True, False]


# ---- hooked functions ----


class FakeRuntime:
    def __init__(self):
        self.calls = []
        self.sink = None
        self.pass_anchors = None

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def sink_for(self, layer):
        return self.sink


@pytest.fixture
def state(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(runtime, "current", lambda: fake)
    return fake


def step(tokens: int, *hits) -> Step:
    return Step(np.arange(tokens), hits)


def pass_over(tokens: int, idle=False, **attributes):
    """A ScheduleBatch of so many tokens, and the ForwardBatch that is made of it."""
    mode = SimpleNamespace(is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, out_cache_loc=np.zeros(tokens), **attributes), SimpleNamespace()


def test_a_step_is_carried_to_the_forward_pass():
    batch, forward_batch = pass_over(2, tail_replay_step=step(2))
    hooks.carry(forward_batch, object, batch, None)
    assert forward_batch.tail_replay_step is batch.tail_replay_step


@pytest.mark.parametrize("idle, attributes", [(True, {"tail_replay_step": step(2)}), (False, {})])
def test_an_idle_or_unplanned_pass_has_no_step(idle, attributes):
    batch, forward_batch = pass_over(0, idle, **attributes)
    hooks.carry(forward_batch, object, batch, None)
    assert forward_batch.tail_replay_step is None


def test_a_step_for_other_tokens_is_an_error():
    batch, forward_batch = pass_over(3, tail_replay_step=step(2))
    with pytest.raises(AssertionError, match="2 rows for a pass over 3 tokens"):
        hooks.carry(forward_batch, object, batch, None)


def test_a_pass_begins_and_ends(state):
    forward_batch = SimpleNamespace(tail_replay_step=step(2))
    output = SimpleNamespace(can_run_graph=True)
    assert hooks.forward(lambda runner, batch: output, None, forward_batch) is output
    passed = forward_batch.tail_replay_step
    assert state.calls == [("forward_begins", passed, forward_batch), ("forward_ended", True, passed)]


def test_a_pass_that_fails_is_abandoned(state):
    def fail(*args):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.forward(fail, None, SimpleNamespace(tail_replay_step=step(2)))
    assert [name for name, *_ in state.calls] == ["forward_begins", "forward_abandoned"]


def test_hits_are_replayed_once_and_a_pass_that_skips_them_is_an_error(state):
    forward_batch = SimpleNamespace(tail_replay_step=step(2, "hit"))
    with pytest.raises(AssertionError, match="without its replay"):
        hooks.forward(lambda *args: SimpleNamespace(can_run_graph=False), None, forward_batch)

    state.calls.clear()

    def original(runner, batch):
        hooks.states_cleared(None, runner, batch)
        hooks.states_cleared(None, runner, batch)
        return SimpleNamespace(can_run_graph=False)

    hooks.forward(original, None, forward_batch)
    assert [call for call in state.calls if call[0] == "replay"] == [("replay", ("hit",))]
    names = [name for name, *_ in state.calls]
    assert names.index("prefill_begins") < names.index("replay"), "loaded KV must be waited for first, if at all"
    assert forward_batch.tail_replay_step.rows.tolist() == [0, 1]


@pytest.mark.parametrize("ahead", [True, False])
def test_hits_are_replayed_ahead_of_their_pass_or_within_it(ahead, state):
    # Two of them have the same rid, as requests of two tokenizer workers may.
    reqs = [
        SimpleNamespace(rid=rid, mamba_pool_idx=object(), mamba_needs_clear=rid != "chunk")
        for rid in ("one", "one", "chunk")
    ]
    planned = step(3, SimpleNamespace(rid="one", slot=reqs[0].mamba_pool_idx))
    state.planner = SimpleNamespace(plan_extend=lambda planned_for: planned)
    state.replay_ahead = lambda hits: ahead and hits == planned.hits
    batch = SimpleNamespace()
    hooks.plan_extend(batch, reqs)
    assert batch.tail_replay_step.rows.tolist() == [0, 1, 2]
    assert batch.tail_replay_step.hits == (() if ahead else planned.hits)
    # SGLang, which clears fresh slots within the pass, must leave those alone that the replay writes.
    assert [req.mamba_needs_clear for req in reqs] == [not ahead, True, False]


def test_without_hits_nothing_is_replayed_ahead(state):
    state.planner = SimpleNamespace(plan_extend=lambda reqs: step(2))
    hooks.plan_extend(SimpleNamespace(), [])
    assert state.calls == []


@pytest.mark.parametrize("carried", [None, step(2)])
def test_a_pass_without_hits_replays_nothing(carried, state):
    hooks.states_cleared(None, "runner", SimpleNamespace(tail_replay_step=carried))
    assert state.calls == [("prefill_begins", "runner")]


def test_a_layer_gets_a_sink_only_where_one_is_wanted(state):
    seen = []

    def original(layer, *args, **kwargs):
        seen.append(kwargs)
        return args

    layer = SimpleNamespace(layer_id=4)
    assert hooks.capture_layer(original, layer, 1, 2, captured_last_layer_outputs=None) == (1, 2)
    state.sink = "sink"
    hooks.capture_layer(original, layer, 1, 2, captured_last_layer_outputs=None)
    hooks.capture_layer(original, layer, 1, 2)
    assert [kwargs["captured_last_layer_outputs"] for kwargs in seen] == [None, "sink", "sink"]
    with pytest.raises(AssertionError, match="someone else"):
        hooks.capture_layer(original, layer, captured_last_layer_outputs=[])


def test_a_mixed_batch_carries_both_steps():
    batch, running = SimpleNamespace(tail_replay_step=step(2, "hit")), SimpleNamespace(tail_replay_step=step(1))
    hooks.mix(None, batch, running)
    assert batch.tail_replay_step.rows.tolist() == [0, 1, 0] and batch.tail_replay_step.hits == ("hit",)


def test_details_tell_of_a_hit():
    rows = RequestRows()
    rows.boundary, rows.replayed, rows.answer_generation, rows.start_kind = 9, 4, 1, "zero"
    hit = SimpleNamespace(tail_replay=rows)
    details = {"device": 9}
    added = {"tail_replay_matched": 9, "tail_replay_replayed": 4, "tail_replay_generation": 1}
    added["tail_replay_start"] = "zero"
    assert hooks.add_details(details, None, hit) == {"device": 9, **added}
    assert details == {"device": 9}
    rows.anchored = True
    assert hooks.add_details(details, None, hit) == {"device": 9, **added, "tail_replay_anchored": 1}
    assert hooks.add_details(details, None, SimpleNamespace()) == details


def test_details_tell_of_a_hit_after_a_retraction_where_sglang_counts_none():
    rows = RequestRows()
    miss = SimpleNamespace(tail_replay=rows)
    assert hooks.add_details(None, None, miss) is None
    rows.boundary, rows.replayed, rows.answer_generation, rows.start_kind = 9, 4, 1, "zero"
    told = hooks.add_details(None, None, miss)
    assert told["device"] == told["host"] == 0 and told["tail_replay_generation"] == 1


@pytest.mark.parametrize("chosen, expected", [(9, []), (None, [(5, 1 << 31, 8)])])
def test_state_slots_are_chosen_where_the_user_did_not(chosen, expected, monkeypatch):
    asked, set_to = [], []
    monkeypatch.setattr(compat, "chosen_state_slots", lambda: chosen)
    monkeypatch.setattr(compat, "chosen_max_running_requests", lambda: 5)
    monkeypatch.setattr(compat, "state_bytes", lambda configurator: 8)
    monkeypatch.setattr(compat, "choose_state_slots", set_to.append)
    monkeypatch.setattr(state_slots, "choose_state_slots", lambda *args: asked.append(args) or 7)
    assert hooks.choose_state_slots(lambda configurator, rest: rest / 2, None, 2.0) == 1.0
    assert asked == expected and set_to == [7] * len(expected)


@pytest.mark.parametrize("params", [None, {}, {"custom_params": None}, {"custom_params": {RATIO_PARAM: 0.5}}])
def test_good_requests_pass(params, server_args):
    manager = SimpleNamespace(server_args=server_args())
    assert hooks.check_request(None, manager, SimpleNamespace(sampling_params=params), [1]) is None


def test_a_bad_ratio_of_a_request_is_refused_only_with_the_backend(server_args):
    request = SimpleNamespace(sampling_params={"custom_params": {RATIO_PARAM: 2}})
    hooks.check_request(None, SimpleNamespace(server_args=server_args(radix_cache_backend=None)), request, [1])
    with pytest.raises(TailReplayError, match="tail_replay_ratio=2"):
        hooks.check_request(None, SimpleNamespace(server_args=server_args()), request, [1])


@pytest.mark.parametrize("ids, said", [([], "at least one token"), ([5, -3], "-3 is no token")])
def test_tokens_that_are_none_are_refused(ids, said, server_args):
    request = SimpleNamespace(sampling_params={}, input_ids=[ids])
    with pytest.raises(TailReplayError, match=said):
        hooks.check_request(None, SimpleNamespace(server_args=server_args()), request, ids)
    hooks.check_request(None, SimpleNamespace(server_args=server_args(radix_cache_backend=None)), request, ids)
    of_text = SimpleNamespace(sampling_params={}, input_ids=None)
    hooks.check_request(None, SimpleNamespace(server_args=server_args()), of_text, ids)


def test_arguments_are_prepared_before_sglang_and_checked_after(monkeypatch, server_args):
    order = []
    monkeypatch.setattr(guard, "prepare", lambda args: order.append("prepare"))
    monkeypatch.setattr(guard, "check", lambda args: order.append("check"))
    hooks.resolve_arguments(lambda args: order.append("sglang"), server_args())
    assert order == ["prepare", "sglang", "check"]
    order.clear()
    hooks.resolve_arguments(lambda args: order.append("sglang"), server_args(radix_cache_backend=None))
    assert order == ["sglang"]


# ---- GDN layers in prefill graphs ----


class FakeGraphs:
    def __init__(self, fits=True):
        self.calls, self._fits = [], fits

    def attend(self, *args):
        self.calls.append(args)
        return "captured"

    def fits(self, forward_batch):
        return self._fits

    def load(self, forward_batch):
        self.calls.append(("load", forward_batch))

    def load_for_capture(self, size):
        self.calls.append(("capture", size))


def attend(layer, *args):
    return hooks.attend_in_graph(lambda *given: ("eager", *given), layer, "batch", "qkv", "a", "b", *args)


@pytest.mark.parametrize("graphs, in_graph", [(None, False), (None, True), (FakeGraphs(), False)])
def test_outside_of_our_graphs_a_layer_waits_for_its_states(state, monkeypatch, graphs, in_graph):
    state.prefill_graphs = graphs
    monkeypatch.setattr(compat, "in_prefill_graph", lambda: in_graph)
    assert attend("layer") == ("eager", "layer", "batch", "qkv", "a", "b")
    assert state.calls == [("gates_made", "layer", "a"), ("states_wanted",)]


def test_in_a_graph_a_layer_is_captured_and_waits_at_its_gate_instead(state, monkeypatch):
    state.prefill_graphs = FakeGraphs()
    monkeypatch.setattr(compat, "in_prefill_graph", lambda: True)
    assert attend("layer") == "captured"
    assert state.prefill_graphs.calls == [("layer", "qkv", "a", "b")] and state.calls == [("gates_made", "layer", "a")]


@pytest.mark.parametrize("graphs, sglang, expected", [(None, True, True), (FakeGraphs(), False, False)])
def test_sglang_decides_what_runs_in_a_graph(state, graphs, sglang, expected):
    state.prefill_graphs = graphs
    assert hooks.prefill_graph_fits(lambda runner, batch: sglang, None, "batch") is expected


def test_but_a_pass_of_too_many_requests_does_not(state):
    state.prefill_graphs = FakeGraphs(fits=False)
    assert hooks.prefill_graph_fits(lambda runner, batch: True, None, "batch") is False


class FakePassAnchors:
    active = True

    def attend(self, *args):
        return ("saved", *args)


def test_a_pass_that_saves_states_inside_of_it_runs_where_they_can_be_had(state, monkeypatch):
    state.prefill_graphs, state.pass_anchors = FakeGraphs(), FakePassAnchors()
    assert hooks.prefill_graph_fits(lambda runner, batch: True, None, "batch") is False
    monkeypatch.setattr(compat, "in_prefill_graph", lambda: False)
    assert attend("layer") == ("saved", "layer", "qkv", "a", "b")
    assert state.calls == [("gates_made", "layer", "a"), ("states_wanted",)]
    state.pass_anchors.active = False
    assert attend("layer")[0] == "eager"


def test_a_graph_is_told_its_pass_before_it_runs(state):
    state.prefill_graphs = FakeGraphs()
    hooks.prefill_graph_capture(None, 64)
    hooks.prefill_graph_run(None, "batch")
    assert state.prefill_graphs.calls == [("capture", 64), ("load", "batch")]
    state.prefill_graphs = None
    hooks.prefill_graph_capture(None, 64)
    hooks.prefill_graph_run(None, "batch")


@pytest.mark.parametrize("graphs", [None, FakeGraphs()])
def test_only_our_graphs_wait_at_gates(state, graphs):
    state.prefill_graphs = graphs
    state.states_wanted = lambda behind_gates: state.calls.append(behind_gates)
    hooks.prefill_graph_launch(None, "shape", "batch")
    assert state.calls == [graphs is not None]
