"""Who may import whom: kernels <- paradigms <- train <- eval <- command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# A module imports from its own rank and below. Root modules but these are the command line.
RANKS = {"allocator": 0, "errors": 0, "kernels": 1, "paradigms": 2, "train": 3, "eval": 4}
COMMAND_LINE = 5
OURS = {*RANKS, "configs", "tests", "cli", "genlab"}
PEERS = {"torch", "transformers", "tensorflow"}
# What a child process runs: imported by nothing of ours, and it imports nothing of ours.
CHILDREN = Path("eval/benchmarks/peers")


def rank(parts: tuple[str, ...]) -> int:
    return RANKS.get(parts[0], COMMAND_LINE) if parts else COMMAND_LINE


def imports(path: Path, source: str) -> list[tuple[int, tuple[str, ...]]]:
    """All imports of a module, also those inside functions, as (dots, parts)."""
    found = []
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            found += [(0, tuple(a.name.split("."))) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            found += [(node.level, (*module, a.name)) for a in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = called or (node.func.id if isinstance(node.func, ast.Name) else "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                name = node.args[0].value
                dots = len(name) - len(name.lstrip("."))
                found.append((dots, tuple(name.lstrip(".").split("."))))
    return found


def faults(path: Path, source: str) -> list[str]:
    """What is wrong with the imports of the module at `path`, relative to the root."""
    found = []
    for dots, parts in imports(path, source):
        name = "." * dots + ".".join(parts)
        if not dots:
            if parts[0] in PEERS and path.parent != CHILDREN:
                found.append(f"{path}: imports {name}, which only a child process may")
            elif parts[0] in OURS:
                found.append(f"{path}: imports {name}; inside the package import relatively")
            continue
        folder = path.parent.parts
        if dots - 1 > len(folder):
            found.append(f"{path}: {name} leaves the package")
            continue
        target = (*folder[: len(folder) - (dots - 1)], *parts)
        if rank(target) > rank((path.with_suffix("") if len(path.parts) == 1 else path).parts):
            found.append(f"{path}: {name} points upwards, to {'.'.join(target)}")
    return found


def test_imports_point_downwards(root: Path, modules: list[Path]) -> None:
    assert [f for p in modules for f in faults(p, (root / p).read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "path, source",
    [
        ("kernels/a.py", "from ..paradigms import interface"),
        ("kernels/ssd/a.py", "from ...train.loop import Loop"),
        ("paradigms/mixers/a.py", "def f():\n    from ... import eval"),
        ("train/a.py", "import importlib\nimportlib.import_module('..eval.harness', __package__)"),
        ("eval/a.py", "from .. import cli"),
        ("errors.py", "from .kernels import dispatch"),
        ("kernels/a.py", "from genlab.kernels import dispatch"),
        ("kernels/a.py", "import train"),
        ("eval/a.py", "import torch.nn"),
        ("eval/benchmarks/a.py", "import torch"),
        ("eval/a.py", "from transformers import AutoModel"),
        ("eval/a.py", "from ... import x"),
    ],
)
def test_the_rule_catches(path: str, source: str) -> None:
    assert len(faults(Path(path), source)) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("eval/tasks/a.py", "from ...kernels.ssd import api\nfrom ..latency import x\nimport jax"),
        ("train/a.py", "from ..errors import DataError\nfrom . import data"),
        ("cli.py", "from .eval import harness\nfrom .errors import GenlabError"),
    ],
)
def test_the_rule_allows(path: str, source: str) -> None:
    assert faults(Path(path), source) == []


def test_what_a_child_runs_knows_nothing_of_us_and_nobody_imports_it(
    root: Path, modules: list[Path]
) -> None:
    for path in modules:
        source = (root / path).read_text(encoding="utf-8")
        for dots, parts in imports(path, source):
            assert "peers" not in parts, path
            if path.parent == CHILDREN:
                assert not dots and parts[0] not in OURS, path


def test_importing_the_root_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport genlab, genlab.errors\n"
        "print(*sorted(m.split('.')[0] for m in set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert set(done.stdout.split()) <= {"genlab", *sys.stdlib_module_names}
    assert list(tmp_path.iterdir()) == []
