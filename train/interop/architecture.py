"""What an architecture is to the importer: its config keys and a table of its tensors.

An architecture is one file in `architectures/`. Its `read` turns a published config into ours and
its `write` does the reverse; its `table` says which published tensors are which of our parameters.
Everything else (files, dtypes, checks, both directions) is shared, see `weights.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError
from ...paradigms.backbone import ModelConfig
from ...paradigms.model import abstract_model
from ..checkpoint import flatten
from ..yaml_loader import validate
from .hf_config import HFConfig

Arrays = tuple[Any, ...]


class Form(NamedTuple):
    """How published tensors become ours, and back. Works on NumPy arrays and under a trace.

    Attributes:
        to_ours: takes the published arrays, returns ours.
        to_theirs: the inverse.
    """

    to_ours: Callable[..., Arrays]
    to_theirs: Callable[..., Arrays]


def _same(x: Any) -> Arrays:
    return (x,)


def _transposed(x: Any) -> Arrays:
    return (x.T,)


SAME = Form(_same, _same)
TRANSPOSED = Form(_transposed, _transposed)  # torch's Linear holds (out, in), we hold (in, out)


def join(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Concatenates, by NumPy where the arrays are NumPy's."""
    if all(isinstance(a, np.ndarray) for a in arrays):
        return np.concatenate(arrays, axis=axis)
    return jnp.concatenate(arrays, axis=axis)


class Row(NamedTuple):
    """Published tensors that hold some of our parameters.

    Attributes:
        ours: dotted names of parameters.
        theirs: names of tensors.
        form: how one becomes the other.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form = SAME


Lines = Iterable[tuple[str | tuple[str, ...], str | tuple[str, ...], Form]]


def rows(ours: str, theirs: str, lines: Lines) -> list[Row]:
    """Rows of a table of (our name, their name, form), each name behind its prefix.

    A name may be a tuple of names.
    """

    def named(prefix: str, names: str | tuple[str, ...]) -> tuple[str, ...]:
        several = (names,) if isinstance(names, str) else names
        return tuple(prefix + name for name in several)

    return [Row(named(ours, own), named(theirs, their), form) for own, their, form in lines]


class Unfit(Exception):
    """A model has no form in an architecture; the message says why."""


class Architecture(NamedTuple):
    """One kind of published checkpoint.

    Attributes:
        name: for messages and `--architecture`.
        model_types: what `config.json` calls it.
        read: published config -> plain values of a `ModelConfig`. Reads every key that it knows.
        write: our config -> published config; raises `Unfit` for a model of another form.
        table: our config -> rows; those about parameters that the model lacks are left out.
        copies: tensors that some files hold a second time -> where the original is. Their equality
            is checked; they are not written.
        ignored: endings of tensors that a language model has no use for: tables of phases and
            masks, heads of other tasks.
        old_endings: endings that files of early releases have -> today's.
        paradigm: plain values of the paradigm's config, from the published config.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[HFConfig], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    table: Callable[[ModelConfig], list[Row]]
    copies: Callable[[ModelConfig], dict[str, str]] = lambda model: {}
    ignored: tuple[str, ...] = ()
    old_endings: dict[str, str] = {}  # noqa: RUF012  (never changed)
    paradigm: Callable[[HFConfig], dict[str, Any]] = lambda config: {"name": "autoregressive"}

    def model_config(self, config: HFConfig) -> ModelConfig:
        """The model that a published config describes.

        Raises:
            ConfigError: a key is missing, wrong or not implemented.
        """
        values = self.read(config)
        config.finish(self.name)
        model = validate(ModelConfig, values, config.source)
        abstract_model(model)  # parts that do not fit one another are named here
        return model

    def rows_of(self, model: ModelConfig) -> list[Row]:
        """The table's rows for the parameters that the model has.

        Raises:
            Unfit: a parameter has no row.
        """
        names = set(flatten(abstract_model(model).params))
        kept = [row for row in self.table(model) if names.issuperset(row.ours)]
        placed = [name for row in kept for name in row.ours]
        homeless = sorted(names.difference(placed))
        if homeless:
            raise Unfit(f"parameter {homeless[0]} has no place in it")
        assert len(placed) == len(set(placed)), "two rows hold the same parameter"
        return kept

    def config_of(self, model: ModelConfig, paradigm: dict[str, Any]) -> dict[str, Any]:
        """The published config of a model, checked by reading it again.

        Args:
            model: ours.
            paradigm: plain values of its paradigm's config.

        Raises:
            Unfit: the architecture cannot express the model, or it is run in another way.
        """
        raw = self.write(model)
        config = HFConfig(raw, f"{self.name} config")
        try:
            again = self.model_config(config)
        except ConfigError as error:
            raise Unfit(str(error)) from None
        for key, absent in _FUNCTION_OF_PARADIGM.items():
            own, want = (values.get(key, absent) for values in (paradigm, self.paradigm(config)))
            if own != want:
                raise Unfit(f"its models have paradigm.{key}={want!r}, this one has {own!r}")
        mine, theirs = essence(model), essence(again)
        for key, value in mine.items():
            if theirs[key] != value:
                raise Unfit(f"{key} {value!r} would become {theirs[key]!r}")
        return raw


