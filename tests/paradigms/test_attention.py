"""The attention mixer against the equation in NumPy, rotary phases, and rings of windows."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from genlab.paradigms.context import Context
from genlab.paradigms.layers.params import Build
from genlab.paradigms.layers.rotary import rotary_phases, rotate
from genlab.paradigms.mixers.attention import AttentionConfig
from genlab.paradigms.ragged import ModelState, compact
from pydantic import ValidationError

WIDTH, LENGTH, EPS = 12, 11, 1e-5


def make(**settings):
    """A mixer and its parameters as float64 arrays."""
    mixer = AttentionConfig(**settings).build(Build(WIDTH, 2, 64, EPS, nnx.Rngs(0)))
    if mixer.q_norm is not None:
        mixer.q_norm.scale[...] = jnp.linspace(0.5, 1.5, mixer.head_dim)
        mixer.k_norm.scale[...] = jnp.linspace(1.5, 0.5, mixer.head_dim)
    for number, bias in enumerate((mixer.b_q, mixer.b_k, mixer.b_v, mixer.b_o), start=1):
        if bias is not None:
            bias[...] = jnp.linspace(-number, number, bias[...].shape[0])
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(mixer)))
    return mixer, params


def scaled(base, R, scaling, length):
    """Radians per position and the factor on cosine and sine, one pair of channels at a time."""
    speeds, amplitude = [base ** (-2 * i / R) for i in range(R // 2)], 1.0
    if scaling is None:
        return np.array(speeds), amplitude
    kind, factor = scaling["name"], scaling["factor"]
    old = scaling.get("original_max_len")
    if kind == "linear":
        speeds = [w / factor for w in speeds]
    if kind == "dynamic" and length > old:
        grown = base * (factor * length / old - (factor - 1)) ** (R / (R - 2))
        speeds = [grown ** (-2 * i / R) for i in range(R // 2)]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        for i, w in enumerate(speeds):
            turns = old * w / (2 * np.pi)
            if turns < low:
                speeds[i] = w / factor
            elif turns <= high:
                smooth = (turns - low) / (high - low)
                speeds[i] = (1 - smooth) * w / factor + smooth * w
    if kind == "yarn":
        amplitude = 0.1 * np.log(factor) + 1
        ends = [
            R * np.log(old / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (scaling["beta_fast"], scaling["beta_slow"])
        ]
        low, high = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), R - 1)
        for i, w in enumerate(speeds):
            ramp = min(max((i - low) / (high - low), 0), 1)
            speeds[i] = ramp * w / factor + (1 - ramp) * w
    return np.array(speeds), amplitude


def by_hand(p, u, *, num_heads, num_kv_heads=None, head_dim=None, window=None, rope_base=10000.0,
            qk_norm=False, soft_cap=None, rotary_dim=None, rope_scaling=None, qkv_bias=False,
            out_bias=False, score_scale=None):
    """Causal attention, one query and head at a time (1706.03762, 2104.09864)."""
    kv_heads = num_kv_heads or num_heads
    H = head_dim or WIDTH // num_heads

    def turned(x, position):
        if rope_base is None:
            return x
        R = rotary_dim or H
        speed, amplitude = scaled(rope_base, R, rope_scaling, len(u))
        pairs = (x[: R // 2] + 1j * x[R // 2 : R]) * np.exp(1j * position * speed) * amplitude
        return np.concatenate([pairs.real, pairs.imag, x[R:]])

    def normed(x, scale):
        return x / np.sqrt((x**2).mean() + EPS) * scale if qk_norm else x

    q, k, v = (
        (u @ p["w_" + n] + (p["b_" + n] if qkv_bias else 0)).reshape(len(u), -1, H) for n in "qkv"
    )
    q_scale, k_scale = (p[n]["scale"] if qk_norm else None for n in ("q_norm", "k_norm"))
    out = np.zeros((len(u), num_heads, H))
    for t in range(len(u)):
        first = 0 if window is None else max(0, t - window + 1)
        for n in range(num_heads):
            group = n // (num_heads // kv_heads)
            query = turned(normed(q[t, n], q_scale), t)
            keys = [turned(normed(k[s, group], k_scale), s) for s in range(first, t + 1)]
            score = np.array(keys) @ query * (score_scale or 1 / np.sqrt(H))
            if soft_cap:
                score = soft_cap * np.tanh(score / soft_cap)
            weight = np.exp(score) / np.exp(score).sum()
            out[t, n] = weight @ v[first : t + 1, group]
    return out.reshape(len(u), -1) @ p["w_o"] + (p["b_o"] if out_bias else 0)


VARIANTS = {
    "multi-head": {"num_heads": 2},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
    "one key head": {"num_heads": 3, "num_kv_heads": 1},
    "window": {"num_heads": 2, "window": 3},
    "no positions": {"num_heads": 2, "rope_base": None},
    "another base": {"num_heads": 2, "rope_base": 100.0},
    "norm": {"num_heads": 2, "qk_norm": True},
    "cap": {"num_heads": 2, "soft_cap": 0.5},
    "scale": {"num_heads": 2, "score_scale": 0.1},
    "biases": {"num_heads": 2, "qkv_bias": True},
    "bias of the output": {"num_heads": 2, "out_bias": True},
    "some channels": {"num_heads": 2, "rotary_dim": 4},
    "linear": {"num_heads": 2, "rope_scaling": {"name": "linear", "factor": 4.0}},
    "dynamic": {
        "num_heads": 2,
        "rope_scaling": {"name": "dynamic", "factor": 4.0, "original_max_len": 7},
    },
    "llama3": {
        "num_heads": 1,
        "rope_scaling": {
            "name": "llama3", "factor": 4.0, "low_freq_factor": 0.05, "high_freq_factor": 0.6,
            "original_max_len": 20,
        },
    },
    "yarn": {
        "num_heads": 1,
        "rope_scaling": {
            "name": "yarn", "factor": 4.0, "original_max_len": 20, "beta_fast": 1.0,
            "beta_slow": 0.01,
        },
    },
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _call(graph, params, x, state, ctx):
    return nnx.merge(graph, params)(x, state, ctx)


def call(mixer, x, state, ctx):
    """The mixer, compiled."""
    graph, params = nnx.split(mixer)
    return _call(graph, params, x, state, ctx)


def context(length, start=None):
    """The context of one row of `length` tokens after `start` ones."""
    state = None
    if start is not None:
        state = ModelState((), *(jnp.array([v], jnp.int32) for v in (start, 0, 0)))
    return compact(jnp.zeros((1, length), jnp.int32), state, Context()).layer_ctx


def inputs(length=LENGTH):
    """(T D), large enough that scores differ."""
    return 3 * np.random.default_rng(0).standard_normal((length, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_equation(name):
    mixer, params = make(**VARIANTS[name])
    u = inputs()
    y, _ = call(mixer, jnp.asarray(u)[None], None, context(LENGTH))
    np.testing.assert_allclose(y[0], by_hand(params, u, **VARIANTS[name]), rtol=1e-4, atol=1e-4)


def test_every_setting_has_an_effect():
    plain = VARIANTS["multi-head"]
    u, seen = inputs(), {}
    for name, settings in VARIANTS.items():
        _, params = make(**settings)
        seen[name] = by_hand(params, u, **settings)
    seen["one head"] = by_hand(make(num_heads=1)[1], u, num_heads=1)
    for name, settings in VARIANTS.items():
        if settings != plain:
            other = "one head" if settings["num_heads"] == 1 else "multi-head"
            assert np.abs(seen[name] - seen[other]).max() > 1e-3, name
    shown = set().union(*VARIANTS.values()) | {"name", "kv"}  # kv: see test_blocks.py
    assert shown == set(AttentionConfig.model_fields)


@pytest.mark.parametrize("sizes", [[11], [3, 8], [8, 3], [1] * 11, [2, 4, 5]])
def test_chunks_longer_and_shorter_than_the_ring(sizes):
    settings = VARIANTS["window"]
    mixer, params = make(**settings)
    u, at, parts = inputs(), 0, []
    want = by_hand(params, u, **settings)
    state = mixer.init_state(1, 64, dtype=jnp.float32)
    assert state.k.shape[1] == settings["window"]
    for size in sizes:
        part = jnp.asarray(u[at : at + size])[None]
        y, state = call(mixer, part, state, context(size, at))
        parts.append(np.asarray(y[0]))
        at += size
    np.testing.assert_allclose(np.concatenate(parts), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.sort(state.order[0]), [8, 9, 10])


def test_state_dtype_is_the_one_asked_for():
    mixer, _ = make(num_heads=2)
    state = mixer.init_state(1, 16, dtype=jnp.bfloat16)
    x = jnp.asarray(inputs())[None]
    _, after = call(mixer, x, state, context(LENGTH, 0))
    assert after.k.dtype == after.v.dtype == jnp.bfloat16
    cost = mixer.cost(1, 1, 16, 2)
    assert cost.bytes_read == state.k.nbytes + state.v.nbytes + 2 * 4 * 16


@pytest.mark.parametrize("offset", [1, 64, 4096])
def test_scores_depend_on_distance_alone(offset):
    head_dim = 32
    draw = np.random.default_rng(1).standard_normal((2, 1, 1, 1, head_dim)).astype(np.float32)

    def score(m, n):
        q, k = (
            rotate(jnp.asarray(x), rotary_phases(jnp.array([[at]]), head_dim, 10000.0))
            for x, at in zip(draw, (m, n), strict=True)
        )
        return float(np.sum(np.asarray(q, np.float64) * np.asarray(k, np.float64)))

    for m, n in ((0, 0), (7, 3), (100, 1)):
        near, far = score(m, n), score(m + offset, n + offset)
        assert abs(near - far) < 1e-3 * np.linalg.norm(draw[0]) * np.linalg.norm(draw[1])
    assert abs(score(7, 3) - score(8, 3)) > 1e-2


def test_phases_do_not_depend_on_the_compute_dtype():
    positions = jnp.array([[0, 1, 4097]])
    cos, sin = rotary_phases(positions, 8, 10000.0)
    assert cos.dtype == sin.dtype == jnp.float32
    angle = np.array([0, 1, 4097])[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=5e-4)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=5e-4)
    # Rotation happens in float32 and is rounded once.
    x = jax.random.normal(jax.random.key(0), (1, 3, 1, 8), jnp.bfloat16)
    want = rotate(x.astype(jnp.float32), (cos, sin)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        rotate(x, (cos, sin)).astype(jnp.float32), want.astype(jnp.float32)
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="width=12 is no multiple of num_heads=5: set head_dim"):
        make(num_heads=5)
    with pytest.raises(ValueError, match="even head_dim, got 3"):
        make(num_heads=4)
    with pytest.raises(ValidationError, match="num_kv_heads=3 does not divide num_heads=4"):
        AttentionConfig.model_validate_json(json.dumps({"num_heads": 4, "num_kv_heads": 3}))
    with pytest.raises(ValidationError, match="num_heads"):
        AttentionConfig.model_validate_json("{}")
