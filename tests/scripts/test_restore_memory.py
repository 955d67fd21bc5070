"""How large a piece scripts.restore tries: chosen before, since Linux ends a process that takes too much memory."""

from types import SimpleNamespace

import pytest
import torch

from archs import ARCHS
from models import heap
from models.infer import restore
from scripts.restore_memory import Gauge, Need, PeakMemory, choose_tile, picture_memory

MIB = 1 << 20
FREE = SimpleNamespace()


def test_a_picture_that_fits_is_seen_whole():
    assert choose_tile((1000, 2000), Need(1e6, 1000, 1000, 1e-5), int(2.1e9), FREE) is None


@pytest.mark.parametrize("unit", [1, 8, 48])
@pytest.mark.parametrize("budget", [20 * MIB, 200 * MIB, 3000 * MIB])
def test_tiles_fit_into_the_budget_and_are_as_large_as_that_allows(unit, budget):
    need = Need(40 * MIB, 200 * 200, 900, 1e-5)
    tile = choose_tile((9000, 9000), need, budget, SimpleNamespace(tile_multiple=unit))
    assert tile % unit == 0
    assert need.bytes(tile**2) <= budget
    assert need.bytes((tile + unit) ** 2) > budget


def test_a_tile_is_never_smaller_than_the_network_takes():
    need = Need(1e9, 1000, 1e6, 1e-5)
    assert choose_tile((500, 500), need, 0, SimpleNamespace(multiple_of=10, minimum=128)) == 130


def test_without_knowledge_pieces_are_small():
    assert choose_tile((4000, 3000), Need(None, 1, 0, 1e-5), 1 << 40, FREE) == 256
    assert choose_tile((200, 200), Need(None, 1, 0, 1e-5), 1 << 40, FREE) is None
    assert choose_tile((4000, 3000), Need(1e6, 1000, 10, 1e-5), None, FREE) == 256


def test_padding_counts():
    need = Need(100 * 100, 100, 100, 1e-5)
    assert choose_tile((1, 300), need, 300 * 100, FREE) is None
    assert choose_tile((1, 300), need, 300 * 100, SimpleNamespace(minimum=64)) is not None


def test_a_larger_result_takes_more():
    plain = picture_memory((1000, 1000), 2, 3, deep=False, ensemble=False)
    # three colours in float32, of four times as many pixels
    assert plain > 4e6 * 3 * 4
    assert picture_memory((1000, 1000), 4, 3, deep=False, ensemble=False) > 3 * plain
    assert picture_memory((1000, 1000), 2, 3, deep=True, ensemble=True) > 1.5 * plain


def test_the_peak_of_a_block_is_seen():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(100 * MIB // 4)
    if memory.peak is None:
        pytest.skip("this system does not tell the peak of a process")
    assert memory.peak - memory.before > 90 * MIB


def test_the_estimate_holds_for_a_larger_picture():
    network = ARCHS.build({"type": "EDSR", "num_feat": 16, "num_block": 1, "upscale": 2}).eval()
    restorer = SimpleNamespace(network=network, device=torch.device("cpu"), dtype=None)
    gauge = Gauge(restorer, 3)
    gauge.tile((640, 640), 1)
    if gauge.need.base is None:
        pytest.skip("this system does not tell the peak of a process")
    with torch.inference_mode(), PeakMemory(torch.device("cpu")) as memory:
        network(torch.rand(1, 3, 640, 640))
    taken = memory.peak - memory.before
    assert taken < gauge.need.bytes(640 * 640) < 6 * taken


def test_what_a_network_needs_is_measured_alike_after_other_pictures():
    network = ARCHS.build({"type": "EDSR", "num_feat": 32, "num_block": 1, "upscale": 2}).eval()
    restorer = SimpleNamespace(network=network, device=torch.device("cpu"), dtype=None)
    fresh = Gauge(restorer, 3)
    with heap.kept():
        fresh.tile((640, 640), 1)
        for _ in range(3):
            restore(network, torch.rand(1, 3, 320, 320))
        warm = Gauge(restorer, 3)
        warm.tile((640, 640), 1)
    if fresh.need.base is None:
        pytest.skip("this system does not tell the peak of a process")
    assert warm.need.bytes(640 * 640) > 0.5 * fresh.need.bytes(640 * 640)
