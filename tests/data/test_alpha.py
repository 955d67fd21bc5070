"""Transparency beside restored colours."""

import io

import numpy as np
import pytest
from PIL import Image

from data.alpha import enlarge_alpha, spread_colors
from data.io import decode, encode


def test_visible_colours_run_on_under_what_does_not_show():
    colors = np.zeros((9, 14, 3), np.uint8)
    alpha = np.zeros((9, 14, 1), np.uint8)
    colors[2:5, 3:8], alpha[2:5, 3:8] = (200, 100, 50), 255
    spread = spread_colors(colors, alpha)
    assert (spread == (200, 100, 50)).all()


def test_colours_that_show_stay_as_they_are(noise):
    colors, alpha = noise((33, 21, 3), np.uint16), noise((33, 21, 1), np.uint16, seed=1)
    alpha[::3] = 0
    spread = spread_colors(colors, alpha)
    shows = alpha[..., 0] > 0
    assert spread.dtype == np.uint16
    np.testing.assert_array_equal(spread[shows], colors[shows])
    assert (spread[~shows] != colors[~shows]).any()


@pytest.mark.parametrize("value", [0, 255])
def test_nothing_changes_where_all_or_nothing_shows(noise, value):
    colors = noise((5, 6, 3))
    np.testing.assert_array_equal(spread_colors(colors, np.full((5, 6, 1), value, np.uint8)), colors)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_alpha_is_enlarged_without_leaving_its_range(dtype):
    top = np.iinfo(dtype).max
    alpha = np.full((8, 8, 1), top, dtype)
    alpha[:, 4:] = 0
    larger = enlarge_alpha(alpha, 3)
    assert (larger.shape, larger.dtype) == ((24, 24, 1), dtype)
    assert (larger[:, :6] == top).all()
    assert (larger[:, 18:] == 0).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_with_alpha_is_written_as_such(noise, dtype):
    image = noise((13, 7, 2), dtype)
    data = encode(image, ".png")
    np.testing.assert_array_equal(decode(data), image)
    if dtype is np.uint8:
        opened = Image.open(io.BytesIO(data))
        assert opened.mode == "LA"
        np.testing.assert_array_equal(np.asarray(opened), image)
