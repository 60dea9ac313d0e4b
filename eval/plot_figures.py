"""The figures of a comparison; `plots` adds captions and writes them."""

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .plot_style import (
    GREY,
    Look,
    byte_tick,
    count_tick,
    finish,
    log_axis,
    looks,
    new_axes,
    not_shown,
    null_reason,
    plain_tick,
    tick_text,
)
from .results import LatencyRecord, Results, Row


def overview(results: Results) -> Figure:
    """Bits per byte of entries and floors on one scale, with 95 % intervals."""
    style = looks(results)
    items = [
        (row.bits_per_byte, row.bits_per_byte_ci95, style[row.name])
        for row in results.rows
        if row.bits_per_byte is not None
    ] + [
        (floor.bits_per_byte, floor.ci95, Look(GREY, "|", floor.name, False))
        for floor in results.floors
    ]
    items.sort(key=lambda item: item[0])
    # A floor far to the right would squeeze all else together; its figure is named instead.
    edge = 1.2 * max((item[0] for item in items if item[2].colour != GREY), default=math.inf)
    beyond = [
        f"{look.label} {value:.3f} (beyond the scale)" for value, _, look in items if value > edge
    ]
    items = [item for item in items if item[0] <= edge]
    figure, (ax,) = new_axes(9.2, 1.1 + 0.3 * max(3, len(items)), 1)
    for place, (value, bounds, look) in enumerate(items):
        if bounds:
            ax.plot(bounds, [place, place], color=look.colour, linewidth=3, alpha=0.45)
        ax.plot([value], [place], linestyle="none", **(look.line() | {"zorder": 3}))
        note = f"{'≤ ' if look.is_bound else ''}{value:.3f}"
        right = max(value, bounds[1] if bounds else value)
        ax.annotate(note, (right, place), (7, 0), textcoords="offset points", va="center",
                    fontsize=8.5, color="#374151")  # fmt: skip
    ax.set_yticks(range(len(items)), [look.label for _, _, look in items])
    for tick, (_, _, look) in zip(ax.get_yticklabels(), items, strict=True):
        tick.set_color(GREY if look.colour == GREY else "black")
    ax.set_ylim(len(items) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.08)
    ax.set_xlabel("bits per byte of the held-out text (lower is better)")
    finish(figure, [ax], [*beyond, *not_shown(results.rows, _no_likelihood)],
            legend=False)  # fmt: skip
    return figure


def _no_likelihood(row: Row) -> str | None:
    return null_reason(row, "bits_per_byte")


def quality_steps(results: Results) -> Figure:
    """Generative perplexity and entropy against model calls per new token."""
    figure, axes = new_axes(9.6, 4.0, 2)
    style = looks(results)
    for ax, field, label in zip(
        axes, ("gen_ppl", "entropy"), ("generative perplexity", "entropy of the samples, nats"),
        strict=True,
    ):  # fmt: skip
        for row in results.rows:
            points = sorted(
                (point.nfe / point.new_tokens, getattr(point, field))
                for point in row.curve
                if point.steps is not None and getattr(point, field) is not None
            )
            own = getattr(row, field)
            if not points and None not in (own, row.nfe, row.new_tokens):
                points = [(row.nfe / row.new_tokens, own)]
            if points:
                ax.plot(
                    *zip(*points, strict=True), label=style[row.name].name, **style[row.name].line()
                )
        ax.set_title(label)
        ax.set_xlabel("model calls per new token (left: fewer calls)")
        if ax.has_data():
            log_axis(ax, "x")
            if field == "gen_ppl":
                log_axis(ax, "y")
    finish(figure, axes, not_shown(results.rows, _no_samples))
    return figure


def _no_samples(row: Row) -> str | None:
    if any(point.gen_ppl is not None for point in row.curve):
        return None
    return null_reason(row, "gen_ppl", "nfe")


