"""What every registered network promises, whatever its paper. A new network adds its small arguments to the table.

Parameters are pushed at random first: fresh ones hide whatever stands behind a scale that starts at zero.
"""

import copy
import inspect
import pickle

import pytest
import torch

from archs import ARCHS

_UNET = {"dim": (8, 16, 16, 24), "num_blocks": (1, 1, 1, 1), "heads": (1, 2, 4, 6), "num_path": (2, 2, 3, 2)}
_SST = {
    "dim": 8,
    "num_heads": 2,
    "n_blocks": 2,
    "exp_ratio": 1.5,
    "upsampler_type": "pixelshuffle",
    "intermediate_dim": 6,
}
# four keys of each tile, of 16 at least
_CORESET = {"rank": 8, "bins": 2}
SMALL = {
    "SST": {**_SST, "window_sizes": (4, 8), "ranks": (2, 3)},
    "EDSR": {"num_feat": 6, "num_block": 2, "upscale": 2},
    "MBTaylorFormer": _UNET,
    "MBTaylorFormerV2": _UNET,
    "WildCatSST": {**_SST, "window_sizes": (4, 8, 0), "ranks": (2, 3, 2), **_CORESET, "threshold": 8},
    "WildCatMBTaylorFormer": {**_UNET, **_CORESET, "threshold": 32, "learned_temperature": True},
}
# for what runs a network hundreds of times, or traces it: fewer copies of the same operators. Fusion of one branch has
# no gradient, so elsewhere there are two at least
_FEWER = {"heads": (1, 1, 1, 6), "num_path": (1, 1, 1, 1)}
LEAN = {
    "MBTaylorFormer": _FEWER,
    "MBTaylorFormerV2": _FEWER,
    "WildCatMBTaylorFormer": {**_FEWER, "rank": 4, "threshold": 200},
}
LEAN["WildCatSST"] = {"n_blocks": 1, "window_sizes": (8, 0), "ranks": 2, "rank": 4}
# of thousands of operators, the gradients are traced part by part, in the tests of the parts
TRACED_IN_PARTS = {"MBTaylorFormer", "MBTaylorFormerV2", "WildCatMBTaylorFormer"}
SIZES = [(1, 1), (1, 5), (9, 11), (17, 23)]

by_arch = pytest.mark.parametrize("arch", ARCHS.names())
by_size = pytest.mark.parametrize("size", SIZES, ids=str)


def build(arch, **changes):
    if arch not in SMALL:
        pytest.fail(f"{arch} is registered and has no entry in the table of small arguments; add one to SMALL")
    return ARCHS.build({"type": arch, **SMALL[arch], **changes})


@pytest.fixture
def net(arch):
    net = build(arch)
    push(net)
    return net.eval()


@pytest.fixture
def lean(arch):
    net = build(arch, **LEAN.get(arch, {}))
    push(net)
    return net.eval()


@torch.no_grad()
def push(net):
    for p in net.parameters():
        p.add_(torch.randn_like(p), alpha=0.1)


