"""calibrate on a real server: a full replay is exact, a short tail of this model is not, and the launcher takes what
was found."""

import json
import os
import subprocess
import sys

import pytest

from sglang_tailreplay import calibration, launch_server
from sglang_tailreplay.config import ENVIRONMENT, TailReplayConfig

SERVER = (
    *("--dtype", "float32", "--max-total-tokens", "4096", "--context-length", "1024", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "4", "--max-mamba-cache-size", "16", "--sleep-on-idle"),
)


@pytest.mark.parametrize("row_dtype", [pytest.param("auto", marks=pytest.mark.slow), "fp8"])
def test_what_was_measured_is_what_is_recommended_and_served(tiny_model, tmp_path, row_dtype):
    """Rows of a byte per number are not exact, but far nearer to it than a short tail."""
    out = tmp_path / "calibration.json"
    asked = ("--lengths", "300", "--ratios", "0.1,1", "--min-tokens", "16", "--anchor-intervals", "0", "--count", "8")
    command = [sys.executable, "-m", "sglang_tailreplay.cli", "calibrate", "--model-path", tiny_model, "--out", out]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    done = subprocess.run(
        [*map(str, command), *asked, "--agreement", "0.6", "--tail-replay-row-dtype", row_dtype, *SERVER],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no anchors:" in done.stdout and out.with_suffix(".png").stat().st_size > 0
    document = json.loads(out.read_text())
    short, full = document["cells"]
    assert document["errors"] == [] and (short["tail"], full["tail"]) == (30, 300)
    assert short["replayed"] == 30 and short["exact"] == 0 and short["agreement"] < 0.5
    assert full["exact"] == 1 and full["kl"] < short["kl"] / 10
    if row_dtype == "auto":
        assert full["agreement"] == 1 and full["kl"] < 1e-6
    else:
        assert full["kl"] > 1e-6  # or rows were not quantised

    environ = {}
    launch_server.translate(["--model-path", str(tiny_model), calibration.FLAG, str(out)], environ)
    found = TailReplayConfig.from_environment({ENVIRONMENT: environ[ENVIRONMENT]})
    assert (found.ratio, found.min_tokens, found.anchor_interval, found.row_dtype) == (1.0, 16, 0, row_dtype)
