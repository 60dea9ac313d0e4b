"""Zamba2 (arXiv 2411.15242): Mamba-2 layers, some of them behind a transformer that they share."""

from typing import Any

from ....errors import ConfigError
from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Form, Row, Unfit, join, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .parts import ACTIVATION_NAMES, ACTIVATIONS, MAMBA2, NoneType, read_attention

TOP = (
    ("embedding", "model.embed_tokens.weight", SAME),
    ("final_norm.scale", "model.final_layernorm.weight", SAME),
    ("w_head", "lm_head.weight", TRANSPOSED),
)
SHARED = (
    ("input_norm.scale", "input_layernorm.weight", SAME),
    ("mixer.w_q", "self_attn.q_proj.weight", TRANSPOSED),
    ("mixer.w_k", "self_attn.k_proj.weight", TRANSPOSED),
    ("mixer.w_v", "self_attn.v_proj.weight", TRANSPOSED),
    ("mixer.w_o", "self_attn.o_proj.weight", TRANSPOSED),
    ("mlp_norm.scale", "pre_ff_layernorm.weight", SAME),
    ("mlp.w_down", "feed_forward.down_proj.weight", TRANSPOSED),
)
MLP_LORA, ATTENTION_LORA = ("w_gate", "w_up"), ("w_q", "w_k", "w_v")
HYBRID = "hybrid"
NORM_EPS = 1e-5  # of the mixers' norms, whatever `rms_norm_eps` says
HARMLESS = (
    "chunk_size", "num_logits_to_keep", "time_step_floor", "time_step_max", "use_mamba_kernels",
    "use_mem_eff_path",
)  # fmt: skip


def _halves(both: Any) -> tuple[Any, Any]:
    half = both.shape[0] // 2
    return both[:half].T, both[half:].T


def _stacked(gate: Any, up: Any) -> tuple[Any]:
    return (join([gate.T, up.T], axis=0),)


GATE_ON_UP = Form(_halves, _stacked)


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    width, depth = c.take("hidden_size", int), c.take("num_hidden_layers", int)
    c.ignore(*HARMLESS)
    c.must_be("use_conv_bias", True)
    c.must_be("add_bias_linear", False)
    c.must_be("use_long_context", False)
    c.must_be("time_step_limit", None)
    c.must_be("rms_norm_eps", NORM_EPS)
    kinds = c.take("layers_block_type", list)
    if len(kinds) != depth or not {"mamba", "linear_attention", HYBRID}.issuperset(kinds):
        raise ConfigError(
            f"{c.source}: layers_block_type is {kinds!r}, want mamba or {HYBRID} for each of "
            f"{depth} layers"
        )
    places = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    c.must_be("hybrid_layer_ids", places)
    attention, max_len = _attention(c, width)
    expand, heads = c.take("mamba_expand", int, 2), c.take("n_mamba_heads", int, 8)
    c.must_be("mamba_headdim", expand * width // heads)
    mamba = {
        "name": "mamba2",
        "state_size": c.take("mamba_d_state", int, 64),
        "head_dim": expand * width // heads,
        "expand": expand,
        "num_groups": c.take("mamba_ngroups", int, 1),
        "conv_width": c.take("mamba_d_conv", int, 4),
        "min_step": c.take("time_step_min", float, 0.001),
    }
    adapts = c.take("use_shared_attention_adapter", bool, False)
    block = {
        "name": "shared",
        "lora_rank": c.take("adapter_rank", int, 128),
        "lora": [*(ATTENTION_LORA if adapts else ()), *MLP_LORA],
        "lora_joined": True,
    }
    mlp = {
        "name": "swiglu",
        "width": c.take("intermediate_size", (int, NoneType), None) or 4 * width,
        "activation": c.choose("hidden_act", ACTIVATIONS, "gelu"),
    }
    blocks = c.take("num_mem_blocks", int, 1)
    pattern = ["mamba"] * depth
    for number, place in enumerate(places):
        pattern[place] = f"{HYBRID}_{number % blocks}"
    layers: dict[str, Any] = {"mamba": {"mixer": mamba}}
    for kind in pattern:
        if kind != "mamba":
            layers[kind] = {"block": block, "mixers": [attention, mamba], "mlp": mlp}
    return {
        "width": width,
        "depth": depth,
        "pattern": pattern,
        "layers": {kind: layers[kind] for kind in dict.fromkeys(pattern)},
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, True),
        "norm_eps": NORM_EPS,
    }


