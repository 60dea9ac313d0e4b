"""`genlab.load` in three lines, for runs and for checkpoints as they were downloaded."""

from pathlib import Path

import genlab
import numpy as np
import pytest
from genlab.errors import CapacityError, CheckpointError, ConfigError

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def loaded():
    return genlab.load(FIXTURES / "qwen3")


def test_three_lines(loaded, imported, expected):
    model, tokenizer, paradigm = loaded
    assert (model.config.vocab_size, tokenizer.vocab_size, paradigm.name) == (
        97, 97, "autoregressive",
    )  # fmt: skip
    want = expected("qwen3")
    logits = loaded(want["tokens"])
    np.testing.assert_allclose(logits, want["logits"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(loaded(want["tokens"][0]), logits[0], rtol=1e-5, atol=1e-5)
    run = genlab.load(imported("qwen3").path)
    np.testing.assert_array_equal(run(want["tokens"]), logits)


def test_generate(loaded, expected):
    """Ids go in as they are; texts begin with BOS, which this tokenizer writes as an id too."""
    ids = expected("qwen3")["tokens"][0].tolist()
    answer = loaded.generate(ids, max_new=4, temperature=0.0)
    assert answer.prompt_ids == ids
    theirs = expected("qwen3")["greedy"][0]
    assert answer.ids == theirs[: len(answer.ids)].tolist() and len(answer.ids) >= 1
    one, two = loaded.generate(["5 17", "4"], max_new=4, temperature=0.0)
    assert (one.prompt_ids, two.prompt_ids) == ([1, 5, 17], [1, 4])
    with pytest.raises(ConfigError, match="no option 'max_tokens'"):
        loaded.generate("5", max_tokens=3)
    with pytest.raises(ConfigError, match="ids from 3 to 97, want 0 to 96"):
        loaded.generate([3, 97])


def test_log_likelihood(loaded):
    ids = [1, 5, 17, 3]
    scored = loaded.log_likelihood(["5 17 3", "5"])
    log_probs = loaded(np.array([ids]))[0]
    log_probs = np.asarray(log_probs) - np.log(np.exp(log_probs).sum(-1, keepdims=True))
    want = -sum(log_probs[i, ids[i + 1]] for i in range(3))
    np.testing.assert_allclose(scored.nll_nats, [want, -log_probs[0, 5]], rtol=1e-5)
    assert scored.tokens.tolist() == [3, 1] and not scored.is_bound
    with pytest.raises(CapacityError, match="rows of 64"):
        loaded.log_likelihood(" ".join(["5"] * 64))


def test_repr(loaded):
    text = repr(loaded)
    assert "qwen3: autoregressive, " in text
    assert "layer_0 ... layer_1 (2)" in text and "w_q: float32[36, 84], 12.1 kB" in text


def test_faults(tmp_path):
    with pytest.raises(CheckpointError, match="no such run folder"):
        genlab.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="want float32 or bfloat16"):
        genlab.load(FIXTURES / "qwen3", dtype="int4")
    with pytest.raises(AttributeError):
        genlab.unload  # noqa: B018
