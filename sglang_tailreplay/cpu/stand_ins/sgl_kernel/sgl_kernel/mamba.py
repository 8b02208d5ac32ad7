"""`from sgl_kernel.mamba import ...` in SGLang's linear-attention backends."""

from sglang_tailreplay.cpu.kernels import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
