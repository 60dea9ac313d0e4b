"""Three questions that people bring to a comparison, answered from its figures alone.

What is fastest at batch 1 with a long prompt, what fits in the least memory at a long context, and
what is best per training FLOP. An answer says what it rests on, and what was not measured.
"""

import itertools
import math
from typing import NamedTuple

from .formatting import byte_size, fixed, listed, short, significant
from .results import LatencyRecord, Results, Row

LONG_PROMPT = 4096  # tokens
LONG_CONTEXT = 65536  # tokens
CLOSE = 0.10  # speeds that differ by less are not told apart


class Answer(NamedTuple):
    """A question, its answer in a sentence or two, and the figures behind it.

    Attributes:
        question: as a newcomer asks it.
        answer: names entries and figures.
        columns: headings of the table.
        lines: one per entry, best first.
        caution: what limits the answer, "" for nothing.
    """

    question: str
    answer: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    caution: str = ""


def answers(results: Results) -> list[Answer]:
    """The questions that the results can answer."""
    found = [fastest(results), smallest(results), most_per_flop(results)]
    return [answer for answer in found if answer is not None]


def fastest(results: Results) -> Answer | None:
    """Which entry answers first and writes fastest at batch 1 behind the longest prompt."""
    shared = _longest_prompt(results)
    if shared is None:
        return None
    timed = []
    for row in results.rows:
        record = _record(row, shared)
        if record is not None:
            total_ms = 1e3 * record.new_tokens / record.tokens_per_s
            timed.append((total_ms, row, record))
    timed.sort(key=lambda item: item[0])
    total_ms, best, record = timed[0]
    close = [row.name for ms, row, _ in timed[1:] if ms <= total_ms * (1 + CLOSE)]
    text = (
        f"{best.name}: prompt of {shared:,} and {record.new_tokens} new tokens in "
        f"{significant(total_ms)} ms, the first token after {significant(record.ttft_ms)} ms"
        + (f"; {listed(close)} within 10 % of it, which this does not tell apart" if close else "")
        + "."
    )
    if len(timed) > 1 and not close:
        ratio = timed[1][0] / total_ms
        text += f" The next, {timed[1][1].name}, takes {ratio:.2f} times as long."
    decode = min(
        (item for item in timed if item[2].step_ms_p50 is not None and _one_by_one(item[2])),
        key=lambda item: item[2].step_ms_p50,
        default=None,
    )
    if decode is not None:
        text += (
            f" Once the prompt is read, {decode[1].name} takes the least time per token: "
            f"{significant(decode[2].step_ms_p50)} ms."
        )
    caution = ""
    if shared < LONG_PROMPT:
        caution = (
            f"The longest prompt measured here has {shared:,} tokens, not {LONG_PROMPT:,}: growth "
            "with length is in configs/compare/paradigms.yaml."
        )
    lines = [
        (
            row.name,
            significant(record.ttft_ms),
            significant(record.step_ms_p50),
            significant(ms),
            short(record.tokens_per_s),
        )
        for ms, row, record in timed
    ]
    columns = ("entry", "first token ms", "one call ms", "whole request ms", "tokens/s")
    question = f"What is fastest at batch 1 with a prompt of {shared:,} tokens?"
    return Answer(question, text, columns, lines, caution)


