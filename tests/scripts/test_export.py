"""Exported files give what the network gives, at sizes that were not traced, and say what they are."""

import json

import pytest
import torch
from torch import nn

from archs import ARCHS
from models.checkpoint import save_safetensors
from options.errors import OptionsError, UserError
from scripts import export

onnx = pytest.importorskip("onnx", reason="ONNX is not installed: pip install -e '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install -e '.[export]'")

SST = {"type": "SST", "dim": 8, "window_sizes": [4], "num_heads": 2, "ranks": [4], "n_blocks": 1}
EDSR = {"type": "EDSR", "num_feat": 8, "num_block": 1, "upscale": 2}


@pytest.fixture
def weights(tmp_path):
    """``weights(spec)``: a file of a perturbed network, and that network."""

    def made(spec):
        network = ARCHS.build(spec).eval()
        for parameter in network.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        facts = {"network_g": spec, "scale": network.scale, "weights": "params"}
        save_safetensors(tmp_path / "net.safetensors", network.state_dict(), facts)
        return tmp_path / "net.safetensors", network

    return made


def agree(network, run, sizes):
    for size in sizes:
        image = torch.rand(size)
        with torch.no_grad():
            torch.testing.assert_close(run(image), network(image), rtol=0, atol=export.TOLERANCE)


