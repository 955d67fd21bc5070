"""RestorationModel: one step is what it says, and the options do what they say."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.checkpoint import save_pth
from models.infer import restore
from models.restoration import NotFinite
from options.errors import OptionsError

SGD = "train.optim_g={type: SGD, lr: 0.1}"


def weights(model):
    return {key: value.clone() for key, value in model.network.state_dict().items()}


def test_a_step_equals_a_step_written_out(make_options, make_model, batches):
    options = make_options("train.scheduler=~")
    model, (batch,) = make_model(options), batches(options, 1)
    plain = copy.deepcopy(model.network).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.9), weight_decay=0)
    loss = F.l1_loss(plain(batch["lq"]), batch["gt"])
    loss.backward()
    optimizer.step()
    logs = model.train_step([batch])
    torch.testing.assert_close(logs["l_pix"], loss.detach())
    torch.testing.assert_close(weights(model), plain.state_dict(), rtol=1e-4, atol=1e-6)


def test_training_lowers_the_loss(make_options, make_model, batches):
    options = make_options()
    model, (batch,) = make_model(options), batches(options, 1)
    losses = [model.train_step([batch])["l_pix"].item() for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_accumulated_halves_equal_the_whole_batch(make_options, make_model, batches):
    options = make_options(SGD, "train.scheduler=~", "datasets.train.batch_size_per_gpu=4")
    (whole,) = batches(options, 1)
    halves = [{key: value[i : i + 2] for key, value in whole.items()} for i in (0, 2)]
    one, two = make_model(options), make_model(options)
    one.train_step([whole])
    logs = two.train_step(halves)
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-4, atol=1e-6)
    assert logs["l_pix"].ndim == 0


def test_the_learning_rate_of_each_step_is_the_schedule_s(make_options, make_model, batches):
    options = make_options("train.total_iter=4", "train.warmup_iter=2")
    model, (batch,) = make_model(options), batches(options, 1)
    rates = []
    for _ in range(4):
        model.train_step([batch])
        rates += model.learning_rates()
    # warm-up 1/2, then its last value goes on; the milestone at 2 acts in step 3
    assert rates == pytest.approx([5e-4, 5e-4, 2.5e-4, 2.5e-4])


def test_clipping_limits_the_gradient_norm(make_options, make_model, batches):
    clipped = make_options(SGD, "train.scheduler=~", "train.use_grad_clip=true", "train.grad_clip=1e-3")
    model, (batch,) = make_model(clipped), batches(clipped, 1)
    before = weights(model)
    logs = model.train_step([batch])
    moved = math.sqrt(sum((weights(model)[k] - before[k]).square().sum().item() for k in before))
    assert logs["grad_norm"] > 1e-3
    assert moved == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_losses_add_up_with_their_weights(make_options, make_model, batches):
    fft = "train.fft_loss_opt={type: FFTLoss, loss_weight: 0.1}"
    extra = "train.losses={l_char: {type: CharbonnierLoss, loss_weight: 0.5}}"
    options = make_options(fft, extra, SGD, "train.scheduler=~")
    model, (batch,) = make_model(options), batches(options, 1)
    plain = copy.deepcopy(model.network).train()
    gap = plain(batch["lq"]) - batch["gt"]
    spectrum = torch.fft.fft2(gap)
    parts = {
        "l_pix": gap.abs().mean(),
        "l_fft": 0.1 * (spectrum.real.abs().mean() + spectrum.imag.abs().mean()) / 2,
        "l_char": 0.5 * (gap.square() + 1e-12).sqrt().mean(),
    }
    sum(parts.values()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    logs = model.train_step([batch])
    del logs["grad_norm"]
    torch.testing.assert_close(logs, {label: value.detach() for label, value in parts.items()})
    torch.testing.assert_close(weights(model), plain.state_dict(), rtol=1e-4, atol=1e-6)


def test_the_average_follows_and_is_what_is_judged(make_options, make_model, batches):
    options = make_options()
    model, (batch,) = make_model(options), batches(options, 1)
    before = weights(model)
    model.train_step([batch])
    expected = {k: before[k] * 0.9 + weights(model)[k] * 0.1 for k in before}
    torch.testing.assert_close(dict(model.ema.network.state_dict()), expected)
    with torch.no_grad():
        judged = model.ema.network.eval()(batch["lq"])
    torch.testing.assert_close(model.predict(batch["lq"]), judged)
    assert set(model.weights()) == {"params", "params_ema"}
    assert model.network.training


def test_without_an_average_the_network_itself_is_judged(make_options, make_model, batches):
    options = make_options("train.ema_decay=0")
    model, (batch,) = make_model(options), batches(options, 1)
    assert set(model.weights()) == {"params"}
    with torch.no_grad():
        torch.testing.assert_close(model.predict(batch["lq"]), model.network.eval()(batch["lq"]))


@pytest.mark.parametrize("bad", ["lq", "gt"])
def test_a_loss_that_is_not_finite_stops_before_it_harms_the_weights(make_options, make_model, batches, bad):
    options = make_options()
    model, (batch,) = make_model(options), batches(options, 1)
    batch[bad][0, 0, 0, 0] = math.nan
    before = weights(model)
    with pytest.raises(NotFinite, match=f"iteration 1: l_pix nan.*pictures: {batch['name'][0]}"):
        model.train_step([batch])
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert model.iteration == 0


def test_the_guard_can_leave_out_the_step_instead(make_options, make_model, batches, caplog):
    options = make_options("train.nan_guard=skip")
    model, (batch,) = make_model(options), batches(options, 1)
    batch["gt"][0, 0, 0, 0] = math.inf
    before = weights(model)
    model.train_step([batch])
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert "the step is left out" in caplog.text
    assert model.iteration == 1


def test_a_saved_state_goes_on_bit_for_bit(make_options, make_model, batches):
    options = make_options()
    four = batches(options, 4)
    through, first, second = make_model(options), make_model(options), make_model(options)
    for batch in four:
        through.train_step([batch])
    for batch in four[:2]:
        first.train_step([batch])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for batch in four[2:]:
        second.train_step([batch])
    assert second.iteration == 4
    for part in ("params", "params_ema"):
        torch.testing.assert_close(second.weights()[part], through.weights()[part], rtol=0, atol=0)
    assert second.learning_rates() == through.learning_rates()


def test_a_continued_run_obeys_its_options_not_the_old_ones(make_options, make_model, batches):
    old = make_model(make_options("train.scheduler=~"))
    old.train_step(batches(old.options, 1))
    new = make_model(make_options("train.scheduler=~", "train.optim_g={type: AdamW, lr: 5e-4, weight_decay: 0.1}"))
    new.load_state_dict(old.state_dict())
    new.train_step(batches(new.options, 1))
    (group,) = new.optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (5e-4, 0.1, (0.9, 0.999))
    assert new.optimizer.state_dict()["state"][0]["step"] == 2


def test_a_state_of_another_scale_is_refused_though_its_weights_could_be_adapted(make_options, make_model, batches):
    old = make_model(make_options())
    old.train_step(batches(old.options, 1))
    tripled = make_options("scale=3", "network_g.upscaling_factor=3", "datasets.train.gt_size=33")
    with pytest.raises(OptionsError, match=r"upsampler\.up_conv\.weight is \(12, .* in the state and \(27, "):
        make_model(tripled).load_state_dict(old.state_dict())


def test_other_moments_than_the_state_has_are_refused(make_options, make_model, batches):
    old = make_model(make_options("train.scheduler=~"))
    old.train_step(batches(old.options, 1))
    with pytest.raises(OptionsError, match="amsgrad was False and is True"):
        make_model(make_options("train.scheduler=~", "train.optim_g.amsgrad=true")).load_state_dict(old.state_dict())


def test_half_precision_may_begin_in_a_resumed_run(make_options, make_model, batches):
    old = make_model(make_options())
    old.train_step(batches(old.options, 1))
    new = make_model(make_options("train.use_amp=true", "train.amp_dtype=float16"))
    new.load_state_dict(old.state_dict())
    new.train_step(batches(new.options, 1))
    assert new.iteration == 2


def test_a_state_of_another_network_is_refused(make_options, make_model):
    other = make_model(make_options("network_g.dim=8"))
    with pytest.raises(OptionsError, match="does not fit this run's network"):
        make_model(make_options()).load_state_dict(other.state_dict())


def layer_calls(model):
    """A list that grows by one at each call of the network's first layer."""
    calls = []
    model.network.body[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("checkpointing", "times"), [("true", 2), ("false", 1)])
