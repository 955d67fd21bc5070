"""Tiles against the whole picture over many sizes, where tiles lie, and what happens when memory does not suffice."""

import json
import random
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.infer import TileMemory, restore
from options.errors import UserError

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class CellNet(nn.Module):
    """Convolutions over cells of ``multiple_of`` pixels: a pixel sees ``depth`` cells beside its own, no further."""

    def __init__(self, *, scale=1, multiple_of=1, minimum=1, depth=2, tile_multiple=1):
        super().__init__()
        self.scale, self.multiple_of, self.minimum, self.tile_multiple = scale, multiple_of, minimum, tile_multiple
        self.halo = depth * multiple_of + multiple_of - 1
        ends = 3 * multiple_of**2, 3 * multiple_of**2 * scale**2
        generator = torch.Generator().manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(ends[i > 0], ends[1], 3, padding=1) for i in range(depth))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / (ends[0] * 9) ** 0.5

    def forward(self, x):
        assert min(x.shape[-2:]) >= self.minimum
        x = F.pixel_unshuffle(x, self.multiple_of)
        for conv in self.convs:
            x = torch.tanh(conv(x))
        return F.pixel_shuffle(x, self.multiple_of * self.scale)


class Surveyor(nn.Module):
    """Returns its input, and notes from the picture of coordinates where each piece began and how large it was."""

    def __init__(self, **facts):
        super().__init__()
        for name, value in {"scale": 1, **facts}.items():
            setattr(self, name, value)
        self.pieces = []

    def forward(self, x):
        self.pieces.append((*x[0, :, 0, 0].long().tolist(), *x.shape[-2:]))
        return x


class ForgetfulNet(CellNet):
    """Out of memory above a number of pixels."""

    def __init__(self, limit, error=NO_MEMORY):
        super().__init__()
        self.limit, self.error, self.seen = limit, error, []

    def forward(self, x):
        self.seen.append(tuple(x.shape[-2:]))
        if x.numel() // 3 > self.limit:
            raise self.error
        return super().forward(x)


def _picture(h, w, b=1):
    return torch.rand(b, 3, h, w, generator=torch.Generator().manual_seed(h * 1000 + w))


def _coordinates(h, w):
    return torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))[None].float()


def _case(seed):
    """A network, a picture, and tiles with room for twice the halo, by chance."""
    draw = random.Random(seed)
    facts = {
        "scale": draw.choice([1, 2, 3]),
        "multiple_of": draw.choice([1, 2, 3, 4]),
        "minimum": draw.choice([1, 5, 13, 24]),
        "depth": draw.choice([1, 2]),
        "tile_multiple": draw.choice([1, 4, 6]),
    }
    net = CellNet(**facts)
    overlap = draw.choice([None, 2 * net.halo, 2 * net.halo + draw.randrange(6)])
    least = 4 * net.halo + 2 * net.multiple_of if overlap is None else overlap + 2 * net.multiple_of
    tile = least + draw.randrange(30)
    lq = _picture(draw.randint(1, 75), draw.randint(1, 75), b=draw.choice([1, 2]))
    return net, lq, {"tile": tile, "overlap": overlap, "self_ensemble": draw.random() < 0.2}


# equal to the whole


@pytest.mark.parametrize("seed", range(120))
def test_tiles_equal_the_whole_picture_whatever_the_sizes(seed):
    net, lq, arguments = _case(seed)
    whole = restore(net, lq, self_ensemble=arguments["self_ensemble"])
    torch.testing.assert_close(restore(net, lq, **arguments), whole, rtol=0, atol=1e-5)


def test_one_pixel_of_overlap_less_than_twice_the_halo_shows():
    """So the test above would notice a halo that is too small, and weights in the blind rim of a tile."""
    net, lq = CellNet(depth=3), _picture(50, 50)
    whole = restore(net, lq)
    torch.testing.assert_close(restore(net, lq, tile=16, overlap=2 * net.halo), whole, rtol=0, atol=1e-5)
    assert (restore(net, lq, tile=16, overlap=2 * net.halo - 1) - whole).abs().max() > 1e-4


@pytest.mark.parametrize("seed", range(60))
def test_the_shares_of_a_pixel_add_up_to_one_whatever_the_sizes(seed):
    draw = random.Random(seed)
    net = Surveyor(
        halo=draw.choice([None, 0, 3]), multiple_of=draw.choice([1, 2, 5]), tile_multiple=draw.choice([1, 6])
    )
    lq = _picture(draw.randint(1, 90), draw.randint(1, 90))
    tile = draw.randint(12, 60)
    torch.testing.assert_close(restore(net, lq, tile=tile, overlap=draw.choice([None, 0, 5])), lq)


