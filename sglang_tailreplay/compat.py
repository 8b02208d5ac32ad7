"""All that depends on the version of SGLang: the symbols that are hooked, and the few calls whose shape may change.

Every target is listed with the parameters it must have; `signature_problem` compares one with the installed SGLang, so
that what has changed stops the start with its name instead of failing somewhere in a request.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import pkgutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_tailreplay.errors import Parser, TailReplayError

if TYPE_CHECKING:
    import torch


class Target(NamedTuple):
    """A function or method of SGLang and the leading parameters that our hook relies on."""

    path: str
    parameters: tuple[str, ...]


_0_5_17 = {
    # every process, whatever backend is chosen
    "server_args_post_init": Target("sglang.srt.server_args.ServerArgs.__post_init__", ("self",)),
    "validate_no_buffer": Target(
        "sglang.srt.server_args.ServerArgs._validate_mamba_no_buffer", ("self", "view", "model_arch")
    ),
    "validate_request": Target(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", ("self", "obj", "input_ids")
    ),
    "scheduler_init": Target("sglang.srt.managers.scheduler.Scheduler.__init__", ("self", "server_args")),
    # the scheduler process, when the backend is chosen
    "state_slots": Target(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        ("self", "total_rest_memory"),
    ),
    "slots_per_request": Target(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio", ("self",)
    ),
    "pools_ready": Target(
        "sglang.srt.model_executor.model_runner.ModelRunner._init_post_memory_pool_components", ("self",)
    ),
    "gdn_layer_qwen3_5": Target(
        "sglang.srt.models.qwen3_5.Qwen3_5LinearDecoderLayer.forward", ("self", "hidden_states", "residual")
    ),
    "gdn_layer_qwen3_next": Target(
        "sglang.srt.models.qwen3_next.Qwen3HybridLinearDecoderLayer.forward",
        ("self", "hidden_states", "residual", "captured_last_layer_outputs"),
    ),
    "gdn_layer_olmo_hybrid": Target(
        "sglang_tailreplay.models.olmo_hybrid.OlmoHybridLinearDecoderLayer.forward",
        ("self", "positions", "hidden_states", "forward_batch", "captured_last_layer_outputs"),
    ),
    "gdn_attention": Target(
        "sglang.srt.layers.radix_linear_attention.RadixLinearAttention.forward",
        ("self", "forward_batch", "mixed_qkv", "a", "b"),
    ),
    "prefill_graph_capture": Target(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture_one_shape",
        ("self", "size"),
    ),
    "prefill_graph_fits": Target(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        ("self", "forward_batch"),
    ),
    "prefill_graph_run": Target(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
        ("self", "forward_batch"),
    ),
    "prefill_graph_launch": Target(
        "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend.replay",
        ("self", "shape_key", "static_forward_batch"),
    ),
    "plan_extend": Target(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._collect_deferred_mamba_cow_and_clear", ("self", "reqs")
    ),
    "plan_decode": Target("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode", ("self",)),
    "mix": Target("sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running", ("self", "running_batch")),
    "carry": Target(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", ("cls", "batch", "model_runner")
    ),
    "states_cleared": Target(
        "sglang.srt.model_executor.model_runner.ModelRunner._maybe_execute_deferred_mamba_cow_and_clear",
        ("self", "forward_batch"),
    ),
    "forward": Target("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("self", "forward_batch")),
    "cached_tokens_details": Target(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        ("self", "req"),
    ),
    "idle_check": Target(
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_tree_cache",
        ("self",),
    ),
    "memory_released": Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".release_memory_occupation",
        ("self", "recv_req"),
    ),
    "weights_updated": Target(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".flush_cache_after_weight_update",
        ("self", "recv_req"),
    ),
}

VERSIONS: dict[str, dict[str, Target]] = {"0.5.17": _0_5_17}


def installed_version() -> str:
    return importlib.metadata.version("sglang")


def version_problem() -> str | None:
    """Why the installed SGLang cannot be used, or None."""
    try:
        version = installed_version()
    except importlib.metadata.PackageNotFoundError:
        return f"SGLang is not installed; install one of: {', '.join(VERSIONS)} (pip install sglang==VERSION)"
    if version not in VERSIONS:
        return f"SGLang {version} is not supported; install one of: {', '.join(VERSIONS)} (pip install sglang==VERSION)"
    return None


def target(name: str) -> Target:
    return VERSIONS[installed_version()][name]


def resolve(path: str) -> Any:
    """The function at path, unwrapped from class- and staticmethod."""
    owner, attribute = path.rsplit(".", 1)
    value = inspect.getattr_static(pkgutil.resolve_name(owner), attribute)
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def signature_problem(wanted: Target) -> str | None:
    """What is wrong with a target in the installed SGLang, or None."""
    try:
        found = tuple(inspect.signature(resolve(wanted.path)).parameters)
    except (ImportError, AttributeError) as error:
        return f"{wanted.path} does not exist ({error})"
    if found[: len(wanted.parameters)] != wanted.parameters:
        return f"{wanted.path} takes {found}, expected {wanted.parameters} first"
    return None


# ---- calls whose shape depends on the version ----


def parse_arguments(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """SGLang's parser, what it makes of argv (a --config file included), and the words that it does not know.
    TailReplayError for a value that does not parse."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    if "--config" in argv:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger

        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    return parser, *parser.parse_known_args(argv)


