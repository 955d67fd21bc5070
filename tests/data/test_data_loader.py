"""Batches: independent of workers, ranks and interruptions."""

import random
from itertools import islice

import numpy as np
import pytest
import torch

from data import DATASETS, build_loader
from data.io import write_image
from options.errors import DataError, OptionsError, UserError


@pytest.fixture
def train(pair_folders, loader_options):
    """train(**changed): options of a train set of six pictures in batches of four."""

    def make(memory=False, **changed):
        arguments = {"dataroot_gt": pair_folders.gt, "dataroot_lq": pair_folders.lq, "filename_tmpl": "{}x2"}
        arguments |= {"gt_size": 32, "use_hflip": True, "use_rot": True}
        arguments |= {"io_backend": {"type": "memory" if memory else "disk"}}
        return loader_options("PairedImageDataset", arguments, **changed)

    return make


def batches(loader, count):
    return list(islice(loader, count))


def assert_same(ones, twos):
    assert len(ones) == len(twos)
    for one, two in zip(ones, twos, strict=True):
        assert one["name"] == two["name"]
        assert one["lq"].equal(two["lq"])
        assert one["gt"].equal(two["gt"])


def test_a_batch_is_what_the_models_expect(train):
    batch = batches(build_loader(train()), 1)[0]
    assert batch["lq"].shape == (4, 3, 16, 16)
    assert batch["gt"].shape == (4, 3, 32, 32)
    assert batch["lq"].dtype == torch.float32
    assert 0 <= batch["lq"].min() <= batch["lq"].max() <= 1
    assert len(batch["name"]) == 4
    assert all(isinstance(name, str) for name in batch["name"])


# three workers on two processors are meant
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_do_not_depend_on_the_number_of_workers(train, workers, memory):
    alone = batches(build_loader(train()), 6)
    assert_same(batches(build_loader(train(memory, num_worker_per_gpu=workers)), 6), alone)


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_batches_do_not_depend_on_how_workers_start(train, way):
    alone = batches(build_loader(train()), 3)
    loader = build_loader(train(memory=True, num_worker_per_gpu=1), multiprocessing_context=way)
    assert_same(batches(loader, 3), alone)


def test_a_dataset_survives_spawning_without_its_kept_pictures(train):
    import pickle

    dataset = build_loader(train(memory=True)).dataset
    bare = len(pickle.dumps(dataset))
    dataset.preload()
    assert len(pickle.dumps(dataset)) == bare
    assert pickle.loads(pickle.dumps(dataset))[1, 2]["gt"].equal(dataset[1, 2]["gt"])


def test_the_stream_crosses_epochs_and_drops_nothing(train):
    names = [name for batch in batches(build_loader(train()), 6) for name in batch["name"]]
    for epoch in range(4):
        assert len(set(names[6 * epoch : 6 * epoch + 6])) == 6


def test_a_batch_larger_than_the_set_is_filled_from_the_next_epochs(train):
    batch = batches(build_loader(train(batch_size_per_gpu=15)), 1)[0]
    assert len(batch["name"]) == 15


def test_two_epochs_differ_in_order_and_in_crops(train):
    loader = build_loader(train(batch_size_per_gpu=6))
    one, two = batches(loader, 2)
    assert one["name"] != two["name"]
    places = [dict(zip(batch["name"], batch["gt"], strict=True)) for batch in (one, two)]
    assert all(not places[0][name].equal(places[1][name]) for name in places[0])


def test_the_repeats_of_an_enlarged_epoch_are_cut_differently(train):
    batch = batches(build_loader(train(batch_size_per_gpu=18, dataset_enlarge_ratio=3)), 1)[0]
    assert len({gt.numpy().tobytes() for gt in batch["gt"]}) == 18


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_a_position_equals_going_on(train, workers):
    unbroken = batches(build_loader(train()), 7)
    first = build_loader(train(num_worker_per_gpu=workers))
    batches(first, 3)
    assert first.position == 12
    resumed = build_loader(train(num_worker_per_gpu=workers), start=first.position)
    assert_same(batches(resumed, 4), unbroken[3:])
    assert resumed.position == 28


def test_iterating_again_starts_at_the_same_place(train):
    loader = build_loader(train(), start=5)
    assert_same(batches(loader, 2), batches(loader, 2))


