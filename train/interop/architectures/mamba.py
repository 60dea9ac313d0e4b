"""Mamba and Mamba-2 as transformers publishes them."""

from typing import Any

from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from .parts import MAMBA, MAMBA2, mixers_of, unlimited_steps

TOP = (
    ("embedding", "backbone.embeddings.weight", SAME),
    ("final_norm.scale", "backbone.norm_f.weight", SAME),
    ("w_head", "lm_head.weight", TRANSPOSED),
)
NORM = (("mixer_norm.scale", "norm.weight", SAME),)
MAX_LEN = 1 << 20  # tokens; the state does not grow, so that no published key limits a row
# How parameters begin, which program runs them, and how many rows `vocab_size` was rounded up to.
HARMLESS = (
    "chunk_size", "fused_add_norm", "pad_vocab_size_multiple", "rescale_prenorm_residual",
    "residual_in_fp32", "time_step_init_scheme", "time_step_scale", "use_associative_scan",
    "use_mambapy",
)  # fmt: skip


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    second = c.raw["model_type"] == "mamba2"
    width = c.take("hidden_size", int)
    c.ignore(*HARMLESS)
    c.must_be("use_bias", False)
    c.must_be("use_conv_bias", True)
    c.must_be("hidden_act", "silu", "swish")
    # The original program's names, which early conversions kept beside the new ones.
    c.must_be("d_model", width)
    c.must_be("n_layer", c.take("num_hidden_layers", int))
    c.must_be("rms_norm", True)
    c.must_be("ssm_cfg", {})
    mixer = {
        "name": c.raw["model_type"],
        "state_size": c.take("state_size", int, 128 if second else 16),
        "conv_width": c.take("conv_kernel", int, 4),
        "expand": c.take("expand", int, 2),
        "dt_min": c.take("time_step_min", float, 0.001),
        "dt_max": c.take("time_step_max", float, 0.1),
        "dt_floor": c.take("time_step_floor", float, 1e-4),
    }
    rank = c.take("time_step_rank", (int, str), "auto")
    inner = mixer["expand"] * width
    if second:
        unlimited_steps(c)
        mixer["head_dim"] = c.take("head_dim", int, 64)
        mixer["num_groups"] = c.take("n_groups", int, 8)
        c.must_be("num_heads", inner // mixer["head_dim"])
    else:
        mixer["dt_rank"] = None if rank == "auto" else rank
        c.must_be("intermediate_size", inner)
        c.must_be("d_inner", inner)
    return {
        "width": width,
        "depth": c.take("num_hidden_layers", int),
        "pattern": ["mixer"],
        "layers": {"mixer": {"mixer": mixer}},
        "max_len": MAX_LEN,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, not second),
        "norm_eps": c.take("layer_norm_epsilon", float, 1e-5),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    mixer = mixers_of(model, "mamba", "mamba2")[0]
    if any(model.layers[kind].mlp is not None for kind in model.stack):
        raise Unfit("its layers have an MLP")
    second = mixer.name == "mamba2"
    raw = {
        "architectures": ["Mamba2ForCausalLM" if second else "MambaForCausalLM"],
        "model_type": mixer.name,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "state_size": mixer.state_size,
        "conv_kernel": mixer.conv_width,
        "expand": mixer.expand,
        "time_step_min": mixer.dt_min,
        "time_step_max": mixer.dt_max,
        "time_step_floor": mixer.dt_floor,
        "layer_norm_epsilon": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if second:
        heads = mixer.expand * model.width // mixer.head_dim
        return raw | {
            "head_dim": mixer.head_dim, "num_heads": heads, "n_groups": mixer.num_groups,
        }  # fmt: skip
    return raw | {"time_step_rank": mixer.dt_rank or -(-model.width // 16)}


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP)
    for i, kind in enumerate(model.stack):
        mixer = model.layers[kind].mixer
        lines = MAMBA2 if mixer is not None and mixer.name == "mamba2" else MAMBA
        ours, theirs = f"layer_{i}.", f"backbone.layers.{i}."
        found += rows(ours, theirs, NORM)
        found += rows(f"{ours}mixer.", f"{theirs}mixer.", lines)
    return found


def copies(model: ModelConfig) -> dict[str, str]:
    """Some files hold the head of a model that ties it to the embedding."""
    return {"lm_head.weight": "backbone.embeddings.weight"} if model.tie_embeddings else {}


ARCHITECTURE = Architecture(
    name="mamba",
    model_types=("mamba", "mamba2"),
    read=read,
    write=write,
    table=table,
    copies=copies,
)
