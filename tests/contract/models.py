"""The tiny models that every contract is checked on, made from the registries.

A new name in a registry gets a model of its own here without any edit, from its defaults and the
settings below (give it some where the defaults are missing or large). Nothing is exempt from the
causal, stateful contracts without a written reason.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from genlab.errors import ConfigError
from genlab.paradigms import registry
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.context import Context
from genlab.paradigms.masks import Mask
from genlab.paradigms.model import Model, build_model
from genlab.train.yaml_loader import load_yaml

WIDTH, DEPTH, VOCAB, MAX_LEN = 16, 2, 23, 64

# Settings by registered name, over the defaults.
MIXERS: dict[str, dict] = {
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "head_dim": 8, "num_groups": 2},
}
MLPS: dict[str, dict] = {
    "swiglu": {"width": 24},
    "moe": {"width": 12, "num_experts": 4, "top_k": 2, "shared_experts": 1},
    "plain": {"width": 24},
}
BLOCKS: dict[str, dict] = {
    "parallel_heads": {"combine": "mean_of_norms", "multipliers": [1.0, 0.5]},
    "shared": {"lora_rank": 2, "lora": ["w_q", "w_gate", "w_up"]},
}

SEVERAL_MIXERS = ("parallel_heads", "shared")

# Models whose settings the registries' defaults do not reach: pattern -> mixers by layer.
ATTENTION = MIXERS["attention"] | {"name": "attention"}
VARIANTS: dict[str, dict[str, dict]] = {
    "attention_window": {"a": ATTENTION | {"window": 5, "qk_norm": True}},
    "mamba_select_norms": {"m": MIXERS["mamba"] | {"name": "mamba", "select_norms": True}},
    "hybrid": {
        "m": MIXERS["mamba"] | {"name": "mamba"},
        "a": ATTENTION | {"window": 6},
        "s": MIXERS["mamba2"] | {"name": "mamba2"},
    },
}

# Families that are hybrids by their YAML: each runs through the suite in small.
CONFIGS = Path(__file__).parents[2] / "configs" / "families"
HYBRIDS = ("falcon_h1", "hymba", "jamba", "samba", "zamba", "zamba2")

# Entries that need not run causally with a state, and why. A test checks that they do refuse.
BIDIRECTIONAL_ONLY = {
    "symmetric_conv": "a token sees both its sides, so there is no state that new tokens extend",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tiny model of the contract suite.

    Attributes:
        name: how tests call it.
        config_json: its `ModelConfig`.
    """

    name: str
    config_json: str

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The configuration."""
        return ModelConfig.model_validate_json(self.config_json)

    @functools.cached_property
    def model(self) -> Model:
        """The model, float32, built once, with weights large enough that every layer matters."""
        model = build_model(self.config, seed=7)

        def louder(path: Any, leaf: jax.Array) -> jax.Array:
            # The embedding's small scale would leave nothing to see of the layers' errors, nor
            # would matrices that begin at zero (the second one of a low-rank adapter).
            if leaf.ndim == 2 and not leaf.any():
                return 0.3 * jax.random.normal(jax.random.key(1), leaf.shape)
            loud = jax.tree_util.keystr(path) in ("['embedding']", "['meta']")
            return leaf * 25 if loud else leaf

        return model.with_params(jax.tree_util.tree_map_with_path(louder, model.params))

    def refusal(self, mask: Mask, *, stateful: bool = False) -> str | None:
        """The reason why the model will not run under a mask, None if it will."""

        def run(model: Model) -> Any:
            state = model.init_state(1, 8) if stateful else None
            return model(jnp.zeros((1, 3), jnp.int32), state, ctx=Context(mask=mask))

        try:
            jax.eval_shape(run, self.model)
        except ConfigError as error:
            return str(error)
        return None


def layer(**parts: dict | None) -> dict:
    """A layer: an attention mixer and a SwiGLU in a pre-norm block unless `parts` says else."""
    return {
        "block": {"name": "prenorm"},
        "mixer": ATTENTION,
        "mlp": MLPS["swiglu"] | {"name": "swiglu"},
    } | parts


def entry(name: str, layers: dict[str, dict], **more: Any) -> Entry:
    """A model of the given layers, each at least once and at least `DEPTH` in all."""
    config = {
        "width": WIDTH,
        "depth": max(DEPTH, len(layers)),
        "pattern": list(layers),
        "layers": layers,
        "max_len": MAX_LEN,
        "vocab_size": VOCAB,
    }
    return Entry(name, json.dumps(config | more))


def shrunk(name: str) -> Entry:
    """The model of a family's YAML with the same wiring and pattern, and small numbers."""
    model = load_yaml(CONFIGS / f"{name}.yaml")["model"]

    def small_mixer(mixer: dict) -> dict:
        window = {"window": 5} if "window" in mixer else {}
        return mixer | MIXERS[mixer["name"]] | window

    layers = {}
    for kind, parts in model["layers"].items():
        parts = dict(parts)
        if "mixer" in parts:
            parts["mixer"] = small_mixer(parts["mixer"])
        if "mixers" in parts:
            parts["mixers"] = [small_mixer(mixer) for mixer in parts["mixers"]]
        if "mlp" in parts:
            parts["mlp"] = parts["mlp"] | MLPS.get(parts["mlp"]["name"], {})
        if "lora_rank" in parts.get("block", {}):
            parts["block"] = parts["block"] | {"lora_rank": 2}
        layers[kind] = parts
    small = {"width": WIDTH, "layers": layers, "max_len": MAX_LEN, "vocab_size": VOCAB}
    if "meta_tokens" in model:
        small["meta_tokens"] = 3
    return Entry(name, json.dumps(model | small))


