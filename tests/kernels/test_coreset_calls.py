"""How coreset attention is called: dtypes, autocast, views, compilers, the fallback of steep heads, refusals."""

import logging

import pytest
import torch

import kernels.coreset_attention as coreset_attention
from kernels.coreset_attention import compress_kv, noise_shape, weighted_attention, wildcat_attention
from kernels.dispatch import use_backend

by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])
LAYOUTS = {
    "one bin": {"rank": 9},
    "tiles": {"rank": 12, "bins": 4, "grid": (7, 9)},
    "all keys": {"rank": 63},
}
by_layout = pytest.mark.parametrize("options", LAYOUTS.values(), ids=list(LAYOUTS))


def drawn(*, b=1, m_heads=1, heads=1, m=9, n=63, d=6, dv=5, dtype=torch.float64):
    shapes = (b, m_heads, m, d), (b, heads, n, d), (b, heads, n, dv)
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_layout
def test_16_bit_inputs_are_compressed_in_float32(options, dtype):
    inputs = drawn(b=2, m_heads=2, heads=1, dtype=dtype)
    out = wildcat_attention(*inputs, **options)
    assert out.dtype == dtype
    single = wildcat_attention(*(x.float() for x in inputs), **options)
    torch.testing.assert_close(out, single.to(dtype), rtol=2e-2, atol=1e-6)
    coreset = compress_kv(*inputs[1:], **options)
    assert {coreset.keys.dtype, coreset.values.dtype, coreset.weights.dtype, coreset.tau.dtype} == {torch.float32}
    assert coreset.pivots.equal(compress_kv(*(x.float() for x in inputs[1:]), **options).pivots)


@by_backend
@pytest.mark.parametrize("fallback", [None, 0.0])
def test_dtypes_may_differ_and_the_queries_decide(fallback, backend):
    q, k, v = drawn()
    expected = wildcat_attention(q, k, v, rank=9, fallback_gamma=fallback, backend=backend)
    for types in ((torch.float32, torch.float64, torch.float32), (torch.bfloat16, torch.float32, torch.float64)):
        inputs = [x.to(dtype) for x, dtype in zip((q, k, v), types, strict=True)]
        out = wildcat_attention(*inputs, rank=9, fallback_gamma=fallback, backend=backend)
        assert out.dtype == types[0]
        torch.testing.assert_close(out.double(), expected, rtol=5e-2, atol=3e-2)


@by_backend
@pytest.mark.parametrize("fallback", [None, 0.0])
def test_autocast_changes_nothing(fallback, backend):
    inputs = [x.requires_grad_() for x in drawn(dtype=torch.float32)]
    options = {"rank": 9, "fallback_gamma": fallback, "backend": backend}
    expected = wildcat_attention(*inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = wildcat_attention(*inputs, **options)
        coreset = compress_kv(*inputs[1:], rank=9, backend=backend)
        attended = weighted_attention(inputs[0], coreset, backend=backend)
    assert out.equal(expected)
    assert attended.equal(
        weighted_attention(inputs[0], compress_kv(*inputs[1:], rank=9, backend=backend), backend=backend)
    )
    for a, b in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (out, expected)), strict=True):
        assert a.equal(b)


@by_layout
def test_views_give_what_their_copies_give(options):
    q, k, v = drawn(b=2, heads=2, m_heads=2)
    expected = wildcat_attention(q, k, v, **options)
    views = [
        [x.mT.contiguous().mT for x in (q, k, v)],
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)],
        [x.contiguous(memory_format=torch.channels_last) for x in (q, k, v)],
    ]
    for inputs in views:
        torch.testing.assert_close(wildcat_attention(*inputs, **options), expected, rtol=0, atol=1e-12)
    one = wildcat_attention(q[:1], k[:1], v[:1], **options)
    expanded = wildcat_attention(*(x[:1].expand(3, -1, -1, -1) for x in (q, k, v)), **options)
    torch.testing.assert_close(expanded, one.expand(3, -1, -1, -1), rtol=0, atol=1e-12)


def test_empty_batches_and_no_queries_give_empty_results():
    q, k, v = drawn(b=2)
    assert wildcat_attention(q[:0], k[:0], v[:0], rank=9).shape == (0, 1, 9, 5)
    assert wildcat_attention(q[:, :, :0], k, v, rank=9).shape == (2, 1, 0, 5)


