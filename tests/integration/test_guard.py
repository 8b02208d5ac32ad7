"""Every setting that Tail-Replay cannot have is refused by name, and the ones that it needs are set."""

import json
from types import SimpleNamespace

import pytest

from sglang_tailreplay import adapters, compat, guard
from sglang_tailreplay.config import ENVIRONMENT
from sglang_tailreplay.errors import Refused, TailReplayError

# What a user would have to set for each row of guard.REFUSALS to apply; each dict on its own.
REFUSED = {
    "--disable-radix-cache": [{"disable_radix_cache": True}],
    "--page-size": [{"page_size": 2}, {"page_size": 64}],
    "--speculative-algorithm": [{"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": "NGRAM"}],
    "--tensor-parallel-size": [{"tp_size": 2}],
    "--pipeline-parallel-size": [{"pp_size": 2}],
    "--enable-dp-attention": [{"enable_dp_attention": True}],
    "--expert-parallel-size": [{"ep_size": 2}],
    "--moe-a2a-backend": [{"moe_a2a_backend": "deepep"}],
    "--enable-eplb": [{"enable_eplb": True}],
    "--expert-distribution-recorder-mode": [{"expert_distribution_recorder_mode": "stat"}],
    "--enable-return-routed-experts": [{"enable_return_routed_experts": True}],
    "--dcp-size": [{"dcp_size": 2}],
    "--enable-prefill-cp": [{"enable_prefill_cp": True}],
    "--disaggregation-mode": [{"disaggregation_mode": "prefill"}, {"disaggregation_mode": "decode"}],
    "--enable-lora": [{"enable_lora": True}, {"lora_paths": ["a"]}],
    "--mamba-radix-cache-strategy": [
        {"mamba_radix_cache_strategy": "extra_buffer"},
        {"mamba_radix_cache_strategy": "extra_buffer_lazy"},
    ],
    "--enable-unified-memory": [{"enable_unified_memory": True}],
    "--enable-lmcache": [{"enable_lmcache": True}],
    "--enable-flexkv": [{"enable_flexkv": True}],
    "--hicache-storage-backend": [{"hicache_storage_backend": "file"}],
    "--enable-hisparse": [{"enable_hisparse": True}],
    "--enable-pdmux": [{"enable_pdmux": True}],
    "--enable-two-batch-overlap": [{"enable_two_batch_overlap": True}],
    "--enable-session-radix-cache": [{"enable_session_radix_cache": True}],
    "--enable-streaming-session": [{"enable_streaming_session": True}],
    "--data-parallel-size": [{"dp_size": 2}],
    "--cpu-offload-gb": [{"cpu_offload_gb": 4}],
    "--offload-group-size": [{"offload_group_size": 2}],
    "--enable-mis": [{"enable_mis": True}],
    "--is-embedding": [{"is_embedding": True}],
    "--use-ray": [{"use_ray": True}],
    "--rl-on-policy-target": [{"rl_on_policy_target": "fsdp"}],
    "--enable-int8-mamba-checkpoint": [{"enable_int8_mamba_checkpoint": True}],
    "--enable-linear-replayssm": [{"enable_linear_replayssm": True}, {"enable_linear_replayssm_spec": True}],
    "--enable-torch-compile": [{"enable_torch_compile": True}],
    "--enable-deterministic-inference": [{"enable_deterministic_inference": True}],
    "--dllm-algorithm": [{"dllm_algorithm": "LowConfidence"}],
    "--cuda-graph-backend-prefill": [
        {"cuda_graph_backend_prefill": "tc_piecewise"},
        {"cuda_graph_backend_prefill": "full"},
    ],
    "--cuda-graph-backend-decode": [{"cuda_graph_backend_decode": "breakable"}],
}


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def one_line(error) -> str:
    message = str(error.value)
    assert message.startswith("tail_replay: ") and "\n" not in message
    return message


@pytest.mark.parametrize("refusal", guard.REFUSALS, ids=lambda refusal: refusal.flag)
def test_every_refusal_names_its_flag_and_the_way_out(refusal, server_args):
    assert refusal.flag in REFUSED, "a new refusal needs a case here"
    for settings in REFUSED[refusal.flag]:
        args = server_args(**settings)
        assert [row for row in guard.REFUSALS if row.applies(args)] == [refusal]
        with pytest.raises(TailReplayError) as error:
            guard.prepare(args)
        message = one_line(error)
        assert refusal.flag in message and refusal.why in message
        assert "Leave this flag out" in message and "--tail-replay-mode off" in message


