"""Bins of keys that lie together: tiles of an image, bands of its rows, or runs of tokens. All are tiles of a grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("tiles", "strips", "slices")


@dataclass(frozen=True)
class Bins:
    """A grid of tokens, row by row, cut into tiles whose sides differ by one at most.

    Attributes:
        grid: ``(h, w)`` of the tokens.
        tiles: how many there are, ``(down, across)``.
    """

    grid: tuple[int, int]
    tiles: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of bins."""
        return self.tiles[0] * self.tiles[1]

    @property
    def sides(self) -> tuple[int, int]:
        """``(h, w)`` of the largest tile."""
        return -(-self.grid[0] // self.tiles[0]), -(-self.grid[1] // self.tiles[1])

    @property
    def width(self) -> int:
        """Tokens of the largest bin."""
        return self.sides[0] * self.sides[1]

    @property
    def even(self) -> bool:
        """Whether all tiles have the same size."""
        return self.width * self.count == self.grid[0] * self.grid[1]

    def split(self, x: Tensor) -> Tensor:
        """(b, heads, n, ...) -> (b, heads, bins, width, ...); past a bin's end a token repeats"""
        b, heads = x.shape[:2]
        if not self.even:
            order, _ = self.tokens(x.device)
            return x.index_select(2, order.flatten()).reshape(b, heads, self.count, self.width, *x.shape[3:])
        (down, across), (high, wide) = self.tiles, self.sides
        tiles = x.reshape(b, heads, down, high, across, wide, *x.shape[3:]).transpose(3, 4)
        return tiles.reshape(b, heads, self.count, self.width, *x.shape[3:])

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The token at each place of each bin, and which places hold one: (bins, width) twice, int64 and bool."""
        rows, has_row = _cuts(self.grid[0], self.tiles[0], device)
        columns, has_column = _cuts(self.grid[1], self.tiles[1], device)
        order = rows[:, None, :, None] * self.grid[1] + columns[None, :, None, :]
        held = has_row[:, None, :, None] & has_column[None, :, None, :]
        return order.reshape(self.count, self.width), held.reshape(self.count, self.width)


def make_bins(n: int, bins: int, grid: Sequence[int] | None, layout: str | None) -> Bins:
    """Cut ``n`` tokens into ``bins`` bins, or the most below that number that can be had (no bin is empty).

    Args:
        n: number of tokens.
        bins: number of bins.
        grid: ``(h, w)`` with ``h * w == n``, or None.
        layout: "tiles" (as square as they can be), "strips" of rows, "slices" of tokens; None for tiles where there is
            a grid and slices elsewhere.

    Raises:
        ValueError: the grid does not hold the tokens, or the layout is unknown or needs a grid.
    """
    layout = layout or ("slices" if grid is None else "tiles")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if grid is None and layout != "slices":
        raise ValueError(f"layout {layout!r} needs grid=(h, w)")
    if grid is not None and (len(grid) != 2 or min(grid) < 1 or grid[0] * grid[1] != n):
        raise ValueError(f"grid must be (h, w) with h * w = {n} tokens, got {tuple(grid)}")
    if grid is None or layout == "slices":
        return Bins((1, n), (1, min(bins, n)))
    h, w = grid
    if layout == "strips":
        return Bins((h, w), (min(bins, h), 1))
    return Bins((h, w), _tiles(h, w, min(bins, n)))


def squarest(count: int, h: int, w: int) -> tuple[int, int] | None:
    """Rows and columns of ``count`` tiles of a grid of ``h`` x ``w``, as square as they can be; None where none fit."""
    fits = [(a, count // a) for a in range(1, min(h, count) + 1) if count % a == 0 and count // a <= w]
    return min(fits, key=lambda tiles: abs(math.log(h * tiles[1] / (w * tiles[0]))), default=None)


def _tiles(h: int, w: int, bins: int) -> tuple[int, int]:
    # one tile always fits
    return next(tiles for tiles in (squarest(count, h, w) for count in range(bins, 0, -1)) if tiles)


def _cuts(side: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(parts, longest) places, and whether each lies in its part."""
    edges = torch.arange(parts + 1, device=device) * side // parts
    places = edges[:-1, None] + torch.arange(-(-side // parts), device=device)
    held = places < edges[1:, None]
    return torch.where(held, places, edges[:-1, None]), held
