"""The protocols that everything in genlab meets at. Start reading here.

A *mixer* mixes time within one layer. A *block* wires a mixer and an MLP into a layer. A *model*
(`genlab.paradigms.model.Model`) is a stack of blocks with its parameters. A *paradigm* says what is
learnt: loss and likelihood. A *decoding* says how a trained model is run. `advance`
(`genlab.paradigms.decoding.loop`) runs any decoding for a number of steps in one compiled loop.
Letters of shapes are in `genlab.paradigms.shapes`.
"""

from typing import Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Bool, Float, Int, Key

from .context import LayerContext


class Batch(NamedTuple):
    """Rows of tokens as the data layer serves them, the same for every paradigm; never shifted.

    Attributes:
        tokens: int32 (B T).
        segment_ids: int32 (B T), the document of each token within its row; -1 for padding.
        loss_mask: bool (B T), True where the token itself is to be predicted and counted.
    """

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]


class SpecialIds(NamedTuple):
    """Ids with a meaning beside text. Any of them may be 0: compare with `is None`, never by truth.

    Attributes:
        bos: begins every row and document.
        eos: ends a document.
        pad: fills rows up; never scored, never drawn.
        mask: stands for an unknown token in diffusion; never drawn.
    """

    bos: int
    eos: int
    pad: int
    mask: int


class LossSums(NamedTuple):
    """Sums, so that micro-batches and devices add up before the one division.

    Attributes:
        nll_sum: sum of the training objective over scored tokens, nats, float32.
        weight: what `nll_sum` is divided by, float32.
        aux_sum: sum of auxiliary losses (z-loss, router balance), already scaled.
        aux_weight: what `aux_sum` is divided by.
        stats: what layers report beside losses (see `Out.stats`), each times `weight`, so that
            micro-batches count by their tokens.
    """

    nll_sum: Float[Array, ""]
    weight: Float[Array, ""]
    aux_sum: Float[Array, ""]
    aux_weight: Float[Array, ""]
    stats: dict[str, Array] = {}  # noqa: RUF012  (never changed)


class Likelihood(NamedTuple):
    """Per-row negative log-likelihood, or an upper bound on it.

    Attributes:
        nll_nats: float32 (B), summed over the row's scored tokens.
        tokens: int32 (B), scored tokens.
        variance: float32 (B), Monte-Carlo variance of `nll_nats` (0 where it is exact).
        draws: Monte-Carlo draws per row, 0 where exact.
        is_bound: True when `nll_nats` bounds the true value from above.
    """

    nll_nats: Float[Array, " B"]
    tokens: Int[Array, " B"]
    variance: Float[Array, " B"]
    draws: int
    is_bound: bool


