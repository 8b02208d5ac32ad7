"""What a server with settled arguments will do with its memory, and what a hit will cost: from config.json alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_tailreplay import compat, memory_plan
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.cost import Shape, Speeds, bound, covering_interval
from sglang_tailreplay.cuda_streams.row_format import check_hidden
from sglang_tailreplay.diagnosis import NOTE, Device, Finding
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.memory_plan import GIB, DevicePlan, NumberBytes
from sglang_tailreplay.replay.tail import tail_length

HITS = (8192, 32768)  # matched tokens that costs are told for
SUFFIX = 64  # new tokens of such a prompt
ASSUMED_FRACTION = 0.8  # of a GPU that is not here, without --mem-fraction-static
ASSUMED_PASS = 16384  # tokens; the same, without --chunked-prefill-size
# Fields that a config.json may leave to its model's defaults.
DEFAULTED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "tie_word_embeddings", "linear_conv_kernel_dim"),
    *("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"),
)
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}
KV_DTYPES = {"fp8_e5m2": 1, "fp8_e4m3": 1, "bf16": 2, "bfloat16": 2}


class Unknown(Exception):
    """There is no forecast for a model that may well start."""


class Imagined(NamedTuple):
    """A GPU that is not here. What SGLang resolved, it resolved for this machine, so only what the user gave counts."""

    gib: float
    given: argparse.Namespace  # as parsed


class Outlook(NamedTuple):
    config: TailReplayConfig
    shape: Shape
    findings: list[Finding]
    memory: list[tuple[str, str]]


def make(server_args: Any, found: Device, imagined: Imagined | None, host_free: int) -> Outlook:
    """host_free: bytes of host memory. TailReplayError where weights, states or rows have no room."""
    from sglang_tailreplay.anchor_store import choose_anchors
    from sglang_tailreplay.decay_store import decay_bytes

    settings = TailReplayConfig.from_environment()
    text, shape = text_config(server_args)
    number = number_bytes(server_args, text)._replace(row_dtype=settings.row_dtype)
    token = memory_plan.token_bytes(shape, number)
    planned = _plan(server_args, shape, text, number, found, imagined)
    host = _host_tier_slots(server_args, planned.kv_slots, token.kv, host_free)
    findings = list(_remarks(server_args, text, planned, imagined))
    memory = _device_rows(planned, token.kv, memory_plan.state_slot_bytes(shape, number))
    if found.kind == "cuda" and imagined is None:
        memory.append(("  of the rest: buffers", _buffers(server_args, settings, shape, number, planned)))
    if host:
        memory.append(("KV on the host", f"{gib(host * token.kv)}: {host:,} slots (HiCache)"))
    if settings.mode == "replay" and token.rows:
        _check_rows(settings, shape)
        room = host_free - host * token.kv
        if settings.anchor_interval:
            each = memory_plan.anchor_bytes(shape, number, settings.anchor_dtype)
            count = choose_anchors(each, planned.kv_slots + host, settings.anchor_interval, room, settings.anchor_gb)
            room -= count * each
            if found.kind == "cuda" or imagined is not None:
                memory.append(("  of the rest: states of a pass", _pass_states(server_args, shape, number, imagined)))
            memory.append(("saved states on the host", f"{gib(count * each)}: {count:,} anchors of {gib(each)}"))
            findings += _uncovered(settings.anchor_interval, planned.kv_slots + host, count, each)
        beside = decay_bytes(shape.value_heads, shape.gdn_layers()) if settings.max_residual is not None else 0
        rows = _rows(settings, token.rows + beside, planned.kv_slots + host, room)
        memory.append(("rows on the host", rows.text))
        findings += rows.findings
    return Outlook(settings, shape, findings, memory)


def text_config(server_args: Any) -> tuple[Mapping[str, Any], Shape]:
    """The text part of config.json and its sizes. TailReplayError for a model that cannot be replayed, Unknown for one
    whose configuration has other words."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(server_args.model_path)
    text = {key: value for key, value in config.get("text_config", config).items() if value is not None}
    defaults = server_args.get_model_config().hf_text_config
    for name in DEFAULTED:
        if name not in text and getattr(defaults, name, None) is not None:
            text[name] = getattr(defaults, name)
    if "layer_types" not in text and "full_attention_interval" in text:
        interval = text["full_attention_interval"]
        kinds = ("linear_attention", "full_attention")
        text["layer_types"] = [kinds[(i + 1) % interval == 0] for i in range(text["num_hidden_layers"])]
    try:
        return text, Shape.from_config(text)
    except KeyError as error:
        raise Unknown(f"memory and costs are not known: the model's configuration has no {error}") from None
    except ValueError as error:
        raise TailReplayError(
            f"--model-path {server_args.model_path}: config.json describes no model that can be replayed ({error})"
        ) from None


