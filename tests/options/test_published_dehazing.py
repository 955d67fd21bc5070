"""The option files of the published MB-TaylorFormer networks load, and say what the authors' files say."""

import re

import pytest
import torch
import yaml

from archs import ARCHS
from models.optim import LearningRate
from models.report import protocols
from options import load
from scripts import mbt_options
from scripts.make_options import ROOT
from scripts.mbt_table import settings

# parameters of the published networks
COUNTS = {(1, "B"): 2_676_520, (1, "L"): 7_432_472}
COUNTS |= {(2, "B"): 2_629_458, (2, "L"): 7_295_572, (2, "XL"): 16_257_900}
SETTINGS = {setting.name: setting for setting in settings()}


def read(setting, kind):
    return ROOT / f"options/{kind}/{setting.data.task}/{setting.name}.yml"


def test_every_published_setting_has_its_files():
    assert len(SETTINGS) == 25
    assert len(mbt_options.files()) == 50
    of = {task: sum(setting.data.task == task for setting in SETTINGS.values()) for task in mbt_options.METRICS}
    assert of == {"dehaze": 20, "derain": 1, "desnow": 2, "denoise": 1, "deblur": 1}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_file_loads_without_a_remark(name, caplog):
    setting = SETTINGS[name]
    training = load.load(read(setting, "train"))
    test = load.load(read(setting, "test"), ["path.pretrain_network_g=~"], training=False)
    assert (training.name, test.name, test.network_g) == (name, name, training.network_g)
    assert not caplog.records
    assert training.datasets["train"].batch_size_per_gpu == setting.batch


@pytest.mark.parametrize(
    "name",
    ["MBTaylorFormer_B_ITS", "MBTaylorFormer_L_ITS", "MBTaylorFormerV2_B_ITS", "MBTaylorFormerV2_L_SIDD"]
    + ["MBTaylorFormerV2_XL_GoPro"],
)
def test_a_network_has_the_published_number_of_parameters(name):
    setting = SETTINGS[name]
    with torch.device("meta"):
        network = ARCHS.build(load.load(read(setting, "train")).network_g.spec())
    assert sum(p.numel() for p in network.parameters()) == COUNTS[setting.version, setting.size]


@pytest.mark.parametrize(
    ("name", "peak", "floor"),
    [
        ("MBTaylorFormer_B_ITS", 2e-4, 1e-5),
        ("MBTaylorFormer_L_OTS", 2e-4, 1e-5),
        ("MBTaylorFormerV2_B_ITS", 3e-4, 1e-6),
        ("MBTaylorFormerV2_L_ITS", 3e-4, 1e-5),
        ("MBTaylorFormerV2_L_Rain13K", 3e-4, 1e-6),
        ("MBTaylorFormerV2_L_Snow100K", 3e-4, 1e-6),
        ("MBTaylorFormerV2_L_SIDD", 3e-4, 1e-5),
        ("MBTaylorFormerV2_XL_GoPro", 3e-4, 1e-5),
    ],
)
def test_the_rate_is_constant_for_200_000_iterations_and_a_cosine_for_300_000(name, peak, floor):
    train = yaml.load(read(SETTINGS[name], "train").read_text(encoding="utf-8"), Loader=Numbers)["train"]
    rate = LearningRate(train["scheduler"])
    base = train["optim_g"]["lr"]
    assert base == rate(1, base) == rate(200_000, base) == rate(200_001, base) == peak
    assert rate(350_001, base) == pytest.approx((peak + floor) / 2)
    assert rate(500_000, base) == pytest.approx(floor, rel=1e-3)
    assert rate.length == train["total_iter"] == 500_000
    assert train["use_grad_clip"] is True
    assert train["grad_clip"] == 0.01
    assert train["optim_g"] == {"type": "AdamW", "lr": peak, "betas": [0.9, 0.999], "weight_decay": 1e-4}
    assert train.get("fft_loss_opt", {}).get("loss_weight") == (0.1 if "V2" in name else None)


class Numbers(yaml.SafeLoader):
    """1e-4 is a number, as the loader of options reads it."""


Numbers.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[0-9]+(\.[0-9]+)?e-?[0-9]+$"), list("0123456789")
)


@pytest.mark.parametrize(
    ("name", "first", "beside"),
    [
        ("MBTaylorFormer_B_ITS", "RGB, crop 0, float", {"RGB, crop 0, 8 bit"}),
        ("MBTaylorFormerV2_L_SIDD", "RGB, crop 0, float", {"RGB, crop 0, 8 bit"}),
        ("MBTaylorFormerV2_XL_GoPro", "RGB, crop 0, 8 bit", {"RGB, crop 0, float"}),
        ("MBTaylorFormerV2_L_Rain13K", "Y, crop 0, 8 bit", {"Y, crop 0, float"}),
        ("MBTaylorFormerV2_L_SRRS", "Y, crop 0, 8 bit", {"RGB, crop 0, 8 bit", "RGB, crop 0, float"}),
    ],
)
def test_a_test_has_the_published_protocol_and_others_beside_it(name, first, beside):
    test = load.load(read(SETTINGS[name], "test"), ["path.pretrain_network_g=~"], training=False)
    found = protocols(test.val.metrics)
    assert found["psnr"] == found["ssim"] == first
    assert set(found.values()) - {first} == beside


@pytest.mark.parametrize("name", SETTINGS)
def test_the_head_says_what_is_published_and_with_which_source(name):
    setting = SETTINGS[name]
    commands = {"train": ("torchrun --nproc_per_node=8", "train.accum_iter=8"), "test": ("test.py -opt",)}
    for kind, parts in commands.items():
        head = read(setting, kind).read_text(encoding="utf-8").split("\nname:")[0]
        assert all(line.startswith("# ") for line in head.splitlines())
        assert all(part in head for part in parts)
        assert "Not measured with Pellucid" in head
        assert any(source in head for source in ("paper's text", "UDPNet's README", "public log", "none found"))
