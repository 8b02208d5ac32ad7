"""Training batches, made by processes beside the training."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train import tasks
from train.shapes import Stage

TRAINING = 1  # first number of every training seed; tasks for an evaluation draw from others
AHEAD = 4  # batches that a process may be ahead
PATIENCE = 120  # seconds


class Batch(NamedTuple):
    ids: np.ndarray  # [B, T]
    answers: np.ndarray  # [B, T] bool
    tasks: np.ndarray  # [B], indices into tasks.TASKS


def make_batch(rng: np.random.Generator, length: int, tokens: int) -> Batch:
    samples = [tasks.training_sample(rng, length) for _ in range(max(1, tokens // length))]
    ids, answers, kinds = zip(*samples, strict=True)
    return Batch(np.stack(ids).astype(np.int16), np.stack(answers), np.array(kinds, np.int8))


class Loader:
    """next() gives batches of the current stage, and for a while after a change still some of the stage before.
    Processes are asked in turn: the same seed, stages and changes give the same batches."""

    def __init__(self, stages: Sequence[Stage], seed: int, processes: int):
        context = multiprocessing.get_context("fork")  # before CUDA is touched; these processes only use numpy
        self._stages, self._stage, self._turn = stages, context.Value("i", 0), 0
        self._queues = [context.Queue(AHEAD) for _ in range(processes)]
        self._inline = None if processes else self._stream(seed, 0)
        targets = [(made, seed, number) for number, made in enumerate(self._queues)]
        self._processes = [context.Process(target=self._fill, args=target, daemon=True) for target in targets]
        for process in self._processes:
            process.start()

    def set_stage(self, stage: int) -> None:
        self._stage.value = stage

    def next(self) -> Batch:
        if self._inline:
            return next(self._inline)
        self._turn += 1
        try:
            return self._queues[self._turn % len(self._queues)].get(timeout=PATIENCE)
        except queue.Empty:
            raise RuntimeError(
                f"no texts for {PATIENCE} s, a process that makes them ended: try --processes 0"
            ) from None

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # it only makes numbers, and a fork of threads may never get to a softer signal
        for process in self._processes:
            process.join()

    def _fill(self, made: multiprocessing.Queue, seed: int, number: int) -> None:
        parent = os.getppid()
        for batch in self._stream(seed, number):
            if os.getppid() != parent:
                return
            made.put(batch)

    def _stream(self, seed: int, number: int):
        rng, count = np.random.default_rng([TRAINING, seed, number]), number
        while True:
            stage = self._stages[self._stage.value]
            yield make_batch(rng, stage.lengths[count % len(stage.lengths)], stage.tokens)
            count += 1
