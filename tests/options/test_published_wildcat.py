"""The option files of WildCat differ from those of the plain networks in the attention alone."""

import pytest
import torch
import yaml

from archs import ARCHS
from options import load
from scripts.make_options import ROOT, files
from scripts.wildcat_table import mbt_settings, sst_settings

FILES = {f"sr/{setting.name}": f"sr/{setting.name.removeprefix('WildCat')}" for setting in sst_settings()}
FILES |= {f"dehaze/{setting.name}": f"dehaze/{setting.name.removeprefix('WildCat')}" for setting in mbt_settings()}
FILES |= {"dehaze/wildcat_mb_taylorformer_quickstart": "dehaze/mb_taylorformer_quickstart"}
COMMON = {"rank", "bins", "threshold", "attention"}
ADDED = {"WildCatSST": COMMON, "WildCatMBTaylorFormer": COMMON | {"normalise", "learned_temperature"}}
by_file = pytest.mark.parametrize("file", FILES)


def read(file, kind):
    return yaml.safe_load((ROOT / f"options/{kind}/{file}.yml").read_text(encoding="utf-8"))


def weights(spec):
    with torch.device("meta"):
        return {key: value.shape for key, value in ARCHS.build(spec).state_dict().items()}


def test_every_setting_has_its_files():
    made = {name.removeprefix("options/train/").removesuffix(".yml") for name in files() if "train" in name}
    assert {file for file in made if "WildCat" in file} == {file for file in FILES if "WildCat" in file}
    assert len(FILES) == 9 + 2 + 1


@by_file
@pytest.mark.parametrize("kind", ["train", "test"])
def test_a_file_is_that_of_the_plain_network_but_for_names_and_attention(file, kind):
    own, plain = read(file, kind), read(FILES[file], kind)
    own_network, plain_network = own.pop("network_g"), plain.pop("network_g")
    added = {key: own_network.pop(key) for key in set(own_network) - set(plain_network)}
    assert COMMON <= set(added) <= ADDED[own_network["type"]]
    assert added["attention"] == "coreset"
    assert own_network.pop("type") == f"WildCat{plain_network.pop('type')}"
    assert own_network == plain_network
    for options in (own, plain):
        options["name"] = options["name"].lower().removeprefix("wildcat").lstrip("_")
        options["path"] = str(options.get("path")).lower().replace("wildcat_", "").replace("wildcat", "")
    assert own == plain


@by_file
def test_a_file_loads_without_a_remark_and_takes_exact_attention(file, caplog):
    training = load.load(ROOT / f"options/train/{file}.yml", ["path.pretrain_network_g=~"])
    test = load.load(ROOT / f"options/test/{file}.yml", ["path.pretrain_network_g=~"], training=False)
    assert test.network_g == training.network_g
    assert not caplog.records
    exact = load.load(ROOT / f"options/train/{file}.yml", ["path.pretrain_network_g=~", "network_g.attention=exact"])
    assert weights(exact.network_g.spec()) == weights(training.network_g.spec())


@by_file
def test_its_network_has_the_weights_of_the_plain_one_and_no_more_than_temperatures(file):
    own, plain = (weights(read(name, "train")["network_g"]) for name in (file, FILES[file]))
    assert plain.items() <= own.items()
    assert all(key.endswith(".attn.core.logit_scale") for key in own.keys() - plain.keys())


@by_file
def test_each_tile_gives_at_least_four_keys(file):
    network = read(file, "train")["network_g"]
    ranks, bins = (value if isinstance(value, list) else [value] for value in (network["rank"], network["bins"]))
    assert all(rank >= 4 * tiles for rank, tiles in zip(ranks, bins, strict=True))
