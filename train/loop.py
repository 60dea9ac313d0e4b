"""The training loop.

One process, one device. The loop keeps the device busy: the metrics of an update are fetched while
the next one runs, so a non-finite loss is noticed one update late, before anything is saved.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import Array

from ..errors import ConfigError, GenlabError
from ..paradigms.interface import Batch, SpecialIds
from ..paradigms.model import Model
from .checkpoint import Best, Identity, Writer, flatten, read_newest, unflatten
from .config import RunConfig, plain
from .data.pipeline import Data, build_data
from .evaluate import validation_bits_per_byte, validation_windows
from .files import write_text
from .metrics import Clock, MetricsLog, Record, Sums, is_finite
from .progress import Callback, TrainProgress
from .result import TrainResult, load_result
from .run_folder import (
    CHECKPOINTS,
    DAMAGED,
    METRICS,
    PROFILE,
    RESULT,
    SAMPLES,
    identity_of,
    open_run,
)
from .samples import write_samples
from .signals import Interrupted, Signals
from .sinks import Sink, TensorBoardSink, WandbSink, wandb_module
from .step import (
    BACKWARD,
    StepMetrics,
    TrainState,
    abstract_state,
    compile_step,
    compiled_memory,
    init_state,
    make_optimizer,
    micro_batches,
)

MEMORY_LABEL = "by XLA's analysis of the compiled update: arguments, outputs and temporaries"


class NonFiniteError(GenlabError):
    """The loss or the gradient is infinite or not a number."""


def train(
    config: RunConfig,
    out: str | Path,
    *,
    data: Data | None = None,
    progress: Callback | None = None,
    note: Callable[[str], None] | None = None,
    overwrite: bool = False,
) -> TrainResult:
    """Trains a run to its end, going on from the newest checkpoint in its folder.

    A folder that holds the same run (configuration, corpus, tokenizer) is continued, or returned
    at once when it is finished; interrupted or killed at any time and called again, the result is
    the same to the bit on a CPU. A folder that holds another run is refused.

    Args:
        config: the run.
        out: its folder.
        data: what `build_data(config.data)` returns, when the caller has it already.
        progress: called after every update.
        note: called with lines that the user should read.
        overwrite: delete the run that is in the folder and begin anew.

    Raises:
        ConfigError: parts of the configuration do not fit together.
        CheckpointError: the folder holds another run, checkpoints are unusable, or saving failed.
        NonFiniteError: the loss or gradient is not finite.
        Interrupted: SIGTERM or Ctrl-C came; the state is saved.
    """
    if jax.process_count() > 1:
        raise ConfigError(f"training runs in one process, this is one of {jax.process_count()}")
    if data is None:
        data = build_data(config.data)
    elif data.config != config.data:
        raise ConfigError("data: was built from another configuration than the run's")
    config = config.with_vocab_size(data.tokenizer.vocab_size)
    check(config, data)
    folder = Path(out)
    with open_run(folder, config, data, overwrite=overwrite), Signals() as signals:
        if (folder / RESULT).exists():
            return load_result(folder)
        trainer = _Trainer(config, data, folder, progress, note or (lambda line: None), signals)
        return trainer.run()


def check(config: RunConfig, data: Data) -> None:
    """Finds what does not fit together before anything is written or compiled.

    Raises:
        ConfigError: says which keys.
    """
    validation_windows(config, data)
    profile = config.training.profile
    if profile is not None and profile.start > config.updates:
        raise ConfigError(
            f"training.profile.start={profile.start} is after the last update, {config.updates}"
        )
    if config.training.wandb is not None:
        wandb_module()


class _Trainer:
    """One session of a run."""

    def __init__(
        self,
        config: RunConfig,
        data: Data,
        folder: Path,
        progress: Callback | None,
        note: Callable[[str], None],
        signals: Signals,
    ):
        self.config, self.data, self.folder = config, data, folder
        self.progress, self.note, self.signals = progress, note, signals
        self.training = config.training
        self.identity: Identity = identity_of(config, data)
        self.paradigm = config.paradigm.build(SpecialIds(*data.tokenizer.specials))
        self.windows = validation_windows(config, data)
        self.tx = make_optimizer(config)
        self.rate = self.training.schedule.build(
            self.training.optimizer.learning_rate, config.updates
        )
        rows, length = config.data.batch_size, config.data.context_length
        self.shapes, self.model = abstract_state(config, self.tx)
        self.flops_per_update = BACKWARD * self.model.cost(rows, length, 0).flops
        self.best: Best | None = None
        self.validation: float | None = None
        self.compile_s = 0.0
        self.peak_memory_bytes: int | None = None
        self.tracing = False

    def run(self) -> TrainResult:
        """Goes on where the folder's newest checkpoint is."""
        state = self._restore_or_init()
        sinks = self._sinks()
        self.writer = Writer(
            self.folder / CHECKPOINTS, keep=self.training.keep, identity=self.identity
        )
        self.log = MetricsLog(self.folder / METRICS, sinks, step=self.start)
        complete = False
        try:
            if self.start < self.config.updates:
                state = self._train(state)
            self.writer.wait()
            complete = True
        finally:
            if self.tracing:
                jax.profiler.stop_trace()
            self.log.close(complete=complete)
            self.writer.close()
        return self._finish()

    def _sinks(self) -> list[Sink]:
        """What takes the metrics beside metrics.jsonl."""
        sinks: list[Sink] = []
        if self.training.wandb is not None:  # first: it may refuse
            sinks.append(WandbSink(self.training.wandb, self.folder, plain(self.config)))
        if self.training.tensorboard:
            sinks.append(TensorBoardSink(self.folder, step=self.start))
        return sinks

    def _restore_or_init(self) -> TrainState:
        found = read_newest(
            self.folder / CHECKPOINTS,
            flatten(self.shapes),
            self.identity,
            set_aside=self.folder / DAMAGED,
        )
        progress: dict[str, Any] = {}
        if found is None:
            self.start = 0
            state, _ = init_state(self.config, self.tx)
        else:
            arrays, meta = found
            self.start, self.best, progress = meta.step, meta.best, meta.progress
            # Not an alias of NumPy's memory: the update takes its buffers over.
            state = jax.device_put(unflatten(self.shapes, arrays), may_alias=False)
            self.note(f"going on after update {self.start} of {self.config.updates}")
        self.sums = Sums(progress.get("sums"))
        self.clock = Clock(self.config.tokens_per_update, progress.get("clock"))
        self.compile_s = progress.get("compile_s", 0.0)
        self.peak_memory_bytes = progress.get("peak_memory_bytes")
        self.validation = progress.get("validation")
        return state

    def _train(self, state: TrainState) -> TrainState:
        self.note("compiling")
        begin = time.perf_counter()
        update = compile_step(self.config, self.paradigm, self.tx, self.model, state)
        self.compile_s += time.perf_counter() - begin
        self.peak_memory_bytes = compiled_memory(update)
        batches = self.data.train_batches(start_step=self.start)
        running: tuple[int, Array] | None = None
        for step in range(self.start + 1, self.config.updates + 1):
            batch = self._batch(batches, step)
            self._profile(step)
            self.clock.resume()
            state, metrics = update(state, micro_batches(batch, self.training.accumulate))
            if running is not None:
                self._absorb(*running, write=self._writes_line(running[0]))
            running = (step, metrics)
            self.writer.check()
            if not self._stops_after(step):
                continue
            self._absorb(step, metrics, write=False)
            running = None
            self.clock.pause()
            self._between_updates(state, step)
        return state

    def _batch(self, batches: Any, step: int) -> Batch:
        number, batch = next(batches)
        if number != step - 1:
            raise AssertionError(f"the data layer served batch {number} for update {step}")
        return batch

    def _stops_after(self, step: int) -> bool:
        """True when something else than the next update comes after this one."""
        every = (
            self.training.evaluate_every, self.training.checkpoint_every,
            self.training.sample_every,
        )  # fmt: skip
        due = any(n is not None and step % n == 0 for n in every)
        return due or step == self.config.updates or self.signals.received is not None

    def _writes_line(self, step: int) -> bool:
        return step % self.training.log_every == 0 or step == self.config.updates

    def _between_updates(self, state: TrainState, step: int) -> None:
        """Evaluates, logs, samples, saves: whatever is due after update `step`."""
        last = step == self.config.updates
        model = self.model.with_params(state.params if state.ema is None else state.ema)
        save = last or step % self.training.checkpoint_every == 0
        evaluated = False
        if self.windows is not None and (last or step % self.training.evaluate_every == 0):
            evaluated = True
            save |= self._evaluate(model, step)
        if evaluated or self._writes_line(step):
            self._write_line(step, self.validation if evaluated else None)
        every = self.training.sample_every
        if every is not None and (last or step % every == 0):
            write_samples(
                self.folder / SAMPLES, model, self.paradigm, self.data.tokenizer, self.config, step
            )
        stop = self.signals.received
        if save or stop is not None:
            self.writer.save(state, step, self._memory_of_loop(), self.best)
        if stop is not None and not last:
            self.writer.wait()
            path = self.folder / CHECKPOINTS / str(step)
            raise Interrupted(stop, path, step)

    def _evaluate(self, model: Model, step: int) -> bool:
        """Scores the validation windows; True when this is the best so far and to be kept."""
        try:
            value = validation_bits_per_byte(self.config, model, self.paradigm, self.windows)
        except FloatingPointError as error:
            raise self._not_finite(step, f"held-out loss: {error}") from None
        self.validation = value
        if not self.training.select_best:
            return False
        if self.best is not None and value >= self.best.bits_per_byte:
            return False
        self.best = Best(step=step, bits_per_byte=value)
        return True

    def _absorb(self, step: int, vector: Array, *, write: bool) -> None:
        """Waits for an update and takes its metrics in."""
        metrics = StepMetrics.fetch(vector)
        self.clock.tick()
        if not is_finite(metrics):
            raise self._not_finite(
                step, f"loss {metrics.loss:g}, gradient norm {metrics.grad_norm:g}"
            )
        self.sums.add(metrics)
        if write:
            self._write_line(step, None)
        if self.progress is not None:
            speed = self.clock.tokens_per_s
            left = (self.config.updates - step) * self.config.tokens_per_update
            self.progress(
                TrainProgress(
                    step=step,
                    steps=self.config.updates,
                    tokens=step * self.config.tokens_per_update,
                    loss=metrics.loss,
                    tokens_per_s=speed,
                    remaining_s=left / speed if speed else None,
                    validation_bits_per_byte=self.validation,
                )
            )

    def _write_line(self, step: int, validation: float | None) -> None:
        loss, aux, norm = self.sums.means()
        stats = self.sums.mean_stats()
        self.sums = Sums()
        self.log.write(
            Record(
                step=step,
                tokens=step * self.config.tokens_per_update,
                flops=step * self.flops_per_update,
                wall_s=self.clock.train_s,
                loss=loss,
                aux_loss=aux,
                grad_norm=norm,
                learning_rate=float(self.rate(step - 1)),
                tokens_per_s=self.clock.tokens_per_s,
                validation_bits_per_byte=validation,
                stats=stats,
            )
        )

    def _memory_of_loop(self) -> dict[str, Any]:
        return {
            "sums": self.sums.to_plain(),
            "clock": self.clock.to_plain(),
            "compile_s": self.compile_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "validation": self.validation,
        }

    def _not_finite(self, step: int, what: str) -> NonFiniteError:
        rows = self.config.data.batch_size
        first = (step - 1) * rows
        self.writer.wait()
        newest = self.writer.newest()
        good = "there is no checkpoint yet" if newest is None else f"last good checkpoint: {newest}"
        return NonFiniteError(
            f"update {step}: {what}; batch: rows {first} to {first + rows - 1}; {good}"
        )

    def _profile(self, step: int) -> None:
        profile = self.training.profile
        if profile is None:
            return
        if step == profile.start and not self.tracing:
            jax.profiler.start_trace(self.folder / PROFILE)
            self.tracing = True
        elif self.tracing and step >= profile.start + profile.updates:
            jax.profiler.stop_trace()
            self.tracing = False

    def _finish(self) -> TrainResult:
        config = self.config
        chosen = config.updates
        if self.training.select_best and self.best is not None:
            chosen = self.best.step
        known = self.peak_memory_bytes is not None
        result = {
            "step": chosen,
            "tokens": config.updates * config.tokens_per_update,
            "flops": config.updates * self.flops_per_update,
            "train_s": self.clock.train_s,
            "compile_s": self.compile_s,
            "tokens_per_s": self.clock.tokens_per_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_memory_reason": MEMORY_LABEL if known else "the backend analyses no memory",
            "best": None if self.best is None else self.best.model_dump(),
        }
        if not result["tokens_per_s"] and self.clock.train_s:
            result["tokens_per_s"] = result["tokens"] / self.clock.train_s
        write_text(self.folder / RESULT, json.dumps(result, indent=2) + "\n")
        return load_result(self.folder)
