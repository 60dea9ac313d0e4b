"""A score on a task from YAML, and the run that is trained for it."""

from typing import Any

from pydantic import Field, field_validator

from ...errors import ConfigError
from ...paradigms.config import Config
from ...paradigms.interface import SpecialIds
from ...paradigms.model import Model
from ...train.config import RunConfig, plain
from ...train.data.synthetic.registry import SyntheticTaskConfig
from ...train.yaml_loader import merge, validate
from .records import TaskScore
from .score import Progress, score_task

RESERVED = ("model.vocab_size", "data.source", "data.tokenizer")


class TaskScoreConfig(Config):
    """What is trained for, and graded at.

    Attributes:
        source: the task.
        levels: to grade at; empty for the task's own (see `score_task`).
        examples: answers per level.
        seed: of the examples.
        batch_size: answers per call.
        steps_per_token: model calls per answer symbol, for decodings that take a number of them.
        run: keys of the training run that differ on this task, such as training.tokens.
    """

    source: SyntheticTaskConfig
    levels: tuple[int, ...] = ()
    examples: int = Field(default=256, ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    batch_size: int = Field(default=64, ge=1)
    steps_per_token: float = Field(default=1.0, gt=0.0)
    run: dict[str, Any] = Field(default_factory=dict)

    @field_validator("levels")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(level < 1 for level in value):
            raise ValueError(f"want levels of at least 1, got {list(value)}")
        return value


def task_run(run: RunConfig, config: TaskScoreConfig, place: str = "task") -> RunConfig:
    """The training run that an entry makes for a task.

    Model, paradigm and training stay the entry's; data are the task's, and rows are just as long
    as it needs. `config.run` is laid over that.

    Args:
        run: the entry's.
        config: the task's.
        place: named in messages.

    Raises:
        ConfigError: a key of `config.run` is unknown, does not fit, or is the task's own business.
    """
    for key in RESERVED:
        node: Any = config.run
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            raise ConfigError(f"{place}: run.{key} is set by the task, leave it out")
    length = config.source.context_length
    raw = plain(run)
    raw = merge(
        raw,
        {
            "model": {"vocab_size": None, "max_len": max(length, run.model.max_len)},
            "data": {"context_length": length},
        },
    )
    raw["data"]["source"] = plain(config.source)
    raw["data"]["tokenizer"] = {"name": "symbols"}
    merged = merge(raw, config.run)
    pattern = config.run.get("model", {}).get("pattern")
    if pattern is not None:
        # A task may do with fewer kinds of layers than the entry has.
        layers = merged["model"]["layers"]
        merged["model"]["layers"] = {k: v for k, v in layers.items() if k in pattern}
    return validate(RunConfig, merged, f"{place}: run")


def score_from_config(
    model: Model,
    decoding: Any,
    specials: SpecialIds,
    config: TaskScoreConfig,
    progress: Progress | None = None,
) -> TaskScore:
    """`score_task` with the settings of a config."""
    return score_task(
        model,
        decoding,
        config.source,
        specials,
        levels=config.levels,
        examples=config.examples,
        seed=config.seed,
        batch_size=config.batch_size,
        steps_per_token=config.steps_per_token,
        progress=progress,
    )