def _attention(c: HFConfig, width: int) -> tuple[dict[str, Any], int]:
    """The shared attention, on inputs of width 2 D, and the longest row."""
    mixer = read_attention(c, kv_heads=None)
    heads = mixer["num_heads"]
    head_dim = 2 * width // heads
    c.must_be("attention_hidden_size", 2 * width)
    c.must_be("attention_head_dim", head_dim)
    c.must_be("kv_channels", width // heads)
    c.must_be("num_query_groups", heads)
    c.raw.setdefault("max_position_embeddings", 4096)
    rope, max_len = read_rope(c, head_dim=head_dim)
    if not c.take("use_mem_rope", bool, False):
        rope = {"rope_base": None}
    mixer |= {"head_dim": head_dim, "score_scale": (head_dim / 2) ** -0.5, **rope}
    return mixer, max_len


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    places = [i for i, kind in enumerate(model.stack) if model.layers[kind].block.name == "shared"]
    kinds = [model.stack[i] for i in places]
    first = list(dict.fromkeys(kinds))
    if not first or any(kind != first[i % len(first)] for i, kind in enumerate(kinds)):
        raise Unfit("it has no layers that share a transformer, or they do not take turns")
    layer = model.layers[first[0]]
    if len(layer.mixers) != 2 or layer.mixers[1].name != "mamba2" or layer.mlp.name != "swiglu":
        raise Unfit("its sharing layers do not have a mamba2 of their own, or no swiglu to share")
    attention, mamba = layer.mixers
    if layer.block.lora_rank is None:
        raise Unfit("its layers do not adapt what they share")
    head_dim = 2 * model.width // attention.num_heads
    rope = {"max_position_embeddings": model.max_len}
    if attention.rope_base is not None:
        rope = write_rope(attention, head_dim, model.max_len)
    return {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "layers_block_type": [HYBRID if i in places else "mamba" for i in range(model.num_layers)],
        "num_mem_blocks": len(first),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "use_mem_rope": attention.rope_base is not None,
        "use_shared_attention_adapter": ATTENTION_LORA[0] in layer.block.lora,
        "adapter_rank": layer.block.lora_rank,
        "intermediate_size": layer.mlp.width,
        "hidden_act": ACTIVATION_NAMES[layer.mlp.activation],
        "mamba_d_state": mamba.state_size,
        "mamba_d_conv": mamba.conv_width,
        "mamba_expand": mamba.expand,
        "mamba_ngroups": mamba.num_groups,
        "n_mamba_heads": mamba.expand * model.width // mamba.head_dim,
        "time_step_min": mamba.min_step,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **rope,
    }


def table(model: ModelConfig) -> list[Row]:
    """All tensors. What is shared stands in the files at the first layer that has it."""
    found, number = rows("", "", TOP), 0
    for i, kind in enumerate(model.stack):
        ours, theirs = f"layer_{i}.", f"model.layers.{i}."
        if model.layers[kind].block.name != "shared":
            found += rows(ours, theirs, (("mixer_norm.scale", "input_layernorm.weight", SAME),))
            found += rows(f"{ours}mixer.", f"{theirs}mamba.", MAMBA2)
            continue
        home = model.stack.index(kind)
        block = f"model.layers.{home}.shared_transformer."
        if home == i:
            found += rows(f"shared_{kind}.", block, SHARED)
            gate_and_up = (("w_gate", "w_up"), "gate_up_proj.weight", GATE_ON_UP)
            found += rows(f"shared_{kind}.mlp.", f"{block}feed_forward.", (gate_and_up,))
        found += rows(ours, theirs, (
            ("w_link", "linear.weight", TRANSPOSED),
            ("mixer_norm.scale", "mamba_decoder.input_layernorm.weight", SAME),
        ))  # fmt: skip
        found += rows(f"{ours}mixer.", f"{theirs}mamba_decoder.mamba.", MAMBA2)
        found += rows(ours, f"{block}feed_forward.gate_up_proj_adapter_list.{number}.", (
            ("w_gate_down", "0.weight", TRANSPOSED),
            (("w_gate_up", "w_up_up"), "1.weight", GATE_ON_UP),
        ))  # fmt: skip
        for name in ATTENTION_LORA:
            at = f"{block}self_attn.linear_{name[-1]}_adapter_list.{number}."
            found += rows(ours, at, (
                (f"{name}_down", "0.weight", TRANSPOSED), (f"{name}_up", "1.weight", TRANSPOSED),
            ))  # fmt: skip
        number += 1
    return found


def copies(model: ModelConfig) -> dict[str, str]:
    """Some files hold what is shared once for each layer, and a tied head."""
    found = {"lm_head.weight": "model.embed_tokens.weight"} if model.tie_embeddings else {}
    names = [name for row in table(model) for name in row.theirs]
    for i, kind in enumerate(model.stack):
        home = f"model.layers.{model.stack.index(kind)}.shared_transformer."
        here = f"model.layers.{i}.shared_transformer."
        if here != home:
            found |= {
                here + name.removeprefix(home): name for name in names if name.startswith(home)
            }
    return found


ARCHITECTURE = Architecture(
    name="zamba2",
    model_types=("zamba2",),
    read=read,
    write=write,
    table=table,
    copies=copies,
    ignored=("rotary_emb.inv_freq",),
)
