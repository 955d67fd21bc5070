"""Networks with attention from a coreset: equal to the plain ones where they must be, near to them elsewhere."""

import copy
import math

import cv2
import pytest
import torch
import torch.nn.functional as F

from archs import ARCHS
from archs.sst import WindowAttention, rib_features
from archs.taylor_blocks import Attention
from kernels.coreset_attention import wildcat_attention

SST = {"dim": 16, "window_sizes": (8, 32), "num_heads": 2, "ranks": (3, 4), "n_blocks": 1, "rib_n_freqs": 2}
UNET = {"dim": (8, 16, 16, 24), "num_blocks": (1, 1, 1, 1), "heads": (1, 2, 4, 6), "num_path": (1, 2, 1, 1)}
# plain network, its arguments, those of its coresets: a large window, or the three finer levels of a small image
NETWORKS = {
    "WildCatSST": ("SST", SST, {"rank": 64, "bins": 4, "threshold": 32}),
    "WildCatMBTaylorFormer": ("MBTaylorFormer", UNET, {"rank": 64, "bins": 4, "threshold": 64}),
}
by_network = pytest.mark.parametrize("network", NETWORKS)


def pushed(net):
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.3 if "attn.to_" in name and p.ndim < 4 else 0.1)
    return net.eval()


def plain(network, **changes):
    kind, arguments, _ = NETWORKS[network]
    torch.manual_seed(0)
    return pushed(ARCHS.build({"type": kind, **arguments, **changes}))


def build(network, **changes):
    """A WildCat network; those that differ in their attention alone have the same weights."""
    _, arguments, coresets = NETWORKS[network]
    torch.manual_seed(0)
    return pushed(ARCHS.build({"type": network, **arguments, **coresets, **changes}))


def photo(*size, picture="train/astronaut.png"):
    """(1, 3, h, w) of a real photograph."""
    pixels = cv2.imread(f"datasets/quickstart/{picture}")[40 : 40 + size[0], 190 : 190 + size[1], ::-1]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 255


def cores(net):
    return [m.core for m in net.modules() if isinstance(m, WindowAttention | Attention)]


@torch.no_grad()
def by_mode(net, x, *modes):
    outputs = []
    for mode in modes:
        net.set_attention(mode)
        outputs.append(net(x))
    return outputs


def relative_error(found, expected, ablated):
    """Error on the scale of what attention does: 1 for the ablated network."""
    return float((found - expected).norm() / (ablated - expected).norm())


# the attention of SST is exact, that of MB-TaylorFormer its expansion
@pytest.mark.parametrize(("network", "mode"), [("WildCatSST", "exact"), ("WildCatMBTaylorFormer", "taylor")])
@torch.no_grad()
def test_the_plain_attention_is_the_plain_network_whose_weights_load_strictly(network, mode):
    net, x = plain(network), photo(40, 48)
    other = build(network, attention=mode)
    keys = {key: value.shape for key, value in net.state_dict().items()}
    assert keys == {key: value.shape for key, value in other.state_dict().items()}
    for p in other.parameters():
        p.zero_()
    other.load_state_dict(net.state_dict(), strict=True)
    assert torch.equal(other(x), net(x))
    other.set_attention("coreset")
    assert not torch.equal(other(x), net(x))


