"""`genlab bench`: how fast kernels and models are, beside their floors and other projects."""

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError, suggest
from ..kernels.dispatch import KernelArgumentError
from ..paradigms.backbone import ModelConfig
from ..train.data.cache import default_cache_dir
from ..train.device import prepare_device
from ..train.interop.export_run import export_run
from ..train.run_folder import load_run
from .benchmarks.alternate import take_turns
from .benchmarks.kernels import (
    DIRECTIONS,
    KERNELS,
    implementations_of,
    kernel_floor,
    kernel_of,
    make_call,
    prepare_kernel,
)
from .benchmarks.model_shapes import DEFAULT, shape_of
from .benchmarks.models import Case, floor_of, max_len_of, prepare
from .benchmarks.peer_process import INSIDE, PEERS, Peer, PeerRefused
from .benchmarks.records import BenchRecord, Floor, Summary
from .cli_compare import live_progress
from .cost.config import Machines
from .results_io import atomic_write

DTYPES = ("float32", "bfloat16")
LENGTHS = {"train": 256, "prefill": 512, "decode": 128}
BATCHES = {"train": 2, "prefill": 1, "decode": 1}

bench_app = typer.Typer(
    help="Times kernels and models in turns with other projects, beside the machine's floor.",
    no_args_is_help=True,
)

Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Model by name, or a run folder; again for more."),
]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", help="float32 or bfloat16; both when left out.")
]
BatchOption = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Rows.")]
LengthOption = Annotated[list[int] | None, typer.Option("--length", min=1, help="Tokens of a row.")]
PeerOption = Annotated[
    list[str] | None, typer.Option("--peer", help="Another project to take turns with.")
]
PeerPython = Annotated[
    Path | None,
    typer.Option(help="Interpreter that has the peers; the running one when left out."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each, after one that warms up.")]
Budget = Annotated[
    float, typer.Option(min=0.0, help="Seconds after which one implementation stops taking turns.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the records to this file.")]


class Common(NamedTuple):
    """What every bench is told."""

    console: Console
    machines: Machines
    peers: list[str]
    python: str | None
    repeats: int
    budget_s: float
    progress: Any


@bench_app.command("train")
def bench_train(
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    batches: BatchOption = None,
    lengths: LengthOption = None,
    peers: PeerOption = None,
    peer_python: PeerPython = None,
    repeats: Repeats = 5,
    budget_s: Budget = 120.0,
    json_file: JsonFile = None,
) -> None:
    """A training step: loss, gradients, clipping and AdamW."""
    _models(
        "train", shapes, dtypes, batches, lengths, peers, peer_python, repeats, budget_s,
        json_file, 1,
    )  # fmt: skip


@bench_app.command("prefill")
def bench_prefill(
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    batches: BatchOption = None,
    lengths: LengthOption = None,
    peers: PeerOption = None,
    peer_python: PeerPython = None,
    repeats: Repeats = 7,
    budget_s: Budget = 120.0,
    json_file: JsonFile = None,
) -> None:
    """Taking a prompt in, up to the first token."""
    _models(
        "prefill", shapes, dtypes, batches, lengths, peers, peer_python, repeats, budget_s,
        json_file, 1,
    )  # fmt: skip


@bench_app.command("decode")
def bench_decode(
    shapes: Shapes = None,
    dtypes: Dtypes = None,
    batches: BatchOption = None,
    lengths: LengthOption = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Steps per timed run.")] = 16,
    peers: PeerOption = None,
    peer_python: PeerPython = None,
    repeats: Repeats = 7,
    budget_s: Budget = 120.0,
    json_file: JsonFile = None,
) -> None:
    """One token after the other, behind a prompt that is not timed."""
    _models(
        "decode", shapes, dtypes, batches, lengths, peers, peer_python, repeats, budget_s,
        json_file, new_tokens,
    )  # fmt: skip


@bench_app.command("kernels")
def bench_kernels(
    op: Annotated[list[str] | None, typer.Option(help="Kernel; all when left out.")] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="Shape by name, of the one --op given.")
    ] = None,
    dtypes: Dtypes = None,
    direction: Annotated[
        list[str] | None, typer.Option(help="forward or forward_backward; both when left out.")
    ] = None,
    peers: PeerOption = None,
    peer_python: PeerPython = None,
    repeats: Repeats = 9,
    budget_s: Budget = 60.0,
    json_file: JsonFile = None,
) -> None:
    """Kernels, each in every implementation that this device takes."""
    names = op or list(KERNELS)
    for name in names:
        kernel_of(name)
    if shapes and len(names) > 1:
        raise ConfigError("--shape: names of shapes belong to one kernel; give one --op")
    _check_choice("--dtype", dtypes, DTYPES)
    _check_choice("--direction", direction, DIRECTIONS)
    _check_peers("kernels", peers)
    for name in names:
        for shape in shapes or ():
            _check_choice("--shape", [shape], tuple(kernel_of(name).shapes))
    console = Console()
    prepare_device(console)
    records = []
    with _shared(console, peers, peer_python, repeats, budget_s) as common:
        for name in names:
            for shape in shapes or kernel_of(name).default:
                for way in direction or kernel_of(name).directions:
                    records += _kernel(common, name, shape, way, dtypes or DTYPES)
    _finish(console, records, json_file)


