"""The folder of a run: found wherever the command is given, one process to it, nothing mixed up or half written."""

import json
import os

import numpy as np
import pytest
import yaml

from models import checkpoint, home


@pytest.fixture
def trained(tiny, command, tmp_path):
    """The folder of a run that has states of iterations 2 and 4."""
    assert command("train.py", tiny)[0] == 0
    return tmp_path / "out/experiments/small"


def rows(folder, kind="train"):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["iter"] for row in found if row["kind"] == kind]


# a state that cannot be read


def test_a_state_that_was_cut_gives_way_to_the_one_before(trained, tiny, command):
    newest = trained / "training_states/4.state"
    newest.write_bytes(newest.read_bytes()[:-400])
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    assert "4.state: it is damaged, cut short" in printed
    assert "2.state, after iteration 2" in printed
    assert checkpoint.load_state(newest)["model"]["iteration"] == 4


def test_a_state_with_a_nan_gives_way_to_the_one_before(trained, tiny, command):
    newest = trained / "training_states/4.state"
    state = checkpoint.load_state(newest)
    state["model"]["weights"]["params"]["conv.bias"][3] = np.nan
    checkpoint.save_state(newest, state)
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    assert "4.state: tensor model.weights.params.conv.bias holds NaN" in printed
    assert "2.state, after iteration 2" in printed


def test_a_run_of_which_no_state_can_be_read_is_not_started_anew(trained, tiny, command):
    for state in trained.glob("training_states/*"):
        state.write_bytes(b"")
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 2, printed
    assert "none of the 2 states of the run is usable" in printed
    assert not list(trained.parent.glob("*_archived_*"))


def test_a_state_that_was_named_does_not_give_way(trained, tiny, command):
    newest = trained / "training_states/4.state"
    newest.write_bytes(newest.read_bytes()[:-400])
    code, printed = command("train.py", tiny, f"path.resume_state={newest}")
    assert code == 2, printed


def test_best_weights_that_cannot_be_read_do_not_stop_a_resumed_run(trained, tiny, command):
    (trained / "models/net_g_best.safetensors").write_bytes(b"cut")
    (trained / "training_states/4.state").unlink()
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed


# where a run is found


@pytest.fixture
def moved(trained, tiny, tmp_path, monkeypatch):
    """The run's results lie by the option file; the command is given in an empty folder."""
    (tmp_path / "out/experiments").rename(tmp_path / "experiments")
    del tiny["path"]["root"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "experiments/small"


def test_a_run_beside_the_option_file_is_continued_from_anywhere(moved, tiny, command, tmp_path):
    code, printed = command("train.py", tiny, "--auto_resume", "train.total_iter=6")
    assert code == 0, printed
    assert f"has no saved state, but {moved} has; the run goes on there" in printed
    assert (moved / "training_states/6.state").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_beside_train_py_is_continued_from_anywhere(moved, tiny, command, tmp_path, monkeypatch):
    (tmp_path / "checkout").mkdir()
    (tmp_path / "experiments").rename(tmp_path / "checkout/experiments")
    monkeypatch.setattr(home, "CHECKOUT", tmp_path / "checkout")
    code, printed = command("train.py", tiny, "--auto_resume", "train.total_iter=6")
    assert code == 0, printed
    assert (tmp_path / "checkout/experiments/small/training_states/6.state").exists()


def test_the_copy_in_a_run_s_folder_continues_it_wherever_it_was_moved(moved, nursery, tmp_path):
    elsewhere = tmp_path / "archive/small"
    elsewhere.parent.mkdir()
    moved.rename(elsewhere)
    options = home.locate(_options(elsewhere / "small.yml"), auto_resume=True)
    assert home.folder_of(options, "experiments") == elsewhere


def _options(file):
    from options import load

    return load.load(file)


@pytest.mark.parametrize("root", ["results_of_mine", "deep/er"])
def test_a_relative_root_is_looked_for_from_the_option_file(moved, tiny, command, tmp_path, root):
    (tmp_path / root).mkdir(parents=True)
    (tmp_path / "experiments").rename(tmp_path / root / "experiments")
    tiny["path"]["root"] = root
    code, printed = command("train.py", tiny, "--auto_resume", "train.total_iter=6")
    assert code == 0, printed
    assert (tmp_path / root / "experiments/small/training_states/6.state").exists()


def test_without_auto_resume_a_run_starts_here(moved, tiny, command, tmp_path):
    assert command("train.py", tiny)[0] == 0
    assert (tmp_path / "empty/experiments/small/training_states/4.state").exists()


def test_two_runs_that_could_be_meant_are_named(moved, tiny, command, tmp_path, monkeypatch):
    other = tmp_path / "checkout/experiments/small"
    checkpoint.save_state(other / "training_states/1.state", {})
    monkeypatch.setattr(home, "CHECKOUT", tmp_path / "checkout")
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 2, printed
    assert str(other) in printed
    assert str(moved) in printed
    assert "path.root" in printed


# a state of another run


def test_a_state_of_another_run_is_continued_in_a_folder_of_its_own(trained, tiny, command, tmp_path):
    assert command("train.py", {**tiny, "name": "second"})[0] == 0
    state = f"path.resume_state={trained / 'training_states/2.state'}"
    code, printed = command("train.py", {**tiny, "name": "second"}, state)
    assert code == 0, printed
    second = trained.parent / "second"
    assert "second held an earlier run, which is now" in printed
    assert f"the record of iterations up to 2 stays with the run that the state comes from, {trained}" in printed
    assert rows(second) == [3, 4]
    assert rows(trained) == [1, 2, 3, 4]
    (archived,) = trained.parent.glob("second_archived_*")
    assert rows(archived) == [1, 2, 3, 4]


# what is in the folder


def test_what_a_kill_left_unfinished_is_removed_and_nothing_else(trained, tiny, command):
    ours = [trained / "models/.net_g_6.pth.4711.tmp", trained / ".metrics.jsonl.12.tmp"]
    ours.append(trained / "visualization/.x_4.png.0123456789ab")
    others = [trained / "models/notes.tmp", trained / ".hidden.tmp", trained / "models/.net_g_6.pth.tmp"]
    (trained / "visualization").mkdir(exist_ok=True)
    for path in (*ours, *others):
        path.write_text("x")
    code, printed = command("train.py", tiny, "--auto_resume")
    assert code == 0, printed
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in others)


def test_the_options_in_force_hold_what_the_command_line_said(tiny, command, tmp_path):
    arguments = ("train.optim_g.lr=1e-5", "manual_seed=7", "--debug")
    assert command("train.py", tiny, *arguments)[0] == 0
    written = tmp_path / "out/experiments/debug_small/debug_small.effective.yml"
    content = yaml.safe_load(written.read_text())
    assert (content["name"], content["manual_seed"], content["val"]["val_freq"]) == ("debug_small", 7, 8)
    assert content["train"]["optim_g"]["lr"] == 1e-5
    assert "manual_seed=7 --debug" in written.read_text()
    assert _options(written).model_dump() == {**_options(written).model_dump(), "manual_seed": 7}


def test_own_components_are_found_from_the_options_in_force(tiny, command, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("")
    assert command("train.py", {**tiny, "import_paths": ["own.py"]})[0] == 0
    written = tmp_path / "out/experiments/small/small.effective.yml"
    assert yaml.safe_load(written.read_text())["import_paths"] == [str(tmp_path / "own.py")]


def test_the_lock_is_given_back_at_the_end(trained):
    assert home._held == []
    assert (trained / home.LOCK).read_text().startswith(f"process {os.getpid()} on ")
