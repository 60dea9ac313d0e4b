"""Sources and splits: exact text, documents that never straddle, bad files named in one line."""

import gzip
import json
import lzma

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from genlab.errors import DataError
from genlab.train.data.readers import split_paragraphs
from genlab.train.data.sources import CORPORA, CorpusConfig, FilesConfig, SourceConfig
from genlab.train.data.splits import SPLITS, Document, SplitConfig, assign_splits
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

CHAPTERS = {
    "sense_and_sensibility": 50,
    "pride_and_prejudice": 61,
    "mansfield_park": 48,
    "emma": 55,
    "northanger_abbey": 31,
    "persuasion": 24,
}


def texts(config) -> list[str]:
    return [d.text for d in config.build().documents()]


def refusal(config) -> str:
    with pytest.raises(DataError) as error:
        texts(config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def austen():
    return list(CorpusConfig().build().documents())


def test_austen_chapters(austen):
    counts = {n: sum(d.group == n for d in austen) for n in CORPORA["austen"]}
    assert counts == CHAPTERS
    assert len({d.id for d in austen}) == len(austen)
    assert sum(len(d.text.encode()) for d in austen) == 4_025_029
    assert min(len(d.text) for d in austen) > 2000
    for document in austen:
        if not document.id.endswith("/001"):
            assert document.text.split()[0].upper() in ("CHAPTER", "VOLUME")
    volumes = [d for d in austen if d.text.startswith("VOLUME")]
    assert [d.id for d in volumes] == ["emma/019", "emma/037"]


def test_austen_chapters_join_to_the_files(austen):
    source = CorpusConfig().build()
    for novel, packed in source._packed():
        joined = "".join(d.text for d in austen if d.group == novel)
        assert joined.encode() == lzma.decompress(packed)


def test_austen_split(austen):
    assignment = assign_splits(austen, CorpusConfig())
    test = {d.group for d, s in zip(austen, assignment, strict=True) if SPLITS[s] == "test"}
    assert test == {"persuasion"}
    assert [int((assignment == s).sum()) for s in range(3)] == [240, 5, 24]


def documents(count, text="text {}"):
    return [Document(f"g{i % 3}/{i}", f"g{i % 3}", text.format(i)) for i in range(count)]


@pytest.mark.parametrize("count", [4, 10, 101])
def test_fractions_are_of_documents(count):
    config = SplitConfig(holdout_fraction=0.2, validation_fraction=0.1)
    assignment = assign_splits(documents(count), config)
    test = max(1, round(0.2 * count))
    assert (assignment == 2).sum() == test
    assert (assignment == 1).sum() == max(1, round(0.1 * (count - test)))


def test_splits_depend_on_text_and_seed_alone():
    docs = documents(50)
    config = SplitConfig(holdout_fraction=0.3)
    first = assign_splits(docs, config)
    moved = [Document(f"else/{i}", "else", d.text) for i, d in enumerate(docs)]
    assert np.array_equal(first, assign_splits(moved, config))
    back = assign_splits(docs[::-1], config)[::-1]
    assert np.array_equal(first, back)
    assert not np.array_equal(
        first, assign_splits(docs, SplitConfig(holdout_fraction=0.3, split_seed=1))
    )


def test_equal_texts_never_straddle():
    docs = [Document(str(i), "g", f"text {i % 7}") for i in range(70)]
    assignment = assign_splits(docs, SplitConfig(holdout_fraction=0.2, validation_fraction=0.2))
    for value in range(7):
        assert len(set(assignment[value::7])) == 1
    assert set(assignment) == {0, 1, 2}


def test_holdout_patterns():
    docs = documents(9)
    none = {"validation_fraction": 0.0}
    by_group = assign_splits(docs, SplitConfig(holdout=("g1",), **none))
    assert [i for i in range(9) if by_group[i] == 2] == [1, 4, 7]
    by_id = assign_splits(docs, SplitConfig(holdout=("g1/4", "g0/*"), **none))
    assert [i for i in range(9) if by_id[i] == 2] == [0, 3, 4, 6]
    files = [Document(f"sub/{n}.jsonl.gz/0", f"sub/{n}.jsonl.gz", n) for n in ("a", "b")]
    for pattern in ("a", "a.jsonl.gz", "sub/a.*"):
        assert assign_splits(files, SplitConfig(holdout=(pattern,), **none)).tolist() == [2, 0]


def test_split_refusals():
    with pytest.raises(DataError, match="'g7' matches no document; valid: g0, g1, g2"):
        assign_splits(documents(3), SplitConfig(holdout=("g7",)))
    many = [Document(f"name{i}/0", f"name{i}", str(i)) for i in range(50)]
    with pytest.raises(DataError, match="did you mean 'name49'"):
        assign_splits(many, SplitConfig(holdout=("nam49",)))
    with pytest.raises(DataError, match="50 groups, such as 'name0'"):
        assign_splits(many, SplitConfig(holdout=("zzz",)))
    with pytest.raises(DataError, match=r"none is left to train on"):
        assign_splits(documents(1), SplitConfig())
    with pytest.raises(DataError, match=r"none is left to train on"):
        assign_splits(documents(3), SplitConfig(holdout=("*",)))
    with pytest.raises(DataError, match="empty"):
        assign_splits([], SplitConfig())
    assert assign_splits(documents(1), SplitConfig(validation_fraction=0.0)).tolist() == [0]
    with pytest.raises(ValidationError, match="not both"):
        SplitConfig(holdout=("a",), holdout_fraction=0.1)
    for bad in (-0.1, 1.0):
        with pytest.raises(ValidationError):
            SplitConfig(validation_fraction=bad)


def test_txt_keeps_every_byte(tmp_path):
    raw = "\ufeffone\r\ntwo\x00\n\n\n  three\u2028\n \t\nfour".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    path = str(tmp_path / "a.txt")
    assert [t.encode() for t in texts(FilesConfig(paths=(path,)))] == [raw]
    paragraphs = texts(FilesConfig(paths=(path,), documents="paragraph"))
    assert "".join(paragraphs).encode() == raw
    assert len(paragraphs) == 3


@given(st.text("ab \n\r\t"))
def test_paragraphs_join_to_the_text(text):
    parts = split_paragraphs(text)
    assert "".join(parts) == text and all(parts)


def compress(path, data: bytes):
    packers = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(data))


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_jsonl(tmp_path, suffix):
    rows = ["one\nline", "", "zw\u00f6lf \u2028 \u4f60"]
    lines = "\n".join(
        json.dumps({"n": i, "body": r}, ensure_ascii=False) for i, r in enumerate(rows)
    )
    path = tmp_path / f"a.jsonl{suffix}"
    compress(path, lines.encode() + b"\n\n")
    config = FilesConfig(paths=(str(path),), field="body")
    assert texts(config) == [rows[0], rows[2]]
    assert [d.id for d in config.build().documents()] == [f"{path.name}/0", f"{path.name}/2"]


