"""The command line as a user meets it: exit codes and one-line errors."""

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
    for command in ("train", "generate", "eval", "compare", "tune", "schema", "version"):
        assert command in result.stdout


def test_an_interrupt_says_how_to_go_on(genlab, monkeypatch):
    def stop():
        def run(*, standalone_mode):
            raise KeyboardInterrupt

        return run

    monkeypatch.setattr(cli, "build_app", stop)
    result = genlab("compare", "x.yaml")
    assert result.returncode == 130
    assert "goes on" in result.stderr
