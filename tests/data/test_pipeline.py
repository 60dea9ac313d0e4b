"""The pipeline: same batches whatever the prefetching, the resumption and the processes."""

import itertools

import numpy as np
import pytest
from genlab.errors import ConfigError, DataError
from genlab.paradigms.interface import Batch
from genlab.train.data.packing import PackedRows
from genlab.train.data.pipeline import DataConfig, build_data, train_batches
from genlab.train.data.sources import FilesConfig
from genlab.train.data.tokenizer_config import BPETokenizerConfig, BytesTokenizerConfig
from pydantic import ValidationError

SIZES = {"batch_size": 4, "length": 8, "seed": 3}


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def assert_same(got, wanted):
    assert [step for step, _ in got] == [step for step, _ in wanted]
    for (_, a), (_, b) in zip(got, wanted, strict=True):
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(x, y)


@pytest.fixture
def store(store_of):
    return store_of([30, 41, 7, 90])


@pytest.fixture
def uninterrupted(store):
    rows = PackedRows(store, length=8, seed=3)
    return [(s, rows(np.arange(4 * s, 4 * s + 4))) for s in range(40)]


def test_batches_are_the_rows_in_order(store, uninterrupted):
    got = take(train_batches(store, **SIZES), 40)
    assert isinstance(got[0][1], Batch)
    assert got[0][1].tokens.shape == (4, 8)
    assert_same(got, uninterrupted)


@pytest.mark.parametrize("step", [1, 6, 7, 33])
def test_resume_goes_on_where_it_was(store, uninterrupted, step):
    """A fresh iterator, as after a kill: prefetched batches of the old one do not matter."""
    killed = train_batches(store, **SIZES)
    before = take(killed, step)
    del killed
    after = take(train_batches(store, **SIZES, start_step=step), 40 - step)
    assert_same(before + after, uninterrupted)


def test_resuming_far_out_is_direct(store):
    far = 10**15
    ((step, batch),) = take(train_batches(store, **SIZES, start_step=far), 1)
    assert step == far
    assert np.array_equal(
        batch.tokens, PackedRows(store, length=8, seed=3)(4 * far + np.arange(4))[0]
    )


@pytest.mark.parametrize("count", [2, 4])
def test_other_process_counts_give_the_same_global_batches(store, uninterrupted, count):
    parts = [
        take(train_batches(store, **SIZES, start_step=10, process_index=p, process_count=count), 20)
        for p in range(count)
    ]
    joined = []
    for of_step in zip(*parts, strict=True):
        steps = {step for step, _ in of_step}
        assert len(steps) == 1
        fields = zip(*(batch for _, batch in of_step), strict=True)
        joined.append((steps.pop(), Batch(*(np.concatenate(f) for f in fields))))
    assert_same(joined, uninterrupted[10:30])


def test_shapes_never_change_and_rows_repeat_only_by_epoch(store):
    rows = PackedRows(store, length=8, seed=3)
    assert rows.rows_per_epoch % 4 != 0  # no short batch at the end of an epoch
    batches = take(train_batches(store, **SIZES), 3 * rows.rows_per_epoch // 4)
    assert {b.tokens.shape for _, b in batches} == {(4, 8)}


def test_refusals(store):
    with pytest.raises(ConfigError, match="batch_size 4 cannot be divided over 3"):
        train_batches(store, **SIZES, process_count=3)
    with pytest.raises(ConfigError, match="process 2"):
        train_batches(store, **SIZES, process_index=2, process_count=2)
    with pytest.raises(ConfigError, match="start_step -1"):
        train_batches(store, **SIZES, start_step=-1)
    with pytest.raises(DataError, match=r"176 tokens.*context length of 300"):
        train_batches(store, batch_size=4, length=300, seed=3)


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = "it is a truth universally acknowledged that a single man must be in want".split()
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c", "held"):
        paragraphs = [" ".join(draw.choice(words, 12)) for _ in range(6)]
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs))
    return DataConfig(
        source=FilesConfig(
            paths=(str(folder / "*.txt"),), documents="paragraph", holdout=("held",)
        ),
        tokenizer=BPETokenizerConfig(vocab_size=290),
        context_length=16,
        batch_size=2,
    )


