"""Plain `lm_eval` finding our model through a file in the environment, and only then.

The harness is played by a few files here, laid out as its releases 0.4.10 to 0.4.13 are; where it
is installed, `test_lm_eval_harness.py` runs the real one.
"""

import importlib
import subprocess
import sys
import venv
from pathlib import Path

import genlab
import pytest
from genlab.eval.lm_eval import plugin

HARNESS = {
    "__init__.py": "",
    "api/__init__.py": "",
    "api/registry.py": """
class Registry(dict):
    def register(self, name, *, target):
        assert name not in self, name
        self[name] = target


model_registry = Registry()
""",
    "models/__init__.py": """
from lm_eval.api.registry import model_registry

model_registry.register("hf", target="lm_eval.models.huggingface:HFLM")
""",
}
MODELS_SEEN = """
import json, sys
import lm_eval.models
from lm_eval.api.registry import model_registry
spec = lm_eval.models.__spec__
print(json.dumps([dict(model_registry), "jax" in sys.modules, type(spec.loader).__name__]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment of its own, with genlab and the harness's stand-in."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home / "venv", symlinks=True)
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    (packages / "genlab").symlink_to(Path(genlab.__file__).parent)
    for name, text in HARNESS.items():
        file = packages / "lm_eval" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return home / "venv" / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-P", *arguments], capture_output=True, text=True, cwd=python.parent, env={}
    )


def seen(python: Path) -> str:
    done = run(python, "-c", MODELS_SEEN)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.strip()


def test_only_where_it_was_asked_for(python):
    """Not before, then the class by its name without loading JAX, then not again."""
    before = '[{"hf": "lm_eval.models.huggingface:HFLM"}, false, "SourceFileLoader"]'
    after = before.replace("}", f', "genlab": "{plugin.TARGET}"}}')
    assert seen(python) == before
    done = run(python, "-m", "genlab.eval.lm_eval", "--register")
    assert done.returncode == 0, done.stderr
    assert plugin.FILE in done.stdout and "`lm_eval --model genlab` works here" in done.stdout
    assert seen(python) == after
    again = run(python, "-m", "genlab.eval.lm_eval", "--register")
    assert again.returncode == 0 and seen(python) == after
    assert run(python, "-m", "genlab.eval.lm_eval", "--unregister").stdout.startswith("removed ")
    assert seen(python) == before
    gone = run(python, "-m", "genlab.eval.lm_eval", "--unregister")
    assert gone.returncode == 0 and gone.stdout.startswith("there is no ")


def test_a_release_that_knows_genlab_already(python):
    """Entry points are read by releases to come: what they registered stays."""
    (models,) = python.parents[1].glob("lib/python*/site-packages/lm_eval/models/__init__.py")
    text = models.read_text()
    models.write_text(text + 'model_registry.register("genlab", target="from an entry point")\n')
    try:
        run(python, "-m", "genlab.eval.lm_eval", "--register")
        assert '"genlab": "from an entry point"' in seen(python)
    finally:
        models.write_text(text)
        run(python, "-m", "genlab.eval.lm_eval", "--unregister")


def test_a_file_left_behind_does_nothing(python):
    """genlab uninstalled, its file still there: Python starts as ever, without a word."""
    (link,) = python.parents[1].glob("lib/python*/site-packages/genlab")
    run(python, "-m", "genlab.eval.lm_eval", "--register")
    assert '"genlab"' in seen(python)
    link.unlink()
    try:
        assert '"genlab"' not in seen(python)
        assert (link.parent / plugin.FILE).exists()
    finally:
        link.symlink_to(Path(genlab.__file__).parent)
        run(python, "-m", "genlab.eval.lm_eval", "--unregister")


def test_without_the_harness_or_the_right_to_write(python):
    """One line that says what is missing, and nothing written."""
    (harness,) = python.parents[1].glob("lib/python*/site-packages/lm_eval")
    aside = harness.rename(harness.with_name("aside"))
    try:
        done = run(python, "-m", "genlab.eval.lm_eval", "--register")
    finally:
        aside.rename(harness)
    assert done.returncode == 1
    assert done.stderr == "genlab: package 'lm_eval' is missing: pip install 'genlab[lm_eval]'\n"
    file = harness.parent / plugin.FILE
    file.mkdir()
    try:
        done = run(python, "-m", "genlab.eval.lm_eval", "--register")
    finally:
        file.rmdir()
    assert done.returncode == 1 and done.stderr.startswith(f"genlab: {file}: ")
    assert "`python -m genlab.eval.lm_eval` needs no such file" in done.stderr


def test_the_name_leads_to_the_class():
    module, name = plugin.TARGET.split(":")
    assert getattr(importlib.import_module(module), name).__name__ == "GenlabLM"
    assert sys.modules[module].NAME == "genlab"
