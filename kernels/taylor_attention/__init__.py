"""Attention with softmax expanded to first order, whose cost is linear in the pixels."""

import math
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch, launch
from kernels.taylor_attention import reference, torch_impl

__all__ = ["taylor_attention"]

GATE_MODES = ("multiply", "add")
# channels of a head whose sums the registers of a Triton program hold
WIDEST = 63


def taylor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    norm: float,
    eps: float,
    temperature: Tensor | None = None,
    gate: Tensor | None = None,
    gate_mode: str = "multiply",
    focus_power: int | None = None,
    focus_weight: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Let each pixel attend to all pixels of its image (T-MSA).

    Paper: Qiu et al., "MB-TaylorFormer: Multi-branch Efficient Transformer Expanded by Taylor Formula for Image
    Dehazing", ICCV 2023 (sec. 3.2); its second version adds the focused term.

    Args:
        q, k, v: ``(b, heads, d, n)``, channel-major, any float dtype, ``n >= 1`` pixels; any strides.
        norm: length that the vectors of q and k are scaled to: ``x / (|x| / norm + eps)``; 0.5 in V1, 1 in V2.
        eps: added there and to the denominator; 1e-6 in V1, 1e-8 in V2.
        temperature: ``(heads,)`` factors of the output, or None.
        gate: ``(b, heads, n)``, or None.
        gate_mode: ``"multiply"`` (V1) the output by the gate, or ``"add"`` (V2) it.
        focus_power: power of the positive parts of q and k in a second term (8 in V2), or None for none.
        focus_weight: ``(heads,)`` weights of that term; needed with ``focus_power`` and only then.
        backend: ``"triton"``, ``"torch"``, ``"reference"`` or ``"auto"``; see :mod:`kernels.dispatch`.

    Returns:
        ``(b, heads, d, n)``, in the dtype of ``v``; sums are kept in float32 at least. Vectors of zeros attend to all
        pixels alike.

    Raises:
        ValueError: a shape, dtype or number that does not fit the others, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.

    Example:
        >>> q, k, v = torch.rand(3, 1, 2, 12, 35 * 20)
        >>> taylor_attention(q, k, v, norm=0.5, eps=1e-6).shape
        torch.Size([1, 2, 12, 700])
    """
    _check_images(q, k, v)
    b, heads, _, n = v.shape
    for name, x, wanted in (("temperature", temperature, (heads,)), ("gate", gate, (b, heads, n))):
        _check_shape(name, x, wanted)
    if (focus_power is None) != (focus_weight is None):
        raise ValueError("focus_power and focus_weight go together: give both or neither")
    _check_shape("focus_weight", focus_weight, (heads,))
    if focus_power is not None and (not isinstance(focus_power, int) or focus_power < 2):
        raise ValueError(f"focus_power must be an integer of at least 2, got {focus_power!r}")
    if gate_mode not in GATE_MODES:
        raise ValueError(f"gate_mode must be one of {', '.join(GATE_MODES)}, got {gate_mode!r}")
    for name, number in (("norm", norm), ("eps", eps)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be a positive number, got {number}")
    tensors = (q, k, v, temperature, gate, focus_weight)
    options = {"norm": float(norm), "eps": float(eps), "gate_mode": gate_mode, "focus_power": focus_power}
    return dispatch.run("taylor_attention", backend, *tensors, **options)


def _check_images(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point() or 0 in x.shape[1:]:
            raise ValueError(f"{name} must be (b, heads, d, n) of a float dtype, got {tuple(x.shape)} {x.dtype}")
        if x.shape != v.shape or x.device != v.device:
            shapes = f"{tuple(x.shape)} on {x.device} and {tuple(v.shape)} on {v.device}"
            raise ValueError(f"{name} and v must have one shape and device, got {shapes}")


def _check_shape(name: str, x: Tensor | None, wanted: tuple[int, ...]) -> None:
    if x is not None and x.shape != torch.Size(wanted):
        raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")


def _triton(*tensors: Tensor | None, **options: Any) -> Tensor:
    from kernels.taylor_attention import fused

    return fused.taylor_attention(*tensors, **options)


def _triton_supports(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *tensors: Tensor | None, **options: Any
) -> str | None:
    if v is not None:
        if v.shape[2] > WIDEST:
            return f"it holds the sums of a head in registers, at most {WIDEST} channels, and this one has {v.shape[2]}"
        if torch.float64 in (q.dtype, k.dtype, v.dtype) and not launch.interpreting():
            return "its products are made for float32 and 16 bits, not for float64"
    return launch.why_not(v)


def _triton_declines(
    q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *tensors: Tensor | None, **options: Any
) -> str | None:
    return launch.why_not_unasked(v)


dispatch.register(
    "taylor_attention",
    (
        dispatch.Backend(
            "triton",
            _triton,
            _triton_supports,
            "sums and outputs are one kernel each, which reads the images once",
            _triton_declines,
        ),
        dispatch.Backend(
            "torch",
            torch_impl.taylor_attention,
            dispatch.always,
            "one product for numerator and denominator, plain PyTorch",
        ),
        dispatch.Backend("reference", reference.taylor_attention, dispatch.always, "the definition, for checks"),
    ),
)
