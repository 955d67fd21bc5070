"""Layer norm of each pixel over its channels, defined in plain PyTorch.

y[c] = (x[c] - mean) / sqrt(mean((x - mean)^2) + eps) * weight[c] + bias[c]; where the mean stays, x[c] is divided.
"""

import torch
from torch import Tensor


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool = True) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w); arithmetic in float32 at least."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    around = y - y.mean(dim=1, keepdim=True)
    y = (around if centred else y) / torch.sqrt(around.square().mean(dim=1, keepdim=True) + eps)
    return scaled(y, weight, bias).to(x.dtype)


def scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``y * weight + bias`` by channels, in the dtype of ``y``; None for neither."""
    if weight is not None:
        y = y * weight.to(y.dtype)[:, None, None]
    if bias is not None:
        y = y + bias.to(y.dtype)[:, None, None]
    return y
