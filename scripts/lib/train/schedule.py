"""What a fraction of the training time means: which stage, which learning rate. Time, not steps, because a budget of
seconds must hold on any machine, with the learning rate at its end."""

from __future__ import annotations

from collections.abc import Sequence

from train.shapes import Stage

WARM_UP_STEPS = 100
DECAY_FROM = 0.5  # of the time
LAST = 0.01  # of the highest rate


def stage_at(stages: Sequence[Stage], fraction: float) -> int:
    end = 0.0
    for number, stage in enumerate(stages):
        end += stage.share
        if fraction < end:
            return number
    return len(stages) - 1


def rate_at(highest: float, fraction: float, step: int) -> float:
    """Rises over the first steps, stays, falls linearly from DECAY_FROM on."""
    falling = LAST + (1 - LAST) * (1 - min(fraction, 1.0)) / (1 - DECAY_FROM)
    return highest * min(1.0, (step + 1) / WARM_UP_STEPS, falling)
