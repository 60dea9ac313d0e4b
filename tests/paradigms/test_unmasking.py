"""Unmasking: exact laws by enumeration, the number of calls, and what may not matter."""

import functools
import itertools
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.loop import advance
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.decoding.sampling import make_sampling
from genlab.paradigms.decoding.unmasking import Unmasking, UnmaskingConfig
from genlab.paradigms.interface import Out, SpecialIds
from genlab.paradigms.masked_diffusion import MaskedDiffusionConfig
from genlab.paradigms.model import build_model
from pydantic import ValidationError

ORACLE = runpy.run_path(str(Path(__file__).with_name("exact_denoiser.py")))
ExactDenoiser, random_joint, TIED_BITS = (
    ORACLE[name] for name in ("ExactDenoiser", "random_joint", "TIED_BITS")
)

SPECIALS = SpecialIds(bos=12, eos=13, pad=14, mask=15)
FORBIDDEN = (12, 14)  # the mask id is the decoding's own affair
ORDERS = ("random", "ancestral", "confidence", "margin", "left_to_right")


@functools.cache
def small_model():
    layers = {
        "conv": {"mixer": {"name": "symmetric_conv", "kernel_size": 3}},
        "attention": {
            "mixer": {"name": "attention", "num_heads": 2},
            "mlp": {"name": "swiglu", "width": 16},
        },
    }
    sizes = {"width": 16, "depth": 2, "max_len": 32, "vocab_size": 16}
    config = ModelConfig.model_validate_json(
        json.dumps({**sizes, "pattern": ["conv", "attention"], "layers": layers})
    )
    model = build_model(config, seed=0)
    # Fresh parameters say next to nothing; make the model opinionated, most about special ids.
    params = jax.tree.map(lambda a: a, model.params)
    noise = np.random.default_rng(0).normal(size=params["embedding"].shape)
    params["embedding"] = jnp.asarray(noise, jnp.float32).at[12:].mul(4.0)
    return model.with_params(params)


def sampling_for(rows, oracle=None, **settings):
    """Settings for the small model or an oracle."""
    if oracle is None:
        return make_sampling(rows, vocab_size=16, forbidden_ids=FORBIDDEN, **settings)
    specials = oracle.specials
    return make_sampling(
        rows, vocab_size=specials.mask + 1, forbidden_ids=specials[:3], **settings
    )


def generate(decoding, prompts, *, seeds=None, max_new=10, max_len=16, n=None, **settings):
    """Runs the small model on prompts (lists of ids behind BOS); `n` steps at a time."""
    rows = len(prompts)
    lengths = np.asarray([1 + len(p) for p in prompts])
    tokens = np.full((rows, lengths.max()), SPECIALS.pad)
    for row, prompt in enumerate(prompts):
        tokens[row, : lengths[row]] = [SPECIALS.bos, *prompt]
    state = decoding.start(
        small_model(),
        tokens,
        lengths=lengths,
        sampling=sampling_for(rows, **settings),
        seeds=np.arange(rows) if seeds is None else np.asarray(seeds),
        max_new=np.broadcast_to(max_new, (rows,)),
        max_len=max_len,
    )
    while not np.asarray(state.done).all():
        state = advance(small_model(), decoding, state, n or 100)
    return state


def oracle_samples(oracle, decoding, rows, steps, n_tokens):
    """Rows drawn from an oracle: (rows n) ids, and the final state."""
    state = decoding.start(
        oracle,
        np.full((rows, 1), oracle.specials.bos),
        sampling=sampling_for(rows, oracle, steps=steps),
        seeds=np.arange(rows),
        max_new=np.full((rows,), n_tokens),
        max_len=1 + n_tokens,
    )
    state = advance(oracle, decoding, state, 1000)
    return np.asarray(state.tokens)[:, 1:], state


