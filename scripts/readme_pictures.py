"""Make the before/after pictures of the README from held-out photographs: python -m scripts.readme_pictures.

Each is made as a user would: a small or hazy picture is written, scripts.restore restores it with the shipped weights,
and the same piece of both stands side by side. Run it again when the weights change. --page also takes a picture of a
page that test.py has written.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.clean import CleanImageDataset, DownsampleImageDataset
from data.haze import HazeImageDataset
from data.io import encode, read_image, write_image, write_whole
from data.resize import imresize
from models import logbook, runtime
from options.errors import OptionsError, UserError
from scripts import restore

ROOT = Path(__file__).resolve().parent.parent
PHOTOGRAPHS = ROOT / "datasets/quickstart/val"
GAP = 8
QUALITY = 85
WINDOW = ("--window-size=1200,1000", "--virtual-time-budget=8000")
LARGEST = 150_000


@dataclass(frozen=True)
class Strip:
    """One picture of the README.

    Args:
        name: of the file. photograph: the held-out one it is made from.
        task, scale, weights: as scripts.restore takes them.
        place: top, left, height and width of the piece, in pixels of the result.
        zoom: how often the piece is enlarged for the page.
    """

    name: str
    photograph: str
    task: str
    scale: int
    weights: str
    place: tuple[int, int, int, int]
    zoom: int


STRIPS = (
    Strip("sr_x2", "dogs", "sr", 2, "sst_tiny_x2", (115, 70, 165, 220), 2),
    Strip("dehaze", "dragonfly", "dehaze", 1, "mb_taylorformer_tiny_dehaze", (40, 44, 330, 440), 1),
)


def main(argv: list[str]) -> None:
    """Make every strip, or those that are named, and the picture of the page."""
    args = _parse(argv)
    logbook.start_logging()
    args.out.mkdir(parents=True, exist_ok=True)
    for strip in STRIPS:
        if not args.only or strip.name in args.only:
            _write(args.out / f"{strip.name}.jpg", make(strip, args.weights / f"{strip.weights}.safetensors"))
    if args.page:
        _write(args.out / "page.jpg", photographed(args.page))


def _write(target: Path, image: np.ndarray) -> None:
    data = encode(image, ".jpg", quality=QUALITY)
    if len(data) > LARGEST:
        raise UserError(f"{target.name} would have {len(data):,} bytes, more than {LARGEST:,}: take a smaller piece")
    write_whole(target, data)
    print(f"{target}: {len(data):,} bytes")


def photographed(page: Path) -> np.ndarray:
    """``(h, w, 3)`` uint8: the top of a page, as a browser shows it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser or not page.is_file():
        raise UserError("--page needs Chromium" if not browser else f"there is no page {page}")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *WINDOW]
        command += [f"--user-data-dir={folder}", f"--screenshot={picture}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if not picture.exists():
            raise UserError(f"{browser} made no picture of {page}: {done.stderr[-500:]}")
        return read_image(picture)[..., :3]


def make(strip: Strip, weights: Path) -> np.ndarray:
    """``(h, w, 3)`` uint8: the input, enlarged where the network enlarges, a white line, and the result."""
    lq = degraded(strip)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.png", Path(folder) / "after.png"
        write_image(before, lq)
        words = [str(before), "-o", str(after), "--task", strip.task, "--weights", str(weights)]
        restore.main(words + (["--scale", str(strip.scale)] if strip.task == "sr" else []))
        result = read_image(after)
    pieces = [_piece(image, strip) for image in (imresize(lq, strip.scale), result)]
    line = np.full((len(pieces[0]), GAP, 3), 255, np.uint8)
    return np.concatenate([pieces[0], line, pieces[1]], axis=1)


def degraded(strip: Strip) -> np.ndarray:
    """``(h, w, 3)`` uint8: the small or hazy picture, as the data set of that task makes it for tests."""
    settings = {"dataroot_gt": str(PHOTOGRAPHS), "scale": strip.scale, "phase": "test"}
    pictures: CleanImageDataset
    pictures = DownsampleImageDataset(**settings) if strip.task == "sr" else HazeImageDataset(**settings)
    sample = pictures[pictures.names.index(strip.photograph)]
    return (sample["lq"].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)


def _piece(image: np.ndarray, strip: Strip) -> np.ndarray:
    top, left, height, width = strip.place
    piece = image[top : top + height, left : left + width]
    # pixels stay visible as they are
    return piece.repeat(strip.zoom, axis=0).repeat(strip.zoom, axis=1)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.readme_pictures", description=__doc__.split("\n\n")[1])
    known = [strip.name for strip in STRIPS]
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"{', '.join(known)}; default: all")
    parser.add_argument("--weights", type=Path, default=ROOT / "archs/weights", help="folder of the weights")
    parser.add_argument("--out", type=Path, default=ROOT / "archs/weights/pictures", help="folder of the pictures")
    parser.add_argument("--page", type=Path, metavar="INDEX.html", help="a page of test.py, to take a picture of")
    args = parser.parse_args(argv)
    unknown = [name for name in args.only if name not in known]
    if unknown:
        raise OptionsError(f"no picture is called {', '.join(unknown)} ({', '.join(known)})")
    return args


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))