def test_build_data(config, tmp_path):
    told = []
    data = build_data(config, cache_dir=tmp_path / "cache", progress=lambda *a: told.append(a))
    assert {phase for phase, _, _ in told} == {"train tokenizer", "tokenise"}
    assert told[-1][1:] == (24, 24)
    assert data.tokenizer.vocab_size == 290
    assert (data.train.num_documents, data.validation.num_documents) == (17, 1)
    assert data.test.names == tuple(f"held.txt/{i}" for i in range(6))
    for split in ("train", "validation", "test"):
        texts = [d.text for d in data.documents(split)]
        store = data.store(split)
        assert [data.tokenizer.decode(store.document(i)) for i in range(len(texts))] == texts
        assert len(texts) == store.num_documents
    step, batch = next(data.train_batches(start_step=5))
    assert step == 5 and batch.tokens.shape == (2, 16)
    windows = data.evaluation_windows("test")
    assert windows.length == 16 and windows.total_bytes == data.test.num_bytes
    assert data.evaluation_windows("test", length=8, max_windows=2).length == 8
    with pytest.raises(DataError, match="length 0"):
        data.evaluation_windows("test", length=0)
    with pytest.raises(DataError, match="no split 'dev'"):
        data.evaluation_windows("dev")


def test_the_tokenizer_sees_the_training_split_alone(config, tmp_path):
    data = build_data(config, cache_dir=tmp_path / "cache")
    again = config.tokenizer.build(d.text for d in data.documents("train"))
    assert again.fingerprint == data.tokenizer.fingerprint


def test_the_second_time_comes_from_the_cache(config, tmp_path):
    first = build_data(config, cache_dir=tmp_path / "cache")

    def fail(*told):
        raise AssertionError(told)

    second = build_data(config, cache_dir=tmp_path / "cache", progress=fail)
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train.tokens, first.train.tokens)
    other = build_data(config, cache_dir=tmp_path / "elsewhere")
    assert np.array_equal(other.train.tokens, first.train.tokens)


def test_everything_that_matters_changes_the_fingerprint(config, tmp_path):
    cache = tmp_path / "cache"
    source = config.source
    variants = [
        config,
        config.model_copy(update={"tokenizer": BytesTokenizerConfig()}),
        config.model_copy(update={"tokenizer": BPETokenizerConfig(vocab_size=280)}),
        config.model_copy(update={"source": source.model_copy(update={"split_seed": 1})}),
        config.model_copy(update={"source": source.model_copy(update={"holdout": ("a",)})}),
    ]
    prints = [build_data(v, cache_dir=cache).fingerprint for v in variants]
    assert len(set(prints)) == len(prints)


def test_another_seed_gives_other_batches_of_the_same_data(config, tmp_path):
    one = build_data(config, cache_dir=tmp_path / "cache")
    two = build_data(config.model_copy(update={"seed": 1}), cache_dir=tmp_path / "cache")
    assert one.fingerprint == two.fingerprint
    assert not np.array_equal(next(one.train_batches())[1][0], next(two.train_batches())[1][0])


def test_short_corpus_is_refused_before_training(config, tmp_path):
    with pytest.raises(DataError, match=r"train split has \d+ tokens.*context length of 5000"):
        build_data(config.model_copy(update={"context_length": 5000}), cache_dir=tmp_path / "cache")


def test_a_damaged_tokenizer_cache_is_named(config, tmp_path):
    build_data(config, cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json")
    path.write_text(path.read_text()[:-9])
    with pytest.raises(DataError, match=f"delete {path.parent} to rebuild"):
        build_data(config, cache_dir=tmp_path / "cache")


def test_defaults_are_the_shipped_corpus():
    config = DataConfig()
    assert config.source.corpus == "austen" and config.source.holdout == ("persuasion",)
    assert DataConfig.model_validate_json(config.model_dump_json()) == config
    for bad in ('{"context_length": "256"}', '{"batch_size": 0}', '{"sed": 1}'):
        with pytest.raises(ValidationError):
            DataConfig.model_validate_json(bad)
