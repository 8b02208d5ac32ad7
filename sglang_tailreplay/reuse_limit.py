"""A request's own limit to what it takes from the cache: for measuring a hit at a chosen token, whatever lies there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tailreplay.errors import TailReplayError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LIMIT_PARAM = "tail_replay_max_matched"  # key of a request's sampling_params.custom_params


def check(custom_params: object) -> int | None:
    """The most tokens that a request wants to be served from the cache, None for no limit; TailReplayError if it is no
    number of tokens."""
    if not isinstance(custom_params, dict) or LIMIT_PARAM not in custom_params:
        return None
    value = custom_params[LIMIT_PARAM]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TailReplayError(
            f"{LIMIT_PARAM}={value!r}: must be a whole number of tokens, 0 or more "
            "(in the request's sampling_params.custom_params)"
        )
    return value


def of(req: Req) -> int | None:
    """A limit that is none, past the check at the entrance, is no limit: no request may end the server."""
    params = req.sampling_params.custom_params if req.sampling_params is not None else None
    try:
        return check(params)
    except TailReplayError:
        return None
