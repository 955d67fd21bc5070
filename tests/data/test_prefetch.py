"""One batch ahead on the training device: same batches, same position, clean end."""

import multiprocessing
from itertools import islice

import pytest
import torch

from data import build_loader
from data.prefetch import prefetch
from options.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture
def train(pair_folders, loader_options):
    """train(**changed): options of a train set of six pictures in batches of four."""

    def make(**changed):
        arguments = {"dataroot_gt": pair_folders.gt, "gt_size": 32, "use_hflip": True, "use_rot": True}
        return loader_options("DownsampleImageDataset", arguments, **changed)

    return make


def ahead(options, device=CPU, **settings):
    """A loader that prefetches to a device, whatever the machine has."""
    loader = build_loader(options, **settings)
    loader._device = device
    return loader


def numbers(count, taken):
    for number in range(count):
        taken.append(number)
        yield {"lq": torch.full((2,), number), "name": [str(number)]}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_position_are_those_of_the_plain_loader(train, workers):
    plain, early = build_loader(train(num_worker_per_gpu=workers)), ahead(train(num_worker_per_gpu=workers))
    for one, two in islice(zip(plain, early, strict=True), 5):
        assert one["name"] == two["name"]
        assert one["lq"].equal(two["lq"])
        assert one["gt"].equal(two["gt"])
        assert early.position == plain.position


def test_a_run_resumed_at_the_position_sees_what_was_prepared_but_not_handed_out(train):
    unbroken = list(islice(build_loader(train()), 5))
    first = ahead(train())
    list(islice(first, 2))
    resumed = list(islice(ahead(train(), start=first.position), 3))
    assert all(one["gt"].equal(two["gt"]) for one, two in zip(unbroken[2:], resumed, strict=True))


def test_exactly_one_batch_is_fetched_ahead():
    taken = []
    stream = prefetch(numbers(9, taken), CPU)
    for number in range(4):
        assert next(stream)["lq"][0] == number
        assert taken == list(range(number + 2))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_stream_that_ends_ends_once_with_its_last_batch(count):
    found = list(prefetch(numbers(count, []), CPU))
    assert [batch["name"] for batch in found] == [[str(number)] for number in range(count)]


def test_an_error_comes_when_its_batch_is_due():
    def broken():
        yield from numbers(2, [])
        raise DataError("b.png is bad")

    stream = prefetch(broken(), CPU)
    assert [next(stream)["name"] for _ in range(2)] == [["0"], ["1"]]
    with pytest.raises(DataError, match=r"b\.png is bad"):
        next(stream)


def test_closing_ends_the_workers(train):
    stream = iter(ahead(train(num_worker_per_gpu=2)))
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("device", [None, CPU], ids=str)
def test_without_a_gpu_a_notice_says_so_and_batches_stay_where_they_are(train, caplog, device):
    loader = build_loader(train(prefetch_mode="cuda"), device=device)
    assert caplog.text.count("prefetch_mode: cuda needs a GPU") == 1
    assert next(iter(loader))["lq"].device == CPU


def test_sets_that_are_judged_are_not_prefetched(train, caplog):
    loader = build_loader(train(prefetch_mode="cuda", phase="val"), device=torch.device("cuda", 0))
    assert next(iter(loader))["lq"].device == CPU
    assert not caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_the_gpu_unchanged(train):
    plain = islice(build_loader(train(num_worker_per_gpu=1)), 20)
    device = torch.device("cuda", 0)
    for one, two in zip(
        plain, build_loader(train(num_worker_per_gpu=1, prefetch_mode="cuda"), device=device), strict=False
    ):
        assert two["gt"].device == device
        # work on the current stream that a copy without waiting would overtake
        torch.rand(2000, 2000, device=device).mm(torch.rand(2000, 2000, device=device))
        assert two["gt"].cpu().equal(one["gt"])
