"""prepare_data archive: odd downloads and odd circumstances, and what it says at the end."""

import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from models import runtime

ROOT = Path(__file__).resolve().parents[2]
# the tests are no package
small = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("archive_imitations.py"))))


def printed_command(printed):
    """The words of the command to train with, as a shell reads them."""
    return shlex.split(re.search(r"^  (python train.py .*(?:\n    .*)*)", printed, re.MULTILINE)[1].replace("\\\n", ""))


def test_the_command_that_is_printed_trains(tmp_path, archive, tiny, monkeypatch, capfd):
    # the picture of the curve has its own tests
    monkeypatch.setattr("models.report.learning_curve", lambda *_: None)
    small.flickr2k(tmp_path / "down")
    out = tmp_path / "it's my #1: é"
    code, printed = archive("Flickr2K", "--scale", 2, "-o", out)
    assert code == 0, printed
    python, script, option, file, *overrides = printed_command(printed)
    assert (python, script, option) == ("python", "train.py", "-opt")
    assert file == "options/train/sr/SST_DF2K_X2.yml"
    tiny_run = ["network_g={type: Tiny}", "train.total_iter=2", "datasets.train.num_worker_per_gpu=0"]
    tiny_run += ["datasets.train.gt_size=32", "datasets.train.batch_size_per_gpu=2", f"path.root={tmp_path / 'runs'}"]
    code = runtime.run(train.main, ["-opt", str(ROOT / file), *overrides, *tiny_run, "logger.use_tb_logger=false"])
    assert code == 0, capfd.readouterr()


def test_a_command_is_printed_for_what_is_there_and_made(tmp_path, archive):
    small.flickr2k(tmp_path / "down")
    code, printed = archive("Flickr2K", "--scale", 2, "--steps", "lr")
    assert code == 0
    assert "no shipped option file names this data" in printed
    printed = archive("Flickr2K", "--scale", 4)[1]
    assert f"datasets.train.dataroot_lq={tmp_path}/out/Flickr2K/Flickr2K_LR_bicubic/X4_sub.lmdb" in printed
    assert "it goes on from experiments/SST_DF2K_X3/models/net_g_latest.pth, which is not there yet" in printed
    small.its(tmp_path / "down")
    told = archive("ITS")[1]
    assert "datasets.val=null" in printed_command(told)
    assert "datasets/RESIDE/SOTS/indoor/gt" in told
    # sets that are prepared beside it are judged on
    small.sots(tmp_path / "down")
    assert archive("SOTS")[0] == 0
    assert f"datasets.val.dataroot_gt={tmp_path}/out/RESIDE/SOTS/indoor/gt" in printed_command(archive("ITS")[1])


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path, archive, monkeypatch):
    small.its(tmp_path / "down")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert archive("ITS")[0] == 0
    assert (tmp_path / "out/RESIDE/ITS/hazy").is_symlink()


def test_pictures_of_another_part_are_named(tmp_path, archive):
    small.div2k(tmp_path / "down")
    # a picture to judge with, among those to train with
    small.write(tmp_path / "down/DIV2K_train_HR/0801.png", small.photo(801, (60, 76)))
    code, printed = archive("DIV2K", "--dry_run")
    assert code == 3
    assert "DIV2K_train_HR: 1 of 3 are not among the pictures 1 to 800: 0801.png" in printed


def test_a_reduction_without_its_picture_is_told_before_anything_is_made(tmp_path, archive):
    small.div2k(tmp_path / "down")
    small.div2k_lr(tmp_path / "down")
    low = tmp_path / "down/DIV2K_train_LR_bicubic/X2"
    shutil.copy(low / "0001x2.png", low / "0003x2.png")
    (low / "0002x2.png").write_bytes(b"")
    code, printed = archive("DIV2K", "--scale", 2)
    assert code == 3
    assert "X2: 1 without their picture in DIV2K/DIV2K_train_HR: 0003x2" in printed
    # a damaged one is not missing
    assert "error: DIV2K in " in printed
    assert ": 2 problems" in printed
    assert not (tmp_path / "out").exists()


def test_pictures_of_which_no_crop_would_be_left_are_told_before_anything_is_made(tmp_path, archive):
    small.div2k(tmp_path / "down")
    small.write(tmp_path / "down/DIV2K_train_HR/0003.png", small.photo(3, (11, 76)))
    code, printed = archive("DIV2K", "--scale", 2, "--small", "keep")
    assert code == 3
    assert "1 pictures are smaller than 12: 0003.png; kept whole, in multiples of 12, nothing would be left" in printed
    assert not (tmp_path / "out").exists()
    assert archive("DIV2K", "--scale", 2, "--small", "skip", "--steps", "lr", "subimages")[0] == 0


@pytest.mark.parametrize("count", ["0", "257", "many"])
def test_a_number_of_workers_that_no_machine_has_is_refused(tmp_path, archive, capfd, count):
    with pytest.raises(SystemExit, match="2"):
        archive("ITS", "--workers", count)
    assert "argument --workers: " in capfd.readouterr().err
