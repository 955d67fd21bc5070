"""Pictures into an LMDB and back: bit by bit, under keys that BasicSR's own reader finds."""

import io
import os
import signal
import subprocess
import sys
from itertools import islice

import cv2
import lmdb
import numpy as np
import pytest
from PIL import Image

from data import build_loader, lmdb_file
from data.backends import FolderSource, LmdbSource
from data.cache import map_ahead
from data.claim import claimed
from data.io import decode, encode, read_image, write_image
from data.lmdb_file import write_lmdb
from options.errors import DataError, OptionsError


@pytest.fixture
def folder(tmp_path, noise):
    """A folder with a picture of every kind, one of them in a subfolder."""
    root = tmp_path / "in"
    for name, shape, dtype in [
        ("rgb.png", (9, 11, 3), np.uint8),
        ("deep.png", (9, 11, 3), np.uint16),
        ("grey.png", (9, 11), np.uint8),
        ("photo.jpg", (16, 16, 3), np.uint8),
        ("deep.grey.tif", (9, 11), np.uint16),
    ]:
        write_image(root / name.replace("deep.grey", "deepgrey"), noise(shape, dtype))
    (root / "sub").mkdir()
    # files that our own encoder would not write like this
    Image.fromarray(noise((9, 11, 2)), "LA").save(root / "greyalpha.png")
    Image.fromarray(np.tile(noise((3, 3, 4)), (3, 4, 1))).save(root / "sub" / "rgba.png", compress_level=9)
    return root


