"""Stand-in for Triton on a machine without it: SGLang's kernel files import, and no kernel can be launched.

SGLang imports many files that define Triton kernels even when it runs on a CPU. What those files do with Triton while
they are imported: decorate functions (`jit`, `autotune`, `heuristics`), build `Config`s, name types (`tl.constexpr`),
subclass, and import submodules. Any name exists here; the launch of a kernel raises.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.6.0"
__path__: list[str] = []  # a package whose submodules come from _Submodules below


class _AnyName(type):
    """Metaclass of placeholders: a class, so it can be an annotation, a base, an `isinstance` target, or be called."""

    def __getattr__(cls, name: str) -> type:
        return _placeholder(f"{cls.__name__}.{name}", name)


def _placeholder(qualified: str, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(qualified)
    return _AnyName(name, (), {"__module__": __name__, "__init__": lambda self, *args, **kwargs: None})


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return _placeholder(f"{self.__name__}.{name}", name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every `triton.x.y` importable."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


class _Kernel:
    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid):
        raise RuntimeError(f"Triton kernel {self.__name__} cannot run here: Triton is not installed on this machine")


def jit(function=None, **options):
    return _Kernel(function) if function is not None else _Kernel


def autotune(*args, **kwargs):
    return lambda kernel: kernel


heuristics = autotune


class Config:
    def __init__(self, kwargs=None, **options):
        self.kwargs = kwargs or {}


def cdiv(a: int, b: int) -> int:
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _placeholder(f"triton.{name}", name)
    return importlib.import_module(f"triton.{name}")


sys.meta_path.append(_Submodules())
