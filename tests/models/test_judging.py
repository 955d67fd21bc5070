"""A picture is scored rounded to 8 bit or as the network returns it, and both stand side by side."""

import csv

import cv2
import numpy as np
import pytest
import skimage.data
import torch
import yaml
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from models import judging, report
from options.schema import MetricOptions, ValOptions

BOTH = {
    "psnr": {"type": "calculate_psnr", "quantize": False},
    "ssim": {"type": "calculate_ssim", "quantize": False},
    "psnr_8bit": {"type": "calculate_psnr"},
    "ssim_8bit": {"type": "calculate_ssim"},
}


@pytest.fixture
def pair():
    """A result that is no multiple of 1/255 and exceeds 0..1, and its 8-bit ground truth, (1, 3, 60, 71)."""
    photo = torch.from_numpy(skimage.data.coffee()[40:100, 60:131].copy()).permute(2, 0, 1)[None]
    gt = photo.float() / 255
    result = gt * 1.4 - 0.03 + 0.02 * torch.randn(gt.shape, generator=torch.Generator().manual_seed(3))
    assert result.min() < 0 < 1 < result.max()
    return result, gt


class Same(torch.nn.Module):
    """Returns what it gets, of any size."""

    scale, in_channels = 1, 3

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@pytest.fixture
def hazy(tiny, own_registry, tmp_path):
    """A run of scale 1 that returns its input, on two corners of a photograph and a grey, weak copy of them."""
    own_registry.register(Same)
    for folder in ("clear", "hazy"):
        (tmp_path / folder).mkdir()
    for i in range(2):
        corner = cv2.imread("datasets/quickstart/val/coffee.png")[80 + 30 * i :][:48, 60:120]
        cv2.imwrite(str(tmp_path / f"clear/{i}.png"), corner)
        cv2.imwrite(str(tmp_path / f"hazy/{i}.png"), (corner * 0.4 + 130).astype(np.uint8))
    tiny |= {"scale": 1, "network_g": {"type": "Same"}}
    pairs = {
        "type": "PairedImageDataset",
        "dataroot_gt": str(tmp_path / "clear"),
        "dataroot_lq": str(tmp_path / "hazy"),
    }
    tiny["datasets"] = {
        "train": {**pairs, "name": "pairs", "gt_size": 16, "batch_size_per_gpu": 2, "num_worker_per_gpu": 0},
        "val": {**pairs, "name": "held-out"},
    }
    tiny["val"] = {"val_freq": 2, "metrics": BOTH}
    return tiny


def score(result, gt, lq=None, **val):
    """Scores of the result and of the baseline, by the options of ``val``."""
    options = type("Run", (), {"val": ValOptions(**{"metrics": BOTH, **val}), "scale": 1})
    batch = {"lq": gt if lq is None else lq, "gt": gt, "name": ["a"]}
    judged = judging.Judged(batch, judging.Picture(result), options, resize=None)
    return judging.score("set/a", judged, options.val.metrics)[1:]


def test_float_scores_are_those_of_scikit_image_on_clamped_values(pair):
    result, gt = (x[0].permute(1, 2, 0).double().numpy() for x in pair)
    result = result.clip(0, 1)
    scores, _ = score(*pair)
    assert scores["psnr"] == pytest.approx(peak_signal_noise_ratio(gt, result, data_range=1), abs=1e-9)
    assert scores["psnr"] == pytest.approx(10 * np.log10(1 / np.mean((gt - result) ** 2)), abs=1e-9)
    window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    expected = structural_similarity(gt, result, channel_axis=2, data_range=1, **window)
    assert scores["ssim"] == pytest.approx(expected, abs=1e-9)


def test_rounded_scores_are_those_of_the_saved_files(pair, tmp_path):
    result, gt = (judging.Picture(x).rounded for x in pair)
    scores, _ = score(*pair)
    for name, picture in (("result", result), ("gt", gt)):
        cv2.imwrite(str(tmp_path / f"{name}.png"), picture)
    saved = [cv2.imread(str(tmp_path / f"{name}.png")) for name in ("gt", "result")]
    assert scores["psnr_8bit"] == pytest.approx(peak_signal_noise_ratio(*saved), abs=1e-9)
    assert abs(scores["psnr_8bit"] - scores["psnr"]) > 1e-5


def test_a_step_of_half_a_level_is_seen_by_the_float_score_only():
    gt = torch.full((1, 3, 16, 16), 100 / 255)
    scores, _ = score(gt + 0.4 / 255, gt)
    assert scores["psnr_8bit"] == float("inf")
    assert scores["psnr"] == pytest.approx(20 * np.log10(255 / 0.4), abs=1e-3)


@pytest.mark.parametrize("level", [0, 0.7 / 255])
def test_a_nearly_black_picture_is_scored_and_not_taken_for_another_range(level):
    black = torch.zeros(1, 3, 16, 16)
    scores, _ = score(black + level, black)
    assert scores["psnr"] == (pytest.approx(20 * np.log10(255 / 0.7), abs=1e-3) if level else float("inf"))


