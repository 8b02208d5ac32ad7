"""Everything of Tail-Replay in one scheduler process, put together as SGLang's parts come into being.

    Scheduler.__init__  ->  activate          settings, planner
      pools allocated   ->  on_pools_ready    model found, row store, capture   (before CUDA graphs are captured)
      tree created      ->  create_cache      tree component, replay engine
      scheduler ready   ->  on_ready          metrics, self-check
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from sglang_tailreplay import adapters, compat, host_room, self_check
from sglang_tailreplay.anchor_store import AnchorStore
from sglang_tailreplay.capture import Capture, Sink
from sglang_tailreplay.cold_prefill import ColdPrefill
from sglang_tailreplay.config import TailReplayConfig
from sglang_tailreplay.cpu import stand_in_active
from sglang_tailreplay.cuda_streams.gates import Gate, make_gates
from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.mover import RowMover
from sglang_tailreplay.decay_store import DecayStore
from sglang_tailreplay.errors import TailReplayError
from sglang_tailreplay.gate_capture import GateCapture
from sglang_tailreplay.gdn import make_core
from sglang_tailreplay.metrics import Metrics, Stopwatch
from sglang_tailreplay.minute_log import MinuteLog
from sglang_tailreplay.pass_anchors import PassAnchors
from sglang_tailreplay.prefill_graphs import PrefillGraphs
from sglang_tailreplay.radix.rows import RowPool
from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.graphs import CudaGraphRecorder, GraphedEngine
from sglang_tailreplay.replayer import Replayer, slots_of
from sglang_tailreplay.residual import ResidualBound
from sglang_tailreplay.row_store import RowStore
from sglang_tailreplay.scheduling import REACH, Admission, Planner
from sglang_tailreplay.step import Hit, Sample, Step
from sglang_tailreplay.verification import Verifier

if TYPE_CHECKING:
    from sglang_tailreplay.radix.tree import TailReplayCache

logger = logging.getLogger(__name__)

# Tokens of one replay launch. Bounds what a long tail takes of the GPU memory that SGLang leaves for activations.
MAX_LAUNCH_TOKENS = 4096
POISON = "SGLANG_TAILREPLAY_POISON"  # "1": see Replayer; for tests on a GPU
IDLE_SECONDS = 0.5  # before the row accounting is checked


class Runtime:
    def __init__(self, config: TailReplayConfig, server_args: Any):
        self.config = config
        self.server_args = server_args
        self.planner = Planner(config, self._on_admission)
        self.capture: Capture | None = None
        self.decays: DecayStore | None = None
        self.gate_capture: GateCapture | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self._model_runner: Any = None
        self._model: adapters.HybridModel | None = None
        self._store: RowStore | None = None
        self._mover: RowMover | None = None
        self.anchors: AnchorStore | None = None
        self.pass_anchors: PassAnchors | None = None
        self._lanes: Lanes | None = None
        self._gates: tuple[Gate, ...] = ()
        self._replayer: Replayer | None = None
        self._metrics: Metrics | None = None
        self._minute = MinuteLog(logger.info)
        self._stopwatch: Stopwatch | None = None
        self._verifier: Verifier | None = None
        self._passes = 0  # forward passes so far
        self._checked_version = self._idle_version = -1  # RowPool.version: last checked, last seen idle
        self._idle_since = 0.0

    # ---- start ----

    def on_pools_ready(self, model_runner: Any) -> None:
        """KV and state pools exist, CUDA graphs do not yet."""
        self._model_runner = model_runner
        self._model = model = adapters.find_model(model_runner.model)
        device = torch.device(model_runner.device)
        report = self._on_seconds if self.server_args.enable_metrics else None
        self._stopwatch = Stopwatch(report, device.type == "cuda")
        if self.config.mode != "replay":
            self.prefill_graphs = self._make_prefill_graphs(device)
            return
        room = host_room.divide(self.config, self.server_args, model, model_runner)
        self._store = RowStore(room.shape, room.rows, room.kv_slots)
        self._lanes = Lanes.create(device, overlap=self.config.overlap)
        self._gates = make_gates(len(model.groups), self._lanes, device)
        self.prefill_graphs = self._make_prefill_graphs(device)
        self._mover = RowMover(self._store.rows, self._lanes, device, room.shape.codec)
        if room.anchors:
            self._make_anchors(room.anchors, device)
        self.capture = Capture(model.row_of_layer(), self._mover.write_out, compat.in_graph_capture)
        if device.type == "cuda":
            tokens = compat.largest_graph(model_runner)
            self.capture.allocate_graph_buffer(tokens, model.hidden_size, model_runner.dtype, device)
        if self.config.max_residual is not None:
            self._make_bound(device)

    def _make_bound(self, device: torch.device) -> None:
        config, (heads, layers) = self.config, host_room.value_heads(self._model_runner)
        self.decays = store = DecayStore(self._store.capacity, layers, heads, self._lanes, device)
        ids = [layer for group in self._model.groups for layer in group.layers]
        self.gate_capture = GateCapture(ids, store.write_out, store.decays.owners, compat.in_graph_capture)
        if device.type == "cuda":
            tokens = compat.largest_graph(self._model_runner)
            self.gate_capture.allocate_graph_buffer(tokens, heads, self._model_runner.dtype, device)
        reach = REACH * config.anchor_interval
        self.planner.bound = ResidualBound(store.decays, config.max_residual, config.max_tokens, reach, store.look)

    def _make_anchors(self, count: int, device: torch.device) -> None:
        pool = self._model_runner.req_to_token_pool
        store = AnchorStore(pool.mamba_pool, count, self._lanes, self.config.anchor_dtype)
        self.anchors = self.planner.saved = store
        if device.type == "cuda" or stand_in_active():
            self.pass_anchors = PassAnchors(make_core(self._model_runner), pool, self.anchors, device)
            # A pass that fits a graph runs in it, and only its end is saved: alone, each layer costs the host more.
            self.planner.keeps_beyond = compat.largest_prefill_graph(self._model_runner)

    def _make_prefill_graphs(self, device: torch.device) -> PrefillGraphs | None:
        tokens = compat.largest_prefill_graph(self._model_runner)
        if device.type != "cuda" or not self.config.graphs or tokens == 0:
            return None
        first_layers = [group.layers[0] for group in self._model.groups]
        return PrefillGraphs(
            make_core(self._model_runner),
            self._model_runner.req_to_token_pool,
            tokens,
            device,
            dict(zip(first_layers, self._gates, strict=False)),
        )

    def create_cache(self, ctx: Any) -> TailReplayCache:
        """The factory behind --radix-cache-backend tail_replay."""
        from sglang_tailreplay.radix.component import TailReplayComponent
        from sglang_tailreplay.radix.tree import TailReplayCache

        cache = compat.create_cache(ctx, TailReplayCache, TailReplayComponent)
        anchors = RowPool(self.anchors.capacity if self.anchors else 0)
        cache.rows.set_pool(RowPool(self._store.capacity if self._store else 0), anchors)
        self.planner.attach(cache)
        if ctx.enable_hierarchical_cache:
            from sglang_tailreplay import host_tier

            host_tier.attach(cache, ctx, self._model_runner.forward_stream)
        if self._store is not None:
            self._replayer = Replayer(
                self._make_engine(),
                self._model.embed,
                self._mover,
                self._lanes,
                self._stopwatch,
                self._gates,
                self.anchors,
                poison=os.environ.get(POISON) == "1",
            )
        return cache

    def _make_engine(self) -> ReplayEngine:
        layers = adapters.replay_layers(self._model, self._model_runner)
        device = torch.device(self._model_runner.device)
        if not (self.config.graphs and device.type == "cuda" and compat.uses_graphs(self._model_runner)):
            return ReplayEngine(layers, MAX_LAUNCH_TOKENS, self.config.skip, device)
        began, free = time.monotonic(), torch.cuda.mem_get_info(device)[0]
        engine = GraphedEngine(
            layers, MAX_LAUNCH_TOKENS, self.config.skip, device, self._model.hidden_size, self._model_runner.dtype
        )
        try:
            engine.capture(CudaGraphRecorder(device))
        except torch.OutOfMemoryError as error:
            raise TailReplayError(
                f"tail_replay: no GPU memory left for the graphs of the replay ({error}). "
                "Lower --mem-fraction-static, or give --tail-replay-no-graphs."
            ) from error
        taken = free - torch.cuda.mem_get_info(device)[0]
        logger.info(
            "tail_replay: captured the replay of %d launch sizes in %.1f s, %.2f GiB of GPU memory",
            len(engine.buckets), time.monotonic() - began, taken / 2**30,
        )  # fmt: skip
        self.planner.rounded = engine.rounded
        return engine

    def on_ready(self, scheduler: Any) -> None:
        if self.server_args.enable_metrics:
            self._metrics = Metrics(self.server_args.served_model_name)
        if self._replayer is not None and self.config.self_check:
            error = self_check.run(scheduler, self)
            logger.info("tail_replay: self-check passed: a replayed state is within %.1e of the prefill's", error)
        if self.config.verify_fraction > 0:
            self._verifier = self._make_verifier(scheduler)
        logger.info("tail_replay: ready, %s", self.config.to_json())
        self._minute = MinuteLog(logger.info)  # without the self-check's requests

    def _make_verifier(self, scheduler: Any) -> Verifier:
        prefill = ColdPrefill(scheduler)
        verifier = Verifier(self.config.verify_fraction, prefill, prefill.fits, self._metrics)
        self.planner.is_sampled = verifier.draws
        self.planner.cache.on_reset = verifier.forget
        return verifier

    # ---- every batch ----

    def forward_begins(self, step: Step | None, forward_batch: Any) -> None:
        self._passes += 1
        self.planner.pass_begins()
        if self.capture is not None:
            self.capture.begin(step.rows if step is not None else None)
        if self.gate_capture is not None:
            self.decays.look()
            self.gate_capture.begin(step)
        if self.anchors is not None:
            self.anchors.pass_begins()
        if step is not None and step.keeps:
            self.pass_anchors.begin(forward_batch, step.keeps)

    def sink_for(self, layer: int) -> Sink | None:
        return self.capture.sink_for(layer) if self.capture is not None else None

    def gates_made(self, layer: Any, a: torch.Tensor) -> None:
        """A GDN layer has its inputs; a [T', HV] goes into its decay."""
        if self.gate_capture is not None:
            self.gate_capture.receive(layer, a)

    def forward_abandoned(self) -> None:
        if self.capture is not None:
            self.capture.abandon()
        if self.gate_capture is not None:
            self.gate_capture.abandon()
        if self.pass_anchors is not None:
            self.pass_anchors.abandon()
        self.states_wanted()  # the slots may get other owners, behind the replay that still writes them

    def states_wanted(self, behind_gates: bool = False) -> None:
        """The pass is about to read recurrent states on the current stream; see Replayer.wait."""
        if self._replayer is not None:
            self._replayer.wait(behind_gates)

    def forward_ended(self, ran_graph: bool, step: Step | None) -> None:
        if self.capture is not None:
            self.capture.end(ran_graph)
        if self.gate_capture is not None:
            self.gate_capture.end(ran_graph)
        if self.pass_anchors is not None:
            self.pass_anchors.end()
        if step is not None and step.takes:
            self.anchors.take(step.takes)
        late = self._replayer is not None and self._replayer.pending
        assert not late, "a forward pass read recurrent states without waiting for their replay"
        self._stopwatch.harvest()

    def answered(self, samples: tuple[Sample, ...], logits: torch.Tensor | None) -> None:
        """A pass with hits to verify was launched; logits [requests, V] of it."""
        if self._verifier is not None:
            self._verifier.answered(samples, logits)

    def prefill_begins(self, model_runner: Any) -> None:
        """Before the replay and the layers of a prefill pass, whose KV from the host may still be on its way.

        Each full-attention layer waits for its own part. Without overlap, all of the pass waits for all of it.
        """
        if not self.config.overlap:
            compat.wait_for_loaded_kv(model_runner)

    def replay_ahead(self, hits: tuple[Hit, ...]) -> bool:
        """Start to rebuild the states of a batch's hits before SGLang prepares its pass, which takes the host
        milliseconds: the replay, not the host, is to be what a hit waits for. Clears their slots.

        False: not done. Without overlap the replay follows the KV that the pass loads from the host (prefill_begins).
        """
        if self._replayer is None or not self.config.overlap:
            return False
        with compat.stream_of_passes(self._model_runner):
            if self.anchors is not None:
                self.anchors.pass_begins()  # a slot may be that of a request whose last state is still to be saved
            slots = slots_of(hits)
            compat.clear_states(self._model_runner, slots)
            self._replay(hits, slots)
        return True

    def replay(self, hits: tuple[Hit, ...]) -> None:
        """Rebuild the states of a prefill batch's hits; their slots were cleared on the current stream."""
        if hits and self._replayer is not None:
            self._replay(hits, slots_of(hits))

    def _replay(self, hits: tuple[Hit, ...], slots: torch.Tensor) -> None:
        self.capture.flush()
        self._replayer.run(hits, slots)

    # ---- reporting ----

    def _on_admission(self, admission: Admission) -> None:
        self._minute.admitted(admission)
        self._look_at_the_minute()
        if self._metrics is not None:
            self._metrics.admitted(admission)
            self._report_stores()

    def _on_seconds(self, stage: str, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.seconds(stage, seconds)

    def _report_stores(self) -> None:
        rows = self.planner.cache.rows
        self._metrics.rows(rows.pool.used_rows, rows.pool.capacity)
        places = rows.anchors.pool
        self._metrics.anchors(places.used_rows, places.capacity, rows.anchors.evicted)

    def _look_at_the_minute(self) -> None:
        if self.planner.cache is not None:
            pool = self.planner.cache.rows.pool
            self._minute.look(pool.used_rows, pool.capacity)

    def on_idle(self) -> None:
        """Called over and over while the server is idle."""
        if self.gate_capture is not None:
            self.gate_capture.flush()
            self.decays.look()
        self._check_rows()
        self._look_at_the_minute()
        if self._verifier is not None:
            self._verifier.on_idle(self._passes)

    def memory_leaves(self) -> None:
        """Idle time goes on while the memory of weights or graphs is away: nothing that needs them may wait for it."""
        if self.gate_capture is not None:
            self.gate_capture.flush()  # reads A_log and dt_bias
        self.forget_hits()

    def forget_hits(self) -> None:
        """Those that wait for the online guard: a cold prefill would compare them with other weights."""
        if self._verifier is not None:
            self._verifier.forget()

    def _check_rows(self) -> None:
        """The row accounting must add up.

        The check takes milliseconds per million rows, which a client that sends one request after the other would
        notice. So it waits until nothing has changed for a while.
        """
        cache, now = self.planner.cache, time.monotonic()
        if cache is None or cache.rows.pool.version == self._checked_version:
            return
        if cache.rows.pool.version != self._idle_version:
            self._idle_version, self._idle_since = cache.rows.pool.version, now
        elif now - self._idle_since >= IDLE_SECONDS:
            cache.check_invariants()
            if self.decays is not None:
                self.decays.decays.check_invariants()
            self._checked_version = cache.rows.pool.version
            if self._metrics is not None:
                self._report_stores()


_runtime: Runtime | None = None


def activate(server_args: Any) -> Runtime:
    """Make this process's runtime; its settings come from the environment."""
    global _runtime
    _runtime = Runtime(TailReplayConfig.from_environment(), server_args)
    return _runtime


def current() -> Runtime:
    assert _runtime is not None, "Tail-Replay was not activated in this process"
    return _runtime
