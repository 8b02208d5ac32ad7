"""The training loop: a budget of seconds, and a report of where it went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from train.loader import Loader
from train.schedule import rate_at, stage_at
from train.shapes import Recipe
from train.step import TrainingStep

REPORT_SECONDS = 5.0


@dataclass
class Progress:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def train(step: TrainingStep, loader: Loader, recipe: Recipe, seconds: float, say: Callable[[str], None]) -> Progress:
    """Ends within `seconds`: a step that may not fit any more is not begun."""
    progress, begin, slowest, reported = Progress(), time.monotonic(), 0.0, 0.0
    while (now := time.monotonic() - begin) + slowest < seconds:
        stage = stage_at(recipe.stages, now / seconds)
        loader.set_stage(stage)
        batch = loader.next()
        step(batch, rate_at(recipe.rate, now / seconds, progress.steps))
        progress.steps += 1
        progress.tokens += batch.ids.size
        progress.seconds = time.monotonic() - begin
        if progress.steps > 5:  # the first ones set libraries up
            slowest = max(0.9 * slowest, progress.seconds - now)
        if progress.seconds - reported >= REPORT_SECONDS:
            reported = progress.seconds
            _report(step, progress, stage, seconds, recipe, say)
    _report(step, progress, len(recipe.stages) - 1, seconds, recipe, say)
    return progress


def _report(
    step: TrainingStep, progress: Progress, stage: int, seconds: float, recipe: Recipe, say: Callable[[str], None]
) -> None:
    rate = rate_at(recipe.rate, progress.seconds / seconds, progress.steps)
    by_length = {length: counts.read() for length, counts in sorted(step.counts.items())}
    by_length = {length: counts for length, counts in by_length.items() if counts["accuracy"]}
    entry = {"seconds": round(progress.seconds, 1), "step": progress.steps, "tokens": progress.tokens, "stage": stage}
    progress.history.append({**entry, "rate": rate, "lengths": by_length})
    head = f"{progress.seconds:5.0f} s of {seconds:.0f}  step {progress.steps}  stage {stage + 1}/{len(recipe.stages)}"
    speed = progress.tokens / progress.seconds
    say(f"{head}  rate {rate:.1e}  {speed / 1e3:,.0f}k tokens/s")
    for length, counts in by_length.items():
        scores = "  ".join(f"{task} {value:.3f}" for task, value in counts["accuracy"].items())
        say(f"      {length:5}: loss {counts['loss']:.3f}, of text {counts['text_loss']:.3f}; right tokens: {scores}")
