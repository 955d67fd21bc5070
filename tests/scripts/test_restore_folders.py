"""python -m scripts.restore over many pictures: which ones, where to, and going on after an interruption."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from archs import ARCHS
from data.io import read_image, write_image, write_whole
from models import runtime
from models.checkpoint import save_safetensors
from scripts import restore
from scripts.restore_record import FILE, Record, stamp

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"type": "EDSR", "num_in_ch": 3, "num_out_ch": 3, "num_feat": 4, "num_block": 1, "upscale": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_safetensors(file, ARCHS.build(SPEC).state_dict(), {"network_g": SPEC, "weights": "params_ema"})
    return str(file)


@pytest.fixture
def tool(weights, capfd, monkeypatch, tmp_path):
    """tool(INPUT ..., options ...) in an empty folder with the tiny network; exit code and what was printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capfd.readouterr()
        code = runtime.run(restore.main, [*map(str, arguments), "--weights", weights])
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    call.weights = weights
    return call


@pytest.fixture(scope="module")
def photo():
    return read_image(ROOT / "datasets/quickstart/val/dogs.png")[100:124, 150:181]


@pytest.fixture
def album(tmp_path, photo):
    """album("a.png", "sub/b.jpg"): these pictures, all different, in the present folder."""

    def make(*names):
        for number, name in enumerate(names):
            write_image(tmp_path / name, photo[number:])

    return make


