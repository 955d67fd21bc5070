"""The image as windows and heads: views without copies, and its continuation to whole windows."""

import torch
from torch import Tensor

from kernels.window_attention import open_sizes


def tiles_of(image: Tensor, window: int, heads: int, *, parts: int) -> tuple[Tensor, ...]:
    """Views of an image of whole windows, (b, h, w, parts * heads * d): ``parts`` times
    (b, rows, columns, heads, window, window, d)."""
    b, h, w, channels = image.shape
    tiles = image.reshape(b, h // window, window, w // window, window, parts, heads, channels // (parts * heads))
    return tiles.permute(5, 0, 1, 3, 6, 2, 4, 7).unbind(0)


def continue_by_reflection(image: Tensor, window: int) -> Tensor:
    """(b, h, w, c): rows and columns added at the bottom and the right until both are multiples of ``window``."""
    if open_sizes.are_open(image):
        return open_sizes.continued(open_sizes.continued(image, 1, window), 2, window)
    for axis in (1, 2):
        target = -(-image.shape[axis] // window) * window
        while image.shape[axis] < target:
            size = image.shape[axis]
            # one mirror image at a time; a single pixel repeats
            count = min(target - size, max(size - 1, 1))
            tail = image.narrow(axis, max(size - 1 - count, 0), count).flip(axis)
            image = torch.cat([image, tail], dim=axis)
    return image
