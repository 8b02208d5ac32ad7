"""What SGLang's CPU path needs besides kernels, registered with SGLang's HookRegistry from this project's plugin."""

import functools
import pkgutil

import torch

from sglang_tailreplay.cpu import host_pool, kernels, stand_in_active

HOST_POOL = "sglang.srt.mem_cache.pool_host"
PINNING_FUNCTIONS = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like")


def rmsnorm_gated_forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """Output norm of a GDN layer, which SGLang runs in Triton unless the CPU has AMX."""
    if not self.norm_before_gate or self.group_size not in (None, x.shape[-1]) or self.bias is not None:
        raise NotImplementedError("the CPU gated RMSNorm takes norm_before_gate=True, one group and no bias")
    return kernels.rmsnorm_gated(x, self.weight, z, self.eps)


def fused_rmsnorm_gated_forward(self, x: torch.Tensor, g: torch.Tensor, *unused, **options) -> torch.Tensor:
    """The same norm as Qwen3-Next has it, in another class."""
    if unused or options or self.activation not in ("silu", "swish"):
        raise NotImplementedError("the CPU gated RMSNorm takes no residual and a SiLU gate")
    return kernels.rmsnorm_gated(x, self.weight, g, self.eps)


def fused_gate_sigmoid_mul_add(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
    """The shared expert of a mixture: final += sigmoid(hidden . gate) * shared, all [T, d], gate_weight [d]."""
    gate = (hidden_states.float() * gate_weight.float()).sum(-1, keepdim=True)
    final_hidden_states.add_(kernels.sigmoid(gate) * shared_output.float())


def apply_vocab_mask(self, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Constrained decoding: forbids in `logits` [N, vocab] the tokens whose bit in `vocab_mask` [N, vocab / 32] is 0.

    Without it one request with a JSON schema ends SGLang's scheduler, which has no kernel for a CPU here.
    """
    bits = torch.arange(32, dtype=torch.int32, device=vocab_mask.device)
    allowed = (vocab_mask.unsqueeze(-1) >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[:, : allowed.shape[1]].masked_fill_(~allowed, float("-inf"))


# (target, replacement); `register` raises where a target is gone.
REPLACEMENTS = [
    ("sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward", rmsnorm_gated_forward),
    ("sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward", fused_rmsnorm_gated_forward),
    ("sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", fused_gate_sigmoid_mul_add),
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", apply_vocab_mask),
    (f"{HOST_POOL}.mha.MHATokenToKVPoolHost.load_to_device_per_layer", host_pool.load_to_device_per_layer),
    (f"{HOST_POOL}.mha.MHATokenToKVPoolHost.backup_from_device_all_layer", host_pool.backup_from_device_all_layer),
    (f"{HOST_POOL}.common._cuda_host_register", host_pool.register_nothing),
]


def register() -> list[str]:
    """Registers the CPU hooks and returns their targets; none where the real CPU build of sgl_kernel is installed.

    Raises LookupError if SGLang has no such target: HookRegistry itself would only log that and go on.
    """
    if not stand_in_active():
        return []
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ignore_pin_memory()
    pkgutil.resolve_name(f"{HOST_POOL}.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = host_pool.RESERVE_BYTES
    for target, replacement in REPLACEMENTS:
        require_target(target)
        HookRegistry.register(target, replacement, HookType.REPLACE)
    return [target for target, _ in REPLACEMENTS]


def require_target(target: str) -> None:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"this SGLang has no {target}, which the CPU backend has to replace") from error


def ignore_pin_memory() -> None:
    """Makes `pin_memory` mean nothing in this process where no accelerator could read pinned memory.

    SGLang pins unconditionally in places (constrained decoding, for one) and torch raises without an accelerator.
    """
    if torch.accelerator.is_available() or hasattr(torch.empty, "ignores_pin_memory"):
        return
    for name in PINNING_FUNCTIONS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


def _without_pinning(function):
    @functools.wraps(function)
    def unpinned(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    unpinned.ignores_pin_memory = True
    return unpinned
