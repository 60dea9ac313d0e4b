"""The token cache: complete or absent, built once, refused when it is not what it should be."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from genlab.errors import DataError
from genlab.train.data import cache
from genlab.train.data.cache import (
    default_cache_dir,
    ensure_folder,
    open_token_cache,
    token_cache_folder,
    write_token_cache,
)
from genlab.train.data.sources import FilesConfig
from genlab.train.data.splits import SPLITS, assign_splits
from genlab.train.data.tokenizer import BytesTokenizer

CONFIG = {"holdout": ("c*",), "validation_fraction": 0.3}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name} first \u00e9\n\n{name} second\n\n{name}")
    return FilesConfig(paths=(str(folder / "*.txt"),), documents="paragraph", **CONFIG).build()


def build(tmp_path, source, tokenizer):
    folder = token_cache_folder(tmp_path / "cache", source, tokenizer)
    assignment = assign_splits(source.documents(), source.config)
    ensure_folder(folder, lambda f: write_token_cache(f, source, assignment, tokenizer, None))
    return folder, assignment


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_stores_hold_the_documents(tmp_path, corpus, bpe, kind):
    tokenizer = BytesTokenizer() if kind == "bytes" else bpe
    folder, assignment = build(tmp_path, corpus, tokenizer)
    stores = open_token_cache(folder, corpus, tokenizer)
    for index, (split, store) in enumerate(zip(SPLITS, stores, strict=True)):
        documents = [d for d, s in zip(corpus.documents(), assignment, strict=True) if s == index]
        assert store.split == split and store.specials == tokenizer.specials
        assert store.names == tuple(d.id for d in documents)
        assert [tokenizer.decode(store.document(i)) for i in range(store.num_documents)] == [
            d.text for d in documents
        ]
        assert store.byte_counts.tolist() == [len(d.text.encode()) for d in documents]
        assert store.num_bytes == sum(len(d.text.encode()) for d in documents)
        assert store.num_tokens == len(store.tokens) > 0
    assert len(stores[2].names) == 3 and all(n.startswith("c.txt") for n in stores[2].names)


def test_wide_vocabularies_take_four_bytes():
    assert [cache._token_dtype(v) for v in (260, 1 << 16, (1 << 16) + 1)] == ["<u2", "<u2", "<u4"]


def test_an_empty_split_opens(tmp_path, corpus):
    config = FilesConfig(paths=corpus.config.paths, validation_fraction=0.0)
    source = config.build()
    folder, _ = build(tmp_path, source, BytesTokenizer())
    train, validation, test = open_token_cache(folder, source, BytesTokenizer())
    assert (train.num_documents, validation.num_documents, test.num_documents) == (3, 0, 0)
    assert test.num_tokens == test.num_bytes == 0


def refusal(folder, source, tokenizer):
    with pytest.raises(DataError) as error:
        open_token_cache(folder, source, tokenizer)
    message = str(error.value)
    assert str(folder) in message and "delete" in message and "\n" not in message
    return message


@pytest.mark.parametrize("suffix", ["tokens.bin", "offsets.bin", "bytes.bin", "names.json"])
@pytest.mark.parametrize("split", SPLITS)
def test_damage_is_refused(tmp_path, corpus, split, suffix):
    tokenizer = BytesTokenizer()
    folder, _ = build(tmp_path, corpus, tokenizer)
    path = folder / f"{split}.{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert "truncated" in refusal(folder, corpus, tokenizer)
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "checksum" in refusal(folder, corpus, tokenizer)
    path.unlink()
    assert "No such file" in refusal(folder, corpus, tokenizer)
    path.write_bytes(whole)
    open_token_cache(folder, corpus, tokenizer)


@pytest.mark.parametrize("meta", ["", "{}", "[]", '{"format": 1}'])
def test_damaged_meta_is_refused(tmp_path, corpus, meta):
    folder, _ = build(tmp_path, corpus, BytesTokenizer())
    (folder / "meta.json").write_text(meta)
    assert "corrupt" in refusal(folder, corpus, BytesTokenizer())
    (folder / "meta.json").unlink()
    assert "No such file" in refusal(folder, corpus, BytesTokenizer())


def test_foreign_caches_are_refused(tmp_path, corpus, bpe):
    folder, _ = build(tmp_path, corpus, BytesTokenizer())
    assert "another tokenizer" in refusal(folder, corpus, bpe)
    other = FilesConfig(paths=corpus.config.paths, holdout=("a*",)).build()
    assert "another source" in refusal(folder, other, BytesTokenizer())
    assert token_cache_folder(tmp_path, corpus, bpe) != token_cache_folder(tmp_path, other, bpe)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": "genlab-tokens-0"}))
    assert "another format" in refusal(folder, corpus, BytesTokenizer())


def test_built_once_by_whoever_comes_first(tmp_path):
    calls = []

    def fill(folder):
        calls.append(folder)
        time.sleep(0.05)
        (folder / "x").write_text("x")

    threads = [
        threading.Thread(target=ensure_folder, args=(tmp_path / "c" / "key", fill))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["key", "key.lock"]


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "x").write_text("x")
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        ensure_folder(tmp_path / "key", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["key.lock"]


def test_a_killed_build_leaves_nothing_usable(tmp_path):
    code = f"""
import os, pathlib, signal
from genlab.train.data.cache import ensure_folder
def fill(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
ensure_folder(pathlib.Path({str(tmp_path)!r}) / "key", fill)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "key").exists()
    assert len(list(tmp_path.glob("key.tmp-*/half"))) == 1
    ensure_folder(tmp_path / "key", lambda f: (f / "whole").write_text("whole"))
    assert [p.name for p in (tmp_path / "key").iterdir()] == ["whole"]
    assert not list(tmp_path.glob("key.tmp-*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (Linux)")
def test_full_disk(tmp_path, corpus, monkeypatch):
    """A real ENOSPC: the tokens go to a device that is always full."""

    def on_full_disk(prefix, dir):
        folder = dir / f"{prefix}0"
        folder.mkdir()
        (folder / "train.tokens.bin").symlink_to("/dev/full")
        return str(folder)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", on_full_disk)
    with pytest.raises(DataError, match=r"no space left.*GENLAB_CACHE"):
        build(tmp_path, corpus, BytesTokenizer())
    assert all(p.suffix == ".lock" for p in (tmp_path / "cache" / "tokens").iterdir())


def test_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot write the cache.*GENLAB_CACHE"):
        ensure_folder(tmp_path / "file" / "key", lambda f: None)


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("GENLAB_CACHE")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache_dir() == tmp_path / "x" / "genlab"


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, corpus):
    assignment = assign_splits(corpus.documents(), corpus.config)
    (tmp_path / "corpus" / "d.txt").write_text("new")
    changed = FilesConfig(paths=corpus.config.paths, documents="paragraph", **CONFIG).build()
    for wrong in (assignment, np.append(assignment, np.zeros(5, np.uint8))):
        out = tmp_path / "out"
        out.mkdir()
        with pytest.raises(DataError, match="changed while"):
            write_token_cache(out, changed, wrong, BytesTokenizer(), None)
        shutil.rmtree(out)
