"""What a comparison says, in plain words, computed from its figures.

A difference is called one only when the measurement can tell: bits per byte by the paired bootstrap
over shared blocks (else by the two intervals), latency by the spread from median to p90.
"""

import math
from typing import NamedTuple

from .formatting import (
    byte_size,
    fixed,
    interval,
    listed,
    seconds,
    short,
    signed,
    significant,
    trimmed,
)
from .results import Results, Row
from .statistics import paired_difference

PARAMETER_TOLERANCE = 0.02  # entries are matched to this in total parameters
SPEED_TOLERANCE = 0.10  # throughputs closer than this are not told apart: they carry no interval
LIKE_ENTROPY = 0.15  # nats; perplexities are compared as they stand up to this difference


class Finding(NamedTuple):
    """One statement under a heading of the summary; `caution` marks what limits the comparison."""

    topic: str
    text: str
    caution: bool = False


class Comparison(NamedTuple):
    """How two entries' bits per byte differ: first minus second, and whether that can be told."""

    difference: float
    bounds: tuple[float, float] | None
    separated: bool | None
    paired: bool


def compare(row: Row, other: Row) -> Comparison | None:
    """Compares bits per byte; None when one of them has none.

    Paired when both entries scored the same blocks; otherwise they are separated when their own
    intervals do not overlap, and `separated` is None when one has no interval.
    """
    if row.bits_per_byte is None or other.bits_per_byte is None:
        return None
    difference = row.bits_per_byte - other.bits_per_byte
    a, b = row.likelihood, other.likelihood
    if a and b and a.block_bytes and a.block_bytes == b.block_bytes:
        bounds = paired_difference(a.block_nats, b.block_nats, a.block_bytes)
        if bounds is not None:
            return Comparison(difference, tuple(bounds), not bounds[0] <= 0 <= bounds[1], True)
    own, others = row.bits_per_byte_ci95, other.bits_per_byte_ci95
    if own is None or others is None:
        return Comparison(difference, None, None, False)
    return Comparison(difference, None, own[0] > others[1] or others[0] > own[1], False)


def _value(row: Row) -> str:
    bounds = interval(row.bits_per_byte_ci95)
    return fixed(row.bits_per_byte, 3) + (f" {bounds}" if bounds else " (no interval)")


def _against(row: Row, best: Row) -> str:
    found = compare(row, best)
    text = f"{row.name} {signed(found.difference)}"
    if found.bounds:
        low, high = (signed(value) for value in found.bounds)
        text += f" [{low}, {high}]"
    return text


def _estimate(row: Row) -> str:
    """Returns how a bound was estimated, with its Monte-Carlo error."""
    if row.likelihood is None:
        return ""
    error = row.likelihood.standard_error_bits_per_byte
    return (
        f" ({row.likelihood.estimator}, {row.likelihood.draws} draws per window, standard error "
        f"{significant(error, 2)})"
    )


def _quality(results: Results) -> list[Finding]:
    scored = sorted(
        (row for row in results.rows if row.bits_per_byte is not None),
        key=lambda row: row.bits_per_byte,
    )
    exact = [row for row in scored if not row.is_bound]
    found = []
    if exact:
        best, rest = exact[0], exact[1:]
        text = f"{best.name} has the lowest exact bits per byte: {_value(best)}."
        groups = {True: [], False: [], None: []}
        for row in rest:
            groups[compare(row, best).separated].append(row)
        if groups[False]:
            text += (
                " Not told apart from it by this text, the difference lying within the interval: "
                f"{listed([_against(row, best) for row in groups[False]])}."
            )
        if groups[True]:
            text += (
                " Behind by more than the interval: "
                f"{listed([_against(row, best) for row in groups[True]])}."
            )
        if groups[None]:
            text += (
                " Without intervals, so the difference cannot be judged: "
                f"{listed([_against(row, best) for row in groups[None]])}."
            )
        found.append(Finding("Quality", text))
    for row in scored:
        if row.is_bound:
            text = (
                f"{row.name}: {_value(row)} is an upper bound{_estimate(row)}; its true "
                "value is this or lower."
            )
            if exact:
                best = exact[0]
                gap = row.bits_per_byte - best.bits_per_byte
                text += (
                    f" It is at most {gap:.3f} behind {best.name}."
                    if gap > 0
                    else f" Its bound already lies below {best.name}."
                )
            found.append(Finding("Quality", text))
    for row in results.rows:
        if row.bits_per_byte is None:
            text = f"{row.name} has no bits per byte: {row.reasons['bits_per_byte']}."
            found.append(Finding("Quality", text, caution=True))
    seeds = {row.seed for row in results.rows}
    if scored:
        found.append(
            Finding(
                "Quality",
                f"The intervals cover the choice of held-out text, not other training seeds (here "
                f"{'one seed' if len(seeds) == 1 else f'{len(seeds)} seeds'}).",
                caution=True,
            )
        )
    return found


