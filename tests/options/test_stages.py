"""A progressive schedule of batch and patch size: its stages, its mistakes, and keys that stand for others."""

import pytest

from options import stages
from options.errors import OptionsError

SCHEDULE = {"batch_size_per_gpu": 8, "gt_size": 96, "mini_batch_sizes": [8, 5, 2], "iters": [3, 2, 4]}
SCHEDULE["gt_sizes"] = [32, 64, 96]


@pytest.fixture
def progressive(right):
    """The small run in three stages."""
    right["datasets"]["train"] |= SCHEDULE
    right["train"]["total_iter"] = 9
    return right


def test_each_iteration_has_the_stage_of_the_published_loop(load_file, progressive):
    found = stages.stages(load_file(progressive).datasets["train"])
    expected = [(8, 32)] * 3 + [(5, 64)] * 2 + [(2, 96)] * 6
    assert [(s.batch, s.gt_size) for s in (stages.at(found, i) for i in range(1, 12))] == expected
    assert str(found[1]) == "iterations 4 to 5: 5 samples of 64x64"
    assert str(found[2]) == "iterations 6 on: 2 samples of 96x96"


def test_without_a_schedule_there_are_no_stages(load_file, right):
    dataset = load_file(right).datasets["train"]
    assert stages.stages(dataset) == ()
    assert dataset.loaded_batch == dataset.batch_size_per_gpu


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "mini_batch_sizes=[8, 5]",
            "iters: each stage needs one entry in each list, but mini_batch_sizes has 2",
        ),
        ("mini_batch_sizes=[9, 5, 2]", "mini_batch_sizes: 9 is larger than batch_size_per_gpu 8; lower it, or raise"),
        ("gt_sizes=[32, 64, 128]", "gt_sizes: 128 is larger than gt_size 96; lower it, or raise gt_size"),
        ("gt_sizes=[33, 64, 96]", "gt_sizes: 33 is not a multiple of scale 2"),
        ("iters=~", "iters: is missing; mini_batch_sizes, iters, gt_sizes belong together"),
        ("iters=[3, 0, 4]", "greater than or equal to 1, got 0"),
        ("iters=[]", "iters: each stage needs one entry in each list"),
    ],
)
def test_a_mistake_in_the_schedule_is_told_with_its_place(load_file, progressive, override, said):
    with pytest.raises(OptionsError) as error:
        load_file(progressive, f"datasets.train.{override}")
    text = " ".join(str(error.value).split())
    assert said in text
    assert "datasets.train." in text


def test_a_schedule_as_long_as_the_run_is_not_remarked(load_file, progressive, caplog):
    load_file(progressive)
    assert "stage" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.total_iter=20"], "iters ends at 9, before train.total_iter 20: the last stage goes on"),
        (["train.total_iter=4"], "stage 3 of datasets.train.iters never begins: train.total_iter is 4"),
        (
            ["datasets.train.mini_batch_sizes=[2, 5, 2]"],
            "takes more than 5 samples, so this many are loaded",
        ),
        (
            ["datasets.train.mini_batch_sizes=[8, 5, 1]", "train.mixing_augs.mixup=true"],
            "stage 3 of datasets.train.mini_batch_sizes has batches of 1: nothing is mixed",
        ),
    ],
)
def test_what_may_not_be_meant_is_remarked(load_file, progressive, caplog, overrides, said):
    progressive["train"]["mixing_augs"] = {"mixup": False}
    load_file(progressive, *overrides)
    assert said in caplog.text


@pytest.mark.parametrize("override", ["batch_size_per_gpu=1", "mini_batch_sizes=[1, 1, 1]"])
def test_mixup_of_single_samples_is_refused(load_file, progressive, override):
    progressive["train"]["mixing_augs"] = {"mixup": True}
    if override.startswith("batch"):
        progressive["datasets"]["train"] |= dict.fromkeys(stages.KEYS)
    with pytest.raises(OptionsError, match=r"train\.mixing_augs\.mixup: there is nothing to mix in batches of 1"):
        load_file(progressive, f"datasets.train.{override}")


# geometric_augs


@pytest.mark.parametrize("wanted", [True, False])
def test_geometric_augs_stands_for_flips_and_turns(load_file, right, wanted):
    for key in ("use_hflip", "use_rot"):
        del right["datasets"]["train"][key]
    right["datasets"]["train"]["geometric_augs"] = wanted
    arguments = load_file(right).datasets["train"].arguments()
    assert (arguments["use_hflip"], arguments["use_rot"]) == (wanted, wanted)


def test_geometric_augs_may_stand_beside_what_it_stands_for(load_file, right):
    assert load_file(right, "datasets.train.geometric_augs=true").datasets["train"].arguments()["use_rot"] is True


@pytest.mark.parametrize(("wanted", "own"), [("true", "false"), ("false", "true")])
def test_a_contradiction_to_geometric_augs_is_told(load_file, right, wanted, own):
    overrides = [f"datasets.train.geometric_augs={wanted}", f"datasets.train.use_hflip={own}"]
    right["datasets"]["train"]["use_rot"] = wanted == "true"
    with pytest.raises(OptionsError, match=rf"use_hflip: is {own}, but geometric_augs is {wanted} and stands for it"):
        load_file(right, *overrides)


def test_a_data_set_without_flips_cannot_have_geometric_augs(load_file, right):
    single = "{type: SingleImageDataset, dataroot_lq: x, geometric_augs: true}"
    with pytest.raises(OptionsError, match="geometric_augs: SingleImageDataset has no use_hflip and use_rot"):
        load_file(right, f"datasets.val_1={single}")
