"""The base of everything that `results.json` holds."""

from pydantic import BaseModel, ConfigDict

Interval = tuple[float, float]


class Record(BaseModel):
    """Base of all parts: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
