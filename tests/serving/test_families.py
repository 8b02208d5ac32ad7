"""Hits on every model family: with r = 1 and float32, the answers are transformers' own."""

from __future__ import annotations

import pytest
import torch

from sglang_tailreplay.tiny_model import write_tiny_model

NEW = 10
# qwen3_next differs from these in the layout of its projections, which tests/integration/test_families.py covers.
FAMILIES = ["olmo_hybrid", "qwen3_5_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return write_tiny_model(path, decay="slow", dtype=torch.float32, family=request.param)


@pytest.fixture(scope="module")
def reference(checkpoint):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(checkpoint, serve_tiny):
    """Its start runs the self-check: a prefill and decode steps, replayed from the rows that the hooks captured."""
    with serve_tiny("--tail-replay-ratio", "1.0", model=checkpoint) as server:
        yield server


@torch.no_grad()
def follows(reference, ids, tokens) -> bool:
    logits = reference(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    return logits.argmax(-1).tolist() == tokens


def test_hits_at_any_token(server, reference, prompt):
    """In a long prompt that was prefilled in three pieces, at a piece's end, and inside an answer."""
    ids = prompt(600)
    answer = server.generate(ids, NEW)
    assert answer.cached_tokens == 0 and follows(reference, ids, answer.tokens)
    whole = [*ids, *answer.tokens]
    for boundary in (1, 65, 256, 257, 599, 604):
        branch = [*whole[:boundary], whole[boundary] ^ 1 or 2, *prompt(20)]
        found = server.generate(branch, NEW)
        assert (found.cached_tokens, found.matched, found.replayed) == (boundary, boundary, boundary)
        assert follows(reference, branch, found.tokens)


def test_a_batch_of_hits(server, reference, prompt):
    ids = prompt(300)
    server.generate(ids, 1)
    branches = [[*ids[: 60 * i + 30], *prompt(8 + i)] for i in range(4)]
    answers = server.generate_many(branches, NEW, concurrency=4)
    assert [answer.cached_tokens for answer in answers] == [30, 90, 150, 210]
    assert all(follows(reference, *pair) for pair in zip(branches, [a.tokens for a in answers], strict=True))
