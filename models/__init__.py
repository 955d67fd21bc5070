"""How a network is trained and judged."""

from models.losses import LOSSES
from models.metrics import METRICS
from models.restoration import RestorationModel
from options.registry import MODELS

__all__ = ["LOSSES", "METRICS", "MODELS", "RestorationModel"]

for _published in ("SRModel", "ESRModel", "SwinIRModel", "ImageCleanModel"):
    MODELS.alias(_published, "RestorationModel")