def _models(
    bench: Any,
    shapes: list[str] | None,
    dtypes: list[str] | None,
    batches: list[int] | None,
    lengths: list[int] | None,
    peers: list[str] | None,
    peer_python: Path | None,
    repeats: int,
    budget_s: float,
    json_file: Path | None,
    new_tokens: int,
) -> None:
    _check_choice("--dtype", dtypes, DTYPES)
    _check_peers(bench, peers)
    for name in shapes or DEFAULT:
        if not Path(name).is_dir():
            shape_of(name)
    console = Console()
    prepare_device(console)
    records = []
    with _shared(console, peers, peer_python, repeats, budget_s) as common:
        for name in shapes or DEFAULT:
            for batch in batches or [BATCHES[bench]]:
                for length in lengths or [LENGTHS[bench]]:
                    cases = [
                        Case(bench, batch, length, dtype, new_tokens) for dtype in dtypes or DTYPES
                    ]
                    records += _model(common, name, cases)
    _finish(console, records, json_file)


def _model(common: Common, name: str, cases: list[Case]) -> list[BenchRecord]:
    """One model in its dtypes, and the peers in theirs, in turns."""
    with contextlib.ExitStack() as stack:
        config, params, published = _source(name, max_len_of(cases[0]), stack, common.peers)
        ready = {case: prepare(config, case, params) for case in cases}
        others = []
        for peer in common.peers:
            for case in cases:
                asked = case._asdict() | published
                try:
                    one = Peer(peer, asked, common.python)
                except PeerRefused as error:
                    common.console.print(f"{name}: {error}", highlight=False, markup=False)
                    continue
                others.append(stack.enter_context(one))
        subjects = [one.subject for one in ready.values()] + others
        times = _times(common, f"{cases[0].bench} {name}", subjects)
        floors = {c: floor_of(config, c, common.machines.get(c.dtype)) for c in cases}
    return [
        _record(
            bench=case.bench, shape=name, dtype=case.dtype, batch=case.batch, length=case.length,
            implementation="genlab", own=times[one.subject.name], compile_s=one.compile_s,
            tokens=one.tokens, floor=floors[case], times=times, others=[p.name for p in others],
        )
        for case, one in ready.items()
    ]  # fmt: skip


