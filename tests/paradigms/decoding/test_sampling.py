"""Filters against their definitions, and draws against the laws they must follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.paradigms.backbone import MASKED
from genlab.paradigms.decoding import sampling as module
from genlab.paradigms.decoding.sampling import (
    Purpose,
    draw,
    filter_logits,
    log_probabilities,
    make_sampling,
    non_finite,
    position_keys,
)
from genlab.paradigms.decoding.state import row_keys

VOCAB = 8
BATCH = 64
DRAWS = 20_000
CHI2_999 = {7: 24.32, 6: 22.46, 5: 20.52, 4: 18.47, 3: 16.27, 2: 13.82}  # by degrees of freedom

compiled_filter = jax.jit(filter_logits)
compiled_draw = jax.jit(draw, static_argnames="purpose")
compiled_log_probabilities = jax.jit(log_probabilities)


def slow_law(logits, temperature, top_k, top_p, min_p, forbidden):
    """Probabilities of one row by the definitions, one filter after the other, float64."""
    logits = np.asarray(logits, np.float64)
    alive = [i for i in range(len(logits)) if i not in forbidden]
    order = sorted(alive, key=lambda i: (-logits[i], i))  # among equals the lower id first
    if temperature == 0:
        return np.eye(len(logits))[order[0]]
    weight = {i: np.exp((logits[i] - logits[order[0]]) / temperature) for i in alive}
    if top_k > 0:
        order = order[:top_k]
    total = sum(weight[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1 and kept and mass >= top_p:
            break
        kept.append(i)
        mass += weight[i] / total
    kept = [i for i in kept if weight[i] >= min_p * weight[order[0]]]
    law = np.zeros(len(logits))
    for i in kept:
        law[i] = weight[i]
    return law / law.sum()


def random_settings(rng):
    """One row's settings, each filter off about half of the time."""
    return {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 3.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 5, VOCAB, VOCAB + 3])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-6, 0.37, 0.613, 0.9])),
        "min_p": float(rng.choice([0.0, 0.0, 0.05, 0.31, 0.7, 1.0])),
    }


@pytest.mark.parametrize("seed", range(12))
def test_filters_follow_their_definitions_in_order(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(BATCH, VOCAB)).astype(np.float32) * 2
    if seed % 2:
        logits = np.round(logits)  # many ties
    rows = [random_settings(rng) for _ in range(BATCH)]
    forbidden = sorted(rng.choice(VOCAB, size=seed % 4, replace=False).tolist())
    settings = make_sampling(
        BATCH,
        vocab_size=VOCAB,
        forbidden_ids=forbidden,
        **{name: [row[name] for row in rows] for name in rows[0]},
    )
    got = np.exp(np.asarray(compiled_log_probabilities(logits, settings), np.float64))
    for row, values in enumerate(rows):
        want = slow_law(logits[row], **values, forbidden=forbidden)
        np.testing.assert_array_equal(got[row] > 0, want > 0, err_msg=f"{values} {logits[row]}")
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=1e-7, err_msg=str(values))


def kept(logits, settings):
    """Which ids the filters leave, as lists."""
    return (np.asarray(filter_logits(logits, settings)) > MASKED).tolist()


def test_top_p_works_on_what_top_k_left():
    # Of 0.4, 0.3, 0.2, 0.1 the two best hold 4/7 and 3/7: 0.55 is reached by the first alone.
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    both = make_sampling(1, vocab_size=4, top_k=2, top_p=0.55)
    only = make_sampling(1, vocab_size=4, top_p=0.55)
    assert kept(logits, both) == [[False, True, False, False]]
    assert kept(logits, only) == [[False, True, False, True]]


def test_the_temperature_comes_before_top_p():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    hot = make_sampling(1, vocab_size=3, top_p=0.5, temperature=4.0)
    assert kept(logits, hot) == [[True, True, False]]


def test_forbidden_ids_do_not_count_in_any_filter():
    logits = np.array([[9.0, 1.0, 0.5, 0.0]], np.float32)
    settings = make_sampling(1, vocab_size=4, top_k=2, forbidden_ids=[0])
    assert kept(logits, settings) == [[False, True, True, False]]


def test_filters_that_are_off_leave_the_softmax():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    law = compiled_log_probabilities(logits, make_sampling(3, vocab_size=VOCAB))
    np.testing.assert_allclose(law, jax.nn.log_softmax(logits), atol=1e-6)


