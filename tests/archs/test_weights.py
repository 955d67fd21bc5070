"""The networks that ship: small, complete, described, and as good as their cards say."""

import csv
import json
import re
from pathlib import Path

import pytest

from archs import ARCHS
from data import DATASETS
from models.checkpoint import read_checkpoint
from models.from_file import network_from_file
from models.infer import restore
from models.metrics import calculate_psnr
from models.samples import to_uint8

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "archs/weights"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
each = pytest.mark.parametrize("name", SHIPPED)


def table(name):
    with (FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {(row["network"], row["picture"], row["metric"]): float(row["value"]) for row in rows}


def test_every_scale_has_its_network_and_haze_has_one():
    assert SHIPPED == ["mb_taylorformer_tiny_dehaze", "sst_tiny_x2", "sst_tiny_x3", "sst_tiny_x4"]


@each
def test_a_file_is_small_and_says_what_it_is(name):
    file = FOLDER / f"{name}.safetensors"
    assert file.stat().st_size < 4_000_000
    facts = read_checkpoint(file).metadata
    assert {"task", "scale", "name", "title", "seed", "iteration", "trained_on"} <= set(facts)
    assert facts["license"] == "Apache-2.0"
    assert json.loads(facts["network_g"])["type"] in ARCHS.names()
    assert facts["name"] == name


@each
def test_a_card_with_scores_and_curve_lies_beside_it(name):
    card = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    facts = read_checkpoint(FOLDER / f"{name}.safetensors").metadata
    network, _ = network_from_file(FOLDER / f"{name}.safetensors")
    count = sum(parameter.numel() for parameter in network.parameters())
    size = (FOLDER / f"{name}.safetensors").stat().st_size
    for text in (facts["title"], f"{count:,} parameters", f"{size:,} bytes", "LICENSES.md", "seed 0", f"{name}.png"):
        assert text in card
    assert (FOLDER / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    lines = card.splitlines()
    for (_, picture, metric), value in table(name).items():
        # the table is rounded to six digits before the card is to two, or four
        close = 0.0051 if "psnr" in metric else 0.000051
        shown = [line for line in lines if line.startswith(f"| {picture} |") or f": {picture}**" in line]
        cells = [float(cell) for line in shown for cell in re.findall(r"\d+\.\d+", line)]
        assert min(abs(cell - value) for cell in cells) <= close, (picture, metric, value)


@each
def test_the_file_scores_what_the_card_says(name):
    network, loaded = network_from_file(FOLDER / f"{name}.safetensors")
    scale, folder = int(loaded.metadata["scale"]), str(ROOT / "datasets/quickstart/val")
    if loaded.metadata["task"] == "dehaze":
        kind, picture, metric = {"type": "HazeImageDataset", "variants": 6}, "fig_1", "psnr_8bit"
        settings = {"crop_border": 0}
    else:
        kind, picture, metric = {"type": "DownsampleImageDataset"}, "fig", "psnr"
        settings = {"crop_border": scale, "test_y_channel": True}
    found = DATASETS.build({**kind, "dataroot_gt": folder, "scale": scale, "phase": "val", "name": "quickstart-val"})
    item = next(item for item in (found[i] for i in range(len(found))) if item["name"] == picture)
    output, truth = to_uint8(restore(network, item["lq"][None])), to_uint8(item["gt"])
    scores = table(name)
    own = next(label for label, shown, kind in scores if (shown, kind) == (picture, metric))
    assert calculate_psnr(output, truth, **settings) == pytest.approx(scores[own, picture, metric], abs=0.005)
    # the card lists the network first, what it is compared with after it
    others = [value for (label, *key), value in scores.items() if key == [picture, metric] and label != own]
    assert others
    if loaded.metadata["task"] == "sr":
        assert scores[own, picture, metric] > max(others)
