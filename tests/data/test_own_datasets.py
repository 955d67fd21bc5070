"""Datasets that a user brings: from files named in import_paths, with the arguments that they care to take."""

import sys
import textwrap
from itertools import islice

import pytest

from data import DATASETS, build_loader
from options.load import import_components

SQUARES = """
    import torch
    from torch.utils.data import Dataset
    from data import DATASETS

    class Row(torch.nn.Module):
        pass

    @DATASETS.register()
    class Squares(Dataset):
        def __init__(self, *, count, phase="train", row=Row):
            self.count, self.row = count, row()

        def __len__(self):
            return self.count

        def __getitem__(self, key):
            epoch, index = key if isinstance(key, tuple) else (0, key)
            return {"lq": torch.tensor(float(index**2)), "epoch": epoch, "name": str(index)}

    @DATASETS.register()
    class OldSquares:
        def __init__(self, opt):
            self.opt, self.helper = opt, Squares(count=opt["count"])

        def __len__(self):
            return self.opt["count"]

        def __getitem__(self, index):
            return {**self.helper[index], "name": self.opt["name"]}
"""


@pytest.fixture
def own(tmp_path):
    """The datasets of a file outside the tree, registered for the time of a test."""
    known, modules = dict(DATASETS._entries), set(sys.modules)
    (tmp_path / "squares.py").write_text(textwrap.dedent(SQUARES))
    import_components([str(tmp_path / "squares.py")], tmp_path)
    yield
    DATASETS._entries.clear()
    DATASETS._entries.update(known)
    for name in set(sys.modules) - modules:
        if name.startswith("pellucid_import_"):
            del sys.modules[name]


def names(loader, count):
    return [name for batch in islice(loader, count) for name in batch["name"]]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("arguments", [{"count": 5}, {"count": 5, "name": "a set"}], ids=["new", "old"])
def test_a_dataset_need_not_take_a_name(loader_options, arguments):
    options = loader_options("Squares", {})
    options.arguments = lambda: dict(arguments)
    assert sorted(names(build_loader(options), 5)[:5]) == list("01234")


@pytest.mark.usefixtures("own")
def test_options_may_have_no_name_at_all(loader_options):
    options = loader_options("Squares", {})
    options.arguments = lambda: {"count": 3}
    del options.name
    assert len(build_loader(options).dataset) == 3


def test_a_dataset_that_takes_a_name_gets_it(loader_options, pair_folders):
    options = loader_options("SingleImageDataset", {}, phase="val")
    options.arguments = lambda: {"dataroot_lq": pair_folders.lq}
    assert build_loader(options).dataset.name == "a set"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("way", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("kind", ["Squares", "OldSquares"])
def test_workers_find_a_dataset_of_an_imported_file_however_they_start(loader_options, kind, way):
    here = build_loader(loader_options(kind, {"count": 5}))
    there = build_loader(loader_options(kind, {"count": 5}, num_worker_per_gpu=1), multiprocessing_context=way)
    assert type(there.dataset) is type(here.dataset)
    for one, two in zip(islice(here, 3), islice(there, 3), strict=True):
        assert one["lq"].equal(two["lq"])
        assert one["name"] == two["name"]
