"""The mixture of experts against its equations: values, gradients, losses, statistics."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from genlab.paradigms.context import Context
from genlab.paradigms.layers.params import Build
from genlab.paradigms.layers.routing import group_by_expert
from genlab.paradigms.mlps.moe import MoEConfig
from genlab.paradigms.ragged import compact
from pydantic import ValidationError

D, B, T = 8, 2, 9
BASE = {"name": "moe", "width": 6, "num_experts": 5, "top_k": 2}
VARIANTS = {
    "mixtral": {},
    "jamba": {"normalize_weights": False, "router_z_weight": 0.02},
    "switch": {"top_k": 1, "normalize_weights": False},
    "deepseek": {"top_k": 3, "shared_experts": 2, "normalize_weights": False},
    "all experts": {"top_k": 5},
    "one expert": {"num_experts": 1, "top_k": 1, "normalize_weights": False},
}

# Compiling is nearly all that these tests cost: LLVM leaves the small programs unoptimised.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def config_of(**settings):
    return MoEConfig.model_validate_json(json.dumps(BASE | settings))


@functools.lru_cache
def built(config):
    """Graph and parameters of a layer; every matrix matters."""
    graph, state = nnx.split(config.build(Build(D, 1, 32, 1e-5, nnx.Rngs(0))))
    return graph, nnx.to_pure_dict(state)


def layer(params, x, lengths, *, config):
    """The layer on rows of `lengths` tokens: output, losses and statistics."""
    shape = jnp.zeros(x.shape[:2], jnp.int32)
    ctx = compact(shape, None, Context(lengths=lengths)).layer_ctx
    return nnx.merge(built(config)[0], params)(x, ctx)


def by_hand(params, x, lengths, *, config):
    """The layer from its equations: every expert on every token, then what was not chosen is 0.

    Returns the output (B T D), the unscaled losses, and statistics.
    """
    p = {name: jnp.asarray(w, jnp.float32) for name, w in params.items() if name != "shared"}
    x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    real = (jnp.arange(T)[None] < lengths[:, None]).reshape(-1, 1)
    x = jnp.where(real, x, 0.0)
    num_experts, k = config.num_experts, config.top_k
    logits = jnp.dot(x, p["w_router"], precision="highest")
    denominator = jnp.sum(jnp.exp(logits), axis=1, keepdims=True)
    probs = jnp.exp(logits) / denominator
    # An expert's rank is the number of experts before it: of larger ones, and of equal ones left.
    left = np.tri(num_experts, k=-1, dtype=bool)
    ahead = (logits[:, None] > logits[:, :, None]) | (
        (logits[:, None] == logits[:, :, None]) & left
    )
    chosen = jnp.sum(ahead, axis=2) < k
    gates = jnp.where(chosen, probs, 0.0)
    if config.normalize_weights:
        gates = gates / jnp.sum(gates, axis=1, keepdims=True)

    def swiglu(gate, up, down):
        return ((gate * jax.nn.sigmoid(gate)) * up) @ down

    y = jnp.zeros_like(x)
    for e in range(num_experts):
        gate, up = jnp.split(x @ p[f"w_in_{e}"], 2, axis=1)
        y += gates[:, e : e + 1] * swiglu(gate, up, p[f"w_down_{e}"])
    if config.shared_experts:
        s = {name: w.astype(jnp.float32) for name, w in params["shared"].items()}
        width = config.width
        for e in range(config.shared_experts):
            part = slice(e * width, (e + 1) * width)
            y += swiglu(x @ s["w_gate"][:, part], x @ s["w_up"][:, part], s["w_down"][part])
    count = jnp.sum(real, dtype=jnp.float32)
    f = jnp.sum(chosen & real, axis=0, dtype=jnp.float32) / (k * count)
    mean_probs = jnp.sum(jnp.where(real, probs, 0.0), axis=0) / count
    entropy = -jnp.sum(jnp.where(real, probs * jnp.log(probs), 0.0)) / count
    losses = {
        "balance": num_experts * jnp.sum(f * mean_probs),
        "z": jnp.sum(jnp.where(real, jnp.log(denominator) ** 2, 0.0)) / count,
    }
    unused = jnp.sum(f == 0).astype(jnp.float32)
    stats = {"router_entropy": entropy, "max_load": num_experts * f.max(), "unused_experts": unused}
    return jnp.where(real, y, 0.0).reshape(B, T, D), losses, stats


run = jit(layer, static_argnames="config")


def rows_of(seed=0, shape=(B, T, D)):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def real_only(y, lengths):
    return np.where(np.arange(T)[None, :, None] < np.array(lengths)[:, None, None], y, 0)


def assert_close(got, want, atol=2e-5, rtol=1e-5):
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        name = jax.tree_util.keystr(path)
        assert np.isfinite(one).all(), name
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", [*VARIANTS, "collapsed"])
def test_output_losses_statistics_and_gradients_are_those_of_the_equations(name):
    config = config_of(**VARIANTS.get(name, {}), balance_weight=0.3)
    params, x, lengths = built(config)[1], rows_of(), np.array([T, T - 4], np.int32)
    if name == "collapsed":  # everybody wants the same two experts: none is turned away
        x[..., 0] = 3.0
        params = params | {"w_router": params["w_router"].at[0].set([0.0, 9.0, 0.0, 8.0, 0.0])}
    weight = real_only(rows_of(1), lengths)

    def mine(params, x):
        y, aux = layer(params, x, lengths, config=config)
        loss = sum(value for name, value in aux.items() if name.endswith("_loss"))
        return jnp.sum(y * weight) + loss, (y, aux)

    def theirs(params, x):
        y, losses, stats = by_hand(params, x, lengths, config=config)
        aux = {"balance_loss": 0.3 * losses["balance"]}
        if config.router_z_weight:
            aux["router_z_loss"] = config.router_z_weight * losses["z"]
        return jnp.sum(y * weight) + sum(aux.values()), (y, aux | stats)

    (got, want) = (
        jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(params, x) for f in (mine, theirs)
    )
    (_, (y, aux)), gradients = got
    (_, (want_y, want_aux)), want_gradients = want
    assert_close(real_only(y, lengths), want_y)
    assert_close(aux, want_aux)
    assert_close(gradients, want_gradients)
    if name == "collapsed":
        assert aux["unused_experts"] == 3 and aux["max_load"] == 2.5


def test_statistics_carry_no_gradient():
    config = config_of()
    params, x, lengths = built(config)[1], rows_of(), np.array([T, T], np.int32)

    def entropy(params):
        return layer(params, x, lengths, config=config)[1]["router_entropy"]

    assert not any(leaf.any() for leaf in jax.tree.leaves(jit(jax.grad(entropy))(params)))


def test_a_balanced_router_has_balance_loss_one_whatever_top_k_is():
    for top_k in (1, 3):
        config = config_of(
            num_experts=4, top_k=top_k, balance_weight=1.0, normalize_weights=top_k > 1
        )
        params = built(config)[1] | {"w_router": jnp.zeros((D, 4))}
        _, aux = run(params, rows_of(), np.array([T, T], np.int32), config=config)
        assert_close(aux["balance_loss"], 1.0)
        assert_close(aux["router_entropy"], np.log(4))


def test_padding_is_not_read_and_counts_nowhere():
    config = config_of(shared_experts=1, router_z_weight=0.1)
    params, lengths = built(config)[1], np.array([T, 3], np.int32)
    x = rows_of()
    want = run(params, x, lengths, config=config)
    nan = np.where(real_only(np.ones((B, T, 1)), lengths) > 0, x, np.float32(np.nan))
    loud = np.where(np.isnan(nan), np.float32(1e6), x)
    for padding in (nan, real_only(x, lengths), loud):
        y, aux = run(params, padding, lengths, config=config)
        assert np.array_equal(real_only(y, lengths), real_only(want[0], lengths))
        assert all(np.array_equal(aux[name], want[1][name]) for name in want[1])
    # A hundred columns of padding more: the sums come in another order.
    more = np.concatenate([x, rows_of(2, (B, 100, D))], axis=1)
    y, aux = run(params, more, lengths, config=config)
    assert_close(real_only(y[:, :T], lengths), real_only(want[0], lengths))
    assert_close(aux, want[1], atol=1e-6, rtol=0)
    # Nothing but padding: no loss, and no division by zero.
    _, aux = run(params, nan, np.array([0, 0], np.int32), config=config)
    assert aux.pop("unused_experts") == 5 and not any(aux.values())


def test_bfloat16_agrees_with_the_equations_to_its_rounding():
    config = config_of(shared_experts=1, normalize_weights=False)
    exact = built(config)[1]
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), exact)
    low["w_router"] = exact["w_router"]
    x, lengths = rows_of().astype(jnp.bfloat16), np.array([T, T - 2], np.int32)
    y, aux = run(low, x, lengths, config=config)
    assert y.dtype == jnp.bfloat16 and aux["balance_loss"].dtype == jnp.float32
    want, losses, _ = jit(by_hand, static_argnames="config")(low, x, lengths, config=config)
    assert_close(real_only(y.astype(jnp.float32), lengths), want, rtol=2**-6, atol=2**-6)
    assert_close(aux["balance_loss"], config.balance_weight * losses["balance"])


def test_assignments_are_sorted_by_expert_in_token_order():
    experts = np.array([[2, 0], [0, 1], [3, 2], [0, 2]], np.int32)
    valid = np.array([True, True, False, True])
    groups = group_by_expert(experts, valid, 5)
    # Flat places: token 0 has 0 and 1, token 1 has 2 and 3, token 3 has 6 and 7; 4 and 5 are pads.
    assert groups.order.tolist() == [1, 2, 6, 3, 0, 7, 4, 5]
    assert groups.sizes.tolist() == [3, 1, 2, 0, 0]
    assert np.asarray(groups.order)[np.asarray(groups.place)].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "top_k=6 is more than num_experts=5; want at most that"),
        ({"top_k": 1}, "want normalize_weights: false"),
        ({"top_k": 0}, "greater than or equal to 1"),
        ({"balance_weight": -1.0}, "greater than or equal to 0"),
        ({"topk": 2}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        config_of(**change)
