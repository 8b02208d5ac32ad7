"""A prefill outside of the cache takes what it needs and gives all of it back, wherever it is interrupted."""

from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from checked_scheduler import KV_SLOTS, CheckedScheduler, serve
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_extend

from sglang_tailreplay import compat
from sglang_tailreplay.cold_prefill import ColdPrefill
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.radix.rows import NO_ROW

CHUNK = 8
TOKENS = [1] * 20 + [2] * 10  # four passes


class Idle:
    """An idle CheckedScheduler as ColdPrefill sees it; the logits of a pass are the number of its last prefix."""

    def __init__(self, server: CheckedScheduler, monkeypatch, requests_after: int | None):
        self.server, self.passes, self.requests_after = server, 0, requests_after
        self.chunked_prefill_size = CHUNK
        self.req_to_token_pool, self.tree_cache = server.request_pool, server.cache
        self.token_to_kv_pool_allocator = server.allocator
        self.model_config = SimpleNamespace(vocab_size=1 << 20)
        self.request_receiver = SimpleNamespace(recv_from_tokenizer=SimpleNamespace(poll=self.poll))
        monkeypatch.setattr(compat, "forward_stream_of", lambda scheduler: nullcontext())
        monkeypatch.setattr(compat, "extend_batch", self.extend)
        monkeypatch.setattr(compat, "forward", self.forward)

    def poll(self, milliseconds: int) -> bool:
        assert milliseconds == 0
        return self.requests_after is not None and self.passes >= self.requests_after

    def extend(self, scheduler, req):
        batch = self.server._sglang_batch([req])
        batch.prefix_lens, batch.extend_lens = [len(req.prefix_indices)], [req.extend_range.length]
        batch.extend_num_tokens = req.extend_range.length
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([req.extend_range.end])
        alloc_for_extend(batch)
        req.kv_committed_len = req.extend_range.end
        step = self.server.planner.plan_extend([req])
        assert step.rows.tolist() == [NO_ROW] * req.extend_range.length and not step.hits
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [req])
        assert (batch.mamba_clear_indices is not None) == (self.passes == 0), "one fresh state, and only one"
        return batch

    def forward(self, scheduler, batch):
        (req,) = batch.reqs
        begin, end = len(req.prefix_indices), req.extend_range.end
        path = self.server.prefixes.path(TOKENS)[:end]
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :end].numpy()
        self.server._write_kv(slots[begin:], path[begin:])
        assert self.server._read_kv(slots) == path, "attention would read another prefix's KV"
        self.passes += 1
        return torch.tensor([[float(path[-1])]])


@pytest.fixture(params=[True, False], ids=["full-tree", "empty-tree"])
def server(request):
    """An idle server that has the prompt in its cache, and little else free, or nothing cached at all."""
    made = CheckedScheduler(TailReplayConfig(ratio=0.5, min_tokens=4), rows=KV_SLOTS, overlap=False)
    if request.param:
        for first in (3, 4, 5):
            serve(made, [first] * 20)
        serve(made, TOKENS)
        assert made.allocator.available_size() < len(TOKENS)
    return made


def test_it_computes_every_token_and_leaves_the_server_as_it_was(server, monkeypatch):
    idle = Idle(server, monkeypatch, requests_after=None)
    prefill = ColdPrefill(idle)
    used = server.cache.rows.pool.used_rows
    assert prefill.fits(KV_SLOTS) and not prefill.fits(KV_SLOTS + 1)
    assert prefill(array("q", TOKENS)).tolist() == [server.prefixes.path(TOKENS)[-1]]
    assert idle.passes == 4
    server.check(evicts_kv=True)
    assert server.cache.rows.pool.used_rows <= used and not server.admissions
    cached = [prefix for prefix in server.prefixes.path(TOKENS) if prefix in server.truth]
    assert len(cached) == (len(TOKENS) if used else 0), "the newest tokens stay, and none is added"


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_it_gives_way_to_a_request_after_any_pass(server, monkeypatch, passes):
    idle = Idle(server, monkeypatch, requests_after=passes)
    assert ColdPrefill(idle)(array("q", TOKENS)) is None
    assert idle.passes == passes
    server.check(evicts_kv=True)


def test_a_pass_that_fails_leaves_nothing_behind(server, monkeypatch):
    idle = Idle(server, monkeypatch, requests_after=None)
    monkeypatch.setattr(compat, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ColdPrefill(idle)(array("q", TOKENS))
    server.check(evicts_kv=True)