def _source(
    name: str, max_len: int, stack: contextlib.ExitStack, peers: list[str]
) -> tuple[ModelConfig, dict | None, dict]:
    """The model behind a name: its configuration, parameters, and what a peer builds it from."""
    if not Path(name).is_dir():
        shape = shape_of(name)
        return shape.config(max_len), None, {"published": shape.published}
    run = load_run(name)
    config = run.config.model.model_copy(update={"max_len": max(max_len, run.config.model.max_len)})
    if not peers:
        return config, run.model.params, {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "checkpoint"
    export_run(run, folder)
    return config, run.model.params, {"checkpoint": str(folder)}


def _kernel(
    common: Common, op: str, shape: str, direction: str, dtypes: Sequence[str]
) -> list[BenchRecord]:
    ready, labels, others, refused = {}, {}, [], []
    with contextlib.ExitStack() as stack:
        for dtype in dtypes:
            call = make_call(op, shape, dtype)
            for name in implementations_of(op):
                label = f"{name} {dtype}"
                try:
                    ready[label] = prepare_kernel(call, name, direction, label)
                except KernelArgumentError as error:
                    if "no implementation" not in str(error):
                        raise  # our own mistake, not a refusal
                    refused.append(f"{op} {shape} {dtype}: {error}")
                    continue
                labels[label] = (call, name, dtype)
                if name in common.peers:
                    others.append(label)
            for peer in common.peers:
                if peer in INSIDE:
                    continue
                sizes = kernel_of(op).shapes[shape]._asdict()
                asked = {"op": op, "sizes": sizes, "dtype": dtype, "direction": direction}
                try:
                    one = Peer(peer, asked, common.python)
                except PeerRefused as error:
                    refused.append(f"{op} {shape}: {error}")
                    continue
                ready[one.name] = stack.enter_context(one)
                others.append(one.name)
        for line in refused:
            common.console.print(line, highlight=False, markup=False, style="dim")
        subjects = [getattr(one, "subject", one) for one in ready.values()]
        if not subjects:
            return []
        times = _times(common, f"{op} {shape} {direction}", subjects)
    records = []
    for label, (call, name, dtype) in labels.items():
        if name in common.peers:
            continue
        floor = kernel_floor(call, direction, common.machines.get(dtype))
        records.append(
            _record(
                bench=f"{op}.{direction}", shape=shape, dtype=dtype, batch=call.batch,
                length=call.length, implementation=name, own=times[label],
                compile_s=ready[label].compile_s, tokens=None, floor=floor, times=times,
                others=others,
            )
        )  # fmt: skip
    return records


def _record(
    *,
    own: Summary,
    tokens: int | None,
    floor: Floor,
    times: dict[str, Summary],
    others: list[str],
    **about: Any,
) -> BenchRecord:
    """The record; its peer is the one that was fastest, whatever dtype it computes in."""
    fastest = min(others, key=lambda name: times[name].median_ms, default=None)
    peer_ms = None if fastest is None else times[fastest].median_ms
    return BenchRecord(
        **about,
        median_ms=own.median_ms,
        p90_ms=own.p90_ms,
        tokens_per_s=None if tokens is None else 1e3 * tokens / own.median_ms,
        floor_ms=floor.ms,
        floor_bound=floor.bound,
        floor_fraction=floor.ms / own.median_ms,
        peer=fastest,
        peer_median_ms=peer_ms,
        ratio=None if peer_ms is None else peer_ms / own.median_ms,
        runs=own.runs,
        device=f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        jax=jax.__version__,
    )


def _times(common: Common, what: str, subjects: Sequence[Any]) -> dict[str, Summary]:
    return take_turns(
        subjects,
        common.repeats,
        budget_s=common.budget_s,
        progress=lambda done, total: common.progress(what, done, total),
    )


@contextlib.contextmanager
def _shared(
    console: Console, peers: list[str] | None, python: Path | None, repeats: int, budget_s: float
) -> Any:
    with live_progress(console) as progress:
        task = progress.add_task("", total=None, detail="")

        def shown(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        machines = Machines(default_cache_dir() / "machine", shown)
        interpreter = None if python is None else str(python)
        yield Common(console, machines, peers or [], interpreter, repeats, budget_s, shown)


def _check_choice(option: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    for value in given or ():
        if value not in known:
            raise ConfigError(f"{option} {value!r}: want {', '.join(known)}{suggest(value, known)}")


def _check_peers(bench: str, peers: list[str] | None) -> None:
    known = [name for name, (_, benches) in PEERS.items() if bench in benches]
    _check_choice("--peer", peers, known + (list(INSIDE) if bench == "kernels" else []))


def _finish(console: Console, records: list[BenchRecord], json_file: Path | None) -> None:
    if json_file is not None:
        lines = [json.dumps(record.model_dump(mode="json")) for record in records]
        atomic_write(json_file, "[\n" + ",\n".join(lines) + "\n]\n")
    Console(width=max(console.width, 130)).print(_table(records))
    if json_file is not None:
        console.print(f"records: {json_file}", highlight=False)


def _table(records: list[BenchRecord]) -> Table:
    columns = (
        "bench", "shape", "rows x tokens", "ours", "ms", "p90", "tokens/s", "floor ms", "of floor",
        "peer", "peer ms", "ratio",
    )  # fmt: skip
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        right = place > 3 and column != "peer"
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for r in records:
        table.add_row(
            r.bench, r.shape, f"{r.batch} x {r.length}", f"{r.implementation} {r.dtype}",
            f"{r.median_ms:.4g}", f"{r.p90_ms:.4g}",
            "" if r.tokens_per_s is None else f"{r.tokens_per_s:,.0f}",
            f"{r.floor_ms:.3g} ({r.floor_bound})", f"{r.floor_fraction:.0%}", r.peer or "",
            "" if r.peer_median_ms is None else f"{r.peer_median_ms:.4g}",
            "" if r.ratio is None else f"{r.ratio:.2f}",
        )  # fmt: skip
    return table
