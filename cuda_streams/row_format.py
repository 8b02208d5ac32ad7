"""What a stored row takes. Integers only.

    auto       [d numbers in the model's dtype]
    fp8, int8  [d numbers of a byte][scale: float32][12 bytes unused]

The scale stands behind its row, so that one copy moves both; 16 bytes keep rows whole vectors of a GPU's copies.
"""

KINDS = ("auto", "fp8", "int8")
TRAILER = 16  # bytes behind a quantised row


def check_hidden(hidden: int, kind: str) -> None:
    """ValueError for a width that cannot be packed."""
    if kind != "auto" and hidden % TRAILER:
        raise ValueError(f"{kind} rows need a hidden size that is a multiple of {TRAILER}, got {hidden}")


def row_bytes(hidden: int, kind: str, itemsize: int) -> int:
    """Bytes of one row of `hidden` numbers; itemsize: of a number in the model's dtype."""
    return hidden * itemsize if kind == "auto" else hidden + TRAILER
