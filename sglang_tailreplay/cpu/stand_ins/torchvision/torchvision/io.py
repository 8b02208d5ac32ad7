from .missing import missing_class as __getattr__

__all__ = ["__getattr__"]
