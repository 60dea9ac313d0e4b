"""`genlab train` as it is typed: exit codes, one-line errors, no traceback."""

import json
import os
import subprocess
import sys

import pytest
from genlab.train.yaml_loader import dump_yaml, load_yaml

CODE = """
import sys, typer
from genlab.errors import GenlabError
from genlab.train.cli_train import schema_command, train_command
app = typer.Typer()
app.command("train")(train_command)
app.command("schema")(schema_command)
try:
    sys.exit(app(standalone_mode=False))
except GenlabError as error:
    print(f"genlab: {error}", file=sys.stderr)
    sys.exit(2)
"""


def genlab(*words, cwd):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", CODE, *map(str, words)],
        capture_output=True, text=True, env=environment, cwd=cwd, timeout=300,
    )  # fmt: skip


@pytest.fixture
def config(raw, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(raw))
    return path


def test_train_then_again_then_other(config, tmp_path):
    done = genlab("train", config, "seed=3", "--out", "mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "device: cpu" in done.stdout and "mine: 512 tokens, loss" in done.stdout
    assert load_yaml(tmp_path / "mine" / "config.yaml")["seed"] == 3
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()) == 8
    before = (tmp_path / "mine" / "result.json").stat().st_mtime_ns
    again = genlab("train", "mine/config.yaml", "--out", "mine", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "mine" / "result.json").stat().st_mtime_ns == before
    other = genlab("train", config, "--out", "mine", cwd=tmp_path)
    assert other.returncode == 2
    assert other.stderr.strip() == (
        "genlab: mine: holds another run: seed is 3 there and 0 here; choose another folder with "
        "--out, or --overwrite to delete that run"
    )


def test_dry_run_leaves_nothing(config, tmp_path):
    done = genlab("train", config, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("parameters", "6,768", "FLOPs per token", "bytes, optimizer", "training time"):
        assert words in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.optimizer.learnig_rate=1"], "did you mean 'learning_rate'?"),
        (["--require", "gpu"], "genlab: --require gpu: JAX"),
        (["--require", "gpus"], "did you mean 'gpu'?"),
    ],
)
def test_bad_input_is_one_line_and_2(config, tmp_path, words, message):
    done = genlab("train", config, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_schema(tmp_path):
    done = genlab("schema", cwd=tmp_path)
    assert json.loads(done.stdout)["properties"]["extends"]
