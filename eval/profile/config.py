"""What the profile of every entry consists of."""

from typing import Any

from pydantic import Field, field_validator, model_validator

from ...paradigms.config import Config
from ...train.config import RunConfig
from ...train.yaml_loader import merge
from ..tasks.config import TaskScoreConfig, task_run


class GrowthConfig(Config):
    """How generation grows with length; see `genlab.eval.profile.growth.measure_growth`.

    Attributes:
        lengths: new tokens per request, increasing.
        prompt_length: tokens of the prompt, BOS included.
        repeats: timed requests per length.
        budget_s: lengths whose request would take longer are left out.
    """

    lengths: tuple[int, ...] = Field(default=(64, 128, 256, 512, 1024, 2048), min_length=2)
    prompt_length: int = Field(default=32, ge=1)
    repeats: int = Field(default=3, ge=1)
    budget_s: float = Field(default=20.0, gt=0.0)

    @field_validator("lengths")
    @classmethod
    def _increasing(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or value[0] < 1:
            raise ValueError(f"want increasing positive numbers, got {list(value)}")
        return value


class LongContextConfig(Config):
    """Likelihood at lengths beyond training; see `measure_long_context`.

    Attributes:
        multiples: of the context length trained at, increasing, each a divisor of the last.
        stretches: pieces of held-out text, each as long as the longest window.
        seed: of the draws of bounds.
    """

    multiples: tuple[int, ...] = Field(default=(1, 2, 4, 8, 16), min_length=1)
    stretches: int = Field(default=4, ge=1)
    seed: int = 0

    @field_validator("multiples")
    @classmethod
    def _divide(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or value[0] < 1:
            raise ValueError(f"want increasing positive numbers, got {list(value)}")
        for multiple in value:
            if value[-1] % multiple:
                raise ValueError(f"{multiple} is no divisor of the largest, {value[-1]}")
        return value


class ProfileConfig(Config):
    """The measurements behind the classic table of paradigms.

    Attributes:
        parallel_length: tokens of the forward pass whose parallelism is measured; null for none.
        growth: of generation with length; null for none.
        long_context: likelihood beyond the length trained at; null for none.
        memory_context: tokens of the request whose memory is accounted for; null for none.
        tasks: synthetic tasks by the name that the table gives them; every entry trains a model on
            each and is graded.
    """

    parallel_length: int | None = Field(default=256, ge=2)
    growth: GrowthConfig | None = GrowthConfig()
    long_context: LongContextConfig | None = LongContextConfig()
    memory_context: int | None = Field(default=65536, ge=2)
    tasks: dict[str, TaskScoreConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_are_folders(self) -> "ProfileConfig":
        for name in self.tasks:
            if not name.replace("_", "").isalnum():
                raise ValueError(f"tasks: {name!r} must be letters, digits and underscores")
        return self


def entry_task(
    run: RunConfig, task: TaskScoreConfig, own: dict[str, Any], place: str
) -> tuple[TaskScoreConfig, RunConfig]:
    """A task with an entry's own changes, and the run that it needs.

    Args:
        run: the entry's.
        task: from the profile.
        own: the entry's changes of `task.run`.
        place: named in messages.

    Raises:
        ConfigError: the keys do not fit; see `task_run`.
    """
    changed = task.model_copy(update={"run": merge(task.run, own)})
    return changed, task_run(run, changed, place)
