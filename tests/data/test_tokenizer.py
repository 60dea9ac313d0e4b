"""Tokenizers: byte-exact round trips, special tokens, ids out of range, saving."""

import json

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.train.data.json_tokenizer import _byte_alphabet
from genlab.train.data.tokenizer import BytesTokenizer
from genlab.train.data.tokenizer_config import (
    BPETokenizerConfig,
    FileTokenizerConfig,
    load_tokenizer,
    save_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from .conftest import TEXTS

few = settings(deadline=None, max_examples=60)
SPECIAL_LOOKING = ["<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>", "<s>", "</s>", "[MASK]"]
AWKWARD = [
    "",
    " ",
    "   leading",
    "double  space ",
    "\t\ttabs\t",
    "a\r\nb\r\n\r\n",
    "\x00nul\x00",
    "e\u0301 \u0301",
    "\U0001f600\u200d\U0001f3fd",
    "a</s>b<|eos|>",
    "\ufeffbom",
]
texts = st.one_of(
    st.sampled_from(AWKWARD),
    st.text(max_size=40),
    st.lists(
        st.one_of(st.sampled_from([*SPECIAL_LOOKING, " ", "  ", "\r\n", "\u0301"]), st.text("ab ")),
        max_size=8,
    ).map("".join),
)


def save_library(library: Tokenizer, path) -> FileTokenizerConfig:
    library.save(str(path))
    return FileTokenizerConfig(path=str(path))


def unigram(path, byte_fallback=True):
    """A SentencePiece-like tokenizer whose model holds its control tokens as pieces."""
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{b:02X}>", -20.0) for b in range(256)] if byte_fallback else []
    vocabulary += [("\u2581", -3.0), ("\u2581the", -2.0)]
    vocabulary += [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz<>/s"]
    library = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=byte_fallback))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return save_library(library, path)


def byte_level(path, special=(), normalizer=None):
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=280 + len(special),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    return save_library(library, path)


@few
@given(texts)
def test_bytes_round_trip(text):
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert not np.isin(ids, tokenizer.specials).any()


@few
@given(text=texts)
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32
    assert bpe.decode(ids) == text
    assert bpe.decode_bytes(ids) == text.encode()
    assert bpe.byte_lengths()[ids].sum() == len(text.encode())
    assert not np.isin(ids, bpe.specials).any()


@few
@given(data=st.data())
def test_streaming_decoder_equals_decode(bpe, data):
    ids = data.draw(st.lists(st.integers(0, bpe.vocab_size - 1), max_size=30))
    stream = bpe.streaming_decoder()
    out, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 3))
        out.append(stream.push(ids[at : at + size]))
        at += size
    assert "".join(out) + stream.flush() == bpe.decode(ids)


def test_streaming_decoder_holds_half_characters():
    tokenizer = BytesTokenizer()
    stream = tokenizer.streaming_decoder()
    emoji = "\U0001f600".encode()
    assert [stream.push(b) for b in emoji] == ["", "", "", "\U0001f600"]
    # Half a character, then a space: the half is lost to U+FFFD, not dropped, the space is kept.
    assert stream.push(list(emoji[:2])) == ""
    assert stream.push(ord(" ")) == "\ufffd "
    assert stream.push(list(emoji[:3])) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_bpe_is_deterministic_and_sized(bpe):
    again = BPETokenizerConfig(vocab_size=300).build(iter(TEXTS))
    assert again.fingerprint == bpe.fingerprint
    assert bpe.vocab_size == 300
    assert bpe.specials == (296, 297, 298, 299)
    assert bpe.byte_lengths()[296:].tolist() == [0, 0, 0, 0]
    assert bpe.byte_lengths()[:296].min() == 1
    assert bpe.lossy_reason is None
    assert BPETokenizerConfig(vocab_size=301).build(TEXTS).fingerprint != bpe.fingerprint


def test_bpe_of_too_little_text_names_both_numbers():
    with pytest.raises(DataError, match=r"vocab_size 400 needs 396 text pieces.*only 258"):
        BPETokenizerConfig(vocab_size=400).build(["abc"])
    with pytest.raises(ValidationError, match="260"):
        BPETokenizerConfig(vocab_size=259)