def _floors(results: Results) -> list[Finding]:
    scored = [row for row in results.rows if row.bits_per_byte is not None]
    parts = []
    for floor in sorted(results.floors, key=lambda floor: -floor.bits_per_byte):
        below, level = [], []
        for row in scored:
            low, high = row.bits_per_byte_ci95 or (row.bits_per_byte, row.bits_per_byte)
            if high < floor.bits_per_byte:
                below.append(row.name)
            elif low <= floor.bits_per_byte:
                level.append(row.name)
        who = (
            f"all {len(scored)} entries"
            if len(below) == len(scored) > 1
            else listed(below)
            if below
            else "no entry"
        )
        part = f"{floor.name} ({floor.bits_per_byte:.3f}): {who}"
        if level:
            part += f" (level with it: {listed(level)})"
        parts.append(part)
    if not parts or not scored:
        return []
    found = [Finding("Floors", "Below each floor, interval included: " + "; ".join(parts) + ".")]
    bounds = [row.name for row in scored if row.is_bound]
    if bounds:
        found.append(
            Finding(
                "Floors",
                f"{listed(bounds)}: an upper bound above a floor does not show that the true value "
                "is above it.",
                caution=True,
            )
        )
    return found


def _speed(results: Results) -> list[Finding]:
    found = []
    first = [row for row in results.rows if row.ttft_ms is not None]
    if len(first) > 1:
        order = sorted(first, key=lambda row: row.ttft_ms)
        close = [r.name for r in order[1:] if r.ttft_ms <= order[0].ttft_ms * (1 + SPEED_TOLERANCE)]
        text = (
            f"First settled token, batch 1: {order[0].name} in {significant(order[0].ttft_ms)} ms"
            + (f" ({listed(close)} within 10 %)" if close else "")
            + f"; last {order[-1].name} in {significant(order[-1].ttft_ms)} ms."
        )
        found.append(Finding("Latency", text))
    for batch in sorted({record.batch for row in results.rows for record in row.latency}):
        speeds = []
        for row in results.rows:
            records = [r for r in row.latency if r.batch == batch]
            if records:
                shortest = min(records, key=lambda r: r.prompt_length)
                speeds.append((shortest.tokens_per_s, row.name))
        if len(speeds) < 2:
            continue
        speeds.sort(reverse=True)
        top = speeds[0][0]
        close = [name for speed, name in speeds[1:] if speed >= top * (1 - SPEED_TOLERANCE)]
        rest = [f"{n} {significant(v)}" for v, n in speeds[1:] if v < top * (1 - SPEED_TOLERANCE)]
        text = f"Tokens per second at batch {batch}: {speeds[0][1]} {significant(top)}"
        text += f", {listed(close)} within 10 % of it (not told apart)" if close else ""
        text += f"; {listed(rest)}." if rest else "."
        found.append(Finding("Latency", text))
    steps = sorted(
        (row for row in results.rows if None not in (row.step_ms_p50, row.step_ms_p90)),
        key=lambda row: row.step_ms_p50,
    )
    if len(steps) > 1:
        best = steps[0]
        close = [row.name for row in steps[1:] if row.step_ms_p50 <= best.step_ms_p90]
        text = (
            f"One model call, batch 1: {best.name} {significant(best.step_ms_p50)} ms (p90 "
            f"{significant(best.step_ms_p90)})"
        )
        text += (
            f"; {listed(close)} within that spread."
            if close
            else "; that p90 lies below all other medians."
        )
        found.append(Finding("Latency", text))
    return found


def _calls(results: Results) -> list[Finding]:
    found = []
    for row in results.rows:
        if None in (row.nfe, row.token_evals, row.new_tokens) or row.nfe >= row.new_tokens:
            continue
        found.append(
            Finding(
                "Steps",
                f"{row.name} writes {row.new_tokens} tokens in {trimmed(row.nfe)} model calls "
                f"({trimmed(row.new_tokens / row.nfe)} tokens per call), but pushes "
                f"{short(row.token_evals)} tokens through the model for it "
                f"({trimmed(row.token_evals / row.new_tokens)} per new token).",
            )
        )
    return found


