"""The command line: what is refused before a server is started, and the answers of servers that are."""

import json

import pytest

from sglang_tailreplay import calibrate
from sglang_tailreplay.calibrate.measure import Client, Cold, NotServed, agree
from sglang_tailreplay.calibrate.plan import Cell
from sglang_tailreplay.calibrate.serving import settings_for
from sglang_tailreplay.config import CONV_WIDTH


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--ratios", "0,0.1"], "--ratios"),
        (["--lengths", "16"], "--suffix"),
        (["--count", "0"], "--count"),
        (["--min-tokens", "3"], "--min-tokens"),
        (["--agreement", "1.5"], "--agreement"),
        (["--tail-replay-ratio", "0.1"], "--tail-replay-ratio is what is measured"),
        (["--tail-replay-host-gb", "-1"], "host_gb"),
    ],
)
def test_a_bad_option_is_refused_at_once(flags, said, capsys):
    with pytest.raises(SystemExit) as error:
        calibrate.parse(["--model-path", "M", *flags])
    assert error.value.code == 2 and said in capsys.readouterr().err


def test_what_is_not_measured_goes_to_the_servers():
    given = ["--model-path", "M", "--dtype", "float32", "--tail-replay-host-gb", "2", "--lengths", "100,200"]
    options, config, flags = calibrate.parse(given)
    assert flags == ["--dtype", "float32"] and config.host_gb == 2 and options.lengths == (100, 200)
    served = settings_for(config, 512)
    assert (served.anchor_interval, served.min_tokens, served.max_tokens) == (512, CONV_WIDTH, None)
    assert served.host_gb == 2


def test_room_for_states_goes_to_the_servers_that_save_some(capsys):
    _, config, _ = calibrate.parse(["--model-path", "M", "--tail-replay-anchor-gb", "3"])
    assert settings_for(config, 2048).anchor_gb == 3 and settings_for(config, 0).anchor_gb is None
    with pytest.raises(SystemExit):
        calibrate.parse(["--model-path", "M", "--tail-replay-anchor-gb", "3", "--anchor-intervals", "0"])
    assert "anchor_gb=3.0: holds nothing without" in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert calibrate.main(["--model-path", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert calibrate.main(["--model-path", str(tmp_path / "none")]) == 2
    assert "--model-path" in capsys.readouterr().err


def test_a_file_without_long_prompts_recommends_nothing_and_starts_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [5, 6]}\n')
    out = tmp_path / "out" / "c.json"
    given = ["--model-path", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
    assert calibrate.main(given) == 1
    assert json.loads(out.read_text())["recommendation"] is None
    assert "nothing is recommended" in capsys.readouterr().out


COLD = Cold([1, 2, 3, 4, 5, 6], 4, [{7: -0.1, 8: -3.0}, {7: -0.1, 8: -3.0}])


def reply(replayed=2, generation=1, cached=4, of_7=-0.2, best=-0.2):
    top = [None, [[best, 9, None]]]  # of tied tokens SGLang gives any
    named = [None, [[of_7, 7, None], [-2.0, 8, None]]]
    return {
        "cached_tokens": cached,
        "cached_tokens_details": {"tail_replay_replayed": replayed, "tail_replay_generation": generation},
        "input_top_logprobs": top, "output_top_logprobs": top[1:],
        "input_token_ids_logprobs": named, "output_token_ids_logprobs": named[1:],
    }  # fmt: skip


def hit(monkeypatch, meta, tail=2):
    monkeypatch.setattr(Client, "_open", lambda self, request: {"meta_info": meta})
    return Client("http://nowhere").hit(COLD, Cell(0, 4, tail), "space")


def test_a_hit_is_compared_at_every_token_behind_the_boundary(monkeypatch):
    found = hit(monkeypatch, reply())
    assert found.agreed == (True, True) and found.replayed == 2 and not found.exact
    assert found.kl[0] == found.kl[1] > 0
    assert hit(monkeypatch, reply(of_7=-0.3)).agreed == (False, False)


def test_ties_are_no_difference():
    tied = {7: -1.0, 8: -1.0, 9: -3.0}
    assert agree(tied, {7: -2.0, 8: -0.5, 9: -9.0}, best=-0.5) and agree({8: -0.1}, {8: -0.7}, best=-0.7)
    assert not agree(tied, {7: -2.0, 8: -0.6, 9: -0.5}, best=-0.5)


@pytest.mark.parametrize(
    "meta", [reply(cached=3), reply(replayed=1), reply(replayed=None), reply(generation=2)]
)  # fmt: skip
def test_a_hit_that_was_not_served_as_asked_is_no_data_point(monkeypatch, meta):
    with pytest.raises(NotServed):
        hit(monkeypatch, meta)


def test_an_exact_start_may_replay_less_than_was_asked_for(monkeypatch):
    assert hit(monkeypatch, reply(replayed=1, generation=0)).exact


def test_a_cold_request_that_found_something_is_no_data_point(monkeypatch):
    monkeypatch.setattr(Client, "_open", lambda self, request: {"meta_info": reply(cached=1)})
    with pytest.raises(NotServed):
        Client("http://nowhere").cold([1, 2, 3], 2, "space", 10)
