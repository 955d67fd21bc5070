"""The settings of WildCat: published networks whose attention is computed from a coreset of the keys.

Everything but the attention is as in ``scripts.sst_table`` and ``scripts.mbt_table``; no score is published for any.
Size of a coreset and number of tiles for each window: the paper of WildCat has none for images, these are ours.
"""

from collections.abc import Iterator

from archs.sst import PRESETS
from scripts import mbt_table, sst_table

ATTENTION = "with attention by Schröder and Mackey, https://arxiv.org/abs/2602.10056"
UNMEASURED = ("unmeasured; no score of this network is published.",)
THRESHOLD = 48
# side of the window -> keys of the coreset, tiles of the window
CORESETS = {48: (256, 9), 64: (256, 16), 96: (512, 16)}
SST_VARIANTS = ("SST", "SST_Plus", "SSTLarge")
MBT_CORPORA = ("ITS", "O-HAZE")


class WildCatSST(sst_table.Setting):
    """An SST with coresets in its large windows."""

    network = "WildCatSST"
    paper = f"{sst_table.PAPER}, {ATTENTION}"
    expected = UNMEASURED

    @property
    def name(self) -> str:
        """That of the plain network, after WildCat."""
        return f"WildCat{super().name}"

    @property
    def weights(self) -> str:
        """Name of the authors' weights, of the plain network."""
        return super().name

    @property
    def title(self) -> str:
        """That of the plain network, after WildCat."""
        return f"WildCat-{super().title}"

    @property
    def warm_start(self) -> str | None:
        """The network of the next smaller scale."""
        start = super().warm_start
        return None if start is None else f"WildCat{start}"

    @property
    def extra(self) -> dict[str, int | tuple[int, ...]]:
        """The coresets, one number where all layers have the same."""
        # smaller windows attend exactly
        chosen = [CORESETS.get(window, CORESETS[64]) for window in PRESETS[self.variant]["window_sizes"]]
        ranks, bins = (values[0] if len(set(values)) == 1 else values for values in zip(*chosen, strict=True))
        return {"rank": ranks, "bins": bins, "threshold": THRESHOLD, "attention": "coreset"}


class WildCatMBTaylorFormer(mbt_table.Setting):
    """An MB-TaylorFormer with softmax attention from coresets."""

    network = "WildCatMBTaylorFormer"
    paper = f"{mbt_table.PAPERS[1]}, {ATTENTION}"
    expected = UNMEASURED
    notes = (
        "The attention alone is another: a softmax whose sharpness is learned.",
        "Weights of the plain network fit it too (path.pretrain_network_g).",
    )

    @property
    def title(self) -> str:
        """That of the plain network, after WildCat."""
        return f"WildCat-{super().title}"

    @property
    def extra(self) -> dict[str, object]:
        """The coresets of each level, and what the Taylor expansion does not have."""
        coresets = {"rank": [128, 128, 64, 64], "bins": [16, 16, 4, 4], "threshold": 1024, "attention": "coreset"}
        return {"qk_norm": 0.5, "normalise": "true", "learned_temperature": "true", **coresets}


def sst_settings() -> Iterator[WildCatSST]:
    """Those of SST."""
    for variant in SST_VARIANTS:
        for scale in sst_table.SCALES:
            yield WildCatSST(variant, "DF2K", scale)


def mbt_settings() -> Iterator[WildCatMBTaylorFormer]:
    """Those of MB-TaylorFormer."""
    for corpus in MBT_CORPORA:
        yield WildCatMBTaylorFormer(1, "B", corpus)
