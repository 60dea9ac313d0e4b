"""Grades a trained model on a synthetic task, level by level."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...paradigms.interface import SpecialIds
from ...paradigms.model import Model
from ...train.data.synthetic.constraint_drift import ConstraintDriftConfig
from ...train.data.synthetic.task import SyntheticTask
from .answers import answer, wilson, with_room
from .drift import drift_levels
from .records import LevelScore, TaskScore

Progress = Callable[[int, int], None]
DRIFT_TEMPERATURE = 1.0


def score_task(
    model: Model,
    decoding: Any,
    task: SyntheticTask,
    specials: SpecialIds,
    *,
    levels: Sequence[int] = (),
    examples: int = 256,
    seed: int = 0,
    batch_size: int = 64,
    steps_per_token: float = 1.0,
    split: str = "test",
    progress: Progress | None = None,
) -> TaskScore:
    """Lets a model answer and grades what it wrote: the same for every paradigm and decoding.

    The prompt is given, the answer generated at temperature 0, and compared with the solver's.
    Constraint drift is different: whole streams are drawn at temperature 1, and the marks behind
    their probes are graded by distance from the instruction.

    Rows may be longer than any that the model was made for: its parameters do not depend on
    `max_len`, which is raised as needed.

    Args:
        model: ready to compute (see `Model.prepare`), trained on `task`.
        decoding: built for the model's paradigm.
        task: what it was trained on.
        specials: of the run's tokenizer.
        levels: to grade at; the task's own when empty. For constraint drift: increasing distances
            (a quarter to four times the training length when empty).
        examples: answers per level; for constraint drift, streams.
        seed: of the examples.
        batch_size: rows per call.
        steps_per_token: model calls per answer symbol, for decodings that take a number of them.
        split: of the examples.
        progress: called as progress(done, levels).

    Raises:
        ConfigError: no such level, a number out of range, or a model of another vocabulary.
        DataError: a level has too few different examples for the split.
    """
    for name, value in (("examples", examples), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}, want at least 1")
    if not steps_per_token > 0:
        raise ConfigError(f"steps_per_token: got {steps_per_token}, want more than 0")
    settings = {
        "batch_size": min(batch_size, examples),
        "seed": seed,
        "steps_per_token": steps_per_token,
    }
    is_drift = isinstance(task, ConstraintDriftConfig)
    details: dict[str, float] = {}
    if is_drift:
        scores, details = drift_levels(
            model, decoding, task, specials, levels=levels, streams=examples,
            temperature=DRIFT_TEMPERATURE, split=split, progress=progress, **settings,
        )  # fmt: skip
    else:
        scores = []
        at_levels = [task.at_level(level).as_examples() for level in levels or (task.level,)]
        for done, at_level in enumerate(at_levels):
            if progress is not None:
                progress(done, len(at_levels))
            scores.append(
                _score_level(model, decoding, task, at_level, specials, examples, split, settings)
            )
        if progress is not None:
            progress(len(at_levels), len(at_levels))
    shortcut = task.shortcut
    return TaskScore(
        task=task.name,
        level_field="distance" if is_drift else task.level_field,
        levels=scores,
        shortcut_name=None if shortcut is None else shortcut.name,
        split=split,
        seed=seed,
        temperature=DRIFT_TEMPERATURE if is_drift else 0.0,
        decoding=decoding.name,
        decoding_options=decoding.options(),
        steps_per_token=steps_per_token if decoding.uses_steps else None,
        source=task.model_dump(mode="json"),
        details=details,
    )


def _score_level(
    model: Model,
    decoding: Any,
    task: SyntheticTask,
    at_level: SyntheticTask,
    specials: SpecialIds,
    examples: int,
    split: str,
    settings: dict[str, Any],
) -> LevelScore:
    drawn = at_level.examples(split=split, indices=np.arange(examples), seed=settings["seed"])
    wanted = np.stack([at_level.solve(prompt) for prompt in drawn.prompts])
    given = answer(
        with_room(model, at_level.context_length),
        decoding,
        specials,
        drawn.prompts,
        new_tokens=at_level.answer_length,
        temperature=0.0,
        **settings,
    )
    graded = slice(at_level.answer_length - at_level.graded, None)
    right = given.symbols == drawn.answers
    exact = right[:, graded].all(axis=1)
    shortcut = at_level.shortcut
    return LevelScore(
        level=at_level.level,
        row_tokens=at_level.context_length,
        trained=(task.min_level or task.level) <= at_level.level <= task.level,
        examples=examples,
        exact=float(exact.mean()),
        exact_ci95=wilson(int(exact.sum()), examples),
        token_accuracy=float(right.mean()),
        chance=at_level.chance,
        shortcut=None if shortcut is None else shortcut.exact,
        solver=float((wanted == drawn.answers)[:, graded].all(axis=1).mean()),
        nfe=given.nfe,
    )
