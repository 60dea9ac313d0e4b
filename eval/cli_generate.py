"""The command `generate`."""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..errors import ConfigError, DataError, suggest
from ..paradigms.config import Config
from ..paradigms.decoding.registry import default_decoding
from ..train.device import prepare_device
from ..train.interop.chat import chat_template_of
from ..train.run_folder import SOURCE, Run, load_run
from .constraints import one_constraint
from .fill import Filled
from .fill import fill as fill_blanks
from .formatting import printable
from .generate import Generation, Generator, Options, Prompt
from .text_stream import check_stops

DEFAULT_MAX_NEW = 128


class Chosen(NamedTuple):
    """A run that is asked, and how."""

    name: str
    generator: Generator
    options: Options


def generate_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run folders.")],
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
    regex: Annotated[
        str | None, typer.Option(help="The answer matches this regular expression as a whole.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON of the schema in this file.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The answer is one of these; give it repeatedly.")
    ] = None,
    fill: Annotated[
        bool, typer.Option("--fill", help="Fill the masks of each prompt, such as [MASK].")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a message to a chat model.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: the system message before each prompt.")
    ] = None,
    truncate_prompt: Annotated[
        bool, typer.Option("--truncate-prompt", help="Keep the end of a prompt that is too long.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as soon as it cannot change any more.")
    ] = False,
    canvas: Annotated[
        bool, typer.Option("--canvas", help="Show the whole answer after every step.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show all runs side by side while they write.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="With --watch: write it to this HTML file, to play again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print records, not text.")] = False,
) -> None:
    """Continues prompts with trained models of any family.

    The filters apply in this order: ids that are no text or that --regex, --json-schema or --choice
    leave out, temperature, top-k, top-p, min-p. Those three need an autoregressive run, --fill
    one of masked diffusion. With several runs, --steps and --order go to those that take them.
    """
    if stream + canvas + as_json + watch > 1:
        raise ConfigError(
            "--stream, --canvas, --watch and --json exclude one another: give one of them"
        )
    prompts = _prompts(prompt, prompt_file)
    if watch and len(prompts) > 1:
        raise ConfigError(f"--watch: got {len(prompts)} prompts, want one for all runs")
    _check_replay(replay, watch)
    _check_fill(
        fill,
        {"--stream": stream, "--canvas": canvas, "--watch": watch, "--chat": chat,
         "--max-new": max_new is not None},
    )  # fmt: skip
    if chat and (watch or truncate_prompt):
        other = "--watch" if watch else "--truncate-prompt"
        raise ConfigError(f"--chat: does not go with {other}; leave out one of them")
    if system is not None and not chat:
        raise ConfigError(f"--system {system!r}: is of --chat, which is not given")
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
        constraint=one_constraint(regex, json_schema, choice),
    )
    loaded = [load_run(run) for run in runs]
    decodings = _decodings(loaded, order)
    given: list[Sequence[Prompt]] = [prompts for _ in loaded]
    if chat:
        given = [_chat_prompts(one, prompts, system) for one in loaded]
    prepare_device(Console(stderr=True))
    generators = [
        Generator(
            one.model.prepare(one.config.training.compute_dtype),
            decoding.build(one.tokenizer.specials, one.paradigm),
            one.tokenizer,
        )
        for one, decoding in zip(loaded, decodings, strict=True)
    ]
    if max_new is None and not fill:
        fits = min(
            _fits(one, own, truncate_prompt) for one, own in zip(generators, given, strict=True)
        )
        options = dataclasses.replace(options, max_new=fits)
    chosen = _chosen(runs, generators, options)
    # A terminal that cannot show a character shows a question mark instead of failing.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if watch:
        _watch(chosen, prompts[0], replay)
        return
    records = []
    for one, own in zip(chosen, given, strict=True):
        if len(chosen) > 1 and not as_json:
            _say(f"=== {one.name}")
        about = {"run": one.name} if len(chosen) > 1 else {}
        if fill:
            filled = _fill(one, prompts, silent=as_json)
            records += [about | text._asdict() for text in filled]
            continue
        results = _answers(one, own, prompts, stream=stream, canvas=canvas, silent=as_json)
        records += [about | result._asdict() for result in results]
        _notes(results, options)
    if as_json:
        text = json.dumps(records, ensure_ascii=False, indent=2)
        # JSON escapes the lower control characters itself, but not those that follow ASCII.
        typer.echo(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))


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
        _say(f"--- {number + 1}: {prompts[number]}")


def _say(text: str, *, nl: bool = True) -> None:
    """Prints text that a model or a user wrote.

    A terminal gets its control characters in visible form, so that they cannot act on it; a pipe
    gets every character as it is.
    """
    typer.echo(printable(text) if sys.stdout.isatty() else text, nl=nl)


def _check_replay(replay: Path | None, watch: bool) -> None:
    if replay is None:
        return
    if not watch:
        raise ConfigError(f"--replay {replay}: is of --watch, which is not given")
    if not replay.absolute().parent.is_dir():
        raise DataError(f"--replay {replay}: no folder {replay.parent}")
    if replay.is_dir():
        raise DataError(f"--replay {replay}: is a folder, want a file")


