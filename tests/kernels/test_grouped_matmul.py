"""The grouped matmul: every implementation against the reference, and that against a NumPy loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels import grouped_matmul as op
from genlab.kernels.dispatch import KernelArgumentError
from genlab.kernels.grouped_matmul import IMPLEMENTATIONS, api, grouped_matmul, shapes
from genlab.kernels.grouped_matmul.shapes import TINY, block_rows

# The kernels for accelerators, which do not run on a CPU, are in test_grouped_matmul_pallas.py.
FAST = ["xla"]
ALL = ["reference", *FAST]

# Sizes of four groups over 37 rows, an odd number: what is left behind them is padding.
SIZES = {
    "uneven": (9, 1, 17, 10),
    "some empty": (0, 20, 0, 17),
    "all in the first": (37, 0, 0, 0),
    "all in the last": (0, 0, 0, 37),
    "padding": (3, 0, 8, 5),
    "only padding": (0, 0, 0, 0),
}
FULL = SIZES["uneven"]
NAN = np.float32(np.nan)


def make(rows=TINY.rows, groups=TINY.groups, dtype=np.float32, seed=0):
    """Random rows and one matrix per group."""
    rng = np.random.default_rng(seed)  # NumPy: a jax.random call would compile for every shape
    x = rng.standard_normal((rows, TINY.inner), np.float32).astype(dtype)
    matrices = rng.standard_normal((groups, TINY.inner, TINY.outer), np.float32).astype(dtype)
    return {"x": x, "w": tuple(matrices)}


@functools.partial(jax.jit, static_argnames="implementation")
def run(a, sizes, *, implementation):
    return grouped_matmul(a["x"], a["w"], sizes, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(a, sizes, dy, *, implementation):
    """Of a weighted sum of y, for x and every matrix."""

    def loss(a):
        y = grouped_matmul(a["x"], a["w"], sizes, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) * dy)

    return jax.grad(loss)(a)


def sizes_of(*sizes):
    return np.array(sizes, np.int32)


def cotangent(rows=TINY.rows):
    return np.random.default_rng(7).standard_normal((rows, TINY.outer), np.float32)


def loop(a, sizes):
    """y in float64, group by group."""
    y, start = np.zeros((len(a["x"]), a["w"][0].shape[1])), 0
    for matrix, size in zip(a["w"], sizes, strict=True):
        rows = slice(start, start + size)
        y[rows] = a["x"][rows].astype(np.float64) @ matrix.astype(np.float64)
        start += size
    return y


def assert_close(got, want, what="", rtol=0.0, atol=1e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    assert np.isfinite(got).all(), what
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=what)


def assert_trees_close(got, want, **tolerance):
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert_close(one, other, jax.tree_util.keystr(path), **tolerance)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("case", SIZES)
def test_values_are_those_of_a_loop_over_groups(implementation, case):
    a = make()
    y = run(a, sizes_of(*SIZES[case]), implementation=implementation)
    assert_close(y, loop(a, SIZES[case]))
    assert not np.asarray(y[sum(SIZES[case]) :]).any()


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("case", SIZES)
def test_gradients_are_those_of_a_loop_over_groups(implementation, case):
    a, dy, sizes = make(), cotangent(), SIZES[case]
    got = gradients(a, sizes_of(*sizes), dy, implementation=implementation)
    back = {"x": dy, "w": tuple(matrix.T for matrix in a["w"])}
    assert_close(got["x"], loop(back, sizes), "x")
    start = 0
    for matrix, size in zip(got["w"], sizes, strict=True):
        rows = slice(start, start + size)
        assert_close(matrix, a["x"][rows].T @ dy[rows])
        start += size


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    ("rows", "groups", "sizes"),
    [
        (1, 4, (0, 0, 1, 0)),  # one row is one block: no loop
        (2, 4, (1, 0, 1, 0)),  # a decode step of two experts
        (3, 1, (3,)),
        (5, 2, (2, 2)),
        (9, 2, (1, 8)),  # the last block would end behind the array
    ],
)
def test_few_rows_equal_the_reference(implementation, rows, groups, sizes):
    a, sizes, dy = make(rows, groups), sizes_of(*sizes), cotangent(rows)
    want = run(a, sizes, implementation="reference")
    assert_close(run(a, sizes, implementation=implementation), want)
    want = gradients(a, sizes, dy, implementation="reference")
    assert_trees_close(gradients(a, sizes, dy, implementation=implementation), want)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_blocks_of_other_platforms_give_the_same(implementation, platform, monkeypatch):
    monkeypatch.setattr(shapes, "target_platform", lambda: platform)
    a, dy = make(5), cotangent(5)  # 8 rows at least: all five are in one block of every group
    assert block_rows(5, TINY.groups, jnp.float32) == 5

    @jax.jit
    def both(a, sizes):
        def loss(a):
            y = grouped_matmul(a["x"], a["w"], sizes, implementation=implementation)
            return jnp.sum(y * dy), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(a)
        return y, grads

    for sizes in ((2, 1, 0, 2), (0, 4, 0, 0)):
        y, grads = both(a, sizes_of(*sizes))
        assert_close(y, loop(a, sizes))
        want = gradients(a, sizes_of(*sizes), dy, implementation="reference")
        assert_trees_close(grads, want)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("rows", [TINY.rows, 2])
def test_a_group_without_rows_is_not_read(implementation, rows):
    sizes = (0, rows - 1, 0, 1)
    a = make(rows)
    poisoned = {"x": a["x"], "w": tuple(
        m if size else np.full_like(m, NAN) for m, size in zip(a["w"], sizes, strict=True)
    )}  # fmt: skip
    sizes, dy = sizes_of(*sizes), cotangent(rows)
    options = {"implementation": implementation}
    assert np.array_equal(run(poisoned, sizes, **options), run(a, sizes, **options))
    got = gradients(poisoned, sizes, dy, **options)
    want = gradients(a, sizes, dy, **options)
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))
    assert not np.asarray(got["w"][0]).any() and not np.asarray(got["w"][2]).any()


@pytest.mark.parametrize("implementation", ALL)
def test_rows_behind_the_groups_are_not_read_nor_is_their_cotangent(implementation):
    a, dy, sizes = make(), cotangent(), SIZES["padding"]
    real = sum(sizes)
    poisoned, poisoned_dy = {**a, "x": a["x"].copy()}, dy.copy()
    poisoned["x"][real:], poisoned_dy[real:] = NAN, NAN
    # Nor may they meet the matrix of a group that nobody chose.
    poisoned["w"] = (a["w"][0], np.full_like(a["w"][1], NAN), *a["w"][2:])
    options = {"implementation": implementation}
    y = run(poisoned, sizes_of(*sizes), **options)
    assert_close(y, loop(a, sizes))
    clean = gradients(a, sizes_of(*sizes), dy, **options)
    got = gradients(poisoned, sizes_of(*sizes), poisoned_dy, **options)
    assert_trees_close(got, clean)
    assert not np.asarray(got["x"][real:]).any()


@pytest.mark.parametrize("implementation", ALL)
def test_nan_in_a_row_stays_in_its_row(implementation):
    a, row = make(), 10  # the second group's only row is the ninth: this is of the third
    poisoned = {**a, "x": a["x"].copy()}
    poisoned["x"][row] = NAN
    y = np.asarray(run(poisoned, sizes_of(*FULL), implementation=implementation))
    want = np.asarray(run(a, sizes_of(*FULL), implementation=implementation))
    others = np.arange(TINY.rows) != row
    assert np.isnan(y[row]).all() and np.array_equal(y[others], want[others])
    grads = gradients(poisoned, sizes_of(*FULL), cotangent(), implementation=implementation)
    assert np.isnan(grads["w"][2]).all()
    for group in (0, 1, 3):
        assert np.isfinite(grads["w"][group]).all()


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("rows", [TINY.rows, 6])
def test_bfloat16(implementation, rows):
    # Several blocks in a group; six rows are one block.
    sizes = (36, 0, 1, 0) if rows == TINY.rows else (1, 0, 4, 1)
    a = make(rows, dtype=jnp.bfloat16)
    y = run(a, sizes_of(*sizes), implementation=implementation)
    assert y.dtype == jnp.bfloat16
    # Products of bfloat16 are exact in float32 and are summed there: one rounding, at the end.
    assert_close(y, loop(a, sizes), rtol=2**-8, atol=1e-6)
    dy = cotangent(rows).astype(jnp.bfloat16).astype(np.float32)
    got = gradients(a, sizes_of(*sizes), dy, implementation=implementation)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(got))
    exact = jax.tree.map(lambda leaf: leaf.astype(np.float32), a)
    want = gradients(exact, sizes_of(*sizes), dy, implementation="reference")
    assert_trees_close(got, want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("implementation", ALL)
def test_float32_matrices_serve_bfloat16_rows(implementation):
    a = make()
    low = {**a, "x": a["x"].astype(jnp.bfloat16)}
    y = run(low, sizes_of(*FULL), implementation=implementation)
    assert y.dtype == jnp.bfloat16
    assert_close(y, loop(low, FULL), rtol=2**-6, atol=5e-2)
    got = gradients(low, sizes_of(*FULL), cotangent(), implementation=implementation)
    assert got["x"].dtype == jnp.bfloat16 and got["w"][0].dtype == jnp.float32


@pytest.mark.parametrize("implementation", ALL)
def test_stacked_matrices_are_the_same_as_separate_ones(implementation):
    a, dy = make(), cotangent()
    stacked = {**a, "w": np.stack(a["w"])}
    sizes = sizes_of(*FULL)
    options = {"implementation": implementation}
    assert np.array_equal(run(stacked, sizes, **options), run(a, sizes, **options))
    got, want = (gradients(v, sizes, dy, **options) for v in (stacked, a))
    assert np.array_equal(got["w"], np.stack(want["w"]))


@pytest.mark.parametrize("implementation", [None, *ALL])
def test_no_rows(implementation):
    y = grouped_matmul(**make(0), group_sizes=sizes_of(0, 0, 0, 0), implementation=implementation)
    assert y.shape == (0, TINY.outer) and y.dtype == jnp.float32


def test_small_integers_count_as_sizes():
    a = make()
    got = grouped_matmul(**a, group_sizes=np.array(FULL, np.int8))
    assert_close(got, loop(a, FULL))


def is_jaxpr(value):
    return hasattr(value, "eqns")


def outside_of_branches(jaxpr):
    """Names of the operations that run whatever the data, those of inner functions included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name not in ("cond", "while"):
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(inner):
                    yield from outside_of_branches(inner)


