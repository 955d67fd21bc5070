"""Depthwise deformable convolution as one ``grid_sample`` of all taps, for graphs that other programs run.

Nine samples of each pixel are one image, nine times as high, whose taps a convolution adds up. Coordinates over the
side of the image, which ``grid_sample`` takes, are in float32 out by about 1e-7 times that side, in pixels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def deform_depthwise_conv2d(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w), all of float32 or float64; forward only."""
    b, c, h, w = x.shape
    kind = {"device": x.device, "dtype": offset.dtype}
    # (b, 9, 2, h, w), rows first
    offset = offset.reshape(b, 9, 2, h, w)
    if clamp is not None:
        offset = offset.clamp(*clamp)
    offset = offset + torch.tensor([[tap // 3 - 1, tap % 3 - 1] for tap in range(9)], **kind)[:, :, None, None]
    # pixels are centred at (2 i + 1) / n - 1, which holds for a single one too
    rows, columns = ((2 * torch.arange(n, **kind) + 1) / n - 1 for n in (h, w))
    y, z = offset[:, :, 0] * (2 / h) + rows[:, None], offset[:, :, 1] * (2 / w) + columns
    places = torch.stack([z, y], dim=-1).reshape(b, 9 * h, w, 2)
    taps = F.grid_sample(x, places, mode="bilinear", padding_mode="zeros", align_corners=False)
    return F.conv2d(taps.reshape(b, 9 * c, h, w), weight.reshape(c, 9, 1, 1), groups=c)
