"""A run's folder: what is in it, and how a trained run is loaded.

    config.yaml        the resolved configuration; loads like any other
    identity.json      fingerprints of corpus and tokenizer
    tokenizer/         the tokenizer
    checkpoints/STEP/  see `genlab.train.checkpoint`
    metrics.jsonl      one line per `training.log_every` updates
    samples.jsonl      with `training.sample_every`
    tensorboard/       with `training.tensorboard`
    wandb/             with `training.wandb`
    profile/           with `training.profile`
    result.json        written last: the run is finished
    source/            of an imported run: the published files beside the weights

One process at a time writes into it.
"""

import contextlib
import fcntl
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..errors import CheckpointError, ConfigError, DataError
from ..paradigms.interface import Paradigm, SpecialIds
from ..paradigms.model import Model, abstract_model
from .checkpoint import (
    Corrupt,
    Identity,
    check_identity,
    check_leaves,
    flatten,
    read,
    read_meta,
    steps_in,
    unflatten,
)
from .config import RunConfig, config_hash, first_difference, plain
from .data.pipeline import Data
from .data.tokenizer import Tokenizer
from .data.tokenizer_config import load_tokenizer, save_tokenizer
from .files import write_text
from .interop.params_file import is_params_folder, read_params_file
from .sinks import TENSORBOARD, WANDB
from .yaml_loader import dump_yaml, load_yaml, validate

CONFIG, IDENTITY, TOKENIZER = "config.yaml", "identity.json", "tokenizer"
CHECKPOINTS, DAMAGED = "checkpoints", "damaged_checkpoints"
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
PROFILE, RESULT, LOCK = "profile", "result.json", "lock"
SOURCE = "source"
CONTENTS = (
    CONFIG, IDENTITY, TOKENIZER, CHECKPOINTS, DAMAGED, METRICS, SAMPLES, TENSORBOARD, PROFILE,
    RESULT, LOCK, SOURCE, WANDB,
)  # fmt: skip


class Run(NamedTuple):
    """A trained run, or one that is being trained.

    Attributes:
        path: its folder.
        config: resolved, vocabulary size included.
        tokenizer: the run's own.
        model: float32 parameters: the averaged ones where the run keeps an average; those of an
            imported run in the dtype that they were imported in.
        paradigm: what was learnt.
        step: updates behind these parameters.
        data_fingerprint: of the corpus and tokenizer that it was trained on.
        result: what `result.json` says; None while the run is unfinished.
    """

    path: Path
    config: RunConfig
    tokenizer: Tokenizer
    model: Model
    paradigm: Paradigm
    step: int
    data_fingerprint: str
    result: dict[str, Any] | None


def identity_of(config: RunConfig, data: Data) -> Identity:
    """What a run's checkpoints must belong to. `config` has its vocabulary size."""
    return Identity(config_hash(config), data.fingerprint, data.tokenizer.fingerprint)