def _state(results: Results) -> list[Finding]:
    known = [
        row
        for row in results.rows
        if row.state_bytes_fixed is not None and row.state_bytes_per_token is not None
    ]
    growing = [row for row in known if row.state_bytes_per_token > 0]
    constant = [row for row in known if row.state_bytes_per_token == 0 and row.state_bytes_fixed]
    found = []
    if constant:
        found.append(
            Finding(
                "State",
                "Constant whatever the context: "
                + listed([f"{r.name} {byte_size(r.state_bytes_fixed)}" for r in constant])
                + ".",
            )
        )
    for row in growing:
        text = (
            f"{row.name} grows by {byte_size(row.state_bytes_per_token)} per token"
            + (f" from {byte_size(row.state_bytes_fixed)}" if row.state_bytes_fixed else "")
            + f": {byte_size(row.state_bytes_at(row.context_length))} at its trained context of "
            f"{row.context_length}."
        )
        crossings = [
            f"{other.name} from {math.floor(gap / row.state_bytes_per_token) + 1:,} tokens on"
            for other in constant
            if (gap := other.state_bytes_fixed - row.state_bytes_fixed) > 0
        ]
        if crossings:
            text += f" It holds more than {listed(crossings)}."
        found.append(Finding("State", text))
    none = [r.name for r in known if not r.state_bytes_per_token and not r.state_bytes_fixed]
    if none:
        found.append(
            Finding("State", f"{listed(none)} keeps no state: each call reads the whole canvas.")
        )
    return found


def _samples(results: Results) -> list[Finding]:
    found = []
    flagged = [row.name for row in results.rows if row.repetitive]
    fair = sorted(
        (
            row
            for row in results.rows
            if row.gen_ppl is not None and row.entropy is not None and not row.repetitive
        ),
        key=lambda row: row.gen_ppl,
    )
    judge = f" under the {results.judge.kind} judge" if results.judge else ""
    if len(fair) > 1:
        best = fair[0]
        text = (
            f"Lowest generative perplexity{judge}: {best.name} {significant(best.gen_ppl)} at "
            f"entropy {best.entropy:.2f} nats; highest {fair[-1].name} "
            f"{significant(fair[-1].gen_ppl)} at {fair[-1].entropy:.2f}."
        )
        varied = [r.name for r in fair[1:] if r.entropy > best.entropy + LIKE_ENTROPY]
        if varied:
            text += (
                f" {listed(varied)} wrote more varied text, so part of that lead is {best.name}'s "
                "sameness."
            )
        found.append(Finding("Samples", text))
    if flagged:
        found.append(
            Finding(
                "Samples",
                f"The samples of {listed(flagged)} repeat themselves: a low perplexity there is no "
                "sign of quality.",
                caution=True,
            )
        )
    return found


def _recipes(results: Results) -> list[Finding]:
    found = []
    plain = [row.name for row in results.rows if not row.recipe]
    if plain:
        found.append(Finding("Recipe", f"Trained as published: {listed(plain)}."))
    for row in results.rows:
        if row.recipe:
            found.append(
                Finding("Recipe", f"{row.name} was given, beyond its published form: "
                        + "; ".join(row.recipe) + ".", caution=True)
            )  # fmt: skip
    for row in results.rows:
        if row.undertrained:
            found.append(
                Finding("Recipe", f"{row.name} is undertrained: {row.undertrained_reason}.", True)
            )
    return found


def _fairness(results: Results) -> list[Finding]:
    """Names every way in which the entries were not given the same."""
    found = []
    rows = results.rows
    sizes = [row.params for row in rows]
    if rows and max(sizes) > (1 + PARAMETER_TOLERANCE) * min(sizes):
        text = listed([f"{row.name} {short(row.params)}" for row in rows])
        found.append(
            Finding("Fairness", f"Parameters differ by more than 2 %: {text}.", caution=True)
        )
    budgets = {row.train_tokens for row in rows if row.train_tokens is not None}
    if len(budgets) > 1:
        text = listed(
            [
                f"{r.name} {short(r.train_tokens)} in {seconds(r.train_s)}"
                for r in rows
                if r.train_tokens
            ]
        )
        found.append(Finding("Fairness", f"Training tokens differ: {text}.", caution=True))
    for field, words in (("context_length", "context lengths"), ("dtype", "compute types")):
        if len({getattr(row, field) for row in rows}) > 1:
            text = listed([f"{row.name} {getattr(row, field)}" for row in rows])
            found.append(Finding("Fairness", f"The entries' {words} differ: {text}.", caution=True))
    partial = [
        f"{row.name} {row.likelihood.bytes:,}"
        for row in rows
        if row.likelihood and row.likelihood.bytes != results.data.test_bytes
    ]
    if partial:
        found.append(
            Finding(
                "Fairness",
                f"Not scored on all {results.data.test_bytes:,} bytes of the held-out text, so "
                f"compared with care: {listed(partial)}.",
                caution=True,
            )
        )
    return found


def findings(results: Results) -> list[Finding]:
    """Returns the statements of the summary, grouped by topic in reading order."""
    parts = (_quality, _floors, _speed, _calls, _state, _samples, _recipes, _fairness)
    return [finding for part in parts for finding in part(results)]
