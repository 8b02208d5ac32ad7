"""What a request may bring of its own, and what becomes of what is none."""

from types import SimpleNamespace

import pytest

from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.request_settings import LIMIT_PARAM, RATIO_PARAM, check, limit_of, ratio_of


def request(params) -> SimpleNamespace:
    return SimpleNamespace(rid="r", sampling_params=SimpleNamespace(custom_params=params))


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, "text"])
def test_most_requests_bring_nothing(params):
    check(params)
    assert ratio_of(request(params), TailReplayConfig(ratio=0.1)) == 0.1 and limit_of(request(params)) is None


def test_a_request_may_bring_its_ratio():
    config = TailReplayConfig(ratio=0.1)
    check({RATIO_PARAM: 1})
    assert ratio_of(request({RATIO_PARAM: 0.5}), config) == 0.5
    assert ratio_of(SimpleNamespace(sampling_params=None), config) == 0.1


def test_a_request_may_limit_what_it_takes_from_the_cache():
    assert limit_of(request({LIMIT_PARAM: 0})) == 0 and limit_of(request({LIMIT_PARAM: 9, "other": 1})) == 9
    assert limit_of(request({LIMIT_PARAM: -1})) is None
    for bad in (-1, 0.5, True, None, "9"):
        with pytest.raises(TailReplayError, match="tail_replay_max_matched=.*custom_params"):
            check({LIMIT_PARAM: bad})


@pytest.mark.parametrize("ratio", [0, -1, 1.5, "0.5", None, True, float("nan"), [1]])
def test_a_bad_ratio_is_refused_where_the_request_enters(ratio):
    with pytest.raises(TailReplayError) as error:
        check({RATIO_PARAM: ratio})
    message = str(error.value)
    assert message.startswith(f"tail_replay_ratio={ratio!r}: ") and "custom_params" in message
    assert "--tail-replay" not in message and "\n" not in message  # a client has no flags


@pytest.mark.parametrize("ratio", [0, 1.5, "0.5"])
def test_a_bad_ratio_that_came_past_the_check_does_not_end_the_server(ratio, caplog):
    assert ratio_of(request({RATIO_PARAM: ratio}), TailReplayConfig(ratio=0.25)) == 0.25
    assert "request r is served with the server's ratio" in caplog.text


def test_a_bad_limit_beside_a_good_ratio_does_not_cost_the_ratio():
    assert ratio_of(request({RATIO_PARAM: 0.5, LIMIT_PARAM: -1}), TailReplayConfig()) == 0.5
