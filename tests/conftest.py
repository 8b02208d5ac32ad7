"""Shared by all tests: the GPU marker and a torch whose uninitialised memory is visible."""

import os

import pytest
import torch
from hypothesis import settings

# A busy machine must not fail a test for its time, and a gate must not fail for a case that nobody has seen before: new
# cases are searched outside of CI.
settings.register_profile("gate", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("gate")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fills what torch.empty and its like return with NaN: a test sees every read of uninitialised floats."""

    def poisoned(allocate):
        def call(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
