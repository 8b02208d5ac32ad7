"""OLMo-Hybrid for SGLang: full attention and Gated DeltaNet layers, three to one.

Other than Qwen3.5: GDN layers are pre-norm, full-attention layers post-norm; q and k are normalised over all heads
together; released checkpoints have no position embedding; beta lies in (0, 2) (wide_beta.py); the projections lie apart
in a checkpoint (olmo_hybrid_weights.py).

Between layers there is one residual stream, added and rounded to the model's dtype as in transformers. What enters a
layer is therefore exactly what a row of Tail-Replay stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm as RMSNormGated
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader, sharded_weight_loader
from sglang.srt.models.olmo2 import Olmo2MLP
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix, make_layers, set_weight_attrs
from torch import nn

from sglang_tailreplay.adapters.family import is_plain
from sglang_tailreplay.models import olmo_hybrid_weights
from sglang_tailreplay.models.olmo_hybrid_config import OlmoHybridConfig, rope_of
from sglang_tailreplay.replay.groups import LINEAR_ATTENTION

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Tensor = torch.Tensor
GATED_NORM_EPS = 1e-5  # not in the configuration; what the model was trained with


class OlmoHybridGatedDeltaNet(nn.Module):
    """x [T, d] -> y [T, d]. `project` and `project_state` serve a replay, too.

    On one rank: H, HV heads and C = 2*H*K + HV*V channels are that rank's.
    """

    def __init__(self, config: OlmoHybridConfig, layer_id: int, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        ranks = get_parallel().tp_size
        for heads in (config.linear_num_key_heads, config.linear_num_value_heads):
            if heads % ranks:
                raise ValueError(f"--tensor-parallel-size must divide the {heads} heads of a GDN layer, got {ranks}")
        d, keys, values = config.hidden_size, config.key_dim, config.value_dim
        self.num_v_heads = config.linear_num_value_heads // ranks
        self.head_v_dim = config.linear_value_head_dim
        self.channels = (2 * keys + values) // ranks
        self.gate_channels = values // ranks
        # q, k, v, then the output gate, so that the first rows are what a state needs.
        self.in_proj_qkvg = MergedColumnParallelLinear(
            d, [keys, keys, values, values], bias=False, quant_config=quant_config,
            prefix=add_prefix("in_proj_qkvg", prefix),
        )  # fmt: skip
        self.in_proj_ba = MergedColumnParallelLinear(
            d, [config.linear_num_value_heads] * 2, bias=False, prefix=add_prefix("in_proj_ba", prefix)
        )
        self.conv_weight = _channels((keys, keys, values), config.linear_conv_kernel_dim)
        self.A_log = _heads(self.num_v_heads)
        self.dt_bias = _heads(self.num_v_heads)
        self.attn = RadixLinearAttention(
            layer_id=layer_id,
            num_q_heads=config.linear_num_key_heads // ranks,
            num_k_heads=config.linear_num_key_heads // ranks,
            num_v_heads=self.num_v_heads,
            head_q_dim=config.linear_key_head_dim,
            head_k_dim=config.linear_key_head_dim,
            head_v_dim=self.head_v_dim,
            conv_weights=self.conv_weight,
            activation="silu",
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        self.attn.beta_scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        self.o_norm = RMSNormGated(
            self.head_v_dim, eps=GATED_NORM_EPS, group_size=None, norm_before_gate=True,
            device=torch.get_device_module().current_device(), dtype=torch.get_default_dtype(),
        )  # fmt: skip
        set_weight_attrs(self.o_norm.weight, {"weight_loader": default_weight_loader})
        self.o_proj = RowParallelLinear(
            values, d, bias=False, quant_config=quant_config, prefix=add_prefix("o_proj", prefix)
        )

    def forward(self, x: Tensor, forward_batch: ForwardBatch) -> Tensor:
        qkv, gate, b, a = self.project(x)
        o = self.attn(forward_batch, mixed_qkv=qkv, a=a, b=b)
        y = self.o_norm(o.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return self.o_proj(y.reshape(x.shape[0], -1))[0]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, d] -> qkv [T, C], gate [T, HV*V], b [T, HV], a [T, HV]."""
        qkv, gate = self.in_proj_qkvg(x)[0].split((self.channels, self.gate_channels), dim=-1)
        return qkv.contiguous(), gate, *self._project_ba(x)

    def project_state(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, d] -> qkv [T, C], b [T, HV], a [T, HV]: without the gate, where the weight is a plain matrix."""
        if not is_plain(self.in_proj_qkvg, (self.channels + self.gate_channels, x.shape[-1])):
            qkv, _, b, a = self.project(x)
            return qkv, b, a
        return nn.functional.linear(x, self.in_proj_qkvg.weight[: self.channels]), *self._project_ba(x)

    def _project_ba(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, a = self.in_proj_ba(x)[0].chunk(2, dim=-1)
        return b.contiguous(), a.contiguous()


class OlmoHybridAttention(nn.Module):
    def __init__(self, config: OlmoHybridConfig, layer_id: int, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        ranks = get_parallel().tp_size
        for heads in (config.num_attention_heads, config.num_key_value_heads):
            if heads % ranks:
                raise ValueError(f"--tensor-parallel-size must divide the {heads} attention heads, got {ranks}")
        head = config.hidden_size // config.num_attention_heads
        self.q_size, self.kv_size = (
            heads // ranks * head for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head, config.num_attention_heads, config.num_key_value_heads,
            bias=config.attention_bias, quant_config=quant_config, prefix=add_prefix("qkv_proj", prefix),
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head, config.hidden_size,
            bias=config.attention_bias, quant_config=quant_config, prefix=add_prefix("o_proj", prefix),
        )  # fmt: skip
        self.q_norm = _ShardedRMSNorm(self.q_size, ranks, config.rms_norm_eps)
        self.k_norm = _ShardedRMSNorm(self.kv_size, ranks, config.rms_norm_eps)
        self.rotary_emb = None
        if rope := rope_of(config):
            self.rotary_emb = get_rope(
                head, rotary_dim=head, max_position=config.max_position_embeddings, base=rope["rope_theta"],
                rope_scaling=rope,
            )  # fmt: skip
        self.attn = RadixAttention(
            config.num_attention_heads // ranks, head, head**-0.5,
            num_kv_heads=config.num_key_value_heads // ranks, layer_id=layer_id,
            quant_config=quant_config, prefix=add_prefix("attn", prefix),
        )  # fmt: skip

    def forward(self, positions: Tensor, x: Tensor, forward_batch: ForwardBatch) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, forward_batch))[0]


class OlmoHybridLinearDecoderLayer(nn.Module):
    """Pre-norm: h + GDN(norm(h)), then h + MLP(norm(h))."""

    def __init__(self, config: OlmoHybridConfig, layer_id: int, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        self.layer_id = layer_id
        self.linear_attn = OlmoHybridGatedDeltaNet(config, layer_id, quant_config, add_prefix("linear_attn", prefix))
        self.mlp = Olmo2MLP(config, quant_config, add_prefix("mlp", prefix))
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        forward_batch: ForwardBatch,
        captured_last_layer_outputs: Any = None,
    ) -> Tensor:
        """h [T, d] -> h [T, d]. h goes to captured_last_layer_outputs.append as well, if there is one."""
        h = hidden_states
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.append(h)
        h = h + self.linear_attn(self.input_layernorm(h), forward_batch)
        return h + self.mlp(self.post_attention_layernorm(h))


class OlmoHybridAttentionDecoderLayer(nn.Module):
    """Post-norm: h + norm(attention(h)), then h + norm(MLP(h))."""

    def __init__(self, config: OlmoHybridConfig, layer_id: int, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        self.layer_id = layer_id
        self.self_attn = OlmoHybridAttention(config, layer_id, quant_config, add_prefix("self_attn", prefix))
        self.mlp = Olmo2MLP(config, quant_config, add_prefix("mlp", prefix))
        self.post_attention_layernorm = _norm(config)
        self.post_feedforward_layernorm = _norm(config)

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        h = hidden_states
        h = h + self.post_attention_layernorm(self.self_attn(positions, h, forward_batch))
        return h + self.post_feedforward_layernorm(self.mlp(h))


class OlmoHybridModel(nn.Module):
    def __init__(self, config: OlmoHybridConfig, quant_config: QuantizationConfig | None, prefix: str):
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=add_prefix("embed_tokens", prefix)
        )

        def layer(idx: int, prefix: str) -> nn.Module:
            linear = config.layer_types[idx] == LINEAR_ATTENTION
            layer_class = OlmoHybridLinearDecoderLayer if linear else OlmoHybridAttentionDecoderLayer
            return layer_class(config, idx, quant_config, prefix)

        self.layers = make_layers(config.num_hidden_layers, layer, prefix=add_prefix("layers", prefix))
        self.norm = _norm(config)

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, input_embeds: Tensor | None = None
    ) -> Tensor:
        h = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        for layer in self.layers:
            h = layer(positions, h, forward_batch)
        return self.norm(h)


class OlmoHybridForCausalLM(nn.Module):
    def __init__(self, config: OlmoHybridConfig, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        super().__init__()
        if is_dp_attention_enabled():
            raise ValueError("--enable-dp-attention: OLMo-Hybrid is not written for it; leave it out")
        if get_parallel().pp_size > 1:
            raise ValueError("--pipeline-parallel-size: OLMo-Hybrid runs in one stage; leave it out")
        if config.hidden_act != "silu":
            raise ValueError(f"config.json: hidden_act is {config.hidden_act!r}, OLMo-Hybrid has silu")
        self.config = config
        self.model = OlmoHybridModel(config, quant_config, add_prefix("model", prefix))
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=add_prefix("lm_head", prefix)
            )
        self.logits_processor = LogitsProcessor(config)
        self._loaded = False

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, input_embeds: Tensor | None = None
    ) -> Any:
        hidden_states = self.model(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The first call must bring a whole checkpoint; later ones, updates of a running model, may bring a part."""
        olmo_hybrid_weights.load(self, self.config, weights, complete=not self._loaded)
        self._loaded = True