def test_all_refusals_are_told_the_first_one_as_the_message(server_args):
    with pytest.raises(Refused) as error:
        guard.prepare(server_args(page_size=16, enable_lora=True, tp_size=2))
    told = [problem.split(":")[1].strip() for problem in error.value.problems]
    assert told == ["--page-size", "--tensor-parallel-size", "--enable-lora"]
    assert one_line(error) == error.value.problems[0]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_host_tier_is_accepted_as_sglang_takes_it(policy, server_args):
    settings = {"enable_hierarchical_cache": True, "hicache_write_policy": policy, "hicache_size": 3}
    args = server_args(**settings)
    guard.prepare(args)
    assert settings.items() <= vars(args).items()


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, "page_first"),  # no host tier: nothing to lay out
        ({"enable_hierarchical_cache": True}, "layer_first"),
        ({"enable_hierarchical_cache": True, "hicache_io_backend": "direct"}, "page_first"),
        ({"enable_hierarchical_cache": True, "hicache_mem_layout": "page_first_direct"}, "page_first_direct"),
    ],
)
def test_kv_on_the_host_is_not_written_token_by_token(settings, layout, server_args):
    args = server_args(**settings)
    guard.prepare(args)
    assert args.hicache_mem_layout == layout


def test_no_case_is_left_over_and_no_flag_is_listed_twice():
    assert sorted(refusal.flag for refusal in guard.REFUSALS) == sorted(REFUSED)


def options_of_sglang() -> list[str]:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return sorted(parser._option_string_actions)


def test_the_flags_in_messages_are_sglangs(sandbox):
    named = {refusal.flag for refusal in guard.REFUSALS}
    named |= {"--model-path", "--attention-backend", "--max-running-requests"}
    assert named <= set(sandbox(options_of_sglang))


def test_the_defaults_pass_and_get_what_tail_replay_needs(server_args):
    args = server_args()
    guard.prepare(args)
    changed = {key: value for key, value in vars(args).items() if value != getattr(server_args(), key)}
    assert changed == {
        "mamba_radix_cache_strategy": "no_buffer",
        "page_size": 1,
        "cuda_graph_bs_prefill": list(guard.PREFILL_GRAPH_SIZES),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"mamba_radix_cache_strategy": "no_buffer"},
        {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "full"},
        {"cuda_graph_backend_prefill": "breakable", "cuda_graph_backend_decode": "disabled"},
        {"cuda_graph_max_bs_prefill": 512},
        {"cuda_graph_bs_prefill": [16, 64], "cuda_graph_max_bs_prefill": None},
        {"disable_overlap_schedule": True},
        {"enable_mixed_chunk": True, "chunked_prefill_size": 256},
        {"max_mamba_cache_size": 9, "max_running_requests": 4},
    ],
    ids=str,
)
def test_what_fits_is_left_to_the_user(settings, server_args):
    args = server_args(**settings)
    guard.prepare(args)
    for key, value in settings.items():
        assert getattr(args, key) == value


def test_only_the_backend_makes_it_active(server_args):
    assert guard.is_active(server_args())
    assert not guard.is_active(server_args(radix_cache_backend=None))
    assert not guard.is_active(server_args(radix_cache_backend="other"))


def test_mode_off_with_the_backend_is_refused(server_args, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, '{"mode": "off"}')
    with pytest.raises(TailReplayError) as error:
        guard.prepare(server_args())
    assert "without --radix-cache-backend tail_replay" in one_line(error)


def test_a_bad_environment_stops_before_sglang_does_anything(server_args, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, '{"ratio": 2}')
    with pytest.raises(TailReplayError, match="ratio=2"):
        guard.prepare(server_args())


def test_an_unknown_version_is_refused_with_the_ones_that_work(server_args, monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.4.1")
    with pytest.raises(TailReplayError) as error:
        guard.prepare(server_args())
    message = one_line(error)
    assert "SGLang 0.4.1" in message and "pip install sglang==" in message
    assert all(version in message for version in compat.VERSIONS)


# ---- after SGLang has resolved its arguments ----


@pytest.fixture
def resolved(server_args, monkeypatch):
    """resolved(architecture, view fields, prefill backend): arguments as guard.check sees them."""

    def make(architecture="Qwen3_5ForCausalLM", prefill="disabled", decode="full", **settled):
        args = server_args()
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture] if architecture else None))
        args.get_model_config = lambda: config
        graphs = {"prefill": SimpleNamespace(backend=prefill), "decode": SimpleNamespace(backend=decode)}
        args.cuda_graph_config = SimpleNamespace(**graphs)
        plain = {"disable_radix_cache": False, "enable_deterministic_inference": False}
        view = SimpleNamespace(**{"page_size": 1, "attention_backend": "triton", **plain, **settled})
        monkeypatch.setattr(compat, "resolved_view", lambda args: view)
        return args

    return make