@by_network
@torch.no_grad()
def test_a_coreset_of_all_keys_is_exact(network):
    coreset, exact = by_mode(build(network, rank=1280, attention="exact"), photo(32, 40), "coreset", "exact")
    assert not torch.equal(coreset, exact)
    torch.testing.assert_close(coreset, exact, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_the_error_of_sst_on_a_photograph_falls_as_the_coreset_grows():
    x, errors = photo(64, 64), []
    exact, mean = by_mode(build("WildCatSST"), x, "exact", "mean")
    for rank in (16, 64, 256):
        errors.append(relative_error(build("WildCatSST", rank=rank)(x), exact, mean))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[1] < 0.05
    assert errors[2] < 0.005


@torch.no_grad()
def test_the_error_over_whole_images_falls_too():
    x, errors = photo(41, 50, picture="val/coffee.png"), []
    changes = {"window_sizes": (8, 0)}
    exact, mean = by_mode(build("WildCatSST", **changes), x, "exact", "mean")
    for rank in (16, 64, 256):
        errors.append(relative_error(build("WildCatSST", rank=rank, **changes)(x), exact, mean))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02


@torch.no_grad()
def test_the_error_of_mb_taylorformer_falls_where_the_expansion_cannot_follow():
    x, errors = photo(64, 72), []
    exact, taylor = by_mode(build("WildCatMBTaylorFormer", qk_norm=2.0), x, "exact", "taylor")
    for rank in (8, 32, 128):
        errors.append(relative_error(build("WildCatMBTaylorFormer", rank=rank, qk_norm=2.0)(x), exact, taylor))
    assert 0.1 > errors[0] > errors[1] > errors[2]


@torch.no_grad()
def test_at_the_published_length_softmax_and_expansion_are_near_to_each_other():
    x = photo(64, 72)
    coreset, exact, taylor = by_mode(build("WildCatMBTaylorFormer"), x, "coreset", "exact", "taylor")
    size = float((exact - x).norm())
    assert float((taylor - exact).norm()) < 1e-2 * size
    assert float((coreset - exact).norm()) < 1e-3 * size


@torch.no_grad()
def test_windows_of_the_threshold_attend_from_a_coreset_and_smaller_ones_do_not():
    x = photo(32, 32)
    at, above = (build("WildCatSST", threshold=threshold) for threshold in (32, 33))
    assert torch.equal(above(x), by_mode(above, x, "exact")[0])
    assert not torch.equal(at(x), by_mode(at, x, "exact")[0])


@torch.no_grad()
def test_images_of_the_threshold_attend_from_a_coreset_and_smaller_ones_do_not():
    net = build("WildCatSST", window_sizes=(8, 0), threshold=32, rank=8)
    for size, same in (((32, 31), True), ((32, 32), False), ((16, 64), False)):
        coreset, exact = by_mode(net, photo(*size), "coreset", "exact")
        assert torch.equal(coreset, exact) == same
    net = build("WildCatMBTaylorFormer", threshold=1024, rank=8)
    for size, same in (((32, 24), True), ((32, 32), False)):
        coreset, exact = by_mode(net, photo(*size), "coreset", "exact")
        assert torch.equal(coreset, exact) == same


@by_network
@torch.no_grad()
def test_in_evaluation_a_picture_gives_the_same_every_time_and_in_every_batch(network):
    net, x = build(network, rank=16), photo(40, 48)
    first = net(x)
    torch.manual_seed(5)
    assert torch.equal(net(x), first)
    batch = torch.cat([photo(40, 48, picture="val/coffee.png"), x, 1 - x])
    torch.testing.assert_close(net(batch)[1:2], first, rtol=1e-4, atol=2e-5)


@by_network
@torch.no_grad()
def test_in_training_other_keys_are_drawn_each_time_and_the_same_after_the_same_seed(network):
    net, x = build(network, rank=16).train(), photo(40, 48)
    outputs = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        outputs.append(net(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


@by_network
def test_checkpointing_draws_the_same_keys_again(network):
    net, x = build(network, rank=16).train(), photo(40, 48)
    first = gradients(net, x)
    net.set_grad_checkpointing()
    for found, expected in zip(gradients(net, x), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def gradients(net, x):
    torch.manual_seed(3)
    out = net(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(out, list(net.parameters()), upstream)


@by_network
def test_the_gradients_of_the_parameters_point_where_the_exact_ones_do(network):
    net, x = build(network).train(), photo(64, 64)
    found = gradients(net, x)
    net.set_attention("exact")
    for (name, _), a, b in zip(net.named_parameters(), found, gradients(net, x), strict=True):
        # the fusion of one branch has none
        if b.any():
            assert float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) >= 0.95, name


@torch.no_grad()
def test_the_mean_of_the_values_is_what_attention_without_queries_would_answer():
    net, x = build("WildCatSST", window_sizes=(8, 32, 0), ranks=3), photo(40, 48)
    (mean,) = by_mode(net, x, "mean")
    # queries of zero attend to all keys alike, in the two layers above the threshold
    for layer in net.body[0][1:3]:
        layer.attn.to_qkv.weight[:16].zero_()
        layer.attn.to_qkv.bias[:16].zero_()
        layer.attn.to_q.zero_()
    torch.testing.assert_close(mean, by_mode(net, x, "exact")[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (9, 11), (33, 20)], ids=str)
@torch.no_grad()
def test_a_window_of_zero_is_the_whole_image_of_any_size(size):
    net, (h, w) = build("WildCatSST", window_sizes=(0,), ranks=4, rank=16, attention="exact").double(), size
    attn, x = net.body[0][0].attn, torch.rand(2, 16, h, w, dtype=torch.float64)
    hidden = F.relu(rib_features((h, w), 2).double() @ attn.to_hidden + attn.hidden_b)
    q, k, v = attn.to_qkv(x).reshape(2, 3, 2, 8, h * w).mT.unbind(1)
    logits = q @ k.mT / math.sqrt(8) + (hidden @ attn.to_q) @ (hidden @ attn.to_k).mT / math.sqrt(4)
    expected = (logits.softmax(dim=-1) @ v).mT.reshape(2, 16, h, w)
    torch.testing.assert_close(attn(x), attn.to_out(expected * attn.gate(x)))
    net.set_attention("coreset")
    assert net(torch.rand(1, 3, *size, dtype=torch.float64)).shape == (1, 3, 2 * h, 2 * w)


@torch.no_grad()
def test_an_image_of_the_windows_size_is_one_window():
    (whole,) = by_mode(build("WildCatSST", window_sizes=(8, 0)), photo(32, 32), "exact")
    assert torch.equal(rib_features((32, 32), 2), rib_features(32, 2))
    torch.testing.assert_close(whole, plain("WildCatSST")(photo(32, 32)), rtol=1e-4, atol=2e-5)


def test_the_coordinates_are_stretched_to_height_and_width():
    xy = rib_features((2, 4), 0)
    assert xy.tolist() == [[x, y] for y in (-0.5, 0.5) for x in (-0.75, -0.25, 0.25, 0.75)]


@torch.no_grad()
def test_remembered_factors_are_those_of_the_size():
    net = build("WildCatSST", window_sizes=(8, 0), attention="exact")
    for size in ((9, 11), (11, 9), (9, 11)):
        assert torch.equal(net(photo(*size)), copy.deepcopy(net)(photo(*size)))


def test_tiles_start_at_the_windows_that_there_are():
    tiles = {sizes: build("WildCatSST", window_sizes=sizes, ranks=3).tile_multiple for sizes in ((8, 0, 12), (0, 0))}
    assert tiles == {(8, 0, 12): 24, (0, 0): 1}


@pytest.mark.parametrize(("window", "size"), [(0, (12, 40)), (24, (24, 24))], ids=["image", "window"])
@torch.no_grad()
def test_keys_are_chosen_from_tiles_of_the_window_or_image(window, size):
    net = build(
        "WildCatSST", window_sizes=(8, window), ranks=3, threshold=20, attn_type="NoPE", gate_type=None, rank=16
    )
    attn, x, (h, w) = net.body[0][1].attn, torch.randn(2, 16, *size), size
    q, k, v = attn.to_qkv(x).reshape(2, 3, 2, 8, h * w).mT.unbind(1)
    expected = wildcat_attention(q, k, v, rank=16, bins=4, grid=size).mT.reshape(2, 16, h, w)
    torch.testing.assert_close(attn(x), attn.to_out(expected), rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_so_they_are_at_each_level_of_mb_taylorformer():
    (core,) = cores(build("WildCatMBTaylorFormer", normalise=False, rank=16).encoder_level1)
    q, k, v = torch.randn(3, 1, 1, 8, 480)
    ones = torch.ones(1, 1, 480)
    expected = wildcat_attention(q.mT, k.mT, v.mT, rank=16, bins=4, grid=(12, 40)).mT
    torch.testing.assert_close(core(q, k, v, ones, ones[0, 0, :1], size=(12, 40)), expected, rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_positions_are_not_needed():
    net, x = build("WildCatSST", attn_type="NoPE", window_sizes=(8, 32, 0), ranks=3), photo(40, 48)
    coreset, exact, mean = by_mode(net, x, "coreset", "exact", "mean")
    assert relative_error(coreset, exact, mean) < 0.1


@torch.no_grad()
def test_every_layer_has_a_rank_and_bins_of_its_own():
    net = build("WildCatSST", rank=(32, 64), bins=(2, 4))
    assert [(core.rank, core.bins) for core in cores(net)] == [(32, 2), (64, 4)]
    net = build("WildCatMBTaylorFormer", rank=(40, 30, 20, 10), bins=(4, 3, 2, 1))
    for stage, rank in {"encoder_level1": 40, "decoder_level2": 30, "latent": 10, "refinement": 40}.items():
        assert {(core.rank, core.bins) for core in cores(getattr(net, stage))} == {(rank, rank // 10)}


@by_network
@torch.no_grad()
def test_heads_with_too_large_logits_fall_back_to_exact_attention(network):
    x, few = photo(32, 40), {"rank": 8}
    (exact,) = by_mode(build(network, **few), x, "exact")
    always, never = (build(network, fallback_gamma=gamma, **few)(x) for gamma in (1e-6, 1e6))
    torch.testing.assert_close(always, exact, rtol=1e-4, atol=2e-5)
    assert torch.equal(never, build(network, **few)(x))


@torch.no_grad()
def test_a_learned_temperature_starts_at_one_and_files_without_one_load():
    net = build("WildCatMBTaylorFormer", learned_temperature=True)
    added = set(net.state_dict()) - set(plain("WildCatMBTaylorFormer").state_dict())
    assert added == {key for key in net.state_dict() if key.endswith("attn.core.logit_scale")}
    assert len(added) == len(cores(net))
    net.load_state_dict(plain("WildCatMBTaylorFormer").state_dict(), strict=True)
    assert all((net.state_dict()[key] == 1).all() for key in added)
    x, other = photo(32, 40), build("WildCatMBTaylorFormer")
    other.load_state_dict(plain("WildCatMBTaylorFormer").state_dict())
    assert torch.equal(net(x), other(x))
    own = net.state_dict()
    for key in added:
        own[key] = own[key] * 3
    net.load_state_dict(own)
    assert not torch.equal(net(x), other(x))


@torch.no_grad()
def test_a_temperature_of_four_is_twice_the_length():
    net, x = build("WildCatMBTaylorFormer", learned_temperature=True, qk_norm=1.0, attention="exact"), photo(32, 40)
    core, gate = cores(net.encoder_level1)[0], torch.rand(1, 1, 1280)
    q, k, v = torch.rand(3, 1, 1, 8, 1280)
    core.logit_scale.fill_(4)
    found = core(q, k, v, gate, torch.ones(1), size=(32, 40))
    core.logit_scale.fill_(1)
    core.norm = 2.0
    torch.testing.assert_close(found, core(q, k, v, gate, torch.ones(1), size=(32, 40)), rtol=1e-4, atol=1e-5)
    assert net(x).isfinite().all()


@torch.no_grad()
def test_the_core_of_mb_taylorformer_is_softmax_attention_times_gate_and_temperature():
    q, k, v = torch.randn(3, 1, 2, 8, 80, dtype=torch.float64)
    gate, temperature = torch.rand(1, 2, 80, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    for changes, scale in (({"normalise": False}, 1 / math.sqrt(8)), ({"qk_norm": 3.0}, 9.0)):
        core = cores(build("WildCatMBTaylorFormer", attention="exact", **changes).encoder_level2)[0]
        a, b = (q, k) if "normalise" in changes else (F.normalize(x, dim=2) for x in (q, k))
        expected = v @ (a.mT @ b * scale).softmax(dim=-1).mT * temperature[:, None, None] * gate[:, :, None]
        found = core(q, k, v, gate, temperature, size=(8, 10))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@by_network
@torch.no_grad()
def test_autocast_and_16_bits_stay_near(network):
    net, x = build(network), photo(40, 48)
    expected = net(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [net(x).float()]
    outputs.append(net.bfloat16()(x.bfloat16()).float())
    for found in outputs:
        assert float((found - expected).norm()) < 0.02 * float(expected.norm())


@pytest.mark.parametrize(
    "changes", [{"attn_type": "RPB"}, {"window_sizes": (32, 32)}, {"attn_type": "RPB", "threshold": 33}], ids=str
)
@torch.no_grad()
def test_tables_and_shifted_windows_are_left_to_exact_attention(changes):
    net, x = build("WildCatSST", **changes, attention="exact"), photo(40, 36)
    if "threshold" in changes:
        net.set_attention("coreset")
    else:
        with pytest.raises(ValueError, match="attention=coreset takes no"):
            net.set_attention("coreset")
        assert {core.attention for core in cores(net)} == {"exact"}
    shared = {key: value for key, value in changes.items() if key != "threshold"}
    assert torch.equal(net(x), plain("WildCatSST", **shared)(x))


@by_network
def test_the_mode_is_seen_where_a_network_is_printed_and_survives_a_copy(network):
    net = build(network, attention="exact")
    assert "attention=exact, rank=64, bins=4" in str(net)
    assert {core.attention for core in cores(copy.deepcopy(net))} == {"exact"}
