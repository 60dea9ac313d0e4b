"""Models by name: our configuration, and what another project calls the same model."""

from typing import Any, NamedTuple

from ...errors import ConfigError, suggest
from ...paradigms.backbone import ModelConfig
from ...train.yaml_loader import validate


class ModelShape(NamedTuple):
    """One model.

    Attributes:
        ours: values of a `ModelConfig` without `max_len`.
        published: the same as a published config (`config.json`), or None where there is none.
    """

    ours: dict[str, Any]
    published: dict[str, Any] | None

    def config(self, max_len: int) -> ModelConfig:
        """Our configuration for rows of such a length."""
        return validate(ModelConfig, self.ours | {"max_len": max_len}, "model shape")


def _transformer(width: int, depth: int, heads: int, mlp: int, vocab: int) -> ModelShape:
    ours = {
        "width": width,
        "depth": depth,
        "pattern": ["attention"],
        "layers": {
            "attention": {
                "mixer": {"name": "attention", "num_heads": heads},
                "mlp": {"name": "swiglu", "width": mlp},
            }
        },
        "vocab_size": vocab,
        "tie_embeddings": False,
    }
    published = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 20,
    }
    return ModelShape(ours, published)


def _mamba(width: int, depth: int, states: int, vocab: int) -> ModelShape:
    ours = {
        "width": width,
        "depth": depth,
        "pattern": ["mamba"],
        "layers": {"mamba": {"mixer": {"name": "mamba", "state_size": states}}},
        "vocab_size": vocab,
    }
    published = {
        "model_type": "mamba",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "state_size": states,
        "vocab_size": vocab,
    }
    return ModelShape(ours, published)


def _mamba2(width: int, depth: int, states: int, heads: int, vocab: int) -> ModelShape:
    head_dim = 2 * width // heads
    ours = {
        "width": width,
        "depth": depth,
        "pattern": ["mamba2"],
        "layers": {
            "mamba2": {"mixer": {"name": "mamba2", "state_size": states, "head_dim": head_dim}}
        },
        "vocab_size": vocab,
        "tie_embeddings": False,
    }
    published = {
        "model_type": "mamba2",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "state_size": states,
        "num_heads": heads,
        "head_dim": head_dim,
        "n_groups": 1,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    return ModelShape(ours, published)


SHAPES: dict[str, ModelShape] = {
    "transformer_134m": _transformer(768, 12, 12, 2048, 32000),
    "mamba_115m": _mamba(768, 24, 16, 32000),
    "mamba2_140m": _mamba2(768, 24, 128, 24, 32000),
    "transformer_1b": _transformer(2048, 16, 16, 8192, 32000),
    "mamba2_1b": _mamba2(2048, 40, 128, 64, 32000),
    "transformer_tiny": _transformer(64, 2, 4, 96, 256),
    "mamba_tiny": _mamba(64, 2, 8, 256),
    "mamba2_tiny": _mamba2(64, 2, 16, 4, 256),
}
DEFAULT = ("transformer_134m", "mamba_115m", "mamba2_140m")


def shape_of(name: str) -> ModelShape:
    """A shape by its name.

    Raises:
        ConfigError: there is none; the nearest is named.
    """
    if name not in SHAPES:
        raise ConfigError(f"--shape {name!r}: no such model{suggest(name, SHAPES)}")
    return SHAPES[name]
