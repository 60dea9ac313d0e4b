"""Metrics for Weights & Biases, with a module in its place that records what it is asked."""

import json
import sys
import types

import pytest
from genlab.errors import ConfigError
from genlab.train.loop import train

WANDB = "training.wandb={project: novels, mode: offline}"


@pytest.fixture
def wandb(monkeypatch):
    """A module with what is used of wandb's interface; `runs` lists what was started."""
    module = types.ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})
    module.runs = []

    class Run:
        def __init__(self, **given):
            self.given, self.lines, self.exit_code = given, [], None
            module.runs.append(self)

        def log(self, scalars, step):
            self.lines.append((step, scalars))

        def finish(self, exit_code):
            self.exit_code = exit_code

    module.init = Run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def stopping_at(step):
    def progress(record):
        if record.step == step:
            raise RuntimeError("stopped")

    return progress


def test_the_same_run_goes_on_after_an_interruption(wandb, make, data, tmp_path):
    config, folder = make(WANDB, "training.evaluate_every=4"), tmp_path / "first"
    with pytest.raises(RuntimeError, match="stopped"):
        train(config, folder, data=data, progress=stopping_at(6))
    train(config, folder, data=data)
    first, second = wandb.runs
    assert first.given["id"] == second.given["id"] and len(first.given["id"]) == 16
    for run in (first, second):
        assert run.given["resume"] == "allow" and run.given["dir"] == str(folder)
        assert (run.given["project"], run.given["mode"]) == ("novels", "offline")
        assert run.given["config"]["training"]["tokens"] == config.training.tokens
    assert (first.exit_code, second.exit_code) == (1, 0)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in second.lines] == [5, 6, 7, 8] and len(lines) == 8
    for (step, scalars), line in zip(second.lines, lines[4:], strict=True):
        plain = {**line, **line["stats"]}
        want = {k: v for k, v in plain.items() if v is not None and k != "stats"}
        assert step == line["step"] and scalars == want
    assert "validation_bits_per_byte" in dict(second.lines)[8]
    # A finished run is not started again.
    train(config, folder, data=data)
    assert len(wandb.runs) == 2


def test_beginning_anew_is_another_run(wandb, make, data, tmp_path):
    config = make(WANDB, "training.tokens=64")
    for overwrite in (False, True):
        train(config, tmp_path / "one", data=data, overwrite=overwrite)
    assert len({run.given["id"] for run in wandb.runs}) == 2


def test_the_run_is_called_as_asked(wandb, make, data, tmp_path):
    config = make(WANDB, "training.tokens=64")
    train(config, tmp_path / "mine", data=data)
    train(config, tmp_path / "mamba" / "run", data=data)
    named = make("training.wandb={project: p, name: asked}", "training.tokens=64")
    train(named, tmp_path / "other", data=data)
    assert [run.given["name"] for run in wandb.runs] == ["mine", "mamba", "asked"]
    assert wandb.runs[-1].given["mode"] == "online"


def test_a_missing_package_is_one_line_before_anything(make, data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as missing:
        train(make(WANDB), tmp_path / "run", data=data)
    assert str(missing.value) == (
        "training.wandb: package wandb is missing: pip install 'genlab[wandb]'"
    )
    assert not (tmp_path / "run").exists()


def test_a_refusal_is_one_line(wandb, make, data, tmp_path, monkeypatch):
    def refuse(**given):
        raise wandb.Error("api_key not configured\n(no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as refused:
        train(make(WANDB), tmp_path / "run", data=data)
    assert str(refused.value) == (
        "training.wandb: api_key not configured (no-tty); mode: offline needs no account"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.wandb={project: p, mode: ofline}", "training.wandb.mode"),
        ("training.wandb={projekt: p}", "did you mean 'project'"),
        ("training.wandb={project: ''}", "training.wandb.project"),
    ],
)
def test_wrong_keys_are_named(make, override, said):
    with pytest.raises(ConfigError, match=said):
        make(override)
