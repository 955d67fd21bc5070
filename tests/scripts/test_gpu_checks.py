"""The parts of scripts.gpu_check: what a check finds, what becomes of steps that fail, peers, timer and settings."""

import re
import sys
import time
from dataclasses import replace

import pytest
import torch

from kernels import coreset_attention, launch
from scripts import gpu_bench, gpu_checks, gpu_crew, gpu_ops, gpu_peers, gpu_rows, gpu_timer, gpu_tuning
from scripts.gpu_rows import Row

NORM, CASE = gpu_ops.NORM, gpu_ops.NORM.usual[0]
DEFORM = gpu_ops.DEFORM
ODD = gpu_ops.NORM.tiny[0]
TAYLOR = gpu_ops.taylor.Case("v1", 2, 2, 6, 35)


def beyond(x):
    """The number behind a tensor."""
    return x.detach().as_strided((1,), (1,), x.storage_offset() + x.numel())


class Faults:
    """Ways to break the layer norm of the ``torch`` backend."""

    def __init__(self):
        self.calls = 0

    def right(self, arguments):
        return NORM.call(arguments, "torch")

    def scaled(self, arguments):
        return self.right(arguments) * 1.001

    def without_a_gradient(self, arguments):
        return self.right(arguments | {"weight": arguments["weight"].detach()}) + 0 * arguments["weight"].sum()

    def writes_beyond_its_input(self, arguments):
        beyond(arguments["x"]).fill_(1)
        return self.right(arguments)

    def changes_its_input(self, arguments):
        found = self.right(arguments)
        # as a kernel does it, unseen by autograd
        arguments["bias"].detach().numpy()[0] += 1
        return found

    def writes_beyond_its_output(self, arguments):
        beyond(torch.empty(8)).fill_(1)
        return self.right(arguments)

    def leaves_output_unwritten(self, arguments):
        found = self.right(arguments)
        return torch.cat([found[:, :-1], found[:, -1:] + torch.empty(1)], dim=1)

    def differs_each_time(self, arguments):
        self.calls += 1
        return self.right(arguments) * (1 + self.calls * 1e-7)

    def is_cut_off(self, arguments):
        return self.right(arguments)[..., :-1]


def broken_norm(broken):
    """The layer norm whose kernels are ``broken``; what it is compared with is not."""

    def call(arguments, backend):
        return broken(arguments) if backend == "triton" else NORM.call(arguments, backend)

    return replace(NORM, call=call)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("right", ""),
        ("scaled", "output is off by 1.0e-03"),
        ("without_a_gradient", "weight is off by 1.0e"),
        ("writes_beyond_its_input", "x or the memory around it was written to"),
        ("changes_its_input", "bias or the memory around it was written to"),
        ("writes_beyond_its_output", "a kernel wrote outside a tensor of 8 numbers"),
        ("leaves_output_unwritten", "output is off by nan"),
        ("differs_each_time", "output differs between two runs"),
    ],
)
def test_a_check_sees(fault, said):
    broken = getattr(Faults(), fault)
    row = gpu_checks.check(broken_norm(broken), ODD, "fp32", device="cpu")
    assert row.ok == (not said)
    assert said in row.note


def test_an_output_of_another_shape_is_a_failure_and_not_the_end():
    op = broken_norm(Faults().is_cut_off)
    step = gpu_crew.Step("cut", Row("check", "norm"), lambda: [gpu_checks.check(op, ODD, "fp32", device="cpu")])
    (row,) = gpu_crew._attempt(step)
    assert row.ok is False
    assert row.note.startswith("RuntimeError: ")


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "tf32"])
@pytest.mark.parametrize("op", gpu_bench.OPS, ids=lambda op: op.name)
def test_plain_pytorch_passes_the_checks(op, kind):
    before = torch.get_float32_matmul_precision()
    row = gpu_checks.check(op, op.tiny[0], kind, device="cpu", backend="torch")
    assert row.ok, row.note
    assert torch.get_float32_matmul_precision() == before