def test_an_onnx_file_of_sst_takes_any_size_and_batch(weights, tmp_path):
    file, network = weights(SST)
    export.main([str(file), "-o", str(tmp_path / "net.onnx")])
    agree(network, export.onnx_runner(tmp_path / "net.onnx"), [(1, 3, 5, 7), (3, 3, 10, 9), (1, 3, 1, 1), (1, 3, 1, 6)])
    facts = {p.key: p.value for p in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert facts["scale"] == "2"
    assert facts["colour"] == "RGB"
    assert json.loads(facts["network_g"]) == SST


def test_a_program_of_sst_takes_other_sizes(weights, tmp_path):
    file, network = weights({**SST, "upscaling_factor": 3, "upsampler_type": "pixelshuffle"})
    export.main([str(file), "-o", str(tmp_path / "net.pt2")])
    found = {"facts.json": ""}
    run = torch.export.load(tmp_path / "net.pt2", extra_files=found).module()
    agree(network, run, [(1, 3, 5, 7), (1, 3, 18, 9)])
    assert json.loads(found["facts.json"])["scale"] == "3"


# all three kernels of the gate, and a level of two branches
TAYLOR = {"dim": [8, 16, 16, 32], "heads": [1, 2, 4, 8], "num_blocks": [1, 1, 1, 1], "num_path": [1, 2, 1, 1]}


@pytest.mark.parametrize("version", ["MBTaylorFormer", "MBTaylorFormerV2"])
def test_an_onnx_file_of_mb_taylorformer_takes_any_size_and_batch(weights, tmp_path, version):
    file, network = weights({"type": version, **TAYLOR})
    export.main([str(file), "-o", str(tmp_path / "net.onnx"), "--no_check"])
    agree(network, export.onnx_runner(tmp_path / "net.onnx"), [(1, 3, 40, 56), (3, 3, 16, 24), (1, 3, 8, 8)])
    facts = {p.key: p.value for p in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert (facts["scale"], facts["multiple_of"], facts["minimum"]) == ("1", "8", "8")


@pytest.mark.parametrize(
    "options",
    [
        # one size of window: every other layer shifts its windows
        {"window_sizes": [4, 4], "attn_type": "RPB", "upsampler_type": "nn+conv"},
        {"window_sizes": [3, 3], "attn_type": "NoPE", "gate_type": None, "upsampler_type": "pixelshuffle"},
        {"window_sizes": [4, 6], "attn_type": "RIBSiren", "gate_type": "Linear", "in_channels": 1},
    ],
    ids=lambda options: options["attn_type"],
)
def test_options_of_sst_in_the_oldest_operator_set(weights, tmp_path, options):
    file, network = weights({**SST, **options, "ranks": [4, 4]})
    export.main([str(file), "-o", str(tmp_path / "net.onnx"), "--opset", "18", "--no_check"])
    assert onnx.load(tmp_path / "net.onnx").opset_import[0].version == 18
    channels = options.get("in_channels", 3)
    facts = {p.key: p.value for p in onnx.load(tmp_path / "net.onnx").metadata_props}
    assert facts["colour"] == {1: "grey", 3: "RGB"}[channels]
    sizes = [(1, channels, 5, 7), (2, channels, 10, 3)]
    agree(network, export.onnx_runner(tmp_path / "net.onnx"), sizes)


def test_edsr_as_onnx(weights, tmp_path, capsys):
    file, network = weights(EDSR)
    export.main([str(file), "-o", str(tmp_path / "net.onnx"), "--size", "8", "6"])
    agree(network, export.onnx_runner(tmp_path / "net.onnx"), [(2, 3, 1, 5)])
    assert capsys.readouterr().out.count("largest difference from PyTorch") == 2


def test_an_onnx_file_of_one_size_takes_that_one_only(weights, tmp_path):
    file, network = weights(SST)
    export.main([str(file), "-o", str(tmp_path / "net.onnx"), "--static", "--size", "6", "9"])
    run = export.onnx_runner(tmp_path / "net.onnx")
    agree(network, run, [(1, 3, 6, 9)])
    with pytest.raises(Exception, match="invalid dimensions"):
        run(torch.rand(1, 3, 6, 8))


class OneWidth(nn.Conv2d):
    """A network whose arithmetic has the traced width in it."""

    scale = 1

    def forward(self, image):
        return super().forward(image) / int(image.shape[3])


def test_a_size_that_the_trace_took_for_granted_is_noticed(tmp_path):
    network = OneWidth(3, 3, 1).requires_grad_(False)
    settings = {"size": (8, 12), "static": False, "facts": {}, "opset": 20}
    export.export_onnx(network, tmp_path / "net.onnx", **settings)
    run = export.onnx_runner(tmp_path / "net.onnx")
    export.check(network, run, [(5, 12)])
    with pytest.raises(UserError, match="gives other pictures at 8x13"):
        export.check(network, run, [(8, 13)])


def test_a_static_program_of_mb_taylorformer_is_checked(weights, tmp_path, capsys):
    spec = {"type": "MBTaylorFormer", "dim": [4, 8, 8, 8], "heads": [1, 1, 1, 1]}
    file, _ = weights({**spec, "num_blocks": [1, 1, 1, 1], "num_path": [1, 1, 1, 1]})
    export.main([str(file), "-o", str(tmp_path / "net.pt2"), "--static", "--size", "16", "24"])
    assert "at 16x24: largest difference" in capsys.readouterr().out
    assert (tmp_path / "net.pt2").is_file()


def test_a_file_that_gives_other_pictures_is_not_kept(weights, tmp_path, monkeypatch):
    file, _ = weights(EDSR)
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"gives other pictures at .* not kept"):
        export.main([str(file), "-o", str(tmp_path / "net.pt2")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-o", "net.tflite"], "must end in .onnx or .pt2"),
        (["-o", "net.onnx", "--opset", "9"], "from 18 to 20, got 9"),
        (["-o", "net.onnx", "--opset", "0"], "from 18 to 20, got 0"),
        (["-o", "net.pt2", "--opset", "20"], "--opset is for ONNX"),
        (["-o", "net.pt2", "--size", "0", "8"], "multiples of 1 from 2 on"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_exported(weights, tmp_path, arguments, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionsError, match=told):
        export.main([str(weights(EDSR)[0]), *arguments])


def test_a_file_that_exists_is_left_as_it_is(weights, tmp_path):
    (tmp_path / "net.pt2").write_text("mine")
    with pytest.raises(OptionsError, match=r"exists and is left as it is; --force"):
        export.main([str(weights(EDSR)[0]), "-o", str(tmp_path / "net.pt2")])
    assert (tmp_path / "net.pt2").read_text() == "mine"


def test_a_network_that_chooses_keys_by_content_is_refused(weights, tmp_path):
    file, _ = weights({**SST, "type": "WildCatSST"})
    with pytest.raises(OptionsError, match="attention: exact"):
        export.main([str(file), "-o", str(tmp_path / "net.pt2")])


def test_a_network_that_decides_by_the_size_of_the_picture_is_refused(weights, tmp_path):
    # beside small pictures, which it attends to exactly, the check would find no difference
    file, _ = weights({**SST, "type": "WildCatSST", "window_sizes": [4, 0], "ranks": [4, 4], "attention": "mean"})
    with pytest.raises(OptionsError, match="by the size of the picture"):
        export.main([str(file), "-o", str(tmp_path / "net.onnx")])
