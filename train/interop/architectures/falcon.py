"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side, with factors everywhere."""

from typing import Any

import numpy as np

from ....errors import ConfigError
from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .parts import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    ATTENTION,
    MAMBA2,
    SWIGLU,
    NoneType,
    read_attention,
    unlimited_steps,
)

TOP = (
    ("embedding", "model.embed_tokens.weight", SAME),
    ("final_norm.scale", "model.final_layernorm.weight", SAME),
    ("w_head", "lm_head.weight", TRANSPOSED),
)
NORMS = (
    ("mixer_norm.scale", "input_layernorm.weight", SAME),
    ("mlp_norm.scale", "pre_ff_layernorm.weight", SAME),
)
HARMLESS = ("mamba_chunk_size", "mamba_use_mlp", "num_logits_to_keep", "use_mamba_kernels")


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config.

    Factors on the attention's input and keys act on the scores, and that on the input acts on what
    comes out as well; factors on the Mamba-2's input act on all that is projected from it.
    """
    c.ignore(*HARMLESS)
    c.must_be("mamba_conv_bias", True)
    c.must_be("mamba_proj_bias", False)
    c.must_be("projectors_bias", False)
    c.must_be("attention_bias", False)
    unlimited_steps(c)
    width = c.take("hidden_size", int)
    attention = read_attention(c, kv_heads=8)
    head_dim = c.take("head_dim", (int, NoneType), None) or width // attention["num_heads"]
    c.raw.setdefault("max_position_embeddings", 8192)
    rope, max_len = read_rope(c, head_dim=head_dim)
    enter, leave = (c.take(f"attention_{way}_multiplier", float, 1.0) for way in ("in", "out"))
    scores = enter * enter * c.take("key_multiplier", float, 1.0)
    attention |= rope | {"head_dim": head_dim, "score_scale": head_dim**-0.5 * scores}
    mamba, mamba_leave = _mamba(c, width)
    mlp = {
        "name": "swiglu",
        "width": c.take("intermediate_size", int),
        "activation": c.choose("hidden_act", ACTIVATIONS, "silu"),
        "bias": c.take("mlp_bias", bool, False),
        "multipliers": _factors(c, "mlp_multipliers", 2),
    }
    block = {"name": "parallel_heads", "multipliers": [enter * leave, mamba_leave]}
    return {
        "width": width,
        "depth": c.take("num_hidden_layers", int),
        "pattern": ["heads"],
        "layers": {"heads": {"block": block, "mixers": [attention, mamba], "mlp": mlp}},
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm_eps": c.take("rms_norm_eps", float, 1e-5),
        "inputs": {"scale": c.take("embedding_multiplier", float, 1.0)},
        "output": {"scale": c.take("lm_head_multiplier", float, 1.0)},
    }


def _mamba(c: HFConfig, width: int) -> tuple[dict[str, Any], float]:
    """The Mamba-2 and the factor on what it returns."""
    expand = c.take("mamba_expand", int, 2)
    inner = c.take("mamba_d_ssm", (int, NoneType), 1024) or expand * width
    heads = c.take("mamba_n_heads", int, 128)
    c.must_be("mamba_d_head", "auto", inner // heads)
    norm = c.take("mamba_rms_norm", bool, False)
    c.must_be("mamba_norm_before_gate", *((False,) if norm else (False, True)))
    if norm and "mamba_norm_before_gate" not in c.raw:
        raise ConfigError(
            f"{c.source}: mamba_norm_before_gate is missing, which means true beside "
            "mamba_rms_norm=true and is not implemented"
        )
    enter = c.take("ssm_in_multiplier", float, 1.0)
    mixer = {
        "name": "mamba2",
        "state_size": c.take("mamba_d_state", int, 256),
        "head_dim": inner // heads,
        "expand": expand,
        "inner_width": inner,
        "num_groups": c.take("mamba_n_groups", int, 1),
        "conv_width": c.take("mamba_d_conv", int, 4),
        "multipliers": [enter * factor for factor in _factors(c, "ssm_multipliers", 5)],
        "gate_norm": norm,
    }
    return mixer, c.take("ssm_out_multiplier", float, 1.0)


def _factors(c: HFConfig, key: str, count: int) -> list[float]:
    found = c.take(key, (list, NoneType), None) or [1.0] * count
    if len(found) != count or any(
        isinstance(factor, bool) or not isinstance(factor, int | float) for factor in found
    ):
        raise ConfigError(f"{c.source}: {key} is {found!r}, want {count} numbers")
    return [float(factor) for factor in found]


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    layers = [model.layers[kind] for kind in model.stack]
    first = layers[0]
    names = [mixer.name for mixer in first.mixers]
    if first.block.name != "parallel_heads" or names != ["attention", "mamba2"]:
        raise Unfit("its layers do not have attention and mamba2 side by side, in that order")
    if any(layer.mlp is None or layer.mlp.name != "swiglu" for layer in layers):
        raise Unfit("its layers do not all have a SwiGLU as their MLP")
    attention, mamba = first.mixers
    if attention.rope_base is None:
        raise Unfit("it has no rotary positions")
    head_dim = attention.head_dim or model.width // attention.num_heads
    inner = mamba.inner_width or mamba.expand * model.width
    leave = first.block.multipliers or (1.0, 1.0)
    raw = {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim,
        "key_multiplier": _quotient(attention.score_scale or head_dim**-0.5, head_dim**-0.5),
        "attention_out_multiplier": leave[0],
        "ssm_out_multiplier": leave[1],
        "ssm_multipliers": list(mamba.multipliers),
        "mamba_d_ssm": inner,
        "mamba_expand": mamba.expand,
        "mamba_n_heads": inner // mamba.head_dim,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_state": mamba.state_size,
        "mamba_d_conv": mamba.conv_width,
        "mamba_rms_norm": mamba.gate_norm,
        "mamba_norm_before_gate": False,
        "intermediate_size": first.mlp.width,
        "hidden_act": ACTIVATION_NAMES[first.mlp.activation],
        "mlp_bias": first.mlp.bias,
        "mlp_multipliers": list(first.mlp.multipliers),
        "embedding_multiplier": model.inputs.scale,
        "lm_head_multiplier": model.output.scale,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(attention, head_dim, model.max_len),
    }
    if head_dim * attention.num_heads == model.width:
        del raw["head_dim"]
    return raw


def _quotient(product: float, factor: float) -> float:
    """A number that times `factor` is `product`, to the last bit if there is one."""
    near = product / factor
    around = (np.nextafter(near, -np.inf), near, np.nextafter(near, np.inf))
    return next((float(one) for one in around if factor * float(one) == product), near)


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP)
    for i in range(model.num_layers):
        ours, theirs = f"layer_{i}.", f"model.layers.{i}."
        found += rows(ours, theirs, NORMS)
        found += rows(f"{ours}mixer_0.", f"{theirs}self_attn.", ATTENTION)
        found += rows(f"{ours}mixer_1.", f"{theirs}mamba.", MAMBA2)
        found += rows(f"{ours}mlp.", f"{theirs}feed_forward.", SWIGLU)
    return found


ARCHITECTURE = Architecture(
    name="falcon_h1",
    model_types=("falcon_h1",),
    read=read,
    write=write,
    table=table,
    copies=lambda model: (
        {"lm_head.weight": "model.embed_tokens.weight"} if model.tie_embeddings else {}
    ),
    ignored=("mup_vector", "rotary_emb.inv_freq"),
)