@pytest.mark.parametrize("architecture", adapters.ARCHITECTURES)
@pytest.mark.parametrize("prefill", guard.PREFILL_GRAPHS)
def test_a_hybrid_with_good_settings_passes(architecture, prefill, resolved, caplog):
    args = resolved(architecture, prefill=prefill)
    guard.check(args)
    assert args.cuda_graph_config.prefill.backend == prefill and not caplog.text


@pytest.mark.parametrize("prefill", ["full", "tc_piecewise"])
def test_prefill_graphs_without_a_capture_are_turned_off(prefill, resolved, caplog):
    args = resolved(prefill=prefill)
    guard.check(args)
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert "prefill CUDA graphs are off" in caplog.text and repr(prefill) in caplog.text


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"architecture": "LlamaForCausalLM"}, "--model-path m: LlamaForCausalLM is no hybrid"),
        ({"architecture": None}, "--model-path m: a model without architecture is no hybrid"),
        ({"disable_radix_cache": True}, "led SGLang to --disable-radix-cache"),
        ({"enable_deterministic_inference": True}, "or --enable-deterministic-inference"),
        ({"page_size": 64}, "--page-size resolved to 64"),
        ({"page_size": None}, "--page-size resolved to None"),
        ({"attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
        ({"decode": "breakable"}, "--cuda-graph-config asks for decode backend 'breakable'"),
    ],
)
def test_what_sglang_resolved_is_checked(settings, said, resolved):
    with pytest.raises(TailReplayError) as error:
        guard.check(resolved(**settings))
    message = one_line(error)
    assert said in message and "--tail-replay-mode off" in message


@pytest.mark.parametrize("path", ["none", "dummy", "None"])
def test_without_a_model_there_is_nothing_to_check(path, server_args):
    guard.check(server_args(model_path=path))


# ---- SGLang's own ServerArgs ----

FIELDS = ("disable_overlap_schedule", "mamba_radix_cache_strategy", "page_size")


def resolve(model: str, cases: list[dict]) -> list[dict | str]:
    """For every case, FIELDS after SGLang has resolved its arguments with the plugin, or why it did not."""
    from sglang.srt.server_args import ServerArgs

    from sglang_tailreplay import plugin

    def outcome(settings: dict):
        chosen = {"model_path": model, "radix_cache_backend": "tail_replay", "attention_backend": "torch_native"}
        try:
            view = compat.resolved_view(ServerArgs(**{**chosen, "device": "cpu", **settings}))
        except TailReplayError as error:
            return str(error)
        return {field: getattr(view, field) for field in FIELDS}

    plugin.register()
    return [outcome(settings) for settings in cases]


def test_overlap_scheduling_stays_on_unless_the_user_turns_it_off(tiny_model, sandbox):
    needed = {"mamba_radix_cache_strategy": "no_buffer", "page_size": 1}
    cases = [{}, {"mamba_radix_cache_strategy": "no_buffer"}, {"page_size": 1}, {"disable_overlap_schedule": True}]
    found = sandbox(resolve, tiny_model, cases)
    assert found == [needed | {"disable_overlap_schedule": off} for off in (False, False, False, True)]


def test_sglang_passes_our_line_on(tiny_model, sandbox, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cases = {
        "--tensor-parallel-size: rows": {"tp_size": 2},
        "--page-size: reuse": {"page_size": 16},
        "LlamaForCausalLM is no hybrid model": {"model_path": str(tmp_path)},
    }
    found = sandbox(resolve, tiny_model, list(cases.values()))
    for said, part in zip(found, cases, strict=True):
        assert isinstance(said, str) and said.startswith("tail_replay: --") and part in said


def test_settings_come_from_the_environment(tiny_model, sandbox):
    (said,) = sandbox(resolve, tiny_model, [{}], SGLANG_TAILREPLAY='{"mode": "off"}')
    assert "mode 'off'" in said
