"""The small functions that files written for BasicSR take from it, in our own words; see ``options.basicsr_alias``.

Pictures are as there: ``(h, w, c)`` in OpenCV's order of channels, BGR.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

trunc_normal_ = nn.init.trunc_normal_


def to_2tuple(value: Any) -> tuple:
    """3 -> (3, 3); what can be iterated over becomes a tuple as it is."""
    return tuple(value) if isinstance(value, Iterable) else (value, value)


def default_init_weights(modules: nn.Module | Sequence[nn.Module], scale: float = 1, bias_fill: float = 0) -> None:
    """Kaiming-normal weights times ``scale`` for convolutions and linear layers, ones for batch norms."""
    roots = [modules] if isinstance(modules, nn.Module) else modules
    for module in (part for root in roots for part in root.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            module.weight.data *= scale
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.ones_(module.weight)
        else:
            continue
        if module.bias is not None:
            nn.init.constant_(module.bias, bias_fill)


def make_layer(block: Callable[..., nn.Module], number: int, **arguments: Any) -> nn.Sequential:
    """``number`` blocks of the same arguments, one after the other."""
    return nn.Sequential(*(block(**arguments) for _ in range(number)))


class ResidualBlockNoBN(nn.Module):
    """Two 3x3 convolutions with a ReLU between them, beside a shortcut."""

    def __init__(self, num_feat: int = 64, res_scale: float = 1, pytorch_init: bool = False) -> None:
        super().__init__()
        self.res_scale = res_scale
        self.conv1 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.conv2 = nn.Conv2d(num_feat, num_feat, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        if not pytorch_init:
            default_init_weights([self.conv1, self.conv2], 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """(b, num_feat, h, w) -> (b, num_feat, h, w)"""
        return x + self.res_scale * self.conv2(self.relu(self.conv1(x)))


class Upsample(nn.Sequential):
    """Sub-pixel convolutions: a stage of x2 for each power of two, or one of x3."""

    def __init__(self, scale: int, num_feat: int) -> None:
        if scale == 3:
            factors = [3]
        elif scale > 0 and scale & (scale - 1) == 0:
            factors = [2] * (scale.bit_length() - 1)
        else:
            raise ValueError(f"scale must be 3 or a power of two, got {scale}")
        stages = ((nn.Conv2d(num_feat, num_feat * n * n, 3, padding=1), nn.PixelShuffle(n)) for n in factors)
        super().__init__(*(part for stage in stages for part in stage))


def pixel_unshuffle(x: Tensor, scale: int) -> Tensor:
    """(b, c, h * scale, w * scale) -> (b, c * scale**2, h, w)"""
    return F.pixel_unshuffle(x, scale)


def get_root_logger(*_: Any, **__: Any) -> logging.Logger:
    """The log of the run."""
    return logging.getLogger("pellucid")


def img2tensor(images: Any, bgr2rgb: bool = True, float32: bool = True) -> Any:
    """(h, w, c) array, or a list of them -> (c, h, w) tensor, or a list."""
    if isinstance(images, list):
        return [img2tensor(image, bgr2rgb, float32) for image in images]
    image = images[..., ::-1] if bgr2rgb and images.shape[2] == 3 else images
    tensor = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    return tensor.float() if float32 else tensor


def tensor2img(
    tensors: Any, rgb2bgr: bool = True, out_type: type = np.uint8, min_max: tuple[float, float] = (0, 1)
) -> Any:
    """(c, h, w), (1, c, h, w) or (h, w) tensor, or a list of them -> (h, w, c) or (h, w) array, or a list.

    Raises:
        ValueError: a batch of more than one picture.
    """
    if isinstance(tensors, list | tuple):
        images = [tensor2img(tensor, rgb2bgr, out_type, min_max) for tensor in tensors]
        return images[0] if len(images) == 1 else images
    low, high = min_max
    tensor = (tensors.detach().float().cpu().clamp(low, high) - low) / (high - low)
    tensor = tensor[0] if tensor.ndim == 4 and len(tensor) == 1 else tensor
    if tensor.ndim not in (2, 3):
        raise ValueError(f"a picture must be (c, h, w), (1, c, h, w) or (h, w), got {tuple(tensors.shape)}")
    image = tensor.numpy() if tensor.ndim == 2 else tensor.permute(1, 2, 0).numpy()
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    elif image.ndim == 3 and rgb2bgr:
        image = image[..., ::-1]
    if out_type is np.uint8:
        image = (image * 255).round()
    return np.ascontiguousarray(image.astype(out_type))


def imwrite(image: np.ndarray, path: str, params: list[int] | None = None, auto_mkdir: bool = True) -> None:
    """Write a picture; OSError where that fails."""
    if auto_mkdir:
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), image, params or []):
        raise OSError(f"{path} cannot be written")


def imfrombytes(content: bytes, flag: str = "color", float32: bool = False) -> np.ndarray:
    """Decode a picture; ``flag`` is color, grayscale or unchanged; ``float32`` divides by 255."""
    flags = {"color": cv2.IMREAD_COLOR, "grayscale": cv2.IMREAD_GRAYSCALE, "unchanged": cv2.IMREAD_UNCHANGED}
    image = cv2.imdecode(np.frombuffer(content, np.uint8), flags[flag])
    return image.astype(np.float32) / 255 if float32 else image


def scandir(
    dir_path: str, suffix: str | tuple[str, ...] | None = None, recursive: bool = False, full_path: bool = False
) -> Iterator[str]:
    """Names of the files of a folder, from it or whole; hidden ones are left out."""
    for folder, folders, files in os.walk(dir_path):
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (suffix is None or name.endswith(suffix)):
                path = os.path.join(folder, name)
                yield path if full_path else os.path.relpath(path, dir_path)
