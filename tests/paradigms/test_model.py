"""The model as a pytree, its parameters, head, taps, dropout and recomputation."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.paradigms.backbone import MASKED, ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.layers.norm import rms_norm
from genlab.paradigms.model import Model, abstract_model, build_model
from pydantic import ValidationError

BASE = {
    "width": 16,
    "depth": 3,
    "pattern": ["attention", "mamba"],
    "layers": {
        "attention": {
            "mixer": {"name": "attention", "num_heads": 2},
            "mlp": {"name": "swiglu", "width": 24},
        },
        "mamba": {"mixer": {"name": "mamba", "state_size": 2}},
    },
    "max_len": 32,
    "vocab_size": 21,
}


def config(**changes):
    """The configuration above, changed."""
    return ModelConfig.model_validate_json(json.dumps(BASE | changes))


@pytest.fixture(scope="module")
def model():
    """One model for all that only read it."""
    return build_model(config(pad_vocab_to=8, dropout=0.3), seed=0)


@pytest.fixture(scope="module")
def tokens():
    """int32 (2 7)."""
    return jax.random.randint(jax.random.key(1), (2, 7), 0, 21, jnp.int32)


@functools.partial(jax.jit, static_argnames=("collect", "remat"))
def run(model, tokens, ctx=Context(), collect=(), remat=False):  # noqa: B008  (frozen)
    """The model without state."""
    return model(tokens, ctx=ctx, collect=collect, remat=remat)[0]


def test_the_pattern_repeats_and_is_counted(model):
    assert [n for n in model.params if n.startswith("layer_")] == ["layer_0", "layer_1", "layer_2"]
    assert "w_q" in model.params["layer_0"]["mixer"] and "A_log" in model.params["layer_1"]["mixer"]
    assert "w_q" in model.params["layer_2"]["mixer"] and "mlp" not in model.params["layer_1"]
    assert model.num_params() == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert f"{model.num_params():,}" in repr(model)
    # Without depth: once through the pattern.
    assert config(depth=None).num_layers == 2


def test_seed_and_configuration_decide_the_parameters(model):
    again = build_model(model.config, seed=0)
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    other = build_model(model.config, seed=1)
    matrices = zip(*map(jax.tree.leaves, (model.params, other.params)), strict=True)
    assert all((a != b).any() for a, b in matrices if a.ndim == 2 and a.shape != (32, 2))
    for leaf in jax.tree.leaves(model.params):
        assert leaf.dtype == jnp.float32 and not leaf.weak_type


def test_projections_into_the_residual_stream_begin_smaller(model):
    mixer = model.params["layer_0"]["mixer"]
    ratio = np.std(mixer["w_q"]) / np.std(mixer["w_o"])
    assert 0.8 < ratio / np.sqrt(2 * 3) < 1.25


def test_shapes_alone_agree_with_the_real_model(model):
    shapes = abstract_model(model.config)
    want = jax.tree.map(lambda a: (a.shape, a.dtype), model.params)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes.params) == want
    assert shapes.num_params() == model.num_params()
    assert shapes.cost(1, 1, 4) == model.cost(1, 1, 4)


def test_prepare_casts_all_but_the_sensitive(model):
    kept = {
        jax.tree_util.keystr(path, simple=True, separator=".").split(".")[-1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.prepare(jnp.bfloat16).params)
        if leaf.dtype == jnp.float32
    }
    assert kept == {"scale", "A_log", "D", "dt_bias"}
    assert model.prepare(jnp.bfloat16).dtype == jnp.bfloat16 and model.dtype == jnp.float32


def test_decay_applies_to_matrices_only(model):
    mask = model.decay_mask()
    assert jax.tree.structure(mask) == jax.tree.structure(model.params)
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".").split(".")[-1]
        for path, value in jax.tree_util.tree_leaves_with_path(mask)
        if value
    }
    assert decayed == {
        "embedding", "w_q", "w_k", "w_v", "w_o", "w_gate", "w_up", "w_down", "w_in", "conv", "w_x",
        "w_dt", "w_out",
    }


def test_padded_ids_have_no_probability(model, tokens):
    logits = model.head(run(model, tokens).hidden)
    assert logits.shape == (2, 7, 24) and logits.dtype == jnp.float32
    assert (np.asarray(logits[..., 21:]) == MASKED).all() and (logits[..., :21] > -100).all()
    np.testing.assert_array_equal(jax.nn.softmax(logits)[..., 21:], 0)
    gradient = jax.grad(lambda m: jax.nn.logsumexp(m.head(jnp.ones((1, 16)))).sum())(model)
    np.testing.assert_array_equal(gradient.params["embedding"][21:], 0)


def test_tied_and_untied_heads(model, tokens):
    hidden = run(model, tokens).hidden
    np.testing.assert_allclose(
        model.head(hidden)[..., :21], hidden @ model.params["embedding"][:21].T, rtol=1e-5,
        atol=1e-6,
    )
    untied = build_model(config(tie_embeddings=False), seed=0)
    assert untied.params["w_head"].shape == (16, 21)
    np.testing.assert_allclose(
        untied.head(hidden), hidden @ untied.params["w_head"], rtol=1e-5, atol=1e-6
    )


def test_taps_are_the_layers_outputs(model, tokens):
    valid = jnp.ones((2, 7), bool).at[1, 2].set(False)
    out = run(model, tokens, Context(valid=valid), collect=(0, 2))
    assert set(out.taps) == {0, 2} and not out.aux
    last = rms_norm(out.taps[2], model.params["final_norm"]["scale"], 1e-5)
    np.testing.assert_allclose(last, out.hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out.taps[0][1, 2], 0)
    assert np.abs(out.taps[0] - out.taps[2]).max() > 0.01


def test_dropout_needs_a_key_and_follows_it(model, tokens):
    keys = [jax.random.key(n) for n in (1, 2)]
    plain = run(model, tokens).hidden
    first, again, second = (
        run(model, tokens, Context(dropout_key=k)).hidden for k in (keys[0], keys[0], keys[1])
    )
    np.testing.assert_array_equal(first, again)
    for a, b in ((first, plain), (first, second)):
        assert np.abs(a - b).max() > 0.01
    # No two places share their noise.
    tapped = run(model, tokens, Context(dropout_key=keys[0]), collect=(0, 1, 2))
    assert np.abs(tapped.hidden - plain).max() > 0.01


def test_dropout_keeps_the_mean():
    from genlab.paradigms.layers.params import dropout

    x = jnp.full((100, 100), 2.0)
    y = dropout(x, 0.25, jax.random.key(0))
    assert set(np.unique(y)) == {0.0, np.float32(2 / 0.75)}
    assert abs(float(y.mean()) - 2) < 4 * 2 * np.sqrt(1 / 3) / 100
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, jax.random.key(0)) is x


def test_recomputing_changes_no_gradient(model, tokens):
    def loss(params, remat):
        ctx = Context(dropout_key=jax.random.key(3))
        hidden = model.with_params(params)(tokens, ctx=ctx, remat=remat)[0].hidden
        return jnp.sum(jnp.sin(hidden))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = gradient(model.params, False), gradient(model.params, True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, again
    )
    text = str(jax.make_jaxpr(lambda p: loss(p, True))(model.params))
    assert text.count("remat") >= 3 or text.count("checkpoint") >= 3


def test_a_model_is_a_pytree_with_static_configuration(model):
    leaves, tree = jax.tree.flatten(model)
    back = jax.tree.unflatten(tree, leaves)
    assert isinstance(back, Model) and back.config is model.config
    # Trees are told apart by configuration: equal ones, of other objects, are one compilation.
    assert tree != jax.tree.structure(abstract_model(config()))
    equal = config(pad_vocab_to=8, dropout=0.3)
    assert equal is not model.config and tree == jax.tree.structure(abstract_model(equal))


def test_a_state_can_be_donated(model, tokens):
    step = jax.jit(lambda m, t, s: m(t, s)[1], donate_argnums=2)
    state = step(model, tokens, model.init_state(2, 32))
    np.testing.assert_array_equal(step(model, tokens, state).length, [14, 14])


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": None}, "model.vocab_size: not set"),
    ({"width": 15}, "width=15 is no multiple of num_heads=2"),
])
def test_parts_that_do_not_fit_are_one_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_model(config(**changes), seed=0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"layers": BASE["layers"] | {"extra": BASE["layers"]["mamba"]}}, "layer 'extra' is not used"),
    ({"layers": BASE["layers"] | {"mamba": {}}}, "a mixer, an mlp or both"),
    ({"pattern": ["attention", "mamb"]}, "did you mean 'mamba'"),
    ({"pattern": []}, "pattern"),
    ({"dropout": 1.0}, "dropout"),
    ({"width": "16"}, "width"),
    ({"depth": 0}, "depth"),
    ({"widht": 3}, "widht"),
])
def test_wrong_configurations_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_layers_without_mixer_and_without_mlp_run(tokens):
    layers = {"mlp": {"mlp": {"name": "swiglu", "width": 8}}, "mix": BASE["layers"]["mamba"]}
    model = build_model(config(pattern=["mlp", "mix"], layers=layers, depth=2), seed=0)
    state = model.init_state(2, 8)
    assert state.layers[0] == ()
    out, state = jax.jit(lambda m, t, s: m(t, s))(model, tokens, state)
    np.testing.assert_allclose(out.hidden, run(model, tokens).hidden, rtol=1e-4, atol=1e-5)