def test_an_own_metric_gets_floats_of_0_to_255(monkeypatch, pair):
    seen = []
    monkeypatch.setitem(judging.METRICS._entries, "own", lambda img, img2: seen.append((img, img2)) or 1.0)
    score(*pair, metrics={"own": {"type": "own", "quantize": False}})
    assert all(x.dtype == np.float64 and x.max() > 200 and x.min() >= 0 and x.max() <= 255 for x in seen[0])


def test_the_protocol_says_float_or_8_bit():
    found = report.protocols({label: MetricOptions(**spec) for label, spec in BOTH.items()})
    assert (found["psnr"], found["psnr_8bit"]) == ("RGB, crop 0, float", "RGB, crop 0, 8 bit")


@pytest.mark.parametrize(("use_image", "quantized"), [(None, True), (True, True), (False, False)])
def test_use_image_of_published_files_is_the_default_of_quantize(use_image, quantized):
    metrics = {"a": {"type": "calculate_psnr"}, "b": {"type": "calculate_psnr", "quantize": True}}
    val = ValOptions(use_image=use_image, metrics=metrics)
    assert (val.metrics["a"].quantize, val.metrics["b"].quantize) == (quantized, True)


# the stretched input


def test_the_stretch_takes_the_1st_percentile_to_0_and_the_99th_to_1():
    ramp = torch.linspace(0.2, 0.7, 101).reshape(1, 1, 1, 101)
    found = judging.stretch(torch.cat([ramp, ramp.flip(3) * 0.5], dim=1))
    expected = ((torch.arange(101) - 1) / 98).clamp(0, 1)
    torch.testing.assert_close(found[0, 0, 0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0, 1, 0], expected.flip(0), rtol=0, atol=1e-6)


def test_a_constant_channel_is_not_stretched_and_a_picture_not_changed_by_its_batch():
    lq = torch.rand(2, 3, 9, 7)
    lq[:, 1] = 0.4
    found = judging.stretch(lq)
    assert torch.equal(found[:, 1], lq[:, 1])
    assert torch.equal(found[:1], judging.stretch(lq[:1]))
    assert found.dtype == lq.dtype


def test_the_gain_is_over_the_hazy_input_or_its_stretch(pair):
    result, gt = pair
    lq = gt * 0.4 + 0.5
    assert score(result, gt, lq, baseline="input")[1] == score(lq, gt)[0]
    assert score(result, gt, lq, baseline="stretch")[1] == score(judging.stretch(lq), gt)[0]
    assert score(result, gt, lq, baseline="stretch")[1]["psnr"] > score(lq, gt)[0]["psnr"] + 1


# the commands


@pytest.mark.parametrize("baseline", ["input", "stretch"])
def test_one_table_and_file_has_both_protocols_and_the_gain(hazy, command, tmp_path, baseline):
    code, printed = command("test.py", hazy, f"val.baseline={baseline}")
    assert code == 0, printed
    words = " ".join(printed.split())
    assert "psnr: RGB, crop 0, float" in words
    assert "psnr_8bit: RGB, crop 0, 8 bit" in words
    lines = (tmp_path / "out/results/small/metrics.csv").read_text().splitlines()
    mean = next(row for row in csv.reader(lines) if row[1:3] == ["mean of 2", "psnr"])
    # the network returns its input
    assert (mean[-3] == mean[-1]) == (baseline == "input")
    assert mean[-2] == baseline


def test_the_log_of_a_validation_names_the_protocol(hazy, command):
    code, printed = command("train.py", hazy, "train.total_iter=2")
    assert code == 0, printed
    assert "[RGB, crop 0, float]" in printed
    assert "[RGB, crop 0, 8 bit]" in printed


@pytest.mark.parametrize("baseline", ["input", "stretch"])
def test_an_input_of_another_size_cannot_be_the_baseline(tiny, command, baseline):
    code, printed = command("train.py", tiny, f"val.baseline={baseline}")
    assert code == 2
    assert f"{baseline} is smaller than the ground truth at scale 2; take bicubic" in printed


def test_the_range_of_a_metric_is_not_the_user_s(tiny, command):
    tiny["val"]["metrics"]["psnr"] = {"type": "calculate_psnr", "data_range": 1}
    code, printed = command("train.py", tiny)
    assert code == 2
    assert "val.metrics.psnr.data_range: is set by the program; quantize says" in " ".join(printed.split())


def test_a_misspelt_quantize_is_told(tiny, command):
    tiny["val"]["metrics"] = yaml.safe_load("psnr: {type: calculate_psnr, quantise: false}")
    code, printed = command("train.py", tiny)
    assert code == 2
    assert "did you mean quantize?" in printed
