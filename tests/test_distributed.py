"""Several processes train and test as one does, speak with one voice, and end together."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest
import torch
import torch.distributed as dist
import yaml

import data  # noqa: F401  the data sets register themselves
from models import MODELS, distributed, launch
from options import load
from options.errors import OptionsError

ROOT = Path(__file__).resolve().parent.parent
OWN = """
import os
import pathlib
import torch
from archs import ARCHS


@ARCHS.register()
class Own(torch.nn.Module):
    def __init__(self, *, p: float = 0.0, norm: bool = False, idle: bool = False) -> None:
        super().__init__()
        self.scale = 2
        self.conv, self.shuffle = torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.PixelShuffle(2)
        self.norm = torch.nn.BatchNorm2d(12) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(p)
        if idle:
            self.idle = torch.nn.Linear(2, 2)
        if "PIDS" in os.environ:
            pathlib.Path(os.environ["PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))

    def forward(self, x):
        return self.shuffle(self.drop(self.norm(self.conv(x))))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with pictures, five to train on and five to judge on, and an own network."""
    folder = tmp_path_factory.mktemp("site")
    picture = cv2.imread(str(ROOT / "datasets/quickstart/train/picos.jpg"))
    for i in range(5):
        for name, row in (("train", 20), ("val", 240)):
            (folder / name).mkdir(exist_ok=True)
            cv2.imwrite(str(folder / name / f"{i}.png"), picture[row : row + 20, 24 * i : 24 * i + 24])
    (folder / "alone").mkdir()
    cv2.imwrite(str(folder / "alone/one.png"), picture[:10, :12])
    (folder / "own.py").write_text(OWN)
    return folder


def options(site, name, **train):
    sets = {"type": "DownsampleImageDataset"}
    return {
        "name": name,
        "scale": 2,
        "num_gpu": 0,
        "import_paths": [str(site / "own.py")],
        "network_g": {"type": "Own"},
        "datasets": {
            "train": sets
            | {"name": "t", "dataroot_gt": str(site / "train"), "gt_size": 16, "io_backend": {"type": "disk"}}
            | {"batch_size_per_gpu": 2, "num_worker_per_gpu": 0},
            "val": sets | {"name": "v", "dataroot_gt": str(site / "val")},
        },
        "path": {"root": str(site / "out")},
        "train": {"total_iter": 4, "ema_decay": 0.5, "pixel_opt": {"type": "MSELoss"}}
        | {"optim_g": {"type": "SGD", "lr": 0.1}}
        | train,
        "val": {"val_freq": 4, "save_img": True, "metrics": {"psnr": {"type": "calculate_psnr"}}},
        "logger": {"print_freq": 2, "save_checkpoint_freq": 4, "use_tb_logger": False},
        "dist_params": {"backend": "nccl", "timeout": 60},
    }


def start(arguments, **environment):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def torchrun(script, raw, *arguments, **environment):
    """The launcher of two processes, started."""
    file = Path(raw["path"]["root"]).parent / f"{raw['name']}.yml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return start([*launcher, script, "-opt", str(file), *arguments], **environment)


def pair(script, raw, *arguments, own=((), ()), **environment):
    """Two processes without a launcher, started; the quicker way. ``own``: arguments of each."""
    file = Path(raw["path"]["root"]).parent / f"{raw['name']}.yml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = []
    for rank in range(2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(start([script, "-opt", str(file), *arguments, *own[rank]], **environment, **place, **ranks))
    return started


def ended(processes):
    """Exit codes, and what was printed."""
    printed = [process.communicate(timeout=100)[0] for process in processes]
    return [process.returncode for process in processes], printed


def wait_for(file, process):
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)


def alone(command, site, name, *arguments, **train):
    """The same run in one process, at the doubled batch."""
    raw = options(site, name, **train)
    raw["datasets"]["train"]["batch_size_per_gpu"] = 4
    code, printed = command("train.py", raw, *arguments)
    assert code == 0, printed
    return site / "out/experiments" / name


def rows(folder):
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


# train.py under torchrun


@pytest.fixture(scope="module")
def trained(site):
    """Folder and output of a run of two processes; its second set has one picture and no ground truth."""
    raw = options(site, "two", accum_iter=2)
    folder = str(site / "alone")
    raw["datasets"]["val_1"] = {"name": "w", "type": "SingleImageDataset", "dataroot_lq": folder}
    codes, printed = ended([torchrun("train.py", raw)])
    assert codes == [0], printed
    return site / "out/experiments/two", printed[0]


def test_two_processes_train_to_the_weights_of_one_at_the_doubled_batch(trained, site, command, own_registry):
    two = torch.load(trained[0] / "models/net_g_4.pth", weights_only=True)
    folder = alone(command, site, "one", accum_iter=2)
    one = torch.load(folder / "models/net_g_4.pth", weights_only=True)
    assert set(two["params"]) == {"conv.weight", "conv.bias"}
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
    # what is logged is the mean over the processes, and so the same too
    losses = [[row["l_pix"] for row in rows(where) if row["kind"] == "train"] for where in (folder, trained[0])]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_two_processes_judge_to_the_mean_of_one(trained, site, command, own_registry):
    weights = f"path.pretrain_network_g={trained[0] / 'models/net_g_4.pth'}"
    code, printed = command("test.py", options(site, "judged"), weights)
    assert code == 0, printed
    (mean,) = [row["scores"]["psnr"] for row in rows(trained[0]) if row["kind"] == "val"]
    with (site / "out/results/judged/metrics.csv").open() as file:
        pictures = [float(cells["value"]) for cells in csv.DictReader(file) if cells["picture"] in tuple("01234")]
    assert len(pictures) == 5
    assert mean == pytest.approx(sum(pictures) / 5, abs=1e-6)
    assert re.findall(r"# psnr: ([\d.]+)", trained[1]) == [f"{mean:.4f}"]


def test_every_picture_is_written_by_the_process_that_restored_it(trained):
    folder = trained[0] / "visualization"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.png")}
    assert found == {f"v/{i}/{i}_4.png" for i in range(5)} | {"w/one/one_4.png"}


def test_scores_are_told_in_the_order_of_the_set(trained):
    assert re.findall(r"^│ v +│ (\d)", trained[1], re.MULTILINE) == list("01234")


def test_the_run_speaks_with_one_voice(trained):
    lines = [re.sub(r"^\S+ \S+ ", "", line) for line in trained[1].splitlines() if "INFO" in line or "WARNING" in line]
    assert len(lines) == len(set(lines))
    assert sum("iter:       2," in line for line in lines) == 1
    assert "rank 1" not in trained[1]
    assert trained[1].count("gloo takes its place") == 1
    assert "2 samples x 2 accumulated x 2 processes = 8" in trained[1]
    (log,) = trained[0].glob("*.log")
    assert log.read_text().count("iter:       4,") == 1


def test_the_run_has_one_folder(trained):
    assert [path.name for path in trained[0].parent.glob("two*")] == ["two"]
    assert "# command: torchrun --nproc_per_node=2 train.py -opt" in (trained[0] / "two.yml").read_text()


def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(site):
    raw = options(site, "unbroken", optim_g={"type": "AdamW", "lr": 1e-3})
    raw["network_g"] |= {"p": 0.3, "norm": True}
    raw["logger"]["save_checkpoint_freq"] = 2
    codes, printed = ended(pair("train.py", raw))
    assert codes == [0, 0], printed
    states = site / "out/experiments/unbroken/training_states"
    codes, printed = ended(pair("train.py", raw | {"name": "resumed"}, f"path.resume_state={states / '2.state'}"))
    assert codes == [0, 0], printed
    assert "not equal to the bit" not in printed[0]
    resumed = site / "out/experiments/resumed/training_states/4.state"
    assert resumed.read_bytes() == (states / "4.state").read_bytes()
    # the processes draw different numbers, or dropout would be the same everywhere
    state = torch.load(resumed, weights_only=True)
    assert not torch.equal(state["random"]["torch"], state["others"][0]["random"]["torch"])


def test_another_number_of_processes_goes_on_from_the_next_sample_and_says_so(trained, site, command, own_registry):
    state = trained[0] / "training_states/4.state"
    raw = options(site, "fewer", accum_iter=2, total_iter=5)
    code, printed = command("train.py", raw, f"path.resume_state={state}")
    assert code == 0, printed
    assert "by a run of 2 processes, and this one has 1" in printed
    saved = torch.load(site / "out/experiments/fewer/training_states/5.state", weights_only=True)
    assert saved["samples"] == 4 * 8 + 4


# how runs end


@pytest.fixture(scope="module")
def killed(site, tmp_path_factory):
    """Folder, exit code and output of a run whose second process was killed."""
    raw = options(site, "killed", total_iter=10**6, optim_g={"type": "AdamW", "lr": 1e-3})
    raw["val"]["val_freq"] = 10**6
    raw["logger"] |= {"print_freq": 2, "save_checkpoint_freq": 10**6}
    pids = tmp_path_factory.mktemp("pids")
    launcher = torchrun("train.py", raw, "logger.save_checkpoint_freq=1", PIDS=str(pids))
    folder = site / "out/experiments/killed"
    wait_for(folder / "metrics.jsonl", launcher)
    os.kill(int((pids / "1").read_text()), signal.SIGKILL)
    printed, _ = launcher.communicate(timeout=60)
    return folder, launcher.returncode, printed


def test_a_killed_process_ends_the_run_with_a_message(killed):
    folder, code, printed = killed
    assert code != 0
    assert "another process of this run ended (rank 1)" in printed
    (log,) = folder.glob("*.log")
    assert "another process of this run ended (rank 1)" in log.read_text()
    assert "Traceback" not in printed.split("torch/distributed/elastic")[0]


def test_what_was_trained_until_then_is_saved(killed):
    states = sorted(int(path.stem) for path in (killed[0] / "training_states").glob("*.state"))
    state = torch.load(killed[0] / f"training_states/{states[-1]}.state", weights_only=True)
    assert state["samples"] == states[-1] * 4


def test_the_first_gradient_of_two_processes_is_that_of_one(killed, site, command, own_registry):
    folder = alone(command, site, "adam", total_iter=1, optim_g={"type": "AdamW", "lr": 1e-3})
    moments = [
        torch.load(where / "training_states/1.state", weights_only=True)["model"]["optimizer"]["state"]
        for where in (folder, killed[0])
    ]
    for one, two in zip(*(own.values() for own in moments), strict=True):
        # a tenth of the gradient
        torch.testing.assert_close(two["exp_avg"] * 10, one["exp_avg"] * 10, rtol=0, atol=1e-6)


def test_a_broken_picture_of_one_process_ends_all_of_them_with_the_message(site, tmp_path):
    raw = options(site, "broken")
    for path in (site / "val").iterdir():
        content = bytearray(path.read_bytes())
        if path.stem == "3":
            content[60:-40] = bytes(255 - byte for byte in content[60:-40])
        (tmp_path / path.name).write_bytes(content)
    raw["datasets"]["val"]["dataroot_gt"] = str(tmp_path)
    codes, printed = ended(pair("test.py", raw))
    assert codes == [3, 3], printed
    assert "".join(printed).count(f"error: rank 1: cannot read {tmp_path / '3.png'}") == 1
    assert "Traceback" not in "".join(printed)
    (log,) = (site / "out/results/broken").glob("*.log")
    assert "3.png" in log.read_text()


def test_a_signal_to_one_process_stops_all_of_them_at_the_same_step(site):
    raw = options(site, "stopped", total_iter=10**6)
    raw["val"]["val_freq"] = raw["logger"]["save_checkpoint_freq"] = 10**6
    processes = pair("train.py", raw)
    folder = site / "out/experiments/stopped"
    wait_for(folder / "metrics.jsonl", processes[0])
    processes[1].send_signal(signal.SIGTERM)
    codes, printed = ended(processes)
    assert codes == [143, 143], printed
    (path,) = (folder / "training_states").glob("*.state")
    assert len(torch.load(path, weights_only=True)["others"]) == 1
    assert "interrupted; to continue: torchrun --nproc_per_node=2 " in printed[0]
    assert printed[1] == ""


def test_processes_that_were_given_different_options_end_in_words(site):
    raw = options(site, "unequal")
    codes, printed = ended(pair("train.py", raw, own=(["train.total_iter=4"], ["train.total_iter=6"])))
    assert codes == [2, 2], printed
    assert "given different options (rank 1 and rank 0 differ)" in printed[0]
    assert not (site / "out/experiments/unequal").exists()


def test_idle_parameters_are_named_with_the_option_that_allows_them(site, own_registry):
    raw = options(site, "idle")
    raw["network_g"]["idle"] = True
    (site / "idle.yml").write_text(yaml.safe_dump(raw))
    checked = load.load(site / "idle.yml")
    model = MODELS.build({"type": checked.model_type}, options=checked, device=torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.distribute(distributed.Processes(launch.Place(world=2)))
        batch = {"lq": torch.rand(1, 3, 8, 8), "gt": torch.rand(1, 3, 16, 16), "name": ["x"]}
        with pytest.raises(OptionsError, match=r"idle\.weight, idle\.bias; .*find_unused_parameters: true"):
            model.train_step([batch])
    finally:
        dist.destroy_process_group()


# the place of a process

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODELIST": "gpu[07-10],other"}


@pytest.mark.parametrize("launcher", ["none", "pytorch"])
def test_torchrun_is_recognised_with_and_without_its_launcher(launcher):
    assert launch.find(launcher, TORCHRUN) == launch.Place(rank=5, world=8, local_rank=1)


def test_a_process_that_nobody_launched_is_alone():
    assert launch.find("none", {}) == launch.Place()


@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_both_spellings_of_the_local_rank_count_where_the_environment_has_none(spelling):
    args = load.parse(["-opt", "x.yml", f"{spelling}=3"], program="train.py")
    environment = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_RANK"}
    assert launch.find("pytorch", environment, local_rank=args.local_rank).local_rank == 3


def test_slurm_gives_rank_world_and_the_first_host():
    place = launch.find("slurm", SLURM)
    assert (place.rank, place.world, place.local_rank) == (5, 8, 1)
    assert dict(place.environment)["MASTER_ADDR"] == "gpu07"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n1", "127.0.0.1"), ("n1,n2", "n1"), ("n[1,3-5]", "n1"), ("n[003-012]-ib", "n003-ib"), ("a-b[2]", "a-b2")],
)
def test_the_first_host_is_read_from_slurm_s_list(hosts, first):
    place = launch.find("slurm", SLURM | {"SLURM_NODELIST": hosts})
    assert dict(place.environment)["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("launcher", "environment", "message"),
    [
        ("pytorch", {}, r"RANK, WORLD_SIZE, .*torchrun --nproc_per_node=2 train.py -opt x.yml"),
        ("none", {"WORLD_SIZE": "2"}, r"RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ("pytorch", TORCHRUN | {"RANK": "eight"}, "'eight'"),
        ("pytorch", TORCHRUN | {"RANK": "8"}, "RANK=8, WORLD_SIZE=8"),
        ("slurm", {}, "SLURM_PROCID, SLURM_NTASKS is not set.*srun"),
    ],
)
def test_an_environment_that_says_no_place_is_refused(launcher, environment, message):
    with pytest.raises(OptionsError, match=message):
        launch.find(launcher, environment, script="train.py -opt x.yml")
