"""EDSR: the published sizes, BasicSR's state-dict keys, and its formula."""

import pytest
import torch
from torch.nn import functional as F

from archs import ARCHS

# parameters of the published networks, counted from their layers (paper, table 1: 1.5 M and 43 M for x4)
PUBLISHED = [
    ({"upscale": 2}, 1_369_859),
    ({"upscale": 4}, 1_517_571),
    ({"upscale": 2, "num_feat": 256, "num_block": 32, "res_scale": 0.1}, 40_729_603),
    ({"upscale": 3, "num_feat": 256, "num_block": 32, "res_scale": 0.1}, 43_680_003),
    ({"upscale": 4, "num_feat": 256, "num_block": 32, "res_scale": 0.1}, 43_089_923),
]


def build(**arguments):
    return ARCHS.build({"type": "EDSR", "num_feat": 4, "num_block": 2, **arguments})


@pytest.mark.parametrize(("arguments", "count"), PUBLISHED, ids=str)
def test_the_published_sizes(arguments, count):
    with torch.device("meta"):
        net = ARCHS.build({"type": "EDSR", **arguments})
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.parametrize(("scale", "convolutions"), [(1, ()), (2, (0,)), (3, (0,)), (4, (0, 2)), (8, (0, 2, 4))])
def test_keys_are_those_of_basicsr(scale, convolutions):
    layers = ["conv_first", "body.0.conv1", "body.0.conv2", "body.1.conv1", "body.1.conv2", "conv_after_body"]
    layers += [*(f"upsample.{i}" for i in convolutions), "conv_last"]
    expected = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
    assert list(build(upscale=scale).state_dict()) == expected


def test_the_output_is_that_of_the_formula():
    net = build(upscale=2, res_scale=0.3, img_range=10.0, rgb_mean=(0.1, 0.2, 0.3)).double()
    weights = net.state_dict()

    def conv(x, name):
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    x = torch.rand(2, 3, 5, 7, dtype=torch.float64)
    mean = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64).view(3, 1, 1)
    first = y = conv((x - mean) * 10, "conv_first")
    for i in range(2):
        y = y + 0.3 * conv(conv(y, f"body.{i}.conv1").clamp(min=0), f"body.{i}.conv2")
    y = F.pixel_shuffle(conv(conv(y, "conv_after_body") + first, "upsample.0"), 2)
    torch.testing.assert_close(net(x), conv(y, "conv_last") / 10 + mean)


def test_a_gray_image_has_no_mean():
    net = build(num_in_ch=1, num_out_ch=1, upscale=2)
    assert net(torch.rand(1, 1, 4, 4)).shape == (1, 1, 8, 8)
    assert net.mean == (0.0,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"upscale": 6}, "power of two or 3, got 6"),
        ({"upscale": 0}, "upscale"),
        ({"num_block": -1}, "num_block"),
        ({"rgb_mean": (0.5,)}, "rgb_mean needs 3 entries"),
        ({"num_in_ch": 1}, "both images 3 channels or neither"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        build(**wrong)