def results(folder):
    """Every file below a folder but the list of results."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if not path.endswith(FILE))


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.*g")}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["in"], ["in/restored/1.png", "in/restored/10.jpg"]),
        (["in", "--recursive"], ["in/restored/1.png", "in/restored/10.jpg", "in/restored/sub/1.png"]),
        (["in", "-o", "out", "--recursive"], ["out/1.png", "out/10.jpg", "out/sub/1.png"]),
        (["in/1.png", "in/sub/1.png"], ["in/restored/1.png", "in/sub/restored/1.png"]),
        (["in/*.png"], ["in/restored/1.png"]),
        (["in/**/*.png"], ["in/restored/1.png", "in/sub/restored/1.png"]),
        (["in/1.png", "in", "./in/1.png"], ["in/restored/1.png", "in/restored/10.jpg"]),
    ],
    ids=["folder", "recursive", "output", "files", "glob", "deep glob", "twice"],
)
def test_files_folders_and_patterns(tool, album, tmp_path, arguments, expected):
    album("in/1.png", "in/10.jpg", "in/sub/1.png", "in/.hidden.png", "in/.cache/a.png")
    code, printed = tool(*arguments, "--suffix", "")
    assert code == 0, printed
    new = set(results(tmp_path)) - {"in/1.png", "in/10.jpg", "in/sub/1.png", "in/.hidden.png", "in/.cache/a.png"}
    assert sorted(new) == expected


def test_a_name_that_looks_like_an_option(tool, album, tmp_path):
    album("-o.png", "b.png")
    code = runtime.run(restore.main, ["--weights", tool.weights, "--suffix", "", "--", "-o.png", "b.png"])
    assert code == 0
    assert results(tmp_path / "restored") == ["-o.png", "b.png"]


def test_a_pipe_is_not_waited_for(tool, tmp_path):
    os.mkfifo(tmp_path / "a.png")
    code, printed = tool("a.png")
    assert (code, "a.png: it is no file" in printed) == (3, True)


def test_other_files_are_counted(tool, album, tmp_path):
    album("in/a.png")
    for name in ("a.heic", "b.heic", "notes.txt"):
        (tmp_path / "in" / name).write_text("x")
    assert "3 other files were left aside (2 .heic, 1 .txt)" in tool("in")[1]


def test_folders_that_are_not_looked_into_are_named(tool, album, tmp_path):
    album("in/a.png", "in/sub/b.png", "in/out/c.png", "in/restored/d.png", "in/.hidden/e.png")
    printed = " ".join(tool("in", "-o", "in/out")[1].split())
    assert "not looked into: in/sub; --recursive" in printed
    assert "not looked into" not in tool("in", "--recursive", "--dry_run")[1]


def test_a_second_run_does_nothing_and_says_so(tool, album, tmp_path):
    album("in/a.png", "in/b.jpg")
    assert tool("in")[0] == 0
    before = times(tmp_path)
    code, printed = tool("in")
    assert (code, "2 done before" in printed) == (0, True)
    assert times(tmp_path) == before


def test_a_changed_picture_or_setting_is_not_taken_for_done(tool, album, tmp_path, photo):
    album("a.png", "b.png")
    assert tool("a.png", "b.png")[0] == 0
    write_image(tmp_path / "a.png", photo[:9])
    before = times(tmp_path)
    code, printed = tool("a.png", "b.png")
    assert code == 3
    assert "1 done before, 1 exists" in printed
    assert "a_x2.png was not made from this picture with these settings and is left as it is; --force" in printed
    code, printed = tool("b.png", "--self_ensemble")
    assert (code, "1 exists" in printed) == (3, True)
    assert times(tmp_path) == before
    assert tool("a.png", "--force")[0] == 0
    assert read_image(tmp_path / "restored/a_x2.png").shape == (18, 62, 3)


@pytest.mark.parametrize("output", ["restored", "other.png"])
def test_what_another_program_wrote_is_never_written_over(tool, album, tmp_path, output):
    album("a.png")
    target = tmp_path / (output if output.endswith(".png") else "restored/a_x2.png")
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(b"precious")
    code, printed = tool("a.png", "-o", output)
    assert (code, "--force writes over it" in printed) == (3, True)
    assert target.read_bytes() == b"precious"
    assert tool("a.png", "-o", output, "--force")[0] == 0
    assert read_image(target).shape == (48, 62, 3)


def test_a_broken_picture_does_not_stop_the_others(tool, album, tmp_path):
    album("in/a.png", "in/b.png", "in/c.png")
    data = (tmp_path / "in/b.png").read_bytes()
    (tmp_path / "in/b.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "in/d.jpg").write_bytes(b"")
    code, printed = tool("in")
    assert code == 3
    assert "2 restored, 2 failed" in printed
    last = "".join(printed.splitlines()[-3:])
    assert "b.png: the file is cut short" in last
    assert "d.jpg: the file is empty" in last
    assert results(tmp_path / "in/restored") == ["a_x2.png", "c_x2.png"]


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (["one/a.png", "two/a.png"], ["one", "two", "-o", "out"]),
        (["a.png", "a.jpg"], ["a.png", "a.jpg", "--format", "webp"]),
    ],
)
def test_two_pictures_for_one_file_are_refused_before_anything_is_done(tool, album, tmp_path, names, arguments):
    album("b.png", *names)
    code, printed = tool("b.png", *arguments)
    assert code == 2
    assert f"would be written by {names[0]} and {names[1]}" in printed or ", ".join(names) in printed
    assert results(tmp_path) == sorted(["b.png", *names])


def test_a_picture_is_never_written_over_by_its_own_result(tool, album, tmp_path):
    album("a.png")
    before = times(tmp_path)
    for output in (".", "a.png"):
        code, printed = tool("a.png", "-o", output, "--suffix", "", "--force")
        assert (code, "one of the pictures themselves" in printed) == (2, True)
    assert times(tmp_path) == before


def test_results_are_not_restored_again(tool, album, tmp_path):
    album("in/a.png", "in/sub/b.png")
    assert tool("in", "--recursive")[0] == 0
    expected = results(tmp_path)
    for arguments in (["in", "--recursive"], ["in/a.png", "in/restored"], ["in/*"], ["in/**/*.png"]):
        code, printed = tool(*arguments)
        assert code == 0, printed
    # "in/**/*.png" names a picture in a folder, whose own results go beside it
    assert results(tmp_path) == sorted([*expected, "in/sub/restored/b_x2.png"])
    assert tool("in", "-o", "in")[0] == 0
    code, printed = tool("in", "-o", "in")
    assert (code, "1 picture in the folder of results was left aside" in printed) == (0, True)
    assert not list(tmp_path.rglob("*_x2_x2*"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.png", "also/none"], 3, "no such file or folder: none.png, also/none"),
        (["no*.png"], 3, r"no such file or folder: no\*.png"),
        (["empty"], 3, "no pictures .* found in empty; --recursive"),
        (["empty", "x" * 300], 3, "no such file or folder: xxx"),
        (["a.png", "-o", "x" * 300], 3, "cannot read .*name too long"),
        (["alone", "-o", "c.png"], 2, "-o c.png names one file, but the folder alone was given"),
        (["a.png", "b.png", "-o", "c.png"], 2, "names one file, but 2 pictures"),
        (["a.png", "-o", "text.txt"], 2, "is a file and no picture"),
        (["a.png", "-o", "c.png", "--format", "jpg"], 2, "leave --format out"),
    ],
)
def test_inputs_and_outputs_that_cannot_be_meant(tool, album, tmp_path, arguments, code, words):
    album("a.png", "b.png", "alone/a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("x")
    found, printed = tool(*arguments)
    assert found == code
    assert re.search(words, printed), printed
    assert results(tmp_path) == ["a.png", "alone/a.png", "b.png", "text.txt"]


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tool, album, tmp_path):
    album("in/a.png", "in/b.png")
    assert tool("in/a.png")[0] == 0
    before = sorted(tmp_path.rglob("*"))
    code, printed = tool("in", "--dry_run")
    assert code == 0
    assert "1 to do, 1 done before; nothing was written" in printed
    assert "62 x 46" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_list(tool, album, tmp_path):
    album("a.png", "b.png", "c.png")
    assert tool("a.png", "b.png")[0] == 0
    file = tmp_path / "restored" / FILE
    file.write_bytes(file.read_bytes()[:-20])
    code, printed = tool("a.png", "b.png", "c.png", "--force")
    assert code == 0, printed
    assert [json.loads(line)["result"] for line in file.read_text().splitlines()[-1:]] == ["c_x2.png"]
    assert "3 done before" in tool("a.png", "b.png", "c.png")[1]


def test_a_folder_that_cannot_be_written_to_is_told(tool, album, tmp_path):
    album("a.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a_x2.png").mkdir()
    code, printed = tool("a.png", "-o", "out", "--force")
    assert (code, "is a folder" in printed) == (3, True)


def start(*arguments, cwd, path=ROOT):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "scripts.restore", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "killed"])
def test_an_interrupted_folder_is_gone_on_with(tool, tmp_path, weights, number, code):
    picture = read_image(ROOT / "datasets/quickstart/val/dogs.png")[:200, :300]
    for place in range(12):
        write_image(tmp_path / f"in/{place}.png", picture[place:])
    process = start("in", "--weights", weights, "--self_ensemble", cwd=tmp_path)
    folder = tmp_path / "in/restored"
    while len(list(folder.glob("*.png"))) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == code, printed
    before = times(folder)
    assert 2 <= len(before) < 12
    if number == signal.SIGINT:
        assert "Give the same command again to go on" in printed
        assert "not reached" in printed
        assert "Traceback" not in printed
    code, printed = tool("in", "--self_ensemble")
    assert code == 0, printed
    assert f"{12 - len(before)} restored, {len(before)} done before" in printed
    assert {path: when for path, when in times(folder).items() if path in before} == before
    assert all(read_image(path).shape[1] == 600 for path in folder.glob("*.png"))
    assert len(list(folder.glob("*.png"))) == 12


def test_two_processes_share_the_pictures_of_a_folder(tool, tmp_path, weights, album):
    album(*(f"in/{place}.png" for place in range(8)))
    process = start("in", "--weights", weights, cwd=tmp_path)
    folder = tmp_path / "in/restored"
    while not list(folder.glob("*.png")) and process.poll() is None:
        time.sleep(0.02)
    code, printed = tool("in")
    others = process.communicate(timeout=60)[0]
    assert (code, process.returncode) == (0, 0), printed + others
    restored = [re.findall(r"(\d+) restored", text) for text in (printed, others)]
    assert sum(int(number) for numbers in restored for number in numbers) == 8
    assert "8 done before" in tool("in")[1]


def test_what_appears_while_other_pictures_are_restored_is_not_written_over(tool, album, tmp_path):
    album(*(f"in/{place}.png" for place in range(6)))
    folder = tmp_path / "in/restored"

    def interfere():
        while not (folder / "0_x2.png").exists():
            time.sleep(0.005)
        (folder / "5_x2.png").write_bytes(b"precious")

    other = threading.Thread(target=interfere)
    other.start()
    code, printed = tool("in")
    other.join()
    assert (code, "5 restored, 1 exists" in printed) == (3, True), printed
    assert (folder / "5_x2.png").read_bytes() == b"precious"


def test_a_picture_that_is_changed_while_it_is_restored_is_not_taken_for_done(tool, album, tmp_path, photo):
    album("a.png")

    def interfere(*_):
        write_image(tmp_path / "a.png", photo[5:])

    with register_module_forward_hook(interfere):
        assert tool("a.png")[0] == 0
    code, printed = tool("a.png")
    assert (code, "1 exists" in printed) == (3, True), printed


def test_a_result_counts_only_once_it_stands_in_its_place(tmp_path):
    target = tmp_path / "a_x2.png"
    record = Record(tmp_path)

    def killed(found):
        record.add(target, stamp(found), source=[1, 1], settings="same")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(target, b"result", settle=killed)
    assert not Record(tmp_path).results()
    write_whole(
        target, b"result", settle=lambda found: record.add(target, stamp(found), source=[1, 1], settings="same")
    )
    assert Record(tmp_path).results() == {str(target)}


def test_help_does_not_load_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.restore", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--self_ensemble" in done.stdout


# an editable installation finds packages last of all, after folders of the same name
EDITABLE = """
import sys
from importlib.machinery import PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{root!r}]) if path is None else None

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
"""


def test_folders_called_data_and_models_where_the_command_is_given_do_no_harm(tmp_path, photo, weights):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(EDITABLE.format(root=str(ROOT)))
    for name in ("data", "models", "options", "archs"):
        (tmp_path / name).mkdir()
    write_image(tmp_path / "data/a.png", photo)
    process = start("data/a.png", "--weights", weights, cwd=tmp_path, path=tmp_path / "site")
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    assert results(tmp_path / "data") == ["a.png", "restored/a_x2.png"]
