"""The selective scan: every implementation against the equation, and the equation against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.selective_scan import IMPLEMENTATIONS, selective_scan, selective_scan_tree
from genlab.kernels.selective_scan import xla as scan_xla
from genlab.kernels.selective_scan.shapes import TINY

# A new form joins every test below by being in the op's table. The kernels for accelerators, which
# do not run on a CPU, are in test_selective_scan_pallas.py.
FAST = sorted(name for name in IMPLEMENTATIONS if name.startswith("xla"))
CHUNK = 4
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3 * CHUNK + 7)
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "state")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks at tiny lengths."""
    monkeypatch.setattr(scan_xla, "CHUNK", CHUNK)


def make(length, seed=0, batch=TINY.batch, dt_shift=-1.0):
    """Random arguments of the op by name."""
    E, M = TINY.inner, TINY.states
    rng = np.random.default_rng(seed)  # NumPy: a jax.random call would compile for every shape

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    return {
        "x": normal(batch, length, E),
        "dt": np.log1p(np.exp(normal(batch, length, E) + np.float32(dt_shift))),
        "A": -np.exp(normal(E, M)),
        "B": normal(batch, length, M),
        "C": normal(batch, length, M),
        "D": normal(E),
        "z": normal(batch, length, E),
        "state": normal(batch, E, M),
    }


def part(arguments, start, stop, state, rows=slice(None)):
    """The same arguments for steps start to stop of some rows, entering with `state`."""
    cut = {k: arguments[k][rows, start:stop] for k in ("x", "dt", "B", "C", "z")}
    return {**arguments, **cut, "state": state}


@functools.partial(jax.jit, static_argnames="implementation")
def run(arguments, reset=None, lengths=None, *, implementation):
    return selective_scan(**arguments, reset=reset, lengths=lengths, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(arguments, weights, reset=None, lengths=None, *, implementation):
    """Of a weighted sum of y and of the final state, by argument."""

    def loss(arguments):
        y, final = selective_scan(
            **arguments, reset=reset, lengths=lengths, implementation=implementation
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
    x, dt, A, B, C, D, z, h = (np.asarray(a[n], np.float64) for n in NAMES)
    reset = np.asarray(some_resets(5))
    want = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(5):
            if reset[b, t]:
                h[b] = 0
            for e in range(x.shape[2]):
                h[b, e] = np.exp(dt[b, t, e] * A[e]) * h[b, e] + dt[b, t, e] * x[b, t, e] * B[b, t]
                y = h[b, e] @ C[b, t] + D[e] * x[b, t, e]
                want[b, t, e] = y * z[b, t, e] / (1 + np.exp(-z[b, t, e]))
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
    poisoned = {
        k: np.where(valid[:, :, None], a[k], np.float32(np.nan)) for k in ("x", "dt", "B", "C", "z")
    }
    poisoned = {**a, **poisoned}
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
        if name in ("x", "dt", "B", "C", "z"):
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
    for name in ("x", "dt", "B", "C", "z"):
        changed[name][:, 6] += 1.0
    y_changed, _ = run(changed, implementation=implementation)
    assert np.array_equal(y[:, :6], y_changed[:, :6])
    assert (np.abs(np.asarray(y - y_changed))[:, 6:].max(axis=(0, 2)) > 0).all()


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
def test_strong_decay_stays_finite_and_exact(implementation):
    a = make(19)
    a["dt"][:, ::3] = 50.0
    a["A"][0], a["A"][1:] = -4.0, -1.0
    want, got = (run(a, implementation=i) for i in ("reference", implementation))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    weights = cotangents(a)
    want, got = (gradients(a, weights, implementation=i) for i in ("reference", implementation))
    for name in NAMES:
        assert_close(got[name], want[name], f"gradient of {name}")


@pytest.mark.parametrize("implementation", ["reference", *FAST])
def test_skip_and_gate_are_optional(implementation):
    a = make(6)
    bare = {**a, "D": None, "z": None, "state": None}
    y, final = run(bare, implementation=implementation)
    neutral = {**bare, "D": np.zeros_like(a["D"]), "state": np.zeros_like(a["state"])}
    want_y, want_final = run(neutral, implementation="reference")
    assert_close(y, want_y)
    assert_close(final, want_final)


def test_tree_nodes_equal_their_root_to_node_paths():
    parents = np.array([[-1, 0, 0, 2, -1], [-1, -1, 1, 2, 0]])
    a = make(parents.shape[1])
    y = jax.jit(lambda a, p: selective_scan_tree(**a, parents=p))(a, parents.astype(np.int32))
    for row in range(2):
        for node in range(parents.shape[1]):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[row, at]
            solo = {k: a[k][row : row + 1, path] for k in ("x", "dt", "B", "C", "z")}
            solo = {**a, **solo, "state": a["state"][row : row + 1]}
            want, _ = run(solo, implementation="reference")
            assert_close(y[row, node], want[0, -1], f"row {row} node {node}")


def test_the_default_is_never_the_reference(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the reference ran")

    broken = IMPLEMENTATIONS["reference"]._replace(run=fail)
    monkeypatch.setitem(IMPLEMENTATIONS, "reference", broken)
    for length in (1, 2, 9):
        selective_scan(**make(length))


def test_no_steps_leave_the_state():
    a = make(0)
    y, final = selective_scan(**a)
    assert y.shape == a["x"].shape
    assert np.array_equal(final, a["state"])


def test_the_associative_form_refuses_what_would_fill_the_memory():
    E, M, T = 1536, 16, 2**17
    shapes = {"x": (1, T, E), "dt": (1, T, E), "A": (E, M), "B": (1, T, M), "C": (1, T, M)}
    arguments = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    with pytest.raises(KernelArgumentError, match=r"xla_associative: it would hold 24\.0 GiB"):
        op = functools.partial(selective_scan, implementation="xla_associative")
        jax.eval_shape(op, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": jnp.ones((2, 3, 5))}, r"dt has shape \(2, 3, 5\); want \(2, 3, 6\)"),
        ({"A": jnp.ones((5, 4))}, r"A has shape \(5, 4\); want \(6, 4\)"),
        ({"state": jnp.ones((2, 6, 4), jnp.bfloat16)}, "state has dtype bfloat16; want float32"),
        ({"reset": jnp.ones((2, 3), jnp.int32)}, "reset has dtype int32; want bool"),
        ({"lengths": jnp.ones((2,))}, "lengths has dtype float32; want integer"),
        ({"x": jnp.ones((2, 6))}, r"x has shape \(2, 6\); want \[B T E\]"),
        ({"implementation": "xla_chunkd"}, "did you mean 'xla_chunked'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(KernelArgumentError, match=message):
        selective_scan(**{**make(3), **change})


@pytest.mark.slow
@pytest.mark.parametrize("implementation", FAST)
def test_long_sequences_stay_finite_and_equal(implementation, monkeypatch):
    monkeypatch.setattr(scan_xla, "CHUNK", 16)
    a = make(4096 + 7, dt_shift=-4.0)
    want, got = (run(a, implementation=i) for i in ("reference", implementation))
    assert_close(got[0], want[0])
    assert_close(got[1], want[1])
    weights = cotangents(a)
    want, got = (gradients(a, weights, implementation=i) for i in ("reference", implementation))
    for name in NAMES:
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=1e-4 * float(jnp.abs(want[name]).max())
        )
