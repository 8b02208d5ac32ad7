"""Replay as captured CUDA graphs: launching a kernel costs the host more than a short replay costs the GPU.

For every bucket of tokens and every group there is one graph. All graphs read the same input buffers and the same
segment table, so that any mix of hits whose tokens fit a bucket runs in it; tokens and segments that a launch leaves
unused are empty and write no state.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from sglang_tailreplay.replay.engine import ReplayEngine
from sglang_tailreplay.replay.groups import Group
from sglang_tailreplay.replay.layers import GdnLayer
from sglang_tailreplay.replay.segments import CHUNK, NO_SLOT
from sglang_tailreplay.replay.tail import Launch, Piece

Run = Callable[[], None]
Record = Callable[[Run], Run]


def buckets(max_tokens: int) -> tuple[int, ...]:
    """Sizes of graphs up to max_tokens, ascending: steps of 64 tokens up to 1024, of 128 up to 2048, of 256 beyond.

    Beyond 512 tokens a step is at most an eighth of the tail: that much rounding up costs at worst.
    """
    sizes, size = [], 0
    while size < max_tokens:
        size += CHUNK if size < 16 * CHUNK else 2 * CHUNK if size < 32 * CHUNK else 4 * CHUNK
        sizes.append(min(size, max_tokens))
    return tuple(sizes)


class GraphedEngine(ReplayEngine):
    """A ReplayEngine whose launches are graphs. `capture` must have run before the first replay."""

    def __init__(
        self,
        groups: Sequence[tuple[Group, Sequence[GdnLayer]]],
        max_tokens: int,
        skip_last_ffn: bool,
        device: torch.device | str,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """See ReplayEngine. `hidden_size` and `dtype` are those of rows."""
        super().__init__(groups, max_tokens, skip_last_ffn, device)
        self.buckets = buckets(max_tokens)
        # Neighbouring groups use different buffers, so that one is filled while the other is replayed.
        self._buffers = torch.zeros(3, max_tokens, hidden_size, dtype=dtype, device=device)
        self._graphs: dict[tuple[int, int], Run] = {}

    def bucket(self, tokens: int) -> int:
        """The smallest graph for that many tokens, at most max_tokens."""
        return self.buckets[bisect_left(self.buckets, tokens)]

    def rounded(self, tail: int) -> int:
        """The longest tail that costs no more than this one."""
        whole, rest = divmod(tail, self.max_tokens)
        return whole * self.max_tokens + (self.bucket(rest) if rest else 0)

    def buffer_of(self, number: int) -> int:
        """Which buffer a group's input is in. Of an odd number of groups the last must not share with the first."""
        odd = len(self.groups) % 2
        return 2 if odd and number == len(self.groups) - 1 else number % 2

    def input_buffer(self, number: int, launch: Launch) -> torch.Tensor:
        return self._buffers[self.buffer_of(number), : launch.tokens]

    @torch.no_grad()
    def capture(self, record: Record) -> None:
        """Make the graphs, the largest first, so that the smaller ones find memory in its pool."""
        nowhere = torch.full((1,), NO_SLOT, dtype=torch.int32, device=self._buffers.device)
        for tokens in reversed(self.buckets):
            # Not an empty launch: what kernels are tuned with should look like what they will run.
            self._table.load(Launch((Piece(0, 0, tokens, continues=False),)), nowhere)
            segments = self._table.whole(tokens)
            for number in range(len(self.groups)):
                h = self._buffers[self.buffer_of(number), :tokens]
                run = record(lambda number=number, h=h: self._replay_layers(number, h, segments))  # noqa: B023
                self._graphs[number, tokens] = run

    def _replay(self, number: int, launch: Launch, h: torch.Tensor) -> None:
        assert h.data_ptr() == self.input_buffer(number, launch).data_ptr(), "a graph reads its own buffer only"
        self._graphs[number, self.bucket(launch.tokens)]()


class CudaGraphRecorder:
    """Runs a body once, for compilers and tuners, and captures it the second time."""

    def __init__(self, device: torch.device) -> None:
        # A stream of its own: a GEMM's workspace belongs to the stream on which it was captured, and graphs of the
        # forward pass may run at the same time.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Run) -> Run:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph.replay
