"""SST's state: factors kept in inference and dropped in time, dtypes of the attention, start from another scale."""

import copy
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F

from archs.layers import WeightCache
from archs.sst import RIBAttention
from kernels.dispatch import use_backend


def calls_of_factors(net, monkeypatch):
    calls, factors = [], RIBAttention.factors
    monkeypatch.setattr(RIBAttention, "factors", lambda self, *size: calls.append(self) or factors(self, *size))
    return calls


def test_factors_are_computed_once_in_inference_and_always_in_training(monkeypatch, build):
    net, x = build(), torch.rand(1, 3, 5, 5)
    calls = calls_of_factors(net, monkeypatch)
    with torch.no_grad():
        net(x), net(x)
    with torch.inference_mode():
        net(x)
    assert len(calls) == 2
    net.train()
    net(x), net(x)
    assert len(calls) == 6


def writes():
    def by_data(p):
        p.data.add_(1)

    def by_data_copy(p):
        p.data.copy_(torch.randn_like(p))

    def new_data(p):
        p.data = torch.randn_like(p)

    def in_place(p):
        with torch.no_grad():
            p.mul_(2)

    def in_inference_mode(p):
        with torch.inference_mode():
            p.mul_(2)

    def by_foreach(p):
        torch._foreach_add_([p.data], 1.0)

    return [by_data, by_data_copy, new_data, in_place, in_inference_mode, by_foreach]


@pytest.mark.parametrize("leaf", ["to_hidden", "hidden_b", "to_q", "to_k"])
@pytest.mark.parametrize("write", writes(), ids=lambda f: f.__name__)
def test_factors_follow_every_write_to_their_weights(write, leaf, build):
    net, x = build(), torch.rand(1, 3, 5, 5)
    with torch.no_grad():
        before = net(x)
        write(getattr(net.body[0][1].attn, leaf))
        after = net(x)
        assert not torch.equal(before, after)
        assert torch.equal(after, copy.deepcopy(net)(x))


def test_factors_follow_a_state_dict_an_optimizer_and_a_change_of_dtype(build):
    net, x = build(), torch.rand(1, 3, 5, 5)
    with torch.no_grad():
        net(x)
        for assign in (False, True):
            other = build()
            net.load_state_dict(other.state_dict(), assign=assign)
            assert torch.equal(net(x), other(x))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(x).mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(net(x), copy.deepcopy(net).train()(x))
        net.double()
        assert torch.equal(net(x.double()), copy.deepcopy(net)(x.double()))
        assert torch.equal(net.float()(x), copy.deepcopy(net)(x))


def test_factors_that_were_kept_in_inference_mode_do_not_disturb_training(build):
    net, x = build(), torch.rand(1, 3, 5, 5)
    with torch.inference_mode():
        net(x)
    net(x).mean().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_copy_starts_without_kept_factors(build):
    net, x = build(), torch.rand(1, 3, 5, 5)
    with torch.no_grad():
        net(x)
    attn = net.body[0][0].attn
    assert attn._cache._entry is not None
    for twin in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn)), attn.eval()):
        assert twin._cache._entry is None


@torch.no_grad()
def test_versions_and_storages_tell_a_change_where_values_are_not_compared(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    cache, weight, calls = WeightCache(), torch.nn.Parameter(torch.zeros(2)), []

    def get(key=0):
        return cache.get([weight], key, lambda: calls.append(key) or len(calls))

    assert [get(), get()] == [1, 1]
    weight.add_(1)
    assert [get(), get()] == [2, 2]
    weight.data = torch.zeros(2)
    assert [get(), get()] == [3, 3]
    assert [get(1), get(1), get(0)] == [4, 4, 5]
    cache.clear()
    assert get() == 6


def test_nothing_is_kept_of_weights_without_values_or_versions():
    cache, meta = WeightCache(), torch.zeros(2, device="meta")
    with torch.no_grad():
        assert [cache.get([meta], 0, lambda n=n: n) for n in range(2)] == [0, 1]
    with torch.inference_mode():
        frozen = torch.zeros(2)
        assert [cache.get([frozen], 0, lambda n=n: n) for n in range(2)] == [0, 1]


def test_features_stay_float32_and_are_there_after_meta_construction(build):
    x = torch.rand(1, 3, 5, 5)
    net = build()
    for module in (net.bfloat16(), net.half(), net.double()):
        assert module.body[0][0].attn.rib_coords.dtype == torch.float32
    net = net.float()
    with torch.device("meta"):
        late = build()
    late.to_empty(device="cpu").load_state_dict(net.state_dict())
    torch.testing.assert_close(late.eval()(x), net(x))
    assert not any("rib_coords" in key for key in net.state_dict())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_attention_runs_in_the_dtype_that_was_asked_for(name, monkeypatch, build):
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q.dtype) or attend(q, *a, **k)
    )
    net, x = build(attention_dtype=name), torch.rand(1, 3, 5, 5)
    with use_backend("sdpa"):
        assert net(x).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(x)
    assert set(seen) == {getattr(torch, name)}


