"""What memory goes where, from a model's config.json and the settings alone: integers, before anything is allocated.

device   weights | state slots | KV slots | the rest: --mem-fraction-static leaves it to activations and graphs
host     rows of cached tokens, pinned
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_tailreplay.cost import Shape
from sglang_tailreplay.cuda_streams.row_format import row_bytes
from sglang_tailreplay.errors import TailReplayError

GIB = 1 << 30
REPLAY_BUFFERS = 3  # inputs of replay graphs: [3, launch tokens, hidden]


def parameters(shape: Shape, config: Mapping[str, Any]) -> int:
    """Numbers in the matrices of a text model: no norms, no vision tower, no draft layers."""
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    ffn = 3 * shape.hidden * shape.stored_ffn
    gdn = shape.hidden * (2 * keys + 3 * values + 2 * shape.value_heads) + shape.conv_width * (2 * keys + values)
    width = shape.heads * shape.head_dim
    queries = 2 * width if shape.attention_gate else width
    attention = shape.hidden * (queries + width + 2 * shape.kv_heads * shape.head_dim)
    gdn_layers = sum(len(group.layers) for group in shape.groups)
    embeddings = (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"] * shape.hidden
    return gdn_layers * (gdn + ffn) + shape.attention_layers * (attention + ffn) + embeddings


class NumberBytes(NamedTuple):
    """Bytes of one number of each kind."""

    weight: int = 2
    row: int = 2
    kv: int = 2
    state: int = 4  # recurrent state; SGLang's mamba_ssm_dtype
    conv: int = 2
    row_dtype: str = "auto"  # of rows in the store


class Token(NamedTuple):
    """Bytes that a cached token takes; of a running request, its states."""

    kv: int
    rows: int


def token_bytes(shape: Shape, number: NumberBytes) -> Token:
    return Token(
        kv=shape.kv_numbers() * number.kv,
        rows=shape.row_groups() * row_bytes(shape.hidden, number.row_dtype, number.row),
    )


def state_slot_bytes(shape: Shape, number: NumberBytes) -> int:
    """Conv and recurrent states of one request, all GDN layers."""
    return anchor_bytes(shape, number, "fp32")


def anchor_bytes(shape: Shape, number: NumberBytes, dtype: str) -> int:
    """The same on the host, its recurrent part kept as `dtype` says: int8 has a scale per head and key channel."""
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    layers = sum(len(group.layers) for group in shape.groups)
    scales = shape.value_heads * shape.key_dim * 4 if dtype == "int8" else 0
    recurrent = values * shape.key_dim * {"fp32": number.state, "bf16": 2, "int8": 1}[dtype] + scales
    return layers * (recurrent + (shape.conv_width - 1) * (2 * keys + values) * number.conv)


def pass_state_bytes(shape: Shape, number: NumberBytes, chunks: int) -> int:
    """What a prefill pass of so many chunks holds of one GDN layer while it saves states inside of it: the states
    before its chunks in float32, and once more in the model's dtype for the outputs (`gdn.KernelCore`)."""
    return chunks * shape.value_heads * shape.value_dim * shape.key_dim * (4 + number.row)


@dataclass(frozen=True)
class DevicePlan:
    """The static part of the device's memory, in bytes where not said otherwise."""

    free: int  # before the model is loaded
    static: int  # --mem-fraction-static of it
    weights: int
    state_slots: int  # number
    states: int
    kv_slots: int  # number
    kv: int

    @property
    def rest(self) -> int:
        return self.free - self.weights - self.states - self.kv


def plan_device(
    *,
    free: int,
    fraction: float,
    weights: int,
    slot_bytes: int,
    state_slots: int,
    kv_token: int,
    max_tokens: int | None,
) -> DevicePlan:
    """As SGLang divides it: states first, one slot more than requests may run, KV takes what is left.

    TailReplayError where weights or states leave nothing."""
    static = int(free * fraction)
    states = (state_slots + 1) * slot_bytes
    room = static - weights - states
    if room < kv_token:
        what = "the weights alone" if weights >= static else f"weights and {state_slots} state slots"
        raise TailReplayError(
            f"--mem-fraction-static {fraction:g} is {static / GIB:.1f} GiB here, and {what} take about "
            f"{(weights if weights >= static else weights + states) / GIB:.1f}: no room for KV. Raise it, lower "
            "--max-running-requests or --max-mamba-cache-size, or take a larger device."
        )
    slots = room // kv_token
    if max_tokens is not None:
        slots = min(slots, max_tokens)
    return DevicePlan(free, static, weights, state_slots, states, slots, slots * kv_token)