def _decodings(loaded: Sequence[Run], order: str | None) -> list[Config]:
    """Each run's decoding; an order goes to those that have one, and some run must."""
    paradigms = [one.config.paradigm.name for one in loaded]
    ordered = [name for name in paradigms if "order" in type(default_decoding(name)).model_fields]
    return [decoding_config(p, order if p in ordered or not ordered else None) for p in paradigms]


def _chat_prompts(run: Run, prompts: list[str], system: str | None) -> list[list[int]]:
    """Each prompt as a chat of its own, in the ids of the run's template.

    Raises:
        ConfigError: the run has no template, or it refuses these messages.
    """
    template = chat_template_of(run.path / SOURCE)
    first = [] if system is None else [{"role": "system", "content": system}]
    chats = [[*first, {"role": "user", "content": prompt}] for prompt in prompts]
    return [template.encode(run.tokenizer, messages).tolist() for messages in chats]


def _fits(generator: Generator, prompts: Sequence[Prompt], truncate_prompt: bool) -> int:
    """The tokens to add when that is left open."""
    max_len = generator.model.config.max_len
    encode = generator.tokenizer.encode
    longest = 1 + max(len(encode(one)) if isinstance(one, str) else len(one) for one in prompts)
    # A prompt that may be cut leaves half the room; any other that fills the model is refused
    # with both numbers, because it leaves none for one token.
    least = max_len // 2 if truncate_prompt else 1
    return min(DEFAULT_MAX_NEW, max(least, max_len - longest))


def _chosen(runs: list[Path], generators: list[Generator], options: Options) -> list[Chosen]:
    """Names the runs, and gives each the options that it takes."""
    short = [run.absolute().parent.name if run.name == "run" else run.name for run in runs]
    names = short if len(set(short)) == len(runs) else [str(run) for run in runs]
    stepped = [one.decoding.uses_steps for one in generators]
    chosen = []
    for name, generator in zip(names, generators, strict=True):
        takes = generator.decoding.uses_steps or not any(stepped)
        own = options if takes else dataclasses.replace(options, steps=0)
        if own.constraint is not None:
            generator.grammar(own.constraint)  # refuses before any run computes
        chosen.append(Chosen(name, generator, own))
    return chosen


def _check_fill(fill: bool, others: dict[str, bool]) -> None:
    given = [name for name, there in others.items() if there]
    if fill and given:
        raise ConfigError(f"--fill: does not go with {given[0]}; leave out one of them")


def _fill(one: Chosen, prompts: list[str], *, silent: bool) -> list[Filled]:
    """Fills the blanks of all prompts with one run, and prints the texts."""
    results = fill_blanks(one.generator, prompts, one.options)
    for number, result in enumerate(results):
        if not silent:
            _heading(prompts, number)
            _say(result.text)
    return results


def _answers(
    one: Chosen,
    prompts: Sequence[Prompt],
    shown: list[str],
    *,
    stream: bool,
    canvas: bool,
    silent: bool,
) -> list[Generation]:
    """Answers all prompts with one run, and prints the answers under what was asked."""
    if not stream and not canvas:
        results = one.generator.generate(prompts, one.options)
        for number, result in enumerate(results):
            if not silent:
                _heading(shown, number)
                _say(result.text)
        return results
    show = _show_canvas if canvas else _show_stream
    results = []
    for number, prompt in enumerate(prompts):
        _heading(shown, number)
        own = dataclasses.replace(one.options, seed=one.options.seed + number)
        results.append(show(one.generator, prompt, own))
    return results


def _notes(results: list[Generation], options: Options) -> None:
    for number, result in enumerate(results, start=1):
        if result.dropped:
            kept = len(result.prompt_ids) - 1
            typer.echo(
                f"note: prompt {number}: {result.dropped} tokens were cut off its beginning, "
                f"{kept} are left",
                err=True,
            )
        if options.constraint is not None and result.finish_reason == "length":
            typer.echo(
                f"note: prompt {number}: the answer was cut off after {options.max_new} tokens, so "
                "it may be an unfinished part of what the constraint asks for; raise --max-new",
                err=True,
            )


def _watch(chosen: list[Chosen], prompt: str, replay: Path | None) -> None:
    from .replay import Track, replay_of, write_replay
    from .watch import watch

    tracks = [Track(one.name, one.generator, prompt, one.options) for one in chosen]
    watch(tracks, Console(highlight=False))
    _notes([track.result for track in tracks if track.result is not None], chosen[0].options)
    if replay is not None:
        write_replay(replay_of(tracks), replay)
        typer.echo(f"replay: {replay}", err=True)


def _show_stream(generator: Generator, prompt: Prompt, options: Options) -> Generation:
    pieces = generator.stream(prompt, options)
    while True:
        try:
            _say(next(pieces), nl=False)
        except StopIteration as end:
            typer.echo()
            return end.value


def _show_canvas(generator: Generator, prompt: Prompt, options: Options) -> Generation:
    console = Console(highlight=False, markup=False)
    snapshots = generator.canvas(prompt, options)
    if not console.is_terminal:
        number = 0
        while True:
            try:
                _say(f"[{number}] {next(snapshots)}")
            except StopIteration as end:
                _say(end.value.text)
                return end.value
            number += 1
    with Live(console=console, transient=True) as live:
        while True:
            try:
                live.update(Text(printable(next(snapshots))), refresh=True)
            except StopIteration as end:
                result = end.value
                break
    _say(result.text)
    return result
