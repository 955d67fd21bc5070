"""Depthwise deformable convolution on a CPU: pixels gathered by embedding_bag, over pieces that stay in the cache.

With the channels of a pixel side by side, a bilinear sample is a weighted sum of four rows of a table, which is what
embedding_bag does best, and all channels share its weights a:

    v_t = sum_k a_tk x[q_t + k]    out = sum_t w_t v_t    k in (0, right, below, below right)

Backward, with u_t = w_t g the gradient by the sample v_t,

    dw_t = sum_p g v_t    s_tk = <u_t, x[q_t + k]>    dx[q + k] = sum of a_tk u_t over all (p, t) whose corner q_t is q

The products s at the corners yield both derivatives of a sample by its place (a sampled product of dense matrices),
and the last sum is an embedding_bag again, over the samples in the order of their corners.
"""

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.deform_conv import open_sizes, reference
from kernels.exported import is_exported

# pixels times channels of a piece, and fewest pixels: one sample of each is 0.8 MB in float32
PIECE, FEWEST = 192 * 1024, 512
# the same of the backward pass: a sort of 32 k samples and more is by radix
PIECE_BACKWARD, FEWEST_BACKWARD = 128 * 1024, 4096
# a share of the work, whose table stays in the cache: pixels at most, rows at least
SHARE, SHARE_ROWS = 16 * 1024, 16
# pixels up to which all images are one share: operators on a few thousand pixels wait for Python more than they compute
TOGETHER = 32 * 1024
# zeros around an image: what points outside reads two of them
EDGE = 2