def test_special_text_is_text_unless_asked(bpe):
    text = "a<|eos|><|mask|>b"
    assert bpe.decode(bpe.encode(text)) == text
    ids = bpe.encode(text, allow_special=True)
    assert ids.tolist() == [*bpe.encode("a"), bpe.eos_id, bpe.mask_id, *bpe.encode("b")]
    assert bpe.decode(ids) == "ab"


@pytest.mark.parametrize("bad", [[-1], [0, 300], [1 << 40], np.array([299, 300], np.uint16)])
def test_ids_out_of_range_are_refused(bpe, bad):
    with pytest.raises(DataError, match="outside the vocabulary of 300 ids"):
        bpe.decode(bad)
    with pytest.raises(DataError, match="outside the vocabulary of 300 ids"):
        bpe.streaming_decoder().push(bad)


@pytest.mark.parametrize("bad", [[1.0], [[1, 2]], [True], ["a"]])
def test_ids_of_another_kind_are_refused(bpe, bad):
    with pytest.raises(DataError, match="integers"):
        bpe.decode(bad)


@pytest.mark.parametrize("text", ["ab\ud800", "\udfff"])
def test_lone_surrogates_are_refused(bpe, text):
    for tokenizer in (bpe, BytesTokenizer()):
        for allow in (False, True):
            with pytest.raises(DataError, match=r"surrogate U\+D"):
                tokenizer.encode(text, allow_special=allow)


def test_bytes_that_are_no_str_are_refused(bpe):
    with pytest.raises(DataError, match="got bytes"):
        bpe.encode(b"abc")


def test_byte_alphabet_is_the_librarys():
    assert sorted(_byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_byte_alphabet().values()) == list(range(256))


