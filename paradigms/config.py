"""The base of every configuration class, and how a registry becomes a choice in YAML."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Self, Union

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """A frozen, strict configuration: unknown keys and mistyped values are errors.

    Validate in JSON mode (`model_validate_json`), where lists become tuples and nothing else is
    converted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @functools.cached_property
    def canonical_json(self) -> str:
        """All fields, defaults included, as JSON in declaration order: equal text, equal config."""
        return self.model_dump_json()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Like pydantic's, but the copy does not inherit the cached JSON of the original."""
        copy = super().model_copy(update=update, deep=deep)
        copy.__dict__.pop("canonical_json", None)
        return copy

    def __hash__(self) -> int:
        """Hashes the canonical JSON, so that dicts inside are no obstacle."""
        return hash(self.canonical_json)


def choice_of(registry: Mapping[str, type[Config]]) -> Any:
    """Returns the union of the registered configs, told apart by their `name` field.

    Args:
        registry: name -> config class, whose `name` field is a `Literal` of that name.

    Raises:
        TypeError: a class's `name` default differs from the name that it is registered under.
    """
    for name, config in registry.items():
        default = config.model_fields["name"].default
        if default != name:
            raise TypeError(f"{config.__name__} is registered as {name!r}, not as {default!r}")
    members = tuple(registry.values())
    if len(members) == 1:
        return members[0]
    return Annotated[Union[members], Field(discriminator="name")]  # noqa: UP007
