"""The commands `compare`, `eval` and `tune`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import ConfigError
from ..train.device import prepare_device
from ..train.run_folder import load_run
from .compare import compare
from .compare_config import load_comparison
from .entry import View
from .evaluate_run import evaluate_run
from .lr_grid import tune
from .profile.table import classic_table
from .report import terminal_table

Only = Annotated[list[str] | None, typer.Option(help="Run only this entry; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes of the configuration: dotted.key=value.")
]


class LiveView:
    """A progress bar per entry, with the trainer's own figures beside it."""

    def __init__(self, progress: Progress):
        """Draws into `progress`, which the caller starts and stops."""
        self._progress = progress

    def view_of(self, name: str, number: int, total: int) -> View:
        """Returns the view of one entry."""
        label = f"[{number}/{total}] {name}" if number else name
        task = self._progress.add_task(label, total=None, detail="", visible=False)

        def phase(what: str, done: int, total: int) -> None:
            self._progress.update(
                task, total=total, completed=done, detail=what, visible=done < total
            )

        def training(record: Any) -> None:
            detail = f"train  loss {record.loss:.3f}  {record.tokens_per_s / 1e3:.1f}k tokens/s"
            self._progress.update(
                task, total=record.steps, completed=record.step, detail=detail, visible=True
            )

        def note(text: str) -> None:
            self._progress.console.print(text, highlight=False, markup=False)

        return View(phase, training, note)


def live_progress(console: Console) -> Progress:
    """The layout of all progress bars."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def compare_command(
    config: Annotated[Path, typer.Argument(help="A comparison, e.g. configs/compare/quick.yaml.")],
    overrides: Overrides = None,
    only: Only = None,
    out: Out = None,
) -> None:
    """Trains the entries of a comparison, measures them alike and writes the report.

    Interrupted, the same command goes on where it was; finished entries are reused by hash.
    """
    comparison = load_comparison(config, overrides)
    console = Console()
    prepare_device(console)
    with live_progress(console) as progress:
        results, folder = compare(
            comparison, out=out, only=only, view_of=LiveView(progress).view_of
        )
    # The table needs 100 columns; a narrower terminal folds lines rather than losing figures.
    Console(width=max(console.width, 100)).print(terminal_table(results))
    if any(row.profile is not None for row in results.rows):
        Console(width=max(console.width, 100)).print(classic_table(results))
    console.print(f"report: {folder / 'report.html'}   figures: {folder / 'results.json'}")


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="Write the row as JSON to this file.")] = None,
    max_windows: Annotated[
        int | None, typer.Option(help="Windows of the test split; all when left out.")
    ] = None,
) -> None:
    """Measures one trained run: likelihood, samples, latency, state size."""
    console = Console()
    loaded = load_run(run)
    prepare_device(console)
    with live_progress(console) as progress:
        row = evaluate_run(loaded, max_windows=max_windows, view_of=LiveView(progress).view_of)
    text = row.model_dump_json(indent=2, exclude={"resolved_config", "training_curve"})
    if out is None:
        console.print_json(text)
        return
    out.write_text(text + "\n")
    console.print(f"wrote {out}")


def tune_command(
    config: Annotated[Path, typer.Argument(help="A comparison.")],
    overrides: Overrides = None,
    rates: Annotated[str, typer.Option(help="Learning rates, comma separated.")] = "2e-3,4e-3,8e-3",
    record: Annotated[
        Path | None, typer.Option(help="The grid to write; the comparison's own when left out.")
    ] = None,
    only: Only = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/tune"),
) -> None:
    """Records a grid of learning rates for a comparison (see configs/compare/lr_grid.yaml)."""
    comparison = load_comparison(config, overrides, use_grid=False)
    if record is None:
        if comparison.config.learning_rates is None:
            raise ConfigError(f"{config}: names no learning_rates file; give --record")
        record = comparison.source.parent / comparison.config.learning_rates
    try:
        values = [float(rate) for rate in rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates: want numbers separated by commas, got {rates!r}") from None
    console = Console()
    prepare_device(console)
    with live_progress(console) as progress:
        tune(
            comparison,
            values,
            out=out,
            record=record,
            only=only,
            view_of=LiveView(progress).view_of,
        )
    console.print(f"wrote {record}")
