"""Images in, batches out. Every module of this folder is imported, so that its datasets register themselves."""

import importlib
import pkgutil

from data.loader import Loader, build_dataset, build_loader
from options.registry import DATASETS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["DATASETS", "Loader", "build_dataset", "build_loader"]
