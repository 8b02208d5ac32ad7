"""doctor finds every problem before a start does, and its forecast is what a measured server did."""

import json
import shlex
from pathlib import Path

import pytest

from sglang_tailreplay import cli, memory_plan
from sglang_tailreplay.cost import Shape
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.memory_plan import GIB, NumberBytes

ROOT = Path(__file__).resolve().parents[2]
SHAPE = str(ROOT / "scripts" / "shapes" / "qwen3.5-4b")
GPU = ("--assume-gpu-gb", "139", "--mem-fraction-static", "0.82", "--assume-host-gb", "300")
SPEED = ("--tflops", "600", "--link-gbs", "50")


def call(arguments: list[str], as_json: bool = True) -> dict | list:
    """The report of one doctor and its exit code; the text where as_json is off."""
    import contextlib
    import io

    from sglang_tailreplay import doctor

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = doctor.main([*arguments, *(["--json"] if as_json else [])])
    return {**json.loads(out.getvalue()), "code": code} if as_json else [code, out.getvalue()]


def call_with_a_changed_sglang(arguments: list[str]) -> dict:
    from sglang_tailreplay import compat

    table = compat.VERSIONS[compat.installed_version()]
    table["forward"] = compat.Target(table["forward"].path, ("self", "renamed"))
    table["mix"] = compat.Target("sglang.srt.managers.schedule_batch.ScheduleBatch.gone", ())
    return call(arguments)


def problems(report: dict) -> list[str]:
    return [text for level, text in report["findings"] if level == "problem"]


def test_a_good_start(sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *GPU, *SPEED])
    assert problems(report) == [] and report["code"] == 0 and report["starts"]
    memory = dict(map(tuple, report["sections"]["memory"]))
    assert "tokens of 32,768 bytes" in memory["KV"] and "tokens of 35,840 bytes" in memory["rows on the host"]
    costs = [text for _, text in report["sections"]["a hit costs at least"]]
    # 410 and 1,639 tokens of 3.947 GFLOP, and of 35,840 bytes
    assert "replay of 410 tokens 2.7, their rows 0.3 " in costs[1]
    assert "replay of 1,639 tokens 10.8, their rows 1.2 " in costs[2]


def test_memory_follows_the_dtype_and_the_host_tier(sandbox):
    flags = ["--dtype", "float32", "--enable-hierarchical-cache", "--hicache-size", "20"]
    memory = dict(map(tuple, sandbox(call, ["--model-path", SHAPE, *GPU, *flags])["sections"]["memory"]))
    assert "tokens of 65,536 bytes" in memory["KV"] and "tokens of 71,680 bytes" in memory["rows on the host"]
    host = 20_000_000_000 // 65_536
    assert f"{host:,} slots" in memory["KV on the host"]
    device, rows = (
        int(memory[row].split(": ")[1].split(" tokens")[0].replace(",", "")) for row in ("KV", "rows on the host")
    )
    assert rows == device + host


def test_rows_of_a_byte_take_half_the_host_and_half_the_link(sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *GPU, *SPEED, "--tail-replay-row-dtype", "fp8"])
    memory = dict(map(tuple, report["sections"]["memory"]))
    assert "tokens of 18,032 bytes" in memory["rows on the host"]  # 7 groups of 2,560 + 16 bytes
    assert "tokens of 32,768 bytes" in memory["KV"]
    costs = [text for _, text in report["sections"]["a hit costs at least"]]
    assert "replay of 1,639 tokens 10.8, their rows 0.6 " in costs[2]


def test_rows_that_cannot_be_packed_are_found_before_a_start(sandbox, tmp_path):
    config = json.loads((Path(SHAPE) / "config.json").read_text())
    config.get("text_config", config)["hidden_size"] = 2568
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model-path", str(tmp_path), *GPU]
    assert sandbox(call, flags)["code"] == 0
    report = sandbox(call, [*flags, "--tail-replay-row-dtype", "int8"])
    assert report["code"] == 1 and "multiple of 16, got 2568; leave it out" in problems(report)[0]


