"""Losses that compare two pictures pixel by pixel, with the meaning of weight and reduction that BasicSR gives them."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from options.registry import LOSSES

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


class WeightedLoss(nn.Module):
    """What every loss of two pictures shares: checks, precision, weighting, reduction.

    A subclass says in :meth:`difference` how far apart two pictures are at each place.

    Args:
        loss_weight: factor on the result.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one value per place).

    Raises:
        ValueError: another reduction.
    """

    def __init__(self, *, loss_weight: float = 1.0, reduction: Reduction = "mean") -> None:
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self.loss_weight = loss_weight
        self.reduction = reduction

    def difference(self, pred: Tensor, target: Tensor) -> Tensor:
        """(b, c, h, w) twice -> (b, c, h, w, ...), not negative"""
        raise NotImplementedError

    def forward(self, pred: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compare ``pred`` with ``target``.

        Args:
            pred, target: ``(b, c, h, w)``, any float dtype; half precisions are compared in float32.
            weight: ``(b, 1, h, w)`` or ``(b, c, h, w)``, factors on each place. The mean is then taken over the
                weights (their sum divides, so a mask averages over what it covers; NaN where it covers nothing).

        Returns:
            A scalar, or one value per place for the reduction ``"none"``; float32, or float64 when an input is.

        Raises:
            ValueError: shapes differ (nothing is broadcast).
            TypeError: a picture that is not of a float dtype.
        """
        pred, target = _as_comparable(pred, target)
        loss = self.difference(pred, target)
        if weight is None:
            return self.loss_weight * _reduce(loss, self.reduction)
        weight = _fit_weight(weight, pred, loss)
        weighted = loss * weight
        if self.reduction == "mean":
            return self.loss_weight * weighted.sum() / weight.expand_as(loss).sum()
        return self.loss_weight * _reduce(weighted, self.reduction)

    def extra_repr(self) -> str:
        return f"loss_weight={self.loss_weight}, reduction={self.reduction!r}"


@LOSSES.register()
class L1Loss(WeightedLoss):
    """Mean absolute error."""

    def difference(self, pred: Tensor, target: Tensor) -> Tensor:
        """(b, c, h, w) twice -> (b, c, h, w)"""
        return F.l1_loss(pred, target, reduction="none")


@LOSSES.register()
class MSELoss(WeightedLoss):
    """Mean squared error."""

    def difference(self, pred: Tensor, target: Tensor) -> Tensor:
        """(b, c, h, w) twice -> (b, c, h, w)"""
        return F.mse_loss(pred, target, reduction="none")


@LOSSES.register()
class CharbonnierLoss(WeightedLoss):
    """Smooth absolute error, ``sqrt((pred - target)^2 + eps)``.

    Args:
        loss_weight: factor on the result.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        eps: added under the root, so in squared units of the picture; more than 0, or the gradient is NaN where two
            pictures agree.
    """

    def __init__(self, *, loss_weight: float = 1.0, reduction: Reduction = "mean", eps: float = 1e-12) -> None:
        super().__init__(loss_weight=loss_weight, reduction=reduction)
        if eps <= 0:
            raise ValueError(f"eps must be more than 0, got {eps}")
        self.eps = eps

    def difference(self, pred: Tensor, target: Tensor) -> Tensor:
        """(b, c, h, w) twice -> (b, c, h, w)"""
        return torch.sqrt((pred - target) ** 2 + self.eps)


@LOSSES.register()
class PSNRLoss(WeightedLoss):
    """Minus the PSNR of each picture in dB, for pictures in 0..1; NAFNet's loss.

    Every picture pulls alike, however far off it is, as each counts alike in the mean of a results table: the error of
    a nearly right one is not drowned by that of a batch mate.

    Source: Chen et al., "Simple Baselines for Image Restoration", ECCV 2022.

    Args:
        loss_weight: factor on the result.
        reduction: over the pictures: ``"mean"``, ``"sum"`` or ``"none"`` (one value per picture, ``(b,)``).
        eps: added to the mean squared error, more than 0; PSNR counts up to ``-10 log10(eps)``.
    """

    def __init__(self, *, loss_weight: float = 1.0, reduction: Reduction = "mean", eps: float = 1e-8) -> None:
        super().__init__(loss_weight=loss_weight, reduction=reduction)
        if eps <= 0:
            raise ValueError(f"eps must be more than 0, got {eps}")
        self.eps = eps

    def forward(self, pred: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """As in :class:`WeightedLoss`; the mean squared error of a picture is taken over the weights."""
        pred, target = _as_comparable(pred, target)
        squares = (pred - target).square()
        if weight is None:
            mse = squares.mean(dim=(1, 2, 3))
        else:
            weight = _fit_weight(weight, pred, squares).expand_as(squares)
            mse = (squares * weight).sum(dim=(1, 2, 3)) / weight.sum(dim=(1, 2, 3))
        return self.loss_weight * _reduce(10 * torch.log10(mse + self.eps), self.reduction)


def _as_comparable(pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if pred.shape != target.shape:
        raise ValueError(f"pred {tuple(pred.shape)} and target {tuple(target.shape)} must have the same shape")
    if pred.dim() != 4:
        raise ValueError(f"pred and target must be (b, c, h, w), got {tuple(pred.shape)}")
    if not (pred.is_floating_point() and target.is_floating_point()):
        raise TypeError(f"pred and target must be of a float dtype, got {pred.dtype} and {target.dtype}")
    dtype = torch.promote_types(torch.promote_types(pred.dtype, target.dtype), torch.float32)
    return pred.to(dtype), target.to(dtype)


def _fit_weight(weight: Tensor, pred: Tensor, loss: Tensor) -> Tensor:
    b, c, h, w = pred.shape
    if tuple(weight.shape) not in ((b, 1, h, w), (b, c, h, w)):
        raise ValueError(f"weight must be {(b, 1, h, w)} or {(b, c, h, w)}, got {tuple(weight.shape)}")
    return weight.to(loss.dtype).reshape(*weight.shape, *(1,) * (loss.dim() - 4))


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()