def test_an_operator_may_add_in_any_order_unless_it_is_asked_not_to():
    asked = []

    def call(arguments, backend):
        asked.append(torch.are_deterministic_algorithms_enabled())
        noise = 0 if asked[-1] else len(asked) * 1e-7
        return NORM.call(arguments, backend) * (1 + noise)

    row = gpu_checks.check(replace(NORM, call=call, ordered=True), ODD, "fp32", device="cpu", backend="torch")
    assert row.ok, row.note
    # reference, PyTorch, once as usual, twice in order
    assert asked == [False, False, False, True, True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("name", "said"), [("x", ""), ("weight", "weight differs between two runs")])
def test_without_a_clamp_only_the_gradient_by_the_image_has_no_order(name, said):
    asked = []

    def call(arguments, backend):
        asked.append(torch.are_deterministic_algorithms_enabled())
        x = arguments[name]
        # the value stays; the gradient is another one each time
        return DEFORM.call(arguments | {name: x + len(asked) * 5e-7 * (x - x.detach())}, backend)

    case = next(case for case in DEFORM.small if case.clamp is None)
    row = gpu_checks.check(replace(DEFORM, call=call), case, "fp32", device="cpu", backend="torch")
    assert row.note == said
    assert not any(asked)


def test_a_gradient_that_cancels_is_held_against_the_others():
    sizes = gpu_checks.sizes_of({"output": torch.ones(1), "v": torch.full((4,), 5.0), "q": torch.full((4,), 1e-9)})
    assert sizes == {"output": 1.0, "v": 10.0, "q": 10.0}
    # of one pixel, the logits do not matter
    case = next(case for case in gpu_ops.WINDOW.small if case.name == "one pixel")
    row = gpu_checks.check(gpu_ops.WINDOW, case, "fp32", device="cpu", backend="torch")
    assert max(row.details["limits"].values()) < 1e-4


def test_an_unlucky_rounding_of_an_ill_conditioned_draw_is_held_against_its_neighbours():
    case = gpu_ops.CORESET.small[1]
    arguments = gpu_ops.CORESET.inputs(case, "fp32", "cpu", 27)
    # here PyTorch itself is off by 6e-6, and by ten times that where the last digits differ
    for size, ok in ((7e-5, True), (1e-3, False)):

        def call(arguments, backend, size=size):
            right = gpu_ops.CORESET.call(arguments, "reference" if backend == "triton" else backend)
            return right * (1 + size) if backend == "triton" else right

        op = replace(gpu_ops.CORESET, call=call)
        found = gpu_checks.compare(op, arguments, "fp32", seed=0)
        assert (not found.wrong) == ok, found
        assert 7e-5 < found.limits["q"] < 1e-3
        alone = gpu_checks.compare(replace(op, ill_conditioned=False), arguments, "fp32", seed=0)
        assert alone.wrong
        assert alone.limits["q"] == 4e-5


def test_forced_draws_choose_the_same_keys_in_every_dtype():
    case = gpu_ops.CoresetCase("two bins", 2, 24, 4, 8, 2)
    arguments = gpu_ops.CORESET.inputs(case, "fp32", "cpu", 3)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        k, v = (arguments[key].to(dtype) for key in "kv")
        options = {"rank": 8, "bins": 2, "noise": arguments["noise"]}
        found.append(gpu_checks.compress_kv(k, v, **options, backend="torch").pivots)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].unique().numel() == 8


PLAN = """
import os, signal, time
from scripts.gpu_crew import Step
from scripts.gpu_rows import Row

def row(name):
    return Row("check", "norm", name)

def fine(name):
    print("to the log")
    return [Row("check", "norm", name, ok=True)]

def plan(kinds):
    made = {
        "fine": lambda: fine("fine"),
        "after": lambda: fine("after"),
        "raises": lambda: 1 / 0,
        "hangs": lambda: time.sleep(100),
        "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "exits": lambda: os._exit(7),
        "peer": lambda: 1 / 0,
    }
    rows = {"peer": Row("bench", "norm", "peer", backend="sdpa")}
    return [Step(kind, rows.get(kind, row(kind)), made[kind], seconds=1.5) for kind in kinds]
"""


