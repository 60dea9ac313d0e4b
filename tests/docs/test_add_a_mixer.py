"""docs/add-a-mixer.md does what it says, on a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("kernels", "paradigms", "train", "configs", "tests/contract")
FILES = ("__init__.py", "errors.py", "pyproject.toml", "tests/conftest.py")
DOCUMENT = ROOT / "docs" / "add-a-mixer.md"


def code_blocks() -> list[tuple[str, str, str]]:
    """(language, first line's file name, code) of every fenced block."""
    found = []
    text = DOCUMENT.read_text(encoding="utf-8")
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        named = re.match(r"# (\S+)\n", code)
        found.append((language, named[1] if named else "", code))
    return found


def applied(text: str, diff: str) -> str:
    """`text` with each `+` line of a diff inserted after the line before it in the diff."""
    before = None
    for line in diff.splitlines()[1:]:
        sign, content = line[:1], line[1:]
        if sign == "+":
            assert before is not None
            assert text.count(before + "\n") == 1, f"{before!r} stands once in the file"
            text = text.replace(before + "\n", f"{before}\n{content}\n")
        else:
            assert sign == " ", f"unexpected line of the diff: {line!r}"
        before = content
    return text


def run(*command: str | Path, cwd: Path, package_parent: Path, **environment: str) -> str:
    """Runs Python with the copy in front of the installed package; returns what it printed."""
    env = os.environ | {"PYTHONPATH": str(package_parent), "PYTHONSAFEPATH": "1"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package after the document's steps."""
    root = tmp_path_factory.mktemp("copy") / "genlab"
    skipped = shutil.ignore_patterns("__pycache__", "corpora")
    for part in PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=skipped)
    for name in FILES:
        shutil.copyfile(ROOT / name, root / name)
    for language, name, code in code_blocks():
        if language == "diff":
            changed = applied((root / name).read_text(encoding="utf-8"), code)
            (root / name).write_text(changed, encoding="utf-8")
        elif name:
            path = root / name if "/" in name else root.parent / name
            assert not path.exists()
            path.write_text(code, encoding="utf-8")
    return root


def test_the_document_has_its_parts() -> None:
    names = [(language, name) for language, name, _ in code_blocks()]
    assert names == [
        ("python", "paradigms/mixers/ema.py"),
        ("diff", "paradigms/registry.py"),
        ("sh", ""),
        ("yaml", "ema.yaml"),
        ("python", "train_ema.py"),
    ]


def test_links_resolve() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", DOCUMENT.read_text(encoding="utf-8"))
    assert links and [k for k in links if not (DOCUMENT.parent / k).exists()] == []


@pytest.mark.slow
def test_the_contract_suite_picks_the_mixer_up_and_it_passes(copy: Path) -> None:
    (command,) = [code for language, _, code in code_blocks() if language == "sh"]
    setting, program, *arguments = command.split()
    name, value = setting.split("=")
    assert program == "pytest"
    options = {name: value, "cwd": copy, "package_parent": copy.parent}
    out = run("-m", "pytest", *arguments, "-rN", **options)
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 40 and "failed" not in out
    listed = run("-m", "pytest", *arguments, "--collect-only", **options)
    assert listed.count("[ema") > 25 and "[mamba" not in listed.replace("MIXERS-mamba", "")


def test_the_yaml_trains(copy: Path) -> None:
    out = run("train_ema.py", cwd=copy.parent, package_parent=copy.parent)
    first, last = (float(nats) for nats in re.findall(r": ([\d.]+) nats", out))
    assert first > 2.5 and last < 1.0


def test_a_wrong_key_is_named(copy: Path) -> None:
    text = (copy.parent / "ema.yaml").read_text(encoding="utf-8")
    (copy.parent / "wrong.yaml").write_text(text.replace("longest", "longst"), encoding="utf-8")
    code = """
from genlab.errors import ConfigError
from genlab.paradigms.backbone import ModelConfig
from genlab.train.yaml_loader import load_yaml, validate
try:
    validate(ModelConfig, load_yaml("wrong.yaml"), "wrong.yaml")
except ConfigError as error:
    print(error)
"""
    out = run("-c", code, cwd=copy.parent, package_parent=copy.parent)
    assert "longst" in out and "'longest'" in out
