"""Masked language models: BERT and RoBERTa. Post-norm layers, learnt positions, a framed head."""

from typing import Any, NamedTuple

from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from .parts import ACTIVATION_NAMES, ACTIVATIONS, mixers_of, mlps_of, norm_rows

LAYER = (
    ("mixer.w_q", "attention.self.query.weight", TRANSPOSED),
    ("mixer.w_k", "attention.self.key.weight", TRANSPOSED),
    ("mixer.w_v", "attention.self.value.weight", TRANSPOSED),
    ("mixer.w_o", "attention.output.dense.weight", TRANSPOSED),
    ("mixer.b_q", "attention.self.query.bias", SAME),
    ("mixer.b_k", "attention.self.key.bias", SAME),
    ("mixer.b_v", "attention.self.value.bias", SAME),
    ("mixer.b_o", "attention.output.dense.bias", SAME),
    ("mlp.w_up", "intermediate.dense.weight", TRANSPOSED),
    ("mlp.b_up", "intermediate.dense.bias", SAME),
    ("mlp.w_down", "output.dense.weight", TRANSPOSED),
    ("mlp.b_down", "output.dense.bias", SAME),
)
EMBEDDINGS = (
    ("embedding", "word_embeddings.weight", SAME),
    ("inputs.positions", "position_embeddings.weight", SAME),
    ("inputs.token_types", "token_type_embeddings.weight", SAME),
)
DENSE = (
    ("w_transform", "weight", TRANSPOSED),
    ("b_transform", "bias", SAME),
)


class Kin(NamedTuple):
    """In what the members of the family differ.

    Attributes:
        hf_class: the class in transformers.
        dense: the head's matrix before the norm.
        norm: the head's norm.
        bias: of the head.
        decoder: what some files hold of the head beside.
    """

    hf_class: str
    dense: str
    norm: str
    bias: str
    decoder: str


KIN = {
    "bert": Kin(
        "BertForMaskedLM",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    "roberta": Kin(
        "RobertaForMaskedLM",
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.bias",
        "lm_head.decoder",
    ),
}


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    kind = c.raw["model_type"]
    c.ignore("hidden_dropout_prob", "attention_probs_dropout_prob")
    c.must_be("is_decoder", False)
    c.must_be("add_cross_attention", False)
    c.must_be("position_embedding_type", "absolute")
    c.must_be("tie_word_embeddings", True)
    # RoBERTa gives padding a position of its own, and counts from behind it.
    first = c.take("pad_token_id", int, 1) + 1 if kind == "roberta" else 0
    positions = c.take("max_position_embeddings", int, 512)
    activation = c.choose("hidden_act", ACTIVATIONS, "gelu")
    mixer = {
        "name": "attention",
        "num_heads": c.take("num_attention_heads", int, 12),
        "rope_base": None,
        "qkv_bias": True,
        "out_bias": True,
    }
    mlp = {
        "name": "plain",
        "width": c.take("intermediate_size", int, 3072),
        "activation": activation,
    }
    return {
        "width": c.take("hidden_size", int, 768),
        "depth": c.take("num_hidden_layers", int, 12),
        "pattern": ["layer"],
        "layers": {"layer": {"block": {"name": "postnorm"}, "mixer": mixer, "mlp": mlp}},
        "max_len": positions - first,
        "vocab_size": c.take("vocab_size", int, 50265 if kind == "roberta" else 30522),
        "norm": "layer",
        "norm_eps": c.take("layer_norm_eps", float, 1e-12),
        "final_norm": False,
        "inputs": {
            "positions": positions,
            "first_position": first,
            "token_types": c.take("type_vocab_size", int, 2),
            "norm": True,
        },
        "output": {"transform": "gelu" if kind == "roberta" else activation, "bias": True},
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config of the member that a model is of."""
    mixer, mlp = mixers_of(model, "attention")[0], mlps_of(model, "plain")[0]
    if model.inputs.positions is None:
        raise Unfit("it has no learnt positions")
    first = model.inputs.first_position
    kind = "roberta" if first else "bert"
    raw = {
        "architectures": [KIN[kind].hf_class],
        "model_type": kind,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "intermediate_size": mlp.width,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "max_position_embeddings": model.inputs.positions,
        "type_vocab_size": model.inputs.token_types,
        "layer_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    return raw | ({"pad_token_id": first - 1} if first else {})


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    kind = _kind(model)
    kin = KIN[kind]
    found = rows("", f"{kind}.embeddings.", EMBEDDINGS)
    found += norm_rows("inputs.norm", f"{kind}.embeddings.LayerNorm")
    for i in range(model.num_layers):
        ours, theirs = f"layer_{i}.", f"{kind}.encoder.layer.{i}."
        found += rows(ours, theirs, LAYER)
        found += norm_rows(f"{ours}mixer_norm", f"{theirs}attention.output.LayerNorm")
        found += norm_rows(f"{ours}mlp_norm", f"{theirs}output.LayerNorm")
    found += rows("output.", f"{kin.dense}.", DENSE)
    found += norm_rows("output.norm", kin.norm)
    return found + rows("", "", (("output.bias", kin.bias, SAME),))


def copies(model: ModelConfig) -> dict[str, str]:
    """Some files hold the head, which is the embedding, and its bias a second time."""
    kind = _kind(model)
    return {
        f"{KIN[kind].decoder}.weight": f"{kind}.embeddings.word_embeddings.weight",
        f"{KIN[kind].decoder}.bias": KIN[kind].bias,
    }


def _kind(model: ModelConfig) -> str:
    return "roberta" if model.inputs.first_position else "bert"


ARCHITECTURE = Architecture(
    name="bert",
    model_types=tuple(KIN),
    read=read,
    write=write,
    table=table,
    copies=copies,
    # Of the second task that BERT was trained on, and a table of the numbers from 0.
    ignored=(
        "embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias",
        "cls.seq_relationship.weight", "cls.seq_relationship.bias",
    ),
    old_endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    paradigm=lambda config: {"name": "masked_diffusion"},
)  # fmt: skip
