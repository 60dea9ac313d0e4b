"""Writes docs/paradigms.md: the classic table with a comparison's figures, and what follows.

Every sentence with a figure is made from the results; where the figures do not bear a statement
out, the page says that instead.
"""

from pathlib import Path

import jinja2

from ..formatting import MISSING, byte_size, fixed, listed, seconds, short, significant
from ..plots import Plot
from ..results import Results, Row
from ..results_io import atomic_write
from ..tasks.records import TaskScore
from .figures import PROFILE_PLOTS, profiled, task_names
from .table import classic, farthest_level, trained_level

_TEMPLATES = Path(__file__).parents[1] / "templates"
LOGIC = ("chain_arithmetic", "parity", "star_graph")
RECALL = ("mqar", "needle", "induction", "copying", "selective_copying")
DRIFT = "constraint_drift"
TELL = 0.05  # shares of right answers closer than this are not told apart in prose


def write_document(results: Results, plots: list[Plot], path: Path) -> list[Path]:
    """Writes the page, and its pictures into a folder of the same name beside it.

    Args:
        results: of a comparison with profiles.
        plots: from `draw_plots`.
        path: of the Markdown page.

    Returns:
        The files written, the page first.

    Raises:
        GenlabError: a folder cannot be written.
    """
    folder = path.with_suffix("")
    written = [path]
    pictures = {}
    for plot in plots:
        if plot.name in PROFILE_PLOTS:
            target = folder / f"{plot.name.removeprefix('profile_')}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, plot.svg)
            pictures[plot.name] = (f"{folder.name}/{target.name}", plot.title, plot.caption)
            written.append(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, render_document(results, pictures))
    return written


def render_document(results: Results, pictures: dict[str, tuple[str, str, str]]) -> str:
    """Returns the page as Markdown."""
    table = classic(results)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown; names come from a validated configuration
    )
    flipped = [
        [column, *(line[at] for line in table.lines)]
        for at, column in enumerate(table.columns)
        if at
    ]
    return environment.get_template("paradigms.md.j2").render(
        results=results,
        families=[line[0] for line in table.lines],
        flipped=flipped,
        keys=list(zip(table.columns, table.keys, strict=True))[1:],
        pictures=pictures,
        sections=[
            ("Training", training_says(results)),
            ("Time to generate", growth_says(results)),
            ("State", state_says(results)),
            ("Strict logic", tasks_say(results, LOGIC)),
            ("Recall", tasks_say(results, RECALL)),
            ("Long windows", long_says(results)),
            ("Constraint drift", drift_says(results)),
        ],
        choices=[choice(results, row) for row in profiled(results)],
        diffusion=diffusion_says(results),
        machine=machine_of(results),
        seconds=seconds(sum(results.phases_s.values())),
    )


def machine_of(results: Results) -> str:
    """What is known of the machine and the versions, in words."""
    about = results.environment
    versions = about.get("versions") or {}
    known = [
        ("{}", about.get("processor")),
        ("{} cores", about.get("cpu_count")),
        ("Python {}", about.get("python")),
        ("JAX {}", versions.get("jax") if isinstance(versions, dict) else None),
    ]
    return ", ".join(text.format(value) for text, value in known if value)


def training_says(results: Results) -> list[str]:
    """Whether training works on all tokens at once."""
    found = [row for row in profiled(results) if row.profile.parallelism is not None]
    if not found:
        return []
    length = found[0].profile.parallelism.length
    parts = [f"{row.name} {row.profile.parallelism.factor:.0f}" for row in found]
    parallel = [row for row in found if row.profile.parallelism.factor > 2]
    says = [
        f"A forward pass over {length} tokens together is so many times faster than over "
        f"{length} tokens one by one: {listed(parts)}."
    ]
    if len(parallel) == len(found):
        says.append("So all of them train in parallel over the row, the recurrent ones included.")
    speeds = sorted(
        (row for row in found if row.train_tokens_per_s), key=lambda row: -row.train_tokens_per_s
    )
    if len(speeds) > 1:
        says.append(
            f"The fastest trainer is {speeds[0].name} with "
            f"{short(speeds[0].train_tokens_per_s)} tokens/s, the slowest {speeds[-1].name} with "
            f"{short(speeds[-1].train_tokens_per_s)}."
        )
    return says


def growth_says(results: Results) -> list[str]:
    """How the time of a generation grows."""
    says = []
    for row in profiled(results):
        found = row.profile.growth
        if found is None:
            continue
        first, last = found.points[0], found.points[-1]
        text = (
            f"**{row.name}**: {significant(first.time_ms)} ms for {first.new_tokens} tokens, "
            f"{significant(last.time_ms / 1e3)} s for {last.new_tokens:,}; exponent "
            f"{found.exponent:.2f} over all lengths, {found.exponent_tail:.2f} at the end; "
            f"{found.calls_per_token:.2f} calls per token."
        )
        if found.stopped:
            text += f" ({found.stopped}.)"
        says.append(text)
    return says


