"""From the options of one dataset to an iterable of batches."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from data.dataset import split_key
from data.prefetch import prefetch
from data.sampler import EndlessSampler, ShardSampler
from data.workers import Sent, is_forked, start_worker
from options.errors import DataError, OptionsError, UserError
from options.registry import DATASETS, UnknownName, WrongArgument, takes_options_dict

_LOST_WORKER = (
    "a data worker ended unexpectedly ({}); it may have run out of memory or of shared memory: lower "
    "num_worker_per_gpu or batch_size_per_gpu, or set num_worker_per_gpu=0 to see the cause"
)

logger = logging.getLogger("pellucid")


class Loader:
    """Batches of one dataset on one rank, as dictionaries (lq, gt, name ...).

    A train loader never ends and starts over from ``start`` each time it is iterated; a val or test loader goes once
    through the pictures of its rank, one at a time. Closing the iterator ends the workers. Batches do not depend on the
    number of workers, and iterating leaves torch's global random state alone.

    Args:
        device: where :func:`data.prefetch.prefetch` brings the tensors; None leaves them on the CPU.

    Attributes:
        dataset: the dataset, over all ranks.
        batch_size: samples per batch of this rank.
        position: samples handed out so far over all ranks, from the stream's beginning: the ``start`` to resume with.
            Batches prepared ahead do not count.
    """

    def __init__(
        self,
        loader: DataLoader,
        dataset: Dataset,
        *,
        world: int,
        start: int,
        endless: bool,
        device: torch.device | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = loader.batch_size
        self.position = start
        self._loader, self._world, self._start, self._endless = loader, world, start, endless
        self._device = device

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("a train loader is endless and has no length; len(loader.dataset) counts its pictures")
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.position = self._start
        # workers that are not forked share nothing with this process, and read for themselves
        shared = self._loader.num_workers and self._loader.dataset is self.dataset
        if shared and hasattr(self.dataset, "preload"):
            self.dataset.preload()
        batches = iter(self._loader)
        stream = batches if self._device is None else prefetch(batches, self._device)
        try:
            while True:
                try:
                    batch = next(stream)
                except StopIteration:
                    return
                except DataError as error:
                    # what comes from a worker carries its traceback; the last part is the message
                    raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
                except RuntimeError as error:
                    if not _is_lost_worker(error):
                        raise
                    raise UserError(_LOST_WORKER.format(str(error).splitlines()[0])) from error
                self.position += self.batch_size * self._world
                yield batch
        finally:
            self._end_workers(batches)

    def _end_workers(self, batches: Any) -> None:
        # left to the garbage collector, idle workers are waited for in vain, ten seconds each
        if self._loader.num_workers and (self._endless or not self._loader.persistent_workers):
            batches._shutdown_workers()
            self._loader._iterator = None


class IndexedDataset(Dataset):
    """A dataset that knows plain indices and global random states only (one written for BasicSR), made deterministic.

    Args:
        dataset: takes an integer; draws from ``random``, ``numpy.random`` or torch.
        seed: with epoch and index it fixes what is drawn.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int | tuple[int, int]) -> Any:
        epoch, index = split_key(key)
        state = int(np.random.SeedSequence([self.seed, epoch, index, 3]).generate_state(1)[0])
        before = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                random.seed(state)
                np.random.seed(state)
                torch.manual_seed(state)
                return _named(self.dataset[index], index)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _named(sample: Any, index: int) -> Any:
    """BasicSR's samples carry paths, and no name."""
    if not isinstance(sample, dict) or "name" in sample:
        return sample
    path = sample.get("lq_path") or sample.get("gt_path") or str(index)
    return {**sample, "name": Path(path).stem}