class Cost(NamedTuple):
    """What a call costs by the equations, for all rows together.

    Attributes:
        flops: floating-point operations (a multiply-add is two).
        bytes_read: bytes of state read from main memory.
        state_bytes_fixed: bytes of state that do not grow with context, windows full.
        state_bytes_per_token: bytes of state per token of context.
        weight_bytes: bytes of parameters read. Blocks count them, so a mixer leaves this out.
        mixing_flops: of `flops`, those that mix time (scores, recurrences, convolutions); the
            others are matrix products of tokens with parameters, whose speed is well known.
        bytes_written: bytes of state written.
        state_windows: (tokens, bytes per token) of each window that `state_bytes_fixed` counts: a
            state made for fewer tokens than the window has room for these alone.
    """

    flops: float
    bytes_read: float
    state_bytes_fixed: float
    state_bytes_per_token: float
    weight_bytes: float = 0.0
    mixing_flops: float = 0.0
    bytes_written: float = 0.0
    state_windows: tuple[tuple[int, float], ...] = ()

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        """Costs of layers add up."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def state_bytes_at(self, room: int) -> float:
        """Bytes of the state made for `room` tokens."""
        empty = sum(max(0, tokens - room) * size for tokens, size in self.state_windows)
        return self.state_bytes_fixed + self.state_bytes_per_token * room - empty


class Out(NamedTuple):
    """What a model's layers return.

    Attributes:
        hidden: (B T D), after the final norm; zeros at padding.
        aux: losses that layers contribute, summed over layers: name -> float32 scalar, a mean over
            real tokens, already scaled by its coefficient.
        stats: what else layers report: `layer_<i>.<name>` -> float32 scalar.
        taps: the hidden states (B T D) that `collect` asked for: layer index -> after that layer.
    """

    hidden: Float[Array, "B T D"]
    aux: dict[str, Array]
    taps: dict[int, Array]
    stats: dict[str, Array] = {}  # noqa: RUF012  (never changed)


class Mixer(Protocol):
    """Mixes time within one layer. One file and one registry line add one.

    `T` is free: a prompt is prefill, one token is decode, a few are a chunk. Rows come compacted:
    row b holds `ctx.lengths[b]` valid tokens, first. What is returned behind them is ignored.
    A mixer whose state or mask cannot do what `ctx` asks says so in `supports`. One that can run
    in a model with meta tokens has another method: `absorb(x, ctx)` runs over them (1 M D) and
    returns y and what documents begin with, which calls then find in `ctx.begin`.
    """

    def init_state(self, batch: int, max_len: int, *, dtype: Any) -> Any:
        """Returns a state without history, a NamedTuple of arrays with leading B."""
        ...

    def __call__(self, x: Array, state: Any, ctx: LayerContext) -> tuple[Array, Any]:
        """Mixes x (B T D); returns y (B T D) and the state after the row's valid tokens.

        `state=None`: no history, and none is kept (None is returned).
        """
        ...

    def verify(self, x: Array, state: Any, ctx: LayerContext) -> tuple[Array, Any]:
        """Like a call, but keeps the state; returns y and what `commit` needs to keep some of it.

        Honours `ctx.parents`: each token continues its parent.
        """
        ...

    def commit(self, state: Any, pending: Any, path: Array, accepted: Array) -> Any:
        """Keeps the first `accepted` (B) tokens along `path` (B K, indices into the verified ones).

        Equal to a call on just those tokens.
        """
        ...

    def cost(self, batch: int, new_tokens: int, context: int, bytes_per_value: int) -> Cost:
        """Cost of a call with T=new_tokens after S=context tokens of history."""
        ...

    def supports(self, ctx: LayerContext, *, stateful: bool) -> str | None:
        """None, or the reason why this mixer cannot honour `ctx`."""
        ...


class Mlp(Protocol):
    """Transforms each token by itself. One file and one registry line add one.

    Two more methods are optional: `weight_bytes(tokens, bytes_per_value) -> float`, the bytes of
    parameters that a call on so many tokens reads (all of them otherwise), and `inactive_params()
    -> int`, the parameters that one token does not use (none otherwise).
    """

    def __call__(self, x: Array, ctx: LayerContext) -> tuple[Array, dict[str, Array]]:
        """Transforms x (B T D); returns y (B T D) and float32 scalars by name.

        Names that end in `_loss` are losses, means over the real tokens, already scaled by their
        coefficient; the others are statistics. Row b holds `ctx.lengths[b]` real tokens, first.
        """
        ...

    def cost(self, batch: int, new_tokens: int) -> Cost:
        """Cost of a call."""
        ...


class Paradigm(Protocol):
    """What is learnt.

    Attributes:
        name: the registered name.
        is_bound: True when `log_likelihood` returns an upper bound on the negative log-likelihood.
    """

    name: str
    is_bound: bool

    def loss(self, model: Any, batch: Batch, *, key: Key[Array, ""], train: bool) -> LossSums:
        """Returns the training objective's sums; `train` switches dropout on."""
        ...

    def log_likelihood(self, model: Any, batch: Batch, *, key: Key[Array, ""]) -> Likelihood:
        """Returns the rows' negative log-likelihoods (or bounds) over `loss_mask`."""
        ...
