"""Hybrids of attention and state spaces with an MLP in each layer.

Jamba has Mamba and in some layers experts (arXiv 2403.19887); Bamba has Mamba-2 and rotary
positions.
"""

from typing import Any

from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .parts import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    ATTENTION,
    MAMBA,
    MAMBA2,
    SWIGLU,
    NoneType,
    experts,
    mixers_of,
    of_kind,
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
HARMLESS = (
    "calc_logits_for_entire_prompt", "mamba_chunk_size", "n_ctx", "num_logits_to_keep",
    "output_router_logits", "use_associative_scan", "use_mamba_kernels", "use_mambapy",
    "z_loss_coefficient",
)  # fmt: skip


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    bamba = c.raw["model_type"] == "bamba"
    width, depth = c.take("hidden_size", int), c.take("num_hidden_layers", int)
    c.ignore(*HARMLESS)
    c.must_be("mamba_conv_bias", True)
    c.must_be("mamba_proj_bias", False)
    c.raw.setdefault("max_position_embeddings", 262144)
    attention = read_attention(c, kv_heads=8)
    state_space = _read_bamba(c, width) if bamba else _read_jamba(c)
    if bamba:
        rope, max_len = read_rope(c, head_dim=width // attention["num_heads"], partial=0.5)
        biased = c.take("attention_bias", bool, False)
        attention |= rope | {"qkv_bias": biased, "out_bias": biased}
        placed = c.take("attn_layer_indices", (list, NoneType), None) or []
        has_attention = [i in placed for i in range(depth)]
        has_experts, router = [False] * depth, {}
    else:
        max_len = c.take("max_position_embeddings", int)
        attention["rope_base"] = None
        period, offset = c.take("attn_layer_period", int, 8), c.take("attn_layer_offset", int, 4)
        has_attention = [i % period == offset for i in range(depth)]
        has_experts, router = _read_experts(c, depth)
    mlp = {
        "name": "swiglu",
        "width": c.take("intermediate_size", int),
        "activation": c.choose("hidden_act", ACTIVATIONS, "silu"),
        "bias": bamba and c.take("mlp_bias", bool, False),
    }
    mixers = {"attention": attention, "state_space": state_space}
    mlps = {"": mlp, "_experts": {"name": "moe", "width": mlp["width"], **router}}
    pattern = [
        ("attention" if own else "state_space") + ("_experts" if many else "")
        for own, many in zip(has_attention, has_experts, strict=True)
    ]
    layers = {}
    for kind in dict.fromkeys(pattern):
        mixer = kind.removesuffix("_experts")
        layers[kind] = {"mixer": mixers[mixer], "mlp": mlps[kind.removeprefix(mixer)]}
    return {
        "width": width,
        "depth": depth,
        "pattern": pattern,
        "layers": layers,
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm_eps": c.take("rms_norm_eps", float, 1e-5 if bamba else 1e-6),
    }


def _read_jamba(c: HFConfig) -> dict[str, Any]:
    rank = c.take("mamba_dt_rank", (int, str), "auto")
    c.must_be("mamba_inner_layernorms", True)
    c.must_be("sliding_window", None)
    return {
        "name": "mamba",
        "state_size": c.take("mamba_d_state", int, 16),
        "conv_width": c.take("mamba_d_conv", int, 4),
        "expand": c.take("mamba_expand", int, 2),
        "dt_rank": None if rank == "auto" else rank,
        "select_norms": True,
    }


def _read_bamba(c: HFConfig, width: int) -> dict[str, Any]:
    unlimited_steps(c)
    expand, heads = c.take("mamba_expand", int, 2), c.take("mamba_n_heads", int, 128)
    c.must_be("mamba_d_head", "auto", expand * width // heads)
    return {
        "name": "mamba2",
        "state_size": c.take("mamba_d_state", int, 256),
        "head_dim": expand * width // heads,
        "expand": expand,
        "num_groups": c.take("mamba_n_groups", int, 1),
        "conv_width": c.take("mamba_d_conv", int, 4),
    }


def _read_experts(c: HFConfig, depth: int) -> tuple[list[bool], dict[str, Any]]:
    period, offset = c.take("expert_layer_period", int, 2), c.take("expert_layer_offset", int, 1)
    count = c.take("num_experts", int, 16)
    router = {
        "num_experts": count,
        "top_k": c.take("num_experts_per_tok", int, 2),
        "balance_weight": c.take("router_aux_loss_coef", float, 0.001),
        "normalize_weights": False,
    }
    return [count > 1 and i % period == offset for i in range(depth)], router


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixers = mixers_of(model, "attention", "mamba", "mamba2")
    mlps = [model.layers[kind].mlp for kind in model.stack]
    attention = of_kind(mixers, "attention")
    first, second = of_kind(mixers, "mamba"), of_kind(mixers, "mamba2")
    if attention is None or (first is None) == (second is None):
        raise Unfit("want attention in some layers and either mamba or mamba2 in the others")
    if any(mlp is None or mlp.name not in ("swiglu", "moe") for mlp in mlps):
        raise Unfit("want an MLP in each layer, swiglu or moe")
    dense, many = of_kind(mlps, "swiglu"), of_kind(mlps, "moe")
    any_mlp = dense or many
    raw = {
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "intermediate_size": any_mlp.width,
        "hidden_act": ACTIVATION_NAMES[dense.activation] if dense else "silu",
        "max_position_embeddings": model.max_len,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    own = first or second
    raw |= {
        "mamba_d_state": own.state_size,
        "mamba_d_conv": own.conv_width,
        "mamba_expand": own.expand,
    }
    places = [i for i, mixer in enumerate(mixers) if mixer.name == "attention"]
    if second is not None:
        if attention.rope_base is None or dense is None:
            raise Unfit("beside mamba2 it wants rotary positions and swiglu")
        head_dim = model.width // attention.num_heads
        return raw | {
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "mamba_n_heads": second.expand * model.width // second.head_dim,
            "mamba_d_head": second.head_dim,
            "mamba_n_groups": second.num_groups,
            "attn_layer_indices": places,
            "attention_bias": attention.qkv_bias,
            "mlp_bias": dense.bias,
            **write_rope(attention, head_dim, model.max_len, partial=True),
        }
    raw |= {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "mamba_dt_rank": first.dt_rank or -(-model.width // 16),
    }
    raw |= _period("attn_layer", places, model.num_layers)
    with_experts = [i for i, mlp in enumerate(mlps) if mlp.name == "moe"]
    if many is None:
        return raw | {"num_experts": 1}
    return (
        raw
        | _period("expert_layer", with_experts, model.num_layers)
        | {
            "num_experts": many.num_experts,
            "num_experts_per_tok": many.top_k,
            "router_aux_loss_coef": many.balance_weight,
        }
    )


def _period(name: str, places: list[int], depth: int) -> dict[str, int]:
    """Period and offset of layers; if they have none, the check of `config_of` notices."""
    period = places[1] - places[0] if len(places) > 1 else max(depth, places[0] + 1)
    return {f"{name}_period": period, f"{name}_offset": places[0]}


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP)
    for i, kind in enumerate(model.stack):
        layer = model.layers[kind]
        ours, theirs = f"layer_{i}.", f"model.layers.{i}."
        found += rows(ours, theirs, NORMS)
        name = getattr(layer.mixer, "name", None)
        part, lines = {
            "mamba": ("mamba.", MAMBA), "mamba2": ("mamba.", MAMBA2),
        }.get(name, ("self_attn.", ATTENTION))  # fmt: skip
        found += rows(f"{ours}mixer.", theirs + part, lines)
        found += rows(f"{ours}mlp.", f"{theirs}feed_forward.", SWIGLU)
        if layer.mlp is not None and layer.mlp.name == "moe":
            several = experts(
                layer.mlp.num_experts, router="router.weight", expert="experts.{}",
                gate="gate_proj", up="up_proj", down="down_proj",
            )  # fmt: skip
            found += rows(f"{ours}mlp.", f"{theirs}feed_forward.", several)
    return found


ARCHITECTURE = Architecture(
    name="jamba", model_types=("jamba", "bamba"), read=read, write=write, table=table
)
