"""Networks: tensors to tensors. Importing this package registers every network of the folder in ``ARCHS``."""

import importlib
import pkgutil

from options.registry import ARCHS

__all__ = ["ARCHS"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
