"""Depthwise deformable 3x3 convolution by Triton, forward and backward.

    out[p] = sum_t w_t v_t(p)     v_t(p): x at p + step_t + clamp(offset_t(p)), bilinear, zero outside     u_t = w_t dy
    d down = sum_c u ((1 - right) (below - here) + right (across - beside)), d right likewise     dw_t = sum_p dy v_t
    dx[corner of v_t(p)] += (weight of the corner) u_t(p)

The kernels are in ``fused_kernels.py``; here are shapes, launches and the operators that autograd and torch.compile
see. Blocks are 2-D and of 32 channels, a line of the cache in float32: all published widths waste little of that.
dw is summed from parts of the programs, in a fixed order. dx is added atomically, in float32 at least; where PyTorch
is to be deterministic, another kernel gathers it from the outputs that the clamp lets reach a pixel.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.deform_conv import fused_aot
from kernels.deform_conv import fused_kernels as kernels
from kernels.triton_parts import tl, triton

OP = "deform_conv"


def deform_depthwise_conv2d(x: Tensor, offset: Tensor, weight: Tensor, *, clamp: tuple[float, float] | None) -> Tensor:
    """The ``triton`` backend: (b, c, h, w) -> (b, c, h, w), channels-last if ``x`` is, NCHW otherwise."""
    # out here, where a compiler can make them part of what comes before and after
    rows, taps = x.permute(0, 2, 3, 1).contiguous(), weight.reshape(-1, 9).t().contiguous()
    out = _forward_op(rows, offset, taps, *(clamp or (None, None))).permute(0, 3, 1, 2)
    return out if x.stride(1) == 1 and not x.is_contiguous() else out.contiguous()


@torch.library.custom_op("pellucid::deform_conv", mutates_args=())
def _forward_op(x: Tensor, offset: Tensor, weight: Tensor, low: float | None, high: float | None) -> Tensor:
    """(b, h, w, c), (b, 18, h, w) and (9, c) -> (b, h, w, c)"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    block = _settings("forward", x)
    sizes = _sizes(x, block)
    programs = x.shape[0] * sizes[-1] * triton.cdiv(x.shape[3], block["BC"])
    # Triton launches on the current device, which may be another one
    with torch.cuda.device_of(x):
        kernels.forward[(programs,)](
            x.contiguous(), offset, weight.contiguous(), out, *sizes, *offset.stride(),
            **_clamp(low, high), C=x.shape[3], ACC=_acc(x, offset), **block,
        )  # fmt: skip
    return out


