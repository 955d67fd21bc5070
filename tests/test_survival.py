"""Runs that are killed, interrupted, started twice or left by their reader: nothing is lost, mixed up or cut."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from models import checkpoint

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def start(nursery, photos, option_file):
    """``start(*arguments)``: train the photographs in a process of its own."""
    return lambda *arguments, **settings: nursery.start("-opt", option_file(photos), *arguments, **settings)


@pytest.fixture
def endless(photos):
    """The run, so long that it must be ended."""
    photos["train"]["total_iter"] = 10**6
    photos["val"]["val_freq"] = 10**6
    photos["logger"]["save_checkpoint_freq"] = 10**6
    return photos


def wait_for(run, happened):
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happened(), run.printed


def folder_of(tmp_path):
    return tmp_path / "out/experiments/small"


def newest(states):
    """Iteration of the newest state, 0 without one."""
    return max((int(path.stem) for path in states.glob("*.state")), default=0)


def reached(states, iteration):
    return newest(states) >= iteration


def read_everything(folder):
    """Read every file of a run, as it is at this moment."""
    for path in folder.rglob("*"):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix in (".pth", ".state"):
            checkpoint.load_state(path)
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".yml":
            assert yaml.safe_load(path.read_text())["name"] == "small"
        elif path.name == "metrics.jsonl":
            assert all(json.loads(line) for line in path.read_text().splitlines())


KILLS = 20


def test_a_run_killed_twenty_times_ends_as_the_unbroken_one(start, photos, tmp_path):
    photos["train"]["total_iter"] = 100
    photos["val"]["val_freq"] = 7
    photos["logger"] |= {"print_freq": 5, "save_checkpoint_freq": 1, "keep_checkpoints": 2}
    rng = random.Random(0)
    whole = start(f"path.root={tmp_path / 'whole'}", "logger.save_checkpoint_freq=100")
    assert whole.wait() == 0, whole.printed
    folder, states = folder_of(tmp_path), folder_of(tmp_path) / "training_states"
    for i in range(KILLS):
        before = newest(states)
        run = start("--auto_resume")
        # some in the start, most a moment after the first, second or third new state
        if i % 5 < 4:
            wait_for(run, partial(reached, states, before + rng.randint(1, 3)))
        time.sleep(rng.uniform(0, 0.02))
        run.kill()
        assert run.wait() == -signal.SIGKILL, run.printed
        read_everything(folder)
    assert KILLS < newest(states) < photos["train"]["total_iter"]
    run = start("--auto_resume")
    assert run.wait() == 0, run.printed
    read_everything(folder)
    assert not list(folder.rglob(".*.tmp"))
    unbroken = tmp_path / "whole/experiments/small"
    for name in ("models/net_g_100.pth", "training_states/100.state"):
        one, other = (flat(checkpoint.load_state(place / name)) for place in (unbroken, folder))
        assert [place for place in {**one, **other} if one.get(place) != other.get(place)] == []
    assert rows(folder) == rows(unbroken)


def rows(folder):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in ("time", "data")} for row in found]


def flat(value, place=""):
    """Every tensor and number of a nest, by its place, tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return {place: (value.dtype, tuple(value.shape), value.contiguous().view(-1).numpy(force=True).tobytes())}
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, entry in entries for k, v in flat(entry, f"{place}/{key}").items()}
    return {place: value}


# signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_a_state_and_the_command_to_go_on_is_told(start, endless, tmp_path, number, code):
    run = start()
    wait_for(run, lambda: "eta:" in run.printed)
    run.kill(number)
    assert run.wait() == code, run.printed
    assert newest(folder_of(tmp_path) / "training_states") > 0
    assert "to continue: python train.py -opt" in run.printed
    assert "--auto_resume" in run.printed.splitlines()[-1]


