"""What this GPU reaches: prints {"tflops", "link_gbs"} as JSON. A process of its own, so that its memory is free again.

python -m sglang_tailreplay.speed
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from sglang_tailreplay.cost import Speeds

SIZE = 8192  # of the square bf16 matrices
COPY_BYTES = 2**30


def measured(seconds: float = 120) -> Speeds:
    """Of the current GPU. RuntimeError, with the last line that the measuring process wrote, where there is none."""
    # -P: in a checkout, the folder of that name lacks what is installed into it from beside.
    command = [sys.executable, "-P", "-m", "sglang_tailreplay.speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return Speeds(**json.loads(done.stdout), origin="measured")


def best_seconds(run: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    tflops = 2 * SIZE**3 / best_seconds(lambda: torch.matmul(a, b, out=out)) / 1e12
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    link = COPY_BYTES / best_seconds(lambda: device.copy_(host, non_blocking=True)) / 1e9
    print(json.dumps({"tflops": round(tflops, 1), "link_gbs": round(link, 2)}))


if __name__ == "__main__":
    main()
