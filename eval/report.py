"""The report of a comparison: one self-contained HTML file, and a table for the terminal."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from . import formatting
from .answers import answers
from .cost.tables import parts_table, phase_table, price_table, remarks
from .plot_style import looks
from .plots import Plot
from .replay import Replay, replay_parts
from .results import MEASURED, Floor, Results, Row
from .results_io import atomic_write
from .summary import findings

_TEMPLATES = Path(__file__).parent / "templates"

_MARKER_PATHS = {
    "o": "M6 1.5a4.5 4.5 0 1 0 0.01 0z",
    "s": "M2 2h8v8h-8z",
    "^": "M6 1.5l4.8 8.6h-9.6z",
    "D": "M6 1l5 5-5 5-5-5z",
    "v": "M6 10.5l4.8-8.6h-9.6z",
    "P": "M4.3 1.5h3.4v2.8h2.8v3.4h-2.8v2.8h-3.4v-2.8h-2.8v-3.4h2.8z",
    "X": "M3.4 1.2 6 3.8 8.6 1.2 10.8 3.4 8.2 6 10.8 8.6 8.6 10.8 6 8.2 3.4 10.8 1.2 8.6 3.8 6z",
    "h": "M6 1l4.4 2.5v5L6 11 1.6 8.5v-5z",
}


class _Line(NamedTuple):
    """One row of the headline table: an entry or a floor, by bits per byte."""

    row: Row | None
    floor: Floor | None


def ranked(results: Results) -> list[_Line]:
    """Returns entries and floors by bits per byte, lowest first; entries without it come last."""
    lines = [_Line(row, None) for row in results.rows] + [
        _Line(None, floor) for floor in results.floors
    ]

    def place(line: _Line) -> tuple[bool, float]:
        value = line.row.bits_per_byte if line.row else line.floor.bits_per_byte
        return value is None, value or 0.0

    return sorted(lines, key=place)


def large_batch(results: Results) -> int | None:
    """Returns the largest measured batch above 1, or None."""
    return max((r.batch for row in results.rows for r in row.latency if r.batch > 1), default=None)


def speed_at(row: Row, batch: int | None) -> float | None:
    """Returns tokens per second at `batch` and the shortest prompt measured with it, or None."""
    records = [record for record in row.latency if record.batch == batch]
    return min(records, key=lambda r: r.prompt_length).tokens_per_s if records else None


def _swatch(colour: str, marker: str, hollow: bool) -> str:
    fill = "#fff" if hollow else colour
    return (
        '<svg class="swatch" viewBox="0 0 12 12" aria-hidden="true">'
        f'<path d="{_MARKER_PATHS[marker]}" fill="{fill}" stroke="{colour}" stroke-width="1.6"/>'
        "</svg>"
    )


def _reasons(results: Results) -> list[tuple[str, str]]:
    """Returns (reason, "entry: fields; entry: fields"), equal reasons together."""
    grouped: dict[str, dict[str, list[str]]] = {}
    for row in results.rows:
        nulls = {field: row.reasons[field] for field in MEASURED if field in row.reasons}
        if row.peak_memory_bytes is None:
            nulls["peak_memory_bytes"] = row.peak_memory_reason or ""
        for field, reason in nulls.items():
            grouped.setdefault(reason, {}).setdefault(row.name, []).append(field)
    lines = []
    for reason, names in grouped.items():
        names = {
            name: ["every measurement"] if set(MEASURED) <= set(fields) else fields
            for name, fields in names.items()
        }
        same = len(names) == len(results.rows) and len(set(map(tuple, names.values()))) == 1
        who = {"all entries": next(iter(names.values()))} if same else names
        lines.append((reason, "; ".join(f"{n}: {', '.join(fields)}" for n, fields in who.items())))
    return lines


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,  # names, samples and configs are text, whatever they hold
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (
        "fixed", "short", "significant", "trimmed", "byte_size", "seconds", "interval", "printable",
    ):  # fmt: skip
        environment.filters[name] = getattr(formatting, name)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment


def render_report(
    results: Results, plots: Iterable[Plot], replay: Replay | None = None
) -> str:
    """Returns the report as one HTML text: styles and plots inside, no request.

    The only script is the replay's, and the page's policy lets no other run.

    Args:
        results: the record.
        plots: from `plots.draw_plots(results)`, embedded as SVG images.
        replay: of the entries on one prompt; None for a report without it.
    """
    style = looks(results)
    topics: dict[str, list] = {}
    for finding in findings(results):
        topics.setdefault(finding.topic, []).append(finding)
    images = [
        (plot, "data:image/svg+xml;base64," + base64.b64encode(plot.svg).decode("ascii"))
        for plot in plots
    ]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            results=results,
            lines=ranked(results),
            topics=topics,
            answers=answers(results),
            costs=cost_sections(results),
            images=images,
            swatches={name: _swatch(look.colour, look.marker, look.is_bound)
                      for name, look in style.items()},
            batch=large_batch(results),
            speed_at=speed_at,
            reasons=_reasons(results),
            missing=formatting.MISSING,
            **(replay_parts(replay) if replay else {"replay": None}),
        )
    )  # fmt: skip


def cost_sections(results: Results) -> dict[str, Any] | None:
    """Tables and sentences of the cost model; None where no entry has a cost."""
    costs = {row.name: row.cost for row in results.rows if row.cost is not None}
    if not costs:
        return None
    return {
        "phases": phase_table(costs),
        "parts": parts_table(costs),
        "prices": price_table(costs),
        "remarks": remarks(costs),
        "machines": results.machines,
    }


def write_report(
    results: Results, plots: Iterable[Plot], path: str | Path, replay: Replay | None = None
) -> Path:
    """Writes the report atomically and returns its path; see `render_report`.

    Raises:
        GenlabError: the folder cannot be written.
    """
    path = Path(path)
    atomic_write(path, render_report(results, plots, replay))
    return path


def terminal_table(results: Results) -> Table:
    """Returns entries and floors by bits per byte as a table of at most 100 columns.

    A value after "<=" is an upper bound; a dash was not measured (the reasons are in the report).
    """
    table = Table(
        title=Text(f"{results.title}: bits per byte on the held-out text, lowest first"),
        caption="<= upper bound   calls: per sample   state: of one request at the trained context"
        "\nTTFT, call and tok/s: batch 1, shortest prompt",
        box=SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("entry", min_width=12, max_width=22, overflow="ellipsis", no_wrap=True)
    for heading in (
        "bits per\nbyte", "95 %", "params", "TTFT\nms", "call\nms", "tok/s", "calls", "gen\nPPL",
        "entropy\nnats", "state",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row, floor in ranked(results):
        if row is None:
            bounds = floor.ci95
            cells = [floor.name, f"{floor.bits_per_byte:.3f}", _range(bounds), *[""] * 8]
            table.add_row(*(Text(formatting.printable(cell)) for cell in cells), style="dim")
            continue
        value = formatting.fixed(row.bits_per_byte, 3)
        if row.is_bound and row.bits_per_byte is not None:
            value = f"<={value}"
        flag = "!" if row.repetitive else ""
        cells = [
            row.name + (" *" if row.undertrained else ""),
            value,
            _range(row.bits_per_byte_ci95),
            formatting.short(row.params),
            formatting.short(row.ttft_ms),
            formatting.short(row.step_ms_p50),
            formatting.short(row.tokens_per_s),
            formatting.trimmed(row.nfe),
            formatting.short(row.gen_ppl) + flag,
            formatting.fixed(row.entropy, 2),
            formatting.byte_size(row.state_bytes_at(row.context_length)).replace(" ", ""),
        ]
        table.add_row(*(Text(formatting.printable(cell)) for cell in cells))
    notes = []
    if any(row.undertrained for row in results.rows):
        notes.append("* undertrained")
    if any(row.repetitive for row in results.rows):
        notes.append("! samples repeat themselves")
    if notes:
        table.caption = f"{table.caption}\n{'   '.join(notes)}"
    return table


def _range(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"
