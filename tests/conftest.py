"""What all tests share: one table of tolerances per dtype, one thread, no backend chosen from outside."""

import copy
import logging
import os
import runpy
import sys
from pathlib import Path

import cv2
import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent

# one thread: results do not depend on the machine, and two tests beside each other do not wait for one another
torch.set_num_threads(1)

TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 1e-2, "atol": 5e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
}


@pytest.fixture
def tolerance():
    """``tolerance(dtype)``: the ``rtol`` and ``atol`` that two results of this dtype may differ by."""
    return lambda dtype: dict(TOLERANCES[dtype])


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("PELLUCID_KERNELS"):
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_imported_files_left():
    """Workers that are not forked import what the process has imported, and a test's files are gone after it."""
    yield
    for name in [name for name in sys.modules if name.startswith("pellucid_import_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _log_as_it_was():
    """A run sends the log elsewhere; afterwards it is pytest's again."""
    yield
    log = logging.getLogger("pellucid")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


# a small, right option file: x2 on the photographs of the quickstart, a few steps
RIGHT = {
    "name": "small",
    "model_type": "RestorationModel",
    "scale": 2,
    "num_gpu": 0,
    "network_g": {
        "type": "SST",
        "dim": 16,
        "window_sizes": [4, 8],
        "num_heads": 2,
        "ranks": [4, 4],
        "n_blocks": 1,
        "upscaling_factor": 2,
        "upsampler_type": "pixelshuffle_direct",
    },
    "datasets": {
        "train": {
            "name": "photos",
            "type": "DownsampleImageDataset",
            "dataroot_gt": "datasets/quickstart/train",
            "io_backend": {"type": "disk"},
            "gt_size": 32,
            "use_hflip": True,
            "use_rot": True,
            "batch_size_per_gpu": 2,
            "num_worker_per_gpu": 0,
        },
        "val": {"name": "held-out", "type": "DownsampleImageDataset", "dataroot_gt": "datasets/quickstart/val"},
    },
    "path": {"strict_load_g": True},
    "train": {
        "total_iter": 4,
        "ema_decay": 0.9,
        "optim_g": {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.9], "weight_decay": 0},
        "scheduler": {"type": "MultiStepLR", "milestones": [2], "gamma": 0.5},
        "pixel_opt": {"type": "L1Loss", "loss_weight": 1.0, "reduction": "mean"},
    },
    "val": {
        "val_freq": 2,
        "metrics": {"psnr": {"type": "calculate_psnr", "crop_border": 2, "test_y_channel": True}},
    },
    "logger": {"print_freq": 1, "save_checkpoint_freq": 2},
}


@pytest.fixture
def right():
    """Options of a small run, to change or to spoil."""
    return copy.deepcopy(RIGHT)


@pytest.fixture
def small(right, tmp_path):
    """The small run on one corner of a photograph; results go to a folder of their own."""
    for name, source in (("train", "train/picos.jpg"), ("val", "val/coffee.png")):
        (tmp_path / name).mkdir()
        picture = cv2.imread(str(ROOT / "datasets/quickstart" / source))[80:176, 60:200]
        cv2.imwrite(str(tmp_path / name / "corner.png"), picture)
        right["datasets"][name]["dataroot_gt"] = str(tmp_path / name)
    right["path"]["root"] = str(tmp_path / "out")
    right["logger"]["use_tb_logger"] = False
    return right


class Tiny(torch.nn.Module):
    """The quickest network for x2: one convolution and a shuffle."""

    scale, in_channels = 2, 3

    def __init__(self, *, enlarge: int = 2) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3 * enlarge**2, 3, padding=1)
        self.shuffle = torch.nn.PixelShuffle(enlarge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shuffle(self.conv(x))


@pytest.fixture
def own_registry(monkeypatch):
    """The registry of networks; what a test adds to it is gone afterwards."""
    import archs

    monkeypatch.setattr(archs.ARCHS, "_entries", dict(archs.ARCHS._entries))
    return archs.ARCHS


@pytest.fixture
def tiny(small, own_registry):
    """The small run with the quickest network."""
    own_registry.register(Tiny)
    small["network_g"] = {"type": "Tiny"}
    return small


@pytest.fixture
def command(tmp_path, capfd):
    """``command("train.py", options, "a.b=1")``: run in this process; returns exit code and what was printed."""
    from models import runtime

    def call(script, options, *arguments):
        file = tmp_path / f"{options.get('name', 'run')}.yml"
        file.write_text(yaml.safe_dump(options, sort_keys=False))
        main = runpy.run_path(str(ROOT / script), run_name="command")["main"]
        capfd.readouterr()
        code = runtime.run(main, ["-opt", str(file), *arguments])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call
