"""What loaded batches go through before a step: the stage's share of a progressive schedule, and mixup.

Both draw from (seed, iteration, rank, place in the accumulation) and from nothing else, so that a resumed run goes on
as an unbroken one, workers have no part in it, and neither shifts other random numbers.

The stages cut whole batches, as in the code that the published option files are for, instead of having the data sets
load the patch of the stage: a data set of anybody's works so, batches that are loaded ahead need not know for which
iteration they are, and the position in the stream stays a plain count. What a stage does not use is loaded in vain, but
never more samples than the largest stage takes.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.base import Batch
from options import stages
from options.schema import MixupOptions, Options
from options.stages import Stage

logger = logging.getLogger("pellucid")
# what is drawn for one thing has no part in the other
_STAGE_STREAM, _MIXUP_STREAM = 11, 12


class Preparation:
    """The rules of one run, as one of its processes follows them.

    Args:
        options: of the run.
        rank: of the process; each draws its own.
    """

    def __init__(self, options: Options, rank: int = 0) -> None:
        self._options, self._rank = options, rank
        (training_set,) = options.phase("train").values()
        self._stages = stages.stages(training_set)
        self._stage: Stage | None = None
        mixing = options.train.mixing_augs
        self._mixup = mixing if mixing is not None and mixing.mixup else None

    def __call__(self, batches: Sequence[Batch], iteration: int) -> list[Batch]:
        """The batches of one step (one, or ``accum_iter``) as its iteration, counted from 1, wants them."""
        if self._stages:
            self._tell_a_new_stage(iteration)
            batches = [
                cut(batch, self._stage, scale=self._options.scale, rng=self._rng(iteration, place, _STAGE_STREAM))
                for place, batch in enumerate(batches)
            ]
        if self._mixup is not None:
            batches = [
                mixup(batch, self._mixup, rng=self._rng(iteration, place, _MIXUP_STREAM))
                for place, batch in enumerate(batches)
            ]
        return list(batches)

    def _rng(self, iteration: int, place: int, stream: int) -> np.random.Generator:
        return np.random.default_rng([self._options.manual_seed, iteration, self._rank, place, stream])

    def _tell_a_new_stage(self, iteration: int) -> None:
        stage = stages.at(self._stages, iteration)
        # a schedule of one stage is in the plan, and nothing begins
        if stage is not self._stage and len(self._stages) > 1:
            logger.info(f"stage {stage.number} of {len(self._stages)}, {stage}")
        self._stage = stage


def cut(batch: Batch, stage: Stage, *, scale: int, rng: np.random.Generator) -> dict[str, Any]:
    """A random choice of the samples and, in all of them, one random patch.

    Args:
        batch: ``lq`` ``(b, c, h, w)``, ``gt`` ``(b, c, h * scale, w * scale)``, and tensors and lists of b entries.
        stage: how many samples, and which patch; a batch that has no more of either is left as it is.
        rng: source of the draws, three of them whatever the stage is.
    """
    found = dict(batch)
    count, _, h, w = batch["lq"].shape
    order, places = rng.permutation(count), rng.random(2)
    if stage.batch < count:
        kept = [int(i) for i in order[: stage.batch]]
        for key, value in batch.items():
            if isinstance(value, Tensor) and value.dim() and len(value) == count:
                found[key] = value[kept]
            elif isinstance(value, list | tuple) and len(value) == count:
                found[key] = [value[i] for i in kept]
    side = stage.gt_size // scale
    if side < h or side < w:
        top, left = (int(place * (max(length - side, 0) + 1)) for place, length in zip(places, (h, w), strict=True))
        found["lq"] = found["lq"][:, :, top : top + side, left : left + side]
        top, left, side = top * scale, left * scale, side * scale
        found["gt"] = found["gt"][:, :, top : top + side, left : left + side]
    return found


def mixup(batch: Batch, options: MixupOptions, *, rng: np.random.Generator) -> dict[str, Any]:
    """Each sample mixed with another one of the batch (or itself), LQ and GT alike: ``m * x + (1 - m) * x[order]``.

    ``m`` is drawn from Beta(b, b), b being ``mixup_beta``, once for the batch. With ``use_identity`` every second
    batch, on average, is left as it is.

    Args:
        batch: ``lq`` and ``gt`` ``(b, c, h, w)``; both keep their dtype.
        options: ``train.mixing_augs``.
        rng: source of the draws.
    """
    untouched, share = rng.random() < 0.5, float(rng.beta(options.mixup_beta, options.mixup_beta))
    if options.use_identity and untouched:
        return dict(batch)
    order = torch.from_numpy(rng.permutation(len(batch["lq"])))
    mixed = {key: share * batch[key] + (1 - share) * batch[key][order.to(batch[key].device)] for key in ("lq", "gt")}
    return {**batch, **mixed}
