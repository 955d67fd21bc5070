"""What a run would do, told and tried before anything is created."""

import re

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from models import plan


@pytest.fixture
def rows(make_options, make_model):
    """``rows("train.accum_iter=4", ..., pictures=13)``: the plan as a dictionary."""

    def describe(*overrides, pictures=13):
        options = make_options(*overrides)
        return dict(plan.describe(make_model(options), options, {"held-out": 4}, training=pictures))

    return describe


# numbers


def test_the_effective_batch_counts_accumulated_ones(rows):
    found = rows("train.accum_iter=4", "datasets.train.batch_size_per_gpu=2")
    assert found["batch"] == "effective batch 2 samples x 4 accumulated x 1 process = 8"


def test_the_length_is_told_in_epochs(rows):
    found = rows("train.total_iter=1000", "train.accum_iter=2", "datasets.train.batch_size_per_gpu=4", pictures=16)
    assert found["length"] == "1,000 iterations = 500.0 epochs of 16 samples (2.0 iterations each)"


def test_an_enlarged_set_makes_longer_epochs(rows):
    found = rows("train.total_iter=100", "datasets.train.dataset_enlarge_ratio=10", pictures=16)
    assert found["length"] == "100 iterations = 1.2 epochs of 160 samples (80.0 iterations each)"


def test_the_number_of_parameters_is_the_network_s(rows, make_options, make_model):
    count = sum(p.numel() for p in make_model(make_options()).network.parameters())
    assert rows()["network"] == f"SST, {count:,} parameters"


def test_sets_metrics_losses_and_precision_are_named(rows):
    found = rows("train.use_amp=true", "train.fft_loss_opt={type: FFTLoss}", "train.ema_decay=0")
    assert found["set"] == "held-out: 4 pictures"
    assert found["metric"] == "psnr: calculate_psnr {'crop_border': 2, 'test_y_channel': True}, Y, crop 2, 8 bit"
    assert found["losses"] == "l_pix: L1Loss, l_fft: FFTLoss"
    assert found["precision"].startswith("bfloat16")
    assert found["average"] == "no EMA"


def test_a_plan_for_a_test_says_nothing_of_training(make_options, make_model):
    options = make_options()
    found = dict(plan.describe(make_model(options, training=False), options, {}))
    assert {"batch", "length", "losses", "training set"}.isdisjoint(found)


# one sample through the network


@pytest.fixture
def sample():
    return {"lq": torch.rand(3, 16, 16), "gt": torch.rand(3, 32, 32)}


def test_a_sample_that_fits_passes(make_options, make_model, sample):
    options = make_options()
    plan.check_sample(make_model(options), sample, options.datasets["train"])


def test_pictures_with_too_few_channels_are_refused_before_anything_is_created(tiny, command, tmp_path):
    code, printed = command("train.py", tiny, "datasets.train.color=gray")
    assert code == 2, printed
    assert "the network does not take the data, (1, 1, 16, 16)" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_a_result_of_another_size_is_refused_before_anything_is_created(tiny, command, tmp_path):
    tiny["network_g"]["enlarge"] = 3
    code, printed = command("train.py", tiny)
    assert code == 2, printed
    assert "(1, 3, 16, 16) to (1, 3, 48, 48), but the ground truth is (1, 3, 32, 32)" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [(), ("--dry_run",)], ids=["run", "dry run"])
def test_pictures_to_test_on_with_too_few_channels_are_told_in_words(tiny, command, option):
    code, printed = command("test.py", tiny, "datasets.val.color=gray", *option)
    assert code == 1, printed
    assert "held-out/corner" in printed
    assert "Traceback" not in printed


# the dry run


def test_a_dry_run_judges_one_picture_of_each_set(tiny, command, tmp_path):
    cv2.imwrite(str(tmp_path / "val/second.png"), np.full((40, 40, 3), 90, np.uint8))
    tiny["datasets"]["val_2"] = {**tiny["datasets"]["val"], "name": "more"}
    code, printed = command("train.py", tiny, "--dry_run")
    assert code == 0, printed
    for name in ("held-out", "more"):
        assert re.search(rf"{name}: \d+\.\d\d s for one picture: psnr \d+", printed)
    assert re.search(r"\d+\.\d\d s at batch 1, \(1, 3, 16, 16\) -> \(1, 3, 32, 32\): l_pix", printed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", ["train.py", "test.py"])
def test_a_metric_that_cannot_be_computed_is_found_by_a_dry_run(tiny, command, tmp_path, script):
    code, printed = command(script, tiny, "val.metrics.psnr.crop_border=100", "--dry_run")
    assert code == 1, printed
    assert "val.metrics.psnr cannot be computed for held-out/corner: crop_border must be 0..47" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_test_tells_the_plan_and_creates_nothing(tiny, command, tmp_path):
    del tiny["train"], tiny["datasets"]["train"]
    code, printed = command("test.py", tiny, "--dry_run", "--auto_resume")
    assert code == 0, printed
    assert "--auto_resume has no effect" in printed
    for fact in ("Tiny, 336 parameters", "held-out: 1 pictures", "calculate_psnr", "trial validation"):
        assert fact in printed
    assert not (tmp_path / "out").exists()


def test_a_dry_run_for_pictures_without_ground_truth_needs_no_score(tiny, command, tmp_path):
    tiny["datasets"] = {"test": {"type": "SingleImageDataset", "dataroot_lq": str(tmp_path / "val"), "name": "alone"}}
    code, printed = command("test.py", tiny, "--dry_run")
    assert code == 0, printed
    assert "alone: " in printed


def test_a_network_that_returns_no_numbers_is_told_in_words(tiny, command, own_registry):
    @own_registry.register()
    class Broken(nn.Module):
        scale = 2

        def forward(self, x):
            return x.repeat_interleave(2, -1).repeat_interleave(2, -2) * float("nan")

    tiny["network_g"] = {"type": "Broken"}
    code, printed = command("test.py", tiny)
    assert code == 1, printed
    assert "held-out/corner" in printed
    assert "NaN" in printed
    assert "Traceback" not in printed
