"""imresize equals MATLAB's: golden vectors and golden pictures."""

import hashlib

import numpy as np
import pytest

from data import resize
from data.degrade import bicubic_downsample, bicubic_downsample_crop, mod_crop
from data.resize import imresize

# sha256 of the LR bytes, and PSNR of Y after going up again
GOLDEN = {
    ("astronaut", 2): ("86e24d8e2e582de8", 31.7073),
    ("astronaut", 3): ("779d988f4eb5bb0e", 28.6788),
    ("astronaut", 4): ("53ca505a86fd24fa", 26.8382),
    ("chelsea", 2): ("32c3dc5866375fcc", 35.2523),
    ("chelsea", 3): ("2ed826137e6071ec", 32.8899),
    ("chelsea", 4): ("6b81de91ea08eef2", 31.4735),
    ("coffee", 2): ("2356f976210326d9", 30.5924),
    ("coffee", 3): ("53ca2f76eb81d545", 28.4058),
    ("coffee", 4): ("5c42e9762536e700", 27.2914),
}


def psnr_y(pred, gt, border):
    luma = [(image / 255) @ np.array([65.481, 128.553, 24.966]) + 16 for image in (pred, gt)]
    error = (luma[0] - luma[1])[border:-border, border:-border]
    return 10 * np.log10(255**2 / np.mean(error**2))


@pytest.mark.parametrize(("name", "scale"), GOLDEN)
def test_a_reduced_photograph_has_the_bytes_of_matlab(photos, name, scale):
    lq = imresize(mod_crop(photos[name], scale), 1 / scale)
    assert hashlib.sha256(lq.tobytes()).hexdigest().startswith(GOLDEN[name, scale][0])


@pytest.mark.parametrize(("name", "scale"), GOLDEN)
def test_bicubic_up_again_has_the_published_psnr(photos, name, scale):
    gt = mod_crop(photos[name], scale)
    assert psnr_y(imresize(imresize(gt, 1 / scale), scale), gt, scale) == pytest.approx(
        GOLDEN[name, scale][1], abs=1e-4
    )


@pytest.mark.parametrize(
    ("squares", "scale", "expected"),
    [
        (12, 1 / 2, [0.300781, 6.261719, 20.25, 42.25, 72.519531, 111.417969]),
        (12, 1 / 3, [1.098765, 16.012346, 49.283951, 102.271605]),
        (12, 1 / 4, [2.390137, 30.636719, 93.473145]),
        (4, 2, [-0.09375, 0.132812, 0.585938, 1.5625, 3.0625, 5.226562, 8.054688, 9.46875]),
    ],
)
def test_float_vectors_are_neither_rounded_nor_clipped(squares, scale, expected):
    columns = np.tile((np.arange(squares) ** 2.0)[:, None], (1, 5))
    np.testing.assert_allclose(imresize(columns, scale)[:, 0], expected, atol=1e-6)
    np.testing.assert_allclose(imresize(columns.T, scale)[0], expected, atol=1e-6)


def test_the_synthetic_ramp_has_the_known_samples():
    y, x, c = np.mgrid[:48, :60, :3]
    ramp = ((3 * x + 5 * y + 40 * c) % 256).astype(np.float64)
    half, third, quarter, double = (imresize(ramp, scale) for scale in (1 / 2, 1 / 3, 1 / 4, 2))
    assert (half.shape, third.shape, quarter.shape, double.shape) == (
        (24, 30, 3),
        (16, 20, 3),
        (12, 15, 3),
        (96, 120, 3),
    )
    np.testing.assert_allclose(half[0, 0], [3.5938, 43.5938, 83.5938], atol=1e-4)
    np.testing.assert_allclose(half[3, 5], [64, 104, 144], atol=1e-4)
    np.testing.assert_allclose(third[0, 0], [7.2099, 47.2099, 87.2099], atol=1e-4)
    np.testing.assert_allclose(quarter[0, 0], [10.8789, 50.8789, 90.8789], atol=1e-4)
    np.testing.assert_allclose(quarter[3, 5], [132, 172, 211.7623], atol=1e-4)
    np.testing.assert_allclose(double[0, 0], [-0.75, 39.25, 79.25], atol=1e-4)


