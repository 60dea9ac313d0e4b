"""Predicted against measured time, every call of every entry in one picture."""

from matplotlib.figure import Figure

from ..plot_style import finish, log_axis, looks, new_axes
from ..results import Results, Row

COST_PLOT = (
    "Predicted against measured time",
    "Prediction: FLOPs and bytes by the equations of each layer, divided by this machine's own "
    "microbenchmarks, plus the cost of starting each operation; nothing is fitted to the entries. "
    "On the diagonal the two agree; the band is 30 % either way. Circles are prompts, squares "
    "decode steps, diamonds calls on a whole canvas.",
)
BAND = 0.30
SHAPES = {"prefill": "o", "decode": "s", "canvas": "D"}


def costed(results: Results) -> list[Row]:
    """The rows that have a cost."""
    return [row for row in results.rows if row.cost is not None]


def predicted_measured(results: Results) -> Figure:
    """One point per call: shape by call, colour by entry."""
    figure, (ax,) = new_axes(9.2, 6.0, 1)
    style = looks(results)
    values = []
    for row in costed(results):
        look = style[row.name]
        for phase in row.cost.phases:
            values += [phase.measured_ms, phase.predicted_ms]
            ax.plot(
                [phase.measured_ms],
                [phase.predicted_ms],
                linestyle="none",
                marker=SHAPES[phase.name],
                markersize=8,
                color=look.colour,
                label=look.name,
            )
    low, high = min(values) / 1.6, max(values) * 1.6
    ax.plot([low, high], [low, high], color="#6b7280", linewidth=1)
    ax.fill_between(
        [low, high],
        [low * (1 - BAND), high * (1 - BAND)],
        [low * (1 + BAND), high * (1 + BAND)],
        color="#6b7280",
        alpha=0.12,
        linewidth=0,
    )
    log_axis(ax, "x")
    log_axis(ax, "y")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ax.set_xlabel("measured, ms per call")
    ax.set_ylabel("predicted, ms per call")
    finish(figure, [ax], [])
    return figure