def state_matches(row: Row) -> bool | None:
    """Whether every measured state equals the formula to the byte; None without measurements."""
    found = row.profile.growth if row.profile is not None else None
    if found is None or row.state_bytes_fixed is None or row.state_bytes_per_token is None:
        return None
    if row.state_bytes_fixed == 0 and row.state_bytes_per_token == 0:
        return all(point.state_bytes == 0 for point in found.points)
    return all(
        point.state_bytes == row.state_bytes_at(found.prompt_length + point.new_tokens)
        for point in found.points
    )


def state_says(results: Results) -> list[str]:
    """What decoding holds, and whether the formula is exact."""
    says = []
    for row in profiled(results):
        match = state_matches(row)
        if match is None:
            continue
        if not row.state_bytes_fixed and not row.state_bytes_per_token:
            says.append(f"**{row.name}** keeps nothing between calls: each call reads the canvas.")
            continue
        per_token = row.state_bytes_per_token
        text = f"**{row.name}**: {byte_size(row.state_bytes_fixed)} fixed"
        if per_token:
            text += f" and {byte_size(per_token)} per token"
        text += f", {byte_size(row.state_bytes_at(65536))} at 64K tokens"
        text += (
            "; the arrays of every measured length have exactly the bytes of that formula."
            if match
            else "; the arrays measured do NOT have the bytes of that formula."
        )
        says.append(text)
    return says


def ranking(results: Results, name: str, *, far: bool) -> list[tuple[Row, TaskScore, float]]:
    """Rows with their share of right answers on a task, best first."""
    pick = farthest_level if far else trained_level
    scored = [
        (row, row.profile.tasks[name], pick(row.profile.tasks[name]).exact)
        for row in profiled(results)
        if name in row.profile.tasks
    ]
    return sorted((s for s in scored if s[2] is not None), key=lambda s: -s[2])


def tasks_say(results: Results, kinds: tuple[str, ...]) -> list[str]:
    """Scores of the tasks of some kinds: as trained, and beyond."""
    says = []
    for name in task_names(results):
        order = ranking(results, name, far=False)
        if not order or order[0][1].task not in kinds:
            continue
        score = order[0][1]
        level = trained_level(score)
        field = score.level_field.replace("_", " ")
        text = (
            f"**{name}** ({field} {level.level}, chance {_percent(level.chance)}"
            + (
                f", {score.shortcut_name}: {_percent(level.shortcut)}"
                if score.shortcut_name and level.shortcut is not None
                else ""
            )
            + "): "
            + listed([f"{row.name} {_percent(exact)}" for row, _, exact in order])
            + "."
        )
        far = farthest_level(score)
        if far is not level:
            text += (
                f" At {field} {far.level}, beyond training: "
                + listed(
                    [f"{row.name} {_percent(x)}" for row, _, x in ranking(results, name, far=True)]
                )
                + "."
            )
        says.append(text)
    return says


def long_says(results: Results) -> list[str]:
    """What longer windows do."""
    says = []
    for row in profiled(results):
        points = row.profile.long_context
        if len(points) < 2:
            continue
        first, last = points[0], points[-1]
        best = min(points, key=lambda point: point.bits_per_byte)
        change = last.bits_per_byte - first.bits_per_byte
        how = "falls" if change < -0.005 else "rises" if change > 0.005 else "stays"
        bound = " (a bound)" if row.is_bound else ""
        says.append(
            f"**{row.name}**{bound}: {fixed(first.bits_per_byte, 3)} bits per byte at "
            f"{first.length} tokens, as trained; {how} to {fixed(last.bits_per_byte, 3)} at "
            f"{last.length:,} ({last.multiple:g} times); best {fixed(best.bits_per_byte, 3)} at "
            f"{best.length:,}."
        )
    return says


def drift_says(results: Results) -> list[str]:
    """Whether an instruction at the start is still obeyed far from it."""
    says = []
    for name in task_names(results):
        scores = [
            (row, row.profile.tasks[name])
            for row in profiled(results)
            if name in row.profile.tasks and row.profile.tasks[name].task == DRIFT
        ]
        for row, score in scores:
            graded = [level for level in score.levels if level.exact is not None]
            if not graded:
                says.append(f"**{row.name}**: wrote no probe that could be graded.")
                continue
            steps = [f"{level.level}: {_percent(level.exact)}" for level in graded]
            says.append(
                f"**{row.name}**: obeyed by distance in tokens {', '.join(steps)} "
                f"(chance {_percent(graded[0].chance)})."
            )
    return says


