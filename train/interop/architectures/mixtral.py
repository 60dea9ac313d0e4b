"""Mixtral: Llama's layers with a mixture of experts as their MLP (arXiv 2401.04088)."""

from typing import Any

from ....paradigms.backbone import ModelConfig
from ..architecture import Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .llama import LAYER, TOP
from .parts import ATTENTION, NoneType, experts, mixers_of, read_attention


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    width = c.take("hidden_size", int)
    mixer = read_attention(c, kv_heads=8)
    head_dim = c.take("head_dim", (int, NoneType), None) or width // mixer["num_heads"]
    c.raw.setdefault("max_position_embeddings", 131072)
    rope, max_len = read_rope(c, head_dim=head_dim, base=1e6)
    c.must_be("hidden_act", "silu")
    c.must_be("output_router_logits", False, True)  # for the loss alone
    c.must_be("router_jitter_noise", 0.0)
    window = c.take("sliding_window", (int, NoneType), None)
    chosen = c.take("num_experts_per_tok", int, 2)
    mlp = {
        "name": "moe",
        "width": c.take("intermediate_size", int),
        "num_experts": c.take("num_local_experts", int, 8),
        "top_k": chosen,
        "balance_weight": c.take("router_aux_loss_coef", float, 0.001),
        # The only expert's gate is 1 either way, but then the router would learn nothing.
        "normalize_weights": True,
    }
    mixer |= {"head_dim": head_dim, "window": window, **rope}
    return {
        "width": width,
        "depth": c.take("num_hidden_layers", int),
        "pattern": ["experts"],
        "layers": {"experts": {"mixer": mixer, "mlp": mlp}},
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm_eps": c.take("rms_norm_eps", float, 1e-5),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixer = mixers_of(model, "attention")[0]
    mlp = model.layers[model.stack[0]].mlp
    if mlp is None or mlp.name != "moe":
        raise Unfit("its layers have no mixture of experts")
    if mixer.rope_base is None:
        raise Unfit("it has no rotary positions")
    head_dim = mixer.head_dim or model.width // mixer.num_heads
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads or mixer.num_heads,
        "head_dim": head_dim,
        "sliding_window": mixer.window,
        "intermediate_size": mlp.width,
        "num_local_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.top_k,
        "router_aux_loss_coef": mlp.balance_weight,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(mixer, head_dim, model.max_len),
    }


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP)
    for i, kind in enumerate(model.stack):
        mlp = model.layers[kind].mlp
        count = mlp.num_experts if mlp is not None and mlp.name == "moe" else 0
        ours, theirs = f"layer_{i}.", f"model.layers.{i}."
        found += rows(ours, theirs, LAYER)
        found += rows(f"{ours}mixer.", f"{theirs}self_attn.", ATTENTION)
        lines = experts(
            count, router="gate.weight", expert="experts.{}", gate="w1", up="w3", down="w2"
        )
        found += rows(f"{ours}mlp.", f"{theirs}block_sparse_moe.", lines)
    return found


ARCHITECTURE = Architecture(
    name="mixtral", model_types=("mixtral",), read=read, write=write, table=table
)
