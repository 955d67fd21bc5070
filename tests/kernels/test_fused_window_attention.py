"""Window attention by Triton, interpreted: against the float64 reference, through its views, and as an operator."""

import pytest
import torch
import torch.nn.functional as F

from kernels import launch
from kernels.dispatch import KernelUnavailable, available, explain
from kernels.window_attention import cases, limits, window_attention

# one of each kind: windows, reflections, edges of blocks; small, since a block of keys takes milliseconds here
SHAPES = (
    cases.Case("whole windows", 2, 4, 8, 2, 8, 4, 4),
    cases.Case("rows and columns added", 1, 6, 7, 2, 6, 4, 3),
    cases.Case("one row added", 1, 7, 4, 1, 16, 4, 16),
    cases.Case("one column added", 1, 4, 7, 1, 16, 4, 2),
    cases.Case("all but one row added", 1, 9, 8, 1, 4, 8, 2),
    cases.Case("more blocks than one", 1, 6, 8, 1, 30, 7, 18),
    cases.Case("one pixel", 1, 1, 1, 2, 4, 4, 2),
    cases.Case("one row", 1, 1, 9, 1, 4, 4, 2),
    cases.Case("one column", 1, 9, 1, 1, 4, 4, 2),
    cases.Case("mirrors of mirrors", 2, 3, 5, 1, 4, 8, 5),
    cases.Case("window of one pixel", 1, 2, 1, 2, 4, 1, 2),
    cases.Case("a rank of two products", 1, 4, 5, 2, 8, 4, 34),
    cases.Case("no position", 1, 9, 8, 1, 8, 4, 0),
)
by_name = pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name.replace(" ", "-"))


@pytest.fixture
def blocks(monkeypatch):
    """``blocks(m, n, programs)``: sizes of the blocks, and how many programs share the windows."""

    def use(m, n, programs=4096):
        from kernels.window_attention import fused

        chosen = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": 4, "num_stages": 2}
        monkeypatch.setattr(launch, "settings", lambda *args, **kwargs: dict(chosen))
        monkeypatch.setattr(fused, "PROGRAMS", programs)
        monkeypatch.setattr(fused, "WHOLE_PROGRAMS", programs)

    return use


@pytest.fixture(params=["whole", "parts"])
def form(request, interpreter, blocks, monkeypatch):
    """Backward by one program for a window and head, then by two kernels; blocks that leave edges in both."""
    from kernels.window_attention import fused

    blocks(32, 16, programs=10)
    whole = request.param == "whole"
    monkeypatch.setattr(fused, "first_settings", lambda *args, **where: launch.settings() if whole else None)
    return request.param


def with_gradients(arguments, backend="triton", wrap=lambda x: x, wanted=("qkv", "q_pos", "k_pos")):
    """The output and the gradient of each tensor that is wanted, for a fixed random upstream gradient."""
    arguments, leaves = dict(arguments), {}
    for name, value in arguments.items():
        if name in wanted and value is not None:
            leaves[name] = arguments[name] = wrap(value.detach().clone().requires_grad_())
    out = window_attention(**arguments, backend=backend)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def exact(arguments):
    """The same by the reference, in float64."""
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return with_gradients({k: v for k, v in double.items() if k != "dtype"}, "reference")