def deform_depthwise_conv2d(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
    """The ``torch`` backend: (b, c, h, w) -> (b, c, h, w)."""
    if is_exported(x, offset, weight):
        return open_sizes.deform_depthwise_conv2d(x, offset, weight, clamp=clamp)
    if torch.compiler.is_compiling() or is_exported():
        return _all_taps(x, offset, weight, clamp)
    if x.device.type != "cpu":
        # what is fast here is so by the cache
        return reference.deform_depthwise_conv2d(x, offset, weight, clamp=clamp)
    return _DeformConv.apply(x, offset, weight, clamp)


def _all_taps(x: Tensor, offset: Tensor, weight: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """The definition with taps and corners as dimensions: few operators for a compiler to make one loop of."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, offset.dtype), torch.float32)
    b, c, h, w = x.shape
    places = offset.to(dtype).unflatten(1, (9, 2))
    if clamp is not None:
        inside = (places >= clamp[0]) & (places <= clamp[1])
        places = torch.where(inside, places, places.detach().clamp(*clamp))
    low = places.detach().floor()
    fraction = places - low
    taps = torch.arange(9, device=x.device)[:, None, None]
    rows, columns = torch.arange(h, device=x.device)[:, None], torch.arange(w, device=x.device)
    y, z = low[:, :, 0].long() + (rows + taps // 3), low[:, :, 1].long() + (columns + taps % 3)
    # (b, 2, 9, h, w): both rows and both columns; what is outside reads the zeros around the image
    y, z = (torch.stack([k, k + 1], dim=1) for k in (y, z))
    index = y.clamp(0, h + 1)[:, :, None] * (w + 2) + z.clamp(0, w + 1)[:, None]
    (up, left), (down, right) = (1 - fraction).unbind(2), fraction.unbind(2)
    weights = torch.stack([up, down], dim=1)[:, :, None] * torch.stack([left, right], dim=1)[:, None]
    padded = F.pad(x.to(dtype), (1, 1, 1, 1)).flatten(2)
    found = padded.gather(2, index.flatten(1)[:, None].expand(-1, c, -1)).view(b, c, 4, 9, h, w)
    sampled = (found * weights.flatten(1, 2)[:, None]).sum(dim=2)
    return (sampled * weight.to(dtype).reshape(c, 9, 1, 1)).sum(dim=2).to(x.dtype)


class _DeformConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offset: Tensor, weight: Tensor, clamp: tuple[float, float] | None) -> Tensor:
        ctx.save_for_backward(x, offset, weight)
        ctx.clamp = clamp
        call = _Call(x, offset, weight, clamp)
        pixels = torch.empty(x.shape[0], x.shape[2] * x.shape[3], x.shape[1], dtype=x.dtype)
        for share in call.shares():
            table, places = call.table(share), call.places(share)
            for part in share.pieces(max(PIECE // call.c, FEWEST)):
                index, weights = call.corners(*call.samples(share, places, part))
                call.mix(table, index.view(9, -1), weights.view(9, -1), pixels.flatten(0, 1)[part])
        return _laid_out_like(x, pixels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "deform_conv by torch has no second derivative (create_graph=True); take backend='reference'"
            )
        x, offset, weight = ctx.saved_tensors
        call = _Call(x, offset, weight, ctx.clamp)
        _say_nothing_of_beta()
        wanted = ctx.needs_input_grad[:3]
        upstream = grad.permute(0, 2, 3, 1)
        d_offset = torch.empty(18, x.shape[0], *x.shape[2:], dtype=offset.dtype) if wanted[1] else None
        d_x = torch.zeros(*_rows_last(x).shape, dtype=call.dtype) if wanted[0] else None
        d_weight = torch.zeros_like(call.weight) if wanted[2] else None
        for share in call.shares():
            d_table, d_taps = _backward_share(call, share, upstream, d_offset, wanted)
            if d_x is not None:
                _add_rows(d_x, share, d_table)
            if d_weight is not None:
                d_weight += d_taps
        return (
            None if d_x is None else _laid_out_like(x, d_x.flatten(1, 2).to(x.dtype)),
            None if d_offset is None else d_offset.transpose(0, 1).contiguous(),
            None if d_weight is None else d_weight.t().reshape(weight.shape).to(weight.dtype),
            None,
        )


@dataclass(frozen=True)
class _Share:
    """Rows ``start`` to ``stop`` of some images, and the rows ``first`` to ``last`` that their samples may touch.

    Of several images the rows are all.
    """

    images: slice
    start: int
    stop: int
    first: int
    last: int
    size: tuple[int, int]

    @property
    def count(self) -> int:
        """Number of images."""
        return self.images.stop - self.images.start

    @property
    def pixels(self) -> slice:
        """The pixels of the share, counted from the first one of the first image of the call."""
        h, w = self.size
        start = (self.images.start * h + self.start) * w
        return slice(start, start + self.count * (self.stop - self.start) * w)

    def pieces(self, pixels: int) -> Iterator[slice]:
        """The pixels of the share, some at a time."""
        for start in range(self.pixels.start, self.pixels.stop, pixels):
            yield slice(start, min(start + pixels, self.pixels.stop))


class _Call:
    """The inputs of one call, in the dtype of its arithmetic and pixel by pixel."""

    def __init__(self, x: Tensor, offset: Tensor, weight: Tensor, clamp: tuple[float, float] | None) -> None:
        self.dtype = torch.promote_types(torch.promote_types(x.dtype, offset.dtype), torch.float32)
        self.image = _rows_last(x)
        # (18, b h w), a view of one image and else a copy
        self.offset = offset.transpose(0, 1).flatten(1)
        self.b, self.h, self.w, self.c = self.image.shape
        self.weight = weight.reshape(self.c, 9).t().to(self.dtype).contiguous()
        self.clamp = clamp
        self.stride = self.w + 2 * EDGE

    def shares(self) -> list[_Share]:
        """Parts of the maps, the same ones whatever the number of cores."""
        # without a clamp each share of the backward pass has a whole map to itself
        if self.clamp is None or self.b * self.h * self.w > TOGETHER:
            rows = self.h if self.clamp is None else max(SHARE // self.w, SHARE_ROWS)
            return [
                self._share(slice(image, image + 1), start, min(start + rows, self.h))
                for image in range(self.b)
                for start in range(0, self.h, rows)
            ]
        return [self._share(slice(0, self.b), 0, self.h)] if self.b else []

    def _share(self, images: slice, start: int, stop: int) -> _Share:
        low, high = (-self.h, self.h) if self.clamp is None else self.clamp
        first = min(max(start - 1 + floor(low), -EDGE), self.h)
        last = min(max(stop + ceil(high), -EDGE), self.h) + 1
        return _Share(images, start, stop, first, last, (self.h, self.w))

    def table(self, share: _Share) -> Tensor:
        """The rows that a share may touch, with zeros around each image, (pixels, c)."""
        rows = share.last - share.first + 1
        table = torch.zeros(share.count, rows, self.stride, self.c, dtype=self.dtype)
        start, stop = max(share.first, 0), min(share.last + 1, self.h)
        if start < stop:
            part = table[:, start - share.first : stop - share.first, EDGE:-EDGE]
            part.copy_(self.image[share.images, start:stop])
        return table.view(-1, self.c)

    def places(self, share: _Share) -> tuple[Tensor, Tensor, Tensor]:
        """Row and column in the table of its image of each pixel of the share, and where that table begins."""
        rows = torch.arange(share.start - share.first, share.stop - share.first, dtype=torch.int32)
        columns = torch.arange(EDGE, self.w + EDGE, dtype=torch.int32)
        tables = torch.arange(share.count, dtype=torch.int32) * ((share.last - share.first + 1) * self.stride)
        height = share.stop - share.start
        return (
            rows.repeat_interleave(self.w).repeat(share.count),
            columns.repeat(share.count * height),
            tables.repeat_interleave(height * self.w),
        )

    def samples(self, share: _Share, places: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        """Of each tap and pixel: the row of the table of the upper left corner, (9, n), and the fractions (9, 2, n)."""
        offset = self.offsets(part)
        whole = offset.floor()
        fraction = offset - whole
        corner = whole.to(torch.int32).view(3, 3, 2, -1)
        start = share.pixels.start
        row, column, table = (place[part.start - start : part.stop - start] for place in places)
        step = torch.arange(-1, 2, dtype=torch.int32)[:, None]
        y, z = corner[:, :, 0], corner[:, :, 1]
        y += (row + step)[:, None]
        z += column + step
        # beyond the edges there are zeros, at whatever distance; and not a number becomes a number here
        y.clamp_(0, share.last - share.first - 1)
        z.clamp_(0, self.w + EDGE)
        return torch.add(z, y, alpha=self.stride).add_(table).view(9, -1), fraction

    def offsets(self, part: slice) -> Tensor:
        """The clamped offsets, (9, 2, n)."""
        own = self.offset[:, part].to(self.dtype)
        if self.clamp is not None:
            own = own.clamp(*self.clamp)
        return own.contiguous().view(9, 2, -1)

    def inside(self, part: slice) -> Tensor:
        """Whether the clamp lets an offset through, (18, n)."""
        own = self.offset[:, part].to(self.dtype)
        return own == own.clamp(*self.clamp)

    def corners(self, corner: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the table and weights of the four corners of each sample, (9 n, 4)."""
        # two neighbours of 32 bits as one number of 64: half as many writes that jump; the weights likewise
        pair = 1 + (1 << 32)
        first = corner.view(-1).to(torch.int64).mul_(pair).add_(1 << 32)
        index = torch.empty(len(first), 2, dtype=torch.int64)
        index[:, 0] = first
        torch.add(first, self.stride * pair, out=index[:, 1])
        down, right = fraction[:, 0], fraction[:, 1]
        up, left = 1 - down, 1 - right
        weights = torch.empty(*corner.shape, 2, dtype=self.dtype.to_complex())
        torch.complex(up * left, up * right, out=weights[..., 0])
        torch.complex(down * left, down * right, out=weights[..., 1])
        return index.view(torch.int32), torch.view_as_real(weights).view(-1, 4)

    def mix(self, table: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """The taps summed with their weights, (n, c)."""
        ends = torch.arange(0, index.shape[1] + 1, 4, dtype=torch.int32)
        total = out if out.dtype == self.dtype else torch.empty_like(out, dtype=self.dtype)
        for tap, weight in enumerate(self.weight):
            sampled = _bag(table, index[tap], ends, weights[tap])
            if tap:
                total.addcmul_(sampled, weight)
            else:
                torch.mul(sampled, weight, out=total)
        if total is not out:
            out.copy_(total)


def _backward_share(
    call: _Call, share: _Share, upstream: Tensor, d_offset: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Fills in ``d_offset``; returns the gradients by the table, (pixels, c), and by the weight, (9, c)."""
    table, places = call.table(share), call.places(share)
    d_table = torch.zeros_like(table) if wanted[0] else None
    d_weight = torch.zeros_like(call.weight) if wanted[2] else None
    for part in share.pieces(max(PIECE_BACKWARD // call.c, FEWEST_BACKWARD)):
        corner, fraction = call.samples(share, places, part)
        corners = call.corners(corner, fraction)
        g = upstream.flatten(0, 2)[part].to(call.dtype).contiguous()
        if d_weight is not None:
            d_weight += _bags(table, *corners).view(9, -1, call.c).mul_(g).sum(dim=1)
        if d_table is None and d_offset is None:
            continue
        u = (call.weight[:, None] * g).view(-1, call.c)
        if d_offset is not None:
            slopes = _slopes(_products(u, table, *corners), fraction)
            if call.clamp is not None:
                slopes.mul_(call.inside(part))
            d_offset.flatten(1)[:, part] = slopes
        if d_table is not None:
            _scatter(d_table, u, corner.view(-1), fraction, call.stride)
    return d_table, d_weight


def _bags(table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sums of four rows with weights, (n, c)."""
    ends = torch.arange(0, index.numel() + 1, 4, dtype=torch.int32)
    return _bag(table, index.view(-1), ends, weights.view(-1))


def _bag(table: Tensor, index: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    return torch.embedding_bag(table, index, ends, False, 0, False, weights, True)[0]


def _products(u: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """<u, x> of each sample and its four corners, (n, 4)."""
    ends = torch.arange(0, index.numel() + 1, 4, dtype=torch.int32)
    size = (len(u), len(table))
    pattern = torch.sparse_csr_tensor(ends, index.view(-1), weights.view(-1), size, check_invariants=False)
    return torch.sparse.sampled_addmm(pattern, u, table.t(), beta=0.0).values().view(-1, 4)


def _slopes(products: Tensor, fraction: Tensor) -> Tensor:
    """The gradient by the offsets, (18, n)."""
    a, b, c, d = products.view(9, -1, 4).unbind(dim=-1)
    down, right = fraction[:, 0], fraction[:, 1]
    slopes = torch.empty_like(fraction)
    torch.lerp(c - a, d - b, right, out=slopes[:, 0])
    torch.lerp(b - a, d - c, down, out=slopes[:, 1])
    return slopes.flatten(0, 1)


def _scatter(d_table: Tensor, u: Tensor, corner: Tensor, fraction: Tensor, stride: int) -> None:
    """Add u to the four corners of each sample: for each corner a sum over the samples in its order."""
    corner, order = corner.sort(stable=True)
    first, last = int(corner[0]), int(corner[-1])
    counts = torch.bincount(corner - first, minlength=last - first + 1)
    ends = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=ends[1:])
    down, right = (fraction[:, axis].reshape(-1).index_select(0, order) for axis in (0, 1))
    up, left = 1 - down, 1 - right
    for place, weights in ((0, up * left), (1, up * right), (stride, down * left), (stride + 1, down * right)):
        d_table[first + place : last + place + 1] += _bag(u, order, ends, weights)


def _add_rows(d_x: Tensor, share: _Share, d_table: Tensor) -> None:
    """Add what a share found for the rows it touches to the gradient of the images, (b, h, w, c)."""
    h, w, c = d_x.shape[1:]
    start, stop = max(share.first, 0), min(share.last + 1, h)
    if start < stop:
        rows = d_table.view(share.count, -1, w + 2 * EDGE, c)
        d_x[share.images, start:stop] += rows[:, start - share.first : stop - share.first, EDGE:-EDGE]


def _rows_last(x: Tensor) -> Tensor:
    """(b, c, h, w) -> (b, h, w, c), a view"""
    return x.permute(0, 2, 3, 1)


def _laid_out_like(x: Tensor, pixels: Tensor) -> Tensor:
    """(b, h w, c) -> (b, c, h, w), channels-last if x is"""
    out = pixels.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return out if last else out.contiguous()


@functools.cache
def _say_nothing_of_beta() -> None:
    """PyTorch says once in a process that compressed matrices are in beta; it is no news for whoever trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), check_invariants=False)
