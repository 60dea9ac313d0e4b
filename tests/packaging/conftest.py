"""Where the sources lie, and the wheel built from a copy of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The folders of the package at the root of the repository. configs holds YAML only.
PARTS = ("kernels", "paradigms", "train", "eval", "configs")


def files_below(folder: Path) -> list[Path]:
    """All files of the checkout below `folder`, less hidden ones and what tools leave behind."""
    found = []
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        found += [Path(path, n) for n in sorted(names) if not n.startswith(".")]
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def package_files() -> list[Path]:
    """Every file that belongs to the package, relative to the root of the repository."""
    inside = [p for part in PARTS for p in files_below(ROOT / part)]
    return [p.relative_to(ROOT) for p in [*sorted(ROOT.glob("*.py")), ROOT / "py.typed", *inside]]


@pytest.fixture(scope="session")
def modules(package_files: list[Path]) -> list[Path]:
    """Every module of the package, relative to the root of the repository."""
    return [p for p in package_files if p.suffix == ".py"]


@pytest.fixture(scope="session")
def wheel(package_files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that no stale build folder can leak into or out of it."""
    source = tmp_path_factory.mktemp("source")
    extra = [Path(n) for n in ("pyproject.toml", "README.md", "LICENSE", "NOTICE")]
    tests = [p.relative_to(ROOT) for p in files_below(ROOT / "tests" / "packaging")]
    for path in [*package_files, *extra, *tests]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, source / path)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", out]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built
