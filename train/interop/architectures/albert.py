"""ALBERT (arXiv 1909.11942): BERT with shared layers and an embedding narrower than the model."""

from typing import Any

from ....errors import ConfigError
from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from . import bert
from .bert import DENSE, EMBEDDINGS
from .parts import norm_rows

LAYER = (
    ("mixer.w_q", "attention.query.weight", TRANSPOSED),
    ("mixer.w_k", "attention.key.weight", TRANSPOSED),
    ("mixer.w_v", "attention.value.weight", TRANSPOSED),
    ("mixer.w_o", "attention.dense.weight", TRANSPOSED),
    ("mixer.b_q", "attention.query.bias", SAME),
    ("mixer.b_k", "attention.key.bias", SAME),
    ("mixer.b_v", "attention.value.bias", SAME),
    ("mixer.b_o", "attention.dense.bias", SAME),
    ("mlp.w_up", "ffn.weight", TRANSPOSED),
    ("mlp.b_up", "ffn.bias", SAME),
    ("mlp.w_down", "ffn_output.weight", TRANSPOSED),
    ("mlp.b_down", "ffn_output.bias", SAME),
)
PROJECTION = (("w_project", "weight", TRANSPOSED), ("b_project", "bias", SAME))


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    for key, default in (("hidden_act", "gelu_new"), ("vocab_size", 30000)):
        c.raw.setdefault(key, default)
    for key in ("hidden_size", "num_attention_heads", "intermediate_size"):
        c.take(key, int)  # BERT has other defaults
    values = bert.read(c)
    c.ignore("classifier_dropout_prob", "eos_token_ids", "num_labels", "output_past")
    for key in ("gap_size", "net_structure_type", "num_memory_blocks"):
        c.must_be(key, 0)
    c.must_be("down_scale_factor", 1)
    c.must_be("inner_group_num", 1)
    depth, groups = values["depth"], c.take("num_hidden_groups", int, 1)
    if not 1 <= groups <= depth:
        raise ConfigError(f"{c.source}: num_hidden_groups is {groups}, want 1 to {depth}")
    pattern = [f"group_{int(i / (depth / groups))}" for i in range(depth)]
    (layer,) = values["layers"].values()
    inputs = values["inputs"] | {"width": c.take("embedding_size", int, 128)}
    return values | {
        "pattern": pattern,
        "layers": dict.fromkeys(pattern, layer),
        "share_layers": True,
        "inputs": inputs,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config."""
    if model.inputs.width is None:
        raise Unfit("its embedding is not narrower than the model")
    return bert.write(model) | {
        "architectures": ["AlbertForMaskedLM"],
        "model_type": "albert",
        "embedding_size": model.inputs.width,
        "num_hidden_groups": len(set(model.homes)),
    }


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "albert.embeddings.", EMBEDDINGS)
    found += norm_rows("inputs.norm", "albert.embeddings.LayerNorm")
    mapping = "albert.encoder.embedding_hidden_mapping_in."
    found += rows("inputs.", mapping, PROJECTION)
    for group, home in enumerate(sorted(set(model.homes))):
        ours = f"layer_{home}."
        theirs = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0."
        found += rows(ours, theirs, LAYER)
        found += norm_rows(f"{ours}mixer_norm", f"{theirs}attention.LayerNorm")
        found += norm_rows(f"{ours}mlp_norm", f"{theirs}full_layer_layer_norm")
    found += rows("output.", "predictions.dense.", DENSE)
    found += norm_rows("output.norm", "predictions.LayerNorm")
    return found + rows("", "", (("output.bias", "predictions.bias", SAME),))


ARCHITECTURE = Architecture(
    name="albert",
    model_types=("albert",),
    read=read,
    write=write,
    table=table,
    copies=lambda model: {
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    ignored=(
        "embeddings.position_ids", "albert.pooler.weight", "albert.pooler.bias",
        "sop_classifier.classifier.weight", "sop_classifier.classifier.bias",
    ),
    paradigm=lambda config: {"name": "masked_diffusion"},
)  # fmt: skip
