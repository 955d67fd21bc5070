"""Windows of a trained SST are what its layers attend over."""

import json
from pathlib import Path

import pytest
import torch

from archs.sst import SST
from data.io import read_image, write_image
from models import runtime
from models.checkpoint import save_safetensors
from options.errors import OptionsError
from scripts import attention_peers as peers
from scripts import attention_trained, bench_attention

QUICKSTART = Path(__file__).parents[2] / "datasets" / "quickstart" / "val"
SIZES = {"dim": 12, "window_sizes": (4, 8), "num_heads": (2, 3), "ranks": (2, 3), "n_blocks": 2}


@pytest.fixture
def network():
    net = SST(**SIZES, upscaling_factor=2, upsampler_type="pixelshuffle_direct").eval()
    for parameter in net.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    return net


@pytest.fixture
def photo():
    return torch.rand(3, 20, 30)


def test_a_window_holds_the_attention_of_its_layer(network, photo):
    name, layer = next((n, m) for n, m in network.named_modules() if getattr(m, "window", None) == 8)
    seen = []
    layer.to_out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer.gate = None
    q, k, v = attention_trained.window_of(network, layer, photo, place="middle")
    assert q.shape == k.shape == (1, 3, 64, 4 + 3), name
    out = peers.exact_attention(q, k, v, scale=1.0)  # (1, heads, n, d)
    torch.testing.assert_close(out.permute(0, 1, 3, 2).reshape(1, 12, 8, 8).float(), seen[0], rtol=1e-4, atol=1e-5)


def test_there_is_a_case_for_each_layer_of_the_windows_asked_for(network, photo):
    found = attention_trained.trained_cases(network, {"one": photo, "two": photo.flip(1)}, [8, 16], ["middle"])
    assert [(case.n, case.scale, case.grid, len(case.draws)) for case in found] == [(64, 1.0, (8, 8), 2)] * 2
    assert not found[0].draws[0]()[0].equal(found[0].draws[1]()[0])


def test_a_network_without_such_windows_is_refused(network, photo):
    with pytest.raises(OptionsError, match=r"no layer with RIB and a window of 5 \(--windows\); it has 4, 8"):
        attention_trained.trained_cases(network, {"one": photo}, [5], ["middle"])


@pytest.fixture
def bench(right, option_file, tmp_path, capfd):
    net = SST(**{key: value for key, value in right["network_g"].items() if key != "type"})
    save_safetensors(tmp_path / "w.safetensors", net.state_dict())
    write_image(tmp_path / "photo.png", read_image(QUICKSTART / "coffee.png")[:40, :50])

    def call(*words):
        words = ["--weights", str(tmp_path / "w.safetensors"), *words]
        quick = ["--quick", "--photos", str(tmp_path / "photo.png"), "--rank", "16", "--bins", "4"]
        code = runtime.run(bench_attention.main, [*quick, *words])
        return code, capfd.readouterr().err

    call.options = str(option_file(right))
    return call


def test_weights_take_the_place_of_the_made_up_windows(bench, tmp_path):
    words = ("--inputs", "window", "--windows", "8", "--opt", bench.options, "--out", str(tmp_path / "out"))
    code, printed = bench(*words)
    assert code == 0, printed
    found = json.loads((tmp_path / "out/results.json").read_text())["cases"]
    assert len(found) == 1
    assert "trained" in found[0]["label"]


@pytest.mark.parametrize("words", [(), ("--opt", "FILE", "--inputs", "photo")])
def test_weights_need_their_options_and_windows(bench, words):
    code, printed = bench(*(bench.options if word == "FILE" else word for word in words))
    assert code == 2
    assert "--weights and --opt go together" in printed
