"""Layer norm of each pixel of an image over its channels."""

from torch import Tensor

from kernels import dispatch
from kernels.layer_norm2d import reference, torch_impl

__all__ = ["layer_norm2d"]


def layer_norm2d(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6, *, backend: str | None = None
) -> Tensor:
    """Normalise each pixel over its channels.

    Args:
        x: ``(b, c, h, w)``, any float dtype, NCHW or channels-last.
        weight, bias: ``(c,)``, or None for neither scale nor shift; rounded to the dtype of ``x``.
        eps: added to the variance, so in squared units of ``x``.
        backend: ``"torch"``, ``"reference"`` or ``"auto"``; see :mod:`kernels.dispatch`.

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
    return dispatch.run("layer_norm2d", backend, x, weight, bias, eps=eps)


dispatch.register(
    "layer_norm2d",
    (
        dispatch.Backend(
            "torch",
            torch_impl.layer_norm2d,
            dispatch.always,
            "F.layer_norm for channels-last images, reductions for others",
        ),
        dispatch.Backend("reference", reference.layer_norm2d, dispatch.always, "the definition, for checks"),
    ),
)
