"""SGLang on a machine without CUDA.

`activate()` prepares this process and the ones it spawns, `default_arguments()` says which SGLang flags a CPU needs,
`hooks.register()` runs inside SGLang's plugin loader. `kernels.py` has the arithmetic, `stand_ins/` the modules that
SGLang imports and that such a machine cannot install.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

GIB = 1 << 30


def activate(environ: MutableMapping[str, str] = os.environ) -> None:
    """Selects SGLang's CPU engine and puts stand-ins in the way of packages that this machine cannot import.

    Call it before `sglang` or `triton` is imported. Spawned processes inherit `environ` and `sys.path`. Safe to repeat.
    An installed CPU build of sgl_kernel, a Triton, a torchvision that works: each is left alone.
    """
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers warns in every process that SGLang forks otherwise
    environ.setdefault("OMP_NUM_THREADS", "1")  # one thread is faster on the small operations of the reference kernels
    for package in ("triton", "torchvision", "sgl_kernel"):
        if not _is_usable(package):
            _prepend_path(STAND_INS / package, environ)
    if is_stand_in("triton"):
        # Or the first function that SGLang compiles (vision towers have some) ends its scheduler: torch.compile takes
        # the stand-in for a Triton. Read when torch compiles for the first time.
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def default_arguments(argv: Sequence[str], free_memory_bytes: int) -> list[str]:
    """The SGLang flags to add to the user's `argv` on a CPU; a flag that the user gave is never added."""
    # SGLang would size its pools for a server that owns the machine. A token costs up to about 64 KiB of KV, so 16384
    # tokens are at most 1 GiB; where that is too much, a small model should still start.
    tokens = 16384 if free_memory_bytes >= 4 * GIB else 4096
    defaults = {
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--max-total-tokens": str(tokens),
        "--max-running-requests": "8",
        "--chunked-prefill-size": "512",
        "--mem-fraction-static": "0.2",
    }
    given = {argument.split("=", 1)[0] for argument in argv}
    added = [f"{flag}={value}" for flag, value in defaults.items() if flag not in given]
    # transformers prepares images with torchvision where it finds one, and the stand-in only looks like one.
    without_torchvision = "--disable-fast-image-processor"
    if is_stand_in("torchvision") and without_torchvision not in given:
        added.append(without_torchvision)
    return added


def stand_in_active() -> bool:
    """Whether `sgl_kernel` is this project's stand-in, here and in the processes that will be spawned."""
    return is_stand_in("sgl_kernel")


def is_stand_in(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(STAND_INS)


def _is_usable(package: str) -> bool:
    """Whether `package` imports here. A torchvision for CUDA, for instance, is found but fails beside a CPU torch."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except Exception:  # whatever a broken binary package raises, OSError and RuntimeError included
        _forget(package)
        return False
    return package != "sgl_kernel" or stand_in_active() or _has_cpu_operations()


def _has_cpu_operations() -> bool:
    """The CUDA build of sgl_kernel may import on a machine without a GPU, but lacks the CPU operations."""
    import torch

    if hasattr(torch.ops.sgl_kernel, "chunk_gated_delta_rule_cpu"):
        return True
    _forget("sgl_kernel")
    return False


def _forget(package: str) -> None:
    """Drops the modules of a failed or rejected import, so that the stand-in is found next."""
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]


def _prepend_path(folder: Path, environ: MutableMapping[str, str]) -> None:
    entry = str(folder)
    if entry not in sys.path:
        sys.path.insert(0, entry)
    inherited = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if entry not in inherited:
        environ["PYTHONPATH"] = os.pathsep.join([entry, *inherited])
    importlib.invalidate_caches()
