"""What a run writes while it goes on: BasicSR's lines, metrics.jsonl, tensorboard, and a bar on a terminal."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models import logbook
from models.logbook import Logbook
from models.report import SetScores
from options.schema import WandbOptions

ROOT = Path(__file__).resolve().parents[2]
# of `2026-01-01 00:00:00,123 INFO: [small..][epoch:  0, iter:       4, lr:(5.000e-04,)] [eta: ...] l_pix: 1.2345e-02 `
BASICSR_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: "
    r"\[(?P<name>.{5})\.\.\]\[epoch:(?P<epoch>[ \d]{3,}), iter:(?P<iter>[ \d,]{8}), "
    r"lr:\((?P<lr>(?:\d\.\d{3}e[+-]\d\d,)+)\)\] "
    r"\[eta: (?P<eta>(?:\d+ days?, )?\d+:\d\d:\d\d), time \(data\): (?P<time>\d+\.\d{3}) \((?P<data>\d+\.\d{3})\)\] "
    r"(?P<losses>(?:\w+: -?\d\.\d{4}e[+-]\d\d )+)"
)


@pytest.fixture
def line(tmp_path):
    """``line(Logbook settings, iteration ...)``: the line of one iteration as it stands in the log file, matched."""

    def write(iteration=4, epoch=0, *, name="small", total=10, start=0, lrs=(5e-4,), logs=None):
        logbook.start_logging(tmp_path / "run.log")
        book = Logbook(tmp_path, name, total=total, start=start)
        logs = {"l_pix": 0.012345} if logs is None else logs
        book.train(iteration, epoch, lrs=lrs, logs=logs, times=(0.1234, 0.0012))
        book.close()
        text = (tmp_path / "run.log").read_text().splitlines()[-1]
        match = BASICSR_LINE.fullmatch(text)
        assert match, text
        return match

    return write


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# lines


def test_a_line_has_the_format_of_basicsr(line):
    found = line()
    assert (found["name"], found["epoch"]) == ("small", "  0")
    assert (found["iter"], found["lr"]) == ("       4", "5.000e-04,")
    assert (found["time"], found["data"]) == ("0.123", "0.001")
    assert found["losses"] == "l_pix: 1.2345e-02 "


def test_large_numbers_keep_the_format(line):
    found = line(300_000, 1234, name="sst_quickstart_x2", total=400_000, lrs=(1e-4, 2e-5), logs={"l_a": 1, "l_b": -2})
    assert (found["name"], found["iter"], found["lr"]) == ("sst_q", " 300,000", "1.000e-04,2.000e-05,")
    assert found["losses"] == "l_a: 1.0000e+00 l_b: -2.0000e+00 "


def test_the_time_left_counts_the_steps_of_this_start_only(line, monkeypatch):
    clock = iter([1000.0, 1010.0])
    monkeypatch.setattr(logbook.time, "monotonic", lambda: next(clock))
    # ten steps in ten seconds, ninety to go
    assert line(110, start=100, total=200)["eta"] == "0:01:30"


@pytest.mark.parametrize(("iteration", "start"), [(10, 0), (12, 0), (10, 10)], ids=["last", "beyond", "no step"])
def test_the_time_left_is_never_negative(line, monkeypatch, iteration, start):
    clock = iter([1000.0, 1010.0])
    monkeypatch.setattr(logbook.time, "monotonic", lambda: next(clock))
    assert line(iteration, start=start, total=10)["eta"] == "0:00:00"


def test_a_validation_is_told_with_the_best_and_the_baseline(tmp_path, caplog):
    caplog.set_level(logging.INFO, "pellucid")
    book = Logbook(tmp_path, "small", total=10)
    scores = SetScores("set", {"psnr": ""}, "bicubic", [("a", {"psnr": 30.0}, {"psnr": 29.5})])
    book.validation(4, scores, {"psnr": (31.0, 2)})
    assert "Validation set\n\t # psnr: 30.0000\tBest: 31.0000 @ 2 iter\t(bicubic 29.5000, +0.5000)" in caplog.text
    assert rows(tmp_path) == [
        {"kind": "val", "iter": 4, "set": "set", "scores": {"psnr": 30.0}, "baseline": {"bicubic": {"psnr": 29.5}}}
    ]


def test_setting_up_the_log_again_does_not_repeat_lines(tmp_path, capfd):
    for _ in range(2):
        logbook.start_logging(tmp_path / "run.log")
    logbook.logger.info("once")
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("once") == 1
    assert (tmp_path / "run.log").read_text().count("once") == 1


# metrics.jsonl


@pytest.fixture
def earlier(tmp_path):
    """The record of a run that was killed while it wrote a line."""
    lines = [
        *({"kind": "train", "iter": i, "l_pix": 1.0} for i in (1, 2)),
        {"kind": "val", "iter": 2, "set": "s", "scores": {}},
        *({"kind": "train", "iter": i, "l_pix": 1.0} for i in (3, 4)),
        {"kind": "val", "iter": 4, "set": "s", "scores": {}},
    ]
    text = "".join(json.dumps(row) + "\n" for row in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "train", "it')
    return tmp_path


def kinds_and_steps(folder):
    return [(row["kind"], row["iter"]) for row in rows(folder)]


def test_a_line_that_a_kill_cut_off_is_dropped(earlier):
    Logbook(earlier, "small", total=10, start=4, validated=4)
    assert kinds_and_steps(earlier) == [
        *(("train", 1), ("train", 2), ("val", 2)),
        *(("train", 3), ("train", 4), ("val", 4)),
    ]


def test_what_comes_after_the_resumed_iteration_is_dropped(earlier):
    Logbook(earlier, "small", total=10, start=2, validated=2)
    assert kinds_and_steps(earlier) == [("train", 1), ("train", 2), ("val", 2)]


def test_a_validation_that_will_be_repeated_is_dropped(earlier):
    Logbook(earlier, "small", total=10, start=4, validated=2)
    assert kinds_and_steps(earlier) == [("train", 1), ("train", 2), ("val", 2), ("train", 3), ("train", 4)]


# tensorboard and Weights & Biases


def test_tensorboard_holds_losses_rate_scores_and_a_picture(tiny, command, tmp_path):
    tiny["logger"]["use_tb_logger"] = True
    assert command("train.py", tiny)[0] == 0
    events = EventAccumulator(str(tmp_path / "out/tb_logger/small"))
    events.Reload()
    assert {"losses/l_pix", "lr", "metrics/held-out/psnr"} <= set(events.Tags()["scalars"])
    found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    record = rows(tmp_path / "out/experiments/small")
    training = {row["iter"]: row for row in record if row["kind"] == "train"}
    assert found["losses/l_pix"] == pytest.approx({i: row["l_pix"] for i, row in training.items()})
    assert found["lr"] == pytest.approx({i: row["lr"] for i, row in training.items()})
    scores = {row["iter"]: row["scores"]["psnr"] for row in record if row["kind"] == "val"}
    assert found["metrics/held-out/psnr"] == pytest.approx(scores)
    (tag,) = events.Tags()["images"]
    assert tag == "held-out/corner"
    assert [(e.step, e.width, e.height) for e in events.Images(tag)] == [(2, 140, 96), (4, 140, 96)]


def test_tensorboard_goes_on_after_the_resumed_iteration(tmp_path):
    for start, last in ((0, 4), (2, 3)):
        book = Logbook(tmp_path, "small", total=10, start=start, tensorboard=tmp_path / "tb")
        for i in range(start + 1, last + 1):
            book.train(i, 0, lrs=(float(start),), logs={}, times=(0, 0))
        book.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lr")] == [(1, 0.0), (2, 0.0), (3, 2.0)]


def test_a_grey_picture_can_be_shown(tmp_path):
    book = Logbook(tmp_path, "small", total=10, tensorboard=tmp_path / "tb")
    book.image("set/grey", np.zeros((8, 6, 1), np.uint8), 1)
    book.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Images("set/grey")[0].width == 6


def test_a_missing_wandb_is_told_once_and_the_run_goes_on(tiny, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tiny["logger"] |= {"use_tb_logger": True, "wandb": {"project": "mine"}}
    code, printed = command("train.py", tiny)
    assert code == 0, printed
    assert printed.count("wandb is not installed") == 1


def test_wandb_without_tensorboard_is_told_that_it_shows_nothing(tmp_path, caplog):
    Logbook(tmp_path, "small", total=10, wandb=WandbOptions(project="mine"))
    assert "set logger.use_tb_logger to true" in caplog.text


@pytest.mark.parametrize("options", [None, WandbOptions()], ids=["unset", "no project"])
def test_wandb_is_left_alone_where_no_project_is_set(tmp_path, monkeypatch, caplog, options):
    monkeypatch.setitem(sys.modules, "wandb", None)
    Logbook(tmp_path, "small", total=10, tensorboard=tmp_path / "tb", wandb=options).close()
    assert not caplog.text


def test_wandb_gets_the_project_and_the_run_to_resume(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=asked.update))
    options = WandbOptions(project="mine", resume_id="abc")
    Logbook(tmp_path, "small", total=10, tensorboard=tmp_path / "tb", wandb=options).close()
    assert asked == {"project": "mine", "id": "abc", "resume": "allow", "name": "small", "sync_tensorboard": True}


# a terminal


def on_a_terminal(arguments, width=110):
    """Run a command on a pseudo-terminal; returns the exit code and what it showed, colours left out."""
    master, slave = pty.openpty()
    settings = {"OMP_NUM_THREADS": "1", "COLUMNS": str(width), "TERM": "xterm"}
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **settings}
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            # how Linux tells the end
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    return process.wait(timeout=60), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_a_terminal_shows_a_bar_and_the_table_and_leaves_the_lines_to_the_file(small, tmp_path):
    file = tmp_path / "small.yml"
    file.write_text(yaml.safe_dump(small))
    code, shown = on_a_terminal([sys.executable, "train.py", "-opt", str(file)])
    assert code == 0, shown
    assert "Traceback" not in shown
    assert re.search(r"━+ [0-4]/4 l_pix", shown), shown
    assert "iter:" not in shown
    assert "Validation held-out" in shown
    table = shown[shown.rindex("Scores") :]
    assert "mean of 1" in table
    (log,) = (tmp_path / "out/experiments/small").glob("train_small_*.log")
    lines = [line for line in log.read_text().splitlines() if "iter:" in line]
    assert len(lines) == 4
    assert all(BASICSR_LINE.fullmatch(line) for line in lines)