def test_saved_states_take_their_part_of_the_host(sandbox):
    flags = ["--tail-replay-anchor-interval", "8192", "--tail-replay-anchor-gb", "10"]
    sections = sandbox(call, ["--model-path", SHAPE, *GPU, *SPEED, *flags])["sections"]
    what, cost = sections["a hit costs at least"][-1]
    # 6.59 MFLOP a token: 2.7 ms for 410 of them, as above
    assert what == "from a saved state" and "4,096 tokens in the mean 27.0 ms, of 16,384 at most 107.8," in cost
    memory = dict(map(tuple, sections["memory"]))
    assert memory["saved states on the host"] == "9.98 GiB: 208 anchors of 49.12 MiB"
    assert "of 290.02 GiB free" in memory["rows on the host"]
    # 256 chunks of 32 heads of 128 x 128, 4 and 2 bytes each
    inside = memory["  of the rest: states of a pass"]
    assert inside == "0.75 GiB while a prefill pass of 16,384 tokens saves states inside of it"
    int8 = ["--tail-replay-anchor-dtype", "int8"]
    # 65 chunks, and a bound
    more = ["--chunked-prefill-size", "4100", *int8, "--tail-replay-max-residual", "0.1"]
    small = dict(map(tuple, sandbox(call, ["--model-path", SHAPE, *GPU, *flags, *more])["sections"]["memory"]))
    assert small["  of the rest: states of a pass"].startswith("0.19 GiB while a prefill pass of 4,100 tokens")
    assert small["saved states on the host"].endswith("anchors of 13.50 MiB")
    assert "tokens of 37,376 bytes" in small["rows on the host"]  # 35,840 and the decay of 24 x 32 heads


def test_fewer_states_than_intervals_is_a_note_that_says_what_would_do(sandbox):
    def notes(*flags: str) -> list[str]:
        report = sandbox(call, ["--model-path", SHAPE, *GPU, "--max-total-tokens", "1000000", *flags])
        return [text for level, text in report["findings"] if level == "note" and "saved states for" in text]

    (note,) = notes("--tail-replay-anchor-interval", "1024", "--tail-replay-anchor-gb", "10")
    # 208 places for 977 intervals; 1,000,000 / 208 is 4,807.7, which 76 x 64 covers
    assert "saved states for 21% of the KV slots" in note and "--tail-replay-anchor-interval 4864 would" in note
    assert "--tail-replay-anchor-gb 47 at this interval" in note
    assert notes("--tail-replay-anchor-interval", "4864", "--tail-replay-anchor-gb", "10") == []


def test_sizes_that_a_configuration_leaves_out_are_its_models_defaults(sandbox, tmp_path):
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    config = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = sandbox(call, ["--model-path", str(tmp_path), *GPU])
    memory = dict(map(tuple, report["sections"]["memory"]))
    assert report["code"] == 0
    assert "tokens of 122,880 bytes" in memory["KV"]  # 8 layers, 2 x 30 heads of 128
    assert "tokens of 53,760 bytes" in memory["rows on the host"]  # 7 groups of 3,840


def other_words(arguments: list[str]) -> dict:
    from sglang_tailreplay import forecast

    def from_config(config):
        raise KeyError("linear_num_key_heads")

    forecast.Shape = type("Shape", (), {"from_config": staticmethod(from_config)})
    return call(arguments)


def test_a_model_without_a_forecast_may_still_start(sandbox):
    report = sandbox(other_words, ["--model-path", SHAPE, *GPU])
    assert report["code"] == 0 and report["sections"] == {}
    assert any("has no 'linear_num_key_heads'" in text for level, text in report["findings"] if level == "note")


def test_all_problems_are_named_at_once_and_memory_is_still_told(sandbox):
    flags = ["--page-size", "16", "--tp", "2", "--enable-lora", "--tail-replay-ratio", "0.1"]
    report = sandbox(call, ["--model-path", SHAPE, *GPU, *flags])
    named = [problem.split(":")[1].strip() for problem in problems(report)]
    assert named == ["--page-size", "--tensor-parallel-size", "--enable-lora"]
    assert all("--tail-replay-mode off" in problem for problem in problems(report))
    assert report["code"] == 1 and not report["starts"] and report["sections"]["memory"]


