"""Wrong values of a dataset's options: told from the annotations at load, and again by the constructor."""

import logging
import typing

import pytest
import torch

from data import DATASETS
from data.clean import DownsampleImageDataset
from data.io import write_image
from data.paired import PairedImageDataset
from data.single import SingleImageDataset
from options import check
from options.errors import OptionsError


@pytest.fixture
def make(tmp_path, noise):
    """make(**options): a training set over one picture; other phases and classes on request."""
    write_image(tmp_path / "a.png", noise((16, 16, 3)))

    def build(kind=DownsampleImageDataset, **options):
        sides = {PairedImageDataset: ("gt", "lq"), SingleImageDataset: ("lq",)}.get(kind, ("gt",))
        crop = {} if kind is SingleImageDataset else {"gt_size": 8}
        return kind(**{f"dataroot_{side}": str(tmp_path) for side in sides}, **{**crop, "name": "Set", **options})

    return build


@pytest.mark.parametrize("phase", ["val", "test"])
@pytest.mark.parametrize("kind", [PairedImageDataset, DownsampleImageDataset, SingleImageDataset])
def test_pictures_that_are_judged_or_saved_are_never_normalised(make, kind, phase):
    with pytest.raises(
        OptionsError, match=rf"Set \({phase}\): mean and std are for training.*must normalise its input"
    ):
        make(kind, phase=phase, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    assert 0 <= make(kind, phase=phase, mean=[0, 0, 0], std=[1, 1, 1])[0]["lq"].max() <= 1


def test_training_pictures_are_normalised_on_both_sides_and_a_notice_says_where_not(make, caplog):
    mean, std = [0.1, 0.2, 0.3], [0.5, 1, 2]
    plain = make()[0, 0]
    with caplog.at_level(logging.WARNING, "pellucid"):
        item = make(mean=mean, std=std)[0, 0]
    for side in ("lq", "gt"):
        torch.testing.assert_close(
            item[side], (plain[side] - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        )
    assert "act in training only" in caplog.text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mean": [0.5] * 3}, "std is missing: give both"),
        ({"std": [0.5] * 3}, "mean is missing: give both"),
        ({"mean": [0.5] * 2, "std": [1] * 3}, "mean: 2 numbers for 3 channels"),
        ({"mean": [0] * 3, "std": [1]}, "std: 1 number for 3 channels"),
        ({"mean": [0.5] * 3, "std": [1] * 3, "color": "y"}, "mean: 3 numbers for 1 channels"),
        ({"mean": [0.5] * 3, "std": [1, 0, 1]}, "not above 0"),
        ({"mean": [0.5] * 3, "std": [1, -1, 1]}, "not above 0"),
        ({"mean": [0.5] * 3, "std": [1, float("nan"), 1]}, "std: .* is not a list of numbers"),
        ({"mean": 0.5, "std": [1] * 3}, "mean: 0.5 is not a list of numbers"),
        ({"io_backend": "lmdb"}, "io_backend: 'lmdb' is not a section"),
    ],
)
def test_the_constructor_refuses_wrong_values(make, changed, message):
    with pytest.raises(OptionsError, match=message):
        make(**changed)


@pytest.mark.parametrize("kind", sorted(DATASETS.names()))
def test_the_annotations_can_be_read(kind):
    hints = typing.get_type_hints(DATASETS.get(kind).__init__)
    assert set(typing.get_args(hints["verify"])) == {"headers", "full", "off"}


WRONG = {
    "color": "rbg",
    "alpha": "whit",
    "verify": "ful",
    "small": "padding",
    "kernel": "matlba",
    "downsample": "images",
    "gt_size": "large",
    "min_texture": "high",
    "gt_scales": 0.5,
    "mean": 0.5,
    "std": ["a"],
    "use_hflip": "perhaps",
    "dataroot_gt": 5,
    "meta_info_file": ["a.txt"],
    "filename_tmpl": 4,
    "io_backend": {"type": "dsik"},
}
BACKENDS = [{"type": "memory", "keep": "coded"}, {"type": "disk", "kepe": "decoded"}, "lmdb"]


@pytest.mark.parametrize("kind", ["PairedImageDataset", "DownsampleImageDataset", "SingleImageDataset"])
def test_every_wrong_value_is_told_at_load(kind):
    taken = typing.get_type_hints(DATASETS.get(kind).__init__)
    values = {key: value for key, value in WRONG.items() if key in taken}
    found = check.component(DATASETS, {"type": kind, "dataroot_lq": "x", "dataroot_gt": "x", **values}, ("datasets",))
    assert set(values) <= {place[1] for place, _ in found}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_wrong_backend_is_told_at_load(backend):
    found = check.component(
        DATASETS, {"type": "SingleImageDataset", "dataroot_lq": "x", "io_backend": backend}, ("datasets",)
    )
    assert [place[1] for place, _ in found] == ["io_backend"]


@pytest.mark.parametrize(
    "backend",
    [
        None,
        {"type": "disk"},
        {"type": "memory", "keep": "encoded"},
        {"type": "lmdb", "db_paths": ["a", "b"], "client_keys": ["lq", "gt"]},
    ],
    ids=str,
)
def test_a_right_backend_passes_the_check_at_load(backend):
    spec = {"type": "PairedImageDataset", "dataroot_lq": "x", "dataroot_gt": "x", "io_backend": backend, "gt_size": 64}
    assert check.component(DATASETS, {**spec, "mean": [0, 0.5, 1], "small": "pad"}, ("datasets",)) == []