@pytest.mark.parametrize("overlap", [None, 8, 16])
def test_a_network_that_answers_with_a_mean_leaves_no_seam(overlap):
    """Neighbouring pixels of a smooth picture stay as close as the ramp is long, at corners of four tiles too."""

    class Mean(nn.Module):
        scale = 1

        def forward(self, x):
            return x.mean((-2, -1), keepdim=True).expand_as(x)

    lq = (torch.linspace(0, 1, 96)[:, None] + torch.linspace(0, 1, 96)).expand(1, 3, 96, 96) / 2
    blended = restore(Mean(), lq, tile=32, overlap=overlap)
    largest = max(blended.diff(dim=axis).abs().max() for axis in (-2, -1))
    assert largest < 0.35 / ((overlap or 8) / 2)


# where tiles lie


@pytest.mark.parametrize("tile_multiple", [16, 24])
@pytest.mark.parametrize(("h", "w"), [(160, 128), (157, 131), (97, 203)])
@pytest.mark.parametrize("overlap", [None, 8, 16])
def test_every_tile_starts_and_ends_where_the_windows_do(h, w, tile_multiple, overlap):
    """All but the last tile end there too: a window that is cut inside the picture would be continued by reflection."""
    net = Surveyor(multiple_of=4, tile_multiple=tile_multiple)
    restore(net, _coordinates(h, w), tile=64, overlap=overlap, self_ensemble=False)
    assert len(net.pieces) > 4
    ends = [-(-side // 4) * 4 for side in (h, w)]
    for *start, height, width in net.pieces:
        assert all(place % tile_multiple == 0 for place in start)
        for place, length, end in zip(start, (height, width), ends, strict=True):
            assert (place + length) % tile_multiple == 0 or place + length == end


def test_a_tile_too_small_for_the_cycle_keeps_to_the_largest_part_of_it():
    """A tile of 64 cannot overlap and keep to 64; windows of 32 and 16 lie right nevertheless."""
    net = Surveyor(tile_multiple=64)
    restore(net, _coordinates(64, 160), tile=64)
    assert [piece[1] for piece in net.pieces] == [0, 32, 64, 96]


def test_tiles_of_a_global_network_overlap_by_a_quarter():
    net = Surveyor(halo=None)
    restore(net, _coordinates(64, 160), tile=64)
    assert [piece[1] for piece in net.pieces] == [0, 48, 96]


def test_a_side_that_fits_into_the_tile_as_asked_for_is_not_cut():
    net = Surveyor(tile_multiple=16)
    restore(net, _coordinates(70, 160), tile=70)
    assert {(piece[0], piece[2]) for piece in net.pieces} == {(0, 70)}


def test_no_tile_is_larger_than_asked_for_unless_the_network_needs_it():
    for tile in range(16, 70, 3):
        net = Surveyor(multiple_of=4, tile_multiple=24)
        restore(net, _coordinates(90, 130), tile=tile)
        assert max(side for piece in net.pieces for side in piece[2:]) <= tile


# memory


@pytest.mark.parametrize("tile", [None, 64])
def test_out_of_memory_falls_back_to_tiles_with_one_notice(tile, caplog):
    lq, net = _picture(70, 90), ForgetfulNet(limit=1000)
    result = restore(net, lq, tile=tile)
    torch.testing.assert_close(result, restore(CellNet(), lq), rtol=0, atol=1e-5)
    assert len(caplog.records) == 1
    whole = "tiles of 64" if tile else r"the whole picture (70 x 90)"
    assert f"out of memory with {whole}; restored in tiles of" in caplog.text


def test_an_overlap_that_the_smaller_tiles_have_no_room_for_is_told(caplog):
    restore(ForgetfulNet(limit=400), _picture(70, 90), tile=64, overlap=30)
    assert "restored in tiles of 16 with the default overlap" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you .."
        ),
        RuntimeError("std::bad_alloc"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB, ..)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
    ids=["CPU", "C++", "MPS", "cuBLAS", "Python"],
)
def test_every_allocator_is_understood(error, caplog):
    restore(ForgetfulNet(1000, error), _picture(70, 90))
    assert "restored in tiles of 22" in caplog.text


