"""LLaDA (arXiv 2502.09992): Llama's layers under masked diffusion, in OLMo's spelling."""

from typing import Any

from ....errors import ConfigError
from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from .parts import NoneType, mixers_of, mlps_of

TOP = (
    ("embedding", "wte.weight", SAME),
    ("final_norm.scale", "ln_f.weight", SAME),
    ("w_head", "ff_out.weight", TRANSPOSED),
)
LAYER = (
    ("mixer_norm.scale", "attn_norm.weight", SAME),
    ("mixer.w_q", "q_proj.weight", TRANSPOSED),
    ("mixer.w_k", "k_proj.weight", TRANSPOSED),
    ("mixer.w_v", "v_proj.weight", TRANSPOSED),
    ("mixer.w_o", "attn_out.weight", TRANSPOSED),
    ("mixer.b_q", "q_proj.bias", SAME),
    ("mixer.b_k", "k_proj.bias", SAME),
    ("mixer.b_v", "v_proj.bias", SAME),
    ("mixer.b_o", "attn_out.bias", SAME),
    ("mlp_norm.scale", "ff_norm.weight", SAME),
    ("mlp.w_gate", "ff_proj.weight", TRANSPOSED),
    ("mlp.w_up", "up_proj.weight", TRANSPOSED),
    ("mlp.w_down", "ff_out.weight", TRANSPOSED),
    ("mlp.b_gate", "ff_proj.bias", SAME),
    ("mlp.b_up", "up_proj.bias", SAME),
    ("mlp.b_down", "ff_out.bias", SAME),
)
# How parameters begin, dropout, and which program runs them.
HARMLESS = (
    "alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "embedding_dropout",
    "flash_attention", "init_cutoff_factor", "init_device", "init_fn", "init_std", "precision",
    "residual_dropout",
)  # fmt: skip


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config. Absent keys mean what LLaDA's program has."""
    c.ignore(*HARMLESS)
    c.must_be("block_type", "llama")
    c.must_be("activation_type", "silu")
    c.must_be("layer_norm_type", "rms")
    c.must_be("layer_norm_with_affine", True)
    c.must_be("bias_for_layer_norm", False, None)
    c.must_be("attention_layer_norm", False)
    c.must_be("input_emb_norm", False)
    c.must_be("scale_logits", False)
    c.must_be("alibi", False)
    c.must_be("rope", True)
    c.must_be("rope_full_precision", True)
    for key in ("block_type", "activation_type", "layer_norm_type", "rope"):
        c.take(key, (str, bool))  # the program's own defaults are others, so they must be said
    width, heads = c.take("d_model", int), c.take("n_heads", int)
    kv_heads = c.take("n_kv_heads", (int, NoneType), None)
    if kv_heads is None:
        kv_heads = 1 if c.take("multi_query_attention", (bool, NoneType), None) else heads
    c.must_be("multi_query_attention", None, kv_heads == 1)
    biased = c.take("include_bias", bool, False)
    ids = c.take("vocab_size", int)
    rows_there = c.take("embedding_size", (int, NoneType), None) or ids
    if rows_there < ids:
        raise ConfigError(
            f"{c.source}: embedding_size is {rows_there}, want at least vocab_size, {ids}"
        )
    mixer = {
        "name": "attention",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rope_base": c.take("rope_theta", float, 10000.0),
        "qkv_bias": biased or c.take("include_qkv_bias", bool, False),
        "out_bias": biased,
    }
    inner = c.take("mlp_hidden_size", (int, NoneType), None)
    ratio = c.take("mlp_ratio", int, 4)
    mlp = {"name": "swiglu", "width": inner or ratio * width, "bias": biased}
    return {
        "width": width,
        "depth": c.take("n_layers", int),
        "pattern": ["layer"],
        "layers": {"layer": {"mixer": mixer, "mlp": mlp}},
        "max_len": c.take("max_sequence_length", int, 1024),
        # The rows beyond the vocabulary are ids like others: the published head gives them logits.
        "vocab_size": rows_there,
        "tie_embeddings": c.take("weight_tying", bool, True),
        "norm_eps": c.take("rms_norm_eps", float, 1e-5),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixer, mlp = mixers_of(model, "attention")[0], mlps_of(model, "swiglu")[0]
    if mixer.rope_base is None:
        raise Unfit("it has no rotary positions")
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": mlp.activation,
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_type": "llama",
        "d_model": model.width,
        "embedding_size": model.padded_vocab_size,
        "include_bias": mlp.bias,
        "include_qkv_bias": mixer.qkv_bias,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": model.max_len,
        "mlp_hidden_size": mlp.width,
        "n_heads": mixer.num_heads,
        "n_kv_heads": mixer.num_kv_heads or mixer.num_heads,
        "n_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": mixer.rope_base,
        "scale_logits": False,
        "vocab_size": model.padded_vocab_size,
        "weight_tying": model.tie_embeddings,
    }


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    top = "model.transformer."
    found = rows("", top, TOP)
    for i in range(model.num_layers):
        found += rows(f"layer_{i}.", f"{top}blocks.{i}.", LAYER)
    return found


ARCHITECTURE = Architecture(
    name="llada",
    model_types=("llada",),
    read=read,
    write=write,
    table=table,
    paradigm=lambda config: {"name": "masked_diffusion", "low_discrepancy": False},
)
