"""RestorationModel: one step is what it says, and the options do what they say."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

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
    options = make_options(fft, extra)
    model, (batch,) = make_model(options), batches(options, 1)
    logs = model.train_step([batch])
    assert set(logs) == {"l_pix", "l_fft", "l_char", "grad_norm"}
    assert logs["l_char"].item() == pytest.approx(0.5 * logs["l_pix"].item(), rel=1e-3)


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


def test_a_state_of_another_network_is_refused(make_options, make_model):
    other = make_model(make_options("network_g.dim=8"))
    with pytest.raises(OptionsError, match="does not fit this run's network"):
        make_model(make_options()).load_state_dict(other.state_dict())


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
    assert rounded["grad_norm"].item() == pytest.approx(exact["grad_norm"].item(), rel=0.1)
    assert all(value.dtype == torch.float32 for value in weights(two).values())


def test_a_compiled_network_trains_to_the_same_weights(make_options, make_model, batches, monkeypatch):
    # the compiler's front end only: its C++ back end takes most of a minute and is PyTorch's own matter
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network, mode=None: real(network, backend="aot_eager"))
    plain = make_options(SGD, "train.scheduler=~")
    compiled = make_options(SGD, "train.scheduler=~", "train.use_compile=true")
    (batch,) = batches(plain, 1)
    one, two = make_model(plain), make_model(compiled)
    one.train_step([batch])
    two.train_step([batch])
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-4, atol=1e-6)
    assert not any("_orig_mod" in key for key in two.weights()["params"])


def test_a_network_that_cannot_be_built_is_the_options_mistake(make_options, make_model):
    with pytest.raises(OptionsError, match=r"network_g: .*dim=16.*3"):
        make_model(make_options("network_g.num_heads=3"))


def test_another_scale_than_the_network_s_is_refused(make_options, make_model):
    with pytest.raises(OptionsError, match="scale is 2, but the network SST enlarges by 3"):
        make_model(make_options("network_g.upscaling_factor=3"))
