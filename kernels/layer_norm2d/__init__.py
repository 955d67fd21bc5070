"""Layer norm of each pixel of an image over its channels."""

from torch import Tensor

from kernels import dispatch, launch
from kernels.layer_norm2d import reference, torch_impl

__all__ = ["layer_norm2d"]

# channels that the registers of a Triton program hold
WIDEST = 1024


def layer_norm2d(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-6,
    *,
    centred: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Normalise each pixel over its channels.

    Args:
        x: ``(b, c, h, w)``, any float dtype, NCHW or channels-last.
        weight, bias: ``(c,)``, or None for neither scale nor shift; rounded to the dtype of ``x``.
        eps: added to the variance, so in squared units of ``x``.
        centred: whether the mean is taken away; without that (the bias-free norm of Restormer and MB-TaylorFormer) a
            pixel is divided by the standard deviation of its channels, around their mean.
        backend: ``"triton"``, ``"torch"``, ``"reference"`` or ``"auto"``; see :mod:`kernels.dispatch`.

    Returns:
        ``(b, c, h, w)``, in the dtype and memory format of ``x``; statistics are kept in float32 at least.

    Raises:
        ValueError: ``x`` is not 4-D, ``weight`` or ``bias`` does not have ``c`` entries, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.

    Example:
        >>> layer_norm2d(torch.rand(1, 8, 5, 7), torch.ones(8), None).shape
        torch.Size([1, 8, 5, 7])
    """
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(f"x must be (b, c, h, w) of a float dtype, got {tuple(x.shape)} {x.dtype}")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.shape != x.shape[1:2]:
            raise ValueError(f"{name} must be (c,) = ({x.shape[1]},), got {tuple(p.shape)}")
    return dispatch.run("layer_norm2d", backend, x, weight, bias, eps=eps, centred=centred)


def _triton(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, centred: bool) -> Tensor:
    from kernels.layer_norm2d import fused

    return fused.layer_norm2d(x, weight, bias, eps=eps, centred=centred)


def _triton_supports(x: Tensor | None = None, *tensors: Tensor | None, **options: float) -> str | None:
    if x is not None and x.shape[1] > WIDEST:
        return f"it holds a pixel in registers, at most {WIDEST} channels, and this one has {x.shape[1]}"
    return launch.why_not(x)


def _triton_declines(x: Tensor | None = None, *tensors: Tensor | None, **options: float) -> str | None:
    return launch.why_not_unasked(x)


dispatch.register(
    "layer_norm2d",
    (
        dispatch.Backend(
            "triton",
            _triton,
            _triton_supports,
            "one kernel reads the image once and writes it once, forward and backward",
            _triton_declines,
        ),
        dispatch.Backend(
            "torch",
            torch_impl.layer_norm2d,
            dispatch.always,
            "F.layer_norm for channels-last images, reductions for others",
        ),
        dispatch.Backend("reference", reference.layer_norm2d, dispatch.always, "the definition, for checks"),
    ),
)
