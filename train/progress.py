"""How far a run is, and how that is shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class TrainProgress(NamedTuple):
    """Where training is, after an update.

    Attributes:
        step: updates done.
        steps: updates in the run.
        tokens: pushed through the model so far.
        loss: of this update, nats per scored token.
        tokens_per_s: median so far; 0.0 during the first updates.
        remaining_s: seconds to go at that speed; None during the first updates.
        validation_bits_per_byte: of the last evaluation; None before the first.
    """

    step: int
    steps: int
    tokens: int
    loss: float
    tokens_per_s: float
    remaining_s: float | None
    validation_bits_per_byte: float | None


Callback = Callable[[TrainProgress], None]


@contextmanager
def progress_bar(console: Console) -> Iterator[Callback]:
    """Shows a live line: update, loss, tokens/s, time left."""
    bar = Progress(
        TextColumn("train"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        console=console,
    )
    task = bar.add_task("train", total=1.0, detail="")

    def show(record: TrainProgress) -> None:
        detail = f"loss {record.loss:.3f}"
        if record.validation_bits_per_byte is not None:
            detail += f"  held out {record.validation_bits_per_byte:.3f} bits/byte"
        if record.remaining_s is not None:
            detail += f"  {record.tokens_per_s:,.0f} tokens/s  {clock(record.remaining_s)} left"
        bar.update(task, total=record.steps, completed=record.step, detail=detail)
        bar.start()  # with the first update: errors before it stand alone

    try:
        yield show
    finally:
        bar.stop()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
