"""Cells, bounds, verdicts and print-out of bench_ttft, from made-up samples."""

import json

import bench_print
import bench_report
import bench_ttft
import plot
import plot_ttft
import pytest

from sglang_tailreplay.cost import Shape, Speeds

CONFIG = {
    "hidden_size": 1000,
    "intermediate_size": 4000,
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 100,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 100,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SPEEDS = Speeds(tflops=0.01, link_gbs=0.1, origin="given")
SHAPE = "qwen3.5-4b"


def sample(kind, length, ms, cached=0, replayed=None, ratio=None, source=None, rejected=None):
    served = {"cached": cached, "device": cached, "host": 0, "replayed": replayed}
    return {"kind": kind, "length": length, "ratio": ratio, "source": source, "ms": ms, "rejected": rejected, **served}


def hit(length, ms, ratio=0.05, source="host", **more):
    return sample("hit", length, ms, length, round(ratio * length), ratio, source, **more)


def engine(hits=(), bursts=(), error=None):
    sections = {}
    for name, samples, summarise in (
        ("hits", hits, bench_report.summarise_hits),
        ("bursts", bursts, bench_report.summarise_bursts),
    ):
        result = summarise(samples) if samples else None
        sections[name] = {"ok": True, "error": None, "samples": list(samples), "result": result}
    return {"error": error, "sections": sections}


def burst(ttft, variant="different", seconds=2.0, rejected=None):
    counts = {"prompt_tokens": 400 * len(ttft), "new_tokens": 16 * len(ttft), "cached": [300] * len(ttft)}
    return {"variant": variant, "source": "host", "ttft_ms": ttft, "seconds": seconds, "rejected": rejected, **counts}


@pytest.fixture
def engines():
    """Full prefill in 191.6 ms as in the paper, and a hit at 8,226 tokens that is twice as fast as the paper's."""
    stock = [sample("cold", 8226, 200), sample("cold", 31847, 786.4), sample("diverge", 8226, 190)]
    stock += [sample("diverge", 31847, 400, cached=16384), sample("again", 8226, 188)]
    stock += [sample("aligned", 16384, 30, cached=16384), sample("aligned", 16384, 32, cached=16384)]
    host = [sample("cold", 8226, 191.6), sample("cold", 31847, 800)]
    host += [hit(8226, 75.2 / 2 - 1), hit(8226, 75.2 / 2 - 3), hit(31847, 60), hit(31847, 100, ratio=0.1)]
    host += [
        sample("suffix", 8226, 33, 8226, 64, 1e-6, "device"),
        sample("suffix", 31847, 20, 31847, 64, 1e-6, "device"),
    ]
    return {"stock": engine(stock), "host": engine(host, [burst([10.0, 20.0]), burst([30.0, 40.0])])}


def cells_of(engines, config=CONFIG):
    return {(c["length"], c["ratio"]): c for c in bench_report.cells(engines, SHAPE, Shape.from_config(config), SPEEDS)}


def test_speedups_are_over_the_faster_full_prefill(engines):
    cells = cells_of(engines)
    assert cells[8226, 0.05]["full_ms"] == 191.6 and cells[31847, 0.05]["full_ms"] == 786.4
    assert cells[8226, 0.05]["speedup"] == pytest.approx(191.6 / 35.6)
    assert cells[8226, 0.05]["of_paper"] == pytest.approx(75.2 / 35.6)
    assert cells[31847, 0.1]["of_paper"] == pytest.approx(108.1 / 100)


def test_rejected_samples_are_no_data_points(engines):
    wrong = hit(8226, 1.0, rejected="8226 device, 0 host")
    engines["host"]["sections"]["hits"]["samples"].append(wrong)
    rows = bench_report.summarise_hits([hit(8226, 10.0), wrong])
    assert (rows[0]["ms"]["n"], rows[0]["rejected"]) == (1, 1)
    (row,) = bench_report.summarise_hits([wrong])
    assert (row["ms"], row["cached"], row["rejected"]) == (None, [], 1)
    assert list(bench_report.problems(engines)) == ["host hits: 1 samples rejected, the first one: 8226 device, 0 host"]


def test_the_suffix_is_the_fastest_that_was_measured(engines):
    assert bench_report.suffix_only(engines, 8226) == {"ms": 31, "of": "stock after 16384 tokens, no replay"}
    assert bench_report.suffix_only(engines, 31847) == {"ms": 20, "of": "host with 64 tokens replayed"}
    del engines["host"]
    assert bench_report.suffix_only(engines, 31847)["ms"] == 31
    missed = engine([sample("aligned", 16384, 3, cached=0)])
    assert bench_report.suffix_only({"stock": missed}, 8226) is None


def test_the_bound_counts_the_kv_of_a_host_hit(engines):
    shape = Shape.from_config(CONFIG)
    limit = cells_of(engines)[8226, 0.05]["bound"]
    tail = round(0.05 * 8226)
    assert limit["replay_ms"] == pytest.approx(shape.replay_flops(tail) / 1e10 * 1e3)
    assert limit["copy_ms"] == pytest.approx((shape.row_bytes(tail) + shape.kv_bytes(8226)) / 1e8 * 1e3)
    assert limit["ms"] == pytest.approx(max(limit["replay_ms"], limit["copy_ms"]) + 31)
    assert limit["reached"] == pytest.approx(limit["ms"] / 35.6)


def test_the_long_tail_is_what_operations_do_not_explain(engines):
    shape = Shape.from_config(CONFIG)
    (line,) = bench_report.long_tail(list(cells_of(engines).values()), shape, SPEEDS)
    extra = round(0.1 * 31847) - round(0.05 * 31847)
    assert (line["length"], line["ratios"], line["measured_ms"]) == (31847, [0.05, 0.1], 40)
    assert line["unexplained_ms"] == pytest.approx(40 - shape.replay_flops(extra) / 1e10 * 1e3)


def test_the_verdict_names_every_cell_that_is_short(engines):
    (line,) = bench_report.verdicts(list(cells_of(engines).values()))
    # 2.11x at the shortest prefix is enough, 1.08x at the longest is not, 86.2 / 60 neither
    assert (line["passed"], line["short"]) == (False, ["31847 r=0.05: 1.44x", "31847 r=0.1: 1.08x"])
    engines["host"] = engine([hit(8226, 75.2 / 1.9), hit(31847, 86.2 / 1.6), sample("cold", 8226, 191.6)])
    (line,) = bench_report.verdicts(list(cells_of(engines).values()))
    assert line["short"] == ["8226 r=0.05: 1.90x"]


def test_a_shape_that_the_paper_lacks_gets_no_verdict(engines):
    cells = bench_report.cells(engines, "/some/model", None, None)
    assert cells and bench_report.verdicts(cells) == [] and all(cell["bound"] is None for cell in cells)


@pytest.mark.parametrize(("q", "expected"), [(0.5, 2), (0.99, 4), (0.25, 1), (0.26, 2), (0.0, 1)])
def test_quantile(q, expected):
    assert bench_report.quantile([4, 1, 3, 2], q) == expected


def test_bursts_count_every_request_and_whole_seconds():
    rows = bench_report.summarise_bursts([burst([10.0, 20.0]), burst([30.0, 40.0], rejected=None), burst([1.0])])
    assert [row["requests"] for row in rows] == [2, 1]
    assert (rows[0]["ttft_ms"]["n"], rows[0]["ttft_ms"]["p99"]) == (4, 40.0)
    assert (rows[0]["prompt_tokens_per_s"], rows[0]["new_tokens_per_s"]) == (400.0, 16.0)
    (row,) = bench_report.summarise_bursts([burst([1.0], rejected="a miss")])
    assert (row["ttft_ms"], row["new_tokens_per_s"], row["rejected"]) == (None, None, 1)


HEADER = {
    "tool": "bench_ttft",
    "shape": SHAPE,
    "commit": "abc",
    "machine": {"gpus": ["NVIDIA H200, 580, 143771 MiB"], "cpu": "x", "sglang": "0.5.17"},
    "sizes": {"suffix": 64, "lengths": [8226, 31847], "burst_length": 8226, "ratios": [0.05, 0.1]},
}


def test_the_document_and_its_print_out(engines):
    engines["host"]["error"] = "ended during bursts"
    report = bench_report.assemble(HEADER, CONFIG, SPEEDS, engines, 12.34)
    assert report["problems"] == ["host: ended during bursts"]
    text = bench_print.print_report(json.loads(json.dumps(report)))  # as it is read back
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| 8,226 | 200.0")]
    assert table and "190.0 (190.0–190.0), 0 cached" in table[0]
    assert any("35.6 (34.6–36.6) 5.38x" in cell for cell in table[0])
    assert "FAIL host, KV on the host: 1.5x" in text and "PROBLEM host: ended during bursts" in text
    assert "| 2 | different | host | host | 300 |" in text


def test_engines_of_another_call_are_taken_only_if_they_compare(engines, tmp_path):
    path = tmp_path / "stock.json"
    document = bench_report.assemble(HEADER | {"date": "d", "command": "c"}, CONFIG, SPEEDS, engines, 1.0)
    path.write_text(json.dumps(document))
    taken = bench_ttft.added([path], HEADER)
    assert taken["stock"]["sections"] == json.loads(path.read_text())["engines"]["stock"]["sections"]
    assert taken["host"]["added_from"] == {"date": "d", "commit": "abc", "command": "c"}
    report = bench_report.assemble(HEADER, CONFIG, SPEEDS, taken, 1.0)
    assert report["cells"] == document["cells"] and "another call, d, commit abc" in bench_print.print_report(report)
    for part, other in (("sizes", {"lengths": [1]}), ("machine", {"gpus": ["NVIDIA A100"]})):
        with pytest.raises(SystemExit, match="here"):
            bench_ttft.added([path], HEADER | {part: HEADER[part] | other})
    with pytest.raises(SystemExit, match="shape"):
        bench_ttft.added([path], HEADER | {"shape": "other"})


def test_documents_of_engines_that_ran_side_by_side_are_put_together(engines, tmp_path, monkeypatch, capsys):
    head = HEADER | {"sizes": bench_ttft.sizes_of(bench_ttft.parse(["--model-shape", "qwen3.5-4b"])).__dict__}
    paths, add = [], []
    for name, engine in engines.items():
        paths.append(tmp_path / f"{name}.json")
        document = bench_report.assemble(head | {"date": "d", "command": "c"}, CONFIG, SPEEDS, {name: engine}, 1.0)
        paths[-1].write_text(json.dumps(document))
        add += ["--add", str(paths[-1])]
    out = tmp_path / "all.json"
    given = ["--model-shape", head["shape"], "--engines", "none", *add, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_ttft", *given, "--tflops", "700", "--link-gbs", "50"])
    assert bench_ttft.main() == 0
    report = json.loads(out.read_text())
    assert set(report["engines"]) == set(engines) and report["machine"] == HEADER["machine"]
    config = bench_ttft.model_config(bench_ttft.model_folder(bench_ttft.parse(given)))
    together = bench_report.assemble(head, config, Speeds(700, 50, "given"), engines, 1.0)
    assert report["cells"] == json.loads(json.dumps(together["cells"]))


def test_a_document_without_tail_replay_still_prints(engines):
    del engines["host"]
    text = bench_print.print_report(bench_report.assemble(HEADER, CONFIG, None, engines, 1.0))
    assert "400.0 (400.0–400.0), 16384 cached" in text and "FAIL" not in text


def test_a_model_of_unknown_cost_is_named():
    report = bench_report.assemble(HEADER, {"layer_types": []}, SPEEDS, {}, 1.0)
    assert len(report["problems"]) == 1 and "no bounds" in report["problems"][0]


def test_the_plot_has_a_line_for_all_that_was_measured(engines):
    report = bench_report.assemble(HEADER, CONFIG, SPEEDS, engines, 1.0)
    lines = {label: points for label, _, points in plot_ttft.bench_lines(json.loads(json.dumps(report)))}
    assert [point[:2] for point in lines["full prefill, stock"]] == [(8226, 200), (31847, 786.4)]
    assert [point[0] for point in lines["H2D-OVL+skip r=5%, KV on the host"]] == [8226, 31847]
    assert {"full prefill, host", "prompt that leaves a cached one, stock"} <= set(lines)


def test_the_plot_is_written(engines, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(bench_report.assemble(HEADER, CONFIG, SPEEDS, engines, 1.0)))
    plot.main([str(path)])
    assert {file.name for file in tmp_path.iterdir()} >= {"table2-qwen3.5-4b.svg", "table2-qwen3.5-4b.png"}
