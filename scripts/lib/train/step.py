"""One training step: forward, backward, optimizer, limit of the gates. On a GPU a CUDA graph per shape of batch: the
model is so small that launching its kernels would take longer than running them."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

from train import tasks, vocabulary
from train.gates import limit_half_lives
from train.loader import Batch
from train.model import Hybrid

EAGER = 3  # first steps of a shape run without a graph, so that libraries have set themselves up
TEXT_WEIGHT = 0.1  # of the loss of all tokens beside that of answers
CLIP = 1.0


class Inputs(NamedTuple):
    ids: torch.Tensor  # [B, T]
    answers: torch.Tensor  # [B, T] bool
    tasks: torch.Tensor  # [B]


class Counts:
    """Sums since the last read, on the device: losses, and of each task the right and all answer tokens."""

    def __init__(self, device: torch.device):
        self.losses = torch.zeros(3, device=device)  # of answers, of all tokens, steps
        self.tokens = torch.zeros(2, len(tasks.TASKS), device=device)

    def read(self) -> dict:
        answers, text, steps = self.losses.tolist()
        right, total = self.tokens.tolist()
        accuracy = {name: right[i] / total[i] for i, name in enumerate(tasks.TASKS) if total[i]}
        self.losses.zero_()
        self.tokens.zero_()
        steps = max(1, steps)
        return {"loss": answers / steps, "text_loss": text / steps, "accuracy": accuracy}


class TrainingStep:
    """step(batch) trains on it; `counts[length]` collects what came out."""

    def __init__(self, model: Hybrid, rate: float, limit: float | None, graphs: bool):
        self.model, self.limit = model, limit
        self.device = next(model.parameters()).device
        self.graphs = graphs and self.device.type == "cuda"
        self.counts: dict[int, Counts] = {}
        self._rate = torch.tensor(rate, device=self.device)
        self._optimizer = self._make_optimizer()
        self._seen: dict[tuple[int, ...], int] = {}
        self._captured: dict[tuple[int, ...], tuple[Inputs, torch.cuda.CUDAGraph]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None
        self._stream = torch.cuda.Stream() if self.graphs else None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.05},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        on_gpu = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self._rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)

    def __call__(self, batch: Batch, rate: float) -> None:
        self._rate.fill_(rate)
        inputs = Inputs(*(torch.from_numpy(x).to(self.device) for x in batch))
        shape = tuple(batch.ids.shape)
        self.counts.setdefault(shape[1], Counts(self.device))
        if not self.graphs:
            self._run(inputs)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run_on_gpu(shape, inputs)
        self._stream.synchronize()

    def _run_on_gpu(self, shape: tuple[int, ...], inputs: Inputs) -> None:
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] > EAGER and shape not in self._captured and self.graphs:
            self._capture(shape, inputs)
        if shape not in self._captured:
            self._run(inputs)
            return
        static, graph = self._captured[shape]
        for kept, new in zip(static, inputs, strict=True):
            kept.copy_(new)
        graph.replay()

    def _capture(self, shape: tuple[int, ...], inputs: Inputs) -> None:
        """A step that cannot be captured is run as it is: slower, not different."""
        static, graph = Inputs(*(x.clone() for x in inputs)), torch.cuda.CUDAGraph()
        try:
            self._optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                self._run(static)
            self._captured[shape] = (static, graph)
        except RuntimeError as error:
            self.graphs = False
            self._captured.clear()
            print(f"no CUDA graphs: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        self._optimizer.zero_grad(set_to_none=True)

    def _run(self, inputs: Inputs) -> None:
        logits, wanted = self.model(inputs.ids.long())[:, :-1], inputs.ids[:, 1:].long()
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        marks = inputs.answers[:, 1:].float()
        answers, text = (each * marks).sum() / marks.sum(), each.mean()
        (answers + TEXT_WEIGHT * text).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.limit:
            limit_half_lives(self.model.recurrent, self.limit)
        with torch.no_grad():
            self._count(inputs, logits, wanted, torch.stack([answers, text, torch.ones_like(text)]))

    def _count(self, inputs: Inputs, logits: torch.Tensor, wanted: torch.Tensor, losses: torch.Tensor) -> None:
        counts = self.counts[inputs.ids.shape[1]]
        counts.losses.add_(losses)
        words = (inputs.answers[:, 1:] & (wanted != vocabulary.EOS)).float()
        right = ((logits.argmax(-1) == wanted) * words).sum(1)
        counts.tokens.index_add_(1, inputs.tasks.long(), torch.stack([right, words.sum(1)]))