def resolve_arguments(namespace: argparse.Namespace) -> Any:
    """ServerArgs, with all that SGLang and its plugins do to them before a server starts."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    return ServerArgs.from_cli_args(namespace)


def resolved_view(server_args: Any) -> Any:
    """ServerArgs with the values that SGLang has resolved so far."""
    from sglang.srt.arg_groups.overrides import resolved_view as view

    return view(server_args)


def chosen_state_slots() -> int | None:
    from sglang.srt.runtime_context import get_schedule

    return get_schedule().max_mamba_cache_size


def chosen_max_running_requests() -> int | None:
    from sglang.srt.runtime_context import get_schedule

    return get_schedule().max_running_requests


def choose_state_slots(slots: int) -> None:
    from sglang.srt.runtime_context import get_context

    get_context().override("tail_replay.state_slots", max_mamba_cache_size=slots)


def state_bytes(configurator: Any) -> int:
    """Bytes of one request's conv and recurrent states."""
    return configurator.mambaish_config.mamba2_cache_params.mamba_cache_per_req


def create_cache(ctx: Any, cache_class: type, component_class: type) -> Any:
    """SGLang's _create_unified_radix_cache for a hybrid model, with our classes."""
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    ctx.params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
    ctx.params.component_registry_override = {ComponentType.MAMBA: component_class}
    return cache_class(ctx.params)


def wait_for_loaded_kv(model_runner: Any) -> None:
    """Make the current stream wait until all KV that the running batch loads from the host is on the device."""
    counter = model_runner.token_to_kv_pool.layer_transfer_counter
    if counter is not None:  # None without HiCache
        counter.wait_until(counter.num_layers - 1)


@contextmanager
def stream_of_passes(model_runner: Any) -> Iterator[None]:
    """On the stream where forward passes run, behind what the scheduler has put on its own so far."""
    import torch

    device = torch.device(model_runner.device)
    if device.type != "cuda" or model_runner.server_args.disable_overlap_schedule:
        yield  # it is the scheduler's own
        return
    model_runner.forward_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(model_runner.forward_stream):
        yield


def clear_states(model_runner: Any, slots: torch.Tensor) -> None:
    """Zero conv and recurrent states of slots [n], on the current stream, as SGLang does for fresh ones."""
    pool = model_runner.req_to_token_pool
    pool.mamba_pool.clear_slots(pool.translate_mamba_indices(slots))


