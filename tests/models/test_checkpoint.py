"""Weights and states on disk: whole files, every known layout, and a misfit told on one screen."""

import json
import os
import pickle
import zipfile

import pytest
import torch
from safetensors import safe_open
from torch import nn

from models import checkpoint
from models.checkpoint import (
    keep_last,
    load_state,
    load_weights,
    read_checkpoint,
    save_pth,
    save_safetensors,
    save_state,
)
from options.errors import DataError, OptionsError, UserError


class Net(nn.Module):
    """A small network with a depth, a width and a scale; between scales it resamples its last layer on loading."""

    def __init__(self, dim=8, depth=3, scale=2):
        super().__init__()
        self.scale = scale
        self.first = nn.Conv2d(3, dim, 3, padding=1)
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(dim, dim, 3), nn.BatchNorm2d(dim)) for _ in range(depth))
        self.up = nn.Conv2d(dim, 3 * scale**2, 3)
        self.last = nn.Conv2d(3, 3, 3)


class ResamplingNet(Net):
    """As SST does: the last layer of another scale is brought to this one's shape while it is loaded."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_load_state_dict_pre_hook(self._resample)

    def _resample(self, module, state_dict, prefix, *_):
        for key, own in ((f"{prefix}up.weight", self.up.weight), (f"{prefix}up.bias", self.up.bias)):
            if key in state_dict and state_dict[key].shape[1:] == own.shape[1:]:
                state_dict[key] = state_dict[key].mean(0, keepdim=True).expand(own.shape)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def other():
    torch.manual_seed(1)
    return Net()


def _copy(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def _assert_equal(network, state):
    torch.testing.assert_close(dict(network.state_dict()), dict(state), rtol=0, atol=0)


# what is written


def test_a_pth_is_what_basicsr_reads(net, other, tmp_path):
    wrapped = {f"module.{name}": value for name, value in net.state_dict().items()}
    save_pth(tmp_path / "net.pth", {"params": wrapped, "params_ema": other.state_dict()})
    content = torch.load(tmp_path / "net.pth", weights_only=True)
    assert list(content) == ["params", "params_ema"]
    _assert_equal(net, content["params"])
    _assert_equal(other, content["params_ema"])


def test_a_view_is_written_without_what_it_does_not_show(tmp_path):
    table = torch.zeros(1_000_000)
    save_pth(tmp_path / "net.pth", {"params": {"row": table[:4]}})
    assert (tmp_path / "net.pth").stat().st_size < 10_000


def test_equal_weights_make_equal_files(net, tmp_path):
    save_pth(tmp_path / "a.pth", {"params": net.state_dict()})
    save_pth(tmp_path / "b.pth", {"params": net.state_dict()})
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


def test_safetensors_carry_facts_as_strings(net, tmp_path):
    facts = {
        "network_g": {"type": "Net", "dim": 8, "sizes": (1, 2)},
        "scale": 2,
        "weights": "params_ema",
        "score": 31.5,
    }
    save_safetensors(tmp_path / "net.safetensors", net.state_dict(), facts)
    with safe_open(tmp_path / "net.safetensors", framework="pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["network_g"]) == {"type": "Net", "dim": 8, "sizes": [1, 2]}
    assert (metadata["scale"], metadata["weights"], metadata["score"]) == ("2", "params_ema", "31.5")


def test_weights_can_be_read_by_whom_the_umask_lets(net, tmp_path):
    save_safetensors(tmp_path / "w.safetensors", net.state_dict())
    (tmp_path / "plain").touch()
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_tied_and_strided_tensors_survive_safetensors(tmp_path):
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 4, 3))
    network[1].weight = network[0].weight
    network = network.to(memory_format=torch.channels_last)
    state = {**network.state_dict(), "2.bias": torch.arange(8.0)[::2]}
    save_safetensors(tmp_path / "net.safetensors", state)
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 4, 3))
    load_weights(fresh, tmp_path / "net.safetensors")
    _assert_equal(fresh, state)


def test_a_state_comes_back_as_it_was(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    state = {"iteration": 7, "best": {"psnr": [31.2, 5]}, "optimizer": optimizer.state_dict(), "none": None}
    state["rng"] = (torch.get_rng_state(), 2**100, b"x")
    save_state(tmp_path / "7.state", state)
    torch.testing.assert_close(load_state(tmp_path / "7.state"), state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1).numpy(), r"state\['a'\]\[1\] is a ndarray"),
        (DataError("x"), r"state\['a'\]\[1\] is a DataError"),
        ({(1, 2): 3}, r"state\['a'\]\[1\] has a key of type tuple"),
    ],
    ids=["numpy", "object", "key"],
)
def test_a_state_that_could_not_be_read_safely_is_not_written(tmp_path, value, message):
    with pytest.raises(TypeError, match=message):
        save_state(tmp_path / "7.state", {"a": [0, value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("unexpected pos"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_leaves_the_old_file(net, tmp_path, monkeypatch, error):
    path = tmp_path / "net.pth"
    save_pth(path, {"params": net.state_dict()})
    before = path.read_bytes()

    def half(content, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", half)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
    with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "cannot write .*net.pth"):
        save_pth(path, {"params": net.state_dict()})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_appears_in_one_step_after_its_bytes_are_safe(net, tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(b.exists()), replace(a, b)))
    save_safetensors(tmp_path / "deep" / "net.safetensors", net.state_dict())
    assert steps == ["fsync", False]


# what is read


def _layouts(state, ema):
    return {
        "params": ({"params": state}, "params"),
        "params_ema": ({"params": ema, "params_ema": state}, "params_ema"),
        "state_dict": ({"state_dict": state, "epoch": 3}, "state_dict"),
        "bare": (state, checkpoint.BARE),
        "DDP": ({"params": {f"module.{k}": v for k, v in state.items()}}, "params"),
        "DDP, compiled": ({f"_orig_mod.module.{k}": v for k, v in state.items()}, checkpoint.BARE),
    }


@pytest.mark.parametrize("layout", ["params", "params_ema", "state_dict", "bare", "DDP", "DDP, compiled"])
def test_every_known_layout_is_found(net, other, tmp_path, layout):
    content, key = _layouts(net.state_dict(), _copy(other))[layout]
    torch.save(content, tmp_path / "weights.bin")
    target = Net()
    loaded = load_weights(target, tmp_path / "weights.bin")
    _assert_equal(target, net.state_dict())
    total = len(net.state_dict())
    assert (loaded.key, loaded.loaded, loaded.total, loaded.problems) == (key, total, total, "")
    assert str(loaded) == f"{key}, {total} of {total} tensors"


def test_safetensors_are_known_by_content(net, tmp_path):
    save_safetensors(tmp_path / "weights.pth", net.state_dict(), {"weights": "params_ema", "scale": 2})
    target = Net()
    loaded = load_weights(target, tmp_path / "weights.pth")
    _assert_equal(target, net.state_dict())
    assert (loaded.key, loaded.metadata["scale"]) == ("params_ema", "2")


def test_a_key_chooses_between_the_weights_and_their_average(net, other, tmp_path):
    save_pth(tmp_path / "net.pth", {"params": net.state_dict(), "params_ema": other.state_dict()})
    target = Net()
    assert load_weights(target, tmp_path / "net.pth", key="params").key == "params"
    _assert_equal(target, net.state_dict())


def test_a_key_that_is_not_there_gives_way_with_a_notice(net, tmp_path, caplog):
    save_pth(tmp_path / "net.pth", {"params": net.state_dict()})
    assert load_weights(Net(), tmp_path / "net.pth", key="params_ema").key == "params"
    assert "has no params_ema; params is used" in caplog.text


def test_a_network_may_have_a_part_called_module(tmp_path):
    network = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(network.state_dict(), tmp_path / "net.pth")
    target = nn.ModuleDict({"module": nn.Linear(2, 2)})
    load_weights(target, tmp_path / "net.pth")
    _assert_equal(target, network.state_dict())


def test_a_network_that_resamples_takes_weights_of_another_scale(tmp_path):
    source = ResamplingNet(scale=3)
    save_pth(tmp_path / "x3.pth", {"params": source.state_dict()})
    target = ResamplingNet(scale=2)
    assert load_weights(target, tmp_path / "x3.pth").problems == ""
    torch.testing.assert_close(target.up.bias, source.up.bias.mean().expand(12))
    torch.testing.assert_close(target.first.weight, source.first.weight)


# what does not fit


@pytest.mark.parametrize(
    ("sizes", "counts", "reason"),
    [
        ({"scale": 3}, "0 missing, 0 unexpected, 2 of another shape", "another scale"),
        ({"dim": 16}, "0 missing, 0 unexpected, 21 of another shape", "another width"),
        ({"depth": 40}, "0 missing, 259 unexpected, 0 of another shape", "another depth"),
        ({"depth": 1}, "12 missing, 0 unexpected, 0 of another shape", "another depth"),
    ],
    ids=["scale", "width", "deeper", "shallower"],
)
def test_a_misfit_is_told_on_one_screen_and_changes_nothing(net, tmp_path, sizes, counts, reason):
    save_pth(tmp_path / "net.pth", {"params": Net(**sizes).state_dict()})
    before = _copy(net)
    with pytest.raises(OptionsError) as caught:
        load_weights(net, tmp_path / "net.pth")
    text = str(caught.value)
    assert f"net.pth (params) does not fit Net: {counts}" in text
    assert f"likely reason: {reason}" in text
    assert "path.strict_load_g: false" in text or sizes == {"dim": 16}
    assert len(text.splitlines()) <= 16
    assert max(map(len, text.splitlines())) < 250
    _assert_equal(net, before)


def test_the_first_few_misfits_are_named_with_both_shapes(net, tmp_path):
    save_pth(tmp_path / "net.pth", {"params": Net(scale=3).state_dict()})
    with pytest.raises(OptionsError, match=r"up.weight: \[27, 8, 3, 3\] in the file, \[12, 8, 3, 3\] in the network"):
        load_weights(net, tmp_path / "net.pth")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"network_g": {"type": "SST"}}, "the file holds a SST, the network is a Net"),
        ({"network_g": {"type": "Net"}, "scale": 3}, "the file is for scale 3, the network for scale 2"),
        ({"network_g": {"type": "Net", "dim": 9}, "scale": 2}, 'the file was made with {"type": "Net", "dim": 9}'),
    ],
    ids=["network", "scale", "arguments"],
)
def test_the_facts_in_a_file_explain_the_misfit(net, tmp_path, facts, reason):
    save_safetensors(tmp_path / "net.safetensors", Net(dim=9, scale=3).state_dict(), facts)
    with pytest.raises(OptionsError) as caught:
        load_weights(net, tmp_path / "net.safetensors")
    assert reason in str(caught.value)


def test_not_strict_loads_what_fits_and_counts(net, tmp_path, caplog):
    source = Net(scale=3, depth=2)
    save_pth(tmp_path / "net.pth", {"params": {**source.state_dict(), "extra": torch.zeros(1)}})
    before = _copy(net)
    loaded = load_weights(net, tmp_path / "net.pth", strict=False)
    assert str(loaded) == "params, 18 of 27 tensors (6 missing, 1 unexpected, 2 of another shape)"
    assert str(loaded) in caplog.text
    assert torch.equal(net.first.weight, source.first.weight)
    assert torch.equal(net.up.weight, before["up.weight"])
    assert torch.equal(net.body[2][0].weight, before["body.2.0.weight"])


def test_nothing_in_common_is_an_error_even_when_not_strict(net, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "net.pth")
    with pytest.raises(OptionsError, match="another architecture: not one name is shared"):
        load_weights(net, tmp_path / "net.pth", strict=False)


def test_a_network_whose_hook_fails_is_put_back(net, tmp_path):
    def fail(module, incompatible):
        raise RuntimeError("tables do not match")

    save_pth(tmp_path / "net.pth", {"params": Net().state_dict()})
    before = _copy(net)
    net.register_load_state_dict_post_hook(fail)
    with pytest.raises(OptionsError, match="does not fit Net: tables do not match"):
        load_weights(net, tmp_path / "net.pth")
    _assert_equal(net, before)


# what cannot be read


def _damaged(path, net):
    save_pth(path, {"params": net.state_dict()})
    path.write_bytes(path.read_bytes()[:-2000])


def _damaged_safetensors(path, net):
    save_safetensors(path, net.state_dict())
    path.write_bytes(path.read_bytes()[:-2000])


def _archive(path, net):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "not weights")


UNREADABLE = {
    "empty": (lambda path, net: path.write_bytes(b""), "it is empty"),
    "text": (lambda path, net: path.write_text("hello, this is text"), "no checkpoint"),
    "noise": (lambda path, net: path.write_bytes(bytes(range(1, 256)) * 9), "no checkpoint"),
    "cut": (_damaged, "damaged, cut short"),
    "cut safetensors": (_damaged_safetensors, "damaged, cut short"),
    "another archive": (_archive, "no checkpoint"),
    "LFS pointer": (lambda path, net: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "web page": (lambda path, net: path.write_text("<!DOCTYPE html><html>"), "a web page"),
    "objects": (lambda path, net: torch.save({"params": net}, path), "holds Python objects"),
    "pickle": (
        lambda path, net: path.write_bytes(pickle.dumps(UserError("x"), protocol=2)),
        "holds Python objects|no checkpoint",
    ),
    "folder": (lambda path, net: path.mkdir(), "is a folder"),
    "absent": (lambda path, net: None, "no such file"),
    "numbers": (lambda path, net: torch.save({"epoch": 3, "lr": 0.1}, path), "holds no weights: found epoch, lr"),
    "a list": (lambda path, net: torch.save([1, 2], path), "holds no weights: found list"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_is_no_checkpoint_is_named_with_the_reason(net, tmp_path, kind):
    make, message = UNREADABLE[kind]
    path = tmp_path / "weights.pth"
    make(path, net)
    with pytest.raises(OptionsError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_name_that_the_file_system_refuses_is_that_of_no_file(tmp_path):
    with pytest.raises(OptionsError, match=r"no such file: .*a{300}\.pth"):
        read_checkpoint(tmp_path / f"{'a' * 300}.pth")


def test_a_state_that_is_damaged_is_named(net, tmp_path):
    _damaged(tmp_path / "7.state", net)
    with pytest.raises(OptionsError, match=r"cannot read .*7\.state: it is damaged"):
        load_state(tmp_path / "7.state")


# what is kept


def test_only_the_newest_are_kept_with_the_best_and_the_latest(tmp_path):
    kept = ["net_g_latest.pth", "net_g_best.safetensors", "notes.txt", "net_g_900.pth", "net_g_1000.pth"]
    kept += ["net_g_1000.safetensors", "net_d_5.pth", "net_d_7.pth", "net_g_200.pth"]
    pruned = ["net_g_80.pth", "net_g_80.safetensors", "net_d_3.pth"]
    for name in kept + pruned:
        (tmp_path / name).touch()
    deleted = keep_last(tmp_path, 2, protect={200})
    assert sorted(path.name for path in deleted) == sorted(pruned)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_states_are_ordered_by_number_not_by_name(tmp_path):
    for iteration in (9, 10, 100):
        (tmp_path / f"{iteration}.state").touch()
    keep_last(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["100.state"]
    assert keep_last(tmp_path / "absent", 1) == []


def test_at_least_one_is_kept(tmp_path):
    with pytest.raises(ValueError, match="at least 1, got 0"):
        keep_last(tmp_path, 0)
