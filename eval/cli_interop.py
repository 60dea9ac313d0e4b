"""The commands `import` and `export`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ..errors import CheckpointError, ConfigError
from ..paradigms.model import abstract_model
from ..train.files import write_text
from ..train.interop.export_run import export_run
from ..train.interop.hub import Fetched, fetch_checkpoint, is_hub_id
from ..train.interop.import_run import import_checkpoint, is_imported
from ..train.run_folder import SOURCE, load_run

Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16; as it is when left out.")]


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
    )


def import_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's folder, a .gguf file, or an id on the Hugging Face Hub."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    revision: Annotated[
        str | None, typer.Option(help="Of an id: a commit, branch or tag; the main branch if not.")
    ] = None,
    dtype: Dtype = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an imported run that is there.")
    ] = False,
) -> None:
    """Turns a published checkpoint into a run folder, which every other command takes.

    Every key of its config.json is either implemented or named in an error. An id such as
    HuggingFaceTB/SmolLM2-135M-Instruct is downloaded first; the same command resumes that.
    """
    fetched = _fetched(source, revision, out, overwrite=overwrite)
    console = Console(stderr=True)
    with _bar(console) as bar:
        task = bar.add_task("import", total=None)
        imported = import_checkpoint(
            Path(source) if fetched is None else fetched.folder,
            out,
            dtype=dtype,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if fetched is not None:
        about = {"id": fetched.hub_id, "commit": fetched.commit}
        write_text(out / SOURCE / "hub.json", json.dumps(about, indent=2) + "\n")
    if imported.tokenizer.note is not None:
        typer.echo(f"note: {imported.tokenizer.note}", err=True)
    params = abstract_model(imported.model).num_params()
    typer.echo(f"{out}: {imported.architecture.name}, {params:,} parameters")


def _fetched(source: str, revision: str | None, out: Path, *, overwrite: bool) -> Fetched | None:
    """Downloads a source that is an id; None for one that lies here.

    Raises:
        CheckpointError: see `fetch_checkpoint`; or `out` is taken, which is better said before.
        ConfigError: see `fetch_checkpoint`; or a revision of a path.
    """
    if Path(source).exists() or not is_hub_id(source):
        if revision is not None:
            raise ConfigError(f"--revision {revision!r}: is of an id on the Hub, got {source!r}")
        return None
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if taken and not (overwrite and is_imported(out)):
        raise CheckpointError(f"{out}: is taken; choose another folder, or --overwrite")
    return fetch_checkpoint(source, revision=revision)


def export_command(
    run: Annotated[Path, typer.Argument(help="A run folder, trained or imported.")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    form: Annotated[
        str, typer.Option("--format", help="hf: safetensors, config.json and tokenizer files.")
    ] = "hf",
    architecture: Annotated[
        str | None, typer.Option(help="To write it as; the first that fits when left out.")
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Writes a run as a checkpoint that transformers loads."""
    if form != "hf":
        raise typer.BadParameter(f"{form!r}: no such format; want hf", param_hint="--format")
    console = Console(stderr=True)
    loaded = load_run(run)
    with _bar(console) as bar:
        task = bar.add_task("export", total=None)
        exported = export_run(
            loaded,
            out,
            architecture=architecture,
            dtype=dtype,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(
        f"{out}: {exported.architecture.name}, {exported.nbytes / 1e6:,.1f} MB in "
        f"{len(exported.files)} file{'s' if len(exported.files) > 1 else ''}"
    )
