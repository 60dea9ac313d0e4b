"""The command line as a user meets it: exit codes and one-line errors."""

import json
import sys
from typing import NamedTuple

import pytest
from genlab import cli


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def genlab(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["genlab", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Outcome(stop.value.code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["compare", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["compare", "configs/compare/quick.yaml", "--outt", "x"], "--out"),
        (["comparee"], "compare"),
        (["train", "transformr"], "did you mean 'transformer'"),
        (["train", "transformer", "training.optimizer.learnig_rate=1"], "'learning_rate'"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere: no such run folder"),
        (["eval", "nowhere"], "nowhere: no such run folder"),
        (["list", "mixer"], "list 'mixer': no such kind; did you mean 'mixers'?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(genlab, args, said):
    result = genlab(*args)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def test_help_names_every_command(genlab):
    result = genlab("--help")
    assert result.returncode == 0
    commands = "train generate eval compare tune schema list doctor version"
    for command in commands.split():
        assert command in result.stdout


def test_list_prints_one_kind_or_all(genlab):
    one = genlab("list", "decodings")
    assert one.returncode == 0 and one.stdout.splitlines()[0] == "decodings"
    assert any(line.split()[0] == "plain" for line in one.stdout.splitlines())
    records = json.loads(genlab("list", "--json").stdout)
    assert {"families", "mixers", "tasks", "configs"} < records.keys()
    assert one.stdout.strip() in genlab("list").stdout


def test_a_missing_package_is_one_line(genlab, monkeypatch):
    def build():
        raise ModuleNotFoundError("No module named 'optax'", name="optax")

    monkeypatch.setattr(cli, "build_app", build)
    result = genlab("list")
    assert result.returncode == 1
    assert result.stderr == (
        "genlab: package 'optax' is missing: install genlab again (make, or pip install .)\n"
    )


def test_an_interrupt_says_how_to_go_on(genlab, monkeypatch):
    def stop():
        def run(*, standalone_mode):
            raise KeyboardInterrupt

        return run

    monkeypatch.setattr(cli, "build_app", stop)
    result = genlab("compare", "x.yaml")
    assert result.returncode == 130
    assert "goes on" in result.stderr
