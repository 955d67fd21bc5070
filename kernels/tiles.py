"""Local operators of images, computed in tiles one after the other, and once more in the backward pass.

A chain of operators that each look at most a few pixels around one gives the same in tiles as on the whole image, if
each tile comes with those pixels. On a CPU that is faster, as what one operator writes is still in the cache when the
next one reads it; and nothing between the input and the output is ever there for the whole image, neither in inference
nor for the backward pass, which computes each tile again. Other devices compute the whole image, and large images in
tiles where no gradients are asked for.

Tried and slower for MB-TaylorFormer-B on 256 x 256 pixels, 2 cores: strips dealt out to threads with one core each,
as :mod:`kernels.threads` does (8.3 against 7.9 s forward and backward, and three times slower for small tiles, as the
threads wait for the interpreter); whole images only (9.5 s); tiles for small maps too (10.9 s).
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.exported import is_exported
from kernels.threads import keep_freed_memory

# numbers in the widest intermediate of a tile, which the cache should hold beside its neighbours
CPU_TILE = 2**19
# the same for the images as a whole, below which tiles cost more than they bring
CPU_LEAST = 2**23
# the same on other devices, where tiles only bound the memory
DEVICE_TILE = 2**30
# sides of a tile: lower ones compute their surroundings more than themselves
ROWS, LEAST_ROWS, LEAST_COLUMNS = 32, 8, 32


@dataclass(frozen=True)
class Span:
    """Places ``start:stop`` along an axis of ``length``."""

    start: int
    stop: int
    length: int

    def before(self, reach: int) -> int:
        """How many of the ``reach`` places before there are in the image."""
        return min(reach, self.start)

    def after(self, reach: int) -> int:
        """The same behind."""
        return min(reach, self.length - self.stop)

    def around(self, reach: int) -> slice:
        """The places and ``reach`` more on each side, as far as there are."""
        return slice(self.start - self.before(reach), self.stop + self.after(reach))

    def within(self, given: int, reach: int) -> slice:
        """:meth:`around`, counted from the first of ``given`` places, which reach equally far to both sides."""
        extra = given - (self.stop - self.start)
        wide = next(r for r in range(extra + 1) if self.before(r) + self.after(r) == extra)
        first = self.before(wide) - self.before(reach)
        return slice(first, first + self.stop - self.start + self.before(reach) + self.after(reach))

    def padding(self, reach: int, half: int) -> tuple[int, int]:
        """Zeros that a kernel of ``2 * half + 1`` places needs at the borders to give :meth:`around`."""
        before = self.before(reach) + half - self.before(reach + half)
        return before, self.after(reach) + half - self.after(reach + half)


class Part:
    """The part of an image that is to be returned, some rows and columns, among the pixels that were handed over."""

    def __init__(self, rows: Span, columns: Span) -> None:
        self.rows, self.columns = rows, columns

    @staticmethod
    def all(x: Tensor) -> "Part":
        """The whole image ``x``."""
        return _Whole(*(Span(0, side, side) for side in x.shape[2:]))

    def cut(self, x: Tensor, reach: int = 0) -> Tensor:
        """Of a map with at least ``reach`` pixels around the part, as far as there are, the part and those."""
        return x[:, :, self.rows.within(x.shape[2], reach), self.columns.within(x.shape[3], reach)]

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, groups: int, reach: int = 0) -> Tensor:
        """Convolution with an odd square kernel and zeros around the image, of the part and ``reach`` around it.

        ``x`` reaches at least half a kernel farther, as far as there are pixels.
        """
        x, padding = self.padded(x, weight.shape[2] // 2, reach)
        return F.conv2d(x, weight, bias, padding=padding, groups=groups)

    def padded(self, x: Tensor, half: int, reach: int = 0) -> tuple[Tensor, int]:
        """What a kernel of ``2 * half + 1`` needs to give the part and ``reach`` around it, and the padding it lacks.

        To pad a narrow map, and not the wide one that pointwise operators make of it where they leave zero at zero.
        """
        padding = (*self.columns.padding(reach, half), *self.rows.padding(reach, half))
        x = self.cut(x, reach + half)
        return (x, padding[0]) if padding.count(padding[0]) == 4 else (F.pad(x, padding), 0)


class _Whole(Part):
    """All of an image, around which there is nothing."""

    def cut(self, x: Tensor, reach: int = 0) -> Tensor:
        return x

    def padded(self, x: Tensor, half: int, reach: int = 0) -> tuple[Tensor, int]:
        return x, half


# (part, maps, images, shared) -> map of the part, or sums over it
Run = Callable[[Part, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]


def in_tiles(
    run: Run,
    maps: Sequence[Tensor],
    images: Sequence[Tensor] = (),
    shared: Sequence[Tensor] = (),
    *,
    halo: int,
    width: int,
    scale: int = 1,
    total: bool = False,
) -> Tensor:
    """``run`` on the whole image, or tile by tile where that is better.

    Args:
        run: gets ``part, maps, images, shared`` for some images and returns the map of ``part``, which cuts and
            convolves. All tensors that need gradients are arguments. It draws no random numbers.
        maps: ``(b, c, h, w)``, handed over in tiles; channels-last for speed.
        images: ``(b, ...)``, handed over for the images of the tile.
        shared: handed over as they are.
        halo: pixels on each side that an output pixel depends on.
        width: channels of the widest intermediate; how large a tile is follows from it.
        scale: how many times as large tiles are to be, for chains of many operators on few channels.
        total: ``run`` returns ``(b, ...)`` sums over the part, which are added up, rather than a map.

    Returns:
        ``(b, c', h, w)``, or ``(b, ...)`` sums with ``total``; a first derivative only, where it is computed in tiles.
    """
    strips = _strips(maps[0], halo=halo, width=width, scale=scale)
    if strips is None:
        return run(Part.all(maps[0]), maps, images, shared)
    keep_freed_memory()
    job = _Job(run, len(maps), len(images), len(shared), halo, total, strips, _autocast_of(maps[0]))
    return _Tiles.apply(job, *maps, *images, *shared)


def suits(x: Tensor, *, halo: int, width: int) -> bool:
    """Whether :func:`in_tiles` would compute a map like ``x`` in tiles; arguments as there."""
    return _strips(x, halo=halo, width=width) is not None


@dataclass(frozen=True)
class _Strip:
    """Images ``first:last`` and some of their rows, in tiles from left to right."""

    first: int
    last: int
    rows: Span
    columns: tuple[Span, ...]

    @property
    def images(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True)
class _Job:
    run: Run
    maps: int
    images: int
    shared: int
    halo: int
    total: bool
    strips: Sequence[_Strip]
    autocast: tuple[str, torch.dtype] | None

    def split(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        return tensors[: self.maps], tensors[self.maps : self.maps + self.images], tensors[self.maps + self.images :]

    def places(self, strip: _Strip, columns: Span) -> list[Any]:
        """Which part of each tensor a tile gets."""
        of_map = (strip.images, slice(None), strip.rows.around(self.halo), columns.around(self.halo))
        return [of_map] * self.maps + [strip.images] * self.images + [...] * self.shared

    def cut(self, strip: _Strip, columns: Span, tensors: Sequence[Tensor]) -> list[Tensor]:
        places = self.places(strip, columns)
        return [x if place is ... else x[place] for x, place in zip(tensors, places, strict=True)]

    def compute(self, strip: _Strip, columns: Span, cut: Sequence[Tensor]) -> Tensor:
        # the backward pass is outside of the autocast that the forward pass was in
        cast = torch.autocast(*self.autocast) if self.autocast else contextlib.nullcontext()
        with cast:
            return self.run(Part(strip.rows, columns), *self.split(cut))

    def tiles(self, strip: _Strip, tensors: Sequence[Tensor]) -> Iterator[tuple[Span, Tensor]]:
        for columns in strip.columns:
            yield columns, self.compute(strip, columns, self.cut(strip, columns, tensors))


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        if job.total:
            parts = [sum(tile for _, tile in job.tiles(strip, tensors)) for strip in job.strips]
            return _added(job.strips, parts, len(tensors[0]))
        out: Tensor | None = None
        for strip in job.strips:
            for columns, tile in job.tiles(strip, tensors):
                if out is None:
                    # the first tile tells channels and dtype
                    b, _, h, w = tensors[0].shape
                    out = tile.new_empty((b, h, w, tile.shape[1])).permute(0, 3, 1, 2)
                out[strip.images, :, strip.rows.around(0), columns.around(0)] = tile
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("operators in tiles have no second derivative (create_graph=True)")
        job, tensors, needed = ctx.job, ctx.saved_tensors, ctx.needs_input_grad[1:]
        found = [
            _empty_sum(job, i, x) if need else None for i, (x, need) in enumerate(zip(tensors, needed, strict=True))
        ]
        for strip in job.strips:
            for columns in strip.columns:
                gradients = _tile_backward(job, strip, columns, tensors, needed, grad)
                for place, total, gradient in zip(job.places(strip, columns), found, gradients, strict=True):
                    if gradient is not None:
                        total[place] += gradient
        return None, *(None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True))


def _empty_sum(job: _Job, i: int, x: Tensor) -> Tensor:
    if i < job.maps:
        return torch.zeros_like(x, memory_format=torch.channels_last)
    # hundreds of tiles are added up, which 16 bits would not hold
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _tile_backward(
    job: _Job, strip: _Strip, columns: Span, tensors: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    with torch.enable_grad():
        cut = [x.detach().requires_grad_(n) for x, n in zip(job.cut(strip, columns, tensors), needed, strict=True)]
        out = job.compute(strip, columns, cut)
        place = (strip.images,) if job.total else (strip.images, slice(None), strip.rows.around(0), columns.around(0))
        wanted = [x for x in cut if x.requires_grad]
        # what does not matter for some tile has a gradient of zero
        gradients = iter(torch.autograd.grad(out, wanted, grad[place].to(out.dtype), materialize_grads=True))
    return [next(gradients) if need else None for need in needed]


def _added(strips: Sequence[_Strip], parts: Sequence[Tensor], images: int) -> Tensor:
    """Sums over the strips of each image."""
    out = parts[0].new_zeros((images, *parts[0].shape[1:]))
    for strip, part in zip(strips, parts, strict=True):
        out[strip.images] += part
    return out


def _autocast_of(x: Tensor) -> tuple[str, torch.dtype] | None:
    kind = x.device.type
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def _strips(x: Tensor, *, halo: int, width: int, scale: int = 1) -> tuple[_Strip, ...] | None:
    """Strips of about equal size; None for the image as a whole."""
    b, _, h, w = x.shape
    if torch.compiler.is_compiling() or is_exported() or not x.numel() or type(x) not in (Tensor, torch.nn.Parameter):
        return None
    on_cpu = x.device.type == "cpu"
    if not on_cpu and (torch.is_grad_enabled() or h * w * width <= DEVICE_TILE):
        return None
    if on_cpu and b * h * w * width < CPU_LEAST:
        return None
    budget = CPU_TILE * scale if on_cpu else DEVICE_TILE
    least = max(LEAST_ROWS, 2 * halo)
    rows = max(least, budget // (w * width), ROWS if on_cpu else 0)
    count = max(1, min(h // least, math.ceil(h / rows)))
    together = max(1, budget // (h * w * width))
    columns = max(LEAST_COLUMNS, 2 * halo, budget // (width * math.ceil(h / count))) if on_cpu else w
    across = _spans(w, max(1, w // columns))
    return tuple(
        _Strip(first, min(b, first + together), span, across)
        for first in range(0, b, together)
        for span in _spans(h, count)
    )


def _spans(length: int, count: int) -> tuple[Span, ...]:
    bounds = [length * i // count for i in range(count + 1)]
    return tuple(Span(start, stop, length) for start, stop in itertools.pairwise(bounds))
