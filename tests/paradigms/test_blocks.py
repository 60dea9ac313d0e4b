"""Every wiring equals its equation, written out in NumPy; meta tokens equal real ones in front."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.model import build_model
from pydantic import ValidationError

WIDTH, VOCAB, T = 16, 23, 9
ATTENTION = {"name": "attention", "num_heads": 2, "rope_base": None}
MAMBA = {"name": "mamba", "state_size": 4}
MAMBA2 = {"name": "mamba2", "state_size": 4, "head_dim": 8}
MLP = {"name": "swiglu", "width": 24}
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def config_of(layers, **more):
    """A configuration with each of the layers once."""
    plain = {
        "width": WIDTH, "pattern": list(layers), "layers": layers, "max_len": 32,
        "vocab_size": VOCAB,
    }  # fmt: skip
    return ModelConfig.model_validate_json(json.dumps(plain | more))


def model_of(layers, **more):
    """A model whose parts all matter: norms are no longer ones, nothing is zero."""
    model = build_model(config_of(layers, **more), seed=3)
    draw = np.random.default_rng(0)

    def stir(leaf):
        return leaf + 0.2 * draw.standard_normal(leaf.shape).astype(np.float32)

    params = jax.tree.map(stir, model.params)
    return model.with_params(params | {"embedding": 30 * params["embedding"]})


@jax.jit
def run(model, tokens, ctx=Context()):  # noqa: B008
    """Hidden states without state."""
    return model(tokens, ctx=ctx)[0].hidden


def tokens_of(seed=0, rows=2, length=T):
    """Random ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length), dtype=np.int32)


def norm(x, scale):
    """RMS norm."""
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * np.asarray(scale["scale"])


def silu(x):
    """x sigmoid(x)."""
    return x / (1 + np.exp(-x))


def mlp(x, p, extra=None):
    """SwiGLU; `extra` maps a matrix's name to what is added to it."""
    weight = {k: np.asarray(v) + (extra or {}).get(k, 0) for k, v in p.items()}
    return (silu(x @ weight["w_gate"]) * (x @ weight["w_up"])) @ weight["w_down"]


def attend(q, k, v, scale):
    """Causal attention of two heads, (B T 2 H) each."""
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weight, v).reshape(*q.shape[:2], -1)


def heads(x, w):
    """(B T 2 H)."""
    y = x @ np.asarray(w)
    return y.reshape(*y.shape[:2], 2, -1)


def attention(x, p, kv=None, extra=None):
    """The mixer without positions; keys and values of `kv` (x, params) if given."""
    weight = {k: np.asarray(v) + (extra or {}).get(k, 0) for k, v in p.items()}
    q = heads(x, weight["w_q"])
    source, held = kv or (x, weight)
    k, v = heads(source, held["w_k"]), heads(source, held["w_v"])
    return attend(q, k, v, q.shape[-1] ** -0.5) @ weight["w_o"]


def embedded(model, tokens):
    """The embedding of tokens and the layers' parameters."""
    p = model.params
    return (
        np.asarray(p["embedding"])[tokens],
        [p[f"layer_{i}"] for i in range(len(p)) if f"layer_{i}" in p],
        p["final_norm"],
    )


WIRINGS = {
    "prenorm": {"name": "prenorm"},
    "postnorm": {"name": "postnorm"},
    "parallel": {"name": "parallel"},
    "parallel_two_norms": {"name": "parallel", "one_norm": False},
}


@pytest.mark.parametrize("name", WIRINGS)
def test_one_mixer_wirings_equal_their_equations(name):
    model = model_of({"x": {"block": WIRINGS[name], "mixer": ATTENTION, "mlp": MLP}})
    tokens = tokens_of()
    x, (p,), final = embedded(model, tokens)
    if name == "prenorm":
        x = x + attention(norm(x, p["mixer_norm"]), p["mixer"])
        x = x + mlp(norm(x, p["mlp_norm"]), p["mlp"])
    elif name == "postnorm":
        x = norm(x + attention(x, p["mixer"]), p["mixer_norm"])
        x = norm(x + mlp(x, p["mlp"]), p["mlp_norm"])
    else:
        h = norm(x, p["mixer_norm"])
        other = h if name == "parallel" else norm(x, p["mlp_norm"])
        x = x + attention(h, p["mixer"]) + mlp(other, p["mlp"])
    np.testing.assert_allclose(run(model, tokens), norm(x, final), **TOLERANCE)


