"""Loss on the spectra of two pictures, as MB-TaylorFormer V2 trains with.

Paper: Jin et al., "MB-TaylorFormer V2: Improved Multi-branch Linear Transformer Expanded by Taylor Formula for Image
Restoration", 2025, https://arxiv.org/abs/2501.04486.
Differs from the authors' code: one transform of the difference instead of the difference of two transforms (the
transform is linear), and half precisions are transformed in float32.
"""

import torch
from torch import Tensor

from models.losses.pixel import WeightedLoss
from options.registry import LOSSES


@LOSSES.register()
class FFTLoss(WeightedLoss):
    """Mean absolute difference of the two-dimensional spectra, their real and imaginary parts side by side.

    The transform is not normalised, so the value grows with the square root of the number of pixels. A ``weight``
    belongs to the frequencies (in the order of ``torch.fft.fft2``), not to the pixels.
    """

    def difference(self, pred: Tensor, target: Tensor) -> Tensor:
        """(b, c, h, w) twice -> (b, c, h, w, 2): the real and the imaginary part"""
        return torch.view_as_real(torch.fft.fft2(pred - target, dim=(-2, -1))).abs()
