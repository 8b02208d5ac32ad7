"""Settings: what is refused and how it is said, and how flags and environment come together."""

import json

import pytest

from sglang_tailreplay import launch_server
from sglang_tailreplay.config import ENVIRONMENT, TailReplayConfig
from sglang_tailreplay.errors import Refused, TailReplayError

FLAGS = {
    "overlap": "--tail-replay-no-overlap",
    "skip": "--tail-replay-no-skip",
    "graphs": "--tail-replay-no-graphs",
    "self_check": "--tail-replay-no-self-check",
}
BAD = {
    "mode": ["on", "", None, 1, [], "Replay"],
    "ratio": [0, -0.1, 1.0001, "0.1", None, True, [0.1], float("nan"), float("inf")],
    "min_tokens": [3, 0, -64, 64.0, "64", None, True],
    "max_tokens": [63, 0, 100.0, "100", False],
    "host_gb": [0, -1, "8", True, [], float("nan"), float("inf")],
    "row_dtype": ["bf16", "", None, 8],
    "anchor_interval": [-1, 1.5, "64", None, True],
    "anchor_dtype": ["fp16", "", None, 8],
    "anchor_gb": [0, -1, "8", True, [], float("nan"), float("inf")],
    "overlap": [0, 1, "true", None],
    "skip": [0, 1, "true", None],
    "graphs": [0, 1, "true", None],
    "self_check": [0, 1, "false", None],
    "max_residual": [0, -0.1, 1.1, "0.1", True, float("nan")],
    "max_generation": [-1, 1.5, "1", False],
    "verify_fraction": [-0.1, 1.1, "0.1", None, True, float("nan")],
}


def environment(**values) -> dict[str, str]:
    return {ENVIRONMENT: json.dumps(values)}


def test_room_for_states_that_nobody_saves_is_refused():
    with pytest.raises(TailReplayError) as error:
        TailReplayConfig(anchor_gb=8)
    message = str(error.value)
    assert message.startswith("anchor_gb=8: holds nothing without --tail-replay-anchor-interval N")
    assert "\n" not in message
    assert TailReplayConfig(anchor_gb=8, anchor_interval=1).anchor_gb == 8
    with pytest.raises(TailReplayError) as error:
        TailReplayConfig(anchor_gb=8, anchor_interval=-1)
    assert "holds nothing" not in str(error.value), "one problem, told once"


def test_every_key_has_bad_values():
    assert set(BAD) == set(TailReplayConfig.__slots__)


@pytest.mark.parametrize("key, value", [(key, value) for key, values in BAD.items() for value in values])
def test_a_bad_value_names_key_variable_and_flag(key, value):
    with pytest.raises(TailReplayError) as error:
        TailReplayConfig.from_environment(environment(**{key: value}))
    message = str(error.value)
    flag = FLAGS.get(key, f"--tail-replay-{key.replace('_', '-')}")
    assert f"key {key!r} of {ENVIRONMENT}, flag {flag})" in message
    assert message.startswith(f"{key}={value!r}: ") and "\n" not in message


@pytest.mark.parametrize("key", BAD)
def test_the_flag_in_the_message_exists(key, capsys):
    launch_server.translate(["--help"], {})
    assert FLAGS.get(key, f"--tail-replay-{key.replace('_', '-')} ") in capsys.readouterr().out


@pytest.mark.parametrize(
    "values",
    [
        {"ratio": 1},
        {"ratio": 1e-9},
        {"min_tokens": 4, "max_tokens": 4},
        {"max_tokens": None},
        {"host_gb": 0.001},
        {"max_residual": 1},
        {"max_residual": 1e-9, "anchor_interval": 64},
        {"host_gb": 8},
        {"mode": "zero", "overlap": False, "skip": False, "self_check": False},
    ],
)
def test_good_values_survive_the_round_trip(values):
    config = TailReplayConfig.from_environment(environment(**values))
    for key, value in values.items():
        assert getattr(config, key) == value
    assert TailReplayConfig.from_environment({ENVIRONMENT: config.to_json()}) == config


