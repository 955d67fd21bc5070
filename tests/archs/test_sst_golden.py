"""SST against values computed in float64 and checked against the published implementation (tests/golden/sst)."""

import pytest
import torch

from archs import ARCHS
from archs.layers import LayerNorm2d, Upsampler
from archs.sst import PRESETS, ConvFFN, RIBAttention, rib_features

by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
UPSAMPLERS = [("pixelshuffle_direct", 64, 2), ("pixelshuffle", 64, 3), ("pixelshuffle", 96, 4)]
SIZES = [(16, 8), (19, 13)]
NETWORKS = ["tiny_direct_x2", "tiny_ps_x3"]
BF16 = {"largest": 2e-2, "mean": 2e-3}


def published_shapes(preset, scale):
    """Keys and shapes of the published state dict, written out from the table of keys."""
    p, shapes = PRESETS[preset], {}
    dim, hidden = p["dim"], int(p["dim"] * p["exp_ratio"])

    def conv(key, out, into, size):
        shapes[f"{key}.weight"], shapes[f"{key}.bias"] = (out, into, size, size), (out,)

    def norm(key):
        shapes[f"{key}.weight"] = shapes[f"{key}.bias"] = (dim,)

    conv("proj", dim, 3, 3)
    for block in range(p["n_blocks"]):
        for i, rank in enumerate(p["ranks"]):
            layer, heads = f"body.{block}.{i}", p["num_heads"][i]
            norm(f"{layer}.norm_attn")
            norm(f"{layer}.norm_ffn")
            shapes[f"{layer}.attn.to_hidden"], shapes[f"{layer}.attn.hidden_b"] = (42, 32), (1, 32)
            shapes[f"{layer}.attn.to_q"] = shapes[f"{layer}.attn.to_k"] = (heads, 32, rank)
            conv(f"{layer}.attn.to_qkv", 3 * dim, dim, 1)
            conv(f"{layer}.attn.to_out", dim, dim, 1)
            conv(f"{layer}.attn.gate.0", dim, 1, 3)
            conv(f"{layer}.attn.gate.1", dim, dim, 1)
            conv(f"{layer}.ffn.proj", hidden, dim, 1)
            conv(f"{layer}.ffn.dwc", hidden, 1, 3)
            conv(f"{layer}.ffn.agg", dim, hidden, 1)
        conv(f"body.{block}.6", dim, dim, 3)
    norm(f"body.{p['n_blocks']}")
    conv(f"body.{p['n_blocks'] + 1}", dim, dim, 3)
    if p["upsampler_type"] == "pixelshuffle_direct":
        conv("upsampler.up_conv", 3 * scale**2, dim, 3)
    else:
        mid = p["intermediate_dim"]
        conv("upsampler.feature_conv", mid, dim, 3)
        conv("upsampler.up_conv", mid * scale**2, mid, 3)
        conv("upsampler.final_conv", 3, mid, 3)
    return shapes


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_published_network_has_the_published_keys_shapes_and_size(preset, scale, golden):
    with torch.device("meta"):
        net = ARCHS.build({"type": "SST", **PRESETS[preset], "upscaling_factor": scale})
    shapes = {key: tuple(value.shape) for key, value in net.state_dict().items()}
    assert shapes == published_shapes(preset, scale)
    expected = golden.records[f"params/{preset}_X{scale}"]
    assert sum(p.numel() for p in net.parameters()) == expected["total"]
    assert len(shapes) == expected["keys"]


def test_the_windows_are_the_published_ones():
    cycles = {name: p["window_sizes"] for name, p in PRESETS.items()}
    plus = (16, 32, 48, 32, 48, 96)
    assert all(cycle == plus for name, cycle in cycles.items() if name.endswith("_Plus"))
    assert cycles["SSTlight"] == (8, 16, 32, 16, 32, 64)
    assert cycles["SST"] == cycles["SSTLarge"] == (16, 32, 64, 16, 32, 64)


@pytest.mark.parametrize("window", [8, 48])
def test_rib_features(window, golden):
    golden.check(f"rib_features/ws{window}", rib_features(window, 10), largest=2e-7)


def attention(golden, *, dim, heads, window, rank, dtype, attention_dtype=None):
    module = RIBAttention(
        dim=dim, window=window, heads=heads, rank=rank, gate_type="DWC", shift=False, attention_dtype=attention_dtype
    )
    return golden.named(module, dtype)