def assert_close(found, expected, limit):
    # a window of equal pixels has no gradient at its factors: the noise there is that of the image's gradient
    floor = expected["qkv"].double().norm()
    for name, value in expected.items():
        error = (found[name].double() - value).norm()
        assert error <= limit * value.norm().maximum(floor), (name, float(error), float(value.norm()))


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestAgainstTheReference:
    @pytest.mark.usefixtures("guarded_outputs", "form")
    @by_name
    def test_output_and_every_gradient_in_float32(self, case, guards):
        seed = torch.seed() % 2**31
        print("seed", seed)
        arguments = cases.make_inputs(case, seed=seed)
        found = with_gradients(arguments, wrap=guards.around)
        assert found["out"].shape == (case.batch, case.height, case.width, case.heads * case.d)
        assert_close(found, exact(arguments), cases.TOLERANCES[torch.float32])

    @pytest.mark.usefixtures("form")
    @pytest.mark.parametrize(
        ("case", "dtype"),
        [(SHAPES[1], torch.float64), (SHAPES[5], torch.float64), (SHAPES[1], torch.bfloat16)],
        ids=lambda value: getattr(value, "name", str(value)).replace(" ", "-"),
    )
    def test_output_and_every_gradient_in_other_types(self, case, dtype):
        arguments = cases.make_inputs(case, dtype=dtype)
        found = with_gradients(arguments)
        assert {value.dtype for value in found.values()} == {dtype}
        # 16-bit gradients go through a rounded softmax and a rounded output
        assert_close(found, exact(arguments), cases.TOLERANCES[dtype] * (1 if dtype == torch.float64 else 3))

    def test_a_float32_image_may_be_multiplied_in_16_bits(self):
        arguments = {**cases.make_inputs(SHAPES[1]), "dtype": torch.float16}
        found = with_gradients(arguments)
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert_close(found, exact(arguments), 3 * cases.TOLERANCES[torch.float16])

    @pytest.mark.parametrize("sizes", [(16, 64), (64, 16)], ids=str)
    def test_the_sizes_of_the_blocks_do_not_matter(self, sizes, form, blocks):
        arguments = cases.make_inputs(cases.Case("", 1, 7, 6, 1, 8, 6, 4))
        blocks(*sizes, programs=2)
        assert_close(with_gradients(arguments), exact(arguments), cases.TOLERANCES[torch.float32])

    @pytest.mark.parametrize("programs", [1, 2])
    def test_the_split_of_the_windows_among_programs_does_not_matter(self, programs, form, blocks):
        arguments = cases.make_inputs(cases.Case("", 1, 6, 7, 1, 8, 4, 4))
        blocks(16, 16, programs=programs)
        assert_close(with_gradients(arguments), exact(arguments), cases.TOLERANCES[torch.float32])

    def test_the_precision_of_float32_is_that_of_torch(self):
        arguments = cases.make_inputs(cases.Case("", 1, 8, 8, 1, 16, 8, 16))
        expected = exact(arguments)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            found = with_gradients(arguments)
        finally:
            torch.set_float32_matmul_precision(before)
        assert_close(found, expected, 2e-3)
        with pytest.raises(AssertionError):
            assert_close(found, expected, 1e-5)

    @pytest.mark.usefixtures("form")
    def test_the_gradients_are_the_derivatives(self):
        arguments = cases.make_inputs(cases.Case("", 1, 2, 4, 1, 2, 3, 1), dtype=torch.float64)
        tensors = [arguments.pop(name).requires_grad_() for name in ("qkv", "q_pos", "k_pos")]
        assert torch.autograd.gradcheck(
            lambda *t: window_attention(*t, **arguments, backend="triton"), tensors, fast_mode=True
        )

    def test_the_scale_can_be_given(self):
        arguments = {**cases.make_inputs(SHAPES[3]), "scale": 0.1}
        assert_close(with_gradients(arguments), exact(arguments), cases.TOLERANCES[torch.float32])

    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    @pytest.mark.usefixtures("form")
    def test_large_logits_stay_finite(self):
        arguments = cases.make_inputs(cases.Case("", 1, 3, 3, 1, 8, 3, 4))
        large = {k: v * 1000 if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        assert all(value.isfinite().all() for value in with_gradients(large).values())
        # all logits far below zero, which is that of the places in a block of 16 keys where there is none
        large["qkv"][..., :8], large["qkv"][..., 8:16] = 1000, -1000
        assert all(value.isfinite().all() for value in with_gradients(large).values())

    def test_equal_values_give_their_mean(self):
        arguments = cases.make_inputs(SHAPES[1])
        flat = torch.ones_like(arguments["qkv"])
        out = window_attention(**{**arguments, "qkv": flat}, backend="triton")
        torch.testing.assert_close(out, flat[..., :12])

    def test_a_nan_stays_in_its_window(self):
        arguments = cases.make_inputs(SHAPES[0])
        arguments["qkv"][0, 1, 1] = torch.nan
        broken = window_attention(**arguments, backend="triton").isnan().any(dim=-1)
        assert broken[0, :, :4].all()
        assert broken.sum() == 16

    def test_an_empty_batch_gives_empty_results(self):
        arguments = cases.make_inputs(cases.Case("", 0, 8, 8, 2, 4, 4, 2))
        found = with_gradients(arguments)
        assert found["out"].shape == (0, 8, 8, 8)
        assert not found["q_pos"].any()
        assert not found["k_pos"].any()


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestMemory:
    def test_views_give_what_their_copies_give(self, guards):
        arguments = cases.make_inputs(cases.Case("", 1, 3, 4, 2, 6, 4, 3))
        qkv = arguments["qkv"]
        expected = with_gradients(arguments)
        channels_first = qkv.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        inside = F.pad(qkv, (2, 3, 1, 1, 1, 2), value=torch.nan)[:, 1:-2, 1:-1, 2:-3]
        every_other = qkv.repeat_interleave(2, dim=1)[:, ::2]
        upstream = torch.randn(expected["out"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        for view in (channels_first, inside, every_other):
            assert not view.is_contiguous()
            view = guards.around(view.detach().requires_grad_())
            out = window_attention(**{**arguments, "qkv": view}, backend="triton")
            torch.testing.assert_close(out, expected["out"], rtol=0, atol=0)
            (found,) = torch.autograd.grad(out, view, upstream.float())
            torch.testing.assert_close(found, expected["qkv"], rtol=0, atol=0)
        transposed = {name: arguments[name].mT.contiguous().mT for name in ("q_pos", "k_pos")}
        out = window_attention(**{**arguments, **transposed}, backend="triton")
        torch.testing.assert_close(out, expected["out"], rtol=0, atol=0)
        one = qkv.expand(2, -1, -1, -1)
        out = window_attention(**{**arguments, "qkv": one}, backend="triton")
        torch.testing.assert_close(out[1], expected["out"][0], rtol=0, atol=0)

    def test_a_constant_upstream_gradient_of_stride_zero_is_right(self):
        arguments = cases.make_inputs(SHAPES[1], dtype=torch.float64)
        grads = []
        for name in ("triton", "reference"):
            qkv = arguments["qkv"].clone().requires_grad_()
            window_attention(**{**arguments, "qkv": qkv}, backend=name).sum().backward()
            grads.append(qkv.grad)
        torch.testing.assert_close(*grads, rtol=0, atol=1e-12)

    def test_an_image_is_read_once_and_written_once(self, form, blocks, monkeypatch):
        from kernels.window_attention import fused

        launched = []

        class Recorder:
            def __init__(self, name):
                self.name = name

            def __getitem__(self, grid):
                return lambda *args, **kwargs: launched.append((self.name, grid))

        for name in ("forward", "backward_q", "backward_kv"):
            monkeypatch.setattr(fused.kernels, name, Recorder(name))
        monkeypatch.setattr(fused, "backward", Recorder("backward"))
        blocks(64, 64)
        qkv, q_pos, k_pos = (cases.make_inputs(SHAPES[0])[name] for name in ("qkv", "q_pos", "k_pos"))
        options = (2, 4, 8**-0.5, torch.float32)
        with torch.profiler.profile() as profile:
            out, lse = fused.window_attention_forward(qkv, q_pos, k_pos, *options)
        operators = {event.name for event in profile.events() if event.name.startswith("aten::")}
        # the fixture fills what is empty
        assert operators <= {"aten::empty", "aten::fill_", "aten::promote_types"}
        assert launched == [("forward", (4 * 2,))]
        fused.window_attention_backward(torch.ones_like(out), qkv, q_pos, k_pos, out, lse, *options)
        kernels = {"whole": ["backward"], "parts": ["backward_q", "backward_kv"]}[form]
        # a program for each of 4 windows and 2 heads
        assert launched[1:] == [(name, (4 * 2,)) for name in kernels]

    def test_queries_outside_the_image_are_not_computed(self, blocks, monkeypatch):
        from triton.runtime.interpreter import InterpreterBuilder

        products, product = [], InterpreterBuilder.create_dot
        monkeypatch.setattr(
            InterpreterBuilder, "create_dot", lambda *args: products.append(args[1].data.shape) or product(*args)
        )
        # 5 of 8 rows are there: 40 queries in 3 blocks of 16, each with all 64 keys in one block
        blocks(16, 64)
        window_attention(**cases.make_inputs(cases.Case("", 1, 5, 8, 1, 16, 8, 0)), backend="triton")
        assert products == [(16, 16), (16, 64)] * 3


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestAsAnOperator:
    @pytest.mark.parametrize(("layout", "rank"), [("contiguous", 3), ("permuted", 0)])
    def test_torch_accepts_its_registration(self, layout, rank):
        from kernels.window_attention import fused

        arguments = cases.make_inputs(cases.Case("", 1, 3, 4, 1, 4, 2, rank))
        tensors = [arguments[name] for name in ("qkv", "q_pos", "k_pos")]
        if layout == "permuted":
            tensors[0] = tensors[0].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        tensors = [None if x is None else x.requires_grad_() for x in tensors]
        torch.library.opcheck(fused.window_attention_forward, (*tensors, 1, 2, 0.5, torch.float32))

    def test_it_compiles_into_one_graph(self):
        arguments = cases.make_inputs(SHAPES[1])
        tensors = [arguments.pop(name) for name in ("qkv", "q_pos", "k_pos")]

        def attend(*tensors):
            return window_attention(*tensors, **arguments, backend="triton") * 2

        grads = []
        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            leaves = [x.clone().requires_grad_() for x in tensors]
            grads.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
        torch.testing.assert_close(*grads)

    def test_the_batch_may_vary_in_compiled_code(self):
        arguments = cases.make_inputs(cases.Case("", 3, 4, 6, 1, 4, 4, 2))
        qkv = arguments.pop("qkv")
        attend = torch.compile(
            lambda x: window_attention(x, **arguments, backend="triton"),
            fullgraph=True,
            backend="aot_eager",
            dynamic=True,
        )
        for count in (2, 3):
            expected = window_attention(qkv[:count], **arguments, backend="reference")
            torch.testing.assert_close(attend(qkv[:count]), expected)

    def test_autocast_does_not_reach_into_it(self):
        arguments = cases.make_inputs(SHAPES[3])
        expected = window_attention(**arguments, backend="triton")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = window_attention(**arguments, backend="triton")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_a_second_derivative_is_refused(self):
        arguments = cases.make_inputs(SHAPES[3])
        qkv = arguments["qkv"].requires_grad_()
        (first,) = torch.autograd.grad(
            window_attention(**arguments, backend="triton").square().sum(), qkv, create_graph=True
        )
        with pytest.raises(RuntimeError, match=r"no second derivative .*backend='reference'"):
            first.sum().backward()

    @pytest.mark.usefixtures("form")
    @pytest.mark.parametrize("name", ["qkv", "q_pos", "k_pos"])
    def test_one_gradient_alone_is_that_among_all(self, name):
        arguments = cases.make_inputs(SHAPES[3])
        alone, among_all = with_gradients(arguments, wanted=[name]), with_gradients(arguments)
        torch.testing.assert_close(alone[name], among_all[name], rtol=0, atol=0)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("window", "d", "rank", "dtype", "arch", "whole"),
    [
        (32, 32, 32, torch.bfloat16, 90, True),
        (8, 16, 16, torch.float16, 90, True),
        (48, 32, 16, torch.bfloat16, 90, False),
        (32, 32, 32, torch.bfloat16, 80, False),
        (32, 30, 34, torch.bfloat16, 90, False),
    ],
)
def test_one_program_has_a_small_window_where_registers_hold_it(window, d, rank, dtype, arch, whole):
    from kernels.window_attention import fused

    names = fused.keys("backward", fused.constants(dtype, d, rank, 6, window, 0.2, 0))
    assert (fused.first_settings(names, arch=arch) is not None) == whole


@pytest.mark.parametrize(
    ("d", "rank", "dtype", "fits"),
    [
        (32, 34, torch.float32, True),
        (30, 50, torch.float32, False),
        (64, 64, torch.bfloat16, True),
        (128, 0, torch.float16, True),
        (128, 1, torch.float16, False),
    ],
)
def test_heads_and_factors_must_fit_the_registers(d, rank, dtype, fits):
    assert (limits.columns_reason(d, rank, dtype) is None) == fits


@pytest.mark.parametrize(
    ("rank", "columns"), [(0, (0, 0)), (1, (16, 0)), (18, (32, 0)), (33, (32, 16)), (48, (32, 16)), (49, (64, 0))]
)
def test_a_rank_takes_one_product_or_two(rank, columns):
    assert limits.chunks(rank) == columns


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
def test_a_cpu_takes_it_only_when_asked():
    arguments = cases.make_inputs(SHAPES[1])
    qkv, others = arguments["qkv"], {k: arguments[k] for k in ("heads", "window")}
    assert "triton" in available("window_attention", qkv, **others)
    text = explain("window_attention", qkv, **others)
    assert text.startswith("window_attention: sdpa")
    assert "not triton: TRITON_INTERPRET=1 interprets the kernel, which only tests want" in text


def test_it_says_each_thing_that_is_missing(monkeypatch):
    arguments = cases.make_inputs(cases.Case("", 1, 8, 8, 1, 200, 4, 3), dtype=torch.float64)
    monkeypatch.setattr(launch, "_found", {"triton": True})
    text = limits.supports(**arguments, bias=torch.zeros(1, 16, 16))
    for reason in ("on cpu", "no dense bias", "do not compute in float64", "not 200 + 3"):
        assert reason in text
    wide = torch.empty(1, 60_000, 180_000, 12, device="meta")
    assert "within 2**31" in limits.supports(wide, heads=1, window=1024)
    # pixels of a row far apart
    turned = torch.empty(1, 8, 60_000, 12, device="meta").transpose(1, 2)
    assert "within 2**31" in limits.supports(turned, heads=1, window=4096)
    assert "within 2**31" not in limits.supports(turned.contiguous(), heads=1, window=4096)
    with pytest.raises(KernelUnavailable, match=r"asked for by backend='triton'.*needs a CUDA tensor"):
        window_attention(**arguments, backend="triton")
    monkeypatch.setattr(launch, "_found", {"triton": False})
    with pytest.raises(KernelUnavailable, match=r"pellucid\[triton\]"):
        window_attention(**arguments, backend="triton")


@pytest.mark.aot
@pytest.mark.parametrize(
    ("match", "arch"), [("SST-L w32 float32/bfloat16", "90"), ("backward_kv SST w64 float32", "80")], ids=str
)
def test_kernels_compile_without_spills(match, arch, aot_report):
    last = aot_report("--op", "window_attention", "--match", match, "--arch", arch)
    assert last == "2 compiled, 0 failed"


@pytest.mark.interpreter
def test_factors_over_a_small_scale_stay_in_range_of_float16(interpreter):
    qkv, q_pos, k_pos = torch.randn(1, 4, 4, 48).half(), torch.full((1, 16, 1), 300.0), torch.full((1, 16, 1), 1e-3)
    options = {"heads": 1, "window": 4, "scale": 1e-3}
    expected = window_attention(qkv, q_pos, k_pos, backend="reference", **options)
    found = window_attention(qkv, q_pos, k_pos, backend="triton", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-3)