@pytest.mark.parametrize("environ", [{}, {ENVIRONMENT: ""}, {ENVIRONMENT: "  "}, {ENVIRONMENT: "{}"}])
def test_nothing_given_means_the_defaults(environ):
    assert TailReplayConfig.from_environment(environ) == TailReplayConfig()
    assert TailReplayConfig() == TailReplayConfig(
        *("replay", 0.05, 64, None, None, "auto", 0, "fp32", None, True, True, True, True),
        max_residual=None,
        max_generation=None,
        verify_fraction=0,
    )


@pytest.mark.parametrize(
    "text, said",
    [
        ("{ratio: 0.1}", "is not JSON"),
        ("0.05", "must hold a JSON object"),
        ('["ratio"]', "must hold a JSON object"),
        ('{"ratio": 0.1, "ration": 0.1}', "unknown key 'ration'"),
        ('{"min-tokens": 64}', "unknown key 'min-tokens'"),
    ],
)
@pytest.mark.parametrize(
    "read", [TailReplayConfig.from_environment, lambda environ: launch_server.translate([], environ)]
)
def test_a_bad_environment_is_named(text, said, read):
    with pytest.raises(TailReplayError) as error:
        read({ENVIRONMENT: text})
    assert ENVIRONMENT in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_a_bound_and_saved_states_need_replays():
    with pytest.raises(TailReplayError, match="max_residual=0.1: mode zero replays nothing; leave it out"):
        TailReplayConfig(mode="zero", max_residual=0.1)
    assert TailReplayConfig(mode="off", max_residual=0.1).max_residual == 0.1
    with pytest.raises(TailReplayError, match="anchor_interval=64: mode zero uses no saved states; give 0"):
        TailReplayConfig(mode="zero", anchor_interval=64)


def test_a_config_cannot_change():
    with pytest.raises(AttributeError):
        TailReplayConfig().ratio = 0.5


# ---- the launcher ----


def translate(*argv: str, **values) -> tuple[list[str], TailReplayConfig]:
    environ = environment(**values) if values else {}
    rest = launch_server.translate(list(argv), environ)
    return rest, TailReplayConfig.from_environment(environ)


def test_every_flag_reaches_its_key():
    rest, config = translate(
        *("--model-path", "m", "--tail-replay-mode", "replay", "--tail-replay-ratio=0.5"),
        *("--tail-replay-min-tokens", "8", "--tail-replay-max-tokens", "99", "--tail-replay-host-gb", "1.5"),
        *("--tail-replay-row-dtype", "int8"),
        *("--tail-replay-anchor-interval", "512", "--tail-replay-anchor-gb", "2.5"),
        *("--tail-replay-anchor-dtype", "int8"),
        *("--tail-replay-no-overlap", "--tail-replay-no-skip", "--tail-replay-no-graphs"),
        *("--tail-replay-no-self-check", "--port", "1"),
        *("--tail-replay-max-generation", "3", "--tail-replay-verify-fraction", "0.25"),
        *("--tail-replay-max-residual", "0.01"),
    )
    assert config == TailReplayConfig(
        *("replay", 0.5, 8, 99, 1.5, "int8", 512, "int8", 2.5, False, False, False, False),
        max_residual=0.01,
        max_generation=3,
        verify_fraction=0.25,
    )
    assert rest == ["--model-path", "m", "--port", "1", "--radix-cache-backend", "tail_replay"]


def test_a_flag_beats_the_environment_and_leaves_the_rest_of_it():
    _, config = translate("--tail-replay-ratio", "0.5", ratio=0.1, min_tokens=8)
    assert (config.ratio, config.min_tokens) == (0.5, 8)
    _, config = translate("--tail-replay-ratio", "0.5", ratio=7)  # never used, so never refused
    assert config.ratio == 0.5


def test_a_flag_and_the_environment_are_checked_together():
    with pytest.raises(TailReplayError, match="max_tokens=32"):
        translate("--tail-replay-min-tokens", "64", max_tokens=32)
    assert translate("--tail-replay-min-tokens", "16", max_tokens=32)[1].max_tokens == 32


@pytest.mark.parametrize("argv, values", [(["--tail-replay-mode", "off"], {}), ([], {"mode": "off"})])
def test_mode_off_leaves_the_backend_to_sglang(argv, values):
    assert translate("--model-path", "m", *argv, **values)[0] == ["--model-path", "m"]


