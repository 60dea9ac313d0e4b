"""GGUF files: every layout of blocks against its definition, and an import like the folder's."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import CheckpointError, ConfigError, DataError
from genlab.train.checkpoint import flatten
from genlab.train.interop.gguf_file import KINDS, GGUFFile
from genlab.train.interop.import_run import import_checkpoint, open_checkpoint
from genlab.train.interop.tensor_files import TensorFolder
from genlab.train.run_folder import load_run
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from .gguf_writer import float32, write_gguf

FIXTURES = Path(__file__).parent / "fixtures"
QUANTISED = {number: kind for number, kind in KINDS.items() if kind.values > 1}


def half(data):
    return float(np.frombuffer(bytes(data), np.float16)[0])


def by_hand(kind, block):
    """One block, value by value, as ggml-common.h and ggml-quants.c define it."""
    out = []
    if kind == "Q4_0":
        for i in range(32):
            nibble = block[2 + i % 16] >> 4 if i >= 16 else block[2 + i] & 15
            out.append(half(block[:2]) * (nibble - 8))
    if kind == "Q4_1":
        for i in range(32):
            nibble = block[4 + i % 16] >> 4 if i >= 16 else block[4 + i] & 15
            out.append(half(block[:2]) * nibble + half(block[2:4]))
    if kind == "Q8_0":
        for i in range(32):
            out.append(half(block[:2]) * (block[2 + i] - 256 * (block[2 + i] > 127)))
    if kind == "Q4_K":
        scales, quants = block[4:16], block[16:]
        for i in range(256):
            j = i // 32
            if j < 4:
                scale, minimum = scales[j] & 63, scales[j + 4] & 63
            else:
                scale = (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4)
                minimum = (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4)
            byte = quants[32 * (i // 64) + i % 32]
            nibble = byte >> 4 if i % 64 >= 32 else byte & 15
            out.append(half(block[:2]) * scale * nibble - half(block[2:4]) * minimum)
    if kind == "Q6_K":
        for i in range(256):
            n, quarter, pos = i // 128, i % 128 // 32, i % 32
            low = block[64 * n + 32 * (quarter % 2) + pos]
            low = low >> 4 if quarter >= 2 else low & 15
            high = block[128 + 32 * n + pos] >> (2 * quarter) & 3
            scale = block[192 + i // 16]
            scale -= 256 * (scale > 127)
            out.append(half(block[208:]) * scale * ((low | high << 4) - 32))
    return out


def random_blocks(kind, count=3):
    """Bytes with scales of a sensible size."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, kind.nbytes), np.uint8)
    scales = {"Q4_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[kind.name]
    for number, at in enumerate(scales):
        values = np.linspace(0.01, 0.3 + number, count).astype(np.float16)
        blocks[:, at : at + 2] = values[:, None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("number", QUANTISED, ids=lambda n: QUANTISED[n].name)
def test_blocks(number):
    kind = QUANTISED[number]
    blocks = random_blocks(kind)
    want = [by_hand(kind.name, [int(b) for b in block]) for block in blocks]
    got = kind.decode(blocks)
    assert got.shape == (3, kind.values) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


if importlib.util.find_spec("gguf"):

    @pytest.mark.parametrize("number", QUANTISED, ids=lambda n: QUANTISED[n].name)
    def test_blocks_equal_the_gguf_package(number):
        import gguf

        blocks = random_blocks(QUANTISED[number], count=7)
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))
        np.testing.assert_allclose(QUANTISED[number].decode(blocks), want, rtol=1e-6)


def permuted(array, heads):
    """Rows in the order that llama.cpp's converter gives them for interleaved pairs."""
    shape = array.shape
    return array.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


def as_gguf(folder, path, **changes):
    """The fixture as llama.cpp would hold it; no tokenizer."""
    raw = json.loads((folder / "config.json").read_text())
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": raw["num_hidden_layers"],
        "llama.context_length": raw["max_position_embeddings"],
        "llama.embedding_length": raw["hidden_size"],
        "llama.feed_forward_length": raw["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "llama.rope.freq_base": raw["rope_parameters"]["rope_theta"],
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": raw["rope_parameters"]["factor"],
        "llama.vocab_size": raw["vocab_size"],
    } | changes
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down"}  # fmt: skip
    found, tensors = TensorFolder(folder), {}
    for name in found.specs:
        array, own = np.asarray(found[name]), name
        if "q_proj" in name or "k_proj" in name:
            array = permuted(array, heads if "q_proj" in name else kv_heads)
        for their, ours in names.items():
            own = own.replace(their, ours)
        own = own.replace("model.layers.", "blk.").replace("model.embed_tokens", "token_embd")
        own = own.replace("model.norm", "output_norm").replace("lm_head", "output")
        tensors[own] = float32(array)
    write_gguf(path, {k: v for k, v in metadata.items() if v is not ...}, tensors)
    return path


