"""Coreset attention by Triton, interpreted: the same keys as the reference by the same noise, and all that follows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kernels import launch
from kernels.coreset_attention import compress_kv, limits, weighted_attention, wildcat_attention
from kernels.coreset_attention.arguments import make_settings
from kernels.dispatch import KernelUnavailable, available, explain

ROOT = Path(__file__).resolve().parents[2]
# name: b, m_heads, heads, m, n, d, dv, and how keys are compressed; small, since a step takes 20 ms here
CASES = {
    "one bin": ((1, 1, 1, 9, 23, 6, 5), {"rank": 5}),
    "uneven tiles, groups": ((2, 2, 1, 5, 35, 3, 4), {"rank": 8, "bins": 4, "grid": (5, 7)}),
    "strips, many queries": ((1, 2, 2, 70, 24, 4, 1), {"rank": 6, "bins": 2, "grid": (4, 6), "layout": "strips"}),
    "slices, greedy": ((1, 1, 1, 3, 19, 5, 17), {"rank": 6, "bins": 2, "sampler": "greedy"}),
    "equal chances": ((1, 1, 1, 1, 20, 17, 2), {"rank": 4, "bins": 2, "sampler": "uniform", "recentre": False}),
}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])


def drawn(b, m_heads, heads, m, n, d, dv, dtype=torch.float64):
    shapes = (b, m_heads, m, d), (b, heads, n, d), (b, heads, n, dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(tensors, *, wrap=lambda x: x, backend="triton", **options):
    """The output, and the gradients of q, k and v for a fixed upstream gradient."""
    leaves = [wrap(x.detach().clone().requires_grad_()) for x in tensors]
    out = wildcat_attention(*leaves, backend=backend, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def close(found, expected, limit):
    for a, b in zip(found, expected, strict=True):
        # a NaN would pass no comparison
        assert (a.double() - b.double()).norm() <= limit * b.double().norm(), float((a.double() - b.double()).norm())


def equal_coresets(found, expected, limit):
    assert found.pivots.equal(expected.pivots)
    for name in ("keys", "values", "weights", "lower", "upper", "gamma", "tau"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=limit, atol=limit)


@pytest.fixture
def streamed(monkeypatch):
    """Bins are streamed in blocks of 16 keys, and queries and coresets in blocks of 16."""
    from kernels.coreset_attention import fused_layout

    chosen = {"BLOCK": 16, "num_warps": 4}, {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
    monkeypatch.setattr(fused_layout, "HELD_FACTOR", 0)
    monkeypatch.setattr(launch, "settings", lambda op, key, *_, **__: dict(chosen[key.startswith("attend")]))


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestAgainstTheReference:
    @pytest.mark.usefixtures("guarded_outputs")
    @by_case
    def test_the_same_noise_gives_the_same_keys_and_gradients(self, case, guards):
        sizes, options = case
        tensors = drawn(*sizes)
        found = with_gradients(tensors, wrap=guards.around, **options)
        close(found, with_gradients(tensors, backend="reference", **options), 1e-10)
        coresets = [compress_kv(*tensors[1:], backend=backend, **options) for backend in ("triton", "reference")]
        equal_coresets(*coresets, 1e-10)

    @pytest.mark.usefixtures("guarded_outputs", "streamed")
    @by_case
    def test_blocks_of_a_bin_one_after_the_other_as_well(self, case, guards):
        sizes, options = case
        tensors = drawn(*sizes)
        found = with_gradients(tensors, wrap=guards.around, **options)
        close(found, with_gradients(tensors, backend="reference", **options), 1e-10)

    @pytest.mark.usefixtures("guarded_outputs")
    @pytest.mark.parametrize("way", ["held", "streamed"])
    def test_what_is_masked_may_be_anything_and_gets_no_gradient(self, way, request):
        if way == "streamed":
            request.getfixturevalue("streamed")
        q, k, v = drawn(2, 2, 2, 4, 30, 4, 3)
        options = {"rank": 6, "bins": 3, "grid": (5, 6), "key_mask": torch.rand(2, 2, 30) > 0.4}
        # a bin without keys, and an image's head without any
        options["key_mask"][0, 0, :12], options["key_mask"][1, 1] = False, False
        gone = ~options["key_mask"][..., None]
        tensors = [q, *(x.masked_fill(gone, torch.nan) for x in (k, v))]
        found = with_gradients(tensors, **options)
        close(found, with_gradients([q, k, v], backend="reference", **options), 1e-10)
        assert not any(gradient.masked_select(gone).any() for gradient in found[2:])

    @pytest.mark.parametrize("way", ["held", "streamed"])
    def test_float32(self, way, request):
        if way == "streamed":
            request.getfixturevalue("streamed")
        tensors = drawn(1, 2, 1, 17, 63, 6, 5, torch.float32)
        options = {"rank": 12, "bins": 4, "grid": (7, 9), "noise": torch.rand(4, 3, 20)}
        wide = [x.double() for x in tensors]
        pivots = [
            compress_kv(*x[1:], query_radius=3.0, backend=backend, **options).pivots
            for x, backend in ((tensors, "triton"), (wide, "reference"))
        ]
        # what follows holds for given pivots only, and rounding might choose others
        assert pivots[0].equal(pivots[1])
        close(with_gradients(tensors, **options), with_gradients(wide, backend="reference", **options), 3e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_16_bits(self, dtype):
        tensors = drawn(1, 1, 1, 9, 40, 8, 8, dtype)
        options = {"rank": 8, "bins": 2}
        found = with_gradients(tensors, **options)
        assert {x.dtype for x in found} == {dtype}
        wide = with_gradients([x.double() for x in tensors], backend="reference", **options)
        # P is rounded, and so are the logits' operands
        close(found, wide, 3e-2 if dtype == torch.bfloat16 else 4e-3)
        coreset = compress_kv(*tensors[1:], backend="triton", **options)
        equal_coresets(coreset, compress_kv(*tensors[1:], backend="torch", **options), 2e-5)

    def test_keys_that_are_all_alike_leave_slots_empty(self):
        q, k, v = drawn(1, 1, 1, 3, 24, 4, 3)
        k = k[:, :, :1].expand_as(k).clone()
        options = {"rank": 8, "bins": 2, "backend": "triton"}
        coreset = compress_kv(k, v, **options)
        assert coreset.pivots.ge(0).sum() == 2
        torch.testing.assert_close(coreset.weights.sum(), torch.tensor(24.0).double())
        out = wildcat_attention(q, k, v, **options)
        torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out), rtol=0, atol=1e-12)
        # two kinds of keys in each bin: two slots each, and exact
        k[:, :, ::2] += 0.5
        exact = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(wildcat_attention(q, k, v, **options), exact, rtol=0, atol=1e-9)

    def test_all_keys_are_exact_attention(self):
        tensors = drawn(1, 2, 2, 40, 21, 4, 3)
        found = with_gradients(tensors, rank=21)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = F.scaled_dot_product_attention(*leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        close(found, [out.detach(), *torch.autograd.grad(out, leaves, upstream)], 1e-12)

    def test_weights_that_cancel_give_the_mean_and_no_gradient(self):
        q, keys, values = drawn(1, 1, 1, 4, 3, 5, 2)
        coreset = compress_kv(keys, values, rank=3)
        # equal keys whose weights add up to nothing
        coreset = coreset._replace(keys=keys[:, :, :1].expand_as(keys), weights=torch.tensor([[[1.0, 1, -2]]]).double())
        q = q.requires_grad_()
        out = weighted_attention(q, coreset, backend="triton")
        torch.testing.assert_close(out, weighted_attention(q, coreset, backend="reference"))
        assert not torch.autograd.grad(out.sum(), q)[0].any()

    def test_places_past_the_coreset_do_not_take_the_softmax(self):
        from kernels.coreset_attention import fused, torch_impl
        from kernels.coreset_attention.torch_impl import Compressed

        q, keys, values = drawn(1, 1, 1, 4, 5, 3, 2)
        coreset = compress_kv(keys, values, rank=5)
        own = Compressed(*coreset, keys[:, :, :1] * 0, values.mean(dim=2, keepdim=True))
        # logits so far below those of empty places, 0, that nothing of them would be left
        own, q = own._replace(keys=-1e3 - keys), q.abs() + 10
        torch.testing.assert_close(fused.attend(q, own, 1.0), torch_impl.attend(q, own, 1.0), rtol=0, atol=1e-10)

    def test_a_result_beyond_the_values_is_cut_off_with_its_gradient(self):
        q, keys, values = drawn(1, 1, 1, 30, 6, 3, 4)
        coreset = compress_kv(keys, values, rank=6)
        coreset = coreset._replace(lower=coreset.lower / 9, upper=coreset.upper / 9)
        outs, gradients = [], []
        for backend in ("triton", "torch"):
            own = q.clone().requires_grad_()
            outs.append(weighted_attention(own, coreset, backend=backend))
            gradients.append(torch.autograd.grad(outs[-1].square().sum(), own)[0])
        assert (outs[0] == coreset.upper[..., None, :]).any()
        close([outs[0], gradients[0]], [outs[1], gradients[1]], 1e-10)

    def test_views_give_what_their_copies_give(self):
        q, k, v = drawn(2, 2, 2, 15, 15, 4, 4)
        options = {"rank": 4, "bins": 2, "grid": (3, 5)}
        expected = with_gradients([q, k, v], backend="reference", **options)
        packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
        views = [
            [x.mT.contiguous().mT for x in (q, k, v)],
            packed.permute(2, 0, 3, 1, 4).unbind(0),
            [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)],
        ]
        for tensors in views:
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = wildcat_attention(*leaves, backend="triton", **options)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            close([out.detach(), *torch.autograd.grad(out, leaves, upstream)], expected, 1e-10)
        # what has tokens side by side stays so
        assert wildcat_attention(*views[0], backend="triton", **options).stride(2) == 1
        # the gradient of a sum has strides of zero
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        sums = [wildcat_attention(*leaves, backend=backend, **options).sum() for backend in ("triton", "reference")]
        close(*(torch.autograd.grad(total, leaves) for total in sums), 1e-10)

    def test_nothing_to_do_gives_nothing(self):
        for sizes in ((0, 1, 1, 3, 8, 2, 2), (1, 1, 1, 0, 8, 2, 2)):
            found = with_gradients(drawn(*sizes), rank=2, bins=2)
            assert [x.shape for x in found[:2]] == [(*sizes[:2], sizes[3], 2)] * 2
            assert not any(x.any() for x in found[1:])

    def test_twice_the_same_bits_and_each_image_alone(self):
        tensors = drawn(2, 2, 1, 20, 24, 4, 3, torch.float32)
        options = {"rank": 4, "bins": 2}
        first, second = (with_gradients(tensors, **options) for _ in range(2))
        assert all(a.equal(b) for a, b in zip(first, second, strict=True))
        alone = wildcat_attention(*(x[1:] for x in tensors), backend="triton", **options)
        assert alone.equal(first[0][1:])

    def test_how_the_sums_over_queries_are_split_does_not_matter(self, monkeypatch, streamed):
        from kernels.coreset_attention import fused

        tensors = drawn(1, 2, 1, 50, 12, 3, 3)
        expected = with_gradients(tensors, rank=4, backend="reference")
        for programs in (1, 3):
            monkeypatch.setattr(fused, "PROGRAMS", programs)
            close(with_gradients(tensors, rank=4), expected, 1e-10)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestAsAnOperator:
    def test_the_gradients_are_the_derivatives(self):
        # of the keys they are not: choice and weights depend on them, and are constants
        q, k, v = (x.requires_grad_() for x in drawn(1, 1, 1, 2, 8, 2, 2))
        options = {"rank": 2, "backend": "triton", "query_radius": 1.0}

        def values_of(v):
            return compress_kv(k.detach(), v, **options).values

        assert torch.autograd.gradcheck(values_of, [v], fast_mode=True)
        coreset = compress_kv(k.detach(), v.detach(), **options)

        def attended(q, keys, values, weights):
            own = coreset._replace(keys=keys, values=values, weights=weights)
            return weighted_attention(q, own, backend="triton")

        leaves = [q, *(x.detach().requires_grad_() for x in (coreset.keys, coreset.values, coreset.weights))]
        assert torch.autograd.gradcheck(attended, leaves, fast_mode=True)

    def test_they_are_operators_as_pytorch_wants_them(self):
        from kernels.coreset_attention import fused

        q, k, v = (x.mT.contiguous().mT for x in drawn(1, 1, 1, 3, 8, 2, 2))
        means, radius = [x.mean(dim=2) for x in (k, v)], torch.ones(1, 1).double()
        own = [x.clone().requires_grad_() for x in (k, v)]
        options = ([1, 8, 1, 2], 2, 0.5, 1.0, False, True)
        torch.library.opcheck(fused.choose, (*own, *means, radius, None, None, torch.rand(1, 2, 2, 4), *options))
        found = fused.choose(k, v, *means, radius, None, None, None, *options)
        keys, values, weights, pivots, _, _, back, rows, lower = found
        kept = (keys, values, k, v, pivots, back, rows, lower, [1, 8, 1, 2], 2)
        torch.library.opcheck(fused.spread, kept)
        bounds = (means[1], *(x(v, dim=2) for x in (torch.amin, torch.amax)))
        leaves = [x.detach().clone().requires_grad_() for x in (q, keys, values, weights)]
        torch.library.opcheck(fused.attend_forward, (*leaves, *bounds, 0.5, True))
        constants = [x.detach() for x in leaves]
        torch.library.opcheck(fused.attend_forward, (*constants, *bounds, 0.5, False))
        out, centred, lse = fused.attend_forward(q, keys, values, weights, *bounds, 0.5, True)
        given = (torch.randn_like(out), q, keys, values, weights, *bounds, centred, lse, 0.5)
        torch.library.opcheck(fused.attend_backward, given)

    def test_it_compiles_to_one_graph_forwards_and_backwards(self):
        torch._dynamo.reset()
        options = {"rank": 4, "bins": 2, "grid": (4, 3)}
        compiled = torch.compile(
            lambda *t: wildcat_attention(*t, backend="triton", **options), fullgraph=True, backend="aot_eager"
        )
        leaves = [x.requires_grad_() for x in drawn(1, 2, 1, 5, 12, 3, 2)]
        out = compiled(*leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = [out.detach(), *torch.autograd.grad(out, leaves, upstream)]
        close(found, with_gradients(leaves, backend="reference", **options), 1e-10)

    def test_a_second_derivative_is_refused_in_words(self):
        q, k, v = (x.requires_grad_() for x in drawn(1, 1, 1, 2, 6, 2, 2))
        out = wildcat_attention(q, k, v, rank=2, backend="triton")
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
            dq.sum().backward()

    def test_it_is_chosen_on_request_only_where_it_is_interpreted(self):
        q, k, v = drawn(1, 1, 1, 2, 6, 2, 2)
        assert available("coreset_attention", k, v)[0] == "triton"
        assert explain("coreset_attention", k, v).startswith("coreset_attention: torch, chosen automatically")
        for options, reason in (
            ({"rank": 2, "sampler": "cdf"}, '"gumbel" draws by the same law'),
            ({"rank": 130, "noise": None}, "64 keys of a bin fit the registers, not 130"),
        ):
            tokens = k.repeat(1, 1, 50, 1)
            with pytest.raises(KernelUnavailable, match=reason):
                wildcat_attention(q, tokens, tokens, backend="triton", **options)
        wide = k.repeat(1, 1, 1, 64)
        with pytest.raises(KernelUnavailable, match="64 channels of keys and values fit the registers, not 128"):
            wildcat_attention(q.repeat(1, 1, 1, 64), wide, v, rank=2, backend="triton")


def test_edges_of_bins_that_pass_32_bits_are_refused():
    reasons = [
        limits.settings_reasons(make_settings(n, rank=4096, bins=4096, grid=None, layout=None, sampler="gumbel"))
        for n in (2**19 - 1, 2**19)
    ]
    assert reasons == [[], ["a side of the grid times its bins must be less than 2**31"]]


def test_without_cuda_it_is_refused_with_the_reason():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    with pytest.raises(KernelUnavailable, match="triton"):
        wildcat_attention(*drawn(1, 1, 1, 2, 6, 2, 2), rank=2, backend="triton")


@pytest.mark.aot
def test_it_compiles_for_hopper_and_ampere_without_spills():
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "scripts.aot_report",
        "--op",
        "coreset_attention",
        "--match",
        "choose_held SST w64",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 compiled, 0 failed" in done.stdout


@pytest.mark.interpreter
@pytest.mark.parametrize("where", ["key", "query"])
def test_a_streamed_bin_shows_nan_in_every_row(interpreter, streamed, where):
    # 19 places are no whole blocks of 16: in the last block some places hold no key
    q, k, v = drawn(1, 1, 1, 3, 19, 4, 2)
    (k if where == "key" else q)[0, 0, 1, 0] = torch.nan
    out = wildcat_attention(q, k, v, rank=3, recentre=False, backend="triton")
    assert wildcat_attention(q, k, v, rank=3, recentre=False, backend="reference").isnan().all()
    assert out.isnan().all()