def test_checkpointing_computes_each_layer_again(make_options, make_model, batches, checkpointing, times):
    options = make_options(f"train.use_checkpointing={checkpointing}")
    model = make_model(options)
    calls = layer_calls(model)
    model.train_step(batches(options, 1))
    assert len(calls) == times


def test_a_network_that_cannot_recompute_refuses_checkpointing(make_options, make_model, own_registry):
    @own_registry.register()
    class Plain(nn.Module):
        scale = 2

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

    with pytest.raises(OptionsError, match="use_checkpointing: Plain has no set_grad_checkpointing"):
        make_model(make_options("train.use_checkpointing=true", network_g={"type": "Plain"}))


@pytest.mark.parametrize("setting", ["true", "false"])
def test_the_memory_layout_is_as_asked(make_options, make_model, setting):
    options = make_options(f"train.use_channels_last={setting}")
    lq = make_model(options)._to_device(torch.rand(2, 3, 8, 8))
    assert lq.is_contiguous(memory_format=torch.channels_last) == (setting == "true")


@pytest.mark.parametrize("setting", ["train.use_checkpointing=true", "train.use_channels_last=false"])
def test_memory_settings_do_not_change_the_result(make_options, make_model, batches, setting):
    plain, changed = make_options(SGD, "train.scheduler=~"), make_options(SGD, "train.scheduler=~", setting)
    (batch,) = batches(plain, 1)
    one, two = make_model(plain), make_model(changed)
    one.train_step([batch])
    two.train_step([batch])
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_stays_close_to_full_precision(make_options, make_model, batches, dtype):
    plain = make_options(SGD, "train.scheduler=~")
    mixed = make_options(SGD, "train.scheduler=~", "train.use_amp=true", f"train.amp_dtype={dtype}")
    (batch,) = batches(plain, 1)
    one, two = make_model(plain), make_model(mixed)
    exact, rounded = one.train_step([batch]), two.train_step([batch])
    assert rounded["l_pix"].item() == pytest.approx(exact["l_pix"].item(), rel=0.02)
    # equal to the last bit would mean that nothing was rounded
    assert rounded["l_pix"] != exact["l_pix"]
    assert rounded["grad_norm"].item() == pytest.approx(exact["grad_norm"].item(), rel=0.1)
    assert all(value.dtype == torch.float32 for value in weights(two).values())


