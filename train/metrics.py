"""What a run reports: means over a few updates, as JSON lines and for whatever shows them."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .files import write_text
from .sinks import Sink
from .step import StepMetrics

SETTLING_UPDATES = 3  # after a start or a pause: not representative of speed


class Record(NamedTuple):
    """One line of metrics.jsonl.

    Attributes:
        step: updates done.
        tokens: pushed through the model so far.
        flops: spent on them by the model's cost, three times a forward pass.
        wall_s: seconds of training so far over all sessions, without compiling, evaluating and
            saving.
        loss: nats per scored token, over the updates since the last line.
        aux_loss: auxiliary losses, mean over these updates.
        grad_norm: before clipping, mean over these updates.
        learning_rate: of the last of these updates.
        tokens_per_s: median so far.
        validation_bits_per_byte: of the evaluation after this update; null without one.
        stats: what layers report, `layer_<i>.<name>`, means over these updates (a router's entropy
            and load); empty where no layer reports anything.
    """

    step: int
    tokens: int
    flops: float
    wall_s: float
    loss: float
    aux_loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    validation_bits_per_byte: float | None
    stats: dict[str, float]


class Sums:
    """What the next line is the mean of. Survives a restart, so that lines do not change."""

    def __init__(self, saved: dict[str, Any] | None = None):
        """Begins empty, or with what `to_plain` returned."""
        saved = saved or {}
        self.nll_sum: float = saved.get("nll_sum", 0.0)
        self.weight: float = saved.get("weight", 0.0)
        self.aux: float = saved.get("aux", 0.0)
        self.grad_norm: float = saved.get("grad_norm", 0.0)
        self.updates: int = saved.get("updates", 0)
        self.stats: dict[str, float] = dict(saved.get("stats", {}))

    def add(self, metrics: StepMetrics) -> None:
        """Takes one update in."""
        self.nll_sum += metrics.nll_sum
        self.weight += metrics.weight
        self.aux += metrics.aux
        self.grad_norm += metrics.grad_norm
        self.updates += 1
        for name, value in metrics.stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint; floats survive JSON exactly."""
        return dict(vars(self))

    def means(self) -> tuple[float, float, float]:
        """Loss (weighted by scored tokens), auxiliary loss, gradient norm."""
        loss = self.nll_sum / self.weight if self.weight else 0.0
        return loss, self.aux / self.updates, self.grad_norm / self.updates

    def mean_stats(self) -> dict[str, float]:
        """What layers report, by name."""
        return {name: total / self.updates for name, total in self.stats.items()}


class Clock:
    """Seconds of training alone, and the speed that is typical of it."""

    def __init__(self, tokens_per_update: int, saved: dict[str, Any] | None = None):
        """Begins at zero, or goes on with what `to_plain` returned."""
        saved = saved or {}
        self.train_s: float = saved.get("train_s", 0.0)
        self._rate: float = saved.get("tokens_per_s", 0.0)
        self._tokens = tokens_per_update
        self._seconds: list[float] = []
        self._last: float | None = None
        self._settling = SETTLING_UPDATES

    def resume(self) -> None:
        """Starts the clock, if it stands still."""
        if self._last is None:
            self._last = time.perf_counter()

    def tick(self) -> None:
        """An update is done."""
        now = time.perf_counter()
        if self._last is not None:
            self.train_s += now - self._last
            if self._settling > 0:
                self._settling -= 1
            else:
                self._seconds.append(now - self._last)
        self._last = now

    def pause(self) -> None:
        """Stops the clock for something else than training; call after `tick`."""
        self._last = None
        self._settling = max(self._settling, 1)

    @property
    def tokens_per_s(self) -> float:
        """By the median update after the first few; 0.0 when there is none yet."""
        if not self._seconds:
            return self._rate
        return self._tokens / statistics.median(self._seconds)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"train_s": self.train_s, "tokens_per_s": self.tokens_per_s}


class MetricsLog:
    """Appends to metrics.jsonl, line by line, and hands each line on."""

    def __init__(self, path: Path, sinks: Sequence[Sink], *, step: int):
        """Opens the log of a run that goes on after update `step`; later lines are dropped.

        Args:
            path: of metrics.jsonl.
            sinks: what else takes the figures.
            step: updates done.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        self._path = path
        self.records = [r for r in read_records(path) if r["step"] <= step]
        self._failed = f"cannot write {path}"
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        write_text(path, text)
        try:
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise CheckpointError(f"{self._failed}: {error.strerror}") from None
        self._sinks = list(sinks)

    def write(self, record: Record) -> None:
        """Adds a line.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        plain = record._asdict()
        self.records.append(plain)
        try:
            self._file.write(json.dumps(plain) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self._failed}: {error.strerror}") from None
        figures = {name: value for name, value in plain.items() if name != "stats"} | record.stats
        scalars = {name: value for name, value in figures.items() if value is not None}
        for sink in self._sinks:
            sink.write(record.step, scalars)

    def close(self, *, complete: bool) -> None:
        """Flushes and closes everything.

        Args:
            complete: the run came to its end.
        """
        self._file.close()
        for sink in self._sinks:
            sink.close(complete=complete)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that was cut off by a kill ends the list."""
    records: list[dict[str, Any]] = []
    if not path.exists():
        return records
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            break
    return records


def is_finite(metrics: StepMetrics) -> bool:
    """False when any of the metrics is infinite or not a number."""
    numbers = [*metrics[:-1], *metrics.stats.values()]
    return all(math.isfinite(value) for value in numbers)
