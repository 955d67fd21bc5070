"""The small networks that ship, and the plain ones that they are compared with, differ in the network alone."""

import pytest
import torch
import yaml

from archs import ARCHS
from options import load
from scripts.make_options import ROOT
from scripts.tiny_table import SCALES, files, settings

NAMES = [f"sr/{tiny.name}" for tiny in settings()] + ["dehaze/mb_taylorformer_tiny_dehaze"]


def read(file, kind="train"):
    return yaml.safe_load((ROOT / f"options/{kind}/{file}.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", NAMES)
def test_a_network_is_judged_in_training_as_in_the_test(file, caplog):
    training, test = read(file), read(file, "test")
    for key in ("network_g", "scale", "name"):
        assert test[key] == training[key]
    for key in ("metrics", "baseline"):
        assert test["val"][key] == training["val"][key]
    assert test["datasets"]["test"] == training["datasets"]["val"]
    for kind in ("train", "test"):
        # what is not shipped, its own training leaves
        weights = (read(file, kind).get("path") or {}).get("pretrain_network_g", "")
        left = (
            [] if weights.startswith("archs/weights/") and (ROOT / weights).exists() else ["path.pretrain_network_g=~"]
        )
        load.load(ROOT / f"options/{kind}/{file}.yml", left, training=kind == "train")
    assert not caplog.records


@pytest.mark.parametrize("scale", SCALES)
def test_the_plain_network_has_as_many_parameters_and_the_same_recipe(scale):
    own, plain = read(f"sr/sst_tiny_x{scale}"), read(f"sr/edsr_tiny_x{scale}")
    counts = []
    for options in (own, plain):
        with torch.device("meta"):
            network = ARCHS.build(options.pop("network_g"))
        counts.append(sum(parameter.numel() for parameter in network.parameters()))
        del options["name"]
        path = options.pop("path", {})
        assert ("pretrain_network_g" in path) == (scale > 2)
    assert 1 <= counts[1] / counts[0] < 1.1
    assert own == plain


def test_training_and_held_out_photographs_are_apart():
    for file in files():
        sets = read(file.removeprefix("options/").split("/", 1)[1].removesuffix(".yml"))["datasets"]
        assert (sets["train"]["dataroot_gt"], sets["val"]["dataroot_gt"]) == (
            "datasets/quickstart/train",
            "datasets/quickstart/val",
        )
