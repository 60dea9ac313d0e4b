"""SentencePiece vocabularies against their definition, and `tokenizer.model` in a folder."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.train.data.json_tokenizer import JsonTokenizer
from genlab.train.interop.gguf_file import GGUFFile
from genlab.train.interop.gguf_llama import settings_of
from genlab.train.interop.gguf_llama import vocabulary_of as vocabulary_of_gguf
from genlab.train.interop.import_run import import_checkpoint
from genlab.train.interop.sentencepiece import read_model, vocabulary_of
from genlab.train.run_folder import load_run

from .gguf_writer import float32, write_gguf
from .sentencepiece_writer import (
    BYTES,
    CONTROL,
    NORMAL,
    SPECIAL,
    UNUSED,
    USER_DEFINED,
    message,
    write_model,
)

FIXTURES = Path(__file__).parent / "fixtures"
SPACE = "\u2581"
WORDS = ("th", "he", "the", f"{SPACE}t", f"{SPACE}th", f"{SPACE}the", "at", "ea", "eat", "tt")
LETTERS = [(letter, -100.0 - i, NORMAL) for i, letter in enumerate(f"{SPACE}theas<>/")]
PIECES = SPECIAL + [(word, -float(i), NORMAL) for i, word in enumerate(WORDS)] + LETTERS
TEXTS = ("", " ", "the", " the  heat", "that tea\u00e9", "a</s>the<unk>", "<0x41> the", "thettthe")


def random_texts():
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list("theas  \u4f60"), rng.integers(1, 30))) for _ in range(100)]


def merged(text, pieces, first_space):
    """The definition of BPE: merge the neighbours whose whole scores highest, leftmost first."""
    ids = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    symbols = list((SPACE if first_space and text else "") + text.replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    out = []
    for symbol in symbols:
        if symbol in scores:
            out.append(ids[symbol])
        elif "<0x00>" in ids:
            out += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        elif out[-1:] != [0]:
            out.append(0)  # unknown characters in a row are one
    return out


def likeliest(text, pieces, squeeze):
    """The definition of a model of unigrams: the pieces of the largest sum of scores."""
    scores = {piece: (score, i) for i, (piece, score, kind) in enumerate(pieces) if kind == NORMAL}
    unknown = min(score for score, _ in scores.values()) - 10
    if squeeze:
        text = " ".join(part for part in text.split(" ") if part)
    text = SPACE + text.replace(" ", SPACE) if text else ""
    best = [(0.0, [])] + [(-np.inf, [])] * len(text)
    for end in range(1, len(text) + 1):
        for begin in range(end):
            one = (unknown, 0) if end == begin + 1 else None
            score, index = scores.get(text[begin:end]) or one or (-np.inf, 0)
            if best[begin][0] + score > best[end][0]:
                ids = best[begin][1]
                ids = ids if index == 0 and ids[-1:] == [0] else [*ids, index]
                best[end] = (best[begin][0] + score, ids)
    return best[-1][1]


def tokenizer_of(data):
    return JsonTokenizer(json.dumps(data), kind="file", origin="x")


@pytest.mark.parametrize("first_space", [True, False])
@pytest.mark.parametrize("extra", [[], BYTES], ids=["unknown", "bytes"])
def test_bpe(tmp_path, extra, first_space):
    pieces = PIECES + extra
    path = write_model(
        tmp_path / "tokenizer.model", pieces, normalizer=[(3, int(first_space)), (4, 0)]
    )
    tokenizer = tokenizer_of(vocabulary_of(read_model(path).pieces))
    for text in (*TEXTS, *random_texts()):
        ids = tokenizer.encode(text).tolist()
        assert ids == merged(text, pieces, first_space), text
        if extra:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("squeeze", [True, False])
def test_unigrams(tmp_path, squeeze):
    rng = np.random.default_rng(1)
    pieces = [(text, float(rng.normal(-6, 3)), kind) for text, _, kind in PIECES]
    path = write_model(tmp_path / "tokenizer.model", pieces, kind=1, normalizer=[(4, int(squeeze))])
    tokenizer = tokenizer_of(vocabulary_of(read_model(path).pieces))
    for text in (*TEXTS, *random_texts()):
        assert tokenizer.encode(text).tolist() == likeliest(text, pieces, squeeze), text


def test_gguf_gives_the_same(tmp_path):
    pieces = PIECES + BYTES
    texts, scores, types = (list(column) for column in zip(*pieces, strict=True))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
    }
    write_gguf(tmp_path / "model.gguf", metadata, {"x": float32(np.zeros((1,)))})
    path = write_model(tmp_path / "tokenizer.model", pieces)
    file = GGUFFile(tmp_path / "model.gguf")
    assert vocabulary_of_gguf(file) == vocabulary_of(read_model(path).pieces)
    assert settings_of(file) == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 3 tokens"),
        ({"tokenizer.ggml.scores": ...}, "has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "gpt2"}, "has no tokenizer.ggml.pre"),
    ],
)
def test_gguf_faults(tmp_path, changes, said):
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "a"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0],
    } | changes
    metadata = {key: value for key, value in metadata.items() if value is not ...}
    write_gguf(tmp_path / "model.gguf", metadata, {"x": float32(np.zeros((1,)))})
    with pytest.raises(DataError, match=said):
        vocabulary_of_gguf(GGUFFile(tmp_path / "model.gguf"))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of 97 rows with a `tokenizer.model` alone."""
    shutil.copytree(FIXTURES / "mistral", tmp_path / "hf")
    write_model(tmp_path / "hf" / "tokenizer.model", PIECES)
    return tmp_path / "hf"