def image_for(net, size=(9, 11), batch=1, dtype=torch.float32):
    """A random image of the least size that the network takes and that is not below ``size``."""
    h, w = (-(-max(side, net.minimum) // net.multiple_of) * net.multiple_of for side in size)
    return torch.rand(batch, net.in_channels, h, w, generator=torch.Generator().manual_seed(1)).to(dtype)


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def exact(net):
    """The network, without approximations that are drawn at random or have no gradient, where it has such."""
    if hasattr(net, "set_attention"):
        net.set_attention("exact")
    return net


def drawn(net, x):
    """The output, after the same draws whenever it is called: a network may make some in training."""
    torch.manual_seed(3)
    return net(x)


def gradients(net, x):
    out = drawn(net, x)
    trained = [p for p in net.parameters() if p.requires_grad]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return torch.autograd.grad(out, trained, upstream, allow_unused=True)


def test_the_tables_name_no_network_that_is_not_registered():
    assert {*SMALL, *LEAN, *TRACED_IN_PARTS} <= set(ARCHS.names())


@by_arch
def test_a_network_takes_keyword_arguments_and_nothing_else(arch):
    parameters = inspect.signature(ARCHS.get(arch)).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert not any(isinstance(p.default, list | dict | set) for p in parameters)


@by_arch
def test_a_network_states_its_facts(net):
    facts = ("scale", "multiple_of", "minimum", "in_channels", "out_channels")
    for name in (*facts, "tile_multiple"):
        value = getattr(net, name) if name in facts else getattr(net, name, 1)
        assert isinstance(value, int), name
        assert value >= 1, name
    assert net.halo is None or (isinstance(net.halo, int) and net.halo >= 0)
    assert getattr(net, "tile_multiple", 1) % net.multiple_of == 0


@by_arch
@by_size
def test_the_output_is_the_image_enlarged_by_the_scale(net, size):
    x = image_for(net, size, batch=2)
    before = x.clone()
    with torch.no_grad():
        out = net(x)
    assert out.shape == (2, net.out_channels, x.shape[2] * net.scale, x.shape[3] * net.scale)
    assert out.dtype == x.dtype
    assert out.isfinite().all()
    assert torch.equal(x, before)


@by_arch
@by_size
@torch.no_grad()
def test_an_image_does_not_see_its_batch(net, size, tolerance):
    x = image_for(net, size, batch=3)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_the_same_image_gives_the_same_output_twice_and_in_training_mode(net, tolerance):
    x = image_for(net)
    assert torch.equal(net(x), net(x))
    first = exact(net)(x)
    torch.testing.assert_close(net.train()(x), first, **tolerance(torch.float32))
    with torch.enable_grad():
        torch.testing.assert_close(net(x).detach(), first, **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_training_mode_gives_the_same_after_the_same_draws_and_hardly_another_output(net):
    x = image_for(net, (17, 23))
    expected = net(x)
    first = drawn(net.train(), x)
    assert torch.equal(drawn(net, x), first)
    assert relative_error(first, expected) < 0.05


@by_arch
@torch.no_grad()
def test_the_image_matters(net):
    x = image_for(net)
    assert relative_error(net(x.flip(2)), net(x)) > 1e-3


@by_arch
def test_every_parameter_gets_a_finite_gradient_and_so_does_the_image(net):
    x = image_for(net, (17, 23)).requires_grad_()
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    unreached = set(names)
    # the slope of a PReLU has none where all that it sees is positive: so from several places
    for _ in range(4):
        for name, gradient in zip(names, gradients(net.train(), x), strict=True):
            assert gradient is not None, name
            assert gradient.isfinite().all(), name
            unreached -= {name} if gradient.any() else set()
        push(net)
    assert not unreached
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert gradient.isfinite().all()
    assert gradient.any()


@by_arch
def test_the_gradient_is_the_slope(net):
    net, x = exact(net).double().train(), image_for(net, (5, 6), dtype=torch.float64)
    directions = [torch.randn_like(p) for p in net.parameters() if p.requires_grad]
    slope = sum((g * d).sum() for g, d in zip(gradients(net, x), directions, strict=True))
    trained, values, step = [p for p in net.parameters() if p.requires_grad], [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(trained, directions, strict=True):
                p.add_(d, alpha=sign * step)
            out = net(x)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
            values.append((out * upstream).sum())
    assert float(slope) == pytest.approx(float(values[0] - values[1]) / (2 * step), rel=1e-5)


@by_arch
@torch.no_grad()
def test_a_state_dict_carries_the_whole_network(arch, net):
    x = image_for(net)
    expected = net(x)
    for assign in (False, True):
        other = build(arch).eval()
        assert relative_error(other(x), expected) > 1e-3
        other.load_state_dict(copy.deepcopy(net.state_dict()), strict=True, assign=assign)
        assert torch.equal(other(x), expected)


@by_arch
@torch.no_grad()
def test_a_network_built_on_meta_is_whole_once_it_has_its_weights(arch, net):
    with torch.device("meta"):
        late = build(arch)
    late.to_empty(device="cpu").load_state_dict(net.state_dict())
    x = image_for(net)
    torch.testing.assert_close(late.eval()(x), net(x))


@by_arch
@torch.no_grad()
def test_bfloat16_and_float64_work_as_types_of_the_whole_network(net):
    x = image_for(net, (17, 23))
    expected = net(x)
    exact = copy.deepcopy(net).double()(x.double())
    assert exact.dtype == torch.float64
    assert relative_error(expected, exact) < 1e-5
    rounded = copy.deepcopy(net).bfloat16()(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded, exact) < 0.05


@by_arch
def test_bfloat16_trains(net):
    x = image_for(net)
    # rounded, it may draw other keys, so what can be told about those gradients is little
    assert all(gradient.isfinite().all() for gradient in gradients(copy.deepcopy(net).bfloat16().train(), x.bfloat16()))
    wide = gradients(exact(copy.deepcopy(net)).double().train(), x.double())
    whole = float(torch.cat([gradient.flatten() for gradient in wide]).norm())
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    for name, found, expected in zip(names, gradients(exact(net).bfloat16().train(), x.bfloat16()), wide, strict=True):
        assert found.dtype == torch.bfloat16, name
        # a parameter of one number, say, may have a gradient whose terms cancel
        scale = max(float(expected.norm()), 0.01 * whole)
        assert float((found.double() - expected).norm()) < 0.5 * scale, name


@by_arch
def test_autocast_works_forward_and_backward(net):
    x = image_for(net)
    expected = net(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net.train()(x)
    out.float().mean().backward()
    assert relative_error(out.detach(), expected) < 0.05
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)


@by_arch
@torch.no_grad()
def test_the_memory_of_the_image_does_not_matter(net, tolerance):
    x = image_for(net, batch=2)
    expected = net(x)
    inside = torch.zeros(2, x.shape[1], x.shape[2] + 3, x.shape[3] + 4)
    inside[:, :, 1:-2, 2:-2] = x
    views = {
        "channels-last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.mT.contiguous().mT,
        "cut out": inside[:, :, 1:-2, 2:-2],
        "batch last": x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        torch.testing.assert_close(net(view), expected, **tolerance(torch.float32), msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(net(x[:1].expand(2, -1, -1, -1))[1:], expected[:1], **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_channels_last_weights_give_the_same(net, tolerance):
    x = image_for(net)
    expected = net(x)
    net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(x), expected, **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_copies_and_pickles_are_networks_of_their_own(net):
    x = image_for(net)
    expected = net(x)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    for p in net.parameters():
        p.zero_()
    for twin in twins:
        assert torch.equal(twin(x), expected)


@by_arch
@torch.no_grad()
def test_the_output_follows_the_weights_in_evaluation_mode(lean):
    net = lean
    x = image_for(net, (5, 6))
    net(x)
    parameters = list(net.parameters())
    for write in (lambda p: p.add_(0.05), lambda p: p.data.mul_(1.1)):
        # at most thirty of them, from everywhere
        for p in parameters[:: len(parameters) // 30 + 1]:
            write(p)
            assert torch.equal(net(x), copy.deepcopy(net)(x))


@by_arch
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_forward_assigns_nothing(net, training):
    def state():
        return {name: dict(vars(module)) for name, module in net.named_modules()}

    net.train(training)
    before, buffers = state(), {name: b.clone() for name, b in net.named_buffers()}
    net(image_for(net)).mean().backward()
    after = state()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name]), name
    assert all(torch.equal(b, buffers[name]) for name, b in net.named_buffers())


@by_arch
def test_checkpointing_gives_the_same_gradients_and_keeps_less(net, tolerance):
    def kept_bytes(x):
        sizes = {}

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            net(x)
        return sum(sizes.values())

    net.train()
    x = image_for(net, (17, 23))
    expected, full = gradients(net, x), kept_bytes(x)
    net.set_grad_checkpointing()
    for found, gradient in zip(gradients(net, x), expected, strict=True):
        torch.testing.assert_close(found, gradient, **tolerance(torch.float32))
    assert kept_bytes(x) < full
    net.set_grad_checkpointing(False)
    assert kept_bytes(x) == full


@by_arch
def test_its_training_compiles_to_one_graph(arch, lean, tolerance):
    torch._dynamo.reset()
    net = lean.train()
    compiled = torch.compile(net, fullgraph=True, backend="eager" if arch in TRACED_IN_PARTS else "aot_eager")
    x = image_for(net)
    torch.testing.assert_close(drawn(compiled, x), drawn(net, x), **tolerance(torch.float32))
    for found, gradient in zip(gradients(compiled, x), gradients(net, x), strict=True):
        torch.testing.assert_close(found, gradient, **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_its_evaluation_compiles_to_one_graph(lean, tolerance):
    torch._dynamo.reset()
    compiled = torch.compile(lean, fullgraph=True, backend="aot_eager")
    x = image_for(lean)
    torch.testing.assert_close(compiled(x), lean(x), **tolerance(torch.float32))


@by_arch
@torch.no_grad()
def test_pixels_beyond_the_halo_do_not_matter(net, tolerance):
    if net.halo is None:
        assert getattr(net, "tile_multiple", 1) >= 1
        return
    x = image_for(net, (9, 2 * net.halo + 9))
    far = x.clone()
    far[..., -1] = 0
    kept = (x.shape[3] - 1 - net.halo) * net.scale
    torch.testing.assert_close(net(far)[..., :kept], net(x)[..., :kept], **tolerance(torch.float32))
