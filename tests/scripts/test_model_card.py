"""Weights are converted without loss and say what they are; a card says what the files of the run say."""

import csv

import pytest
import torch
from safetensors import safe_open

from models.checkpoint import read_checkpoint
from models.from_file import network_from_file
from options.errors import OptionsError
from scripts import convert_weights, model_card


@pytest.fixture
def trained(small, command, tmp_path):
    """Folder of a finished run of EDSR, and of its test's results."""
    small["network_g"] = {"type": "EDSR", "num_feat": 8, "num_block": 1, "upscale": 2}
    small["datasets"]["val"]["name"] = "held-out"
    small["datasets"]["train"]["gt_scales"] = [1, 0.5]
    assert command("train.py", small)[0] == 0
    run = tmp_path / "out/experiments/small"
    small["path"]["pretrain_network_g"] = str(run / "models/net_g_latest.pth")
    small["val"]["baseline"] = "bicubic"
    del small["train"], small["datasets"]["train"]
    assert command("test.py", small)[0] == 0
    return run, tmp_path / "out/results/small/metrics.csv"


def test_the_weights_of_a_run_go_round_through_both_formats(trained, tmp_path, capfd):
    run, _ = trained
    first, second, third = tmp_path / "a.safetensors", tmp_path / "b.pth", tmp_path / "c.safetensors"
    convert_weights.main([str(run), "-o", str(first), "--fact", "made_by=a test"])
    assert "wrote" in capfd.readouterr().out
    network, loaded = network_from_file(first)
    assert loaded.key == "params_ema"
    assert (loaded.metadata["task"], loaded.metadata["scale"], loaded.metadata["made_by"]) == ("sr", "2", "a test")
    convert_weights.main([str(first), "-o", str(second)])
    with pytest.raises(OptionsError, match="does not say what network it is for"):
        convert_weights.main([str(second), "-o", str(third)])
    convert_weights.main([str(second), "-o", str(third), "--opt", str(next(run.glob("*.effective.yml")))])
    average = read_checkpoint(run / "models/net_g_latest.pth").sections["params_ema"]
    for file in (first, third):
        with safe_open(file, "pt") as opened:
            assert set(opened.keys()) == set(average)
            assert all(torch.equal(opened.get_tensor(key), value) for key, value in average.items())
    assert not network.training
    convert_weights.main([str(run), "-o", str(tmp_path / "raw.safetensors"), "--param_key", "params"])
    found = read_checkpoint(tmp_path / "raw.safetensors")
    raw = read_checkpoint(run / "models/net_g_latest.pth").sections["params"]
    assert list(found.sections) == ["params"]
    assert all(torch.equal(found.sections["params"][key], value) for key, value in raw.items())


def test_nothing_is_overwritten_or_guessed(trained, tmp_path):
    run, _ = trained
    out = tmp_path / "a.safetensors"
    convert_weights.main([str(run), "-o", str(out)])
    before = out.read_bytes()
    with pytest.raises(OptionsError, match=r"a\.safetensors exists; --force"):
        convert_weights.main([str(run), "-o", str(out)])
    with pytest.raises(OptionsError, match=r"write \.safetensors or \.pth"):
        convert_weights.main([str(run), "-o", str(tmp_path / "a.onnx")])
    with pytest.raises(OptionsError, match="no finished training run"):
        convert_weights.main([str(tmp_path), "-o", str(tmp_path / "b.pth")])
    with pytest.raises(OptionsError, match="write KEY=TEXT"):
        convert_weights.main([str(run), "-o", str(tmp_path / "b.pth"), "--fact", "alone"])
    assert out.read_bytes() == before


def test_a_card_says_what_a_finished_run_says(trained, tmp_path):
    run, scores = trained
    arguments = [str(run), "-o", str(tmp_path / "w"), "--title", "Small x2", "--note", "Not for use."]
    arguments += ["--machine", "two cores"]
    model_card.main([*arguments, "--scores", f"small={scores}", f"again={scores}"])
    assert {path.name for path in (tmp_path / "w").iterdir()} == {
        f"small.{kind}" for kind in ("safetensors", "md", "csv", "png")
    }
    card = (tmp_path / "w/small.md").read_text()
    with scores.open() as file:
        rows = list(csv.DictReader(file))
    own, baseline = (f"{float(rows[0][key]):.2f}" for key in ("value", "baseline_value"))
    assert f"| corner | {own} | {own} | {baseline} |" in card
    assert "| photograph | small | again | bicubic |" in card
    assert "psnr (Y, crop 2, 8 bit)" in card
    for text in (
        "# Small x2",
        "EDSR with ",
        "4 iterations of 2 crops of 32x32 pixels of photographs at 1, 0.5 times their size, ",
        "L1Loss",
        "seed 0",
        "Not for use.",
        "(two cores)",
        "1 photographs",
    ):
        assert text in card
    # nothing that is not in the files of the run
    assert "LICENSES.md" not in card
    assert "train.py -opt" not in card
    with (tmp_path / "w/small.csv").open() as file:
        table = {(row["network"], row["picture"]): float(row["value"]) for row in csv.DictReader(file)}
    assert table["small", "corner"] == pytest.approx(float(rows[0]["value"]), rel=1e-5)
    assert table["bicubic", "corner"] == pytest.approx(float(rows[0]["baseline_value"]), rel=1e-5)
    facts = network_from_file(tmp_path / "w/small.safetensors")[1].metadata
    assert (facts["license"], facts["title"], facts["iteration"]) == ("Apache-2.0", "Small x2", "4")
    with pytest.raises(OptionsError, match="exist; --force replaces them"):
        model_card.main([*arguments, "--scores", f"small={scores}"])
    arguments[2] = str(tmp_path / "other")
    effective = next(run.glob("*.effective.yml"))
    effective.write_text(effective.read_text().replace("total_iter: 4", "total_iter: 40"))
    with pytest.raises(OptionsError, match="ended at iteration 4 of 40"):
        model_card.main([*arguments, "--scores", f"small={scores}"])
    with pytest.raises(OptionsError, match=r"is no metrics\.csv"):
        model_card.main([*arguments, "--scores", f"small={effective}"])
    assert not (tmp_path / "other").exists()
