"""The online guard without a server: which hits are kept, when they are computed again, what is compared."""

import logging
import math
from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_tailreplay import compat
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.step import Sample
from sglang_tailreplay.verification import (
    IDLE_SECONDS,
    KEPT,
    MOST_ATTEMPTS,
    MOST_KL,
    Verifier,
    compare,
)

V = 11


def logits(seed: int) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed))


# ---- comparison ----


def test_equal_distributions_agree_whatever_their_offset():
    agreement = compare(logits(1), logits(1) + 5)
    assert agreement.first_token and agreement.kl == pytest.approx(0, abs=1e-6)


def test_divergence_is_from_cold_to_hit():
    cold, hit = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.25, 0.75]).log()
    agreement = compare(cold, hit)
    assert not agreement.first_token
    assert agreement.kl == pytest.approx(0.75 * math.log(3) - 0.25 * math.log(3), rel=1e-5)
    skewed = torch.tensor([0.5, 0.5]).log()
    assert compare(cold, skewed).kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)
    assert compare(skewed, cold).kl == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), rel=1e-5)


def test_a_vocabulary_padded_with_impossible_tokens():
    cold, hit = (torch.cat([logits(seed), torch.tensor([-torch.inf])]) for seed in (1, 2))
    assert compare(cold, hit).kl == pytest.approx(compare(logits(1), logits(2)).kl)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_as_wrong_as_can_be(bad):
    hit = logits(1)
    hit[3] = bad
    assert compare(logits(1), hit).kl == MOST_KL


# ---- keeping hits, and computing them again ----


class Server:
    """A verifier, its clock, and the cold prefills that it asks for: of tokens [n] they give logits(n)."""

    def __init__(self, fraction=1.0, room=1000):
        self.now, self.passes, self.busy = 0.0, 0, False
        self.prefilled, self.results, self.lost = [], [], 0
        self.verifier = Verifier(fraction, self.prefill, lambda n: n <= room, self, clock=lambda: self.now)

    def prefill(self, tokens):
        if self.busy:
            return None
        self.prefilled.append(tokens[0])
        return logits(tokens[0])

    def verified(self, agreement):
        self.results.append(agreement)

    def unverified(self, hits):
        self.lost += hits

    def hit(self, n, says=None, length=1):
        """One pass with a hit at index 1 of two requests."""
        self.passes += 1
        answers = torch.stack([logits(99), logits(n if says is None else says)])
        self.verifier.answered((Sample(1, array("q", [n] * length)),), answers)
        answers.fill_(math.nan)  # the next pass writes there

    def idle(self, seconds):
        self.verifier.on_idle(self.passes)
        self.now += seconds
        self.verifier.on_idle(self.passes)


def test_hits_are_compared_in_idle_time_oldest_first(caplog):
    server = Server()
    server.hit(1)
    server.hit(2, says=3)
    with caplog.at_level(logging.INFO):
        server.idle(IDLE_SECONDS)
    assert server.prefilled == [1, 2] and server.lost == 0
    first, second = server.results
    assert first.first_token and first.kl == pytest.approx(0, abs=1e-6)
    assert second == compare(logits(2), logits(3)) and second.kl > 0.1
    assert "verified 2 hits so far: the first token agrees in 1" in caplog.text


def test_a_short_pause_between_requests_is_not_used():
    server = Server()
    for n in range(1, 5):
        server.hit(n)
        server.idle(IDLE_SECONDS * 0.9)
    assert server.prefilled == []
    server.idle(IDLE_SECONDS * 0.2)
    assert server.prefilled == [1, 2, 3, 4]


def test_no_more_are_kept_than_there_is_room_for_and_the_newest_stay():
    server = Server()
    for n in range(1, KEPT + 4):
        server.hit(n)
    assert server.lost == 3
    server.idle(IDLE_SECONDS)
    assert server.prefilled == list(range(4, KEPT + 4)) and len(server.results) == KEPT


def test_a_prefill_that_gave_way_is_tried_again_and_given_up_in_the_end():
    server = Server()
    server.hit(1)
    server.busy = True
    server.idle(IDLE_SECONDS)
    server.busy = False
    server.idle(IDLE_SECONDS)
    assert server.prefilled == [1]
    server.hit(2)
    server.busy = True
    for _ in range(MOST_ATTEMPTS):
        server.idle(IDLE_SECONDS)
    assert server.prefilled == [1] and server.lost == 1
    server.busy = False
    server.idle(IDLE_SECONDS)
    assert server.prefilled == [1]


def test_a_flush_forgets():
    server = Server()
    server.hit(1)
    server.verifier.forget()
    server.verifier.forget()
    server.idle(IDLE_SECONDS)
    assert server.prefilled == [] and server.lost == 1


def test_a_hit_longer_than_the_memory_is_given_up():
    server = Server(room=5)
    server.hit(1, length=6)
    server.hit(2, length=5)
    server.idle(IDLE_SECONDS)
    assert server.prefilled == [2] and server.lost == 1


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_the_fraction_is_a_fraction(fraction):
    verifier = Server(fraction).verifier
    drawn = sum(verifier.draws() for _ in range(4000))
    assert drawn == pytest.approx(4000 * fraction, abs=120 if 0 < fraction < 1 else 0)


def test_a_model_that_gives_no_logits():
    server = Server()
    server.verifier.answered((Sample(0, array("q", [1])),), None)
    server.idle(IDLE_SECONDS)
    assert server.results == [] and server.prefilled == []


def test_a_server_that_does_not_tell_whether_requests_wait_is_refused():
    scheduler = SimpleNamespace(request_receiver=SimpleNamespace(recv_from_tokenizer=object()))
    with pytest.raises(TailReplayError, match="--tail-replay-verify-fraction.*SGLANG_RUST_SERVER"):
        compat.request_probe(scheduler)
