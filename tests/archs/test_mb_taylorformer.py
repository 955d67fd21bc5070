"""MB-TaylorFormer beyond its golden values: tiles, files, initialisation, odd images."""

import math

import pytest
import torch

from archs.mb_taylorformer import MBTaylorFormer, MBTaylorFormerV2
from kernels import tiles
from kernels.dispatch import use_backend
from models.checkpoint import load_weights
from options.errors import OptionsError

UNET = {"dim": (8, 16, 16, 24), "num_blocks": (1, 1, 1, 1), "heads": (1, 2, 4, 6), "num_path": (2, 1, 3, 2)}
VERSIONS = {"MBTaylorFormer": MBTaylorFormer, "MBTaylorFormerV2": MBTaylorFormerV2}
SMALLEST_TILES = {"CPU_TILE": 1, "CPU_LEAST": 0, "ROWS": 1, "LEAST_COLUMNS": 4}
by_version = pytest.mark.parametrize("version", VERSIONS)


def build(version, **changes):
    return VERSIONS[version](**{**UNET, **changes})


@torch.no_grad()
def pushed(net, by=0.1):
    for p in net.parameters():
        p.add_(torch.randn_like(p), alpha=by)
    return net.eval()


def image(*size, channels=3, dtype=torch.float64):
    return torch.rand(size[0], channels, *size[1:], generator=torch.Generator().manual_seed(1)).to(dtype)


def with_gradients(net, x):
    x = x.detach().requires_grad_()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    out = net(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, [x, *trained.values()], upstream)
    return {"out": out.detach(), **dict(zip(["x", *trained], found, strict=True))}


def assert_same(found, expected, limit):
    for name, value in expected.items():
        # a slope of a PReLU, for instance, may have a gradient of about nothing
        scale = max(float(value.abs().max()), 1e-3)
        assert float((found[name] - value).abs().max()) <= limit * scale, name


@pytest.mark.parametrize("size", [(2, 8, 8), (1, 40, 16), (1, 8, 72)], ids=str)
@by_version
def test_tiles_give_the_whole_image_and_every_gradient(version, size, monkeypatch):
    net, x = pushed(build(version)).double(), image(*size)
    widths = []
    for name, value in SMALLEST_TILES.items():
        monkeypatch.setattr(tiles, name, value)
    small = with_gradients(net, x)
    monkeypatch.setattr(tiles, "_strips", lambda *_, **settings: widths.append(settings["width"]))
    whole = with_gradients(net, x)
    assert widths
    assert_same(small, whole, 1e-10)


@by_version
def test_the_definitions_of_the_operators_give_the_same_with_every_gradient(version, monkeypatch):
    net, x = pushed(build(version)).double(), image(2, 16, 24)
    for name, value in SMALLEST_TILES.items():
        monkeypatch.setattr(tiles, name, value)
    found = with_gradients(net, x)
    with use_backend("reference"):
        assert_same(found, with_gradients(net, x), 1e-10)
    for op in ("TAYLOR_ATTENTION", "DEFORM_CONV"):
        monkeypatch.setenv(f"PELLUCID_KERNELS_{op}", "reference")
        assert_same(found, with_gradients(net, x), 1e-10)
    with use_backend("taylor_attention", "torch"):
        assert_same(found, with_gradients(net, x), 1e-10)


@pytest.fixture
def _threads_as_before():
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@by_version
@pytest.mark.usefixtures("_threads_as_before")
def test_the_number_of_threads_hardly_matters_and_a_second_run_not_at_all(version):
    net, x = pushed(build(version)), image(1, 32, 24, dtype=torch.float32)
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        with torch.no_grad():
            results.append(net(x))
    assert torch.equal(results[1], results[2])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


@by_version
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
def test_images_of_one_colour_give_finite_outputs_and_gradients(version, value, fresh):
    net = build(version) if fresh else pushed(build(version))
    found = with_gradients(net, torch.full((1, 3, 16, 16), value))
    assert all(tensor.isfinite().all() for tensor in found.values())
    if value == 0 and version == "MBTaylorFormer":
        # no biases but the gate's: black stays black
        assert not found["out"].any()


@by_version
def test_a_black_corner_of_an_image_is_nothing_special(version):
    net, x = pushed(build(version)), image(1, 16, 16, dtype=torch.float32)
    x[:, :, :9, :9] = 0
    assert all(tensor.isfinite().all() for tensor in with_gradients(net, x).values())


