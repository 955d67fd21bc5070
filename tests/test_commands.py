"""train.py and test.py as a user runs them: what they write, what they say, and their exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest
import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def rows(folder, kind):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def test_train_then_test(small, command, tmp_path):
    code, printed = command("train.py", small)
    assert code == 0, printed
    folder = tmp_path / "out/experiments/small"
    assert {"small.yml", "metrics.jsonl", "curve.png"} <= set(files(folder))
    (log,) = folder.glob("train_small_*.log")
    assert "[small..][epoch:" in log.read_text()
    assert "iter:       4, lr:(5.000e-04,)]" in log.read_text()

    small["path"]["pretrain_network_g"] = str(folder / "models/net_g_latest.pth")
    small["val"] |= {"save_img": True, "suffix": "x2", "baseline": "bicubic"}
    del small["train"], small["datasets"]["train"]
    code, printed = command("test.py", small)
    assert code == 0, printed
    results = tmp_path / "out/results/small"
    assert {"metrics.csv", "visualization/held-out/corner_x2.png"} <= set(files(results))
    # the same weights (the average), the same protocol, the same number as the last validation of the training
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    tested = (results / "metrics.csv").read_text().splitlines()[1].split(",")
    assert tested[:3] == ["held-out", "corner", "psnr"]
    assert float(tested[-3]) == pytest.approx(last["scores"]["psnr"], abs=1e-9)
    assert "params_ema" in printed
    assert "Y, crop 2" in " ".join(printed.split())


def test_the_best_weights_can_be_tested_too(small, command, tmp_path):
    assert command("train.py", small)[0] == 0
    # worse from here on, so that the best weights are not the latest
    code, printed = command("train.py", small, "--auto_resume", "train.total_iter=6", "train.optim_g.lr=0.5")
    assert code == 0, printed
    folder = tmp_path / "out/experiments/small"
    scores = [row["scores"]["psnr"] for row in rows(folder, "val")]
    assert scores.index(max(scores)) < len(scores) - 1
    small["path"]["pretrain_network_g"] = str(folder / "models/net_g_best.safetensors")
    code, printed = command("test.py", small)
    assert code == 0, printed
    tested = (tmp_path / "out/results/small/metrics.csv").read_text().splitlines()[1].split(",")
    assert float(tested[-3]) == pytest.approx(max(scores), abs=1e-9)


def test_a_dry_run_tells_the_plan_and_creates_nothing(small, command, tmp_path):
    code, printed = command("train.py", small, "--dry_run")
    assert code == 0, printed
    for fact in ("training set", "effective batch 2", "SST, ", " parameters", "cpu", "window_attention", "l_pix"):
        assert fact in printed
    assert not (tmp_path / "out").exists()


def test_typos_end_with_code_2_and_create_nothing(small, command, tmp_path):
    small["train"]["tota_iter"] = small["train"].pop("total_iter")
    small["network_g"]["dimm"] = small["network_g"].pop("dim")
    code, printed = command("train.py", small)
    assert code == 2
    assert "did you mean total_iter?" in printed
    assert "did you mean dim?" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_a_constructor_s_refusal_ends_with_code_2(small, command, tmp_path):
    code, printed = command("train.py", small, "network_g.num_heads=3")
    assert code == 2
    assert "the override network_g.num_heads=3: network_g.num_heads: num_heads must divide dim=16" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_weights_of_another_network_end_with_code_2_in_one_screen(small, command, tmp_path):
    assert command("train.py", small)[0] == 0
    weights = tmp_path / "out/experiments/small/models/net_g_latest.pth"
    code, printed = command("test.py", small, "network_g.dim=24", f"path.pretrain_network_g={weights}")
    assert code == 2
    assert "of another shape" in printed
    assert len(printed.splitlines()) < 40
    assert "Traceback" not in printed


def _truncate(folder):
    path = next(Path(folder).glob("*.png"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path.name


def _empty(folder):
    for path in Path(folder).iterdir():
        path.unlink()
    return str(folder)


def _too_small(folder):
    path = next(Path(folder).glob("*.png"))
    cv2.imwrite(str(path), cv2.imread(str(path))[:20, :20])
    return path.name


@pytest.mark.parametrize("spoil", [_truncate, _empty, _too_small])
def test_a_wrong_picture_ends_with_code_3_naming_it(small, command, tmp_path, spoil):
    named = spoil(small["datasets"]["train"]["dataroot_gt"])
    code, printed = command("train.py", small)
    assert code == 3, printed
    assert named in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["unpaired", "mismatched"])
def test_a_wrong_pair_ends_with_code_3_naming_it(small, command, tmp_path, kind):
    gt, lq = Path(small["datasets"]["train"]["dataroot_gt"]), tmp_path / "lq"
    lq.mkdir()
    picture = cv2.imread(str(gt / "corner.png"))
    cv2.imwrite(str(lq / "corner.png"), picture[::2, ::2] if kind == "unpaired" else picture[:40:2, ::2])
    if kind == "unpaired":
        cv2.imwrite(str(lq / "corner2.png"), picture[::2, ::2])
    small["datasets"]["train"] |= {"type": "PairedImageDataset", "dataroot_lq": str(lq)}
    code, printed = command("train.py", small)
    assert code == 3, printed
    assert ("corner2" if kind == "unpaired" else "corner.png") in printed
    assert "Traceback" not in printed


DROPPING = """
import torch
from archs import ARCHS


