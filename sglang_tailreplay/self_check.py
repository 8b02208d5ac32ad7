"""One replay against one prefill, on the loaded model, before the server takes requests.

A request of made-up tokens is prefilled and decoded through SGLang's own batches, so that every hook takes part; then
its state slot is cleared and all its rows are replayed into it, which must bring the same states back. A hook that sees
the wrong tensor, a row written to the wrong place, a kernel with another layout: each gives an error as large as the
state.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_tailreplay import compat
from sglang_tailreplay.anchor_codec import LOSS
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.pass_anchors import Keep
from sglang_tailreplay.radix.rows import NO_ROW, Anchor
from sglang_tailreplay.replay.segments import CHUNK
from sglang_tailreplay.step import Hit, Take

if TYPE_CHECKING:
    from sglang_tailreplay.runtime import Runtime

PROMPT_TOKENS, DECODED_TOKENS = 131, 3  # no multiple of a kernel's chunk, and two graph launches of a changing state
# Rounding moves a layer's states by about the dtype's epsilon times the layers before it; a wrong row moves them by 1.
QUANTISED_BOUND = 0.3  # rows of a byte per number: steps of up to 6 %, more beside an outlier; still no wrong row
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.no_grad()
def run(scheduler: Any, runtime: Runtime) -> float:
    """Largest relative error of a layer's recurrent state. TailReplayError if it is beyond rounding."""
    error = _check(scheduler, runtime, None)
    place = scheduler.tree_cache.rows.anchors.alloc() if runtime.pass_anchors is not None else None
    if place is not None:
        runtime.anchors.forget(place)
        try:
            _check(scheduler, runtime, place)
        finally:
            scheduler.tree_cache.rows.anchors.free({0: Anchor(place, 0)})
    return error


def _check(scheduler: Any, runtime: Runtime, place: int | None) -> float:
    """Prefill, decode, replay and compare; with a place for an anchor, the state after CHUNK tokens is saved there by
    the prefill and the replay begins at it."""
    from sglang.srt.mem_cache.common import release_kv_cache

    model_runner = scheduler.tp_worker.model_runner
    req = _request(scheduler)
    tokens = _prefill_and_decode(scheduler, req, place)
    try:
        rows, begin = req.tail_replay.ids.copy(), 0 if place is None else CHUNK
        if (rows == NO_ROW).any():
            raise TailReplayError("tail_replay: the row store is too small for a request; raise --tail-replay-host-gb")
        pool, slot = scheduler.req_to_token_pool.mamba_pool, int(req.mamba_pool_idx)
        states = pool.mamba_cache.temporal  # [layers, slots, HV, V, K]
        expected = states[:, slot].clone()
        pool.clear_slots(req.mamba_pool_idx.unsqueeze(0))
        runtime.replay((Hit(req.rid, req.mamba_pool_idx, rows[begin:], tokens[begin:], place),))
        runtime.states_wanted()
        error = _relative_error(states[:, slot], expected)
        if runtime.anchors is not None and place is None:
            _check_anchor(runtime, req, states[:, slot])
    finally:
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
    # SGLang keeps windows of the convolution in bfloat16 unless told otherwise, and decoding reads them.
    dtypes = (model_runner.dtype, states.dtype, *(conv.dtype for conv in pool.mamba_cache.conv))
    bound = max(BOUNDS[dtype] for dtype in dtypes)
    if place is not None:
        bound = max(bound, LOSS[runtime.anchors.dtype])
    if runtime.config.row_dtype != "auto":
        _check_quantised(error, runtime.config.row_dtype)
        return error
    if not error <= bound:  # NaN fails too
        way_out = "--tail-replay-mode off" if place is None else "no --tail-replay-anchor-interval"
        raise TailReplayError(
            f"tail_replay: self-check failed: a state replayed from token {begin} is off by {error:.2e} of its size, "
            f"rounding explains {bound:.0e}. Answers after a hit would be wrong; use {way_out} and report this."
        )
    return error


def _check_quantised(error: float, row_dtype: str) -> None:
    if not error <= QUANTISED_BOUND:
        raise TailReplayError(
            f"tail_replay: self-check failed: a state replayed from {row_dtype} rows is off by {error:.2e} of its "
            f"size, more than {QUANTISED_BOUND:g}. Outlier channels leave little of the others in int8 rows; use "
            "--tail-replay-row-dtype fp8 or auto, and report it if auto fails, too."
        )


def _check_anchor(runtime: Runtime, req: Any, states: torch.Tensor) -> None:
    """Save a state, restore it over something else, and find it as it was. states: [layers, HV, V, K] of the slot."""
    expected = states.clone()
    runtime.anchors.take((Take(req.mamba_pool_idx, 0),))  # no place is anybody's yet
    states.fill_(float("nan"))
    nothing = np.empty(0, dtype=np.int64)
    runtime.replay((Hit(req.rid, req.mamba_pool_idx, nothing, nothing, anchor=0),))
    runtime.states_wanted()
    if not _relative_error(states, expected) <= LOSS[runtime.anchors.dtype]:
        raise TailReplayError(
            "tail_replay: self-check failed: a state that was saved on the host came back changed. Leave "
            "--tail-replay-anchor-interval out and report this."
        )


def _request(scheduler: Any) -> Any:
    vocabulary = scheduler.model_config.vocab_size
    ids = array("q", np.random.default_rng(0).integers(1, vocabulary, PROMPT_TOKENS).tolist())
    return compat.internal_request(scheduler, "tail-replay-self-check", ids, DECODED_TOKENS)


def _prefill_and_decode(scheduler: Any, req: Any, place: int | None) -> np.ndarray:
    """Run req without the scheduler's loop; returns the tokens whose states its slot now holds."""
    req.init_next_round_input(scheduler.tree_cache)
    req.set_extend_range(0, PROMPT_TOKENS)
    batch = compat.extend_batch(scheduler, req)
    if place is not None:
        batch.tail_replay_step = dataclasses.replace(batch.tail_replay_step, keeps=(Keep(0, 1, place),), takes=())
    tokens = list(req.origin_input_ids)
    for _ in range(DECODED_TOKENS):
        next_token = compat.forward(scheduler, batch).argmax(-1)
        batch.prepare_for_decode()
        batch.input_ids = next_token.to(torch.int64)
        tokens.append(int(next_token[0]))
    compat.forward(scheduler, batch)
    return np.array(tokens, dtype=np.int64)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """States [layers, HV, V, K] both; largest ||found - expected|| / ||expected|| over layers."""
    reference = expected.float().flatten(1)
    difference = found.float().flatten(1) - reference
    return float((difference.norm(dim=1) / reference.norm(dim=1).clamp_min(1e-12)).max())