def test_a_compiled_network_trains_to_the_same_weights(make_options, make_model, batches, monkeypatch):
    # the compiler's front end only: its C++ back end takes most of a minute and is PyTorch's own matter
    # other sizes in other tests would have it compile for any size, which takes half a minute
    torch.compiler.reset()
    real, modes = torch.compile, []

    def front_end(network, mode=None):
        modes.append(mode)
        return real(network, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", front_end)
    plain = make_options(SGD, "train.scheduler=~")
    compiled = make_options(SGD, "train.scheduler=~", "train.use_compile=reduce-overhead")
    (batch,) = batches(plain, 1)
    one, two = make_model(plain), make_model(compiled)
    assert two._forward is not two.network
    calls = []
    two._forward.register_forward_pre_hook(lambda *_: calls.append(1))
    one.train_step([batch])
    two.train_step([batch])
    assert (modes, len(calls)) == (["reduce-overhead"], 1)
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-4, atol=1e-6)
    assert not any("_orig_mod" in key for key in two.weights()["params"])


@pytest.mark.parametrize(
    ("argument", "value", "told"),
    [
        ("num_heads", 3, r"network_g: .*dim=16.*3"),
        ("upscaling_factor", 3, "scale is 2, but the network SST enlarges by 3"),
    ],
)
def test_a_network_that_cannot_be_as_the_options_say_is_their_mistake(make_options, make_model, argument, value, told):
    # the loader would tell these first
    options = make_options()
    network = options.network_g.model_validate({**options.network_g.spec(), argument: value})
    with pytest.raises(OptionsError, match=told):
        make_model(options.model_copy(update={"network_g": network}))


def test_the_guard_can_be_off(make_options, make_model, batches):
    options = make_options("train.nan_guard=off")
    model, (batch,) = make_model(options), batches(options, 1)
    batch["gt"][0, 0, 0, 0] = math.nan
    assert model.train_step([batch])["l_pix"].isnan()
    assert model.iteration == 1


# weights to start from


