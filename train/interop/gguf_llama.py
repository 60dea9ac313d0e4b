"""GGUF files of the Llama family, presented as the checkpoint folder that they were made from.

The metadata becomes a `config.json` and a `tokenizer.json`, the tensors get their published names
and orders; what follows is the same import as for any folder.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers

from ...errors import CheckpointError, ConfigError, DataError
from .gguf_file import GGUFFile
from .sentencepiece import BPE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Pieces
from .sentencepiece import vocabulary_of as sentencepiece_vocabulary
from .tensor_files import Spec

# `llama` files hold the rows of queries and keys in the order of interleaved rotary pairs.
KINDS = {"llama": True, "qwen2": False, "qwen3": False}

KEYS = {  # behind "ARCHITECTURE."
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
CHECKED = {"attention.value_length", "rope.dimension_count", "vocab_size"}
SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
HARMLESS = ("general.", "tokenizer.", "quantize.", "split.")

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLIT = {  # how `tokenizer.ggml.pre` cuts a text into words: expressions, each within the last's
    "gpt-2": (WORDS,),
    "smollm": (r"\p{N}", WORDS),
    "starcoder": (r"\p{N}", WORDS),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}  # fmt: skip


class GGUFTensors:
    """The tensors under their published names.

    Attributes:
        path: of the file.
        specs: name -> what it is once dequantised.
    """

    def __init__(self, file: GGUFFile, heads: tuple[int, int] | None):
        """Names the tensors; `heads` are query and key heads where rows are to be put in order."""
        self.path, self._file, self._heads = file.path, file, heads
        self._names = {_published(name): name for name in file.tensors}
        kinds = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
        self.specs = {
            name: Spec(np.dtype(kinds.get(file.tensors[own].kind.name, np.float32)),
                       file.tensors[own].shape)
            for name, own in self._names.items()
        }  # fmt: skip

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, dequantised, in the published order of rows."""
        array = self._file[self._names[name]]
        if self._heads is not None:
            for suffix, heads in zip(("q_proj", "k_proj"), self._heads, strict=True):
                if f".{suffix}." in name:
                    rest = array.shape[1:]
                    pairs = array.reshape(heads, -1, 2, *rest).swapaxes(1, 2)
                    return np.ascontiguousarray(pairs).reshape(array.shape)
        return array

    def file_of(self, name: str) -> Path:
        """The one file."""
        del name
        return self.path


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that the metadata amounts to.

    Raises:
        ConfigError: another architecture, or a key that is not implemented.
        CheckpointError: a key is missing.
    """
    given = file.metadata
    kind = given.get("general.architecture")
    if kind not in KINDS:
        raise ConfigError(f"{file.path}: general.architecture is {kind!r}; want {', '.join(KINDS)}")
    raw: dict[str, Any] = {"model_type": kind}
    scaling: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix(f"{kind}.")
        if name in KEYS:
            # Stored in 32 bits: 1e-5 reads 9.99999974e-06.
            raw[KEYS[name]] = float(f"{value:.7g}") if isinstance(value, float) else value
        elif name in SCALING:
            scaling[SCALING[name]] = value
        elif key == name and not key.startswith(HARMLESS):
            raise ConfigError(f"{file.path}: key {key} is not implemented")
        elif key != name and name not in CHECKED:
            raise ConfigError(f"{file.path}: key {key} ({value!r}) is not implemented")
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if key not in raw:
            missing = next(k for k, v in KEYS.items() if v == key)
            raise CheckpointError(f"{file.path}: has no {kind}.{missing}")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    for name in ("attention.value_length", "rope.dimension_count"):
        if given.get(f"{kind}.{name}", head_dim) != head_dim:
            raise ConfigError(f"{file.path}: {kind}.{name} is not the head's width {head_dim}")
    if scaling.get("rope_type", "none") != "none":
        raw["rope_scaling"] = scaling
    if kind == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    for role in ("bos", "eos", "padding", "mask"):
        index = given.get(f"tokenizer.ggml.{role}_token_id")
        if index is not None:
            raw[f"{'pad' if role == 'padding' else role}_token_id"] = index
    raw["vocab_size"] = len(given.get("tokenizer.ggml.tokens") or [])
    if not raw["vocab_size"]:
        raw["vocab_size"] = int(given.get(f"{kind}.vocab_size", 0))
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    return raw


def settings_of(file: GGUFFile) -> dict[str, Any]:
    """The `tokenizer_config.json` that the metadata amounts to."""
    settings: dict[str, Any] = {}
    if "tokenizer.ggml.add_bos_token" in file.metadata:
        settings["add_bos_token"] = bool(file.metadata["tokenizer.ggml.add_bos_token"])
    elif file.metadata.get("tokenizer.ggml.pre") == "llama-bpe":
        # As in llama.cpp: Llama 3's own settings leave this to a part that GGUF does not hold.
        settings["add_bos_token"] = "tokenizer.ggml.bos_token_id" in file.metadata
    if "tokenizer.chat_template" in file.metadata:
        settings["chat_template"] = file.metadata["tokenizer.chat_template"]
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and int(index) < len(tokens):
            settings[f"{role}_token"] = tokens[int(index)]
    return settings


def generation_of(file: GGUFFile) -> dict[str, Any]:
    """The `generation_config.json` that the metadata amounts to: what ends an answer."""
    ids = [file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    found = [index for index in dict.fromkeys(ids) if index is not None]
    return {"eos_token_id": found} if len(found) > 1 else {}


def vocabulary_of(file: GGUFFile) -> dict[str, Any] | None:
    """The `tokenizer.json` that the metadata amounts to, None without one.

    Raises:
        DataError: a kind of tokenizer that is not implemented.
    """
    given = file.metadata
    model = given.get("tokenizer.ggml.model")
    if model is None:
        return None
    tokens = given.get("tokenizer.ggml.tokens")
    if not tokens:
        raise DataError(f"{file.path}: has no tokenizer.ggml.tokens")
    types = given.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    scores = given.get("tokenizer.ggml.scores")
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise DataError(
                f"{file.path}: tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} "
                "tokens"
            )
    if model == "llama":
        if not scores:
            raise DataError(f"{file.path}: has no tokenizer.ggml.scores")
        return _sentencepiece(file, tokens, types, scores)
    if model != "gpt2":
        raise DataError(
            f"{file.path}: tokenizer.ggml.model is {model!r}; want 'gpt2' (BPE) or 'llama' "
            "(SentencePiece)"
        )
    return _byte_level(file, tokens, types)


def _sentencepiece(
    file: GGUFFile, tokens: list[str], types: list[int], scores: list[float]
) -> dict[str, Any]:
    """With llama.cpp's defaults for what the metadata leaves out."""
    given = file.metadata
    bos = given.get("tokenizer.ggml.bos_token_id")
    pieces = Pieces(
        file.path, BPE, tokens, scores, types,
        byte_fallback=True,
        first_space=bool(given.get("tokenizer.ggml.add_space_prefix", True)),
        squeeze=bool(given.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=b"",
        bos=bos if bos is not None and bos < len(tokens) else None,
    )  # fmt: skip
    return sentencepiece_vocabulary(pieces)


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> dict[str, Any]:
    given = file.metadata
    cut = given.get("tokenizer.ggml.pre")
    if cut not in SPLIT:
        if cut is None:
            raise DataError(
                f"{file.path}: has no tokenizer.ggml.pre, so how texts are cut into words is not "
                "known; convert the model again with a llama.cpp of May 2024 or later"
            )
        raise DataError(
            f"{file.path}: tokenizer.ggml.pre is {cut!r}, which genlab does not implement; want "
            f"{', '.join(SPLIT)}"
        )
    merges = given.get("tokenizer.ggml.merges", [])
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=cut == "llama-bpe",
        )
    )
    pre = tokenizers.pre_tokenizers
    steps = [pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLIT[cut]]
    library.pre_tokenizer = pre.Sequence(
        [*steps, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    if cut == "qwen2":
        library.normalizer = tokenizers.normalizers.NFC()
    added = [
        tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    library.add_tokens([token for token in added if not token.special])
    library.add_special_tokens([token for token in added if token.special])
    return dict(json.loads(library.to_str()))


def tensors_of(file: GGUFFile, raw: dict[str, Any]) -> GGUFTensors:
    """The tensors under their published names."""
    heads = raw["num_attention_heads"], raw.get("num_key_value_heads", raw["num_attention_heads"])
    return GGUFTensors(file, heads if KINDS[raw["model_type"]] else None)


def _published(name: str) -> str:
    """The published name; an unknown one stays and is refused with the others."""
    if name in TOP:
        return TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    return name
