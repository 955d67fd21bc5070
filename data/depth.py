"""How far away each pixel is: drawn depth fields, and measured depth maps made usable.

Haze needs depth only up to a factor, so depth is relative here: 1 is the farthest place of a picture. A drawn field
belongs to a whole picture and is evaluated where it is wanted, so that a training crop sees its part of the scene (a
crop in the foreground is thinly veiled throughout) at the cost of the crop alone.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from data.io import read_image
from options.errors import DataError

FieldKind = Literal["constant", "ramp", "layers", "bank"]
FIELD_KINDS = get_args(FieldKind)
# of scenes whose haze is even along the line of sight, so that the depth alone decides
MIXTURE = ("constant", "ramp", "layers")

# nodes per side of the lattice that a field is interpolated from
_NODES = 49
# what is nearest, as a part of what is farthest; measured indoor scenes lie at 0.2 to 0.6
_NEAR = (0.1, 0.7)
# what lies over the clear places between banks of fog, as a part of the densest
_THIN = (0.01, 0.15)
_PERCENTILES = (0.5, 99.5)


@dataclass(frozen=True)
class DepthField:
    """A drawn depth of one picture; ``window`` evaluates it.

    Attributes:
        size: height and width of the picture.
        base: ``(n, n)`` lattice over the picture, interpolated bilinearly; in 0..1.
        levels: depth of each layer, rising; empty takes the base itself.
        thresholds: values of the base at which the next layer begins.
        detail: ``(n, n)`` lattice, added to layers.
        largest: of all nodes; what the depth is divided by.
    """

    size: tuple[int, int]
    base: np.ndarray
    levels: np.ndarray
    thresholds: np.ndarray
    detail: np.ndarray
    largest: float

    def window(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """``(height, width)``, float32 in 0..1: the same bits as that part of the whole field."""
        nodes = self.base.shape[0]
        rows, columns = _places(top, height, self.size[0], nodes), _places(left, width, self.size[1], nodes)
        depth = _bilinear(self.base, rows, columns)
        if self.levels.size:
            depth = self._layered(depth) + _bilinear(self.detail, rows, columns)
        # between its nodes a layered field may rise above them
        return np.minimum(depth / np.float32(self.largest), np.float32(1))

    def whole(self) -> np.ndarray:
        """``size``, float32 in 0..1."""
        return self.window(0, 0, *self.size)

    def _layered(self, base: np.ndarray) -> np.ndarray:
        return self.levels[np.searchsorted(self.thresholds, base)]


def draw_depth_field(
    size: tuple[int, int], rng: np.random.Generator, *, kind: str | Sequence[str] = "mixture"
) -> DepthField:
    """Draw the depth of a picture; its farthest place has depth 1.

    Args:
        size: height and width of the picture.
        rng: source of the draws.
        kind: ``"constant"`` (1 everywhere), ``"ramp"`` (a slope in any direction, upwards most often, and smooth
            noise), ``"layers"`` (such a slope cut into 3 to 7 steps, and a little noise), ``"bank"`` (banks of fog with
            nearly clear air around them: depth times density), ``"mixture"`` (one of the first three at equal odds), or
            several of them to draw one from at equal odds.

    Raises:
        ValueError: an unknown kind, or a picture without pixels.
    """
    kinds = [kind] if isinstance(kind, str) else list(kind)
    if not kinds or not {*kinds} <= {*FIELD_KINDS, "mixture"}:
        raise ValueError(f"kind must be mixture, {', '.join(FIELD_KINDS)} or a list of them, got {kind!r}")
    if min(size) < 1:
        raise ValueError(f"a picture of {size} has no depth")
    if not isinstance(kind, str):
        kind = _one_of(kinds, rng)
    if kind == "mixture":
        kind = _one_of(MIXTURE, rng)
    none = np.zeros(0, np.float32)
    if kind == "constant":
        return DepthField(size, np.ones((2, 2), np.float32), none, none, none, 1.0)
    near = rng.uniform(*_NEAR)
    if kind == "ramp":
        base = (near + (1 - near) * _slope(rng, rng.uniform(0.0, 0.6))).astype(np.float32)
        return DepthField(size, base, none, none, none, float(base.max()))
    if kind == "bank":
        base = _bank(rng)
        return DepthField(size, base, none, none, none, float(base.max()))
    base = _slope(rng, rng.uniform(0.3, 1.2)).astype(np.float32)
    steps = int(rng.integers(3, 8))
    levels = (near + (1 - near) * np.sort(rng.random(steps))).astype(np.float32)
    thresholds = np.sort(rng.random(steps - 1)).astype(np.float32)
    detail = (rng.uniform(0.02, 0.08) * _noise(rng)).astype(np.float32)
    field = DepthField(size, base, levels, thresholds, detail, 1.0)
    return replace(field, largest=float((field._layered(base) + detail).max()))


def depth_from_disparity(disparity: np.ndarray, focal: float, *, baseline: float, offset: float = 0.0) -> np.ndarray:
    """Depth of a stereo pair, ``baseline * focal / (disparity + offset)``; NaN where there is none.

    Args:
        disparity: ``(h, w)`` in pixels; not finite where it is unknown.
        focal: focal length in pixels.
        baseline: distance of the cameras, in the unit that the depth is to have.
        offset: difference of the principal points in pixels.
    """
    shift = np.asarray(disparity, np.float64) + offset
    known = np.isfinite(shift) & (shift > 0)
    return np.where(known, baseline * focal / np.where(known, shift, 1), np.nan)


def relative_depth(depth: np.ndarray) -> np.ndarray:
    """A measured depth map without holes and outliers, its largest value 1.

    What is not finite is filled from the left or the right, by the farther of the two (stereo loses the background
    beside an edge), and where a row holds nothing from the nearest row. The 0.5 and 99.5 percentiles bound the rest.

    Args:
        depth: ``(h, w)`` in any unit, larger is farther.

    Returns:
        ``(h, w)``, float32 in 0..1.

    Raises:
        ValueError: not ``(h, w)``, nothing finite, or depths that are negative or all zero.
    """
    depth = np.asarray(depth, np.float64)
    if depth.ndim != 2 or not depth.size:
        raise ValueError(f"a depth map must be (h, w), got {depth.shape}")
    known = np.isfinite(depth)
    if not known.any():
        raise ValueError("the depth map holds no finite number")
    low, high = np.percentile(depth[known], _PERCENTILES)
    if low < 0 or high <= 0:
        raise ValueError(f"the depth map reaches from {low:g} to {high:g}; depths must be positive, larger is farther")
    filled = np.clip(depth if known.all() else _fill(np.where(known, depth, np.nan)), low, high)
    return (filled / filled.max()).astype(np.float32)


def read_depth(path: str | os.PathLike) -> np.ndarray:
    """The :func:`relative_depth` of a ``.npy`` array, or of a grey 16-bit PNG or TIFF in which 0 marks a hole.

    Raises:
        DataError: a file that cannot be read or is no depth map; the message names it.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".npy":
            depth = np.load(path, allow_pickle=False)
        else:
            image = read_image(path)
            if image.shape[2] != 1 or image.dtype != np.uint16:
                raise ValueError(
                    f"it has {image.shape[2]} channels of {image.dtype}; a depth map is grey, with 16 bits"
                )
            depth = np.where(image[..., 0] > 0, image[..., 0].astype(np.float64), np.nan)
        return relative_depth(depth)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot use the depth map {path}: {getattr(error, 'strerror', None) or error}") from error


