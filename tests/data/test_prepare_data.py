"""python -m scripts.prepare_data: what it makes, what it refuses, and how it goes on after an interruption."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from data import DATASETS
from data.archives import ARCHIVES
from data.backends import FolderSource
from data.claim import claimed
from data.io import read_image, write_image
from data.prepare import Grid, crop_starts, cut_subimages, make_lr
from data.resize import imresize
from models import runtime
from options.errors import OptionsError
from scripts import prepare_data
from scripts.watching import _line


@pytest.fixture
def pictures(tmp_path, noise):
    """pictures(folder, name=(h, w, c) ...): a folder of noise; returns its path."""

    def make(folder, *, dtype=np.uint8, **shapes):
        for seed, (name, shape) in enumerate(shapes.items()):
            write_image(tmp_path / folder / f"{name}.png", noise(shape, dtype, seed))
        return str(tmp_path / folder)

    return make


@pytest.fixture
def tool(capfd):
    """tool("check", folder ...) -> exit code and what was printed."""

    def call(*arguments):
        capfd.readouterr()
        code = runtime.run(prepare_data.main, [str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    before = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, before)


def through(items, _):
    return items


def files(folder):
    return sorted(os.path.relpath(os.path.join(where, name), folder) for where, _, n in os.walk(folder) for name in n)


@pytest.mark.parametrize(
    ("length", "side", "step", "thresh", "expected"),
    [
        (480, 480, 240, 0, [0]),
        (960, 480, 240, 0, [0, 240, 480]),
        (961, 480, 240, 0, [0, 240, 480, 481]),
        (961, 480, 240, 1, [0, 240, 480]),
        (1100, 480, 240, 0, [0, 240, 480, 620]),
        (700, 480, 600, 0, [0, 220]),
    ],
)
def test_the_last_crop_ends_at_the_border(length, side, step, thresh, expected):
    assert crop_starts(length, side, step, thresh) == expected


def test_subimages_are_the_regions_that_their_numbers_say(pictures, tmp_path, tool):
    folder = pictures("in", **{"0001": (50, 70, 3), "sub/b": (40, 40, 3)})
    code, printed = tool("subimages", folder, tmp_path / "out", "--size", 40, "--step", 20)
    assert code == 0, printed
    assert "7 sub-images" in printed
    assert files(tmp_path / "out") == [*(f"0001_s00{i}.png" for i in range(1, 7)), "sub/b_s001.png"]
    whole = read_image(f"{folder}/0001.png")
    for number, (top, left) in enumerate([(0, 0), (0, 20), (0, 30), (10, 0), (10, 20), (10, 30)], start=1):
        cut = read_image(tmp_path / "out" / f"0001_s00{number}.png")
        np.testing.assert_array_equal(cut, whole[top : top + 40, left : left + 40])


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (4, np.uint8), (3, np.uint16)])
def test_subimages_keep_depth_grey_and_transparency(pictures, tmp_path, channels, dtype):
    folder = pictures("in", dtype=dtype, a=(20, 20, channels))
    cut_subimages(FolderSource(folder), tmp_path / "out", Grid(16, 16), threads=1, watch=through)
    cut = read_image(tmp_path / "out" / "a_s004.png")
    assert cut.dtype == dtype
    np.testing.assert_array_equal(cut, read_image(f"{folder}/a.png")[4:, 4:])


def test_pairs_are_cut_at_the_same_places_into_equally_many_files_of_the_same_names(pictures, tmp_path, tool):
    # 51 rows and 67 columns: the GT is larger by less than one LQ pixel
    gt = pictures("gt", a=(51, 67, 3), b_x2=(40, 48, 3))
    assert tool("lr", gt, tmp_path / "lq", "--scale", 2)[0] == 0
    arguments = ["--lr", tmp_path / "lq", tmp_path / "low", "--scale", 2, "--size", 32, "--step", 16]
    code, printed = tool("subimages", gt, tmp_path / "high", *arguments)
    assert code == 0, printed
    assert files(tmp_path / "high") == files(tmp_path / "low")
    assert "b_x2_s004.png" in files(tmp_path / "high")
    dataset = DATASETS.get("PairedImageDataset")(
        dataroot_gt=str(tmp_path / "high"), dataroot_lq=str(tmp_path / "low"), scale=2, phase="val"
    )
    whole = imresize(read_image(f"{gt}/a.png")[:50, :66], 1 / 2)
    last = dataset[dataset.pairs.index(("a_s012.png", "a_s012.png"))]
    np.testing.assert_array_equal(np.round(last["lq"].numpy() * 255), whole[9:25, 17:33].transpose(2, 0, 1))
    np.testing.assert_array_equal(
        np.round(last["gt"].numpy() * 255), read_image(f"{gt}/a.png")[18:50, 34:66].transpose(2, 0, 1)
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("0001x2", "ax2bx2"), ["0001_s001.png", "ax2b_s001.png"]),
        (("0001x2", "0002"), ["0001x2_s001.png", "0002_s001.png"]),
        (("0001x2", "0002x4"), ["0001x2_s001.png", "0002x4_s001.png"]),
        (("x2", "ax2"), ["ax2_s001.png", "x2_s001.png"]),
        (("0001x5",), ["0001x5_s001.png"]),
    ],
)
def test_a_suffix_is_left_out_only_at_the_end_and_only_where_all_have_it(pictures, tmp_path, names, expected):
    folder = pictures("in", **{name: (8, 8, 3) for name in names})
    cut_subimages(FolderSource(folder), tmp_path / "out", Grid(8, 8), threads=1, watch=through)
    assert files(tmp_path / "out") == expected


def test_pictures_below_the_size_are_named_or_left_out_or_kept_whole(pictures, tmp_path, tool):
    folder = pictures("in", large=(20, 20, 3), small=(10, 30, 3))
    cut = ["subimages", folder, tmp_path / "out", "--size", 16, "--step", 16]
    code, printed = tool(*cut)
    assert code == 3
    assert "small.png is 10x30, smaller than 16; see --small" in printed
    assert not (tmp_path / "out").exists()
    code, printed = tool(*cut, "--small", "skip")
    assert code == 0
    assert "smaller than 16 and left out: 1 (small.png)" in printed
    assert files(tmp_path / "out") == [f"large_s00{i}.png" for i in range(1, 5)]
    cut[2] = tmp_path / "kept"
    assert tool(*cut, "--small", "keep")[0] == 0
    assert read_image(tmp_path / "kept" / "small_s001.png").shape == (10, 30, 3)


@pytest.mark.parametrize("command", ["subimages", "lr", "lmdb", "meta"])
def test_what_exists_is_never_written_over(pictures, tmp_path, tool, command):
    folder = pictures("in", a=(16, 16, 3))
    out = tmp_path / "out.lmdb"
    out.mkdir()
    (out / "mine").write_text("precious")
    target = out / "mine" if command == "meta" else out
    settings = {"subimages": ["--size", 8], "lr": ["--scale", 2]}.get(command, [])
    code, printed = tool(command, folder, target, *settings)
    assert code == 3
    assert "exists and is left as it is" in printed
    assert (out / "mine").read_text() == "precious"
    assert files(out) == ["mine"]


def stopped_after(count):
    def watch(items, _):
        for number, item in enumerate(items, start=1):
            yield item
            if number == count:
                raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("command", [("subimages", "--size", "16", "--step", "16"), ("lr", "--scale", "2")])
def test_what_another_process_makes_is_left_to_it(pictures, tmp_path, tool, command):
    name, *arguments = command
    given = (name, pictures("in", a=(32, 32, 3)), tmp_path / "out", *arguments)
    (tmp_path / ".out.partial").mkdir()
    with claimed(tmp_path / ".out.partial"):
        code, printed = tool(*given)
        assert code == 3
        assert "is being made by another process; wait for it" in printed
    # a process that was killed before it wrote anything leaves such a folder
    assert tool(*given)[0] == 0


def test_an_interrupted_run_goes_on_where_it_ended(pictures, tmp_path, tool):
    folder = pictures("in", **{f"p{i}": (16, 16, 3) for i in range(9)})
    with pytest.raises(KeyboardInterrupt):
        cut_subimages(FolderSource(folder), tmp_path / "out", Grid(8, 8), threads=1, watch=stopped_after(2))
    assert not (tmp_path / "out").exists()
    first = tmp_path / ".out.partial" / "p0_s001.png"
    before = first.stat().st_mtime_ns
    assert len(files(tmp_path / ".out.partial")) < 37
    code, printed = tool("subimages", folder, tmp_path / "out", "--size", 8, "--step", 8)
    assert code == 0, printed
    assert "going on with what an interrupted run left" in printed
    assert len(files(tmp_path / "out")) == 36
    assert (tmp_path / "out" / "p0_s001.png").stat().st_mtime_ns == before
    assert not first.parent.exists()


@pytest.mark.parametrize("change", ["settings", "pictures"])
def test_what_a_run_of_other_settings_or_pictures_left_is_not_mixed_in(pictures, tmp_path, tool, change):
    folder = pictures("in", **{f"p{i}": (16, 16, 3) for i in range(9)})
    with pytest.raises(KeyboardInterrupt):
        make_lr(
            FolderSource(folder), tmp_path / "out", 2, tmpl="{}x2", alpha="error", threads=1, watch=stopped_after(1)
        )
    if change == "pictures":
        pictures("in", p0=(18, 18, 3))
    code, printed = tool("lr", folder, tmp_path / "out", "--scale", 4 if change == "settings" else 2)
    assert code == 3
    assert "with other settings or pictures; remove it" in printed


def test_lr_pictures_are_those_of_matlab_and_a_cut_is_said(pictures, tmp_path, tool):
    folder = pictures("in", a=(16, 18, 3), odd=(17, 19, 3))
    code, printed = tool("lr", folder, tmp_path / "out", "--scale", 2)
    assert code == 0, printed
    assert "1 picture not a multiple of 2: the last rows or columns are left out (odd.png)" in printed
    assert "filename_tmpl: '{}x2'" in printed
    odd = read_image(f"{folder}/odd.png")[:16, :18]
    np.testing.assert_array_equal(read_image(tmp_path / "out" / "oddx2.png"), imresize(odd, 1 / 2))


def test_check_passes_a_good_pair_of_folders_and_says_what_it_holds(pictures, tmp_path, tool):
    gt = pictures("gt", a=(16, 18, 3), b=(8, 8, 3))
    lq = pictures("lq", ax2=(8, 9, 3), bx2=(4, 4, 3))
    code, printed = tool("check", gt, lq)
    assert code == 0, printed
    for said in ("2 pictures, readable", "largest 18 x 16", "2 png RGB 8 bit", "filename_tmpl: '{}x2'", "2 pairs x2"):
        assert said in printed


def test_check_names_unreadable_unpaired_and_unfitting_pictures(pictures, tmp_path, tool):
    gt = pictures("gt", a=(16, 18, 3), b=(8, 8, 3), c=(10, 8, 3), d=(8, 8, 3))
    lq = pictures("lq", a=(8, 9, 3), b=(4, 4, 3), c=(4, 4, 3), z=(4, 4, 3))
    data = bytearray((tmp_path / "gt" / "b.png").read_bytes())
    data[60] ^= 1
    (tmp_path / "gt" / "b.png").write_bytes(data)
    code, printed = tool("check", gt, lq)
    assert code == 3
    for said in (
        "4 problems",
        "b.png: wrong checksum",
        "1 GT without LQ (filename_tmpl: '{}'): d.png",
        "1 LQ without GT (filename_tmpl: '{}'): z.png",
        "the size of c.png is no multiple",
    ):
        assert said in printed


def test_check_pairs_a_dehazing_archive_by_its_naming(pictures, tool):
    clear = pictures("clear", **{"1400": (32, 40, 3), "1401": (12, 20, 3)})
    hazy = pictures("hazy", **{"1400_1": (12, 20, 3), "1400_2": (12, 20, 3), "1401_1": (12, 20, 3)})
    code, printed = tool("check", clear, hazy, "--naming", "sots_indoor")
    assert code == 0, printed
    assert "3 pairs of 2 clear pictures, naming: SOTS-indoor" in printed
    code, printed = tool("check", clear, hazy, "--naming", "NH-HAZE")
    assert code == 3
    assert "NH-HAZE matches none of 3 hazy pictures; SOTS-indoor matches all 3" in printed
    assert tool("check", clear, hazy, "--naming", "SOTS")[0] == 2
    with pytest.raises(SystemExit, match="2"):
        tool("check", clear, "--naming", "ITS")


def test_a_listing_serves_as_meta_info_file(pictures, tmp_path, tool):
    folder = pictures("in", **{"two words": (9, 8, 3), "sub/b": (8, 8, 1)})
    assert tool("meta", folder, tmp_path / "list" / "meta.txt")[0] == 0
    lines = (tmp_path / "list" / "meta.txt").read_text().splitlines()
    assert lines == ["sub/b.png (8,8,1)", "two words.png (9,8,3)"]
    dataset = DATASETS.get("SingleImageDataset")(dataroot_lq=folder, meta_info_file=str(tmp_path / "list" / "meta.txt"))
    assert dataset.files == ["sub/b.png", "two words.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["subimages", "{in}", "{out}", "--lr", "{in}", "{out}2"], 2, "--lr needs --scale"),
        (["subimages", "{in}", "{out}", "--scale", 2], 2, "--scale has no meaning without --lr"),
        (["subimages", "{in}", "{out}", "--size", 0], 2, "size: 0 is below 1"),
        (["subimages", "{in}", "{out}", "--lr", "{in}", "{out}2", "--scale", 3, "--size", 16], 2, "not a multiple"),
        (["subimages", "{in}", "{out}", "--lr", "{in}", "{out}", "--scale", 2, "--size", 16], 2, "would both go to"),
        (["lr", "{in}", "{out}", "--scale", 1], 2, "scale: 1 is below 2"),
        (["lr", "{in}", "{out}", "--scale", 2, "--tmpl", "../{}"], 2, "must be a plain name"),
        (["lr", "{in}", "{out}", "--scale", 2, "--tmpl", ".{}"], 2, "must be a plain name"),
        (["lmdb", "{in}", "{out}"], 2, "must end in .lmdb"),
        (["check", "{out}"], 3, "does not exist"),
    ],
)
def test_wrong_arguments_are_told_in_words_and_nothing_is_made(pictures, tmp_path, tool, arguments, code, message):
    folder = pictures("in", a=(16, 16, 3))
    filled = [str(a).replace("{in}", folder).replace("{out}", str(tmp_path / "out")) for a in arguments]
    found, printed = tool(*filled)
    assert found == code, printed
    assert message in printed
    assert "Traceback" not in printed
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_the_command_line_works_from_a_shell(pictures, tmp_path):
    folder = pictures("in", a=(16, 16, 3))
    command = [sys.executable, "-m", "scripts.prepare_data", "lmdb", folder, str(tmp_path / "out.lmdb")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 picture in" in done.stdout
    assert files(tmp_path / "out.lmdb") == ["data.mdb", "lock.mdb", "meta_info.txt"]


def test_a_grid_that_does_not_fit_the_scale_is_refused():
    with pytest.raises(OptionsError, match="step: 15 is not a multiple of scale 2"):
        Grid(16, 15).over(2)


def test_the_time_left_follows_from_the_time_taken():
    assert _line("pictures cut", 2, 10, 14.5) == "2 of 10 pictures cut, 0:00:58 left"


def test_help_lists_every_archive_with_its_counts(capfd):
    with pytest.raises(SystemExit):
        prepare_data.main(["archive", "--help"])
    told = capfd.readouterr().out
    assert all(f"\n  {name} " in told for name in ARCHIVES)
    # 614,944 in all
    assert all(f"({count})" in told for count in ("800", "2,650", "84,991", "526,503"))