@pytest.fixture
def crew(tmp_path, monkeypatch):
    (tmp_path / "a_plan.py").write_text(PLAN)
    monkeypatch.syspath_prepend(tmp_path)
    import a_plan

    def run(*kinds, seconds=60.0, jobs=1):
        rows, said = {}, []
        until, log = time.monotonic() + seconds, str(tmp_path / "log")
        plan = ("a_plan", "plan", {"kinds": kinds})
        gpu_crew.run(a_plan.plan(kinds), plan, rows, until=until, jobs=jobs, log=log, say=said.append)
        return {name: found[0] for name, found in rows.items()}, said, tmp_path / "log"

    yield run
    sys.modules.pop("a_plan", None)


def test_what_raises_hangs_or_dies_is_a_row_and_the_others_run(crew, monkeypatch):
    # the first step of a process has the time of its start besides
    monkeypatch.setattr(gpu_crew, "START", 8.0)
    rows, said, log = crew("fine", "raises", "hangs", "dies", "exits", "peer", "after")
    assert {name: row.ok for name, row in rows.items()} == {
        "fine": True,
        "raises": False,
        "hangs": False,
        "dies": False,
        "exits": False,
        "peer": None,
        "after": True,
    }
    assert rows["raises"].note == "ZeroDivisionError: division by zero"
    assert rows["hangs"].note.startswith("hung: nothing for ")
    assert rows["dies"].note == "the process died: SIGSEGV"
    assert rows["exits"].note == "the process died: exit code 7"
    assert rows["peer"].note == "missing: ZeroDivisionError: division by zero"
    assert len(said) == 4
    assert "to the log" in log.read_text()
    assert "Traceback" in log.read_text()


def test_the_deadline_ends_what_hangs_and_says_what_was_skipped(crew):
    begin = time.monotonic()
    rows, said, _ = crew("hangs", "fine", seconds=1.0)
    assert time.monotonic() - begin < 10
    assert rows["hangs"].note == "skipped: deadline (it was running)"
    assert rows["fine"].note == "skipped: deadline"
    assert [row.ok for row in rows.values()] == [None, None]
    assert not said


def test_readable_t_msa_is_t_msa():
    arguments = gpu_ops.taylor.make_inputs(TAYLOR, dtype=torch.float64)
    exact = gpu_ops.TAYLOR.call(arguments, "reference")
    torch.testing.assert_close(gpu_peers.taylor_eager(arguments)(), exact)
    with pytest.raises(gpu_peers.Missing, match="no focused term"):
        gpu_peers.taylor_eager(gpu_ops.taylor.make_inputs(gpu_ops.taylor.SMALL[1]))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["flex", "sdpa"])
def test_routes_of_window_attention_compute_it(name, monkeypatch):
    # as it is without a compiler, which takes a minute to be found on a CPU
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = gpu_ops.window.Case("odd", 1, 18, 20, 2, 16, 16, 16)
    arguments = gpu_ops.WINDOW.inputs(case, "fp32", "cpu")
    exact = gpu_ops.WINDOW.reference(gpu_ops.widened(arguments))
    peer = gpu_peers.window_flex(arguments) if name == "flex" else gpu_bench.plain(gpu_ops.WINDOW, "sdpa")(arguments)
    with torch.no_grad():
        assert gpu_checks.relative_error(peer(), exact) < 1e-5