@pytest.mark.parametrize("combine", ["sum", "mean_of_norms"])
def test_parallel_heads_equal_their_equation(combine):
    block = {"name": "parallel_heads", "combine": combine, "multipliers": [0.5, 2.0]}
    mixers = [ATTENTION, ATTENTION | {"num_kv_heads": 2}]
    model = model_of({"x": {"block": block, "mixers": mixers, "mlp": MLP}})
    tokens = tokens_of()
    x, (p,), final = embedded(model, tokens)
    h = norm(x, p["mixer_norm"])
    outs = [attention(h, p["mixer_0"]), attention(h, p["mixer_1"])]
    if combine == "mean_of_norms":
        outs = [norm(y, p[f"out_norm_{i}"]) / 2 for i, y in enumerate(outs)]
    x = x + 0.5 * outs[0] + 2.0 * outs[1]
    x = x + mlp(norm(x, p["mlp_norm"]), p["mlp"])
    np.testing.assert_allclose(run(model, tokens), norm(x, final), **TOLERANCE)


@pytest.mark.parametrize("own", [False, True])
def test_a_shared_block_equals_its_equation(own):
    block = {"name": "shared", "lora_rank": 2, "lora": ["w_q", "w_gate", "w_up"]}
    firsts = {"w_q": "w_q", "w_gate": "w_gate", "w_up": "w_gate" if own else "w_up"}
    block |= {"lora_joined": own}
    mixers = [ATTENTION, ATTENTION] if own else [ATTENTION]
    layers = {"s": {"block": block, "mixers": mixers, "mlp": MLP}, "a": {"mixer": ATTENTION}}
    model = model_of(layers, depth=3)  # s a s: two invocations of the same weights
    tokens = tokens_of()
    first, parts, final = embedded(model, tokens)
    s, x = model.params["shared_s"], first
    for p in (parts[0], None, parts[2]):
        if p is None:
            x = x + attention(norm(x, parts[1]["mixer_norm"]), parts[1]["mixer"])
            continue
        extra = {name: np.asarray(p[f"{first_of}_down"]) @ np.asarray(p[f"{name}_up"])
                 for name, first_of in firsts.items()}  # fmt: skip
        wide = norm(np.concatenate([x, first], -1), s["input_norm"])
        y = norm(attention(wide, s["mixer"], extra={"w_q": extra["w_q"]}), s["mlp_norm"])
        link = mlp(y, s["mlp"], extra) @ np.asarray(p["w_link"])
        if own:
            x = x + attention(norm(x + link, p["mixer_norm"]), p["mixer"])
        else:
            x = x + link
    np.testing.assert_allclose(run(model, tokens), norm(x, final), **TOLERANCE)
    shared = sum(a.size for a in jax.tree.leaves(s))
    once = model_of(layers).num_params()
    more = model.num_params() - once
    assert more == sum(a.size for a in jax.tree.leaves(parts[2]))  # and the shared ones only once
    assert shared > 0 and "mixer" not in parts[0].keys() - ({"mixer"} if own else set())


def test_reused_keys_and_values_are_those_of_the_publishing_layer():
    layers = {
        "p": {"mixer": ATTENTION | {"kv": "publish"}},
        "r": {"mixer": ATTENTION | {"kv": "reuse"}},
    }
    model = model_of(layers, depth=3, pattern=["p", "r", "r"])
    tokens = tokens_of()
    x, (p, *reusing), final = embedded(model, tokens)
    source = norm(x, p["mixer_norm"])
    x = x + attention(source, p["mixer"])
    for r in reusing:
        assert set(r["mixer"]) == {"w_q", "w_o"}
        x = x + attention(norm(x, r["mixer_norm"]), r["mixer"], kv=(source, p["mixer"]))
    np.testing.assert_allclose(run(model, tokens), norm(x, final), **TOLERANCE)
    state = model.init_state(1, 8)
    assert jax.tree.leaves(state.layers[1:]) == []


