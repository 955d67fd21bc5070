"""Any size through a network, tiles that equal the whole, self-ensemble, precision, and the way to whole numbers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from archs.sst import SST
from models.infer import inference_dtype, restore
from models.samples import to_uint8
from options.errors import OptionsError, UserError


class ConvNet(nn.Module):
    """Four zero-padded 3 x 3 convolutions, then pixel shuffle: looks 4 pixels far."""

    in_channels = 3
    halo = 4

    def __init__(self, scale=2, multiple_of=1, minimum=1):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.multiple_of, self.minimum = scale, multiple_of, minimum
        dims = (3, 8, 8, 8, 3 * scale**2)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(dims))
        self.seen = []

    def forward(self, x):
        assert x.shape[-1] % self.multiple_of == 0
        assert x.shape[-2] % self.multiple_of == 0
        assert min(x.shape[-2:]) >= self.minimum
        self.seen.append(tuple(x.shape[-2:]))
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return F.pixel_shuffle(x, self.scale)


class WindowNet(nn.Module):
    """Mixes each window of 4 and then each of 6 pixels with itself only: windows start at multiples of 12 together."""

    halo = 10
    tile_multiple = 12

    def forward(self, x):
        for side in (4, 6):
            h, w = x.shape[-2:]
            whole = F.pad(x, (0, -w % side, 0, -h % side), mode="replicate")
            means = F.avg_pool2d(whole, side)
            x = torch.sin(3 * x) + F.interpolate(means, scale_factor=side)[..., :h, :w]
        return x


def _picture(h, w, b=1, c=3):
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(h * 1000 + w))


# to 8 bits


def test_bytes_are_clamped_and_rounded_half_to_even():
    values = torch.tensor([-0.3, 0.0, 0.5 / 255, 1.5 / 255, 2.5 / 255, 254.4 / 255, 1.0, 7.0])
    image = to_uint8(values.reshape(1, 1, 8).expand(3, 1, 8))
    assert image.dtype == np.uint8
    assert image.shape == (1, 8, 3)
    assert image[0, :, 0].tolist() == [0, 0, 0, 2, 2, 254, 255, 255]


def test_every_level_survives_the_way_to_floats_and_back():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    floats = torch.from_numpy(levels.astype(np.float32) / 255).permute(2, 0, 1)
    assert np.array_equal(to_uint8(floats), levels)


def test_channels_come_last_in_their_order():
    image = torch.stack([torch.full((4, 5), value) for value in (1.0, 0.6, 0.0)])
    assert to_uint8(image[None].to(torch.bfloat16))[2, 3].tolist() == [255, 153, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_picture_does_not_come_out_black(value):
    image = torch.rand(3, 4, 5)
    image[1, 2, 3] = value
    with pytest.raises(ValueError, match="1 of 60 values of the picture are NaN or infinite"):
        to_uint8(image)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (4, 4), (1, 1, 3, 4, 4)])
def test_only_one_picture_becomes_bytes(shape):
    with pytest.raises(ValueError, match="a picture must be"):
        to_uint8(torch.zeros(shape))


# padding


@pytest.mark.parametrize("size", [(16, 24), (17, 23), (8, 9), (5, 30), (3, 2), (1, 1)])
@pytest.mark.parametrize("scale", [1, 3])
def test_any_size_comes_out_at_its_scale(size, scale):
    net = ConvNet(scale=scale, multiple_of=8, minimum=16)
    result = restore(net, _picture(*size, b=2))
    assert result.shape == (2, 3, size[0] * scale, size[1] * scale)
    assert net.seen == [tuple(max(16, -(-side // 8) * 8) for side in size)]


def test_a_size_that_fits_is_not_touched():
    net, lq = ConvNet(multiple_of=8, minimum=16), _picture(24, 16)
    assert torch.equal(restore(net, lq), net(lq))


def test_the_picture_is_continued_by_reflection_and_by_its_edge_where_it_is_too_small():
    class Keep(nn.Module):
        scale, multiple_of, minimum = 1, 8, 1

        def forward(self, x):
            self.last = x
            return x

    net, lq = Keep(), _picture(13, 3)
    assert torch.equal(restore(net, lq), lq)
    rows = [*range(13), 11, 10, 9]
    columns = [0, 1, 2, 2, 2, 2, 2, 2]
    assert torch.equal(net.last, lq[:, :, rows][..., columns])


def test_a_network_without_facts_gets_the_picture_as_it_is():
    assert torch.equal(restore(nn.Identity(), _picture(5, 7)), _picture(5, 7))


def test_pictures_of_a_batch_do_not_see_each_other():
    net, lq = ConvNet(multiple_of=4), _picture(17, 23, b=3)
    torch.testing.assert_close(restore(net, lq, tile=16)[1:2], restore(net, lq[1:2], tile=16))


def test_nothing_tracks_gradients_and_the_mode_stays():
    net = ConvNet().train()
    assert not restore(net, _picture(9, 9).requires_grad_(True)).requires_grad
    assert net.training


# tiles


@pytest.mark.parametrize("size", [(64, 64), (61, 45), (33, 70), (16, 90), (7, 41)])
@pytest.mark.parametrize("tile", [16, 20, 32, 50])
@pytest.mark.parametrize(("scale", "multiple_of"), [(1, 1), (2, 4), (3, 8)])
def test_tiles_that_overlap_by_twice_the_halo_equal_the_whole(size, tile, scale, multiple_of):
    net, lq = ConvNet(scale=scale, multiple_of=multiple_of, minimum=8), _picture(*size)
    tiled = restore(net, lq, tile=tile, overlap=8)
    assert max(max(seen) for seen in net.seen) <= tile
    torch.testing.assert_close(tiled, restore(net, lq), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tile", [16, 33, 64])
def test_the_default_overlap_of_a_finite_halo_is_enough(tile):
    net, lq = ConvNet(), _picture(70, 83)
    torch.testing.assert_close(restore(net, lq, tile=tile), restore(net, lq), rtol=0, atol=1e-5)
    assert len(net.seen) > 2


def test_too_little_overlap_shows():
    net, lq = ConvNet(), _picture(70, 83)
    assert (restore(net, lq, tile=32, overlap=2) - restore(net, lq)).abs().max() > 1e-4


@pytest.mark.parametrize("size", [(72, 60), (71, 53)])
def test_tiles_start_where_windows_do(size):
    net, lq = WindowNet(), _picture(*size)
    torch.testing.assert_close(restore(net, lq, tile=48, overlap=20), restore(net, lq), rtol=0, atol=1e-5)


def test_the_last_tile_is_as_large_as_the_network_needs():
    net, lq = ConvNet(scale=1, minimum=20), _picture(37, 50)
    net.tile_multiple = 12
    tiled = restore(net, lq, tile=24, overlap=8)
    assert len(net.seen) == 6
    torch.testing.assert_close(tiled, restore(net, lq), rtol=0, atol=1e-5)


def test_a_global_network_is_blended_without_seams():
    """Each tile answers with its own mean: between the middles of two tiles the result moves in small steps."""

    class Mean(nn.Module):
        scale = 2

        def forward(self, x):
            return x.mean((-2, -1), keepdim=True).expand(-1, -1, x.shape[-2] * 2, x.shape[-1] * 2)

    lq = torch.linspace(0, 1, 96).expand(1, 3, 32, 96)
    blended = restore(Mean(), lq, tile=32, overlap=16)
    cut = restore(Mean(), lq, tile=32, overlap=0)
    assert cut.diff(dim=-1).abs().max() > 0.3
    assert blended.diff(dim=-1).abs().max() < 0.02
    assert (blended.diff(dim=-1) >= -1e-6).all()


@pytest.mark.parametrize("overlap", [None, 0, 1, 5, 11, 15])
@pytest.mark.parametrize("halo", [None, 0, 3, 100])
@pytest.mark.parametrize("size", [(16, 17), (40, 57), (31, 129)])
def test_every_pixel_gets_shares_that_add_up_to_one(size, halo, overlap):
    net = nn.Identity()
    net.scale, net.halo = 1, halo
    torch.testing.assert_close(restore(net, _picture(*size), tile=16, overlap=overlap), _picture(*size))


def test_a_half_precision_result_is_summed_in_float32():
    net, lq = nn.Identity(), _picture(40, 40).to(torch.bfloat16)
    result = restore(net, lq, tile=16, overlap=8)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, lq)


# self-ensemble


def test_the_self_ensemble_is_the_mean_of_eight_views():
    net, lq = ConvNet(scale=2), _picture(12, 9)
    views = []
    for k in range(4):
        for mirrored in (False, True):
            view = torch.rot90(lq.flip(-1) if mirrored else lq, k, (-2, -1))
            back = torch.rot90(net(view), -k, (-2, -1))
            views.append(back.flip(-1) if mirrored else back)
    torch.testing.assert_close(restore(net, lq, self_ensemble=True), torch.stack(views).mean(0))


def test_the_self_ensemble_does_not_care_how_the_picture_lies():
    net, lq = ConvNet(scale=1, multiple_of=4), _picture(16, 20)
    straight = restore(net, lq, self_ensemble=True, tile=16)
    turned = restore(net, torch.rot90(lq, 1, (-2, -1)), self_ensemble=True, tile=16)
    torch.testing.assert_close(torch.rot90(turned, -1, (-2, -1)), straight)


# precision


@pytest.mark.parametrize(("name", "dtype"), [("float32", None), ("auto", None), ("bfloat16", torch.bfloat16)])
def test_a_dtype_by_its_name_on_a_cpu(name, dtype):
    assert inference_dtype(name, torch.device("cpu")) is dtype


def test_a_dtype_that_the_device_has_no_use_for_is_refused():
    with pytest.raises(OptionsError, match=r"val\.dtype: float16 is slower than float32 on a CPU; take bfloat16"):
        inference_dtype("float16", torch.device("cpu"))


@pytest.mark.parametrize("arguments", [{}, {"tile": 16}, {"self_ensemble": True}], ids=["whole", "tiles", "ensemble"])
def test_a_network_in_bfloat16_returns_float32_that_is_close(arguments):
    net, lq = ConvNet(), _picture(30, 41)
    result, exact = restore(net, lq, dtype=torch.bfloat16, **arguments), restore(net, lq, **arguments)
    assert result.dtype == torch.float32
    assert 1e-4 < (result - exact).abs().max() < 2e-2
    assert next(net.parameters()).dtype == torch.float32


def test_what_a_network_keeps_in_float32_is_not_rounded():
    """Autocast, not a cast of the network: the sum with the input stays as exact as the input."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

        def forward(self, x):
            return x + self.conv(x)

    lq = _picture(20, 20)
    assert torch.equal(restore(Residual(), lq, dtype=torch.bfloat16), lq)


