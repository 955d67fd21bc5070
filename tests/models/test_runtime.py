"""Folders, devices, signals and exit codes of a run."""

import errno
import logging
import signal
import sys
from pathlib import Path

import pytest
import torch

from models import checkpoint, home, logbook, runtime
from models.runtime import Interrupted, StopSignal
from options import load
from options.errors import DataError, OptionsError, UserError


@pytest.fixture
def options(make_options, tmp_path):
    """The small run, its results below ``out``."""
    return make_options(f"path.root={tmp_path / 'out'}")


def written(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def saved(path):
    checkpoint.save_state(path, {"a": 1})
    return path


# where things are


def test_the_newest_state_is_the_one_of_the_highest_iteration(options, tmp_path):
    states = tmp_path / "out/experiments/small/training_states"
    for name in ("9.state", "10.state", "notes.state", "11.txt"):
        saved(states / name)
    assert home.find_state(options, auto_resume=True) == states / "10.state"


def test_a_run_without_a_state_starts_from_the_beginning_and_says_so(options, caplog):
    caplog.set_level(logging.INFO, "pellucid")
    assert home.find_state(options, auto_resume=True) is None
    assert "no saved state yet" in caplog.text


def test_states_are_not_looked_for_unasked(options, tmp_path):
    saved(tmp_path / "out/experiments/small/training_states/10.state")
    assert home.find_state(options, auto_resume=False) is None


def test_a_named_state_is_taken(make_options, tmp_path):
    state = written(tmp_path / "5.state")
    options = make_options(f"path.root={tmp_path / 'out'}", f"path.resume_state={state}")
    assert home.find_state(options, auto_resume=False) == state
    # an automatic restart of the same command goes on from the run's own state once there is one
    assert home.find_state(options, auto_resume=True) == state
    own = saved(tmp_path / "out/experiments/small/training_states/7.state")
    assert home.find_state(options, auto_resume=True) == own


@pytest.mark.parametrize(
    ("override", "experiments", "results"),
    [
        ("path={}", "experiments/small", "results/small"),
        ("path.root=elsewhere", "elsewhere/experiments/small", "elsewhere/results/small"),
        ("path={root: r, experiments_root: e}", "e/small", "r/results/small"),
        ("path={root: r, results_root: s}", "r/experiments/small", "s/small"),
        ("path.root=~", "experiments/small", "results/small"),
    ],
)
def test_folders_lie_where_the_options_say(make_options, tmp_path, monkeypatch, override, experiments, results):
    monkeypatch.chdir(tmp_path)
    options = make_options(override)
    assert home.folder_of(options, "experiments").absolute() == tmp_path / experiments
    assert home.folder_of(options, "results").absolute() == tmp_path / results


def test_a_home_folder_is_understood(make_options, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = make_options("path={experiments_root: '~/runs'}")
    assert home.folder_of(options, "experiments") == tmp_path / "runs/small"


# the folder of a run


def test_tensorboard_files_are_kept_beside_the_experiment_they_belong_to(options, tmp_path):
    for kind in ("experiments", "tb_logger"):
        written(tmp_path / "out" / kind / "small/file", kind)
    home.prepare_folder(options, "experiments", keep=False, command="")
    for kind in ("experiments", "tb_logger"):
        (archived,) = (tmp_path / "out" / kind).glob("small_archived_*/file")
        assert archived.read_text() == kind


def test_three_runs_within_one_second_are_all_kept(options, tmp_path, monkeypatch):
    monkeypatch.setattr(home, "_stamp", lambda: "20260101_000000")
    for run in "123":
        written(home.prepare_folder(options, "results", keep=False, command="") / "file", run)
    kept = (tmp_path / "out/results").glob("*/file")
    assert sorted(path.read_text() for path in kept) == ["1", "2", "3"]


def test_a_resumed_run_keeps_its_folder(options, tmp_path):
    file = written(tmp_path / "out/experiments/small/file")
    assert home.prepare_folder(options, "experiments", keep=True, command="") == file.parent
    assert file.exists()
    assert not list((tmp_path / "out/experiments").glob("*_archived_*"))


def test_the_folder_holds_the_options_and_the_command(options, tmp_path):
    options = options.model_copy(update={"file": written(tmp_path / "mine.yml", "name: small\n")})
    folder = home.prepare_folder(options, "experiments", keep=False, command="python train.py -opt mine.yml")
    text = (folder / "mine.yml").read_text()
    assert "# command: python train.py -opt mine.yml\n" in text
    assert text.endswith("\nname: small\n")


@pytest.mark.parametrize("arguments", [(), ("--auto_resume",)], ids=["anew", "resumed"])
def test_a_run_starts_from_the_copy_in_its_own_folder(tiny, command, tmp_path, capfd, arguments):
    import runpy

    assert command("train.py", tiny)[0] == 0
    copy = tmp_path / "out/experiments/small/small.yml"
    main = runpy.run_path("train.py", run_name="command")["main"]
    code = runtime.run(main, ["-opt", str(copy), *arguments])
    assert code == 0, capfd.readouterr()
    assert "name: small\n" in copy.read_text()


def test_a_folder_that_cannot_be_made_is_told_in_words(tiny, command, tmp_path):
    written(tmp_path / "occupied")
    code, printed = command("train.py", tiny, f"path.root={tmp_path / 'occupied'}")
    assert code == 1, printed
    assert "occupied" in printed
    assert "Traceback" not in printed


# the device


@pytest.mark.parametrize(("asked", "notice"), [("0", ""), ("auto", ""), ("2", "num_gpu is 2, but CUDA is not")])
def test_a_machine_without_a_gpu_trains_on_the_cpu(make_options, monkeypatch, caplog, asked, notice):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.choose_device(make_options(f"num_gpu={asked}")) == torch.device("cpu")
    assert notice in caplog.text
    assert bool(notice) == bool(caplog.text)


def test_a_gpu_is_left_alone_where_none_is_asked_for(make_options, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.choose_device(make_options("num_gpu=0")) == torch.device("cpu")


def test_a_launcher_that_set_no_environment_is_told_how_to_start(tiny, command, tmp_path):
    code, printed = command("train.py", tiny, "--launcher", "pytorch")
    assert code == 2, printed
    assert "torchrun --nproc_per_node=2 train.py -opt" in printed
    assert not (tmp_path / "out").exists()


@pytest.fixture
def _two_gpus(monkeypatch):
    for name, answer in {"is_available": True, "device_count": 2, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.usefixtures("_two_gpus")
def test_each_process_takes_the_gpu_of_its_number_on_its_machine(options):
    options = options.model_copy(update={"num_gpu": "auto"})
    assert runtime.choose_device(options, local_rank=1, world=4) == torch.device("cuda", 1)


@pytest.mark.usefixtures("_two_gpus")
def test_more_processes_than_gpus_are_told_how_many_there_are(options):
    options = options.model_copy(update={"num_gpu": "auto"})
    with pytest.raises(OptionsError, match=r"2 GPUs, but process 3 .*--nproc_per_node=2"):
        runtime.choose_device(options, local_rank=2, world=4)


# how a run ends


def raising(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("in words"), 1),
        (OptionsError("in words"), 2),
        (DataError("in words"), 3),
        (Interrupted(130), 130),
        (Interrupted(143), 143),
        (KeyboardInterrupt(), 130),
        (torch.OutOfMemoryError("in words"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_end_has_its_exit_code_and_no_traceback(error, code, capsys):
    assert runtime.run(raising(error), []) == code
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert ("in words" in printed) == ("in words" in str(error))


def test_a_run_that_ends_well_has_code_0():
    assert runtime.run(lambda argv: None, []) == 0


def test_a_mistake_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        runtime.run(raising(ZeroDivisionError()), [])


@pytest.mark.parametrize(("length", "name"), [(256, "a" * 256), (5000, f"aaa ({5000} letters)")])
def test_a_name_that_the_file_system_refuses_is_told_without_a_traceback(length, name, capsys):
    assert runtime.run(lambda argv: Path("a" * length).stat(), []) == 1
    printed = capsys.readouterr().err
    assert f"{name}: File name too long" in printed
    assert len(printed) < 400


def test_a_full_disk_is_told_without_a_traceback(tmp_path, capsys):
    def main(argv):
        logbook.start_logging(tmp_path / "run.log")
        Path("/dev/full").write_text("x")

    assert runtime.run(main, []) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert "Traceback" in (tmp_path / "run.log").read_text()


def test_a_closed_file_is_told_with_the_place_in_the_users_own_component(tmp_path, capsys):
    def main(argv):
        raise PermissionError(errno.EACCES, "Permission denied", "/own/secret")

    assert runtime.run(main, []) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: /own/secret: Permission denied"
    own = tmp_path / "own.py"
    own.write_text("def main(argv):\n    raise PermissionError(13, 'Permission denied', '/own/secret')\n")
    load.import_components([str(own)], tmp_path)
    (module,) = (module for name, module in sys.modules.items() if name.startswith("pellucid_import_own_"))
    assert runtime.run(module.main, []) == 1
    assert f"raised at {own}:2" in capsys.readouterr().err


def test_a_missing_file_of_the_program_keeps_its_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        runtime.run(lambda argv: (tmp_path / "none").stat(), [])


def test_running_out_of_memory_names_the_ways_out(capsys):
    runtime.run(raising(torch.OutOfMemoryError("tried to allocate")), [])
    assert "batch_size_per_gpu" in capsys.readouterr().err


@pytest.mark.parametrize("error", [DataError("in words"), torch.OutOfMemoryError("in words")], ids=["error", "memory"])
def test_an_error_is_written_to_the_log_file_and_printed_once(error, tmp_path, capfd):
    def main(argv):
        logbook.start_logging(tmp_path / "run.log")
        raise error

    runtime.run(main, [])
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("in words") == 1
    assert "ERROR: " in (tmp_path / "run.log").read_text()
    assert "in words" in (tmp_path / "run.log").read_text()


def test_what_is_told_before_there_is_a_log_file_stands_in_it(tiny, command, tmp_path):
    assert command("train.py", tiny)[0] == 0
    assert command("train.py", tiny, "val.rgb2bgr=true", "num_gpu=auto")[0] == 0
    (log,) = (tmp_path / "out/experiments/small").glob("train_small_*.log")
    assert "val.rgb2bgr has no effect" in log.read_text()
    assert "held an earlier run, which is now" in log.read_text()


# signals and seeds


def test_a_ctrl_c_that_terminal_and_launcher_both_send_counts_once():
    with StopSignal(shared=True) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert stop.code == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_remembered_until_the_loop_is_ready(number, code):
    with StopSignal() as stop:
        signal.raise_signal(number)
        assert stop.code == code


def test_a_second_interrupt_stops_at_once():
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.code == 130


def test_a_second_termination_signal_waits_for_the_state():
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stop.code == 143


def test_a_seed_fixes_every_source_of_randomness():
    import random

    import numpy as np

    drawn = []
    for seed in (5, 5, 6):
        runtime.seed_all(seed)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))


def test_a_log_file_says_what_ran_and_when(options):
    assert home.log_file(Path("folder"), options, "train").match("folder/train_small_2*_*.log")