@by_version
@torch.no_grad()
def test_an_image_in_bfloat16_under_autocast_stays_close(version):
    net, x = pushed(build(version)), image(1, 16, 24, dtype=torch.float32)
    exact = net.double()(x.double())
    net = net.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
    assert (out.double() - exact).norm() < 0.02 * exact.norm()


def saved(net, path, prefix="", drop=()):
    weights = {f"{prefix}{k}": v.clone() for k, v in net.state_dict().items() if not k.endswith(tuple(drop) or "?")}
    torch.save({"params": weights}, path)
    return path


@by_version
@pytest.mark.parametrize("prefix", ["", "module."], ids=["plain", "wrapped"])
def test_a_file_in_the_published_format_loads_strictly(version, prefix, tmp_path):
    net, other = pushed(build(version)), build(version)
    loaded = load_weights(other, saved(net, tmp_path / "net.pth", prefix), strict=True)
    assert (loaded.key, loaded.problems) == ("params", "")
    assert loaded.loaded == loaded.total == len(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), net.state_dict().values(), strict=True))


def test_a_file_of_version_2_from_before_the_release_loads_strictly_without_one_m(tmp_path):
    net, other = pushed(build("MBTaylorFormerV2")), build("MBTaylorFormerV2")
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith("one_M"):
                p.fill_(1)
    loaded = load_weights(other, saved(net, tmp_path / "net.pth", "module.", ["one_M"]), strict=True)
    assert loaded.problems == ""
    assert loaded.loaded < loaded.total
    x = image(1, 8, 8, dtype=torch.float32)
    assert torch.equal(other.eval()(x), net(x))


@by_version
def test_a_file_that_lacks_anything_else_is_refused(version, tmp_path):
    path = saved(build(version), tmp_path / "net.pth", drop=["encoder_level2.aggregate.conv_du.1.weight"])
    with pytest.raises(OptionsError, match=r"encoder_level2\.aggregate\.conv_du\.1\.weight"):
        load_weights(build(version), path, strict=True)


def test_a_file_of_the_other_version_is_refused(tmp_path):
    for one, other in (VERSIONS, reversed(VERSIONS)):
        with pytest.raises(OptionsError, match=f"does not fit {other}"):
            load_weights(build(other), saved(build(one), tmp_path / "net.pth"), strict=True)


def test_one_m_is_a_frozen_one_that_does_nothing():
    net, x = pushed(build("MBTaylorFormerV2")), image(1, 8, 8, dtype=torch.float32)
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
    assert frozen == [name for name in net.state_dict() if name.endswith("one_M")]
    assert len(frozen) == 8
    assert all(float(p) == 1 for name, p in build("MBTaylorFormerV2").named_parameters() if name in frozen)
    with torch.no_grad():
        expected = net(x)
        for name in frozen:
            net.get_parameter(name).fill_(7)
        assert torch.equal(net(x), expected)


@by_version
def test_other_numbers_of_heads_work(version):
    net = pushed(build(version, dim=(12, 24, 24, 24), heads=(3, 6, 12, 1)))
    assert all(tensor.isfinite().all() for tensor in with_gradients(net.double(), image(1, 8, 16)).values())


@by_version
def test_a_pair_of_views_makes_one_image_that_is_no_correction_of_it(version):
    net = pushed(build(version, inp_channels=6, dual_pixel_task=True))
    assert (net.in_channels, net.out_channels) == (6, 3)
    assert net.skip_conv.weight.shape == (16, 8, 1, 1)
    x = image(2, 16, 8, channels=6, dtype=torch.float32)
    assert net(x).shape == (2, 3, 16, 8)
    with torch.no_grad():
        net.output[0].weight.zero_()
        assert not net(x).any()
    assert not hasattr(build(version), "skip_conv")


@by_version
def test_the_stem_reaches_the_output_of_a_pair_directly(version):
    net = pushed(build(version, inp_channels=6, dual_pixel_task=True))
    x = image(1, 8, 8, channels=6, dtype=torch.float32)
    with torch.no_grad():
        added = net.output(net.skip_conv(net.patch_embed["proj"](x)))
        out = net(x)
        net.skip_conv.weight.zero_()
        torch.testing.assert_close(out - net(x), added, rtol=1e-4, atol=1e-5)


@by_version
@torch.no_grad()
def test_the_image_itself_is_what_comes_out_without_corrections(version):
    net, x = pushed(build(version)), image(1, 8, 16, dtype=torch.float32)
    net.output[0].weight.zero_()
    assert torch.equal(net(x), x)


