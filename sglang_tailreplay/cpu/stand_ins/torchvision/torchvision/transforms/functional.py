from ..missing import missing_class as __getattr__
from . import InterpolationMode

__all__ = ["InterpolationMode", "__getattr__"]