def test_zstd_frames_are_read_to_the_end(tmp_path):
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"one ") + zstandard.compress(b"two"))
    assert texts(FilesConfig(paths=(str(tmp_path / "a.txt.zst"),))) == ["one two"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_and_foreign_compression(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    compress(path, np.random.default_rng(0).bytes(20).hex().encode() * 50)
    whole = path.read_bytes()
    config = FilesConfig(paths=(str(path),))
    path.write_bytes(whole[:-5])
    assert "corrupt or truncated" in refusal(config)
    path.write_bytes(b"this was never compressed")
    assert "corrupt or truncated" in refusal(config)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_parquet(tmp_path, kind):
    rows = ["one", "", "three \u4f60"]
    table = pyarrow.table({"text": pyarrow.array(rows, kind), "n": [1, 2, 3]})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    assert texts(FilesConfig(paths=(str(path),), field="text")) == ["one", rows[2]]
    assert "no column 'txt'; did you mean 'text'?" in refusal(
        FilesConfig(paths=(str(path),), field="txt")
    )
    assert "must hold strings, got int64" in refusal(FilesConfig(paths=(str(path),), field="n"))
    assert "needs `field`" in refusal(FilesConfig(paths=(str(path),)))
    path.write_bytes(path.read_bytes()[:-20])
    assert "corrupt or no parquet" in refusal(FilesConfig(paths=(str(path),), field="text"))


def test_parquet_nulls_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    assert "row 1: column 'text' is null" in refusal(FilesConfig(paths=(str(path),), field="text"))


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"ab\xff", {}, "byte 0xff at offset 2 is not UTF-8"),
        ("a.txt", b"", {}, "no text in"),
        ("a.txt", b"x", {"field": "text"}, "has no fields"),
        ("a.jsonl", b"", {"field": "text"}, "no text in"),
        ("a.jsonl", b'{"text": 1}', {"field": "text"}, "line 1: field 'text' must be a string"),
        ("a.jsonl", b'{"texts": ""}', {"field": "text"}, "did you mean 'texts'?"),
        ("a.jsonl", b'{"text": ""}\n[1]', {"field": "text"}, "line 2: wanted a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{', {"field": "text"}, "line 2: no JSON"),
        ("a.jsonl", b'\n{"text": "\xff"}', {"field": "text"}, "line 2: byte 0xff"),
        ("a.jsonl", b'{"text": "a"}', {}, "needs `field`"),
        ("a.jsonl", b"{}", {"field": "t", "documents": "paragraph"}, "is for .txt"),
        ("a.csv", b"x", {}, "cannot read this kind of file"),
        ("a.parquet.gz", b"x", {}, "cannot read this kind of file"),
    ],
)
def test_bad_files(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_bytes(content)
    got = refusal(FilesConfig(paths=(str(path),), **options))
    assert message in got and name in got


def test_paths_and_globs(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert texts(FilesConfig(paths=("*.txt",))) == ["a.txt", "b.txt"]
    every = FilesConfig(paths=("**/*.txt", "a.txt"))
    assert texts(every) == ["a.txt", "b.txt", "sub/c.txt", "sub/d.txt"]
    assert [d.group for d in every.build().documents()] == texts(every)
    (tmp_path / "odd[1].txt").write_text("odd")
    assert texts(FilesConfig(paths=("odd[1].txt",))) == ["odd"]
    for bad in ("*.text", "none.txt", "sub"):
        with pytest.raises(DataError, match="matches no file"):
            FilesConfig(paths=(bad,)).build()
    with pytest.raises(DataError, match=r"it is a folder: give a glob such as sub/\*\.txt"):
        FilesConfig(paths=("sub",)).build()
    with pytest.raises(ValidationError):
        FilesConfig(paths=())


def test_fingerprint_follows_content_not_place(tmp_path):
    def config(folder, **options):
        return FilesConfig(paths=(str(tmp_path / folder / "*.txt"),), **options)

    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("a")
        (tmp_path / folder / "b.txt").write_text("b")
    first = config("one").build().fingerprint
    assert config("two").build().fingerprint == first
    assert config("two", holdout_fraction=0.5).build().fingerprint != first
    assert config("two", split_seed=1).build().fingerprint != first
    (tmp_path / "two" / "b.txt").write_text("B")
    assert config("two").build().fingerprint != first
    assert CorpusConfig().build().fingerprint != CorpusConfig(split_seed=1).build().fingerprint


def test_choice_by_name():
    adapter = TypeAdapter(SourceConfig)
    config = adapter.validate_json('{"name": "files", "paths": ["a"], "holdout": ["b"]}')
    assert config == FilesConfig(paths=("a",), holdout=("b",))
    with pytest.raises(ValidationError):
        adapter.validate_json('{"name": "corpus", "paths": ["a"]}')
