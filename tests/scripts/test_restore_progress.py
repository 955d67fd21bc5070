"""How scripts.restore tells how far it is: by whole pieces, and by layers within one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from archs import ARCHS
from scripts import restore_watch
from scripts.restore_layers import LayerTimes, Watched
from scripts.restore_memory import Gauge
from scripts.restore_watch import Watch


def make_network():
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 1)))


def told(network, pieces, total, shares):
    found = []
    with Watched(network, total, shares=shares, progress=found.append):
        for height, width in pieces:
            network(torch.zeros(1, 1, height, width))
    assert not network._forward_hooks
    return found


def test_a_whole_picture_moves_on_with_every_layer():
    assert told(make_network(), [(4, 5)], 20, [0.25, 0.5, 0.9]) == [0.25, 0.5, 0.9, 0.99, 1.0]


def test_layers_count_within_the_pieces_that_were_seen():
    pieces = told(make_network(), [(4, 5), (2, 5)], 30, [0.25, 0.5, 0.9])
    assert pieces == pytest.approx([5 / 30, 10 / 30, 18 / 30, 20 / 30, 22.5 / 30, 25 / 30, 29 / 30, 0.99, 1.0])


@pytest.mark.parametrize("shares", [[], [0.5]], ids=["nothing measured", "fewer layers measured"])
def test_progress_never_goes_back_or_beyond_the_end(shares):
    found = told(make_network(), [(4, 5), (4, 5)], 40, shares)
    assert found == sorted(found)
    assert found[-1] == 1.0


def test_more_pieces_than_were_counted_do_not_end_it_early():
    found = told(make_network(), [(4, 5), (4, 5), (2, 5)], 20, [0.25, 0.5, 0.9])
    assert found == sorted(found)
    assert found.count(1.0) == 1
    assert found[-1] == 1.0


def test_the_layers_of_a_network_are_measured_with_its_memory():
    network = ARCHS.build({"type": "EDSR", "num_feat": 8, "num_block": 3, "upscale": 2}).eval()
    gauge = Gauge(SimpleNamespace(network=network, device=torch.device("cpu"), dtype=None), 3)
    assert gauge.shares == []
    gauge.tile((300, 300), None)
    assert gauge.shares == sorted(gauge.shares)
    assert len(gauge.shares) > 6
    assert 0 < gauge.shares[0] < gauge.shares[-1] <= 1


def test_layers_are_left_as_they_were():
    network = make_network()
    with LayerTimes(network) as times:
        for _ in range(2):
            network(torch.zeros(1, 1, 4, 5))
    # of the last run
    assert len(times.shares) == 3
    assert not any(layer._forward_hooks for layer in network.modules())


def outcome(name, size):
    return SimpleNamespace(size=size, job=SimpleNamespace(source=SimpleNamespace(name=name)))


def test_the_time_left_is_guessed_until_enough_is_seen_to_go_by(monkeypatch):
    moment = [100.0]
    monkeypatch.setattr(restore_watch.time, "monotonic", lambda: moment[0])
    watch = Watch([outcome("a.jpg", (100, 100)), outcome("b.jpg", (100, 100))], lambda size: 50.0)
    # reading and measuring took long
    moment[0] = 110.0
    watch.move(0.02)
    assert watch._seconds_left() == pytest.approx(99)
    moment[0] = 140.0
    watch.move(0.5)
    assert watch._seconds_left() == pytest.approx(120)
