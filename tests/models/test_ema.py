"""The moving average of the weights."""

import pytest
import torch
from torch import nn

from models.ema import EMA


class Net(nn.Module):
    """Trained and frozen parameters, float and integer buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Parameter(torch.full((1,), 0.1), requires_grad=False)
        self.register_buffer("table", torch.arange(3), persistent=False)

    def forward(self, x):
        return self.norm(self.conv(x)) * self.one


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def _push(net, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator)


def test_the_average_is_the_geometric_sum(net):
    ema, decay = EMA(net, 0.9), 0.9
    expected = net.conv.weight.detach().double()
    for seed in range(5):
        _push(net, seed)
        ema.update(net)
        expected = decay * expected + (1 - decay) * net.conv.weight.detach().double()
    torch.testing.assert_close(ema.network.conv.weight.double(), expected, rtol=1e-6, atol=1e-6)


def test_buffers_are_those_of_the_trained_network(net):
    ema = EMA(net, 0.999)
    net.train()(torch.randn(2, 3, 8, 8))
    net.table += 1
    ema.update(net)
    for name, buffer in net.named_buffers():
        assert torch.equal(dict(ema.network.named_buffers())[name], buffer), name


def test_a_frozen_parameter_keeps_its_bits(net):
    ema = EMA(net, 0.7)
    for _ in range(50):
        ema.update(net)
    assert torch.equal(ema.network.one, net.one)


def test_a_decay_of_0_follows_at_once(net):
    ema = EMA(net, 0)
    _push(net, 1)
    ema.update(net)
    torch.testing.assert_close(ema.network.state_dict(), net.state_dict())


def test_the_average_is_a_network_of_its_own(net):
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    ema = EMA(net, 0.5)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _push(ema.network.requires_grad_(True), 3)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_it_never_tracks_gradients_and_never_trains(net):
    net.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    ema = EMA(net, 0.5)
    ema.update(net)
    assert not ema.network.training
    for parameter in ema.network.parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert parameter.grad_fn is None
    assert net.training
    assert net.conv.weight.requires_grad


def test_it_goes_on_from_loaded_averages(net):
    source = EMA(net, 0.9)
    _push(net, 0)
    source.update(net)
    ema = EMA(net, 0.9)
    ema.load_state_dict(source.state_dict())
    for average in (source, ema):
        average.update(net)
    torch.testing.assert_close(ema.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert not torch.equal(ema.network.conv.weight, net.conv.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_stays(net, dtype):
    net.to(dtype)
    ema = EMA(net, 0.5)
    _push(net, 0)
    ema.update(net)
    assert {parameter.dtype for parameter in ema.network.parameters()} == {dtype}


def test_tied_weights_are_averaged_once(net):
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    ema = EMA(tied, 0.75)
    start = tied[0].weight.detach().clone()
    with torch.no_grad():
        tied[0].weight += 1
    ema.update(tied)
    assert ema.network[0].weight is ema.network[1].weight
    torch.testing.assert_close(ema.network[0].weight, start + 0.25)


@pytest.mark.parametrize("decay", [-0.1, 1, 1.5])
def test_a_decay_that_makes_no_sense_is_refused(net, decay):
    with pytest.raises(ValueError, match="decay must be"):
        EMA(net, decay)


def test_another_network_is_refused(net):
    ema = EMA(net, 0.9)
    with pytest.raises(ValueError, match=r"differ in .*weight"):
        ema.update(nn.Conv2d(3, 4, 3))
    net.conv = nn.Conv2d(3, 4, 5)
    with pytest.raises(ValueError, match=r"conv.weight \(4, 3, 3, 3\) became \(4, 3, 5, 5\)"):
        ema.update(net)


class Counting(nn.Module):
    """Keeps a number that is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(1)), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_what_a_module_keeps_beside_tensors_is_copied():
    net = nn.Sequential(Counting())
    average = EMA(net, 0.9)
    net[0].seen = 5
    average.update(net)
    assert average.network[0].seen == 5