META_LAYERS = {
    "attention": {"mixer": ATTENTION | {"rope_base": 10000.0}, "mlp": MLP},
    "mamba": {"mixer": MAMBA},
    "mamba2": {"mixer": MAMBA2},
    "both": {"block": {"name": "parallel_heads"}, "mixers": [ATTENTION, MAMBA]},
}


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_meta_tokens_are_tokens_in_front_of_the_row(count):
    with_meta = model_of(META_LAYERS, meta_tokens=count)
    params = dict(with_meta.params)
    meta = params.pop("meta")
    params["embedding"] = jnp.concatenate([params["embedding"], meta])
    plain = build_model(config_of(META_LAYERS, vocab_size=VOCAB + count), seed=0)
    plain = plain.with_params(params)
    tokens = tokens_of()
    front = np.broadcast_to(np.arange(VOCAB, VOCAB + count, dtype=np.int32), (2, count))
    want = run(plain, np.concatenate([front, tokens], axis=1))[:, count:]
    np.testing.assert_allclose(run(with_meta, tokens), want, **TOLERANCE)
    ready = with_meta.prepare("float32")
    assert ready.begin is not None
    np.testing.assert_allclose(run(ready, tokens), want, **TOLERANCE)
    # Two documents in a row begin with them both.
    packed = np.concatenate([tokens[:1], tokens[1:]], axis=1)
    segments = np.repeat([[0, 1]], T, axis=1).astype(np.int32)
    got = run(with_meta, packed, Context(segment_ids=segments))
    np.testing.assert_allclose(got.reshape(2, T, -1), want, **TOLERANCE)


def test_a_window_does_not_hide_meta_tokens():
    layers = {"a": {"mixer": ATTENTION | {"window": 2}}}
    model = model_of(layers, meta_tokens=3)
    moved = model.with_params(model.params | {"meta": model.params["meta"] + 1.0})
    difference = np.abs(run(moved, tokens_of()) - run(model, tokens_of())).max(axis=(0, 2))
    assert (difference > 1e-4).all()


def test_gradients_reach_what_layers_hand_on_also_when_recomputed():
    layers = {
        "p": {"mixer": ATTENTION | {"kv": "publish"}},
        "s": {"block": {"name": "shared"}, "mixers": [ATTENTION, MAMBA], "mlp": MLP},
        "r": {"mixer": ATTENTION | {"kv": "reuse"}},
    }
    model = model_of(layers, meta_tokens=2)
    tokens = tokens_of()

    def loss(params, remat):
        out, _ = model.with_params(params)(tokens, remat=remat)
        return jnp.sum(jnp.sin(out.hidden))

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = grad(model.params, False), grad(model.params, True)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(plain), jax.tree.leaves(again), strict=True
    ):
        assert np.abs(a).max() > 0, path
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=str(path))


REFUSED = [
    ({"x": {"mixers": [ATTENTION, MAMBA]}}, "block 'prenorm' takes one mixer, got 2"),
    ({"x": {"mixer": ATTENTION, "mixers": [MAMBA]}}, "give mixer or mixers, not both"),
    ({"x": {"block": {"name": "parallel"}, "mixer": ATTENTION}}, "needs a mixer and an mlp"),
    (
        {"x": {"block": {"name": "parallel_heads"}, "mixer": ATTENTION}},
        "at least two, got 1",
    ),
    (
        {"x": {"block": {"name": "parallel_heads", "multipliers": [1.0]},
               "mixers": [ATTENTION, MAMBA]}},
        "1 values for 2 mixers",
    ),
    ({"x": {"block": {"name": "shared"}, "mixers": [MAMBA], "mlp": MLP}}, "must be attention"),
    (
        {"x": {"block": {"name": "shared", "lora_joined": True}, "mixers": [ATTENTION],
               "mlp": MLP}},
        "lora_joined needs lora_rank",
    ),
    ({"x": {"mixer": ATTENTION | {"kv": "reuse"}}}, "needs a layer with kv=publish before it"),
    (
        {"p": {"mixer": ATTENTION | {"kv": "publish"}},
         "r": {"mixer": ATTENTION | {"kv": "reuse", "window": 4}}},
        "kv=reuse has window=4, the publishing layer has None",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "message"), REFUSED)
def test_parts_that_do_not_fit_are_refused(layers, message):
    with pytest.raises(ValidationError, match=message):
        config_of(layers)


def test_an_unknown_matrix_of_an_adapter_is_named():
    block = {"name": "shared", "lora_rank": 2, "lora": ["w_gat"]}
    with pytest.raises(ConfigError, match="no shared matrix 'w_gat' among"):
        model_of({"x": {"block": block, "mixers": [ATTENTION], "mlp": MLP}})


def test_a_mixer_that_cannot_begin_from_meta_tokens_says_so():
    layers = {"x": {"mixer": {"name": "symmetric_conv"}}}
    model = build_model(config_of(layers, meta_tokens=2), seed=0)
    with pytest.raises(ConfigError, match="SymmetricConv cannot begin from meta tokens"):
        model.prepare("float32")
