"""Who may import whom, held against the code; and what must import on a bare torch and numpy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("options", "kernels", "archs", "data", "models", "scripts", "tests", "train", "test")

# what each room may import of ours; a name after a dot narrows it, a name after a colon is the only one to be taken
ALLOWED = {
    "options": {"options"},
    "kernels": {"kernels"},
    "archs": {"archs", "kernels", "options.registry"},
    "data": {"data", "options"},
    "models": {"models", "kernels", "options", "archs:ARCHS"},
    "train.py": {"options", "data", "models", "archs:ARCHS"},
    "test.py": {"options", "data", "models", "archs:ARCHS"},
    "scripts": {"scripts", "options", "kernels", "archs", "data", "models"},
}
BLOCKED = (
    "pydantic",
    "yaml",
    "cv2",
    "lmdb",
    "safetensors",
    "tensorboard",
    "rich",
    "matplotlib",
    "triton",
    "flash_attn",
)


def imports_of(source, package):
    """(line, module, name or None) for each import of one of our rooms, literal calls of import_module included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [(module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            text = ast.unparse(node.args[0]).removeprefix("f").strip("'\"") if node.args else ""
            found = [(text, None)]
        else:
            continue
        yield from ((node.lineno, module, name) for module, name in found if module.split(".")[0] in ROOMS)


def is_allowed(module, name, allowed):
    for rule in allowed:
        room, _, only = rule.partition(":")
        inside = module == room or module.startswith(room + ".")
        if only and module == room and name in (only, None):
            return True
        # "from options import registry" is options.registry too
        if not only and (inside or f"{module}.{name}" == room):
            return True
    return False


def files_of(room):
    return [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", list(ALLOWED))
def test_a_room_imports_only_what_the_table_allows(room):
    wrong = []
    for path in files_of(room):
        if path.exists():
            package = list(path.relative_to(ROOT).parent.parts)
            for line, module, name in imports_of(path.read_text(), package):
                if not is_allowed(module, name, ALLOWED[room]):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module} {name or ''}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_code_is_a_room_of_the_table():
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests"}
    assert folders <= set(ALLOWED)
    assert {path.name for path in ROOT.glob("*.py")} <= {"train.py", "test.py", "setup.py"}


@pytest.mark.parametrize(
    ("room", "source", "expected"),
    [
        ("kernels", "from options.registry import ARCHS", False),
        ("archs", "from options.registry import ARCHS", True),
        ("archs", "from options import registry", True),
        ("archs", "from options import schema", False),
        ("archs", "import options", False),
        ("archs", "from .layers import x", True),
        ("models", "from archs import ARCHS", True),
        ("models", "from archs.sst import SST", False),
        ("models", "def f():\n    import data.io", False),
        ("models", "importlib.import_module('data')", False),
        ("models", "importlib.import_module(f'data.{name}')", False),
        ("data", "from models import MODELS", False),
        ("data", "from ..models import MODELS", False),
        ("scripts", "import train", False),
        ("options", "import torch", True),
    ],
)
def test_the_check_sees_what_it_should(room, source, expected):
    found = list(imports_of(source, [room]))
    assert all(is_allowed(module, name, ALLOWED[room]) for _, module, name in found) == expected


def test_kernels_is_a_docstring_and_nothing_else():
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_the_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_weights_and_no_pickles_among_the_fixtures():
    kinds = {".pth", ".pt", ".pkl", ".pickle", ".ckpt"}
    assert not [path for path in (ROOT / "tests").rglob("*") if path.suffix in kinds]


BARE = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError("blocked: " + name)

sys.meta_path.insert(0, Block())
import pathlib, importlib
import torch
heavy = "torch._dynamo" in sys.modules
import archs
for path in sorted(pathlib.Path("kernels").rglob("*.py")):
    if not path.stem.startswith(("fused", "triton")):
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
assert heavy or "torch._dynamo" not in sys.modules, "an import brought in torch._dynamo"
net = archs.ARCHS.build({{"type": "SST", "dim": 4, "window_sizes": [2], "num_heads": 1, "ranks": [1], "n_blocks": 1}})
print(tuple(net(torch.rand(1, 3, 3, 5)).shape), sorted(set({blocked}) & set(sys.modules)))
"""


def test_networks_and_kernels_import_and_run_on_a_bare_torch():
    code = BARE.format(blocked=set(BLOCKED))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 3, 6, 10) []"
