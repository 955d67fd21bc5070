"""Layer norm of each pixel by plain PyTorch, with statistics in float32 at least.

``F.layer_norm`` reads a channels-last image without a copy. For an image in NCHW order it needs one each way; on the
CPU, reductions over the channel axis are then twice as fast (README.md), and the definition is just that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layer_norm2d import reference


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w), channels-last if ``x`` is, NCHW otherwise."""
    channels_last = x.stride(1) == 1
    if x.device.type == "cpu" and not channels_last:
        return reference.layer_norm2d(x, weight, bias, eps=eps)
    dtype = torch.float32 if _sums_in_16_bits(x, weight, bias) else x.dtype
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    y = F.layer_norm(x.to(dtype).permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).to(x.dtype).permute(0, 3, 1, 2)
    return y if channels_last else y.contiguous()


def _sums_in_16_bits(x: Tensor, *parameters: Tensor | None) -> bool:
    """True if PyTorch would add up the gradients of the parameters in 16 bits: 14 % wrong for a 128 x 128 image."""
    trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters)
    return trained and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
