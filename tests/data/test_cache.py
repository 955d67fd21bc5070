"""Pictures in memory: read once, shared with forked workers, never beyond the limit."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data import build_loader
from data.backends import FolderSource, ImageReader
from data.cache import Cache, available_memory
from data.clean import DownsampleImageDataset
from data.io import write_image
from data.paired import PairedImageDataset
from options import check
from options.errors import OptionsError
from options.registry import DATASETS

MIB = 1 << 20


@pytest.fixture
def large(tmp_path, noise):
    """A folder of four pictures that take 1.5 MiB each when decoded."""
    for number in range(4):
        write_image(tmp_path / "gt" / f"{number}.png", np.tile(noise((64, 64, 3), seed=number), (8, 16, 1)))
    return str(tmp_path / "gt")


@pytest.fixture
def reads(monkeypatch):
    """The names that were read from disk, in this process."""
    names, read = [], FolderSource.read
    monkeypatch.setattr(FolderSource, "read", lambda self, name: names.append(name) or read(self, name))
    return names


def memory(folder, **backend):
    return DownsampleImageDataset(
        dataroot_gt=folder, scale=2, gt_size=32, name="set", io_backend={"type": "memory", **backend}
    )


@pytest.mark.parametrize("keep", ["decoded", "encoded"])
def test_each_picture_is_read_once(large, reads, keep):
    dataset = memory(large, keep=keep)
    for epoch in range(3):
        for index in range(4):
            assert dataset[epoch, index]["gt"].shape == (3, 32, 32)
    assert sorted(reads) == ["0.png", "1.png", "2.png", "3.png"]
    dataset.preload()
    assert len(reads) == 8
    dataset[3, 0]
    assert len(reads) == 8


def test_what_fits_is_kept_and_a_notice_says_how_much(large, reads, caplog):
    dataset = memory(large, limit=5)
    dataset.preload()
    assert "set (train): 3 pictures are kept in memory, 4 of at most 5 MiB; the others are read again" in caplog.text
    assert len(dataset.cache) == 3
    del reads[:]
    whole = DownsampleImageDataset(dataroot_gt=large, scale=2, gt_size=32)
    for index in range(4):
        assert dataset[1, index]["lq"].equal(whole[1, index]["lq"])
    assert reads.count("3.png") == 2
    assert reads.count("0.png") == 1
    assert len(dataset.cache) == 3


def test_a_set_that_fits_is_reported_with_its_size(large, caplog):
    with caplog.at_level(logging.INFO, "pellucid"):
        memory(large, limit=6).preload()
    assert "set (train): all 4 pictures are kept in memory, 6 MiB" in caplog.text


def test_pictures_read_on_the_way_keep_within_the_limit_too(large, caplog):
    dataset = memory(large, limit=3)
    for index in (3, 1, 0, 2, 3):
        dataset[0, index]
    assert dataset.cache.used == 3 * MIB
    assert caplog.text.count("are kept in memory") == 1


def test_both_sides_of_a_pair_share_one_limit_pair_by_pair(pair_folders):
    dataset = PairedImageDataset(
        dataroot_gt=pair_folders.gt,
        dataroot_lq=pair_folders.lq,
        filename_tmpl="{}x2",
        scale=2,
        gt_size=32,
        io_backend={"type": "memory", "limit": 1},
    )
    assert dataset.gt.cache is dataset.lq.cache
    assert [name for _, name in dataset.readings()][:4] == ["1.png", "1x2.png", "2.png", "2x2.png"]


def test_by_default_half_of_the_free_memory_may_be_used():
    free = available_memory()
    cache = Cache("set")
    assert 0.3 * free < cache._bytes() < 0.7 * free


def test_kept_pictures_cannot_be_changed_by_accident(large):
    reader = ImageReader(FolderSource(large), cache=Cache("set"))
    with pytest.raises(ValueError, match="read-only"):
        reader("0.png")[0, 0] = 1


def private_memory():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells which memory is shared")
def test_forked_workers_share_the_pictures(tmp_path, noise):
    for number in range(8):
        write_image(tmp_path / f"{number}.png", np.tile(noise((64, 64, 3), seed=number), (16, 16, 1)))
    dataset = memory(str(tmp_path))
    dataset.preload()
    assert dataset.cache.used == 24 * MIB
    child = os.fork()
    if not child:
        before = private_memory()
        for number in range(80):
            dataset[number // 8, number % 8]
            dataset.gt(f"{number % 8}.png").sum()
        os._exit(0 if private_memory() - before < 8 * MIB else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_forked_workers_keep_nothing_of_their_own(large, loader_options):
    arguments = {"dataroot_gt": large, "gt_size": 32, "io_backend": {"type": "memory", "limit": 4}}
    loader = build_loader(loader_options("DownsampleImageDataset", arguments, num_worker_per_gpu=1))
    next(iter(loader))
    assert loader.dataset.cache.closed


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_workers_that_share_nothing_are_announced(large, loader_options, caplog, way):
    arguments = {"dataroot_gt": large, "gt_size": 32, "io_backend": {"type": "memory", "limit": 4}}
    options = loader_options("DownsampleImageDataset", arguments, num_worker_per_gpu=1)
    build_loader(options, multiprocessing_context=way)
    assert ("each keep pictures in a memory of their own" in caplog.text) == (way == "spawn")


class Limits(torch.utils.data.Dataset):
    """What a worker that begins to fill a cache may use."""

    def __init__(self):
        self.cache = Cache("set", limit=6)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.cache._bytes()


def test_workers_that_share_nothing_divide_the_limit():
    (found,) = torch.utils.data.DataLoader(Limits(), batch_size=3, num_workers=2)
    assert found.tolist() == [3 * MIB] * 3
    assert Limits()[0] == 6 * MIB


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "much"])
def test_a_wrong_limit_is_refused(large, limit):
    with pytest.raises(OptionsError, match=r"io_backend\.limit: .* is not a whole number of MiB from 1"):
        memory(large, limit=limit)


def test_a_limit_belongs_to_memory_and_is_a_number(large):
    with pytest.raises(OptionsError, match="limit is not known for disk"):
        DownsampleImageDataset(dataroot_gt=large, gt_size=32, io_backend={"type": "disk", "limit": 5})
    spec = {"type": "DownsampleImageDataset", "dataroot_gt": "x", "io_backend": {"type": "memory", "limit": "much"}}
    assert check.component(DATASETS, spec, ("datasets",))
