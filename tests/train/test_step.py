"""The update: sums divided once, decoupled decay, clipping, averages, dtypes, one program."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.interface import Batch, LossSums
from genlab.train.optimizer import AdamWConfig, clip_by_norm, decayed_paths
from genlab.train.schedule import ConstantConfig, CosineConfig, WSDConfig
from genlab.train.step import (
    StepMetrics,
    abstract_state,
    compile_step,
    init_state,
    make_optimizer,
    micro_batches,
)


@pytest.fixture(scope="module")
def ready(make, data):
    """ready(*overrides) -> a config that knows its vocabulary size."""
    return lambda *overrides: make(*overrides).with_vocab_size(data.tokenizer.vocab_size)


@pytest.fixture(scope="module")
def rows(data) -> Batch:
    """A batch whose micro-batches hold unequal numbers of scored tokens, one of them none."""
    _, batch = next(data.train_batches())
    loss_mask = np.array(batch.loss_mask)
    loss_mask[0, 3:] = False
    segments = np.array(batch.segment_ids)
    segments[1] = -1
    return Batch(np.array(batch.tokens), segments, loss_mask & (segments >= 0))


def one_update(config, batch, paradigm=None, steps=1):
    tx = make_optimizer(config)
    state, model = init_state(config, tx)
    paradigm = Autoregressive() if paradigm is None else paradigm
    update = compile_step(config, paradigm, tx, model, state)
    for _ in range(steps):
        state, metrics = update(state, micro_batches(batch, config.training.accumulate))
    return state, StepMetrics.fetch(metrics)


@dataclasses.dataclass(frozen=True)
class GivenSums:
    """Each row's objective is its first token, counted as often as it has scored tokens."""

    def loss(self, model, batch, *, key, train, remat):
        weight = jnp.sum(batch.loss_mask, dtype=jnp.float32)
        total = jnp.sum(jnp.where(batch.loss_mask[:, 0], batch.tokens[:, 0], 0.0))
        zero = 0.0 * jnp.sum(model.params["embedding"])
        return LossSums(total + zero, weight, 2 * weight, weight)


def test_micro_batches_are_not_averaged(ready):
    """1 target of loss 4 and 3 targets of loss 3 together: 7/4 = 1.75, not (4/1 + 3/3)/2 = 2.5."""
    config = ready("data.batch_size=3", "training.accumulate=3")
    tokens = np.zeros((3, 16), np.int32)
    loss_mask = np.zeros((3, 16), bool)
    tokens[0, 0], loss_mask[0, :1] = 4, True
    tokens[1, 0], loss_mask[1, :3] = 3, True
    batch = Batch(tokens, np.zeros((3, 16), np.int32), loss_mask)
    _, metrics = one_update(config, batch, GivenSums())
    assert metrics.loss == 1.75
    assert metrics.weight == 4
    assert metrics.aux == 2.0


def test_however_rows_are_split_the_update_is_the_same(ready, rows):
    whole, one = one_update(ready("training.optimizer.eps=1e-3"), rows)
    for accumulate in (2, 4):
        config = ready("training.optimizer.eps=1e-3", f"training.accumulate={accumulate}")
        state, metrics = one_update(config, rows)
        assert metrics.weight == one.weight
        np.testing.assert_allclose(metrics[:4], one[:4], rtol=2e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            state.params,
            whole.params,
        )


def test_a_batch_without_targets_changes_nothing_but_by_decay(ready, rows):
    config = ready("training.optimizer.weight_decay=0")
    padding = Batch(rows.tokens, np.full_like(rows.segment_ids, -1), np.zeros_like(rows.loss_mask))
    state, metrics = one_update(config, padding)
    assert metrics == (0.0, 0.0, 0.0, 0.0, {}) and metrics.loss == 0.0
    fresh, _ = init_state(config, make_optimizer(config))
    jax.tree.map(np.testing.assert_array_equal, state.params, fresh.params)


def test_accumulating_takes_the_memory_of_a_micro_batch(ready):
    sizes = {}
    for accumulate in (1, 8):
        config = ready(
            "data.batch_size=64", "data.context_length=32", f"training.accumulate={accumulate}"
        )
        tx = make_optimizer(config)
        state, model = abstract_state(config, tx)
        update = compile_step(config, Autoregressive(), tx, model, state)
        sizes[accumulate] = update.memory_analysis().temp_size_in_bytes
    assert sizes[8] < sizes[1] / 4


def test_decay_is_decoupled():
    config = AdamWConfig(learning_rate=0.1, weight_decay=0.1)
    tx = config.build(optax.constant_schedule(0.1), {"w": True, "scale": False})
    params = {"w": jnp.ones(()), "scale": jnp.ones(())}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_allclose(after["w"], 0.99, rtol=1e-7)
    assert after["scale"] == 1.0


