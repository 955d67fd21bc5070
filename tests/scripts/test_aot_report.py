"""The committed report on the compiled kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.dispatch import KernelUnavailable
from scripts import aot_report

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "kernels" / "aot_report.json"


def check(path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.aot_report", "--check", str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_it_is_of_every_shipped_configuration_and_tells_of_no_failure():
    done = check(REPORT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("content", [None, "{}", "rows"], ids=["absent", "without rows", "no JSON"])
def test_what_is_no_report_is_told_so(content, tmp_path):
    if content is not None:
        (tmp_path / "report.json").write_text(content, encoding="utf-8")
    done = check(tmp_path / "report.json")
    assert done.returncode == 2
    assert "is no report" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_triton_it_says_so(monkeypatch, capsys):
    def absent(ops=None):
        raise KernelUnavailable("triton cannot be imported (no module)")

    monkeypatch.setattr(aot_report, "cases", absent)
    monkeypatch.setattr(aot_report, "interpreting", lambda: False)
    assert aot_report.main([]) == 2
    assert "triton cannot be imported" in capsys.readouterr().err


def test_what_is_missing_unknown_or_failed_is_named(tmp_path):
    content = json.loads(REPORT.read_text(encoding="utf-8"))
    missing, failed, unknown = content["rows"][:3]
    content["rows"] = [*content["rows"][3:], failed | {"failures": ["8 bytes of stack"]}, unknown | {"warps": 64}]
    (tmp_path / "report.json").write_text(json.dumps(content), encoding="utf-8")
    done = check(tmp_path / "report.json")
    assert done.returncode == 1
    assert f"not in the report {missing['op']} {missing['case']}" in done.stdout
    assert f"failed {failed['op']} {failed['case']} {failed['arch']} 8 bytes of stack" in done.stdout
    assert f"in the report, but not shipped {unknown['op']} {unknown['case']}" in done.stdout
