"""A model on real photographs, built as train.py builds it."""

import pytest
import torch

import archs  # noqa: F401  the components register themselves
import data
from models import MODELS, loop
from options import load, schema


@pytest.fixture
def make_options(right):
    """``make_options("train.total_iter=8", ...)``: the small run with overrides, checked."""

    def make(*overrides, **sections):
        raw = load.apply_overrides({**right, **sections}, overrides)
        problems, options = load._validate(raw, training=True)
        assert not problems
        return options

    return make


@pytest.fixture
def make_model():
    """``make_model(options)``: a model on the CPU, the weights always the same and off their neutral start."""

    def make(options: schema.Options, training: bool = True):
        torch.manual_seed(0)
        model = MODELS.build(
            {"type": options.model_type}, options=options, device=torch.device("cpu"), training=training
        )
        with torch.no_grad():
            for parameter in model.network.parameters():
                # not randn_like: its values depend on the memory layout
                parameter.add_(0.02 * torch.randn(parameter.shape))
        if training and model.ema is not None:
            model.ema.network.load_state_dict(model.network.state_dict())
        return model

    return make


@pytest.fixture
def batches():
    """``batches(options, n)``: the first n batches of the training set."""

    def take(options: schema.Options, count: int):
        stream = iter(data.build_loader(options.datasets["train"]))
        return [next(stream) for _ in range(count)]

    return take


@pytest.fixture
def tools():
    """Real picture writing and resizing."""
    from data.io import write_image
    from data.resize import imresize

    return loop.PictureTools(write=write_image, resize=imresize)
