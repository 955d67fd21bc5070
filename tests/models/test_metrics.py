"""PSNR and SSIM against printed values of BasicSR and scikit-image, and what they refuse."""

import numpy as np
import pytest
import skimage.data
from skimage.metrics import structural_similarity

from models.metrics import METRICS, calculate_psnr, calculate_ssim, rgb_to_y

# crop: PSNR of RGB, of luma, SSIM of RGB, of luma, as BasicSR prints them for the pair below
BASICSR = {
    0: (42.155172, 46.062302, 0.985700, 0.993703),
    2: (42.156422, 46.066697, 0.986053, 0.994009),
    4: (42.156735, 46.066791, 0.986452, 0.994366),
}


def _pair():
    """The pictures of the table; its formula counts channels in BGR order."""
    y, x, c = np.mgrid[0:48, 0:60, 0:3]
    a = (3 * x + 5 * y + 40 * c) % 256
    b = np.clip(a + (x + 2 * y + c) % 7 - 3, 0, 255)
    return a[..., ::-1].astype(np.uint8), b[..., ::-1].astype(np.uint8)


def _noisy(image, level=12.0):
    noise = np.random.default_rng(0).normal(0, level, image.shape)
    return np.clip(image + noise, 0, 255).round().astype(np.uint8)


@pytest.mark.parametrize("crop", BASICSR)
def test_the_values_are_those_of_basicsr(crop):
    a, b = _pair()
    values = [f(a, b, crop, test_y_channel=luma) for f in (calculate_psnr, calculate_ssim) for luma in (False, True)]
    np.testing.assert_allclose(values, BASICSR[crop], rtol=0, atol=6e-7)


def test_luma_of_the_five_corners_of_bt601():
    colours = np.array([[[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    np.testing.assert_allclose(rgb_to_y(colours), [[16, 235, 81.481, 144.553, 40.966]], rtol=1e-12)


@pytest.mark.parametrize("name", ["astronaut", "chelsea"])
def test_ssim_of_a_photograph_is_that_of_scikit_image(name):
    image = getattr(skimage.data, name)()[:131, :90]
    noisy = _noisy(image)
    expected = structural_similarity(
        image, noisy, channel_axis=2, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=255
    )
    assert calculate_ssim(image, noisy) == pytest.approx(expected, abs=1e-10)


def test_psnr_is_the_peak_over_the_mean_squared_error():
    image = skimage.data.coffee()
    noisy = _noisy(image)
    error = np.mean((image.astype(float) - noisy) ** 2)
    assert calculate_psnr(image, noisy) == pytest.approx(20 * np.log10(255) - 10 * np.log10(error), abs=1e-12)


def test_equal_pictures_reach_the_best_value():
    image = skimage.data.chelsea()[:40, :50]
    assert calculate_psnr(image, image.copy()) == float("inf")
    assert calculate_ssim(image, image.copy()) == pytest.approx(1, abs=1e-12)
    black = np.zeros((16, 16, 3), np.float32)
    assert calculate_psnr(black, black) == float("inf")


def test_the_border_does_not_count():
    a, b = _pair()
    spoilt = b.copy()
    spoilt[:4], spoilt[-4:], spoilt[:, :4], spoilt[:, -4:] = 0, 0, 0, 0
    assert calculate_psnr(a, spoilt, 4) == calculate_psnr(a, b, 4)
    assert calculate_ssim(a, spoilt, 4) == calculate_ssim(a, b, 4)


def test_both_orders_of_channels_agree():
    a, b = _pair()
    for metric in (calculate_psnr, calculate_ssim):
        planes = metric(a.transpose(2, 0, 1), b.transpose(2, 0, 1), 3, input_order="CHW", test_y_channel=True)
        assert planes == pytest.approx(metric(a, b, 3, test_y_channel=True), abs=1e-12)


def test_grey_pictures_are_compared_as_they_are():
    a, b = (picture[..., 0] for picture in _pair())
    for metric in (calculate_psnr, calculate_ssim):
        assert metric(a, b) == metric(a[..., None], b[..., None]) == metric(a, b, test_y_channel=True)


def test_floats_of_0_to_255_score_as_bytes_do():
    a, b = _pair()
    assert calculate_psnr(a.astype(np.float32), b.astype(np.float64)) == calculate_psnr(a, b)


def test_the_pictures_are_left_as_they_are():
    a, b = _pair()
    copies = a.copy(), b.copy()
    calculate_ssim(a, b, 2, test_y_channel=True)
    assert np.array_equal(a, copies[0])
    assert np.array_equal(b, copies[1])


@pytest.mark.parametrize("name", ["calculate_psnr", "calculate_ssim"])
def test_a_metric_says_which_way_is_up(name):
    assert METRICS.get(name).better == "higher"


@pytest.mark.parametrize("metric", [calculate_psnr, calculate_ssim])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:-1], "same shape"),
        (lambda a: a / 255, "looks like 0..1 .*48 dB"),
        (lambda a: a * 1.5, r"must lie in 0..255"),
        (lambda a: a - 300.0, r"must lie in 0..255"),
        (lambda a: np.where(a == a[0, 0, 0], np.nan, a), "must lie in 0..255"),
        (lambda a: a.astype(np.uint16) * 257, "must lie in 0..255"),
        (lambda a: a > 100, "must hold real numbers"),
    ],
    ids=["shape", "0..1", "too bright", "negative", "NaN", "16 bit", "bool"],
)
def test_what_would_score_wrongly_in_silence_is_refused(metric, change, message):
    a, b = _pair()
    with pytest.raises(ValueError, match=message):
        metric(change(a), b)
    with pytest.raises(ValueError, match=message):
        metric(b, change(a))


@pytest.mark.parametrize("crop", [-1, 24, 100])
def test_a_border_that_eats_the_picture_is_refused(crop):
    with pytest.raises(ValueError, match=r"crop_border must be 0..23 for a picture of \(48, 60\)"):
        calculate_psnr(*_pair(), crop)


def test_ssim_needs_room_for_its_window():
    a, b = _pair()
    assert np.isfinite(calculate_ssim(a[:11], b[:11]))
    with pytest.raises(ValueError, match=r"11 pixels a side, got \(10, 60\)"):
        calculate_ssim(a[:10], b[:10])
    with pytest.raises(ValueError, match="after a crop of 19"):
        calculate_ssim(a, b, 19)


def test_luma_needs_three_channels():
    four = np.zeros((16, 16, 4), np.uint8)
    with pytest.raises(ValueError, match=r"RGB picture \(h, w, 3\), got \(16, 16, 4\)"):
        calculate_psnr(four, four, test_y_channel=True)
