"""`genlab train` and `genlab schema`."""

import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .config import RunConfig
from .data.pipeline import build_data
from .device import prepare_device
from .loop import check, train
from .plan import make_plan, print_plan
from .progress import progress_bar
from .schema import schema_text
from .signals import Interrupted
from .yaml_loader import find_config, load_config

INTERRUPTED = 130


def train_command(
    config: Annotated[str, typer.Argument(help="A YAML file, or a family such as transformer.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes of the configuration: dotted.key=value.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/NAME when left out.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, FLOPs and time; train nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run that is in the folder first.")
    ] = False,
    require: Annotated[
        str | None, typer.Option(help="Refuse to run on anything but: cpu, gpu or tpu.")
    ] = None,
) -> int:
    """Trains a model. The same command goes on where an interrupted one stopped.

    A folder that holds the same run is continued; a finished one is not trained again. A folder
    that holds another run is an error, unless --overwrite. Ctrl-C and SIGTERM save first.
    """
    run = load_config(RunConfig, config, overrides)
    folder = Path("runs") / find_config(config).stem if out is None else out
    console = Console()
    warnings.showwarning = _one_line
    prepare_device(console, require=require)
    data = build_data(run.data)
    run = run.with_vocab_size(data.tokenizer.vocab_size)
    check(run, data)
    if dry_run:
        print_plan(make_plan(run, data), console)
        return 0

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    try:
        with progress_bar(console) as progress:
            result = train(
                run, folder, data=data, progress=progress, note=say, overwrite=overwrite
            )
    except Interrupted as stop:
        say(f"genlab: {stop}")
        return 0 if stop.number == signal.SIGTERM else INTERRUPTED
    last = result.history[-1]
    held_out = last["validation_bits_per_byte"]
    tail = "" if held_out is None else f", held out {held_out:.3f} bits per byte"
    say(f"{folder}: {result.tokens:,} tokens, loss {last['loss']:.4f} nats per token{tail}")
    return 0


def schema_command(
    out: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
) -> None:
    """Prints the JSON Schema of a training configuration, for editors."""
    text = schema_text(RunConfig)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(text)
    typer.echo(f"wrote {out}")


def _one_line(message: Any, category: Any, *where: Any, **more: Any) -> None:
    """Warnings as the command line prints them."""
    del category, where, more
    print(f"genlab: warning: {message}", file=sys.stderr)
