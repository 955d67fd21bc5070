"""A progressive schedule of batch and patch size: ``mini_batch_sizes``, ``iters`` and ``gt_sizes`` of a training set.

Each of the lists has one entry for each stage; the last stage goes on to the end of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

KEYS = ("mini_batch_sizes", "iters", "gt_sizes")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        number: counted from 1.
        first, last: its iterations, counted from 1; the last stage of a schedule has no last one.
        batch: samples per device and accumulation step.
        gt_size: side of the ground-truth patch in pixels.
    """

    number: int
    first: int
    last: int | None
    batch: int
    gt_size: int

    def __str__(self) -> str:
        """``iterations 1 to 92,000: 8 samples of 128x128``"""
        span = f"{self.first:,} to {self.last:,}" if self.last is not None else f"{self.first:,} on"
        return f"iterations {span}: {self.batch} samples of {self.gt_size}x{self.gt_size}"


def stages(dataset: Any) -> tuple[Stage, ...]:
    """The stages of a data set's options (attributes ``mini_batch_sizes`` ..); none where there is no schedule."""
    batches, iters, sizes = (getattr(dataset, key, None) for key in KEYS)
    if not (batches and iters and sizes):
        return ()
    ends = [*accumulate(iters[:-1]), None]
    begins = [1, *(end + 1 for end in ends[:-1])]
    return tuple(
        Stage(number, *places) for number, places in enumerate(zip(begins, ends, batches, sizes, strict=True), 1)
    )


def at(found: tuple[Stage, ...], iteration: int) -> Stage:
    """The stage of an iteration, counted from 1."""
    return next(stage for stage in found if stage.last is None or iteration <= stage.last)


def problems(dataset: Any, scale: int) -> list[tuple[str, str]]:
    """(key, message) for each thing that is wrong with the schedule of a data set's options."""
    given = {key: value for key in KEYS if (value := getattr(dataset, key)) is not None}
    if not given:
        return []
    lacking = [key for key in KEYS if key not in given]
    if lacking:
        return [(key, f"is missing; {', '.join(KEYS)} belong together") for key in lacking]
    if len({len(value) for value in given.values()}) > 1 or not given["iters"]:
        lengths = ", ".join(f"{key} has {len(value)}" for key, value in given.items())
        return [("iters", f"each stage needs one entry in each list, but {lengths}")]
    found, batch, size = [], dataset.batch_size_per_gpu, dataset.arguments().get("gt_size")
    large = [own for own in dataset.mini_batch_sizes if own > batch]
    if large:
        text = f"{large[0]} is larger than batch_size_per_gpu {batch}; lower it, or raise batch_size_per_gpu"
        found.append(("mini_batch_sizes", text))
    large = [own for own in dataset.gt_sizes if isinstance(size, int) and own > size]
    if large:
        found.append(("gt_sizes", f"{large[0]} is larger than gt_size {size}; lower it, or raise gt_size"))
    odd = [own for own in dataset.gt_sizes if own % scale]
    if odd:
        found.append(("gt_sizes", f"{odd[0]} is not a multiple of scale {scale}"))
    return found


def remarks(dataset: Any, total: int) -> list[str]:
    """What is right in the schedule of a data set's options, and yet may not be meant."""
    found, told = stages(dataset), []
    late = [str(stage.number) for stage in found if stage.first > total]
    if late:
        told.append(f"stage {', '.join(late)} of datasets.train.iters never begins: train.total_iter is {total}")
    if found and not late and sum(dataset.iters) < total:
        end = f"datasets.train.iters ends at {sum(dataset.iters)}, before train.total_iter {total}"
        told.append(f"{end}: the last stage goes on")
    if found and dataset.loaded_batch < dataset.batch_size_per_gpu:
        told.append(
            f"no stage of datasets.train.mini_batch_sizes takes more than {dataset.loaded_batch} samples, so this many "
            f"are loaded rather than batch_size_per_gpu {dataset.batch_size_per_gpu}"
        )
    return told


def loaded(dataset: Any) -> int:
    """Samples per batch that the loader has to bring: what the largest stage takes."""
    return max((stage.batch for stage in stages(dataset)), default=dataset.batch_size_per_gpu)


def expand_geometric_augs(section: Mapping[str, Any], takes: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Write ``geometric_augs`` of a data set out as ``use_hflip`` and ``use_rot``: one of the eight positions.

    Args:
        section: of one data set.
        takes: whether its class has both arguments.

    Returns:
        the section, and (key, message) for each contradiction.
    """
    wanted, section = section.get("geometric_augs"), dict(section)
    if not isinstance(wanted, bool):
        return section, []
    if not takes:
        text = f"{section.get('type')} has no use_hflip and use_rot, which it stands for; remove it"
        return section, [("geometric_augs", text)] if wanted else []
    found = []
    for key in ("use_hflip", "use_rot"):
        if section.setdefault(key, wanted) is not wanted:
            own, other = (str(value).lower() for value in (section[key], wanted))
            found.append((key, f"is {own}, but geometric_augs is {other} and stands for it too; remove one of them"))
    return section, found
