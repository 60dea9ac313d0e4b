"""Masked diffusion: the objective and its bound against brute force."""

import dataclasses
import functools
import itertools
import json
import math
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.interface import Batch, SpecialIds
from genlab.paradigms.masked_diffusion import MaskedDiffusionConfig, padding_as_text
from genlab.paradigms.model import build_model
from genlab.paradigms.noise import (
    T_MIN,
    mask_exactly,
    mask_with_probability,
    noise_levels,
    random_bits,
)
from pydantic import ValidationError

ORACLE = runpy.run_path(str(Path(__file__).with_name("exact_denoiser.py")))
ExactDenoiser, random_joint, TIED_BITS = (
    ORACLE[name] for name in ("ExactDenoiser", "random_joint", "TIED_BITS")
)

SPECIALS = SpecialIds(bos=12, eos=13, pad=14, mask=15)
KEYS = jax.random.split(jax.random.key(0), 512)


@functools.cache
def small_model(dropout=0.0):
    layers = {
        "conv": {"mixer": {"name": "symmetric_conv", "kernel_size": 3}},
        "attention": {
            "mixer": {"name": "attention", "num_heads": 2},
            "mlp": {"name": "swiglu", "width": 16},
        },
    }
    sizes = {"width": 16, "depth": 2, "max_len": 32, "vocab_size": 16, "dropout": dropout}
    config = ModelConfig.model_validate_json(
        json.dumps({**sizes, "pattern": ["conv", "attention"], "layers": layers})
    )
    return build_model(config, seed=0)


def paradigm(specials=SPECIALS, **settings):
    return MaskedDiffusionConfig(**settings).build(specials)


def text_batch(text, specials):
    """Rows of BOS and text, all one document."""
    text = jnp.asarray(text, jnp.int32)
    tokens = jnp.pad(text, ((0, 0), (1, 0)), constant_values=specials.bos)
    scored = jnp.pad(jnp.ones(text.shape, bool), ((0, 0), (1, 0)))
    return Batch(tokens, jnp.zeros_like(tokens), scored)


def random_batch(rows, length, seed=0):
    return text_batch(np.random.default_rng(seed).integers(0, 12, (rows, length - 1)), SPECIALS)


@functools.partial(jax.jit, static_argnums=0)
def loss(paradigm, model, batch, key):
    return paradigm.loss(model, batch, key=key, train=False)


@functools.partial(jax.jit, static_argnums=0)
def losses(paradigm, model, batch, keys):
    return jax.lax.map(lambda key: paradigm.loss(model, batch, key=key, train=False).nll_sum, keys)


@functools.partial(jax.jit, static_argnums=0)
def hidden_nll(paradigm, model, batch, hidden):
    return paradigm.hidden_nll(model, batch, hidden)


@functools.partial(jax.jit, static_argnums=0)
def likelihood(paradigm, model, batch, key):
    # `draws` and `is_bound` are not arrays; they are looked at outside.
    out = paradigm.log_likelihood(model, batch, key=key)
    return out.nll_nats, out.tokens, out.variance


def subset_nll(paradigm, model, row):
    """Sum of cross-entropies for every set of hidden tokens of one row: {set: nats}."""
    places = np.flatnonzero(np.asarray(paradigm.counted(row)[0]))
    sets = [c for size in range(1, len(places) + 1) for c in itertools.combinations(places, size)]
    hidden = np.zeros((len(sets), row.tokens.shape[1]), bool)
    for index, chosen in enumerate(sets):
        hidden[index, list(chosen)] = True
    many = Batch(*(jnp.repeat(a, len(sets), axis=0) for a in row))
    nll = hidden_nll(paradigm, model, many, jnp.asarray(hidden))
    return dict(zip(sets, np.asarray(jnp.sum(nll, axis=1), np.float64), strict=True))


def exact_bound(paradigm, model, row):
    """E_l E_sets [n/l CE], summed over all sets (LLaDA eq. 6)."""
    by_set = subset_nll(paradigm, model, row)
    n = max(len(s) for s in by_set)
    return sum(
        np.mean([v for s, v in by_set.items() if len(s) == size]) / size
        for size in range(1, n + 1)
    )


