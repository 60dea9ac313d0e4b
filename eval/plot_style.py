"""How every plot looks: colours, markers, axes, and what is said about missing data."""

import math
import textwrap
from collections.abc import Callable, Iterable
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .formatting import byte_size, printable, short
from .results import Results, Row

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
GREY = "#6b7280"
PNG_DPI = 144

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 6.5,
    "svg.hashsalt": "genlab",  # same record, same file
    "svg.fonttype": "path",
    "text.parse_math": False,  # a name or reason with dollars stays text
}


class Look(NamedTuple):
    """How an entry is drawn everywhere."""

    colour: str
    marker: str
    name: str
    is_bound: bool

    @property
    def label(self) -> str:
        """The name, and that its likelihood is a bound: for plots that show likelihoods."""
        return self.name + (" (bound)" if self.is_bound else "")

    def line(self) -> dict:
        """Returns keyword arguments for `Axes.plot`."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markerfacecolor": "white" if self.is_bound else self.colour,
            "markeredgecolor": self.colour,
            "markeredgewidth": 1.5,
        }


def looks(results: Results) -> dict[str, Look]:
    """Returns each entry's colour, marker and name, by its place in the record."""
    return {
        row.name: Look(
            COLOURS[index % len(COLOURS)],
            MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
            # matplotlib drops labels that start with an underscore from legends
            (" " if row.name.startswith("_") else "") + printable(row.name).replace("\n", " "),
            row.is_bound,
        )
        for index, row in enumerate(results.rows)
    }


def not_shown(rows: Iterable[Row], why: Callable[[Row], str | None]) -> list[str]:
    """Returns "name: reason" for each row for which `why` gives a reason."""
    return [f"{row.name}: {reason}" for row in rows if (reason := why(row))]


def null_reason(row: Row, *fields: str) -> str | None:
    """Returns why the first of the fields that is null is null, or None."""
    for field in fields:
        if getattr(row, field) is None:
            return row.reasons[field]
    return None


def finish(figure: Figure, axes: list[Axes], missing: list[str], *, legend: bool = True) -> None:
    """Adds the legend on top, "no data" to empty axes and the list of what is not shown."""
    handles: dict[str, object] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
        if not ax.has_data():
            ax.text(
                0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color=GREY
            )
            ax.set_xticks([])
            ax.set_yticks([])
    if legend and handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside upper left",
            ncols=min(len(handles), 6),
            handlelength=1.6, columnspacing=1.6,
        )  # fmt: skip
    if missing:
        figure.supxlabel(
            textwrap.fill("not shown: " + "; ".join(dict.fromkeys(missing)), 150),
            fontsize=8,
            color=GREY,
        )


def tick_text(text: Callable[[float], str]) -> FuncFormatter:
    """Makes a tick formatter of a function of the value."""
    return FuncFormatter(lambda value, _: text(value))


def plain_tick(value: float) -> str:
    """Returns the value without trailing zeros."""
    return f"{value:.10g}"


def count_tick(value: float) -> str:
    """Returns "800k", "1.6T"."""
    return _trim(short(value, 3))


def byte_tick(value: float) -> str:
    """Returns "64 KiB"."""
    return byte_size(value)


def _trim(text: str) -> str:
    """Drops zeros after a decimal point: "1.60T" to "1.6T"."""
    digits = text.rstrip("kMGTPE")
    unit = text[len(digits) :]
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + unit


def log_axis(ax: Axes, which: str, text: Callable[[float], str] = plain_tick) -> None:
    """Makes an axis logarithmic with plain labels at 1, 2 and 5."""
    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    low, high = axis.get_view_interval()
    wide = low > 0 and math.log10(high / low) > 2.2
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(tick_text(text))
    axis.set_minor_formatter(NullFormatter())


def new_axes(width: float, height: float, panels: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure with panels side by side; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    return figure, list(axes)
