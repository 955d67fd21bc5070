"""prepare_data archive: whole archives, imitated in small, become sets that the shipped option files train with."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from data import DATASETS
from data.archives import ARCHIVES
from data.backends import FolderSource, LmdbSource
from data.degrade import bicubic_downsample
from data.io import decode, read_image

ROOT = Path(__file__).resolve().parents[2]
# the tests are no package
small = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("archive_imitations.py"))))
IMITATIONS, photo, write = small.IMITATIONS, small.photo, small.write


class Same(torch.nn.Module):
    """The quickest network for scale 1."""

    scale, in_channels = 1, 3

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


def shipped(tiny, file, out, *, judged=("val",), **changed):
    """The data of a shipped option file, below ``out``, with the smallest network and two steps."""
    options = yaml.safe_load((ROOT / "options/train" / file).read_text().replace("datasets/", f"{out}/"))
    scale = options["scale"]
    sets = {phase: data for phase, data in options["datasets"].items() if phase == "train" or phase in judged}
    sets["train"] |= {"gt_size": 24, "batch_size_per_gpu": 2, "num_worker_per_gpu": 0, **changed}
    sets["train"].pop("prefetch_mode", None)
    network = {"type": "Same"} if scale == 1 else {"type": "Tiny", "enlarge": scale}
    metrics = {"psnr": {"type": "calculate_psnr", "crop_border": scale}}
    judge = {"val_freq": 2, "metrics": metrics} if len(sets) > 1 else {"val_freq": 2}
    return tiny | {"scale": scale, "network_g": network, "datasets": sets, "val": judge, "manual_seed": 1}


# archive, what else is prepared beside it, option file, sets it is judged on, changes
TRAINED = [
    ("DF2K", (), "sr/SST_DF2K_X2.yml", (), {}),
    ("DIV2K", (), "sr/SSTlight_DIV2K_X2.yml", (), {}),
    ("LSDIR", (), "sr/SSTLarge_DFLIP_X2.yml", (), {"dataroot_gt": "{}/LSDIR/HR", "io_backend": {"type": "disk"}}),
    ("DFLIP", (), "sr/SSTLarge_DFLIP_X2.yml", (), {}),
    ("ITS", ("SOTS",), "dehaze/MBTaylorFormer_B_ITS.yml", ("val",), {}),
    ("OTS", ("SOTS",), "dehaze/MBTaylorFormer_B_OTS.yml", ("val",), {}),
    ("O-HAZE", (), "dehaze/MBTaylorFormer_B_O-HAZE.yml", ("val",), {}),
    ("Dense-Haze", (), "dehaze/MBTaylorFormer_B_Dense-Haze.yml", (), {}),
    ("NH-HAZE", (), "dehaze/MBTaylorFormerV2_B_NH-HAZE.yml", (), {}),
    ("Haze4K", (), "dehaze/MBTaylorFormerV2_B_Haze4K.yml", ("val",), {}),
]


@pytest.mark.parametrize(("name", "beside", "file", "judged", "changed"), TRAINED, ids=[row[0] for row in TRAINED])
def test_an_archive_as_downloaded_becomes_a_set_that_trains_with_the_shipped_file(
    tmp_path, archive, tiny, own_registry, command, monkeypatch, name, beside, file, judged, changed
):
    # the picture of the curve has its own tests
    monkeypatch.setattr("models.report.learning_curve", lambda *_: None)
    for one in (name, *beside):
        IMITATIONS[one](tmp_path / "down")
        scales = ("--scale", 2) if ARCHIVES[one].train else ()
        code, printed = archive(one, *scales)
        assert code == 0, printed
    own_registry.register(Same)
    changed = {k: v.format(tmp_path / "out") if k == "dataroot_gt" else v for k, v in changed.items()}
    options = shipped(tiny, file, tmp_path / "out", judged=judged, **changed)
    code, printed = command("train.py", options, "train.total_iter=2", "logger.save_checkpoint_freq=2")
    assert code == 0, printed
    assert ("psnr" in printed) == bool(judged)


def test_every_archive_of_the_table_has_an_imitation_that_passes(tmp_path, archive):
    assert set(IMITATIONS) == set(ARCHIVES)
    for name in {*IMITATIONS} - {row[0] for row in TRAINED} - {"SOTS"}:
        IMITATIONS[name](tmp_path / name)
        code, printed = archive(name, "--dry_run", down=tmp_path / name)
        assert code == 0, printed


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-40])


BROKEN = [
    ("DIV2K", lambda d: cut_short(d / "DIV2K_train_HR/0002.png"), "DIV2K_train_HR/0002.png"),
    ("DIV2K", lambda d: shutil.rmtree(d / "DIV2K_train_HR"), "DIV2K/DIV2K_train_HR: no such folder with pictures"),
    ("Flickr2K", lambda d: (d / "Flickr2K/Flickr2K_HR/000001.png").write_bytes(b""), "000001.png: the file is empty"),
    (
        "Flickr2K",
        lambda d: write(d / "Flickr2K/Flickr2K_HR/cover.png", photo(1, (20, 20))),
        "named as in this archive: c",
    ),
    ("DF2K", lambda d: (d / "DIV2K/DIV2K_train_LR_bicubic/X2/0001x2.png").unlink(), "X2: 1 missing: 0001x2; unpack"),
    ("DF2K", lambda d: shutil.copytree(d / "DIV2K", d / "again"), "DIV2K/DIV2K_train_HR is there more than once"),
    ("DF2K", lambda d: write(d / "DIV2K/DIV2K_train_LR_bicubic/X2/0001x2.png", photo(1, (9, 9))), "is 9x9 and should"),
    ("LSDIR", lambda d: (d / "LSDIR/train/0001000/0000002.png").write_bytes(b"text"), "0000002.png"),
    (
        "LSDIR",
        lambda d: shutil.copytree(d / "LSDIR/train/0001000", d / "LSDIR/train/1"),
        "2 names are there twice: 0000",
    ),
    ("DiverSeg-IP", lambda d: cut_short(d / "DiverSeg-IP/pass/00a1.jpg"), "00a1.jpg"),
    ("DFLIP", lambda d: shutil.rmtree(d / "DiverSeg-IP"), "DiverSeg-IP/HR: no such folder"),
    ("ITS", lambda d: (d / "ITS_v2/clear/2.png").unlink(), "Without a clear picture: 2_1_0.91.png"),
    (
        "ITS",
        lambda d: write(d / "ITS_v2/clear/2.png", photo(2, (30, 30))),
        "2.png and 2_1_0.91.png do not fit, 30x30 and",
    ),
    ("OTS", lambda d: [p.unlink() for p in d.rglob("0005_*")], "1 clear pictures without a hazy one: 0005.jpg"),
    ("SOTS", lambda d: write(d / "SOTS/indoor/nyuhaze500/gt/1400.png", photo(1, (460, 620))), "should be 480x640"),
    ("O-HAZE", lambda d: cut_short(d / "# O-HAZY NTIRE 2018/hazy/45_outdoor_hazy.jpg"), "45_outdoor_hazy.jpg"),
    ("I-HAZE", lambda d: (d / "x.zip.part").write_bytes(b"x"), "x.zip.part is a download that has not ended"),
    ("Dense-Haze", lambda d: write(d / "Dense_Haze_NTIRE19/GT/01_GT.png", photo(1, (600, 800))), "should be 1200x1600"),
    ("NH-HAZE", lambda d: (d / "NH-HAZE/55_GT.png").unlink(), "Without a clear picture: 55_hazy.png"),
    ("Haze4K", lambda d: (d / "Haze4K/test/gt/1.png").rename(d / "Haze4K/test/gt/one.png"), "archive: one.png"),
]


@pytest.mark.parametrize(("name", "spoil", "told"), BROKEN, ids=[f"{row[0]}-{row[2][-20:]}" for row in BROKEN])
def test_a_broken_archive_is_named_and_nothing_is_made(tmp_path, archive, name, spoil, told):
    IMITATIONS[name](tmp_path / "down")
    spoil(tmp_path / "down")
    code, printed = archive(name)
    assert code == 3, printed
    assert f"error: {name} in {tmp_path / 'down'}" in printed
    assert told in printed
    assert not (tmp_path / "out").exists()


def test_gaps_are_named_and_partial_lets_them_pass(tmp_path, archive):
    IMITATIONS["ITS"](tmp_path / "down")
    small.div2k(tmp_path / "down")
    code, printed = archive("DIV2K", "--dry_run", partial=False)
    assert code == 3
    assert "DIV2K/DIV2K_train_HR: 798 of 800 missing: 0003.png, 0004.png, 0005.png, 0006.png, 0007.png, ..." in printed
    assert "DIV2K/DIV2K_valid_HR: 99 of 100 missing: 0802.png" in printed
    assert "give --partial" in printed
    code, printed = archive("ITS", partial=False)
    assert code == 3
    assert "RESIDE/ITS/clear: 1397 of 1,399 missing: 3.png" in printed
    assert "RESIDE/ITS/hazy: 2 scenes without their 10 hazy pictures: 1 (3), 2 (3)" in printed


def test_a_complete_archive_passes_with_its_counts(tmp_path, archive):
    small.o_haze(tmp_path / "down", [f"{number:02d}" for number in range(1, 46)])
    code, printed = archive("O-HAZE", partial=False)
    assert code == 0, printed
    assert "45 pairs, by the names of O-HAZE" in printed
    folders = {f"dataroot_{side}": str(tmp_path / "out/O-HAZE" / name) for side, name in (("gt", "GT"), ("lq", "hazy"))}
    sets = {split: DATASETS.get("ResideDataset")(**folders, phase="val", split=split) for split in ("train", "test")}
    assert {split: len(found) for split, found in sets.items()} == {"train": 40, "test": 5}


def test_leftovers_of_unpacking_are_named_and_do_no_harm(tmp_path, archive):
    small.div2k(tmp_path / "twice")
    (tmp_path / "down").mkdir()
    (tmp_path / "twice/DIV2K_train_HR").rename(tmp_path / "down/DIV2K_train_HR")
    inner = tmp_path / "down/DIV2K_train_HR/DIV2K_train_HR"
    (tmp_path / "down/DIV2K_train_HR").rename(tmp_path / "inner")
    inner.parent.mkdir()
    (tmp_path / "inner").rename(inner)
    (tmp_path / "down/DIV2K_train_HR.zip").write_bytes(b"PK")
    (inner / "Thumbs.db").write_bytes(b"x")
    write(tmp_path / "down/DIV2K_train_HR/__MACOSX/0001.png", photo(1, (20, 20)))
    code, printed = archive("DIV2K", "--dry_run", "--scale", 2)
    assert code == 0, printed
    assert f"DIV2K/DIV2K_train_HR: {inner}" in printed
    assert f"still packed, or left after unpacking: {tmp_path / 'down/DIV2K_train_HR.zip'}" in printed
    assert "__MACOSX" in printed
    assert "Thumbs.db" in printed


def test_a_zip_that_was_not_unpacked_is_the_first_guess(tmp_path, archive):
    (tmp_path / "down").mkdir()
    (tmp_path / "down/hazy.zip").write_bytes(b"PK")
    code, printed = archive("O-HAZE")
    assert code == 3
    assert "O-HAZE/hazy: no such folder with pictures" in printed
    assert "still packed: hazy.zip: unpack it" in printed


def test_pictures_of_all_scales_are_cut_at_the_same_places(tmp_path, archive):
    small.df2k(tmp_path / "down")
    assert archive("DF2K", "--scale", 2, 4)[0] == 0
    out = tmp_path / "out/DF2K"
    names = FolderSource(out / "DF2K_train_HR_sub").names()
    assert {name.split("/")[0] for name in names} == {"DIV2K", "Flickr2K"}
    for scale in (2, 4):
        low = LmdbSource(out / f"DF2K_train_LR_bicubic/X{scale}_sub.lmdb")
        assert low.names() == names
        # 65 x 67: the last 5 rows and 7 columns fill no block of 12 and are in no crop
        whole = bicubic_downsample(read_image(tmp_path / "down/Flickr2K/Flickr2K_HR/000002.png"), scale)
        cut = decode(low.read("Flickr2K/000002_s004.png"))
        np.testing.assert_array_equal(cut, whole[12 // scale : 60 // scale, 12 // scale : 60 // scale])
    # a further scale fits the crops that are there
    code, printed = archive("DF2K", "--scale", 3)
    assert code == 0, printed
    assert LmdbSource(out / "DF2K_train_LR_bicubic/X3_sub.lmdb").names() == names


def test_the_archives_own_reductions_are_taken_and_compared(tmp_path, archive):
    small.div2k(tmp_path / "down")
    small.div2k_lr(tmp_path / "down")
    code, printed = archive("DIV2K", "--scale", 2, "--steps", "lr")
    assert code == 0, printed
    own = tmp_path / "out/DIV2K/DIV2K_train_LR_bicubic/X2"
    assert own.is_symlink()
    low = tmp_path / "down/DIV2K_train_LR_bicubic/X2"
    write(low / "0001x2.png", read_image(low / "0001x2.png")[::-1])
    shutil.rmtree(tmp_path / "out")
    code, printed = archive("DIV2K", "--scale", 2, "--steps", "lr")
    assert code == 3
    assert "0001x2.png is not the bicubic reduction of" in printed
    assert not os.path.lexists(own)


def made(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_the_same_command_again_makes_nothing_anew_and_a_lost_part_only(tmp_path, archive):
    small.df2k(tmp_path / "down")
    assert archive("DF2K", "--scale", 2)[0] == 0
    before = made(tmp_path / "out")
    code, printed = archive("DF2K", "--scale", 2)
    assert code == 0, printed
    assert "about 0 B needed" in printed
    assert made(tmp_path / "out") == before
    lost = tmp_path / "out/DF2K/DF2K_train_LR_bicubic/X2_sub.lmdb"
    shutil.rmtree(lost)
    assert archive("DF2K", "--scale", 2)[0] == 0
    after = made(tmp_path / "out")
    assert set(after) == set(before)
    assert {path for path in after if after[path] != before[path]} == {path for path in before if lost in path.parents}


def test_a_run_that_is_killed_is_finished_by_the_next(tmp_path, archive):
    small.div2k(tmp_path / "down", (300, 300))
    chosen = ["--scale", "2", "--subimages", "48", "24", "--steps", "lr", "subimages"]
    places = [str(tmp_path / "down"), "-o", str(tmp_path / "out"), "--partial", "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.prepare_data", "archive", "DIV2K", *places, *chosen], cwd=ROOT
    )
    begun, done = (tmp_path / "out/DIV2K" / name for name in (".DIV2K_train_HR_sub.partial", "DIV2K_train_HR_sub"))
    while process.poll() is None and (not begun.is_dir() or len(list(begun.iterdir())) < 9):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    kept = made(begun)
    # as a kill in the middle of a picture leaves it
    (begun / ".0001_s144.png.0123").write_bytes(b"half")
    assert not done.exists()
    code, printed = archive("DIV2K", *chosen)
    assert code == 0, printed
    assert "going on with what an interrupted run left" in printed
    # 12 places along each side, and the note
    assert len(made(done)) == 2 * 12 * 12 + 1
    assert all((done / path.name).stat().st_mtime_ns == time for path, time in kept.items() if path.suffix == ".png")


def test_pictures_too_small_for_the_crops_are_told_before_anything_is_made(tmp_path, archive):
    small.div2k(tmp_path / "down")
    code, printed = archive("DIV2K", "--subimages", 72, 72)
    assert code == 3
    assert "DIV2K: 2 pictures are smaller than 72: 0001.png, 0002.png; give --small skip or keep" in printed
    assert not (tmp_path / "out").exists()


def test_what_has_the_name_already_is_left_as_it_is(tmp_path, archive):
    small.its(tmp_path / "down")
    write(tmp_path / "out/RESIDE/ITS/clear/1.png", photo(4, (20, 20)))
    code, printed = archive("ITS")
    assert code == 3
    assert "it is left as it is" in printed
    assert read_image(tmp_path / "out/RESIDE/ITS/clear/1.png").shape == (20, 20, 3)


def test_an_archive_unpacked_where_the_option_files_look_stays_there(tmp_path, archive):
    small.dense_haze(tmp_path / "down")
    (tmp_path / "out").mkdir()
    (tmp_path / "down/Dense_Haze_NTIRE19").rename(tmp_path / "out/Dense-Haze")
    code, printed = archive("Dense-Haze", down=tmp_path / "out/Dense-Haze")
    assert code == 0, printed
    assert not (tmp_path / "out/Dense-Haze/GT").is_symlink()


def test_archives_unpacked_side_by_side_in_the_data_folder_are_merged_there(tmp_path, archive):
    small.df2k(tmp_path / "out")
    for again in (False, True):
        code, printed = archive("DF2K", "--scale", 2, down=tmp_path / "out")
        assert code == 0, printed
        assert ("about 0 B needed" in printed) == again
    made = LmdbSource(tmp_path / "out/DF2K/DF2K_train_HR_sub.lmdb").names()
    assert len(made) == len(set(made)) == 16


def test_only_option_files_whose_data_are_all_there_are_named(tmp_path, archive):
    small.df2k(tmp_path / "down")
    printed = archive("DF2K", "--scale", 3)[1]
    assert f"datasets.train.dataroot_lq={tmp_path}/out/DF2K/DF2K_train_LR_bicubic/X3_sub.lmdb" in printed
    assert "SST_DF2K_X3.yml" in printed
    assert "_X2.yml" not in printed


def test_a_dry_run_makes_nothing_and_tells_counts_and_space(tmp_path, archive):
    small.df2k(tmp_path / "down")
    code, printed = archive("DF2K", "--dry_run", "--scale", 2)
    assert code == 0
    assert not (tmp_path / "out").exists()
    assert "DF2K_train_HR_sub  16 pictures, about " in printed
    assert "free on the disk of" in printed
    assert "dry run: nothing was made" in printed


def test_a_disk_that_is_too_small_is_told_before_anything_is_made(tmp_path, archive, monkeypatch):
    small.df2k(tmp_path / "down")
    # no disk of a test is as small as that
    monkeypatch.setattr("scripts.prepare_archive.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 5000))
    code, printed = archive("DF2K", "--scale", 2)
    assert code == 3
    assert "has 4.9 KiB free" in printed
    assert not (tmp_path / "out").exists()


def test_a_listing_names_the_pictures_and_their_sizes(tmp_path, archive):
    small.lsdir(tmp_path / "down")
    assert archive("LSDIR")[0] == 0
    text = (tmp_path / "out/meta_info/meta_info_LSDIR_HR.txt").read_text()
    assert text.splitlines()[0] == "0001000/0000001.png (48,64,3)"
    assert len(text.splitlines()) == 3


def test_full_verification_finds_what_headers_do_not_show(tmp_path, archive):
    small.div2k(tmp_path / "down")
    path = tmp_path / "down/DIV2K_train_HR/0001.png"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    assert archive("DIV2K", "--dry_run")[0] == 0
    code, printed = archive("DIV2K", "--dry_run", "--verify", "full")
    assert code == 3
    assert "0001.png" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ITZ",), "archive ITZ is not known, did you mean ITS"),
        (("ITS", "--steps", "lr"), "ITS has pairs"),
        (("DIV2K", "--steps", "subimages"), "add lr"),
        (("DIV2K", "--steps", "none", "lr"), "none stands alone"),
    ],
)
def test_wrong_options_are_told(tmp_path, archive, arguments, told):
    small.div2k(tmp_path / "down")
    code, printed = archive(*arguments)
    assert code == 2
    assert told in printed.replace("; did", ", did")
