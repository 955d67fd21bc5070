"""python -m scripts.restore where the user may not read or write, also when the tests are run by root."""

import os
import shutil

import numpy as np
import pytest
from torch.nn.modules.module import register_module_forward_hook

from archs import ARCHS
from data.io import write_image
from models import runtime
from models.checkpoint import save_safetensors
from scripts import restore

SPEC = {"type": "EDSR", "num_in_ch": 3, "num_out_ch": 3, "num_feat": 4, "num_block": 1, "upscale": 2}
NOBODY = 65534


@pytest.fixture
def tool(tmp_path, capfd, monkeypatch):
    """tool(INPUT ..., options ...) without root's rights, in a folder with in/a.png and in/closed/b.png."""
    monkeypatch.chdir(tmp_path)
    save_safetensors(tmp_path / "tiny.safetensors", ARCHS.build(SPEC).state_dict(), {"network_g": SPEC})
    for name in ("first/a.png", "in/a.png", "in/closed/b.png"):
        write_image(tmp_path / name, np.zeros((9, 11, 3), np.uint8))
    # what Python loads late may lie where only root can read
    assert runtime.run(restore.main, ["first", "--weights", "tiny.safetensors"]) == 0
    shutil.rmtree(tmp_path / "first")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    tmp_path.chmod(0o777)
    (tmp_path / "in").chmod(0o555)
    (tmp_path / "in/closed").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)

    def call(*arguments):
        capfd.readouterr()
        code = runtime.run(restore.main, [*map(str, arguments), "--weights", "tiny.safetensors"])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    yield call
    if root:
        os.seteuid(0)
    (tmp_path / "in/closed").chmod(0o755)
    (tmp_path / "in").chmod(0o755)


def test_a_folder_that_may_not_be_looked_into_is_told(tool):
    code, printed = tool("in", "--recursive", "-o", "out")
    assert code == 0, printed
    assert "in/closed was left aside, as it cannot be looked into: Permission denied" in printed
    code, printed = tool("in/closed/", "-o", "out")
    assert (code, "cannot look into in/closed/: Permission denied" in printed) == (3, True)


def test_a_folder_that_may_not_be_written_to_is_told_before_anything_is_computed(tool):
    ran = []
    with register_module_forward_hook(lambda *_: ran.append(1)):
        code, printed = tool("in")
    assert (code, ran) == (3, []), printed
    assert "in may not be written to" in printed.replace("\n", " ")