def test_inputs_are_left_as_they_were():
    inputs = drawn()
    copies = [x.clone() for x in inputs]
    wildcat_attention(*inputs, rank=9, bins=3, recentre=False)
    assert all(a.equal(b) for a, b in zip(inputs, copies, strict=True))


def test_a_compiler_traces_the_whole_with_its_gradient():
    inputs = [x.requires_grad_() for x in drawn(n=32)]
    options = {"rank": 4, "bins": 2, "grid": (4, 8), "key_mask": torch.rand(1, 32) > 0.2}

    def attend(*tensors, seed):
        return wildcat_attention(*tensors, seed=seed, **options)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    for seed in (torch.tensor(1), torch.tensor(2)):
        out, expected = compiled(*inputs, seed=seed), attend(*inputs, seed=seed)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def steep(**sizes):
    """Of two heads, the second one has logits that no coreset reaches."""
    q, k, v = drawn(b=2, m_heads=4, heads=2, **sizes)
    q[:, 2:] *= 8
    k[:, 1] *= 8
    return q, k, v


@by_backend
@pytest.mark.parametrize("masked", [False, True], ids=["all there", "masked"])
def test_heads_above_the_limit_are_exact_and_others_untouched(masked, backend):
    q, k, v = (x.requires_grad_() for x in steep())
    there = torch.rand(2, 63) > 0.4 if masked else None
    if masked:
        k, v = (x.detach().masked_fill(~there[:, None, :, None], torch.nan).requires_grad_() for x in (k, v))
    options = {"rank": 9, "key_mask": there, "backend": backend}
    plain = wildcat_attention(q, k, v, fallback_gamma=1e9, **options)
    out = wildcat_attention(q, k, v, fallback_gamma=20.0, **options)
    exact = wildcat_attention(q, k, v, **{**options, "rank": 63})
    assert out[:, :2].equal(plain[:, :2])
    torch.testing.assert_close(out[:, 2:], exact[:, 2:], rtol=0, atol=1e-12)
    assert not torch.allclose(plain[:, 2:], exact[:, 2:], atol=1e-2)
    upstream = torch.randn_like(out)
    mixed = torch.cat([plain[:, :2], exact[:, 2:]], dim=1)
    found, expected = (torch.autograd.grad(x, (q, k, v), upstream, retain_graph=True) for x in (out, mixed))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(coreset_attention, "_warned", set())
    monkeypatch.setattr(coreset_attention, "_calls", {"gamma": 0})


@pytest.mark.usefixtures("unwarned")
def test_a_poor_approximation_is_told_of_once(caplog):
    q, k, v = steep()
    with caplog.at_level(logging.WARNING, logger="pellucid"):
        wildcat_attention(q[:, :2], k[:, :1], v[:, :1], rank=9)
        wildcat_attention(q, k, v, rank=63)
        wildcat_attention(q, k, v, rank=9, fallback_gamma=20.0)
        assert not caplog.messages
        for _ in range(2):
            wildcat_attention(q, k, v, rank=9)
    assert len(caplog.messages) == 1
    assert "fallback_gamma" in caplog.messages[0]


@pytest.mark.usefixtures("unwarned")
def test_the_look_for_a_warning_becomes_rare(monkeypatch):
    # on a GPU each look waits for it
    q, k, v = drawn(n=16)
    looks, truth = [], torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: (looks.append(call), truth(x))[1])
    for call in range(1, 18):  # noqa: B007  the patch reads it
        wildcat_attention(q, k, v, rank=4)
    assert set(looks) == {1, 2, 4, 8, 16}


def test_a_fallback_is_refused_while_a_compiler_traces():
    torch._dynamo.reset()
    compiled = torch.compile(wildcat_attention, backend="eager")
    with pytest.raises(ValueError, match="fallback_gamma looks at values"):
        compiled(*drawn(n=16), rank=4, fallback_gamma=3.0)


def test_the_backend_can_be_chosen_from_outside():
    q, k, v = drawn()
    expected = wildcat_attention(q, k, v, rank=9, backend="reference")
    with use_backend("coreset_attention", "reference"):
        assert wildcat_attention(q, k, v, rank=9).equal(expected)