@pytest.mark.parametrize("rows", [1, 2, 6, TINY.rows])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_matrix_is_read_only_where_its_group_has_rows(rows, dtype):
    a, sizes = make(rows, dtype=dtype), sizes_of(1, 0, 0, 0)
    jaxpr = jax.make_jaxpr(lambda a, sizes: run(a, sizes, implementation="xla"))(a, sizes)
    names = set(outside_of_branches(jaxpr.jaxpr))
    assert names & {"cond", "while"}
    # Nothing that touches a whole matrix: no product, no copy into one array, no conversion.
    assert not names & {"dot_general", "ragged_dot_general", "concatenate", "gather", "transpose"}
    text = jax.jit(lambda a, s: run(a, s, implementation="xla")).lower(a, sizes).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert " dot(" not in entry, "the compiler moved a product out of its branch"


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("rows", [2, TINY.rows])
def test_it_lowers_for_accelerators(platform, implementation, rows, monkeypatch):
    kind = {"cuda": "gpu"}.get(platform, platform)
    monkeypatch.setattr(shapes, "target_platform", lambda: kind)
    a, sizes, dy = make(rows, dtype=jnp.bfloat16), sizes_of(1, 0, 1, 0), cotangent(rows)

    def step(a, sizes, dy):  # afresh: `gradients` may have been traced for the CPU
        def loss(a):
            y = grouped_matmul(a["x"], a["w"], sizes, implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) * dy)

        return jax.value_and_grad(loss)(a)

    exported = jax.export.export(jax.jit(step), platforms=[platform])(a, sizes, dy)
    assert exported.platforms == (platform,)
    assert "stablehlo.dot_general" in exported.mlir_module()


