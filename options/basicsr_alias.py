"""Files written for BasicSR, unchanged: its names lead to our registries. Opt-in.

``basicsr_alias: true`` in the option file, or the environment variable PELLUCID_BASICSR=1, puts modules called
``basicsr...`` into the process, with the registries and the small functions below. What registers itself there is
registered here.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator

from options import registry

logger = logging.getLogger("pellucid")

ENVIRONMENT = "PELLUCID_BASICSR"
PACKAGE = "basicsr"

_REGISTRIES = {
    "ARCH_REGISTRY": registry.ARCHS,
    "DATASET_REGISTRY": registry.DATASETS,
    "LOSS_REGISTRY": registry.LOSSES,
    "METRIC_REGISTRY": registry.METRICS,
    "MODEL_REGISTRY": registry.MODELS,
}
_LAYERS = (
    "to_2tuple",
    "trunc_normal_",
    "default_init_weights",
    "make_layer",
    "ResidualBlockNoBN",
    "Upsample",
    "pixel_unshuffle",
)
_PICTURES = ("img2tensor", "tensor2img", "imwrite", "imfrombytes")
_UTILS = ("get_root_logger", "scandir", *_PICTURES)
# module -> what it holds; the functions come from options.basicsr_helpers
_MODULES: dict[str, tuple[str, ...]] = {
    "basicsr": (),
    "basicsr.utils": _UTILS,
    "basicsr.utils.registry": tuple(_REGISTRIES),
    "basicsr.utils.logger": ("get_root_logger",),
    "basicsr.utils.misc": ("scandir",),
    "basicsr.utils.img_util": _PICTURES,
    "basicsr.archs": (),
    "basicsr.archs.arch_util": _LAYERS,
}


def is_wanted(option: object) -> bool:
    """Whether the option file or the environment asks for the alias.

    Args:
        option: the value of ``basicsr_alias``.
    """
    return option is True or os.environ.get(ENVIRONMENT, "").lower() in ("1", "true", "yes")


def is_active() -> bool:
    """Whether ``import basicsr`` finds the alias."""
    return hasattr(sys.modules.get(PACKAGE), "__pellucid__")


def install() -> None:
    """Make ``basicsr`` importable; an installed package of this name is hidden for this process, with a notice."""
    if is_active():
        return
    if PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None:
        logger.warning("basicsr_alias: the installed package basicsr is hidden in this run; its names lead to Pellucid")
    helpers = importlib.import_module("options.basicsr_helpers")
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    for name, contents in _MODULES.items():
        module = types.ModuleType(name, f"Pellucid in the place of {name}.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__pellucid__ = True
        for key in contents:
            setattr(module, key, _REGISTRIES[key] if key in _REGISTRIES else getattr(helpers, key))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def remove() -> None:
    """Take the alias out of the process."""
    for name in [name for name, module in sys.modules.items() if hasattr(module, "__pellucid__")]:
        del sys.modules[name]


def way_out(error: Exception) -> str:
    """What to do about an import that failed; empty where it is not about BasicSR."""
    name = getattr(error, "name", None) or ""
    if not isinstance(error, ImportError) or name.split(".")[0] != PACKAGE:
        return ""
    if not is_active():
        switch = f"basicsr_alias: true in the option file, or {ENVIRONMENT}=1 in the environment"
        return f". The file was written for BasicSR; to let its registries lead to Pellucid's, set {switch}"
    return f". In the place of BasicSR there is: {'; '.join(_offers())}"


def _offers() -> Iterator[str]:
    for name, contents in _MODULES.items():
        if contents:
            yield f"{name} ({', '.join(contents)})"
