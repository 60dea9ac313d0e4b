"""The classic table of paradigms, every cell measured: as text cells, and for the terminal."""

from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..formatting import MISSING, byte_size, fixed, printable, short
from ..results import Results, Row
from ..tasks.records import LevelScore, TaskScore
from .figures import profiled, task_names


class Classic(NamedTuple):
    """The table.

    Attributes:
        columns: heading of each column.
        keys: what each column means, in plain words.
        lines: one per entry, text cells.
    """

    columns: list[str]
    keys: list[str]
    lines: list[list[str]]


def trained_level(score: TaskScore) -> LevelScore:
    """The hardest level that training rows have; the first graded one if none is."""
    trained = [level for level in score.levels if level.trained]
    return trained[-1] if trained else score.levels[0]


def farthest_level(score: TaskScore) -> LevelScore:
    """The last level graded."""
    return score.levels[-1]


def classic(results: Results) -> Classic:
    """Makes the table of the rows that have a profile."""
    columns = [
        "family", "parallel in training", "training tokens/s", "time to write n tokens",
        "calls per token", "state",
    ]  # fmt: skip
    keys = [
        "the entry of the comparison",
        "how many times faster a forward pass takes a row's tokens together than one by one",
        "tokens per second of training",
        "growth of a request's time with its length n at batch 1, over the last two lengths",
        "model calls per new token",
        "what decoding holds of one request, by the bytes of its arrays",
    ]
    tasks = task_names(results)
    for name in tasks:
        columns.append(name.replace("_", " "))
        keys.append(_task_key(results, name))
    if any(row.profile.long_context for row in profiled(results)):
        columns.append("long windows")
        keys.append(
            "bits per byte of the same held-out text in windows of the trained length, and in the "
            "longest ones"
        )
    lines = [_line(row, tasks, "long windows" in columns) for row in profiled(results)]
    return Classic(columns, keys, lines)


def _line(row: Row, tasks: list[str], long: bool) -> list[str]:
    profile = row.profile
    growth = profile.growth
    cells = [
        row.name,
        MISSING if profile.parallelism is None else f"{profile.parallelism.factor:.0f} x",
        short(row.train_tokens_per_s),
        MISSING if growth is None else f"n^{growth.exponent_tail:.2f}",
        MISSING if growth is None else fixed(growth.calls_per_token, 2),
        state_words(row),
    ]
    for name in tasks:
        score = profile.tasks.get(name)
        cells.append(MISSING if score is None else _score_cell(score))
    if long:
        points = profile.long_context
        bound = "≤ " if row.is_bound else ""
        cells.append(
            f"{bound}{points[0].bits_per_byte:.2f} → {bound}{points[-1].bits_per_byte:.2f}"
            if points
            else MISSING
        )
    return cells


def state_words(row: Row) -> str:
    """What the row's decoding holds, in words: none, fixed or growing."""
    if row.state_bytes_fixed is None or row.state_bytes_per_token is None:
        return MISSING
    if row.state_bytes_per_token:
        return f"grows {byte_size(row.state_bytes_per_token)} per token"
    return f"fixed {byte_size(row.state_bytes_fixed)}" if row.state_bytes_fixed else "none"


def _score_cell(score: TaskScore) -> str:
    trained, farthest = trained_level(score), farthest_level(score)
    text = _percent(trained.exact)
    return text if farthest is trained else f"{text} → {_percent(farthest.exact)}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"


def _task_key(results: Results, name: str) -> str:
    score = next(r.profile.tasks[name] for r in profiled(results) if name in r.profile.tasks)
    trained, farthest = trained_level(score), farthest_level(score)
    field = score.level_field.replace("_", " ")
    text = f"right answers of {score.task.replace('_', ' ')} at {field} {trained.level} as trained"
    if farthest is not trained:
        text += f", and at {farthest.level}"
    return text + f"; by chance {_percent(trained.chance)}"


def classic_table(results: Results) -> Table:
    """The table for the terminal: one column per entry, so that it fits."""
    found = classic(results)
    table = Table(
        title=Text("The paradigms, measured"), box=SIMPLE_HEAD, padding=(0, 1),
        title_justify="left",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for line in found.lines:
        table.add_column(Text(printable(line[0])), justify="right", overflow="fold")
    for at, column in enumerate(found.columns[1:], start=1):
        table.add_row(Text(column), *(Text(printable(line[at])) for line in found.lines))
    return table
