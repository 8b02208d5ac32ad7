"""What the paper "Tail-Replay: Escaping the Curse of Linear Attention in Prefix Caching for Hybrid LLMs" published: its
Table 2, "TTFT (ms, mean over 20 timed repetitions)", on NVIDIA H100 GPUs with PyTorch 2.9.1. Its clock runs "from the
start of cache transfer or replay to the first generated token"."""

from __future__ import annotations

from typing import NamedTuple

SERIAL = "H2D-SER"
OVERLAP = "H2D-OVL"  # named in neither table nor text; here: overlapped transfer without the FFN skip
SKIP = "H2D-OVL+skip"


class Row(NamedTuple):
    """Milliseconds. A pair is (5 % replay, 10 % replay)."""

    full: float
    serial: tuple[float, float]
    skip: tuple[float, float]


RATIOS = (0.05, 0.10)
TABLE_2: dict[str, dict[int, Row]] = {
    "olmo-hybrid-7b": {
        8225: Row(264.3, (100.7, 101.2), (82.9, 82.7)),
        16417: Row(533.7, (122.3, 121.7), (83.5, 85.6)),
        31366: Row(1068.3, (158.8, 191.7), (108.8, 112.5)),
    },
    "qwen3.5-4b": {
        8226: Row(191.6, (81.3, 82.0), (75.2, 75.9)),
        16418: Row(387.7, (87.0, 87.7), (75.0, 76.0)),
        31847: Row(786.4, (105.8, 133.9), (86.2, 108.1)),
    },
    "qwen3.6-27b": {
        8226: Row(879.6, (166.6, 167.4), (154.3, 154.7)),
        16418: Row(1797.2, (187.7, 260.8), (161.6, 218.1)),
        31847: Row(3605.2, (311.9, 453.9), (251.8, 371.3)),
    },
}
OTHER_LENGTHS = (8226, 16418, 31847)  # for shapes that the paper does not have


def lengths(shape: str | None) -> tuple[int, ...]:
    return tuple(TABLE_2.get(shape or "", OTHER_LENGTHS))


def speedup(shape: str | None, length: int, ratio: float, variant: str) -> float | None:
    """The published milliseconds of full prefill by those of the cell; None where the paper has no such cell."""
    row = TABLE_2.get(shape or "", {}).get(length)
    cells = {SERIAL: row.serial, SKIP: row.skip} if row else {}
    if variant not in cells or ratio not in RATIOS:
        return None
    return row.full / cells[variant][RATIOS.index(ratio)]
