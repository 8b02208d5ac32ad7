"""compat's own arithmetic, on stand-ins for SGLang's objects."""

from types import SimpleNamespace

import pytest

from sglang_tailreplay import compat


def model_runner(decode, prefill, requests):
    phases = {
        name: SimpleNamespace(backend="disabled" if sizes is None else "full", bs=sizes or [4096])
        for name, sizes in (("decode", decode), ("prefill", prefill))
    }
    return SimpleNamespace(
        server_args=SimpleNamespace(cuda_graph_config=SimpleNamespace(**phases)),
        req_to_token_pool=SimpleNamespace(size=requests),
    )


@pytest.mark.parametrize(
    "decode, prefill, requests, tokens",
    [
        ([1, 2, 8], [2, 4, 512], 8, 512),
        ([1, 2, 32], None, 8, 32),  # padded above the number of requests
        ([1, 2], None, 8, 8),
        (None, [2, 64], 8, 64),
        (None, None, 5, 5),
    ],
)
def test_the_buffer_of_the_capture_holds_the_largest_graph(decode, prefill, requests, tokens):
    assert compat.largest_graph(model_runner(decode, prefill, requests)) == tokens


def test_without_a_host_tier_there_is_no_load_to_wait_for():
    compat.wait_for_loaded_kv(SimpleNamespace(token_to_kv_pool=SimpleNamespace(layer_transfer_counter=None)))


def test_the_wait_for_a_load_is_for_its_last_layer():
    waits = []
    counter = SimpleNamespace(num_layers=32, wait_until=waits.append)
    compat.wait_for_loaded_kv(SimpleNamespace(token_to_kv_pool=SimpleNamespace(layer_transfer_counter=counter)))
    assert waits == [31]


def test_a_phase_without_sizes_counts_nothing():
    runner = model_runner([1, 4], [8], 2)
    runner.server_args.cuda_graph_config.prefill.bs = None
    assert compat.largest_graph(runner) == 4
