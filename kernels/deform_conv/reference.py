"""Depthwise deformable 3x3 convolution, defined in plain PyTorch: short, without tricks.

    out[c, p] = sum_t weight[c, t] x_c(p + step_t + clamp(offset_t(p)))

where x_c between the pixels is bilinear, and zero outside the image.
"""

import torch
from torch import Tensor


def deform_depthwise_conv2d(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w); arithmetic in float32 at least; see the public function."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, offset.dtype), torch.float32)
    image, offset, weight = (tensor.to(dtype) for tensor in (x, offset, weight))
    if clamp is not None:
        # torch.clamp lets gradients through on its bounds up to PyTorch 2.13, and no more in 2.14; here they pass
        inside = (offset >= clamp[0]) & (offset <= clamp[1])
        offset = torch.where(inside, offset, offset.detach().clamp(*clamp))
    h, w = x.shape[2:]
    rows, columns = torch.arange(h, device=x.device)[:, None], torch.arange(w, device=x.device)
    out = torch.zeros_like(image)
    for tap in range(9):
        i, j = divmod(tap, 3)
        dy, dx = offset[:, 2 * tap], offset[:, 2 * tap + 1]
        # whole pixels apart from the fraction, which is then exact however large the image
        top, left = dy.detach().floor(), dx.detach().floor()
        down, right = dy - top, dx - left
        y, z = rows + (i - 1) + top.long(), columns + (j - 1) + left.long()
        upper = (1 - right)[:, None] * pixels(image, y, z) + right[:, None] * pixels(image, y, z + 1)
        lower = (1 - right)[:, None] * pixels(image, y + 1, z) + right[:, None] * pixels(image, y + 1, z + 1)
        sampled = (1 - down)[:, None] * upper + down[:, None] * lower
        out = out + weight[:, 0, i, j, None, None] * sampled
    return out.to(x.dtype)


def pixels(image: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x[b, c, y, z], (b, c, h, w), for rows y and columns z of (b, h, w); zero outside the image."""
    _, c, h, w = image.shape
    inside = (y >= 0) & (y < h) & (z >= 0) & (z < w)
    index = y.clamp(0, h - 1) * w + z.clamp(0, w - 1)
    found = image.flatten(2).gather(2, index.flatten(1)[:, None].expand(-1, c, -1))
    return torch.where(inside[:, None], found.view_as(image), 0)