def test_bfloat16_leaves_nothing_behind_in_sst():
    """What the network caches for inference is kept apart by dtype."""
    net = SST(dim=8, window_sizes=(4, 8), num_heads=2, n_blocks=1, ranks=4).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    lq = _picture(17, 20)
    exact = restore(net, lq)
    rounded = restore(net, lq, dtype=torch.bfloat16)
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()
    assert torch.equal(restore(net, lq), exact)


def test_a_network_that_cannot_compute_in_the_dtype_is_refused_in_words():
    class Lerp(ConvNet):
        def forward(self, x):
            y = self.convs[0](x)[:, :3]
            return torch.lerp(y, x, 0.5)

    net = Lerp(scale=1)
    assert restore(net, _picture(9, 9)).shape == (1, 3, 9, 9)
    with pytest.raises(UserError, match=r"cannot compute in bfloat16 \(.*dtype.*\); take float32"):
        restore(net, _picture(9, 9), dtype=torch.bfloat16)


def test_an_error_that_has_nothing_to_do_with_the_dtype_passes():
    net = ConvNet()
    net.forward = lambda x: x.reshape(7, 7)
    with pytest.raises(RuntimeError, match="shape"):
        restore(net, _picture(9, 9), dtype=torch.bfloat16)


# refusals


@pytest.mark.parametrize(
    ("lq", "arguments", "message"),
    [
        (torch.rand(3, 8, 8), {}, r"lq must be \(b, c, h, w\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), {}, "float dtype, got torch.uint8"),
        (torch.rand(1, 3, 0, 8), {}, r"lq must be .* \(1, 3, 0, 8\)"),
        (torch.rand(1, 1, 8, 8), {}, "takes 3 channels, lq has 1"),
        (torch.rand(1, 3, 40, 40), {"tile": 0}, "tile must be at least 1"),
        (torch.rand(1, 3, 40, 40), {"tile": 16, "overlap": 16}, "below the tile's 16, got 16"),
        (torch.rand(1, 3, 40, 40), {"tile": 16, "overlap": -1}, "overlap must be at least 0"),
    ],
    ids=["three axes", "bytes", "empty", "channels", "tile", "overlap", "negative"],
)
def test_wrong_input_is_refused(lq, arguments, message):
    with pytest.raises(ValueError, match=message):
        restore(ConvNet(), lq, **arguments)


def test_a_network_that_lies_about_its_scale_is_found_out():
    net = ConvNet(scale=2)
    net.scale = 3
    net.forward = lambda x: F.interpolate(x, scale_factor=2)
    with pytest.raises(ValueError, match=r"scale of 3 .*\(1, 3, 8, 8\) gave \(1, 3, 16, 16\)"):
        restore(net, _picture(8, 8))


def test_the_picture_may_lie_on_another_device_than_the_network():
    """The result stays where the picture is; checked with the one device that every machine has besides the CPU."""
    net = ConvNet(scale=2).to("meta")
    assert restore(net, _picture(8, 8).to("meta")).device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pieces_travel_to_the_network_and_the_result_comes_back():
    net, lq = ConvNet(), _picture(70, 90)
    expected = restore(net, lq)
    result = restore(net.cuda(), lq, tile=32)
    assert result.device.type == "cpu"
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_precision_on_a_gpu_returns_float32_that_is_close():
    net, lq = ConvNet().cuda(), _picture(70, 90)
    result = restore(net, lq, tile=32, dtype=torch.float16)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, restore(net, lq), rtol=0, atol=5e-3)
    assert inference_dtype("auto", torch.device("cuda")) in (None, torch.bfloat16)