def smallest(results: Results) -> Answer | None:
    """Which entry needs the least memory for one request at a long context."""
    held = []
    for row in results.rows:
        memory = row.profile.memory if row.profile is not None else None
        if memory is not None:
            held.append((memory.total_bytes, row, memory.weight_bytes, memory.state_bytes,
                         memory.working_bytes, memory.context))  # fmt: skip
            continue
        state = row.state_bytes_at(LONG_CONTEXT)
        keeps_nothing = row.state_bytes_fixed == 0 and not row.state_bytes_per_token
        if state is None or keeps_nothing:
            continue  # without its working memory a canvas would look free
        weights = row.params * (2 if row.dtype == "bfloat16" else 4)
        held.append((weights + state, row, weights, state, None, LONG_CONTEXT))
    if not held:
        return None
    held.sort(key=lambda item: item[0])
    total, best, weights, state, _, context = held[0]
    text = (
        f"{best.name}: {byte_size(total)} for one request at {context:,} tokens, of which "
        f"{byte_size(weights)} are weights and {byte_size(state)} state."
    )
    if len(held) > 1:
        last = held[-1]
        text += f" The most, {last[1].name}, takes {byte_size(last[0])}."
    left_out = [r.name for r in results.rows if r.name not in {h[1].name for h in held}]
    caution = "By the compiler's account of one call; nothing of this length was run."
    if left_out:
        caution += (
            f" Left out: {listed(left_out)}, which keeps no state but works on the whole canvas in "
            "each call; that memory was not accounted for here."
        )
    lines = [
        (
            row.name,
            byte_size(weights),
            byte_size(state),
            byte_size(working),
            byte_size(total),
        )
        for total, row, weights, state, working, _ in held
    ]
    columns = ("entry", "weights", "state", "working memory of a call", "together")
    question = f"What fits in the least memory at {context:,} tokens?"
    return Answer(question, text, columns, lines, caution)


def most_per_flop(results: Results) -> Answer | None:
    """Which entry has the lowest held-out loss at equal training FLOPs."""
    curves = {}
    for row in results.rows:
        points = [
            (point.flops, point.bits_per_byte_validation)
            for point in row.training_curve
            if point.bits_per_byte_validation is not None and point.flops > 0
        ]
        if points:
            curves[row.name] = sorted(points)
    if len(curves) < 2:
        return None
    budget = min(points[-1][0] for points in curves.values())
    scored = []
    for row in results.rows:
        value = at_flops(curves.get(row.name, []), budget)
        if value is not None:
            scored.append((value, row))
    if len(scored) < 2:
        return None
    scored.sort(key=lambda item: item[0])
    value, best = scored[0]
    text = (
        f"{best.name}: {fixed(value, 3)} bits per byte of validation text at {short(budget)}FLOP, "
        f"the most that every entry has spent; last {scored[-1][1].name} with "
        f"{fixed(scored[-1][0], 3)}."
    )
    bounds = [row.name for _, row in scored if row.is_bound]
    caution = "One seed and small models: a statement about this budget."
    if bounds:
        caution += f" Values of {listed(bounds)} are upper bounds."
    lines = [
        (row.name, fixed(value, 3), short(row.train_flops), fixed(row.bits_per_byte, 3))
        for value, row in scored
    ]
    columns = (
        "entry", "bits per byte at equal FLOP", "FLOP of its whole run", "test text, whole run",
    )  # fmt: skip
    return Answer("What is best per training FLOP?", text, columns, lines, caution)


def at_flops(points: list[tuple[float, float]], budget: float) -> float | None:
    """The loss of a training curve at a budget: linear in log FLOPs between its points.

    Args:
        points: (FLOPs, loss), by FLOPs.
        budget: FLOPs; None is returned when the curve begins or ends on one side of it.
    """
    if not points or not points[0][0] <= budget <= points[-1][0] * (1 + 1e-9):
        return None
    for (f0, v0), (f1, v1) in itertools.pairwise(points):
        if f0 <= budget <= f1:
            share = math.log(budget / f0) / math.log(f1 / f0) if f1 > f0 else 0.0
            return v0 + share * (v1 - v0)
    return points[-1][1]


def _longest_prompt(results: Results) -> int | None:
    """The longest prompt that every entry with latencies was measured at, batch 1."""
    lengths = [
        {r.prompt_length for r in row.latency if r.batch == 1}
        for row in results.rows
        if row.latency
    ]
    common = set.intersection(*lengths) if lengths else set()
    return max(common, default=None)


def _record(row: Row, prompt_length: int) -> LatencyRecord | None:
    for record in row.latency:
        if record.batch == 1 and record.prompt_length == prompt_length:
            return record
    return None


def _one_by_one(record: LatencyRecord) -> bool:
    """True where a call gives one token, which then stays."""
    return record.tokens_per_call <= 1.01 and record.new_tokens > 1
