"""SSD: every implementation against the recurrence, and the recurrence against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.ssd import IMPLEMENTATIONS, ssd, ssd_tree
from genlab.kernels.ssd.shapes import TINY

# A new form joins every test below by being in the op's table. The kernels for accelerators, which
# do not run on a CPU, are in test_ssd_pallas.py.
FAST = sorted(name for name in IMPLEMENTATIONS if name.startswith("xla"))
CHUNK = 4
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK + 7)
NAMES = ("x", "dt", "A", "B", "C", "D", "state")
OVER_TIME = ("x", "dt", "B", "C")


def make(length, seed=0, batch=TINY.batch, groups=TINY.groups, dt_shift=-1.0):
    """Random arguments of the op by name."""
    N, P, M = TINY.heads, TINY.channels, TINY.states
    rng = np.random.default_rng(seed)  # NumPy: a jax.random call would compile for every shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    return {
        "x": normal(batch, length, N, P),
        "dt": np.log1p(np.exp(normal(batch, length, N) + np.float32(dt_shift))),
        "A": -np.exp(normal(N)),
        "B": normal(batch, length, groups, M),
        "C": normal(batch, length, groups, M),
        "D": normal(N),
        "state": normal(batch, N, P, M),
    }


def part(arguments, start, stop, state, rows=slice(None)):
    """The same arguments for steps start to stop of some rows, entering with `state`."""
    cut = {k: arguments[k][rows, start:stop] for k in OVER_TIME}
    return {**arguments, **cut, "state": state}


@functools.partial(jax.jit, static_argnames=("implementation", "chunk"))
def run(arguments, reset=None, lengths=None, *, implementation, chunk=CHUNK):
    return ssd(
        **arguments, reset=reset, lengths=lengths, chunk=chunk, implementation=implementation
    )


@functools.partial(jax.jit, static_argnames=("implementation", "chunk"))
def gradients(arguments, weights, reset=None, lengths=None, *, implementation, chunk=CHUNK):
    """Of a weighted sum of y and of the final state, by argument."""

    def loss(arguments):
        y, final = ssd(
            **arguments, reset=reset, lengths=lengths, chunk=chunk, implementation=implementation
        )
        return jnp.sum(y.astype(jnp.float32) * weights[0]) + jnp.sum(final * weights[1])

    return jax.grad(loss)(arguments)


def cotangents(arguments, seed=7):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(arguments[name].shape, np.float32) for name in ("x", "state")]


def assert_close(got, want, what=""):
    """Equal within float32 rounding of the largest element."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), what
    limit = 2e-5 * (1 + np.abs(want).max(initial=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=limit, err_msg=what)


def some_resets(length):
    """Two rows: documents of different lengths, one that begins at step 0, one step long."""
    reset = np.zeros((2, length), bool)
    reset[0, [0, length // 2]] = True
    reset[1, [length // 3, length - 1]] = True
    return reset


def test_reference_is_the_recurrence_in_numpy():
    a = make(5)
    x, dt, A, B, C, D, h = (np.asarray(a[n], np.float64) for n in NAMES)
    reset = np.asarray(some_resets(5))
    want = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(5):
            if reset[b, t]:
                h[b] = 0
            for n in range(x.shape[2]):
                g = n * B.shape[2] // x.shape[2]
                u = dt[b, t, n] * x[b, t, n]
                h[b, n] = np.exp(dt[b, t, n] * A[n]) * h[b, n] + np.outer(u, B[b, t, g])
                want[b, t, n] = h[b, n] @ C[b, t, g] + D[n] * x[b, t, n]
    y, final = run(a, reset, implementation="reference")
    assert_close(y, want)
    assert_close(final, h)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("length", "documents"),
    [(1, False), (CHUNK + 1, True), (3 * CHUNK + 7, False)]
    + [pytest.param(n, False, marks=pytest.mark.slow) for n in LENGTHS[1:-1]]
    + [pytest.param(n, True, marks=pytest.mark.slow) for n in LENGTHS if n != CHUNK + 1],
)
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


@pytest.mark.parametrize("chunk", [1, 2, 7, 19, 64, None])
def test_the_chunk_length_does_not_matter(chunk):
    a = make(19)
    reset = some_resets(19)
    want = run(a, reset, implementation="reference")
    got = run(a, reset, implementation="xla_chunked", chunk=chunk)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("groups", [1, 4])
def test_one_group_or_a_group_per_head(implementation, groups):
    a = make(6, groups=groups)
    want, got = (run(a, implementation=i) for i in ("reference", implementation))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("implementation", [None, *FAST])
@pytest.mark.parametrize("sizes", [(10, 10, 17), (1, 2, 10, 1, 17, 2, 2, 2)])
def test_chained_calls_equal_one_call(implementation, sizes):
    a = make(sum(sizes))
    want_y, want_final = run(a, implementation="reference")
    ys, state, start = [], a["state"], 0
    for size in sizes:
        y, state = run(part(a, start, start + size, state), implementation=implementation)
        ys.append(y)
        start += size
    assert_close(np.concatenate(ys, axis=1), want_y)
    assert_close(state, want_final)


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_packed_documents_equal_separate_ones(implementation):
    sizes = (3, 1, 5, 5)
    a = make(sum(sizes))
    starts = np.cumsum((0, *sizes[:-1]))
    reset = np.isin(np.tile(np.arange(sum(sizes)), (2, 1)), starts)
    y, final = run(a, reset, implementation=implementation)
    for start, size in zip(starts, sizes, strict=True):
        zeros = np.zeros_like(a["state"])
        solo_y, solo_final = run(part(a, start, start + size, zeros), implementation="reference")
        assert_close(y[:, start : start + size], solo_y)
    assert_close(final, solo_final)


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_a_ragged_batch_equals_solo_runs_and_never_reads_its_padding(implementation):
    lengths, total = (11, 0, 4), 11
    a = make(total, batch=3)
    valid = np.arange(total) < np.array(lengths)[:, None]

    def poison(v):
        return np.where(valid.reshape(*valid.shape, *(1,) * (v.ndim - 2)), v, np.float32(np.nan))

    poisoned = {**a, **{k: poison(a[k]) for k in OVER_TIME}}
    y, final = run(poisoned, lengths=np.array(lengths, np.int32), implementation=implementation)
    for row, length in enumerate(lengths):
        state = a["state"][row : row + 1]
        if length:
            solo = part(a, 0, length, state, slice(row, row + 1))
            solo_y, state = run(solo, implementation="reference")
            assert_close(y[row : row + 1, :length], solo_y)
        assert_close(final[row : row + 1], state)
        assert not np.asarray(y[row, length:]).any()
    weights = cotangents(a)
    options = {"lengths": np.array(lengths, np.int32), "implementation": implementation}
    clean = gradients(a, weights, **options)
    got = gradients(poisoned, weights, **options)
    for name in NAMES:
        assert_close(got[name], clean[name], f"gradient of {name}")
        if name in OVER_TIME:
            assert not np.asarray(got[name])[~valid].any()


@pytest.mark.parametrize("implementation", ["reference", *FAST])
@pytest.mark.parametrize("length", [1, 9])
def test_an_unwritten_state_is_not_read_where_a_document_begins(implementation, length):
    a = make(length)
    reset = np.tile(np.arange(length) == 0, (2, 1))
    want = run({**a, "state": np.zeros_like(a["state"])}, implementation="reference")
    unwritten = {**a, "state": np.full_like(a["state"], np.float32(np.nan))}
    got = run(unwritten, reset, implementation=implementation)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_later_inputs_change_no_earlier_output(implementation):
    a = make(11)
    y, _ = run(a, implementation=implementation)
    changed = {k: v.copy() for k, v in a.items()}
    for name in OVER_TIME:
        changed[name][:, 6] += 1.0
    y_changed, _ = run(changed, implementation=implementation)
    assert np.array_equal(y[:, :6], y_changed[:, :6])
    assert (np.abs(np.asarray(y - y_changed))[:, 6:].max(axis=(0, 2, 3)) > 0).all()


@pytest.mark.parametrize("implementation", [None, *FAST])
@pytest.mark.parametrize("length", [1, 9])
def test_bfloat16_inputs_are_scanned_in_float32(implementation, length):
    a = make(length)
    low = {k: v if k in ("state", "A", "D") else v.astype(jnp.bfloat16) for k, v in a.items()}
    exact = {k: v.astype(jnp.float32) for k, v in low.items()}
    y, final = run(low, implementation=implementation)
    want_y, want_final = run(exact, implementation="reference")
    assert y.dtype == jnp.bfloat16
    assert final.dtype == jnp.float32
    assert_close(final, want_final)
    np.testing.assert_allclose(y.astype(jnp.float32), want_y, rtol=2**-7, atol=1e-5)
    grads = gradients(low, cotangents(exact), implementation=implementation)
    assert {k: v.dtype for k, v in grads.items()} == {k: v.dtype for k, v in low.items()}


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("chunk", [CHUNK, 19])
def test_strong_decay_stays_finite_and_exact(implementation, chunk):
    a = make(19)
    a["dt"][:, ::3] = 50.0
    a["A"][0], a["A"][1:] = -40.0, -1.0
    want, got = (run(a, implementation=i, chunk=chunk) for i in ("reference", implementation))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    weights = cotangents(a)
    options = {"weights": weights, "chunk": chunk}
    want = gradients(a, **options, implementation="reference")
    got = gradients(a, **options, implementation=implementation)
    for name in NAMES:
        assert_close(got[name], want[name], f"gradient of {name}")


def test_weak_decay_after_strong_decay_keeps_its_digits():
    # Sums of logs reach -3000 in the chunk; a plain difference of them is off by 1e-4.
    length = 64
    a = make(length)
    a["A"][:] = -1.0
    a["dt"][:, :-4], a["dt"][:, -4:] = 50.0, 0.0123
    a["x"][:, :-4] *= 0.02
    want = run(a, implementation="reference")
    got = run(a, implementation="xla_chunked", chunk=length)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * float(jnp.abs(w).max()))


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_skip_and_state_are_optional(implementation):
    a = make(6)
    y, final = run({**a, "D": None, "state": None}, implementation=implementation)
    neutral = {**a, "D": np.zeros_like(a["D"]), "state": np.zeros_like(a["state"])}
    want_y, want_final = run(neutral, implementation="reference")
    assert_close(y, want_y)
    assert_close(final, want_final)


@pytest.mark.parametrize(
    "parents",
    [
        [[-1, 0, 0, 2, -1], [-1, -1, 1, 2, 0]],
        [[-1, 0, 1, 2], [-1, -1, -1, -1]],
        [[-1], [-1]],
        [[-1, 0], [-1, -1]],
    ],
)
def test_tree_nodes_equal_their_root_to_node_paths(parents):
    parents = np.array(parents)
    a = make(parents.shape[1])
    a["dt"][:, 0] = 50.0
    y = jax.jit(lambda a, p: ssd_tree(**a, parents=p))(a, parents.astype(np.int32))
    for row in range(2):
        for node in range(parents.shape[1]):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[row, at]
            solo = {k: a[k][row : row + 1, path] for k in OVER_TIME}
            solo = {**a, **solo, "state": a["state"][row : row + 1]}
            want, _ = run(solo, implementation="reference")
            assert_close(y[row, node], want[0, -1], f"row {row} node {node}")


def test_the_default_is_never_the_reference(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the reference ran")

    broken = IMPLEMENTATIONS["reference"]._replace(run=fail)
    monkeypatch.setitem(IMPLEMENTATIONS, "reference", broken)
    for length in (1, 2, 9):
        ssd(**make(length))


def test_no_steps_leave_the_state():
    a = make(0)
    y, final = ssd(**a)
    assert y.shape == a["x"].shape
    assert np.array_equal(final, a["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": jnp.ones((2, 3, 5))}, r"dt has shape \(2, 3, 5\); want \(2, 3, 4\)"),
        ({"A": jnp.ones((4, 4))}, r"A has shape \(4, 4\); want \(4,\)"),
        ({"state": jnp.ones((2, 4, 3, 5), jnp.bfloat16)}, "state has dtype bfloat16; want float32"),
        ({"reset": jnp.ones((2, 3))}, "reset has dtype float32; want bool"),
        ({"lengths": jnp.ones((3,), jnp.int32)}, r"lengths has shape \(3,\); want \(2,\)"),
        ({"B": jnp.ones((2, 3, 3, 5)), "C": jnp.ones((2, 3, 3, 5))}, "4 heads are not a multiple"),
        ({"chunk": 0}, "chunk is 0; want at least 1"),
        ({"implementation": "xla_sequental"}, "did you mean 'xla_sequential'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(KernelArgumentError, match=message):
        ssd(**{**make(3), **change})


@pytest.mark.slow
@pytest.mark.parametrize("implementation", FAST)
def test_long_sequences_stay_finite_and_equal(implementation):
    a = make(4096 + 7, dt_shift=-4.0)
    want, got = (run(a, implementation=i, chunk=None) for i in ("reference", implementation))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    weights = cotangents(a)
    want = gradients(a, weights, implementation="reference", chunk=None)
    got = gradients(a, weights, implementation=implementation, chunk=None)
    for name in NAMES:
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=1e-4 * float(jnp.abs(want[name]).max())
        )
