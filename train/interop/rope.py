"""Rotary settings of published configs, in the old spelling and in that of transformers 5."""

import math
from typing import Any

from ...errors import ConfigError
from .hf_config import HFConfig

NoneType = type(None)

# Per kind: keys of the published dictionary -> ours. `original_max_position_embeddings` may be
# left out there and then is the model's length.
ORIGINAL = {"original_max_position_embeddings": "original_max_len"}
KEYS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **ORIGINAL,
    },
    "yarn": {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        **ORIGINAL,
    },
}
NEEDED = {"factor", "low_freq_factor", "high_freq_factor"}


def read_rope(
    c: HFConfig, *, head_dim: int, base: float = 10000.0, partial: float = 1.0
) -> tuple[dict[str, Any], int]:
    """Reads the rotary keys.

    Args:
        c: the published config; `max_position_embeddings` is read as well.
        head_dim: H.
        base: what an absent `rope_theta` means.
        partial: what an absent `partial_rotary_factor` means.

    Returns:
        Keys of our attention config, and the longest row that the settings are made for.

    Raises:
        ConfigError: a kind or key that is not implemented.
    """
    max_len = c.take("max_position_embeddings", int)
    new = c.take("rope_parameters", (dict, NoneType), None)
    old = c.take("rope_scaling", (dict, NoneType), None)
    key = "rope_scaling" if old else "rope_parameters"
    given = dict(old or new or {})
    theta = c.take("rope_theta", float, base)
    share = c.take("partial_rotary_factor", float, partial)
    theta = float(given.pop("rope_theta", theta))
    share = float(given.pop("partial_rotary_factor", share))
    original = c.take("original_max_position_embeddings", (int, NoneType), None)
    if original is not None:
        given["original_max_position_embeddings"] = original
    old_kind = given.pop("type", "default")
    kind = given.pop("rope_type", old_kind)
    turned = int(head_dim * share)
    own = {"rope_base": theta, "rotary_dim": None if turned == head_dim else turned}
    if kind == "default":
        given.pop("original_max_position_embeddings", None)
        _refuse(c, key, kind, given)
        return own, max_len
    if kind not in KEYS:
        raise ConfigError(
            f"{c.source}: {key}.rope_type is {kind!r}, which genlab does not implement; want "
            f"default, {', '.join(KEYS)}"
        )
    scaling: dict[str, Any] = {"name": kind}
    if kind == "dynamic":  # grows beyond the model's length, whatever the dictionary says
        given.pop("original_max_position_embeddings", None)
        scaling["original_max_len"] = max_len
    elif "original_max_len" in KEYS[kind].values():
        given.setdefault("original_max_position_embeddings", max_len)
    if kind == "yarn":
        _read_mscale(given)
    for their, our in KEYS[kind].items():
        value = given.pop(their, None)
        if value is not None:
            scaling[our] = value if isinstance(value, bool) or our[0] == "o" else float(value)
        elif their in NEEDED:
            raise ConfigError(f"{c.source}: {key}.{their} is missing, which {kind} needs")
    _refuse(c, key, kind, given)
    if kind == "dynamic":
        max_len = math.ceil(scaling["factor"] * max_len)
    if kind == "yarn":
        max_len = max(max_len, int(scaling["factor"] * scaling["original_max_len"]))
    return own | {"rope_scaling": scaling}, max_len


def write_rope(mixer: Any, head_dim: int, max_len: int, *, partial: bool = False) -> dict[str, Any]:
    """The published keys of an attention config, in the spelling that every release reads.

    Args:
        mixer: our attention config, with rotary positions.
        head_dim: H.
        max_len: longest row of the model.
        partial: say the rotated share of a head even where it is all.
    """
    raw: dict[str, Any] = {"max_position_embeddings": max_len, "rope_theta": mixer.rope_base}
    if partial or (mixer.rotary_dim is not None and mixer.rotary_dim != head_dim):
        raw["partial_rotary_factor"] = (mixer.rotary_dim or head_dim) / head_dim
    if mixer.rope_scaling is None:
        return raw
    ours = mixer.rope_scaling.model_dump(mode="json")
    kind = ours["name"]
    scaling = {their: ours[our] for their, our in KEYS[kind].items() if ours[our] is not None}
    if kind == "dynamic":
        raw["max_position_embeddings"] = ours["original_max_len"]
    return raw | {"rope_scaling": {"rope_type": kind, **scaling}}


def _read_mscale(given: dict[str, Any]) -> None:
    """Replaces YaRN's two scales (DeepSeek) by the factor that they amount to."""
    one, all_dims = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if given.get("attention_factor") is None and one and all_dims and given.get("factor", 0) > 1:
        log = math.log(given["factor"])
        given["attention_factor"] = (0.1 * one * log + 1) / (0.1 * all_dims * log + 1)


def _refuse(c: HFConfig, key: str, kind: str, rest: dict[str, Any]) -> None:
    for name, value in rest.items():
        raise ConfigError(
            f"{c.source}: {key}.{name} ({value!r}) is not implemented for rope_type {kind!r}"
        )
