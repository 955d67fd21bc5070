"""Listings with the names of the real archives load with the right pairs; what does not fit is told by name."""

import logging

import numpy as np
import pytest
import torch

from data import DATASETS, build_loader
from data.io import read_image, write_image
from data.reside import ResideDataset
from options import load
from options.errors import DataError, OptionsError

OTS = [f"{a}_{b}" for a in (0.8, 0.85, 0.9, 0.95, 1) for b in (0.04, 0.06, 0.08, 0.1, 0.12, 0.16, 0.2)]
A = [0.74031, 0.90179, 0.85, 0.99, 0.8, 0.71, 0.93, 0.95, 0.88, 0.79]


def archive(scenes, hazy, clear):
    """{hazy name: clear name} of an archive."""
    return {name: clear.format(scene) for scene in scenes for name in hazy(scene)}


ARCHIVES = {
    "ITS": archive([1, 2, 1399], lambda s: [f"{s}_{k}_{a}.png" for k, a in enumerate(A, 1)], "{}.png"),
    "OTS": archive(["0025", "8970"], lambda s: [f"{s}_{pair}.jpg" for pair in OTS], "{}.jpg"),
    "SOTS-indoor": archive([1400, 1449], lambda s: [f"{s}_{k}.png" for k in range(1, 11)], "{}.png"),
    "SOTS-outdoor": archive(
        ["0001", "0002", "1002"], lambda s: [f"{s}_0.8_0.2.jpg"] + ["0002_0.95_0.16.jpg"] * (s == "0002"), "{}.png"
    ),
    "O-HAZE": archive([f"{n:02}" for n in range(1, 46)], lambda s: [f"{s}_outdoor_hazy.jpg"], "{}_outdoor_GT.jpg"),
    "Dense-Haze": archive([f"{n:02}" for n in range(1, 56)], lambda s: [f"{s}_hazy.png"], "{}_GT.png"),
    "NH-HAZE": archive([f"{n:02}" for n in range(1, 56)], lambda s: [f"{s}_hazy.png"], "{}_GT.png"),
    "Haze4K": archive([1, 2, 1000], lambda s: [f"{s}_0.74_1.6.png"], "{}.png"),
    "SRRS": archive([1, 7, 100], lambda s: [f"{s}.tif"], "{}.jpg"),
    "Snow100K": archive(["beautiful_smile_00003", "city_read_00028"], lambda s: [f"{s}.jpg"], "{}.jpg"),
}
SPLIT = ("O-HAZE", "Dense-Haze", "NH-HAZE")


def write_archive(root, names, hazy="hazy", clear="clear", side=4):
    """Tiny pictures; the clear one of each hazy one has its level, so that a wrong pair shows."""
    levels = {name: 5 + 3 * number for number, name in enumerate(dict.fromkeys(names.values()))}
    for name, level in levels.items():
        write_image(root / clear / name, np.full((side, side, 3), level, np.uint8))
    for name, partner in names.items():
        write_image(root / hazy / name, np.full((side, side, 3), levels[partner] + 1, np.uint8))
    return {"dataroot_gt": str(root / clear), "dataroot_lq": str(root / hazy)}


def found(dataset):
    return {
        dataset.lq.path(hazy).rsplit("/", 1)[1]: dataset.gt.path(clear).rsplit("/", 1)[1]
        for clear, hazy in dataset.pairs
    }


