"""Crops, flips and turns, drawn from a generator that the caller passes; all pictures of a sample move together."""

import math
from collections.abc import Sequence

import numpy as np

from data.resize import imresize


def draw_crop(size: tuple[int, int], crop: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """Top and left of a crop of ``(h, w)`` inside a picture of ``(h, w)``, every place equally likely.

    Raises:
        ValueError: the crop is larger than the picture.
    """
    if crop[0] > size[0] or crop[1] > size[1]:
        raise ValueError(f"a crop of {crop} does not fit into a picture of {size}")
    return int(rng.integers(size[0] - crop[0] + 1)), int(rng.integers(size[1] - crop[1] + 1))


def draw_textured_crop(
    image: np.ndarray, crop: tuple[int, int], grid: int, min_texture: float, rng: np.random.Generator
) -> tuple[int, int]:
    """:func:`draw_crop`, drawn again up to 8 times while the place is too smooth; the best place is kept.

    Args:
        image: ``(h, w, 1 or 3)``, uint8 or uint16.
        crop: height and width in pixels, multiples of ``grid``.
        grid: top and left are multiples of it (the scale).
        min_texture: what :func:`texture` must exceed; 0 takes the first place.
        rng: source of the draws.
    """
    cells = image.shape[0] // grid, image.shape[1] // grid
    best, best_texture = (0, 0), -1.0
    for _ in range(9):
        top, left = (grid * i for i in draw_crop(cells, (crop[0] // grid, crop[1] // grid), rng))
        if min_texture <= 0:
            return top, left
        found = texture(image[top : top + crop[0], left : left + crop[1]])
        if found > best_texture:
            best, best_texture = (top, left), found
        if found > min_texture:
            break
    return best


def draw_reduced_crop(
    image: np.ndarray, side: int, factor: float, *, margin: int, grid: int, min_texture: float, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[int, int]]:
    """A random crop of a picture that is reduced by MATLAB's bicubic, at the cost of what is around the crop.

    Args:
        image: ``(h, w, c)``, uint8 or uint16.
        side: of the crop, in pixels of the reduced picture.
        factor: new size over old, in (0, 1]; a picture that would be smaller than the crop is reduced to its size.
        margin: pixels around the crop that are wanted too, where the picture has them.
        grid: top and left are multiples of it (the scale).
        min_texture: as for :func:`draw_textured_crop`, before the reduction.
        rng: source of the draws.

    Returns:
        A piece of the picture, reduced by itself, and top and left of the crop in it.

    Raises:
        ValueError: the crop is larger than the picture.
    """
    if side > min(image.shape[:2]):
        raise ValueError(f"a crop of {(side, side)} does not fit into a picture of {image.shape[:2]}")
    factor = max(factor, side / min(image.shape[:2]))
    if factor >= 1:
        return image, draw_textured_crop(image, (side, side), grid, min_texture, rng)
    source, around = min(math.ceil(side / factor), *image.shape[:2]), math.ceil(margin / factor)
    place = draw_textured_crop(image, (source, source), 1, min_texture, rng)
    low = [max(0, start - around) for start in place]
    high = [start + source + around for start in place]
    piece = imresize(image[low[0] : high[0], low[1] : high[1]], factor)
    top, left = (math.floor((start - first) * factor) // grid * grid for start, first in zip(place, low, strict=True))
    return piece, (top, left)


def texture(image: np.ndarray) -> float:
    """Mean \\|dx\\| + mean \\|dy\\| of the grey picture, in levels of 0..255; ``(h, w, c)``, uint8 or uint16."""
    grey = image[..., 0] if image.shape[2] == 1 else image @ np.array([0.299, 0.587, 0.114], np.float32)
    grey = grey.astype(np.float32) * (255 / np.iinfo(image.dtype).max)
    changes = (np.abs(np.diff(grey, axis=axis)) for axis in (0, 1) if grey.shape[axis] > 1)
    return float(sum(change.mean() for change in changes))


def flip_and_rotate(
    images: Sequence[np.ndarray], rng: np.random.Generator, *, use_hflip: bool, use_rot: bool
) -> list[np.ndarray]:
    """Mirror left-right with probability 0.5; with ``use_rot`` also top-bottom, and swap the axes, 0.5 each.

    Args:
        images: ``(h, w, c)`` each; all get the same flips.
        rng: source of the draws; three are made whatever the options are, so that they never shift later ones.
        use_hflip, use_rot: together they give the eight positions of a square.

    Returns:
        Views of ``images``.
    """
    mirror, turn_over, swap = rng.random(3) < 0.5
    if use_hflip and mirror:
        images = [image[:, ::-1] for image in images]
    if use_rot and turn_over:
        images = [image[::-1] for image in images]
    if use_rot and swap:
        images = [image.swapaxes(0, 1) for image in images]
    return list(images)
