"""Plain decoding and the loop, on a model whose text is known beforehand."""

import json
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError, GenlabError
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.loop import _advance, advance, finished
from genlab.paradigms.decoding.plain import Plain, PlainConfig, _start
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.decoding.sampling import make_sampling
from genlab.paradigms.decoding.state import raise_failures
from genlab.paradigms.interface import SpecialIds
from genlab.paradigms.masked_diffusion import MaskedDiffusionConfig
from genlab.paradigms.model import build_model

ScriptedModel = runpy.run_path(str(Path(__file__).with_name("scripted.py")))["ScriptedModel"]

VOCAB, STOP, BOS = 12, 9, 11
PLAIN = Plain()
# Rows that stop after 2, 5, 9 tokens and never.
SCRIPTS = np.full((4, 12), 4, np.int32)
for _row, _count in enumerate((2, 5, 9)):
    SCRIPTS[_row, :_count] = np.arange(_count) % 4
    SCRIPTS[_row, _count - 1] = STOP
MODEL = ScriptedModel(jnp.asarray(SCRIPTS), VOCAB)
NOISY = ScriptedModel(jnp.asarray(SCRIPTS), VOCAB, 64, 59.0)  # the others nearly as probable


def begin(
    model=MODEL, rows=(0, 1, 2, 3), seeds=None, max_new=12, max_len=32, stop_ids=(STOP,), **values
):
    """Starts one row per script."""
    batch = len(rows)
    prompt = np.stack([np.full(batch, BOS), np.array(rows), np.full(batch, 1)], axis=1)
    return PLAIN.start(
        model,
        prompt.astype(np.int32),
        sampling=make_sampling(
            batch, vocab_size=VOCAB, stop_ids=stop_ids, **{"temperature": 0.0} | values
        ),
        seeds=np.arange(batch) if seeds is None else np.asarray(seeds),
        max_new=np.broadcast_to(max_new, (batch,)),
        max_len=max_len,
    )


def answers(state):
    """Each row's new ids as a list."""
    return [
        np.asarray(state.tokens)[row, begin:end].tolist()
        for row, (begin, end) in enumerate(zip(state.prompt_length, state.cursor, strict=True))
    ]


def test_rows_end_at_their_own_stop_and_count_as_if_alone():
    state = advance(MODEL, PLAIN, begin(), 1000)
    assert finished(state)
    want = [SCRIPTS[row, :count].tolist() for row, count in enumerate((2, 5, 9, 12))]
    assert answers(state) == want  # the stop id is written
    assert np.asarray(state.nfe).tolist() == [2, 5, 9, 12]
    assert np.asarray(state.token_evals).tolist() == [4, 7, 11, 14]
    assert (np.asarray(state.known).sum(1) == 3 + np.array([2, 5, 9, 12])).all()
    for row in range(4):
        alone = advance(MODEL, PLAIN, begin(rows=[row]), 1000)
        assert answers(alone) == [want[row]]
        assert int(alone.nfe[0]) == int(state.nfe[row])
        assert int(alone.token_evals[0]) == int(state.token_evals[row])


def test_the_first_token_comes_with_start():
    state = begin()
    assert [len(ids) for ids in answers(state)] == [1, 1, 1, 1]
    np.testing.assert_array_equal(PLAIN.settled(state), [4, 4, 4, 4])
    assert PLAIN.first_output(7) == 1


def test_the_first_token_may_be_the_stop_and_a_stop_may_be_id_0():
    model = ScriptedModel(jnp.zeros((4, 12), jnp.int32), VOCAB)
    state = begin(model, stop_ids=(0,))
    assert finished(state)
    assert answers(state) == [[0]] * 4
    state = advance(model, PLAIN, begin(model, stop_ids=()), 1000)
    assert answers(state) == [[0] * 12] * 4  # nothing but a stop id stops


@pytest.mark.parametrize("max_new", [0, 1, 2])
def test_exactly_max_new_tokens(max_new):
    state = begin(max_new=max_new, stop_ids=())
    assert finished(state) == (max_new < 2)
    state = advance(MODEL, PLAIN, state, 1000)
    assert [len(ids) for ids in answers(state)] == [max_new] * 4
    assert np.asarray(state.nfe).tolist() == [max(max_new, 1)] * 4
    assert (np.asarray(state.tokens)[:, 3 + max_new :] == 0).all()


def test_rows_may_ask_for_different_lengths():
    state = advance(MODEL, PLAIN, begin(max_new=[0, 3, 1, 7], stop_ids=()), 1000)
    assert [len(ids) for ids in answers(state)] == [0, 3, 1, 7]


def rest_of(state):
    """All leaves as NumPy, keys as their bits."""
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        state,
    )


def test_how_steps_are_divided_does_not_matter():
    whole = rest_of(advance(NOISY, PLAIN, begin(NOISY, temperature=1.0), 1000))
    for pieces in ([1] * 11, [0, 3, 0, 8], [5, 5, 5]):
        state = begin(NOISY, temperature=1.0)
        for n in pieces:
            state = advance(NOISY, PLAIN, state, n)
        jax.tree.map(np.testing.assert_array_equal, rest_of(state), whole)


