"""What the datasets hand out: values, sizes, alignment, and everything fixed by (seed, epoch, index)."""

import numpy as np
import pytest
import torch

from data import DATASETS
from data.augment import draw_reduced_crop
from data.clean import DownsampleImageDataset
from data.degrade import CONTEXT, bicubic_downsample, bicubic_downsample_crop
from data.io import read_image, to_float, write_image
from data.paired import PairedImageDataset
from data.resize import imresize
from data.single import SingleImageDataset
from options.errors import DataError, OptionsError


def paired(folders, **changed):
    plain = {"dataroot_gt": folders.gt, "dataroot_lq": folders.lq, "filename_tmpl": "{}x2", "scale": 2, "gt_size": 32}
    return PairedImageDataset(**{**plain, "use_hflip": True, "use_rot": True, "seed": 1, **changed})


def downsampled(folders, **changed):
    plain = {"dataroot_gt": folders.gt, "scale": 2, "gt_size": 32, "use_hflip": True, "use_rot": True, "seed": 1}
    return DownsampleImageDataset(**{**plain, **changed})


def to_array(tensor):
    """(h, w, c) uint8"""
    return np.round(tensor.numpy() * 255).astype(np.uint8).transpose(1, 2, 0)


def test_the_datasets_are_registered():
    assert {"PairedImageDataset", "SingleImageDataset", "DownsampleImageDataset"} <= set(DATASETS.names())


def test_a_validation_item_is_the_whole_picture_to_the_bit(pair_folders):
    item = paired(pair_folders, phase="val")[0]
    gt, lq = read_image(item["gt_path"]), read_image(item["lq_path"])
    assert item["gt"].dtype == item["lq"].dtype == torch.float32
    np.testing.assert_array_equal(item["gt"].numpy(), to_float(gt).transpose(2, 0, 1))
    np.testing.assert_array_equal(item["lq"].numpy(), to_float(lq).transpose(2, 0, 1))
    assert item["name"] == "1x2"


@pytest.mark.parametrize("index", range(6))
def test_lq_and_gt_crops_lie_above_each_other(pair_folders, index):
    dataset = paired(pair_folders)
    for epoch in range(6):
        item = dataset[epoch, index]
        assert item["gt"].shape == (3, 32, 32)
        assert item["lq"].shape == (3, 16, 16)
        again = bicubic_downsample(item["gt"].numpy().transpose(1, 2, 0).astype(np.float64), 2).transpose(2, 0, 1)
        # the border of the crop was reduced with other neighbours; elsewhere only rounding differs
        assert np.abs(again - item["lq"].numpy())[:, 2:-2, 2:-2].mean() < 0.6 / 255


@pytest.mark.parametrize("make", [paired, downsampled])
def test_a_sample_depends_on_seed_epoch_and_index_alone(pair_folders, make):
    one, two = make(pair_folders), make(pair_folders)
    _ = two[3, 2], two[0, 0]
    torch.manual_seed(99)
    assert one[5, 2]["gt"].equal(two[5, 2]["gt"])
    assert one[5, 2]["lq"].equal(two[5, 2]["lq"])
    assert not one[5, 2]["gt"].equal(one[6, 2]["gt"])
    assert not one[5, 2]["gt"].equal(make(pair_folders, seed=2)[5, 2]["gt"])
    assert one[2]["gt"].equal(one[0, 2]["gt"])


@pytest.mark.parametrize("keep", ["decoded", "encoded"])
@pytest.mark.parametrize("make", [paired, downsampled])
def test_memory_gives_what_disk_gives(pair_folders, make, keep):
    disk, memory = make(pair_folders), make(pair_folders, io_backend={"type": "memory", "keep": keep})
    memory.preload()
    for key in [(0, 0), (1, 3), (1, 3), (2, 5)]:
        assert disk[key]["lq"].equal(memory[key]["lq"])
        assert disk[key]["gt"].equal(memory[key]["gt"])


@pytest.mark.parametrize("keep", ["decoded", "encoded"])
def test_memory_reads_each_file_once(pair_folders, monkeypatch, keep):
    dataset = downsampled(pair_folders, io_backend={"type": "memory", "keep": keep})
    dataset.preload()
    monkeypatch.setattr(dataset.gt.source, "read", lambda name: pytest.fail(f"{name} was read again"))
    for index in range(len(dataset)):
        assert dataset[4, index]["gt"].shape == (3, 32, 32)


@pytest.mark.parametrize("phase", ["train", "val"])
def test_made_low_resolution_equals_a_prepared_folder(pair_folders, phase):
    made, prepared = downsampled(pair_folders, phase=phase), paired(pair_folders, phase=phase)
    for index in range(pair_folders.count):
        assert made[3, index]["gt"].equal(prepared[3, index]["gt"])
        assert made[3, index]["lq"].equal(prepared[3, index]["lq"])


