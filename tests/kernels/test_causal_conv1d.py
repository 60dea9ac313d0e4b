"""The causal convolution: every implementation against the sum, and the sum against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.causal_conv1d import IMPLEMENTATIONS, causal_conv1d, causal_conv1d_tree
from genlab.kernels.causal_conv1d.shapes import TINY
from genlab.kernels.dispatch import KernelArgumentError

# A new backend joins every test below by being in the op's table.
FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
ALL = sorted(IMPLEMENTATIONS)
NAMES = ("x", "weight", "bias", "state")


def make(length, seed=0, batch=TINY.batch, width=TINY.width):
    """Random arguments of the op by name."""
    rng = np.random.default_rng(seed)  # NumPy: a jax.random call would compile for every shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    return {
        "x": normal(batch, length, TINY.inner),
        "weight": normal(width, TINY.inner),
        "bias": normal(TINY.inner),
        "state": normal(batch, width - 1, TINY.inner),
    }


@functools.partial(jax.jit, static_argnames=("implementation", "activation"))
def run(arguments, reset=None, lengths=None, *, implementation, activation="silu"):
    return causal_conv1d(
        **arguments,
        reset=reset,
        lengths=lengths,
        activation=activation,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(arguments, weights, reset=None, lengths=None, *, implementation):
    """Of a weighted sum of y and of the final state, by argument."""

    def loss(arguments):
        y, final = run(arguments, reset, lengths, implementation=implementation)
        y, final = y.astype(jnp.float32), final.astype(jnp.float32)
        return jnp.sum(y * weights[0]) + jnp.sum(final * weights[1])

    return jax.grad(loss)(arguments)


def cotangents(arguments, seed=7):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(arguments[name].shape, np.float32) for name in ("x", "state")]


def assert_close(got, want, what=""):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), what
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=what)


def some_resets(length):
    reset = np.zeros((2, length), bool)
    reset[0, [0, length // 2]] = True
    reset[1, [length // 3, length - 1]] = True
    return reset


def test_reference_is_the_convolution_in_numpy():
    a = make(7)
    x, weight, bias, state = (np.asarray(a[n], np.float64) for n in NAMES)
    full = np.concatenate([state, x], axis=1)
    want = bias + np.stack([(full[:, t : t + 4] * weight).sum(axis=1) for t in range(7)], axis=1)
    y, final = run(a, implementation="reference", activation=None)
    assert_close(y, want)
    assert np.array_equal(final, a["x"][:, -3:])
    y, _ = run(a, implementation="reference", activation="silu")
    assert_close(y, want / (1 + np.exp(-want)))


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 19])
def test_outputs_state_and_gradients_equal_the_reference(implementation, length, documents):
    a = make(length)
    options = {}
    if documents:
        lengths = np.array([length, max(length - 2, 0)], np.int32)
        options = {"reset": some_resets(length), "lengths": lengths}
    want = run(a, **options, implementation="reference")
    got = run(a, **options, implementation=implementation)
    assert_close(got[0], want[0], "y")
    assert_close(got[1], want[1], "final state")
    weights = cotangents(a)
    want = gradients(a, weights, **options, implementation="reference")
    got = gradients(a, weights, **options, implementation=implementation)
    for name in NAMES:
        assert_close(got[name], want[name], f"gradient of {name}")


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_an_impulse_is_seen_by_exactly_w_taps(implementation, width):
    a = {**make(9, width=width), "bias": None, "state": None}
    a["x"] = np.zeros_like(a["x"])
    a["x"][:, 2] = 1.0
    y, final = run(a, implementation=implementation, activation=None)
    want = np.zeros(y.shape, np.float32)
    want[:, 2 : 2 + width] = np.asarray(a["weight"])[::-1]
    assert np.array_equal(y, want)
    assert final.shape == (2, width - 1, TINY.inner)
    # The same impulse through a call of three steps, then one step at a time.
    cut = {**a, "x": a["x"][:, :3]}
    y, state = run(cut, implementation=implementation, activation=None)
    ys = [y]
    for t in range(3, 9):
        step = {**a, "x": a["x"][:, t : t + 1], "state": state}
        y, state = run(step, implementation=implementation, activation=None)
        ys.append(y)
    assert np.array_equal(np.concatenate(ys, axis=1), want)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("sizes", [(10, 10, 17), (1, 2, 10, 1, 17, 2, 2, 2), (2, 2)])
def test_chained_calls_equal_one_call(implementation, sizes):
    a = make(sum(sizes))
    want_y, want_final = run(a, implementation="reference")
    ys, state, start = [], a["state"], 0
    for size in sizes:
        cut = {**a, "x": a["x"][:, start : start + size], "state": state}
        y, state = run(cut, implementation=implementation)
        ys.append(y)
        start += size
    assert_close(np.concatenate(ys, axis=1), want_y)
    assert np.array_equal(state, want_final)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("length", [1, 2])
def test_a_short_call_shifts_the_older_entries(implementation, length):
    a = make(length)
    _, final = run(a, implementation=implementation)
    want = np.concatenate([a["state"][:, length:], a["x"]], axis=1)
    assert np.array_equal(final, want)
    _, final = run({**a, "state": None}, implementation=implementation)
    want[:, : 3 - length] = 0
    assert np.array_equal(final, want)


@pytest.mark.parametrize("implementation", ALL)
def test_packed_documents_equal_separate_ones(implementation):
    sizes = (3, 1, 5, 5, 2)
    a = make(sum(sizes))
    starts = np.cumsum((0, *sizes[:-1]))
    reset = np.isin(np.tile(np.arange(sum(sizes)), (2, 1)), starts)
    y, final = run(a, reset, implementation=implementation)
    for start, size in zip(starts, sizes, strict=True):
        solo = {**a, "x": a["x"][:, start : start + size], "state": None}
        solo_y, solo_final = run(solo, implementation="reference")
        assert_close(y[:, start : start + size], solo_y)
    # The last document has two steps: what lies left of it in the window is zero.
    assert not np.asarray(final[:, 0]).any()
    assert np.array_equal(final, solo_final)


@pytest.mark.parametrize("implementation", ALL)
def test_a_ragged_batch_equals_solo_runs_and_never_reads_its_padding(implementation):
    lengths, total = (9, 0, 1, 5), 9
    a = make(total, batch=4)
    valid = np.arange(total) < np.array(lengths)[:, None]
    poisoned = {**a, "x": np.where(valid[:, :, None], a["x"], np.float32(np.nan))}
    y, final = run(poisoned, lengths=np.array(lengths, np.int32), implementation=implementation)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        state = a["state"][one]
        if length:
            solo = {**a, "x": a["x"][one, :length], "state": state}
            solo_y, state = run(solo, implementation="reference")
            assert_close(y[one, :length], solo_y)
        assert np.array_equal(final[one], state)
        assert not np.asarray(y[row, length:]).any()
    options = {"lengths": np.array(lengths, np.int32), "implementation": implementation}
    clean, got = (gradients(v, cotangents(a), **options) for v in (a, poisoned))
    for name in NAMES:
        assert_close(got[name], clean[name], f"gradient of {name}")
    assert not np.asarray(got["x"])[~valid].any()


@pytest.mark.parametrize("implementation", ALL)
def test_an_unwritten_state_is_not_read_where_a_document_begins(implementation):
    a = make(5)
    reset = np.tile(np.arange(5) == 0, (2, 1))
    want = run({**a, "state": None}, implementation="reference")
    unwritten = {**a, "state": np.full_like(a["state"], np.float32(np.nan))}
    got = run(unwritten, reset, implementation=implementation)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("implementation", ALL)
def test_later_inputs_change_no_earlier_output(implementation):
    a = make(9)
    y, _ = run(a, implementation=implementation)
    changed = {**a, "x": a["x"].copy()}
    changed["x"][:, 4] += 1.0
    y_changed, _ = run(changed, implementation=implementation)
    assert y.shape == a["x"].shape
    assert np.array_equal(y[:, :4], y_changed[:, :4])
    moved = np.abs(np.asarray(y - y_changed)).max(axis=(0, 2)) > 0
    assert moved.tolist() == [False] * 4 + [True] * 4 + [False]


@pytest.mark.parametrize("implementation", ALL)
def test_bfloat16_inputs_keep_a_float32_window(implementation):
    a = make(5)
    low = {**a, "x": a["x"].astype(jnp.bfloat16)}
    y, final = run(low, implementation=implementation)
    want, _ = run({**a, "x": low["x"].astype(jnp.float32)}, implementation="reference")
    assert y.dtype == jnp.bfloat16
    assert final.dtype == jnp.float32
    assert np.array_equal(final, low["x"][:, -3:].astype(jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_tree_nodes_equal_their_root_to_node_paths(width):
    parents = np.array([[-1, 0, 1, 2, 3, 1], [-1, -1, 1, 0, 3, 4]])
    a = make(parents.shape[1], width=width)
    tree = jax.jit(lambda a, p: causal_conv1d_tree(**a, parents=p, activation="silu"))
    y = tree(a, parents.astype(np.int32))
    for row in range(2):
        for node in range(parents.shape[1]):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[row, at]
            one = slice(row, row + 1)
            solo = {**a, "x": a["x"][one, path], "state": a["state"][one]}
            want, _ = run(solo, implementation="reference")
            assert_close(y[row, node], want[0, -1], f"row {row} node {node}")


def test_no_steps_leave_the_state():
    a = make(0)
    y, final = causal_conv1d(**a)
    assert y.shape == a["x"].shape
    assert np.array_equal(final, a["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": jnp.ones((4, 5))}, r"weight has shape \(4, 5\); want \(4, 6\)"),
        ({"weight": jnp.ones((0, 6))}, r"weight has shape \(0, 6\); want \(1, 6\)"),
        ({"state": jnp.ones((2, 4, 6))}, r"state has shape \(2, 4, 6\); want \(2, 3, 6\)"),
        ({"reset": jnp.ones((2, 3), jnp.int32)}, "reset has dtype int32; want bool"),
        ({"activation": "sillu"}, "did you mean 'silu'"),
        ({"implementation": "xl"}, "did you mean 'xla'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(KernelArgumentError, match=message):
        causal_conv1d(**{**make(3), **change})