def test_import_equals_that_of_the_folder(imported, tmp_path):
    path = as_gguf(FIXTURES / "llama_linear", tmp_path / "model.gguf")
    import_checkpoint(path, tmp_path / "run")
    mine, theirs = load_run(tmp_path / "run"), imported("llama_linear")
    assert mine.config.model == theirs.config.model
    for name, leaf in flatten(theirs.model.params).items():
        np.testing.assert_array_equal(flatten(mine.model.params)[name], leaf)


FAULTS = {
    "other architecture": ({"general.architecture": "gemma"}, "general.architecture is 'gemma'"),
    "unknown key": ({"llama.expert_count": 8}, "llama.expert_count (8) is not implemented"),
    "missing key": ({"llama.block_count": ...}, "has no llama.block_count"),
    "partial rotation": ({"llama.rope.dimension_count": 6}, "llama.rope.dimension_count"),
    "no cut": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 97},
        "has no tokenizer.ggml.pre",
    ),
    "another tokenizer": (
        {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"] * 97},
        "tokenizer.ggml.model is 'rwkv'",
    ),
    "another cut": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "bloom",
         "tokenizer.ggml.tokens": ["a"] * 97},
        "tokenizer.ggml.pre is 'bloom'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_metadata_faults(tmp_path, name):
    changes, words = FAULTS[name]
    path = as_gguf(FIXTURES / "llama_linear", tmp_path / "model.gguf", **changes)
    with pytest.raises((ConfigError, CheckpointError, DataError)) as error:
        open_checkpoint(path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("left", [0, 3, 10, 400, 3000, 90_000])
def test_truncated(tmp_path, left):
    path = as_gguf(FIXTURES / "llama_linear", tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"truncated|no GGUF|empty"):
        GGUFFile(path)


CUTS = {"gpt-2": 4, "smollm": 1, "starcoder": 1, "llama-bpe": 3, "qwen2": 1, "deepseek-coder": 1}


@pytest.mark.parametrize("cut", CUTS)
def test_tokenizer(tmp_path, cut):
    """Vocabulary and merges become a tokenizer; what cuts the words is in the metadata."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    library.train_from_iterator(["It was 1812, and 1813 came. It wasn't 12 or 1812!"] * 3, trainer)
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    first = len(tokens)
    write_gguf(
        tmp_path / "model.gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": cut,
            "tokenizer.ggml.tokens": [*tokens, "<|start|>", "<|end|>"],
            "tokenizer.ggml.token_type": [1] * first + [3, 3],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        },
        {"x": float32(np.zeros((1,)))},
    )
    from genlab.train.data.json_tokenizer import JsonTokenizer
    from genlab.train.interop.gguf_llama import vocabulary_of

    data = vocabulary_of(GGUFFile(tmp_path / "model.gguf"))
    tokenizer = JsonTokenizer(json.dumps(data), kind="file", origin="x")
    for text in ("It was 1812, and 1813 came.", "na\u00efve \u4f60\u597d <|end|>", " a  b\n\n c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_tokens["<|end|>"] == first + 1
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" 1812")]
    assert max(len(piece.strip()) for piece in pieces) <= CUTS[cut]
    if cut == "gpt-2":
        assert pieces == [" 1812"]


def test_what_begins_and_ends_texts(tmp_path):
    """Where the file is silent on BOS, Llama 3 has it; what ends a turn ends an answer too."""
    from genlab.train.interop.gguf_llama import generation_of, settings_of

    given = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
    }
    for changes, bos, stops in (
        ({}, True, {"eos_token_id": [1, 2]}),
        ({"tokenizer.ggml.add_bos_token": False}, False, {"eos_token_id": [1, 2]}),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.eot_token_id": 1}, None, {}),
    ):
        write_gguf(tmp_path / "model.gguf", given | changes, {"x": float32(np.zeros((1,)))})
        file = GGUFFile(tmp_path / "model.gguf")
        assert settings_of(file).get("add_bos_token") is bos
        assert generation_of(file) == stops
