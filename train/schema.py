"""The JSON Schema of a configuration, with which editors complete and check YAML files."""

import json
from typing import Any

from ..paradigms.config import Config
from .yaml_loader import EXTENDS

_EXTENDS = {
    "type": "string",
    "description": "A family of configs/families by name, or another file, relative to this one.",
}


def schema_of(config_class: type[Config]) -> dict[str, Any]:
    """Returns the schema of a file that may extend another, so that no key is required.

    The `name` that tells choices apart stays required.
    """
    schema = config_class.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("required", None)
    schema["properties"] = {EXTENDS: _EXTENDS, **schema["properties"]}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def schema_text(config_class: type[Config]) -> str:
    """The same as text."""
    return json.dumps(schema_of(config_class), indent=2) + "\n"
