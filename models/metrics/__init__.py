"""Metrics, registered by name in ``METRICS``; each says by its attribute ``better`` which way is up."""

from models.metrics.psnr_ssim import calculate_psnr, calculate_ssim, rgb_to_y
from options.registry import METRICS

__all__ = ["METRICS", "calculate_psnr", "calculate_ssim", "rgb_to_y"]
