"""The n-gram model against the equations written out with dictionaries."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.eval.ngram import JudgeScore, NgramModel, perplexity

BOS = 7
V = 8


def reference_probability(sequences, order, history, word):
    """Interpolated modified Kneser-Ney, one word at a time (Chen & Goodman 1999, eq. 26, 27)."""
    counts = [Counter() for _ in range(order + 1)]
    left = [defaultdict(set) for _ in range(order + 1)]
    for sequence in sequences:
        documents = []
        for token in sequence:
            if token == BOS:
                documents.append([])
            documents[-1].append(token)
        for document in documents:
            for end in range(1, len(document)):
                for k in range(1, order + 1):
                    start = end - k + 1
                    if start < 0:
                        continue
                    gram = tuple(document[start : end + 1])
                    counts[k][gram] += 1
                    if start > 0:
                        left[k][gram].add(document[start - 1])

    def count(gram):
        k = len(gram)
        if k == order or gram[0] == BOS:
            return counts[k][gram]
        return len(left[k][gram])

    def discounts(k):
        values = [count(gram) for gram in counts[k]]
        n = [sum(value == c for value in values) for c in range(1, 5)]
        if min(n[:3]) > 0:
            y = n[0] / (n[0] + 2 * n[1])
            d = [c - (c + 1) * y * n[c] / n[c - 1] for c in (1, 2, 3)]
            if all(0 <= value <= c for c, value in enumerate(d, 1)):
                return d
        return [0.5, 1.0, 1.5]

    def discount(c, d):
        return 0.0 if c == 0 else d[min(c, 3) - 1]

    def probability(context, w):
        k = len(context) + 1
        lower = probability(context[1:], w) if context else 1 / V
        followers = [count(g) for g in counts[k] if g[:-1] == context]
        if sum(followers) == 0:
            return lower
        d = discounts(k)
        c = count((*context, w))
        gamma = sum(discount(f, d) for f in followers) / sum(followers)
        return (c - discount(c, d)) / sum(followers) + gamma * lower

    history = list(history)
    last_bos = len(history) - 1 - history[::-1].index(BOS)
    usable = history[last_bos:][-(order - 1) :] if order > 1 else []
    return probability(tuple(usable), word)


def random_sequences(seed, count=6, length=60):
    rng = np.random.default_rng(seed)
    step = rng.dirichlet(np.full(6, 0.4), size=6)
    rows = []
    for _ in range(count):
        row, state = [BOS], int(rng.integers(6))
        for _ in range(length):
            if rng.random() < 0.05:
                row.append(BOS)
            state = int(rng.choice(6, p=step[state]))
            row.append(state)
        rows.append(row)
    return rows


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_equations(order):
    train = random_sequences(0)
    model = NgramModel.fit(train, vocab_size=V, bos_id=BOS, order=order)
    for sequence in random_sequences(1, count=2, length=25):
        nats = model.token_nats([sequence])[0]
        for i, token in enumerate(sequence):
            if token == BOS:
                assert nats[i] == 0
            else:
                expected = reference_probability(train, order, sequence[:i], token)
                assert math.exp(-nats[i]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "context", [[BOS], [BOS, 0], [BOS, 1, 2, 3, 0, 1], [BOS, 6, 6, 6, 6], [BOS, 0, BOS, 5, 1]]
)
def test_sums_to_one_for_any_context(order, context):
    model = NgramModel.fit(random_sequences(2), vocab_size=V, bos_id=BOS, order=order)
    probabilities = model.next_token_probabilities(context)
    assert probabilities.shape == (V,)
    assert (probabilities > 0).all()  # id 6 is never seen and still has mass
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    if context[-1] != BOS:  # the same path scores text
        for w in range(V - 1):
            nats = model.token_nats([[*context, w]])[0][-1]
            assert math.exp(-nats) == pytest.approx(probabilities[w], rel=1e-12)


def test_known_entropy_of_a_markov_chain():
    """On text from a chain of known entropy rate the bigram comes within 1 % of it."""
    rng = np.random.default_rng(3)
    matrix = np.array([[0.9, 0.1, 0.0], [0.0, 0.2, 0.8], [0.5, 0.0, 0.5]])
    stationary = np.linalg.matrix_power(matrix, 200)[0]
    logs = np.log(np.where(matrix > 0, matrix, 1))
    rate = -(stationary[:, None] * matrix * logs).sum()

    def chain(n):
        cumulative, state, out = matrix.cumsum(1), 0, [BOS]
        for u in rng.random(n):
            state = int(np.searchsorted(cumulative[state], u, side="right"))
            out.append(state)
        return out

    model = NgramModel.fit([chain(40_000)], vocab_size=V, bos_id=BOS, order=2)
    score = model.nats([chain(40_000)])
    assert score.nats.sum() / score.tokens.sum() == pytest.approx(rate, rel=0.01)


def test_windows_carry_no_history_and_bos_is_not_scored():
    model = NgramModel.fit(random_sequences(4), vocab_size=V, bos_id=BOS, order=3)
    a, b = [BOS, 1, 2, 3], [BOS, 4, 5]
    together = model.nats([a, b])
    assert together.tokens.tolist() == [3, 2]
    np.testing.assert_allclose(
        together.nats, [model.nats([a]).nats[0], model.nats([b]).nats[0]], rtol=1e-12
    )
    packed = model.nats([a + b])
    assert packed.tokens.tolist() == [5]
    assert packed.nats[0] == pytest.approx(together.nats.sum(), rel=1e-12)


def test_score_from_leaves_the_prompt_out():
    model = NgramModel.fit(random_sequences(5), vocab_size=V, bos_id=BOS, order=3)
    ids = [BOS, 1, 2, 3, 4, 5]
    each = model.token_nats([ids])[0]
    score = model.nats([ids, ids], score_from=[3, 1])
    assert score.tokens.tolist() == [3, 5]
    np.testing.assert_allclose(score.nats, [each[3:].sum(), each.sum()], rtol=1e-12)


def test_uniform_data_has_perplexity_of_the_alphabet():
    rng = np.random.default_rng(6)
    rows = [[BOS, *rng.integers(0, 4, 20_000).tolist()]]
    model = NgramModel.fit(rows, vocab_size=V, bos_id=BOS, order=1)
    assert perplexity(model.nats(rows)) == pytest.approx(4, rel=1e-3)


def test_large_vocabularies_do_not_overflow():
    ids = np.arange(1, 400_001, 7) % 200_000
    train = [np.concatenate([[0], ids])]
    model = NgramModel.fit(train, vocab_size=200_001, bos_id=0, order=6)
    assert perplexity(model.nats(train)) < 3


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        ([[BOS, 1, 8]], "id 8 is outside the vocabulary of 8"),
        ([[BOS, 1, -1]], "id -1 is outside"),
        ([[BOS, 1], [1, 2]], "sequence 1 starts with id 1, not with BOS"),
        ([[BOS], [BOS]], "nothing but BOS"),
    ],
)
def test_bad_ids_are_refused(sequences, message):
    with pytest.raises(DataError, match=message):
        NgramModel.fit(sequences, vocab_size=V, bos_id=BOS)


def test_perplexity_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one scored token"):
        perplexity(JudgeScore(np.zeros(1), np.zeros(1, int)))
