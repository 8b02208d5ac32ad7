"""What Tail-Replay needs of ServerArgs: settings it sets, settings it refuses.

Every refusal is one line that names the flag and the way out. The checks run in the process that parses the arguments,
before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from sglang_tailreplay import adapters, compat
from sglang_tailreplay.config import BACKEND, TailReplayConfig
from sglang_tailreplay.errors import Refused

logger = logging.getLogger(__name__)

DECODE_GRAPHS = ("full", "disabled")
PREFILL_GRAPHS = ("breakable", "disabled")
# Sizes of prefill CUDA graphs. Up to 2048 tokens: passes over 8192 and more gain nothing from a graph (4B shape, H200),
# in none are states saved inside, and the buffer in which they leave their hidden states has the size of the largest.
# SGLang's own sizes start at 4, and a pass may not be less than half of its graph; the 2 is for the one token that is
# left of a prompt that is sent again.
PREFILL_GRAPH_SIZES = (
    *(2, *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32)),
    *(*range(576, 1025, 64), *range(1280, 2049, 256)),
)
_OFF = "or choose SGLang's own cache with --tail-replay-mode off"


class Refusal(NamedTuple):
    """A setting that cannot be combined with Tail-Replay."""

    applies: Callable[[Any], Any]  # of ServerArgs
    flag: str
    why: str


REFUSALS = (
    Refusal(lambda a: a.disable_radix_cache, "--disable-radix-cache", "there is no cache to reuse"),
    Refusal(lambda a: (a.page_size or 1) > 1, "--page-size", "reuse at any token needs pages of one token"),
    Refusal(lambda a: a.speculative_algorithm, "--speculative-algorithm", "accepted drafts move KV but not its rows"),
    Refusal(lambda a: a.tp_size > 1, "--tensor-parallel-size", "rows are not sharded over ranks yet"),
    Refusal(lambda a: a.pp_size > 1, "--pipeline-parallel-size", "a group may not be cut by a pipeline stage"),
    Refusal(lambda a: a.enable_dp_attention, "--enable-dp-attention", "a replay would run collectives of its own"),
    Refusal(lambda a: a.moe_a2a_backend != "none", "--moe-a2a-backend", "a replay would run collectives of its own"),
    Refusal(lambda a: a.enable_eplb, "--enable-eplb", "a replay would be counted as load of the experts"),
    Refusal(
        lambda a: a.expert_distribution_recorder_mode is not None,
        "--expert-distribution-recorder-mode",
        "a replay would be counted as load of the experts",
    ),
    Refusal(
        lambda a: a.enable_return_routed_experts,
        "--enable-return-routed-experts",
        "a replay would be taken for the request's own tokens",
    ),
    Refusal(lambda a: a.ep_size > 1, "--expert-parallel-size", "a replay would run collectives of its own"),
    Refusal(lambda a: a.dcp_size > 1, "--dcp-size", "a token's KV would lie on several ranks"),
    Refusal(lambda a: a.enable_prefill_cp, "--enable-prefill-cp", "a token's hidden state would lie on another rank"),
    Refusal(lambda a: a.disaggregation_mode != "null", "--disaggregation-mode", "transferred KV has no rows"),
    Refusal(lambda a: a.enable_lora or a.lora_paths, "--enable-lora", "a replay does not apply adapters"),
    Refusal(
        lambda a: a.mamba_radix_cache_strategy not in ("auto", "no_buffer"),
        "--mamba-radix-cache-strategy",
        "no recurrent state is stored; only auto and no_buffer make sense",
    ),
    Refusal(lambda a: a.enable_unified_memory, "--enable-unified-memory", "state slots must be physical"),
    Refusal(lambda a: a.enable_lmcache, "--enable-lmcache", "KV from an external cache has no rows"),
    Refusal(lambda a: a.enable_flexkv, "--enable-flexkv", "KV from an external cache has no rows"),
    Refusal(lambda a: a.hicache_storage_backend, "--hicache-storage-backend", "KV from storage has no rows"),
    Refusal(lambda a: a.enable_hisparse, "--enable-hisparse", "its KV does not stay where the tree thinks it is"),
    Refusal(lambda a: a.enable_pdmux, "--enable-pdmux", "its split prefill passes by the replay"),
    Refusal(lambda a: a.enable_two_batch_overlap, "--enable-two-batch-overlap", "a forward pass would be cut in two"),
    Refusal(lambda a: a.enable_session_radix_cache, "--enable-session-radix-cache", "it is not supported yet"),
    Refusal(
        lambda a: a.enable_streaming_session,
        "--enable-streaming-session",
        "a session keeps KV and state outside of the tree",
    ),
    Refusal(lambda a: a.dp_size > 1, "--data-parallel-size", "ranks share one host memory; start one server a GPU"),
    Refusal(lambda a: a.cpu_offload_gb > 0, "--cpu-offload-gb", "a replay reads weights that are not on the GPU then"),
    Refusal(lambda a: a.offload_group_size > 0, "--offload-group-size", "a replay reads weights on the GPU only"),
    Refusal(lambda a: a.enable_mis, "--enable-mis", "it turns the prefix cache off"),
    Refusal(lambda a: a.is_embedding, "--is-embedding", "only generating models are supported"),
    Refusal(lambda a: a.use_ray, "--use-ray", "Ray's schedulers load no plugins"),
    Refusal(lambda a: a.enable_int8_mamba_checkpoint, "--enable-int8-mamba-checkpoint", "no state is checkpointed"),
    Refusal(
        lambda a: a.enable_linear_replayssm or a.enable_linear_replayssm_spec,
        "--enable-linear-replayssm",
        "a replay writes states past its ring",
    ),
    Refusal(lambda a: a.enable_torch_compile, "--enable-torch-compile", "compiled layers pass by the capture"),
    Refusal(
        lambda a: a.enable_deterministic_inference,
        "--enable-deterministic-inference",
        "answers depend on how much of a prompt was cached",
    ),
    Refusal(
        lambda a: a.rl_on_policy_target,
        "--rl-on-policy-target",
        "answers depend on how much of a prompt was cached",
    ),
    Refusal(lambda a: a.dllm_algorithm, "--dllm-algorithm", "diffusion models have no recurrent state"),
    Refusal(
        lambda a: a.cuda_graph_backend_prefill not in (None, *PREFILL_GRAPHS),
        "--cuda-graph-backend-prefill",
        "hidden states are captured inside 'breakable' graphs only",
    ),
    Refusal(
        lambda a: a.cuda_graph_backend_decode not in (None, *DECODE_GRAPHS),
        "--cuda-graph-backend-decode",
        "hidden states are captured inside 'full' graphs only",
    ),
)


def is_active(server_args: Any) -> bool:
    return server_args.radix_cache_backend == BACKEND


def refused_flags(server_args: Any) -> tuple[Refusal, ...]:
    return tuple(refusal for refusal in REFUSALS if refusal.applies(server_args))


def prepare(server_args: Any) -> None:
    """Before SGLang resolves its arguments: refuse what the user asked for and cannot have, set what must be set."""
    _raise_if(_problems_before(server_args))
    # 'auto' would choose extra_buffer, which stores states, or turn overlap scheduling off for no_buffer.
    server_args.mamba_radix_cache_strategy = "no_buffer"
    server_args.page_size = 1
    if server_args.cuda_graph_max_bs_prefill is None and server_args.cuda_graph_bs_prefill is None:
        server_args.cuda_graph_bs_prefill = list(PREFILL_GRAPH_SIZES)
    if _writes_page_by_page(server_args):
        server_args.hicache_mem_layout = "layer_first"


def _writes_page_by_page(server_args: Any) -> bool:
    """SGLang's default layout of host KV: its scheduler handles every page, here one token, on its own when it writes.

    That took 5 to 9 us a token, before the answer to a cold prompt was sent."""
    layout, backend = server_args.hicache_mem_layout, server_args.hicache_io_backend
    return server_args.enable_hierarchical_cache and (layout, backend) == ("page_first", "kernel")


def check(server_args: Any) -> None:
    """After SGLang has resolved its arguments: refuse what defaults and the model led to."""
    if server_args.model_path.lower() in ("none", "dummy"):
        return
    _raise_if(_problems_after(server_args))
    graphs = server_args.cuda_graph_config
    if graphs.prefill.backend not in PREFILL_GRAPHS:
        logger.warning(
            "tail_replay: prefill CUDA graphs are off: hidden states are not captured inside %r graphs",
            graphs.prefill.backend,
        )
        graphs.prefill.backend = "disabled"


def _raise_if(problems: Iterable[str]) -> None:
    found = [f"tail_replay: {problem}" for problem in problems]
    if found:
        raise Refused(found)


def _problems_before(server_args: Any) -> Iterator[str]:
    problem = compat.version_problem()
    if problem:
        yield problem
    if TailReplayConfig.from_environment().mode == "off":
        yield "mode 'off' means SGLang's own cache: start without --radix-cache-backend tail_replay"
    for refusal in refused_flags(server_args):
        yield f"{refusal.flag}: {refusal.why}. Leave this flag out, {_OFF}."


def _problems_after(server_args: Any) -> Iterator[str]:
    architecture = (server_args.get_model_config().hf_config.architectures or ["a model without architecture"])[0]
    if architecture not in adapters.ARCHITECTURES:
        yield (
            f"--model-path {server_args.model_path}: {architecture} is no hybrid model that Tail-Replay "
            f"knows. Use one of {', '.join(adapters.ARCHITECTURES)}, {_OFF}."
        )
    view = compat.resolved_view(server_args)
    if view.disable_radix_cache or view.enable_deterministic_inference:
        yield (
            "some other flag led SGLang to --disable-radix-cache or --enable-deterministic-inference; "
            f"leave it out, {_OFF}."
        )
    if view.page_size != 1:
        yield f"--page-size resolved to {view.page_size}; give --page-size 1, {_OFF}."
    if view.attention_backend == "trtllm_mha":
        yield f"--attention-backend trtllm_mha needs larger pages; choose flashinfer or triton, {_OFF}."
    if server_args.cuda_graph_config.decode.backend not in DECODE_GRAPHS:
        yield (
            f"--cuda-graph-config asks for decode backend {server_args.cuda_graph_config.decode.backend!r}; hidden "
            f"states are captured inside 'full' graphs only. Leave it out, {_OFF}."
        )
