"""EDSR, a plain residual convolutional network for super-resolution: what other networks are compared with.

Paper: Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution", CVPR Workshops 2017,
https://arxiv.org/abs/1707.02921 (sec. 3, fig. 3). Arguments and state-dict keys are those of BasicSR's ``EDSR``.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from archs.layers import check_integers
from options.registry import ARCHS

# of DIV2K, red first
DIV2K_MEAN = (0.4488, 0.4371, 0.4040)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside the identity: (b, c, h, w) -> (b, c, h, w)"""

    def __init__(self, dim: int, *, res_scale: float) -> None:
        super().__init__()
        self.res_scale = res_scale
        self.conv1 = _conv(dim, dim)
        self.conv2 = _conv(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x))) * self.res_scale


@ARCHS.register()
class EDSR(nn.Module):
    """(b, num_in_ch, h, w) in 0..1 -> (b, num_out_ch, h * upscale, w * upscale), not clamped.

    Args:
        num_in_ch, num_out_ch: channels of the images.
        num_feat: channels inside; 64 in the baseline, 256 in EDSR.
        num_block: residual blocks; 16 in the baseline, 32 in EDSR.
        upscale: a power of two or 3.
        res_scale: factor of each residual; 0.1 in EDSR.
        img_range: the images are brought to 0..img_range inside.
        rgb_mean: subtracted inside, in 0..1, one for each channel; another number of channels has none.

    Raises:
        ValueError: a size that is not a positive integer, a scale that has no sub-pixel convolution, or means that do
            not fit the channels.
    """

    multiple_of = 1
    minimum = 1

    def __init__(
        self,
        *,
        num_in_ch: int = 3,
        num_out_ch: int = 3,
        num_feat: int = 64,
        num_block: int = 16,
        upscale: int = 4,
        res_scale: float = 1.0,
        img_range: float = 255.0,
        rgb_mean: Sequence[float] = DIV2K_MEAN,
    ) -> None:
        super().__init__()
        check_integers(num_in_ch=num_in_ch, num_out_ch=num_out_ch, num_feat=num_feat, num_block=num_block)
        if len(rgb_mean) != 3 or (num_in_ch == 3) != (num_out_ch == 3):
            raise ValueError(
                f"rgb_mean needs 3 entries, and both images 3 channels or neither: got {len(rgb_mean)} entries, "
                f"num_in_ch {num_in_ch}, num_out_ch {num_out_ch}"
            )
        self.in_channels, self.out_channels, self.scale = num_in_ch, num_out_ch, upscale
        self.img_range, self.checkpointing = img_range, False
        # constants of the option file, not weights: published files lack them
        self.mean = tuple(map(float, rgb_mean)) if num_in_ch == 3 else (0.0,)
        self.conv_first = _conv(num_in_ch, num_feat)
        self.body = nn.Sequential(*(ResidualBlock(num_feat, res_scale=res_scale) for _ in range(num_block)))
        self.conv_after_body = _conv(num_feat, num_feat)
        self.upsample = nn.Sequential(*_upsampling(num_feat, upscale))
        self.conv_last = _conv(num_feat, num_out_ch)

    @property
    def halo(self) -> int:
        """Pixels around a piece of the input that its output depends on."""
        # the convolutions at full size see less than one pixel of the input each
        return 2 + 2 * len(self.body) + len(self.upsample) // 2 + 1

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the input of each block for the backward pass and compute the rest again."""
        self.checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        mean = x.new_tensor(self.mean).view(1, -1, 1, 1)
        features = self.conv_first((x - mean) * self.img_range)
        body = features
        for block in self.body:
            recompute = self.checkpointing and self.training
            body = checkpoint(block, body, use_reentrant=False) if recompute else block(body)
        features = features + self.conv_after_body(body)
        return self.conv_last(self.upsample(features)) / self.img_range + mean


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def _upsampling(dim: int, scale: int) -> list[nn.Module]:
    """Sub-pixel convolutions; none for scale 1."""
    check_integers(upscale=scale)
    if scale == 3:
        return [_conv(dim, 9 * dim), nn.PixelShuffle(3)]
    if scale & (scale - 1):
        raise ValueError(f"upscale must be a power of two or 3, got {scale}")
    doublings = int(math.log2(scale))
    return [layer for _ in range(doublings) for layer in (_conv(dim, 4 * dim), nn.PixelShuffle(2))]
