"""The plots of a comparison, each as PNG and SVG.

One colour and one marker per entry, the same in every plot. The colours are Okabe and Ito's, which
colour-blind readers can tell apart; markers repeat the distinction without colour. Hollow markers
are upper bounds. What was not measured is named under the plot, never drawn.
"""

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.style import context as style_context

from . import plot_figures as figures
from .cost.figure import COST_PLOT, costed, predicted_measured
from .plot_style import PNG_DPI, STYLE
from .profile.figures import DRAW, PROFILE_PLOTS, profiled
from .results import Results
from .results_io import atomic_write


class Plot(NamedTuple):
    """One plot: file stem, heading, how to read it, and the figure as bytes."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: bytes


class PlotFiles(NamedTuple):
    """Where one plot was written."""

    png: Path
    svg: Path


class _Spec(NamedTuple):
    draw: Callable[[Results], Figure]
    title: str
    caption: str


PLOTS: dict[str, _Spec] = {
    "overview": _Spec(
        figures.overview,
        "Quality and floors on one scale",
        "Left is better. Bars are 95 % intervals over the held-out text. A hollow marker is an "
        "upper bound: the true value lies at it or to its left. Grey ticks are floors that need "
        "no neural network.",
    ),
    "quality_steps": _Spec(
        figures.quality_steps,
        "Quality against steps",
        "Left: perplexity of the samples under the judge (lower is better only at like entropy). "
        "Right: entropy of the same samples. Autoregression needs one call per new token; "
        "diffusion trades calls for quality, and each of its calls works on the whole canvas.",
    ),
    "quality_length": _Spec(
        figures.quality_length,
        "Quality against sample length",
        "How the samples hold up as they grow. Entropy rises with length by itself: compare "
        "entries at one length, not lengths with each other.",
    ),
    "quality_latency": _Spec(
        figures.quality_latency,
        "Quality against latency: the frontier",
        "Down and left is better. The dotted line joins the entries that no other one beats in "
        "both speed and quality. Hollow markers are upper bounds, so their true place is at or "
        "below the marker. Time per new token is the whole request, prompt included, over its new"
        " tokens.",
    ),
    "latency_context": _Spec(
        figures.latency_context,
        "Latency against context length",
        "Left: wait until the first token that can no longer change: the first token for "
        "autoregression, the whole canvas for plain diffusion. Right: one model call after that. "
        "Compilation is not included.",
    ),
    "state_context": _Spec(
        figures.state_context,
        "State against context length",
        "Memory one request holds while decoding, from the measured fixed part and part per "
        "token. Flat lines are recurrent states; slopes are keys and values of attention. Right "
        "of the dashed line is extrapolation beyond the trained context.",
    ),
    "training_validation": _Spec(
        figures.training_validation,
        "Learning on held-out text",
        "The same curves against three costs: text read, arithmetic done, time passed. Lower is "
        "better; hollow markers are upper bounds.",
    ),
    "training_loss": _Spec(
        figures.training_loss,
        "Training loss",
        "Faint: as recorded; strong: running mean over a twentieth of the points. Dashed: the "
        "loss is a bound and noisy by construction, so its level does not compare with the "
        "others.",
    ),
}


def specs_of(results: Results) -> dict[str, _Spec]:
    """The plots of these results: those of costs and profiles only where there are any."""
    extra = {}
    if costed(results):
        extra["cost_predicted"] = _Spec(predicted_measured, *COST_PLOT)
    if profiled(results):
        extra |= {n: _Spec(DRAW[n], title, text) for n, (title, text) in PROFILE_PLOTS.items()}
    return PLOTS | extra


def draw_plots(results: Results) -> list[Plot]:
    """Draws every plot as PNG (144 dpi) and SVG, in the report's order.

    Equal records give equal bytes with equal matplotlib versions.
    """
    plots = []
    with style_context(["default", STYLE]):
        for name, spec in specs_of(results).items():
            figure = spec.draw(results)
            png, svg = io.BytesIO(), io.BytesIO()
            figure.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
            plots.append(Plot(name, spec.title, spec.caption, png.getvalue(), svg.getvalue()))
    return plots


def write_plots(plots: Iterable[Plot], out_dir: str | Path) -> dict[str, PlotFiles]:
    """Writes `<name>.png` and `<name>.svg` into `out_dir`, each atomically.

    Raises:
        GenlabError: the folder cannot be written.
    """
    out_dir = Path(out_dir)
    files = {}
    for plot in plots:
        files[plot.name] = PlotFiles(out_dir / f"{plot.name}.png", out_dir / f"{plot.name}.svg")
        atomic_write(files[plot.name].png, plot.png)
        atomic_write(files[plot.name].svg, plot.svg)
    return files
