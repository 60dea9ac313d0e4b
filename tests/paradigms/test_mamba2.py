"""Mamba-2 against the paper's equations in NumPy, and how its parameters begin."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from genlab.paradigms.context import Context
from genlab.paradigms.layers.params import Build, Float32Param
from genlab.paradigms.mixers.mamba2 import Mamba2Config
from genlab.paradigms.ragged import compact
from pydantic import ValidationError

WIDTH, LENGTH, EPS = 12, 9, 1e-5
SMALL = {"state_size": 3, "head_dim": 4, "num_groups": 2, "conv_width": 3}


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def make(config, width=WIDTH, seed=0):
    """A mixer and its parameters as float64 arrays."""
    mixer = config.build(Build(width, 2, 32, EPS, nnx.Rngs(seed)))
    # These begin at constants, where a forgotten one would not show.
    mixer.conv_bias[...] = jnp.linspace(-0.5, 0.5, mixer.conv_bias.shape[0])
    if mixer.norm is not None:
        mixer.norm[...] = jnp.linspace(0.5, 1.5, mixer.norm.shape[0])
    mixer.D[...] = jnp.linspace(0.5, 1.5, mixer.D.shape[0])
    params = nnx.to_pure_dict(nnx.state(mixer))
    return mixer, {name: np.asarray(v, np.float64) for name, v in params.items()}


def by_hand(p, u, config):
    """arXiv 2405.21060, section 7, token by token: y (T D), last state (N P M), window."""
    G, M, P = config.num_groups, config.state_size, config.head_dim
    inner, taps = p["w_out"].shape[0], p["conv"].shape[0]
    factors = np.repeat(config.multipliers, (inner, inner, G * M, G * M, inner // P))
    heads = inner // P
    window, h, out = np.zeros((taps, inner + 2 * G * M)), np.zeros((heads, P, M)), []
    for u_t in u:
        z, xBC, dt = np.split((u_t @ p["w_in"]) * factors, [inner, 2 * inner + 2 * G * M])
        window = np.concatenate([window[1:], xBC[None]])
        mixed = silu((window * p["conv"]).sum(0) + p["conv_bias"])
        x, B, C = np.split(mixed, [inner, inner + G * M])
        x = x.reshape(heads, P)
        dt = np.maximum(softplus(dt + p["dt_bias"]), config.min_step)
        y = np.zeros((heads, P))
        for n in range(heads):
            group = n // (heads // G)
            B_n, C_n = B.reshape(G, M)[group], C.reshape(G, M)[group]
            h[n] = np.exp(-dt[n] * np.exp(p["A_log"][n])) * h[n] + dt[n] * np.outer(x[n], B_n)
            y[n] = h[n] @ C_n + p["D"][n] * x[n]
        gated = (y.reshape(-1) * silu(z)).reshape(G, -1)
        if not config.gate_norm:
            out.append(gated.reshape(-1) @ p["w_out"])
            continue
        normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + EPS)
        out.append((normed.reshape(-1) * p["norm"]) @ p["w_out"])
    return np.stack(out), h, window[1:]


def layer_ctx(length):
    """The context of one row."""
    return compact(jnp.zeros((1, length), jnp.int32), None, Context()).layer_ctx


@pytest.mark.parametrize("length", [LENGTH, 41])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_groups": 1, "head_dim": 12, "conv_width": 1},
        {"inner_width": 32, "gate_norm": False, "multipliers": (0.5, 1.5, 0.7, 1.2, 2.0),
         "min_step": 0.05},
    ],
)  # fmt: skip
def test_equals_the_paper_token_by_token(change, length):
    config = Mamba2Config(**(SMALL | change))
    mixer, params = make(config)
    u = np.random.default_rng(0).standard_normal((length, WIDTH)).astype(np.float32)
    want, h, window = by_hand(params, u, config)
    if config.min_step:  # some steps fall below it, and not all do
        free, _, _ = by_hand(params, u, config.model_copy(update={"min_step": 0.0}))
        every, _, _ = by_hand(params | {"dt_bias": -99.0}, u, config)
        assert np.abs(want - free).max() > 1e-3 < np.abs(want - every).max()
    state = mixer.init_state(1, 64, dtype=jnp.bfloat16)
    y, state = jax.jit(mixer.__call__)(jnp.asarray(u)[None], state, layer_ctx(length))
    np.testing.assert_allclose(y[0], want, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state.ssm[0], h, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state.conv[0], window, rtol=1e-4, atol=1e-5)
    assert state.conv.dtype == state.ssm.dtype == jnp.float32


def test_parameters_begin_as_in_the_paper():
    config = Mamba2Config(head_dim=1)
    mixer = config.build(Build(64, 2, 32, EPS, nnx.Rngs(0)))
    rates = np.exp(np.asarray(mixer.A_log[...]))
    assert rates.shape == (128,) and rates.min() >= 0.999 and rates.max() <= 16.001
    logs = np.log(rates)
    assert abs(logs.mean() - np.log(4)) < 4 * np.log(16) / np.sqrt(12 * 128)
    step = softplus(np.asarray(mixer.dt_bias[...], np.float64))
    assert step.min() >= 1e-3 * 0.999 and step.max() <= 0.1 * 1.001
    np.testing.assert_array_equal(mixer.D[...], 1)
    np.testing.assert_array_equal(mixer.norm[...], 1)


def test_rates_steps_and_norm_stay_float32_and_are_not_decayed():
    mixer, _ = make(Mamba2Config(**SMALL))
    kept = {n for n, v in vars(mixer).items() if isinstance(v, Float32Param)}
    assert kept == {"A_log", "D", "dt_bias", "norm"}


def test_pending_is_small():
    mixer, _ = make(Mamba2Config(state_size=64, head_dim=32), width=32)
    state = mixer.init_state(1, 8, dtype=jnp.float32)
    pending = jax.eval_shape(mixer.verify, jnp.zeros((1, 8, 32)), state, layer_ctx(8))[1]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pending))
    assert size < 8 * state.ssm.nbytes / 8  # a trail of eight states would be eight times as much


@pytest.mark.parametrize("change", [
    {"state_size": 4}, {"head_dim": 6}, {"expand": 4}, {"num_groups": 1}, {"conv_width": 2},
    {"dt_min": 0.05}, {"dt_max": 0.5}, {"dt_floor": 0.05}, {"a_init_range": (1.0, 2.0)},
])
def test_every_setting_changes_the_parameters(change):
    _, before = make(Mamba2Config(**SMALL))
    _, after = make(Mamba2Config(**(SMALL | change)))
    same = [before[n].shape == after[n].shape and (before[n] == after[n]).all() for n in before]
    assert not all(same)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"head_dim=7 does not divide expand \* width = 24"):
        make(Mamba2Config(head_dim=7))
    with pytest.raises(ValueError, match="num_groups=5 does not divide 6 heads"):
        make(Mamba2Config(head_dim=4, num_groups=5))
    with pytest.raises(ValidationError, match="a_init_range"):
        Mamba2Config.model_validate_json(json.dumps({"a_init_range": [4.0, 1.0]}))
    with pytest.raises(ValidationError, match=r"dt_min=0\.5 is above dt_max=0\.1"):
        Mamba2Config.model_validate_json(json.dumps({"dt_min": 0.5}))