@pytest.fixture(scope="module", autouse=True)
def oracles_pass_for_models():
    """`check_request` asks a model's config for its vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactDenoiser.config, "padded_vocab_size", 6, raising=False)
        yield


# --- laws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
def test_ancestral_sampling_of_tied_bits(steps):
    oracle = ExactDenoiser(jnp.asarray(TIED_BITS))
    text, state = oracle_samples(
        oracle, Unmasking(oracle.specials.mask, order="ancestral"), 4000, steps, 2
    )
    equal = (text[:, 0] == text[:, 1]).mean()
    want = 1 - 1 / (2 * steps)
    assert abs(equal - want) < 4 * np.sqrt(want * (1 - want) / 4000)
    assert set(np.unique(text)) <= {0, 1}
    assert np.asarray(state.nfe).max() <= steps


@pytest.mark.parametrize("order", ["random", "left_to_right", "confidence", "margin"])
def test_tied_bits_one_at_a_time_are_always_equal(order):
    oracle = ExactDenoiser(jnp.asarray(TIED_BITS))
    decoding = Unmasking(oracle.specials.mask, order=order)
    text, _ = oracle_samples(oracle, decoding, 1000, 2, 2)
    assert (text[:, 0] == text[:, 1]).all()
    assert 0.4 < text[:, 0].mean() < 0.6
    text, _ = oracle_samples(oracle, decoding, 1000, 1, 2)  # both at once: independent
    assert 0.4 < (text[:, 0] == text[:, 1]).mean() < 0.6


def law_of_random_order(joint, counts):
    """The exact law of uncovering `counts` tokens per step in random order, by enumeration."""
    n, k = joint.ndim, joint.shape[0]
    law = np.zeros(joint.shape)
    orders = list(itertools.permutations(range(n)))
    for order, text in itertools.product(orders, itertools.product(range(k), repeat=n)):
        seen, p, at = [], 1.0, 0
        for count in counts:
            visible = tuple(text[i] if i in seen else slice(None) for i in range(n))
            rest = [i for i in range(n) if i not in seen]
            conditional = joint[visible] / joint[visible].sum()
            for place in order[at : at + count]:
                others = tuple(j for j, i in enumerate(rest) if i != place)
                p *= conditional.sum(axis=others)[text[place]]
            seen += order[at : at + count]
            at += count
        law[text] += p / len(orders)
    return law


@pytest.mark.parametrize(("steps", "counts"), [(1, [3]), (2, [2, 1]), (3, [1, 1, 1])])
def test_random_order_has_the_enumerated_law(steps, counts):
    joint = np.asarray(random_joint(2, 3), np.float64)
    want = law_of_random_order(joint, counts)
    if steps == 3:
        np.testing.assert_allclose(want, joint, atol=1e-6)  # one at a time is exact
    else:
        assert abs(want - joint).max() > 0.01
    oracle = ExactDenoiser(jnp.asarray(joint, jnp.float32))
    text, _ = oracle_samples(oracle, Unmasking(oracle.specials.mask), 8000, steps, 3)
    got = np.zeros(joint.shape)
    np.add.at(got, tuple(text.T), 1)
    expected = want * 8000
    assert ((got - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees, p = 0.001


def test_one_step_marginals_at_a_temperature():
    joint = np.asarray(random_joint(2, 2, seed=3), np.float64)
    oracle = ExactDenoiser(jnp.asarray(joint, jnp.float32))
    decoding = Unmasking(oracle.specials.mask)
    state = decoding.start(
        oracle,
        np.full((4000, 1), oracle.specials.bos),
        sampling=sampling_for(4000, oracle, steps=1, temperature=2.0),
        seeds=np.arange(4000),
        max_new=np.full((4000,), 2),
        max_len=3,
    )
    text = np.asarray(advance(oracle, decoding, state, 9).tokens)[:, 1:]
    for place in range(2):
        law = np.sqrt(joint.sum(axis=1 - place))
        law /= law.sum()
        got = np.bincount(text[:, place], minlength=2) / 4000
        assert abs(got[1] - law[1]) < 4 * np.sqrt(law[0] * law[1] / 4000)


def test_shifted_answers_are_read_one_place_earlier():
    joint = random_joint(2, 3, seed=5)
    plain, shifted = ExactDenoiser(joint), ExactDenoiser(joint, shift=True)
    texts = [
        oracle_samples(o, Unmasking(o.specials.mask, shift=o.shift), 64, 3, 3)[0]
        for o in (plain, shifted)
    ]
    np.testing.assert_array_equal(*texts)


# --- steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["random", "confidence", "margin", "left_to_right"])
def test_ten_tokens_in_four_steps_go_3_3_2_2(order):
    decoding = Unmasking(SPECIALS.mask, order=order)
    model, sampling = small_model(), sampling_for(2, steps=[4, 10])
    state = decoding.start(
        model,
        np.full((2, 1), SPECIALS.bos),
        sampling=sampling,
        seeds=np.arange(2),
        max_new=np.full((2,), 10),
        max_len=16,
    )
    shown = [np.asarray(state.known).sum(axis=1)]
    for _ in range(10):
        state = advance(model, decoding, state, 1)
        shown.append(np.asarray(state.known).sum(axis=1))
    np.testing.assert_array_equal(
        np.diff(shown, axis=0).T, [[3, 3, 2, 2, 0, 0, 0, 0, 0, 0], [1] * 10]
    )
    np.testing.assert_array_equal(state.nfe, [4, 10])
    np.testing.assert_array_equal(state.token_evals, [4 * 11, 10 * 11])


class Counting:
    """A model that reports each call at run time."""

    def __init__(self, model, calls):
        self.model, self.calls, self.config = model, calls, model.config

    def __call__(self, tokens, state=None, *, ctx):
        jax.debug.callback(lambda: self.calls.append(1))
        return self.model(tokens, state, ctx=ctx)

    def head(self, hidden):
        return self.model.head(hidden)


@pytest.mark.parametrize(("steps", "want"), [(1, 1), (4, 4), (50, 10)])
def test_nfe_is_the_number_of_model_calls(steps, want):
    calls = []
    model, decoding = Counting(small_model(), calls), Unmasking(SPECIALS.mask)
    state = decoding.start(
        model,
        np.full((1, 1), SPECIALS.bos),
        sampling=sampling_for(1, steps=steps),
        seeds=np.zeros((1,), int),
        max_new=np.full((1,), 10),
        max_len=16,
    )
    step = jax.jit(lambda state: decoding.step(model, state))
    while not np.asarray(state.done).all():
        state = step(state)
    jax.effects_barrier()
    assert int(state.nfe[0]) == len(calls) == want
    assert np.asarray(state.known)[0, :11].all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_mask_is_left_and_no_forbidden_id_appears(order, temperature):
    # The model is loudest about special ids.
    decoding = Unmasking(SPECIALS.mask, order=order)
    state = generate(
        decoding, [[], [3, 1], [5]], max_new=[10, 0, 7], steps=[1, 3, 4], temperature=temperature
    )
    tokens, known = np.asarray(state.tokens), np.asarray(state.known)
    np.testing.assert_array_equal(known.sum(axis=1), [11, 3, 9])
    np.testing.assert_array_equal(decoding.settled(state), [11, 3, 9])
    answer = known & (np.arange(16) >= np.asarray(state.prompt_length)[:, None])
    assert not np.isin(tokens[answer], (SPECIALS.mask, *FORBIDDEN)).any()
    assert (tokens[~known] == 0).all()
    np.testing.assert_array_equal(tokens[1, :3], [SPECIALS.bos, 3, 1])
    assert int(state.nfe[1]) == 0


# --- what may not matter ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_does_not_depend_on_its_batch_mates_or_on_n(order):
    decoding = Unmasking(SPECIALS.mask, order=order)
    settings = {"steps": 3, "temperature": 0.8}
    prompts = [[1, 2], [3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]]
    both = generate(decoding, prompts, seeds=[7, 8], max_new=[9, 5], max_len=20, **settings)
    by_one = generate(
        decoding, prompts, seeds=[7, 8], max_new=[9, 5], max_len=20, n=1, **settings
    )
    np.testing.assert_array_equal(both.tokens, by_one.tokens)
    for row, (seed, new) in enumerate([(7, 9), (8, 5)]):
        solo = generate(
            decoding, prompts[row : row + 1], seeds=[seed], max_new=new, max_len=20, **settings
        )
        np.testing.assert_array_equal(both.tokens[row], solo.tokens[0])
        assert int(both.nfe[row]) == int(solo.nfe[0])


@pytest.mark.parametrize("order", ["random", "confidence", "margin", "left_to_right"])
def test_temperature_zero_is_argmax(order):
    decoding = Unmasking(SPECIALS.mask, order=order)
    runs = [
        np.asarray(generate(decoding, [[2, 3]], seeds=[s], steps=1, temperature=0.0).tokens)
        for s in (0, 1)
    ]
    np.testing.assert_array_equal(*runs)
    canvas = np.full((1, 16), SPECIALS.mask)
    canvas[0, :3] = [SPECIALS.bos, 2, 3]
    context = jax.jit(_full_logits)(small_model(), jnp.asarray(canvas), jnp.asarray([13]))
    logits = np.asarray(context).copy()
    logits[..., [*FORBIDDEN, SPECIALS.mask]] = -np.inf
    np.testing.assert_array_equal(runs[0][0, 3:13], logits[0, 3:13].argmax(axis=-1))


def _full_logits(model, tokens, lengths):
    from genlab.paradigms.context import Context
    from genlab.paradigms.masks import Full

    return model.head(model(tokens, ctx=Context(lengths=lengths, mask=Full()))[0].hidden)


def test_settings_compile_nothing_new():
    decoding = Unmasking(SPECIALS.mask, order="confidence")
    compiled = []
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        original = Unmasking.step
        patch.setattr(
            Unmasking, "step", lambda *a: (compiled.append(1), original(*a))[1]
        )
        for steps, temperature, top_k in ((2, 0.0, 0), (5, 0.7, 3), (9, 1.0, 0)):
            generate(decoding, [[1]], steps=steps, temperature=temperature, top_k=top_k)
    assert len(compiled) == 1


# --- order and blocks -------------------------------------------------------------------------


def test_confidence_uncovers_the_surest_place_first():
    # Place 1 is sure, place 2 is not.
    joint = jnp.asarray([[0.5, 0.45], [0.02, 0.03]], jnp.float32)
    oracle = ExactDenoiser(joint)
    decoding = Unmasking(oracle.specials.mask, order="confidence")
    state = decoding.start(
        oracle,
        np.full((1, 1), oracle.specials.bos),
        sampling=sampling_for(1, oracle, steps=2, temperature=0.0),
        seeds=np.zeros((1,), int),
        max_new=np.full((1,), 2),
        max_len=3,
    )
    state = advance(oracle, decoding, state, 1)
    np.testing.assert_array_equal(state.known, [[True, True, False]])


@pytest.mark.parametrize("order", ["random", "confidence", "margin"])
def test_blocks_are_uncovered_one_after_another(order):
    decoding = Unmasking(SPECIALS.mask, order=order, block_length=4)
    model = small_model()
    state = decoding.start(
        model,
        np.full((1, 2), SPECIALS.bos),
        sampling=sampling_for(1, steps=6),
        seeds=np.zeros((1,), int),
        max_new=np.full((1,), 12),
        max_len=16,
    )
    for step in range(1, 7):
        state = advance(model, decoding, state, 1)
        known = np.asarray(state.known)[0, 2:14]
        full = 2 * step // 4 * 4
        assert known[:full].all() and known.sum() == 2 * step
        assert not known[full + 4 :].any()
        assert int(decoding.settled(state)[0]) >= 2 + full
    assert decoding.options() == {"order": order, "block_length": 4}


# --- infilling --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_fixed_places_stay(order):
    decoding = Unmasking(SPECIALS.mask, order=order)
    tokens = np.random.default_rng(0).integers(0, 12, (2, 12))
    tokens[:, 0] = SPECIALS.bos
    known = np.random.default_rng(1).random((2, 12)) < 0.4
    known[:, 0] = True
    state = decoding.start_canvas(
        small_model(),
        tokens,
        known,
        lengths=np.asarray([12, 7]),
        sampling=sampling_for(2, steps=3),
        seeds=np.arange(2),
    )
    assert int(state.prompt_length[0]) == int(np.cumprod(known[0]).sum())
    state = advance(small_model(), decoding, state, 100)
    inside = np.arange(12) < np.asarray([[12], [7]])
    np.testing.assert_array_equal(np.asarray(state.known), inside)
    np.testing.assert_array_equal(np.asarray(state.tokens)[known & inside], tokens[known & inside])
    assert not np.isin(np.asarray(state.tokens)[inside & ~known], (15, *FORBIDDEN)).any()


def test_infilling_conditions_on_both_sides():
    joint = np.zeros((2, 2, 2), np.float32)
    for a, b in itertools.product(range(2), repeat=2):
        joint[a, (a + b) % 2, b] = 0.25  # the middle is the sum of its neighbours
    oracle = ExactDenoiser(jnp.asarray(joint))
    decoding = Unmasking(oracle.specials.mask)
    ends = np.asarray(list(itertools.product(range(2), repeat=2)) * 8)
    canvas = np.full((32, 4), oracle.specials.bos)
    canvas[:, 1], canvas[:, 3] = ends[:, 0], ends[:, 1]
    known = np.tile([True, True, False, True], (32, 1))
    state = decoding.start_canvas(
        oracle,
        canvas,
        known,
        sampling=sampling_for(32, oracle, steps=1),
        seeds=np.arange(32),
    )
    state = advance(oracle, decoding, state, 5)
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, 2], ends.sum(axis=1) % 2)


# --- failures ---------------------------------------------------------------------------------


class Broken(ExactDenoiser):
    """NaN at one place."""

    def __call__(self, tokens, state=None, *, ctx, collect=(), remat=False):
        out, _ = super().__call__(tokens, ctx=ctx)
        return Out(out.hidden.at[:, 2, 0].set(jnp.nan), {}, {}), None


def test_logits_that_are_not_finite_end_the_row():
    jax.tree_util.register_pytree_node(
        Broken, lambda m: m.tree_flatten(), lambda shift, leaves: Broken(leaves[0], shift)
    )
    broken = Broken(jnp.asarray(TIED_BITS))
    _, state = oracle_samples(broken, Unmasking(broken.specials.mask), 2, 2, 2)
    np.testing.assert_array_equal(state.failed_at, [2, 2])
    np.testing.assert_array_equal(state.known, [[True, False, False]] * 2)
    assert np.asarray(state.done).all()


def test_bad_requests():
    decoding = Unmasking(SPECIALS.mask)
    with pytest.raises(ConfigError, match="steps: got 0, want the number of model calls"):
        generate(decoding, [[1]])
    with pytest.raises(CapacityError, match="there is room for 16"):
        generate(decoding, [[1]], max_new=20, steps=2)
    canvas = {"sampling": sampling_for(1, steps=1), "seeds": np.zeros((1,), int)}
    with pytest.raises(ConfigError, match="hides its first token"):
        Unmasking(SPECIALS.mask, shift=True).start_canvas(
            small_model(), np.zeros((1, 4), int), np.zeros((1, 4), bool), **canvas
        )
    with pytest.raises(ConfigError, match=r"known: got int64 \(1, 4\), want bool"):
        decoding.start_canvas(
            small_model(), np.zeros((1, 4), int), np.zeros((1, 4), int), **canvas
        )
    with pytest.raises(ValidationError, match="block_length=4 does not go with order 'ancestral'"):
        UnmaskingConfig(order="ancestral", block_length=4)


def test_is_the_default_for_masked_diffusion_and_refuses_other_paradigms():
    config = default_decoding("masked_diffusion")
    paradigm = MaskedDiffusionConfig(shift=True).build(SPECIALS)
    assert config.build(SPECIALS, paradigm) == Unmasking(15, True, "random", None)
    with pytest.raises(ConfigError, match="this one is autoregressive"):
        config.build(SPECIALS, Autoregressive())
