"""From the options of one dataset to an iterable of batches."""

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.dataset import split_key
from data.io import use_one_thread
from data.sampler import EndlessSampler, ShardSampler
from options.errors import DataError, OptionsError, UserError
from options.registry import DATASETS, UnknownName, WrongArgument, takes_options_dict

_LOST_WORKER = (
    "a data worker ended unexpectedly ({}); it may have run out of memory or of shared memory: lower "
    "num_worker_per_gpu or batch_size_per_gpu, or set num_worker_per_gpu=0 to see the cause"
)


class Loader:
    """Batches of one dataset on one rank, as dictionaries (lq, gt, name ...).

    A train loader never ends and starts over from ``start`` each time it is iterated; a val or test loader goes once
    through the pictures of its rank, one at a time. Closing the iterator ends the workers. Batches do not depend on the
    number of workers, and iterating leaves torch's global random state alone.

    Attributes:
        dataset: the dataset, over all ranks.
        batch_size: samples per batch of this rank.
        position: samples handed out so far over all ranks, from the stream's beginning: the ``start`` to resume with.
    """

    def __init__(self, loader: DataLoader, *, world: int, start: int, endless: bool) -> None:
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.position = start
        self._loader, self._world, self._start, self._endless = loader, world, start, endless

    def __len__(self) -> int:
        if self._endless:
            raise TypeError("a train loader is endless and has no length; len(loader.dataset) counts its pictures")
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.position = self._start
        if self._loader.num_workers and hasattr(self.dataset, "preload"):
            self.dataset.preload()
        batches = iter(self._loader)
        try:
            while True:
                try:
                    batch = next(batches)
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
                return self.dataset[index]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def build_dataset(options: Any) -> Dataset:
    """The dataset of ``options`` (``type``, ``arguments()``, ``phase``, ``scale``, ``seed``).

    Raises:
        OptionsError: an unknown type or argument, or a wrong value.
        DataError: what is wrong with the pictures, or none there.
    """
    seed = options.seed or 0
    given = {"phase": options.phase, "scale": options.scale or 1, "seed": seed}
    spec = {**options.arguments(), "type": options.type}
    label = f"{options.name or options.type} ({options.phase})"
    try:
        dataset = DATASETS.build(spec, **given)
        if takes_options_dict(DATASETS.get(options.type)):
            dataset = IndexedDataset(dataset, seed)
    except (UnknownName, WrongArgument) as error:
        raise OptionsError(f"{label}: {error}") from error
    if not len(dataset):
        raise DataError(f"{label}: no images found")
    return dataset


def build_loader(
    options: Any, rank: int = 0, world: int = 1, *, start: int = 0, multiprocessing_context: str | None = None
) -> Loader:
    """Build the dataset that ``options`` describes, check its pictures, and serve it in batches.

    Args:
        options: one dataset's options: ``type``, ``name``, ``phase``, ``scale``, ``seed``, ``batch_size_per_gpu``,
            ``num_worker_per_gpu``, ``num_prefetch_queue``, ``pin_memory``, ``persistent_workers``, ``use_shuffle``,
            ``dataset_enlarge_ratio``, and ``arguments()`` for the dataset's own ones.
        rank, world: this process among all.
        start: position of a train loader in the stream of samples, counted over all ranks.
        multiprocessing_context: how workers start (``"fork"``, ``"spawn"``, ``"forkserver"``); None is the
            platform's way.

    Raises:
        OptionsError, DataError: as :func:`build_dataset`.
    """
    dataset = build_dataset(options)
    endless = options.phase == "train"
    if endless:
        sampler = EndlessSampler(
            len(dataset),
            seed=options.seed or 0,
            shuffle=options.use_shuffle is not False,
            ratio=int(options.dataset_enlarge_ratio or 1),
            rank=rank,
            world=world,
            start=start,
        )
    else:
        sampler = ShardSampler(len(dataset), rank=rank, world=world)
    workers = int(options.num_worker_per_gpu or 0)
    several = {
        "prefetch_factor": max(2, int(options.num_prefetch_queue or 0)),
        "persistent_workers": endless or bool(options.persistent_workers),
        "worker_init_fn": _start_worker,
        "multiprocessing_context": multiprocessing_context,
    }
    loader = DataLoader(
        dataset,
        batch_size=options.batch_size_per_gpu if endless else 1,
        sampler=sampler,
        num_workers=workers,
        pin_memory=bool(options.pin_memory) and torch.cuda.is_available(),
        # its own generator, so that starting the workers draws nothing from the global one
        generator=torch.Generator().manual_seed(options.seed or 0),
        **(several if workers else {}),
    )
    return Loader(loader, world=world, start=start if endless else 0, endless=endless)


def _start_worker(worker: int) -> None:
    use_one_thread()
    torch.set_num_threads(1)
    # signals to the whole group are the main process's to handle: it wants batches until it has saved
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))


def _is_lost_worker(error: RuntimeError) -> bool:
    return "DataLoader worker" in str(error) and "Caught" not in str(error)
