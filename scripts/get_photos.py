"""Fetch 49 openly licensed photographs out of Debian packages: python -m scripts.get_photos [-o datasets/photos].

The packages are downloaded and unpacked, not installed. Each photograph is checked by its sha256, turned upright,
reduced by a whole factor and stored without loss; ``LICENSES.md`` in the result names author, licence and source of
each. Those that the quickstart judges with go to ``val``, the one of real fog to ``hazy``, all others to ``train``.
Nothing that exists is written over; the same command goes on where an interrupted one ended.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.headers import HeaderError, read_header
from data.io import decode, encode, read_bytes, remove_alpha, use_one_thread, write_whole
from data.pairs import Problems
from models import logbook
from models.runtime import run
from models.screen import Screen
from options.errors import DataError, OptionsError
from options.registry import nearest
from scripts.debian_package import Licence, get_package, licence_of, read_files

_ROWS = Path(__file__).with_name("photos.tsv")
_HEAD = "# The photographs of this folder: origin and licences"


class Package(NamedTuple):
    """A Debian package with photographs.

    Attributes:
        pool: its path below the root of a mirror.
        inside: folder of the pictures in the package.
        source: the same folder in debian/copyright.
        licences: in short, as its debian/copyright has them.
    """

    pool: str
    inside: str
    source: str
    licences: str


_LOMIRI = "pool/main/l/lomiri-wallpapers/lomiri-wallpapers"
PACKAGES = {
    "lomiri-wallpapers-16.04": Package(
        f"{_LOMIRI}-16.04_20.04.0-2_all.deb", "usr/share/backgrounds/", "16.04/", "CC-BY-4.0, CC-BY-SA-4.0, CC0-1.0"
    ),
    "lomiri-wallpapers-20.04": Package(
        f"{_LOMIRI}-20.04_20.04.0-2_all.deb", "usr/share/backgrounds/", "20.04/", "CC-BY-SA-3.0"
    ),
    "lxqt-themes": Package(
        "pool/main/l/lxqt-themes/lxqt-themes_1.2.0-1_all.deb",
        "usr/share/lxqt/wallpapers/",
        "wallpapers/",
        "LGPL-2.1+; CC-BY-SA-3.0 beside the files",
    ),
    "mate-backgrounds": Package(
        "pool/main/m/mate-backgrounds/mate-backgrounds_1.26.0-1_all.deb", "usr/share/backgrounds/mate/", "", "GPL-2+"
    ),
    "plasma-workspace-wallpapers": Package(
        "pool/main/p/plasma-workspace-wallpapers/plasma-workspace-wallpapers_5.27.5-2_all.deb",
        "usr/share/wallpapers/",
        "",
        "GPL-2+; LGPL-3.0 beside the files",
    ),
}


@dataclass(frozen=True)
class Photo:
    """One photograph.

    Attributes:
        package, path: where it is.
        name: what it is called here.
        folder: ``train``, ``val`` or ``hazy``.
        height, width: of the original, in pixels.
        beside: author and licence as a file beside it says; empty: nothing is said there.
        sha256: of the original file.
    """

    package: str
    name: str
    folder: str
    height: int
    width: int
    beside: str
    sha256: str
    path: str

    def factor(self, max_side: int | None) -> int:
        """By which whole number it is reduced, so that no side is above ``max_side``; None: not at all."""
        return 1 if max_side is None else -(-max(self.height, self.width) // max_side)

    def target(self, max_side: int | None) -> str:
        """Its path in the result; originals keep their kind of file."""
        ending = os.path.splitext(self.path)[1] if max_side is None else ".png"
        return f"{self.folder}/{self.name}{ending}"


def photos() -> list[Photo]:
    """The fixed list."""
    with open(_ROWS, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Photo(**{**row, "height": int(row["height"]), "width": int(row["width"])}) for row in rows]


def choose(words: list[str]) -> list[Photo]:
    """The photographs that are called so, or else whose package has the word in its name; all of them without words.

    Raises:
        OptionsError: a word that chooses nothing.
    """
    found, names = photos(), {photo.name for photo in photos()}
    taken: set[str] = set()
    for word in words:
        meant = {word} & names or {photo.name for photo in found if word in photo.package}
        if not meant:
            near = nearest(word, [*PACKAGES, *names])
            raise OptionsError(f"--only {word} is neither a photograph nor part of a package's name{near}")
        taken |= meant
    return [photo for photo in found if not words or photo.name in taken]


def block_mean(image: np.ndarray, factor: int) -> np.ndarray:
    """``(h, w, c)`` uint8 -> the mean of each block of ``factor`` x ``factor`` pixels, rounded half up.

    Up to ``factor - 1`` rows and columns at the bottom and the right that fill no block are left out.
    """
    height, width = (side // factor for side in image.shape[:2])
    blocks = image[: height * factor, : width * factor].reshape(height, factor, width, factor, -1)
    sums = blocks.sum(axis=(1, 3), dtype=np.int64)
    return ((2 * sums + factor**2) // (2 * factor**2)).astype(np.uint8)


def main(argv: list[str]) -> None:
    """List or fetch."""
    args = _parse(argv)
    logbook.start_logging()
    # whoever reads along may leave
    with contextlib.redirect_stdout(Screen(sys.stdout)):
        if args.list:
            print(_listing(choose(args.only)))
        else:
            _fetch(args)


def _fetch(args: argparse.Namespace) -> None:
    """Get what is missing, and list the licences of all that is there."""
    use_one_thread()
    chosen = choose(args.only)
    output, max_side = Path(os.path.expanduser(args.output)), None if args.full else args.max_side
    missing = [photo for photo in chosen if not _is_there(photo, output, max_side)]
    own = args.packages is None
    packages = output / ".packages" if own else Path(os.path.expanduser(args.packages))
    for name in dict.fromkeys(photo.package for photo in missing):
        wanted = [photo for photo in missing if photo.package == name]
        print(f"{name}: {len(wanted)} photographs to get", flush=True)
        package = get_package(name, PACKAGES[name].pool, packages, args.mirror)
        _unpack(package, wanted, output, max_side)
        if own:
            package.unlink()
    if own and packages.is_dir() and not any(packages.iterdir()):
        packages.rmdir()
    _write_licences(output)
    size = sum((output / photo.target(max_side)).stat().st_size for photo in chosen)
    print(
        f"{len(chosen)} photographs in {output}, {len(missing)} of them new, {size / 2**20:,.1f} MiB; their licences: "
        f"{output / 'LICENSES.md'}"
    )
    for folder in sorted({photo.folder for photo in chosen}):
        print(f"  {folder}: {sum(photo.folder == folder for photo in chosen)}")


def _is_there(photo: Photo, output: Path, max_side: int | None) -> bool:
    """True when the result has it already, as these options make it.

    Raises:
        DataError: something else has its name.
    """
    path = output / photo.target(max_side)
    if not os.path.lexists(path):
        return False
    factor = photo.factor(max_side)
    data, note = read_bytes(path), output / ".photos" / f"{photo.name}.json"
    try:
        found = read_header(io.BytesIO(data))
    except HeaderError as error:
        raise DataError(f"{path} is no picture ({error}); it is left as it is, remove it") from error
    expected = photo.height // factor, photo.width // factor
    if (found.height, found.width) != expected or not note.is_file():
        raise DataError(
            f"{path} exists, of {found.height}x{found.width} pixels and not made with these options (that would be "
            f"{expected[0]}x{expected[1]}); it is left as it is, choose another folder with -o"
        )
    digest = hashlib.sha256(data).hexdigest()
    # notes of the first days have no digest
    if digest != (photo.sha256 if max_side is None else _read_note(note).get("stored", digest)):
        raise DataError(f"{path} is not as it was stored; it is left as it is, move it away or choose another folder")
    return True


def _read_note(path: Path) -> dict[str, Any]:
    """What :func:`_store` noted of a photograph."""
    try:
        note = json.loads(read_bytes(path))
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it and its picture, and give the command again"
        ) from error
    return note


def _unpack(package: Path, wanted: list[Photo], output: Path, max_side: int | None) -> None:
    """Write the photographs of one package, each whole, with a note of its licence."""
    name, problems = wanted[0].package, Problems(str(package))
    by_path = {photo.path: photo for photo in wanted}
    text = f"usr/share/doc/{name}/copyright"
    # the copyright file comes after some of the pictures; one package at a time is read twice
    said = dict(read_files(package, lambda path: path == text)).get(text)
    if said is None:
        raise DataError(f"{package} holds no {text}; remove it and get it again")
    for path, data in read_files(package, by_path.__contains__):
        photo = by_path.pop(path)
        if hashlib.sha256(data).hexdigest() != photo.sha256:
            problems.add(
                f"{path} is not the photograph of the list (its sha256 is another): the package has changed since"
            )
            continue
        inside = PACKAGES[name]
        licence = licence_of(said.decode("utf-8"), inside.source + path.removeprefix(inside.inside))
        _store(photo, data, licence, package=package.name, output=output, max_side=max_side)
    for path in by_path:
        problems.add(f"{path} is not in the package")
    problems.raise_if_any()


def _store(photo: Photo, data: bytes, licence: Licence, *, package: str, output: Path, max_side: int | None) -> None:
    factor, target = photo.factor(max_side), output / photo.target(max_side)
    changes, version = "none: the original file", package.split("_")[1].replace("%3a", ":")
    height, width = photo.height, photo.width
    if max_side is not None:
        image = block_mean(remove_alpha(decode(data, photo.path, upright=True), "error", photo.path), factor)
        height, width, data = *image.shape[:2], encode(image, ".png")
        changes = f"reduced from {photo.width} × {photo.height} by {factor}; stored as PNG, without metadata"
    row = {**asdict(photo), "file": photo.target(max_side), "height": height, "width": width, "changes": changes}
    row |= {"holders": licence.holders, "licence": licence.name, "version": version}
    row["stored"] = hashlib.sha256(data).hexdigest()
    try:
        for folder in (target.parent, output / ".photos"):
            folder.mkdir(parents=True, exist_ok=True)
        # the note first: a picture without one is taken for somebody else's
        note = json.dumps(row, ensure_ascii=False, indent=1).encode("utf-8")
        write_whole(output / ".photos" / f"{photo.name}.json", note)
        write_whole(target, data)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}") from error


def _write_licences(output: Path) -> None:
    """LICENSES.md of all photographs that the folder has, whichever runs brought them."""
    rows = [_read_note(path) for path in sorted((output / ".photos").glob("*.json"))]
    rows = [row for row in rows if (output / row["file"]).is_file()]
    target = output / "LICENSES.md"
    if target.exists() and not read_bytes(target).startswith(_HEAD.encode()):
        raise DataError(f"{target} exists and was not written by this program; move it away")
    lines = [
        _HEAD,
        "",
        "Each picture is under its own licence, given below; Pellucid's licence does not apply to them. No author",
        "endorses Pellucid. Holders and licence are those of debian/copyright of the package; where a file beside the",
        "picture says more or something else, that is given too, and keeping to both is safe.",
        "",
        "| File | Pixels (w × h) | Copyright | Licence (debian/copyright) | Said beside the file | Source | Changes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["file"]):
        cells = (f"`{row['file']}`", f"{row['width']} × {row['height']}", row["holders"], row["licence"], row["beside"])
        source = f"Debian {row['package']} ({row['version']}), `/{row['path']}`"
        lines.append(f"| {' | '.join((*cells, source, row['changes']))} |")
    write_whole(target, ("\n".join(lines) + "\n").encode("utf-8"))


def _listing(chosen: list[Photo]) -> str:
    lines = []
    for name in dict.fromkeys(photo.package for photo in chosen):
        lines.append(f"{name} ({PACKAGES[name].licences})")
        for photo in (photo for photo in chosen if photo.package == name):
            beside = f"  {photo.beside}" if photo.beside else ""
            lines.append(f"  {photo.folder:5} {photo.name:18} {photo.width:4} x {photo.height:4}{beside}")
    return "\n".join([*lines, f"{len(chosen)} photographs"])


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.get_photos", description=__doc__.split("\n\n")[1].replace("``", "")
    )
    parser.add_argument("-o", "--output", default="datasets/photos", help="where they go; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the photographs and their licences, fetch nothing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="parts of packages' names, or photographs"
    )
    parser.add_argument("--max_side", type=_side, default=1200, help="longest side in pixels; default: %(default)s")
    parser.add_argument("--full", action="store_true", help="the original files, not reduced")
    parser.add_argument("--mirror", metavar="URL", help="root of a Debian mirror; default: the sources of apt")
    parser.add_argument("--packages", metavar="FOLDER", help="where packages lie or are to be kept; default: not kept")
    return parser.parse_args(argv)


def _side(text: str) -> int:
    value = int(text)
    if value < 16:
        raise argparse.ArgumentTypeError(f"{value} is below 16")
    return value


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
