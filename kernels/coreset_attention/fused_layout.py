"""Memory and compile-time arguments of the Triton kernels of coreset attention."""

from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.coreset_attention.limits import LONGEST, whole
from kernels.triton_parts import tl

LOG2E = 1.4426950408889634
# numbers of the factor and of the keys that the registers hold
HELD_FACTOR, HELD_KEYS = 4096, 16384
# channels of keys or values, up to which settings hold
COLUMNS = (16, 32, 64)


def is_held(width: int, slots: int, d: int) -> bool:
    """Whether a bin of ``width`` places is held in registers."""
    return whole(width) * whole(slots) <= HELD_FACTOR and whole(width) * whole(d) <= HELD_KEYS


def choose_constants(heads: int, d: int, dv: int, slots: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments that all kernels of bins share."""
    return {
        "HEADS": heads,
        "D": d,
        "DV": dv,
        "R": slots,
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32x3",
        "BLOCK_D": whole(d),
        "BLOCK_V": whole(dv),
        "BLOCK_R": whole(slots),
    }


def choose_keys(kernel: str, constants: dict[str, Any]) -> tuple[str, ...]:
    """Names of settings, most specific first."""
    return f"{kernel}/{constants['BLOCK_D']}", kernel


def attend_constants(
    heads: int, group: int, d: int, dv: int, dtype: torch.dtype, sums: torch.dtype, beta: float, precision: str = ""
) -> dict[str, Any]:
    """Compile-time arguments that the kernels of attention share; ``dtype`` is that of q, ``sums`` of the coreset."""
    acc = tl.float64 if sums == torch.float64 else tl.float32
    narrow = dtype in (torch.bfloat16, torch.float16) and sums == torch.float32
    highest = not launch.tf32()
    return {
        "FACTOR": beta * LOG2E,
        "HEADS": heads,
        "GROUP": group,
        "D": d,
        "DV": dv,
        "TYPE": getattr(tl, str(dtype).removeprefix("torch.")) if narrow else acc,
        "ACC": acc,
        "PRECISION": precision or ("tf32x3" if highest else "tf32"),
        "BLOCK_D": whole(d),
        "BLOCK_V": whole(dv),
    }


def attend_keys(kernel: str, constants: dict[str, Any]) -> tuple[str, ...]:
    """Names of settings, most specific first: for up to so many channels, then for all."""
    name = constants["TYPE"].name
    name = constants["PRECISION"] if name == "fp32" else name
    widest = max(constants["BLOCK_D"], constants["BLOCK_V"])
    return (*(f"{kernel}/{name}/{limit}" for limit in COLUMNS if widest <= limit), f"{kernel}/{name}")


def close(x: Tensor) -> Tensor:
    """x, or a copy where a head's entries are too far apart for 32 bits."""
    far = (x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3) >= LONGEST
    return x.contiguous() if far else x


def empty_like(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """(b, heads, n, channels), dense, with tokens side by side where those of x are, channels otherwise."""
    b, heads, n, _ = x.shape
    if x.stride(2) == 1 and x.stride(3) != 1:
        return torch.empty((b, heads, channels, n), dtype=dtype, device=x.device).transpose(2, 3)
    return torch.empty((b, heads, n, channels), dtype=dtype, device=x.device)


def allocate(k: Tensor, v: Tensor, sums: Tensor, grid: list[int], slots: int, keep: bool) -> tuple[Tensor, ...]:
    """What ``choose`` returns."""
    (b, heads), (h, w, down, across) = k.shape[:2], grid
    bins, width = down * across, -(-h // down) * -(-w // across)

    def make(*shape: int, dtype: torch.dtype = sums.dtype) -> Tensor:
        return torch.empty((b, heads, *shape), dtype=dtype, device=k.device)

    r = bins * slots
    keys, values, weights, pivots = make(r, k.shape[3]), make(r, v.shape[3]), make(r), make(r, dtype=torch.int64)
    return (
        *(keys, values, weights, pivots, make(), make(bins), make(r)),
        *(make(bins, slots, width if keep else 0), make(bins, slots, slots)),
    )


def allocate_attend(q: Tensor, values: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What ``attend_forward`` returns."""
    b, heads, m, _ = q.shape
    m = m if keep else 0
    centred = torch.empty((b, heads, m, values.shape[3]), dtype=values.dtype, device=q.device)
    lse = torch.empty((b, heads, m), dtype=values.dtype, device=q.device)
    return empty_like(q, values.shape[3], q.dtype), centred, lse