def integrated_bound(paradigm, model, row):
    """Integral over t of E_mask [CE / t] (MDLM eq. 10), each set's share of it in closed form."""
    by_set = subset_nll(paradigm, model, row)
    n = max(len(s) for s in by_set)
    # The integral of t^(l-1) (1-t)^(n-l) over 0..1 is (l-1)! (n-l)! / n!.
    return sum(
        v * math.factorial(len(s) - 1) * math.factorial(n - len(s)) / math.factorial(n)
        for s, v in by_set.items()
    )


# --- the bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [False, True])
def test_count_based_and_integrated_bounds_agree(shift):
    row = random_batch(1, 6)
    p = paradigm(shift=shift)
    assert exact_bound(p, small_model(), row) == pytest.approx(
        integrated_bound(p, small_model(), row), rel=1e-6
    )


def test_bound_is_tight_for_the_exact_denoiser_and_above_nll_otherwise():
    joint = random_joint(3, 4)
    oracle = ExactDenoiser(joint)
    wrong = ExactDenoiser(random_joint(3, 4, seed=1))
    p = paradigm(oracle.specials)
    total = 0.0
    for text in ([0, 1, 2, 0], [2, 2, 2, 2], [1, 0, 0, 2]):
        row = text_batch([text], oracle.specials)
        exact = -math.log(float(joint[tuple(text)]))
        # Any order of unmasking multiplies out to the joint law, so the bound is tight.
        assert exact_bound(p, oracle, row) == pytest.approx(exact, abs=1e-4)
        total += exact_bound(p, wrong, row) + math.log(float(wrong.joint[tuple(text)]))
    assert total == pytest.approx(0.0, abs=1e-3)


def test_bound_of_a_network_is_above_its_negative_log_likelihood():
    # A network's conditionals are no law's; averaging over orders, Jensen's inequality remains:
    # E_order[-log p_order(x)] >= -log E_order[p_order(x)].
    row, model, p = random_batch(1, 5), small_model(), paradigm()
    places = [1, 2, 3, 4]
    hidden = np.zeros((16, 5), bool)
    for index, bits in enumerate(itertools.product([False, True], repeat=4)):
        hidden[index, 1:] = bits
    many = Batch(*(jnp.repeat(a, 16, axis=0) for a in row))
    nll = np.asarray(hidden_nll(p, model, many, jnp.asarray(hidden)), np.float64)
    by_set = {tuple(np.flatnonzero(h)): v for h, v in zip(hidden, nll, strict=True)}
    orders = []
    for order in itertools.permutations(places):
        rest = [tuple(sorted(order[i:])) for i in range(4)]
        orders.append(sum(by_set[s][place] for s, place in zip(rest, order, strict=True)))
    bound = exact_bound(p, model, row)
    assert bound == pytest.approx(np.mean(orders), rel=1e-5)
    assert bound > -math.log(np.mean(np.exp(-np.asarray(orders)))) + 1e-6


@pytest.mark.parametrize("text", [[0, 0], [1, 1]])
def test_two_tied_bits_cost_log_two(text):
    oracle = ExactDenoiser(jnp.asarray(TIED_BITS))
    p = paradigm(oracle.specials, draws=2)
    row = text_batch([text], oracle.specials)
    assert exact_bound(p, oracle, row) == pytest.approx(math.log(2), abs=1e-5)


# --- its estimators --------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("low_discrepancy", [False, True])
def test_training_loss_estimates_the_bound_without_bias(shift, low_discrepancy):
    batch, model = random_batch(3, 6), small_model()
    p = paradigm(shift=shift, low_discrepancy=low_discrepancy)
    keys = jax.random.split(jax.random.key(1), 4096)
    values = np.asarray(losses(p, model, batch, keys))
    rows = [Batch(*(a[i : i + 1] for a in batch)) for i in range(3)]
    want = sum(integrated_bound(p, model, row) for row in rows)
    error = values.std() / math.sqrt(len(values))
    # Levels under T_MIN are left out, a relative bias of about T_MIN.
    assert abs(values.mean() - want) < 4 * error + 2 * T_MIN * want
    assert error < 0.02 * want


