"""transformers' OLMo-Hybrid configuration with what SGLang asks of a hybrid model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from sglang_tailreplay.replay.groups import FULL_ATTENTION, LINEAR_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams

ARCHITECTURE = "OlmoHybridForCausalLM"


class OlmoHybridConfig(transformers.OlmoHybridConfig):
    """Which layers have a KV cache, which a recurrent state, and how large that is."""

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == FULL_ATTENTION]

    @property
    def linear_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION]

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k, of a GDN layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Of one rank: conv state [2 * key_dim + value_dim, W-1], recurrent state [HV, V, K]."""
        from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape, mamba2_state_dtype
        from sglang.srt.runtime_context import get_parallel

        shape = Mamba2StateShape.create(
            tp_world_size=get_parallel().attn_tp_size,
            intermediate_size=self.value_dim,
            n_groups=self.linear_num_key_heads,
            num_heads=self.linear_num_value_heads,
            head_dim=self.linear_value_head_dim,
            state_size=self.linear_key_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
            conv_shard_groups=[self.key_dim, self.key_dim, self.value_dim],
        )
        return Mamba2CacheParams(shape=shape, layers=self.linear_layer_ids, dtype=mamba2_state_dtype(self))


def rope_of(config: Any) -> dict | None:
    """Parameters of the rotary embedding, or None: released checkpoints have no position embedding at all."""
    rope = getattr(config, "rope_parameters", None)
    return rope if rope and rope.get("rope_theta") is not None else None