def test_a_signal_in_a_validation_ends_it_and_the_resumed_run_makes_it_up(start, photos, tmp_path):
    photos["train"]["total_iter"] = 2
    photos["val"] |= {"val_freq": 1, "metrics": {"m": {"type": "terminating"}}}
    (tmp_path / "own.py").write_text(TERMINATING)
    photos["import_paths"] = [str(tmp_path / "own.py")]
    run = start(env={"TERMINATE": "1"})
    assert run.wait() == 143, run.printed
    assert newest(folder_of(tmp_path) / "training_states") == 1
    again = start("--auto_resume")
    assert again.wait() == 0, again.printed
    assert [row["iter"] for row in rows(folder_of(tmp_path)) if row["kind"] == "val"] == [1, 2]


TERMINATING = """
import os
import signal

from models.metrics import METRICS


@METRICS.register()
def terminating(img, img2):
    if os.environ.get("TERMINATE"):
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0
"""

WAITING = """
import os
import signal
import time

os.kill(os.getpid(), int(os.environ["SIGNAL"]))
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_start_ends_with_its_code_in_words_and_leaves_nothing(start, photos, tmp_path, number, code):
    (tmp_path / "own.py").write_text(WAITING)
    photos["import_paths"] = [str(tmp_path / "own.py")]
    run = start(env={"SIGNAL": str(int(number))})
    assert run.wait() == code, run.printed
    assert "interrupted: what was saved before" in run.printed
    assert "Traceback" not in run.printed
    assert not (tmp_path / "out").exists()


def test_an_interrupt_that_was_ignored_from_the_start_stays_ignored(start, photos, tmp_path):
    (tmp_path / "own.py").write_text(TERMINATING.replace("SIGTERM", "SIGINT"))
    photos["import_paths"] = [str(tmp_path / "own.py")]
    photos["val"]["metrics"] = {"m": {"type": "terminating"}}
    run = start("train.total_iter=2", env={"TERMINATE": "1"}, ignored=[signal.SIGINT])
    assert run.wait() == 0, run.printed


# two at a time


def test_a_second_run_of_the_name_is_refused_unless_dry_and_the_first_goes_on(start, endless, tmp_path):
    first = start()
    wait_for(first, lambda: "eta:" in first.printed)
    logs = list(folder_of(tmp_path).glob("*.log"))
    for arguments in ((), ("--auto_resume",)):
        second = start(*arguments)
        assert second.wait() == 1, second.printed
        assert f"is in use by process {first.pid} on " in second.printed
        assert "Traceback" not in second.printed
    dry = start("--dry_run")
    assert dry.wait() == 0, dry.printed
    assert list(folder_of(tmp_path).glob("*.log")) == logs
    assert [path.name for path in (tmp_path / "out/experiments").iterdir()] == ["small"]
    first.kill(signal.SIGTERM)
    assert first.wait() == 143, first.printed


def test_of_several_that_start_at_once_one_trains(start, endless, tmp_path):
    runs = [start() for _ in range(3)]
    wait_for(runs[0], lambda: sum("in use by" in run.printed for run in runs) == 2)
    (winner,) = [run for run in runs if "in use by" not in run.printed]
    wait_for(winner, lambda: "eta:" in winner.printed)
    winner.kill(signal.SIGTERM)
    assert sorted(run.wait() for run in runs) == [1, 1, 143]
    assert [path.name for path in (tmp_path / "out/experiments").iterdir()] == ["small"]


def test_a_killed_run_s_folder_is_free_at_once_though_its_workers_live_on(start, endless):
    first = start("logger.save_checkpoint_freq=1")
    wait_for(first, lambda: "saved the weights" in first.printed)
    first.kill()
    second = start("--auto_resume")
    wait_for(second, lambda: "continuing from" in second.printed)
    second.kill()
    assert second.wait() == -signal.SIGKILL


# who reads along


def test_a_reader_that_leaves_does_not_end_the_run(photos, tmp_path, option_file):
    command = [sys.executable, "train.py", "-opt", str(option_file(photos)), "logger.print_freq=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout.readline()
    run.stdout.close()
    errors = run.stderr.read()
    assert run.wait(timeout=60) == 0, errors
    assert errors == ""
    (log,) = folder_of(tmp_path).glob("*.log")
    assert len(re.findall("iter: +\\d+, lr", log.read_text())) == 20
    assert "everything lies in" in log.read_text()
