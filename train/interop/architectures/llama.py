"""Llama and its kin: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3."""

from typing import Any, NamedTuple

from ....errors import ConfigError
from ....paradigms.backbone import ModelConfig
from ..architecture import SAME, TRANSPOSED, Architecture, Row, Unfit, rows
from ..hf_config import HFConfig
from ..rope import read_rope, write_rope
from .parts import ACTIVATION_NAMES, ACTIVATIONS, ATTENTION, SWIGLU, NoneType

LAYER = (
    ("mixer_norm.scale", "input_layernorm.weight", SAME),
    ("mlp_norm.scale", "post_attention_layernorm.weight", SAME),
)
TOP = (
    ("embedding", "model.embed_tokens.weight", SAME),
    ("final_norm.scale", "model.norm.weight", SAME),
    ("w_head", "lm_head.weight", TRANSPOSED),
)


class Kin(NamedTuple):
    """In what the members of the family differ.

    Attributes:
        hf_class: the class in transformers.
        max_len: what an absent `max_position_embeddings` means.
        kv_heads: what an absent `num_key_value_heads` means; None for as many as query heads.
        head_dim: what an absent `head_dim` means; None for D / N.
        windows: `no`, `all` layers, or `some`, as `layer_types` or `max_window_layers` say.
        biases: of attention: `key`, as `attention_bias` says, `qkv` always, or `no`.
        qk_norm: whether queries and keys are normed.
        mlp_bias: whether `mlp_bias` is a key.
    """

    hf_class: str
    max_len: int
    kv_heads: int | None
    head_dim: int | None
    windows: str
    biases: str
    qk_norm: bool
    mlp_bias: bool


KIN = {
    "llama": Kin("LlamaForCausalLM", 2048, None, None, "no", "key", False, True),
    "mistral": Kin("MistralForCausalLM", 131072, 8, None, "all", "no", False, False),
    "qwen2": Kin("Qwen2ForCausalLM", 32768, 32, None, "some", "qkv", False, False),
    "qwen3": Kin("Qwen3ForCausalLM", 32768, 32, 128, "some", "key", True, False),
}