def largest_graph(model_runner: Any) -> int:
    """Tokens of the largest forward pass that may run in a CUDA graph, decode or prefill."""
    graphs = model_runner.server_args.cuda_graph_config
    phases = [phase for phase in (graphs.decode, graphs.prefill) if phase.backend != "disabled"]
    sizes = [size for phase in phases for size in phase.bs or ()]
    # A decode batch is padded to a captured size, which may lie above the number of requests.
    return max([*sizes, model_runner.req_to_token_pool.size])


def uses_graphs(model_runner: Any) -> bool:
    """Whether SGLang runs any forward pass in CUDA graphs (--disable-cuda-graph turns all of them off)."""
    graphs = model_runner.server_args.cuda_graph_config
    return any(phase.backend != "disabled" for phase in (graphs.decode, graphs.prefill))


def largest_prefill_graph(model_runner: Any) -> int:
    """Tokens of the largest prefill that runs in a CUDA graph, 0 if none does."""
    prefill = model_runner.server_args.cuda_graph_config.prefill
    return max(prefill.bs or (0,)) if prefill.backend != "disabled" else 0


def in_prefill_graph() -> bool:
    """Whether the model is called to be captured in a breakable prefill graph, warm-up calls included."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph

    return is_in_breakable_cuda_graph()


def in_graph_capture() -> bool:
    """Whether SGLang is capturing CUDA graphs, its warm-up forwards included."""
    from sglang.srt.model_executor.runner import get_is_capture_mode

    return get_is_capture_mode()


def internal_request(scheduler: Any, rid: str, tokens: array, new_tokens: int = 1) -> Any:
    """A request that no client has sent. tokens: of int64."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    params.normalize(None)
    return Req(rid, "", tokens, params, vocab_size=scheduler.model_config.vocab_size)


def extend_batch(scheduler: Any, req: Any) -> Any:
    """A prefill batch of the request's extend range, with KV slots and input on the device."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = ScheduleBatch.init_new(
        [req], scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache,
        scheduler.model_config, enable_overlap=False, spec_algorithm=scheduler.spec_algorithm,
    )  # fmt: skip
    batch.prepare_for_extend()
    batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
    return batch


def forward(scheduler: Any, batch: Any) -> Any:
    """Run the model on a batch, past the scheduler: next-token logits [requests, V]. Its KV is all on the device."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    scheduler.tp_worker.set_hicache_consumer(batch.hicache_consumer_index)
    model_runner = scheduler.tp_worker.model_runner
    forward_batch = ForwardBatch.init_new(batch, model_runner, return_hidden_states_before_norm=False)
    return model_runner.forward(forward_batch).logits_output.next_token_logits


@contextmanager
def forward_stream_of(scheduler: Any) -> Iterator[None]:
    """On the stream where the scheduler's passes run, behind what the scheduler has put on its own."""
    with scheduler.forward_stream_ctx:
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        yield
    scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def request_probe(scheduler: Any) -> Callable[[], bool]:
    """What tells whether a request has arrived that the scheduler has not read."""
    poll = getattr(scheduler.request_receiver.recv_from_tokenizer, "poll", None)
    if poll is None:
        raise TailReplayError(
            "tail_replay: --tail-replay-verify-fraction: SGLang's Rust server does not tell when requests wait; leave "
            "out the flag or SGLANG_RUST_SERVER"
        )
    return lambda: bool(poll(0))


def register_config(config_class: type) -> None:
    """Let SGLang read config.json of this class's model_type through it, as it does with its own classes.

    transformers' AutoConfig keeps the class it has, which its own models are found by.
    """
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    _CONFIG_REGISTRY[config_class.model_type] = config_class


def gdn_backend_class(model_config: Any) -> type:
    """The attention backend that SGLang runs the model's GDN layers with."""
    from sglang.srt.configs.linear_attn_model_registry import import_backend_class
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    registered = model_config.linear_attn_registry_result
    return import_backend_class(registered[0].backend_class_name) if registered else GDNAttnBackend