def test_at_most_n_steps_are_taken():
    state = begin(stop_ids=())
    for n, total in ((0, 1), (3, 4), (1, 5), (2**40, 12)):
        state = advance(MODEL, PLAIN, state, n)
        assert np.asarray(state.nfe).tolist() == [total] * 4


def test_a_finished_row_never_changes():
    state = begin(NOISY, temperature=1.0, max_new=[2, 12, 12, 3], stop_ids=())
    kept = {}
    while not finished(state):
        state = advance(NOISY, PLAIN, state, 1)
        seen = rest_of(state)._replace(sampling=None, extra=None)
        for row in np.flatnonzero(seen.done):
            of_row = jax.tree.map(lambda x, row=row: x[row], seen)
            jax.tree.map(np.testing.assert_array_equal, of_row, kept.setdefault(row, of_row))
    assert sorted(kept) == [0, 1, 2, 3]


def test_a_row_depends_on_its_seed_alone():
    seeds = [5, 6, 7, 8]
    same = answers(advance(NOISY, PLAIN, begin(NOISY, [3] * 4, seeds, temperature=1.0), 99))
    assert len({tuple(ids) for ids in same}) == 4
    swapped = begin(NOISY, [3] * 4, [8, 5, 5, 6], temperature=1.0)
    assert answers(advance(NOISY, PLAIN, swapped, 99)) == [same[3], same[0], same[0], same[1]]
    alone = begin(NOISY, [3], [7], temperature=1.0)
    assert answers(advance(NOISY, PLAIN, alone, 99)) == [same[2]]


def test_settings_compile_nothing_new():
    rng = np.random.default_rng(0)

    def request(number):
        state = begin(
            temperature=float(rng.random()),
            top_k=int(rng.integers(5)),
            top_p=float(1 - rng.random()),
            min_p=float(rng.random()),
            seeds=rng.integers(1000, size=4),
            max_new=rng.integers(1, 10, size=4),
            stop_ids=list(range(number % 4)),
        )
        return advance(MODEL, PLAIN, advance(MODEL, PLAIN, state, number), 100)

    request(3)
    before = _start._cache_size(), _advance._cache_size()
    for number in range(20):
        assert finished(request(number))
    assert (_start._cache_size(), _advance._cache_size()) == before


def test_the_state_is_taken_over_and_the_callers_arrays_are_not():
    prompt = jnp.asarray([[BOS, 1, 1]], jnp.int32)
    sampling = jax.tree.map(jnp.asarray, make_sampling(1, vocab_size=VOCAB))
    seeds, max_new = jnp.asarray([3], jnp.int32), jnp.asarray([5], jnp.int32)

    def go():
        state = PLAIN.start(
            MODEL, prompt, sampling=sampling, seeds=seeds, max_new=max_new, max_len=16
        )
        return advance(MODEL, PLAIN, state, 100), state

    first, old = go()
    assert old.tokens.is_deleted()
    second, _ = go()
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_non_finite_logits_end_the_row_and_are_reported():
    scripts = SCRIPTS.copy()
    scripts[1, 3] = -1
    model = ScriptedModel(jnp.asarray(scripts), VOCAB)
    state = advance(model, PLAIN, begin(model), 1000)
    assert finished(state)
    assert np.asarray(state.failed_at).tolist() == [-1, 3 + 3, -1, -1]
    assert answers(state)[1] == SCRIPTS[1, :3].tolist()
    assert [len(ids) for ids in answers(state)] == [2, 3, 9, 12]  # the others go on
    with pytest.raises(GenlabError, match="non-finite logits at position 6 of row 1"):
        raise_failures(state)
    raise_failures(advance(MODEL, PLAIN, begin(), 1000))
    scripts[1, 0] = -1
    model = ScriptedModel(jnp.asarray(scripts), VOCAB)
    assert np.asarray(begin(model).failed_at).tolist() == [-1, 3, -1, -1]