def values(target):
    """Key -> value, as they lie in the database."""
    with lmdb.open(str(target), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return {bytes(key).decode(): bytes(value) for key, value in transaction.cursor()}


def test_every_kind_of_picture_comes_back_bit_by_bit(folder, tmp_path):
    write_lmdb(FolderSource(folder), tmp_path / "out.lmdb")
    before, after = FolderSource(folder), LmdbSource(tmp_path / "out.lmdb")
    assert [os.path.splitext(name)[0] for name in after.names()] == [os.path.splitext(n)[0] for n in before.names()]
    for old, new in zip(before.names(), after.names(), strict=True):
        one, two = decode(before.read(old)), decode(after.read(new))
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


def test_png_files_are_kept_byte_for_byte_and_others_become_png(folder, tmp_path):
    written = write_lmdb(FolderSource(folder), tmp_path / "out.lmdb")
    stored = values(tmp_path / "out.lmdb")
    assert stored["sub/rgba"] == (folder / "sub" / "rgba.png").read_bytes()
    assert stored["photo"].startswith(b"\x89PNG")
    assert (written.pictures, written.unchanged) == (7, 5)
    assert written.size == sum(map(len, stored.values()))


def test_the_reader_of_basicsr_finds_every_picture(folder, tmp_path):
    target = tmp_path / "out.lmdb"
    write_lmdb(FolderSource(folder), target)
    assert {entry.name for entry in target.iterdir()} == {"data.mdb", "lock.mdb", "meta_info.txt"}
    keys = [line.split(".")[0] for line in (target / "meta_info.txt").read_text().splitlines()]
    environment = lmdb.open(str(target), readonly=True, lock=False, readahead=False)
    with environment, environment.begin(write=False) as transaction:
        for key in keys:
            picture = cv2.imdecode(np.frombuffer(transaction.get(key.encode("ascii")), np.uint8), cv2.IMREAD_COLOR)
            assert picture.shape[2] == 3
    assert "sub/rgba.png (9,12,4) 1" in (target / "meta_info.txt").read_text().splitlines()


def test_the_map_grows_with_the_pictures_and_the_file_is_no_larger_than_they_need(tmp_path, noise, monkeypatch):
    # a small first picture, from which a size of everything was once guessed
    write_image(tmp_path / "in" / "0.png", noise((2, 2, 3)))
    for number in range(1, 13):
        write_image(tmp_path / "in" / f"{number}.png", noise((150, 200, 3), seed=number))
    monkeypatch.setattr(lmdb_file, "_STEP", 1 << 16)
    monkeypatch.setattr(lmdb_file, "_PENDING", 1 << 18)
    written = write_lmdb(FolderSource(tmp_path / "in"), tmp_path / "out.lmdb")
    assert written.size > 10 * (1 << 16)
    assert len(values(tmp_path / "out.lmdb")) == 13
    assert (tmp_path / "out.lmdb" / "data.mdb").stat().st_size < 1.3 * written.size


def test_names_with_dots_are_refused_or_rewritten(tmp_path, noise):
    for name in ("img.v1.png", "img.v2.png", "ok.png"):
        write_image(tmp_path / "in" / name, noise((4, 4, 3), seed=ord(name[-5])))
    source = FolderSource(tmp_path / "in")
    with pytest.raises(DataError, match=r"(?s)2 problems.*img\.v1\.png: BasicSR reads keys up to the first dot"):
        write_lmdb(source, tmp_path / "out.lmdb")
    write_lmdb(source, tmp_path / "out.lmdb", replace_dots=True)
    assert sorted(values(tmp_path / "out.lmdb")) == ["img_v1", "img_v2", "ok"]
    written = LmdbSource(tmp_path / "out.lmdb")
    np.testing.assert_array_equal(decode(written.read("img_v2.png")), read_image(tmp_path / "in" / "img.v2.png"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.png", "a.jpg"], "a.jpg and a.png would both get the key a"),
        (["a.b.png", "a_b.png"], "would both get the key a_b"),
        ([" a.png"], "spaces around a name"),
        (["a\u2028b.png"], "line breaks"),
        ([f"{'d' * 200}/{'d' * 200}/{'e' * 200}.png"], "a key of 602 bytes; LMDB takes 511"),
    ],
    ids=["kinds", "dots", "space", "line", "long"],
)
def test_names_that_cannot_be_keys_are_told(names, message):
    with pytest.raises(DataError, match=message):
        lmdb_file.lmdb_keys(sorted(names), "set", replace_dots=True)


def test_keys_that_are_not_ascii_are_utf8_and_a_notice_says_who_reads_them(tmp_path, noise, caplog):
    write_image(tmp_path / "in" / "é ü.png", noise((4, 5, 3)))
    write_lmdb(FolderSource(tmp_path / "in"), tmp_path / "out.lmdb")
    assert "BasicSR's own reader does not" in caplog.text
    source = LmdbSource(tmp_path / "out.lmdb")
    assert source.names() == ["é ü.png"]
    assert decode(source.read("é ü.png")).shape == (4, 5, 3)


def test_what_exists_is_never_written_over(folder, tmp_path):
    target = tmp_path / "out.lmdb"
    target.mkdir()
    with pytest.raises(DataError, match=r"out\.lmdb exists and is left as it is"):
        write_lmdb(FolderSource(folder), target)
    assert list(target.iterdir()) == []
    with pytest.raises(OptionsError, match=r"must end in \.lmdb"):
        write_lmdb(FolderSource(folder), tmp_path / "out")


def test_an_unreadable_picture_is_named_and_nothing_is_left_behind(folder, tmp_path):
    (folder / "zebra.png").write_bytes((folder / "rgb.png").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"zebra\.png: the file is cut short"):
        write_lmdb(FolderSource(folder), tmp_path / "out.lmdb")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


KILLED = """
import os, signal, sys
from data.backends import FolderSource
from data.lmdb_file import write_lmdb

def watch(entries):
    for number, entry in enumerate(entries):
        yield entry
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

write_lmdb(FolderSource(sys.argv[1]), sys.argv[2], watch=watch)
"""


def test_a_writer_that_is_killed_leaves_nothing_under_the_name(folder, tmp_path):
    target = tmp_path / "out.lmdb"
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(target)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert write_lmdb(FolderSource(folder), target).pictures == 7


def test_pairs_whose_names_differ_are_read_from_databases_as_from_folders(pair_folders, tmp_path, loader_options):
    for side in ("gt", "lq"):
        write_lmdb(FolderSource(getattr(pair_folders, side)), tmp_path / f"{side}.lmdb")
    roots = {"disk": (pair_folders.gt, pair_folders.lq), "lmdb": (tmp_path / "gt.lmdb", tmp_path / "lq.lmdb")}
    found = {}
    for backend, (gt, lq) in roots.items():
        arguments = {"dataroot_gt": str(gt), "dataroot_lq": str(lq), "filename_tmpl": "{}x2", "gt_size": 32}
        arguments |= {"io_backend": {"type": backend}, "use_hflip": True, "use_rot": True}
        loader = build_loader(loader_options("PairedImageDataset", arguments, num_worker_per_gpu=1))
        found[backend] = list(islice(loader, 3))
    for one, two in zip(*found.values(), strict=True):
        assert one["name"] == two["name"]
        assert one["lq"].equal(two["lq"])
        assert one["gt"].equal(two["gt"])


def test_pictures_are_read_only_a_few_ahead_of_the_writing():
    begun = []
    results = map_ahead(lambda item: begun.append(item) or item, range(1000), 2)
    assert list(islice(results, 10)) == list(range(10))
    results.close()
    assert len(begun) <= 10 + 2 * 2 + 1


def test_a_value_of_any_format_is_recognised(tmp_path, noise):
    # written by others: JPEG under the name .png
    write_lmdb_by_hand = lmdb.open(str(tmp_path / "x.lmdb"), map_size=1 << 20)
    with write_lmdb_by_hand as environment, environment.begin(write=True) as transaction:
        transaction.put(b"a", encode(noise((16, 16, 3)), ".jpg"))
    (tmp_path / "x.lmdb" / "meta_info.txt").write_text("a.png (16,16,3) 1\n")
    written = write_lmdb(LmdbSource(tmp_path / "x.lmdb"), tmp_path / "y.lmdb")
    assert (written.pictures, written.unchanged) == (1, 0)
    assert Image.open(io.BytesIO(values(tmp_path / "y.lmdb")["a"])).format == "PNG"


class Breaking:
    """A source that is gone after some pictures, as when the machine goes down."""

    def __init__(self, source, left):
        self.source, self.left, self.root = source, left, source.root

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, name):
        self.left -= 1
        if self.left < 0:
            raise DataError("gone")
        return self.source.read(name)


