"""Sample metrics: closed forms, and the ways in which perplexity flatters."""

import math

import numpy as np
import pytest
from genlab.eval import text_metrics
from genlab.eval.ngram import JudgeScore, NgramModel

BOS = 20


@pytest.fixture(scope="module")
def real():
    """Ids with the repetition of text: Zipf-like frequencies over 20 ids, a first-order chain."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, 21)
    chain = [rng.permutation(weights / weights.sum()) for _ in range(20)]
    ids = [0]
    for _ in range(8000):
        ids.append(int(rng.choice(20, p=chain[ids[-1]])))
    return np.array(ids)


@pytest.fixture(scope="module")
def judge(real):
    return NgramModel.fit([[BOS, *real]], vocab_size=21, bos_id=BOS, order=2)


def test_generative_perplexity_is_exp_of_mean_nats():
    class Fixed:
        def nats(self, sequences, *, score_from=None):
            assert score_from == [2, 3]
            return JudgeScore(np.array([4.0, 2.0]), np.array([2, 1]))

    found = text_metrics.generative_perplexity(Fixed(), [[0, 1, 2, 3]] * 2, score_from=[2, 3])
    assert found == (pytest.approx(math.exp(6 / 3)), 6.0, 3)


def test_repeated_id_has_low_perplexity_zero_entropy_and_is_flagged(real, judge):
    """The judge likes "aaaa...": only entropy and the flag tell."""
    stays = [(real[1:][real[:-1] == id_] == id_).mean() for id_ in range(20)]
    a = int(np.argmax(stays))
    looped = [np.full(64, a)] * 4
    honest = [real[i : i + 64] for i in (100, 900, 2000, 4000)]
    prefix = lambda rows: [[BOS, *row] for row in rows]  # noqa: E731
    flattering = text_metrics.generative_perplexity(judge, prefix(looped)).gen_ppl
    assert flattering < text_metrics.generative_perplexity(judge, prefix(honest)).gen_ppl
    assert text_metrics.token_entropy(looped) == 0
    flag = text_metrics.repetition(looped, real)
    assert flag.repetitive
    assert flag.flagged == (True,) * 4
    assert "4 of 4" in flag.detail
    assert not text_metrics.repetition(honest, real).repetitive


def test_long_loops_are_flagged_by_their_bigrams(real):
    phrase = real[300:316]
    looped = np.tile(phrase, 8)
    fair = text_metrics.sequence_entropy(real[:128])
    assert text_metrics.sequence_entropy(looped) > 0.6 * fair  # entropy alone would pass it
    assert text_metrics.repetition([looped], real).repetitive


def test_one_loop_among_good_samples_is_counted_but_does_not_condemn(real):
    samples = [real[:64], real[500:564], np.zeros(64, int)]
    flag = text_metrics.repetition(samples, real)
    assert flag.flagged == (False, False, True)
    assert not flag.repetitive


def test_repetition_needs_enough_reference():
    with pytest.raises(ValueError, match="the reference has 3 ids"):
        text_metrics.repetition([[1, 2, 3, 4]], [1, 2, 3])
    with pytest.raises(ValueError, match="at least two ids"):
        text_metrics.repetition([[1]], [1, 2, 3])


def test_entropy_closed_forms():
    assert text_metrics.sequence_entropy(np.arange(16)) == pytest.approx(math.log(16))
    assert text_metrics.sequence_entropy([3, 3, 3]) == 0
    assert text_metrics.sequence_entropy([1, 1, 2, 2]) == pytest.approx(math.log(2))
    # The mean over samples, not the entropy of the pool: two different loops stay at zero.
    assert text_metrics.token_entropy([[1, 1], [2, 2]]) == 0
    with pytest.raises(ValueError, match="empty sample"):
        text_metrics.token_entropy([[]])
    with pytest.raises(ValueError, match="no samples"):
        text_metrics.token_entropy([])


def test_distinct_n_counts_and_borders():
    assert text_metrics.distinct_n([[1, 2, 1, 2, 1]], 1) == pytest.approx(2 / 5)
    assert text_metrics.distinct_n([[1, 2, 1, 2, 1]], 2) == pytest.approx(2 / 4)
    assert text_metrics.distinct_n([[1, 2], [3, 4]], 2) == 1  # (2, 3) is no bigram
    assert text_metrics.distinct_n([[1, 2], [1, 2]], 2) == pytest.approx(1 / 2)
    assert text_metrics.distinct_n([[1], [2]], 2) is None
    with pytest.raises(ValueError, match="n must be 1 or more"):
        text_metrics.distinct_n([[1]], 0)


def test_counts_come_from_ids():
    """Fifteen spaces: fifteen ids as generated, however a tokenizer would merge them."""
    spaces = np.full(15, 5)
    score = NgramModel.fit([[BOS, *spaces]], vocab_size=21, bos_id=BOS, order=1).nats(
        [[BOS, *spaces]]
    )
    assert score.tokens.tolist() == [15]
    assert text_metrics.distinct_n([spaces], 1) == pytest.approx(1 / 15)


def test_word_rate():
    vocabulary = text_metrics.training_words(["Anne couldn't see Captain Wentworth."])
    assert vocabulary == {"anne", "couldn't", "see", "captain", "wentworth"}
    assert text_metrics.word_rate(["Anne saw Captain Wentworth."], vocabulary) == 3 / 4
    assert text_metrics.word_rate(["COULDN'T see; 1818 --"], vocabulary) == 1
    # The cut word at the end is left out; a finished one is counted.
    assert text_metrics.word_rate(["Anne see capt"], vocabulary) == 1
    assert text_metrics.word_rate(["Anne see capt "], vocabulary) == 2 / 3
    assert text_metrics.word_rate(["... 42", ""], vocabulary) is None
