"""The options of MB-TaylorFormer: what the published files say, what has no effect, what is refused."""

import logging
import math
import re

import pytest
import torch

from archs import ARCHS
from archs.mb_taylorformer import MBTaylorFormer, MBTaylorFormerV2

UNET = {"dim": (8, 16, 16, 24), "num_blocks": (1, 1, 1, 1), "heads": (1, 2, 4, 6), "num_path": (2, 1, 3, 2)}
VERSIONS = {"MBTaylorFormer": MBTaylorFormer, "MBTaylorFormerV2": MBTaylorFormerV2}
by_version = pytest.mark.parametrize("version", VERSIONS)
# what a published file says and the network does
PUBLISHED = {"num_refinement_blocks": 1, "ffn_expansion_factor": 2.66, "bias": False, "LayerNorm_type": "BiasFree"}


def build(version, **changes):
    return VERSIONS[version](**{**UNET, **changes})


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@by_version
def test_what_the_published_files_say_is_accepted(version, caplog):
    changes = {**PUBLISHED, "out_channels": 3, "inp_channels": 3, "dual_pixel_task": False, "offset_clamp": [-3, 3]}
    build(
        version,
        **{key: list(value) for key, value in UNET.items()},
        **changes,
        qk_norm={"1": 0.5, "2": 1}.get(version[-1], 0.5),
    )
    assert warnings_of(caplog) == []


@by_version
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_name": 16}, "model_name 16"),
        ({"out_channels": 1}, "out_channels 1 (it is 3)"),
        ({"num_refinement_blocks": 4}, "num_refinement_blocks 4 (it is 1)"),
        ({"ffn_expansion_factor": 2.0}, "ffn_expansion_factor 2.0 (it is 2.66)"),
        ({"LayerNorm_type": "WithBias"}, "LayerNorm_type WithBias (it is BiasFree)"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_an_option_without_effect_is_accepted_with_a_notice(version, changes, words, caplog):
    shapes = {key: v.shape for key, v in build(version, **changes).state_dict().items()}
    (notice,) = warnings_of(caplog)
    assert f"{version}: without effect, as in the published code: {words}" in notice
    assert shapes == {key: v.shape for key, v in build(version).state_dict().items()}


@pytest.mark.parametrize(("name", "value"), [("qk_norm", 0.5), ("N", 3), ("path_emb_dim", 24)])
def test_so_are_those_of_version_2_alone(name, value, caplog):
    build("MBTaylorFormerV2", **{name: value})
    (notice,) = warnings_of(caplog)
    assert f"{name} {value}" in notice


def test_the_published_name_is_version_1_with_a_notice_that_names_version_2(caplog):
    net = ARCHS.build({"type": "MB_TaylorFormer", **UNET})
    assert type(net) is MBTaylorFormer
    (notice,) = warnings_of(caplog)
    assert "network_g.type=MBTaylorFormerV2" in notice


@by_version
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": (8, 12, 16, 24)}, r"dim\[1\] must be twice dim\[0\].*\[8, 12, 16, 24\]"),
        ({"dim": (8, 16, 18, 24), "heads": (1, 1, 1, 1)}, r"dim\[2\] must be a multiple of 4.*18"),
        ({"dim": (8, 16, 16)}, r"dim must have one entry for each of the 4 levels.*\[8, 16, 16\]"),
        ({"dim": (8, 16, 16, 24.0)}, r"dim\[3\] must be an integer.*24\.0"),
        ({"num_blocks": (1, 1, 1, 1, 1)}, r"num_blocks must have one entry.*\[1, 1, 1, 1, 1\]"),
        ({"num_blocks": (1, 0, 1, 1)}, r"num_blocks\[1\] must be an integer of at least 1, got 0"),
        ({"num_path": (2, 2)}, r"num_path must have one entry.*\[2, 2\]"),
        ({"num_path": 2}, r"num_path must have one entry.*2"),
        ({"num_path": (0, 2, 2, 2)}, r"num_path\[0\] must be an integer of at least 1, got 0"),
        ({"heads": (1, 2, 4)}, r"heads must have one entry.*\[1, 2, 4\]"),
        ({"heads": (1, 2, 5, 6)}, r"heads\[2\] must divide dim\[2\]=16, got 5"),
        ({"offset_clamp": (3, -3)}, r"offset_clamp must be \[low, high\].*\(3, -3\)"),
        ({"offset_clamp": (1, 2, 3)}, r"offset_clamp must be \[low, high\].*\(1, 2, 3\)"),
        ({"offset_clamp": (float("nan"), 3)}, r"offset_clamp must be \[low, high\]"),
        ({"offset_clamp": (-math.inf, 3)}, r"offset_clamp must be"),
        ({"offset_clamp": (-3, math.inf)}, r"offset_clamp must be"),
        ({"offset_clamp": 3}, r"offset_clamp must be"),
        ({"inp_channels": 0}, "inp_channels must be an integer of at least 1, got 0"),
    ],
    ids=lambda value: re.sub(r"[^\w., ]", "", str(value)) if isinstance(value, dict) else "",
)
def test_an_argument_out_of_its_range_is_refused_with_its_name_and_value(version, changes, message):
    with pytest.raises(ValueError, match=message):
        build(version, **changes)


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("MBTaylorFormer", {"qk_norm": 0}, "qk_norm must be a positive number, got 0"),
        ("MBTaylorFormer", {"qk_norm": float("nan")}, "qk_norm must be a positive number, got nan"),
        ("MBTaylorFormerV2", {"focus_power": 1}, "focus_power must be an integer of at least 2, got 1"),
        ("MBTaylorFormerV2", {"focus_power": 4.0}, r"focus_power must be an integer of at least 2, got 4\.0"),
    ],
)
def test_so_are_those_of_one_version(version, changes, message):
    with pytest.raises(ValueError, match=message):
        build(version, **changes)


@by_version
@pytest.mark.parametrize("size", [(9, 8), (8, 20), (0, 8), (4, 8)], ids=str)
def test_a_size_that_is_no_multiple_of_eight_is_refused(version, size):
    with pytest.raises(ValueError, match=re.escape(f"multiples of 8, got {size}")):
        build(version)(torch.rand(1, 3, *size))


@by_version
@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8)], ids=str)
def test_what_is_no_image_of_its_channels_is_refused(version, shape):
    with pytest.raises(ValueError, match=re.escape(f"x must be (b, 3, h, w), got {shape}")):
        build(version)(torch.rand(shape))
