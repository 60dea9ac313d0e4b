"""Gradients, dtypes, bytes, compilations and refusals, the same for every model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError
from genlab.paradigms.context import Context

ROWS, ROOM = 4, 40


def nll(model, tokens, segment_ids):
    """Sum over rows of next-token nats inside documents, the plain way."""
    out, _ = model(tokens, ctx=Context(segment_ids=segment_ids))
    log_p = jax.nn.log_softmax(model.head(out.hidden[:, :-1]), axis=-1)
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[..., 0]
    counted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    return -jnp.sum(jnp.where(counted, picked, 0.0))


@pytest.fixture(scope="module")
def value_and_grad(lab):
    """Loss and gradients of the parameters, compiled."""
    options = {"xla_backend_optimization_level": 0}

    @functools.partial(jax.jit, compiler_options=options)
    def of(model, tokens, segment_ids):
        def loss(params):
            return nll(model.with_params(params), tokens, segment_ids)

        return jax.value_and_grad(loss)(model.params)

    return of


def test_gradients_of_packed_documents_equal_separate_ones(lab, value_and_grad, causal_entry):
    model = causal_entry.model
    tokens = np.tile(lab.random_tokens(21, 1, 20), (ROWS, 1))
    ids = np.repeat(np.arange(3), [8, 7, 5]).astype(np.int32)
    blank = np.full((1, 20), -1, np.int32)  # rows of padding alone give nothing, not NaN
    packed = np.concatenate([ids[None], blank, blank, blank])
    separate = np.concatenate([np.where(ids == n, 0, -1)[None] for n in range(3)] + [blank])
    want, want_grad = value_and_grad(model, tokens, separate.astype(np.int32))
    got, got_grad = value_and_grad(model, tokens, packed)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    paths = jax.tree_util.tree_leaves_with_path(want_grad)
    for (path, b), a in zip(paths, jax.tree.leaves(got_grad), strict=True):
        assert np.isfinite(a).all() and np.abs(b).max() > 0, path  # and every parameter is used
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-4, err_msg=str(path))


def test_gradients_agree_with_finite_differences(lab, value_and_grad, causal_entry):
    model = causal_entry.model
    tokens, ids = lab.random_tokens(21, ROWS, 20), np.zeros((ROWS, 20), np.int32)
    _, gradient = value_and_grad(model, tokens, ids)
    leaves, tree = jax.tree.flatten(model.params)
    draw = np.random.default_rng(0)
    step = [draw.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves]
    size = 1e-3 / np.sqrt(sum((s**2).sum() for s in step))
    values = []
    for sign in (1, -1):
        moved = [leaf + sign * size * s for leaf, s in zip(leaves, step, strict=True)]
        values.append(value_and_grad(model.with_params(tree.unflatten(moved)), tokens, ids)[0])
    slope = sum((g * s).sum() for g, s in zip(jax.tree.leaves(gradient), step, strict=True)) * size
    np.testing.assert_allclose(values[0] - values[1], 2 * slope, rtol=0.05, atol=2e-3)


def test_bfloat16_stays_near_and_keeps_sensitive_parameters(lab, causal_entry):
    tokens = lab.random_tokens(22, ROWS, 17)
    model, half = causal_entry.model, causal_entry.model.prepare(jnp.bfloat16)
    empty = half.init_state(ROWS, ROOM)
    out, state = lab.run(half, tokens, empty)
    assert out.hidden.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(lambda a: a.dtype, empty)
    logits = lab.head(half, out.hidden)
    assert logits.dtype == jnp.float32
    want = np.asarray(lab.head(model, lab.run(model, tokens)[0].hidden))
    # 8 bits of mantissa, several roundings a layer.
    assert np.abs(np.asarray(logits) - want).mean() < 0.05 * np.abs(want).mean()
    for path, leaf in jax.tree_util.tree_leaves_with_path(half.params):
        name = jax.tree_util.keystr(path)
        sensitive = any(part in name for part in ("norm", "A_log", "dt_bias", "['D']"))
        if sensitive:
            assert leaf.dtype == jnp.float32, name


def test_every_write_keeps_the_dtype_of_the_state(lab, causal_entry):
    model = causal_entry.model
    tokens = lab.random_tokens(23, ROWS, 17)
    empty = model.init_state(ROWS, ROOM, dtype=jnp.bfloat16)
    floats = {a.dtype for a in jax.tree.leaves(empty) if jnp.issubdtype(a.dtype, jnp.floating)}
    assert floats <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    want = jax.tree.map(lambda a: (a.shape, a.dtype), empty)
    _, prefilled = lab.run(model, tokens, empty)
    _, decoded = lab.run(model, tokens[:, :1], prefilled)
    _, pending = lab.verify(model, tokens[:, :4], decoded)
    path = np.tile(np.arange(4, dtype=np.int32), (ROWS, 1))
    kept = lab.commit(model, decoded, pending, path, np.array([0, 1, 2, 4], np.int32))
    for state in (prefilled, decoded, kept):
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == want


def test_state_bytes_are_those_of_the_arrays(causal_entry):
    model = causal_entry.model
    for batch, room in ((1, 2), (1, 10), (3, ROOM)):  # 2: below every window
        cost = model.cost(batch, 1, room)
        state = model.init_state(batch, room)
        held = sum(a.nbytes for a in jax.tree.leaves(state))
        assert cost.state_bytes_at(room) == held
    assert 0 < cost.flops < model.cost(batch, 2, room).flops
    assert cost.flops * 2 == model.cost(2 * batch, 1, room).flops


def test_projections_dominate_the_flops(lab, causal_entry):
    cost = causal_entry.model.cost(1, 1, 0)
    matrices = sum(a.size for a in jax.tree.leaves(causal_entry.model.params) if a.ndim >= 2)
    assert 0.5 * 2 * matrices < cost.flops < 3 * 2 * matrices


def test_other_numbers_compile_nothing(lab, causal_entry):
    model, traces = causal_entry.model, []

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def all_calls(model, tokens, lengths, parents, accepted):
        traces.append(1)
        state = model.init_state(2, ROOM)
        _, state = model(tokens, state, ctx=Context(lengths=lengths))
        _, pending = model.verify(tokens, state, ctx=Context(parents=parents))
        path = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1))
        return model.commit(state, pending, path, accepted)

    for seed, lengths, parents, accepted in (
        (0, [3, 3], [[-1, 0, 1]] * 2, [0, 3]),
        (1, [1, 0], [[-1, -1, 1]] * 2, [1, 2]),
    ):
        numbers = (np.array(v, np.int32) for v in (lengths, parents, accepted))
        all_calls(model, lab.random_tokens(seed, 2, 3), *numbers)
        model = model.with_params(jax.tree.map(lambda a: np.asarray(a) * 0.5, model.params))
    assert len(traces) == 1


def test_arguments_that_do_not_exist_are_refused(lab, entry):
    tokens = lab.random_tokens(24, 1, 3)
    with pytest.raises(TypeError, match="mode"):
        entry.model(tokens, mode="decode")
    with pytest.raises(TypeError, match="positions"):
        Context(positions=tokens)
    with pytest.raises(ValueError, match="collect: no layer 9"):
        entry.model(tokens, collect=(9,))
    with pytest.raises(ValueError, match="integers"):
        entry.model(tokens.astype(np.float32))


def test_rows_beyond_max_len_are_refused(lab, causal_entry):
    tokens = lab.random_tokens(25, 1, lab.MAX_LEN + 1)
    with pytest.raises(CapacityError, match=f"{lab.MAX_LEN + 1}.*max_len={lab.MAX_LEN}"):
        causal_entry.model(tokens)
