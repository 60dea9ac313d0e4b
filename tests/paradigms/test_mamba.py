"""Mamba against the paper's equations in NumPy, and how its parameters begin."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from genlab.paradigms.context import Context
from genlab.paradigms.layers.params import Build, Float32Param
from genlab.paradigms.mixers.mamba import MambaConfig
from genlab.paradigms.ragged import compact
from pydantic import ValidationError

WIDTH, LENGTH = 12, 9


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def make(config=None, width=WIDTH, seed=0):
    """A mixer and its parameters as float64 arrays."""
    config = config or MambaConfig(state_size=3, conv_width=3, dt_rank=2)
    mixer = config.build(Build(width, 2, 32, 1e-5, nnx.Rngs(seed)))
    # Biases begin at zero, where a forgotten one would not show.
    mixer.conv_bias[...] = jnp.linspace(-0.5, 0.5, mixer.conv_bias.shape[0])
    params = nnx.to_pure_dict(nnx.state(mixer))
    return mixer, {name: np.asarray(v, np.float64) for name, v in params.items()}


def by_hand(p, u):
    """arXiv 2312.00752, algorithm 2, token by token: y (T D) and the last state (E M)."""
    inner, states = p["A_log"].shape
    taps, rank = p["conv"].shape[0], p["w_dt"].shape[0]
    window, h, out = np.zeros((taps, inner)), np.zeros((inner, states)), []
    for u_t in u:
        x, z = np.split(u_t @ p["w_in"], 2)
        window = np.concatenate([window[1:], x[None]])
        x = silu((window * p["conv"]).sum(0) + p["conv_bias"])
        low, B, C = np.split(x @ p["w_x"], [rank, rank + states])
        dt = softplus(low @ p["w_dt"] + p["dt_bias"])
        h = np.exp(-dt[:, None] * np.exp(p["A_log"])) * h + (dt * x)[:, None] * B
        out.append(((h @ C + p["D"] * x) * silu(z)) @ p["w_out"])
    return np.stack(out), h, window[1:]


def layer_ctx(length, state=None, **kwargs):
    """The context of one row."""
    return compact(jnp.zeros((1, length), jnp.int32), state, Context(**kwargs)).layer_ctx


@pytest.mark.parametrize("config", [
    MambaConfig(state_size=3, conv_width=3, dt_rank=2),
    MambaConfig(state_size=1, conv_width=1, expand=1),
])
def test_equals_the_paper_token_by_token(config):
    mixer, params = make(config)
    u = np.random.default_rng(0).standard_normal((LENGTH, WIDTH)).astype(np.float32)
    want, h, window = by_hand(params, u)
    state = mixer.init_state(1, 16, dtype=jnp.bfloat16)
    y, state = mixer(jnp.asarray(u)[None], state, layer_ctx(LENGTH))
    np.testing.assert_allclose(y[0], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.ssm[0], h, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.conv[0], window, rtol=1e-4, atol=1e-5)
    assert state.conv.dtype == state.ssm.dtype == jnp.float32


def test_parameters_begin_as_in_the_paper():
    mixer, p = make(MambaConfig(), width=64)
    assert mixer.inner == 128 and mixer.dt_rank == 4 and p["conv"].shape == (4, 128)
    np.testing.assert_allclose(np.exp(p["A_log"]), np.tile(np.arange(1, 17), (128, 1)), rtol=1e-6)
    np.testing.assert_array_equal(p["D"], 1)
    step = softplus(p["dt_bias"])
    assert step.min() >= 1e-3 * 0.999 and step.max() <= 0.1 * 1.001
    # Log-uniform: the logarithm's mean and spread, four standard errors around.
    logs = np.log(step)
    low, high = np.log(1e-3), np.log(0.1)
    assert abs(logs.mean() - (low + high) / 2) < 4 * (high - low) / np.sqrt(12 * 128)
    assert abs(p["w_dt"]).max() <= 0.5 and abs(p["w_dt"]).max() > 0.45
    floor = make(MambaConfig(dt_min=1e-6, dt_floor=1e-3), width=64)[1]
    assert np.isclose(softplus(floor["dt_bias"]).min(), 1e-3, rtol=1e-3)


def test_rates_and_steps_stay_float32_and_are_not_decayed():
    mixer, _ = make()
    kept = {n for n, v in vars(mixer).items() if isinstance(v, Float32Param)}
    assert kept == {"A_log", "D", "dt_bias"}


def test_an_impulse_meets_exactly_the_taps():
    mixer, _ = make(MambaConfig(state_size=2, conv_width=4))
    mixer.conv_bias[...] = jnp.zeros_like(mixer.conv_bias[...])
    impulse = jnp.zeros((1, 8, WIDTH)).at[0, 2].set(1.0)
    ctx = layer_ctx(8)
    _, pending = mixer.verify(impulse, mixer.init_state(1, 8, dtype=jnp.float32), ctx)
    answered = np.abs(np.asarray(pending.x[0])).max(axis=-1) > 0
    np.testing.assert_array_equal(answered, [0, 0, 1, 1, 1, 1, 0, 0])


def test_pending_is_small():
    mixer, _ = make(MambaConfig(state_size=16), width=32)
    tokens = jnp.zeros((1, 8, 32))
    state = mixer.init_state(1, 8, dtype=jnp.float32)
    pending = jax.eval_shape(mixer.verify, tokens, state, layer_ctx(8))[1]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pending))
    assert size < 8 * state.ssm.nbytes / 4  # a trail of eight states would be four times as much


@pytest.mark.parametrize("change", [
    {"state_size": 4}, {"conv_width": 2}, {"expand": 3}, {"dt_rank": 5}, {"dt_min": 0.05},
    {"dt_max": 0.5}, {"dt_floor": 0.05},
])
def test_every_setting_changes_the_parameters(change):
    base = {"state_size": 3, "conv_width": 3, "dt_rank": 2}
    _, before = make(MambaConfig(**base))
    _, after = make(MambaConfig(**(base | change)))
    same = [before[n].shape == after[n].shape and (before[n] == after[n]).all() for n in before]
    assert not all(same)


def test_a_range_upside_down_is_refused():
    with pytest.raises(ValidationError, match=r"dt_min=0\.5 is above dt_max=0\.1"):
        MambaConfig.model_validate_json(json.dumps({"dt_min": 0.5}))
    with pytest.raises(ValidationError, match="state_size"):
        MambaConfig.model_validate_json(json.dumps({"state_size": 0}))
