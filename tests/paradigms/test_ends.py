"""Learnt positions, types, layer norms and the head's frame equal their equations in NumPy."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.model import abstract_model, build_model
from pydantic import ValidationError

WIDTH, VOCAB, T = 16, 23, 9
LAYER = {"mlp": {"name": "plain", "width": 24, "activation": "gelu"}}
ALL = {
    "norm": "layer",
    "inputs": {
        "positions": 40, "first_position": 2, "token_types": 3, "norm": True, "scale": 1.5,
    },
    "output": {"transform": "gelu", "bias": True, "scale": 0.5},
    "final_norm": False,
}  # fmt: skip
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def config_of(**more):
    """A model of one layer that is an MLP alone."""
    plain = {
        "width": WIDTH, "pattern": ["a"], "layers": {"a": LAYER}, "max_len": 32,
        "vocab_size": VOCAB, "pad_vocab_to": 8,
    }  # fmt: skip
    return ModelConfig.model_validate_json(json.dumps(plain | more))


FACTORED = ALL | {"inputs": ALL["inputs"] | {"width": 6}}


@pytest.fixture(scope="module", params=["whole", "factored"])
def model(request):
    """A model whose every parameter matters."""
    model = build_model(config_of(**(ALL if request.param == "whole" else FACTORED)), seed=0)
    draw = np.random.default_rng(0)
    stir = lambda leaf: leaf + 0.3 * draw.standard_normal(leaf.shape).astype(np.float32)  # noqa: E731
    return model.with_params(jax.tree.map(stir, model.params))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, VOCAB, (2, T), dtype=np.int32)


def normed(x, p):
    """Layer norm."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gelu(x):
    """By the error function."""
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def in_numpy(params, tokens, places):
    """Hidden states and logits, from the equations."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = 1.5 * p["embedding"][tokens] + p["inputs"]["token_types"][0]
    x = normed(x + p["inputs"]["positions"][2 + places], p["inputs"]["norm"])
    if "w_project" in p["inputs"]:
        x = x @ p["inputs"]["w_project"] + p["inputs"]["b_project"]
    m = p["layer_0"]["mlp"]
    h = normed(x, p["layer_0"]["mlp_norm"])
    x = x + gelu(h @ m["w_up"] + m["b_up"]) @ m["w_down"] + m["b_down"]
    o = p["output"]
    y = 0.5 * normed(gelu(x @ o["w_transform"] + o["b_transform"]), o["norm"])
    return x, (y @ p["embedding"].T + o["bias"])[..., :VOCAB]


@jax.jit
def run(model, tokens, ctx):
    hidden = model(tokens, ctx=ctx)[0].hidden
    return hidden, model.head(hidden)


def test_everything_at_the_ends(model, tokens):
    hidden, logits = run(model, tokens, Context())
    want, want_logits = in_numpy(model.params, tokens, np.arange(T))
    np.testing.assert_allclose(hidden, want, **TOLERANCE)
    np.testing.assert_allclose(logits[..., :VOCAB], want_logits, **TOLERANCE)
    assert (np.asarray(logits[..., VOCAB:]) < -1e29).all()


def test_positions_count_from_each_document_and_not_over_padding(model, tokens):
    valid = np.ones((2, T), bool)
    valid[0, :3] = False
    segments = np.where(np.arange(T) < 5, 0, 1) * np.ones((2, 1), np.int32)
    hidden, _ = run(model, tokens, Context(valid=jnp.asarray(valid), segment_ids=segments))
    places = np.stack([[0, 0, 0, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    want, _ = in_numpy(model.params, tokens, places)
    np.testing.assert_allclose(np.asarray(hidden)[valid], want[valid], **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_the_cross_entropy_is_that_of_the_logits(model, tokens, tied):
    if not tied:
        plain = json.loads(model.config.canonical_json) | {"tie_embeddings": False}
        untied = build_model(ModelConfig.model_validate_json(json.dumps(plain)), seed=0)
        params = {**untied.params, **model.params, "w_head": 0.3 * untied.params["w_head"]}
        model = untied.with_params(params)
    hidden = run(model, tokens, Context())[0]

    def by_logits(model):
        law = jax.nn.log_softmax(model.head(hidden), axis=-1)
        return -jnp.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]

    want = by_logits(model)
    np.testing.assert_allclose(model.nll(hidden, tokens)[0], want, **TOLERANCE)
    weight = np.linspace(0, 1, 2 * T, dtype=np.float32).reshape(2, T)
    got, slope = jax.value_and_grad(
        lambda params: model.with_params(params).weighted_nll(hidden, tokens, weight)
    )(model.params)
    np.testing.assert_allclose(got, (weight * want).sum(), rtol=1e-5)
    other = jax.grad(lambda params: (weight * by_logits(model.with_params(params))).sum())(
        model.params
    )
    for name in ("bias", "w_transform", "b_transform"):
        mine, theirs = slope["output"][name], other["output"][name]
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_costs_count_what_is_read():
    model = abstract_model(config_of(**ALL))
    bare = abstract_model(config_of(norm="layer"))
    more = model.cost_parts(2, 3, 0, logits=1)["head"]
    less = bare.cost_parts(2, 3, 0, logits=1)["head"]
    assert more.flops - less.flops == 2 * 2 * WIDTH * WIDTH
    tables = 2 * 3 * WIDTH + WIDTH  # a position of each token, one type
    frame = WIDTH * WIDTH + WIDTH + 24 + 2 * WIDTH
    assert more.weight_bytes - less.weight_bytes == 4 * (tables + 2 * WIDTH + frame - 2 * WIDTH)


def test_costs_of_a_factored_embedding():
    head = abstract_model(config_of(**FACTORED)).cost_parts(2, 3, 0, logits=1)["head"]
    rows = 24
    assert head.flops == 2 * (2 * 6 * rows + 2 * 6 * WIDTH) + 6 * 2 * 6 * WIDTH
    tables = 6 * rows + 2 * 3 * 6 + 2 * 3 * 6 + 6  # the head, tokens, positions, one type
    project, frame = 6 * WIDTH + WIDTH, WIDTH * 6 + 6 + rows
    assert head.weight_bytes == 4 * (tables + project + frame + 2 * 6 + 2 * 6)


def test_bfloat16_computes_in_bfloat16(model, tokens):
    low = model.prepare(jnp.bfloat16)
    hidden, logits = run(low, tokens, Context())
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    assert low.params["output"]["norm"]["bias"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"inputs": {"positions": 31}}, "max_len=32 exceeds the 31 positions"),
        ({"inputs": {"positions": 33, "first_position": 2}}, "max_len=32 exceeds the 31"),
        ({"inputs": {"first_position": 2}}, "first_position is of positions"),
        ({"inputs": {"positions": 32}, "meta_tokens": 1}, "meta_tokens do not go with"),
        ({"norm": "batch"}, "norm"),
        ({"inputs": {"width": 6}}, "inputs.width=6 with a tied head needs output.transform"),
        ({"output": {"transform": "tanh"}}, "transform"),
    ],
)
def test_what_does_not_fit_is_refused(more, message):
    with pytest.raises(ValidationError, match=message):
        config_of(**more)


def test_learnt_positions_end_somewhere(model):
    assert model.with_max_len(38).config.max_len == 38
    with pytest.raises(ConfigError, match="max_len=39 exceeds the 38 positions"):
        model.with_max_len(39)


def test_layers_that_share_their_parameters(tokens):
    """As if each layer had a copy, states included; the copies are one in the gradient."""
    mixer = {"name": "attention", "num_heads": 2, "rope_base": None}
    layers = {
        "a": {"mixer": mixer, "mlp": {"name": "swiglu", "width": 8}},
        "b": {"mixer": {"name": "mamba", "state_size": 3}},
    }
    stack = {"pattern": ["a", "b"], "layers": layers, "depth": 4}
    shared = build_model(config_of(**stack, share_layers=True), seed=0)
    apart = build_model(config_of(**stack), seed=0)
    assert shared.params.keys() == apart.params.keys() - {"layer_2", "layer_3"}
    copies = {"layer_2": shared.params["layer_0"], "layer_3": shared.params["layer_1"]}
    apart = apart.with_params(shared.params | copies)
    hidden, logits = run(apart, tokens, Context())
    np.testing.assert_array_equal(run(shared, tokens, Context())[0], hidden)

    @jax.jit
    def grow(model, state, new):
        out, state = model(new, state)
        return model.head(out.hidden), state

    state = shared.init_state(2, T)
    for at in range(0, T, 3):
        piece, state = grow(shared, state, tokens[:, at : at + 3])
        np.testing.assert_allclose(piece, logits[:, at : at + 3], rtol=1e-4, atol=1e-5)

    def loss(params, model):
        return jnp.sum(model.with_params(params)(tokens)[0].hidden[..., 0] ** 2)

    one = jax.jit(jax.grad(lambda p: loss(p, shared)))(shared.params)["layer_0"]["mlp"]["w_up"]
    each = jax.jit(jax.grad(lambda p: loss(p, apart)))(apart.params)
    total = each["layer_0"]["mlp"]["w_up"] + each["layer_2"]["mlp"]["w_up"]
    np.testing.assert_allclose(one, total, rtol=1e-4, atol=1e-6)
