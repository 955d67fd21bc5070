"""Operators in tiles: what the whole image gives, with every gradient, however it is cut."""

import pytest
import torch
from torch.nn import functional as F

from kernels import tiles
from kernels.tiles import Part, Span, in_tiles

BUDGETS = [1, 400, 2_000, 2**19]
SIZES = [(1, 1, 1), (2, 8, 8), (1, 17, 5), (3, 23, 11), (1, 64, 3), (1, 5, 700), (5, 9, 2)]
by_size = pytest.mark.parametrize("size", SIZES, ids=str)
# the widest intermediate of the chain, and the rows that it looks at
WIDTH, HALO = 8, 3


def chain(part, maps, images, shared):
    """Two convolutions one after the other, two maps, a factor for each image, something that looks at no neighbour."""
    (x, y), (factor,), (first, second, bias, scale) = maps, images, shared
    x = part.conv2d(x * scale, first, groups=1, reach=1).tanh()
    z = part.conv2d(x, second, bias, groups=2)
    return z * factor[:, :, None, None] + part.cut(y).exp()


def sums(part, maps, images, shared):
    z = chain(part, maps, images, shared)
    return torch.cat([z.sum(dim=(2, 3)), z.square().sum(dim=(2, 3))], dim=1)


def inputs(size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    b, h, w = size
    shapes = [[(b, 3, h, w), (b, 4, h, w)], [(b, 4)], [(8, 3, 5, 5), (4, 4, 3, 3), (4,), (1, 3, 1, 1)]]
    return [[torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in group] for group in shapes]


def with_gradients(run, tensors, *, whole=False, total=False, halo=HALO, width=WIDTH):
    """Result, and gradients by all tensors."""
    groups = [[x.detach().requires_grad_() for x in group] for group in tensors]
    leaves = [x for group in groups for x in group]
    if whole:
        out = run(Part.all(groups[0][0]), *groups)
    else:
        out = in_tiles(run, *groups, halo=halo, width=width, total=total)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_all_close(found, expected, atol=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol * max(1, float(b.abs().max())))


@pytest.fixture
def threads():
    """``threads(n)``: PyTorch uses n from now on."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def cut(monkeypatch):
    """``cut(n)``: from now on images of any size are cut, into tiles of about n numbers or the smallest there are."""

    def cut(budget):
        for name, value in {"CPU_TILE": budget, "CPU_LEAST": 0, "ROWS": 1, "LEAST_COLUMNS": 4}.items():
            monkeypatch.setattr(tiles, name, value)

    return cut


@pytest.fixture
def count():
    """``count(run)``: the same, and into how many tiles an image is cut is the length of its list ``seen``."""

    def counted(run):
        def wrapper(part, maps, images, shared):
            wrapper.seen.append((part.rows, part.columns))
            return run(part, maps, images, shared)

        wrapper.seen = []
        return wrapper

    return counted


@pytest.mark.parametrize("total", [False, True], ids=["map", "sums"])
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@by_size
def test_tiles_give_the_whole_image_and_every_gradient(size, budget, total, cut):
    cut(budget)
    tensors, run = inputs(size), sums if total else chain
    assert_all_close(with_gradients(run, tensors, total=total), with_gradients(run, tensors, whole=True))


def test_a_small_budget_does_make_tiles_that_cover_the_image_once(count, cut):
    cut(1)
    run, covered = count(chain), torch.zeros(64, 25)
    in_tiles(run, *inputs((1, 64, 25)), halo=HALO, width=WIDTH)
    assert len(run.seen) >= 16
    for rows, columns in run.seen:
        covered[rows.start : rows.stop, columns.start : columns.stop] += 1
    assert (covered == 1).all()


def test_a_tile_is_handed_no_more_pixels_than_it_needs(cut):
    cut(1)
    seen = []

    def run(part, maps, images, shared):
        sides = zip((part.rows, part.columns), maps[0].shape[2:], strict=True)
        seen.extend((span.start, span.stop, span.length, handed) for span, handed in sides)
        return part.cut(maps[0])

    x = torch.rand(1, 2, 40, 30)
    assert torch.equal(in_tiles(run, [x], halo=2, width=2), x)
    assert all(given == min(length, stop + 2) - max(0, start - 2) for start, stop, length, given in seen)
    assert len(seen) > 2


@pytest.mark.parametrize("total", [False, True], ids=["map", "sums"])
@pytest.mark.parametrize("size", [(1, 40, 30), (3, 24, 9)], ids=str)
def test_a_second_run_has_the_same_bits_and_more_threads_nearly_so(size, total, threads, cut):
    cut(2_000)
    tensors, run = inputs(size, torch.float32), sums if total else chain
    threads(1)
    alone = with_gradients(run, tensors, total=total)
    for number in (1, 2, 3):
        threads(number)
        expected = with_gradients(run, tensors, total=total)
        for found, wanted in zip(with_gradients(run, tensors, total=total), expected, strict=True):
            assert torch.equal(found, wanted)
        # convolutions deal the sums of their gradients out to the threads
        assert_all_close(expected, alone, atol=1e-5)


def test_the_gradients_are_the_derivatives(cut):
    cut(1)
    groups = inputs((1, 14, 3))
    lengths = [len(group) for group in groups]

    def run(*tensors):
        parts = iter(tensors)
        return in_tiles(chain, *([next(parts) for _ in range(n)] for n in lengths), halo=HALO, width=WIDTH)

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for group in groups for x in group])


@pytest.mark.parametrize("wanted", range(7))
def test_only_the_gradients_that_are_asked_for_are_given(wanted, cut):
    cut(1)
    tensors = inputs((2, 20, 4))
    leaves = [x for group in tensors for x in group]
    leaves[wanted].requires_grad_()
    in_tiles(chain, *tensors, halo=HALO, width=WIDTH).sum().backward()
    assert [i for i, x in enumerate(leaves) if x.grad is not None] == [wanted]
    groups = [[x.detach().requires_grad_() for x in group] for group in tensors]
    out = chain(Part.all(tensors[0][0]), *groups).sum()
    (expected,) = torch.autograd.grad(out, [x for group in groups for x in group][wanted])
    torch.testing.assert_close(leaves[wanted].grad, expected, rtol=1e-12, atol=1e-11)


def test_what_only_some_tiles_use_gets_the_gradient_of_those(cut):
    cut(1)
    x, here, there = torch.rand(1, 2, 24, 3), torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    seen = []

    def run(part, maps, images, shared):
        seen.append(part.rows.stop if part.rows.start == 0 else 24)
        return maps[0] * (shared[0] if part.rows.start == 0 else shared[1])

    in_tiles(run, [x], [], [here, there], halo=0, width=2).sum().backward()
    assert min(seen) < 24
    torch.testing.assert_close(here.grad, x[:, :, : min(seen)].sum())
    torch.testing.assert_close(there.grad, x[:, :, min(seen) :].sum())


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("reach", [0, 1, 2])
@pytest.mark.parametrize("bounds", [(0, 12), (0, 3), (1, 4), (2, 3), (5, 8), (9, 12), (11, 12)], ids=str)
def test_a_convolution_of_a_part_sees_the_zeros_around_the_image_and_no_others(bounds, reach, kernel):
    (start, stop), half, side = bounds, kernel // 2, 12
    x, bias = torch.randn(2, 4, side, side, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    weight = torch.randn(6, 2, kernel, kernel, dtype=torch.float64)
    whole = F.conv2d(x, weight, bias, padding=half, groups=2)
    for other in ((0, 12), (0, 5), (4, 9), (10, 12)):
        rows, columns = Span(start, stop, side), Span(*other, side)
        wanted = (..., rows.around(reach), columns.around(reach))
        # exactly the pixels that are needed, and more than these
        for halo in (reach + half, reach + half + 2):
            given = x[:, :, rows.around(halo), columns.around(halo)]
            found = Part(rows, columns).conv2d(given, weight, bias, groups=2, reach=reach)
            torch.testing.assert_close(found, whole[wanted], rtol=0, atol=1e-12)
            assert torch.equal(Part(rows, columns).cut(given, reach), x[wanted])


def test_a_second_derivative_is_refused_in_words(cut):
    cut(1)
    tensors = inputs((1, 24, 3))
    x = tensors[0][0].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(in_tiles(chain, *tensors, halo=HALO, width=WIDTH).sum(), x, create_graph=True)


@pytest.mark.parametrize("number", [1, 2])
def test_autocast_holds_within_tiles_and_in_the_backward_pass(number, threads, cut):
    threads(number)
    cut(2_000)
    tensors, kinds = inputs((1, 40, 7), torch.float32), []

    def run(part, maps, images, shared):
        out = part.conv2d(maps[0], shared[0], groups=1)
        kinds.append(out.dtype)
        return out

    maps, shared = [tensors[0][0].requires_grad_()], [tensors[2][0].requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = in_tiles(run, maps, [], shared, halo=2, width=WIDTH)
        expected = F.conv2d(maps[0], shared[0], padding=2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    # as usual, outside of the context
    out.float().sum().backward()
    assert set(kinds) == {torch.bfloat16}
    assert maps[0].grad.dtype == shared[0].grad.dtype == torch.float32
    assert maps[0].grad.isfinite().all()


@pytest.mark.parametrize("number", [1, 2])
def test_inference_mode_gives_the_same(number, threads, cut):
    threads(number)
    cut(2_000)
    tensors = inputs((2, 40, 7))
    expected = in_tiles(chain, *tensors, halo=HALO, width=WIDTH)
    with torch.inference_mode():
        out = in_tiles(chain, *tensors, halo=HALO, width=WIDTH)
    assert out.is_inference()
    assert torch.equal(out.clone(), expected)


def test_nothing_is_kept_for_the_backward_pass_but_the_inputs(cut):
    cut(2_000)
    groups = [[x.requires_grad_() for x in group] for group in inputs((2, 40, 7))]
    own, kept = {x.data_ptr() for group in groups for x in group}, []

    def pack(x):
        kept.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = in_tiles(chain, *groups, halo=HALO, width=WIDTH)
    assert kept
    assert set(kept) <= own
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_stay_what_they_are(dtype, cut):
    cut(2_000)
    tensors = inputs((1, 24, 5), dtype)
    exact = with_gradients(chain, [[x.double() for x in group] for group in tensors], whole=True)
    for found, expected in zip(with_gradients(chain, tensors), exact, strict=True):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() < 0.03 * expected.norm()


def test_the_memory_of_the_maps_does_not_matter(cut):
    cut(2_000)
    tensors = inputs((2, 24, 5))
    expected = with_gradients(chain, tensors)
    layouts = (lambda x: x.contiguous(memory_format=torch.channels_last), lambda x: x.mT.contiguous().mT)
    for change in (*layouts, lambda x: torch.cat([x, x], dim=3)[..., :5]):
        assert_all_close(with_gradients(chain, [[change(x) for x in tensors[0]], *tensors[1:]]), expected)
    upstream = torch.ones(()).double().expand(expected[0].shape)
    x = tensors[0][0].requires_grad_()
    given = [
        torch.autograd.grad(in_tiles(chain, *tensors, halo=HALO, width=WIDTH), x, u)[0]
        for u in (upstream, upstream.contiguous())
    ]
    assert torch.equal(*given)


def test_an_error_within_a_tile_comes_out(cut):
    cut(1)

    def run(part, maps, images, shared):
        raise ValueError(f"rows {part.rows.start} to {part.rows.stop}")

    with pytest.raises(ValueError, match="rows 0 to"):
        in_tiles(run, [torch.rand(1, 2, 32, 4)], halo=0, width=2)


def test_it_compiles_to_one_graph(cut):
    cut(1)
    tensors = inputs((1, 24, 9), torch.float32)
    compiled = torch.compile(
        lambda: in_tiles(chain, *tensors, halo=HALO, width=WIDTH), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(), chain(Part.all(tensors[0][0]), *tensors))


def test_hundreds_of_tiles_add_up_in_more_than_16_bits(monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", 2**10)
    monkeypatch.setattr(tiles, "CPU_LEAST", 0)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 3, 120, 200, generator=generator).bfloat16()
    weight = torch.rand(5, 3, 1, 1, generator=generator).bfloat16().requires_grad_()

    def run(part, maps, images, shared):
        return part.conv2d(maps[0], shared[0], groups=1)

    (found,) = torch.autograd.grad(tiles.in_tiles(run, [x], [], [weight], halo=0, width=5).sum(), weight)
    exact = x.double().sum(dim=(0, 2, 3)).expand(5, 3)
    assert float((found.double().view(5, 3) - exact).norm() / exact.norm()) < 6e-3
