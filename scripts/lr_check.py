"""Whether reductions that came with an archive are MATLAB's bicubic ones of its good pictures."""

import numpy as np

from data.backends import ImageReader, Source
from data.degrade import bicubic_downsample
from data.prepare import pair_names
from options.errors import DataError

_SAMPLES = 5
# other roundings differ by a level here and there, other kernels by more nearly everywhere
_MEAN = 0.1


def check_samples(hr: Source, lr: Source, scale: int, *, every: bool = False) -> None:
    """Compare five pictures, evenly chosen, or every one.

    Raises:
        DataError: the first that differs by more than rounding.
    """
    pairs, _ = pair_names(hr.names(), lr.names(), [f"{{}}x{scale}"], f"{hr.root} and {lr.root}")
    chosen = pairs if every else [pairs[i * (len(pairs) - 1) // (_SAMPLES - 1)] for i in range(_SAMPLES)]
    good, low = ImageReader(hr, "drop"), ImageReader(lr, "drop")
    for hr_name, lr_name in dict.fromkeys(chosen):
        own, theirs = bicubic_downsample(good(hr_name), scale), low(lr_name)
        apart = np.abs(own.astype(int) - theirs).mean() if own.shape == theirs.shape else np.inf
        if apart > _MEAN:
            raise DataError(
                f"{low.path(lr_name)} is not the bicubic reduction of {good.path(hr_name)}: {apart:.2f} levels apart "
                "on average; it belongs to another picture, or was made otherwise. Move its folder away to have it made"
            )