def number_bytes(server_args: Any, text: Mapping[str, Any]) -> NumberBytes:
    """Bytes of one number, as SGLang will choose them."""
    weight = server_args.get_model_config().dtype.itemsize
    state = os.environ.get("SGLANG_MAMBA_SSM_DTYPE") or text.get("mamba_ssm_dtype")
    return NumberBytes(
        weight=weight,
        row=weight,
        kv=KV_DTYPES.get(compat.resolved_view(server_args).kv_cache_dtype, weight),
        state=DTYPES.get(state, 4),
        conv=DTYPES.get(os.environ.get("SGLANG_MAMBA_CONV_DTYPE"), 2),
    )


def _plan(
    server_args: Any,
    shape: Shape,
    text: Mapping[str, Any],
    number: NumberBytes,
    found: Device,
    imagined: Imagined | None,
) -> DevicePlan:
    from sglang_tailreplay.state_slots import choose_state_slots

    view = compat.resolved_view(server_args) if imagined is None else imagined.given
    free = found.free if imagined is None else int(imagined.gib * GIB)
    fraction = view.mem_fraction_static or ASSUMED_FRACTION
    weights = memory_plan.parameters(shape, text) * number.weight
    slot_bytes = memory_plan.state_slot_bytes(shape, number)
    slots = view.max_mamba_cache_size
    if slots is None:
        rest = max(int(free * fraction) - weights, 0)
        slots = choose_state_slots(view.max_running_requests, rest, slot_bytes)
    return memory_plan.plan_device(
        free=free,
        fraction=fraction,
        weights=weights,
        slot_bytes=slot_bytes,
        state_slots=slots,
        kv_token=memory_plan.token_bytes(shape, number).kv,
        max_tokens=view.max_total_tokens,
    )


def _device_rows(planned: DevicePlan, kv_token: int, slot_bytes: int) -> list[tuple[str, str]]:
    return [
        ("device, free before the start", gib(planned.free)),
        ("weights", f"{gib(planned.weights)}, counted from config.json"),
        ("states", f"{gib(planned.states)}: {planned.state_slots} requests at once, {slot_bytes / 2**20:.1f} MiB each"),
        ("KV", f"{gib(planned.kv)}: {planned.kv_slots:,} tokens of {kv_token:,} bytes"),
        ("the rest", f"{gib(planned.rest)} for activations and CUDA graphs"),
    ]


def _buffers(
    server_args: Any, settings: TailReplayConfig, shape: Shape, number: NumberBytes, planned: DevicePlan
) -> str:
    from sglang_tailreplay.runtime import MAX_LAUNCH_TOKENS

    graphs = server_args.cuda_graph_config
    sizes = [
        size for phase in (graphs.decode, graphs.prefill) if phase.backend != "disabled" for size in phase.bs or ()
    ]
    numbers = shape.row_numbers() + (shape.gate_numbers() if settings.max_residual is not None else 0)
    captured = max([*sizes, planned.state_slots]) * numbers * number.row if settings.mode == "replay" else 0
    replayed = memory_plan.REPLAY_BUFFERS * MAX_LAUNCH_TOKENS * shape.hidden * number.row if settings.graphs else 0
    return f"{gib(captured + replayed)} that graphs write rows to and read them from; the log says what graphs took"