@ARCHS.register()
class Dropping(torch.nn.Module):
    def __init__(self, *, p: float = 0.2) -> None:
        super().__init__()
        self.scale = 2
        self.conv, self.drop = torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.Dropout(p)
        self.shuffle = torch.nn.PixelShuffle(2)

    def forward(self, x):
        return self.shuffle(self.drop(self.conv(x)))
"""


def test_a_run_continues_where_it_was_stopped_to_the_last_bit(small, own_registry, command, tmp_path):
    (tmp_path / "own.py").write_text(DROPPING)
    small |= {"import_paths": [str(tmp_path / "own.py")], "network_g": {"type": "Dropping"}}
    small["train"] |= {"total_iter": 6, "accum_iter": 2}
    small["datasets"]["train"]["num_worker_per_gpu"] = 2
    assert command("train.py", {**small, "name": "whole"})[0] == 0
    assert command("train.py", {**small, "name": "halves"}, "train.total_iter=4")[0] == 0
    code, printed = command("train.py", {**small, "name": "halves"}, "--auto_resume")
    assert code == 0, printed
    assert "continuing from" in printed
    whole, halves = (tmp_path / "out/experiments" / name for name in ("whole", "halves"))
    for kind, timed in (("train", {"time", "data"}), ("val", set())):
        told = [[{k: v for k, v in row.items() if k not in timed} for row in rows(f, kind)] for f in (whole, halves)]
        assert told[0] == told[1]
    a, b = (torch.load(folder / "models/net_g_6.pth", weights_only=True) for folder in (whole, halves))
    assert set(a) == {"params", "params_ema"}
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    a, b = (load_file(folder / "models/net_g_best.safetensors") for folder in (whole, halves))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    a, b = ((folder / "training_states/6.state").read_bytes() for folder in (whole, halves))
    assert a == b


def test_an_earlier_run_of_the_same_name_is_kept(small, command, tmp_path):
    assert command("train.py", small)[0] == 0
    before = (tmp_path / "out/experiments/small/metrics.jsonl").read_text()
    code, printed = command("train.py", small)
    assert code == 0
    (archived,) = (tmp_path / "out/experiments").glob("small_archived_*")
    assert (archived / "metrics.jsonl").read_text() == before
    assert str(archived) in printed.replace("\n", "")


def test_two_runs_in_one_process_do_not_repeat_lines(small, command):
    command("train.py", small)
    _, printed = command("train.py", {**small, "name": "second"})
    assert printed.count("iter:       4,") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_whole_group_saves_a_state_and_ends_with_its_code(small, tmp_path, number, code):
    small["train"] |= {"total_iter": 100000, "scheduler": None}
    small["val"]["val_freq"] = 100000
    small["datasets"]["train"]["num_worker_per_gpu"] = 1
    small["logger"]["save_checkpoint_freq"] = 100000
    file = tmp_path / "small.yml"
    file.write_text(yaml.safe_dump(small))
    process = subprocess.Popen(
        [sys.executable, "train.py", "-opt", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # the tests themselves may have been started to ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "out/experiments/small/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == code, printed
    assert "Traceback" not in printed
    (state,) = (tmp_path / "out/experiments/small/training_states").glob("*.state")
    done = [json.loads(line)["iter"] for line in metrics.read_text().splitlines()]
    assert int(state.stem) == done[-1]