@pytest.mark.parametrize(
    "bad", [["--tail-replay-ratio", "2"], ["--tail-replay-x", "3"], ["--tail-replay-mode", "on"], ["--nosuch"]]
)
def test_a_bad_setting_hides_no_other_problem(bad, sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *GPU, *bad, "--page-size", "16"])
    first, second = problems(report)
    assert bad[0] in first and "--page-size" in second and report["sections"]["memory"]
    notes = [text for level, text in report["findings"] if level == "note"]
    ours = bad[0].startswith("--tail-replay-")
    assert any("--tail-replay settings at their defaults" in note for note in notes) == ours


def test_a_bad_environment_hides_no_other_problem(sandbox):
    found = problems(sandbox(call, ["--model-path", SHAPE, *GPU, "--page-size", "16"], SGLANG_TAILREPLAY="{"))
    assert len(found) == 2 and "SGLANG_TAILREPLAY is not JSON" in found[0] and "--page-size" in found[1]


def test_a_model_that_nobody_has(sandbox):
    (problem,) = problems(sandbox(call, ["--model-path", "models/tiny-typo"], HF_HUB_OFFLINE="1"))
    assert problem.startswith("--model-path models/tiny-typo: no folder here")


@pytest.mark.parametrize(
    "flags, said",
    [
        ([*GPU, "--tail-replay-ratio", "2"], "the replay ratio must be a number in (0, 1]"),
        ([*GPU, "--no-such-flag", "3"], "SGLang knows no --no-such-flag 3"),
        (["--tp", "two"], "--tensor-parallel-size: invalid int value: 'two'"),
        ([*GPU, "--radix-cache-backend", "lru"], "--radix-cache-backend is this launcher's choice"),
        (["--assume-gpu-gb", "8"], "--mem-fraction-static 0.8 is 6.4 GiB here, and the weights alone take about 7.8"),
        ([*GPU, "--max-mamba-cache-size", "2300"], "weights and 2300 state slots"),
        (
            [*GPU, "--assume-host-gb", "50", "--tail-replay-host-gb", "60"],
            "--tail-replay-host-gb 60 does not fit: 50.0",
        ),
        ([*GPU, "--assume-host-gb", "50", "--enable-hierarchical-cache"], "--hicache-ratio 2 takes"),
    ],
    ids=str,
)
def test_one_problem(flags, said, sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *flags])
    (problem,) = problems(report)
    assert said in problem and report["code"] == 1


def test_a_model_that_is_no_hybrid(sandbox, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,) = problems(sandbox(call, ["--model-path", str(tmp_path)]))
    assert "LlamaForCausalLM is no hybrid model" in problem


@pytest.mark.parametrize("folder, said", [("empty", "has no config.json"), ("none", "there is no such folder")])
def test_a_folder_without_a_model(folder, said, sandbox, tmp_path):
    (tmp_path / "empty").mkdir()
    (problem,) = problems(sandbox(call, ["--model-path", str(tmp_path / folder)]))
    assert said in problem


def test_an_sglang_that_cannot_be_hooked(sandbox):
    found = problems(sandbox(call_with_a_changed_sglang, ["--model-path", SHAPE, *GPU]))
    assert len(found) == 2 and "ModelRunner.forward takes" in found[0] + found[1] and "gone" in found[0] + found[1]


def test_a_plugin_that_is_kept_out(sandbox):
    found = problems(sandbox(call, ["--model-path", SHAPE, *GPU], TAILREPLAY_DISABLE="1", SGLANG_PLUGINS="other"))
    assert any("SGLANG_PLUGINS=other" in text for text in found) and any(
        "TAILREPLAY_DISABLE=1" in text for text in found
    )


def test_fewer_rows_than_slots_is_a_note_that_says_what_would_do(sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *GPU[:4], "--assume-host-gb", "60"])
    notes = [text for level, text in report["findings"] if level == "note"]
    assert any("--tail-replay-host-gb 104 would hold all" in note for note in notes) and report["code"] == 0


def test_off_is_stock_sglang(sandbox):
    report = sandbox(call, ["--model-path", SHAPE, "--tail-replay-mode", "off", "--page-size", "16"])
    assert report["code"] == 0 and report["starts"] is None
    assert any("stock SGLang" in text for _, text in report["findings"])


