"""A file written for BasicSR trains here unchanged, once its user asks for that."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from options import basicsr_alias, registry
from options.errors import OptionsError

# as such files are written: positional arguments, one dictionary for a data set, pictures in OpenCV's order
FILE = """
import os.path as osp

import cv2
import numpy as np
import torch
from basicsr.archs.arch_util import ResidualBlockNoBN, Upsample, default_init_weights, make_layer, to_2tuple
from basicsr.utils import get_root_logger, img2tensor, scandir
from basicsr.utils.registry import ARCH_REGISTRY, DATASET_REGISTRY, LOSS_REGISTRY, METRIC_REGISTRY
from torch import nn
from torch.nn import functional as F
from torch.utils import data as data


@ARCH_REGISTRY.register()
class OldResNet(nn.Module):
    def __init__(self, num_in_ch=3, num_feat=8, num_block=2, upscale=2):
        super(OldResNet, self).__init__()
        kernel, _ = to_2tuple(3)
        self.first = nn.Conv2d(num_in_ch, num_feat, kernel, 1, 1)
        self.body = make_layer(ResidualBlockNoBN, num_block, num_feat=num_feat)
        self.upsample = Upsample(upscale, num_feat)
        self.last = nn.Conv2d(num_feat, num_in_ch, 3, 1, 1)
        default_init_weights([self.first, self.last], 0.1)

    def forward(self, x):
        return self.last(self.upsample(self.body(self.first(x)))) + F.interpolate(x, scale_factor=2)


@DATASET_REGISTRY.register()
class OldFolder(data.Dataset):
    def __init__(self, opt):
        super(OldFolder, self).__init__()
        self.opt = opt
        self.paths = sorted(scandir(opt['dataroot_gt'], suffix='png', full_path=True))
        get_root_logger().info(f"{len(self.paths)} old pictures")

    def __getitem__(self, index):
        gt = cv2.imread(self.paths[index]).astype(np.float32) / 255.
        side, scale = 32, self.opt['scale']
        if self.opt['phase'] == 'train':
            top = np.random.randint(0, gt.shape[0] - side + 1)
            gt = gt[top:top + side, :side]
        lq = cv2.resize(gt, (gt.shape[1] // scale, gt.shape[0] // scale), interpolation=cv2.INTER_AREA)
        gt, lq = img2tensor([gt, lq], bgr2rgb=True, float32=True)
        return {'lq': lq, 'gt': gt, 'lq_path': self.paths[index], 'gt_path': self.paths[index]}

    def __len__(self):
        return len(self.paths)


@LOSS_REGISTRY.register()
class OldLoss(nn.Module):
    def __init__(self, loss_weight=1.0):
        super(OldLoss, self).__init__()
        self.loss_weight = loss_weight

    def forward(self, pred, target, weight=None, **kwargs):
        return self.loss_weight * F.smooth_l1_loss(pred, target)


@METRIC_REGISTRY.register()
def calculate_old(img, img2, crop_border=0, **kwargs):
    return float(np.abs(img.astype(np.float64) - img2.astype(np.float64)).mean())
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """No alias and no environment from outside; afterwards the registries hold what they held."""
    monkeypatch.delenv("PELLUCID_BASICSR", raising=False)
    for kind in (registry.ARCHS, registry.DATASETS, registry.LOSSES, registry.METRICS, registry.MODELS):
        monkeypatch.setattr(kind, "_entries", dict(kind._entries))
    yield
    basicsr_alias.remove()


@pytest.fixture
def old(small, tmp_path):
    """The small run with everything from an old file."""
    (tmp_path / "old_arch.py").write_text(FILE)
    small["import_paths"] = [str(tmp_path / "old_arch.py")]
    small["network_g"] = {"type": "OldResNet", "num_feat": 4, "upscale": 2}
    small["train"]["pixel_opt"] = {"type": "OldLoss", "loss_weight": 0.5}
    small["val"]["metrics"]["old"] = {"type": "calculate_old", "crop_border": 2, "better": "lower"}
    for key, dataset in small["datasets"].items():
        extra = {"batch_size_per_gpu": 2, "num_worker_per_gpu": 0} if key == "train" else {}
        small["datasets"][key] = {"type": "OldFolder", "dataroot_gt": dataset["dataroot_gt"], **extra}
    return small


def test_a_file_written_for_basicsr_trains_unchanged(old, command, tmp_path):
    code, printed = command("train.py", {**old, "basicsr_alias": True})
    assert code == 0, printed
    assert "1 old pictures" in printed
    assert "# old: " in printed
    assert (tmp_path / "out/experiments/small/models/net_g_4.pth").exists()


def test_the_environment_switches_it_on_too(old, load_file, monkeypatch):
    monkeypatch.setenv("PELLUCID_BASICSR", "1")
    assert load_file(old).network_g.type == "OldResNet"


@pytest.mark.skipif(importlib.util.find_spec("basicsr") is not None, reason="BasicSR itself is installed")
def test_unless_asked_for_the_import_fails_and_says_which_switch_to_set(old, command):
    code, printed = command("train.py", old)
    assert code == 2
    printed = " ".join(printed.split())
    assert "old_arch.py cannot be imported: No module named 'basicsr'" in printed
    assert "set basicsr_alias: true in the option file, or PELLUCID_BASICSR=1 in the environment" in printed
    assert "basicsr" not in sys.modules


@pytest.mark.parametrize(
    "line",
    ["from basicsr.models.sr_model import SRModel", "from basicsr.utils import FileClient", "import basicsr.ops"],
)
def test_a_name_that_is_not_there_is_told_with_those_that_are(old, load_file, tmp_path, line):
    (tmp_path / "old_arch.py").write_text(line + "\n" + FILE)
    with pytest.raises(OptionsError, match=r"basicsr\.utils\.registry \(ARCH_REGISTRY, DATASET_REGISTRY"):
        load_file({**old, "basicsr_alias": True})


def test_workers_that_start_anew_know_the_alias_too(old, load_file):
    import data

    options = load_file({**old, "basicsr_alias": True}, "datasets.train.num_worker_per_gpu=1")
    loader = data.build_loader(options.datasets["train"], multiprocessing_context="spawn")
    batch = next(stream := iter(loader))
    stream.close()
    assert batch["lq"].shape == (2, 3, 16, 16)
    assert batch["name"] == ["corner", "corner"]


def test_pictures_and_tensors_turn_into_each_other():
    basicsr_alias.install()
    from basicsr.utils import img2tensor, tensor2img
    from basicsr.utils.img_util import imfrombytes, imwrite  # noqa: F401

    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    tensor = img2tensor(picture.astype(np.float32) / 255)
    assert tensor.shape == (3, 5, 7)
    assert tensor[0, 0, 0] == picture[0, 0, 2] / np.float32(255)
    np.testing.assert_array_equal(tensor2img(tensor[None]), picture)
    np.testing.assert_array_equal(tensor2img([tensor, tensor])[1], picture)


def test_unshuffling_undoes_the_shuffle():
    basicsr_alias.install()
    from basicsr.archs.arch_util import pixel_unshuffle

    x = torch.rand(2, 3, 8, 12)
    assert torch.nn.functional.pixel_shuffle(pixel_unshuffle(x, 4), 4).equal(x)


def test_nothing_is_aliased_by_loading_options(right, load_file):
    load_file(right)
    assert not basicsr_alias.is_active()