def chi_square(ids, law):
    """Pearson's statistic; asserts that nothing impossible was drawn."""
    counts = np.bincount(np.asarray(ids).reshape(-1), minlength=len(law))
    assert counts[law == 0].sum() == 0
    want = law[law > 0] * counts.sum()
    return ((counts[law > 0] - want) ** 2 / want).sum(), int((law > 0).sum()) - 1


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_law(values, vary):
    logits = np.log(np.array([0.3, 0.02, 0.2, 0.08, 0.05, 0.15, 0.12, 0.08], np.float32))
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    law = slow_law(logits, **full, forbidden=())
    numbers = np.arange(DRAWS, dtype=np.int32)
    seeds, positions = (numbers, numbers * 0 + 3) if vary == "seed" else (numbers * 0 + 3, numbers)
    settings = make_sampling(DRAWS, vocab_size=VOCAB, **values)
    ids = compiled_draw(
        np.broadcast_to(logits, (DRAWS, VOCAB)), row_keys(seeds), positions, 0, settings
    )
    statistic, freedom = chi_square(ids, law)
    assert statistic < CHI2_999[freedom]


def test_draws_at_neighbouring_positions_are_independent():
    positions = np.arange(DRAWS, dtype=np.int32)
    ids = np.asarray(
        compiled_draw(
            np.zeros((DRAWS, VOCAB), np.float32),
            row_keys(np.zeros(DRAWS, np.int32)),
            positions,
            0,
            make_sampling(DRAWS, vocab_size=VOCAB),
        )
    )
    pairs = (ids[:-1] % 2) * 2 + ids[1:] % 2
    statistic, _ = chi_square(pairs, np.full(4, 0.25))
    assert statistic < CHI2_999[3]


def some_draws(positions, purpose=Purpose.TOKEN, seeds=None, **values):
    """Eight uniform rows, drawn at the positions."""
    batch = len(positions)
    seeds = np.arange(batch) if seeds is None else seeds
    settings = make_sampling(batch, vocab_size=1000, **values)
    logits = np.zeros((batch, 1000), np.float32)
    return np.asarray(draw(logits, row_keys(seeds), np.asarray(positions), purpose, settings))


def test_a_draw_depends_on_seed_position_and_purpose_alone():
    base = some_draws([5, 6, 7])
    np.testing.assert_array_equal(some_draws([7, 5, 6], seeds=[2, 0, 1]), base[[2, 0, 1]])
    np.testing.assert_array_equal(some_draws([6], seeds=[1]), base[1:2])
    for other in (
        some_draws([6, 7, 8]),
        some_draws([5, 6, 7], purpose=Purpose.ORDER),
        some_draws([5, 6, 7], seeds=[10, 11, 12]),
    ):
        assert (other != base).all()


def test_positions_may_have_more_axes():
    logits = np.random.default_rng(1).normal(size=(2, 3, VOCAB)).astype(np.float32)
    settings = make_sampling(2, vocab_size=VOCAB, top_k=[0, 3], temperature=[1.0, 0.0])
    positions = np.array([[4, 5, 6], [0, 1, 2]], np.int32)
    keys = row_keys(np.array([8, 9]))
    got = draw(logits, keys, positions, Purpose.TOKEN, settings)
    for at in range(3):
        want = draw(logits[:, at], keys, positions[:, at], Purpose.TOKEN, settings)
        np.testing.assert_array_equal(got[:, at], want)
    assert position_keys(keys, positions, 0).shape == (2, 3)


def test_temperature_zero_is_the_argmax_and_a_tie_goes_to_the_lower_id():
    logits = np.array([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]], np.float32)
    for seed in range(5):
        for values in ({}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
            settings = make_sampling(2, vocab_size=4, temperature=0, **values)
            keys = row_keys(np.array([seed, seed + 1]))
            assert draw(logits, keys, np.zeros(2, np.int32), 0, settings).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-9, 1e-30])
def test_a_tiny_temperature_is_the_argmax_too(temperature):
    logits = np.array([[1.0, 900.0, 899.9, -900.0]], np.float32)
    settings = make_sampling(1, vocab_size=4, temperature=temperature)
    law = np.asarray(log_probabilities(logits, settings))
    assert np.isfinite(law).all() and law[0, 1] == 0
    ids = draw(logits, row_keys(np.array([1])), np.zeros(1, np.int32), 0, settings)
    assert ids.tolist() == [1]


