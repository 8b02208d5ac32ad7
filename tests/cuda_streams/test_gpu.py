"""Kernels, lanes and pinned memory on a GPU. Needs torch, triton and pytest only."""

import time

import pytest
import torch

from sglang_tailreplay.cuda_streams.gates import make_gates
from sglang_tailreplay.cuda_streams.lanes import Lanes
from sglang_tailreplay.cuda_streams.mover import RowMover
from sglang_tailreplay.cuda_streams.pinned import pinned_empty
from sglang_tailreplay.cuda_streams.row_codec import MOVED_AS, make_codec
from sglang_tailreplay.cuda_streams.rows import gather_rows, scatter_groups, scatter_rows

pytestmark = pytest.mark.gpu

GIGA = 1e9


@pytest.fixture
def pool():
    """pool(G, R, H, dtype): pinned rows that are released after the test."""
    owners = []

    def make(*shape, dtype=torch.bfloat16):
        owners.append(pinned_empty(shape, dtype))
        return owners[-1].tensor

    yield make
    for owner in owners:
        owner.close()


def random_ids(T, R, seed=0):
    return torch.randperm(R, generator=torch.Generator().manual_seed(seed))[:T]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("H", [8, 64, 1288, 2560, 3840, 5120])  # 1288: a packed row of 2560, as int16
@pytest.mark.parametrize("T", [1, 5, 64, 1000])
def test_kernels_move_what_indexing_moves(pool, T, H, dtype):
    G, R = 2, 1500
    rows = pool(G, R, H, dtype=dtype)
    assert rows.is_pinned()
    rows.fill_(-1)
    ids = random_ids(T, R)
    ids[::3] = torch.where(torch.arange(len(ids[::3])) % 2 == 0, ids[::3], -1)
    source = torch.randn(G, T, H, device="cuda").to(dtype)
    expected = torch.full((G, R, H), -1, dtype=dtype)

    scatter_rows(source[1], rows, 1, ids.cuda())
    torch.cuda.synchronize()
    expected[1, ids[ids >= 0]] = source[1, ids.cuda() >= 0].cpu()
    assert torch.equal(rows, expected)

    scatter_groups(source, rows, ids.cuda())
    torch.cuda.synchronize()
    expected[0, ids[ids >= 0]] = source[0, ids.cuda() >= 0].cpu()
    assert torch.equal(rows, expected)

    wanted = random_ids(T, R, seed=1)
    out = torch.full((T, H), float("nan"), dtype=dtype, device="cuda")
    gather_rows(rows, 1, wanted.cuda(), out)
    assert torch.equal(out.cpu(), expected[1, wanted])