def test_auto_is_the_type_of_the_input_on_the_cpu(monkeypatch, build):
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q.dtype) or attend(q, *a, **k)
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with use_backend("sdpa"):
            build().to(dtype)(torch.rand(1, 3, 5, 5, dtype=dtype))
        assert set(seen) == {dtype}
        seen.clear()


def test_factors_are_computed_in_float32_under_autocast(build):
    attn = build().body[0][1].attn
    expected = attn.factors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attn.factors()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["pixelshuffle", "pixelshuffle_direct"])
@pytest.mark.parametrize(("source", "target"), [(2, 3), (3, 4), (4, 2)])
def test_a_state_dict_of_another_scale_is_resampled_with_a_notice(kind, source, target, caplog, build):
    settings = {"upsampler_type": kind, "intermediate_dim": 5}
    old, net = build(**settings, upscaling_factor=source), build(**settings, upscaling_factor=target)
    given = old.state_dict()
    before = {key: value.clone() for key, value in given.items()}
    with caplog.at_level(logging.INFO, logger="pellucid"):
        assert not any(net.load_state_dict(given))
    assert [r.getMessage() for r in caplog.records] == [
        f"upsampler.up_conv: resampled from scale {source} to scale {target}"
    ]
    assert all(torch.equal(given[key], value) for key, value in before.items())
    for leaf in ("weight", "bias"):
        found, original = getattr(net.upsampler.up_conv, leaf), getattr(old.upsampler.up_conv, leaf)
        group = 5 if kind == "pixelshuffle" else 3
        for channel in range(group):
            grid = original.reshape(group, source, source, -1)[channel].permute(2, 0, 1)[None]
            expected = F.interpolate(grid, size=(target, target), mode="bilinear", align_corners=False)[0]
            torch.testing.assert_close(found.reshape(group, target, target, -1)[channel].permute(2, 0, 1), expected)


def test_loading_the_same_scale_says_nothing_and_changes_nothing(caplog, build):
    old, net = build(), build()
    net.load_state_dict(old.state_dict())
    assert not caplog.records
    assert torch.equal(net.upsampler.up_conv.weight, old.upsampler.up_conv.weight)


def test_a_backbone_without_upsampler_loads_when_it_may_be_incomplete(build):
    net, sd = build(upscaling_factor=3), build().state_dict()
    backbone = {key: value for key, value in sd.items() if not key.startswith("upsampler")}
    missing, unexpected = net.load_state_dict(backbone, strict=False)
    assert set(missing) == {"upsampler.up_conv.weight", "upsampler.up_conv.bias"}
    assert not unexpected
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict(backbone)


def test_a_network_inside_another_module_starts_from_another_scale_too(build):
    outer = torch.nn.ModuleDict({"net": build(upscaling_factor=4)})
    outer.load_state_dict({f"net.{key}": value for key, value in build().state_dict().items()})
    assert outer["net"].upsampler.up_conv.weight.shape[0] == 48


def test_a_state_dict_that_fits_no_scale_is_refused(build):
    sd = build().state_dict()
    sd["upsampler.up_conv.weight"] = torch.zeros(13, 8, 3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for upsampler\.up_conv\.weight"):
        build().load_state_dict(sd)
    with pytest.raises(RuntimeError, match="size mismatch"):
        build(dim=16).load_state_dict(build(upscaling_factor=3).state_dict())
