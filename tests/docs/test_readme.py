"""What README.md tells to type exists: commands, their options, keys of YAML."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from genlab.cli import build_app
from genlab.train.data.pipeline import DataConfig
from genlab.train.yaml_loader import parse_yaml, validate

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS if not language
    for line in block.splitlines() if line.startswith("genlab ")
]  # fmt: skip


@pytest.fixture(scope="module")
def commands():
    return typer.main.get_command(build_app()).commands


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_and_options_exist(commands, line):
    words = shlex.split(line.replace("[", " ").replace("]", " ") if '"[' not in line else line)
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert words[1] in commands
    command = commands[words[1]]
    if hasattr(command, "commands"):  # a group: the option belongs to the command inside it
        assert words[2] in command.commands
        command = command.commands[words[2]]
    known = {opt for parameter in command.params for opt in parameter.opts}
    assert options <= known, options - known


def test_the_yaml_is_a_configuration():
    blocks = [block for language, block in BLOCKS if language == "yaml"]
    assert blocks
    for block in blocks:
        raw = parse_yaml(block, "README.md")
        assert raw.keys() == {"data"}
        assert validate(DataConfig, raw["data"], "README.md").source.name == "hub"
