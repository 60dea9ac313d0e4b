"""The symmetric convolution against its equation, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from genlab.errors import ConfigError
from genlab.paradigms.context import Context
from genlab.paradigms.layers.params import Build
from genlab.paradigms.masks import BlockCausal, Causal, Full, Prefix, Vectors
from genlab.paradigms.mixers.symmetric_conv import SymmetricConvConfig
from genlab.paradigms.ragged import compact
from pydantic import ValidationError

WIDTH = 3


def make(kernel_size):
    build = Build(WIDTH, 1, 16, 1e-5, nnx.Rngs(0))
    return SymmetricConvConfig(kernel_size=kernel_size).build(build)


def layer_context(shape, **context):
    return compact(jnp.zeros(shape, jnp.int32), None, Context(**context)).layer_ctx


def equation(taps, x, visible):
    """A loop over tokens and taps; `visible(b, t, s)` says what t may look at."""
    reach = len(taps) // 2
    y = np.zeros(x.shape, np.float64)
    for b, t in np.ndindex(x.shape[:2]):
        for j in range(-reach, reach + 1):
            if 0 <= t + j < x.shape[1] and visible(b, t, t + j):
                y[b, t] += taps[reach + j] * x[b, t + j]
    return y


def random_input(shape):
    return np.random.default_rng(0).normal(size=(*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(("kernel_size", "length"), [(3, 7), (5, 7), (5, 2), (9, 3), (5, 1)])
def test_equals_the_equation(kernel_size, length):
    mixer, x = make(kernel_size), random_input((2, length))
    y, state = mixer(jnp.asarray(x), None, layer_context((2, length), mask=Full()))
    want = equation(np.asarray(mixer.w_taps[...]), x, lambda b, t, s: True)
    np.testing.assert_allclose(y, want, atol=1e-5)
    assert state is None


def test_sees_neither_other_documents_nor_padding():
    segments = jnp.asarray([[0, 0, 0, 1, 1, 2, 2, -1], [4, 4, 4, 4, 4, 4, -1, -1]])
    x = random_input((2, 8))
    x[0, 7:], x[1, 6:] = np.nan, np.nan
    mixer = make(5)
    ctx = layer_context((2, 8), segment_ids=segments, mask=Full())
    y = np.asarray(mixer(jnp.asarray(x), None, ctx)[0])
    ids = np.asarray(segments)
    want = equation(
        np.asarray(mixer.w_taps[...]),
        np.where(ids[..., None] >= 0, x, 0),
        lambda b, t, s: ids[b, t] == ids[b, s] and ids[b, s] >= 0,
    )
    np.testing.assert_allclose(y[ids >= 0], want[ids >= 0], atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (Prefix(jnp.asarray([3, 0])), lambda b, t, s: s <= max(t, (3, 0)[b] - 1)),
        (BlockCausal(2), lambda b, t, s: s <= t // 2 * 2 + 1),
        (
            Vectors(
                q_lo=jnp.zeros((2, 6), jnp.int32),
                q_hi=jnp.full((2, 6), -1),
                q_tag=jnp.asarray([[0, 0, -1, 1, 1, 1]] * 2),
                k_tag=jnp.asarray([[0, 1, -1, 1, 1, 0]] * 2),
            ),
            lambda b, t, s: (0, 0, -1, 1, 1, 1)[t] == (0, 1, -2, 1, 1, 0)[s],
        ),
    ],
)
def test_honours_the_rule_of_every_mask(mask, visible):
    # The token itself stands in the middle of the kernel and is always seen.
    mixer, x = make(5), random_input((2, 6))
    y, _ = mixer(jnp.asarray(x), None, layer_context((2, 6), mask=mask))
    want = equation(np.asarray(mixer.w_taps[...]), x, lambda b, t, s: t == s or visible(b, t, s))
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_gradients_are_those_of_the_equation():
    mixer, x = make(3), jnp.asarray(random_input((1, 4)))
    ctx = layer_context((1, 4), mask=Full())
    dx = jax.grad(lambda x: jnp.sum(mixer(x, None, ctx)[0][:, 1]))(x)
    want = np.zeros((1, 4, WIDTH))
    want[0, :3] = np.asarray(mixer.w_taps[...])
    np.testing.assert_allclose(dx, want, atol=1e-6)


def test_computes_in_the_input_dtype():
    mixer, x = make(5), jnp.asarray(random_input((2, 4)), jnp.bfloat16)
    assert mixer(x, None, layer_context((2, 4), mask=Full()))[0].dtype == jnp.bfloat16


def test_refuses_state_causal_masks_and_trees():
    mixer, x = make(5), jnp.zeros((1, 4, WIDTH))
    full, causal = layer_context((1, 4), mask=Full()), layer_context((1, 4), mask=Causal())
    tree = layer_context((1, 4), mask=Full(), parents=jnp.asarray([[-1, 0, 0, 1]]))
    assert mixer.supports(full, stateful=False) is None
    assert "state" in mixer.supports(full, stateful=True)
    assert "causal" in mixer.supports(causal, stateful=False)
    assert "tree" in mixer.supports(tree, stateful=False)
    for call in (
        lambda: mixer.init_state(1, 4, dtype=jnp.float32),
        lambda: mixer(x, (), full),
        lambda: mixer.verify(x, (), full),
        lambda: mixer.commit((), (), jnp.zeros((1, 1), jnp.int32), jnp.ones((1,), jnp.int32)),
    ):
        with pytest.raises(ConfigError, match="state"):
            call()


def test_wants_an_odd_kernel():
    with pytest.raises(ValidationError, match="kernel_size=4: want an odd number"):
        SymmetricConvConfig(kernel_size=4)


def test_cost_counts_taps():
    assert make(5).cost(2, 7, 0, 4).flops == 2 * 2 * 7 * 5 * WIDTH
