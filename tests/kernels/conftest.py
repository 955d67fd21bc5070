"""What tests of Triton kernels share: the interpreter, memory that tells what was not written, guards around tensors.

The interpreter notices no access beyond a tensor. ``guards.around`` puts NaN before and behind each one: such a read
shows in the result, and such a write in the guards. ``torch.empty`` gives memory full of NaN between guards, so that an
output that was not written shows as well.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VARIABLE = "TRITON_INTERPRET"
ROOT = Path(__file__).resolve().parents[2]
# numbers before and behind a tensor that nobody may touch
GUARD = 256
# what stands beside an output; of every dtype
BESIDE = 4096


def reason_against_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: no kernel can be interpreted (pip install 'pellucid[test]', on Linux)"
    import numpy
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and tuple(
        map(int, numpy.__version__.split(".")[:2])
    ) >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs numpy below 2.4, this is {numpy.__version__}"
    if torch.cuda.is_available() and os.environ.get(VARIABLE) != "1":
        return f"kernels are compiled where there is a GPU; {VARIABLE}=1 interprets them instead"
    return None


def _import_triton_for_the_interpreter():
    """Triton decides at its import whether it interprets; the variable is then taken back until a test asks for it."""
    if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    import triton  # noqa: F401

    if before is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = before


_import_triton_for_the_interpreter()


@pytest.fixture
def interpreter(monkeypatch):
    """Kernels run in Triton's interpreter, and new memory holds NaN."""
    reason = reason_against_the_interpreter()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv(VARIABLE, "1")
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))


@pytest.fixture
def guarded_outputs(interpreter, monkeypatch):
    """What ``torch.empty`` gives has numbers before and behind it, which must be there afterwards.

    They are no NaN: a kernel that goes too far reads NaN beyond its input, and would write just that.
    """
    made = []
    monkeypatch.setattr(torch, "empty", _guarded(torch.empty, made))
    yield
    for memory, numel in made:
        unharmed = bool((torch.cat([memory[:GUARD], memory[GUARD + numel :]]) == BESIDE).all())
        assert unharmed, f"a kernel wrote outside a tensor of {numel} numbers"


def _has_data(x):
    """Neither meta nor fake, and something that NaN can be written into."""
    return type(x) is torch.Tensor and x.is_floating_point() and x.device.type != "meta"


def _filled(make):
    def empty(*args, **kwargs):
        x = make(*args, **kwargs)
        if _has_data(x):
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return empty


def _guarded(make, made):
    def empty(*args, **kwargs):
        x = make(*args, **kwargs)
        if not _has_data(x):
            return x
        memory = torch.full((x.numel() + 2 * GUARD,), BESIDE, dtype=x.dtype, device=x.device)
        memory[GUARD : GUARD + x.numel()] = torch.nan
        made.append((memory, x.numel()))
        # not a view: it owns this part of the memory
        return x.set_(memory.untyped_storage(), GUARD, x.shape, x.stride())

    return empty


class Guards:
    """Tensors in the middle of memory that holds NaN, or a fixed integer."""

    def __init__(self):
        self._all = []

    def around(self, x):
        """A copy of ``x``, with its strides, in guarded memory; a leaf that wants a gradient if ``x`` does."""
        length = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        fill = torch.nan if x.is_floating_point() else 77
        memory = torch.full((length + 2 * GUARD,), fill, dtype=x.dtype, device=x.device)
        view = memory.as_strided(x.shape, x.stride(), GUARD)
        view.copy_(x.detach())
        self._all.append((memory, memory.clone()))
        return view.detach().requires_grad_(x.requires_grad)

    def check(self):
        """Nothing was written into the guarded memory, inputs included."""
        for memory, before in self._all:
            assert torch.equal(memory.nan_to_num(12345), before.nan_to_num(12345)), "a kernel wrote outside its output"


@pytest.fixture
def aot_report():
    """``aot_report(*arguments)``: the last line of ``scripts.aot_report``, run where kernels are not interpreted."""
    pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

    def run(*arguments):
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        command = [sys.executable, "-m", "scripts.aot_report", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    return run


@pytest.fixture
def guards():
    """``guards.around(x)`` puts NaN before and behind a copy of ``x``; afterwards all of it must be as it was."""
    made = Guards()
    yield made
    made.check()