def test_integers_are_rounded_half_up_and_clipped_after_the_rows_and_again_after_the_columns(noise):
    image = noise((23, 31))
    rows = np.clip(np.floor(imresize(np.repeat(image, 2, 1).astype(float), 0.5) + 0.5), 0, 255)
    assert rows.shape == (12, 31)
    once = np.clip(np.floor(_rows_only(image, 0.5) + 0.5), 0, 255)
    twice = np.clip(np.floor(_rows_only(once.T, 0.5).T + 0.5), 0, 255)
    np.testing.assert_array_equal(imresize(image, 0.5), twice)


def _rows_only(image, scale):
    """One pass over the rows in floating point: constant columns are left alone by the other pass."""
    return np.stack([imresize(np.tile(column[:, None], (1, 2)).astype(float), scale)[:, 0] for column in image.T], 1)


def test_sixteen_bits_stay_sixteen_bits():
    image = np.full((9, 9, 3), 65535, np.uint16)
    image[4:] = 0
    small = imresize(image, 0.5)
    assert small.dtype == np.uint16
    assert small.max() == 65535


@pytest.mark.parametrize(
    ("shape", "scale", "expected"), [((7, 5), 0.5, (4, 3)), ((7, 5, 1), 2, (14, 10, 1)), ((1, 1), 3, (3, 3))]
)
def test_sides_are_rounded_up(shape, scale, expected, noise):
    assert imresize(noise(shape), scale).shape == expected


def test_every_picture_size_divided_by_its_own_factor_has_the_exact_side():
    for factor in range(2, 13):
        sides = [imresize(np.zeros((factor * n, 1)), 1 / factor).shape[0] for n in (1, 7, 49, 107)]
        assert sides == [1, 7, 49, 107]


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.int64), np.zeros(4), np.zeros((0, 4))], ids=["int64", "1-D", "empty"]
)
def test_a_picture_that_cannot_be_resized_is_refused(image):
    with pytest.raises(ValueError, match="image must be"):
        imresize(image, 0.5)


@pytest.mark.parametrize("scale", [0, -1, float("nan")])
def test_a_scale_must_be_above_zero(scale):
    with pytest.raises(ValueError, match="scale must be above 0"):
        imresize(np.zeros((4, 4)), scale)


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_a_low_resolution_crop_is_the_crop_of_the_reduced_picture(photos, scale):
    image = photos["chelsea"][:121, :143]
    whole = bicubic_downsample(image, scale)
    rng = np.random.default_rng(scale)
    crop = (8, 12)
    corners = [(0, 0), (whole.shape[0] - crop[0], whole.shape[1] - crop[1])]
    inner = [(int(rng.integers(whole.shape[0] - 8)), int(rng.integers(whole.shape[1] - 12))) for _ in range(20)]
    for top, left in corners + inner:
        part = bicubic_downsample_crop(image, scale, (top, left), crop)
        np.testing.assert_array_equal(part, whole[top : top + 8, left : left + 12])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("factor", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (97, 12)], ids=str)
def test_the_quick_sums_of_whole_factors_equal_the_general_ones_in_every_bit(noise, factor, dtype, shape):
    image = noise(shape, np.uint16).astype(dtype)
    rows, weights = resize._taps(shape[0], 1 / factor)
    quick = resize._reduce_evenly(image, rows, weights, factor)
    general = resize._reduce(image, rows, weights, factor)
    np.testing.assert_array_equal(quick.astype(np.float64), general)


def test_float32_is_used_only_where_no_sum_is_rounded():
    exact = {factor for factor in range(2, 9) if resize._is_exact(tuple(resize._taps(64, 1 / factor)[1][0].tolist()))}
    assert exact == {2, 4}