def test_routes_of_other_operators_compute_them(monkeypatch):
    arguments = NORM.inputs(CASE, "fp32", "cpu")
    assert gpu_checks.relative_error(gpu_peers.norm_torch(arguments)(), NORM.call(arguments, "reference")) < 1e-6
    q, k, v = torch.randn(3, 1, 2, 30, 8).unbind()
    weights = (q @ k.mT / 8**0.5).softmax(dim=-1)
    # the one that a CPU has
    monkeypatch.setitem(gpu_peers.SDPA, "sdpa-math", "MATH")
    found = gpu_peers.exact_sdpa({"q": q, "k": k, "v": v}, "sdpa-math")()
    torch.testing.assert_close(found, weights @ v)


def test_a_timed_coreset_does_not_make_a_gpu_wait(monkeypatch):
    monkeypatch.setattr(coreset_attention, "_warned", set())
    run = replace(next(run for run in gpu_bench.runs(tiny=True) if run.op is gpu_ops.CORESET), what="fwd")
    call = gpu_bench.prepared(run, gpu_bench.plain(run.op), "cpu", 0)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: pytest.fail("a value was looked at"))
    assert call().shape == (1, 1, 24, 4)


def test_gradients_come_to_the_kernels_laid_out_as_their_outputs(monkeypatch):
    given = []
    monkeypatch.setattr(torch.autograd, "grad", lambda out, inputs, upstream, **_: given.append((out, upstream)))
    run = next(run for run in gpu_bench.runs(tiny=True) if run.op is gpu_ops.NORM)
    gpu_bench.prepared(run, gpu_bench.plain(run.op), "cpu", 0)()
    ((out, upstream),) = given
    assert not out.is_contiguous()
    assert (upstream.dtype, upstream.stride()) == (out.dtype, out.stride())


def test_what_is_not_installed_is_missing(monkeypatch):
    monkeypatch.setattr(gpu_peers.importlib.util, "find_spec", lambda name: None)
    arguments = gpu_ops.DEFORM.inputs(gpu_ops.DEFORM.tiny[0], "fp32", "cpu")
    with pytest.raises(gpu_peers.Missing, match="torchvision is not installed"):
        gpu_peers.deform_torchvision(arguments)
    run = next(run for run in gpu_bench.runs(tiny=True) if run.op is gpu_ops.DEFORM)
    step = gpu_bench._step(run, "torchvision", gpu_peers.deform_torchvision, "cpu", 0)
    (row,) = step.run()
    assert row.ok is None
    assert row.note == "missing: torchvision is not installed"


def test_torchvision_is_given_the_offsets_as_it_takes_them(monkeypatch):
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    assert torchvision.ops
    arguments = gpu_ops.DEFORM.inputs(gpu_ops.DEFORM.tiny[0], "fp32", "cpu")
    exact = gpu_ops.DEFORM.call(arguments, "reference")
    assert gpu_checks.relative_error(gpu_peers.deform_torchvision(arguments)(), exact) < 1e-5


def test_the_median_lies_between_the_quantiles_and_is_about_right():
    ms, p20, p80 = gpu_timer.quantiles(lambda: time.sleep(0.003), device="cpu", repeat=30.0)
    assert p20 <= ms <= p80
    assert 3.0 <= ms < 30.0


class Clock:
    """A GPU that takes two milliseconds for each call; what is asked of it is noted."""

    def __init__(self, monkeypatch):
        self.calls, self.asleep, self.made, make = 0, [], [], torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda size, device: self.made.append(make(size)) or self.made[-1])
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.asleep.append)
        monkeypatch.setattr(gpu_timer, "CACHE", 16)

    def run(self):
        self.calls += 1


class Event:
    def __init__(self, clock):
        self.clock, self.at = clock, None

    def record(self):
        self.at = self.clock.calls

    def elapsed_time(self, last):
        return 2.0 * (last.at - self.at)


