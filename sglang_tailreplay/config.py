"""Settings: one frozen dataclass, read from the environment, filled by the launcher's flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_tailreplay.cuda_streams.row_format import KINDS as ROW_DTYPES
from sglang_tailreplay.errors import Refused, TailReplayError

BACKEND = "tail_replay"
ENVIRONMENT = "SGLANG_TAILREPLAY"
MODES = ("replay", "zero", "off")
ANCHOR_DTYPES = ("fp32", "bf16", "int8")
SWITCHES = ("overlap", "skip", "graphs", "self_check")  # on, unless their flag --tail-replay-no-... is given
CONV_WIDTH = 4  # a shorter tail could not even fill the convolution window of the first replayed layer


def _refuse(key: str, value: Any, wanted: str, where: str | None = None) -> TailReplayError:
    if where is None:
        where = f"key {key!r} of {ENVIRONMENT}, flag --tail-replay-{'no-' if key in SWITCHES else ''}{dashed(key)}"
    return TailReplayError(f"{key}={value!r}: {wanted} ({where})")


def dashed(key: str) -> str:
    return key.replace("_", "-")


def check_ratio(value: Any, key: str = "ratio", where: str | None = None) -> float:
    """A replay ratio r in (0, 1]; TailReplayError otherwise, which says where the value was given."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _refuse(key, value, "the replay ratio must be a number in (0, 1]", where)
    return float(value)