X = torch.zeros(2, 2, 12, 4)
WRONG = {
    "q of three dimensions": ({"q": X[0]}, "q must be"),
    "q of another batch": ({"q": X[:1]}, "q must be .* b=2"),
    "q of another width": ({"q": X[..., :3]}, "q must be .* d=4"),
    "whole q": ({"q": X.long()}, "q must be of a float dtype, got torch.int64"),
    "heads that do not divide": ({"q": X.repeat(1, 2, 1, 1)[:, :3]}, "multiple of the 2 of k, got 3"),
    "k of three dimensions": ({"k": X[0]}, "k must be"),
    "no tokens": ({"k": X[:, :, :0], "v": X[:, :, :0]}, "k must be .* n, d >= 1"),
    "whole k": ({"k": X.long()}, "k must be of a float dtype"),
    "v of other tokens": ({"v": X[:, :, :5]}, "v must have the batch, heads, tokens"),
    "v of other heads": ({"v": X[:, :1]}, "v must have the batch, heads, tokens"),
    "whole v": ({"v": X.bool()}, "v must be of a float dtype"),
    "rank 0": ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
    "a half rank": ({"rank": 2.5}, "rank must be a whole number"),
    "a true rank": ({"rank": True}, "rank must be a whole number"),
    "no bins": ({"bins": 0}, "bins must be a whole number"),
    "scale 0": ({"scale": 0.0}, "scale must be a positive number, got 0"),
    "scale nan": ({"scale": float("nan")}, "scale must be a positive number, got nan"),
    "a grid of other tokens": ({"grid": (3, 5)}, r"grid must be \(h, w\) with h \* w = 12 tokens, got \(3, 5\)"),
    "a negative grid": ({"grid": (-3, -4)}, "grid must be"),
    "a grid of three": ({"grid": (3, 2, 2)}, "grid must be"),
    "a wrong grid of slices": ({"grid": (3, 5), "layout": "slices"}, "grid must be"),
    "tiles without a grid": ({"layout": "tiles"}, "layout 'tiles' needs grid"),
    "strips without a grid": ({"layout": "strips"}, "layout 'strips' needs grid"),
    "an unknown layout": ({"layout": "rows"}, "layout must be one of tiles, strips, slices, got 'rows'"),
    "a mask of numbers": ({"key_mask": torch.ones(2, 12)}, "key_mask must be a bool tensor"),
    "a mask of other tokens": ({"key_mask": torch.ones(2, 11, dtype=torch.bool)}, "key_mask must be a bool tensor"),
    "an unknown sampler": ({"sampler": "random"}, "sampler must be one of gumbel, cdf, greedy, uniform, got 'random'"),
    "noise of another shape": ({"noise": torch.rand(1, 3, 12)}, r"noise must be uniforms of shape \(1, 4, 12\)"),
    "noise for a draw of another kind": ({"noise": torch.rand(1, 4, 12), "sampler": "cdf"}, r"noise .* \(1, 4, 1\)"),
    "wrong noise where nothing is drawn": ({"noise": torch.rand(1, 3, 12), "sampler": "greedy"}, "noise must be"),
    "whole noise": ({"noise": torch.ones(1, 4, 12).long()}, "noise must be uniforms"),
    "noise and generator": ({"noise": torch.rand(1, 4, 12), "generator": torch.Generator()}, "give one of them"),
    "a broken seed": ({"seed": 0.5}, "seed must be a whole number"),
    "seeds": ({"seed": torch.tensor([1, 2])}, "seed must be a whole number"),
    "tau_mult 0": ({"tau_mult": 0.0}, "tau_mult must be a positive number, got 0"),
    "a fallback that is no number": ({"fallback_gamma": float("nan")}, "fallback_gamma must be a number"),
    "an unknown backend": ({"backend": "refrence"}, "did you mean reference"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments_are_named_in_the_refusal(change, message):
    arguments = {"q": X, "k": X, "v": X, "rank": 4, **change}
    with pytest.raises(ValueError, match=message):
        wildcat_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("radius", [-1.0, float("nan"), torch.ones(3)], ids=str)
def test_a_wrong_query_radius_is_refused(radius):
    with pytest.raises(ValueError, match="query_radius must be"):
        compress_kv(X, X, rank=4, query_radius=radius)


def test_what_does_not_fit_the_coreset_is_refused():
    coreset = compress_kv(X, X, rank=4)
    with pytest.raises(ValueError, match="scale must be a positive number"):
        weighted_attention(X, coreset, scale=-1.0)
    with pytest.raises(ValueError, match="q must be"):
        weighted_attention(X[..., :3], coreset)


def test_a_shape_of_noise_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bins must be a whole number"):
        noise_shape(12, rank=4, bins=0, grid=(3, 4))
