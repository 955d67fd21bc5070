"""What all tests share: one table of tolerances per dtype, one thread, no backend chosen from outside."""

import copy
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent

# one thread: results do not depend on the machine, and two tests beside each other do not wait for one another
torch.set_num_threads(1)

# nohup and the background of a shell ignore these for whatever they start; tests of signals send them
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

TOLERANCES = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 1e-2, "atol": 5e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 2e-2},
}


@pytest.fixture
def tolerance():
    """``tolerance(dtype)``: the ``rtol`` and ``atol`` that two results of this dtype may differ by."""
    return lambda dtype: dict(TOLERANCES[dtype])


@pytest.fixture(autouse=True)
def _no_backend_from_outside(monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("PELLUCID_KERNELS"):
            monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_imported_files_left():
    """Workers that are not forked import what the process has imported, and a test's files are gone after it."""
    yield
    for name in [name for name in sys.modules if name.startswith("pellucid_import_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _log_as_it_was():
    """A run sends the log elsewhere; afterwards it is pytest's again."""
    yield
    log = logging.getLogger("pellucid")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


# a small, right option file: x2 on the photographs of the quickstart, a few steps
RIGHT = {
    "name": "small",
    "model_type": "RestorationModel",
    "scale": 2,
    "num_gpu": 0,
    "network_g": {
        "type": "SST",
        "dim": 16,
        "window_sizes": [4, 8],
        "num_heads": 2,
        "ranks": [4, 4],
        "n_blocks": 1,
        "upscaling_factor": 2,
        "upsampler_type": "pixelshuffle_direct",
    },
    "datasets": {
        "train": {
            "name": "photos",
            "type": "DownsampleImageDataset",
            "dataroot_gt": "datasets/quickstart/train",
            "io_backend": {"type": "disk"},
            "gt_size": 32,
            "use_hflip": True,
            "use_rot": True,
            "batch_size_per_gpu": 2,
            "num_worker_per_gpu": 0,
        },
        "val": {"name": "held-out", "type": "DownsampleImageDataset", "dataroot_gt": "datasets/quickstart/val"},
    },
    "path": {"strict_load_g": True},
    "train": {
        "total_iter": 4,
        "ema_decay": 0.9,
        "optim_g": {"type": "AdamW", "lr": 1e-3, "betas": [0.9, 0.9], "weight_decay": 0},
        "scheduler": {"type": "MultiStepLR", "milestones": [2], "gamma": 0.5},
        "pixel_opt": {"type": "L1Loss", "loss_weight": 1.0, "reduction": "mean"},
    },
    "val": {
        "val_freq": 2,
        "metrics": {"psnr": {"type": "calculate_psnr", "crop_border": 2, "test_y_channel": True}},
    },
    "logger": {"print_freq": 1, "save_checkpoint_freq": 2},
}


@pytest.fixture
def right():
    """Options of a small run, to change or to spoil."""
    return copy.deepcopy(RIGHT)


@pytest.fixture
def small(right, tmp_path):
    """The small run on one corner of a photograph; results go to a folder of their own."""
    for name, source in (("train", "train/picos.jpg"), ("val", "val/coffee.png")):
        (tmp_path / name).mkdir()
        picture = cv2.imread(str(ROOT / "datasets/quickstart" / source))[80:176, 60:200]
        cv2.imwrite(str(tmp_path / name / "corner.png"), picture)
        right["datasets"][name]["dataroot_gt"] = str(tmp_path / name)
    right["path"]["root"] = str(tmp_path / "out")
    right["logger"]["use_tb_logger"] = False
    return right


class Tiny(torch.nn.Module):
    """The quickest network for x2: one convolution and a shuffle."""

    scale, in_channels = 2, 3

    def __init__(self, *, enlarge: int = 2) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3 * enlarge**2, 3, padding=1)
        self.shuffle = torch.nn.PixelShuffle(enlarge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shuffle(self.conv(x))


@pytest.fixture
def own_registry(monkeypatch):
    """The registry of networks; what a test adds to it is gone afterwards."""
    import archs

    monkeypatch.setattr(archs.ARCHS, "_entries", dict(archs.ARCHS._entries))
    return archs.ARCHS


@pytest.fixture
def tiny(small, own_registry):
    """The small run with the quickest network."""
    own_registry.register(Tiny)
    small["network_g"] = {"type": "Tiny"}
    return small


@pytest.fixture
def command(tmp_path, capfd):
    """``command("train.py", options, "a.b=1")``: run in this process; returns exit code and what was printed."""
    from models import runtime

    def call(script, options, *arguments):
        file = tmp_path / f"{options.get('name', 'run')}.yml"
        file.write_text(yaml.safe_dump(options, sort_keys=False))
        main = runpy.run_path(str(ROOT / script), run_name="command")["main"]
        capfd.readouterr()
        code = runtime.run(main, ["-opt", str(file), *arguments])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


# a process that has imported everything and forks: each run is a process of its own, there at once
NURSERY = """
import json, os, signal, sys
import torch, torch._dynamo
import train
from models import report, runtime

torch.set_num_threads(1)
# the picture of the curve has its own tests, and takes longer than a short run
report.learning_curve = lambda *paths: None
# what the first step would load
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).zero_grad()
signal.signal(signal.SIGINT, signal.default_int_handler)
running = set()
for line in sys.stdin:
    order = json.loads(line)
    if "argv" not in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["pid"], 0)[1]), flush=True)
        running.remove(order["pid"])
        continue
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        for number in order["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        sys.argv = ["train.py", *order["argv"]]
        sys.exit(runtime.run(train.main, order["argv"]))
    running.add(child)
    print(child, flush=True)
# the tests are over, or were ended
for child in running:
    os.kill(child, signal.SIGKILL)
"""


class Run:
    """One process that trains."""

    def __init__(self, nursery, pid, output):
        self._nursery, self.pid, self._output = nursery, pid, output
        self._code = None

    @property
    def printed(self):
        return self._output.read_text(errors="replace")

    def wait(self):
        """The exit code; minus the signal that killed the process."""
        if self._code is None:
            self._code = int(self._nursery.ask({"pid": self.pid}))
        return self._code

    def kill(self, number=signal.SIGKILL):
        if self._code is None:
            os.kill(self.pid, number)


class Nursery:
    """``start("-opt", file, ...)`` runs train.py in a new process."""

    def __init__(self, folder):
        self._folder, self._count, self._runs = folder, 0, []
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def ask(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def start(self, *argv, cwd=ROOT, env=None, ignored=()):
        self._count += 1
        output = self._folder / f"{self._count}.txt"
        output.touch()
        order = {"argv": list(map(str, argv)), "output": str(output), "cwd": str(cwd), "env": env or {}}
        self._runs.append(Run(self, int(self.ask({**order, "ignored": list(ignored)})), output))
        return self._runs[-1]

    def end_all(self):
        """End what a failed test left running."""
        for run in self._runs:
            run.kill()
            run.wait()
        self._runs = []

    def close(self):
        self.end_all()
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory):
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    yield made
    made.close()


@pytest.fixture
def nursery(_nursery):
    """Starts real processes of train.py quickly."""
    yield _nursery
    _nursery.end_all()


@pytest.fixture
def photos(right, tmp_path):
    """A run of a tiny SST on five crops of photographs, judged on a sixth."""
    crops = [("train", "train/picos.jpg", 5), ("val", "val/coffee.png", 1)]
    for name, source, count in crops:
        (tmp_path / name).mkdir()
        picture = cv2.imread(str(ROOT / "datasets/quickstart" / source))
        for i in range(count):
            cv2.imwrite(str(tmp_path / name / f"crop{i}.png"), picture[40 + 20 * i :][:32, 60 + 30 * i :][:, :40])
        right["datasets"][name]["dataroot_gt"] = str(tmp_path / name)
    right["datasets"]["train"] |= {"gt_size": 16, "num_worker_per_gpu": 2}
    right["datasets"]["val"]["num_worker_per_gpu"] = 0
    right["network_g"] |= {"dim": 8, "ranks": [2, 2], "window_sizes": [2, 4]}
    right["train"] |= {"total_iter": 20, "scheduler": None}
    right["val"]["val_freq"] = 5
    right["logger"] |= {"use_tb_logger": False, "print_freq": 4, "save_checkpoint_freq": 5}
    right["path"]["root"] = str(tmp_path / "out")
    return right


@pytest.fixture
def option_file(tmp_path):
    """``option_file(options)``: written to a file of its own."""

    def write(options, folder=tmp_path):
        file = folder / f"{options['name']}.yml"
        file.write_text(yaml.safe_dump(options, sort_keys=False))
        return file

    return write
