"""Layer norm of each pixel by plain PyTorch, with statistics in float32 at least.

``F.layer_norm`` reads a channels-last image without a copy. For an image in NCHW order it needs one each way; on the
CPU, reductions over the channel axis are then twice as fast (README.md), and the definition is just that. The form that
keeps the mean has its own gradient, in which less is kept than autograd would.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.exported import is_exported
from kernels.layer_norm2d import reference


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool = True) -> Tensor:
    """(b, c, h, w) -> (b, c, h, w), channels-last if ``x`` is, NCHW otherwise."""
    if not centred:
        return _divided(x, weight, bias, eps)
    channels_last = x.stride(1) == 1
    if x.device.type == "cpu" and not channels_last:
        return reference.layer_norm2d(x, weight, bias, eps=eps)
    dtype = torch.float32 if _sums_in_16_bits(x, weight, bias) else x.dtype
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    # a number, where a trace would take it for one that may be another in the next image
    channels = (int(x.shape[1]),)
    y = F.layer_norm(x.to(dtype).permute(0, 2, 3, 1), channels, weight, bias, eps).to(x.dtype).permute(0, 3, 1, 2)
    return y if channels_last else y.contiguous()


def _divided(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The form that keeps the mean."""
    if is_exported(x, weight, bias):
        y = x * torch.rsqrt(x.var(dim=1, keepdim=True, correction=0) + eps)
        return reference.scaled(y, weight, bias)
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if torch.compiler.is_compiling():
        y = y * torch.rsqrt(y.var(dim=1, keepdim=True, correction=0) + eps)
    else:
        y = _Divided.apply(y, eps)
    return reference.scaled(y, weight, bias).to(x.dtype)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        scale = centred.square_().mean(dim=1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        along = (x * grad).mean(dim=1, keepdim=True) * scale**3
        # x * scale, whose scale falls with the variance of x
        return torch.addcmul(grad * scale, x - x.mean(dim=1, keepdim=True), along, value=-1), None


def _sums_in_16_bits(x: Tensor, *parameters: Tensor | None) -> bool:
    """True if PyTorch would add up the gradients of the parameters in 16 bits: 14 % wrong for a 128 x 128 image."""
    trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters)
    return trained and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