def quality_length(results: Results) -> Figure:
    """Generative perplexity and entropy against the length of the samples."""
    figure, axes = new_axes(9.6, 4.0, 2)
    style = looks(results)
    missing = []
    for ax, field, label in zip(
        axes, ("gen_ppl", "entropy"), ("generative perplexity", "entropy of the samples, nats"),
        strict=True,
    ):  # fmt: skip
        for row in results.rows:
            points = sorted(
                (point.new_tokens, getattr(point, field))
                for point in row.curve
                if point.steps is None and getattr(point, field) is not None
            )
            if points:
                ax.plot(
                    *zip(*points, strict=True), label=style[row.name].name, **style[row.name].line()
                )
            else:
                missing.append(f"{row.name}: no curve over lengths")
        ax.set_title(label)
        ax.set_xlabel("new tokens per sample")
        if ax.has_data():
            log_axis(ax, "x")
    finish(figure, axes, missing)
    return figure


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no other one beats in both coordinates (lower is better), sorted."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def quality_latency(results: Results) -> Figure:
    """Bits per byte and generative perplexity against milliseconds per new token, batch 1."""
    figure, axes = new_axes(9.6, 4.0, 2)
    style = looks(results)
    missing = not_shown(results.rows, lambda r: null_reason(r, "bits_per_byte", "tokens_per_s"))
    for panel, ax in enumerate(axes):
        places: list[tuple[float, float]] = []
        for row in results.rows:
            if panel == 0:
                if row.bits_per_byte is None or row.tokens_per_s is None:
                    continue
                points = [(1000 / row.tokens_per_s, row.bits_per_byte)]
                if row.bits_per_byte_ci95:
                    ax.plot([points[0][0]] * 2, row.bits_per_byte_ci95, linewidth=3, alpha=0.4,
                            color=style[row.name].colour)  # fmt: skip
            else:
                points = sorted(
                    (point.latency_ms / point.new_tokens, point.gen_ppl)
                    for point in row.curve
                    if None not in (point.latency_ms, point.gen_ppl)
                    and (point.steps is not None or point.new_tokens == row.new_tokens)
                )
            if points:
                ax.plot(*zip(*points, strict=True), label=style[row.name].label,
                        linestyle="-" if len(points) > 1 else "none",
                        **style[row.name].line())  # fmt: skip
                places += points
            elif panel:
                missing.append(f"{row.name}: no samples with a latency")
        edge = frontier(places)
        if len(edge) > 1:
            ax.plot(*zip(*edge, strict=True), color=GREY, linewidth=1, linestyle=":",
                    drawstyle="steps-post", zorder=1, label="frontier")  # fmt: skip
        ax.set_title("bits per byte" if panel == 0 else "generative perplexity")
        ax.set_xlabel("ms per new token, batch 1 (left: faster)")
        if ax.has_data():
            log_axis(ax, "x")
            if panel:
                log_axis(ax, "y")
    finish(figure, axes, missing)
    return figure


def _batch_one(row: Row) -> list[LatencyRecord]:
    return sorted((r for r in row.latency if r.batch == 1), key=lambda r: r.prompt_length)


def latency_context(results: Results) -> Figure:
    """Time to the first settled token, and time per model call, against the prompt's length."""
    figure, axes = new_axes(9.6, 4.0, 2)
    style = looks(results)
    for row in results.rows:
        look, records = style[row.name], _batch_one(row)
        if not records:
            continue
        axes[0].plot(
            [r.prompt_length for r in records], [r.ttft_ms for r in records],
            label=look.name, **look.line(),
        )  # fmt: skip
        steps = [r for r in records if r.step_ms_p50 is not None]
        if steps:
            x, middle = [r.prompt_length for r in steps], [r.step_ms_p50 for r in steps]
            axes[1].plot(x, middle, label=look.name, **look.line())
            high = [r.step_ms_p50 if r.step_ms_p90 is None else r.step_ms_p90 for r in steps]
            axes[1].fill_between(x, middle, high, color=look.colour, alpha=0.15, linewidth=0)
    axes[0].set_title("time to first settled token, ms")
    axes[1].set_title("time per model call, ms (band: median to p90)")
    for ax in axes:
        ax.set_xlabel("prompt length, tokens (batch 1)")
        if ax.has_data():
            log_axis(ax, "x")
            log_axis(ax, "y")
    missing = not_shown(
        results.rows,
        lambda r: None if _batch_one(r) else r.reasons.get("ttft_ms", "no latency at batch 1"),
    )
    finish(figure, axes, missing)
    return figure