def test_blocks_are_about_a_groups_size_and_never_more_than_the_rows(monkeypatch):
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(shapes, "target_platform", lambda platform=platform: platform)
        for dtype in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
            for rows in (1, 2, 7, 37, 1000, 100_000):
                block = block_rows(rows, 4, dtype)
                assert 1 <= block <= min(rows, shapes.MAX_BLOCK[platform])
                assert block == rows or block & (block - 1) == 0


def test_the_default_is_the_preferred_one_and_never_the_reference(monkeypatch):
    for names in api.PREFERRED.values():
        assert "reference" not in names and set(names) <= set(op.IMPLEMENTATIONS)
    called = []
    for name, way in IMPLEMENTATIONS.items():

        def note(x, w, group_sizes, name=name, run=way.run):
            called.append(name)
            return run(x, w, group_sizes)

        monkeypatch.setitem(IMPLEMENTATIONS, name, way._replace(run=note))
    a, sizes = make(), sizes_of(*FULL)
    for wanted in (None, "reference", "xla", ["xla", "reference"], ("reference", "xla")):
        grouped_matmul(**a, group_sizes=sizes, implementation=wanted)
    assert called == [api.PREFERRED["cpu"][0], "reference", "xla", "xla", "reference"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 3, 5))}, r"x has shape \(2, 3, 5\); want \[T D\]"),
        ({"x": jnp.ones((2, 5), jnp.int32)}, "x has dtype int32; want floating"),
        ({"x": [[1.0]]}, "x is a list; want an array"),
        ({"w": ()}, "w is empty; want a matrix for each group"),
        ({"w": jnp.ones((5, 3))}, r"w has shape \(5, 3\); want \[E D F\]"),
        ({"w": 3}, "w is of type int; want matrices"),
        ({"w": (jnp.ones((5, 3)), 3)}, r"w\[1\] is a int; want an array"),
        ({"w": (jnp.ones((5,)),)}, r"w\[0\] has shape \(5,\); want \[D F\]"),
        ({"w": (jnp.ones((4, 3)),)}, r"w\[0\] has shape \(4, 3\); want \(5, 3\)"),
        (
            {"w": (jnp.ones((5, 3)), jnp.ones((5, 4)))},
            r"w\[1\] has shape \(5, 4\); want \(5, 3\)",
        ),
        ({"group_sizes": sizes_of(1, 1, 1)}, r"group_sizes has shape \(3,\); want \(4,\)"),
        ({"group_sizes": jnp.ones((4,))}, "group_sizes has dtype float32; want integer"),
        ({"implementation": "xl"}, "unknown implementation 'xl'; did you mean 'xla'"),
        ({"implementation": []}, "implementation is an empty sequence"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = make() | {"group_sizes": sizes_of(*FULL)} | change
    with pytest.raises(KernelArgumentError, match=f"grouped_matmul: {message}") as told:
        grouped_matmul(**arguments)
    assert "\n" not in str(told.value)