def test_decay_is_on_matrices_alone(ready):
    _, model = abstract_state(ready(), make_optimizer(ready()))
    mixer = [f"layer_0.mixer.{name}" for name in ("w_k", "w_o", "w_q", "w_v")]
    mlp = [f"layer_0.mlp.{name}" for name in ("w_down", "w_gate", "w_up")]
    assert decayed_paths(model) == ["embedding", *mixer, *mlp]


def test_a_tied_head_is_one_array(ready):
    tied, _ = abstract_state(ready(), make_optimizer(ready()))
    untied_config = ready("model.tie_embeddings=false")
    untied, _ = abstract_state(untied_config, make_optimizer(untied_config))
    assert "w_head" not in tied.params and "w_head" in untied.params
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(state.params)) for state in (tied, untied)
    ]
    assert sizes[1] - sizes[0] == 260 * 16


def test_clipping_keeps_direction_and_reports_the_norm_before():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    clipped, norm = clip_by_norm(gradients, 1.0)
    assert norm == 5.0
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.8], rtol=1e-6)
    for limit in (None, 6.0):
        same, norm = clip_by_norm(gradients, limit)
        assert norm == 5.0
        jax.tree.map(np.testing.assert_array_equal, same, gradients)


def test_average_follows_closely_when_young(ready, rows):
    """decay = min(ema_decay, (1 + n) / (10 + n)) before update n from 0: 0.1, then 2/11."""
    config = ready("training.ema_decay=0.15")
    fresh, _ = init_state(config, make_optimizer(config))
    start = np.asarray(fresh.params["embedding"])
    first, _ = one_update(config, rows)
    second, _ = one_update(config, rows, steps=2)
    after_one = 0.1 * start + 0.9 * np.asarray(first.params["embedding"])
    np.testing.assert_allclose(first.ema["embedding"], after_one, rtol=1e-5, atol=1e-7)
    after_two = 0.15 * after_one + 0.85 * np.asarray(second.params["embedding"])
    np.testing.assert_allclose(second.ema["embedding"], after_two, rtol=1e-5, atol=1e-7)
    assert second.step == 2


def test_bfloat16_computes_on_float32_parameters(ready, rows):
    _, reference = one_update(ready(), rows)
    state, metrics = one_update(ready("training.compute_dtype=bfloat16"), rows)
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert kinds == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert metrics.loss != reference.loss
    assert metrics.loss == pytest.approx(reference.loss, rel=1e-2)


def test_remat_changes_memory_not_numbers(ready, rows):
    _, plain = one_update(ready(), rows)
    _, remat = one_update(ready("training.remat=true"), rows)
    np.testing.assert_allclose(remat[:4], plain[:4], rtol=1e-6)


def test_noise_is_a_function_of_seed_step_and_micro_batch(ready, rows):
    noisy = ("model.dropout=0.5", "training.optimizer.learning_rate=1e-30")
    _, first = one_update(ready(*noisy), rows)
    _, again = one_update(ready(*noisy), rows)
    _, later = one_update(ready(*noisy), rows, steps=2)
    _, other = one_update(ready(*noisy, "seed=1"), rows)
    assert first == again
    assert len({first.nll_sum, later.nll_sum, other.nll_sum}) == 3
    twice = Batch(*(np.concatenate([a[2:3], a[2:3]]) for a in rows))
    config = ready(*noisy, "data.batch_size=2", "training.accumulate=2")
    _, both = one_update(config, twice)
    _, one = one_update(ready(*noisy, "data.batch_size=1"), Batch(*(a[2:3] for a in rows)))
    assert both.nll_sum != pytest.approx(2 * one.nll_sum, rel=1e-4)


def test_the_update_cannot_be_traced_again(ready, rows):
    """It is compiled ahead of time: other shapes or dtypes are refused, not compiled."""
    config = ready()
    tx = make_optimizer(config)
    state, model = init_state(config, tx)
    update = compile_step(config, Autoregressive(), tx, model, state)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    batches = micro_batches(rows, 1)
    state, _ = update(state, batches)
    state, _ = update(state, batches)
    with pytest.raises(TypeError):
        update(state, Batch(*(a[:, :, :8] for a in batches)))


def rates(schedule, updates):
    rate = schedule.build(1.0, updates)
    return [float(rate(step)) for step in range(updates)]


def test_schedules_count_updates():
    np.testing.assert_allclose(
        rates(ConstantConfig(warmup_fraction=0.4), 10), [0.25, 0.5, 0.75] + [1] * 7, rtol=1e-6
    )
    np.testing.assert_allclose(
        rates(WSDConfig(warmup_fraction=0.2, decay_fraction=0.4, final_fraction=0.2), 10),
        [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4],
        rtol=1e-6,
    )
    cosine = rates(CosineConfig(warmup_fraction=0.2, final_fraction=0.1), 10)
    want = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    np.testing.assert_allclose(cosine, [0.5, 1.0, *want[0:]], rtol=1e-6)
    assert float(CosineConfig(final_fraction=0.1).build(1.0, 10)(10)) == pytest.approx(0.1)
    np.testing.assert_allclose(rates(ConstantConfig(warmup_fraction=0.0), 3), [1, 1, 1])
