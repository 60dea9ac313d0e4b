"""The curve of constraint drift: obedience by distance from the instruction."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...paradigms.interface import SpecialIds
from ...paradigms.model import Model
from ...train.data.synthetic.constraint_drift import STEP_ON, ConstraintDriftConfig
from .answers import answer, wilson, with_room
from .records import LevelScore


def default_distances(length: int) -> tuple[int, ...]:
    """A quarter, a half, one, two and four times the training length."""
    return tuple(dict.fromkeys(max(2, length * n // 4) for n in (1, 2, 4, 8, 16)))


def obeyed(
    task: ConstraintDriftConfig, rules: NDArray[np.integer], streams: NDArray[np.integer]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Grades streams of symbols.

    Args:
        task: the task.
        rules: integers [n], the instruction of each stream.
        streams: integers [n L], without the instruction.

    Returns:
        two bool [n L]: where a symbol follows a probe, and where it is then the rule's mark. Column
        j is at distance j + 1 from the instruction.
    """
    asked = np.zeros(streams.shape, bool)
    asked[:, 1:] = streams[:, :-1] == task.probe
    return asked, asked & (streams == task.num_rules + rules[:, None])


def drift_levels(
    model: Model,
    decoding: Any,
    task: ConstraintDriftConfig,
    specials: SpecialIds,
    *,
    levels: Sequence[int],
    streams: int,
    temperature: float,
    split: str,
    seed: int,
    batch_size: int,
    steps_per_token: float,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[LevelScore], dict[str, float]]:
    """Draws streams as long as the largest distance; see `score_task`.

    Probes of one stream are not independent: the interval counts streams, not probes.

    Returns:
        a score for each distance, and what the streams look like beside the task's law.

    Raises:
        ConfigError: distances that do not increase from 2 on.
    """
    distances = tuple(levels) or default_distances(task.length)
    if list(distances) != sorted(set(distances)) or distances[0] < 2:
        raise ConfigError(f"levels: got {list(distances)}, want increasing distances from 2 on")
    longest = task.at_level(max(4, distances[-1]))
    rules = np.arange(streams) % task.num_rules
    if progress is not None:
        progress(0, 1)
    given = answer(
        with_room(model, longest.context_length),
        decoding,
        specials,
        rules[:, None],
        new_tokens=longest.length,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
        steps_per_token=steps_per_token,
    )
    asked, right = obeyed(task, rules, given.symbols)
    law = longest.rows(split=split, indices=np.arange(min(streams, 64)), seed=seed).symbols
    law_asked, law_right = obeyed(task, law[:, 0], law[:, 1:])
    scores, before = [], 0
    for distance in distances:
        part = slice(before, distance)
        probes, hits = int(asked[:, part].sum()), int(right[:, part].sum())
        independent = int(asked[:, part].any(axis=1).sum())
        share = hits / probes if probes else None
        law_probes = int(law_asked[:, part].sum())
        scores.append(
            LevelScore(
                level=distance,
                row_tokens=2 + distance,
                trained=distance <= task.length,
                examples=probes,
                exact=share,
                exact_ci95=None if share is None else wilson(share * independent, independent),
                token_accuracy=None,
                chance=task.chance,
                shortcut=None,
                solver=int(law_right[:, part].sum()) / law_probes if law_probes else None,
                nfe=given.nfe,
            )
        )
        before = distance
    if progress is not None:
        progress(1, 1)
    return scores, _looks(task, given.symbols, asked)


def _looks(
    task: ConstraintDriftConfig, streams: NDArray[np.integer], asked: NDArray[np.bool_]
) -> dict[str, float]:
    """Probes, marks that nothing asked for, and steps of the chain: written, and by the law.

    A model that writes no probe obeys every one: these figures show it.
    """
    state = (streams >= task.first_state) & (streams < task.probe)
    pairs = state[:, 1:] & state[:, :-1]
    steps = (streams[:, 1:] - streams[:, :-1]) % task.num_states == 1 % task.num_states
    marks = (streams >= task.num_rules) & (streams < task.first_state)
    rate = task.probe_rate
    looks = {
        "probes_per_token": float((streams == task.probe).mean()),
        "probes_per_token_law": rate / (1 + rate),
        "unasked_marks_per_token": float((marks & ~asked).mean()),
        "next_state_rate_law": STEP_ON + (1 - STEP_ON) / task.num_states,
    }
    if pairs.any():
        looks["next_state_rate"] = float(steps[pairs].mean())
    return looks
