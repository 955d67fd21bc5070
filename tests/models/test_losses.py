"""Losses: values by hand, weights and reductions, precision, and what they refuse."""

import numpy as np
import pytest
import torch

from models.losses import LOSSES
from models.metrics import calculate_psnr
from options.registry import WrongArgument

BY_PLACE = ("L1Loss", "MSELoss", "CharbonnierLoss", "FFTLoss")
NAMES = (*BY_PLACE, "PSNRLoss")


def _pictures(dtype=torch.float64, shape=(2, 3, 5, 7)):
    generator = torch.Generator().manual_seed(0)
    pred, target = torch.rand(2, *shape, dtype=torch.float64, generator=generator).to(dtype)
    return pred, target


def _by_hand(name, pred, target):
    """The difference at each place (of each picture for PSNRLoss), by numpy."""
    a, b = pred.double().numpy(), target.double().numpy()
    if name == "L1Loss":
        return np.abs(a - b)
    if name == "MSELoss":
        return (a - b) ** 2
    if name == "CharbonnierLoss":
        return np.sqrt((a - b) ** 2 + 1e-12)
    if name == "PSNRLoss":
        return 10 * np.log10(((a - b) ** 2).mean(axis=(1, 2, 3)) + 1e-8)
    spectra = np.fft.fft2(a), np.fft.fft2(b)
    parts = [np.stack([spectrum.real, spectrum.imag], axis=-1) for spectrum in spectra]
    return np.abs(parts[0] - parts[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("reduction", "reduce"), [("mean", np.mean), ("sum", np.sum), ("none", np.asarray)])
def test_a_loss_is_its_formula_times_its_weight(name, reduction, reduce):
    pred, target = _pictures()
    loss = LOSSES.build({"type": name, "loss_weight": 0.5, "reduction": reduction})
    expected = 0.5 * reduce(_by_hand(name, pred, target))
    np.testing.assert_allclose(loss(pred, target).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", BY_PLACE)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_weighted_mean_is_taken_over_the_weights(name, channels):
    pred, target = _pictures()
    weight = torch.rand(2, channels, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    differences = _by_hand(name, pred, target)
    factors = weight.numpy() if name != "FFTLoss" else weight.numpy()[..., None]
    expected = np.average(differences, weights=np.broadcast_to(factors, differences.shape))
    np.testing.assert_allclose(LOSSES.build({"type": name})(pred, target, weight).item(), expected, rtol=1e-12)


def test_the_psnr_loss_is_minus_the_psnr_of_the_results_table():
    pred, target = _pictures()
    expected = [
        calculate_psnr(*(255 * x.permute(1, 2, 0).numpy() for x in pair)) for pair in zip(pred, target, strict=True)
    ]
    assert LOSSES.build({"type": "PSNRLoss"})(pred, target).item() == pytest.approx(-np.mean(expected), rel=1e-6)


def test_the_psnr_loss_takes_the_error_of_a_picture_over_the_weights():
    pred, target = _pictures()
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.float64)
    mask[..., :3] = 0.5
    loss = LOSSES.build({"type": "PSNRLoss"})
    torch.testing.assert_close(loss(pred, target, mask), loss(pred[..., :3], target[..., :3]))


def test_the_psnr_loss_is_finite_where_pictures_agree():
    pred, target = torch.zeros(2, 1, 1, 2, 2).unbind(0)
    pred.requires_grad_()
    loss = LOSSES.build({"type": "PSNRLoss"})(pred, target)
    loss.backward()
    assert loss.item() == pytest.approx(-80)
    assert torch.isfinite(pred.grad).all()


@pytest.mark.parametrize("name", ["L1Loss", "PSNRLoss"])
def test_a_mask_hides_what_it_does_not_cover(name):
    pred, target = _pictures()
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.float64)
    mask[..., :3] = 1
    loss = LOSSES.build({"type": name})
    changed = pred.clone()
    changed[..., 3:] += 100
    assert loss(changed, target, mask) == loss(pred, target, mask)
    torch.testing.assert_close(loss(pred, target, mask), loss(pred[..., :3], target[..., :3]))


def test_the_spectrum_is_not_normalised():
    """A constant difference of 1 puts h * w into one of 2 * h * w numbers."""
    pred, target = torch.ones(1, 3, 6, 8), torch.zeros(1, 3, 6, 8)
    assert LOSSES.build({"type": "FFTLoss"})(pred, target).item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_right(name):
    pred, target = _pictures(shape=(1, 2, 3, 4))
    loss = LOSSES.build({"type": name})
    assert torch.autograd.gradcheck(lambda x: loss(x, target), pred.requires_grad_(True))


def test_charbonnier_has_a_gradient_where_pictures_agree():
    pred = torch.zeros(1, 1, 2, 2, requires_grad=True)
    LOSSES.build({"type": "CharbonnierLoss"})(pred, torch.zeros(1, 1, 2, 2)).backward()
    assert torch.equal(pred.grad, torch.zeros_like(pred))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_in_float32(name, dtype):
    pred, target = _pictures(dtype)
    value = LOSSES.build({"type": name})(pred, target)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(_by_hand(name, pred, target).mean(), rel=1e-5)


def test_a_half_precision_prediction_gets_a_gradient_of_its_own_dtype():
    pred, target = _pictures(torch.bfloat16)
    LOSSES.build({"type": "FFTLoss"})(pred.requires_grad_(True), target.float()).backward()
    assert pred.grad.dtype == torch.bfloat16
    assert torch.isfinite(pred.grad).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 5, 6), (3, 5, 7)])
def test_nothing_is_broadcast(name, shape):
    with pytest.raises(ValueError, match="same shape"):
        LOSSES.build({"type": name})(_pictures()[0], torch.zeros(shape))


def test_a_weight_of_another_shape_is_refused():
    pred, target = _pictures()
    with pytest.raises(ValueError, match=r"weight must be .*got \(1, 1, 5, 7\)"):
        LOSSES.build({"type": "L1Loss"})(pred, target, torch.ones(1, 1, 5, 7))


def test_an_8_bit_picture_is_refused():
    with pytest.raises(TypeError, match="uint8"):
        LOSSES.build({"type": "L1Loss"})(torch.rand(1, 3, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"type": "L1Loss", "reduction": "avg"}, "reduction must be one of mean, sum, none, got 'avg'"),
        ({"type": "CharbonnierLoss", "eps": 0}, "eps must be more than 0"),
        ({"type": "PSNRLoss", "eps": -1.0}, "eps must be more than 0"),
    ],
    ids=["reduction", "eps", "eps of PSNRLoss"],
)
def test_a_wrong_value_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        LOSSES.build(spec)


def test_a_misspelt_argument_names_the_right_one():
    with pytest.raises(WrongArgument, match="did you mean loss_weight"):
        LOSSES.build({"type": "L1Loss", "los_weight": 1.0})
