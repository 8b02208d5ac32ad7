"""Pinned host memory for a large pool.

torch's own pinned allocator rounds sizes up to a power of two, which can double a pool of hundreds of gigabytes. Here
plain pages are mapped and then registered with CUDA, in slices, so that progress is seen.
"""

import logging
import math
import mmap
import time
from collections.abc import Sequence
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

GIB = 1 << 30
SLICE = 8 * GIB  # registered at once; a few seconds
LOG_FROM = 16 * GIB


class PinningError(RuntimeError):
    """The machine does not give this much pinned memory."""


class Driver(Protocol):
    """Registers host memory with the GPU driver; both return a CUDA error code, 0 for success."""

    def register(self, pointer: int, size: int) -> int: ...
    def unregister(self, pointer: int) -> int: ...


class CudaDriver:
    """The CUDA runtime that torch has loaded."""

    FLAGS = 1 | 2  # portable (every context of the process) and mapped (kernels may read and write it)

    def register(self, pointer: int, size: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(pointer, size, self.FLAGS))

    def unregister(self, pointer: int) -> int:
        torch.cuda.synchronize()  # a kernel may still use it
        return int(torch.cuda.cudart().cudaHostUnregister(pointer))


class PinnedTensor:
    """Owner of pinned memory. `tensor` must not be used after `close`, nor by lanes whose work is not done."""

    def __init__(self, tensor: torch.Tensor, driver: Driver | None, slices: Sequence[int]) -> None:
        self.tensor = tensor
        self._driver = driver
        self._slices = list(slices)

    def close(self) -> None:
        """Releases the memory, once. Waits for the device."""
        while self._slices:
            self._driver.unregister(self._slices.pop())
        self.tensor = None

    def __enter__(self) -> "PinnedTensor":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def pinned_empty(
    shape: Sequence[int], dtype: torch.dtype, driver: Driver | None = None, copied: bool = False
) -> PinnedTensor:
    """Pinned CPU tensor that a GPU can read and write in place; a plain tensor on a machine without CUDA.

    The contents are undefined. `driver` is for tests. `copied`: parts of it are copied by the driver (Tensor.copy_),
    which refuses a part of two slices, so it is one; kernels do not mind.
    Raises: PinningError that names the size, and ValueError for an empty shape.
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= 0:
        raise ValueError(f"cannot pin an empty tensor of shape {tuple(shape)}")
    if driver is None and not torch.cuda.is_available():
        return PinnedTensor(torch.empty(*shape, dtype=dtype), None, [])
    pages = _map_pages(size)
    memory = torch.frombuffer(pages, dtype=torch.uint8, count=size)  # keeps the pages
    slices = _register(driver or CudaDriver(), memory.data_ptr(), len(pages), len(pages) if copied else SLICE)
    return PinnedTensor(memory.view(dtype).view(*shape), driver or CudaDriver(), slices)


def _map_pages(size: int) -> mmap.mmap:
    """Private pages, whole ones, that a forked child does not inherit."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise _refused(size, 0, str(error)) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                pages.madvise(getattr(mmap, advice))
            except OSError:  # a kernel without it; pinning is only slower, or a fork only dearer
                logger.debug("%s is not supported here", advice)
    return pages


def _register(driver: Driver, base: int, size: int, most: int) -> list[int]:
    """Registers [base, base + size) in slices of `most` bytes. Returns their pointers; undoes all on failure."""
    slices: list[int] = []
    started = time.monotonic()
    for offset in range(0, size, most):
        length = min(most, size - offset)
        code = driver.register(base + offset, length)
        if code:
            while slices:
                driver.unregister(slices.pop())
            raise _refused(size, offset, f"CUDA error {code}")
        slices.append(base + offset)
        if size >= LOG_FROM:
            done = offset + length
            seconds = time.monotonic() - started
            logger.info("pinned %.0f of %.0f GiB of host memory (%.0f s)", done / GIB, size / GIB, seconds)
    return slices


def _refused(size: int, done: int, reason: str) -> PinningError:
    return PinningError(
        f"cannot pin {size / GIB:.2f} GiB of host memory ({done / GIB:.2f} GiB went well, then {reason}): "
        "ask for less, or raise the memory limit of the container and `ulimit -l`"
    )