def test_low_discrepancy_varies_less():
    # Weight 1/t has the same expected loss at every level; it is the other one that levels move.
    batch, model = random_batch(3, 6), small_model()
    keys = jax.random.split(jax.random.key(2), 1024)
    even, independent = (
        np.asarray(losses(paradigm(weight="uniform", low_discrepancy=choice), model, batch, keys))
        for choice in (True, False)
    )
    assert even.var() < 0.7 * independent.var()
    assert even.mean() == pytest.approx(independent.mean(), rel=0.1)


def test_uniform_weight_counts_every_hidden_token_twice():
    batch, model = random_batch(3, 8), small_model()
    p = paradigm(weight="uniform")
    key = jax.random.key(5)
    sums = loss(p, model, batch, key)
    t = noise_levels(jax.random.fold_in(key, 0), 3, low_discrepancy=True)
    hidden = mask_with_probability(jax.random.fold_in(key, 1), batch.loss_mask, t)
    nll = hidden_nll(p, model, batch, hidden)
    assert float(sums.nll_sum) == pytest.approx(2 * float(nll.sum()), rel=1e-5)
    assert float(sums.weight) == 21
    published = loss(paradigm(), model, batch, key)
    assert float(published.nll_sum) == pytest.approx(float((nll / t[:, None]).sum()), rel=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_likelihood_estimator_and_its_variance_are_unbiased(shift):
    model, row = small_model(), random_batch(1, 6)
    batch = Batch(*(jnp.repeat(a, 2048, axis=0) for a in row))
    p = paradigm(shift=shift, draws=4)
    nll, tokens, variance = likelihood(p, model, batch, jax.random.key(3))
    nll, variance = np.asarray(nll), np.asarray(variance)
    want = exact_bound(p, model, row)
    assert abs(nll.mean() - want) < 4 * nll.std() / math.sqrt(2048)
    assert variance.mean() == pytest.approx(nll.var(), rel=0.15)
    assert tokens[0] == 5


def test_more_draws_shrink_the_error():
    model, row = small_model(), random_batch(1, 7)
    batch = Batch(*(jnp.repeat(a, 512, axis=0) for a in row))
    spread = {
        draws: float(likelihood(paradigm(draws=draws), model, batch, KEYS[0])[0].var())
        for draws in (2, 8, 32)
    }
    assert spread[8] < spread[2] / 3
    assert spread[32] < spread[8] / 3
    stated = []
    jax.eval_shape(
        lambda: stated.append(paradigm(draws=2).log_likelihood(model, row, key=KEYS[0])[3:])
    )
    assert stated == [(2, True)]


def test_count_based_estimator_varies_less_than_masking_with_probability_t():
    model, row = small_model(), random_batch(1, 8)
    keys = jax.random.split(jax.random.key(4), 1024)
    p = paradigm(draws=2)
    bernoulli = np.asarray(losses(p, model, row, keys)).var() / 2
    batch = Batch(*(jnp.repeat(a, 1024, axis=0) for a in row))
    assert float(likelihood(p, model, batch, keys[0])[0].var()) < bernoulli / 2


# --- what a row's loss may depend on ----------------------------------------------------------


def padded(batch, length, left=0):
    """The rows with padding of noise on both sides."""
    right = length - left - batch.tokens.shape[1]
    widths = ((0, 0), (left, right))
    return Batch(
        jnp.pad(batch.tokens, widths, constant_values=3),
        jnp.pad(batch.segment_ids, widths, constant_values=-1),
        jnp.pad(batch.loss_mask, widths, constant_values=True),
    )


@pytest.mark.parametrize("shift", [False, True])
def test_padding_is_neither_hidden_nor_counted(shift):
    short = random_batch(2, 6)
    p = paradigm(shift=shift, draws=4)
    got = [loss(p, small_model(), padded(short, length), KEYS[1]) for length in (8, 32)]
    assert float(got[0].nll_sum) == pytest.approx(float(got[1].nll_sum), rel=1e-5)
    assert float(got[0].weight) == float(got[1].weight) == 10
    alone, wide = (
        likelihood(p, small_model(), padded(short, length), KEYS[1]) for length in (8, 32)
    )
    np.testing.assert_allclose(alone[0], wide[0], rtol=1e-5)
    np.testing.assert_array_equal(alone[1], [5, 5])


def test_padding_in_the_loss_equals_eos_as_text():
    batch = padded(random_batch(2, 6), 12)
    as_text = Batch(
        batch.tokens.at[:, 6:].set(SPECIALS.eos), jnp.zeros((2, 12), jnp.int32), batch.loss_mask
    )
    got = loss(paradigm(pad_in_loss=True), small_model(), batch, KEYS[2])
    want = loss(paradigm(), small_model(), as_text, KEYS[2])
    assert float(got.nll_sum) == pytest.approx(float(want.nll_sum), rel=1e-6)
    assert float(got.weight) == float(want.weight) == 22
    off = loss(paradigm(), small_model(), batch, KEYS[2])
    assert float(off.weight) == 10


def test_padding_before_text_and_rows_of_padding_stay_padding():
    segments = jnp.asarray([[-1, 2, -1, 5, -1], [-1] * 5])
    batch = Batch(jnp.ones((2, 5), jnp.int32), segments, segments == 2)
    got = padding_as_text(batch, 13)
    np.testing.assert_array_equal(got.segment_ids, [[-1, 2, 2, 5, 5], [-1] * 5])
    np.testing.assert_array_equal(got.tokens, [[1, 1, 13, 1, 13], [1] * 5])
    np.testing.assert_array_equal(got.loss_mask, [[False, True, True, False, True], [False] * 5])


@pytest.mark.parametrize("shift", [False, True])
def test_packed_documents_do_not_see_one_another(shift):
    # The same set of hidden tokens, packed and as separate rows.
    one, two = random_batch(1, 5, seed=1), random_batch(1, 7, seed=2)
    second = two._replace(segment_ids=two.segment_ids + 1)
    packed = Batch(*(jnp.concatenate(pair, axis=1) for pair in zip(one, second, strict=True)))
    p, model = paradigm(shift=shift), small_model()
    hidden = jnp.asarray(np.random.default_rng(0).random((1, 12)) < 0.6) & p.counted(packed)
    whole = hidden_nll(p, model, packed, hidden)
    alone = [
        hidden_nll(p, model, one, hidden[:, :5]), hidden_nll(p, model, two, hidden[:, 5:])
    ]
    np.testing.assert_allclose(whole, jnp.concatenate(alone, axis=1), atol=1e-5)
    assert np.asarray(p.counted(packed)).sum() == 10


def test_a_row_is_hidden_alike_whatever_its_batch_mates_and_length():
    small, large = random_bits(KEYS[3], (2, 5)), random_bits(KEYS[3], (6, 32))
    np.testing.assert_array_equal(small, large[:2, :5])
    model, p = small_model(), paradigm(draws=4)
    batch = random_batch(4, 6)
    solo = Batch(*(a[:1] for a in batch))
    np.testing.assert_allclose(
        likelihood(p, model, solo, KEYS[4])[0],
        likelihood(p, model, batch, KEYS[4])[0][:1],
        rtol=1e-5,
    )


def test_given_tokens_are_never_hidden():
    batch = random_batch(2, 6)
    given = batch._replace(loss_mask=batch.loss_mask.at[:, 1:3].set(False))
    for index in range(8):
        bits = mask_with_probability(KEYS[index], given.loss_mask, jnp.full((2,), 0.999))
        assert not np.asarray(bits & ~given.loss_mask).any()
    sums = loss(paradigm(), small_model(), given, KEYS[0])
    assert float(sums.weight) == 6


def test_rows_without_scored_tokens_cost_nothing_and_keep_gradients_finite():
    batch, p = random_batch(2, 6), paradigm(draws=2)
    half = batch._replace(
        segment_ids=batch.segment_ids.at[1].set(-1), loss_mask=batch.loss_mask.at[1].set(False)
    )
    empty = half._replace(loss_mask=jnp.zeros_like(half.loss_mask))
    for rows, weight in ((half, 5), (empty, 0)):

        def total(params, rows=rows):
            sums = p.loss(small_model().with_params(params), rows, key=KEYS[5], train=False)
            return sums.nll_sum, sums.weight

        differentiate = jax.jit(jax.value_and_grad(total, has_aux=True))
        (value, got), gradient = differentiate(small_model().params)
        assert np.isfinite(value) and float(got) == weight
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    nll, tokens, variance = likelihood(p, small_model(), half, KEYS[5])
    assert nll[0] > 0
    assert (nll[1], tokens[1], variance[1]) == (0, 0, 0)


# --- parametrisation and noise ----------------------------------------------------------------


def test_the_mask_id_has_no_probability():
    """However loud its row of the head is, the others share all probability."""
    batch, p, model = random_batch(2, 6), paradigm(), small_model()
    hidden = jnp.ones((2, 6), bool)
    loud = dict(model.params)
    loud["embedding"] = loud["embedding"].at[SPECIALS.mask].multiply(50.0)
    outputs = jax.random.normal(KEYS[0], (2, 6, model.config.width))
    for one in (model, model.with_params(loud)):
        free, _ = one.nll(outputs, batch.tokens)
        banned, log_total = one.nll(outputs, batch.tokens, banned=SPECIALS.mask)
        logits = np.delete(np.asarray(one.head(outputs), np.float64), SPECIALS.mask, axis=-1)
        np.testing.assert_allclose(log_total, np.log(np.exp(logits).sum(-1)), rtol=1e-5)
        assert (np.asarray(banned) <= np.asarray(free)).all()
    assert np.isfinite(hidden_nll(p, model.with_params(loud), batch, hidden)).all()


def test_visible_tokens_cost_nothing():
    batch, p = random_batch(2, 6), paradigm()
    hidden = jnp.zeros((2, 6), bool).at[:, 2].set(True)
    nll = np.asarray(hidden_nll(p, small_model(), batch, hidden))
    assert (nll[:, 2] > 0).all()
    assert (np.delete(nll, 2, axis=1) == 0).all()


def test_noise_levels_are_uniform_and_low_discrepancy_ones_spread_evenly():
    levels = jax.vmap(lambda key: noise_levels(key, 4, low_discrepancy=True))(KEYS)
    independent = jax.vmap(lambda key: noise_levels(key, 4, low_discrepancy=False))(KEYS)
    for t in (np.asarray(levels), np.asarray(independent)):
        assert (t >= T_MIN).all() and (t < 1).all()
        for row in range(4):  # each row's own level is uniform
            counts = np.histogram(t[:, row], bins=8, range=(0, 1))[0]
            assert ((counts - 64) ** 2 / 64).sum() < 24.3  # chi-square, 7 degrees, p = 0.001
    quarters = np.sort((np.asarray(levels) - T_MIN) / (1 - T_MIN), axis=1) // 0.25
    np.testing.assert_array_equal(quarters, np.tile([0, 1, 2, 3], (512, 1)))


def test_mask_exactly_draws_every_set_equally_often():
    maskable = jnp.asarray([[False, True, True, True, False, True]])
    masks = jax.vmap(lambda key: mask_exactly(key, maskable, jnp.asarray([2])))(
        jax.random.split(jax.random.key(6), 1200)
    )
    masks = np.asarray(masks)[:, 0]
    assert (masks.sum(axis=1) == 2).all() and not masks[:, [0, 4]].any()
    _, counts = np.unique(masks, axis=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 20.5  # chi-square, 5 degrees, p = 0.001


def test_dropout_only_while_training():
    batch, model = random_batch(2, 6), small_model(dropout=0.5)
    p = paradigm()
    quiet = loss(p, model, batch, KEYS[7]).nll_sum
    same = loss(p, small_model(), batch, KEYS[7]).nll_sum
    noisy = jax.jit(lambda m: p.loss(m, batch, key=KEYS[7], train=True).nll_sum)(model)
    assert float(quiet) == pytest.approx(float(same), rel=1e-6)
    assert abs(float(noisy) - float(quiet)) > 1e-3


def test_config_refuses_odd_draws_and_unknown_weights():
    with pytest.raises(ValidationError, match="draws=3: want an even number"):
        MaskedDiffusionConfig(draws=3)
    with pytest.raises(ValidationError, match="inverse_t"):
        MaskedDiffusionConfig(weight="inverse")
    assert dataclasses.asdict(paradigm())["inverse_t"] is True
