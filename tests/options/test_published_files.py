"""The option files of the published SST networks are generated from one table, load, and build what was published."""

import shutil

import pytest
import torch
import yaml

from archs import ARCHS
from options import load
from options.errors import UserError
from scripts import make_options, tiny_table
from scripts.make_options import ROOT, differences, files, write

# parameters of the published networks at x2, x3 and x4
COUNTS = {
    "SSTlight": (893_340, 899_835, 908_928),
    "SST": (11_676_707, 11_861_347, 12_119_843),
    "SSTLarge": (20_314_947, 20_730_147, 21_311_427),
    "SSTXL": (33_892_195, 34_307_395, 34_888_675),
}
TINY = tiny_table.files()
NAMES = sorted({name.split("/")[-1].removesuffix(".yml") for name in set(files()) - set(TINY) if "/sr/" in name})


def test_the_files_are_as_the_table_has_them(capsys):
    assert differences(ROOT) == []
    make_options.main(["--check"])
    assert f"all {len(files())} files" in capsys.readouterr().out


def test_every_published_network_has_its_files():
    assert len(NAMES) == 33 + 9
    assert sum("/sr/" in name for name in set(files()) - set(TINY)) == 2 * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_loads_and_its_network_has_the_published_number_of_parameters(name):
    training = load.load(ROOT / f"options/train/sr/{name}.yml", ["path.pretrain_network_g=~"])
    test = load.load(ROOT / f"options/test/sr/{name}.yml", ["path.pretrain_network_g=~"], training=False)
    assert training.file.read_text(encoding="utf-8").startswith("# ")
    assert (training.name, test.name, training.num_gpu) == (name, name, "auto")
    assert test.network_g == training.network_g
    with torch.device("meta"):
        network = ARCHS.build(training.network_g.spec())
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == COUNTS[name.removeprefix("WildCat").split("_")[0]][training.scale - 2]
    # whole windows fill the patch, so that nothing is continued by reflection in training
    patch = training.datasets["train"].arguments()["gt_size"] // training.scale
    assert all(patch % window == 0 for window in training.network_g.arguments()["window_sizes"])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("X2")])
def test_a_larger_scale_starts_from_the_smaller_one_of_the_same_network_and_data(name):
    options = yaml.safe_load((ROOT / f"options/train/sr/{name}.yml").read_text(encoding="utf-8"))
    smaller = f"{name[:-1]}{int(name[-1]) - 1}"
    assert smaller in NAMES
    assert options["path"]["pretrain_network_g"] == f"experiments/{smaller}/models/net_g_latest.pth"


@pytest.fixture
def some_files(tmp_path):
    """A checkout with the files, one of which was edited and one of which is gone."""
    shutil.copytree(ROOT / "options/train", tmp_path / "options/train")
    shutil.copytree(ROOT / "options/test", tmp_path / "options/test")
    edited = tmp_path / "options/train/sr/SST_DF2K_X2.yml"
    edited.write_text(edited.read_text(encoding="utf-8").replace("lr: 5e-4", "lr: 1e-3"), encoding="utf-8")
    (tmp_path / "options/test/sr/SST_DF2K_X2.yml").unlink()
    return tmp_path


def test_an_edited_file_is_named_and_never_replaced_unasked(some_files):
    edited = some_files / "options/train/sr/SST_DF2K_X2.yml"
    told = differences(some_files)
    assert told[1] == "options/test/sr/SST_DF2K_X2.yml is missing"
    assert told[0].startswith("options/train/sr/SST_DF2K_X2.yml differs from the table, from line ")
    with pytest.raises(UserError, match=r"SST_DF2K_X2\.yml differs.*(?s:.)*--force"):
        write(some_files)
    assert "lr: 1e-3" in edited.read_text(encoding="utf-8")
    assert not (some_files / "options/test/sr/SST_DF2K_X2.yml").exists()


def test_force_restores_the_files(some_files):
    assert sorted(write(some_files, force=True)) == [f"options/{kind}/sr/SST_DF2K_X2.yml" for kind in ("test", "train")]
    assert differences(some_files) == []


def test_a_file_beside_them_has_a_head_and_its_own_name():
    generated = {ROOT / name for name in files()}
    others = sorted(set((ROOT / "options").glob("*/*/*.yml")) - generated)
    assert others
    for file in others:
        assert file.read_text(encoding="utf-8").startswith("# "), f"{file} says nothing about itself"
        training = file.parent.parent.name == "train"
        options = load.load(file, ["path.pretrain_network_g=~"], training=training)
        assert options.name == file.stem, file
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["num_gpu"] in ("auto", 0), file


QUICKSTARTS = [
    "sr/sst_quickstart_x2",
    "sr/wildcat_sst_quickstart_x2",
    "dehaze/mb_taylorformer_quickstart",
    "dehaze/wildcat_mb_taylorformer_quickstart",
]


@pytest.mark.parametrize("file", QUICKSTARTS, ids=lambda f: f.split("/")[1])
def test_the_quickstart_is_tested_as_it_was_trained(file):
    training, test = (
        yaml.safe_load((ROOT / "options" / kind / f"{file}.yml").read_text(encoding="utf-8"))
        for kind in ("train", "test")
    )
    # trained exactly, a network may be tested by its coreset
    attention = {
        key: options["network_g"].pop("attention", None) for key, options in (("train", training), ("test", test))
    }
    assert attention["test"] == attention["train"] or attention == {"train": "exact", "test": "coreset"}
    for key in ("network_g", "scale", "name"):
        assert test[key] == training[key]
    for key in ("metrics", "baseline"):
        assert test["val"][key] == training["val"][key]
    assert test["datasets"]["test"] == training["datasets"]["val"]
    assert test["path"]["pretrain_network_g"] == f"experiments/{training['name']}/models/net_g_latest.pth"
