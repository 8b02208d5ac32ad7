"""Stand-in for the CPU build of sgl_kernel: this project's reference kernels under the names that SGLang imports.

SGLang takes its operations partly from this module and partly from `torch.ops.sgl_kernel`:

| called by | operation |
|---|---|
| layers/attention/linear/gdn_backend.py | causal_conv1d_fn_cpu, causal_conv1d_update_cpu, fused_gdn_gating_cpu |
| layers/attention/linear/kernels/gdn_triton.py | chunk_gated_delta_rule_cpu, fused_sigmoid_gating_delta_rule_... |
| models/qwen3_5.py | fused_sigmoid_mul_cpu, fused_qk_gemma_rmsnorm(_with_gate)_cpu, fused_qkvzba_split_... |
| mem_cache/allocation.py | assign_req_to_token_pool_cpu |

`convert_weight_packed` must stay absent: SGLang takes it for the sign of an AMX build.
"""

import torch

from sglang_tailreplay.cpu.kernels import OPERATIONS

for _name, _operation in OPERATIONS.items():
    setattr(torch.ops.sgl_kernel, _name, _operation)
globals().update(OPERATIONS)


def _refuse(name: str):
    def operation(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: speculative decoding needs the CPU build of sgl_kernel")

    return operation


# Imported at the top of files that every scheduler loads, and called only when speculative decoding is on.
_SPECULATIVE = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
globals().update({_name: _refuse(_name) for _name in _SPECULATIVE})