def test_import_of_a_folder(folder, tmp_path):
    end = len(PIECES)
    (folder / "added_tokens.json").write_text(json.dumps({"<|user|>": end}))
    added = {str(end): {"content": "<|user|>", "special": True}, str(end + 1): {"content": "tea"}}
    settings = {"added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    import_checkpoint(folder, tmp_path / "run")
    tokenizer = load_run(tmp_path / "run").tokenizer
    assert tokenizer.adds_bos and tokenizer.specials[:2] == (1, 2)
    assert tokenizer.special_tokens["<|user|>"] == end
    assert tokenizer.encode("the").tolist() == merged("the", PIECES, True)
    assert tokenizer.encode("the tea").tolist() == [*merged("the ", PIECES, True), end + 1]
    assert tokenizer.encode("<|user|>").max() < end
    assert (tmp_path / "run" / "source" / "tokenizer.model").exists()


FAULTS = {
    "no message": (b"text, not a message", "no SentencePiece model"),
    "empty": (b"", "no SentencePiece model|want one of unigrams or BPE"),
    "words": ({"kind": 3}, "model of words"),
    "suffixes": ({"trainer": [(24, 1)]}, "treat_whitespace_as_suffix"),
    "other spaces": ({"normalizer": [(5, 0)]}, "escape_whitespaces"),
    "bytes among unigrams": ({"kind": 1, "pieces": PIECES + BYTES}, "byte piece '<0x00>'"),
    "unused": ({"pieces": [*PIECES, ("hea", -9.0, UNUSED)]}, "unused piece 'hea'"),
    "twice": ({"pieces": [*PIECES, ("the", -9.0, NORMAL)]}, "occurs twice"),
    "no unknown": ({"kind": 1, "pieces": PIECES[1:]}, "no unknown piece"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(folder, tmp_path, name):
    change, said = FAULTS[name]
    path = folder / "tokenizer.model"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        write_model(path, **{"pieces": PIECES} | change)
    with pytest.raises(DataError, match=said) as error:
        import_checkpoint(folder, tmp_path / "run")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("left", [1, 100, 300])
def test_truncated(folder, left):
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:-left])
    with pytest.raises(DataError, match="damaged"):
        read_model(path)


def test_wrong_added_tokens(folder, tmp_path):
    for listed, said in (
        ({"<|user|>": 60}, "'<|user|>' has id 60"),
        ({"<|user|>": "60"}, "want an id"),
        ({"": len(PIECES)}, "want a text"),
    ):
        (folder / "added_tokens.json").write_text(json.dumps(listed))
        with pytest.raises(DataError, match=said.replace("|", r"\|")):
            import_checkpoint(folder, tmp_path / "run")


def test_user_defined_pieces_are_found_in_texts(tmp_path):
    pieces = [*PIECES, ("heat", 0.0, USER_DEFINED), ("<x>", 0.0, CONTROL)]
    path = write_model(tmp_path / "tokenizer.model", pieces, normalizer=[(3, 0), (4, 0)])
    tokenizer = tokenizer_of(vocabulary_of(read_model(path).pieces))
    ids = tokenizer.encode("the heats<x>").tolist()
    assert ids[:3] == [*merged("the ", pieces, False), len(PIECES)]
    assert len(PIECES) + 1 not in ids


def test_messages_in_parts_are_one(tmp_path):
    """Of a field's several messages Protocol Buffers make one, in which the later value counts."""
    path = write_model(tmp_path / "tokenizer.model", PIECES)
    path.write_bytes(path.read_bytes() + message([(2, message([(41, 2), (42, 1)]))]))
    assert read_model(path).settings == {
        "unk_token": "<unk>", "bos_token": "</s>", "eos_token": "<s>",
    }  # fmt: skip
