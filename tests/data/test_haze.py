"""Haze by the scattering model, and the data set that lays it over clean pictures."""

import numpy as np
import pytest
import torch

from data import DATASETS, build_loader
from data.degrade import AIRLIGHT, BETA, add_haze, draw_haze, transmission
from data.haze import HazeImageDataset
from data.io import read_image, write_image
from options import load
from options.errors import DataError, OptionsError


@pytest.fixture(scope="module")
def clean(tmp_path_factory, photos):
    """A folder with three small photographs."""
    root = tmp_path_factory.mktemp("clean")
    for name, photo in photos.items():
        write_image(root / f"{name}.png", photo[100:164, 100:190])
    return str(root)


def hazy(folder, **changed):
    plain = {"gt_size": 32, "use_hflip": True, "use_rot": True, "seed": 1}
    return HazeImageDataset(dataroot_gt=folder, **{**plain, **changed})


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
def test_clear_air_leaves_a_picture_alone_and_dense_haze_is_the_airlight(noise, dtype):
    image = noise((7, 5, 3), dtype) if np.issubdtype(dtype, np.integer) else noise((7, 5, 3)).astype(dtype) / 255
    top = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1
    clear, dense = (add_haze(image, np.full((7, 5), t, np.float32), airlight=0.8) for t in (1, 0))
    np.testing.assert_array_equal(clear, image)
    assert dense.dtype == dtype
    np.testing.assert_allclose(dense, round(0.8 * top) if top > 1 else 0.8, atol=1e-7)


def test_inverting_the_model_gives_the_picture_back(photos):
    image = photos["coffee"][:60, :80]
    t = np.linspace(0.2, 1, 60 * 80, dtype=np.float32).reshape(60, 80)
    back = (add_haze(image, t, airlight=0.9) - 0.9 * 255 * (1 - t[..., None])) / t[..., None]
    # the file rounds by half a level, which the inverse enlarges
    assert (np.abs(back - image) <= 0.5 / t[..., None] + 1e-3).all()
    exact = (image / 255).astype(np.float64)
    back = (add_haze(exact, t, airlight=0.9) - 0.9 * (1 - t[..., None])) / t[..., None]
    np.testing.assert_allclose(back, exact, atol=1e-5)


def test_haze_is_drawn_from_its_ranges(clean):
    drawn = np.array([draw_haze(np.random.default_rng(seed)) for seed in range(500)])
    for values, (low, high) in zip(drawn.T, (AIRLIGHT, BETA), strict=True):
        assert low <= values.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < values.max() <= high
    assert (AIRLIGHT, BETA) == ((0.7, 1.0), (0.6, 1.8))
    np.testing.assert_allclose(transmission(np.array([0, 0.5, 1], np.float32), 1.2), np.exp([0, -0.6, -1.2]), rtol=1e-6)


@pytest.mark.parametrize(
    ("t", "airlight", "message"), [((4, 5), 0.8, r"\(5, 4\) and a transmission of \(4, 5\)"), ((5, 4), 1.2, "got 1.2")]
)
def test_what_does_not_fit_is_refused(noise, t, airlight, message):
    with pytest.raises(ValueError, match=message):
        add_haze(noise((5, 4, 3)), np.ones(t, np.float32), airlight=airlight)


def test_the_set_is_registered_under_its_name(clean):
    assert DATASETS.get("HazeImageDataset") is HazeImageDataset


@pytest.mark.parametrize("phase", ["val", "test"])
def test_a_judged_picture_is_whole_and_has_the_same_haze_for_ever(clean, phase):
    one, two = hazy(clean, phase=phase), hazy(clean, phase=phase, use_rot=False)
    for index in range(3):
        item = one[index]
        np.testing.assert_array_equal(item["gt"].numpy() * 255, read_image(item["gt_path"]).transpose(2, 0, 1))
        assert item["lq"].equal(two[7, index]["lq"])
        assert item["lq"].equal(hazy(clean, phase=phase, seed=2)[index]["lq"])
        assert not item["lq"].equal(hazy(clean, phase=phase, haze_seed=2)[index]["lq"])


def test_the_haze_of_a_judged_picture_does_not_depend_on_its_neighbours(clean, tmp_path):
    names = [item["name"] for item in hazy(clean, phase="val")]
    write_image(tmp_path / f"{names[-1]}.png", read_image(f"{clean}/{names[-1]}.png"))
    assert hazy(str(tmp_path), phase="val")[0]["lq"].equal(hazy(clean, phase="val")[len(names) - 1]["lq"])


