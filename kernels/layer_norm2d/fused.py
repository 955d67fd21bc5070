"""Layer norm of each pixel by Triton, forward and backward, for NCHW and channels-last images.

    y  = u * weight + bias                               u = (x - mean) / sqrt(var + eps), over the channels
    dx = (g - mean(g) - u * mean(g * u)) / sqrt(var + eps)                        g = dy * weight
    dweight = sum of dy * u over the pixels,  dbias = sum of dy

Where the mean stays, u = x / sqrt(var + eps), dx = (g - (x - mean) / sqrt(var + eps) * mean(g * u)) / sqrt(var + eps).

A program holds all channels of a block of pixels, so that an image is read once, and nothing but the image is kept
for the backward pass: the statistics cost less than reading them. Blocks have some 4,096 entries forward and 2,048
backward, 16 to 32 for each thread, which leaves registers for several programs side by side; in NCHW order at least 32
pixels, a line of the cache, up to 256 channels.
Backward, a fixed number of programs share the blocks in a fixed order and write what they found for weight and bias;
one sum over the programs follows. There are no atomics: the same bits every time.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.triton_parts import stored, tl, triton


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, n, tiles, xb, xc, xp, yb, yc, yp,
    EPS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    image, start = (tile // tiles).to(tl.int64), (tile % tiles).to(tl.int64) * BP
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    channel = c < C
    inside = ((start + p) < n)[:, None] & channel[None, :]
    x = tl.load(
        x_ptr + _start(image, start, xb, xp, LAST, UNIT) + _places(p, c, xp, xc, LAST, UNIT), mask=inside, other=0
    ).to(ACC)
    u, _, _ = _normalised(x, channel, EPS, C, CENTRED)
    if HAS_WEIGHT:
        u = u * tl.load(weight_ptr + c, mask=channel, other=0).to(ACC)[None, :]
    if HAS_BIAS:
        u = u + tl.load(bias_ptr + c, mask=channel, other=0).to(ACC)[None, :]
    y_ptr += _start(image, start, yb, yp, LAST, UNIT)
    tl.store(y_ptr + _places(p, c, yp, yc, LAST, UNIT), stored(u, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, sums_ptr, n, tiles, total, programs,
    xb, xc, xp, gb, gc, gp, db, dc, dp,
    EPS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_SUMS: tl.constexpr, CENTRED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    channel = c < C
    d_weight, d_bias = tl.zeros((BC,), ACC), tl.zeros((BC,), ACC)
    for tile in range(program, total, programs):
        image, start = (tile // tiles).to(tl.int64), (tile % tiles).to(tl.int64) * BP
        inside = ((start + p) < n)[:, None] & channel[None, :]
        x = tl.load(
            x_ptr + _start(image, start, xb, xp, LAST, UNIT) + _places(p, c, xp, xc, LAST, UNIT), mask=inside, other=0
        ).to(ACC)
        dy = tl.load(
            dy_ptr + _start(image, start, gb, gp, LAST, UNIT) + _places(p, c, gp, gc, LAST, UNIT), mask=inside, other=0
        ).to(ACC)
        u, around, scale = _normalised(x, channel, EPS, C, CENTRED)
        if HAS_SUMS:
            # dy is zero where there is no pixel, but u is NaN there if EPS is zero
            d_weight += tl.sum(tl.where(inside, dy * u, 0), axis=0)
            d_bias += tl.sum(dy, axis=0)
        if HAS_WEIGHT:
            dy = dy * tl.load(weight_ptr + c, mask=channel, other=0).to(ACC)[None, :]
        along = tl.sum(dy * u, axis=1) / C
        dx = dy - around * along[:, None]
        if CENTRED:
            dx -= (tl.sum(dy, axis=1) / C)[:, None]
        dx *= scale[:, None]
        at = dx_ptr + _start(image, start, db, dp, LAST, UNIT) + _places(p, c, dp, dc, LAST, UNIT)
        tl.store(at, stored(dx, dx_ptr.dtype.element_ty), mask=inside)
    if HAS_SUMS:
        sums_ptr += program.to(tl.int64) * 2 * C
        tl.store(sums_ptr + c, d_weight, mask=channel)
        tl.store(sums_ptr + C + c, d_bias, mask=channel)


@triton.jit
def _start(image, start, by_image, by_pixel, LAST: tl.constexpr, UNIT: tl.constexpr):
    """Where a block begins. Distances come as multiples of UNIT entries, so that the compiler knows them to be that."""
    if LAST:
        return (image * by_image + start * by_pixel) * UNIT
    return image * by_image * UNIT + start


@triton.jit
def _places(p, c, by_pixel, by_channel, LAST: tl.constexpr, UNIT: tl.constexpr):
    """Where the entries of a block are from its first pixel on; what lies side by side has no factor."""
    if LAST:
        return (p.to(tl.int64) * by_pixel * UNIT)[:, None] + c[None, :]
    return p[:, None] + (c.to(tl.int64) * by_channel * UNIT)[None, :]


@triton.jit
def _normalised(x, channel, EPS: tl.constexpr, C: tl.constexpr, CENTRED: tl.constexpr):
    """The normalised pixels, the same around their mean, both zero beyond the channels, and the factors that do it."""
    around = tl.where(channel[None, :], x - (tl.sum(x, axis=1) / C)[:, None], 0)
    scale = 1 / tl.sqrt(tl.sum(around * around, axis=1) / C + EPS)
    around *= scale[:, None]
    if CENTRED:
        u = around
    else:
        u = x * scale[:, None]
    return u, around, scale


@torch.library.custom_op("pellucid::layer_norm2d", mutates_args=())
def _forward_op(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    last = _is_channels_last(x)
    y = _empty_like(x)
    if x.numel() == 0:
        return y
    b, c, h, w = x.shape
    x = _walkable(x, last)
    block = _settings("forward", x, last)
    tiles = triton.cdiv(h * w, block["BP"])
    strides, unit = _in_units(last, x, y)
    with torch.cuda.device_of(x):
        _forward[(b * tiles,)](
            x, weight, bias, y, h * w, tiles, *strides,
            EPS=eps, C=c, LAST=last, UNIT=unit, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            CENTRED=centred, ACC=_acc(x), **block,
        )  # fmt: skip
    return y


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    return _empty_like(x)


@torch.library.custom_op("pellucid::layer_norm2d_backward", mutates_args=())
def _backward_op(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, centred: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    """The gradient by x, and those by weight and bias, (2, c), where ``sums`` wants them."""
    last = _is_channels_last(x)
    dx, total = _empty_like(x), _empty_sums(x, sums)
    if x.numel() == 0:
        return dx, total.zero_()
    b, c, h, w = x.shape
    x, dy = _walkable(x, last), _walkable(dy, last)
    block = _settings("backward", x, last)
    tiles = triton.cdiv(h * w, block["BP"])
    programs = min(b * tiles, block.pop("programs"))
    parts = torch.empty((programs, *total.shape), dtype=total.dtype, device=x.device)
    strides, unit = _in_units(last, x, dy, dx)
    with torch.cuda.device_of(x):
        _backward[(programs,)](
            x, weight, dy, dx, parts, h * w, tiles, b * tiles, programs, *strides,
            EPS=eps, C=c, LAST=last, UNIT=unit, HAS_WEIGHT=weight is not None, HAS_SUMS=sums, CENTRED=centred,
            ACC=_acc(x), **block,
        )  # fmt: skip
    return dx, parts.sum(dim=0)


@_backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, centred: bool, sums: bool) -> tuple[Tensor, Tensor]:
    return _empty_like(x), _empty_sums(x, sums)


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, bias, ctx.eps, ctx.centred = inputs
    ctx.save_for_backward(x, weight)
    ctx.dtypes = [None if p is None else p.dtype for p in (weight, bias)]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = [ctx.needs_input_grad[i] for i in (1, 2)]
    dx, sums = _backward_op(dy, x, weight, ctx.eps, ctx.centred, any(wanted))
    parameters = (sums[i].to(ctx.dtypes[i]) if wanted[i] else None for i in range(2))
    return (dx if ctx.needs_input_grad[0] else None, *parameters, None, None)


def _refused(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("layer_norm2d by triton has no second derivative (create_graph=True); take backend='reference'")


_forward_op.register_autograd(_gradients, setup_context=_setup)
_backward_op.register_autograd(_refused)


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool) -> Tensor:
    """The ``triton`` backend: (b, c, h, w) -> (b, c, h, w), channels-last if ``x`` is, NCHW otherwise."""
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    return _forward_op(x, weight, bias, eps, centred)


def _is_channels_last(x: Tensor) -> bool:
    return x.stride(1) == 1


def _empty_like(x: Tensor) -> Tensor:
    """Of the shape of x, dense, channels-last if x is."""
    b, c, h, w = x.shape
    if _is_channels_last(x):
        return torch.empty(b, h, w, c, dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)
    return torch.empty(b, c, h, w, dtype=x.dtype, device=x.device)


def _empty_sums(x: Tensor, wanted: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty((2, x.shape[1]) if wanted else (0,), dtype=dtype, device=x.device)


def _walkable(x: Tensor, last: bool) -> Tensor:
    """x if its pixels are at one distance, with channels (or else pixels) side by side; a copy otherwise."""
    _, c, h, w = x.shape
    _, by_channel, by_pixel = _strides(x)
    even = h == 1 or w == 1 or x.stride(2) == w * x.stride(3)
    close = c == 1 or by_channel == 1 if last else h * w == 1 or by_pixel == 1
    return x if even and close else _copied(x, last)


def _copied(x: Tensor, last: bool) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if last else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    """From image to image, channel to channel and pixel to pixel."""
    return x.stride(0), x.stride(1), x.stride(3) if x.shape[3] > 1 else x.stride(2)


def _in_units(last: bool, *images: Tensor) -> tuple[list[int], int]:
    """The strides of some images over the largest power of two up to 16 that divides them, and that."""
    strides = [_strides(x) for x in images]
    unit = math.gcd(16, *(s for by_image, *by in strides for s in (by_image, by[last])))
    return [s // unit if s > 1 else s for three in strides for s in three], unit


def _acc(x: Tensor) -> Any:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _settings(kernel: str, x: Tensor, last: bool) -> dict[str, int]:
    """Sizes of the blocks, warps, and how many programs share the blocks backward."""
    size = triton.next_power_of_2(x.shape[1])
    keys = (f"{kernel}/{'channels-last' if last else 'nchw'}/{size}", kernel)
    return _sized(launch.settings("layer_norm2d", *keys, device=x.device), size, last)


def _sized(settings: dict[str, int], size: int, last: bool) -> dict[str, int]:
    # in NCHW order a line of the cache, as long as there are registers for it
    pixels = max(settings.pop("entries") // size, 1 if last else min(32, 8192 // size))
    warps = min(max(size * pixels // 1024, settings["num_warps"]), 16)
    return {**settings, "BC": size, "BP": pixels, "num_warps": warps}


def aot_cases() -> list[launch.AotCase]:
    """Every shipped configuration, at the published widths."""
    found = []
    for kernel, settings in launch.configuration("default")["layer_norm2d"].items():
        own = {k: v for k, v in settings.items() if k not in launch.RECORD}
        for c, kind, last in itertools.product((24, 48, 96, 180, 192, 1024), ("fp32", "bf16"), (True, False)):
            found.append(_aot_case(kernel, own, c, kind, last, centred=True))
        # MB-TaylorFormer, whose images are channels-last
        for c, kind in itertools.product((24, 72, 160), ("fp32", "bf16")):
            found.append(_aot_case(kernel, own, c, kind, True, centred=False))
    return found


def _aot_case(kernel: str, settings: dict[str, int], c: int, kind: str, last: bool, *, centred: bool) -> launch.AotCase:
    block = _sized(dict(settings), triton.next_power_of_2(c), last)
    options = {"num_warps": block.pop("num_warps"), "num_stages": 3}
    constants = {"EPS": 1e-6, "C": c, "LAST": last, "UNIT": math.gcd(c, 16) if last else 16}
    constants |= {"HAS_WEIGHT": centred, "CENTRED": centred, "ACC": tl.float32, "BC": block["BC"], "BP": block["BP"]}
    image = f"*{kind}"
    if kernel == "backward":
        pointers = {"x_ptr": image, "weight_ptr": "*fp32", "dy_ptr": image, "dx_ptr": image, "sums_ptr": "*fp32"}
        strides = ("xb", "xc", "xp", "gb", "gc", "gp", "db", "dc", "dp")
        counts, constants["HAS_SUMS"] = ("n", "tiles", "total", "programs"), centred
    else:
        pointers = {"x_ptr": image, "weight_ptr": "*fp32", "bias_ptr": "*fp32", "y_ptr": image}
        strides = ("xb", "xc", "xp", "yb", "yc", "yp")
        counts, constants["HAS_BIAS"] = ("n", "tiles"), centred
    signature = pointers | dict.fromkeys((*counts, *strides), "i32")
    name = f"{kernel} {kind} c{c} {'channels-last' if last else 'nchw'}{'' if centred else ' bias-free'}"
    run = _backward if kernel == "backward" else _forward
    return launch.AotCase(name, run, signature, constants, options, aligned=("n",), tensor_cores=False)
