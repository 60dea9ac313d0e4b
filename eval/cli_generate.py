"""The command `generate`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..errors import ConfigError, DataError, suggest
from ..paradigms.config import Config
from ..paradigms.decoding.registry import default_decoding
from ..train.device import prepare_device
from ..train.run_folder import load_run
from .generate import Generation, Generator, Options
from .text_stream import check_stops

DEFAULT_MAX_NEW = 128

def generate_command(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be repeated. Default: empty.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file of UTF-8 text, one prompt to a line.")
    ] = None,
    max_new: Annotated[
        int | None, typer.Option(help="Tokens to add at most; 128, or what fits, if left out.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of the k most probable tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Of the top tokens of this mass; 1 is off.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Of tokens this probable, relative to the best; 0 is off.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; the next takes seed + 1.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Diffusion: model calls for the answer; 0 is one per token.")
    ] = 0,
    order: Annotated[str | None, typer.Option(help="Diffusion: order of uncovering.")] = None,
    truncate_prompt: Annotated[
        bool, typer.Option("--truncate-prompt", help="Keep the end of a prompt that is too long.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as soon as it cannot change any more.")
    ] = False,
    canvas: Annotated[
        bool, typer.Option("--canvas", help="Show the whole answer after every step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print records, not text.")] = False,
) -> None:
    """Continues prompts with a trained model of any family.

    The filters apply in this order: ids that are no text, temperature, top-k, top-p, min-p.
    """
    if stream + canvas + as_json > 1:
        raise ConfigError("--stream, --canvas and --json exclude one another: give one of them")
    prompts = _prompts(prompt, prompt_file)
    options = Options(
        max_new=DEFAULT_MAX_NEW if max_new is None else max_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        steps=steps,
        seed=seed,
        stop=check_stops(stop or ()),
        truncate_prompt=truncate_prompt,
    )
    loaded = load_run(run)
    decoding = decoding_config(loaded.config.paradigm.name, order)
    console = Console(stderr=True)
    prepare_device(console)
    generator = Generator(
        loaded.model.prepare(loaded.config.training.compute_dtype),
        decoding.build(loaded.tokenizer.specials, loaded.paradigm),
        loaded.tokenizer,
    )
    if max_new is None:
        max_len = generator.model.config.max_len
        longest = 1 + max(len(ids) for ids in loaded.tokenizer.encode_batch(prompts))
        # A prompt that may be cut leaves half the room; any other that fills the model is refused
        # with both numbers, because it leaves none for one token.
        least = max_len // 2 if truncate_prompt else 1
        fits = min(DEFAULT_MAX_NEW, max(least, max_len - longest))
        options = dataclasses.replace(options, max_new=fits)
    # A terminal that cannot show a character shows a question mark instead of failing.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    results = []
    if stream or canvas:
        show = _show_canvas if canvas else _show_stream
        for number, one in enumerate(prompts):
            _heading(prompts, number)
            own = dataclasses.replace(options, seed=seed + number)
            results.append(show(generator, one, own))
    else:
        results = generator.generate(prompts, options)
        if as_json:
            records = [result._asdict() for result in results]
            typer.echo(json.dumps(records, ensure_ascii=False, indent=2))
        else:
            for number, result in enumerate(results):
                _heading(prompts, number)
                typer.echo(result.text)
    for number, result in enumerate(results):
        if result.dropped:
            kept = len(result.prompt_ids) - 1
            typer.echo(
                f"note: prompt {number + 1}: {result.dropped} tokens were cut off its beginning, "
                f"{kept} are left",
                err=True,
            )


def decoding_config(paradigm: str, order: str | None) -> Config:
    """The paradigm's decoding, with another order of uncovering if one is given.

    Raises:
        ConfigError: the decoding has no order, or not this one.
    """
    config = default_decoding(paradigm)
    if order is None:
        return config
    field = type(config).model_fields.get("order")
    if field is None:
        raise ConfigError(f"--order {order}: decoding {config.name!r} has no order to choose")
    orders = get_args(field.annotation)
    if order not in orders:
        raise ConfigError(f"--order {order!r}: no such order{suggest(order, orders)}")
    return type(config)(order=order)


def _prompts(prompt: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(prompt or [])
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"--prompt-file {file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"--prompt-file {file}: no UTF-8 at byte {error.start}") from None
        lines = text.split("\n")
        prompts += lines[:-1] if lines[-1] == "" else lines
        if not prompts:
            raise DataError(f"--prompt-file {file}: holds no line")
    return prompts or [""]


def _heading(prompts: list[str], number: int) -> None:
    if len(prompts) > 1:
        typer.echo(f"--- {number + 1}: {prompts[number]}")


def _show_stream(generator: Generator, prompt: str, options: Options) -> Generation:
    pieces = generator.stream(prompt, options)
    while True:
        try:
            typer.echo(next(pieces), nl=False)
        except StopIteration as end:
            typer.echo()
            return end.value


def _show_canvas(generator: Generator, prompt: str, options: Options) -> Generation:
    console = Console(highlight=False, markup=False)
    snapshots = generator.canvas(prompt, options)
    if not console.is_terminal:
        number = 0
        while True:
            try:
                typer.echo(f"[{number}] {next(snapshots)}")
            except StopIteration as end:
                typer.echo(end.value.text)
                return end.value
            number += 1
    with Live(console=console, transient=True) as live:
        while True:
            try:
                live.update(Text(next(snapshots)), refresh=True)
            except StopIteration as end:
                result = end.value
                break
    typer.echo(result.text)
    return result
