"""A run that was stopped and continued is, to the last bit, the run that was not."""

import json
import re

import cv2
import numpy as np
import pytest
import torch

import archs  # noqa: F401  the components register themselves
from data import loader
from models import checkpoint
from options import load

# L1, and a real SIGTERM to its own process in the step that the environment names
STOPPING = """
import os
import signal

import torch

from models.losses import LOSSES


@LOSSES.register()
class Stopping(torch.nn.Module):
    calls = 0

    def forward(self, pred, gt):
        self.calls += 1
        if str(self.calls) == os.environ.get("STOP_IN_CALL"):
            os.kill(os.getpid(), signal.SIGTERM)
        return (pred - gt).abs().mean()
"""

COSINE = {"type": "CosineAnnealingRestartLR", "periods": [8, 12], "restart_weights": [1, 0.5], "eta_min": 1e-5}
STEPS = {"type": "MultiStepLR", "milestones": [7, 14], "gamma": 0.5}


@pytest.fixture
def run(nursery, photos, tmp_path, option_file):
    """``run(root, *arguments, code=0)``: train the photographs below that root, in a process of its own."""
    (tmp_path / "own.py").write_text(STOPPING)
    photos["import_paths"] = [str(tmp_path / "own.py")]
    photos["train"]["pixel_opt"] = {"type": "Stopping"}

    def call(root, *arguments, code=0, stop_in_call=""):
        file = option_file(photos)
        root = f"path.root={tmp_path / root}"
        process = nursery.start("-opt", file, *arguments, root, env={"STOP_IN_CALL": str(stop_in_call)})
        assert process.wait() == code, process.printed
        return process.printed

    return call


def told(folder):
    """What a run reports of its training, without the clock: rows of metrics.jsonl, and lines of the logs."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k not in ("time", "data")} for row in rows]
    text = "".join(path.read_text() for path in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime))
    lines = re.findall(r"\[small\.\.\](\[epoch.*?\]) \[eta.*?\)\] (.*)", text)
    return rows, lines


def flat(value, place=""):
    """Every tensor and number of a nest, by its place, tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return {place: (value.dtype, tuple(value.shape), value.contiguous().view(-1).numpy(force=True).tobytes())}
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, entry in entries for k, v in flat(entry, f"{place}/{key}").items()}
    return {place: value}


def assert_same_run(a, b, last):
    """Weights, average, optimizer, random states and everything else that is kept."""
    for name in (f"models/net_g_{last}.pth", f"training_states/{last}.state"):
        one, other = (flat(checkpoint.load_state(folder / name)) for folder in (a, b))
        assert [place for place in {**one, **other} if one.get(place) != other.get(place)] == []


@pytest.mark.parametrize(
    "train",
    [
        {"scheduler": COSINE, "warmup_iter": 3},
        {"scheduler": STEPS},
        {"scheduler": STEPS, "accum_iter": 2, "use_amp": True, "amp_dtype": "bfloat16"},
    ],
    ids=["cosine", "steps", "accumulated in bfloat16"],
)
def test_a_run_stopped_in_the_middle_goes_on_to_the_last_bit(run, photos, tmp_path, train):
    photos["train"] |= train
    # in step 10, between two log lines, whose means span the stop
    calls = 10 * train.get("accum_iter", 1)
    run("whole")
    run("halves", code=143, stop_in_call=calls)
    halves, whole = (tmp_path / root / "experiments/small" for root in ("halves", "whole"))
    assert (halves / "training_states/10.state").exists()
    assert not (halves / "training_states/15.state").exists()
    printed = run("halves", "--auto_resume")
    assert "continuing from" in printed
    assert_same_run(whole, halves, 20)
    assert told(whole) == told(halves)
    assert [row["iter"] for row in told(whole)[0] if row["kind"] == "train"] == [4, 8, 12, 16, 20]


def test_weights_do_not_depend_on_the_number_of_workers(run, tmp_path):
    for workers in (0, 1, 3):
        run(f"workers{workers}", f"datasets.train.num_worker_per_gpu={workers}", "train.total_iter=8")
    first, *others = (tmp_path / f"workers{workers}/experiments/small" for workers in (0, 1, 3))
    for other in others:
        assert_same_run(first, other, 8)


def test_each_epoch_draws_its_own_flips_and_the_same_epoch_the_same(photos, tmp_path):
    # pictures of the size of the crop, so that only flips and rotations can differ
    for path in (tmp_path / "train").iterdir():
        cv2.imwrite(str(path), cv2.imread(str(path))[:16, :16])
    drawn = []
    for _ in range(2):
        problems, options = load._validate(photos, training=True)
        assert not problems
        dataset = loader.build_dataset(options.datasets["train"])
        drawn.append([dataset[epoch, 0]["gt"].numpy() for epoch in range(8)])
    assert all((one == two).all() for one, two in zip(*drawn, strict=True))
    assert len({picture.tobytes() for picture in drawn[0]}) > 2
    whole = drawn[0][0]
    turned = [np.rot90(flipped, k, axes=(1, 2)).tobytes() for flipped in (whole, whole[:, ::-1]) for k in range(4)]
    assert all(picture.tobytes() in turned for picture in drawn[0])


def test_a_changed_option_is_told_when_a_run_goes_on(run):
    run("out", "train.total_iter=5")
    changes = ["network_g.window_sizes=[4, 4]", "train.optim_g.lr=1e-4", "manual_seed=3"]
    changes.append("datasets.train.batch_size_per_gpu=3")
    printed = run("out", "--auto_resume", "train.total_iter=6", "datasets.train.num_worker_per_gpu=0", *changes)
    (line,) = [line for line in printed.splitlines() if "continuing with changes" in line]
    assert "network_g.window_sizes [2, 4] -> [4, 4]" in line
    assert "train.optim_g.lr 0.001 -> 0.0001" in line
    assert "manual_seed 0 -> 3" in line
    assert "datasets.train.batch_size_per_gpu 2 -> 3" in line
    # other lengths and workers train the same weights
    assert "total_iter" not in line
    assert "num_worker" not in line


def test_the_options_in_force_are_kept_and_give_the_same_run(run, nursery, tmp_path):
    run("out", "train.total_iter=6", "train.optim_g.lr=1e-4", "datasets.train.batch_size_per_gpu=3")
    first = tmp_path / "out/experiments/small"
    again = nursery.start("-opt", first / "small.effective.yml", f"path.root={tmp_path / 'again'}", cwd=tmp_path)
    assert again.wait() == 0, again.printed
    assert_same_run(first, tmp_path / "again/experiments/small", 6)