def test_another_error_is_not_taken_for_a_lack_of_memory():
    net = ForgetfulNet(1000, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        restore(net, _picture(70, 90))
    assert len(net.seen) == 1


def test_the_self_ensemble_runs_out_of_memory_once_not_eight_times(caplog):
    net = ForgetfulNet(limit=40 * 40)
    restore(net, _picture(48, 60), self_ensemble=True)
    assert net.seen.count((48, 60)) == 1
    assert len(caplog.records) == 1


def test_memory_that_never_suffices_ends_with_a_plain_message():
    with pytest.raises(UserError, match=r"out of memory with tiles of 16 pixels.*CUDA out of memory"):
        restore(ForgetfulNet(limit=10), _picture(70, 90))


def test_the_next_picture_of_the_size_does_not_run_out_of_memory_first(caplog):
    net, memory = ForgetfulNet(limit=1000), TileMemory()
    first = restore(net, _picture(70, 90), memory=memory)
    net.seen.clear()
    torch.testing.assert_close(restore(net, _picture(70, 90), memory=memory), first, rtol=0, atol=0)
    restore(net, _picture(91, 75), memory=memory, tile=80)
    assert max(h * w for h, w in net.seen) <= net.limit
    assert len(caplog.records) == 1


def test_a_picture_that_may_fit_is_still_tried_whole():
    net, memory = ForgetfulNet(limit=1000), TileMemory()
    restore(net, _picture(70, 90), memory=memory)
    net.seen.clear()
    restore(net, _picture(30, 30), memory=memory)
    assert net.seen == [(30, 30)]


def test_memory_that_became_scarcer_is_learnt_anew():
    net, memory = ForgetfulNet(limit=1000), TileMemory()
    restore(net, _picture(70, 90), memory=memory)
    net.limit = 300
    restore(net, _picture(70, 90), memory=memory)
    net.seen.clear()
    restore(net, _picture(70, 90), memory=memory)
    assert max(h * w for h, w in net.seen) <= net.limit


def test_a_model_remembers_what_did_not_fit(make_options, make_model, caplog):
    model, lq = make_model(make_options()), torch.rand(1, 3, 40, 40)
    forward, seen = model.ema.network.forward, []

    def scarce(x):
        seen.append(tuple(x.shape[-2:]))
        if x.shape[-1] > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(x)

    model.ema.network.forward = scarce
    for _ in range(2):
        model.predict(lq)
    assert seen.count((40, 40)) == 1
    assert len([record for record in caplog.records if "out of memory" in record.message]) == 1


SCARCE = """
    import json, logging, resource, sys
    import torch
    from models.infer import TileMemory, restore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    convs = (torch.nn.Conv2d(*channels, 3, padding=1) for channels in ((3, 64), (64, 3)))
    net = torch.nn.Sequential(*convs)
    net.scale, net.halo, calls, notices = 1, 2, [], []
    net.register_forward_pre_hook(lambda module, inputs: calls.append(max(inputs[0].shape[-2:])))
    handler = logging.Handler()
    handler.emit = lambda record: notices.append(record.getMessage())
    logging.getLogger("pellucid").addHandler(handler)
    lq = torch.rand(1, 3, 600, 500)
    expected = restore(net, lq, tile=160)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    # room for the result, not for 64 channels of the whole picture (77 MB)
    resource.setrlimit(resource.RLIMIT_AS, (size + 60 * 2**20,) * 2)
    calls.clear()
    memory = TileMemory()
    results = [restore(net, lq, memory=memory) for _ in range(2)]
    error = max((result - expected).abs().max().item() for result in results)
    print(json.dumps({"error": error, "whole": calls.count(600), "notices": notices}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_large_picture_is_restored_where_the_machine_has_no_memory_for_it_at_once(monkeypatch):
    """A child process with a real limit: the allocator of the CPU refuses, tiles fit."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(SCARCE)], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)
    assert told["error"] < 1e-5
    assert told["whole"] == 1
    assert len(told["notices"]) == 1
    assert "out of memory with the whole picture (600 x 500); restored in tiles of" in told["notices"][0]


class LargeBuffers(TorchDispatchMode):
    """Counts the buffers of at least a size that are made."""

    def __init__(self, least):
        super().__init__()
        self.least, self.kept = least, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() >= self.least:
            # kept, so that no address is used twice
            self.kept[result.untyped_storage().data_ptr()] = result
        return result


@pytest.mark.parametrize("size", [(128, 128), (121, 117)])
def test_tiles_are_put_together_in_the_one_buffer_of_the_result(size):
    lq = _picture(*size)
    with LargeBuffers(lq.nbytes * 3 // 4) as buffers:
        result = restore(Surveyor(multiple_of=8), lq, tile=64)
    assert set(buffers.kept) - {lq.untyped_storage().data_ptr()} == {result.untyped_storage().data_ptr()}
