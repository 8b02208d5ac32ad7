"""Traces for hypothesis: prompts over a tree with few branches."""

from block_trace import Request, blocks
from hypothesis import strategies as st


@st.composite
def traces(draw, size: int, longest: int) -> list[Request]:
    """Prompts of at most `longest` blocks of `size` tokens, some with a short end; a block's key is its path, as in
    real traces."""
    requests = []
    for number in range(draw(st.integers(1, 12))):
        path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=longest))
        keys = [tuple(path[: i + 1]) for i in range(len(path))]
        length = size * len(path) - draw(st.integers(0, size - 1))
        requests.append(Request(float(number), blocks(keys, length, size, number), draw(st.integers(0, 5))))
    return requests