@by_version
def test_images_of_one_channel_work(version):
    net = pushed(build(version, inp_channels=1))
    assert (net.in_channels, net.out_channels) == (1, 1)
    assert net(image(2, 8, 16, channels=1, dtype=torch.float32)).shape == (2, 1, 8, 16)


@by_version
def test_the_joining_convolutions_have_a_bias_where_one_is_asked_for(version):
    keys = set(build(version, bias=True).state_dict()) - set(build(version).state_dict())
    assert keys == {"reduce_chan_level3.0.bias", "reduce_chan_level2.0.bias"}
    net = pushed(build(version, bias=True)).double()
    found = with_gradients(net, image(1, 8, 8))
    assert all(found[key].any() for key in keys)


@by_version
@torch.no_grad()
def test_offsets_are_limited_only_where_they_are_asked_to_be(version):
    nets = {}
    for clamp in ((-3, 3), (-1, 1), None, []):
        torch.manual_seed(0)
        nets[str(clamp)] = net = build(version, offset_clamp=clamp).eval()
        for name, p in net.named_parameters():
            if "offset_generator.1" in name:
                p.mul_(100)
    x = image(1, 16, 16, dtype=torch.float32)
    outputs = {clamp: net(x) for clamp, net in nets.items()}
    assert torch.equal(outputs["None"], outputs["[]"])
    outputs.pop("[]")
    found = list(outputs.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert all(out.isfinite().all() for out in found)


@torch.no_grad()
def test_the_power_of_the_focused_term_matters():
    net, other = pushed(build("MBTaylorFormerV2")), build("MBTaylorFormerV2", focus_power=4).eval()
    other.load_state_dict(net.state_dict())
    x = image(1, 16, 16, dtype=torch.float32)
    assert float((net(x) - other(x)).norm()) > 1e-4 * float(net(x).norm())


@torch.no_grad()
def test_the_length_of_queries_and_keys_matters_in_version_1():
    net, other = pushed(build("MBTaylorFormer")), build("MBTaylorFormer", qk_norm=1.0).eval()
    other.load_state_dict(net.state_dict())
    x = image(1, 16, 16, dtype=torch.float32)
    assert float((net(x) - other(x)).norm()) > 1e-4 * float(net(x).norm())


@by_version
def test_a_fresh_network_is_drawn_as_published(version):
    net = VERSIONS[version](num_blocks=(1, 1, 1, 1))
    state = net.state_dict()
    for stage, c in (("encoder_level2", 48), ("latent", 96), ("refinement", 48)):
        # all branches, for enough numbers
        found = {}
        for key, value in state.items():
            if key.startswith(f"patch_embed_{stage}."):
                found.setdefault(key.split("patch_conv.")[1], []).append(value.flatten())
        found = {key: torch.cat(values) for key, values in found.items()}
        wanted = {"offset_generator.0.weight": math.sqrt(2 / (9 * c)), "offset_generator.1.weight": 1 / 3}
        for key, std in {**wanted, "pwconv.weight": math.sqrt(2 / c)}.items():
            assert float(found[key].std()) == pytest.approx(std, rel=0.1), (stage, key)
            assert abs(float(found[key].mean())) < 0.2 * std
        # uniform between these
        assert float(found["dcn.weight"].abs().max()) == pytest.approx(1 / 3, rel=0.02)
        assert float(found["dcn.weight"].std()) == pytest.approx(1 / 3 / math.sqrt(3), rel=0.1)
    ones = [v for k, v in state.items() if k.endswith(("temperature", "scale", "one_M", "norm1.body.weight"))]
    assert all((value == 1).all() for value in ones)
    assert all(float(v) == 0.25 for k, v in state.items() if k.endswith("conv_du.1.weight"))
    for key in ("patch_embed.proj.weight", "down1_2.body.0.weight", "latent.aggregate.fcs.0.weight", "output.0.weight"):
        bound = 1 / math.sqrt(math.prod(state[key].shape[1:]))
        assert 0.9 * bound < float(state[key].abs().max()) <= bound, key


@by_version
def test_an_image_of_eight_pixels_trains(version):
    # the coarsest map is a single pixel
    net = pushed(build(version)).double()
    found = with_gradients(net, image(1, 8, 8))
    assert all(tensor.isfinite().all() for tensor in found.values())
