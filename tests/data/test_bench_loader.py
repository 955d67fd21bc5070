"""python -m scripts.bench_loader: readings that are compared yield the same tensors."""

import numpy as np
import pytest

from data.io import write_image
from models import runtime
from scripts import bench_loader


@pytest.fixture
def folder(tmp_path, photos):
    for number, photo in enumerate(photos.values()):
        write_image(tmp_path / f"{number}.png", photo[:60, :71])
    return str(tmp_path)


def bench(folder, *more):
    return runtime.run(
        bench_loader.main,
        ["--folder", folder, "--gt_size", "32", "--batch", "2", "--seconds", "0.04", "--workers", "0", *more],
    )


@pytest.mark.parametrize("scale", ["2", "3"])
def test_all_readings_are_compared_and_listed(folder, capfd, scale):
    size = {"2": "32", "3": "33"}[scale]
    assert bench(folder, "--scale", scale, "--gt_size", size) == 0
    printed = capfd.readouterr().out
    assert printed.count("one decode per crop") == 2
    for reading in ("disk", "lmdb", "memory", "equal bit by bit"):
        assert reading in printed


def test_a_reading_of_other_crops_is_not_timed(folder, capfd, monkeypatch):
    monkeypatch.setattr(bench_loader, "_float", lambda image: image.astype(np.float32) / 256)
    assert bench(folder) == 1
    assert "the crops of disk differ from those of one decode per crop" in capfd.readouterr().err