def choice(results: Results, row: Row) -> tuple[str, str]:
    """When to take a family, by what it was best at here."""
    best = []
    names = {
        "quality": _lowest(results, row, lambda r: r.bits_per_byte),
        "training speed": _lowest(results, row, lambda r: _negative(r.train_tokens_per_s)),
        "speed at batch 1": _lowest(results, row, lambda r: _negative(r.tokens_per_s)),
        "memory at a long context": _lowest(
            results,
            row,
            lambda r: r.profile.memory.total_bytes if r.profile.memory is not None else None,
        ),
        "text in long windows": _lowest(
            results,
            row,
            lambda r: r.profile.long_context[-1].bits_per_byte if r.profile.long_context else None,
        ),
    }
    best += [what for what, is_best in names.items() if is_best]
    for name in task_names(results):
        order = ranking(results, name, far=False)
        if order and row.name in {r.name for r, _, x in order if x >= order[0][2] - TELL}:
            spread = order[0][2] - order[-1][2]
            if spread > TELL:  # a task that all solve alike recommends nobody
                best.append(name.replace("_", " "))
    worst = [
        name.replace("_", " ")
        for name in task_names(results)
        if (order := ranking(results, name, far=False))
        and order[-1][0].name == row.name
        and order[0][2] - order[-1][2] > TELL
    ]
    text = f"best or level with the best here in {listed(best)}" if best else "best here in nothing"
    if worst:
        text += f"; last in {listed(worst)}"
    return row.name, text + "."


def diffusion_says(results: Results) -> list[str]:
    """Whether diffusion can stand in for autoregression, by these figures."""
    rows = profiled(results)
    diffusion = [row for row in rows if row.paradigm == "masked_diffusion"]
    others = [row for row in rows if row.paradigm == "autoregressive"]
    if not diffusion or not others:
        return []
    says = []
    for row in diffusion:
        scored = [r for r in others if r.bits_per_byte is not None]
        best = min(scored, key=lambda r: r.bits_per_byte, default=None)
        behind = ahead = 0
        if best is not None and row.bits_per_byte is not None:
            gap = row.bits_per_byte - best.bits_per_byte
            like = min(
                (r for r in scored if r.family == "transformer"),
                key=lambda r: r.bits_per_byte,
                default=best,
            )
            says.append(
                f"Quality: its bound of {fixed(row.bits_per_byte, 3)} bits per byte is "
                f"{abs(gap):.3f} {'above' if gap > 0 else 'below'} {best.name}, the best "
                f"autoregressive entry, and {abs(row.bits_per_byte - like.bits_per_byte):.3f} "
                f"{'above' if row.bits_per_byte > like.bits_per_byte else 'below'} {like.name}."
            )
            behind, ahead = behind + (gap > 0), ahead + (gap <= 0)
        fast = max((r for r in others if r.tokens_per_s), key=lambda r: r.tokens_per_s)
        if row.tokens_per_s:
            ratio = fast.tokens_per_s / row.tokens_per_s
            says.append(
                f"Speed: at batch 1 and one call per token {fast.name} writes {ratio:.1f} times "
                f"as many tokens per second; with fewer calls diffusion gets faster and worse "
                f"(see the quality curve in the report)."
            )
            behind, ahead = behind + (ratio > 1), ahead + (ratio <= 1)
        growth = row.profile.growth
        if growth is not None:
            says.append(
                f"Length: its time grows as n^{growth.exponent_tail:.2f}, since each call reads "
                "the whole canvas, and it keeps no state that would spare that."
            )
        wins, losses = [], []
        for name in task_names(results):
            order = ranking(results, name, far=False)
            own = next((x for r, _, x in order if r.name == row.name), None)
            theirs = max((x for r, _, x in order if r.paradigm == "autoregressive"), default=None)
            if own is None or theirs is None:
                continue
            label = f"{name.replace('_', ' ')} ({_percent(own)} against {_percent(theirs)})"
            if own > theirs + TELL:
                wins.append(label)
            elif own < theirs - TELL:
                losses.append(label)
        if wins:
            says.append(f"It does better than every autoregressive entry in {listed(wins)}.")
        if losses:
            says.append(f"It does worse than the best of them in {listed(losses)}.")
        ahead, behind = ahead + bool(wins), behind + bool(losses)
        if behind and not ahead:
            says.append("So by these figures it cannot: it is behind in all that was measured.")
        elif behind:
            says.append(
                "So by these figures it cannot replace autoregression as the general choice today; "
                "it is a tool for the cases named above, where the order of generation matters."
            )
        else:
            says.append("By these figures it can.")
    return says


def _lowest(results: Results, row: Row, value: object) -> bool:
    found = [(value(r), r.name) for r in profiled(results)]
    known = [item for item in found if item[0] is not None]
    return bool(known) and len(known) > 1 and min(known)[1] == row.name


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"
