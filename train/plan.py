"""What a run will take, before it is started."""

import time
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from ..paradigms.interface import SpecialIds
from .config import RunConfig
from .data.pipeline import Data
from .optimizer import decayed_paths
from .progress import clock
from .step import (
    BACKWARD,
    abstract_state,
    compile_step,
    compiled_memory,
    init_state,
    make_optimizer,
    micro_batches,
)

TIMED_UPDATES = 3


class Plan(NamedTuple):
    """Figures of a run.

    Attributes:
        groups: parameters by top-level part of the model.
        params: total.
        decayed: names of the parameters that weight decay applies to.
        updates: of the optimizer.
        tokens: pushed through the model.
        flops_per_token: of training, forward and backward.
        flops: of the run.
        bytes: by what they are for: parameters, optimizer, average, update.
        compile_s: seconds to compile the update here.
        update_s: seconds per update, measured here; None where it was not.
    """

    groups: dict[str, int]
    params: int
    decayed: list[str]
    updates: int
    tokens: int
    flops_per_token: float
    flops: float
    bytes: dict[str, int | None]
    compile_s: float
    update_s: float | None


def make_plan(config: RunConfig, data: Data, *, measure: bool = True) -> Plan:
    """Counts parameters, FLOPs and bytes, compiles the update, and times a few.

    Args:
        config: resolved, vocabulary size included.
        data: what it trains on.
        measure: run some updates, on a state that is thrown away.
    """
    tx = make_optimizer(config)
    shapes, model = abstract_state(config, tx)
    paradigm = config.paradigm.build(SpecialIds(*data.tokenizer.specials))
    begin = time.perf_counter()
    update = compile_step(config, paradigm, tx, model, shapes)
    compile_s = time.perf_counter() - begin
    update_s = None
    if measure:
        state, _ = init_state(config, tx)
        batches = data.train_batches()
        for timed in range(1 + TIMED_UPDATES):
            batch = micro_batches(next(batches)[1], config.training.accumulate)
            if timed == 1:
                begin = time.perf_counter()
            state, metrics = update(state, batch)
            jax.block_until_ready(metrics)
        update_s = (time.perf_counter() - begin) / TIMED_UPDATES
    rows, length = config.data.batch_size, config.data.context_length
    flops = BACKWARD * model.cost(rows, length, 0).flops
    return Plan(
        groups={name: _count(part) for name, part in model.params.items()},
        params=model.num_params(),
        decayed=decayed_paths(model),
        updates=config.updates,
        tokens=config.updates * config.tokens_per_update,
        flops_per_token=flops / config.tokens_per_update,
        flops=flops * config.updates,
        bytes={
            "parameters": _bytes(shapes.params),
            "optimizer": _bytes(shapes.opt_state),
            "average": _bytes(shapes.ema),
            "update, all together": compiled_memory(update),
        },
        compile_s=compile_s,
        update_s=update_s,
    )


def print_plan(plan: Plan, console: Console) -> None:
    """Shows a plan as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, count in plan.groups.items():
        table.add_row(f"  {name}", f"{count:,}")
    table.add_row("parameters", f"{plan.params:,}")
    table.add_row("  with weight decay", f"{len(plan.decayed)} arrays: {', '.join(plan.decayed)}")
    table.add_row("updates", f"{plan.updates:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("FLOPs per token", f"{plan.flops_per_token:.3g}")
    table.add_row("FLOPs", f"{plan.flops:.3g}")
    for name, size in plan.bytes.items():
        table.add_row(f"bytes, {name}", "not known here" if size is None else f"{size:,}")
    table.add_row("compile time", f"{plan.compile_s:.1f} s")
    if plan.update_s is not None:
        per_update = f"{plan.update_s * 1e3:.1f} ms per update here"
        table.add_row("training time", f"{clock(plan.update_s * plan.updates)} ({per_update})")
    console.print(table)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
