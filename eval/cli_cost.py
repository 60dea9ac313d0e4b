"""`genlab cost`: what a model costs per call, by the equations and on this machine."""

from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..errors import CapacityError, ConfigError
from ..paradigms.decoding.registry import default_decoding
from ..paradigms.decoding.state import Decoding
from ..paradigms.interface import SpecialIds
from ..paradigms.model import abstract_model, build_model
from ..train.config import RunConfig
from ..train.data.cache import default_cache_dir
from ..train.device import prepare_device
from ..train.yaml_loader import find_config, load_config
from .cli_compare import live_progress
from .cost.arithmetic import crossover_context
from .cost.config import Machines
from .cost.devices import DEVICES, Device, load_devices
from .cost.measure import measure_cost
from .cost.records import CostRecord, Machine
from .cost.tables import TextTable, parts_table, phase_table, price_table, remarks
from .formatting import MISSING, byte_size, short, significant
from .results_io import atomic_write

SPECIALS = SpecialIds(bos=0, eos=1, pad=2, mask=3)
VOCAB_SIZE = 512  # where the configuration leaves it to the tokenizer


def cost_command(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="YAML files or families such as transformer; dotted.key=value changes all of them."
        ),
    ],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Requests run together.")] = 1,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed requests; 5 when left out.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=2, help="Ids, where the configuration names no number.")
    ] = VOCAB_SIZE,
    devices: Annotated[
        Path | None, typer.Option(help="Table of device prices; the shipped one when left out.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="FLOPs and bytes only: builds and runs nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the records as JSON.")] = None,
) -> None:
    """Sets predicted and measured time of a model's calls side by side, untrained.

    The model has random weights: time does not depend on them. Nothing is trained.
    """
    names = [text for text in configs if "=" not in text]
    overrides = [text for text in configs if "=" in text]
    if not names:
        raise ConfigError("cost: name at least one configuration before the changes")
    measuring = {"--out": out, "--devices": devices, "--repeats": repeats}
    for option, value in measuring.items():
        if plan and value is not None:
            raise ConfigError(f"{option} is of measuring, which --plan leaves out: drop one")
    stems = [find_config(name).stem for name in names]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ConfigError(f"cost: two configurations are called {stem!r}; measure them apart")
    runs = {
        stem: _run(name, overrides, vocab_size) for stem, name in zip(stems, names, strict=True)
    }
    for name, run in runs.items():
        if prompt + new > run.model.max_len:
            raise CapacityError(
                f"{name}: --prompt and --new ask for {prompt + new} tokens, model.max_len is "
                f"{run.model.max_len}; add model.max_len={prompt + new}"
            )
    console = Console()
    if plan:
        _print(console, plan_table(runs, batch, prompt), turned=1)
        return
    table = load_devices(devices or DEVICES)
    prepare_device(console)
    costs: dict[str, CostRecord] = {}
    with live_progress(console) as progress:
        task = progress.add_task("", total=None, detail="")

        def shown(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        machines = Machines(default_cache_dir() / "machine", shown)
        for done, (name, run) in enumerate(runs.items()):
            machine = machines.get(run.training.compute_dtype)
            shown(name, done, len(runs))
            costs[name] = _measured(run, machine, table, batch, prompt, new, repeats or 5)
    if out is not None:
        records = ",\n".join(f'"{name}": {cost.model_dump_json()}' for name, cost in costs.items())
        atomic_write(out, "{" + records + "}\n")
    _print(console, phase_table(costs), turned=2)
    _print(console, parts_table(costs), turned=2)
    _print(console, price_table(costs))
    for line in remarks(costs):
        console.print(line, highlight=False, markup=False)


def plan_table(runs: dict[str, RunConfig], batch: int, context: int) -> TextTable:
    """FLOPs and bytes of one decode step behind `context` tokens, from shapes alone."""
    columns = [
        "model", "parameters", "active", "weights", "tokens per call", "FLOP per call",
        "weights read per call", "state at context", "state per token", "FLOP per byte",
        "crossover tokens",
    ]  # fmt: skip
    lines = []
    for name, run in runs.items():
        dtype = run.training.compute_dtype
        model = jax.eval_shape(lambda m, dtype=dtype: m.prepare(dtype), abstract_model(run.model))
        # Without a state every call works on the whole canvas.
        keeps_state = _decoding(run).keeps_state
        tokens, history = (1, context) if keeps_state else (context, 0)
        cost = model.cost(batch, tokens, history)
        moved = cost.weight_bytes + cost.bytes_read + (cost.bytes_written if keeps_state else 0)
        per_token = cost.state_bytes_per_token / batch if keeps_state else 0.0
        fixed = cost.state_bytes_fixed / batch if keeps_state else 0.0
        held = cost.state_bytes_at(context) if keeps_state else 0.0
        crossover = crossover_context(cost.weight_bytes, per_token, batch, fixed)
        lines.append(
            [
                name,
                short(model.num_params()),
                short(model.num_active_params()),
                byte_size(model.num_params() * jnp.dtype(dtype).itemsize),
                str(batch * tokens),
                short(cost.flops),
                byte_size(cost.weight_bytes),
                byte_size(held),
                byte_size(per_token),
                significant(cost.flops / moved, 2),
                MISSING if crossover is None else f"{crossover:,.0f}",
            ]
        )
    return TextTable(columns, lines)


def _run(name: str, overrides: list[str], vocab_size: int) -> RunConfig:
    run = load_config(RunConfig, name, overrides)
    return run if run.model.vocab_size is not None else run.with_vocab_size(vocab_size)


def _decoding(run: RunConfig) -> Decoding:
    paradigm = run.paradigm.build(SPECIALS)
    return default_decoding(run.paradigm.name).build(SPECIALS, paradigm)


def _measured(
    run: RunConfig,
    machine: Machine,
    table: dict[str, Device],
    batch: int,
    prompt: int,
    new: int,
    repeats: int,
) -> CostRecord:
    model = build_model(run.model, seed=run.seed).prepare(run.training.compute_dtype)
    drawn = np.random.default_rng(run.seed).integers(4, run.model.vocab_size, (batch, prompt))
    return measure_cost(
        model,
        _decoding(run),
        machine,
        prompts=drawn.astype(np.int32),
        new_tokens=new,
        devices=table,
        forbidden_ids=tuple(SPECIALS),
        repeats=repeats,
    )


def _print(console: Console, table: TextTable, *, turned: int = 0) -> None:
    """Prints a table; `turned` says how many first columns become the headings."""
    if turned:
        headings = ["\n".join(line[:turned]) for line in table.lines]
        lines = [
            [name, *(line[turned + place] for line in table.lines)]
            for place, name in enumerate(table.columns[turned:])
        ]
        table = TextTable(["", *headings], lines)
    shown = Table(*table.columns, box=None, header_style="bold", pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for line in table.lines:
        shown.add_row(*line)
    console.print(shown)
    console.print()