def published_shapes(row: Row, params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes that a row's published tensors must have.

    Args:
        row: of the table.
        params: dotted name -> anything with a shape.
    """
    ours = [jax.ShapeDtypeStruct(params[name].shape, jnp.float32) for name in row.ours]
    theirs = jax.eval_shape(row.form.to_theirs, *ours)
    return {name: tuple(one.shape) for name, one in zip(row.theirs, theirs, strict=True)}


# Keys that say how parameters begin or how they are trained: they do not belong to a function.
_TRAINING_KEYS = {
    "dropout", "balance_weight", "router_z_weight", "dt_min", "dt_max", "dt_floor", "a_init_range",
}  # fmt: skip


# Keys of a paradigm that say how the model is run, and what an absent one means.
_FUNCTION_OF_PARADIGM = {"name": None, "shift": False}


def essence(model: ModelConfig) -> dict[str, Any]:
    """What a model computes, as plain values, with every layer spelt out: equal for equal models.

    The longest row is not part of it.
    """
    plain = model.model_dump(mode="json")
    layers = {name: _spelt_out(layer, model.width) for name, layer in plain["layers"].items()}
    top = {
        key: value
        for key, value in plain.items()
        if key not in _TRAINING_KEYS | {"layers", "pattern", "depth", "max_len"}
    }
    found = {f"layer {i}": layers[kind] for i, kind in enumerate(model.stack)}
    for i, kind in enumerate(model.stack):
        if model.share_layers or model.layers[kind].block.name == "shared":
            found[f"layer {i} shares with"] = model.stack.index(kind)
    return top | found


def _spelt_out(node: Any, width: int) -> Any:
    if isinstance(node, list):
        return [_spelt_out(child, width) for child in node]
    if not isinstance(node, dict):
        return node
    out = {k: _spelt_out(v, width) for k, v in node.items() if k not in _TRAINING_KEYS}
    if out.get("name") == "attention":
        out["num_kv_heads"] = out["num_kv_heads"] or out["num_heads"]
        out["head_dim"] = out["head_dim"] or width // out["num_heads"]
        out["score_scale"] = out["score_scale"] or out["head_dim"] ** -0.5
        out["rotary_dim"] = out["rotary_dim"] or out["head_dim"]
        scaling = out["rope_scaling"]
        if scaling is not None and scaling["name"] == "yarn":
            from ...paradigms.layers.rotary import YarnScaling

            scaling["attention_factor"] = YarnScaling(**scaling).amplitude
    if out.get("name") == "mamba2":
        out["inner_width"] = out["inner_width"] or out["expand"] * width
        del out["expand"]
    if out.get("name") == "mamba":
        out["dt_rank"] = out["dt_rank"] or -(-width // 16)
    return out