def _pass_states(server_args: Any, shape: Shape, number: NumberBytes, imagined: Imagined | None) -> str:
    from sglang_tailreplay.replay.segments import CHUNK

    view = server_args if imagined is None else imagined.given
    tokens = view.chunked_prefill_size or ASSUMED_PASS
    if tokens < 0:  # passes are not cut
        tokens = view.max_prefill_tokens
    held = memory_plan.pass_state_bytes(shape, number, -(-tokens // CHUNK))
    return f"{gib(held)} while a prefill pass of {tokens:,} tokens saves states inside of it"


def _host_tier_slots(server_args: Any, kv_slots: int, kv_token: int, free: int) -> int:
    """KV slots on the host with HiCache."""
    if not server_args.enable_hierarchical_cache:
        return 0
    from sglang_tailreplay import host_tier

    return host_tier.pool_of(server_args, kv_token, kv_slots, free).tokens


def _check_rows(settings: TailReplayConfig, shape: Shape) -> None:
    try:
        check_hidden(shape.hidden, settings.row_dtype)
    except ValueError as error:
        raise TailReplayError(f"--tail-replay-row-dtype: {error}; leave it out") from None


class _Rows(NamedTuple):
    text: str
    findings: list[Finding]


def _rows(settings: TailReplayConfig, row_bytes: int, slots: int, free: int) -> _Rows:
    from sglang_tailreplay.row_store import choose_capacity

    capacity = choose_capacity(row_bytes, slots, free, settings.host_gb)
    text = f"{gib(capacity * row_bytes)} of {gib(free)} free: {capacity:,} tokens of {row_bytes:,} bytes"
    if capacity == slots:
        return _Rows(text, [])
    return _Rows(
        text,
        [
            Finding(
                NOTE,
                f"rows for {capacity / slots:.0%} of the KV slots: hits on what was used longest ago will shrink. "
                f"--tail-replay-host-gb {slots * row_bytes / GIB:.0f} would hold all",
            )
        ],
    )


def _uncovered(interval: int, slots: int, count: int, each: int) -> list[Finding]:
    """Where fewer states than intervals fit, those that are left lie further apart than a hit may replay."""
    intervals = -(-slots // interval)
    if count >= intervals:
        return []
    return [
        Finding(
            NOTE,
            f"saved states for {count / intervals:.0%} of the KV slots: hits on the rest will be approximate. "
            f"--tail-replay-anchor-interval {covering_interval(slots, each, count * each)} would cover all in the same "
            f"memory, --tail-replay-anchor-gb {intervals * each / GIB:.0f} at this interval",
        )
    ]


def _remarks(server_args: Any, text: Mapping[str, Any], planned: DevicePlan, imagined: Imagined | None):
    architectures = server_args.get_model_config().hf_config.architectures
    if architectures[0].endswith("ForConditionalGeneration"):
        yield Finding(NOTE, "requests with images are served without reuse; the vision tower's weights are not counted")
    if "quantization_config" in text or server_args.quantization:
        yield Finding(NOTE, "quantised weights are counted as if they were not: they will take less")
    if imagined is not None and imagined.given.mem_fraction_static is None:
        yield Finding(
            NOTE, f"a GPU that is not here: --mem-fraction-static {ASSUMED_FRACTION:g} assumed; SGLang chooses"
        )
    wanted = compat.resolved_view(server_args).max_running_requests
    if imagined is None and wanted is not None and wanted > planned.state_slots:
        yield Finding(
            NOTE, f"{planned.state_slots} state slots: SGLang will lower --max-running-requests from {wanted}"
        )


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.2f} MiB"


# ------------------------------------------------------------------------------------------------------------ costs


def speeds(tflops: float | None, link_gbs: float | None, found: Device) -> tuple[Speeds | None, str]:
    """Given, or measured on this machine's GPU; None with the reason otherwise."""
    if tflops is not None:
        return Speeds(tflops, link_gbs, "given"), ""
    if found.kind != "cuda":
        return None, "no GPU to measure; give --tflops and --link-gbs"
    from sglang_tailreplay import speed

    try:
        return speed.measured(), ""
    except RuntimeError as error:
        return None, f"could not measure this GPU ({error}); give --tflops and --link-gbs"


def costs(outlook: Outlook, machine: Speeds) -> list[tuple[str, str]]:
    """Bounds: real times add launches, norms and kernels below their peak."""
    config, shape = outlook.config, outlook.shape
    rows = [("at", f"{machine.tflops:g} TFLOP/s, {machine.link_gbs:g} GB/s ({machine.origin})")]
    for matched in HITS:
        length = matched + SUFFIX
        suffix = shape.prefill_flops(matched, length) / machine.tflops / 1e9
        cold = shape.prefill_flops(0, length) / machine.tflops / 1e9
        tail = (
            tail_length(matched, config.ratio, config.min_tokens, config.max_tokens) if config.mode == "replay" else 0
        )
        least = bound(
            shape,
            machine,
            matched=matched,
            tail=tail,
            skip=config.skip,
            from_host=False,
            suffix_ms=suffix,
            row_dtype=config.row_dtype,
        )
        rows.append(
            (
                f"{matched:,} matched, {SUFFIX} new",
                f"{least.ms:.1f} ms (replay of {tail:,} tokens {least.replay_ms:.1f}, their rows {least.copy_ms:.1f} "
                f"beside it, new tokens {suffix:.1f}); a cold prefill {cold:.1f} ms",
            )
        )
    if config.anchor_interval and config.mode == "replay":
        rows.append(("from a saved state", _from_a_state(config, shape, machine)))
    return rows


def _from_a_state(config: TailReplayConfig, shape: Shape, machine: Speeds) -> str:
    """Boundaries lie anywhere between states that are an interval apart, but where an end of a request left one."""
    from sglang_tailreplay.scheduling import REACH

    mean, most = config.anchor_interval // 2, REACH * config.anchor_interval
    mean_ms, most_ms = (shape.replay_flops(tail, config.skip) / machine.tflops / 1e9 for tail in (mean, most))
    return f"replay of {mean:,} tokens in the mean {mean_ms:.1f} ms, of {most:,} at most {most_ms:.1f}, not of a tail"
