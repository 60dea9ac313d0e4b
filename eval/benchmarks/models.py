"""Training steps, prefill and decode steps of whole models, as genlab's own commands run them."""

import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError
from ...paradigms.autoregressive import AutoregressiveConfig
from ...paradigms.backbone import ModelConfig
from ...paradigms.decoding.loop import advance
from ...paradigms.decoding.plain import Plain
from ...paradigms.decoding.prefill import prefill
from ...paradigms.decoding.sampling import make_sampling
from ...paradigms.interface import Batch, SpecialIds
from ...paradigms.model import Model, abstract_model, build_model
from ...train.config import RunConfig
from ...train.step import compile_step, init_state, make_optimizer, micro_batches
from ...train.yaml_loader import validate
from ..cost.arithmetic import bandwidth_at
from ..cost.records import Machine
from .alternate import Timed
from .records import Floor

Bench = Literal["train", "prefill", "decode"]
SPECIALS = SpecialIds(bos=0, eos=1, pad=2, mask=3)
TRAIN_FLOPS = 3  # the backward pass does twice the forward's products


class Case(NamedTuple):
    """What is measured.

    Attributes:
        bench: see `Bench`.
        batch: rows.
        length: tokens of a row: trained on, taken in, or held before the first new one.
        dtype: that is computed in.
        new_tokens: decode steps per run.
    """

    bench: Bench
    batch: int
    length: int
    dtype: str
    new_tokens: int = 16


class Ready(NamedTuple):
    """A compiled case.

    Attributes:
        subject: to be timed.
        compile_s: tracing and compiling.
        tokens: per step, all rows together.
    """

    subject: Timed
    compile_s: float
    tokens: int


def max_len_of(case: Case) -> int:
    """Longest row that the case needs."""
    return case.length + (case.new_tokens + 1 if case.bench == "decode" else 0)


def prepare(config: ModelConfig, case: Case, params: dict | None = None) -> Ready:
    """Compiles a case.

    Args:
        config: the model's.
        case: what to measure.
        params: float32 or as they come; random ones when None.

    Raises:
        ConfigError: it does not fit the model.
    """
    name = f"genlab {case.dtype}"
    if max_len_of(case) > config.max_len:
        raise ConfigError(f"{case.bench} needs {max_len_of(case)} tokens, max_len={config.max_len}")
    if case.bench == "train":
        return _train(name, config, case, params)
    model = build_model(config, seed=0)
    model = model if params is None else model.with_params(params)
    model = jax.block_until_ready(jax.jit(lambda m: m.prepare(case.dtype))(model))
    make = _prefill if case.bench == "prefill" else _decode
    return make(name, model, case)


def _tokens(config: ModelConfig, case: Case) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(4, config.vocab_size, (case.batch, case.length))
    return drawn.astype(np.int32)


def _train(name: str, config: ModelConfig, case: Case, params: dict | None) -> Ready:
    plain = config.model_dump(mode="json")
    run = validate(
        RunConfig,
        {
            "model": plain,
            "paradigm": {"name": "autoregressive"},
            "data": {"batch_size": case.batch, "context_length": case.length},
            "training": {
                "tokens": 1_000_000,
                "compute_dtype": case.dtype,
                "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            },
        },
        "bench",
    )
    paradigm = AutoregressiveConfig().build(SPECIALS)
    tx = make_optimizer(run)
    state, model = init_state(run, tx)
    if params is not None:
        state = state._replace(params=params)
    begin = time.perf_counter()
    step = compile_step(run, paradigm, tx, model, state)
    compile_s = time.perf_counter() - begin
    tokens = _tokens(config, case)
    shape = tokens.shape
    batch = Batch(tokens, np.zeros(shape, np.int32), np.ones(shape, bool))
    batches = jax.device_put(micro_batches(batch, 1))
    held = [jax.block_until_ready(state)]

    def call() -> int:
        after, metrics = step(held.pop(), batches)
        jax.block_until_ready((after, metrics))
        held.append(after)
        return 1

    return Ready(Timed(name, call), compile_s, case.batch * case.length)


def _prefill(name: str, model: Model, case: Case) -> Ready:
    tokens = jnp.asarray(_tokens(model.config, case))

    @jax.jit
    def run(model: Model, tokens: jax.Array) -> Any:
        lengths = jnp.full((case.batch,), case.length, jnp.int32)
        hidden, state = prefill(model, tokens, lengths, case.length)
        return jnp.argmax(model.head(hidden), axis=-1), state

    begin = time.perf_counter()
    compiled = run.lower(model, tokens).compile()
    compile_s = time.perf_counter() - begin

    def call() -> int:
        jax.block_until_ready(compiled(model, tokens))
        return 1

    return Ready(Timed(name, call), compile_s, case.batch * case.length)


def _decode(name: str, model: Model, case: Case) -> Ready:
    """One compiled loop of `new_tokens` steps behind the prompt; the prompt is not timed."""
    tokens, rows = _tokens(model.config, case), case.batch
    vocab_size = model.config.padded_vocab_size
    sampling = make_sampling(rows, vocab_size=vocab_size, temperature=0.0)
    decoding = Plain()

    def start() -> tuple:
        state = decoding.start(
            model,
            tokens,
            sampling=sampling,
            seeds=np.arange(rows, dtype=np.int32),
            max_new=np.full((rows,), case.new_tokens + 1, np.int32),
            max_len=max_len_of(case),
        )
        return (jax.block_until_ready(state),)

    def call(state: Any) -> int:
        jax.block_until_ready(advance(model, decoding, state, case.new_tokens))
        return case.new_tokens

    state = start()
    begin = time.perf_counter()
    jax.block_until_ready(advance(model, decoding, *state, 0))
    compile_s = time.perf_counter() - begin
    return Ready(Timed(name, call, start), compile_s, rows)


def floor_of(config: ModelConfig, case: Case, machine: Machine) -> Floor:
    """The least time of a step, from the equations and the machine's measured speeds.

    Weights are counted once per step, in the compute dtype; training moves parameters, gradient
    and both moments of AdamW in float32 besides.
    """
    model = jax.eval_shape(lambda m: m.prepare(case.dtype), abstract_model(config))
    if case.bench == "decode":
        context = case.length + case.new_tokens // 2
        parts = model.cost_parts(case.batch, 1, context, logits=1)
    else:
        logits = case.length if case.bench == "train" else 1
        parts = model.cost_parts(case.batch, case.length, 0, logits=logits)
    flops = sum(part.flops for part in parts.values())
    moved = sum(part.weight_bytes for part in parts.values())
    if case.bench == "decode":
        moved += sum(part.bytes_read + part.bytes_written for part in parts.values())
    if case.bench == "train":
        flops *= TRAIN_FLOPS
        # Reads the parameter, its gradient and two moments; writes the gradient and all but that.
        moved += 8 * 4 * model.num_params()
    return Floor(
        flops=flops,
        bytes_moved=moved,
        flops_per_s=machine.peak_flops_per_s,
        bytes_per_s=bandwidth_at(machine, moved),
    )