def test_an_interrupted_database_with_a_mark_goes_on_where_it_ended(tmp_path, noise, monkeypatch):
    for number in range(6):
        write_image(tmp_path / f"in/{number}.png", noise((9, 11, 3), seed=number))
    # a transaction for each picture
    monkeypatch.setattr(lmdb_file, "_PENDING", 1)
    source, target = FolderSource(tmp_path / "in"), tmp_path / "x.lmdb"
    with pytest.raises(DataError, match="gone"):
        write_lmdb(Breaking(source, 4), target, mark="a", threads=1)
    assert not target.exists()
    with open(tmp_path / ".x.lmdb.partial/.journal", "a") as file:
        file.write('["5", "cut sho')
    with pytest.raises(DataError, match="with other settings or pictures"):
        write_lmdb(source, target, mark="b", threads=1)
    # interrupted once more, after a line cut short
    with pytest.raises(DataError, match="gone"):
        write_lmdb(Breaking(source, 1), target, mark="a", threads=1)
    with claimed(tmp_path / ".x.lmdb.partial"), pytest.raises(DataError, match="is being made by another process"):
        write_lmdb(source, target, mark="a", threads=1)
    rest = Breaking(source, 99)
    written = write_lmdb(rest, target, mark="a", threads=1)
    assert written == (6, 6, sum((tmp_path / f"in/{number}.png").stat().st_size for number in range(6)))
    assert rest.left > 99 - 6
    assert lmdb_file.is_made(target, "a")
    assert LmdbSource(target).names() == source.names()
    assert values(target) == {str(number): source.read(f"{number}.png") for number in range(6)}
    assert not list(tmp_path.glob(".x.lmdb*"))


def test_jpeg_files_stay_what_they_are_where_that_is_wanted(folder, tmp_path):
    write_lmdb(FolderSource(folder), tmp_path / "out.lmdb", as_is=("png", "jpeg"))
    kept, decoded = values(tmp_path / "out.lmdb")["photo"], LmdbSource(tmp_path / "out.lmdb").read("photo.png")
    assert kept == decoded == (folder / "photo.jpg").read_bytes()