def test_the_text_ends_with_the_verdict(sandbox):
    code, text = sandbox(call, ["--model-path", SHAPE, *GPU, "--page-size", "4"], False)
    *_, verdict, _, introduction, command = text.splitlines()
    assert code == 1 and verdict == "It would NOT start: 1 problem." and introduction.endswith("it would:")
    assert command == f"  sglang-tailreplay serve --model-path {SHAPE} --mem-fraction-static 0.82"
    assert "no GPU to measure; give --tflops and --link-gbs" in text


@pytest.mark.parametrize(
    "bad, kept",
    [
        (["--tp", "2", "--page-size=16", "--tail-replay-ratio", "0.1"], [*GPU[2:4], "--tail-replay-ratio", "0.1"]),
        (["--tail-replay-ratio", "2", "--tail-replay-min-tokens", "9"], [*GPU[2:4], "--tail-replay-min-tokens", "9"]),
        (["--nosuch", "3", "--dtype", "bfloat16", "--enable-lora"], [*GPU[2:4], "--dtype", "bfloat16"]),
        (["--max-mamba-cache-size", "2300"], []),  # or another --mem-fraction-static, it says
    ],
    ids=str,
)
def test_flags_that_stand_in_the_way_are_left_out(bad, kept, sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *GPU, *bad])
    assert report["code"] == 1 and report["remedy"]
    assert shlex.split(report["remedy"]) == ["sglang-tailreplay", "serve", "--model-path", SHAPE, *kept]


@pytest.mark.parametrize(
    "called, named",
    [(".venv/bin/sglang-tailreplay", ".venv/bin/sglang-tailreplay"), ("x/cli.py", "sglang-tailreplay")],
)
def test_the_remedy_calls_the_program_as_it_was_called(called, named, monkeypatch):
    from sglang_tailreplay import doctor

    monkeypatch.setattr("sys.argv", [called, "doctor"])
    assert doctor.called_as() == named


@pytest.mark.parametrize("flags", [["--assume-gpu-gb", "8"], ["--assume-gpu-gb", "8", "--page-size", "16"]], ids=str)
def test_what_no_flag_causes_has_no_such_remedy(flags, sandbox):
    report = sandbox(call, ["--model-path", SHAPE, *flags])
    assert problems(report) and report["remedy"] is None


def test_settings_of_the_environment_are_not_forgotten_with_a_flag(sandbox):
    """A start has them too, so a bad one stays a problem, and a good one is no reason against a remedy."""
    flags = ["--model-path", SHAPE, *GPU, "--page-size", "16"]
    assert sandbox(call, flags, SGLANG_TAILREPLAY='{"ratio": 2}')["remedy"] is None
    assert sandbox(call, flags, SGLANG_TAILREPLAY='{"ratio": 0.2}')["remedy"]


def documented() -> list[str]:
    pages = (ROOT / "README.md", ROOT / "docs" / "operating.md")
    lines = [line.strip() for page in pages for line in page.read_text().splitlines() if line.startswith("    ")]
    return [line for line in lines if "sglang-tailreplay doctor" in line]


@pytest.mark.parametrize("command", documented())
def test_a_documented_command(command, sandbox):
    """As on a machine with a GPU. A name on a hub would be downloaded; the shape is the same."""
    program, name, *arguments = shlex.split(command)
    assert (Path(program).name, name) == ("sglang-tailreplay", "doctor")
    arguments = [SHAPE if word in ("Qwen/Qwen3.5-4B", "scripts/shapes/qwen3.5-4b") else word for word in arguments]
    assumed = [] if "--assume-gpu-gb" in arguments else ["--assume-gpu-gb", "139", "--assume-host-gb", "200"]
    code, text = sandbox(call, [*arguments, *assumed], False)
    refused = sum(word in ("--page-size", "--enable-lora") for word in arguments)
    assert code == (1 if refused else 0)
    assert (f"It would NOT start: {refused} problems." if refused else "It would start.") in text.splitlines()


def test_there_are_documented_commands():
    assert len(documented()) >= 4


# ---- the arithmetic, against a measured server ----


