"""A network from a file of weights: what says which network it is, and what is told when nothing does."""

import pytest
import torch
import yaml

from archs import ARCHS
from models.checkpoint import save_pth, save_safetensors
from models.from_file import network_from_file
from options.errors import OptionsError

SPEC = {"type": "EDSR", "num_feat": 8, "num_block": 1, "upscale": 2}
TEXT = "{type: EDSR, num_feat: 8, num_block: 1, upscale: 2}"


@pytest.fixture
def net():
    return ARCHS.build(SPEC)


@pytest.fixture
def pth(net, tmp_path):
    save_pth(tmp_path / "net.pth", {"params": net.state_dict()})
    return tmp_path / "net.pth"


@pytest.fixture
def safetensors(net, tmp_path):
    facts = {"network_g": SPEC, "scale": 2, "weights": "params_ema", "task": "sr"}
    save_safetensors(tmp_path / "net.safetensors", net.state_dict(), facts)
    return tmp_path / "net.safetensors"


@pytest.fixture
def options(tmp_path):
    (tmp_path / "opt.yml").write_text(yaml.safe_dump({"name": "opt", "scale": 2, "network_g": SPEC}))
    return tmp_path / "opt.yml"


def test_a_file_with_metadata_needs_nothing_else(net, safetensors):
    built, loaded = network_from_file(safetensors)
    x = torch.rand(1, 3, 5, 7)
    assert torch.equal(built(x), net(x))
    assert not built.training
    assert loaded.key == "params_ema"
    assert loaded.metadata["task"] == "sr"


@pytest.mark.parametrize("way", ["opt", "network"])
def test_an_option_file_or_a_text_says_what_a_pth_is_for(net, pth, options, way):
    built, _ = network_from_file(pth, **{"opt": {"opt": options}, "network": {"network": TEXT}}[way])
    x = torch.rand(1, 3, 5, 7)
    assert torch.equal(built(x), net(x))


def test_the_average_is_taken_where_there_is_one(net, tmp_path):
    average = {key: value + 1 for key, value in net.state_dict().items()}
    save_pth(tmp_path / "both.pth", {"params": net.state_dict(), "params_ema": average})
    built, _ = network_from_file(tmp_path / "both.pth", network=TEXT)
    assert torch.equal(built.conv_first.weight, net.conv_first.weight + 1)


def test_own_networks_of_the_option_file_are_imported(tmp_path):
    (tmp_path / "own.py").write_text(
        "from archs import ARCHS\nfrom torch import nn\n\n@ARCHS.register()\nclass OwnOfFile(nn.Conv2d):\n"
        "    def __init__(self):\n        super().__init__(3, 3, 1)\n"
    )
    options = {"import_paths": ["own.py"], "network_g": {"type": "OwnOfFile"}}
    (tmp_path / "own.yml").write_text(yaml.safe_dump(options))
    save_pth(tmp_path / "own.pth", {"params": torch.nn.Conv2d(3, 3, 1).state_dict()})
    built, _ = network_from_file(tmp_path / "own.pth", opt=tmp_path / "own.yml")
    assert type(built).__name__ == "OwnOfFile"
    assert built.scale == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"does not say what network .*--opt FILE\.yml.*--network"),
        ("EDSR", r"must read '\{type: NAME"),
        ("{type: EDSSR}", "did you mean EDSR"),
        ("{type: EDSR, upscal: 2}", "did you mean upscale"),
        ("{type: EDSR, num_feat: [8]}", "num_feat: .*got"),
        ("{type: EDSR, upscale: 5}", "power of two or 3, got 5"),
        ("{type: EDSR, num_feat: 16, num_block: 1, upscale: 2}", "does not fit EDSR"),
    ],
)
def test_a_wrong_network_is_told_in_words(pth, text, told):
    with pytest.raises(OptionsError, match=told):
        network_from_file(pth, network=text)


def test_metadata_that_is_no_network_is_told(net, tmp_path):
    save_safetensors(tmp_path / "odd.safetensors", net.state_dict(), {"network_g": "[1, 2"})
    with pytest.raises(OptionsError, match="no JSON object"):
        network_from_file(tmp_path / "odd.safetensors")


def test_weights_of_another_scale_are_refused(safetensors):
    with pytest.raises(OptionsError, match="the file is for scale 2, the network for scale 4"):
        network_from_file(safetensors, network=TEXT.replace("upscale: 2", "upscale: 4"))


def test_a_misfit_names_a_way_out_that_the_command_has(pth):
    with pytest.raises(OptionsError, match="does not fit EDSR") as caught:
        network_from_file(pth, network=TEXT.replace("num_block: 1", "num_block: 2"))
    assert "--opt FILE.yml" in str(caught.value)
    assert "strict_load_g" not in str(caught.value)
