"""A task from YAML to a score: trained, loaded, generated from, graded."""

import jax
import numpy as np
import pytest
from genlab.eval.generate import Generator, Options
from genlab.eval.tasks.config import TaskScoreConfig, score_from_config
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.decoding.unmasking import UnmaskingConfig
from genlab.paradigms.interface import SpecialIds
from genlab.train.checkpoint import steps_in
from genlab.train.config import RunConfig
from genlab.train.data.pipeline import build_data
from genlab.train.loop import train
from genlab.train.run_folder import load_run
from genlab.train.yaml_loader import validate

SOURCE = {"name": "mqar", "num_pairs": 2, "num_keys": 4, "num_values": 4}
SCORE = validate(TaskScoreConfig, {"source": SOURCE, "examples": 200, "levels": [2, 3]}, "tasks")


def run_config(paradigm="autoregressive", tokens=800_000) -> RunConfig:
    raw = {
        "model": {
            "width": 32,
            "depth": 2,
            "pattern": ["attention"],
            "layers": {
                "attention": {
                    "mixer": {"name": "attention", "num_heads": 2, "num_kv_heads": 2},
                    "mlp": {"name": "swiglu", "width": 32},
                }
            },
            "max_len": 9,
        },
        "paradigm": {"name": paradigm},
        "data": {
            "source": SOURCE,
            "tokenizer": {"name": "symbols"},
            "context_length": 9,
            "batch_size": 32,
        },
        "training": {
            "tokens": tokens,
            "optimizer": {"name": "adamw", "learning_rate": 2e-3},
            "evaluate_every": 1000,
            "checkpoint_every": 5 if tokens < 10_000 else 1000,
            "tensorboard": False,
        },
    }
    return validate(RunConfig, raw, "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mqar") / "run"
    train(run_config(), folder)
    return load_run(folder)


def score(run, decoding):
    specials = SpecialIds(*run.tokenizer.specials)
    built = decoding.build(specials, run.paradigm)
    return score_from_config(run.model.prepare("float32"), built, specials, SCORE)


def test_attention_learns_recall(trained):
    """Far above any value of the prompt, which is right in 62.5 %."""
    result = score(trained, default_decoding("autoregressive"))
    learnt, beyond = result.levels
    assert learnt.shortcut == 0.625 and result.shortcut_name == "any value"
    assert learnt.exact_ci95[0] > 0.8
    assert not beyond.trained and beyond.row_tokens == 9
    assert result.decoding == "plain" and learnt.nfe == 1.0


def test_generate_answers_in_words(trained):
    specials = SpecialIds(*trained.tokenizer.specials)
    decoding = default_decoding("autoregressive").build(specials, trained.paradigm)
    generator = Generator(trained.model.prepare("float32"), decoding, trained.tokenizer)
    answers = generator.generate(
        ["k0 v1 k3 v2 k3", "k0 v1 k3 v2 k0"], Options(max_new=1, temperature=0.0)
    )
    assert [a.text.strip() for a in answers] == ["v2", "v1"]


def test_a_continued_run_is_the_same(tmp_path):
    """Stopped after update 5 and called again, the rows go on where they stopped."""
    config = run_config(tokens=10 * 32 * 9)
    data = build_data(config.data)
    straight = train(config, tmp_path / "straight", data=data)
    begun = tmp_path / "begun"
    with pytest.raises(RuntimeError, match="pulled the plug"):
        train(config, begun, data=data, progress=plug_pulled_after(6))
    assert steps_in(begun / "checkpoints") == [5]
    continued = train(config, begun, data=data)
    for a, b in zip(
        jax.tree.leaves(straight.model.params), jax.tree.leaves(continued.model.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def plug_pulled_after(step):
    def progress(record):
        if record.step == step:
            raise RuntimeError("pulled the plug")

    return progress


def test_masked_diffusion_is_scored_by_the_same_code(tmp_path):
    train(run_config("masked_diffusion", tokens=2880), tmp_path / "run")
    result = score(load_run(tmp_path / "run"), UnmaskingConfig(order="confidence"))
    assert result.decoding == "unmasking" and result.steps_per_token == 1.0
    assert result.decoding_options["order"] == "confidence"
    assert [level.examples for level in result.levels] == [200, 200]
