"""YAML to validated configuration: every fault is one line that names its place and the cure."""

import io
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from ..errors import ConfigError, suggest
from ..paradigms.config import Config
from .config_faults import explain

C = TypeVar("C", bound=Config)
EXTENDS = "extends"
SUFFIXES = (".yaml", ".yml")


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML 1.2 (`1e-3` is a number, `off` is text) into plain values.

    Raises:
        ConfigError: not YAML, a duplicate key (with both lines), or a value that JSON has not.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
        if node is not None:
            _refuse_duplicates(node, source, "")
        value = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" line {mark.line + 1}:"
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{source}:{where} not valid YAML: {problem}") from None
    _refuse_odd_values(value, source, "")
    return value


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML or not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        kind = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"{path}: want a mapping at the top, got {kind}")
    return value


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lays `changes` over `base`: mappings merge, everything else is replaced.

    A mapping that names another choice (`name: ...`) replaces the old choice whole: its keys mean
    nothing to the new one.
    """
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other_choice = "name" in value and value["name"] != old.get("name", value["name"])
            result[key] = dict(value) if other_choice else merge(old, value)
        else:
            result[key] = value
    return result


def families() -> dict[str, Path]:
    """The presets that ship with the package, by name."""
    package = __package__.rpartition(".")[0]
    folder = Path(str(resources.files(package))) / "configs" / "families"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_preset(name: str, base_dir: Path) -> Path:
    """The file that `extends: name` means: a path from `base_dir`, or a family's bare name.

    Raises:
        ConfigError: neither exists.
    """
    path = base_dir / name
    if path.suffix in SUFFIXES:
        if path.is_file():
            return path
        raise ConfigError(f"extends: {name!r}: no such file in {base_dir}")
    presets = families()
    if name not in presets:
        raise ConfigError(f"extends: no family {name!r}{suggest(name, presets)}")
    return presets[name]


def find_config(name: str | Path) -> Path:
    """The file that a command's CONFIG means: a path, or a family's bare name.

    Raises:
        ConfigError: neither exists.
    """
    path, presets = Path(name), families()
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, want a YAML file")
    if path.exists():
        return path
    if str(name) in presets:
        return presets[str(name)]
    if path.suffix in SUFFIXES or len(path.parts) > 1:
        raise ConfigError(f"{path}: no such file")
    raise ConfigError(f"{name}: no such file, and no family{suggest(str(name), presets)}")


def resolve(raw: Mapping[str, Any], base_dir: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Replaces `extends` at the top of a mapping by what it names, this mapping laid over it.

    Raises:
        ConfigError: the preset is missing, or presets extend one another in a circle.
    """
    own = {key: value for key, value in raw.items() if key != EXTENDS}
    if EXTENDS not in raw:
        return own
    name = raw[EXTENDS]
    if not isinstance(name, str):
        raise ConfigError(f"extends: want a family or a file, got {name!r}")
    path = find_preset(name, base_dir).resolve()
    if path in _seen:
        circle = " -> ".join(str(p) for p in (*_seen[_seen.index(path) :], path))
        raise ConfigError(f"extends goes in a circle: {circle}")
    return merge(resolve(load_yaml(path), path.parent, (*_seen, path)), own)


def apply_overrides(raw: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Applies `dotted.key=value` changes; values are YAML.

    Raises:
        ConfigError: an override without `=`, or one that goes through a value that is no mapping.
    """
    result = dict(raw)
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"override {override!r}: want dotted.key=value")
        change: Any = parse_yaml(text, f"override {override!r}") if text.strip() else None
        node: Any = result
        for part in parts[:-1]:
            node = node.get(part) if isinstance(node, Mapping) else None
            if node is not None and not isinstance(node, Mapping):
                raise ConfigError(f"override {override!r}: {part} is {node!r}, not a mapping")
        for part in reversed(parts):
            change = {part: change}
        result = merge(result, change)
    return result


def validate(config_class: type[C], raw: Any, source: str | Path) -> C:
    """Turns a raw mapping into a configuration, in JSON mode (lists become tuples, no more).

    Raises:
        ConfigError: one line for each fault: place, value got, what was wanted.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: want a mapping, got {raw!r}")
    try:
        return config_class.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        raise ConfigError(explain(error, config_class, raw, str(source))) from None


def load_config(
    config_class: type[C], name: str | Path, overrides: list[str] | None = None
) -> C:
    """Reads, resolves, overrides and validates: the usual way in.

    Raises:
        ConfigError: see the functions above.
    """
    path = find_config(name)
    raw = load_yaml(path)
    try:
        raw = resolve(raw, path.parent)
    except ConfigError as error:
        named = str(error).startswith(EXTENDS)
        raise ConfigError(f"{path}: {error}" if named else str(error)) from None
    return validate(config_class, apply_overrides(raw, overrides or []), path)


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Writes plain values as YAML 1.2 that `parse_yaml` reads back equal, keys in their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 100
    stream = io.StringIO()
    yaml.dump(dict(value), stream)
    return stream.getvalue()


def _refuse_duplicates(node: Node, source: str, path: str) -> None:
    if isinstance(node, MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            dotted = f"{path}.{name}" if path else name
            if name in lines:
                raise ConfigError(
                    f"{source}: {dotted}: duplicate key in line {line}, "
                    f"first given in line {lines[name]}"
                )
            lines[name] = line
            _refuse_duplicates(value, source, dotted)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            _refuse_duplicates(value, source, f"{path}[{index}]")


def _refuse_odd_values(value: Any, source: str, path: str) -> None:
    """Only what JSON has may stand in a configuration."""
    where = f"{source}: {path}" if path else source
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is no text; put it in quotes")
            _refuse_odd_values(child, source, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_odd_values(child, source, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: got {value}, want a finite number")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ConfigError(
            f"{where}: got {value} ({type(value).__name__}), want text, a number, true, false or "
            "null; put text in quotes"
        )
