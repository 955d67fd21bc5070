"""A run that was stopped, killed or turned back goes on as if nothing had happened, and loses nothing."""

import json
import math
import random
import re
import signal

import numpy as np
import pytest
import torch

from models import changes, checkpoint, progress
from models.logbook import Logbook
from models.progress import Progress
from models.report import SetScores
from models.restoration import RestorationModel


class Killed(BaseException):
    """What nothing catches, as a kill."""


def scores(value):
    return SetScores("set", {"m": ""}, rows=[("picture", {"m": value}, {})])


def take_in(values, better):
    """The best after these validations, at iterations 1, 2, ..., and which of them improved."""
    kept = Progress()
    improved = [bool(kept.update_best(scores(value), {"m": better}, i)) for i, value in enumerate(values, 1)]
    return kept.best["set"]["m"], improved


def validations(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "val"]


def at_validation_of(step, act, monkeypatch):
    """Call ``act`` each time a picture is restored in the validation of ``step``."""
    predict = RestorationModel.predict

    def acting(self, lq):
        if self.iteration == step:
            act()
        return predict(self, lq)

    monkeypatch.setattr(RestorationModel, "predict", acting)


def kill():
    raise Killed


# the best


@pytest.mark.parametrize(
    ("better", "best", "improved"),
    [("higher", (3.0, 2), [True, True, False]), ("lower", (1.0, 3), [True, False, True])],
)
def test_the_best_is_the_highest_or_the_lowest(better, best, improved):
    assert take_in([2.0, 3.0, 1.0], better) == (best, improved)


def test_an_equal_value_keeps_the_earlier_iteration():
    assert take_in([2.0, 2.0], "higher") == ((2.0, 1), [True, False])


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_what_is_not_a_number_is_never_the_best(better):
    best, improved = take_in([math.nan, 2.0, math.nan], better)
    assert (best, improved) == ((2.0, 2), [False, True, False])


def test_infinity_is_the_best_of_the_higher_ones():
    assert take_in([30.0, math.inf], "higher") == ((math.inf, 2), [True, True])


# log lines


def test_the_first_step_is_shown_at_once_and_counts_for_the_line_that_is_due(tiny, command, tmp_path):
    code, seldom = command("train.py", tiny, "logger.print_freq=4")
    assert code == 0, seldom
    assert re.findall("iter: +([0-9]+), lr", seldom) == ["1", "4"]
    (row,) = trainings(tmp_path / "out/experiments/small")
    command("train.py", tiny, "logger.print_freq=1")
    each = [row["l_pix"] for row in trainings(tmp_path / "out/experiments/small")]
    assert len(each) == 4
    assert row["l_pix"] == pytest.approx(sum(each) / 4, rel=1e-6)


def trainings(folder):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if row["kind"] == "train"]


# states


def test_random_numbers_go_on_where_they_were(make_options, make_model, tmp_path):
    model = make_model(make_options())
    progress.save(tmp_path / "0.state", model, Progress(samples=6, validated=2, best={"set": {"m": (1.5, 2)}}))
    drawn = random.random(), np.random.normal(), torch.rand(1).item()
    found = progress.resume(tmp_path / "0.state", model)
    assert (random.random(), np.random.normal(), torch.rand(1).item()) == drawn
    assert found == Progress(samples=6, validated=2, best={"set": {"m": (1.5, 2)}})


def test_the_best_of_before_is_still_known_after_resuming(tiny, command, tmp_path):
    assert command("train.py", tiny)[0] == 0
    state = tmp_path / "out/experiments/small/training_states/4.state"
    content = checkpoint.load_state(state)
    checkpoint.save_state(state, {**content, "best": {"held-out": {"psnr": (99.0, 2)}}})
    code, printed = command("train.py", tiny, "--auto_resume", "train.total_iter=6")
    assert code == 0, printed
    assert "Best: 99.0000 @ 2 iter" in printed


def test_a_kill_during_the_last_validation_costs_the_validation_only(tiny, command, tmp_path):
    # no divisor of the last iteration, which is saved all the same
    tiny["logger"]["save_checkpoint_freq"] = 3
    folder = tmp_path / "out/experiments"
    assert command("train.py", {**tiny, "name": "whole"})[0] == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        at_validation_of(4, kill, patch)
        command("train.py", {**tiny, "name": "broken"})
    left = checkpoint.load_state(folder / "broken/training_states/4.state")
    assert (left["model"]["iteration"], left["validated"], left["best"]["held-out"]["psnr"][1]) == (4, 2, 2)
    code, printed = command("train.py", {**tiny, "name": "broken"}, "--auto_resume")
    assert code == 0, printed
    assert validations(folder / "broken") == validations(folder / "whole")
    made_up, whole = (checkpoint.load_state(folder / name / "training_states/4.state") for name in ("broken", "whole"))
    assert (made_up["validated"], made_up["best"]) == (4, whole["best"])


def test_a_kill_after_the_scores_were_written_does_not_write_them_twice(tiny, command, tmp_path):
    whole_row = Logbook.validation

    def killing(self, iteration, *rest):
        whole_row(self, iteration, *rest)
        if iteration == 2:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Logbook, "validation", killing)
        command("train.py", tiny)
    assert command("train.py", tiny, "--auto_resume")[0] == 0
    assert [row["iter"] for row in validations(tmp_path / "out/experiments/small")] == [2, 4]


