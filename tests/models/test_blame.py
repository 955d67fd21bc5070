"""An error in a component of the user's is told by its place there; one of Pellucid's keeps its traceback."""

import pytest

from models import restoration
from options.registry import ARCHS, DATASETS, LOSSES, METRICS

OWN = """
import numpy as np
import torch

from archs import ARCHS
from data import DATASETS
from data.single import SingleImageDataset
from models.losses import LOSSES
from models.metrics import METRICS


@ARCHS.register()
class OwnNet(torch.nn.Module):
    scale = 2

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, x):
        if self.training:
            return x.reshape(7)  # here: network
        return torch.nn.functional.pixel_shuffle(self.conv(x), 2)


@LOSSES.register()
class OwnLoss(torch.nn.Module):
    def forward(self, pred, gt):
        return {}["missing"]  # here: loss


@METRICS.register()
def own_metric(img, img2):
    return np.zeros(3)[5]  # here: metric


@DATASETS.register()
class OwnSet:
    def __init__(self, *, phase="train", scale=1):
        self.phase = phase

    def __len__(self):
        return 4

    def __getitem__(self, key):
        if torch.utils.data.get_worker_info() is not None:
            raise AttributeError("no such thing")  # here: dataset
        return {"lq": torch.rand(3, 8, 8), "gt": torch.rand(3, 16, 16), "name": "x"}
"""

SPOILT = {
    "network": {"network_g": {"type": "OwnNet"}},
    "loss": {"pixel_opt": {"type": "OwnLoss"}},
    "metric": {"metrics": {"m": {"type": "own_metric"}}},
    "dataset": {"train_set": {"type": "OwnSet", "num_worker_per_gpu": 1}},
}


@pytest.fixture
def own(tiny, tmp_path, monkeypatch):
    """``own("loss")``: the run with one component that raises, and the line where it does."""
    for registry in (ARCHS, DATASETS, LOSSES, METRICS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def make(kind):
        (tmp_path / "own.py").write_text(OWN)
        change = SPOILT[kind]
        tiny["import_paths"] = [str(tmp_path / "own.py")]
        tiny["network_g"] = change.get("network_g", tiny["network_g"])
        tiny["train"]["pixel_opt"] = change.get("pixel_opt", tiny["train"]["pixel_opt"])
        tiny["val"]["metrics"] = change.get("metrics", tiny["val"]["metrics"])
        tiny["datasets"]["train"] = change.get("train_set", tiny["datasets"]["train"])
        line = next(i for i, text in enumerate(OWN.splitlines(), 1) if f"here: {kind}" in text)
        return tiny, f"{tmp_path / 'own.py'}:{line}, in "

    return make


@pytest.mark.parametrize("kind", list(SPOILT))
def test_an_error_of_the_user_s_is_told_by_its_line_with_the_traceback_in_the_log(own, command, tmp_path, kind):
    options, place = own(kind)
    code, printed = command("train.py", options)
    assert code == 1, printed
    assert f"raised at {place}" in printed
    assert "Traceback" not in printed
    (log,) = (tmp_path / "out/experiments/small").glob("*.log")
    assert "Traceback (most recent call last)" in log.read_text()


def test_an_error_of_a_metric_of_the_user_s_loses_no_step(own, command, tmp_path):
    options, _ = own("metric")
    options["val"]["val_freq"] = 3
    command("train.py", options)
    assert (tmp_path / "out/experiments/small/training_states/3.state").exists()


def test_an_error_of_pellucid_keeps_its_traceback_and_has_it_in_the_log(tiny, command, tmp_path, monkeypatch):
    def broken(self, step, base):
        return {}["missing"]

    monkeypatch.setattr(restoration.LearningRate, "__call__", broken)
    with pytest.raises(KeyError, match="missing"):
        command("train.py", tiny)
    (log,) = (tmp_path / "out/experiments/small").glob("*.log")
    assert "Traceback (most recent call last)" in log.read_text()