@contextlib.contextmanager
def open_run(path: Path, config: RunConfig, data: Data, *, overwrite: bool) -> Iterator[Path]:
    """Makes a run's folder, or opens it to go on; nobody else may write into it meanwhile.

    Args:
        path: the folder.
        config: resolved, vocabulary size included.
        data: what is trained on.
        overwrite: delete a run that is there and begin anew.

    Raises:
        CheckpointError: the folder holds another run, or files that are no run, or another process
            is training in it.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path}: is a file, want a folder for the run")
    found = {p.name for p in path.iterdir()} if path.is_dir() else set()
    strange = sorted(name for name in found if name not in CONTENTS and not name.endswith(".tmp"))
    if strange and CONFIG not in found:
        raise CheckpointError(f"{path}: is no run folder: it holds {strange[0]}; choose another")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if SOURCE in found:
        raise CheckpointError(f"{path}: is an imported run, want another folder to train in")
    with _locked(path):
        if overwrite:
            _clear(path)
        elif CONFIG in found:
            _refuse_other(path, config, data)
        write_text(path / CONFIG, _config_text(config))
        identity = {
            "data_fingerprint": data.fingerprint,
            "tokenizer_fingerprint": data.tokenizer.fingerprint,
        }
        write_text(path / IDENTITY, json.dumps(identity, indent=2) + "\n")
        if not (path / TOKENIZER).exists():
            (path / TOKENIZER).mkdir()
        save_tokenizer(data.tokenizer, path / TOKENIZER)
        yield path


def load_run(path: str | Path, *, step: int | None = None) -> Run:
    """Loads a run for generation or evaluation.

    Args:
        path: its folder.
        step: the checkpoint to load; None for the result of a finished run, else the best one so
            far if the run selects by held-out loss, else the newest that is intact.

    Raises:
        CheckpointError: no such run or checkpoint, or it is damaged or foreign.
    """
    path = Path(path)
    config = _load_config(path)
    try:
        tokenizer = load_tokenizer(path / TOKENIZER)
        identity = json.loads((path / IDENTITY).read_text())
        data_fingerprint = str(identity["data_fingerprint"])
        expected = str(identity["tokenizer_fingerprint"])
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / IDENTITY}: cannot be read: {error}") from None
    if tokenizer.fingerprint != expected:
        raise CheckpointError(
            f"{path}: belongs to another tokenizer: trained with {expected[:12]}, "
            f"{TOKENIZER}/ holds {tokenizer.fingerprint[:12]}"
        )
    config = config.with_vocab_size(tokenizer.vocab_size)
    wanted = Identity(config_hash(config), data_fingerprint, tokenizer.fingerprint)
    result = read_result(path)
    if step is None and result is not None:
        step = int(result["step"])
    params, step = _read_params(path, config, wanted, step)
    return Run(
        path=path,
        config=config,
        tokenizer=tokenizer,
        model=params,
        paradigm=config.paradigm.build(SpecialIds(*tokenizer.specials)),
        step=step,
        data_fingerprint=data_fingerprint,
        result=result,
    )


def load_params(path: Path, config: RunConfig, identity: Identity) -> Model:
    """The parameters that a checkpoint answers with: the average where one is kept.

    Raises:
        Corrupt: it cannot be read.
        CheckpointError: it belongs to another run, or its leaves do not fit the configuration.
    """
    model = abstract_model(config.model)
    if is_params_folder(path):
        arrays = read_params_file(
            path, flatten(model.params), lambda meta, file: check_identity(meta, identity, file)
        )
        return model.with_params(jax.device_put(unflatten(model.params, arrays)))
    prefix = "params." if config.training.ema_decay is None else "ema."
    arrays, meta = read(path, None, prefix=prefix)
    check_identity(meta, identity, path)
    arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    check_leaves(arrays, flatten(model.params), path)
    return model.with_params(jax.device_put(unflatten(model.params, arrays)))


def read_result(path: Path) -> dict[str, Any] | None:
    """What `result.json` says, or None.

    Raises:
        CheckpointError: it is there and damaged.
    """
    file = path / RESULT
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _config_text(config: RunConfig) -> str:
    return "# The resolved configuration of this run.\n" + dump_yaml(plain(config))


def _load_config(path: Path) -> RunConfig:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run folder")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: is no run folder: it has no {CONFIG}")
    try:
        return validate(RunConfig, load_yaml(path / CONFIG), path / CONFIG)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its configuration does not load: {error}") from None


def _refuse_other(path: Path, config: RunConfig, data: Data) -> None:
    try:
        there = load_yaml(path / CONFIG)
    except ConfigError as error:
        raise CheckpointError(f"{error}; --overwrite begins anew") from None
    found = first_difference(there, plain(config))
    if found is not None:
        key, old, new = found
        raise CheckpointError(
            f"{path}: holds another run: {key} is {old!r} there and {new!r} here; choose another "
            "folder with --out, or --overwrite to delete that run"
        )
    try:
        identity = json.loads((path / IDENTITY).read_text())
    except FileNotFoundError:
        return  # killed before it was written
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / IDENTITY}: cannot be read: {error}") from None
    for key, now in (
        ("tokenizer_fingerprint", data.tokenizer.fingerprint),
        ("data_fingerprint", data.fingerprint),
    ):
        if identity.get(key) != now:
            raise CheckpointError(
                f"{path}: holds a run on other data: {key} is {str(identity.get(key))[:12]} there "
                f"and {now[:12]} here; choose another folder with --out, or --overwrite"
            )


def _read_params(
    path: Path, config: RunConfig, identity: Identity, step: int | None
) -> tuple[Model, int]:
    folder = path / CHECKPOINTS
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{path}: has no checkpoint yet")
    if step is not None:
        if step not in steps:
            listed = ", ".join(map(str, steps))
            raise CheckpointError(f"{path}: has no checkpoint of step {step}; there are {listed}")
        try:
            return load_params(folder / str(step), config, identity), step
        except Corrupt as error:
            raise CheckpointError(f"{folder / str(step)}: is corrupt: {error}") from None
    for newest in reversed(steps):
        try:
            best = read_meta(folder / str(newest)).best if config.training.select_best else None
            chosen = best.step if best is not None and best.step in steps else newest
            return load_params(folder / str(chosen), config, identity), chosen
        except Corrupt as error:
            warnings.warn(f"checkpoint {folder / str(newest)} is corrupt ({error})", stacklevel=3)
    raise CheckpointError(f"{path}: all {len(steps)} checkpoints are corrupt")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder's lock; the system releases it when the process ends, however it does."""
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{path}: another process is training in it") from None
        yield


def _clear(path: Path) -> None:
    """Deletes a run, and nothing that is not part of one."""
    for name in CONTENTS:
        target = path / name
        if target.is_dir():
            shutil.rmtree(target)
        elif name != LOCK:
            target.unlink(missing_ok=True)
