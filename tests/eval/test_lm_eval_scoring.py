"""Log-likelihoods of continuations: equal to direct computation, whatever the batch."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.eval.lm_eval import scoring
from genlab.eval.lm_eval.forward import score_causal, score_choices
from genlab.eval.lm_eval.scoring import Pair, Scorer, windows
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.interface import Batch
from genlab.paradigms.masked_diffusion import MaskedDiffusion
from genlab.paradigms.masks import Full
from genlab.paradigms.model import build_model

VOCAB, MASK, MAX_LEN, WIDTH = 23, 22, 88, 36
LAYERS = {
    "a": {"mixer": {"name": "attention", "num_heads": 2, "num_kv_heads": 1}},
    "s": {"mixer": {"name": "mamba2", "state_size": 4, "head_dim": 8}},
}
PATTERNS = {"transformer": "a", "hybrid": "sa"}
DIFFUSION = MaskedDiffusion(
    mask_id=MASK, eos_id=1, inverse_t=True, low_discrepancy=True, shift=False, pad_in_loss=False,
    draws=6,
)  # fmt: skip
DRAW = np.random.default_rng(3)
PAIRS = [
    Pair(DRAW.integers(0, MASK, before).tolist(), DRAW.integers(0, MASK, after).tolist())
    for before, after in [(1, 1), (5, 3), (11, 5), (13, 14), (1, 12), (7, 1), (3, 29)]
]


@functools.cache
def model(pattern):
    config = {
        "width": 16, "vocab_size": VOCAB, "max_len": MAX_LEN, "pattern": list(pattern),
        "layers": {name: LAYERS[name] for name in set(pattern)},
    }  # fmt: skip
    made = build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=5)
    louder = jax.tree.map(lambda leaf: leaf * (6.0 if leaf.ndim == 2 else 1.0), made.params)
    return made.with_params(louder).prepare("float32")


def batch_of(pairs, hidden=None):
    """All pairs in one batch of whole rows, the continuations to be scored."""
    shape = (len(pairs), WIDTH)
    tokens, segments = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    mask = np.zeros(shape, bool)
    for row, (context, continuation) in enumerate(pairs):
        length = len(context) + len(continuation)
        tokens[row, :length], segments[row, :length] = [*context, *continuation], 0
        mask[row, len(context) : length] = True
    return Batch(*map(jnp.asarray, (tokens, segments, mask)))


@functools.cache
def direct(name):
    """What the paradigm itself says of `PAIRS`, and the argmax of every position."""

    @jax.jit
    def compute(net, batch):
        out, _ = net(batch.tokens)
        return (
            Autoregressive().log_likelihood(net, batch, key=jax.random.key(0)).nll_nats,
            jnp.argmax(net.head(out.hidden), -1),
        )

    return jax.tree.map(np.asarray, compute(model(PATTERNS[name]), batch_of(PAIRS)))


def values(scores):
    return np.array([score.log_likelihood for score in scores])


@pytest.mark.parametrize("name", PATTERNS)
def test_equal_to_direct_computation_whatever_the_batch(name):
    net, (nats, best) = model(PATTERNS[name]), direct(name)
    greedy = [
        best[row, len(c) - 1 : len(c) + len(x) - 1].tolist() == x
        for row, (c, x) in enumerate(PAIRS)
    ]
    # Pairs whose continuation is what the model would say, so that some are greedy.
    said = [Pair(c, [int(best[row, len(c) - 1])]) for row, (c, _) in enumerate(PAIRS)]
    for batch_size in (4, 1) if name == "transformer" else (4,):
        scorer = Scorer(net, Autoregressive(), batch_size=batch_size)
        scores = scorer.score([*PAIRS, *said])
        np.testing.assert_allclose(values(scores[: len(PAIRS)]), -nats, rtol=2e-5, atol=2e-5)
        assert [s.greedy for s in scores] == [*greedy, *[True] * len(said)]
        assert all(s.variance == 0 for s in scores)


def test_parts_of_a_continuation_add_up():
    """Choices cannot gain from where they are cut."""
    context, continuation = PAIRS[3]
    cuts = [Pair([*context, *continuation[:i]], continuation[i : i + 1]) for i in range(14)]
    whole, *parts = values(Scorer(model("a"), Autoregressive()).score([PAIRS[3], *cuts]))
    assert math.isclose(whole, sum(parts), rel_tol=1e-5)


def test_a_uniform_model_is_at_chance():
    net = model("a")
    flat = net.with_params(jax.tree.map(jnp.zeros_like, net.params))
    counts = np.array([len(pair.continuation) for pair in PAIRS])
    found = values(Scorer(flat, Autoregressive(), batch_size=4).score(PAIRS))
    np.testing.assert_allclose(found, -counts * math.log(VOCAB), rtol=1e-6)


def test_truncation_keeps_the_end():
    scorer = Scorer(model("a"), Autoregressive(), batch_size=4, max_len=16)
    context, continuation = PAIRS[3]
    whole, cut, longer = values(
        scorer.score(
            [
                PAIRS[3],
                Pair(context[-3:], continuation),
                Pair([9, 9, *context], continuation),
            ]
        )
    )
    assert whole == pytest.approx(cut, rel=1e-6) and whole == pytest.approx(longer, rel=1e-6)
    free = Scorer(model("a"), Autoregressive(), batch_size=4).score([PAIRS[3]])[0]
    assert abs(free.log_likelihood - whole) > 1e-2  # the cut part did matter


def test_a_longer_continuation_is_scored_in_windows():
    scorer = Scorer(model("a"), Autoregressive(), batch_size=4, max_len=16)
    context, continuation = PAIRS[6]
    parts = windows(PAIRS[6], 16)
    assert [len(part.continuation) for part in parts] == [16, 13]
    assert [len(part.context) for part in parts] == [1, 4]
    assert [i for part in parts for i in part.continuation] == continuation
    assert parts[0].context == context[-1:] and parts[1].context == continuation[12:16]
    whole, *each = scorer.score([PAIRS[6], *parts])
    assert whole.log_likelihood == pytest.approx(sum(s.log_likelihood for s in each), rel=1e-6)
    assert whole.greedy == all(s.greedy for s in each)


@pytest.mark.parametrize("max_len", [2, 7, 64])
def test_windows_change_nothing_where_one_token_is_all_the_context(max_len):
    """A thousand tokens of a bigram model, whose likelihood is a sum over a table."""
    net = model("a")
    deaf = jax.tree.map(jnp.array, net.params)
    deaf["layer_0"]["mixer"]["w_o"] *= 0
    net = net.with_params(deaf)
    each = jnp.arange(VOCAB)[:, None]
    logits = np.asarray(net.head(net(each)[0].hidden), np.float64)[:, 0]
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.random.default_rng(0).integers(0, VOCAB, 1001)
    pair = Pair(ids[:1].tolist(), ids[1:].tolist())
    scorer = Scorer(net, Autoregressive(), batch_size=32, max_len=max_len)
    (found,) = values(scorer.score([pair]))
    assert table.std() > 0.1
    assert found == pytest.approx(table[ids[:-1], ids[1:]].sum(), rel=1e-6)


def test_nothing_to_score():
    scores = Scorer(model("a"), Autoregressive()).score([Pair([1], []), PAIRS[0]])
    assert scores[0] == (0.0, True, 0.0) and scores[1].log_likelihood < 0
    assert Scorer(model("a"), Autoregressive()).score([]) == []


def test_lengths_share_a_few_programs():
    scorer = Scorer(model("a"), Autoregressive(), batch_size=4)
    pairs = [Pair([1] * before, [2] * after) for before in (1, 4, 25) for after in range(1, 9)]
    scorer.score(pairs)
    before = score_causal._cache_size() + score_choices._cache_size()
    seen = []
    scores = scorer.score(pairs[::-1], lambda number, score: seen.append((number, score)))
    assert score_causal._cache_size() + score_choices._cache_size() == before
    widths = {scorer._width(length) for length in range(2, MAX_LEN + 2)}
    assert widths == {16, 24, 32, 48, 64, 88}
    assert sorted(seen) == list(enumerate(scores))


@pytest.mark.parametrize("shift", [False, True])
def test_a_bound_is_the_mean_over_its_draws(shift):
    """The draws' masks, recomputed with the paradigm's own cross-entropy."""
    paradigm = MaskedDiffusion(**vars(DIFFUSION) | {"shift": shift})
    net = model("a")
    scorer = Scorer(net, paradigm, batch_size=5, seed=3)
    cross_entropy = jax.jit(lambda net, *rows: paradigm.hidden_nll(net, *rows))
    pairs = PAIRS[:3] if shift else PAIRS
    scores = scorer.score(pairs)
    for number, pair in enumerate(pairs):
        rows = list(scorer._rows_of(number, pair))
        hidden = np.zeros((7, WIDTH), bool)
        for row, one in enumerate(rows):
            hidden[row, : len(one.scored)] = one.scored
        nats = np.asarray(cross_entropy(net, batch_of([pair] * 7), jnp.asarray(hidden))).sum(1)
        if len(pair.continuation) == 1:  # nothing to draw: the first row hides it all
            assert scores[number].log_likelihood == pytest.approx(-nats[0], rel=2e-5)
            assert scores[number].variance == 0
            continue
        own = -nats[1:] * [row.weight for row in rows[1:]]
        assert scores[number].log_likelihood == pytest.approx(own.mean(), rel=2e-5)
        variance = ((own[0::2] - own[1::2]) ** 2).sum() / 36
        assert scores[number].variance == pytest.approx(variance, rel=1e-3)


def test_single_tokens_behind_one_context_share_a_row(monkeypatch):
    rows = []

    def counting(net, tokens, *others, **options):
        rows.extend(tokens.tolist())
        return score_choices(net, tokens, *others, **options)

    monkeypatch.setattr(scoring, "score_choices", counting)
    every = [Pair(PAIRS[1].context, [token]) for token in range(VOCAB)]
    scores = Scorer(model("a"), Autoregressive(), batch_size=1).score([*every, every[3]])
    assert len(rows) == 3  # of eight choices each
    assert all(row[:5] == PAIRS[1].context for row in rows)
    assert np.exp(values(scores[:-1])).sum() == pytest.approx(1.0, rel=1e-5)
    assert [score.greedy for score in scores[:-1]].index(True) == values(scores[:-1]).argmax()
    assert scores[3].log_likelihood == pytest.approx(scores[-1].log_likelihood, rel=1e-6)


def test_draws_depend_on_ids_and_seed_alone():
    pairs = PAIRS[:3]
    first, second = (Scorer(model("a"), DIFFUSION, batch_size=size, seed=3) for size in (5, 2))
    there = second.score(pairs[::-1])[::-1]
    np.testing.assert_allclose(values(first.score(PAIRS)[:3]), values(there), rtol=2e-5)
    np.testing.assert_allclose(values(first.score(PAIRS[2:3])), values(there[2:3]), rtol=2e-5)
    other = Scorer(model("a"), DIFFUSION, batch_size=5, seed=4).score(pairs)
    assert abs(other[2].log_likelihood - there[2].log_likelihood) > 1e-3
    assert other[0].log_likelihood == pytest.approx(there[0].log_likelihood, rel=1e-5)  # exact


def test_the_estimate_agrees_with_the_paradigms_own():
    draws = 200
    paradigm = MaskedDiffusion(**vars(DIFFUSION) | {"draws": draws})
    net, pair = model("a"), PAIRS[1]
    ours = Scorer(net, DIFFUSION, batch_size=5, draws=draws).score([pair])[0]
    theirs = jax.jit(lambda net, batch: paradigm.log_likelihood(net, batch, key=jax.random.key(0)))(
        net, batch_of([pair])
    )
    error = math.sqrt(ours.variance + float(theirs.variance[0]))
    assert 0 < error < 0.2 * abs(ours.log_likelihood)
    assert abs(ours.log_likelihood + float(theirs.nll_nats[0])) < 5 * error


def test_diffusion_is_greedy_where_all_at_once_is_right():
    net, (context, continuation) = model("a"), PAIRS[1]
    noisy = jnp.asarray([[*context, *[MASK] * len(continuation)]])
    out, _ = jax.jit(lambda net, rows: net(rows, ctx=Context(mask=Full())))(net, noisy)
    best = np.asarray(net.head(out.hidden)[..., :MASK].argmax(-1))[0, len(context) :]
    scorer = Scorer(net, DIFFUSION, batch_size=5)
    said, other = scorer.score([Pair(context, best.tolist()), PAIRS[1]])
    assert said.greedy and not other.greedy


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch_size": "8x"}, "batch_size: got '8x', want a whole number of at least 1 or 'auto'"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"batch_size": 2, "max_batch_size": 4}, "max_batch_size 4: is for batch_size=auto, got 2"),
        ({"max_len": 89}, "max_length: got 89, want a whole number from 2 to 88"),
        ({"draws": 4}, "draws 4: the likelihood of an autoregressive run is exact; leave it out"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_faults(values, said):
    with pytest.raises(ConfigError) as error:
        Scorer(model("a"), Autoregressive(), **values)
    assert said in str(error.value)


def test_faults_of_a_bound():
    with pytest.raises(ConfigError, match="draws: got 3, want an even number"):
        Scorer(model("a"), DIFFUSION, draws=3)
    assert Scorer(model("a"), DIFFUSION).draws == 6
    auto = Scorer(model("a"), DIFFUSION, batch_size="auto", max_batch_size="8")
    assert [auto.rows_per_batch(width) for width in (16, 2048)] == [8, 4]