def start(prompt=((BOS, 1),), model=MODEL, **values):
    """Starts from a literal prompt."""
    batch = len(prompt)
    values = {
        "sampling": make_sampling(batch, vocab_size=VOCAB),
        "seeds": np.zeros(batch, int),
        "max_new": np.ones(batch, int),
        "max_len": 16,
    } | values
    return PLAIN.start(model, np.asarray(prompt), **values)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"max_new": np.array([15])}, CapacityError, "2 tokens and max_new=15 need 17 pl"),
        ({"max_new": np.array([63]), "max_len": 99}, CapacityError, "need 65 .* room for 64"),
        ({"max_new": np.array([-1])}, ConfigError, "max_new: got -1, want 0 to"),
        ({"max_new": np.array([1.0])}, ConfigError, "max_new: got float64"),
        ({"max_new": 3}, ConfigError, r"max_new: got int64 \(\), want integers \(1,\)"),
        ({"seeds": np.array([2**31])}, ConfigError, "seeds: got 2147483648, want 0 to"),
        ({"prompt": [[BOS, VOCAB]]}, ConfigError, "row 0 has the id 12, want ids from 0 to 11"),
        ({"prompt": [[BOS, -1]]}, ConfigError, "row 0 has the id -1"),
        ({"prompt": [[0.5]]}, ConfigError, "prompt: got float64"),
        ({"prompt": [[]]}, ConfigError, "prompt: got float64"),
        ({"prompt": np.zeros((1, 0), int)}, ConfigError, "row 0 has 0 tokens"),
        ({"lengths": np.array([0])}, ConfigError, "row 0 has 0 tokens, want 1 to 2"),
        ({"lengths": np.array([3])}, ConfigError, "row 0 has 3 tokens, want 1 to 2"),
        ({"valid": np.array([[1, 1]])}, ConfigError, "valid: got int64"),
        ({"valid": np.array([[False, False]])}, ConfigError, "row 0 has 0 tokens"),
        (
            {"valid": np.array([[True, True]]), "lengths": np.array([2])},
            ConfigError,
            "give valid or lengths, not both",
        ),
        (
            {"sampling": make_sampling(1, vocab_size=VOCAB, steps=4)},
            ConfigError,
            "steps: got 4, but decoding 'plain'",
        ),
        ({"sampling": make_sampling(2, vocab_size=VOCAB)}, ConfigError, "made for 2 rows, "),
        ({"sampling": make_sampling(1, vocab_size=5)}, ConfigError, "for 5 ids, the model has 12"),
    ],
)
def test_bad_requests_are_refused_before_compute(values, error, message):
    before = _start._cache_size()
    with pytest.raises(error, match=message):
        start(**values)
    assert _start._cache_size() == before


def test_the_last_place_can_be_used_and_padding_takes_none():
    wide = np.zeros((1, 40), np.int32)
    wide[0, [3, 30]] = [BOS, 3]
    valid = np.zeros((1, 40), bool)
    valid[0, [3, 30]] = True
    state = start(wide, valid=valid, max_new=np.array([14]))
    state = advance(MODEL, PLAIN, state, 1000)
    assert np.asarray(state.tokens)[0, :2].tolist() == [BOS, 3]
    assert len(answers(state)[0]) == 14
    assert np.asarray(state.known).all()


@pytest.mark.parametrize("n", [-1, 1.5, True, None])
def test_a_bad_number_of_steps(n):
    with pytest.raises(ConfigError, match="n: got"):
        advance(MODEL, PLAIN, start(), n)


def test_padded_ids_are_never_drawn():
    config = ModelConfig.model_validate_json(
        '{"width": 8, "pattern": ["a"], "max_len": 40, "vocab_size": 5, "pad_vocab_to": 16,'
        ' "layers": {"a": {"mixer": {"name": "attention", "num_heads": 2}}}}'
    )
    state = PLAIN.start(
        (model := build_model(config, seed=0)),
        np.zeros((16, 2), np.int32),
        sampling=make_sampling(16, vocab_size=16, temperature=2.0),
        seeds=np.arange(16),
        max_new=np.full(16, 38),
        max_len=40,
    )
    tokens = np.asarray(advance(model, PLAIN, state, 100).tokens)
    assert np.bincount(tokens[:, 2:].ravel(), minlength=16)[:5].min() > 0
    assert tokens.max() < 5


def test_the_registry_makes_it_for_autoregressive_models_only():
    specials = SpecialIds(0, 1, 2, 3)
    assert default_decoding("autoregressive").build(specials, Autoregressive()) == PLAIN
    diffusion = MaskedDiffusionConfig().build(specials)
    with pytest.raises(ConfigError, match="an autoregressive model, this one is masked_diff"):
        PlainConfig().build(specials, diffusion)
    with pytest.raises(ConfigError, match="no decoding for paradigm 'autoregresive'; did you mean"):
        default_decoding("autoregresive")


def test_no_step_copies_the_state():
    """Keys and values are written where they are; XLA would copy them to read them meanwhile."""
    attention = {"mixer": {"name": "attention", "num_heads": 2}}
    config = {
        "width": 8, "pattern": ["a"], "layers": {"a": attention}, "max_len": 37, "vocab_size": 32,
    }  # fmt: skip
    model = build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=0)
    decoding = Plain()
    state = decoding.start(
        model,
        np.ones((1, 3), np.int32),
        sampling=make_sampling(1, vocab_size=model.config.padded_vocab_size),
        seeds=np.zeros(1, np.int32),
        max_new=np.full(1, 8, np.int32),
        max_len=37,
    )
    text = _advance.lower(model, state, np.int32(1), decoding=decoding).compile().as_text()
    assert "f32[1,37,2,4]" in text
    copies = re.findall(r"= f32\[1,37,2,4\]\S* copy\(", text)
    # JAX 0.10.2's compiler drops the barrier before it decides: each of two arrays, twice.
    assert len(copies) == (0 if jax.__version_info__ >= (0, 12) else 4)
