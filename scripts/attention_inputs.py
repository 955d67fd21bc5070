"""Inputs that ways to attend are measured on: Gaussian ones, features of photographs, windows with positions."""

import argparse
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.io import EXTENSIONS, read_image, to_float
from kernels.coreset_attention import cases
from options.errors import DataError, OptionsError

HELD_OUT = Path(__file__).parents[1] / "datasets" / "quickstart" / "val"
INPUTS = ("gaussian", "photo", "window")

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of input of one size.

    Args:
        kind: one of ``INPUTS``. label: sizes and settings in words.
        n: number of keys. scale: factor of the logits. grid: ``(h, w)`` of the keys, or None.
        draws: each makes q, k, v in float64, with as many queries as keys.
    """

    kind: str
    label: str
    n: int
    scale: float
    grid: tuple[int, int] | None
    draws: tuple[Callable[[], Inputs], ...]


def make_cases(args: argparse.Namespace, photos: Mapping[str, Tensor]) -> tuple[list[Case], list[str]]:
    """The inputs that the options ask for, but those of trained weights, and in words what is left out."""
    found, notes = [], []
    if "gaussian" in args.inputs:
        found += [_gaussian(n, d, args.seeds) for n, d in itertools.product(args.n, args.d)]
    crops = []
    if "photo" in args.inputs:
        crops += [(_photo, *rest) for rest in itertools.product(args.sides, args.d, args.std, args.crops)]
    if "window" in args.inputs and not args.weights:
        crops += [(_window, *rest) for rest in itertools.product(args.windows, args.d, args.amplitudes, args.crops)]
    for make, side, *rest in crops:
        found.append(make(large_enough(photos, side, notes), side, *rest, args.seeds))
    if photos:
        notes.append(f"photographs: {', '.join(photos)}")
    return found, list(dict.fromkeys(notes))


def large_enough(photos: Mapping[str, Tensor], side: int, notes: list[str]) -> dict[str, Tensor]:
    """Those from which a square can be cut; what is left out is added to the notes.

    Raises:
        OptionsError: there is none.
    """
    fitting = {name: photo for name, photo in photos.items() if min(photo.shape[1:]) >= side}
    if not fitting:
        raise OptionsError(f"no photograph is as large as {side} x {side}; give others with --photos")
    small = sorted(set(photos) - set(fitting))
    if small:
        notes.append(f"smaller than {side} x {side}, so left out there: {', '.join(small)}")
    return fitting


def _gaussian(n: int, d: int, seeds: int) -> Case:
    draws = tuple(partial(cases.gaussian_inputs, n, d, seed=seed) for seed in range(seeds))
    return Case("gaussian", f"{n} keys, d {d}", n, 1 / math.sqrt(d), None, draws)


def _photo(photos: Mapping[str, Tensor], side: int, d: int, std: float, place: str, seeds: int) -> Case:
    make = partial(cases.photo_inputs, side=side, d=d, logit_std=std, place=place)
    label = f"{place} {side} x {side}, d {d}, logit std {std:g}"
    return Case("photo", label, side * side, 1 / math.sqrt(d), (side, side), _draws(make, photos, seeds))


def _window(photos: Mapping[str, Tensor], window: int, d: int, amplitude: float, place: str, seeds: int) -> Case:
    make = partial(cases.window_inputs, window=window, d=d, amplitude=amplitude, place=place)
    label = f"{place} {window} x {window}, d {d}, bias {amplitude:g}"
    return Case("window", label, window * window, 1.0, (window, window), _draws(make, photos, seeds))


def _draws(make: Callable[..., Inputs], photos: Mapping[str, Tensor], seeds: int) -> tuple[Callable[[], Inputs], ...]:
    def draw(name: str, seed: int) -> Inputs:
        try:
            return make(photos[name], seed=seed)
        except ValueError as error:
            raise DataError(f"{name}: {error}; give other photographs with --photos, or another --crops") from error

    return tuple(partial(draw, name, seed) for name in photos for seed in range(seeds))


def read_photos(places: Sequence[str] | None) -> dict[str, Tensor]:
    """``(3, h, w)`` in 0..1 by name: of files and folders, or the usual photographs.

    Raises:
        DataError: a file or folder that is missing, empty or no RGB picture.
    """
    files: list[Path] = []
    for place in map(Path, places or _usual_photos()):
        inside = sorted(path for path in place.glob("*") if path.suffix.lower() in EXTENSIONS) if place.is_dir() else []
        if place.is_dir() and not inside:
            raise DataError(f"no pictures in {place}")
        files += inside or [place]
    photos = {}
    for file in files:
        image = to_float(read_image(file))
        if image.shape[2] != 3:
            raise DataError(f"{file} has {image.shape[2]} channels; an RGB photograph is needed")
        photos[str(file) if file.name in photos else file.name] = torch.from_numpy(
            np.ascontiguousarray(image.transpose(2, 0, 1))
        )
    return photos


def _usual_photos() -> list[str]:
    """The held-out photographs of the quickstart, and the two samples of scikit-learn where that is installed."""
    sample = importlib.util.find_spec("sklearn")
    folder = Path(sample.origin).parent / "datasets" / "images" if sample and sample.origin else None
    return [str(HELD_OUT), *([str(folder)] if folder and folder.is_dir() else [])]
