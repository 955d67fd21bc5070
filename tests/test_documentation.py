"""What the README files say is so: commands run, examples load, links lead somewhere, tables name what there is.

``documented_commands.yml`` says of each command how it is run, or why it cannot be.
"""

import argparse
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from data.resize import imresize
from models import runtime
from options import load, registry, schema

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("options", "archs", "data", "models", "kernels", "scripts")
_WHERE = ("README.md", "CONTRIBUTING.md", *(f"{room}/README.md" for room in ROOMS), "kernels/*/README.md")
_WHERE += ("tests/golden/*/README.md", "archs/weights/*.md", "archs/weights/pictures/*.md")
PAGES = sorted({path for pattern in _WHERE for path in ROOT.glob(pattern)})
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMAND = re.compile(r"([A-Z_]+=\S+ )*(\.venv/bin/)?(python3?|torchrun|pip|srun) \S")
TABLE = yaml.safe_load((ROOT / "tests/documented_commands.yml").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _registries_as_they_were(monkeypatch):
    """What an example registers is gone after its test."""
    for entry in (registry.ARCHS, registry.DATASETS, registry.LOSSES, registry.METRICS):
        monkeypatch.setattr(entry, "_entries", dict(entry._entries))


def blocks(page, language):
    """What stands between the fences of a page, in this language."""
    return [textwrap.dedent(m[3]) for m in FENCE.finditer(page.read_text(encoding="utf-8")) if m[2] == language]


def one_line(command):
    return " ".join(command.replace("\\\n", " ").replace(".venv/bin/", "").split())


def commands_of(page):
    """Every single command of a page, one line each."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [part for line in lines if line.strip() and not line.startswith("#") for part in line.split(" && ")]
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    inline = [words for words in map(one_line, INLINE.findall(prose)) if COMMAND.match(words)]
    return [one_line(command) for command in found] + inline


def kind_of(entry):
    return next(kind for kind in ("run", "parse", "skip") if kind in entry)


ENTRIES = {one_line(entry[kind_of(entry)]): entry for entry in TABLE}
RUN = [command for command, entry in ENTRIES.items() if "run" in entry]
PARSED = [command for command, entry in ENTRIES.items() if "parse" in entry]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_in_the_table(page):
    unknown = [command for command in commands_of(page) if command not in ENTRIES]
    assert not unknown, "tests/documented_commands.yml does not say how to run these"


def test_the_table_has_no_command_that_no_page_has():
    written = {command for page in PAGES for command in commands_of(page)}
    assert set(ENTRIES) <= written
    for entry in TABLE:
        assert "run" in entry or entry["why"]


def test_the_test_command_is_what_ci_runs():
    last = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1]
    assert [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines() if line == last]


class Site:
    """A folder with what the pages speak of, where each command is run once."""

    def __init__(self, folder):
        self.folder, self._done = folder, {}

    def ran(self, command, capfd):
        """Exit code and what was printed."""
        if command not in self._done:
            entry = ENTRIES.get(command, {})
            for earlier in map(one_line, entry.get("after", ())):
                code, printed = self.ran(earlier, capfd)
                assert code == 0, f"{earlier}\n{printed}"
            words = shlex.split(command) + shlex.split(entry.get("add", ""))
            self._done[command] = self._apart(words) if entry.get("real") else self._here(words, capfd)
        return self._done[command]

    def _apart(self, words):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        program = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        command = [sys.executable, *program, *words[1:]]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def _here(self, words, capfd):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            capfd.readouterr()
            code = in_process(words, patch)
            printed = capfd.readouterr()
        return code, printed.out + printed.err


def in_process(words, patch):
    """The exit code of ``[NAME=value ..] python FILE.py ..`` or ``python -m MODULE ..``, run as the main program."""
    while re.match(r"[A-Z_]+=", words[0]):
        patch.setenv(*words.pop(0).split("=", 1))
    assert words[0] in ("python", "python3"), words
    module = words[1] == "-m"
    patch.setattr(sys, "argv", words[2:] if module else words[1:])
    try:
        with warnings.catch_warnings():
            # other tests have imported what is run as the main program here
            warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
            if module:
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def photograph(name, height, width):
    """A piece of one of the photographs that come with the repository, as cv2 keeps it."""
    image = cv2.imread(str(next((ROOT / "datasets/quickstart").glob(f"*/{name}.*"))))
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return np.ascontiguousarray(image[top : top + height, left : left + width])


def write_photographs(folder):
    """Small pieces of photographs, under the names that the pages and option files give them."""
    pictures = {"photo.jpg": ("dogs", 24, 32), "foggy.jpg": ("fig", 24, 32), "photos/bridge.png": ("bridge", 24, 32)}
    pictures |= {"in/wine.png": ("wine", 16, 16), "DIR/fig.png": ("fig", 48, 40)}
    for place in ("PHOTOS", "datasets/quickstart/train"):
        pictures |= {f"{place}/{name}.png": (name, 128, 128) for name in ("bird", "brushes")}
    pictures |= {f"datasets/quickstart/val/{name}.png": (name, 64, 64) for name in ("fig", "coffee")}
    pictures |= {"CLEAR/1.png": ("wine", 40, 40), "HAZY/1_1_0.9.png": ("wine", 40, 40)}
    for path, (name, height, width) in pictures.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / path), photograph(name, height, width))
    for place in ("GT", "LQ"):
        (folder / place).mkdir()
    gt = photograph("bridge", 484, 488)
    cv2.imwrite(str(folder / "GT/bridge.png"), gt)
    cv2.imwrite(str(folder / "LQ/bridgex2.png"), imresize(gt, 1 / 2))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for name in ("options", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "train.py").symlink_to(ROOT / "train.py")
    (folder / "archs").mkdir()
    (folder / "archs/weights").symlink_to(ROOT / "archs/weights")
    write_photographs(folder)
    for page in PAGES:
        for text in blocks(page, "python"):
            named = re.match(r"# (my_\w+/\w+\.py)\n", text)
            if named:
                (folder / named[1]).parent.mkdir(exist_ok=True)
                (folder / named[1]).write_text(text)
    (folder / "mine.yml").write_text(blocks(ROOT / "options/README.md", "yaml")[0])
    return Site(folder)


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_does_what_its_page_says(command, site, capfd):
    entry = ENTRIES[command]
    if "needs" in entry and not (ROOT / entry["needs"]).exists():
        pytest.skip(f"{entry['needs']} is not there")
    code, printed = site.ran(command, capfd)
    assert code == entry.get("code", 0), printed
    assert "Traceback" not in printed
    assert entry.get("says", "") in printed
    for path in entry.get("leaves", ()):
        assert (site.folder / path).stat().st_size > 0


class Parsed(Exception):
    """The arguments were read."""


def stopping(parse):
    def stop(*arguments, **named):
        parse(*arguments, **named)
        raise Parsed

    return stop


@pytest.mark.parametrize("command", PARSED, ids=str)
def test_a_command_that_cannot_run_here_has_arguments_that_its_parser_takes(command, monkeypatch):
    words = shlex.split(command)
    if words[0] == "torchrun":
        from torch.distributed.run import parse_args

        arguments = parse_args(words[1:])
        words = ["python", arguments.training_script, *arguments.training_script_args]
    words = words[1:] if words[0] == "srun" else words
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr(runtime, "run", lambda main, argv: main(argv))
    monkeypatch.chdir(ROOT)
    with pytest.raises(Parsed):
        in_process(words, monkeypatch)
    if "-opt" in words:
        assert load.load(Path(words[words.index("-opt") + 1])).name


# ---- examples


def named_files(page):
    """Name -> content of the Python blocks that begin with the name of a file."""
    found = ((re.match(r"# (\S+\.py)\n", text), text) for text in blocks(page, "python"))
    return {named[1]: text for named, text in found if named}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_example_runs(page):
    for text in blocks(page, "python"):
        if not text.startswith("# kernels/") and not text.startswith("# tests/"):
            exec(compile(text, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_yaml_example_has_only_options_that_there_are(page):
    for text in blocks(page, "yaml"):
        for key, value in yaml.safe_load(text).items():
            assert key in schema.Options.model_fields
            section = {"train": schema.TrainOptions, "val": schema.ValOptions}.get(key)
            assert section is None or set(value) <= set(section.model_fields)
            for given in value.values() if key == "datasets" else ():
                own = inspect.signature(registry.DATASETS.get(given["type"])).parameters
                assert set(given) <= {*own, *schema.DatasetOptions.model_fields}


def test_the_example_of_a_kernel_passes_its_tests_and_compiles(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed: no kernel can be interpreted")
    for name in ("kernels", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/kernels").mkdir(parents=True)
    shutil.copy(ROOT / "tests/kernels/conftest.py", tmp_path / "tests/kernels")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    for name, text in named_files(ROOT / "kernels/README.md").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for command in ("pytest tests/kernels/test_simple_gate.py", "scripts.aot_report --op simple_gate"):
        words = [sys.executable, "-m", *command.split()]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "18 passed" in done.stdout or "4 compiled, 0 failed" in done.stdout


# ---- links, and what is named


def anchors(page):
    """The places of a page that a link can lead to, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_every_message_that_is_explained_is_one_that_the_program_has():
    page = (ROOT / "models/README.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "models").glob("*.py"))
    told = re.findall(r'"([^"]+)"', " ".join(re.findall(r'^\*\*(".*?)\*\*', page, re.MULTILINE | re.DOTALL)))
    assert len(told) > 5
    for message in told:
        for piece in message.replace("\n", " ").split("..."):
            assert piece.strip() in code, message


def test_pictures_are_small():
    sizes = [path.stat().st_size for path in (ROOT / "archs/weights/pictures").iterdir() if path.suffix != ".md"]
    assert sizes
    assert max(sizes) <= 150_000
    assert sum(sizes) <= 500_000


def known_options():
    from scripts.options_docs import document

    return set(re.findall(r"^\| `([\w.<>]+)` \|", document(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_is_named_is_in_the_schema(page):
    known = known_options()
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for words in INLINE.findall(prose):
        named = re.match(r"((?:train|val|logger|path|dist_params)\.\w+)", words)
        if named and not words.endswith((".py", ".yml")):
            assert named[1] in known or f"{named[1]}.<label>" in known, words


def test_every_flag_that_is_named_is_one_of_ours():
    of_others = {"--help", "--nproc_per_node", "--rdzv_endpoint", "--signal", "--logdir"}
    files = [*ROOT.glob("scripts/*.py"), ROOT / "options/load.py"]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        flags = {flag for words in INLINE.findall(prose) for flag in re.findall(r"(?<![\w-])--\w[\w-]*", words)}
        unknown = [flag for flag in sorted(flags - of_others) if f'"{flag}"' not in code]
        assert not unknown, page


def test_the_option_reference_is_in_step_with_the_schema():
    from scripts.options_docs import written_into

    text = (ROOT / "options/README.md").read_text(encoding="utf-8")
    assert text == written_into(text), "python -m scripts.options_docs --into options/README.md"


def test_every_tool_is_named():
    page = (ROOT / "scripts/README.md").read_text(encoding="utf-8")
    tools = [path.stem for path in (ROOT / "scripts").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert "prepare_data" in tools
    for tool in tools:
        assert f"`{tool}`" in page, tool


def test_every_folder_has_a_page_that_the_first_page_names():
    first = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ROOMS:
        assert f"({name}/README.md)" in first
    for folder in (ROOT / "kernels").glob("*/fused.py"):
        assert (folder.parent / "README.md").exists()
        assert f"({folder.parent.name}/README.md)" in (ROOT / "kernels/README.md").read_text(encoding="utf-8")
