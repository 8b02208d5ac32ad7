"""What a workload gets: token material that depends on seed and name only, and how much of everything."""

from __future__ import annotations

from dataclasses import dataclass

from prompts import Segment, tokens


@dataclass(frozen=True)
class Load:
    """Lengths are in tokens for scale 1, which fits a GPU; tests use a scale that fits a laptop."""

    seed: str
    vocab_size: int = 1000
    scale: float = 1.0
    concurrency: int = 8
    rounds: int = 4  # turns of a conversation, waves of questions

    def length(self, count: int) -> int:
        return max(int(count * self.scale), 4)

    def text(self, name: str, count: int) -> list[int]:
        """`count` times scale random tokens. The same name is the same text; two names share no prefix to speak of."""
        return tokens((Segment(f"{self.seed}/{name}", self.length(count)),), self.vocab_size)