def test_a_patch_can_be_reduced_by_itself(pair_folders):
    item = downsampled(pair_folders, downsample="patch", use_hflip=False, use_rot=False)[0]
    np.testing.assert_array_equal(
        to_float(bicubic_downsample(to_array(item["gt"]), 2)).transpose(2, 0, 1), item["lq"].numpy()
    )


@pytest.mark.parametrize("scale", [3, 4])
def test_a_gt_is_cut_to_a_multiple_of_the_scale(tmp_path, noise, scale):
    write_image(tmp_path / "a.png", noise((25, 31, 3)))
    item = DownsampleImageDataset(dataroot_gt=str(tmp_path), scale=scale, phase="val")[0]
    sides = 25 // scale, 31 // scale
    assert item["lq"].shape == (3, *sides)
    assert item["gt"].shape == (3, sides[0] * scale, sides[1] * scale)


def test_sixteen_bits_reach_the_tensor(tmp_path, noise):
    image = noise((20, 20, 3), np.uint16)
    write_image(tmp_path / "a.png", image)
    item = DownsampleImageDataset(dataroot_gt=str(tmp_path), scale=2, phase="val")[0]
    np.testing.assert_array_equal(np.round(item["gt"].numpy() * 65535).transpose(1, 2, 0), image)
    np.testing.assert_array_equal(np.round(item["lq"].numpy() * 65535).transpose(1, 2, 0), bicubic_downsample(image, 2))


@pytest.mark.parametrize(("color", "channels"), [("rgb", 3), ("gray", 1), ("y", 1)])
@pytest.mark.parametrize("stored", [1, 3])
def test_the_channels_are_those_asked_for(tmp_path, noise, color, channels, stored):
    grey = noise((20, 20, 1))
    write_image(tmp_path / "a.png", np.repeat(grey, stored, axis=2))
    item = DownsampleImageDataset(dataroot_gt=str(tmp_path), scale=2, phase="val", color=color)[0]
    assert item["lq"].shape == (channels, 10, 10)
    expected = grey[..., 0] / 255 * ((235 - 16) / 255) + 16 / 255 if color == "y" else grey[..., 0] / 255
    np.testing.assert_allclose(item["gt"][0], expected, atol=1e-6)


def test_a_single_dataset_has_no_gt(pair_folders):
    item = SingleImageDataset(dataroot_lq=pair_folders.lq)[0]
    assert sorted(item) == ["lq", "lq_path", "name"]
    with pytest.raises(OptionsError, match="no ground truth to train on"):
        SingleImageDataset(dataroot_lq=pair_folders.lq, phase="train")


@pytest.mark.parametrize("make", [paired, downsampled])
def test_pictures_smaller_than_the_crop_are_refused_before_training(pair_folders, make):
    with pytest.raises(DataError, match=r"6 problems.*\n.*1\.png is 66x80, smaller than gt_size 128.*small: pad"):
        make(pair_folders, gt_size=128)
    assert make(pair_folders, gt_size=128, phase="val")[0]["gt"].shape[1:] == (66, 80)


def test_padded_pictures_keep_lq_and_gt_above_each_other(tmp_path, noise):
    lq = noise((7, 9, 3))
    write_image(tmp_path / "lq" / "a.png", lq)
    write_image(tmp_path / "gt" / "a.png", lq.repeat(3, axis=0).repeat(3, axis=1))
    dataset = PairedImageDataset(
        dataroot_gt=str(tmp_path / "gt"),
        dataroot_lq=str(tmp_path / "lq"),
        scale=3,
        gt_size=60,
        small="pad",
        use_rot=True,
    )
    for epoch in range(4):
        item = dataset[epoch, 0]
        assert item["gt"].shape == (3, 60, 60)
        assert item["gt"].equal(item["lq"].repeat_interleave(3, 1).repeat_interleave(3, 2))


@pytest.mark.parametrize("make", [paired, downsampled])
def test_textured_crops_are_preferred(pair_folders, make):
    def texture(dataset):
        items = [dataset[epoch, index]["gt"] for epoch in range(20) for index in range(6)]
        return np.mean([(g.diff(dim=1).abs().mean() + g.diff(dim=2).abs().mean()).item() for g in items])

    assert texture(make(pair_folders, min_texture=30)) > texture(make(pair_folders)) * 1.1


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_reduced_ground_truth_has_its_low_resolution_picture_above_it(pair_folders, scale):
    dataset = downsampled(
        pair_folders, scale=scale, gt_size=12 * scale, gt_scales=[0.6, 0.8], use_hflip=False, use_rot=False
    )
    inner, seen_beyond = slice(CONTEXT, -CONTEXT), 0
    for epoch in range(20):
        for index in range(len(dataset)):
            item = dataset[epoch, index]
            gt, lq = (to_array(item[key]) for key in ("gt", "lq"))
            assert gt.shape == (12 * scale, 12 * scale, 3)
            alone = bicubic_downsample(gt, scale)
            assert np.array_equal(alone[inner, inner], lq[inner, inner])
            seen_beyond += not np.array_equal(alone, lq)
    # the outer pixels are made of what lies around the crop, too
    assert seen_beyond > 100


