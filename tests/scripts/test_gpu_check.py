"""python3 -m scripts.gpu_check: the whole of it once on a CPU, how it ends, and what its table says."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import gpu_bench, gpu_check, gpu_crew, gpu_ops, gpu_rows
from scripts.gpu_rows import Row

ROOT = Path(__file__).parents[2]
BENCH = {"stage": "bench", "op": "window", "shape": "SST-L w64", "dtype": "bf16", "what": "fwd"}
WORK = {"bytes": 4.3e9, "products": 1e12, "exps": 6e9, "pairs": 6e9}


@pytest.fixture
def environment(monkeypatch):
    """What is set for the processes that are started is not for the other tests."""
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.mark.interpreter
def test_all_of_it_runs_on_a_cpu_and_what_it_writes_agrees(tmp_path):
    # as a file, from elsewhere; the tests of the module form are the processes that it starts
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--device", "cpu", "--tiny", "--deadline", "500"]
    # a drawn seed may lie at the edge of a limit
    command += ["--out", "out", "--seed", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    if "pip install" in done.stderr:
        pytest.skip(done.stderr.strip())
    said = done.stdout + done.stderr + (tmp_path / "out/worker.log").read_text()
    assert done.returncode == 0, said
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    checked = {row["op"] for row in rows if row["stage"] == "check" and row["ok"]}
    assert checked == {op.short for op in gpu_ops.operators()}, said
    assert {row["op"] for row in rows if row["stage"] == "bench" and row["note"] == "run, not timed"} == checked
    assert any(row["stage"] == "graph" and row["ok"] for row in rows), said
    assert all(row["ms"] is None for row in rows)
    lines = done.stdout.splitlines()
    assert lines == (tmp_path / "out/table.txt").read_text().splitlines()
    assert lines[-1] == f"{sum(row['ok'] is not None for row in rows)} checks, 0 failed"
    settings = json.loads((tmp_path / "out/cpu.json").read_text())["settings"]
    assert settings["layer_norm2d"]["backward"]["num_warps"] == 4


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "no CUDA device is seen by PyTorch .* Run it where"),
        (("--device", "cpu"), "--device cpu and --tiny go together"),
        (("--tiny",), "--device cpu and --tiny go together"),
        (("--device", "cpu", "--tiny", "--op", "convolution"), "no kernels of convolution; there are those of window"),
        (("--device", "cpu", "--tiny", "--out", "{file}"), "cannot write to .*; choose another folder"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_where_it_cannot_run_it_says_why_and_exits_with_2(words, why, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    words = ["--out", str(tmp_path / "out"), *(word.format(file=tmp_path / "file") for word in words)]
    assert gpu_check.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(why, said.err), said.err


def test_without_triton_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert gpu_check.main([]) == 2
    assert "pip install 'triton==" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (None, 1)])
@pytest.mark.usefixtures("environment")
def test_the_table_is_printed_however_it_ends(error, code, tmp_path, capsys, monkeypatch):
    def run(steps, plan, rows, **options):
        rows[steps[0].name] = [replace(steps[0].row, ok=False, note="broken")]
        for step in steps[1:]:
            rows[step.name] = [replace(step.row, note="skipped: deadline")]
        if error:
            raise error

    monkeypatch.setattr(gpu_crew, "run", run)
    monkeypatch.setattr(gpu_check, "_can_interpret", lambda: None)
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: True)
    assert gpu_check.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == code
    assert capsys.readouterr().out.splitlines()[-1] == "1 checks, 1 failed"
    assert json.loads((tmp_path / "results.json").read_text())["rows"][0]["note"] == "broken"


def test_the_plan_of_a_gpu_names_every_operator_and_no_step_twice():
    names = [op.name for op in gpu_ops.operators()]
    steps = gpu_check.plan(device="cuda", tiny=False, seed=0, names=names)
    assert len({step.name for step in steps}) == len(steps)
    for stage in ("check", "compile", "bench", "tune"):
        assert {step.row.op for step in steps if step.row.stage == stage} == {op.short for op in gpu_ops.operators()}
    for step in steps:
        assert step.alone == (step.row.stage in ("bench", "ceiling", "tune")), step.name


def test_failures_come_first_and_the_count_last():
    rows = [Row("check", "norm", "a", "fp32", ok=True, relerr=1e-7, tol=1e-6), Row("check", "window", "b", ok=False)]
    lines = gpu_rows.table(rows)
    assert lines[0].split()[:3] == ["op", "shape", "dtype"]
    assert lines[1].startswith("window   b")
    assert lines[1].endswith("FAIL")
    assert lines[-1] == "2 checks, 1 failed"


def test_passed_checks_are_one_line_with_the_worst_of_them():
    rows = [Row("check", "norm", f"{i}", "fp32", "f+b", ok=True, relerr=i * 1e-7, tol=1e-6) for i in range(5)]
    (line,) = gpu_rows.table(rows)[1:-1]
    assert "5 shapes" in line
    assert "4.0e-07" in line


def test_a_long_table_keeps_failures_and_marks_and_says_what_is_left_out():
    rows = [Row("bench", "window", f"{i}", ms=1.0, p20=0.9, p80=1.1) for i in range(200)]
    rows += [Row("check", "norm", f"{i}", ok=False, note="wrong") for i in range(3)]
    rows += [Row("mark", "window", ok=True, note="fast")]
    lines = gpu_rows.table(rows)
    assert len(lines) == gpu_rows.MOST_ROWS
    assert sum("wrong" in line for line in lines) == 3
    assert any("fast" in line for line in lines)
    assert lines[-2] == "... 97 more rows in results.json"
    assert lines[-1] == "4 checks, 3 failed"


def test_lines_stay_within_the_width_of_a_screen():
    row = Row(
        "bench", "coreset", "a" * 40, "fp32/bf16", "fwd", "b" * 40, 1234.5, 1e-4, 9999, 1e-7, 1e-6, True, "n" * 99
    )
    row = replace(row, work=WORK, percent=100.0, xbest=10.0)
    assert len(gpu_rows.line(row)) <= 165
    assert len(gpu_rows.line(replace(row, note=""))) <= 136


def test_the_floor_is_that_of_the_measured_ceilings():
    rows = [
        Row("ceiling", "ceiling", "bytes", work={"rate": 2e12}),
        Row(**BENCH, backend="triton", ms=10.0, work={"bytes": 8e9}),
        Row(**BENCH, backend="sdpa-flash", ms=20.0, work={"bytes": 8e9}),
        Row(**BENCH | {"dtype": "fp32"}, backend="sdpa-eff", ms=1.0),
    ]
    gpu_rows.finish(rows)
    assert rows[1].floor_ms == pytest.approx(4.0)
    assert rows[1].percent == pytest.approx(40.0)
    # a peer of another dtype is none
    assert rows[1].xbest == pytest.approx(2.0)
    assert rows[2].xbest is None
    cells = gpu_rows.line(rows[1]).split()
    assert cells[-5:] == ["10.00", "800", "40", "2.00", "-"]


@pytest.mark.parametrize(
    ("work", "dtype", "expected"),
    [
        ({"bytes": 4.3e9}, "bf16", 1.0),
        ({"products": 788e9}, "bf16", 1.0),
        ({"products": 394e9}, "tf32", 1.0),
        # three products of tf32 for one of float32
        ({"products": 394e9}, "fp32", 3.0),
        ({"exps": 4.18e9, "bytes": 1.0}, "fp32", 1.0),
        ({"fma": 60e9, "exps": 1.0}, "fp32", 1.0),
    ],
)
def test_the_floor_is_what_takes_longest(work, dtype, expected):
    assert gpu_rows.floor_ms(work, dtype, gpu_rows.CEILINGS) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ms", "peer", "states"),
    [(3.0, 3.3, [True, True]), (3.0, 2.9, [True, False]), (4.0, 8.0, [False, True]), (3.0, None, [True, None])],
)
def test_marks_hold_the_rate_and_the_peers_against_the_timing(ms, peer, states):
    rows = [Row(**BENCH, backend="triton", ms=ms, work=WORK), Row(**BENCH, backend="sdpa-cudnn", ms=peer)]
    # a faster route that is not SDPA is not asked about
    rows.append(Row(**BENCH, backend="flex", ms=0.1))
    assert [row.ok for row in gpu_bench.marks(gpu_rows.finish(rows))] == states


def test_what_was_not_timed_is_neither_passed_nor_failed():
    row = Row(**BENCH, backend="triton", note="skipped: deadline")
    marks = gpu_bench.marks(gpu_rows.finish([row]))
    assert [mark.ok for mark in marks] == [None, None]
    assert "not measured" in marks[0].note


def test_every_mark_of_the_plan_is_asked_for():
    asked = [(row.op, row.shape, row.what) for row in _marks_of_the_plan()]
    for mark in (
        ("window", "SST-L w64", "fwd"),
        ("window", "SST-L w16", "fwd"),
        ("deform", "C24 640x360", "fwd"),
        ("deform", "C24 640x360", "bwd"),
        ("taylor", "h1 d24 640x360", "fwd"),
        ("wildcat", "n57600 r256", "fwd"),
    ):
        assert mark in asked


def test_nothing_checked_is_no_success():
    assert gpu_rows.exit_code([]) == 1
    assert gpu_rows.exit_code([Row("bench", "norm", ms=1.0)]) == 1
    assert gpu_rows.exit_code([Row("check", "norm", ok=True), Row("bench", "norm")]) == 0
    assert gpu_rows.exit_code([Row("check", "norm", ok=True), Row("mark", "norm", ok=False)]) == 1


def test_results_hold_what_is_not_a_number_in_words(tmp_path):
    rows = [Row("check", "norm", relerr=math.nan, ok=False, details={"errors": {"x": math.inf}})]
    gpu_rows.write(rows, tmp_path, {"gpu": "a GPU"})
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["gpu"] == "a GPU"
    assert found["rows"][0]["relerr"] == "nan"
    assert found["rows"][0]["details"]["errors"]["x"] == "inf"


def _marks_of_the_plan():
    rows = [run.row("triton") for run in gpu_bench.runs()]
    return gpu_bench.marks(gpu_rows.finish(rows))
