"""What a loaded batch goes through before a step: the patch and samples of its stage, and mixup."""

import logging

import numpy as np
import pytest
import torch

from models import batches as rules
from models import checkpoint
from options.schema import MixupOptions
from options.stages import Stage

SCHEDULE = {"batch_size_per_gpu": 4, "gt_size": 32, "mini_batch_sizes": [4, 3, 2], "iters": [2, 2, 2]}
SCHEDULE["gt_sizes"] = [16, 24, 32]


@pytest.fixture
def batch():
    """Four samples of scale 2 whose every value says sample, row and column; GT pixels repeat those of the LQ."""
    lq = torch.arange(4 * 12 * 12.0).reshape(4, 1, 12, 12).repeat(1, 3, 1, 1)
    gt = lq.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return {"lq": lq, "gt": gt, "name": list("abcd"), "index": torch.arange(4), "set": "photos"}


def rng(seed=0):
    return np.random.default_rng(seed)


def stage(count=4, size=24):
    return Stage(1, 1, None, count, size)


# stages


def test_samples_are_chosen_with_all_that_belongs_to_them(batch):
    found = rules.cut(batch, stage(count=2), scale=2, rng=rng())
    kept = found["index"].tolist()
    assert len(set(kept)) == 2
    assert found["name"] == ["abcd"[i] for i in kept]
    assert torch.equal(found["lq"], batch["lq"][kept])
    assert torch.equal(found["gt"], batch["gt"][kept])
    assert found["set"] == "photos"
    assert batch["lq"].shape == (4, 3, 12, 12)


def test_every_choice_and_place_comes_equally_often(batch):
    draws = [rules.cut(batch, stage(count=1, size=20), scale=2, rng=rng(i)) for i in range(900)]
    places = np.array([int(found["lq"][0, 0, 0, 0]) for found in draws])
    # 4 samples, 3 rows, 3 columns
    counts = np.unique(places, return_counts=True)[1]
    assert len(counts) == 36
    assert counts.min() > 8


def test_lq_and_gt_are_cut_at_the_same_place(batch):
    found = rules.cut(batch, stage(size=10), scale=2, rng=rng(3))
    assert found["lq"].shape == (4, 3, 5, 5)
    assert torch.equal(found["gt"], found["lq"].repeat_interleave(2, 2).repeat_interleave(2, 3))


def test_a_stage_of_the_whole_batch_leaves_it_as_it_is(batch):
    found = rules.cut(batch, stage(), scale=2, rng=rng())
    assert all(found[key] is batch[key] for key in batch)


@pytest.fixture
def prepare(make_options, batch):
    """``prepare(iteration, rank=0, **train)``: the first batch of a step of the small run in stages of 2 iterations."""

    def call(iteration, rank=0, place=0, **train):
        overrides = [f"datasets.train.{key}={value}" for key, value in SCHEDULE.items()]
        mixing = "{mixup: true, mixup_beta: 1.2, use_identity: false}"
        overrides += [f"train.mixing_augs={mixing}"] if train.pop("mixup", False) else []
        overrides += [f"{key}={value}" for key, value in train.items()]
        return rules.Preparation(make_options(*overrides), rank)([batch] * (place + 1), iteration)[place]

    return call


def test_a_step_has_the_published_numbers_of_samples_and_pixels(prepare):
    shapes = [tuple(prepare(i)["gt"].shape) for i in range(1, 8)]
    # the batch of the test is smaller than the last stage's patch
    assert shapes == [(4, 3, 16, 16)] * 2 + [(3, 3, 24, 24)] * 2 + [(2, 3, 24, 24)] * 3


@pytest.mark.parametrize("mixup", [False, True])
def test_what_is_drawn_depends_on_seed_iteration_rank_and_place_alone(prepare, mixup):
    torch.manual_seed(5)
    one = prepare(5, mixup=mixup)
    torch.rand(3), np.random.rand(3)
    assert torch.equal(one["lq"], prepare(5, mixup=mixup)["lq"])
    for other in ({"iteration": 6}, {"rank": 1}, {"place": 1}, {"manual_seed": 1}):
        found = prepare(**{"iteration": 5, **other}, mixup=mixup)
        assert not torch.equal(one["lq"], found["lq"]), other


def test_the_log_says_when_a_stage_begins(make_options, batch, caplog):
    caplog.set_level(logging.INFO, "pellucid")
    prepare = rules.Preparation(make_options(*(f"datasets.train.{key}={value}" for key, value in SCHEDULE.items())))
    told = []
    for iteration in range(1, 8):
        caplog.clear()
        prepare([batch], iteration)
        told.append([record.getMessage() for record in caplog.records])
    assert told[0] == ["stage 1 of 3, iterations 1 to 2: 4 samples of 16x16"]
    assert told[4] == ["stage 3 of 3, iterations 5 on: 2 samples of 32x32"]
    assert not any(told[i] for i in (1, 3, 5, 6))


# mixup


def mixed(batch, seed=0, **options):
    return rules.mixup(batch, MixupOptions(mixup=True, **options), rng=rng(seed))


