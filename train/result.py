"""What a finished run is."""

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..paradigms.model import Model
from .checkpoint import Best
from .config import RunConfig
from .metrics import read_records
from .run_folder import METRICS, load_run


class TrainResult(NamedTuple):
    """A finished run.

    Attributes:
        model: float32 parameters: averaged where the run keeps an average, the best evaluated
            ones where it selects, else the last.
        config: resolved, vocabulary size included.
        folder: of the run.
        step: updates behind `model`.
        tokens: pushed through the model in the whole run.
        flops: spent on them by the model's cost.
        train_s: seconds of training, without compiling, evaluating and saving.
        compile_s: seconds of compiling the update, all sessions together.
        tokens_per_s: by the median update.
        peak_memory_bytes: of the update.
        peak_memory_reason: how it was obtained, or why it is None.
        best: the best evaluation, where the run selects.
        history: the lines of metrics.jsonl (`genlab.train.metrics.Record`).
    """

    model: Model
    config: RunConfig
    folder: Path
    step: int
    tokens: int
    flops: float
    train_s: float
    compile_s: float
    tokens_per_s: float
    peak_memory_bytes: int | None
    peak_memory_reason: str | None
    best: Best | None
    history: list[dict[str, Any]]

    def curve(self) -> list[dict[str, Any]]:
        """The training curve: step, tokens, flops, wall_s, loss, bits_per_byte_validation."""
        return [
            {
                **{key: line[key] for key in ("step", "tokens", "flops", "wall_s", "loss")},
                "bits_per_byte_validation": line["validation_bits_per_byte"],
            }
            for line in self.history
        ]


def load_result(folder: Path) -> TrainResult:
    """Loads a finished run.

    Raises:
        CheckpointError: it is not finished, or damaged.
    """
    run = load_run(folder)
    if run.result is None:
        raise CheckpointError(f"{folder}: is not finished")
    best = run.result["best"]
    figures = {key: run.result[key] for key in _RESULT_KEYS}
    return TrainResult(
        model=run.model,
        config=run.config,
        folder=folder,
        best=None if best is None else Best(**best),
        history=read_records(folder / METRICS),
        **figures,
    )


_RESULT_KEYS = (
    "step", "tokens", "flops", "train_s", "compile_s", "tokens_per_s", "peak_memory_bytes",
    "peak_memory_reason",
)  # fmt: skip
