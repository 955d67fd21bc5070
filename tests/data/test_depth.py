"""Depth fields that are drawn, and depth maps that were measured."""

import numpy as np
import pytest
import skimage.data

from data.depth import FIELD_KINDS, depth_from_disparity, draw_depth_field, read_depth, relative_depth
from data.io import write_image
from options.errors import DataError


def draw(size, seed, kind="mixture"):
    return draw_depth_field(size, np.random.default_rng(seed), kind=kind)


@pytest.mark.parametrize("kind", [*FIELD_KINDS, "mixture"])
def test_a_field_lies_above_zero_and_reaches_one(kind):
    for seed in range(30):
        depth = draw((97, 141), seed, kind).whole()
        assert depth.dtype == np.float32
        assert depth.min() > 0
        # the farthest node may lie between two pixels
        assert 0.99 < depth.max() <= 1


@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_a_window_is_that_part_of_the_whole_to_the_bit(kind):
    field = draw((97, 141), 3, kind)
    np.testing.assert_array_equal(field.window(11, 40, 60, 33), field.whole()[11:71, 40:73])


@pytest.mark.parametrize("kind", [*FIELD_KINDS, "mixture"])
def test_the_same_generator_gives_the_same_field(kind):
    np.testing.assert_array_equal(draw((31, 20), 5, kind).whole(), draw((31, 20), 5, kind).whole())
    assert kind == "constant" or (draw((31, 20), 5, kind).whole() != draw((31, 20), 6, kind).whole()).any()


def test_the_kinds_differ_as_their_names_say():
    changes = {kind: np.abs(np.diff(draw((128, 128), 4, kind).whole(), axis=0)).max() for kind in FIELD_KINDS}
    assert changes["constant"] == 0
    assert 0 < changes["ramp"] < 0.05 < changes["layers"]
    kinds = {changes_of(draw((64, 64), seed).whole()) for seed in range(40)}
    assert kinds == {"constant", "smooth", "steps"}


def test_banks_of_fog_leave_clear_air_between_them():
    thin, dense = np.array(
        [[(d < 0.2).mean(), (d > 0.8).mean()] for d in (draw((64, 96), s, "bank").whole() for s in range(40))]
    ).T
    assert (dense > 0).all()
    assert np.mean(thin > 0.1) > 0.7
    assert np.median(thin) > 0.25


def test_a_list_of_kinds_draws_each_of_them():
    found = {changes_of(draw((64, 64), seed, ["constant", "ramp"]).whole()) for seed in range(20)}
    assert found == {"constant", "smooth"}
    mixed = {changes_of(draw((64, 64), seed, ["mixture"]).whole()) for seed in range(20)}
    assert mixed == {"constant", "smooth", "steps"}


def changes_of(depth):
    largest = np.abs(np.diff(depth, axis=0)).max()
    return "constant" if largest == 0 else "smooth" if largest < 0.1 else "steps"


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (300, 2)])
@pytest.mark.parametrize("kind", FIELD_KINDS)
def test_a_picture_of_any_size_has_a_depth(size, kind):
    depth = draw(size, 0, kind).whole()
    assert depth.shape == size
    assert np.isfinite(depth).all()


def test_an_unknown_kind_is_refused():
    for kinds in ([], ["bank", "slope"]):
        with pytest.raises(ValueError, match="a list of them, got"):
            draw((8, 8), 0, kinds)
    with pytest.raises(ValueError, match="got 'slope'"):
        draw((4, 4), 0, "slope")
    with pytest.raises(ValueError, match="has no depth"):
        draw((0, 4), 0)


@pytest.fixture(scope="module")
def motorcycle():
    """Measured depth in metres; NaN where there is none."""
    disparity = skimage.data.stereo_motorcycle()[2]
    return depth_from_disparity(disparity, 994.978, baseline=0.193001, offset=31.086)


def test_disparity_becomes_metres(motorcycle):
    assert 0.05 < np.isnan(motorcycle).mean() < 0.1
    assert 2 < np.nanmin(motorcycle) < 2.3
    assert 4.5 < np.nanmax(motorcycle) < 5.1


def test_a_measured_map_becomes_usable(motorcycle):
    depth = relative_depth(motorcycle)
    assert depth.shape == motorcycle.shape
    assert np.isfinite(depth).all()
    assert depth.max() == 1
    assert 0.4 < depth.min() < 0.5
    known = np.isfinite(motorcycle)
    low, high = np.percentile(motorcycle[known], (0.5, 99.5))
    np.testing.assert_allclose(depth[known], np.clip(motorcycle[known], low, high) / high, rtol=1e-6)


def test_a_hole_takes_the_farther_of_its_neighbours():
    nan = np.nan
    depth = [[2, nan, nan, 4], [nan, 3, nan, nan], [nan, nan, nan, nan], [nan, nan, 4, 2]]
    filled = relative_depth(np.array(depth)) * np.float32(3.98)
    np.testing.assert_allclose(filled, [[2, 4, 4, 4], [3, 3, 3, 3], [3, 3, 3, 3], [4, 4, 4, 2]], atol=0.05)


def test_a_constant_map_is_one_everywhere():
    np.testing.assert_array_equal(relative_depth(np.full((3, 4), 7)), np.ones((3, 4), np.float32))
    np.testing.assert_array_equal(relative_depth(np.ones((1, 1))), [[1]])


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (np.full((3, 3), np.nan), "holds no finite number"),
        (np.zeros((3, 3)), "depths must be positive"),
        (-np.ones((3, 3)), "depths must be positive"),
        (np.ones((3, 3, 1)), r"must be \(h, w\), got \(3, 3, 1\)"),
        (np.ones((0, 3)), r"must be \(h, w\)"),
    ],
)
def test_a_map_without_depth_is_refused(tmp_path, depth, message):
    with pytest.raises(ValueError, match=message):
        relative_depth(depth)
    np.save(tmp_path / "a", depth)
    with pytest.raises(DataError, match=rf"cannot use the depth map .*a\.npy: .*{message}"):
        read_depth(tmp_path / "a.npy")


def test_a_sixteen_bit_picture_is_read_with_zero_as_a_hole(tmp_path):
    write_image(tmp_path / "a.png", np.array([[1000, 0, 2000]], np.uint16))
    np.testing.assert_allclose(read_depth(tmp_path / "a.png"), [[0.5, 1, 1]], atol=0.01)
    write_image(tmp_path / "b.png", np.ones((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match="3 channels of uint8; a depth map is grey, with 16 bits"):
        read_depth(tmp_path / "b.png")
