"""What a configuration can name, read from the registries and the headers of the YAML files."""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ..errors import ConfigError, suggest
from ..paradigms.decoding.registry import DECODINGS
from ..paradigms.paradigm_registry import PARADIGMS
from ..paradigms.registry import BLOCKS, MIXERS, MLPS
from ..train.config import TrainingConfig
from ..train.data.pipeline import DataConfig
from ..train.data.sources import SOURCES
from ..train.data.synthetic.registry import TASKS
from ..train.yaml_loader import families

COMMENT = "#"
COMMAND = "genlab "


class Offer(NamedTuple):
    """One thing that can be named.

    Attributes:
        name: as a configuration or a command names it.
        about: one line; empty where its author wrote none.
    """

    name: str
    about: str


def kinds() -> dict[str, Callable[[], list[Offer]]]:
    """What can be listed: kind -> function that reads it."""
    return {
        "families": lambda: [Offer(name, _about_file(path)) for name, path in families().items()],
        "mixers": lambda: _registered(MIXERS),
        "blocks": lambda: _registered(BLOCKS),
        "mlps": lambda: _registered(MLPS),
        "paradigms": lambda: _registered(PARADIGMS),
        "decodings": lambda: _registered(DECODINGS),
        "tokenizers": lambda: _registered(_choices(DataConfig, "tokenizer")),
        "sources": lambda: _registered(SOURCES),
        "tasks": lambda: _registered(TASKS),
        "optimizers": lambda: _registered(_choices(TrainingConfig, "optimizer")),
        "schedules": lambda: _registered(_choices(TrainingConfig, "schedule")),
        "configs": _configs,
    }


def inventory(kind: str | None = None) -> dict[str, list[Offer]]:
    """Everything, or one kind of thing.

    Args:
        kind: one of `kinds()`; None for all.

    Raises:
        ConfigError: no such kind.
    """
    every = kinds()
    if kind is None:
        return {name: read() for name, read in every.items()}
    if kind not in every:
        raise ConfigError(f"list {kind!r}: no such kind{suggest(kind, every)}")
    return {kind: every[kind]()}


def configs_folder() -> Path:
    """Where the shipped YAML files lie."""
    package = __package__.rpartition(".")[0]
    return Path(str(resources.files(package))) / "configs"


def header_of(text: str) -> tuple[str, str]:
    """The command that a YAML file opens with, and the first sentence of what it says after it.

    Either is empty where there is none.
    """
    command, words = "", []
    for line in text.splitlines():
        if not line.startswith(COMMENT):
            break
        line = line.removeprefix(COMMENT).strip()
        if line.startswith(COMMAND) and not words and not command:
            command = line
        elif line:
            words.append(line)
        elif words:
            break
    return command, _first_sentence(" ".join(words))


def _configs() -> list[Offer]:
    """All shipped YAML files but the families, by their path below `configs_folder`."""
    folder, named = configs_folder(), set(families().values())
    paths = [path for path in sorted(folder.rglob("*.yaml")) if path not in named]
    return [Offer(path.relative_to(folder).as_posix(), _about_file(path)) for path in paths]


def _about_file(path: Path) -> str:
    command, about = header_of(path.read_text(encoding="utf-8"))
    return about or command


def _choices(config: type, field: str) -> dict[str, type]:
    """The classes that a field of a configuration chooses from, by name."""
    info = config.model_fields[field]
    members = get_args(info.annotation) or (info.annotation,)
    return {member.model_fields["name"].default: member for member in members}


def _registered(registry: Mapping[str, type]) -> list[Offer]:
    """One line for each class: its module's, where the module is about this class alone."""
    homes = [config.__module__ for config in registry.values()]
    offers = []
    for name, config in registry.items():
        owner: Any = config
        if homes.count(config.__module__) == 1 and not _shared(config):
            owner = sys.modules[config.__module__]
        offers.append(Offer(name, _first_line(owner)))
    return offers


def _shared(config: type) -> bool:
    """True when the module defines other classes that are chosen by name."""
    classes = {v for v in vars(sys.modules[config.__module__]).values() if inspect.isclass(v)}
    own = [c for c in classes if c.__module__ == config.__module__]
    return sum("name" in getattr(c, "model_fields", {}) for c in own) > 1


def _first_line(owner: Any) -> str:
    return (inspect.getdoc(owner) or "").partition("\n")[0].strip()


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence and no abbreviation."""
    end = re.search(r"(?<!\bsec)(?<!\beq)(?<!\bfig)\.(?=$| +[A-Z0-9])", text)
    return text if end is None else text[: end.end()]