def test_lq_and_gt_are_mixed_alike(batch):
    found = mixed(batch)
    assert not torch.equal(found["lq"], batch["lq"])
    expected = found["lq"].repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(found["gt"], expected)
    assert found["lq"].dtype == batch["lq"].dtype


def test_each_sample_is_mixed_with_one_other_and_the_shares_add_up(batch):
    batch["lq"] = torch.eye(4)[:, :, None, None].expand(4, 4, 2, 2)
    shares = mixed(batch)["lq"][:, :, 0, 0]
    torch.testing.assert_close(shares.sum(1), torch.ones(4))
    # a permutation of the batch, so that all samples have the same part in it
    torch.testing.assert_close(shares.sum(0), torch.ones(4))
    assert ((shares > 0).sum(1) <= 2).all()


@pytest.mark.parametrize("beta", [0.4, 1.2, 5.0])
def test_the_share_is_drawn_from_a_beta_distribution(batch, beta):
    batch["lq"] = torch.eye(4)[:, :, None, None].double()
    draws = (mixed(batch, seed, mixup_beta=beta)["lq"][:, :, 0, 0] for seed in range(1500))
    shares = np.array([own.diagonal().min().item() for own in draws if own.diagonal().min() < 1])
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * (2 * beta + 1)), rel=0.15)


def test_identity_leaves_half_of_the_batches_as_they_are(batch):
    draws = [mixed(batch, seed, use_identity=True) for seed in range(400)]
    assert sum(found["lq"] is batch["lq"] for found in draws) == pytest.approx(200, abs=40)
    assert not any(mixed(batch, seed)["lq"] is batch["lq"] for seed in range(50))


def test_mixup_that_is_off_changes_nothing(make_options, batch):
    prepare = rules.Preparation(make_options("train.mixing_augs={mixup: false, mixup_beta: 1.2, use_identity: true}"))
    assert prepare([batch], 1)[0] is batch


# runs


@pytest.fixture
def staged(tiny):
    """The small run of the quickest network, in stages and with mixup."""
    tiny["datasets"]["train"] |= SCHEDULE
    tiny["train"] |= {"total_iter": 6, "scheduler": None, "mixing_augs": {"mixup": True, "use_identity": True}}
    tiny["val"]["val_freq"] = 100
    tiny["logger"] |= {"save_checkpoint_freq": 3, "print_freq": 2}
    return tiny


def weights(root):
    return checkpoint.load_state(root / "experiments/small/training_states/6.state")


def test_a_resumed_run_in_stages_with_mixup_is_the_unbroken_one_with_any_workers(staged, command, tmp_path):
    roots = [tmp_path / name for name in ("whole", "broken", "workers")]
    code, printed = command("train.py", staged, f"path.root={roots[0]}")
    assert code == 0, printed
    assert "stage 2 of 3, iterations 3 to 4: 3 samples of 24x24" in printed
    command("train.py", staged, f"path.root={roots[1]}", "train.total_iter=3")
    code, printed = command("train.py", staged, f"path.root={roots[1]}", "--auto_resume")
    assert code == 0, printed
    assert "stage 2 of 3" in printed
    code, printed = command("train.py", staged, f"path.root={roots[2]}", "datasets.train.num_worker_per_gpu=2")
    assert code == 0, printed
    whole, *others = (weights(root)["model"]["weights"]["params"] for root in roots)
    for other in others:
        assert all(torch.equal(whole[key], other[key]) for key in whole)
    assert weights(roots[0])["samples"] == weights(roots[1])["samples"] == 24


def test_the_plan_names_the_stages_and_mixup(staged, command, tmp_path):
    code, printed = command("train.py", staged, "--dry_run")
    assert code == 0, printed
    words = " ".join(printed.replace("│", " ").split())
    assert "stage iterations 1 to 2: 4 samples of 16x16 stage iterations 3 to 4: 3 samples of 24x24" in words
    assert "effective batch 4 samples x 1 accumulated x 1 process = 4, in stages" in words
    assert "Beta(1.2, 1.2) in half of the batches" in words
    assert not (tmp_path / "out").exists()


def test_only_as_many_samples_are_loaded_as_a_stage_takes(staged, command, tmp_path):
    staged["datasets"]["train"] |= {"batch_size_per_gpu": 8}
    code, printed = command("train.py", staged)
    assert code == 0, printed
    assert weights(tmp_path / "out")["samples"] == 24


def test_a_patch_that_the_network_does_not_take_ends_the_run_before_it_begins(staged, command, own_registry, tmp_path):
    class Coarse(torch.nn.Conv2d):
        scale, multiple_of = 2, 8

        def __init__(self) -> None:
            super().__init__(3, 12, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] % 8:
                raise ValueError(f"sides must be multiples of 8, got {tuple(x.shape)}")
            return torch.nn.functional.pixel_shuffle(super().forward(x), 2)

    own_registry.register(Coarse)
    staged["network_g"] = {"type": "Coarse"}
    code, printed = command("train.py", staged)
    assert code == 2
    assert "the network does not take the data, (1, 3, 12, 12)" in " ".join(printed.split())
    assert not (tmp_path / "out").exists()
