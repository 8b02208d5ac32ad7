"""The least that a prefill or a hit computes and moves, from a model's config.json: what times are held against.

Counted are the floating-point operations of matrix products, convolutions and the gated delta rule in its recurrent
form (chunked kernels compute more), and the bytes of rows and KV. Norms, activations and launches count nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_tailreplay.cuda_streams.row_format import row_bytes
from sglang_tailreplay.replay.groups import EMBEDDING, FULL_ATTENTION, Group, find_groups

BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a hybrid model, in the words of Hugging Face's configs."""

    hidden: int
    ffn: int  # width of what a token goes through: of the FFN, or of its experts and the shared one
    stored_ffn: int  # width of what has weights: the same, or all experts
    attention_layers: int
    heads: int
    attention_gate: bool  # the query projection makes a gate of the same size too
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_width: int
    groups: tuple[Group, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """ValueError for a model that is no hybrid, KeyError for sizes that the config does not name, or does not name
        alike for all layers."""
        kinds = config["layer_types"]
        ffn, stored_ffn = _ffn_widths(config)
        return cls(
            hidden=config["hidden_size"],
            ffn=ffn,
            stored_ffn=stored_ffn,
            attention_layers=sum(kind == FULL_ATTENTION for kind in kinds),
            heads=config["num_attention_heads"],
            attention_gate=bool(config.get("attn_output_gate")),
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            key_heads=config["linear_num_key_heads"],
            key_dim=config["linear_key_head_dim"],
            value_heads=config["linear_num_value_heads"],
            value_dim=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
            groups=find_groups(kinds),
        )

    # ------------------------------------------------------------------------------------ operations per token

    @property
    def _keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_dim

    def state_flops(self) -> int:
        """What changes a GDN layer's state: k, v, decay and beta, convolution, rank-1 update. No q, gate, output."""
        projected = 2 * self.hidden * (self._keys + self._values + 2 * self.value_heads)
        convolved = 2 * self.conv_width * (self._keys + self._values)
        return projected + convolved + 5 * self._values * self.key_dim

    def layer_flops(self) -> int:
        """A whole GDN layer: the state, q and its convolution, gate, read-out, output projection, FFN."""
        query = 2 * self.hidden * self._keys + 2 * self.conv_width * self._keys
        gate_and_output = 2 * 2 * self.hidden * self._values
        read_out = 2 * self._values * self.key_dim
        return self.state_flops() + query + gate_and_output + read_out + 6 * self.hidden * self.ffn

    def attention_flops(self) -> int:
        """A full-attention layer but for its scores: query (and gate), k, v, output projection, FFN."""
        width = self.heads * self.head_dim
        projected = width * (3 if self.attention_gate else 2) + 2 * self.kv_heads * self.head_dim
        return 2 * self.hidden * projected + 6 * self.hidden * self.ffn

    # --------------------------------------------------------------------------------------- a prefill, a hit

    def prefill_flops(self, matched: int, length: int) -> int:
        """Tokens [matched, length) of a prompt, the rest being cached. The output head is left out."""
        per_token = self.gdn_layers() * self.layer_flops() + self.attention_layers * self.attention_flops()
        pairs = (length * (length + 1) - matched * (matched + 1)) // 2  # a token attends to itself and what is before
        return (length - matched) * per_token + self.attention_layers * 4 * self.heads * self.head_dim * pairs

    def replay_flops(self, tail: int, skip: bool = True) -> int:
        """Replaying `tail` tokens. With `skip` a group's last layer computes its state only."""
        states_only = len(self.groups) if skip else 0
        return tail * ((self.gdn_layers() - states_only) * self.layer_flops() + states_only * self.state_flops())

    def row_numbers(self) -> int:
        """Of one token. Group 0 takes the token embedding and has no row."""
        return self.row_groups() * self.hidden

    def row_groups(self) -> int:
        return sum(group.row != EMBEDDING for group in self.groups)

    def gdn_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def gate_numbers(self) -> int:
        """Of one token: a decay for each value head of each GDN layer."""
        return self.gdn_layers() * self.value_heads

    def kv_numbers(self) -> int:
        """Of one token."""
        return self.attention_layers * 2 * self.kv_heads * self.head_dim

    def row_bytes(self, tail: int, row_dtype: str = "auto") -> int:
        """Rows of the tail, from the host."""
        return tail * self.row_groups() * row_bytes(self.hidden, row_dtype, BYTES)

    def kv_bytes(self, matched: int) -> int:
        return matched * self.kv_numbers() * BYTES


def _ffn_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    """(used by a token, stored). The router and the shared expert's gate are left out: they are vectors."""
    if not config.get("num_experts"):
        return config["intermediate_size"], config["intermediate_size"]
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise KeyError("one size of all FFNs: some layers have experts and others have none")
    expert, shared = config["moe_intermediate_size"], config.get("shared_expert_intermediate_size") or 0
    return config["num_experts_per_tok"] * expert + shared, config["num_experts"] * expert + shared


@dataclass(frozen=True)
class Speeds:
    """What the machine was measured, or said, to reach."""

    tflops: float  # bf16 matrix product, TFLOP/s
    link_gbs: float  # pinned host memory to GPU, GB/s
    origin: str  # measured, given


@dataclass(frozen=True)
class Bound:
    """Milliseconds that no engine can beat: replay and copies run beside each other, the suffix after them."""

    replay_ms: float
    copy_ms: float
    suffix_ms: float

    @property
    def ms(self) -> float:
        return max(self.replay_ms, self.copy_ms) + self.suffix_ms


def bound(
    shape: Shape,
    speeds: Speeds,
    *,
    matched: int,
    tail: int,
    skip: bool,
    from_host: bool,
    suffix_ms: float,
    row_dtype: str = "auto",
) -> Bound:
    """`from_host`: the KV of the matched tokens is moved too. `suffix_ms`: what the new tokens take, measured."""
    moved = shape.row_bytes(tail, row_dtype) + (shape.kv_bytes(matched) if from_host else 0)
    return Bound(
        replay_ms=shape.replay_flops(tail, skip) / speeds.tflops / 1e9,
        copy_ms=moved / speeds.link_gbs / 1e6,
        suffix_ms=suffix_ms,
    )


# ------------------------------------------------------------------------------------------------- saved states


def covering_interval(tokens: int, anchor_bytes: int, budget: int, step: int = 64) -> int:
    """The least interval, a multiple of `step` tokens, at which a budget in bytes has a place for every anchor of so
    many cached tokens. ValueError for a budget without a place."""
    places = budget // anchor_bytes
    if places < 1:
        raise ValueError(f"{budget} bytes hold no state of {anchor_bytes}")
    return -(-tokens // (places * step)) * step


def pays_from(interval: int, ratio: float) -> int:
    """Matched tokens from which a hit at any token behind an anchor replays less, on average, than its tail would."""
    return round(interval / 2 / ratio)
