"""SST beyond the golden values: each variant against a plain formula, initialisation, facts, errors."""

import math

import pytest
import torch
import torch.nn.functional as F

from archs import ARCHS
from archs.sst import rib_features
from kernels.dispatch import use_backend

SMALL = {"dim": 8, "window_sizes": (2, 4), "num_heads": 2, "ranks": (2, 3), "n_blocks": 1, "rib_n_freqs": 3}


class Plain:
    """SST from its state dict, step by step: padding by torch, windows by loops, a softmax written out."""

    def __init__(self, net):
        self.net, self.sd = net, net.state_dict()

    def __call__(self, x):
        features = y = self.conv(x, "proj")
        for b, block in enumerate(self.net.body[:-2]):
            z = y
            for i, layer in enumerate(block[:-1]):
                key = f"body.{b}.{i}"
                z = z + self.attention(self.norm(z, f"{key}.norm_attn"), f"{key}.attn", layer.attn)
                hidden = F.gelu(self.conv(self.norm(z, f"{key}.norm_ffn"), f"{key}.ffn.proj"))
                hidden = hidden + F.gelu(self.conv(hidden, f"{key}.ffn.dwc", groups=hidden.shape[1]))
                z = z + self.conv(hidden, f"{key}.ffn.agg")
            y = y + self.conv(z, f"body.{b}.{len(block) - 1}")
        last = len(self.net.body) - 1
        return self.upsampler(features + self.conv(self.norm(y, f"body.{last - 1}"), f"body.{last}"), x)

    def conv(self, x, key, groups=1):
        weight = self.sd[f"{key}.weight"]
        return F.conv2d(x, weight, self.sd[f"{key}.bias"], padding=weight.shape[-1] // 2, groups=groups)

    def norm(self, x, key):
        variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        weight, bias = (self.sd[f"{key}.{leaf}"].view(1, -1, 1, 1) for leaf in ("weight", "bias"))
        return (x - mean) / torch.sqrt(variance + 1e-6) * weight + bias

    def gate(self, x, key):
        if f"{key}.gate.1.weight" in self.sd:
            return torch.sigmoid(self.conv(self.conv(x, f"{key}.gate.0", groups=x.shape[1]), f"{key}.gate.1"))
        return torch.sigmoid(self.conv(x, f"{key}.gate.0")) if f"{key}.gate.0.weight" in self.sd else 1

    def attention(self, x, key, attn):
        b, dim, h, w = x.shape
        window, heads, move = attn.window, attn.heads, attn.window // 2 if attn.shift else 0
        padded = F.pad(x, (0, -w % window, 0, -h % window), mode="reflect").roll((-move, -move), dims=(2, 3))
        qkv, out = self.conv(padded, f"{key}.to_qkv"), torch.zeros_like(padded)
        bias = self.table_bias(key, attn) if f"{key}.relative_position_bias" in self.sd else self.rib_bias(key, attn)
        for top in range(0, padded.shape[2], window):
            for left in range(0, padded.shape[3], window):
                tile = qkv[:, :, top : top + window, left : left + window].reshape(b, 3, heads, dim // heads, -1)
                q, k, v = tile.mT.unbind(1)
                merged = torch.softmax(q @ k.mT / math.sqrt(dim // heads) + bias, -1) @ v
                out[:, :, top : top + window, left : left + window] = merged.mT.reshape(b, dim, window, window)
        out = out.roll((move, move), dims=(2, 3))[:, :, :h, :w]
        return self.conv(out * self.gate(x, key), f"{key}.to_out")

    def rib_bias(self, key, attn):
        if f"{key}.to_q" not in self.sd:
            return 0
        features = rib_features(attn.window, 0 if attn.siren else attn.n_freqs).double()
        hidden = features @ self.sd[f"{key}.to_hidden"] + self.sd[f"{key}.hidden_b"]
        hidden = torch.sin(30 * hidden) if attn.siren else hidden.clamp(min=0)
        to_q, to_k = self.sd[f"{key}.to_q"], self.sd[f"{key}.to_k"]
        return torch.einsum("nd,hdr,me,her->hnm", hidden, to_q, hidden, to_k) / math.sqrt(to_q.shape[-1])

    def table_bias(self, key, attn):
        table, w = self.sd[f"{key}.relative_position_bias"], attn.window
        bias = table.new_zeros(attn.heads, w**2, w**2)
        for i in range(w**2):
            for j in range(w**2):
                dy, dx = j // w - i // w, j % w - i % w
                bias[:, i, j] = table[:, (dy + w - 1) * (2 * w - 1) + dx + w - 1]
        return bias

    def upsampler(self, y, x):
        scale = self.net.scale
        if "upsampler.final_conv.weight" in self.sd:
            y = F.leaky_relu(self.conv(y, "upsampler.feature_conv"), 0.1)
            y = self.conv(F.pixel_shuffle(self.conv(y, "upsampler.up_conv"), scale), "upsampler.final_conv")
            return y + larger(x, scale)
        if "upsampler.up_conv.weight" in self.sd:
            return F.pixel_shuffle(self.conv(y, "upsampler.up_conv"), scale) + larger(x, scale)
        image = F.leaky_relu(self.conv(self.conv(x, "upsampler.f_img.0"), "upsampler.f_img.1"), 0.1)
        y = F.leaky_relu(self.conv(y + self.conv(image, "upsampler.f_img.3"), "upsampler.f.0"), 0.1)
        index = 2
        for factor in {3: [3], 4: [2, 2]}.get(scale, [scale]):
            y = F.leaky_relu(self.conv(larger(y, factor), f"upsampler.f.{index + 1}"), 0.1)
            index += 3
        return self.conv(y, f"upsampler.f.{index}")


def larger(x, scale):
    return x.repeat_interleave(scale, 2).repeat_interleave(scale, 3)


VARIANTS = {
    "RIB": {},
    "RIBSiren": {"attn_type": "RIBSiren"},
    "NoPE": {"attn_type": "NoPE", "ranks": None},
    "RPB": {"attn_type": "RPB", "ranks": None},
    "a rank that fills the head to 256": {"ranks": None},
    "no octaves": {"rib_n_freqs": 0},
    "defaults of RIB": {"rib_n_freqs": None, "rib_hidden_dim": None},
    "linear gate": {"gate_type": "Linear"},
    "no gate": {"gate_type": None},
    "heads per layer": {"num_heads": (1, 4), "ranks": 2},
    "shifted windows": {"window_sizes": (4, 4)},
    "one layer": {"window_sizes": (3,), "ranks": (2,), "n_blocks": 2},
    "pixelshuffle x3": {"upsampler_type": "pixelshuffle", "intermediate_dim": 6, "upscaling_factor": 3},
    "direct x4": {"upscaling_factor": 4},
    "direct x1": {"upscaling_factor": 1},
    "nn+conv x2": {"upsampler_type": "nn+conv", "intermediate_dim": 6},
    "nn+conv x3": {"upsampler_type": "nn+conv", "intermediate_dim": 6, "upscaling_factor": 3},
    "nn+conv x4": {"upsampler_type": "nn+conv", "intermediate_dim": 6, "upscaling_factor": 4},
    "one channel": {"in_channels": 1, "exp_ratio": 1.3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=[name.replace(" ", "-") for name in VARIANTS])
def test_a_variant_is_its_formula(changes, build):
    net = build(**changes).double()
    x = torch.rand(2, net.in_channels, 7, 10, dtype=torch.float64)
    torch.testing.assert_close(net(x), Plain(net)(x), rtol=0, atol=1e-11)


def test_the_shift_is_that_of_every_other_layer_when_all_windows_are_equal(build):
    shifts = [layer.attn.shift for layer in build(window_sizes=(4, 4, 4), ranks=2).body[0][:-1]]
    assert shifts == [False, True, False]
    assert not any(layer.attn.shift for layer in build().body[0][:-1])


@pytest.mark.parametrize("name", ["Naive", "SDPA", "Flex"])
def test_the_published_names_of_the_table_build_it(name, build):
    assert "body.0.0.attn.relative_position_bias" in build(attn_type=name).state_dict()


@pytest.mark.parametrize("name", ["none", "None", None])
def test_no_gate_has_three_spellings(name, build):
    assert not any("gate" in key for key in build(gate_type=name).state_dict())


def test_a_rank_of_none_fills_the_head_up_to_256(build):
    assert build(ranks=(None, 3)).body[0][0].attn.to_q.shape == (2, 32, 256 - 8 // 2)


def test_features_go_by_octaves_without_pi():
    x, y = 2 * (5 + 0.5) / 8 - 1, 2 * (2 + 0.5) / 8 - 1
    row = [x, y]
    for i in range(3):
        row += [math.sin(2**i * x), math.sin(2**i * y), math.cos(2**i * x), math.cos(2**i * y)]
    torch.testing.assert_close(rib_features(8, 3)[2 * 8 + 5], torch.tensor(row))


@pytest.mark.parametrize("attn_type", ["RIB", "RPB", "NoPE"])
def test_every_backend_gives_the_same_network(attn_type, build):
    net, x = build(attn_type=attn_type), torch.rand(1, 3, 9, 6)
    expected = net(x)
    for backend in ("torch", "reference"):
        with use_backend("window_attention", backend):
            torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


def test_initialisation_is_the_published_one(build):
    net = ARCHS.build({"type": "SST", **{**SMALL, "dim": 64, "ranks": 16}})
    attn = net.body[0][0].attn
    assert all(not m.bias.any() for m in net.modules() if isinstance(m, torch.nn.Conv2d))
    assert 0.018 < float(attn.to_qkv.weight.detach().std()) < 0.022
    assert all(0.045 < float(p.detach().std()) < 0.055 for p in (attn.to_hidden, attn.to_q, attn.to_k))
    assert not attn.hidden_b.any()
    bound = 1 / math.sqrt(64 * 9)
    assert 0.9 * bound < float(net.body[-1].weight.detach().abs().max()) <= bound
    siren = ARCHS.build({"type": "SST", **{**SMALL, "ranks": 16}, "attn_type": "RIBSiren"}).body[0][0].attn
    assert 0.45 < float(siren.to_hidden.detach().abs().max()) <= 0.5
    assert 0.9 < float(siren.to_q.detach().abs().max()) / (math.sqrt(6 / 32) / 30) <= 1


def test_facts(build):
    net = build(window_sizes=(4, 6), upscaling_factor=3)
    assert (net.scale, net.multiple_of, net.minimum, net.halo, net.tile_multiple) == (3, 1, 1, None, 12)
    assert (net.in_channels, net.out_channels) == (3, 3)


def test_tiles_that_start_at_whole_windows_see_the_same_windows(build):
    attn, image = build(gate_type=None).body[0][1].attn, torch.rand(1, 8, 8, 12)
    torch.testing.assert_close(attn(image)[..., 4:], attn(image[..., 4:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide dim=8, got 3; these do: 1, 2, 4, 8"),
        ({"num_heads": (2, 3)}, "got 3"),
        ({"num_heads": (2,)}, r"num_heads must have one entry per layer \(2\), got \(2,\)"),
        ({"ranks": (2, 3, 4)}, "ranks must have one entry per layer"),
        ({"ranks": (2, 0)}, r"ranks\[1\] must be an integer of at least 1, got 0"),
        ({"window_sizes": ()}, "window_sizes must have one entry"),
        ({"window_sizes": (4, -8)}, r"window_sizes\[1\] .* got -8"),
        ({"dim": 0}, "dim must be an integer of at least 1, got 0"),
        ({"n_blocks": 1.5}, "n_blocks .* got 1.5"),
        ({"upscaling_factor": 0}, "upscaling_factor .* got 0"),
        ({"in_channels": 0}, "in_channels .* got 0"),
        ({"intermediate_dim": 0}, "intermediate_dim .* got 0"),
        ({"exp_ratio": 0.01}, r"dim \* exp_ratio .* got 0"),
        ({"rib_hidden_dim": 0}, "rib_hidden_dim .* got 0"),
        ({"rib_n_freqs": -1}, "rib_n_freqs must be an integer of at least 0, got -1"),
        ({"dim": 512, "ranks": None}, "256 - dim / num_heads, which is 0; give the rank"),
        ({"attn_type": "RIBSirene"}, "did you mean RIBSiren"),
        ({"gate_type": "DW"}, "did you mean DWC"),
        ({"upsampler_type": "pixelshufle"}, "did you mean pixelshuffle"),
        ({"attention_dtype": "bf16"}, "Known: auto, float32, bfloat16, float16"),
        ({"upsampler_type": "nn+conv", "upscaling_factor": 6}, "3 or a power of two, got 6"),
    ],
)
def test_a_bad_argument_fails_at_construction_with_its_value(changes, message, build):
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8)], ids=str)
def test_an_image_of_the_wrong_shape_is_refused(shape, build):
    with pytest.raises(ValueError, match=r"x must be \(b, 3, h, w\), got"):
        build()(torch.rand(shape))


def test_gradients_lie_in_memory_as_their_parameters_do(build):
    net = build(dim=12, upsampler_type="pixelshuffle").train().to(memory_format=torch.channels_last)
    net(torch.rand(2, 3, 9, 10)).sum().backward()
    strides = {name: (p.stride(), p.grad.stride()) for name, p in net.named_parameters()}
    assert {name: pair for name, pair in strides.items() if pair[0] != pair[1]} == {}
