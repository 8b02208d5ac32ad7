from ...missing import missing_class as __getattr__
from .. import InterpolationMode
from . import functional

__all__ = ["InterpolationMode", "__getattr__", "functional"]
