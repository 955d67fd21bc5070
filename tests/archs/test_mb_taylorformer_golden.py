"""MB-TaylorFormer against float64 outputs of the published networks in tests/golden, and their tables."""

import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from archs import ARCHS
from archs.mb_taylorformer import PRESETS
from kernels import tiles
from kernels.dispatch import use_backend

GOLDEN = Path(__file__).parents[1] / "golden" / "mb_taylorformer"
VERSIONS = {"v1_B_2x48x64": "MB-TaylorFormer-B", "v2_B_2x48x64": "MB-TaylorFormerV2-B"}
LIMITS = {torch.float64: 1e-8, torch.float32: 1e-5}
SMALLEST_TILES = {"CPU_TILE": 1, "CPU_LEAST": 0, "ROWS": 1, "LEAST_COLUMNS": 4}
by_version = pytest.mark.parametrize("version", VERSIONS)
by_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=str)
by_preset = pytest.mark.parametrize("preset", PRESETS)


def golden_weight(key, shape):
    """The weight that the golden values give to a state-dict key."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) & 0x7FFFFFFF)
    r = torch.randn(shape, generator=generator, dtype=torch.float64)
    if key.endswith("one_M"):
        r = torch.ones_like(r)
    elif key.endswith("temperature"):
        r = 1 + 0.2 * r
    elif key.endswith("body.weight") and len(shape) <= 2:
        r = 1 + 0.1 * r
    elif key.endswith("conv_du.1.weight"):
        r = torch.full_like(r, 0.25)
    elif key.endswith(".bias"):
        r = 0.1 * r
    elif not key.endswith(".scale"):
        r = r / math.sqrt(math.prod(shape[1:])) * (0.2 if "project_out" in key else 1)
        r = r * (2 if "offset_generator.1" in key else 1)
    return r.float()


@pytest.fixture(scope="module")
def networks():
    found = {}
    for version, preset in VERSIONS.items():
        net = ARCHS.build(PRESETS[preset])
        net.load_state_dict({key: golden_weight(key, tuple(v.shape)) for key, v in net.state_dict().items()})
        found[version] = net.eval()
    return found


def golden_images(dtype):
    i, c, y, x = np.meshgrid(*(np.arange(n, dtype=np.float64) for n in (2, 3, 48, 64)), indexing="ij")
    images = 0.5 + 0.25 * np.sin(0.31 * y * (c + 1) + 0.17 * x + i) + 0.2 * np.cos(0.05 * x * y / (c + 2) + 0.7 * c)
    return torch.from_numpy(images.clip(0, 1).astype(np.float32)).to(dtype)


def distance(found, version):
    expected = np.load(GOLDEN / f"{version}.npz")["y"] / 2.0**29
    assert found.shape == expected.shape
    return float(np.abs(found.double().numpy() - expected).max())


@by_dtype
@by_version
@torch.no_grad()
def test_the_network_gives_what_the_published_one_gives(version, dtype, networks):
    out = networks[version].to(dtype)(golden_images(dtype))
    assert out.dtype == dtype
    assert distance(out, version) < LIMITS[dtype]


@by_version
@torch.no_grad()
def test_so_it_does_in_the_smallest_tiles_and_without_tiles(version, networks, monkeypatch):
    net, images = networks[version].float(), golden_images(torch.float32)
    for name, value in SMALLEST_TILES.items():
        monkeypatch.setattr(tiles, name, value)
    assert distance(net(images), version) < LIMITS[torch.float32]
    monkeypatch.setattr(tiles, "_strips", lambda *_, **__: None)
    assert distance(net(images), version) < LIMITS[torch.float32]


@by_version
@torch.no_grad()
def test_so_it_does_by_the_definitions_of_its_operators(version, networks):
    with use_backend("reference"):
        out = networks[version].float()(golden_images(torch.float32))
    assert distance(out, version) < LIMITS[torch.float32]


def published_shapes(preset):
    """Keys and shapes of the published state dict, written out from the table of keys."""
    p, shapes = PRESETS[preset], {}
    d = p["dim"]

    def resize(name, into, out):
        shapes[f"{name}.body.0.weight"], shapes[f"{name}.body.1.weight"] = (into, 1, 3, 3), (out, into, 1, 1)

    for level in range(3):
        shapes |= stage_shapes(f"encoder_level{level + 1}", p, d[level], level)
        resize(f"down{level + 1}_{level + 2}", d[level], d[level + 1] // 4)
        resize(f"up{level + 2}_{level + 1}", d[level + 1], 4 * d[level])
    # at full size: twice the channels, the rest as in the first level
    places = {"latent": (3, 3), "decoder_level3": (2, 2), "decoder_level2": (1, 1)}
    for name, (width, level) in {**places, "decoder_level1": (1, 0), "refinement": (1, 0)}.items():
        shapes |= stage_shapes(name, p, d[width], level)
    shapes["patch_embed.proj.weight"] = (d[0], 3, 3, 3)
    shapes["reduce_chan_level3.0.weight"] = (d[2], 2 * d[2], 1, 1)
    shapes["reduce_chan_level2.0.weight"] = (d[1], 2 * d[1], 1, 1)
    shapes["output.0.weight"] = (3, d[1], 3, 3)
    return shapes


def stage_shapes(name, p, c, level):
    blocks, heads, branches = p["num_blocks"][level], p["heads"][level], p["num_path"][level]
    shapes = {f"{name}.aggregate.conv_du.0.weight": (max(c // 8, 4), c, 1, 1)}
    shapes[f"{name}.aggregate.conv_du.1.weight"] = (1,)
    for i in range(branches):
        shapes[f"{name}.aggregate.fcs.{i}.weight"] = (c, max(c // 8, 4), 1, 1)
        key = f"patch_embed_{name}.patch_embeds.{i}.patch_conv"
        shapes[f"{key}.offset_generator.0.weight"] = shapes[f"{key}.dcn.weight"] = (c, 1, 3, 3)
        shapes[f"{key}.offset_generator.1.weight"] = (18, c, 1, 1)
        shapes[f"{key}.pwconv.weight"] = (c, c, 1, 1)
    for j in range(blocks):
        if p["type"] == "MBTaylorFormerV2":
            shapes |= block_shapes(f"{name}.mhca_blk.MHCA_layers.{j}", c, heads, branches)
        else:
            for i in range(branches):
                shapes |= block_shapes(f"{name}.mhca_blks.{i}.MHCA_layers.{j}", c, heads, None)
    return shapes


def block_shapes(key, c, heads, branches):
    """Of one branch, or in version 2 of all branches."""
    kernels = {1: ((3, 1),), 2: ((3, 2),), 4: ((3, 2), (5, 2)), 8: ((3, 2), (5, 3), (7, 3))}[heads]
    v2, m, p, stacked = branches is not None, int(2.66 * c), branches or 1, (branches,) if branches else ()
    shapes = {f"{key}.norm{i}.body.weight": (*stacked, c) for i in (1, 2)}
    shapes[f"{key}.attn.temperature"] = (*stacked, heads, 1, 1)
    if v2:
        shapes[f"{key}.attn.scale"], shapes[f"{key}.attn.one_M"] = (p, heads, 1, 1), (1,)
    shapes[f"{key}.attn.qkv.weight"] = (3 * c * p, c, 1, 1)
    shapes[f"{key}.attn.qkv_dwconv.weight"] = (3 * c * p, 1, 3, 3)
    shapes[f"{key}.attn.project_out.weight"] = (c * p, c, 1, 1)
    for g, (k, count) in enumerate(kernels):
        gate = f"{key}.attn.refine_att.conv_list.{g}"
        shapes[f"{gate}.weight"] = (count * p, (1 if v2 else 2) * c // heads, k, k)
        shapes[f"{gate}.bias"] = (count * p,)
    for end, factor in (("_1", p), ("_2", p)) if v2 else (("", 2),):
        shapes[f"{key}.ffn.project_in{end}.weight"] = (m * factor, c, 1, 1)
        shapes[f"{key}.ffn.dwconv{end}.weight"] = (m * factor, 1, 3, 3)
    shapes[f"{key}.ffn.project_out.weight"] = (c * p, m, 1, 1)
    return shapes


# parameters, trained ones, tensors in the state dict
SIZES = {
    "MB-TaylorFormer-B": (2_676_520, 2_676_520, 652),
    "MB-TaylorFormer-L": (7_432_472, 7_432_472, 1_625),
    "MB-TaylorFormerV2-B": (2_629_458, 2_629_436, 470),
    "MB-TaylorFormerV2-L": (7_295_572, 7_295_528, 853),
    "MB-TaylorFormerV2-XL": (16_257_900, 16_257_856, 853),
}


def on_meta(preset):
    with torch.device("meta"):
        return ARCHS.build(PRESETS[preset])


def test_the_presets_are_the_five_published_networks():
    assert set(PRESETS) == set(SIZES)


@by_preset
def test_a_published_network_has_the_published_keys_and_shapes(preset):
    assert {key: tuple(v.shape) for key, v in on_meta(preset).state_dict().items()} == published_shapes(preset)


@by_preset
def test_a_published_network_has_the_published_size(preset):
    net = on_meta(preset)
    parameters = list(net.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert (sum(p.numel() for p in parameters), trained, len(net.state_dict())) == SIZES[preset]
    assert not list(net.buffers())


# billions of multiplications with an addition, for 256 x 256 pixels
GIGA_MACS = {
    "MB-TaylorFormer-B": 35.35,
    "MB-TaylorFormer-L": 80.11,
    "MB-TaylorFormerV2-B": 38.26,
    "MB-TaylorFormerV2-L": 86.37,
    "MB-TaylorFormerV2-XL": 130.91,
}
# the level, counted from 0, at whose size something is computed, if its name does not say so
LEVELS = {"latent": 3, "refinement": 0, "patch_embed": 0, "output": 0, "down1_2": 0, "down2_3": 1, "down3_4": 2}
LEVELS |= {"up4_3": 3, "up3_2": 2, "up2_1": 1}


def macs(preset, pixels):
    """Counted from the weights: convolutions, deformable ones as if they were not, without the bilinear weights; keys
    by values and queries by those, and one scalar product for the denominator. No norms, activations or fusion.
    """
    p, total = PRESETS[preset], 0
    terms = 2 if p["type"] == "MBTaylorFormerV2" else 1
    for key, value in on_meta(preset).state_dict().items():
        name = key.split(".")[0].removeprefix("patch_embed_")
        level = LEVELS[name] if name in LEVELS else int(name[-1]) - 1
        here = pixels // 4**level
        if ".aggregate." in key:
            continue
        if value.ndim == 4 and value.shape[1] * value.shape[2] * value.shape[3] > 1 and not key.endswith("scale"):
            total += value.numel() * here
        if key.endswith("attn.project_out.weight"):
            # channels of all branches
            c, head = value.shape[0], value.shape[1] // p["heads"][level]
            total += terms * c * (2 * head + 1) * here
    return total


@by_preset
def test_a_published_network_has_the_published_cost_less_the_repeated_denominators(preset):
    assert macs(preset, 256 * 256) / 1e9 == pytest.approx(GIGA_MACS[preset], abs=0.01)


@pytest.mark.parametrize("preset", VERSIONS.values())
@torch.no_grad()
def test_no_more_than_that_is_computed(preset, monkeypatch):
    # tiles compute the pixels around them again
    monkeypatch.setattr(tiles, "_strips", lambda *_, **__: None)
    with FlopCounterMode(display=False) as counter:
        ARCHS.build(PRESETS[preset]).requires_grad_(False)(torch.rand(1, 3, 16, 24))
    assert 0.7 * macs(preset, 16 * 24) < counter.get_total_flops() / 2 <= 1.01 * macs(preset, 16 * 24)
