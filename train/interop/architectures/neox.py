"""GPT-NeoX and Pythia: parallel residuals, layer norms, partly rotated heads."""

from typing import Any

from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .parts import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    fused_by_head,
    mixers_of,
    mlps_of,
    norm_rows,
)

TOP = (
    ("embedding", "gpt_neox.embed_in.weight", SAME),
    ("w_head", "embed_out.weight", TRANSPOSED),
)
LAYER = (
    ("mixer.w_o", "attention.dense.weight", TRANSPOSED),
    ("mixer.b_o", "attention.dense.bias", SAME),
    ("mlp.w_up", "mlp.dense_h_to_4h.weight", TRANSPOSED),
    ("mlp.b_up", "mlp.dense_h_to_4h.bias", SAME),
    ("mlp.w_down", "mlp.dense_4h_to_h.weight", TRANSPOSED),
    ("mlp.b_down", "mlp.dense_4h_to_h.bias", SAME),
)


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    width, heads = c.take("hidden_size", int), c.take("num_attention_heads", int)
    c.raw.setdefault("max_position_embeddings", 2048)
    base, share = c.take("rotary_emb_base", float, 10000.0), c.take("rotary_pct", float, 0.25)
    rope, max_len = read_rope(c, head_dim=width // heads, base=base, partial=share)
    biased = c.take("attention_bias", bool, True)
    mixer = {
        "name": "attention",
        "num_heads": heads,
        "qkv_bias": biased,
        "out_bias": biased,
        **rope,
    }
    mlp = {
        "name": "plain",
        "width": c.take("intermediate_size", int),
        "activation": c.choose("hidden_act", ACTIVATIONS, "gelu"),
    }
    parallel = c.take("use_parallel_residual", bool, True)
    block = {"name": "parallel", "one_norm": False} if parallel else {"name": "prenorm"}
    return {
        "width": width,
        "depth": c.take("num_hidden_layers", int),
        "pattern": ["layer"],
        "layers": {"layer": {"block": block, "mixer": mixer, "mlp": mlp}},
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm": "layer",
        "norm_eps": c.take("layer_norm_eps", float, 1e-5),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixer, mlp = mixers_of(model, "attention")[0], mlps_of(model, "plain")[0]
    if mixer.rope_base is None:
        raise Unfit("it has no rotary positions")
    rope = write_rope(mixer, model.width // mixer.num_heads, model.max_len, partial=True)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "intermediate_size": mlp.width,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "attention_bias": mixer.qkv_bias,
        "use_parallel_residual": model.layers[model.stack[0]].block.name == "parallel",
        "layer_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "rotary_emb_base": rope.pop("rope_theta"),
        "rotary_pct": rope.pop("partial_rotary_factor"),
        **rope,
    }


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP) + norm_rows("final_norm", "gpt_neox.final_layer_norm")
    for i, kind in enumerate(model.stack):
        ours, theirs = f"layer_{i}.", f"gpt_neox.layers.{i}."
        found += norm_rows(f"{ours}mixer_norm", f"{theirs}input_layernorm")
        found += norm_rows(f"{ours}mlp_norm", f"{theirs}post_attention_layernorm")
        fused = fused_by_head(getattr(model.layers[kind].mixer, "num_heads", 1))
        qkv = f"{theirs}attention.query_key_value."
        found.append(
            Row(tuple(f"{ours}mixer.w_{x}" for x in "qkv"), (f"{qkv}weight",), fused.weight)
        )
        found.append(Row(tuple(f"{ours}mixer.b_{x}" for x in "qkv"), (f"{qkv}bias",), fused.bias))
        found += rows(ours, theirs, LAYER)
    return found


def copies(model: ModelConfig) -> dict[str, str]:
    """Some files hold the head of a model that ties it to the embedding."""
    return {"embed_out.weight": "gpt_neox.embed_in.weight"} if model.tie_embeddings else {}


ARCHITECTURE = Architecture(
    name="gpt_neox",
    model_types=("gpt_neox",),
    read=read,
    write=write,
    table=table,
    copies=copies,
    ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
)
