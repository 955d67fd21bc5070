"""The reduction of Pillow, and the data set that trains on it."""

import numpy as np
import pytest
from PIL import Image

from data.clean import DownsampleImageDataset
from data.degrade import bicubic_downsample
from data.io import read_image, write_image
from data.pillow import pillow_bicubic
from options.errors import DataError

SIZES = [((96, 96), (48, 48)), ((96, 72), (32, 24)), ((128, 64), (32, 16)), ((17, 23), (5, 7)), ((31, 33), (62, 40))]


def by_pillow(image, size):
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_the_bits_are_those_of_pillow(noise, before, after):
    image = noise((*before, 3))
    # black and white beside each other overshoot, which the 8 bits between the passes cut off
    for picture in (image, (image > 127).astype(np.uint8) * 255, image[..., 0]):
        np.testing.assert_array_equal(pillow_bicubic(picture, after), by_pillow(picture, after))


@pytest.mark.parametrize("wrong", [(np.zeros((4, 4), np.float32), (2, 2)), (np.zeros((4, 4), np.uint8), (0, 2))])
def test_what_pillow_cannot_reduce_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        pillow_bicubic(*wrong)


def crops(folder, **changed):
    """A pair of GT and LQ crops of training, (h, w, 3) uint8, for a few draws."""
    plain = {"dataroot_gt": folder, "scale": 2, "gt_size": 32, "use_hflip": True, "use_rot": True, "kernel": "pillow"}
    dataset = DownsampleImageDataset(**{**plain, **changed})
    for epoch in range(8):
        item = dataset[epoch, 1]
        yield tuple((item[key].numpy().transpose(1, 2, 0) * 255).round().astype(np.uint8) for key in ("gt", "lq"))


def test_a_patch_is_reduced_as_it_comes_out_of_augmentation(pair_folders):
    for gt, lq in crops(pair_folders.gt, downsample="patch"):
        np.testing.assert_array_equal(lq, by_pillow(gt, (16, 16)))


def test_a_crop_of_the_reduced_picture_is_made_without_the_picture(pair_folders):
    picture = read_image(DownsampleImageDataset(dataroot_gt=pair_folders.gt, scale=2, phase="val")[1]["gt_path"])
    whole = bicubic_downsample(picture, 2, kernel="pillow")
    assert whole.tobytes() == by_pillow(picture, whole.shape[:2]).tobytes()
    for _, lq in crops(pair_folders.gt, use_hflip=False, use_rot=False):
        places = np.lib.stride_tricks.sliding_window_view(whole, (16, 16, 3))
        assert (places == lq).all(axis=(-3, -2, -1)).any()


def test_a_picture_of_16_bits_is_refused_with_the_way_out(tmp_path, noise):
    write_image(tmp_path / "deep.png", noise((40, 40, 3), np.uint16))
    dataset = DownsampleImageDataset(dataroot_gt=str(tmp_path), scale=2, gt_size=32, kernel="pillow")
    with pytest.raises(DataError, match=r"deep\.png has 16 bits, .*set kernel: matlab"):
        dataset[0]


def test_the_key_that_published_files_carry_is_told_to_have_no_effect(pair_folders, caplog):
    DownsampleImageDataset(dataroot_gt=pair_folders.gt, scale=2, gt_size=32, filename_tmpl="{}")
    assert "filename_tmpl has no effect" in caplog.text
    assert "set kernel: pillow and downsample: patch (here: kernel matlab, downsample image)" in caplog.text
