"""The benchmark of networks compares like with like."""

import pytest
import torch

from options.errors import OptionsError
from scripts import bench_arch
from scripts.bench_arch import Job


@pytest.fixture
def job(monkeypatch):
    tiny = {"dim": 12, "window_sizes": (4, 8), "num_heads": (2, 3), "ranks": (2, 3), "n_blocks": 2, "exp_ratio": 1.5}
    monkeypatch.setitem(bench_arch.PRESETS, "SSTlight", {**tiny, "upsampler_type": "pixelshuffle"})
    return Job(bench_arch.PRESETS["SSTlight"], 2, (9, 14), 2, "auto", False, "cpu")


def test_the_baseline_computes_the_network_with_its_gradients(job):
    net, image = job.network().double(), job.image().double()
    found = []
    for variant in bench_arch.VARIANTS.values():
        net.zero_grad()
        out = variant(net, image)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in net.parameters())])
    for own, baseline in zip(*found, strict=True):
        torch.testing.assert_close(own, baseline, rtol=1e-9, atol=1e-9)


def test_multiplications_are_those_of_the_layers(job):
    parameters, products = bench_arch.count(job)
    net = job.network()
    assert parameters == sum(p.numel() for p in net.parameters())
    pixels, dim, hidden = 2 * 9 * 14, 12, 18
    layer = dim * 9 + dim * dim + 3 * dim * dim + dim * dim + 2 * dim * hidden + 9 * hidden
    # 12 windows of 4 by 4, 4 of 8 by 8: pixels, times pixels of a window
    attention = [2 * 192 * 16 * 2 * (2 * 6 + 2), 2 * 256 * 64 * 3 * (2 * 4 + 3)]
    # the factors: coordinates to hidden units to factors, for each pixel of a window
    factors = [n**2 * (42 * 32 + 2 * heads * 32 * rank) for n, heads, rank in ((4, 2, 2), (8, 3, 3))]
    blocks = 2 * (pixels * (2 * layer + 9 * dim * dim) + sum(attention) + sum(factors))
    ends = pixels * (9 * 3 * dim + 9 * dim * dim + 9 * dim * 64 + 9 * 64 * 256) + 4 * pixels * 9 * 64 * 3
    assert products == blocks + ends


def test_a_run_prints_times_memory_and_ratios(job, capsys):
    bench_arch.main(["SSTlight", "--size", "33", "40", "--repeats", "1", "--train", "--profile"])
    printed = capsys.readouterr().out
    for text in ("forward and backward, 1 x 33 x 40, cpu", "unfused", "speed-up", "memory ratio", "multiplications"):
        assert text in printed
    assert "pellucid, one thread: " in printed


@pytest.mark.parametrize("words", [["--size", "4", "40"], ["--batch", "0"], ["--repeats", "0"]])
def test_what_cannot_be_measured_is_refused(words, job):
    with pytest.raises(OptionsError, match="--size must be at least 5 5"):
        bench_arch.parse(words)