def all_entries() -> dict[str, Entry]:
    """Every registered mixer, block and MLP in at least one model, and the variants."""
    found = {}
    for name in registry.MIXERS:
        mixer = MIXERS.get(name, {}) | {"name": name}
        layers = {"x": layer(mixer=mixer)}
        if name in BIDIRECTIONAL_ONLY:
            layers["a"] = layer()
        found[name] = entry(name, layers)
    for name, mixers in VARIANTS.items():
        found[name] = entry(name, {k: layer(mixer=mixer) for k, mixer in mixers.items()})
    for name in registry.MLPS:
        if name != "swiglu":
            mlp = MLPS.get(name, {}) | {"name": name}
            found[f"mlp_{name}"] = entry(f"mlp_{name}", {"x": layer(mlp=mlp)})
    for name in registry.BLOCKS:
        if name != "prenorm":
            block = BLOCKS.get(name, {}) | {"name": name}
            mamba = MIXERS["mamba"] | {"name": "mamba"}
            layers = {"a": layer(block=block), "m": layer(block=block, mixer=mamba)}
            if name in SEVERAL_MIXERS:
                both = layer(block=block, mixers=[ATTENTION, mamba])
                del both["mixer"]
                layers = {"b": both, "a": layer()}
            found[f"block_{name}"] = entry(f"block_{name}", layers)
    # Meta tokens before the mixers that Hymba's YAML does not put them before.
    mamba2 = layer(mixer=MIXERS["mamba2"] | {"name": "mamba2"})
    found["meta_mamba2"] = entry("meta_mamba2", {"s": mamba2, "a": layer()}, meta_tokens=5)
    return found | {name: shrunk(name) for name in HYBRIDS}


ENTRIES = all_entries()
CAUSAL = {name: e for name, e in ENTRIES.items() if name not in BIDIRECTIONAL_ONLY}


# Compiled once for all tests: jit tells the models apart by their configuration. Compiling is
# nearly all that the suite costs, so LLVM leaves these small programs unoptimised.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(_jit, static_argnames=("collect",))
def run(
    model: Model,
    tokens: Any,
    state: Any = None,
    ctx: Context = Context(),  # noqa: B008  (frozen)
    collect: tuple[int, ...] = (),
) -> tuple[Any, Any]:
    """`model(...)`, compiled: Out and state."""
    return model(tokens, state, ctx=ctx, collect=collect)


@_jit
def verify(
    model: Model,
    tokens: Any,
    state: Any,
    ctx: Context = Context(),  # noqa: B008
) -> tuple[Any, Any]:
    """`model.verify(...)`, compiled."""
    return model.verify(tokens, state, ctx=ctx)


@_jit
def commit(model: Model, state: Any, pending: Any, path: Any, accepted: Any) -> Any:
    """`model.commit(...)`, compiled."""
    return model.commit(state, pending, path, accepted)


@_jit
def head(model: Model, hidden: jax.Array) -> jax.Array:
    """`model.head(...)`, compiled."""
    return model.head(hidden)


def random_tokens(seed: int, batch: int, length: int) -> np.ndarray:
    """int32 (B T), any id of the vocabulary."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, VOCAB, (batch, length), dtype=np.int32)
