"""Says in one line per fault what is wrong with a configuration and what was probably meant."""

import difflib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import suggest

Fault = Any  # pydantic_core.ErrorDetails, a TypedDict
NEAR = 0.75  # similarity from which a key is taken for a misspelt one


def explain(error: ValidationError, root: type[BaseModel], raw: Any, source: str) -> str:
    """Returns one line per fault: source, dotted key, value, what was wanted.

    Args:
        error: what pydantic raised.
        root: the class that was validated against.
        raw: the mapping that was validated.
        source: where it came from.
    """
    faults = error.errors(include_url=False)
    # An unknown key often is the missing one misspelt: it comes first, and explains the other.
    faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")
    lines, explained = [], set()
    for fault in faults:
        path = _path(fault["loc"], raw)
        if fault["type"] == "extra_forbidden":
            hint, meant = _unknown(path, root, raw)
            if meant is not None:
                explained.add(meant)
            got = "" if isinstance(fault["input"], dict | list) else f" (got {fault['input']!r})"
            lines.append(f"{source}: {_dotted(path)}: unknown key{got}{hint}")
        elif fault["type"] != "missing" or path not in explained:
            lines.append(f"{source}: {_dotted(path)}: {_wanted(fault)}".replace(": : ", ": "))
    return "\n".join(dict.fromkeys(lines))


def _dotted(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _path(loc: tuple[str | int, ...], raw: Any) -> tuple[str | int, ...]:
    """Leaves out of pydantic's location the names of union members, which are no keys."""
    path: list[str | int] = []
    node = raw
    for part in loc:
        inside = isinstance(node, dict) and part in node
        if inside or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            node = node[part]
            path.append(part)
        elif isinstance(node, dict) and node.get("name") == part:
            continue
        else:
            node = None
            path.append(part)
    return tuple(path)


def _wanted(fault: Fault) -> str:
    kind, value, ctx = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "missing":
        return "missing; there is no default"
    if kind == "union_tag_not_found":
        return "want a mapping with `name:`" + (
            "" if isinstance(value, dict) else f", got {value!r}"
        )
    if kind == "union_tag_invalid":
        names = [name.strip().strip("'") for name in ctx["expected_tags"].split(", ")]
        return f"no {ctx['tag']!r} here{suggest(ctx['tag'], names)}"
    said = fault["msg"]
    if kind == "value_error":
        return said.removeprefix("Value error, ")
    said = said.removeprefix("Input should be ").removeprefix("Input should ")
    if kind == "literal_error" and isinstance(value, str):
        listed = ctx["expected"].replace(" or ", ", ").split(",")
        names = [name.strip().strip("'") for name in listed]
        return f"got {value!r}, want {said}{suggest(value, names)}"
    got = "a mapping" if isinstance(value, dict) else repr(value)
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        said = "a mapping of keys to values"
    return f"got {got}, want {said}"


def _unknown(
    path: tuple[str | int, ...], root: type[BaseModel], raw: Any
) -> tuple[str, tuple[str | int, ...] | None]:
    """A hint on an unknown key, and the key that was probably meant."""
    parent, key = path[:-1], str(path[-1])
    here = _class_at(root, raw, parent)
    valid = [] if here is None else list(here.model_fields)
    underscored = key.replace("-", "_")
    if underscored in valid:
        return f"; keys have underscores: {underscored!r}", (*parent, underscored)
    near = difflib.get_close_matches(key, valid, n=1, cutoff=NEAR)
    if near:
        return f"; did you mean {near[0]!r}?", (*parent, near[0])
    places = list(dict.fromkeys(_places(root, raw, ())))
    for cutoff in (1.0, NEAR):
        for name in difflib.get_close_matches(underscored, [k for _, k in places], 3, cutoff):
            section = next(p for p, k in places if k == name)
            place = f"under {section}" if section else "at the top"
            return f"; {name!r} belongs {place}", None
    return (f"; valid: {', '.join(sorted(valid))}" if valid else ""), None


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes that an annotation admits, inside unions, lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in typing.get_args(annotation):
        yield from _classes(part)


def _member(annotation: Any, raw: Any) -> type[BaseModel] | None:
    """The one class that `raw` is meant to be."""
    classes = list(_classes(annotation))
    if len(classes) > 1 and isinstance(raw, dict):
        named = [c for c in classes if _name(c) == raw.get("name")]
        return named[0] if named else None
    return classes[0] if classes else None


def _name(config: type[BaseModel]) -> str | None:
    field = config.model_fields.get("name")
    return None if field is None else field.default


def _is_mapping(annotation: Any) -> bool:
    if typing.get_origin(annotation) is dict:
        return True
    return any(_is_mapping(part) for part in typing.get_args(annotation))


def _class_at(root: type[BaseModel], raw: Any, path: tuple[str | int, ...]) -> Any:
    """The class whose keys stand at `path`, or None."""
    here: type[BaseModel] | None = root
    node, inside = raw, None  # inside: annotation of the mapping or list that we are in
    for part in path:
        node = node[part]
        if inside is None:
            if here is None or part not in here.model_fields:
                return None
            annotation = here.model_fields[part].annotation
            if _is_mapping(annotation) or isinstance(node, list):
                inside, here = annotation, None
                continue
        else:
            annotation = inside
            inside = None
        here = _member(annotation, node)
    return here


def _places(
    config: type[BaseModel], raw: Any, path: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """All (dotted section, key) that are valid in this tree, sections that are there first."""
    for key in config.model_fields:
        yield ".".join(path), key
    for key, field in config.model_fields.items():
        node = raw.get(key) if isinstance(raw, dict) else None
        if _is_mapping(field.annotation):
            for name, child in (node or {}).items() if isinstance(node, dict) else ():
                member = _member(field.annotation, child)
                if member is not None:
                    yield from _places(member, child, (*path, key, name))
            continue
        member = _member(field.annotation, node)
        if member is None and isinstance(field.default, BaseModel):
            member = type(field.default)
        if member is not None:
            yield from _places(member, node, (*path, key))
