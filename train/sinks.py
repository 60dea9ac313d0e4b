"""Where metrics go beside metrics.jsonl: TensorBoard's event files, Weights & Biases."""

import uuid
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from ..errors import CheckpointError, ConfigError
from ..paradigms.config import Config
from .files import write_text

TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders in the run's
WANDB_ID = "genlab_id"
NOT_SHOWN = ("step", "wall_s")  # TensorBoard has its own


class WandbConfig(Config):
    """Metrics for Weights & Biases as well (the extra `genlab[wandb]`).

    Attributes:
        project: that the run belongs to.
        name: of the run; null for its folder's.
        mode: `offline` writes below the run's folder, for `wandb sync`.
    """

    project: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    mode: Literal["online", "offline"] = "online"


class Sink(Protocol):
    """Takes what metrics.jsonl holds, line by line."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Takes the figures after update `step`."""
        ...

    def close(self, *, complete: bool) -> None:
        """Writes out what is left; `complete` says that the run came to its end."""
        ...


class TensorBoardSink:
    """Event files."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """Goes on after update `step`; what was written of later ones is not shown any more."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(folder / TENSORBOARD), purge_step=step + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Adds the scalars."""
        for name, value in scalars.items():
            if name not in NOT_SHOWN:
                self._writer.add_scalar(name, value, step)

    def close(self, *, complete: bool) -> None:
        """Flushes and closes the file."""
        del complete
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, the same one however often training is interrupted."""

    def __init__(self, config: WandbConfig, folder: Path, run_config: dict[str, Any]) -> None:
        """Starts the run, or goes on with it.

        Raises:
            ConfigError: the package is missing, or it refuses (no account, no network).
        """
        wandb = wandb_module()
        (folder / WANDB).mkdir(exist_ok=True)
        # Below a comparison every run's folder is called `run`; the entry's is the one above.
        name = folder.absolute().parent.name if folder.name == "run" else folder.name
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name or name,
                mode=config.mode,
                id=_run_id(folder / WANDB / WANDB_ID),
                resume="allow",
                dir=str(folder),
                config=run_config,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"training.wandb: {' '.join(str(error).split())}; mode: offline needs no account"
            ) from None

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Logs the scalars. Lines that a resumed run repeats are equal, and are left out there."""
        self._run.log(scalars, step=step)

    def close(self, *, complete: bool) -> None:
        """Uploads or writes what is left."""
        self._run.finish(exit_code=0 if complete else 1)


def wandb_module() -> Any:
    """Returns the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "training.wandb: package wandb is missing: pip install 'genlab[wandb]'"
        ) from None
    return wandb


def _run_id(path: Path) -> str:
    """The id in the file; a new one where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        identity = uuid.uuid4().hex[:16]
        write_text(path, identity + "\n")
        return identity
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