def test_a_hazy_picture_is_what_an_eight_bit_file_would_hold(clean):
    for phase in ("train", "val"):
        levels = hazy(clean, phase=phase)[0]["lq"].numpy() * np.float32(255)
        np.testing.assert_allclose(levels, levels.round(), atol=1e-4)


def test_each_visit_draws_its_own_haze_from_seed_epoch_and_index(clean):
    one, two = hazy(clean), hazy(clean)
    _ = two[4, 1], two[0, 0]
    torch.manual_seed(5)
    assert one[3, 1]["lq"].equal(two[3, 1]["lq"])
    assert one[3, 1]["gt"].shape == one[3, 1]["lq"].shape == (3, 32, 32)
    assert not one[3, 1]["lq"].equal(one[4, 1]["lq"])
    assert not one[3, 1]["lq"].equal(hazy(clean, seed=2)[3, 1]["lq"])


def test_clean_and_hazy_crops_lie_above_each_other(clean):
    dataset = hazy(clean, depth="constant", airlight=[0.8, 0.8], beta=[0.7, 0.7])
    t = np.exp(-0.7)
    for epoch in range(8):
        item = dataset[epoch, epoch % 3]
        np.testing.assert_allclose(item["lq"], item["gt"] * t + 0.8 * (1 - t), atol=0.51 / 255)


@pytest.mark.parametrize("depth", ["ramp", "layers", "map"])
def test_a_crop_sees_its_part_of_the_whole_scene(clean, tmp_path, depth):
    for name in ("astronaut", "chelsea", "coffee"):
        np.save(tmp_path / name, np.random.default_rng(0).random((64, 90)) + 1)
    choice = {"dataroot_depth": str(tmp_path)} if depth == "map" else {"depth": depth}
    dataset = hazy(clean, **choice)
    gt = read_image(f"{clean}/chelsea.png")
    whole = dataset._veil(gt, "chelsea.png", (0, 0, 64, 90), np.random.default_rng(3))
    part = dataset._veil(gt, "chelsea.png", (20, 31, 32, 32), np.random.default_rng(3))
    np.testing.assert_array_equal(part, whole[20:52, 31:63])


def test_variants_give_a_judged_picture_several_hazes_and_names(clean):
    dataset = hazy(clean, phase="val", variants=3)
    assert len(dataset) == 9
    items = [dataset[index] for index in range(3)]
    assert [item["name"] for item in items] == ["astronaut_1", "astronaut_2", "astronaut_3"]
    assert items[0]["gt"].equal(items[2]["gt"])
    assert not items[0]["lq"].equal(items[1]["lq"])
    assert len(list(dataset)) == 9
    assert len(hazy(clean, variants=3)) == 3


@pytest.mark.parametrize("kind", [".npy", ".png"])
@pytest.mark.parametrize("phase", ["train", "val"])
def test_depth_maps_take_the_place_of_drawn_fields(clean, tmp_path, kind, phase):
    depth = np.tile(np.linspace(500, 1000, 90), (64, 1))
    for name in ("astronaut", "chelsea", "coffee"):
        if kind == ".npy":
            np.save(tmp_path / name, depth)
        else:
            write_image(tmp_path / f"{name}.png", depth.astype(np.uint16))
    plain = {"phase": phase, "airlight": [0.9, 0.9], "beta": [1, 1], "use_hflip": False, "use_rot": False}
    item = hazy(clean, dataroot_depth=str(tmp_path), **plain)[1]
    t = (item["lq"] - 0.9) / (item["gt"] - 0.9)
    columns = t.nanmedian(dim=0).values.median(dim=0).values
    assert columns[0] > columns[-1] > np.exp(-1.01)
    assert phase == "train" or abs(columns[0] - np.exp(-0.5)) < 0.02


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 50, 1)])
def test_a_picture_of_any_size_can_be_veiled(tmp_path, noise, shape):
    write_image(tmp_path / "a.png", noise(shape))
    for kind in ("constant", "ramp", "layers", "bank", ["ramp", "bank"]):
        item = HazeImageDataset(dataroot_gt=str(tmp_path), phase="val", depth=kind)[0]
        assert item["lq"].shape == item["gt"].shape == (3, *shape[:2])
        assert torch.isfinite(item["lq"]).all()


def test_sixteen_bits_stay_sixteen_bits(tmp_path, noise):
    write_image(tmp_path / "a.png", noise((9, 8, 3), np.uint16))
    levels = HazeImageDataset(dataroot_gt=str(tmp_path), phase="val")[0]["lq"].numpy().astype(np.float64) * 65535
    np.testing.assert_allclose(levels, levels.round(), atol=0.01)
    assert (np.abs(levels / 257 - (levels / 257).round()) > 0.1).any()


