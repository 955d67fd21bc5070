"""Photographs of scikit-image, folders made from them, and a cache that belongs to the test."""

from types import SimpleNamespace

import numpy as np
import pytest
import skimage.data

from data.degrade import bicubic_downsample
from data.io import write_image


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Never the user's own cache of verified pictures."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PELLUCID_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def photos():
    """Name -> (h, w, 3) uint8."""
    return {name: getattr(skimage.data, name)() for name in ("astronaut", "chelsea", "coffee")}


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory, photos):
    """GT and x2 LQ folders with six small pictures of different sizes."""
    root = tmp_path_factory.mktemp("pairs")
    places = [("astronaut", 0, 0), ("astronaut", 180, 180), ("chelsea", 90, 120), ("coffee", 60, 60)]
    places += [("coffee", 200, 300), ("chelsea", 150, 250)]
    for number, (name, top, left) in enumerate(places, start=1):
        gt = photos[name][top : top + 64 + 2 * number, left : left + 80]
        write_image(root / "gt" / f"{number}.png", gt)
        write_image(root / "lq" / f"{number}x2.png", bicubic_downsample(gt, 2))
    return SimpleNamespace(gt=str(root / "gt"), lq=str(root / "lq"), count=len(places))


@pytest.fixture
def noise():
    """noise(shape, dtype=np.uint8): the same picture each time."""

    def make(shape, dtype=np.uint8, seed=0):
        return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)

    return make


@pytest.fixture
def loader_options():
    """loader_options(type, arguments, **loader keys): what options/schema.py hands to build_loader."""

    def make(kind, arguments, **changed):
        plain = {
            "type": kind,
            "name": "a set",
            "phase": "train",
            "scale": 2,
            "seed": 7,
            "batch_size_per_gpu": 4,
            "num_worker_per_gpu": 0,
            "dataset_enlarge_ratio": 1,
            "prefetch_mode": None,
            "num_prefetch_queue": 1,
            "pin_memory": False,
            "persistent_workers": False,
            "use_shuffle": True,
        }
        return SimpleNamespace(**{**plain, **changed}, arguments=lambda: dict(arguments, name="a set"))

    return make