@pytest.fixture(scope="module")
def gpt2_like(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    return byte_level(path, special=["<|endoftext|>"]).build()


@few
@given(text=texts)
def test_file_round_trip(gpt2_like, text):
    assert gpt2_like.decode(gpt2_like.encode(text)) == text


def test_file_eos_may_be_id_zero(gpt2_like):
    assert gpt2_like.eos_id == 0
    assert gpt2_like.specials == (281, 0, 282, 283)
    assert gpt2_like.vocab_size == 284
    assert gpt2_like.encode("a<|endoftext|>", allow_special=True)[-1] == 0
    assert 0 not in gpt2_like.encode("a<|endoftext|>")
    assert gpt2_like.byte_lengths()[0] == 0
    assert not gpt2_like.lossy


def test_file_decodes_like_its_library(gpt2_like, tmp_path):
    library = Tokenizer.from_str(gpt2_like.content)
    for text in AWKWARD:
        assert gpt2_like.encode(text).tolist() == [
            i for i in library.encode(text, add_special_tokens=False).ids if i != 0
        ]


def test_lossy_normalizer_is_found_and_named(tmp_path):
    tokenizer = byte_level(tmp_path / "t.json", normalizer=normalizers.NFC()).build()
    assert tokenizer.lossy
    assert "normalizer NFC" in tokenizer.lossy_reason
    assert "\n" not in tokenizer.lossy_reason
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_sentencepiece_like_file(tmp_path):
    tokenizer = unigram(tmp_path / "t.json").build()
    library = Tokenizer.from_file(str(tmp_path / "t.json"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in ["the cat", " the", "a  b ", "", "\u4f60\u597d", "x\ny"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids) == library.decode(ids.tolist())
        assert ids.tolist() == library.encode(text).ids
    # The model itself would match these as one piece.
    library.encode_special_tokens = True
    for name in ("</s>", "<s>", "<unk>"):
        assert library.token_to_id(name) in library.encode(f"a{name}b").ids
        ids = tokenizer.encode(f"a{name}b")
        assert not np.isin(ids, tokenizer.specials).any()
        assert tokenizer.decode(ids) == f"a{name}b"
    assert tokenizer.encode("a</s>", allow_special=True)[-1] == tokenizer.eos_id
    # Only the low line itself is lost: it means a space in such a vocabulary.
    assert "2581" in tokenizer.lossy_reason
    # A stream that goes on after a prompt keeps its first space.
    the = tokenizer.encode("the")
    assert tokenizer.streaming_decoder(continuing=True).push(the) == " the"
    assert tokenizer.streaming_decoder().push(the) == "the"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_space_before_the_beginning(tmp_path, scheme, nested):
    """Newer files put it before a text alone, not behind special tokens (legacy=false)."""
    library = Tokenizer.from_file(unigram(tmp_path / "t.json").path)
    library.normalizer = normalizers.Sequence([])
    step = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([step]) if nested else step
    tokenizer = save_library(library, tmp_path / "t.json").build()
    text = "</s>the<s> the</s></s>ab the"
    for whole in (text, text.removeprefix("</s>"), "the", ""):
        assert tokenizer.encode(whole, allow_special=True).tolist() == library.encode(whole).ids


def test_unknown_tokens_make_a_file_lossy(tmp_path):
    tokenizer = unigram(tmp_path / "t.json", byte_fallback=False).build()
    assert tokenizer.lossy
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_wordpiece_file(tmp_path):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "hello": 5, "##s": 7}
    library = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.add_special_tokens([AddedToken(n, special=True) for n in names])
    tokenizer = save_library(library, tmp_path / "t.json").build()
    assert tokenizer.specials == (2, 3, 0, 4)
    assert tokenizer.lossy
    assert tokenizer.encode("Hello hellos").tolist() == [5, 5, 7]
    assert tokenizer.decode([5, 5, 7]) == "hello hellos"
    with pytest.raises(DataError, match="id 6 names no token"):
        tokenizer.decode([5, 6])


def test_special_tokens_swallow_no_spaces(tmp_path):
    mask = AddedToken("<mask>", special=True, lstrip=True, rstrip=True)
    tokenizer = byte_level(tmp_path / "t.json", special=[mask]).build()
    assert tokenizer.mask_id == 0
    assert tokenizer.decode(tokenizer.encode("a <mask> b")) == "a <mask> b"
    assert tokenizer.encode("<mask>", allow_special=True).tolist() == [0]


def test_bpe_dropout_in_a_file_does_not_make_encoding_random(tmp_path):
    byte_level(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    data["model"]["dropout"] = 0.9
    (tmp_path / "t.json").write_text(json.dumps(data))
    tokenizer = FileTokenizerConfig(path=str(tmp_path / "t.json")).build()
    text = TEXTS[0]
    assert all(np.array_equal(tokenizer.encode(text), tokenizer.encode(text)) for _ in range(5))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "\x00",
        '{"model": {"type": "nothing"}}',
        '{"model": {"type": "BPE"}, "added_tokens": [{"id": 3}]}',
        '{"model": {"type": "BPE"}, "added_tokens": [7]}',
        '{"model": {"type": "Unigram", "vocab": [["a"]]}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": "x"}',
    ],
)
def test_bad_tokenizer_files(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        FileTokenizerConfig(path=str(path)).build()
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_tokenizer_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        FileTokenizerConfig(path=str(tmp_path / "none.json")).build()


def test_save_and_load(bpe, gpt2_like, tmp_path):
    for tokenizer in (BytesTokenizer(), bpe, gpt2_like):
        folder = tmp_path / tokenizer.kind
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        loaded = load_tokenizer(folder)
        assert type(loaded) is type(tokenizer)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.kind, loaded.specials) == (tokenizer.kind, tokenizer.specials)
        assert np.array_equal(loaded.encode(TEXTS[0]), tokenizer.encode(TEXTS[0]))
        assert not list(folder.glob("*.tmp"))


def test_loading_refuses_what_was_not_saved(bpe, tmp_path):
    with pytest.raises(DataError, match="no saved tokenizer"):
        load_tokenizer(tmp_path)
    save_tokenizer(bpe, tmp_path)
    content = tmp_path / "tokenizer.json"
    text = content.read_text()
    content.write_text(text[:-200])
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    content.write_text(BPETokenizerConfig(vocab_size=290).build(TEXTS).content)
    with pytest.raises(DataError, match="corrupt or was replaced"):
        load_tokenizer(tmp_path)
    content.unlink()
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_meta.json").write_text("{}")
    with pytest.raises(DataError, match="corrupt"):
        load_tokenizer(tmp_path)


def test_choice_by_name():
    from genlab.train.data.tokenizer_config import TokenizerConfig

    adapter = TypeAdapter(TokenizerConfig)
    assert adapter.validate_json('{"name": "bpe", "vocab_size": 300}') == BPETokenizerConfig(
        vocab_size=300
    )
    with pytest.raises(ValidationError):
        adapter.validate_json('{"name": "bytes", "vocab_size": 300}')
