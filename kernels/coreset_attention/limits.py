"""What the Triton kernels of coreset attention take, asked before they are imported."""

from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.coreset_attention.torch_impl import Compressed, Settings

# of a product on tensor cores
SMALLEST = 16
# channels, keys of a bin that are chosen, and keys of a coreset, that fit the registers
CHANNELS, SLOTS, KEYS = 64, 64, 4096
# offsets inside a head, and the edges of bins before they are divided, are 32-bit numbers
LONGEST = 2**31


def run(*tensors: Any, step: str, **options: Any) -> Any:
    """The ``triton`` backend, ``step="compress"`` or ``step="attend"``; imports triton."""
    from kernels.coreset_attention import fused

    return getattr(fused, step)(*tensors, **options)


def supports(
    x: Tensor | None = None, *others: Tensor | Compressed | None, settings: Settings | None = None, **_: Any
) -> str | None:
    """Every reason against ``triton`` for this call, or None."""
    reasons = [launch.why_not(x)]
    if x is not None:
        # a coreset's values come second, as v does
        values = [other.values if isinstance(other, Compressed) else other for other in others[:1]]
        reasons += [tensor_reason(tensor) for tensor in (x, *values)]
    if settings is not None and not settings.exact:
        reasons += settings_reasons(settings)
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None


def declines(x: Tensor | None = None, *_: Any, **__: Any) -> str | None:
    """Why nobody wants ``triton`` for this call without asking for it."""
    return launch.why_not_unasked(x)


def tensor_reason(x: Tensor) -> str | None:
    """Why the kernels do not take these keys, queries or values, or None."""
    if x.dtype == torch.float64 and not launch.interpreting():
        return "tensor cores do not compute in float64"
    if x.shape[3] > CHANNELS:
        return f"{CHANNELS} channels of keys and values fit the registers, not {x.shape[3]}"
    widest = max((x.shape[2] - 1) * x.stride(2) + (x.shape[3] - 1) * x.stride(3), x.shape[2] * CHANNELS)
    if widest >= LONGEST:
        return "the tokens of a head must lie within 2**31 numbers"
    return None


def settings_reasons(settings: Settings) -> list[str]:
    """Why the kernels do not choose keys in this way."""
    found, total = [], settings.slots * settings.bins.count
    if settings.sampler == "cdf":
        found.append('sampler="cdf" needs sums over a whole bin in order; "gumbel" draws by the same law')
    if settings.slots > SLOTS:
        found.append(f"{SLOTS} keys of a bin fit the registers, not {settings.slots}; more bins make them fewer")
    if total > KEYS:
        found.append(f"coresets have at most {KEYS} keys, not {total}")
    if any(side * tiles >= LONGEST for side, tiles in zip(settings.bins.grid, settings.bins.tiles, strict=True)):
        found.append("a side of the grid times its bins must be less than 2**31")
    return found


def whole(size: int) -> int:
    """The next power of two, and at least what tensor cores take."""
    return max(SMALLEST, 1 << (size - 1).bit_length())
