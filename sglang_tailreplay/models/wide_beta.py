"""Gated DeltaNet with a write strength beta in (0, 2), which allows negative eigenvalues of the state transition.

SGLang's kernels take beta = sigmoid(b). Its prefill kernels are handed beta, so it is doubled on the way. Its decode
kernels compute beta themselves, from b; no b gives more than 1, and k cannot be scaled instead, because they normalise
it. So decode goes through another kernel of SGLang's, which is handed beta as well.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.utils import is_cpu

Tensor = torch.Tensor


class WideBetaGDNKernel(TritonGDNKernel):
    """beta = 2 * sigmoid(b). Shapes as in the base class: q, k [1, T, H, K], v [1, T, HV, V], a, b [T, HV]."""

    supports_packed_decode = False

    def extend(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **where: Any) -> tuple:
        return super().extend(q, k, v, g, 2 * beta, **where)

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **unused: Any,
    ) -> Tensor:
        """o [1, N, HV, V] of one token for each of N sequences; updates their slots of ssm_states [slots, HV, V, K]."""
        g, beta = gdn_backend.fused_gdn_gating(A_log, a, b, dt_bias)  # [1, N, HV] float32
        if is_cpu():
            where = dict(ssm_states=ssm_states, cache_indices=cache_indices, query_start_loc=query_start_loc)
            return self.extend(q, k, v, g, beta, **where)[0]
        from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update

        # It would update a copy of a pool that is not contiguous, and the state would be lost.
        assert ssm_states.is_contiguous(), "the state pool must be contiguous"
        # N sequences of one token instead of one of N tokens: without cu_seqlens it wants no intermediate states.
        q, k, v, g, beta = (x.transpose(0, 1) for x in (q, k, v, g, 2 * beta))
        o = fused_recurrent_gated_delta_rule_update(
            q, k, v, g, beta,
            initial_state_source=ssm_states, initial_state_indices=cache_indices, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o.transpose(0, 1)

    def target_verify(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("speculative decoding has no kernel for beta in (0, 2)")


class WideBetaGDNBackend(gdn_backend.GDNAttnBackend):
    """GDNAttnBackend for a model whose config says linear_allow_neg_eigval; without that it is GDNAttnBackend."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        if not model_runner.model_config.hf_config.linear_allow_neg_eigval:
            return
        _refuse_other_kernels(model_runner.server_args, self.kernel_dispatcher)
        dispatcher, kernel = self.kernel_dispatcher, WideBetaGDNKernel()
        dispatcher.decode_kernel = dispatcher.extend_kernel = kernel
        dispatcher.verify_kernel = dispatcher.tree_verify_kernel = kernel
        dispatcher.supports_packed_decode = False


def _refuse_other_kernels(server_args: Any, dispatcher: Any) -> None:
    """ValueError for settings that would reach a kernel whose beta ends at 1."""
    for kernel in (dispatcher.decode_kernel, dispatcher.extend_kernel):
        if type(kernel) is not TritonGDNKernel:
            raise ValueError(
                f"{type(kernel).__name__} knows no negative eigenvalues, which this model has: leave out "
                "--linear-attn-backend, --linear-attn-decode-backend and --linear-attn-prefill-backend"
            )
    if server_args.speculative_algorithm is not None:
        raise ValueError("--speculative-algorithm: no kernel verifies drafts of a model with negative eigenvalues")
    if server_args.enable_linear_replayssm or server_args.enable_linear_replayssm_spec:
        raise ValueError("--enable-linear-replayssm: its kernels know no negative eigenvalues, which this model has")