def read(c: HFConfig) -> dict[str, Any]:
    """The model's values from a published config."""
    kin = KIN[c.raw["model_type"]]
    width, heads = c.take("hidden_size", int), c.take("num_attention_heads", int)
    depth = c.take("num_hidden_layers", int)
    kv_heads = c.take("num_key_value_heads", (int, NoneType), kin.kv_heads)
    head_dim = c.take("head_dim", (int, NoneType), kin.head_dim) or width // heads
    c.raw.setdefault("max_position_embeddings", kin.max_len)
    rope, max_len = read_rope(c, head_dim=head_dim)
    c.must_be("pretraining_tp", 1)
    c.must_be("rope_interleaved", False)
    c.must_be("tie_word_embeddings", True, False)
    mixer = {
        "name": "attention",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "qk_norm": kin.qk_norm,
        **rope,
    }
    biased = kin.biases == "key" and c.take("attention_bias", bool, False)
    mixer |= {"qkv_bias": biased or kin.biases == "qkv", "out_bias": biased}
    mlp = {
        "name": "swiglu",
        "width": c.take("intermediate_size", int),
        "activation": c.choose("hidden_act", ACTIVATIONS, "silu"),
        "bias": kin.mlp_bias and c.take("mlp_bias", bool, False),
    }
    pattern, windows = _windows(c, kin, depth)
    return {
        "width": width,
        "depth": depth,
        "pattern": pattern,
        "layers": {
            kind: {"mixer": mixer | {"window": window}, "mlp": mlp}
            for kind, window in windows.items()
        },
        "max_len": max_len,
        "vocab_size": c.take("vocab_size", int),
        "tie_embeddings": c.take("tie_word_embeddings", bool, False),
        "norm_eps": c.take("rms_norm_eps", float, 1e-6),
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """The published config of the member that a model is of."""
    layers = [model.layers[kind] for kind in model.stack]
    first = layers[0]
    if any(layer.block.name != "prenorm" for layer in layers):
        raise Unfit("its layers are not all pre-norm")
    if any(layer.mixer is None or layer.mixer.name != "attention" for layer in layers):
        raise Unfit("its layers do not all have attention as their mixer")
    if any(layer.mlp is None or layer.mlp.name != "swiglu" for layer in layers):
        raise Unfit("its layers do not all have a SwiGLU as their MLP")
    mixer, mlp = first.mixer, first.mlp
    windows = [layer.mixer.window for layer in layers]
    if mixer.rope_base is None:
        raise Unfit("it has no rotary positions")
    name = "llama"
    if mixer.qk_norm:
        name = "qwen3"
    elif mixer.qkv_bias and not mixer.out_bias:
        name = "qwen2"
    elif windows[0] is not None and len(set(windows)) == 1:
        name = "mistral"
    elif any(windows):
        raise Unfit("some of its layers have windows, which needs the biases or norms of Qwen")
    kin = KIN[name]
    head_dim = mixer.head_dim or model.width // mixer.num_heads
    raw: dict[str, Any] = {
        "architectures": [kin.hf_class],
        "model_type": name,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads or mixer.num_heads,
        "head_dim": head_dim,
        "intermediate_size": mlp.width,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.padded_vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        **write_rope(mixer, head_dim, model.max_len),
    }
    if kin.head_dim is None and head_dim * mixer.num_heads == model.width:
        del raw["head_dim"]
    if kin.biases == "key":
        raw["attention_bias"] = mixer.qkv_bias
    if kin.mlp_bias:
        raw["mlp_bias"] = mlp.bias
    if kin.windows == "all":
        raw["sliding_window"] = windows[0]
    if kin.windows == "some":
        used = [window for window in windows if window is not None]
        raw |= {"use_sliding_window": bool(used), "sliding_window": used[0] if used else None}
        raw["layer_types"] = ["full_attention" if w is None else WINDOWED for w in windows]
    return raw


def table(model: ModelConfig) -> list[Row]:
    """All tensors."""
    found = rows("", "", TOP)
    for i in range(model.num_layers):
        ours, theirs = f"layer_{i}.", f"model.layers.{i}."
        found += rows(ours, theirs, LAYER)
        found += rows(f"{ours}mixer.", f"{theirs}self_attn.", ATTENTION)
        found += rows(f"{ours}mlp.", f"{theirs}mlp.", SWIGLU)
    return found


def copies(model: ModelConfig) -> dict[str, str]:
    """Some files hold the head of a model that ties it to the embedding."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if model.tie_embeddings else {}


WINDOWED = "sliding_attention"


def _windows(c: HFConfig, kin: Kin, depth: int) -> tuple[list[str], dict[str, int | None]]:
    """The pattern of layer kinds, and the window of each kind."""
    if kin.windows == "no":
        return ["attention"], {"attention": None}
    if kin.windows == "all":
        return ["attention"], {"attention": c.take("sliding_window", (int, NoneType), 4096)}
    window = c.take("sliding_window", (int, NoneType), 4096)
    window = window if c.take("use_sliding_window", bool, False) else None
    first = c.take("max_window_layers", int, 28)
    kinds = c.take("layer_types", (list, NoneType), None)
    if kinds is None:
        windowed = [window is not None and i >= first for i in range(depth)]
    else:
        if len(kinds) != depth or not {"full_attention", WINDOWED}.issuperset(kinds):
            raise ConfigError(
                f"{c.source}: layer_types is {kinds!r}, want full_attention or {WINDOWED} for each "
                f"of {depth} layers"
            )
        windowed = [kind == WINDOWED and window is not None for kind in kinds]
    if len(set(windowed)) == 1:
        return ["attention"], {"attention": window if windowed[0] else None}
    return (
        ["window" if one else "attention" for one in windowed],
        {"attention": None, "window": window},
    )


ARCHITECTURE = Architecture(
    name="llama",
    model_types=tuple(KIN),
    read=read,
    write=write,
    table=table,
    copies=copies,
    ignored=("rotary_emb.inv_freq",),
)