def test_two_ranks_see_together_what_one_sees_alone(train):
    alone = batches(build_loader(train(batch_size_per_gpu=4)), 4)
    ranks = [build_loader(train(batch_size_per_gpu=2), rank, 2) for rank in range(2)]
    halves = [batches(loader, 4) for loader in ranks]
    for step, whole in enumerate(alone):
        joint = torch.stack([half[step]["gt"] for half in halves], dim=1).flatten(0, 1)
        assert joint.equal(whole["gt"])
    assert ranks[0].position == 16


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_validation_ranks_cover_every_picture_exactly_once(train, world):
    names = []
    for rank in range(world):
        loader = build_loader(train(phase="val"), rank, world)
        found = [batch["name"] for batch in loader]
        assert len(found) == len(loader)
        assert len(loader.dataset) == 6
        names += [(rank + i * world, *name) for i, name in enumerate(found)]
    assert sorted(names) == [(i, f"{i + 1}x2") for i in range(6)]


def test_a_train_loader_has_no_length(train):
    with pytest.raises(TypeError, match="endless"):
        len(build_loader(train()))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_global_random_states(train, workers):
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches(build_loader(train(num_worker_per_gpu=workers)), 3)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_training_is_one_line_that_names_the_file(tmp_path, noise, loader_options, workers):
    for name in "ab":
        write_image(tmp_path / f"{name}.png", noise((40, 40, 3)))
    arguments = {"dataroot_gt": str(tmp_path), "gt_size": 32}
    loader = build_loader(loader_options("DownsampleImageDataset", arguments, num_worker_per_gpu=workers))
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:-40])
    with pytest.raises(DataError, match=r"^cannot read [^\n]*b\.png: the file is cut short$"):
        batches(loader, 3)


class Killed(torch.utils.data.Dataset):
    """Its worker dies without a word, as when memory runs out."""

    def __init__(self, *, phase):
        self.phase = phase

    def __len__(self):
        return 3

    def __getitem__(self, key):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


class BasicSRStyle:
    """Written for BasicSR: one dictionary, plain indices, global random numbers."""

    def __init__(self, opt):
        self.opt = opt

    def __len__(self):
        return 5

    def __getitem__(self, index):
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return {"lq": drawn, "gt": drawn, "name": str(index)}


@pytest.fixture
def registered():
    known = dict(DATASETS._entries)
    DATASETS.register(Killed)
    DATASETS.register(BasicSRStyle)
    yield
    DATASETS._entries.clear()
    DATASETS._entries.update(known)


@pytest.mark.usefixtures("registered")
def test_a_killed_worker_is_explained(loader_options):
    options = loader_options("Killed", {}, num_worker_per_gpu=1)
    options.arguments = dict
    with pytest.raises(UserError, match=r"a data worker ended unexpectedly.*lower num_worker_per_gpu"):
        batches(build_loader(options), 1)


@pytest.mark.usefixtures("registered")
def test_a_dataset_written_for_basicsr_becomes_deterministic(loader_options):
    alone, twice, workers = (
        batches(build_loader(loader_options("BasicSRStyle", {}, num_worker_per_gpu=n)), 4) for n in (0, 0, 2)
    )
    assert_same(alone, twice)
    assert_same(alone, workers)
    assert len({float(value) for batch in alone for value in batch["lq"][:, 0]}) == 16


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("PairedImageDatset", {}, "a set .train.: unknown dataset PairedImageDatset; did you mean PairedImageDataset"),
        (
            "SingleImageDataset",
            {"dataroot_lr": "x"},
            "dataroot_lr: unknown argument of SingleImageDataset; did you mean dataroot_lq",
        ),
    ],
)
def test_wrong_options_are_explained(loader_options, kind, arguments, message):
    with pytest.raises(OptionsError, match=message):
        build_loader(loader_options(kind, arguments))


@pytest.mark.parametrize("ahead", [1, 3])
def test_workers_prepare_as_many_batches_ahead_as_they_are_told(train, ahead):
    loader = build_loader(train(num_worker_per_gpu=1, num_prefetch_queue=ahead))
    assert loader._loader.prefetch_factor == ahead
    assert len(batches(loader, 2)) == 2


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_pictures_are_read_ahead_only_for_workers_that_share_them(train, monkeypatch, way):
    loader = build_loader(train(memory=True, num_worker_per_gpu=1), multiprocessing_context=way)
    batches(loader, 1)
    assert bool(loader.dataset.cache) == (way == "fork")