def test_no_temperature_makes_a_padded_or_forbidden_id_possible():
    logits = np.array([[0.0, 1.0, MASKED, 2.0]], np.float32)
    settings = make_sampling(1, vocab_size=4, temperature=3e38, forbidden_ids=[3])
    law = np.asarray(log_probabilities(logits, settings))
    np.testing.assert_allclose(np.exp(law), [[0.5, 0.5, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("noise", [np.inf, -np.inf, 0.0, 88.0])
@pytest.mark.parametrize("values", [{}, {"top_k": 2}, {"min_p": 0.5}, {"temperature": 1e20}])
def test_extreme_noise_never_draws_what_is_excluded(monkeypatch, noise, values):
    def extreme(key, shape, *args, **kwargs):
        # On every second id, forbidden ones among them, and the opposite on the others.
        return jnp.where(jnp.arange(shape[0]) % 2 == 0, noise, -noise).astype(jnp.float32)

    monkeypatch.setattr(module.jax.random, "gumbel", extreme)
    logits = np.array([[9.0, 1.0, MASKED, 0.9, 8.0, 0.8]] * 2, np.float32)
    settings = make_sampling(2, vocab_size=6, forbidden_ids=[0, 4], **values)
    ids = draw(logits, row_keys(np.arange(2)), np.zeros(2, np.int32), 0, settings)
    assert set(np.asarray(ids).tolist()) <= {1, 3, 5}


def test_bfloat16_logits_are_filtered_in_float32():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, VOCAB)), jnp.bfloat16)
    assert filter_logits(logits, make_sampling(2, vocab_size=VOCAB)).dtype == jnp.float32


def test_settings_are_data():
    fresh = jax.jit(lambda *a: draw(*a[:3], 0, a[3]))
    rng = np.random.default_rng(5)
    logits, keys = np.zeros((2, VOCAB), np.float32), row_keys(np.arange(2))
    for number in range(20):
        row = random_settings(rng)
        settings = make_sampling(
            2, vocab_size=VOCAB, **row, stop_ids=range(number % 5), forbidden_ids=[number % 3]
        )
        fresh(logits, keys, np.full(2, number, np.int32), settings)
    assert fresh._cache_size() == 1


def test_broken_logits_are_seen():
    logits = np.zeros((4, 3), np.float32)
    logits[1, 2], logits[2, 0], logits[3, 1] = np.nan, np.inf, -np.inf
    assert non_finite(logits).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature: got -0.1, want 0 or at least"),
        ({"temperature": [1.0, 1e-31]}, "temperature: got 1e-31, want 0 or at least"),
        ({"temperature": float("nan")}, "temperature: got nan, want finite numbers"),
        ({"temperature": float("inf")}, "temperature: got inf, want finite numbers"),
        ({"temperature": "hot"}, "temperature: got 'hot', want numbers"),
        ({"temperature": [1.0]}, r"temperature: got shape \(1,\), want one number or one for each"),
        ({"top_k": -1}, "top_k: got -1, want at least 0"),
        ({"top_k": 1.5}, "top_k: got 1.5, want whole numbers"),
        ({"top_p": 0.0}, "top_p: got 0, want more than 0"),
        ({"top_p": 1.01}, "top_p: got 1.01, want more than 0 and at most 1"),
        ({"min_p": -0.5}, "min_p: got -0.5, want from 0 to 1"),
        ({"min_p": 2}, "min_p: got 2, want from 0 to 1"),
        ({"steps": -2}, "steps: got -2, want at least 0"),
        ({"forbidden_ids": [8]}, "forbidden_ids: got 8, want ids from 0 to 7"),
        ({"stop_ids": [-1]}, "stop_ids: got -1, want ids from 0 to 7"),
        ({"forbidden_ids": range(8)}, "forbidden_ids: all 8 ids are forbidden"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        make_sampling(2, vocab_size=8, **values)


def test_greedy_rows_beside_do_not_change_what_a_row_draws():
    logits = jax.random.normal(jax.random.key(5), (BATCH, VOCAB)) / 4
    keys, positions = row_keys(np.arange(BATCH)), jnp.arange(BATCH)
    temperature = np.where(np.arange(BATCH) % 2, 1.0, 0.0)

    def drawn(temperature):
        sampling = make_sampling(BATCH, vocab_size=VOCAB, temperature=temperature)
        return np.asarray(compiled_draw(logits, keys, positions, Purpose.TOKEN, sampling))

    mixed, warm, greedy = drawn(temperature), drawn(1.0), drawn(0.0)
    np.testing.assert_array_equal(greedy, np.argmax(logits, axis=-1))
    assert (warm != greedy)[1::2].any()
    np.testing.assert_array_equal(mixed, np.where(temperature > 0, warm, greedy))