@pytest.mark.parametrize("step", [2, 4])
def test_a_signal_during_a_validation_leaves_it_to_the_resumed_run(tiny, command, tmp_path, step):
    with pytest.MonkeyPatch.context() as patch:
        at_validation_of(step, lambda: signal.raise_signal(signal.SIGTERM), patch)
        code, printed = command("train.py", tiny)
    assert code == 143, printed
    assert "Scores" not in printed
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    assert [row["iter"] for row in validations(tmp_path / "out/experiments/small")] == [2, 4]
    assert "Scores" in printed
    assert "mean of 1" in printed


def test_a_finished_run_is_told_that_nothing_is_left(tiny, command):
    assert command("train.py", tiny)[0] == 0
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    assert "nothing is left to train" in printed


def test_a_finished_run_that_starts_in_an_empty_folder_ends_without_an_error(tiny, command, tmp_path):
    assert command("train.py", tiny)[0] == 0
    state = tmp_path / "out/experiments/small/training_states/4.state"
    code, printed = command("train.py", {**tiny, "name": "other"}, f"path.resume_state={state}")
    assert code == 0, printed


# turning back


def test_what_is_later_than_the_resumed_state_is_set_aside(tmp_path, caplog):
    for folder in ("models", "training_states"):
        (tmp_path / folder).mkdir()
    for name in ("models/net_g_2.pth", "models/net_g_10.pth", "models/net_g_latest.pth"):
        (tmp_path / name).write_text(name)
    for name in ("training_states/2.state", "training_states/10.state"):
        (tmp_path / name).write_text(name)
    best = tmp_path / "models/net_g_best.safetensors"
    checkpoint.save_safetensors(best, {"w": torch.zeros(1)}, {"iteration": 10})
    progress.set_aside_later(tmp_path, 9)
    (aside,) = tmp_path.glob("superseded_*")
    assert {path.name for path in aside.iterdir()} == {"net_g_10.pth", "10.state", "net_g_best.safetensors"}
    assert (aside / "10.state").read_text() == "training_states/10.state"
    kept = {path.name for path in tmp_path.glob("[mt]*/*")}
    assert kept == {"net_g_2.pth", "2.state", "net_g_latest.pth"}
    assert f"3 files of iterations after 9, from an earlier try, are now in {aside}" in caplog.text


def test_a_best_of_before_stays_where_it_is(tmp_path):
    best = tmp_path / "models/net_g_best.safetensors"
    checkpoint.save_safetensors(best, {"w": torch.zeros(1)}, {"iteration": 9})
    progress.set_aside_later(tmp_path, 9)
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["net_g_best.safetensors"]
    assert not list(tmp_path.glob("superseded_*"))


def test_a_run_turned_back_replaces_what_came_later(tiny, command, tmp_path):
    assert command("train.py", tiny)[0] == 0
    folder = tmp_path / "out/experiments/small"
    earlier = (folder / "training_states/4.state").read_bytes()
    state = folder / "training_states/2.state"
    code, printed = command("train.py", tiny, f"path.resume_state={state}", "train.optim_g.lr=1e-4")
    assert code == 0, printed
    (aside,) = folder.glob("superseded_*")
    assert (aside / "4.state").read_bytes() == earlier
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iter"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert rows[-2]["lr"] == pytest.approx(5e-5)
    assert "from an earlier try, are now in" in printed


# what is no state of this run


def _our_weights(path):
    checkpoint.save_pth(path, {"params": {"w": torch.zeros(1)}})


def _safetensors(path):
    checkpoint.save_safetensors(path, {"w": torch.zeros(1)})


def _basicsr(path):
    torch.save({"epoch": 3, "iter": 1000, "optimizers": [{}], "schedulers": [{"last_epoch": 1000}]}, path)


def _text(path):
    path.write_text("no state")


@pytest.mark.parametrize("write", [_our_weights, _safetensors, _basicsr, _text])
def test_a_foreign_file_is_refused_in_words(tiny, command, tmp_path, write):
    write(tmp_path / "foreign.state")
    code, printed = command("train.py", tiny, f"path.resume_state={tmp_path / 'foreign.state'}")
    assert code == 2, printed
    assert "foreign.state" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_weights_named_as_a_state_are_told_where_they_belong(tiny, command, tmp_path):
    _our_weights(tmp_path / "net.pth")
    _, printed = command("train.py", tiny, f"path.resume_state={tmp_path / 'net.pth'}")
    assert "path.pretrain_network_g" in printed


def test_a_state_of_another_optimizer_is_told(tiny, command):
    tiny["train"]["optim_g"] = {"type": "SGD", "lr": 1e-3}
    assert command("train.py", tiny, "train.total_iter=2")[0] == 0
    tiny["train"]["optim_g"] = {"type": "AdamW", "lr": 1e-3}
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 2
    assert "of the optimizer SGD, this run's is AdamW" in printed
    assert "Traceback" not in printed


def test_an_option_that_a_state_does_not_know_and_nobody_sets_is_no_change():
    assert changes.describe({"scale": 2}, {"scale": 2, "datasets.train.iters": None}) == ""
    assert changes.describe({"scale": 2}, {"scale": 2, "datasets.train.iters": [3]}).endswith("iters none -> [3]")
