"""What a score on a task says."""

from pydantic import Field, JsonValue

from ..record import Interval, Record


class LevelScore(Record):
    """Answers at one level.

    Attributes:
        level: the value of the task's level field; for constraint drift the distance from the
            instruction up to which probes are counted, from the level before it on.
        row_tokens: tokens of prompt and answer together, BOS included.
        trained: the task's training rows have this level.
        examples: answers graded; for constraint drift, probes.
        exact: share that is right to the last graded symbol; None where there was nothing to grade.
        exact_ci95: Wilson interval of `exact`.
        token_accuracy: share of right symbols; None where only whole answers are graded.
        chance: `exact` of answers drawn at random from the symbols that answers are made of.
        shortcut: `exact` of the best known strategy that does not solve the task, or None.
        solver: `exact` of the task's own solver, measured on the same examples.
        nfe: model calls per answer.
    """

    level: int
    row_tokens: int
    trained: bool
    examples: int = Field(ge=0)
    exact: float | None = Field(ge=0, le=1)
    exact_ci95: Interval | None
    token_accuracy: float | None = Field(ge=0, le=1)
    chance: float
    shortcut: float | None
    solver: float | None
    nfe: float


class TaskScore(Record):
    """How a trained model does on a task.

    Attributes:
        task: registered name.
        level_field: what a level is.
        levels: in the order asked for.
        shortcut_name: what `LevelScore.shortcut` does, or None.
        split: of the examples; training sees other ones.
        seed: of the examples; of the draws too where `temperature` is not 0.
        temperature: 0 for the most probable answer.
        decoding: registered name.
        decoding_options: its settings.
        steps_per_token: model calls per answer symbol, for decodings that take a number; else None.
        source: the task's settings.
        details: figures of this task alone, by name.
    """

    task: str
    level_field: str
    levels: list[LevelScore]
    shortcut_name: str | None
    split: str
    seed: int
    temperature: float
    decoding: str
    decoding_options: dict[str, JsonValue]
    steps_per_token: float | None
    source: dict[str, JsonValue]
    details: dict[str, float] = Field(default_factory=dict)
