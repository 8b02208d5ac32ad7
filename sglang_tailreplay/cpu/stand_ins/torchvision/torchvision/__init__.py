"""Stand-in for torchvision: SGLang and transformers import names from it for image models; text models call none."""

from . import io, transforms

__version__ = "0.28.0"
__all__ = ["io", "transforms"]
