"""Both ends of a model beside the table of tokens: what is added to a token, and the head's frame.

BERT (arXiv 1810.04805) has all of it.
"""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int
from pydantic import Field, model_validator

from ..config import Config
from .activations import ACTIVATIONS
from .linear import linear
from .norm import make_norm
from .params import Build, plus, shape_of


class InputConfig(Config):
    """What is added to a token's row of the embedding.

    Attributes:
        positions: rows of a learnt table that is added by the token's position in its document;
            null for none. It bounds the longest row.
        first_position: the table's row of a document's first token (RoBERTa begins at 2).
        token_types: rows of a learnt table of token types, 0 for none. A row holds one text, so
            all its tokens are of the first type; the others come from and go to checkpoints.
        scale: factor on the token's row, before all else (Falcon-H1, arXiv 2507.22448).
        norm: normalise the sum.
        width: of all these tables and of the embedding; the sum is then projected to D (ALBERT,
            arXiv 1909.11942, sec. 3.1). Null for tables of width D.
    """

    positions: int | None = Field(default=None, ge=2)
    first_position: int = Field(default=0, ge=0)
    token_types: int = Field(default=0, ge=0)
    scale: float = Field(default=1.0, gt=0.0)
    norm: bool = False
    width: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _first_is_of_positions(self) -> "InputConfig":
        if self.first_position and self.positions is None:
            raise ValueError("first_position is of positions, which positions=null leaves out")
        return self

    def refuses(self, max_len: int, meta_tokens: int) -> str | None:
        """The reason why rows of that length cannot be read, None if they can."""
        if self.positions is None:
            return None
        if meta_tokens:
            return "meta_tokens do not go with inputs.positions: they would take the first of them"
        there = self.positions - self.first_position
        if max_len > there:
            return f"max_len={max_len} exceeds the {there} positions of inputs.positions"
        return None

    def build(self, build: Build) -> "Inputs | None":
        """Makes the tables; None where there are none."""
        return None if self == InputConfig() else Inputs(self, build)


class Inputs(nnx.Module):
    """`norm(scale x + position + type) W + b`, of what is there."""

    def __init__(self, config: InputConfig, build: Build):
        """Draws the tables as the embedding is drawn."""
        width, types = config.width or build.width, config.token_types
        rows = config.positions
        self.first_position, self.scale = config.first_position, config.scale
        self.positions = None if rows is None else build.normal((rows, width), 0.02)
        self.token_types = build.normal((types, width), 0.02) if types else None
        self.norm = make_norm(build, width) if config.norm else None
        projects = config.width is not None
        self.w_project = build.matrix(width, build.width) if projects else None
        self.b_project = build.zeros(build.width) if projects else None

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of the projection."""
        return _flops(self.w_project)

    def __call__(
        self, x: Float[Array, "B T d"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Adds to the embedding's rows."""
        if self.scale != 1.0:
            x = x * self.scale
        if self.token_types is not None:
            x = x + self.token_types[...][0].astype(x.dtype)
        if self.positions is not None:
            table = self.positions[...].astype(x.dtype)
            # Padding may stand at any position; what is read there does not matter.
            at = jnp.clip(positions + self.first_position, 0, table.shape[0] - 1)
            x = x + table[at]
        x = x if self.norm is None else self.norm(x)
        if self.w_project is None:
            return x
        return plus(linear(x, self.w_project[...]), self.b_project)

    def unread_bytes(self, tokens: int, bytes_per_value: int) -> float:
        """Bytes of the tables' rows that a call of so many tokens does not read."""
        unread = 0
        for table, read in ((self.positions, tokens), (self.token_types, 1)):
            if table is not None:
                rows, width = shape_of(table)
                unread += max(rows - read, 0) * width * bytes_per_value
        return float(unread)


class OutputConfig(Config):
    """What stands before and behind the head's matrix.

    Attributes:
        transform: `norm(act(x W + b))` before it, with this activation; null for none. Its width is
            that of the embedding.
        bias: a learnt bias of each id behind it.
        scale: factor on what the matrix is applied to (Falcon-H1, arXiv 2507.22448).
    """

    transform: Literal["silu", "gelu", "gelu_tanh", "relu"] | None = None
    bias: bool = False
    scale: float = Field(default=1.0, gt=0.0)

    def build(self, build: Build, rows: int, width: int) -> "Output | None":
        """Makes the frame of a head with that many ids and an embedding of that width."""
        return None if self == OutputConfig() else Output(self, build, rows, width)


class Output(nnx.Module):
    """The head's frame."""

    def __init__(self, config: OutputConfig, build: Build, rows: int, width: int):
        """Draws the transform; the bias begins at zero."""
        self.activation, self.scale = config.transform, config.scale
        has = config.transform is not None
        self.w_transform = build.matrix(build.width, width) if has else None
        self.b_transform = build.zeros(width) if has else None
        self.norm = make_norm(build, width) if has else None
        self.bias = build.zeros(rows) if config.bias else None

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of the transform."""
        return _flops(self.w_transform)

    def transform(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B d"]:
        """What the head's matrix is applied to."""
        if self.w_transform is not None:
            y = plus(linear(hidden, self.w_transform[...]), self.b_transform)
            hidden = self.norm(ACTIVATIONS[self.activation](y))
        return hidden if self.scale == 1.0 else hidden * self.scale

    def biased(self, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Adds the bias."""
        return plus(logits, self.bias)

    def with_bias_inside(
        self, hidden: Float[Array, "*B D"], weight: Array, vocab_first: bool
    ) -> tuple[Float[Array, "*B d"], Array]:
        """The transformed input and the matrix, with one more channel for the bias.

        The cross-entropy kernels know a matrix only: `h W + b` is `[h, 1] [W; b]`.

        Args:
            hidden: before the transform.
            weight: (V D) with `vocab_first`, else (D V), in hidden's dtype.
            vocab_first: which axis of `weight` is the vocabulary.
        """
        hidden = self.transform(hidden)
        if self.bias is None:
            return hidden, weight
        ones = jnp.ones((*hidden.shape[:-1], 1), hidden.dtype)
        axis = 1 if vocab_first else 0
        column = jnp.expand_dims(self.bias[...].astype(weight.dtype), axis)
        return (
            jnp.concatenate([hidden, ones], axis=-1),
            jnp.concatenate([weight, column], axis=axis),
        )


def _flops(matrix: nnx.Param | None) -> float:
    """Of the product of one token with a matrix that may be missing."""
    if matrix is None:
        return 0.0
    rows, columns = shape_of(matrix)
    return float(2 * rows * columns)
