"""Depthwise 3x3 convolution whose taps are moved, pixel by pixel, by an offset field."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch, launch
from kernels.deform_conv import reference, torch_impl

__all__ = ["deform_depthwise_conv2d"]


def deform_depthwise_conv2d(
    x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None, backend: str | None = None
) -> Tensor:
    """Convolve each channel with its own 3x3 kernel, sampled where the offsets say (DSDCN without its 1x1).

    Papers: Dai et al., "Deformable Convolutional Networks", ICCV 2017; Qiu et al., "MB-TaylorFormer: Multi-branch
    Efficient Transformer Expanded by Taylor Formula for Image Dehazing", ICCV 2023 (sec. 3.3). Stride 1, padding 1,
    no bias, one offset field for all channels. Samples are bilinear; what lies outside the image is zero. The
    derivative by an offset that is a whole number is the one towards larger offsets.

    Args:
        x: ``(b, c, h, w)``, any float dtype, NCHW or channels-last; no axis but the first may be empty.
        offset: ``(b, 18, h, w)`` in pixels, finite: channel ``2 t`` moves tap ``t = 3 i + j`` down, ``2 t + 1`` right.
            Float32 is advised whatever ``x`` is: bfloat16 is out by up to 1/128 pixel between 2 and 4.
        weight: ``(c, 1, 3, 3)``.
        clamp: ``(lowest, highest)`` that the offsets are clamped to, or None. Beyond it they get no gradient.
        backend: name of the implementation, or None for the best one.

    Returns:
        ``(b, c, h, w)``, dtype of ``x``, channels-last if ``x`` is; arithmetic is in float32 at least, or in float64
        if ``x`` or ``offset`` is.

    Raises:
        ValueError: shapes, devices or dtypes do not fit, or ``clamp`` is no interval.
        KernelUnavailable: the backend that was asked for cannot run this call.
        RuntimeError: a derivative of the gradient was asked of the backend ``torch`` or ``triton``, or ``triton``
            was told to be deterministic between forward and backward passes, and there is no clamp.
    """
    _check_tensors(x, offset, weight)
    return dispatch.run("deform_conv", backend, x, offset, weight, clamp=_interval(clamp))


def _check_tensors(x: Tensor, offset: Tensor, weight: Tensor) -> None:
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(f"x must be (b, c, h, w) with at least one channel and pixel, got {tuple(x.shape)}")
    b, c, h, w = x.shape
    for name, tensor, wanted in (("offset", offset, (b, 18, h, w)), ("weight", weight, (c, 1, 3, 3))):
        if tensor.shape != torch.Size(wanted):
            raise ValueError(f"{name} must be {wanted} for x of {tuple(x.shape)}, got {tuple(tensor.shape)}")
    for name, tensor in (("x", x), ("offset", offset), ("weight", weight)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a float dtype, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")


def _interval(clamp: tuple[float, float] | None) -> tuple[float, float] | None:
    if clamp is None:
        return None
    try:
        low, high = (float(bound) for bound in clamp)
    except (TypeError, ValueError):
        raise ValueError(f"clamp must be (lowest, highest) in pixels, or None, got {clamp!r}") from None
    # an infinite bound says nothing of which rows may be read; None says that there is none
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"clamp must be (lowest, highest), both finite and in this order, or None, got {clamp!r}")
    return low, high


def _triton(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
    from kernels.deform_conv import fused

    return fused.deform_depthwise_conv2d(x, offset, weight, clamp=clamp)


def _triton_supports(x: Tensor | None = None, *tensors: Tensor | None, **options: Any) -> str | None:
    scattered = x is not None and x.requires_grad and torch.is_grad_enabled() and options.get("clamp", ()) is None
    if scattered and torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on, and without a clamp it adds the gradient by x in any order"
    return launch.why_not(x)


def _triton_declines(x: Tensor | None = None, *tensors: Tensor | None, **options: Any) -> str | None:
    return launch.why_not_unasked(x)


dispatch.register(
    "deform_conv",
    (
        dispatch.Backend(
            "triton",
            _triton,
            _triton_supports,
            "one kernel reads channels-last rows at the corners, and two more give every gradient",
            _triton_declines,
        ),
        dispatch.Backend(
            "torch",
            torch_impl.deform_depthwise_conv2d,
            dispatch.always,
            "whole pixels are gathered and scattered by plain PyTorch, in pieces that stay in the cache",
        ),
        dispatch.Backend("reference", reference.deform_depthwise_conv2d, dispatch.always, "the definition, for checks"),
    ),
)
