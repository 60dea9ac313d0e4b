"""Dream (arXiv 2508.15487): Qwen2's layers under masked diffusion, each position about the next."""

from typing import Any

from ....paradigms.backbone import ModelConfig
from ..architecture import Architecture, Unfit
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from . import llama
from .parts import ACTIVATION_NAMES, ACTIVATIONS, mixers_of, mlps_of, read_attention


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    width = c.take("hidden_size", int)
    mixer = read_attention(c, kv_heads=32)
    c.raw.setdefault("max_position_embeddings", 32768)
    rope, max_len = read_rope(c, head_dim=width // mixer["num_heads"])
    c.must_be("use_sliding_window", False)
    c.must_be("use_mrope", False)
    c.must_be("attention_bias", True)
    c.must_be("mlp_bias", False)
    c.ignore("sliding_window", "max_window_layers")  # of use_sliding_window
    mixer |= {**rope, "qkv_bias": True}
    mlp = {
        "name": "swiglu",
        "width": c.take("intermediate_size", int),
        "activation": c.choose("hidden_act", ACTIVATIONS, "silu"),
    }
    return {
        "width": width,
        "depth": c.take("num_hidden_layers", int),
        "pattern": ["layer"],
        "layers": {"layer": {"mixer": mixer, "mlp": mlp}},
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm_eps": c.take("rms_norm_eps", float, 1e-6),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixer, mlp = mixers_of(model, "attention")[0], mlps_of(model, "swiglu")[0]
    if mixer.rope_base is None:
        raise Unfit("it has no rotary positions")
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads or mixer.num_heads,
        "intermediate_size": mlp.width,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(mixer, model.width // mixer.num_heads, model.max_len),
    }


ARCHITECTURE = Architecture(
    name="dream",
    model_types=("Dream",),
    read=read,
    write=write,
    table=llama.table,
    copies=llama.copies,
    ignored=("rotary_emb.inv_freq",),
    paradigm=lambda config: {"name": "masked_diffusion", "shift": True},
)
