"""Operators of MB-TaylorFormer's blocks on parts of an image: norm, projections, gating, and the views of heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.exported import is_exported
from kernels.layer_norm2d import layer_norm2d
from kernels.tiles import Part, in_tiles

NORM_EPS = 1e-5


def local(part: Part, x: Tensor, weight: Tensor, depthwise: Tensor, reach: int = 0) -> Tensor:
    """Norm, 1x1 convolution and depthwise 3x3 convolution: (b, c, h, w) -> (b, out, h, w), weight (out, c)"""
    x, padding = part.padded(x, 1, reach)
    return F.conv2d(pointwise(normed(x), weight), depthwise, padding=padding, groups=len(depthwise))


def separable(x: Tensor, depthwise: nn.Conv2d, mixing: nn.Conv2d) -> Tensor:
    """Depthwise 3x3 convolution and 1x1 convolution, in tiles: (b, c, h, w) -> (b, out, h, w)"""

    def run(part: Part, maps: Sequence[Tensor], images: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        return pointwise(part.conv2d(maps[0], shared[0], groups=maps[0].shape[1]), shared[1])

    weights = [depthwise.weight, mixing.weight.flatten(1)]
    return in_tiles(run, [x], [], weights, halo=1, width=x.shape[1] + len(weights[1]))


def gated(x: Tensor) -> Tensor:
    """GELU of the first half of the channels times the second half: (b, 2 c, h, w) -> (b, c, h, w)"""
    if torch.compiler.is_compiling() or is_exported():
        a, b = x.chunk(2, dim=1)
        return F.gelu(a) * b
    return _Gated.apply(x)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, dim=1)
        return F.gelu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=1)
        out = torch.empty_like(x)
        da, db = out.chunk(2, dim=1)
        torch.mul(grad, F.gelu(a), out=db)
        torch.mul(grad, b, out=da)
        torch.ops.aten.gelu_backward.grad_input(da, a, grad_input=da)
        return out


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """(b, c, h, w) -> (b, out, h, w), channels-last, weight (out, c)"""
    if is_exported():
        return F.conv2d(x, weight.reshape(*weight.shape, 1, 1))
    return F.linear(x.permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2)


def normed(x: Tensor) -> Tensor:
    """x over the standard deviation of each pixel's channels, whose mean stays: (b, c, h, w), in the dtype of ``x``."""
    return layer_norm2d(x, None, None, NORM_EPS, centred=False)


def heads_of(x: Tensor, kinds: int, heads: int) -> tuple[Tensor, ...]:
    """(b, kinds * heads * d, h, w) -> ``kinds`` times (b, heads, d, h * w), views of channels-last memory"""
    b, channels, h, w = x.shape
    if is_exported():
        return x.reshape(b, kinds, heads, channels // (kinds * heads), h * w).unbind(1)
    rows = x.permute(0, 2, 3, 1).reshape(b, h * w, kinds, heads, channels // (kinds * heads))
    return rows.permute(2, 0, 3, 4, 1).unbind(0)


def image_of(x: Tensor, like: Tensor) -> Tensor:
    """(b, heads, d, n) -> (b, heads * d, h, w), channels-last, h and w those of ``like``"""
    b, heads, d, _ = x.shape
    if is_exported():
        return x.reshape(b, heads * d, *like.shape[2:])
    return x.permute(0, 3, 1, 2).reshape(b, *like.shape[2:], heads * d).permute(0, 3, 1, 2)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