class _ShardedRMSNorm(nn.Module):
    """RMSNorm over a vector whose parts of `size` lie on `ranks` ranks."""

    def __init__(self, size: int, ranks: int, eps: float):
        super().__init__()
        self.ranks, self.eps = ranks, eps
        self.weight = nn.Parameter(torch.ones(size))
        set_weight_attrs(self.weight, {"weight_loader": sharded_weight_loader(0)})

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        mean = y.square().mean(-1, keepdim=True)
        if self.ranks > 1:
            mean = tensor_model_parallel_all_reduce(mean) / self.ranks
        return (y * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


def _norm(config: OlmoHybridConfig) -> RMSNorm:
    norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    set_weight_attrs(norm.weight, {"weight_loader": default_weight_loader})
    return norm


def _heads(heads: int) -> nn.Parameter:
    """One number per value head of this rank; float32, as the gates are computed in it."""
    parameter = nn.Parameter(torch.zeros(heads, dtype=torch.float32), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
    return parameter


def _channels(sizes: tuple[int, ...], width: int) -> nn.Parameter:
    """This rank's channels of a convolution [C, W] over several streams, each sharded on its own."""
    ranks, rank = get_parallel().tp_size, get_parallel().tp_rank
    parts = [size // ranks for size in sizes]
    parameter = nn.Parameter(torch.empty(sum(parts), width), requires_grad=False)

    def load(parameter: nn.Parameter, tensor: Tensor, stream: int) -> None:
        """tensor [size of the stream, 1, W]."""
        mine = tensor.squeeze(1).narrow(0, rank * parts[stream], parts[stream])
        parameter.data.narrow(0, sum(parts[:stream]), parts[stream]).copy_(mine)

    set_weight_attrs(parameter, {"weight_loader": load})
    return parameter


EntryClass = OlmoHybridForCausalLM
