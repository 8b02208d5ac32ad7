"""The launcher takes settings from a calibration of this model by these versions, and refuses any other."""

import json

import pytest

from sglang_tailreplay import calibration, launch_server
from sglang_tailreplay.calibrate.plan import Setting
from sglang_tailreplay.config import ENVIRONMENT, TailReplayConfig
from sglang_tailreplay.errors import TailReplayError

CHOSEN = {"ratio": 0.2, "min_tokens": 128, "max_tokens": None, "anchor_interval": 1024}
CHOSEN |= {"row_dtype": "fp8", "anchor_dtype": "int8"}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", b"weights")


def write_model(folder, weights: bytes, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def write(folder, model, **changes):
    document = {
        "tool": calibration.TOOL,
        "format": calibration.FORMAT,
        "versions": calibration.versions(),
        "prompts": "generated",
        "model": {"path": "M", "fingerprint": calibration.fingerprint(model)},
        "recommendation": CHOSEN,
        "verdict": "well",
    }
    path = folder / "calibration.json"
    path.write_text(json.dumps({**document, **changes}))
    return str(path)


def start(file, model, *flags, **environment) -> TailReplayConfig:
    environ = {ENVIRONMENT: json.dumps(environment)}
    launch_server.translate(["--model-path", str(model), calibration.FLAG, file, *flags], environ)
    return TailReplayConfig.from_environment(environ)


def test_settings_come_from_the_file_and_flags_and_environment_beat_it(tmp_path, model, capsys):
    file = write(tmp_path, model)
    assert start(file, model) == TailReplayConfig(**CHOSEN)
    assert "ratio=0.2" in capsys.readouterr().err
    found = start(file, model, "--tail-replay-ratio", "0.5", ratio=0.3, anchor_interval=0)
    assert (found.ratio, found.anchor_interval, found.min_tokens) == (0.5, 0, 128)


def test_the_file_belongs_to_the_weights_not_to_their_place(tmp_path, model):
    file = write(tmp_path, model)
    (tmp_path / "elsewhere").mkdir()
    same = write_model(tmp_path / "elsewhere" / "other-name", b"weights")
    assert start(file, same).ratio == 0.2
    for other in (write_model(tmp_path / "a", b"Weights"), write_model(tmp_path / "b", b"weights", hidden_size=9)):
        with pytest.raises(TailReplayError, match="another model") as error:
            start(file, other)
        assert calibration.FLAG in str(error.value) and "\n" not in str(error.value)


def test_every_part_of_a_large_file_that_is_sampled_counts(tmp_path):
    weights = bytearray(3 << 20)
    first = calibration.fingerprint(write_model(tmp_path / "a", bytes(weights)))
    weights[-1] = 1
    assert calibration.fingerprint(write_model(tmp_path / "b", bytes(weights))) != first


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"format": 0}, "format 0"),
        ({"tool": "another"}, "was not written by"),
        ({"versions": {"sglang": "0.0.1"}}, "measured with sglang 0.0.1"),
        ({"recommendation": None, "verdict": "no measured setting meets it"}, "no measured setting meets it"),
    ],
)
def test_a_file_that_says_nothing_about_this_start_is_refused(tmp_path, model, changes, said):
    with pytest.raises(TailReplayError, match=said) as error:
        start(write(tmp_path, model, **changes), model)
    assert calibration.FLAG in str(error.value) and "alibrat" in str(error.value)


def test_no_file_no_json_no_model(tmp_path, model):
    with pytest.raises(TailReplayError, match="cannot be read"):
        start(str(tmp_path / "none"), model)
    (tmp_path / "text").write_text("ratio: 1")
    with pytest.raises(TailReplayError, match="cannot be read"):
        start(str(tmp_path / "text"), model)
    with pytest.raises(TailReplayError, match="needs --model-path"):
        launch_server.translate([calibration.FLAG, write(tmp_path, model)], {})


def test_every_key_that_is_read_is_a_setting():
    assert set(calibration.RECOMMENDED) <= set(TailReplayConfig.__slots__)
    assert calibration.MEASURED == Setting._fields


def test_every_setting_that_changes_answers_is_measured_or_kept():
    """A new one belongs into one of the two, or here."""
    sizes = {"host_gb", "anchor_gb"}
    speed = {"overlap", "skip", "graphs"}
    # Measured hits have one approximate replay behind them at most, whatever max_generation is.
    # None of them has a tail that a bound made longer.
    others = {"mode", "self_check", "verify_fraction", "max_generation", "max_residual"}
    assert set(TailReplayConfig.__slots__) - set(calibration.RECOMMENDED) == sizes | speed | others
