"""Window attention where height and width are left open, as an export does: windows gathered by computed indices.

Views as windows would tie the sizes of an image to multiples of the window, and a loop that reflects cannot be written
down for sizes that nobody knows. One gather reflects and partitions, another one puts the pixels back and cuts.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.exported import is_exported


def are_open(image: Tensor) -> bool:
    """Whether a graph is made in which height or width of (b, h, w, c) are left open; compilers guard them instead."""
    # a trace counts in tensors, torch.export in torch.SymInt
    return is_exported() and any(type(side) is not int for side in image.shape[1:3])


def attention(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
    fused: bool,
) -> Tensor:
    """(b, h, w, 3 * heads * d) -> (b, h, w, heads * d), by PyTorch's fused attention or by a softmax written out."""
    b, h, w, channels = qkv.shape
    d, pixels = channels // (3 * heads), window * window
    rows, columns = _whole(h, window), _whole(w, window)
    y, x = (_places(n, size, window, qkv.device) for n, size in ((rows, h), (columns, w)))
    index = (y[:, None, :, None] * w + x[None, :, None, :]).reshape(rows * columns * pixels)
    tiles = qkv.reshape(b, h * w, channels).index_select(1, index)
    q, k, v = tiles.reshape(b * (rows * columns), pixels, 3, heads, d).permute(2, 0, 3, 1, 4).unbind(0)
    if q_pos is not None:
        rank = q_pos.shape[-1]
        q, k = (
            torch.cat([part, position.to(part.dtype)[None].expand(part.shape[0], -1, -1, -1)], dim=-1)
            for part, position in ((q, q_pos * (1 / (scale * math.sqrt(rank)))), (k, k_pos))
        )
    out = _attend(q, k, v, bias, scale, fused)
    out = out.transpose(1, 2).reshape(b, rows * columns * pixels, heads * d)
    return out.index_select(1, _home(h, w, window, qkv.device)).reshape(b, h, w, heads * d)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, fused: bool) -> Tensor:
    """(windows, heads, pixels, d) each -> the same as v"""
    if fused:
        mask = None if bias is None else bias.to(q.dtype)
        # the kernels of a CPU take equal lengths only
        longer = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return F.scaled_dot_product_attention(q, k, longer, attn_mask=mask, scale=scale)[..., : v.shape[-1]]
    logits = ((q * scale) @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return torch.softmax(logits, dim=-1).to(v.dtype) @ v


def continued(image: Tensor, axis: int, window: int) -> Tensor:
    """An image whose axis is continued by reflection to whole windows."""
    length = _whole(image.shape[axis], window) * window
    return image.index_select(axis, _reflected(torch.arange(length, device=image.device), image.shape[axis]))


def _whole(size: int, window: int) -> int:
    """Windows that cover an axis."""
    # not -(-size // window): ONNX divides towards zero
    return (size + window - 1) // window


def _reflected(position: Tensor, size: int) -> Tensor:
    """Places of an endless image that is continued by reflection -> places in its first ``size`` pixels."""
    # as a tensor, since of an open size nobody knows whether this is zero
    period = torch.full((), 2 * (size - 1), device=position.device).clamp(min=1)
    position = position % period
    return torch.minimum(position, period - position)


def _places(windows: int, size: int, window: int, device: torch.device) -> Tensor:
    """(windows, window): the places of an axis of ``size`` pixels that each window holds."""
    starts = torch.arange(windows, device=device)[:, None] * window
    return _reflected(starts + torch.arange(window, device=device), size)


def _home(h: int, w: int, window: int, device: torch.device) -> Tensor:
    """(h * w,): where among the pixels of all windows each pixel of the image is."""
    y, x = torch.arange(h, device=device)[:, None], torch.arange(w, device=device)
    tile = (y // window) * _whole(w, window) + x // window
    return (tile * window**2 + (y % window) * window + x % window).reshape(h * w)