def _check_choice(key: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise _refuse(key, value, f"must be one of {', '.join(choices)}")


def _check_switch(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(key, value, "must be true or false")


def _check_max_tokens(value: Any, min_tokens: Any) -> None:
    least = min_tokens if _is_count(min_tokens) and min_tokens >= CONV_WIDTH else CONV_WIDTH
    _check_count("max_tokens", value, least)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(key: str, value: Any, least: int) -> None:
    if not _is_count(value) or value < least:
        raise _refuse(key, value, f"must be a whole number of at least {least}")


def _check_fraction(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _refuse(key, value, "must be a number from 0 to 1")


def _check_residual(value: Any, mode: Any) -> None:
    key = "max_residual"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise _refuse(key, value, "must be a number in (0, 1]")
    if mode == "zero":
        raise _refuse(key, value, "mode zero replays nothing; leave it out, or take mode replay")


def _check_anchor_interval(value: Any, mode: Any) -> None:
    _check_count("anchor_interval", value, 0)
    if value > 0 and mode == "zero":
        raise _refuse("anchor_interval", value, "mode zero uses no saved states; give 0, or take mode replay")


def _check_size(key: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):
        raise _refuse(key, value, "must be a positive number of GiB")


def _check_anchor_gb(value: Any, interval: Any) -> None:
    _check_size("anchor_gb", value)
    if value is not None and interval == 0:
        wanted = "holds nothing without --tail-replay-anchor-interval N, N > 0: give an interval too, or leave this out"
        raise _refuse("anchor_gb", value, wanted)


@dataclasses.dataclass(frozen=True, slots=True)
class TailReplayConfig:
    """Validates itself; TailReplayError names the bad key."""

    mode: str = "replay"  # replay; zero: reuse KV, states from zero (the paper's baseline); off: SGLang's own cache
    ratio: float = 0.05  # r: share of the matched prefix that is replayed
    min_tokens: int = 64  # k_min: never replay less, unless the prefix is shorter
    max_tokens: int | None = None  # k_max: never replay more, but for what two anchor intervals make exact
    host_gb: float | None = None  # size of the row store; None: fits all KV slots, at most half of the free memory
    row_dtype: str = "auto"  # of stored rows: auto is the model's; fp8 and int8 take half of bfloat16's memory
    anchor_interval: int = 0  # save a state on the host about every so many tokens; 0: none
    anchor_dtype: str = "fp32"  # of recurrent states on the host: fp32 (as the pool has them), bf16 or int8
    anchor_gb: float | None = None  # size of the anchor store; None: one per interval, at most 1/8 of the free memory
    overlap: bool = True  # replay and copies on their own streams; off: one after the other (ablation)
    skip: bool = True  # leave out what the state does not need in a group's last layer (ablation when off)
    graphs: bool = True  # launch replays as captured CUDA graphs (off: kernel by kernel)
    self_check: bool = True  # at start, compare one replay with a prefill
    max_residual: float | None = None  # a hit's replay may leave out this share of a head's missing state; 1: tell only
    max_generation: int | None = None  # reuse nothing that has more approximate replays behind it
    verify_fraction: float = 0.0  # share of hits that are computed again from nothing when the server is idle

    def __post_init__(self) -> None:
        problems = []
        for check, *arguments in self._checks():
            try:
                check(*arguments)
            except TailReplayError as error:
                problems.append(str(error))
        if problems:
            raise Refused(problems)

    def _checks(self) -> Iterator[tuple[Any, ...]]:
        yield _check_choice, "mode", self.mode, MODES
        yield _check_choice, "row_dtype", self.row_dtype, ROW_DTYPES
        yield check_ratio, self.ratio
        yield _check_count, "min_tokens", self.min_tokens, CONV_WIDTH
        if self.max_tokens is not None:
            yield _check_max_tokens, self.max_tokens, self.min_tokens
        yield _check_anchor_interval, self.anchor_interval, self.mode
        if self.max_generation is not None:
            yield _check_count, "max_generation", self.max_generation, 0
        if self.max_residual is not None:
            yield _check_residual, self.max_residual, self.mode
        yield _check_fraction, "verify_fraction", self.verify_fraction
        yield _check_choice, "anchor_dtype", self.anchor_dtype, ANCHOR_DTYPES
        yield _check_size, "host_gb", self.host_gb
        yield _check_anchor_gb, self.anchor_gb, self.anchor_interval
        for key in SWITCHES:
            yield _check_switch, key, getattr(self, key)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, calibrated: Mapping[str, Any] | None = None, **flags: Any
    ) -> TailReplayConfig:
        """Parse the JSON object in SGLANG_TAILREPLAY: a flag beats its key, which beats what a calibration recommends;
        defaults where nothing is given."""
        text = environ.get(ENVIRONMENT, "").strip() or "{}"
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise TailReplayError(f"{ENVIRONMENT} is not JSON ({error}); an example: '{{\"ratio\": 0.05}}'") from None
        if not isinstance(values, dict):
            raise TailReplayError(f"{ENVIRONMENT} must hold a JSON object, not {text}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise TailReplayError(f"{ENVIRONMENT}: unknown key {unknown[0]!r}; known keys: {', '.join(known)}")
        return cls(**{**(calibrated or {}), **values, **flags})

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The launcher's flags; a flag that is not given leaves the environment's value or the default."""
    group = parser.add_argument_group("Tail-Replay")

    def add(key: str, **kwargs: Any) -> None:
        group.add_argument(f"--tail-replay-{dashed(key)}", dest=key, default=argparse.SUPPRESS, **kwargs)

    add("mode", choices=MODES, help="replay (default); zero: reuse KV, states from zero; off: SGLang's own cache")
    add("ratio", type=float, help="share of the matched prefix to replay, in (0, 1] (default 0.05)")
    add("min_tokens", type=int, help="replay at least this many tokens (default 64)")
    add("max_tokens", type=int, help="replay at most this many tokens (default: no limit)")
    add("host_gb", type=float, help="GiB of host memory for rows (default: fits all KV slots, at most half of free)")
    add("row_dtype", choices=ROW_DTYPES, help="of stored rows: auto (default: the model's), fp8, int8 (half as large)")
    add("anchor_interval", type=int, help="save a state (anchor) about every so many tokens (default 0: none)")
    add("anchor_dtype", choices=ANCHOR_DTYPES, help="how saved states are kept (default fp32: as they are)")
    add("anchor_gb", type=float, help="GiB of host memory for them (default: one per interval, at most 1/8 of free)")
    add("max_residual", type=float, help="largest share of a head's missing state that a hit may lack (default: any)")
    add("max_generation", type=int, help="reuse nothing with more approximate replays behind it (default: no limit)")
    add("verify_fraction", type=float, help="share of hits to check against a cold prefill when idle (default 0)")
    for flag, key, text in (
        ("no-overlap", "overlap", "replay, row copies and forward passes one after the other"),
        ("no-skip", "skip", "compute the whole last layer of every group"),
        ("no-graphs", "graphs", "launch replays kernel by kernel, not as captured CUDA graphs"),
        ("no-self-check", "self_check", "start without comparing a replay with a prefill"),
    ):
        group.add_argument(
            f"--tail-replay-{flag}", dest=key, action="store_false", default=argparse.SUPPRESS, help=text
        )