def test_ground_truth_is_reduced_by_the_factors_drawn(tmp_path):
    # twice as steep where it is half as large
    slope = np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (200, 1, 3))
    write_image(tmp_path / "slope.png", slope)
    dataset = DownsampleImageDataset(dataroot_gt=str(tmp_path), scale=2, gt_size=32, gt_scales=[1, 0.5])
    steps = {round(np.diff(to_array(dataset[e, 0]["gt"]).astype(float), axis=1).mean(), 1) for e in range(20)}
    assert steps == {1.0, 2.0}


def test_ground_truth_is_never_reduced_below_the_crop(pair_folders):
    whole = downsampled(pair_folders, gt_size=64, gt_scales=[0.1])
    for index in range(len(whole)):
        assert whole[0, index]["gt"].shape == (3, 64, 64)


def test_a_reduced_crop_at_the_edge_is_that_of_the_reduced_picture(noise):
    image = noise((40, 40, 3))
    settings = {"grid": 2, "min_texture": 0, "rng": np.random.default_rng(0)}
    piece, place = draw_reduced_crop(image, 20, 0.5, margin=4, **settings)
    assert place == (0, 0)
    assert np.array_equal(piece, imresize(image, 0.5))
    assert draw_reduced_crop(image, 40, 0.5, margin=4, **settings)[0] is image
    with pytest.raises(ValueError, match="does not fit"):
        draw_reduced_crop(image, 41, 0.5, margin=4, **settings)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_low_resolution_pixels_see_nothing_of_the_edge_of_a_piece(photos, scale):
    # inside the picture: there is more of it on all sides than the piece has
    image = photos["astronaut"][:500, :500]
    rng = np.random.default_rng(0)
    side, margin = 12 * scale, (CONTEXT + 1) * scale
    found = 0
    for _ in range(20):
        piece, (top, left) = draw_reduced_crop(image, side, 0.6, margin=margin, grid=scale, min_texture=0, rng=rng)
        other = np.zeros_like(piece)
        other[2:-2, 2:-2] = piece[2:-2, 2:-2]
        places = [start // scale for start in (top, left)]
        if min(top, left) >= CONTEXT * scale and min(piece.shape[:2]) >= side + 2 * margin:
            lq, same = (bicubic_downsample_crop(x, scale, places, (12, 12)) for x in (piece, other))
            assert np.array_equal(lq, same)
            found += 1
    assert found > 10


def test_reduced_crops_are_drawn_by_seed_epoch_and_index_and_by_texture(pair_folders):
    dataset, again = (downsampled(pair_folders, gt_scales=[0.6], gt_size=24) for _ in range(2))
    assert dataset[3, 1]["gt"].equal(again[3, 1]["gt"])
    assert not dataset[3, 1]["gt"].equal(dataset[4, 1]["gt"])

    def contrast(dataset):
        items = [dataset[epoch, index]["gt"] for epoch in range(20) for index in range(6)]
        return np.mean([item.diff(dim=2).abs().mean().item() for item in items])

    assert contrast(downsampled(pair_folders, gt_scales=[0.6], gt_size=24, min_texture=30)) > contrast(dataset) * 1.05


@pytest.mark.parametrize("scales", [[], [0], [1.5], [True], 0.5, "0.5", ["half"], [float("nan")]], ids=repr)
def test_wrong_factors_are_refused(pair_folders, scales):
    with pytest.raises(OptionsError, match=r"gt_scales: .* is no list of factors above 0 and up to 1"):
        downsampled(pair_folders, gt_scales=scales)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gt_size": 33}, "gt_size: 33 is not a multiple of scale 2; take 32 or 34"),
        ({"gt_size": 1}, "take 2"),
        ({"gt_size": None}, "a train set needs it"),
        ({"scale": 0}, "scale: 0"),
        ({"seed": -1}, "seed: -1 is below 0"),
        ({"scale": 1.5}, "scale: 1.5"),
        ({"phase": "training"}, "phase: training is not known; did you mean train"),
        ({"color": "rbg"}, "color: rbg is not known; did you mean rgb"),
        ({"alpha": "whit"}, "did you mean white"),
        ({"verify": "ful"}, "did you mean full"),
        ({"small": "padding"}, "small: padding is not known"),
        ({"min_texture": -1}, "min_texture: -1 is below 0"),
    ],
)
@pytest.mark.parametrize("make", [paired, downsampled])
def test_a_wrong_option_is_refused_at_construction(pair_folders, make, changed, message):
    with pytest.raises(OptionsError, match=message):
        make(pair_folders, **changed)


@pytest.mark.parametrize(("key", "value"), [("kernel", "matlba"), ("downsample", "images")])
def test_an_unknown_way_of_reducing_is_refused(pair_folders, key, value):
    with pytest.raises(OptionsError, match=f"{key}: {value} is not known; did you mean"):
        downsampled(pair_folders, **{key: value})
