"""Window attention by PyTorch's own operators, on any device and visible to torch.compile.

    scale * q.k + q_pos.k_pos / sqrt(rank)  =  scale * [q | c q_pos].[k | k_pos]      with c = 1 / (scale sqrt(rank))

so that the bias costs no (N, N) matrix: the fused attention of PyTorch (``sdpa``) or of the flash-attn package
(``flash``) sees longer vectors and nothing else. v is continued by zeros where equal lengths are needed: the flash
kernels need them, and without one of those the CPU falls back to a path that is 5 times slower. ``attention`` writes
the softmax out (``torch``).
"""

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.window_attention import open_sizes
from kernels.window_attention.layout import continue_by_reflection, tiles_of

FLASH_PACKAGES = ("flash_attn_interface", "flash_attn")  # FlashAttention-3, FlashAttention-2
# CUDA kernels put the batch on a grid axis of this length
MOST_WINDOWS = 65_535
HALF = (torch.float16, torch.bfloat16)

_found: dict[str, str | None] = {}


def attention(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
) -> Tensor:
    """The ``torch`` backend: explicit logits and softmax, the latter in float32 at least."""
    if open_sizes.are_open(qkv):
        settings = {"heads": heads, "window": window, "scale": scale}
        return open_sizes.attention(qkv, q_pos, k_pos, bias, fused=False, **settings)
    q, k, v = (_flat(x) for x in partition(qkv, heads, window))
    logits = (q * scale) @ k.transpose(-1, -2)
    # 16-bit types keep three digits: not enough to add two logits and subtract the largest
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if q_pos is not None:
        position = (q_pos * (1 / math.sqrt(q_pos.shape[-1]))) @ k_pos.transpose(-1, -2)
        logits = logits + position.to(logits.dtype)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    return merge(torch.softmax(logits, dim=-1).to(v.dtype) @ v, qkv.shape, window)


def sdpa(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
) -> Tensor:
    """The ``sdpa`` backend: ``scaled_dot_product_attention``, which chooses among the kernels of its device."""
    if open_sizes.are_open(qkv):
        settings = {"heads": heads, "window": window, "scale": scale}
        return open_sizes.attention(qkv, q_pos, k_pos, bias, fused=True, **settings)
    on_cpu = _on_cpu(qkv)
    q, k, v = lengthened(qkv, q_pos, k_pos, heads=heads, window=window, scale=scale, equal=on_cpu or qkv.dtype in HALF)
    mask = None if bias is None else bias.to(q.dtype)[None]
    step = len(q) if on_cpu else MOST_WINDOWS
    parts = zip(q.split(step), k.split(step), v.split(step), strict=True)
    out = [F.scaled_dot_product_attention(*part, attn_mask=mask, scale=scale) for part in parts]
    out = out[0] if len(out) == 1 else torch.cat(out)
    return merge(out[..., : qkv.shape[-1] // (3 * heads)], qkv.shape, window)


def flash(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
) -> Tensor:
    """The ``flash`` backend: the flash-attn package, version 2 or 3."""
    if flash_package() == "flash_attn_interface":
        from flash_attn_interface import flash_attn_func
    else:
        from flash_attn import flash_attn_func
    q, k, v = lengthened(qkv, q_pos, k_pos, heads=heads, window=window, scale=scale, equal=True)
    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=False)
    # some releases of version 3 return the log-sum-exp as well
    out = out[0] if isinstance(out, tuple) else out
    return merge(out.transpose(1, 2)[..., : qkv.shape[-1] // (3 * heads)], qkv.shape, window)


def flash_package() -> str | None:
    """The flash-attn package that is installed, looked for once and not imported."""
    if "flash" not in _found:
        _found["flash"] = next((name for name in FLASH_PACKAGES if _is_installed(name)), None)
    return _found["flash"]


def flash_supports(
    qkv: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Every reason against ``flash`` for this call, or None."""
    reasons = []
    if flash_package() is None:
        reasons.append("the package flash-attn is not installed (pip install 'pellucid[flash]')")
    if qkv is not None:
        if qkv.device.type != "cuda":
            reasons.append(f"it needs a CUDA tensor, this one is on {qkv.device.type}")
        dtype = dtype or qkv.dtype
        if dtype not in HALF:
            reasons.append(f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}")
        if heads is not None:
            width = qkv.shape[-1] // (3 * heads) + (0 if q_pos is None else q_pos.shape[-1])
            if width % 8 or width > 256:
                reasons.append(f"head size + rank must be a multiple of 8 up to 256, not {width}")
    if bias is not None:
        reasons.append("it takes no dense bias")
    return "; ".join(reasons) or None


def partition(qkv: Tensor, heads: int, window: int) -> tuple[Tensor, ...]:
    """(b, h, w, 3 * heads * d) -> q, k, v, each (b, rows, columns, heads, window, window, d): views, not copies."""
    return tiles_of(continue_by_reflection(qkv, window), window, heads, parts=3)


def lengthened(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float,
    equal: bool,
) -> list[Tensor]:
    """q, k and v of each window, q and k continued by the positional factors and v, if ``equal``, by as many zeros.

    Each is (windows, heads, window**2, d + rank) and written once, straight from the image.
    """
    tiles = partition(qkv, heads, window)
    if q_pos is None:
        return [_flat(x) for x in tiles]
    q, k, v = tiles
    rank = q_pos.shape[-1]
    # the small table is scaled, not the image, and rounded once, afterwards
    q_pos = q_pos * (1 / (scale * math.sqrt(rank)))
    shape = (*q.shape[:-1], rank)
    q_pos, k_pos = (x.to(q.dtype).reshape(heads, window, window, rank).expand(shape) for x in (q_pos, k_pos))
    v = F.pad(v, (0, rank)) if equal else v
    return [_flat(x) for x in (torch.cat([q, q_pos], dim=-1), torch.cat([k, k_pos], dim=-1), v)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        # something hides it from import: a finder, or a None among the modules
        return False


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _flat(tiles: Tensor) -> Tensor:
    """(b, rows, columns, heads, window, window, d) -> (windows, heads, window**2, d)"""
    return tiles.flatten(0, 2).flatten(2, 3)


def merge(out: Tensor, shape: torch.Size, window: int) -> Tensor:
    """(windows, heads, window**2, d) -> (b, h, w, heads * d), of which ``shape`` gives b, h, w."""
    b, h, w, _ = shape
    rows, columns = -(-h // window), -(-w // window)
    _, heads, _, d = out.shape
    out = out.reshape(b, rows, columns, heads, window, window, d).permute(0, 1, 4, 2, 5, 3, 6)
    return out.reshape(b, rows * window, columns * window, heads * d)[:, :h, :w]
