"""The command `generate`: what it prints, and one line for bad input."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from genlab.errors import CapacityError, ConfigError, DataError, GenlabError
from genlab.eval import cli_generate
from genlab.paradigms.autoregressive import Autoregressive
from genlab.train.data.tokenizer import BytesTokenizer
from typer.testing import CliRunner

SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]
BYTES = BytesTokenizer()


class Model(ScriptedModel):
    """The cast copy is the model itself."""

    def prepare(self, dtype):
        """Only the run's own dtype is asked for."""
        assert dtype == "float32"
        return ScriptedModel(self.scripts, *self.static)


@pytest.fixture
def command(monkeypatch):
    """Calls the command with arguments on a run that says "hello" or "wörld"."""
    scripts = np.full((256, 64), BYTES.eos_id, np.int32)
    scripts[:, :5] = list(b"hello")
    scripts[ord("z"), :] = ord("z")
    scripts[ord("b"), :6] = list("wörld".encode())
    config = SimpleNamespace(
        paradigm=SimpleNamespace(name="autoregressive"),
        training=SimpleNamespace(compute_dtype="float32"),
    )
    loaded = SimpleNamespace(
        config=config,
        model=Model(jnp.asarray(scripts), BYTES.vocab_size),
        tokenizer=BYTES,
        paradigm=Autoregressive(),
    )
    monkeypatch.setattr(cli_generate, "load_run", lambda path: loaded)
    monkeypatch.setattr(cli_generate, "prepare_device", lambda console: None)
    app = typer.Typer()
    app.command()(cli_generate.generate_command)

    def call(*arguments):
        result = CliRunner().invoke(app, ["run", *arguments])
        if isinstance(result.exception, GenlabError):
            raise result.exception
        return result

    return call


def test_prints_the_text(command):
    assert command().stdout == "hello\n"
    assert command("--prompt", "b").stdout == "wörld\n"
    assert command("--prompt", "b", "--stop", "r", "--temperature", "0").stdout == "wö\n"
    assert command("--max-new", "0").stdout == "\n"


def test_as_many_tokens_as_fit_unless_told(command):
    assert command("--prompt", "z").stdout == "z" * 62 + "\n"  # the model holds 64
    assert command("--prompt", "z" * 60).stdout == "zzz\n"
    assert command("--prompt", "z", "--max-new", "5").stdout == "zzzzz\n"
    cut = command("--prompt", "z" * 80, "--truncate-prompt")
    assert cut.stdout == "z" * 32 + "\n" and "49 tokens were cut off" in cut.stderr


def test_several_prompts(command, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("b\n\n", encoding="utf-8")
    result = command("--prompt", "a", "--prompt-file", str(file))
    assert result.stdout == "--- 1: a\nhello\n--- 2: b\nwörld\n--- 3: \nhello\n"


def test_streams_and_canvases(command):
    assert command("--prompt", "b", "--stream").stdout == "wörld\n"
    lines = command("--max-new", "3", "--canvas").stdout.split("\n")
    assert lines == ["[0] h··", "[1] he·", "[2] hel", "hel", ""]


def test_records(command):
    (record,) = json.loads(command("--prompt", "b", "--json").stdout)
    assert record == {
        "text": "wörld",
        "ids": [*"wörld".encode(), BYTES.eos_id],
        "prompt_ids": [BYTES.bos_id, ord("b")],
        "finish_reason": "stop",
        "nfe": 7,
        "token_evals": 8,
        "dropped": 0,
    }


def test_a_cut_prompt_is_mentioned(command):
    result = command("--prompt", "x" * 70, "--truncate-prompt", "--max-new", "12")
    assert result.stdout == "hello\n"
    assert result.stderr == (
        "note: prompt 1: 19 tokens were cut off its beginning, 51 are left\n"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--temperature", "-1"], ConfigError, "temperature: got -1"),
        (["--top-p", "0"], ConfigError, "top_p: got 0"),
        (["--max-new", "-1"], ConfigError, "max_new: got -1"),
        (["--stop", ""], ConfigError, "stop: got ''"),
        (["--steps", "4"], ConfigError, "steps: got 4"),
        (["--order", "random"], ConfigError, "--order random: decoding 'plain' has no order"),
        (["--stream", "--json"], ConfigError, "exclude one another"),
        (["--prompt", "x" * 63], CapacityError, "64 tokens .* max_new=1 need 65 places"),
        (["--prompt-file", "nowhere.txt"], DataError, "nowhere.txt: No such file"),
    ],
)
def test_bad_input_is_one_line(command, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        command(*arguments)
    assert "\n" not in str(caught.value)


def test_a_mistyped_option_exits_2(command):
    assert command("--top-kk", "3").exit_code == 2
    assert command("--top-k", "many").exit_code == 2


def test_the_order_of_a_diffusion_model():
    assert cli_generate.decoding_config("masked_diffusion", "confidence").order == "confidence"
    assert cli_generate.decoding_config("masked_diffusion", None).order == "random"
    with pytest.raises(ConfigError, match="no such order; did you mean 'confidence'"):
        cli_generate.decoding_config("masked_diffusion", "confidense")
