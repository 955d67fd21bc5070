"""python -m scripts.get_photos: photographs out of Debian packages made here, offline."""

import hashlib
import http.server
import io
import lzma
import socketserver
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from data.io import read_image, write_image
from models import runtime
from options.errors import DataError
from scripts import get_photos
from scripts.debian_package import licence_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DEB = "lomiri-wallpapers-16.04", "lomiri-wallpapers-16.04_20.04.0-2_all.deb"
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2016, The Team
License: GPL-2+

Files: 16.04/a_by_A.png
       16.04/c_by_C.png
Copyright: 2018, Ada Example <ada@example.org>
           2019, Bob
License: CC-BY-4.0
Comment: long
"""


def build_deb(path, files):
    """A Debian package, as dpkg-deb lays it out."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": lzma.compress(packed.getvalue())}
    with open(path, "wb") as file:
        file.write(b"!<arch>\n")
        for name, data in members.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(data):<10}`\n".encode())
            file.write(data + b"\n" * (len(data) % 2))


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A package with three real photographs, the list of them, and a folder to put the results into."""
    folder = "usr/share/backgrounds"
    files = {f"usr/share/doc/{PACKAGE}/copyright": COPYRIGHT.encode()}
    rows = ["package\tname\tfolder\theight\twidth\tbeside\tsha256\tpath"]
    crops = {"a": ("train/brushes.png", "train"), "b": ("val/fig.png", "val"), "c": ("train/wine.png", "train")}
    for name, (picture, split) in crops.items():
        write_image(tmp_path / "crop.png", read_image(ROOT / "datasets/quickstart" / picture)[100:201, 50:203])
        data, path = (tmp_path / "crop.png").read_bytes(), f"{folder}/{name}_by_{name.upper()}.png"
        files[path] = data
        row = [PACKAGE, name, split, "101", "153", "", hashlib.sha256(data).hexdigest(), path]
        rows.append("\t".join(row))
    files[f"{folder}/drawing.png"] = b"not of the list"
    (tmp_path / "photos.tsv").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(get_photos, "_ROWS", tmp_path / "photos.tsv")
    (tmp_path / "debs").mkdir()
    build_deb(tmp_path / "debs" / DEB, files)
    return tmp_path


@pytest.fixture
def tool(capfd, archive):
    """tool("--full", ...) -> exit code and what was printed; the packages are those of the archive."""

    def call(*arguments, packages=archive / "debs"):
        capfd.readouterr()
        places = ["--packages", str(packages)] if packages else []
        code = runtime.run(get_photos.main, ["-o", str(archive / "out"), *places, *map(str, arguments)])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


def pictures(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.*") if path.parent.name != ".photos")


def test_photographs_are_reduced_by_means_of_blocks_and_those_judged_with_are_kept_apart(archive, tool):
    code, printed = tool("--max_side", 80)
    assert code == 0, printed
    assert pictures(archive / "out") == ["train/a.png", "train/c.png", "val/b.png"]
    whole = read_image(ROOT / "datasets/quickstart/train/brushes.png")[100:201, 50:203].astype(float)
    means = whole[:100, :152].reshape(50, 2, 76, 2, 3).mean(axis=(1, 3))
    np.testing.assert_array_equal(read_image(archive / "out/train/a.png"), np.floor(means + 0.5))


def test_author_and_licence_of_each_come_from_the_package(archive, tool):
    assert tool("--only", "a", "b")[0] == 0
    lines = (archive / "out/LICENSES.md").read_text().splitlines()
    (a,) = [line for line in lines if "`train/a.png`" in line]
    (b,) = [line for line in lines if "`val/b.png`" in line]
    assert "| 2018, Ada Example; 2019, Bob | CC-BY-4.0 |" in a
    assert "| 2016, The Team | GPL-2+ |" in b
    assert "`/usr/share/backgrounds/a_by_A.png` | reduced from 153 × 101 by 1" in a
    assert not any("train/c.png" in line for line in lines)
    # a later run adds to the list
    assert "1 of them new" in tool("--only", "c", "a")[1]
    assert "`train/c.png`" in (archive / "out/LICENSES.md").read_text()


def test_the_last_paragraph_that_fits_counts_and_none_is_told():
    assert licence_of(COPYRIGHT, "16.04/c_by_C.png").name == "CC-BY-4.0"
    with pytest.raises(DataError, match="says nothing of x"):
        licence_of("Files: y\nLicense: MIT\n", "x")


def test_originals_are_kept_byte_for_byte(archive, tool):
    assert tool("--full")[0] == 0
    assert hashlib.sha256((archive / "out/val/b.png").read_bytes()).hexdigest() in (archive / "photos.tsv").read_text()


def test_the_same_command_gets_only_what_is_missing_and_another_size_is_refused(archive, tool):
    assert tool("--max_side", 80)[0] == 0
    kept = (archive / "out/train/a.png").stat().st_mtime_ns
    (archive / "out/val/b.png").unlink()
    code, printed = tool("--max_side", 80)
    assert code == 0
    assert "1 of them new" in printed
    assert (archive / "out/train/a.png").stat().st_mtime_ns == kept
    code, printed = tool("--max_side", 40)
    assert code == 3
    assert "a.png exists, of 50x76 pixels and not made with these options (that would be 25x38)" in printed
    # nothing is asked of anybody when all is there
    assert tool("--max_side", 80, packages=None)[0] == 0


def test_a_picture_of_somebody_else_is_left_alone(archive, tool):
    write_image(archive / "out/train/a.png", np.zeros((101, 153, 3), np.uint8))
    code, printed = tool()
    assert code == 3
    assert "is left as it is" in printed
    assert not read_image(archive / "out/train/a.png").any()


def test_a_changed_photograph_and_a_broken_package_are_named(archive, tool):
    rows = (archive / "photos.tsv").read_text().replace("\ttrain\t101\t153\t\t", "\ttrain\t101\t153\t\tf", 1)
    (archive / "photos.tsv").write_text(rows)
    code, printed = tool()
    assert code == 3
    assert "a_by_A.png is not the photograph of the list" in printed
    assert pictures(archive / "out") == ["train/c.png", "val/b.png"]
    deb = archive / "debs" / DEB
    deb.write_bytes(deb.read_bytes()[:-5000])
    code, printed = tool("--only", "a")
    assert code == 3
    assert f"{DEB} is damaged or cut short" in printed


def test_a_package_comes_from_a_mirror_and_is_not_kept(archive, tool, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    pool = archive / "mirror" / get_photos.PACKAGES[PACKAGE].pool
    pool.parent.mkdir(parents=True)
    (archive / "debs" / DEB).rename(pool)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: Quiet(*given, directory=archive / "mirror")
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        code, printed = tool("--mirror", f"{address}/nowhere", packages=None)
        assert code == 1
        assert "is the root of a mirror" in printed
        code, printed = tool("--mirror", address, packages=None)
    finally:
        server.shutdown()
        server.server_close()
    assert code == 0, printed
    assert len(pictures(archive / "out")) == 3
    assert not (archive / "out/.packages").exists()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"hello", "hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nxx", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx", "2 of 9 bytes came"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>please log in</html>", "what came is no Debian package"),
    ],
    ids=["no-http", "cut-chunk", "cut", "a-page"],
)
def test_what_is_no_mirror_is_told_once_and_leaves_nothing(archive, tool, monkeypatch, answer, told):
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Answer(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(10_000)
            self.request.sendall(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        code, printed = tool("--mirror", f"http://127.0.0.1:{server.server_address[1]}", packages=archive / "got")
        thread.join()
    assert code == 1
    assert printed.count(told) == 1
    assert "Traceback" not in printed
    assert not list((archive / "got").iterdir())


def test_a_photograph_that_was_changed_since_is_not_passed_off_as_the_original(archive, tool):
    assert tool()[0] == 0
    path = archive / "out/val/b.png"
    stored = path.read_bytes()
    write_image(path, 255 - read_image(path))
    changed = path.read_bytes()
    code, printed = tool()
    assert code == 3
    assert "val/b.png is not as it was stored; it is left as it is" in printed
    assert path.read_bytes() == changed
    path.write_bytes(stored)
    assert tool()[0] == 0
    (archive / "out/.photos/b.json").write_text("{")
    code, printed = tool()
    assert code == 3
    assert "b.json is damaged" in printed


def test_without_apt_the_ways_out_are_named(archive, tool, monkeypatch):
    monkeypatch.setenv("PATH", str(archive))
    code, printed = tool(packages=archive / "none")
    assert code == 2
    assert "give --mirror with the root of a Debian mirror" in printed


def test_the_list_names_every_photograph_once_and_a_wrong_word_is_told(capfd):
    photos = get_photos.photos()
    assert len({photo.name for photo in photos}) == len({photo.sha256 for photo in photos}) == len(photos) == 49
    assert {photo.package for photo in photos} == set(get_photos.PACKAGES)
    assert [photo.name for photo in photos if photo.folder == "val"] == ["dogs", "dragonfly", "fig"]
    assert runtime.run(get_photos.main, ["--list", "--only", "lomiri-wallpapers-16.04"]) == 0
    assert capfd.readouterr().out.endswith("13 photographs\n")
    assert runtime.run(get_photos.main, ["--list", "--only", "dandylion"]) == 2
    assert "did you mean dandelion" in capfd.readouterr().err
