"""Inputs that coreset attention is judged on: as random, as spread and as placed as they say."""

import math

import pytest
import torch

from kernels.coreset_attention import cases


@pytest.fixture
def image():
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(1, 3, 6, 7, generator=generator, dtype=torch.float64)
    return torch.nn.functional.interpolate(coarse, (40, 50), mode="bilinear")[0]


def test_gaussian_inputs_are_drawn_query_first():
    q, k, v = cases.gaussian_inputs(7, 3, queries=5, seed=4)
    generator = torch.Generator().manual_seed(4)
    for found, size in ((q, 5), (k, 7), (v, 7)):
        assert found.equal(torch.randn(1, 1, size, 3, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("std", [1.0, 3.0])
def test_logits_of_a_photograph_have_the_spread_asked_for(image, std):
    q, k, v = cases.photo_inputs(image, side=12, d=8, logit_std=std)
    logits = q @ k.transpose(-2, -1) / math.sqrt(8)
    assert logits.std(dim=-1, correction=0).mean().item() == pytest.approx(std, rel=1e-9)
    assert [x.shape for x in (q, k, v)] == [(1, 1, 144, 8)] * 3


def test_a_crop_depends_on_its_own_pixels_alone(image):
    other = image.clone()
    other[:, 12:] = 0
    other[:, :, 12:] = 1
    for one, two in zip(*(cases.photo_inputs(x, side=12, d=4, place="corner") for x in (image, other)), strict=True):
        assert one.equal(two)
    middle = image[:, 14:26, 19:31]
    whole, cut = (cases.photo_inputs(x, side=12, d=4, place=p)[1] for x, p in ((image, "middle"), (middle, "corner")))
    assert whole.equal(cut)


def test_the_same_seed_gives_the_same_features(image):
    first, again, other = (cases.photo_inputs(image, side=8, d=4, seed=seed)[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_logits_of_a_window_are_content_and_a_bias_that_is_largest_at_home(image):
    settings = {"d": 4, "logit_std": 2.0, "seed": 5}
    q, k, v = cases.window_inputs(image, window=9, amplitude=3.0, rank=6, **settings)
    content_q, content_k, content_v = cases.photo_inputs(image, side=9, **settings)
    bias = (q @ k.transpose(-2, -1) - content_q @ content_k.transpose(-2, -1) / 2)[0, 0]
    torch.testing.assert_close(bias.diagonal(), torch.full((81,), 3.0, dtype=torch.float64))
    assert bias.max().item() == pytest.approx(3)
    # of the distance alone: one step right is the same everywhere
    torch.testing.assert_close(bias[0, 1], bias[40, 41])
    assert v.equal(content_v)
    assert q.shape == (1, 1, 81, 10)


def test_an_amplitude_of_zero_leaves_the_content_alone(image):
    q, _, _ = cases.window_inputs(image, window=9, d=4, amplitude=0)
    assert not q[..., 4:].any()


def test_gamma_is_the_largest_logit_over_the_log_of_the_keys():
    q = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 5.0], [1.0, 1.0]]]], dtype=torch.float64)
    assert cases.gamma(q, k, scale=0.5).item() == pytest.approx(0.5 * 5 * 2 / math.log(2))


def test_the_relative_error_of_the_mean_value_is_one():
    exact, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    mean = v.mean(dim=-2, keepdim=True).expand_as(exact)
    assert cases.relative_error(mean, exact, v) == pytest.approx(1)
    assert cases.relative_error(exact, exact, v) == 0
    assert cases.relative_error(2 * exact - mean, exact, v) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"side": 41}, "side must be within 2 and the image's 40, got 41"),
        ({"side": 1}, "side must be within 2"),
        ({"place": "centre"}, "place must be one of middle, corner, got 'centre'"),
    ],
)
def test_a_crop_that_is_not_there_is_refused(image, change, message):
    with pytest.raises(ValueError, match=message):
        cases.photo_inputs(image, **{"side": 8, "d": 4, **change})


def test_images_of_other_shapes_or_one_colour_are_refused():
    with pytest.raises(ValueError, match=r"image must be \(3, h, w\), got \(1, 9, 9\)"):
        cases.photo_inputs(torch.rand(1, 9, 9), side=8, d=4)
    with pytest.raises(ValueError, match="the 8 x 8 crop has one colour"):
        cases.photo_inputs(torch.full((3, 9, 9), 0.3), side=8, d=4)
    with pytest.raises(ValueError, match="rank must be even"):
        cases.window_inputs(torch.rand(3, 9, 9), window=8, d=4, amplitude=1, rank=5)
