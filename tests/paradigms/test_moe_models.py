"""Models with a mixture of experts: each request by itself, what decoding reads, the loss."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.interface import Batch, SpecialIds
from genlab.paradigms.layers.routing import expected_distinct, route
from genlab.paradigms.masked_diffusion import MaskedDiffusionConfig
from genlab.paradigms.model import build_model

D, T, VOCAB = 8, 9, 23
BASE = {"name": "moe", "width": 6, "num_experts": 5, "top_k": 2}

# Compiling is nearly all that these tests cost: LLVM leaves the small programs unoptimised.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

ATTENTION = {"name": "attention", "num_heads": 2}
LAYERS = {
    "a": {"mixer": ATTENTION, "mlp": BASE | {"shared_experts": 1}},
    "b": {"mixer": ATTENTION, "mlp": BASE | {"normalize_weights": False}},
}


def model_of(layers, **more):
    """A model whose embedding is loud enough for routers to have an opinion."""
    plain = {
        "width": D, "pattern": list(layers), "layers": layers, "max_len": 32, "vocab_size": VOCAB,
    }  # fmt: skip
    model = build_model(ModelConfig.model_validate_json(json.dumps(plain | more)), seed=1)
    return model.with_params(model.params | {"embedding": 30 * model.params["embedding"]})


@pytest.fixture(scope="module")
def model():
    return model_of(LAYERS)


def assert_close(got, want, atol=2e-5, rtol=1e-5):
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        name = jax.tree_util.keystr(path)
        assert np.isfinite(one).all(), name
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=name)


def tokens_of(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, shape, dtype=np.int32)


@jit
def forward(model, tokens, state, ctx):
    return model(tokens, state, ctx=ctx)


def test_one_request_is_the_same_alone_and_with_31_others(model):
    lengths = np.arange(32, dtype=np.int32) % 7 + 1
    prompts, more = tokens_of(32, 7), tokens_of(32, 3, seed=1)

    def whole(rows):  # prompt and continuation at once; padding stands between them
        tokens = np.concatenate([prompts[rows], more[rows]], axis=1)
        here = np.arange(7)[None] < lengths[rows, None]
        valid = np.concatenate([here, np.ones((len(rows), 3), bool)], axis=1)
        return np.asarray(forward(model, tokens, None, Context(valid=valid))[0].hidden)

    def by_steps(rows):  # prefill, then token by token
        state = model.init_state(len(rows), 16)
        ctx = Context(lengths=lengths[rows])
        out, state = forward(model, prompts[rows], state, ctx)
        hidden = [out.hidden]
        for t in range(3):
            out, state = forward(model, more[rows, t : t + 1], state, Context())
            hidden.append(out.hidden)
        return np.concatenate(hidden, axis=1)

    everyone = list(range(32))
    together, stepwise = whole(everyone), by_steps(everyone)
    assert_close(stepwise, together)
    assert np.abs(together[:, -1]).max(axis=1).min() > 0.1
    for row in (0, 13, 31):
        assert_close(whole([row])[0], together[row])
        assert_close(by_steps([row])[0], together[row])
    # The others' tokens changed: to rounding, nothing happens to a row that stayed.
    prompts[1:] = tokens_of(31, 7, seed=2)
    assert_close(whole(everyone)[0], together[0])


@pytest.mark.parametrize("prepared", ["float32", "bfloat16"])
def test_a_decode_step_reads_only_the_chosen_experts(model, prepared):
    ready = model.prepare(prepared)
    state = ready.init_state(1, 16)
    _, state = forward(ready, tokens_of(1, 5), state, Context())

    def poisoned(*experts):
        """Hidden state of the next token when these (layer, expert) hold NaN."""
        params = jax.tree.map(lambda leaf: leaf, ready.params)
        for layer, e in experts:
            mlp = dict(params[layer]["mlp"])
            for name in (f"w_in_{e}", f"w_down_{e}"):
                mlp[name] = jnp.full_like(mlp[name], jnp.nan)
            params[layer] = params[layer] | {"mlp": mlp}
        tokens = tokens_of(1, 1, seed=3)
        return np.asarray(forward(ready.with_params(params), tokens, state, Context())[0].hidden)

    want = poisoned()
    assert np.isfinite(want.astype(np.float32)).all()
    everyone = list(itertools.product(("layer_0", "layer_1"), range(5)))
    read = [pair for pair in everyone if not np.array_equal(poisoned(pair), want)]
    assert [layer for layer, _ in read] == ["layer_0"] * 2 + ["layer_1"] * 2
    assert np.array_equal(poisoned(*(pair for pair in everyone if pair not in read)), want)


def test_cost_and_active_parameters_are_those_of_the_chosen_experts(model):
    """They equal those of a model with only as many experts, but for the routers' size."""
    fewer = {
        name: kind | {"mlp": kind["mlp"] | {"num_experts": 2}} for name, kind in LAYERS.items()
    }
    chosen = model_of(fewer)
    router = 2 * D * 3  # two layers, three experts more
    assert model.num_active_params() == chosen.num_params() + router
    got, want = model.cost(1, 1, 10), chosen.cost(1, 1, 10)
    assert got.weight_bytes == want.weight_bytes + 4 * router
    assert got.flops == want.flops + 2 * router
    low = model.prepare("bfloat16").cost(1, 1, 10)
    assert low.weight_bytes == chosen.prepare("bfloat16").cost(1, 1, 10).weight_bytes + 4 * router
    # Many tokens choose every expert.
    expert = 3 * D * BASE["width"]
    many = model.cost(64, 8, 0).weight_bytes - chosen.cost(64, 8, 0).weight_bytes
    assert_close(many, 4 * (router + 2 * 3 * expert), rtol=1e-9)