@pytest.mark.parametrize("naming", ARCHIVES)
def test_the_names_of_an_archive_give_its_pairs(tmp_path, naming):
    names = ARCHIVES[naming]
    roots = write_archive(tmp_path, names)
    dataset = ResideDataset(**roots, naming=naming, phase="test")
    assert len(dataset) == len(names)
    assert found(dataset) == names
    assert dataset[len(names) // 2]["name"] in {name.rsplit(".", 1)[0] for name in names}


@pytest.mark.parametrize("naming", ARCHIVES)
def test_the_pixels_of_a_training_pair_belong_together(tmp_path, naming):
    dataset = ResideDataset(**write_archive(tmp_path, ARCHIVES[naming]), naming=naming, gt_size=3)
    for index in range(0, len(dataset), 7):
        item = dataset[1, index]
        # one level apart, and the next clear picture three; a JPEG may be off by one
        assert ((item["lq"] - item["gt"]) * 255 - 1).abs().max() < 1.5


@pytest.mark.parametrize("spelling", ["sots-indoor", "SOTS_INDOOR", "sotsindoor", "ITS_SOTS"])
def test_a_rule_is_found_in_any_spelling(tmp_path, spelling):
    roots = write_archive(tmp_path, ARCHIVES["SOTS-indoor"])
    assert ResideDataset(**roots, naming=spelling, phase="test").naming.name == "SOTS-indoor"


def test_prepared_copies_with_equal_names_are_accepted(tmp_path):
    names = {name: name for name in ("00001.png", "00500.png", "1400_1.png", "0001_0.8_0.2.png")}
    for naming in ("SOTS-indoor", "SOTS-outdoor", "O-HAZE", "same"):
        assert found(ResideDataset(**write_archive(tmp_path, names), naming=naming, phase="test")) == names


def test_o_haze_is_accepted_in_both_spellings(tmp_path):
    names = {"41_outdoor_haze.jpg": "41_outdoor_GT.jpg", "42_outdoor_hazy.JPG": "42_outdoor_GT.jpg"}
    assert found(ResideDataset(**write_archive(tmp_path, names), naming="O-HAZE", phase="test")) == names


def test_pictures_in_parts_share_the_clear_folder(tmp_path):
    write_image(tmp_path / "clear/0025.jpg", np.zeros((4, 4, 3), np.uint8))
    for part in ("part1", "part2"):
        write_image(
            tmp_path / "hazy" / part / f"0025_{0.8 if part == 'part1' else 0.9}_0.1.jpg", np.ones((4, 4, 3), np.uint8)
        )
    dataset = ResideDataset(dataroot=str(tmp_path), naming="OTS", phase="test")
    assert [item["name"] for item in dataset] == ["part1/0025_0.8_0.1", "part2/0025_0.9_0.1"]


@pytest.mark.parametrize("naming", SPLIT)
def test_the_last_five_scenes_are_for_testing(tmp_path, naming):
    roots = write_archive(tmp_path, ARCHIVES[naming])
    names = list(ARCHIVES[naming])
    parts = {
        split: list(found(ResideDataset(**roots, naming=naming, split=split, gt_size=4)))
        for split in ("train", "test", "all")
    }
    assert parts == {"train": names[:-5], "test": names[-5:], "all": names}


def test_a_folder_without_the_last_five_has_no_test_part(tmp_path):
    names = dict(list(ARCHIVES["NH-HAZE"].items())[:50])
    roots = write_archive(tmp_path, names)
    with pytest.raises(DataError, match=r"no picture for split: test \(the scenes 51 to 55 are for testing\)"):
        ResideDataset(**roots, naming="NH-HAZE", split="test", phase="test")
    assert len(ResideDataset(**roots, naming="NH-HAZE", split="train", gt_size=4)) == 50


@pytest.mark.parametrize(
    ("hazy", "clear"),
    [("hazy", "clear"), ("haze", "gt"), ("IN", "GT"), ("input", "target"), ("lq", "gt"), ("ITS_haze", "ITS_clear")],
)
def test_one_root_is_enough_where_the_folders_say_what_they_hold(tmp_path, hazy, clear):
    write_archive(tmp_path, ARCHIVES["ITS"], hazy, clear)
    (tmp_path / "trans").mkdir()
    assert found(ResideDataset(dataroot=str(tmp_path), naming="ITS", phase="test")) == ARCHIVES["ITS"]


def test_train_and_test_lie_in_folders_of_their_own(tmp_path):
    write_archive(tmp_path / "Train", {"1_hazy.png": "1_GT.png"}, "Haze", "GT")
    write_archive(tmp_path / "Test", {"51_hazy.png": "51_GT.png"}, "Haze", "GT")
    for phase, name in (("train", "1_hazy"), ("val", "51_hazy"), ("test", "51_hazy")):
        dataset = ResideDataset(dataroot=str(tmp_path), naming="Dense-Haze", phase=phase, gt_size=4)
        assert [item["name"] for item in (dataset[0],)] == [name]


def test_both_sides_may_lie_in_one_folder(tmp_path):
    write_archive(tmp_path, ARCHIVES["NH-HAZE"], ".", ".")
    for roots in ({"dataroot": str(tmp_path)}, {"dataroot_gt": str(tmp_path), "dataroot_lq": str(tmp_path)}):
        dataset = ResideDataset(**roots, naming="NH-HAZE", split="test", phase="test")
        assert [item["name"] for item in dataset] == [f"{n}_hazy" for n in range(51, 56)]
    with pytest.raises(DataError, match="naming: same cannot tell them apart"):
        ResideDataset(**roots, naming="same", phase="test")
    with pytest.raises(DataError, match="has no hazy picture by naming: ITS"):
        ResideDataset(**roots, naming="ITS", phase="test")


def test_a_root_without_the_two_folders_says_what_was_looked_for(tmp_path):
    write_archive(tmp_path, ARCHIVES["ITS"], "foggy", "clear")
    with pytest.raises(
        DataError, match=r"end in hazy, haze, in, input, lq and in clear, gt, target.*below test.*it has clear, foggy"
    ):
        ResideDataset(dataroot=str(tmp_path), naming="ITS", phase="test")
    write_archive(tmp_path, ARCHIVES["ITS"], "hazy", "clear")
    write_archive(tmp_path, ARCHIVES["ITS"], "input", "clear")
    with pytest.raises(DataError, match="has hazy and input; set dataroot_gt and dataroot_lq"):
        ResideDataset(dataroot=str(tmp_path), naming="ITS", phase="test")


@pytest.mark.parametrize(
    ("naming", "files", "message"),
    [
        ("ITS", "SOTS-outdoor", "ITS matches none of 4 hazy pictures; OTS, SOTS-outdoor, Haze4K match all 4"),
        ("ITS", "NH-HAZE", r"01_hazy\.png, .*\(ITS names its hazy pictures otherwise\); .* called 01_GT\.png"),
        ("same", "NH-HAZE", "same matches none of 55 hazy pictures; Dense-Haze, NH-HAZE match all 55"),
        ("NH-HAZE", "O-HAZE", "NH-HAZE matches none of 45 hazy pictures; O-HAZE matches all 45"),
    ],
)
def test_a_rule_that_does_not_fit_names_the_one_that_would(tmp_path, naming, files, message):
    roots = write_archive(tmp_path, ARCHIVES[files])
    with pytest.raises(DataError, match=message):
        ResideDataset(**roots, naming=naming, phase="test")


@pytest.mark.parametrize("naming", [name for name in ARCHIVES if name not in ("SRRS", "Snow100K")])
def test_a_wrong_folder_fails_with_the_first_unmatched_names(tmp_path, naming):
    names = ARCHIVES[naming]
    roots = write_archive(tmp_path, names)
    write_image(tmp_path / "other/flowers.png", np.zeros((4, 4, 3), np.uint8))
    roots["dataroot_gt"] = str(tmp_path / "other")
    dataset_names = list(ResideDataset(dataroot=str(tmp_path), naming=naming, phase="test").pairs)
    first = ", ".join(hazy for _, hazy in dataset_names[:5])
    for phase in ("train", "test"):
        with pytest.raises(DataError) as error:
            ResideDataset(**roots, naming=naming, phase=phase, gt_size=4)
        assert f"naming: {naming} matches none of {len(names)} hazy pictures" in str(error.value)
        assert f"Without a clear picture: {first}" in str(error.value)
        assert "the clear pictures are called flowers.png" in str(error.value)


def test_a_missing_clear_picture_is_named_with_the_name_it_should_have(tmp_path):
    roots = write_archive(tmp_path, ARCHIVES["ITS"])
    (tmp_path / "clear/2.png").unlink()
    with pytest.raises(DataError, match=r"ITS matches 20 of 30 .*: 2_1_0.74031.png, .*\(the first should have 2\)"):
        ResideDataset(**roots, naming="ITS", gt_size=4)


def test_clear_pictures_without_hazy_ones_warn_in_training_and_end_a_test(tmp_path, caplog):
    roots = write_archive(tmp_path, ARCHIVES["ITS"])
    for name in ("7.png", "8.png"):
        write_image(tmp_path / "clear" / name, np.zeros((4, 4, 3), np.uint8))
    with caplog.at_level(logging.INFO, "pellucid"):
        ResideDataset(**roots, naming="ITS", gt_size=4)
    assert "2 clear pictures without a hazy one: 7.png, 8.png" in caplog.text
    assert "may be incomplete" in caplog.text
    assert "30 hazy pictures, 10 of each clear one (ITS)" in caplog.text
    with pytest.raises(DataError, match=r"2 clear pictures without a hazy one: 7.png, 8.png; a result over a part"):
        ResideDataset(**roots, naming="ITS", phase="test")
    (tmp_path / "list.txt").write_text("1_1_0.74031.png\n2_3_0.85.png\n")
    few = ResideDataset(**roots, naming="ITS", phase="test", meta_info_file=str(tmp_path / "list.txt"))
    assert [item["name"] for item in few] == ["1_1_0.74031", "2_3_0.85"]


def test_hazy_pictures_that_are_missing_of_some_scenes_are_told(tmp_path, caplog):
    roots = write_archive(tmp_path, ARCHIVES["SOTS-indoor"])
    (tmp_path / "hazy/1449_3.png").unlink()
    ResideDataset(**roots, naming="SOTS-indoor", phase="test")
    assert "19 hazy pictures, 9 to 10 of each clear one (SOTS-indoor); the archive has 10" in caplog.text


def test_what_the_other_part_lacks_is_no_matter(tmp_path):
    roots = write_archive(tmp_path, ARCHIVES["O-HAZE"])
    (tmp_path / "hazy/03_outdoor_hazy.jpg").unlink()
    assert len(ResideDataset(**roots, naming="O-HAZE", split="test", phase="test")) == 5
    with pytest.raises(DataError, match=r"1 clear picture without a hazy one: 03_outdoor_GT\.jpg"):
        ResideDataset(**roots, naming="O-HAZE", phase="test")


def test_two_clear_pictures_of_one_name_are_told(tmp_path):
    roots = write_archive(tmp_path, {"1_1.png": "1.png"})
    write_image(tmp_path / "clear/1.jpg", np.zeros((4, 4, 3), np.uint8))
    assert found(ResideDataset(**roots, naming="SOTS-indoor", phase="test")) == {"1_1.png": "1.png"}
    write_image(tmp_path / "clear/1.bmp", np.zeros((4, 4, 3), np.uint8))
    (tmp_path / "clear/1.png").unlink()
    with pytest.raises(DataError, match=r"1_1\.png has several clear ones: 1.bmp, 1.jpg"):
        ResideDataset(**roots, naming="SOTS-indoor", phase="test")


@pytest.fixture
def bordered(tmp_path, noise):
    """A clear picture that is larger by 10 pixels on each side, as SOTS-indoor has them."""
    clear = noise((52, 60, 3))
    write_image(tmp_path / "gt/1400.png", clear)
    write_image(tmp_path / "hazy/1400_1.png", clear[10:-10, 10:-10] // 2)
    return tmp_path, clear


def test_the_border_of_sots_indoor_is_cut_to_the_pixel(bordered):
    root, clear = bordered
    item = ResideDataset(dataroot=str(root), naming="SOTS-indoor", phase="test")[0]
    np.testing.assert_array_equal(np.round(item["gt"].numpy() * 255).transpose(1, 2, 0), clear[10:-10, 10:-10])
    train = ResideDataset(dataroot=str(root), naming="SOTS-indoor", gt_size=20, use_rot=True, use_hflip=True)
    for epoch in range(5):
        crop = train[epoch, 0]
        assert torch.equal((crop["lq"] * 255).round(), torch.floor((crop["gt"] * 255).round() / 2))


def test_any_other_difference_of_sizes_is_refused_by_name(bordered, noise):
    root, _ = bordered
    (root / "hazy/1400_1.png").rename(root / "hazy/1400_1_0.9.png")
    told = r"1400\.png is 52x60 and .*1400_1_0\.9\.png is 32x40.*naming: SOTS-indoor cuts 10 pixels"
    with pytest.raises(DataError, match=told):
        ResideDataset(dataroot=str(root), naming="ITS", phase="test")
    for size in ((32, 41), (31, 40), (52, 59)):
        for old in (root / "hazy").iterdir():
            old.unlink()
        write_image(root / "hazy/1400_1.png", noise((*size, 3)))
        with pytest.raises(DataError, match=rf"1400\.png is 52x60 and .*1400_1\.png is {size[0]}x{size[1]}"):
            ResideDataset(dataroot=str(root), naming="SOTS-indoor", phase="test")


def test_small_pictures_are_continued_as_published_or_refused(tmp_path):
    roots = write_archive(tmp_path, ARCHIVES["Haze4K"])
    assert ResideDataset(**roots, naming="Haze4K", gt_size=9)[0]["lq"].shape == (3, 9, 9)
    with pytest.raises(DataError, match="smaller than gt_size 9"):
        ResideDataset(**roots, naming="Haze4K", gt_size=9, small="error")


@pytest.mark.parametrize(
    ("folder", "files", "rule"),
    [
        ("ITS/{}", "ITS", "ITS"),
        ("ITS_SOTS/{}_clip", "SOTS-indoor", "SOTS-indoor"),
        ("train/ITS/{}", "ITS", "ITS"),
        ("SOTS/outdoor/{}", "SOTS-outdoor", "SOTS-outdoor"),
        ("OTS/{}", "OTS", "OTS"),
        ("O-HAZY/{}", "O-HAZE", "O-HAZE"),
        ("NH_HAZE/{}", "NH-HAZE", "NH-HAZE"),
        ("Dense_Haze_NTIRE19/{}", "Dense-Haze", "Dense-Haze"),
        ("haze4k/train/{}", "Haze4K", "Haze4K"),
        ("Snow100K/{}", "Snow100K", "same"),
        ("SRRS/{}", "SRRS", "same"),
    ],
)
def test_the_published_name_goes_by_the_folder_and_says_so(tmp_path, caplog, folder, files, rule):
    roots = write_archive(tmp_path, ARCHIVES[files], folder.format("input"), folder.format("target"))
    with caplog.at_level(logging.WARNING, "pellucid"):
        dataset = DATASETS.build({"type": "Dataset_PairedImage", **roots, "filename_tmpl": "{}"}, phase="val")
    assert found(dataset) == ARCHIVES[files]
    assert f"naming: auto chose {rule} for the folder" in caplog.text


@pytest.mark.parametrize("folder", ["units/gt", "SITS/gt", "pictures", "SOTS/gt"])
def test_a_folder_that_names_no_set_is_never_guessed(folder):
    arguments = {"dataroot_gt": folder, "dataroot_lq": "hazy", "gt_size": 8}
    with pytest.raises(OptionsError, match="names no data set; set naming to one of ITS, OTS, SOTS-indoor"):
        ResideDataset.check_arguments(phase="train", scale=1, **arguments)
    with pytest.raises(OptionsError, match="names no data set"):
        ResideDataset(**arguments)


ROOTS = {"dataroot_gt": "ITS/gt", "dataroot_lq": "ITS/hazy"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({**ROOTS, "naming": "ITZ"}, "naming: ITZ is not known; did you mean ITS"),
        ({**ROOTS, "naming": "O-HAZ"}, "did you mean O-HAZE"),
        ({**ROOTS, "split": "test"}, "split: test is for O-HAZE, Dense-Haze, NH-HAZE.*not ITS"),
        ({**ROOTS, "split": "tests"}, "split: tests is not known; did you mean test"),
        ({**ROOTS, "scale": 2}, "scale: 2, but"),
        ({**ROOTS, "dataroot": "ITS"}, "dataroot: give it alone"),
        ({"dataroot_gt": "ITS"}, "dataroot_lq: is missing"),
        ({}, "dataroot_gt: is missing"),
        ({**ROOTS, "gt_size": None}, "gt_size: None"),
    ],
)
def test_a_wrong_option_is_refused_before_a_folder_is_opened(changed, message):
    with pytest.raises(OptionsError, match=message):
        ResideDataset.check_arguments(**{"phase": "train", "scale": 1, "gt_size": 8, **changed})
    if changed.get("gt_size", 8):
        with pytest.raises(OptionsError, match=message):
            ResideDataset(**{"gt_size": 8, **changed})


def test_option_mistakes_are_told_at_load(tmp_path):
    import archs  # noqa: F401
    import models  # noqa: F401

    (tmp_path / "run.yml").write_text(
        """
name: run
model_type: ImageCleanModel
network_g: {type: SST, dim: 4, window_sizes: [2], num_heads: 1, ranks: 2, n_blocks: 1, upscaling_factor: 1}
datasets:
  train: {type: Dataset_PairedImage, dataroot_gt: ITZ/gt, dataroot_lq: ITZ/lq, geometric_augs: true, gt_size: 32,
          filename_tmpl: '{}', mini_batch_sizes: [1], iters: [10], gt_sizes: [32]}
  val: {type: ResideDataset, dataroot: SOTS, naming: sots-indor}
  val_2: {type: Dataset_PairedImage, dataroot_gt: ITS/gt, dataroot_lq: ITS/lq, io_backend: {type: disk}}
train: {total_iter: 1, optim_g: {type: Adam, lr: 1e-3}, pixel_opt: {type: L1Loss}}
""",
        encoding="utf-8",
    )
    with pytest.raises(OptionsError) as error:
        load.load(tmp_path / "run.yml", [])
    assert "datasets.train.naming: auto goes by the names of the folders, and ITZ/gt names no" in str(error.value)
    assert "datasets.val.naming: sots-indor is not known; did you mean SOTS-indoor" in str(error.value)
    assert "val_2" not in str(error.value)


def test_a_template_that_does_nothing_is_told(tmp_path, caplog):
    roots = write_archive(tmp_path, ARCHIVES["Haze4K"])
    ResideDataset(**roots, naming="Haze4K", phase="test", filename_tmpl="{}_hazy")
    assert "filename_tmpl has no effect; naming: Haze4K pairs" in caplog.text


def test_batches_do_not_depend_on_workers_and_go_on_where_they_ended(tmp_path, loader_options, noise):
    for scene in range(1, 4):
        write_image(tmp_path / f"gt/{scene}.png", noise((20, 24, 3), seed=scene))
        for k in (1, 2):
            write_image(tmp_path / f"hazy/{scene}_{k}_0.9.png", noise((20, 24, 3), seed=10 * scene + k))
    arguments = {"dataroot": str(tmp_path), "naming": "ITS", "gt_size": 12, "use_rot": True, "use_hflip": True}

    def batches(count, start=0, **settings):
        stream = iter(build_loader(loader_options("ResideDataset", arguments, scale=1, **settings), start=start))
        taken = [next(stream)["lq"] for _ in range(count)]
        stream.close()
        return torch.stack(taken)

    plain = batches(4)
    assert batches(4, num_worker_per_gpu=2).equal(plain)
    assert batches(2, start=8).equal(plain[2:])


def test_a_jpeg_beside_a_png_is_read_as_it_is(tmp_path):
    dataset = ResideDataset(**write_archive(tmp_path, ARCHIVES["SOTS-outdoor"]), naming="SOTS-outdoor", phase="test")
    item = dataset[0]
    assert item["lq_path"].endswith(".jpg")
    assert item["gt_path"].endswith(".png")
    np.testing.assert_array_equal(np.round(item["lq"].numpy() * 255).transpose(1, 2, 0), read_image(item["lq_path"]))
