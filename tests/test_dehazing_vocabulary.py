"""Files with every key that the authors of MB-TaylorFormer write, V1 and V2, run as they are on folders of theirs."""

import runpy
from pathlib import Path

import cv2
import pytest
import torch
import yaml

from models import checkpoint, runtime
from models.losses import LOSSES

ROOT = Path(__file__).resolve().parent.parent

FILE = """
name: as_the_authors_write
model_type: ImageCleanModel
scale: 1
num_gpu: 8
manual_seed: {seed}

datasets:
  train:
    name: TrainSet
    type: Dataset_PairedImage
    dataroot_gt: /nowhere/ITS/{gt}
    dataroot_lq: /nowhere/ITS/{lq}
    geometric_augs: true
    filename_tmpl: '{{}}'
    io_backend:
      type: disk
    use_shuffle: true
    num_worker_per_gpu: 8
    batch_size_per_gpu: {batch}
    mini_batch_sizes: [{mini_batch}]
    iters: [9200000]
    gt_size: 256
    gt_sizes: [256]
    dataset_enlarge_ratio: 1
    prefetch_mode: ~
  val:
    name: ValSet
    type: Dataset_PairedImage
    dataroot_gt: /nowhere/ITS_SOTS/{gt}
    dataroot_lq: /nowhere/ITS_SOTS/{lq}
    io_backend:
      type: disk

network_g:
  type: MB_TaylorFormer
  model_name: 16
  inp_channels: 3
  out_channels: 3
  dim: [24, 48, 72, 96]
  num_blocks: [2, 3, 3, 4]
  num_refinement_blocks: {refinement}
  heads: [1, 2, 4, 8]
  ffn_expansion_factor: 2.66
  bias: False
  LayerNorm_type: WithBias
  dual_pixel_task: False
  num_path: [2, 2, 2, 2]
  qk_norm: 0.5
  offset_clamp: [-3, 3]

path:
  pretrain_network_g: ~
  strict_load_g: false
  resume_state: ~

train:
  total_iter: 500000
  warmup_iter: -1
  use_grad_clip: true
  scheduler:
    type: CosineAnnealingRestartCyclicLR
    periods: [200000, 300000]
    restart_weights: [1, 1]
    eta_mins: [{peak}, {floor}]
  mixing_augs:
    mixup: false
    mixup_beta: 1.2
    use_identity: true
  optim_g:
    type: AdamW
    lr: !!float {lr}
    weight_decay: !!float 1e-4
    betas: [0.9, 0.999]
  pixel_opt:
    type: L1Loss
    loss_weight: 1
    reduction: mean
{fft}
val:
  window_size: 8
  val_freq: !!float 4e3
  save_img: False
  rgb2bgr: true
  use_image: true
  max_minibatch: 8
  metrics:
    psnr:
      type: calculate_psnr
      crop_border: 0
      test_y_channel: false

logger:
  print_freq: 1000
  save_checkpoint_freq: !!float 4e3
  use_tb_logger: false
  wandb:
    project: ~
    resume_id: ~

dist_params:
  backend: nccl
  port: 29500
"""
FFT = "  fft_loss_opt:\n    type: FFTLoss\n    loss_weight: 0.1\n    reduction: mean\n"
V1 = {"seed": 100, "gt": "imgH", "lq": "imgL", "batch": 1, "mini_batch": 1, "refinement": 2, "fft": ""}
V1 |= {"peak": 0.0002, "floor": 0.00001, "lr": "2e-4"}
V2 = {"seed": 42, "gt": "target", "lq": "input", "batch": 4, "mini_batch": 2, "refinement": 4, "fft": FFT}
V2 |= {"peak": 0.0003, "floor": 0.000001, "lr": "3e-4"}
SMALL = "network_g.dim=[8, 16, 16, 16]", "network_g.num_blocks=[1, 1, 1, 1]"


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """``run(version, *overrides)``: train the file with only roots and sizes changed; code, words, folder."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))

    def call(version, *overrides):
        photo = cv2.imread(str(ROOT / "datasets/quickstart/train/picos.jpg"))
        names = {"ITS": ("1.png", ("1_1_0.90179.png", "1_2_0.8.png")), "ITS_SOTS": ("00001.png", ("00001.png",))}
        roots = []
        for (folder, (clear, hazy)), key in zip(names.items(), ("train", "val"), strict=True):
            for side, files in (("gt", (clear,)), ("lq", hazy)):
                place = tmp_path / "data" / folder / version[side]
                place.mkdir(parents=True)
                for i, name in enumerate(files):
                    crop = photo[100:140, 60:108]
                    cv2.imwrite(str(place / name), crop if side == "gt" else crop // 2 + 90 + 10 * i)
                roots.append(f"datasets.{key}.dataroot_{side}={place}")
        (tmp_path / "authors.yaml").write_text(FILE.format(**version))
        sizes = ["datasets.train.gt_size=32", "datasets.train.gt_sizes=[32]", "datasets.train.num_worker_per_gpu=0"]
        sizes += ["train.total_iter=2", "val.val_freq=2", f"path.root={tmp_path / 'out'}", *SMALL]
        main = runpy.run_path(str(ROOT / "train.py"), run_name="command")["main"]
        code = runtime.run(main, ["-opt", str(tmp_path / "authors.yaml"), *roots, *sizes, *overrides])
        return code, " ".join("".join(capfd.readouterr()).split()), tmp_path / "out/experiments/as_the_authors_write"

    return call


def test_a_file_of_version_1_trains_with_each_notice_once(run):
    code, printed, folder = run(V1)
    assert code == 0, printed
    state = checkpoint.load_state(folder / "training_states/2.state")
    assert state["samples"] == 2
    # the switch in the name is told, and so is each key that does nothing
    notices = ["network_g.type MB_TaylorFormer is taken for version 1", "model_name 16"]
    notices += [f"val.{key} has no effect" for key in ("window_size", "rgb2bgr", "max_minibatch")]
    for notice in notices:
        assert printed.count(notice) == 1, notice
    for acting in ("geometric_augs", "mini_batch_sizes", "mixing_augs", "use_image"):
        assert f"{acting} has no effect" not in printed
    assert "use_grad_clip" not in printed


def test_a_file_of_version_2_trains_with_its_name_changed(run):
    code, printed, folder = run(V2, "network_g.type=MBTaylorFormerV2")
    assert code == 0, printed
    assert "MBTaylorFormerV2, " in printed
    assert "l_pix: L1Loss, l_fft: FFTLoss" in printed
    # four are for each step, of which the stage takes two
    assert "so this many are loaded rather than batch_size_per_gpu 4" in printed
    state = checkpoint.load_state(folder / "training_states/2.state")
    assert state["samples"] == 4
    assert any(".scale" in key for key in state["model"]["weights"]["params"])


def test_the_loss_of_version_2_is_l1_and_a_tenth_of_its_spectrum():
    pred, gt = torch.rand(2, 3, 8, 10, dtype=torch.float64), torch.rand(2, 3, 8, 10, dtype=torch.float64)
    section = yaml.safe_load(FFT)["fft_loss_opt"]
    spectra = [torch.stack([s.real, s.imag], dim=-1) for s in (torch.fft.fft2(x) for x in (pred, gt))]
    expected = 0.1 * (spectra[0] - spectra[1]).abs().mean()
    torch.testing.assert_close(LOSSES.build(section)(pred, gt), expected)
