"""The autoregressive loss: one shift, no border crossed, sums that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.interface import Batch
from genlab.paradigms.model import build_model

VOCAB = 11
PLAIN = Autoregressive()


@pytest.fixture(scope="module")
def model():
    text = (
        '{"width": 16, "pattern": ["a"], "max_len": 32, "vocab_size": 11, "pad_vocab_to": 8,'
        ' "layers": {"a": {"mixer": {"name": "attention", "num_heads": 2},'
        ' "mlp": {"name": "swiglu", "width": 24}}}}'
    )
    return build_model(ModelConfig.model_validate_json(text), seed=0)


def make_batch(rows, segments=None, mask=None):
    tokens = jnp.asarray(rows, jnp.int32)
    segments = jnp.zeros_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    return Batch(tokens, segments, mask)


@jax.jit
def logits_of(model, tokens):
    return model.head(model(tokens)[0].hidden)


def numpy_logits(model, row):
    """Logits at every position of one row, over the real vocabulary, float64."""
    padded = jnp.asarray([row + [0] * (8 - len(row))], jnp.int32)
    return np.asarray(logits_of(model, padded), np.float64)[0, : len(row), :VOCAB]


def sums(model, batch, paradigm=PLAIN):
    return jax.jit(lambda m, b: paradigm.loss(m, b, key=jax.random.key(0), train=False))(
        model, batch
    )


def slow_nll(model, row):
    """Token by token from the definition."""
    logits = numpy_logits(model, row)
    total = 0.0
    for t in range(1, len(row)):
        total -= logits[t - 1][row[t]] - np.log(np.exp(logits[t - 1]).sum())
    return total


def test_each_token_is_scored_against_the_logits_before_it(model):
    row = [3, 0, 7, 7, 10, 1]
    result = sums(model, make_batch([row]))
    assert float(result.weight) == 5
    np.testing.assert_allclose(float(result.nll_sum), slow_nll(model, row), rtol=1e-5)


def test_token_zero_is_a_token_like_any_other(model):
    result = sums(model, make_batch([[1, 0, 0, 0]]))
    assert float(result.weight) == 3


def test_padding_changes_neither_sum_nor_count(model):
    row = [3, 1, 4, 1, 5, 9]
    alone = sums(model, make_batch([row]))
    padded = make_batch(
        [row + [2] * 6, [2] * 3 + row + [2] * 3],
        [[0] * 6 + [-1] * 6, [-1] * 3 + [0] * 6 + [-1] * 3],
    )
    both = sums(model, padded)
    assert float(both.weight) == 2 * float(alone.weight)
    np.testing.assert_allclose(float(both.nll_sum), 2 * float(alone.nll_sum), rtol=1e-5)


def test_packed_documents_equal_separate_ones(model):
    first, second = [1, 2, 3, 4], [5, 6, 7]
    packed = sums(model, make_batch([first + second], [[0] * 4 + [1] * 3]))
    apart = [sums(model, make_batch([row])) for row in (first, second)]
    assert float(packed.weight) == 5
    total = sum(float(result.nll_sum) for result in apart)
    np.testing.assert_allclose(float(packed.nll_sum), total, rtol=1e-5)


def test_loss_mask_says_which_targets_count(model):
    row = [1, 2, 3, 4, 5]
    whole = slow_nll(model, row)
    prompt = slow_nll(model, row[:3])
    result = sums(model, make_batch([row], mask=[[False, False, False, True, True]]))
    assert float(result.weight) == 2
    np.testing.assert_allclose(float(result.nll_sum), whole - prompt, rtol=1e-5)


def test_a_batch_of_padding_has_no_weight_and_a_finite_gradient(model):
    batch = make_batch([[1, 2, 3]], [[-1, -1, -1]])

    def loss(params):
        result = sums(model.with_params(params), batch)
        return result.nll_sum + result.aux_sum, result.weight

    (value, weight), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
    assert float(value) == 0 and float(weight) == 0
    assert all(bool(jnp.all(leaf == 0)) for leaf in jax.tree.leaves(gradient))


def test_z_loss_is_the_scaled_square_of_the_log_denominator(model):
    row = [1, 2, 3, 4]
    result = sums(model, make_batch([row]), Autoregressive(z_loss=0.5))
    logits = numpy_logits(model, row)[:-1]
    expected = 0.5 * (np.log(np.exp(logits).sum(-1)) ** 2).sum()
    np.testing.assert_allclose(float(result.aux_sum), expected, rtol=1e-5)
    assert float(result.aux_weight) == 3


def test_likelihood_is_exact_and_per_row(model):
    rows = [[1, 2, 3, 4], [4, 3, 2, 1]]
    result = Autoregressive().log_likelihood(model, make_batch(rows), key=jax.random.key(0))
    assert not result.is_bound and result.draws == 0
    expected = [slow_nll(model, row) for row in rows]
    np.testing.assert_allclose(np.asarray(result.nll_nats), expected, rtol=1e-5)
    assert result.tokens.tolist() == [3, 3]


def test_padded_vocabulary_takes_no_probability(model):
    probability = jax.nn.softmax(logits_of(model, jnp.zeros((1, 8), jnp.int32)))
    assert probability.shape[-1] == 16
    assert float(probability[..., VOCAB:].max()) == 0.0
