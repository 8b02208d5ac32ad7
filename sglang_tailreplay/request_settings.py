"""What a request brings of its own, in its sampling_params.custom_params, and what is refused where it enters.

    tail_replay_ratio         a replay ratio in place of the server's
    tail_replay_max_matched   the most tokens that it is served from the cache, whatever lies there: for measuring a hit
                              at a chosen token

A tokenizer worker of its own loads no plugins, and what is no setting comes past the entrance with it. It is taken for
none then: no request may end the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_tailreplay.config import TailReplayConfig, check_ratio
from sglang_tailreplay.errors import TailReplayError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)
RATIO_PARAM = "tail_replay_ratio"
LIMIT_PARAM = "tail_replay_max_matched"
_WHERE = "in the request's sampling_params.custom_params"


def check(custom_params: object) -> None:
    """TailReplayError for a ratio or a limit that is none. Called where a request enters, so that the client learns of
    it."""
    _limit(custom_params)
    _ratio(custom_params)


def check_tokens(ids: Sequence[int]) -> None:
    """TailReplayError for token ids that no prompt has; called where `check` is."""
    if len(ids) == 0:
        raise TailReplayError("input_ids: a prompt needs at least one token")
    if min(ids) < 0:
        raise TailReplayError(f"input_ids: {min(ids)} is no token")


def ratio_of(req: Req, config: TailReplayConfig) -> float:
    """The request's own replay ratio, if it brings one, else the server's."""
    try:
        own = _ratio(_params(req))
    except TailReplayError as error:
        logger.warning("tail_replay: request %s is served with the server's ratio: %s", req.rid, error)
        own = None
    return config.ratio if own is None else own


def limit_of(req: Req) -> int | None:
    """The most tokens that the request is served from the cache; None for no limit."""
    try:
        return _limit(_params(req))
    except TailReplayError:
        return None


def _params(req: Req) -> object:
    return req.sampling_params.custom_params if req.sampling_params is not None else None


def _ratio(custom_params: object) -> float | None:
    if not isinstance(custom_params, dict) or RATIO_PARAM not in custom_params:
        return None
    return check_ratio(custom_params[RATIO_PARAM], RATIO_PARAM, _WHERE)


def _limit(custom_params: object) -> int | None:
    if not isinstance(custom_params, dict) or LIMIT_PARAM not in custom_params:
        return None
    value = custom_params[LIMIT_PARAM]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TailReplayError(f"{LIMIT_PARAM}={value!r}: must be a whole number of tokens, 0 or more ({_WHERE})")
    return value
