"""A model: parameters as a plain nested dict, and how to run them. Crosses jit borders cheaply."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from ..errors import ConfigError
from .backbone import Backbone, ModelConfig
from .context import Context
from .interface import Cost, Out
from .layers.params import decays, is_float32_param
from .ragged import ModelState


class _Plan:
    """How a config's parameters become a module; equal for equal configs, hashed once."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.text = config.canonical_json
        self._hash = hash(self.text)
        abstract = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
        self.graph, state = nnx.split(abstract)
        self.shapes = nnx.to_pure_dict(state)
        variables = nnx.to_flat_state(state)
        self.float32_paths = frozenset(p for p, v in variables if is_float32_param(v))
        self.decay_paths = frozenset(p for p, v in variables if decays(v))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Plan) and self.text == other.text)


@functools.lru_cache(maxsize=256)
def _plan(config: ModelConfig) -> _Plan:
    return _Plan(config)


def _by_path(params: dict, function: Any) -> dict:
    """Maps `function(path, leaf)` over a nested dict, paths as tuples of names."""

    def visit(node: Any, path: tuple) -> Any:
        if isinstance(node, dict):
            return {name: visit(child, (*path, name)) for name, child in node.items()}
        return function(path, node)

    return visit(params, ())


@jax.tree_util.register_pytree_node_class
class Model:
    """A model ready to run.

    Its leaves are the parameters, so it passes through `jax.jit`, `jax.grad` and the like; the
    configuration is static. Methods run eagerly or under a trace; wrap loops in `jax.jit`.

    Attributes:
        params: nested dict of arrays.
        config: the configuration that the parameters belong to.
        begin: what documents begin with in each layer, as `prepare` computed it for a model with
            meta tokens; None otherwise, and then calls compute it.
    """

    def __init__(self, params: dict, plan: _Plan, begin: tuple | None = None):
        """Use `build_model`, `abstract_model` or `with_params`."""
        self.params = params
        self._plan = plan
        self.begin = begin

    @property
    def config(self) -> ModelConfig:
        """The configuration."""
        return self._plan.config

    @property
    def dtype(self) -> Any:
        """The compute dtype: that of the embedding."""
        return self.params["embedding"].dtype

    def with_params(self, params: dict) -> "Model":
        """The same model with other parameters."""
        return Model(params, self._plan)

    def with_max_len(self, max_len: int) -> "Model":
        """The same parameters in a model for rows of another length.

        Raises:
            ConfigError: the model has learnt positions, and not so many.
        """
        reason = self.config.inputs.refuses(max_len, self.config.meta_tokens)
        if reason is not None:
            raise ConfigError(f"model: {reason}")
        config = self.config.model_copy(update={"max_len": max_len})
        return Model(self.params, abstract_model(config)._plan, self.begin)

    def prepare(self, dtype: Any) -> "Model":
        """Returns the copy to compute with: parameters cast to `dtype`, sensitive ones float32.

        Meta tokens are run through the layers here, once, instead of in every call.

        Differentiable, so that a train step may compute in bfloat16 on float32 parameters.
        """

        def cast(path: tuple, leaf: Array) -> Array:
            return leaf.astype(jnp.float32 if path in self._plan.float32_paths else dtype)

        model = self.with_params(_by_path(self.params, cast))
        return Model(model.params, self._plan, _begin(model))

    def decay_mask(self) -> dict:
        """Nested dict of bool: True where weight decay applies (matrices)."""
        return _by_path(self._plan.shapes, lambda path, leaf: path in self._plan.decay_paths)

    def num_params(self) -> int:
        """Number of parameters, embeddings included, tied ones once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._plan.shapes))

    def num_active_params(self) -> int:
        """Parameters that one token's computation reads; fewer than all under routing."""
        abstract = nnx.merge(self._plan.graph, self._plan.shapes)
        return self.num_params() - abstract.inactive_params()

    def init_state(self, batch: int, max_len: int, *, dtype: Any = None) -> ModelState:
        """A state without history.

        Args:
            batch: B.
            max_len: tokens that a row may take in.
            dtype: of keys and values; the compute dtype when None. SSM states are float32.
        """
        dtype = self.dtype if dtype is None else dtype
        return self._module().init_state(batch, max_len, dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: ModelState | None = None,
        *,
        ctx: Context = Context(),  # noqa: B008  (frozen)
        collect: Collection[int] = (),
        remat: bool = False,
    ) -> tuple[Out, ModelState | None]:
        """Runs the layers over new tokens.

        Args:
            tokens: int32 (B T). T is free: a prompt is prefill, one token is decode.
            state: history; None for none, and then none is kept.
            ctx: padding, documents, mask, dropout.
            collect: layers whose output to return in `Out.taps`.
            remat: recompute each layer in the backward pass instead of keeping it.

        Returns:
            `Out` (hidden in the compute dtype, before the head) and the new state.

        Raises:
            ConfigError: a mixer cannot honour `ctx`; the message says which and why.
            CapacityError: a row longer than `max_len` without state.
        """
        return self._module()(
            tokens, state, ctx=ctx, collect=collect, remat=remat, begin=self.begin
        )

    def head(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits, float32. Pick positions before calling: this is a large matmul."""
        return self._module().head(hidden)

    def nll(
        self,
        hidden: Float[Array, "*B D"],
        targets: Int[Array, "*B"],
        *,
        banned: int | None = None,
    ) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
        """Cross-entropy of each target under the head, without keeping the logits of all.

        Args:
            hidden: of the positions that predict.
            targets: ids.
            banned: an id without probability (the mask).

        Returns:
            Nats and the log of the softmax denominator, float32.
        """
        return self._module().nll(hidden, targets, banned)

    def weighted_nll(
        self,
        hidden: Float[Array, "*B D"],
        targets: Int[Array, "*B"],
        token_weight: Float[Array, "*B"],
        *,
        banned: int | None = None,
    ) -> Float[Array, ""]:
        """The sum of `token_weight` times the cross-entropy: what training differentiates.

        Args:
            hidden: of the positions that predict.
            targets: ids; any where the weight is 0.
            token_weight: float32; no gradient flows into it.
            banned: an id without probability (the mask).
        """
        return self._module().weighted_nll(hidden, targets, token_weight, banned)

    def verify(
        self, tokens: Int[Array, "B T"], state: ModelState, *, ctx: Context = Context()  # noqa: B008
    ) -> tuple[Out, Any]:
        """Looks at tokens without taking them in; returns `Out` and what `commit` needs."""
        return self._module().verify(tokens, state, ctx=ctx, begin=self.begin)

    def commit(
        self,
        state: ModelState,
        pending: Any,
        path: Int[Array, "B K"],
        accepted: Int[Array, " B"],
    ) -> ModelState:
        """Takes in the first `accepted` of the verified tokens along `path`.

        Args:
            state: the state that `verify` was given.
            pending: what `verify` returned.
            path: int32 (B K), indices into the verified tokens, root first.
            accepted: int32 (B), how many of them to keep, 0 to K.
        """
        return self._module().commit(state, pending, path, accepted)

    def cost(self, batch: int, new_tokens: int, context: int) -> Cost:
        """Cost of one call with logits of every new token; see `cost_parts`."""
        parts = self.cost_parts(batch, new_tokens, context, logits=new_tokens).values()
        return sum(parts, Cost(0.0, 0.0, 0.0, 0.0))

    def cost_parts(
        self, batch: int, new_tokens: int, context: int, *, logits: int
    ) -> dict[str, Cost]:
        """Cost of one call by part, all rows together, the parameters that it reads included.

        Args:
            batch: rows.
            new_tokens: T of the call.
            context: tokens of history, S.
            logits: tokens per row that the head is applied to; 1 for a prompt.

        Returns:
            "head" (with the embedding and the final norm), mixers and MLPs by their classes'
            names, summed over layers, and "other" for what blocks have beside.
        """
        abstract = nnx.merge(self._plan.graph, self._plan.shapes)
        size = jnp.dtype(self.dtype).itemsize
        return abstract.cost_parts(batch, new_tokens, context, size, logits)

    def tree_flatten(self) -> tuple[tuple[dict, tuple | None], _Plan]:
        """Parameters, and what `prepare` made of the meta tokens, are the leaves."""
        return (self.params, self.begin), self._plan

    @classmethod
    def tree_unflatten(cls, plan: _Plan, children: tuple[dict, tuple | None]) -> "Model":
        """Inverse of `tree_flatten`."""
        params, begin = children
        return cls(params, plan, begin)

    def __repr__(self) -> str:
        """Size at a glance."""
        config = self.config
        return (
            f"Model({self.num_params():,} parameters, width={config.width}, "
            f"depth={config.num_layers}, pattern={list(config.pattern)})"
        )

    def _module(self) -> Backbone:
        return nnx.merge(self._plan.graph, self.params)


@jax.jit
def _begin(model: Model) -> tuple | None:
    return model._module().begin()


def build_model(config: ModelConfig, *, seed: int) -> Model:
    """Makes a model with fresh float32 parameters, a function of config and seed alone.

    Raises:
        ConfigError: `vocab_size` is missing, or parts of the configuration do not fit.
    """
    plan = abstract_model(config)._plan

    @jax.jit
    def draw(key: Array) -> dict:
        module = config.build(nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.split(module)[1])
        # Weak types would make the second train step compile anew.
        return jax.tree.map(lambda a: jax.lax.convert_element_type(a, a.dtype), params)

    return Model(draw(jax.random.key(seed)), plan)


def abstract_model(config: ModelConfig) -> Model:
    """A model whose parameters are shapes only: for counting, planning and restoring.

    Raises:
        ConfigError: see `build_model`.
    """
    try:
        plan = _plan(config)
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    return Model(plan.shapes, plan)