@_forward_op.register_fake
def _(x: Tensor, offset: Tensor, weight: Tensor, low: float | None, high: float | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("pellucid::deform_conv_backward", mutates_args=())
def _backward_op(
    dy: Tensor, x: Tensor, offset: Tensor, weight: Tensor, low: float | None, high: float | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by x, offset and weight, where ``wanted``."""
    d_x, d_offset, d_weight = _empty_gradients(x, offset, weight, wanted)
    if x.numel() == 0:
        return d_x, d_offset, d_weight.zero_()
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    gathered = wanted[0] and torch.are_deterministic_algorithms_enabled()
    if gathered:
        _gather(dy, offset, weight, low, high, d_x)
    scattered = wanted[0] and not gathered
    if not (scattered or wanted[1] or wanted[2]):
        return d_x, d_offset, d_weight
    block = _settings("backward", x)
    sizes = _sizes(x, block)
    programs = x.shape[0] * sizes[-1]
    dtype = _promoted(x, offset)
    total = torch.zeros(x.shape if scattered else (0,), dtype=dtype, device=x.device)
    parts = torch.empty((programs if wanted[2] else 0, *weight.shape), dtype=dtype, device=x.device)
    strides = d_offset.stride() if wanted[1] else (0, 0, 0, 0)
    with torch.cuda.device_of(x):
        kernels.backward[(programs,)](
            x, offset, weight, dy, total, d_offset, parts, *sizes, *offset.stride(), *strides,
            **_clamp(low, high), C=x.shape[3], ACC=_acc(x, offset),
            BY_X=scattered, BY_OFFSET=wanted[1], BY_WEIGHT=wanted[2], **block,
        )  # fmt: skip
    return (
        total.to(x.dtype) if scattered else d_x,
        d_offset,
        parts.sum(dim=0).to(weight.dtype) if wanted[2] else d_weight,
    )


@_backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, offset: Tensor, weight: Tensor, low: float | None, high: float | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(x, offset, weight, wanted)


def _gather(dy: Tensor, offset: Tensor, weight: Tensor, low: float | None, high: float | None, d_x: Tensor) -> None:
    """Fill in the gradient by x, with the same bits every time."""
    if low is None:
        raise RuntimeError(
            "deform_conv by triton without a clamp adds the gradient by x in any order, and "
            "torch.use_deterministic_algorithms(True) forbids that; give clamp=(low, high) or take backend='reference'"
        )
    block = _settings("gather", dy)
    sizes = _sizes(dy, block)
    first, last = _reach(low, high, max(dy.shape[1:3]))
    programs = dy.shape[0] * sizes[-1] * triton.cdiv(dy.shape[3], block["BC"])
    with torch.cuda.device_of(dy):
        kernels.gather[(programs,)](
            offset, weight, dy, d_x, *sizes, *offset.stride(),
            LOW=low, HIGH=high, FIRST=first, LAST=last, C=dy.shape[3], ACC=_acc(dy, offset), **block,
        )  # fmt: skip


def _reach(low: float, high: float, side: int) -> tuple[int, int]:
    """How many pixels before a pixel the outputs are that may sample it, at least and at most, in an image of ``side``.

    A sample is at an offset and a step of 1 from its output, and takes from what is nearer to it than 1.
    """
    return max(math.floor(low) - 1, -side), min(math.ceil(high) + 1, side)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, offset, weight, *ctx.clamp = inputs
    ctx.save_for_backward(x, offset, weight)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward_op(dy, *ctx.saved_tensors, *ctx.clamp, wanted)
    return (*(d if there else None for d, there in zip(found, wanted, strict=True)), None, None)


def _refused(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("deform_conv by triton has no second derivative (create_graph=True); take backend='reference'")


_forward_op.register_autograd(_gradients, setup_context=_setup)
_backward_op.register_autograd(_refused)


def _empty_gradients(x: Tensor, offset: Tensor, weight: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Without numbers where not wanted; the offsets' with its channels side by side if theirs are."""
    b, channels, h, w = offset.shape
    if not wanted[1]:
        d_offset = torch.empty((0,), dtype=offset.dtype, device=x.device)
    elif offset.stride(1) == 1 and not offset.is_contiguous():
        d_offset = torch.empty((b, h, w, channels), dtype=offset.dtype, device=x.device).permute(0, 3, 1, 2)
    else:
        d_offset = torch.empty(offset.shape, dtype=offset.dtype, device=x.device)
    d_x, d_weight = (
        torch.empty(like.shape if there else (0,), dtype=like.dtype, device=x.device)
        for like, there in ((x, wanted[0]), (weight, wanted[2]))
    )
    return d_x, d_offset, d_weight


def _sizes(x: Tensor, block: dict[str, int]) -> tuple[int, int, int, int]:
    """Rows and columns of (b, h, w, c), and how many blocks lie side by side and make up an image."""
    h, w = x.shape[1:3]
    across = triton.cdiv(w, block["TW"])
    return h, w, across, across * triton.cdiv(h, block["TH"])


def _clamp(low: float | None, high: float | None) -> dict[str, Any]:
    return {"LOW": low or 0.0, "HIGH": high or 0.0, "CLAMP": low is not None}


def _promoted(x: Tensor, offset: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, offset.dtype), torch.float32)


def _acc(x: Tensor, offset: Tensor) -> Any:
    return tl.float64 if _promoted(x, offset) == torch.float64 else tl.float32


def _settings(kernel: str, x: Tensor) -> dict[str, Any]:
    return launch.settings(OP, f"{kernel}/{x.shape[3]}", kernel, device=x.device)


def aot_cases() -> list[launch.AotCase]:
    """Every kernel at every published width."""
    return fused_aot.cases()
