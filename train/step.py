"""One update of the optimizer as one compiled function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from ..paradigms.interface import Batch, LossSums, Paradigm
from ..paradigms.model import Model, abstract_model, build_model
from .config import RunConfig
from .optimizer import clip_by_norm

BACKWARD = 3  # FLOPs of an update, in forward passes
EMA_WARMUP = 10  # updates; a young average follows the parameters closely


class TrainState(NamedTuple):
    """All that changes from update to update.

    Attributes:
        params: nested dict of float32 arrays.
        opt_state: the optimizer's.
        ema: moving average of the parameters, or None.
        step: int32 scalar, updates done.
    """

    params: dict
    opt_state: Any
    ema: dict | None
    step: Int[Array, ""]


class StepMetrics(NamedTuple):
    """What an update reports, as floats on the host or one vector on the device.

    Attributes:
        nll_sum: sum of the objective over the update's scored tokens, nats.
        weight: what it is divided by.
        aux: auxiliary losses, already divided.
        grad_norm: length of the gradient before clipping.
        stats: what layers report (a router's load), means over the update's scored tokens.
    """

    nll_sum: Any
    weight: Any
    aux: Any
    grad_norm: Any
    stats: dict[str, float] = {}  # noqa: RUF012  (never changed)

    @classmethod
    def fetch(cls, metrics: tuple[Float[Array, " n"], dict[str, Array]]) -> "StepMetrics":
        """Waits for the update and takes its metrics off the device."""
        vector, stats = jax.device_get(metrics)
        return cls(*vector.tolist(), {name: float(value) for name, value in stats.items()})

    @property
    def loss(self) -> float:
        """Nats per scored token, without auxiliary losses; 0 for a batch without any."""
        return self.nll_sum / self.weight if self.weight else 0.0


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """The optimizer of a run whose vocabulary size is known."""
    training = config.training
    schedule = training.schedule.build(training.optimizer.learning_rate, config.updates)
    return training.optimizer.build(schedule, abstract_model(config.model).decay_mask())


def init_state(config: RunConfig, tx: optax.GradientTransformation) -> tuple[TrainState, Model]:
    """Fresh state, a function of the config alone, and the model that its parameters belong to."""
    model = build_model(config.model, seed=config.seed)
    return jax.jit(lambda params: _init(params, config, tx))(model.params), model


def abstract_state(
    config: RunConfig, tx: optax.GradientTransformation
) -> tuple[TrainState, Model]:
    """The same as shapes only."""
    model = abstract_model(config.model)
    return jax.eval_shape(lambda params: _init(params, config, tx), model.params), model


def _init(params: dict, config: RunConfig, tx: optax.GradientTransformation) -> TrainState:
    # Copies, because buffers are donated: none may occur twice. Converting to an array's own
    # dtype strips weak types, which would make the second update compile anew.
    ema = None
    if config.training.ema_decay is not None:
        ema = jax.tree.map(jnp.copy, params)
    state = TrainState(params, tx.init(params), ema, jnp.zeros((), jnp.int32))
    return jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), state)


def make_train_step(
    config: RunConfig, paradigm: Paradigm, tx: optax.GradientTransformation, model: Model
) -> Callable[[TrainState, Batch], tuple[TrainState, tuple[Float[Array, " n"], dict[str, Array]]]]:
    """Returns the update as a pure function, to be compiled once with the state donated.

    The batch comes as `micro_batches` makes it. Randomness is a function of the seed, the step
    number and the micro-batch, so the step number is all that has to be kept. With several
    micro-batches gradients of the summed loss add up in a `lax.scan`; what they are divided by is
    summed up beforehand (it does not depend on the parameters: XLA drops the model from that
    pass), so that equal tokens weigh equally however they are split.

    Args:
        config: the run's, its vocabulary size known.
        paradigm: has the loss.
        tx: from `make_optimizer`.
        model: tells how to run parameters; its own are not used.
    """
    training = config.training
    accumulate = training.accumulate

    def sums(params: dict, batch: Batch, step: Array, micro: Array) -> LossSums:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), step), micro)
        ready = model.with_params(params).prepare(training.compute_dtype)
        return paradigm.loss(ready, batch, key=key, train=True, remat=training.remat)

    def gradients(params: dict, batches: Batch, step: Array) -> tuple[dict, LossSums]:
        micros = jnp.arange(accumulate, dtype=jnp.int32)
        if accumulate == 1:
            batch = jax.tree.map(lambda a: a[0], batches)

            def loss(params: dict) -> tuple[Array, LossSums]:
                got = sums(params, batch, step, micros[0])
                return _mean(got.nll_sum, got.weight) + _mean(got.aux_sum, got.aux_weight), got

            (_, got), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return grads, got

        def weigh(total: tuple[Array, Array], xs: tuple[Batch, Array]) -> tuple[Any, None]:
            got = sums(params, *_with_step(xs, step))
            return (total[0] + got.weight, total[1] + got.aux_weight), None

        zero = jnp.zeros((), jnp.float32)
        (weight, aux_weight), _ = jax.lax.scan(weigh, (zero, zero), (batches, micros))

        def add(carry: tuple[dict, LossSums], xs: tuple[Batch, Array]) -> tuple[Any, None]:
            def loss(params: dict) -> tuple[Array, LossSums]:
                got = sums(params, *_with_step(xs, step))
                return _mean(got.nll_sum, weight) + _mean(got.aux_sum, aux_weight), got

            (_, got), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, carry, (grads, got)), None

        one = jax.tree.map(lambda a: a[0], (batches, micros))
        shapes = jax.eval_shape(lambda p: sums(p, *_with_step(one, step)), params)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        begin = (jax.tree.map(jnp.zeros_like, params), nothing)
        (grads, got), _ = jax.lax.scan(add, begin, (batches, micros))
        return grads, got

    def train_step(state: TrainState, batches: Batch) -> tuple[TrainState, tuple[Array, dict]]:
        grads, got = gradients(state.params, batches, state.step)
        grads, norm = clip_by_norm(grads, training.optimizer.clip_norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            young = (1.0 + state.step) / (EMA_WARMUP + state.step)
            decay = jnp.minimum(training.ema_decay, young).astype(jnp.float32)
            ema = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, ema, params)
        aux = _mean(got.aux_sum, got.aux_weight)
        vector = jnp.stack([got.nll_sum, got.weight, aux, norm]).astype(jnp.float32)
        stats = {name: _mean(total, got.weight) for name, total in got.stats.items()}
        return TrainState(params, opt_state, ema, state.step + 1), (vector, stats)

    return train_step


def micro_batches(batch: Batch, accumulate: int) -> Batch:
    """Splits rows [B T] into micro-batches [accumulate, B/accumulate, T]; no copy."""
    return Batch(*(a.reshape(accumulate, -1, *a.shape[1:]) for a in batch))


def compile_step(
    config: RunConfig,
    paradigm: Paradigm,
    tx: optax.GradientTransformation,
    model: Model,
    state: TrainState,
) -> jax.stages.Compiled:
    """Compiles the update ahead of time: one program per run, which cannot be traced again.

    Args:
        config: the run's.
        paradigm: has the loss.
        tx: from `make_optimizer`.
        model: from `init_state` or `abstract_state`.
        state: likewise; only its shapes matter.
    """
    rows, length = config.data.batch_size, config.data.context_length
    kinds = Batch(jnp.int32, jnp.int32, jnp.bool_)
    batch = Batch(*(jax.ShapeDtypeStruct((rows, length), kind) for kind in kinds))
    batches = jax.eval_shape(lambda b: micro_batches(b, config.training.accumulate), batch)
    step = jax.jit(make_train_step(config, paradigm, tx, model), donate_argnums=0)
    return step.lower(state, batches).compile()


def compiled_memory(update: jax.stages.Compiled) -> int | None:
    """Bytes that the update needs at once, or None where XLA does not say."""
    analysis = update.memory_analysis()
    if analysis is None:
        return None
    size = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    return size or None


def _with_step(xs: tuple[Batch, Array], step: Array) -> tuple[Batch, Array, Array]:
    batch, micro = xs
    return batch, step, micro


def _mean(total: Array, weight: Array) -> Array:
    """Returns total / weight; 0 where nothing was scored."""
    return total / jnp.where(weight > 0, weight, 1.0)
