"""Losses, registered by name in ``LOSSES``."""

from models.losses.frequency import FFTLoss
from models.losses.pixel import CharbonnierLoss, L1Loss, MSELoss, PSNRLoss
from options.registry import LOSSES

__all__ = ["LOSSES", "CharbonnierLoss", "FFTLoss", "L1Loss", "MSELoss", "PSNRLoss"]
