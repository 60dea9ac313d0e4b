"""Held-out loss during training."""

from ..errors import ConfigError, DataError
from ..paradigms.interface import Paradigm
from ..paradigms.model import Model
from .config import RunConfig
from .data.pipeline import Data
from .data.windows import EvaluationWindows
from .likelihood import score_windows


def validation_windows(config: RunConfig, data: Data) -> EvaluationWindows | None:
    """The windows that the run is evaluated on; None when it is not.

    Raises:
        ConfigError: evaluation is asked for and the validation split is empty.
    """
    if config.training.evaluate_every is None:
        return None
    try:
        return data.evaluation_windows(
            "validation", max_windows=config.training.evaluate_windows
        )
    except DataError as error:
        raise ConfigError(
            f"training.evaluate_every={config.training.evaluate_every} needs a validation split: "
            f"{error}"
        ) from None


def validation_bits_per_byte(
    config: RunConfig, model: Model, paradigm: Paradigm, windows: EvaluationWindows
) -> float:
    """Bits per byte of the windows, or its bound; the draws of a bound are the same each time.

    Args:
        config: the run's.
        model: float32 parameters.
        paradigm: has the likelihood.
        windows: from `validation_windows`.

    Raises:
        FloatingPointError: the value is not finite.
    """
    scores = score_windows(
        model,
        paradigm,
        windows,
        batch_size=config.data.batch_size // config.training.accumulate,
        seed=config.seed,
        dtype=config.training.compute_dtype,
    )
    return scores.bits_per_byte
