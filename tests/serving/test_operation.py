"""What an operator and a client see: metrics, bad requests, aborts, flushes, a row store that is too small."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error

import pytest


def test_metrics_tell_cold_and_replayed_requests_apart(exact, prompt):
    ids = prompt(200)
    before = exact.metrics()
    exact.generate(ids, 2)
    exact.generate(ids[:150] + prompt(10), 2)
    after = exact.metrics()

    def rise(name):
        return after[f"sglang:tail_replay_{name}"] - before.get(f"sglang:tail_replay_{name}", 0)

    assert rise("requests_total") == 2
    assert rise("matched_tokens_total") == 150
    assert rise("replayed_tokens_total") == 150
    assert rise("seconds_count") >= 3  # fetch, replay, wait
    assert 0 < after["sglang:tail_replay_rows_used"] <= after["sglang:tail_replay_rows_capacity"] == 4096
    kinds = {s.labels["kind"] for s in exact.metric_samples() if s.name == "sglang:tail_replay_requests_total"}
    assert kinds >= {"cold", "replayed"}


def test_a_request_may_bring_its_own_ratio(exact, prompt):
    ids = prompt(400)
    exact.generate(ids, 1)
    answer = exact.generate(ids[:390] + prompt(9), 2, custom_params={"tail_replay_ratio": 0.25})
    assert (answer.cached_tokens, answer.replayed, answer.generation) == (390, 98, 1)


@pytest.mark.parametrize("ratio", [0, 1.5, "half", True])
def test_a_bad_ratio_is_a_client_error(exact, prompt, ratio):
    with pytest.raises(urllib.error.HTTPError) as error:
        exact.generate(prompt(20), 1, custom_params={"tail_replay_ratio": ratio})
    assert error.value.code == 400
    assert "tail_replay_ratio" in "".join(error.value.__notes__)
    assert exact.generate(prompt(20), 1).tokens


def test_generations_count_approximate_replays(exact, prompt):
    """What is built on an approximate state says so, and an exact replay adds nothing."""
    history = prompt(300)
    exact.generate(history, 1)
    for turn in range(1, 4):
        history = [*history[:-1], *prompt(60)]
        answer = exact.generate(history, 1, custom_params={"tail_replay_ratio": 0.3})
        assert answer.generation == turn
    assert exact.generate([*history[:-1], 3, 4], 1).generation == 3  # r = 1 adds none
    assert exact.generate([*history[:200], 3, 4], 1).generation == 0  # the part before the first replay


@pytest.mark.parametrize(
    "body",
    [
        *({"input_ids": ids} for ids in ([], [[]], [[3, 4], []], [3, -1], [3] * 5000)),
        *({"sampling_params": {}}, {}),
    ],
)
def test_malformed_requests_leave_the_server_whole(exact, prompt, body):
    with pytest.raises(urllib.error.HTTPError):
        exact.post("/generate", body)
    assert exact.generate(prompt(20), 2).tokens


def test_aborted_requests_give_everything_back(exact, cold, prompt):
    prefix = prompt(300)
    exact.generate(prefix, 1)
    threads = []
    for i in range(6):
        rid = f"abort-{i}"
        body = prefix + prompt(20)
        threads.append(threading.Thread(target=lambda b=body, r=rid: exact.generate(b, 400, rid=r)))
        threads[-1].start()
    time.sleep(0.4)
    for i in range(6):
        exact.abort(f"abort-{i}")
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    ids = prefix + prompt(11)
    answer = exact.generate(ids, 8)
    assert answer.cached_tokens == 300
    assert answer.tokens == cold.generate(ids, 8).tokens
    time.sleep(1.5)  # idle: the leak checks run
    exact.check_alive()


def test_flush_forgets_rows_with_the_tree(exact, prompt):
    ids = prompt(100)
    exact.generate(ids, 1)
    exact.flush()
    exact.generate(prompt(5), 1)  # an admission renews the gauge
    assert exact.metrics()["sglang:tail_replay_rows_used"] < 10  # the prompt and a step or two of decode
    assert exact.generate(ids, 1).cached_tokens == 0


def test_a_hit_without_rows_shrinks_and_heals(few_rows, cold, prompt):
    ids = prompt(600)
    few_rows.generate(ids, 1)
    few_rows.generate(prompt(700), 1)  # takes the rows of the first prompt; its KV stays
    before = few_rows.metrics().get("sglang:tail_replay_shrunk_hits_total", 0)
    fork = ids[:500] + prompt(20)
    shrunk = few_rows.generate(fork, 8)
    assert shrunk.cached_tokens < 500
    assert shrunk.tokens == cold.generate(fork, 8).tokens
    assert few_rows.metrics()["sglang:tail_replay_shrunk_hits_total"] == before + 1
    again = ids[:500] + prompt(20)
    healed = few_rows.generate(again, 8)
    assert healed.cached_tokens == 500
    assert healed.tokens == cold.generate(again, 8).tokens


def test_a_tail_grows_until_it_leaves_little_enough_out(few_rows, cold, prompt):
    """Of what lies 64 tokens back this model keeps 0.9 and more; the bound is 0.8."""
    few_rows.flush()
    ids = prompt(600)
    text = ids + few_rows.generate(ids, 60).tokens
    time.sleep(0.5)  # what the last decode steps kept arrives
    own = {"custom_params": {"tail_replay_ratio": 0.05}}
    residuals = []
    for boundary in (600, 400, 650):
        answer = few_rows.generate(text[:boundary] + prompt(9), 4, **own)
        residuals.append(answer.meta["cached_tokens_details"]["tail_replay_residual"])
        assert answer.cached_tokens >= boundary and answer.generation == 1
        assert 64 < answer.replayed < boundary and 0.5 < residuals[-1] <= 0.8
    # With what was generated in the tail, too, it grows to where a pass of the prefill cut a run.
    assert (answer.cached_tokens - answer.replayed) % 64 == 0
    told = {s.name: s.value for s in few_rows.metric_samples() if "residual" in s.name and "le" not in s.labels}
    assert told["sglang:tail_replay_residual_sum"] >= sum(residuals)
    short = ids[:100] + prompt(5)
    answer = few_rows.generate(short, 8, **own)
    assert (answer.cached_tokens, answer.replayed, answer.generation) == (
        100,
        100,
        0,
    )  # no tail is enough but all of it
    assert answer.meta["cached_tokens_details"]["tail_replay_residual"] == 0
    assert answer.tokens == cold.generate(short, 8).tokens


def test_openai_chat_reports_cached_tokens(exact):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the same question, " * 6}],
        "max_tokens": 4,
        "temperature": 0,
    }
    first = exact.post("/v1/chat/completions", body)
    second = exact.post("/v1/chat/completions", body)
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_hits_last_as_long_as_their_kv(exact, prompt):
    """Nothing but KV is kept on the GPU, so nothing else can be evicted first."""
    exact.flush()
    chains = [prompt(900) for _ in range(3)]
    for chain in chains:
        exact.generate(chain, 1)
    assert exact.generate(chains[0][:300] + prompt(20), 1).cached_tokens == 300
    assert [exact.generate(chain, 1).cached_tokens for chain in chains] == [899] * 3


ENGINE = """
import json, sys
from sglang_tailreplay import cpu
if __name__ == "__main__":
    cpu.activate()
    import sglang
    engine = sglang.Engine(
        model_path=sys.argv[1], radix_cache_backend="tail_replay", device="cpu", attention_backend="torch_native",
        cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled", max_total_tokens=2000,
        max_running_requests=4, mem_fraction_static=0.2, skip_tokenizer_init=True,
    )
    ask = lambda ids: engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0})
    prefix = list(range(10, 310))
    ask(prefix)
    print("ANSWER " + json.dumps(ask(prefix[:200] + [5, 6, 7])["meta_info"]["cached_tokens_details"]))
    engine.shutdown()
"""


def test_engine_takes_its_settings_from_the_environment(tiny_model, tmp_path):
    """Of these a hit on 200 tokens would leave out more than half of a state; it ends where all of it is replayed."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = {"max_tokens": 120, "max_residual": 0.5}
    env = {**os.environ, "SGLANG_TAILREPLAY": json.dumps(settings)}
    command = [sys.executable, script, tiny_model]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stdout + done.stderr
    details = json.loads(answers[0].removeprefix("ANSWER "))
    assert (details["tail_replay_matched"], details["tail_replay_replayed"]) == (120, 120)
    assert (details["tail_replay_start"], details["tail_replay_residual"]) == ("exact", 0)


def test_an_unsupported_setting_is_one_line_at_start(tiny_model, tmp_path):
    command = [sys.executable, "-m", "sglang_tailreplay.launch_server", "--model-path", tiny_model, "--page-size", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: tail_replay: --page-size: ") and "--tail-replay-mode off" in last
