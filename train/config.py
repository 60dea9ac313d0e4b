"""The configuration of a training run."""

import hashlib
from typing import Any, Literal

from pydantic import Field, model_validator

from ..errors import ConfigError
from ..paradigms.backbone import ModelConfig
from ..paradigms.config import Config
from ..paradigms.paradigm_registry import ParadigmConfig
from .data.pipeline import DataConfig
from .optimizer import OptimizerConfig
from .schedule import CosineConfig, ScheduleConfig
from .sinks import WandbConfig


class ProfileConfig(Config):
    """A trace of some updates, for TensorBoard's or Perfetto's profile view.

    Attributes:
        start: the first update to trace.
        updates: how many.
    """

    start: int = Field(default=10, ge=1)
    updates: int = Field(default=5, ge=1)


class TrainingConfig(Config):
    """How a model is trained. An update is one step of the optimizer.

    Attributes:
        tokens: budget: tokens pushed through the model, rows times T per update, rounded up to
            whole updates.
        optimizer: from gradients to updates.
        schedule: learning rate over the run.
        accumulate: micro-batches per update; divides data.batch_size. Changes memory, not the
            objective: sums are divided once.
        ema_decay: the result is an exponential moving average of the parameters with this decay
            (less at the start of a run); null for the last ones.
        compute_dtype: of activations; parameters and optimizer stay float32.
        remat: recompute layers in the backward pass instead of keeping their activations.
        evaluate_every: updates between evaluations on the validation split; null for never. The
            last update is always followed by one then.
        evaluate_windows: windows of the validation split to score, evenly spaced; null for all.
        select_best: the result is the evaluated state with the lowest held-out loss instead of
            the last one.
        sample_every: updates between short samples, written to samples.jsonl; null for never.
        checkpoint_every: updates between checkpoints; there is always one after the last update.
        keep: newest checkpoints that are kept; the best one is kept beside them.
        log_every: updates per line of metrics.jsonl, which holds means over them.
        tensorboard: write metrics for TensorBoard as well.
        wandb: write them for Weights & Biases as well; null for not.
        profile: null for no trace.
    """

    tokens: int = Field(ge=1)
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = CosineConfig()
    accumulate: int = Field(default=1, ge=1)
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    evaluate_every: int | None = Field(default=None, ge=1)
    evaluate_windows: int | None = Field(default=32, ge=1)
    select_best: bool = False
    sample_every: int | None = Field(default=None, ge=1)
    checkpoint_every: int = Field(default=200, ge=1)
    keep: int = Field(default=2, ge=1)
    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = True
    wandb: WandbConfig | None = None
    profile: ProfileConfig | None = None

    @model_validator(mode="after")
    def _best_is_measured(self) -> "TrainingConfig":
        if self.select_best and self.evaluate_every is None:
            raise ValueError("select_best=true needs evaluate_every, which is null")
        return self


class RunConfig(Config):
    """A training run: everything that its result depends on.

    Attributes:
        model: the backbone.
        paradigm: what is learnt.
        data: what from.
        training: how.
        seed: of the initial parameters, dropout and the paradigm's noise (data.seed orders rows).
    """

    model: ModelConfig
    paradigm: ParadigmConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig
    seed: int = Field(default=0, ge=0, lt=1 << 32)

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        if self.model.max_len < self.data.context_length:
            raise ValueError(
                f"model.max_len={self.model.max_len} is less than "
                f"data.context_length={self.data.context_length}"
            )
        if self.data.batch_size % self.training.accumulate:
            raise ValueError(
                f"training.accumulate={self.training.accumulate} does not divide "
                f"data.batch_size={self.data.batch_size}"
            )
        return self

    @property
    def tokens_per_update(self) -> int:
        """Tokens pushed through the model per update."""
        return self.data.batch_size * self.data.context_length

    @property
    def updates(self) -> int:
        """Updates in the whole run."""
        return -(-self.training.tokens // self.tokens_per_update)

    def with_vocab_size(self, vocab_size: int) -> "RunConfig":
        """The same with `model.vocab_size` filled in from the tokenizer.

        Raises:
            ConfigError: it was set to another value.
        """
        given = self.model.vocab_size
        if given is not None and given != vocab_size:
            raise ConfigError(
                f"model.vocab_size: got {given}, but the tokenizer has {vocab_size} ids; leave it "
                "out, or set model.pad_vocab_to for a larger embedding"
            )
        model = self.model.model_copy(update={"vocab_size": vocab_size})
        return self.model_copy(update={"model": model})


def plain(config: Config) -> dict[str, Any]:
    """All fields, defaults included, as plain values."""
    return config.model_dump(mode="json")


def config_hash(config: Config) -> str:
    """Twelve hex digits: equal for equal configs."""
    return hashlib.sha256(config.canonical_json.encode()).hexdigest()[:12]


def first_difference(mine: Any, theirs: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first dotted key at which two trees of plain values differ, and both values.

    A key that only one of them has counts as null in the other.
    """
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys((*mine, *theirs)):
            dotted = f"{path}.{key}" if path else key
            found = first_difference(mine.get(key), theirs.get(key), dotted)
            if found is not None:
                return found
        return None
    # 1 and 1.0 are written differently, but are one value; true is not 1.
    same = mine == theirs and isinstance(mine, bool) == isinstance(theirs, bool)
    return None if same else (path, mine, theirs)
