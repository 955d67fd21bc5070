"""The shared parts of the Triton kernels: rounding in the interpreter, the launch settings, why one cannot run."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import launch
from kernels.layer_norm2d import layer_norm2d
from kernels.window_attention import window_attention
from scripts import aot_report

ROOT = Path(__file__).resolve().parents[2]


def test_settings_come_from_the_gpu_then_its_architecture_then_the_default(monkeypatch, tmp_path):
    default = {
        "op": {"forward": {"BLOCK": 64, "num_warps": 4, "triton": "3.6.0", "ms": None}, "backward": {"BLOCK": 8}}
    }
    own = {"op": {"forward": {"BLOCK": 128, "triton": "3.6.0", "ms": 1.5}}}
    hopper = {"op": {"forward": {"BLOCK": 32}, "sum": {"BLOCK": 256, "triton": "3.6.0", "ms": None}}}
    for name, content in (("default", default), ("sm_90", hopper), ("nvidia_h200", own)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": name, "settings": content}))
    monkeypatch.setattr(launch, "CONFIGS", tmp_path)
    launch.configuration.cache_clear(), launch._settings.cache_clear()
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert launch.settings("op", "forward") == {"BLOCK": 64, "num_warps": 4}
    assert launch.settings("op", "forward/large", "forward", device="cuda") == {"BLOCK": 128}
    assert launch.settings("op", "backward", device="cuda") == {"BLOCK": 8}
    assert launch.settings("op", "sum", device="cuda") == launch.settings("op", "sum", arch=90) == {"BLOCK": 256}
    assert launch.settings("op", "forward", arch=80) == launch.settings("op", "forward")
    with pytest.raises(KeyError, match="no settings of op for sideways"):
        launch.settings("op", "sideways")
    launch.configuration.cache_clear(), launch._settings.cache_clear()


@pytest.mark.parametrize("path", sorted((ROOT / "kernels" / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_setting_says_which_compiler_it_was_chosen_with(path):
    content = json.loads(path.read_text())
    assert launch.slug(content["gpu"]) == path.stem
    for entries in content["settings"].values():
        for entry in entries.values():
            assert {"triton", "ms", "num_warps"} <= set(entry)


def test_a_kernel_says_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(launch, "_found", {"triton": False})
    assert "triton is not installed" in launch.why_not(torch.zeros(1))
    monkeypatch.setattr(launch, "_found", {"triton": True, "new": False})
    assert "older than 3.6" in launch.why_not(torch.zeros(1))
    monkeypatch.setattr(launch, "_found", {"triton": True, "new": True})
    assert "needs a CUDA tensor, this one is on cpu" in launch.why_not(torch.zeros(1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launch.why_not(torch.zeros(1)) is None
    assert "only tests want" in launch.why_not_unasked(torch.zeros(1))


def test_a_kernel_needs_a_gpu_it_is_written_for_and_a_compiler(monkeypatch):
    x = SimpleNamespace(device=torch.device("cuda"))
    gpu = SimpleNamespace(major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(launch, "_found", {"triton": True, "new": True, "compiler": True})
    assert launch.why_not(x) is None
    gpu.major, gpu.minor = 7, 5
    assert "compute capability 8.0 or more, cuda has 7.5" in launch.why_not(x)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "GPUs of NVIDIA" in launch.why_not(x)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delitem(launch._found, "compiler")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "gcc or clang" in launch.why_not(x)


@pytest.mark.parametrize(("version", "new"), [("3.6.0", True), ("3.10.1+git1", True), ("3.2.0", False)])
def test_an_old_triton_is_none(version, new, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert launch._is_new() == new


def test_either_setting_of_pytorch_allows_tf32():
    before = torch.get_float32_matmul_precision()
    try:
        for precision, allowed in (("highest", False), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert launch.tf32() == allowed
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert not launch.tf32()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert launch.tf32()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("shape", "run"),
    [
        ((1, 4, 1, 1), lambda x: layer_norm2d(x, None, None, backend="triton")),
        ((1, 1, 1, 3), lambda x: window_attention(x, None, None, heads=1, window=1, backend="triton")),
    ],
    ids=["layer_norm2d", "window_attention"],
)
def test_kernels_are_launched_on_the_device_of_their_image(shape, run, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    current, launched, call = [], [], GridExecutor.__call__

    @contextlib.contextmanager
    def device_of(x):
        current.append(x.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *a, **k: launched.append(list(current)) or call(*a, **k))
    run(torch.rand(shape, requires_grad=True)).sum().backward()
    assert len(launched) >= 2
    assert all(devices == [torch.device("cpu")] for devices in launched)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreter")
class TestRounding:
    """In the interpreter numbers of narrow types are float32 numbers on the steps of that type."""

    @staticmethod
    def applied(helper, x, out, **options):
        from kernels.triton_parts import tl, triton

        @triton.jit
        def kernel(x, out, FUNCTION: tl.constexpr, SIZE: tl.constexpr):
            i = tl.arange(0, SIZE)
            tl.store(out + i, FUNCTION(tl.load(x + i)))

        kernel[(1,)](x, out, FUNCTION=helper, SIZE=len(x), **options)
        return out

    def test_to_bfloat16_is_torchs_rounding_to_the_bit(self):
        from kernels.triton_parts import to_bfloat16

        bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32)
        ties = torch.arange(0, 1 << 22, 1 << 15, dtype=torch.int32)[:126] + (120 << 23)
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, -1e-40])
        x = torch.cat([bits.view(torch.float32), ties.view(torch.float32), -ties.view(torch.float32)])
        x = torch.cat([x, special, torch.zeros(8192 - len(x) - len(special))])
        found = self.applied(to_bfloat16, x, torch.empty_like(x))
        torch.testing.assert_close(found, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)

    def test_to_tf32_keeps_ten_bits(self):
        from kernels.triton_parts import to_tf32

        x = torch.randn(1024)
        found = self.applied(to_tf32, x, torch.empty_like(x))
        assert ((found - x).abs() <= x.abs() * 2**-11).all()
        assert not (found.view(torch.int32) & 0x1FFF).any()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_products_of_every_type_are_right(self, dtype):
        from kernels.triton_parts import dot, operand, stored, tl, triton

        # the interpreter sees no names of the enclosing function, so the helpers are arguments
        @triton.jit
        def kernel(
            a,
            b,
            out,
            OPERAND: tl.constexpr,
            DOT: tl.constexpr,
            STORED: tl.constexpr,
            TYPE: tl.constexpr,
            ACC: tl.constexpr,
            N: tl.constexpr,
        ):
            i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
            x = OPERAND(tl.load(a + i), TYPE)
            y = OPERAND(tl.load(b + i), TYPE)
            z = DOT(x, y, tl.zeros((N, N), ACC), "ieee")
            tl.store(out + i, STORED(z, TYPE))

        a, b = torch.randn(2, 32, 32, dtype=torch.float64).unbind()
        out = torch.empty(32, 32, dtype=dtype)
        narrow = getattr(tl, str(dtype).removeprefix("torch."))
        kernel[(1,)](
            a, b, out, operand, dot, stored, TYPE=narrow, ACC=tl.float64 if narrow == tl.float64 else tl.float32, N=32
        )
        expected = (a.to(dtype).double() @ b.to(dtype).double()).to(dtype)
        # the sum in float32 may fall on the other side of a step
        step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        torch.testing.assert_close(out, expected, rtol=step, atol=1e-5 if dtype != torch.float64 else 1e-13)


@pytest.mark.interpreter
def test_the_guards_notice_a_write_beside_a_tensor(guards):
    x = guards.around(torch.zeros(3, 4, requires_grad=True).detach())
    memory = guards._all[-1][0]
    memory[256 + 12] = 0
    with pytest.raises(AssertionError, match="wrote outside"):
        guards.check()
    memory[256 + 12] = torch.nan
    assert x.sum() == 0


def test_the_report_refuses_the_interpreter(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert aot_report.main([]) == 2
    assert "unset it" in capsys.readouterr().err
