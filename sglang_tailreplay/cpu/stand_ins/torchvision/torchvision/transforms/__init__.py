import enum

from ..missing import missing_class as __getattr__


class InterpolationMode(enum.Enum):
    """transformers builds a table from these when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from . import functional, v2  # noqa: E402  (both import InterpolationMode)

__all__ = ["InterpolationMode", "__getattr__", "functional", "v2"]
