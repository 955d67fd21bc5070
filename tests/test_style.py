"""The code is as the linter wants it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None, reason="ruff is not installed (the extra [test] brings it)"
)
@pytest.mark.parametrize("command", [("check",), ("format", "--check")])
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_names_a_machine():
    # assembled, so that this file does not name them itself
    folders = ["/" + name + "/" for name in ("tmp", "work", "root", "home")]
    patterns = ("*/**/*.py", "*.py", "options/**/*.yml", "*.md", "*/README.md", "kernels/*/README.md")
    for path in [path for pattern in patterns for path in ROOT.glob(pattern)]:
        if ".venv" in path.parts or path.parts[len(ROOT.parts)] in ("experiments", "results", "build"):
            continue
        text = path.read_text(encoding="utf-8")
        assert not any(folder in text for folder in folders), path
