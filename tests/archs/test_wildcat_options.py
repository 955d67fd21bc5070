"""The options of networks with attention from a coreset: what is refused, and what the message says."""

import math
import re

import pytest

from archs import ARCHS

SST = {"dim": 8, "window_sizes": (8, 32), "num_heads": 2, "ranks": (3, 4), "n_blocks": 1, "rib_n_freqs": 2}
UNET = {"dim": (8, 16, 16, 24), "num_blocks": (1, 1, 1, 1), "heads": (1, 2, 4, 6), "num_path": (1, 2, 1, 1)}
NETWORKS = {
    "WildCatSST": {**SST, "rank": 64, "bins": 4, "threshold": 32},
    "WildCatMBTaylorFormer": {**UNET, "rank": 64, "bins": 4, "threshold": 64},
}


def build(network, **changes):
    return ARCHS.build({"type": network, **NETWORKS[network], **changes})


@pytest.mark.parametrize(
    ("network", "changes", "message"),
    [
        ("WildCatSST", {"attention": "corset"}, "unknown attention 'corset'; did you mean coreset"),
        ("WildCatSST", {"attention": "taylor"}, "unknown attention 'taylor'.*Known: coreset, exact, mean"),
        ("WildCatMBTaylorFormer", {"attention": "mean"}, "unknown attention 'mean'.*Known: coreset, exact, taylor"),
        ("WildCatSST", {"rank": (64,)}, r"rank must have one entry per layer \(2\), got \(64,\)"),
        ("WildCatMBTaylorFormer", {"bins": (4, 4)}, r"bins must have one entry per layer \(4\), got \(4, 4\)"),
        ("WildCatSST", {"rank": (64, 0)}, r"rank\[1\] must be an integer of at least 1, got 0"),
        ("WildCatSST", {"bins": 2.0}, r"bins\[0\] must be an integer of at least 1, got 2\.0"),
        ("WildCatSST", {"rank": 4, "bins": (2, 8)}, r"bins\[1\]=8 must not be above rank\[1\]=4"),
        ("WildCatSST", {"threshold": 0}, "threshold must be an integer of at least 1, got 0"),
        ("WildCatMBTaylorFormer", {"threshold": 1.5}, "threshold must be an integer.*1.5"),
        ("WildCatSST", {"fallback_gamma": 0}, "fallback_gamma must be a positive number or None, got 0"),
        ("WildCatMBTaylorFormer", {"fallback_gamma": math.nan}, "fallback_gamma must be a positive number.*nan"),
        ("WildCatSST", {"window_sizes": (8, -1)}, r"window_sizes\[1\] must be an integer of at least 0, got -1"),
        ("WildCatSST", {"attn_type": "RPB"}, "takes no table of positions.*windows of 32; take attention=exact"),
        ("WildCatSST", {"attn_type": "RPB", "attention": "mean"}, "attention=mean takes no table of positions"),
        ("WildCatSST", {"window_sizes": (32, 32)}, "takes no shifted windows.*32 throughout.*attention=exact"),
        ("WildCatSST", {"attn_type": "RPB", "window_sizes": (8, 0), "attention": "exact"}, "none for a whole image"),
        ("WildCatMBTaylorFormer", {"qk_norm": 0}, "qk_norm must be a positive number, got 0"),
        ("WildCatMBTaylorFormer", {"normalise": False, "attention": "taylor"}, "does nothing by normalise=false;"),
        (
            "WildCatMBTaylorFormer",
            {"learned_temperature": True, "attention": "taylor"},
            "learned_temperature=true; leave that out, or take attention=exact",
        ),
    ],
    ids=lambda value: re.sub(r"[^\w., ]", "", str(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused_in_words(network, changes, message):
    with pytest.raises(ValueError, match=message):
        build(network, **changes)


def test_plain_sst_has_no_window_of_zero():
    with pytest.raises(ValueError, match=r"window_sizes\[1\] must be an integer of at least 1, got 0"):
        ARCHS.build({"type": "SST", **SST, "window_sizes": (8, 0)})