@by_dtype
def test_positional_factors(dtype, golden):
    q_pos, k_pos = attention(golden, dim=48, heads=3, window=8, rank=16, dtype=dtype).factors()
    golden.check("attn/D48h3ws8R16/q_pos", q_pos)
    golden.check("attn/D48h3ws8R16/k_pos", k_pos)
    golden.check("attn/D48h3ws8R16/bias", q_pos @ k_pos.mT / 4)
    q_pos, k_pos = attention(golden, dim=180, heads=6, window=16, rank=18, dtype=dtype).factors()
    golden.check("attn/D180h6ws16R18/bias", q_pos @ k_pos.mT / 18**0.5)


@by_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention(size, dtype, golden):
    module = attention(golden, dim=48, heads=3, window=8, rank=16, dtype=dtype)
    x = golden.normal(f"attn/D48h3ws8R16{size}", (2, 48, *size), dtype)
    golden.check(f"attn/D48h3ws8R16/{size[0]}x{size[1]}/out", module(x))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_in_bfloat16(size, golden):
    settings = {"dtype": torch.float32, "attention_dtype": torch.bfloat16}
    module = attention(golden, dim=48, heads=3, window=8, rank=16, **settings)
    out = module(golden.normal(f"attn/D48h3ws8R16{size}", (2, 48, *size)))
    assert out.dtype == torch.float32
    golden.check(f"attn/D48h3ws8R16/{size[0]}x{size[1]}/out", out, **BF16)
    with pytest.raises(AssertionError):
        golden.check(f"attn/D48h3ws8R16/{size[0]}x{size[1]}/out", out)


@by_dtype
def test_feed_forward_layer_and_norm(dtype, golden):
    x = golden.normal("ffn", (1, 48, 9, 11), dtype)
    golden.check("ffn/out", golden.named(ConvFFN(48, 72), dtype)(x))
    golden.check("ln/out", golden.named(LayerNorm2d(48), dtype)(x))


@by_dtype
@pytest.mark.parametrize(("kind", "mid", "scale"), UPSAMPLERS)
def test_upsampler(kind, mid, scale, dtype, golden):
    module = golden.named(Upsampler(48, scale=scale, kind=kind, intermediate_dim=mid), dtype)
    features = golden.normal("ffn", (1, 48, 9, 11), dtype)
    out = module(features, golden.image("img", (1, 3, 9, 11), dtype))
    golden.check(f"up/{kind}{mid}x{scale}", out)


def network(golden, name, **changes):
    return golden.named(ARCHS.build({"type": "SST", **golden.records[f"full/{name}"]["cfg"], **changes}))


@by_dtype
@pytest.mark.parametrize("name", NETWORKS)
def test_whole_network(name, dtype, golden):
    image = golden.image(name.rsplit("_x", 1)[0], golden.records[f"full/{name}"]["input"], dtype)
    golden.check(f"full/{name}", network(golden, name).to(dtype)(image))


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_network_with_attention_in_bfloat16(name, golden):
    image = golden.image(name.rsplit("_x", 1)[0], golden.records[f"full/{name}"]["input"])
    golden.check(f"full/{name}", network(golden, name, attention_dtype="bfloat16")(image), **BF16)


def test_start_from_another_scale(golden):
    source = network(golden, "tiny_ps_x3", upscaling_factor=2)
    net = ARCHS.build({"type": "SST", **golden.records["full/tiny_ps_x3"]["cfg"]})
    net.load_state_dict(source.state_dict())
    golden.check("warm/2to3/w", net.upsampler.up_conv.weight)
    golden.check("warm/2to3/b", net.upsampler.up_conv.bias)


def test_every_record_has_its_test(golden):
    tested = {f"params/{preset}_X{scale}" for preset in PRESETS for scale in (2, 3, 4)}
    tested |= {"rib_features/ws8", "rib_features/ws48", "ffn/out", "ln/out", "warm/2to3/w", "warm/2to3/b"}
    tested |= {f"attn/D48h3ws8R16/{part}" for part in ("q_pos", "k_pos", "bias")} | {"attn/D180h6ws16R18/bias"}
    tested |= {f"attn/D48h3ws8R16/{h}x{w}/out" for h, w in SIZES} | {f"full/{name}" for name in NETWORKS}
    tested |= {f"up/{kind}{mid}x{scale}" for kind, mid, scale in UPSAMPLERS}
    assert set(golden.records) == tested