@pytest.fixture
def pair_of_weights(make_options, make_model, tmp_path):
    """A file with two different sets of weights, and both of them."""
    ordinary, average = (
        {key: value + shift for key, value in weights(make_model(make_options())).items()} for shift in (0.0, 0.125)
    )
    save_pth(tmp_path / "pair.pth", {"params": ordinary, "params_ema": average})
    return tmp_path / "pair.pth", ordinary, average


def start(options, training=True):
    from models import MODELS

    return MODELS.build({"type": options.model_type}, options=options, device=torch.device("cpu"), training=training)


def assert_same(network, state):
    torch.testing.assert_close(dict(network.state_dict()), dict(state), rtol=0, atol=0)


def test_training_starts_from_the_weights_and_its_average_from_the_average(make_options, pair_of_weights):
    file, ordinary, average = pair_of_weights
    model = start(make_options(f"path.pretrain_network_g={file}"))
    assert_same(model.network, ordinary)
    assert_same(model.ema.network, average)


def test_a_key_asks_for_the_average_in_both_places(make_options, pair_of_weights):
    file, _, average = pair_of_weights
    model = start(make_options(f"path.pretrain_network_g={file}", "path.param_key_g=params_ema"))
    assert_same(model.network, average)
    assert_same(model.ema.network, average)


@pytest.mark.parametrize(("key", "which"), [("auto", 2), ("params", 1), ("params_ema", 2), ("~", 2)])
def test_a_test_takes_the_weights_that_the_key_says(make_options, pair_of_weights, key, which):
    options = make_options(f"path.pretrain_network_g={pair_of_weights[0]}", f"path.param_key_g={key}")
    assert_same(start(options, training=False).network, pair_of_weights[which])


def test_an_average_starts_from_the_weights_where_the_file_has_none(make_options, pair_of_weights, tmp_path):
    _, ordinary, _ = pair_of_weights
    save_pth(tmp_path / "single.pth", {"params": ordinary})
    model = start(make_options(f"path.pretrain_network_g={tmp_path / 'single.pth'}"))
    assert_same(model.network, ordinary)
    assert_same(model.ema.network, ordinary)


def test_what_fits_is_loaded_where_strictness_is_off(make_options, pair_of_weights, tmp_path, caplog):
    _, ordinary, _ = pair_of_weights
    key = next(iter(ordinary))
    save_pth(tmp_path / "part.pth", {"params": {k: v for k, v in ordinary.items() if k != key}})
    strict = make_options(f"path.pretrain_network_g={tmp_path / 'part.pth'}")
    with pytest.raises(OptionsError, match="1 missing"):
        start(strict)
    model = start(make_options(f"path.pretrain_network_g={tmp_path / 'part.pth'}", "path.strict_load_g=false"))
    rest = {k: v for k, v in weights(model).items() if k != key}
    torch.testing.assert_close(rest, {k: v for k, v in ordinary.items() if k != key}, rtol=0, atol=0)
    assert "fits in part" in caplog.text


def test_a_resumed_run_can_leave_out_the_network(make_options, make_model, batches):
    old = make_model(make_options())
    old.train_step(batches(old.options, 1))
    new = make_model(make_options("path.ignore_resume_networks=[network_g]"))
    before = weights(new)
    new.load_state_dict(old.state_dict())
    assert_same(new.network, before)
    assert_same(new.ema.network, before)
    assert new.iteration == 1


# how validation restores


@pytest.mark.parametrize(
    ("override", "settings"),
    [
        ("val={tile: 16, overlap: 4}", {"tile": 16, "overlap": 4}),
        ("val.self_ensemble=true", {"self_ensemble": True}),
        ("val.dtype=bfloat16", {"dtype": torch.bfloat16}),
    ],
    ids=["tiles", "self-ensemble", "bfloat16"],
)
def test_prediction_restores_as_val_says(make_options, make_model, override, settings):
    model, lq = make_model(make_options(override)), torch.rand(1, 3, 40, 24)
    result = model.predict(lq)
    torch.testing.assert_close(result, restore(model.ema.network, lq, **settings), rtol=0, atol=0)
    assert not torch.equal(result, restore(model.ema.network, lq))


def test_a_dtype_that_the_device_has_no_use_for_ends_before_the_run(make_options, make_model):
    with pytest.raises(OptionsError, match=r"val\.dtype: float16"):
        make_model(make_options("val.dtype=float16"))
