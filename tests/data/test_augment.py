"""Crops and flips: where they may fall, and that a sample's pictures move together."""

import numpy as np
import pytest

from data.augment import draw_crop, draw_textured_crop, flip_and_rotate, texture


def test_crops_reach_every_place_and_no_other():
    rng = np.random.default_rng(0)
    places = {draw_crop((6, 5), (4, 4), rng) for _ in range(300)}
    assert places == {(top, left) for top in range(3) for left in range(2)}


def test_a_crop_as_large_as_the_picture_fits_and_a_larger_one_does_not():
    assert draw_crop((4, 4), (4, 4), np.random.default_rng(0)) == (0, 0)
    with pytest.raises(ValueError, match="does not fit"):
        draw_crop((4, 4), (5, 4), np.random.default_rng(0))


def test_flips_and_turns_give_the_eight_positions_equally_often():
    image = np.arange(4).reshape(2, 2, 1)
    rng = np.random.default_rng(0)
    drawn = [flip_and_rotate([image], rng, use_hflip=True, use_rot=True)[0].tobytes() for _ in range(4000)]
    counts = [drawn.count(position) for position in set(drawn)]
    assert len(counts) == 8
    assert min(counts) > 400


@pytest.mark.parametrize(("hflip", "rot", "positions"), [(False, False, 1), (True, False, 2), (False, True, 4)])
def test_each_option_turns_only_its_own_moves_on(hflip, rot, positions):
    image = np.arange(4).reshape(2, 2, 1)
    rng = np.random.default_rng(0)
    drawn = {flip_and_rotate([image], rng, use_hflip=hflip, use_rot=rot)[0].tobytes() for _ in range(200)}
    assert len(drawn) == positions


def test_all_pictures_of_a_sample_move_together(noise):
    image = noise((6, 6, 3))
    for seed in range(20):
        one, two = flip_and_rotate([image, image], np.random.default_rng(seed), use_hflip=True, use_rot=True)
        np.testing.assert_array_equal(one, two)


def test_texture_is_counted_in_eight_bit_levels_at_any_depth():
    ramp = np.tile(np.arange(0, 100, 5, dtype=np.uint8)[:, None, None], (1, 9, 1))
    assert texture(ramp) == pytest.approx(5)
    assert texture(ramp.astype(np.uint16) * 257) == pytest.approx(5, rel=1e-5)
    assert texture(np.repeat(ramp, 3, axis=2)) == pytest.approx(5, rel=1e-5)


def test_smooth_places_are_drawn_again_and_the_best_is_kept(noise):
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, 40:] = noise((64, 24, 3))
    crops = [draw_textured_crop(image, (16, 16), 4, 10, np.random.default_rng(seed)) for seed in range(200)]
    assert all(top % 4 == left % 4 == 0 for top, left in crops)
    textured = sum(texture(image[top : top + 16, left : left + 16]) > 10 for top, left in crops)
    assert textured > 190
    plain = [draw_textured_crop(image, (16, 16), 4, 0, np.random.default_rng(seed)) for seed in range(200)]
    assert sum(left + 16 <= 40 for _, left in plain) > 60
    flat = np.zeros((20, 20, 1), np.uint8)
    assert draw_textured_crop(flat, (8, 8), 1, 10, np.random.default_rng(0)) is not None
