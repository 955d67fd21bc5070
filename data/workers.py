"""The processes that load pictures: how they start, and how a dataset gets to them.

A forked worker has everything that its parent has. Any other starts from nothing and receives the dataset pickled;
what the parent imported from a file outside the tree (``import_paths``) cannot be found there by its name.
"""

import importlib.util
import multiprocessing
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from data.io import use_one_thread
from options import basicsr_alias

# the names that options.load gives to the modules of import_paths
_IMPORTED = "pellucid_import_"


def is_forked(context: str | None) -> bool:
    """True when workers of this start method (None: the one in force) are forked."""
    # asking without allow_none would settle the method for the whole process
    method = context or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"


def start_worker(worker: int) -> None:
    """Settle a new worker process: one thread, and the signals left to its parent."""
    use_one_thread()
    torch.set_num_threads(1)
    # signals to the whole group are the main process's to handle: it wants batches until it has saved
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))


class Sent:
    """A dataset that pickles as itself, behind the files of ``import_paths`` that its classes may come from.

    Args:
        dataset: what the worker is to get.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __reduce__(self) -> tuple[Callable, tuple]:
        # arguments are unpickled in their order, so the files are imported before a class is looked up
        return _second, (_Imports(), self.dataset)


class _Imports:
    def __reduce__(self) -> tuple[Callable, tuple]:
        files = [(name, module.__file__) for name, module in sys.modules.items() if name.startswith(_IMPORTED)]
        return _import_files, (files, basicsr_alias.is_active())


def _import_files(files: list[tuple[str, str]], alias: bool) -> None:
    """Import files in this order, under the names that another process knows them by."""
    if alias:
        basicsr_alias.install()
    for name, file in files:
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _second(_: None, dataset: Any) -> Any:
    return dataset