def test_expected_distinct_experts_by_counting():
    choices = list(itertools.combinations(range(4), 2))
    for tokens in (1, 2, 3):
        drawn = [len(set().union(*each)) for each in itertools.product(choices, repeat=tokens)]
        assert expected_distinct(4, 2, tokens) == pytest.approx(np.mean(drawn), rel=1e-12)


def test_the_router_is_float32_in_a_bfloat16_model():
    model = model_of({"x": {"mlp": BASE}}).prepare("bfloat16")
    mlp = model.params["layer_0"]["mlp"]
    assert mlp["w_router"].dtype == jnp.float32
    assert mlp["w_in_0"].dtype == mlp["w_down_4"].dtype == jnp.bfloat16
    # Logits that bfloat16 cannot tell apart: the lower index would win.
    w_router = jnp.ones((D, 5)).at[:, 3].add(1e-3)
    x = jnp.ones((1, D), jnp.bfloat16)
    assert route(x, w_router, 2, normalize=True).experts.tolist() == [[3, 0]]


def batch_of(pads=0):
    """Two rows: of two documents, and with padding; `pads` more of it behind both."""
    tokens = tokens_of(2, T + pads, seed=4)
    segments = np.full(tokens.shape, -1, np.int32)
    segments[0, :4], segments[0, 4:T], segments[1, :5] = 0, 1, 0
    tokens[:, :T] = tokens_of(2, T)
    return Batch(tokens, segments, segments >= 0)


def sums_of(model, batch, paradigm):
    return paradigm.loss(model, batch, key=jax.random.key(3), train=True)


def test_the_balance_loss_arrives_in_the_training_loss_with_its_coefficient():
    """A model without mixer: what its router sees is the normed embedding, by hand."""

    def with_weight(c):
        return model_of({"x": {"mlp": BASE | {"balance_weight": c}}})

    batch = batch_of()

    def objective(params, model):
        sums = sums_of(model.with_params(params), batch, Autoregressive())
        return sums.nll_sum / sums.weight + sums.aux_sum / sums.aux_weight

    def balance(w_router, model):
        x = np.asarray(model.params["embedding"])[batch.tokens[batch.segment_ids >= 0]]
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5)
        probs = jax.nn.softmax(jnp.dot(x, w_router, precision="highest"))
        two_best = jnp.argsort(-probs, axis=1)[:, :2]
        f = jnp.bincount(two_best.reshape(-1), length=5) / two_best.size
        return 5 * jnp.sum(f * probs.mean(axis=0))

    none, some = with_weight(0.0), with_weight(0.25)
    params = none.params
    w_router = params["layer_0"]["mlp"]["w_router"]
    want, slope = jax.value_and_grad(balance)(w_router, none)
    got = [jit(jax.value_and_grad(objective))(params, m) for m in (none, some)]
    assert_close(got[1][0] - got[0][0], 0.25 * want)
    gradients = [grads["layer_0"]["mlp"]["w_router"] for _, grads in got]
    assert np.abs(slope).max() > 1e-3
    assert_close(gradients[1] - gradients[0], 0.25 * slope)


def test_padding_behind_the_rows_changes_no_loss_and_no_statistic(model):
    run = jit(lambda model, batch: sums_of(model, batch, Autoregressive()))
    sums, padded = (run(model, batch_of(pads)) for pads in (0, 20))
    assert set(sums.stats) >= {"layer_0.max_load", "layer_1.router_entropy"}
    assert_close(padded, sums, atol=1e-5, rtol=1e-6)
    assert sums.aux_sum > 0


def test_masked_diffusion_is_balanced_too():
    paradigm = MaskedDiffusionConfig().build(SpecialIds(bos=0, eos=1, pad=2, mask=VOCAB - 1))
    mlp = BASE | {"balance_weight": 0.1}
    model = model_of({"a": {"mixer": ATTENTION, "mlp": mlp}})
    sums = jit(lambda model: sums_of(model, batch_of(), paradigm))(model)
    # The loss is about 1 when balanced and 5 when one expert gets everything.
    assert 0.09 < sums.aux_sum / sums.aux_weight < 0.5