def build_dataset(options: Any) -> Dataset:
    """The dataset of ``options`` (``type``, ``arguments()``, ``phase``, ``scale``, ``seed``).

    Raises:
        OptionsError: an unknown type or argument, or a wrong value.
        DataError: what is wrong with the pictures, or none there.
    """
    seed = options.seed or 0
    name = getattr(options, "name", "")
    given = {"phase": options.phase, "scale": options.scale or 1, "seed": seed, "name": name}
    # a dataset may do without a name; what is given is left out then
    spec = {key: value for key, value in options.arguments().items() if key != "name"} | {"type": options.type}
    label = f"{name or options.type} ({options.phase})"
    try:
        dataset = DATASETS.build(spec, **given)
        if takes_options_dict(DATASETS.get(options.type, quiet=True)):
            dataset = IndexedDataset(dataset, seed)
    except (UnknownName, WrongArgument) as error:
        raise OptionsError(f"{label}: {error}") from error
    if not len(dataset):
        raise DataError(f"{label}: no images found")
    return dataset


def build_loader(
    options: Any,
    rank: int = 0,
    world: int = 1,
    *,
    start: int = 0,
    multiprocessing_context: str | None = None,
    device: torch.device | None = None,
) -> Loader:
    """Build the dataset that ``options`` describes, check its pictures, and serve it in batches.

    Args:
        options: one dataset's options: ``type``, ``name``, ``phase``, ``scale``, ``seed``, ``batch_size_per_gpu``,
            ``num_worker_per_gpu``, ``num_prefetch_queue``, ``prefetch_mode``, ``pin_memory``, ``persistent_workers``,
            ``use_shuffle``, ``dataset_enlarge_ratio``, and ``arguments()`` for the dataset's own ones.
        rank, world: this process among all.
        start: position of a train loader in the stream of samples, counted over all ranks.
        multiprocessing_context: how workers start (``"fork"``, ``"spawn"``, ``"forkserver"``); None is the
            platform's way.
        device: where training takes place; only ``prefetch_mode: cuda`` asks for it.

    Raises:
        OptionsError, DataError: as :func:`build_dataset`.
    """
    dataset = build_dataset(options)
    endless = options.phase == "train"
    settings: dict[str, Any] = {"num_workers": int(options.num_worker_per_gpu or 0)}
    if settings["num_workers"]:
        settings |= {
            "prefetch_factor": int(options.num_prefetch_queue or 2),
            "persistent_workers": endless or bool(options.persistent_workers),
            "worker_init_fn": start_worker,
            "multiprocessing_context": multiprocessing_context,
        }
    alike = not settings["num_workers"] or is_forked(multiprocessing_context)
    if not alike and getattr(dataset, "cache", None) is not None:
        logger.warning(f"{options.name}: workers that are not forked each keep pictures in a memory of their own")
    target = _prefetch_target(options, device) if endless else None
    loader = DataLoader(
        dataset if alike else Sent(dataset),
        # a progressive schedule may take fewer samples
        batch_size=getattr(options, "loaded_batch", options.batch_size_per_gpu) if endless else 1,
        sampler=_sampler(options, len(dataset), rank, world, start),
        pin_memory=bool(options.pin_memory or target) and torch.cuda.is_available(),
        # its own generator, so that starting the workers draws nothing from the global one
        generator=torch.Generator().manual_seed(options.seed or 0),
        **settings,
    )
    start = start if endless else 0
    return Loader(loader, dataset, world=world, start=start, endless=endless, device=target)


def _prefetch_target(options: Any, device: torch.device | None) -> torch.device | None:
    """Where batches are to be copied ahead, or None."""
    if options.prefetch_mode == "cpu":
        logger.info(f"{options.name}: prefetch_mode: cpu changes nothing, the workers prepare batches ahead anyway")
    if options.prefetch_mode != "cuda":
        return None
    if device is None or device.type != "cuda":
        logger.warning(f"{options.name}: prefetch_mode: cuda needs a GPU, and this run uses none; batches stay here")
        return None
    return device


def _sampler(options: Any, size: int, rank: int, world: int, start: int) -> Sampler:
    if options.phase != "train":
        return ShardSampler(size, rank=rank, world=world)
    return EndlessSampler(
        size,
        seed=options.seed or 0,
        shuffle=options.use_shuffle is not False,
        ratio=int(options.dataset_enlarge_ratio or 1),
        rank=rank,
        world=world,
        start=start,
    )


def _is_lost_worker(error: RuntimeError) -> bool:
    return "DataLoader worker" in str(error) and "Caught" not in str(error)
