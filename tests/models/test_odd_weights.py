"""Weights with a NaN, and modules that keep more than tensors (``get_extra_state``)."""

import math

import pytest
import torch
from torch import nn

from models import checkpoint, progress
from models.progress import Progress
from options.errors import OptionsError


class Counting(nn.Module):
    """Keeps a plain value that torch saves as ``_extra_state``."""

    scale, in_channels = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.seen = {"names": ["a", "b"], "count": 3}

    def forward(self, x):
        return nn.functional.pixel_shuffle(self.conv(x), 2)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


@pytest.fixture
def spoilt(tmp_path):
    """A file of weights for a convolution, with one NaN."""
    weights = nn.Conv2d(3, 2, 1).state_dict()
    weights["bias"][1] = math.nan
    checkpoint.save_pth(tmp_path / "net.pth", {"params": weights})
    return tmp_path / "net.pth"


def test_weights_with_a_nan_are_refused_by_the_name_of_the_tensor(spoilt):
    net = nn.Conv2d(3, 2, 1)
    with pytest.raises(OptionsError, match=r"net\.pth: tensor bias holds NaN \(params\)"):
        checkpoint.load_weights(net, spoilt)
    assert net.bias.isfinite().all()


def test_weights_with_a_nan_are_loaded_with_a_warning_where_all_that_fits_is_asked_for(spoilt, caplog):
    net = nn.Conv2d(3, 2, 1)
    checkpoint.load_weights(net, spoilt, strict=False)
    assert net.bias[1].isnan()
    assert "tensor bias holds NaN" in caplog.text


def test_an_infinity_in_weights_is_no_mistake(tmp_path):
    # a mask of attention may hold it
    weights = nn.Conv2d(3, 2, 1).state_dict()
    weights["bias"][1] = -math.inf
    checkpoint.save_pth(tmp_path / "net.pth", {"params": weights})
    checkpoint.load_weights(nn.Conv2d(3, 2, 1), tmp_path / "net.pth")


def test_a_nan_in_the_optimizer_s_state_is_named(make_options, make_model, batches, tmp_path):
    options = make_options()
    model = make_model(options)
    model.train_step(batches(options, 1))
    state = next(iter(model.optimizer.state.values()))
    state["exp_avg"].fill_(math.nan)
    progress.save(tmp_path / "1.state", model, Progress())
    with pytest.raises(OptionsError, match=r"1\.state: tensor model\.optimizer\.state\.0\.exp_avg holds NaN"):
        progress.resume(tmp_path / "1.state", model)


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_what_a_module_keeps_beside_tensors_is_saved_and_loaded(tmp_path, kind):
    net, file = Counting(), tmp_path / f"net.{kind}"
    net.seen = {"names": ["c"], "table": torch.arange(3)}
    if kind == "pth":
        checkpoint.save_pth(file, {"params": net.state_dict()})
    else:
        checkpoint.save_safetensors(file, net.state_dict(), {"weights": "params"})
    other = Counting()
    checkpoint.load_weights(other, file)
    assert other.seen["names"] == ["c"]
    assert other.seen["table"].tolist() == [0, 1, 2]


def test_a_refused_file_leaves_what_a_module_keeps(tmp_path):
    weights = Counting().state_dict()
    weights["_extra_state"] = {"names": []}
    del weights["conv.bias"]
    checkpoint.save_pth(tmp_path / "net.pth", {"params": weights})
    net = Counting()
    with pytest.raises(OptionsError, match="1 missing"):
        checkpoint.load_weights(net, tmp_path / "net.pth")
    assert net.seen == {"names": ["a", "b"], "count": 3}


def test_a_run_of_such_a_network_is_trained_resumed_and_tested(tiny, own_registry, command, tmp_path):
    own_registry.register(Counting)
    tiny["network_g"] = {"type": "Counting"}
    assert command("train.py", tiny, "train.total_iter=2")[0] == 0
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    weights = tmp_path / "out/experiments/small/models/net_g_best.safetensors"
    code, printed = command("test.py", tiny, f"path.pretrain_network_g={weights}")
    assert code == 0, printed


def test_the_scale_of_float16_gradients_goes_on_where_it_was(make_options, make_model, tmp_path):
    model, other = (make_model(make_options("train.use_amp=true", "train.amp_dtype=float16")) for _ in "ab")
    for scaled in (model, other):
        scaled.scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=8.0)
    model.scaler.load_state_dict({**model.scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 17})
    progress.save(tmp_path / "0.state", model, Progress())
    progress.resume(tmp_path / "0.state", other)
    kept = other.scaler.state_dict()
    assert (kept["scale"], kept["_growth_tracker"]) == (1024.0, 17)