def test_pictures_smaller_than_the_crop_are_continued_with_their_depth(clean, tmp_path):
    for name in ("astronaut", "chelsea", "coffee"):
        np.save(tmp_path / name, np.ones((64, 90)))
    for depth in ({}, {"dataroot_depth": str(tmp_path)}):
        item = hazy(clean, gt_size=100, small="pad", **depth)[0]
        assert item["lq"].shape == item["gt"].shape == (3, 100, 100)
    with pytest.raises(DataError, match="smaller than gt_size 100"):
        hazy(clean, gt_size=100)


def test_missing_and_unfit_depth_maps_are_named(clean, tmp_path):
    with pytest.raises(DataError, match=r"dataroot_depth: the folder .* does not exist"):
        hazy(clean, dataroot_depth=str(tmp_path / "none"))
    np.save(tmp_path / "chelsea", np.ones((64, 91)))
    with pytest.raises(DataError, match=r"2 of 3 pictures without a depth map in .*: astronaut.png, coffee.png"):
        hazy(clean, dataroot_depth=str(tmp_path))
    for name in ("astronaut", "coffee"):
        np.save(tmp_path / name, np.ones((64, 90)))
    with pytest.raises(DataError, match=r"chelsea.npy is 64x91, .*chelsea.png is 64x90"):
        hazy(clean, dataroot_depth=str(tmp_path))[1]
    write_image(tmp_path / "coffee.png", np.ones((64, 90), np.uint16))
    with pytest.raises(DataError, match="two depth maps for one picture"):
        hazy(clean, dataroot_depth=str(tmp_path))


WRONG = [
    ({"airlight": [0.7]}, r"airlight: \[0.7\] is not a range \[low, high\] within 0..1"),
    ({"airlight": [0.7, 1.2]}, "airlight: .*within 0..1"),
    ({"airlight": [0.9, 0.7]}, "airlight"),
    ({"beta": [-1, 1]}, "beta: .*from 0"),
    ({"beta": [1, float("inf")]}, "beta"),
    ({"depth": "layer"}, "depth: layer is not known; did you mean layers"),
    ({"depth": ["bank", "ramps"]}, "depth: ramps is not known; did you mean ramp"),
    ({"depth": []}, r"depth: \[\] draws nothing"),
    ({"variants": 0}, "variants: 0 is not a whole number from 1"),
    ({"variants": True}, "variants: True is not a whole number from 1"),
    ({"haze_seed": -1}, "haze_seed: -1 is not a whole number from 0"),
    ({"scale": 2}, "scale: 2, but haze does not change the size of a picture; set scale: 1"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_a_wrong_option_is_refused_at_construction_and_before_the_folder_is_opened(clean, changed, message):
    with pytest.raises(OptionsError, match=message):
        hazy(clean, **changed)
    with pytest.raises(OptionsError, match=message):
        HazeImageDataset.check_arguments(**{"phase": "train", "scale": 1, "gt_size": 32, **changed})


def test_batches_do_not_depend_on_workers_and_go_on_where_they_ended(clean, loader_options):
    arguments = {"dataroot_gt": clean, "gt_size": 24, "use_rot": True}

    def batches(count, **settings):
        start = settings.pop("start", 0)
        stream = iter(build_loader(loader_options("HazeImageDataset", arguments, scale=1, **settings), start=start))
        found = [next(stream)["lq"] for _ in range(count)]
        stream.close()
        return torch.stack(found)

    plain = batches(4)
    assert batches(4, num_worker_per_gpu=2).equal(plain)
    assert batches(2, start=8).equal(plain[2:])


def test_option_mistakes_are_told_at_load(tmp_path, clean):
    import archs  # noqa: F401
    import models  # noqa: F401

    (tmp_path / "run.yml").write_text(
        f"""
name: run
model_type: RestorationModel
scale: 1
network_g: {{type: SST, dim: 4, window_sizes: [2], num_heads: 1, ranks: 2, n_blocks: 1, upscaling_factor: 1}}
datasets:
  train: {{name: a, type: HazeImageDataset, dataroot_gt: '{clean}', gt_size: 32, airlight: [0.9, 0.7], dept: ramp}}
  val: {{name: b, type: HazeImageDataset, dataroot_gt: '{clean}', beta: thick}}
train: {{total_iter: 1, optim_g: {{type: Adam, lr: 1e-3}}, pixel_opt: {{type: L1Loss}}}}
""",
        encoding="utf-8",
    )
    with pytest.raises(OptionsError) as error:
        load.load(tmp_path / "run.yml", [])
    for text in ("datasets.train.dept: unknown argument of HazeImageDataset; did you mean depth", "datasets.val.beta"):
        assert text in str(error.value)