def state_context(results: Results) -> Figure:
    """Bytes of decoding state of one request against its context length."""
    figure, (ax,) = new_axes(9.2, 3.9, 1)
    style = looks(results)
    lengths = 2 ** np.arange(5, 18)
    missing = not_shown(
        results.rows, lambda r: null_reason(r, "state_bytes_fixed", "state_bytes_per_token")
    )
    for row in results.rows:
        if row.state_bytes_fixed is None or row.state_bytes_per_token is None:
            continue
        values = [row.state_bytes_at(int(length)) for length in lengths]
        if values[-1] == 0:
            missing.append(f"{row.name}: keeps no state between calls (0 bytes)")
            continue
        ax.plot(lengths, values, label=style[row.name].name, **style[row.name].line())
    contexts = sorted({row.context_length for row in results.rows})
    if ax.has_data():
        for length in contexts:
            ax.axvline(length, color=GREY, linestyle="--", linewidth=1)
        ax.annotate(
            "trained context",
            (contexts[-1], 1),
            (4, -2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=GREY,
        )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.xaxis.set_major_formatter(tick_text(plain_tick))
        ax.yaxis.set_major_formatter(tick_text(byte_tick))
    ax.set_xlabel("context length, tokens (prompt and new tokens)")
    ax.set_title("decoding state of one request")
    finish(figure, [ax], missing)
    return figure


_TRAINING_AXES = (
    ("tokens", "training tokens"),
    ("flops", "training FLOPs"),
    ("wall_s", "wall-clock seconds of training"),
)


def _smooth(values: list[float]) -> np.ndarray:
    """Returns the centred running mean over a twentieth of the points, shorter at the ends."""
    half = len(values) // 40
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _training(results: Results, field: str, title: str) -> Figure:
    figure, axes = new_axes(9.6, 3.6, 3)
    style = looks(results)
    missing = []
    for row in results.rows:
        points = [p for p in row.training_curve if getattr(p, field) is not None]
        if not points:
            missing.append(f"{row.name}: not recorded")
            continue
        look = style[row.name]
        values = [getattr(p, field) for p in points]
        for ax, (axis, _) in zip(axes, _TRAINING_AXES, strict=True):
            x = [getattr(p, axis) for p in points]
            if field == "loss":
                ax.plot(x, values, color=look.colour, alpha=0.25, linewidth=0.8)
                ax.plot(x, _smooth(values), label=look.label, color=look.colour,
                        linestyle="--" if look.is_bound else "-")  # fmt: skip
            else:
                ax.plot(x, values, label=look.label, **(look.line() | {"markersize": 4.5}))
    for ax, (_, label) in zip(axes, _TRAINING_AXES, strict=True):
        ax.set_xlabel(label)
        ax.xaxis.set_major_formatter(tick_text(count_tick))
        ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes[0].set_title(title)
    finish(figure, axes, missing)
    return figure


def training_loss(results: Results) -> Figure:
    """Training loss against tokens, FLOPs and wall-clock."""
    return _training(results, "loss", "training loss, nats per token")


def training_validation(results: Results) -> Figure:
    """Held-out bits per byte during training against tokens, FLOPs and wall-clock."""
    return _training(results, "bits_per_byte_validation", "held-out bits per byte")