def _places(start: int, length: int, side: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Node before each pixel, and the part of the way to the next."""
    places = np.arange(start, start + length) * ((nodes - 1) / max(1, side - 1))
    before = np.minimum(places.astype(np.int64), nodes - 2)
    return before, (places - before).astype(np.float32)


def _bilinear(lattice: np.ndarray, rows: tuple, columns: tuple) -> np.ndarray:
    (row, down), (column, right) = rows, columns
    down = down[:, None]
    lines = lattice[row] * (1 - down) + lattice[row + 1] * down
    return lines[:, column] * (1 - right) + lines[:, column + 1] * right


def _slope(rng: np.random.Generator, roughness: float) -> np.ndarray:
    """``(n, n)`` in 0..1, both reached: a slope and smooth noise."""
    # upwards is farther in most photographs
    angle = rng.normal(0, np.pi / 4)
    places = np.linspace(-0.5, 0.5, _NODES)
    slope = places[None] * np.sin(angle) - places[:, None] * np.cos(angle) + roughness * _noise(rng)
    slope -= slope.min()
    return slope / slope.max()


def _bank(rng: np.random.Generator) -> np.ndarray:
    """``(n, n)`` in 0..1: smooth patches of fog that thin out to nearly nothing between them."""
    density = _slope(rng, rng.uniform(0.4, 1.4))
    clear, width = rng.uniform(0.2, 0.6), rng.uniform(0.2, 0.7)
    part = np.clip((density - clear) / width, 0, 1)
    floor = rng.uniform(*_THIN)
    return (floor + (1 - floor) * part * part * (3 - 2 * part)).astype(np.float32)


def _one_of(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def _noise(rng: np.random.Generator) -> np.ndarray:
    """``(n, n)`` in -1..1, smooth, with features of a half to a seventh of the side."""
    cells = int(rng.integers(2, 8))
    values = rng.uniform(-1, 1, (cells + 1, cells + 1))
    node, part = _places(0, _NODES, _NODES, cells + 1)
    # without a kink at the nodes
    part = part * part * (3 - 2 * part)
    return _bilinear(values, (node, part), (node, part))


def _fill(depth: np.ndarray) -> np.ndarray:
    """NaN replaced along the rows, then along the columns."""
    filled = np.fmax(_carry(depth), _carry(depth[:, ::-1])[:, ::-1])
    rows = np.flatnonzero(np.isfinite(filled[:, 0]))
    nearest = rows[np.abs(np.arange(len(depth))[:, None] - rows).argmin(axis=1)]
    return np.where(np.isfinite(depth), depth, filled[nearest])


def _carry(depth: np.ndarray) -> np.ndarray:
    """Each NaN replaced by the last number to the left of it, if there is one."""
    places = np.where(np.isfinite(depth), np.arange(depth.shape[1]), 0)
    return np.take_along_axis(depth, np.maximum.accumulate(places, axis=1), axis=1)
