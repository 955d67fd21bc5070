"""What is saved when an error ends a run: never less than was there, and never a state that does not hold together."""

import math

import pytest
import torch

import data
from models import checkpoint, home, loop, runtime
from models.distributed import Processes
from models.launch import Place
from models.restoration import NotFinite
from options.errors import OptionsError


@pytest.fixture
def run(right, make_options, make_model, tools, tmp_path):
    """``run(spoil, "key=value")``: train until ``spoil(model)`` breaks it; returns the folder of the states."""

    def fit(spoil, *overrides):
        right["datasets"].pop("val")
        quiet = ("logger.use_tb_logger=false", "train.total_iter=9", "logger.save_checkpoint_freq=100")
        options = make_options(f"path.root={tmp_path}", *quiet, *overrides)
        model = make_model(options)
        spoil(model)
        folder = tmp_path / "experiment"
        folder.mkdir()
        loop.fit(model, data.build_loader(options.datasets["train"]), {}, options, tools, folder=folder)

    fit.states = tmp_path / "experiment" / "training_states"
    return fit


def test_an_error_within_a_step_does_not_replace_the_exact_state_before_it(run):
    kept = []

    def spoil(model):
        step = model.train_step

        def failing(batches):
            if model.iteration == 2:
                kept.append((run.states / "2.state").read_bytes())
                torch.rand(3)
                raise NotFinite("a loss is NaN")
            return step(batches)

        model.train_step = failing

    with pytest.raises(NotFinite):
        run(spoil, "logger.save_checkpoint_freq=2")
    assert (run.states / "2.state").read_bytes() == kept[0]


def test_a_state_saved_after_an_error_within_a_step_says_that_it_is_not_exact(run, caplog):
    def spoil(model):
        step = model.train_step

        def failing(batches):
            if model.iteration == 2:
                raise NotFinite("a loss is NaN")
            return step(batches)

        model.train_step = failing

    with pytest.raises(NotFinite):
        run(spoil)
    assert (run.states / "2.state").exists()
    assert "not equal to the bit" in caplog.text


def test_weights_in_the_middle_of_an_update_are_not_saved(run, caplog):
    def spoil(model):
        update = model.ema.update

        def failing(network):
            if model.iteration == 2:
                raise MemoryError("no memory for the average")
            update(network)

        model.ema.update = failing

    with pytest.raises(MemoryError):
        run(spoil, "train.ema_decay=0.9")
    assert not list(run.states.glob("*.state"))
    assert "within a step, so its state is not saved" in caplog.text


def test_a_loss_that_was_left_out_does_not_make_a_state_unusable(tmp_path):
    sound = {"model": {"w": torch.ones(2)}, "sums": {"l_pix": torch.tensor(math.nan)}}
    checkpoint.save_state(tmp_path / "1.state", sound)
    assert checkpoint.load_sound_state(tmp_path / "1.state")["sums"]["l_pix"].isnan()
    checkpoint.save_state(tmp_path / "2.state", {**sound, "model": {"w": torch.tensor([1, math.nan])}})
    with pytest.raises(OptionsError, match=r"model\.w holds NaN"):
        checkpoint.load_sound_state(tmp_path / "2.state")


def test_a_folder_is_locked_before_anything_is_moved(make_options, tmp_path, monkeypatch):
    options = make_options(f"path.root={tmp_path}")
    folder = home.folder_of(options, "experiments")
    held = []
    monkeypatch.setattr(home, "_archive", lambda earlier: held.append((folder / home.LOCK).exists()))
    try:
        home.prepare_folder(options, "experiments", keep=False, command="")
    finally:
        home.release()
    assert held[0]


def test_a_copy_of_the_option_file_does_not_collect_headers(make_options, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text("name: small\n")
    options = make_options(f"path.root={tmp_path}").model_copy(update={"file": file})
    try:
        folder = home.prepare_folder(options, "experiments", keep=False, command="python train.py")
        copy = folder / options.file.name
        again = options.model_copy(update={"file": copy})
        home.prepare_folder(again, "experiments", keep=True, command="python train.py --auto_resume")
    finally:
        home.release()
    text = copy.read_text()
    assert text.count("# command: ") == 1
    assert "--auto_resume" in text
    assert text.endswith("\n\nname: small\n")


def test_a_process_tells_what_is_wrong_with_itself_alone(make_options, monkeypatch):
    def refuse(*_, **__):
        raise OptionsError("this machine has 1 GPUs")

    monkeypatch.setattr(runtime, "choose_device", refuse)
    with pytest.raises(OptionsError, match="1 GPUs"), Processes(Place(rank=1, world=2, local_rank=1)) as processes:
        processes.join(make_options())
