import logging
import mmap

import pytest
import torch

from sglang_tailreplay.cuda_streams import pinned
from sglang_tailreplay.cuda_streams.pinned import PinningError, pinned_empty


class FakeDriver:
    def __init__(self, fail_at=None):
        self.registered, self.calls, self.fail_at = {}, 0, fail_at

    def register(self, pointer, size):
        self.calls += 1
        if self.calls == self.fail_at:
            return 2
        self.registered[pointer] = size
        return 0

    def unregister(self, pointer):
        del self.registered[pointer]
        return 0


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(pinned, "SLICE", 4 * mmap.PAGESIZE)
    monkeypatch.setattr(pinned, "LOG_FROM", 8 * mmap.PAGESIZE)


def test_slices_cover_whole_pages_once(small_slices):
    driver = FakeDriver()
    owner = pinned_empty((3, 5, 1000), torch.bfloat16, driver)
    tensor = owner.tensor
    assert tensor.shape == (3, 5, 1000) and tensor.dtype == torch.bfloat16
    pages = -(-tensor.nbytes // mmap.PAGESIZE)
    starts = sorted(driver.registered)
    assert starts[0] == tensor.data_ptr() and starts[0] % mmap.PAGESIZE == 0
    for start, following in zip(starts, starts[1:], strict=False):
        assert start + driver.registered[start] == following
    assert sum(driver.registered.values()) == pages * mmap.PAGESIZE
    tensor.fill_(2)
    assert tensor.sum() == 2 * tensor.numel()


def test_memory_that_the_driver_copies_from_is_one_slice(small_slices):
    driver = FakeDriver()
    owner = pinned_empty((10, 4096), torch.float32, driver, copied=True)
    assert driver.registered == {owner.tensor.data_ptr(): owner.tensor.nbytes}


def test_close_unregisters_once(small_slices):
    driver = FakeDriver()
    with pinned_empty((10, 4096), torch.float32, driver) as owner:
        assert len(driver.registered) == 10
        owner.close()
        assert driver.registered == {} and owner.tensor is None


def test_a_refusal_names_the_size_and_leaves_nothing(small_slices):
    driver = FakeDriver(fail_at=3)
    with pytest.raises(PinningError, match=r"cannot pin 0\.\d\d GiB .*CUDA error 2.*ask for less"):
        pinned_empty((4096, 4096), torch.float32, driver)
    assert driver.registered == {}


def test_more_than_the_address_space_is_refused():
    with pytest.raises(PinningError, match="GiB"):
        pinned_empty((1 << 50, 1 << 8), torch.bfloat16, FakeDriver())


def test_progress_is_logged_for_a_large_pool_only(small_slices, caplog):
    with caplog.at_level(logging.INFO, logger=pinned.__name__):
        pinned_empty((1, 4096), torch.float32, FakeDriver())
        assert caplog.records == []
        pinned_empty((2, 4096 * 5), torch.float32, FakeDriver())
    assert len(caplog.records) == 10 and "of host memory" in caplog.text


def test_without_cuda_it_is_a_plain_tensor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pinned_empty([2, 3, 8], torch.float32) as owner:
        assert owner.tensor.shape == (2, 3, 8)
    with pytest.raises(ValueError, match="empty"):
        pinned_empty((0, 3), torch.float32)