@pytest.fixture(scope="module")
def measured() -> dict:
    document = json.loads((ROOT / "docs" / "results" / "h200-qwen3.5-4b.json").read_text())
    engines = document["engines"]
    return {name: engines[name]["sections"]["capacity"]["result"] for name in ("stock", "tail_replay")}


def test_slots_are_those_of_a_measured_server(measured):
    """Two numbers of the run go in: the memory that was divided (KV and 221 slots), and what the weights took."""
    config = json.loads((Path(SHAPE) / "config.json").read_text())
    shape, result = Shape.from_config(config), measured["tail_replay"]
    slot = memory_plan.state_slot_bytes(shape, NumberBytes())
    slots = result["settings"]["effective_max_running_requests_per_dp"]
    weights = memory_plan.parameters(shape, config) * 2
    assert weights == pytest.approx(result["memory_usage"]["weight"] * GIB, rel=0.02)
    divided = int(result["memory_usage"]["kvcache"] * GIB) + (slots + 1) * slot
    from sglang_tailreplay.state_slots import choose_state_slots

    assert choose_state_slots(None, divided, slot) == slots
    plan = memory_plan.plan_device(
        free=divided + weights, fraction=1, weights=weights, slot_bytes=slot, state_slots=slots,
        kv_token=memory_plan.token_bytes(shape, NumberBytes()).kv, max_tokens=None,
    )  # fmt: skip
    assert plan.kv_slots == pytest.approx(result["max_total_num_tokens"], rel=0.001)


def test_a_plan_accounts_for_every_byte():
    plan = memory_plan.plan_device(
        free=1000, fraction=0.5, weights=100, slot_bytes=10, state_slots=9, kv_token=7, max_tokens=None
    )
    assert (plan.states, plan.kv_slots) == (100, 42)  # 500 - 100 - 10 slots of 10 = 300 = 42 tokens and a rest
    assert plan.weights + plan.states + plan.kv + plan.rest == plan.free
    capped = memory_plan.plan_device(
        free=1000, fraction=0.5, weights=100, slot_bytes=10, state_slots=9, kv_token=7, max_tokens=5
    )
    assert capped.kv_slots == 5
    with pytest.raises(TailReplayError, match="no room for KV"):
        memory_plan.plan_device(
            free=1000, fraction=0.5, weights=395, slot_bytes=10, state_slots=9, kv_token=7, max_tokens=None
        )


# ---- the command ----


def test_the_command_knows_its_commands(capsys):
    assert cli.main([]) == 0 and cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {command} " in told for command in ("serve", "doctor", "calibrate", *cli.IN_SCRIPTS))
    assert cli.main(["bnech"]) == 2
    assert "known are serve, doctor, calibrate, demo, bench, eval" in capsys.readouterr().err


def test_what_lies_in_scripts_is_run_or_said_to_be_missing(monkeypatch, capfd, tmp_path):
    assert all((cli.SCRIPTS / name).exists() for name in cli.IN_SCRIPTS.values())
    (tmp_path / "demo.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    monkeypatch.setattr(cli, "SCRIPTS", tmp_path)
    assert cli.main(["demo", "--mode", "zero"]) == 3 and "['--mode', 'zero']" in capfd.readouterr().out
    assert cli.main(["bench"]) == 2 and "needs a checkout of the repository" in capfd.readouterr().err


def test_a_start_with_several_problems_points_to_doctor(monkeypatch, capsys):
    from sglang_tailreplay import launch_server
    from sglang_tailreplay.errors import Refused

    def refuse(argv):
        raise Refused(["first", "second", "third"])

    monkeypatch.setattr(launch_server, "prepare", refuse)
    with pytest.raises(SystemExit) as stop:
        launch_server.main(["--model-path", "m"])
    more, error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and error == "error: first"
    assert more.startswith("2 more") and "sglang-tailreplay doctor" in more


def test_serve_is_the_launcher(monkeypatch):
    from sglang_tailreplay import launch_server

    called = []
    monkeypatch.setattr(launch_server, "main", called.append)
    assert cli.main(["serve", "--model-path", "m"]) == 0
    assert called == [["--model-path", "m"]]