def test_offsets_beyond_2_to_the_31(pool):
    H = 5120
    rows = pool(2, (1 << 31) // H + 100, H)
    ids = torch.tensor([rows.shape[1] - 1, 0, rows.shape[1] - 50])
    source = torch.randn(2, 3, H, device="cuda", dtype=torch.bfloat16)
    scatter_groups(source, rows, ids.cuda())
    out = torch.empty_like(source)
    for group in range(2):
        gather_rows(rows, group, ids.cuda(), out[group])
    assert torch.equal(out, source) and torch.equal(rows[1, ids], source[1].cpu())


def test_lanes_order_rows_behind_a_slow_forward_pass(pool):
    """Each round the forward stream is still busy when its rows are handed over, fetched and used."""
    G, R, H, T = 3, 4096, 2560, 512
    lanes = Lanes.create("cuda")
    mover = RowMover(pool(G, R, H), lanes, "cuda")
    results, expected = [], torch.zeros(G, R, H)
    for step in range(40):
        torch.cuda._sleep(2_000_000)  # about a millisecond
        source = torch.empty(G, T, H, dtype=torch.bfloat16, device="cuda").fill_(step)
        ids = random_ids(T, R, seed=step)
        mover.write_out(None, source, ids)
        del source  # the copy lane keeps it
        expected[:, ids] = step
        for group, fetched in enumerate(mover.fetch(range(G), ids.flip(0))):
            with lanes.replay.after(fetched.ready):
                results.append((fetched.tensor.float().sum(), expected[group, ids].sum()))
        del fetched
        torch.empty(G, T, H, dtype=torch.bfloat16, device="cuda").fill_(-1)  # would reuse a block freed too early
    lanes.current_waits(lanes.replay.record("replayed"))
    for actual, wanted in results:
        assert actual.item() == wanted.item()
    written = mover.write_out(0, torch.zeros(1, H, dtype=torch.bfloat16, device="cuda"), [7])
    written.synchronize()
    assert (mover.rows[0, 7] == 0).all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_packed_rows_come_back_as_packing_makes_them(pool, kind):
    codec = make_codec(kind, 2560, torch.bfloat16)
    mover = RowMover(pool(2, 600, codec.width, dtype=MOVED_AS), Lanes.create("cuda"), "cuda", codec)
    source = torch.randn(2, 500, 2560, device="cuda", dtype=torch.bfloat16)
    ids = random_ids(500, 600)
    mover.write_out(None, source, ids)
    expected = torch.empty_like(source)
    codec.unpack(codec.pack(source), expected)
    for group, fetched in enumerate(mover.fetch([0, 1], ids)):
        mover.lanes.current_waits(fetched.ready)
        assert torch.equal(fetched.tensor, expected[group])
    assert ((expected - source).float().norm() / source.float().norm()).item() < 0.05


def test_ids_on_the_device(pool):
    mover = RowMover(pool(1, 64, 64), Lanes.create("cuda"), "cuda")
    source = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([9, -1, 63, 0], device="cuda")
    mover.write_out(0, source, ids)
    (fetched,) = mover.fetch([0], ids[[0, 2, 3]], after=[mover.lanes.mark_current("ids made")])
    mover.lanes.current_waits(fetched.ready)
    assert torch.equal(fetched.tensor, source[[0, 2, 3]])


def test_unpinned_rows_are_refused():
    with pytest.raises(ValueError, match="pinned"):
        RowMover(torch.zeros(1, 2, 8), Lanes.create("cuda"), "cuda")


def test_closed_memory_is_no_longer_pinned():
    owner = pinned_empty((1 << 20,), torch.bfloat16)
    tensor = owner.tensor
    assert tensor.is_pinned()
    owner.close()
    assert not tensor.is_pinned()


@pytest.mark.parametrize("H", [2560, 5120])
def test_throughput(pool, H, capsys):
    """Prints GB/s. The bound only catches a transfer that is not vectorised or not in flight; machines differ."""
    T, R = 8192, 65_536
    rows = pool(1, R, H)
    rows.fill_(1)
    ids = random_ids(T, R).cuda()
    tokens = torch.ones(T, H, dtype=torch.bfloat16, device="cuda")
    plain = torch.ones(T, H, dtype=torch.bfloat16).pin_memory()
    speeds = {
        "gather H2D": speed(lambda: gather_rows(rows, 0, ids, tokens), tokens.nbytes),
        "scatter D2H": speed(lambda: scatter_rows(tokens, rows, 0, ids), tokens.nbytes),
        "memcpy H2D": speed(lambda: tokens.copy_(plain, non_blocking=True), tokens.nbytes),
        "memcpy D2H": speed(lambda: plain.copy_(tokens, non_blocking=True), tokens.nbytes),
    }
    with capsys.disabled():
        print(f"\nH={H} T={T}: " + ", ".join(f"{name} {value:.1f} GB/s" for name, value in speeds.items()))
    assert speeds["gather H2D"] > 0.4 * speeds["memcpy H2D"]
    assert speeds["scatter D2H"] > 0.4 * speeds["memcpy D2H"]


def speed(move, size, rounds=10):
    """GB/s, the median of `rounds`."""
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        move()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return size / GIGA / sorted(times[2:])[rounds // 2]


class TestGates:
    """What a prefill graph relies on: it waits for the last opening before its launch, and for no later one."""

    def captured(self, gate, value):
        """A graph that waits at the gate and then copies `value` to `seen`."""
        seen, stream = torch.zeros_like(value), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            gate.wait()
            seen.copy_(value)
            graph.capture_end()
        return graph, seen

    def test_a_launch_waits_for_the_opening_before_it(self):
        lanes = Lanes.create("cuda")
        (gate,) = make_gates(1, lanes, torch.device("cuda"))
        value = torch.zeros(8, device="cuda")
        graph, seen = self.captured(gate, value)
        for number in range(1, 4):
            with lanes.replay.after():
                torch.cuda._sleep(50_000_000)  # some 30 ms
                value.fill_(number)
            gate.open(lanes.replay)
            graph.replay()
            torch.cuda.synchronize()
            assert (seen == number).all(), "the graph ran past the closed gate"

    def test_an_opening_after_the_launch_is_not_waited_for(self):
        """It may itself wait for the graph: the next replay is asked for while a pass is still running."""
        lanes = Lanes.create("cuda")
        (gate,) = make_gates(1, lanes, torch.device("cuda"))
        value = torch.ones(8, device="cuda")
        graph, seen = self.captured(gate, value)
        torch.cuda._sleep(50_000_000)  # keeps the graph waiting on its own stream
        graph.replay()
        launched = lanes.mark_current("graph launched")
        with lanes.replay.after(launched):
            value.fill_(2)
        gate.open(lanes.replay)
        deadline = time.monotonic() + 10
        done = lanes.replay.record("value changed")
        while not done.query():
            assert time.monotonic() < deadline, "the graph waits for what waits for the graph"
        assert (seen == 1).all()
