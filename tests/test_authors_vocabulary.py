"""A file with every key that the authors of SST write, on LMDBs as BasicSR has them, runs as it is."""

import runpy
import sys
from pathlib import Path

import cv2
import lmdb
import pytest
import torch

from data.degrade import bicubic_downsample
from models import runtime

ROOT = Path(__file__).resolve().parent.parent

FILE = """
name: as_the_authors_write
model_type: ESRModel
scale: 2
num_gpu: 4
manual_seed: 0

datasets:
  train:
    name: corners
    type: {kind}
    dataroot_gt: /nowhere/HR_sub.lmdb
    filename_tmpl: '{{}}'
    io_backend:
      type: lmdb
    gt_size: 128
    use_hflip: true
    use_rot: true
    use_shuffle: true
    num_worker_per_gpu: 4
    batch_size_per_gpu: 8
    dataset_enlarge_ratio: 1
    prefetch_mode: cuda
    pin_memory: true
  val_1:
    name: one
    type: PairedImageDataset
    dataroot_gt: /nowhere/HR
    dataroot_lq: /nowhere/LR_bicubic/X2
    filename_tmpl: '{{}}x2'
    io_backend:
      type: disk

network_g:
  type: SST
  dim: 12
  window_sizes: [4, 8]
  num_heads: [3, 3]
  ranks: [4, 4]
  n_blocks: 1
  exp_ratio: 1.5
  attn_type: RIB
  rib_hidden_dim: 8
  rib_n_freqs: 4
  upscaling_factor: 2
  upsampler_type: pixelshuffle_direct
  gate_type: DWC

path:
  pretrain_network_g: ~
  param_key_g: params_ema
  strict_load_g: true
  resume_state: ~

train:
  ema_decay: 0.999
  optim_g:
    type: AdamW
    lr: !!float 5e-4
    weight_decay: 0
    betas: [0.9, 0.9]
  scheduler:
    type: MultiStepLR
    milestones: [250000, 400000]
    gamma: 0.5
  total_iter: 500000
  warmup_iter: 20000
  pixel_opt:
    type: L1Loss
    loss_weight: 1.0
    reduction: mean

val:
  val_freq: !!float 5e3
  save_img: false
  pbar: False
  metrics:
    psnr:
      type: calculate_psnr
      crop_border: 2
      test_y_channel: true
      better: higher

logger:
  print_freq: 100
  save_checkpoint_freq: !!float 5e3
  use_tb_logger: true
  wandb:
    project: RIN
    resume_id: ~

dist_params:
  backend: nccl
  port: 29500
"""


def write_lmdb(folder, pictures):
    """One value per picture, and the listing beside it."""
    folder.mkdir()
    with lmdb.open(str(folder), map_size=1 << 24) as database, database.begin(write=True) as transaction:
        for key, picture in pictures.items():
            transaction.put(key.encode(), cv2.imencode(".png", picture)[1].tobytes())
    lines = [f"{key}.png ({picture.shape[0]},{picture.shape[1]},3) 1\n" for key, picture in pictures.items()]
    (folder / "meta_info.txt").write_text("".join(lines))


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """Overrides that put real pictures in the place of the authors' paths, at sizes for a test."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    photo = cv2.imread(str(ROOT / "datasets/quickstart/train/picos.jpg"))
    corners = {f"corner_{i}": photo[100 + 40 * i : 148 + 40 * i, 60:108] for i in range(3)}
    write_lmdb(tmp_path / "gt.lmdb", corners)
    write_lmdb(tmp_path / "lq.lmdb", {key: bicubic_downsample(corner, 2) for key, corner in corners.items()})
    for folder, name, picture in (("hr", "a", corners["corner_0"]), ("lr", "ax2", corners["corner_0"][::2, ::2])):
        (tmp_path / folder).mkdir()
        cv2.imwrite(str(tmp_path / folder / f"{name}.png"), picture)
    sizes = ["datasets.train.batch_size_per_gpu=1", "datasets.train.gt_size=32", "train.total_iter=2"]
    sizes += ["datasets.train.num_worker_per_gpu=0", "val.val_freq=2", f"path.root={tmp_path / 'out'}"]
    sets = {"train.dataroot_gt": "gt.lmdb", "val_1.dataroot_gt": "hr", "val_1.dataroot_lq": "lr"}
    return sizes + [f"datasets.{key}={tmp_path / folder}" for key, folder in sets.items()]


@pytest.mark.parametrize("kind", ["PairedImageDataset", "DownsampleImageDataset"])
def test_two_steps_with_only_roots_and_sizes_changed(kind, roots, tmp_path, monkeypatch, capfd):
    # as if it were not installed
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "authors.yaml").write_text(FILE.format(kind=kind))
    if kind == "PairedImageDataset":
        roots.append(f"datasets.train.dataroot_lq={tmp_path / 'lq.lmdb'}")
    main = runpy.run_path(str(ROOT / "train.py"), run_name="command")["main"]
    code = runtime.run(main, ["-opt", str(tmp_path / "authors.yaml"), *roots])
    printed = " ".join("".join(capfd.readouterr()).split())
    assert code == 0, printed
    assert (tmp_path / "out/experiments/as_the_authors_write/models/net_g_2.pth").exists()
    assert printed.count("prefetch_mode") <= 1
    lacking = ["wandb is not installed"]
    lacking += [] if torch.cuda.is_available() else ["num_gpu is 4, but CUDA is not available: the run uses the CPU"]
    for notice in lacking:
        assert printed.count(notice) == 1, notice