@pytest.mark.parametrize("given", [["--radix-cache-backend", "lmcache"], ["--radix-cache-backend=tail_replay"]])
@pytest.mark.parametrize("mode", ["replay", "off"])
def test_the_backend_is_the_launchers_choice(given, mode):
    with pytest.raises(TailReplayError, match="--radix-cache-backend"):
        translate("--tail-replay-mode", mode, *given)


@pytest.mark.parametrize(
    "word", ["--tail-replay-x", "--tail-replay-ratios=1", "--tail-replay-rat", "--tail-replay-overlap"]
)
def test_an_unknown_flag_is_refused(word):
    with pytest.raises(TailReplayError, match=f"unknown flag {word}"):
        translate(word)


@pytest.mark.parametrize("argv", [["--tail-replay-ratio", "2"], ["--tail-replay-min-tokens", "1"]])
def test_a_bad_flag_is_refused(argv):
    with pytest.raises(TailReplayError, match=f"flag {argv[0]}"):
        translate(*argv)


@pytest.mark.parametrize("argv", [["--tail-replay-ratio", "x"], ["--tail-replay-mode", "on"], ["--tail-replay-ratio"]])
def test_a_flag_that_does_not_parse_is_refused(argv):
    with pytest.raises(TailReplayError, match=argv[0]):
        translate(*argv)


def test_all_bad_settings_are_named_at_once():
    with pytest.raises(Refused) as error:
        translate("--tail-replay-ratio", "2", "--tail-replay-min-tokens", "-1", max_tokens=True, skip=0)
    assert [problem.split("=")[0] for problem in error.value.problems] == ["ratio", "min_tokens", "max_tokens", "skip"]


def test_a_minimum_that_is_none_does_not_make_the_maximum_wrong():
    with pytest.raises(Refused) as error:
        TailReplayConfig(min_tokens="64", max_tokens=32)
    assert len(error.value.problems) == 1


def test_without_settings_keeps_what_is_sglangs():
    ours = ["--tail-replay-min-tokens", "-1", "--tail-replay-x=3", "--radix-cache-backend", "lru"]
    assert launch_server.without_settings(["--tp", "2", *ours, "--seed", "-1"]) == ["--tp", "2", "--seed", "-1"]


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_prints_our_flags_and_goes_on_to_sglangs(word, capsys):
    environ = {}
    assert launch_server.translate([word], environ) == [word]
    printed = capsys.readouterr().out
    assert "--tail-replay-ratio" in printed and "sglang.launch_server" in printed and not environ


def test_the_launcher_prints_one_line_for_a_bad_setting(monkeypatch, capsys):
    monkeypatch.setenv(ENVIRONMENT, "{")
    with pytest.raises(SystemExit) as stop:
        launch_server.main(["--model-path", "m"])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.startswith("error: ") and printed.count("\n") == 1


@pytest.mark.parametrize("mode", ["replay", "off"])
def test_a_disabled_plugin_stops_the_start_before_a_model_is_loaded_unless_it_is_off(monkeypatch, capsys, mode):
    monkeypatch.setenv("TAILREPLAY_DISABLE", "1")
    launched = []
    monkeypatch.setattr(launch_server, "_launch", launched.append)
    monkeypatch.setattr(launch_server, "prepare", lambda argv: launch_server.translate(argv, {}))
    if mode == "off":
        launch_server.main(["--model-path", "m", "--tail-replay-mode", "off"])
        assert launched == [["--model-path", "m"]]
        return
    with pytest.raises(SystemExit):
        launch_server.main(["--model-path", "m"])
    assert launched == [] and "TAILREPLAY_DISABLE=1" in capsys.readouterr().err


def test_an_environment_that_leaves_the_plugin_out_is_named(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, tailreplay")
    launch_server.check_entry_point()
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    with pytest.raises(TailReplayError, match="SGLANG_PLUGINS=other"):
        launch_server.check_entry_point()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    with pytest.raises(TailReplayError, match="not installed"):
        launch_server.check_entry_point()