def test_on_a_gpu_calls_are_queued_behind_a_pause_and_timed_one_by_one(monkeypatch):
    clock = Clock(monkeypatch)
    assert gpu_timer.quantiles(clock.run, device="cuda", launches=100) == (2.0, 2.0, 2.0)
    # as many calls to a pause as the queue takes
    assert len(clock.asleep) >= 5 / (gpu_timer.QUEUE // 104)
    row = gpu_timer.timed(Row("bench", "norm", backend="triton"), clock.run, device="cuda")
    assert (row.ms, row.ok) == (2.0, None)


def test_the_cache_of_a_gpu_is_filled_by_reading(monkeypatch):
    clock = Clock(monkeypatch)
    gpu_timer.quantiles(clock.run, device="cuda")
    (cache,) = clock.made
    assert (cache.numel(), cache._version) == (4, 0)


def test_a_row_on_a_cpu_has_no_milliseconds():
    called = []
    row = gpu_timer.timed(Row("bench", "norm", backend="triton"), lambda: called.append(1), device="cpu")
    assert called == [1]
    assert (row.ms, row.note) == (None, "run, not timed")


def test_settings_are_seen_by_their_key_and_can_be_replaced():
    with gpu_tuning.recording(gpu_tuning.Recorder()) as recorder:
        setting = launch.settings("layer_norm2d", "forward/nothing", "forward")
        recorder.instead = {("layer_norm2d", "forward"): {**setting, "num_warps": 8}}
        assert launch.settings("layer_norm2d", "forward")["num_warps"] == 8
    assert recorder.found == {("layer_norm2d", "forward"): setting}
    assert launch.settings("layer_norm2d", "forward") == setting


def test_neighbours_change_one_number_and_nothing_else():
    setting = {"BLOCK_M": 16, "PRECISION": "tf32", "num_warps": 4, "num_stages": 1}
    found = gpu_tuning.alternatives(setting)
    changed = [{key: x for key, x in one.items() if x != setting[key]} for one in found]
    assert changed == [{"BLOCK_M": 32}, {"num_warps": 8}, {"num_warps": 2}, {"num_stages": 2}]


def test_the_proposal_takes_the_first_timing_of_a_key_and_then_what_is_faster(tmp_path, monkeypatch):
    def row(**settings):
        return Row("tune", "norm", details={"settings": [{"op": "layer_norm2d", "key": "forward", **settings}]})

    slow = row(setting={"num_warps": 4}, ms=2.0)
    rows = [slow, row(setting={"num_warps": 4}, ms=9.0), row(setting={"num_warps": 8}, ms=1.0, gain=0.5)]
    rows.append(row(setting={"num_warps": 2}, ms=1.5, gain=0.8))
    found = gpu_tuning.proposal(rows, gpu="NVIDIA H200", triton="3.6.0")
    best = found["settings"]["layer_norm2d"]["forward"]
    assert (best["num_warps"], best["ms"], best["triton"]) == (8, 1.0, "3.6.0")
    assert gpu_tuning.proposal(rows[:2], gpu="", triton="")["settings"]["layer_norm2d"]["forward"]["ms"] == 2.0
    # the file is one that the kernels can read
    gpu_rows.write_settings(found, tmp_path / "nvidia_h200.json")
    monkeypatch.setattr(launch, "CONFIGS", tmp_path)
    assert launch.configuration.__wrapped__("nvidia_h200")["layer_norm2d"]["forward"]["num_warps"] == 8


def test_a_kernel_is_known_by_the_first_part_of_its_key():
    times = {"_forward": 0.5, "backward_q": 0.25}
    assert gpu_tuning.time_of("forward/bf16", times) == 0.5
    assert gpu_tuning.time_of("backward_q/tf32/64", times) == 0.25
    assert gpu_tuning.time_of("gather", times) is None


def test_every_setting_names_a_kernel_of_its_operator():
    for op, settings in launch.configuration("default").items():
        source = "".join(path.read_text() for path in (gpu_ops.KERNELS / op).glob("fused*.py"))
        for key in settings:
            kernels = [name for name in re.findall(r"^def (\w+)\(", source, re.M) if gpu_tuning.time_of(key, {name: 1})]
            assert kernels, f"{op}: {key}"
