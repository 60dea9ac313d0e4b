"""A synthetic task in the place of a text: batches, windows, tokenizer, what is refused."""

import json

import numpy as np
import pytest
from genlab.errors import ConfigError, DataError
from genlab.train.data.pipeline import DataConfig, build_data
from genlab.train.data.symbols_tokenizer import SymbolsTokenizer
from genlab.train.data.synthetic.data import HELD_OUT_EXAMPLES, TaskData
from genlab.train.data.tokenizer_config import (
    SymbolsTokenizerConfig,
    load_tokenizer,
    save_tokenizer,
)
from genlab.train.yaml_loader import validate

MQAR = {"name": "mqar", "num_pairs": 4, "num_keys": 8, "num_values": 8, "min_level": 2}


def config(**changes) -> DataConfig:
    raw = {
        "source": MQAR, "tokenizer": {"name": "symbols"}, "context_length": 20, "batch_size": 4,
    }  # fmt: skip
    return validate(DataConfig, {**raw, **changes}, "run.yaml: data")


@pytest.fixture(scope="module")
def data() -> TaskData:
    return build_data(config())


def test_rows_are_bos_prompt_answer_and_padding(data):
    _, batch = next(data.train_batches())
    bos, _, pad, _ = data.tokenizer.specials
    assert batch.tokens.shape == (4, 20) and batch.tokens.dtype == np.int32
    rows = data.task.rows(split="train", indices=np.arange(4), seed=0)
    for tokens, segments, scored, symbols, expected in zip(
        *batch, rows.symbols, rows.scored, strict=True
    ):
        real = symbols >= 0
        count = int(real.sum())
        assert tokens[0] == bos
        np.testing.assert_array_equal(tokens[1 : 1 + count], symbols[real])
        assert (tokens[1 + count :] == pad).all() and (segments[1 + count :] == -1).all()
        assert (segments[: 1 + count] == 0).all()
        np.testing.assert_array_equal(scored[1:17], expected)
        assert not scored[0] and not scored[17:].any()


def test_resuming_and_more_processes_serve_the_same_rows(data):
    batches = data.train_batches()
    straight = [next(batches) for _ in range(6)]
    step, resumed = next(data.train_batches(start_step=5))
    assert step == 5
    np.testing.assert_array_equal(resumed.tokens, straight[5][1].tokens)
    halves = [
        next(data.train_batches(start_step=3, process_index=p, process_count=2))[1].tokens
        for p in range(2)
    ]
    np.testing.assert_array_equal(np.concatenate(halves), straight[3][1].tokens)
    far, _ = next(data.train_batches(start_step=10**12))
    assert far == 10**12


def test_the_seed_orders_training_and_leaves_held_out_rows(data):
    other = build_data(config(seed=1))
    assert not np.array_equal(
        next(other.train_batches())[1].tokens, next(data.train_batches())[1].tokens
    )
    np.testing.assert_array_equal(
        other.evaluation_windows("test", max_windows=3).rows([0, 1, 2]).tokens,
        data.evaluation_windows("test", max_windows=3).rows([0, 1, 2]).tokens,
    )
    assert other.fingerprint == data.fingerprint
    assert build_data(config(source={**MQAR, "num_values": 9})).fingerprint != data.fingerprint


def test_windows_count_the_bytes_of_answers(data):
    windows = data.evaluation_windows("validation", max_windows=10)
    assert len(windows) == 10 and windows.complete
    seen, scored_bytes = [], []
    for indices, batch in windows.batches(4):
        assert batch.tokens.shape == (4, 20)
        filled = indices < 0
        assert (batch.segment_ids[filled] == -1).all() and not batch.loss_mask[filled].any()
        for index, tokens, scored in zip(
            indices, batch.tokens, batch.loss_mask, strict=True
        ):
            if index >= 0:
                seen.append(index)
                answer = data.tokenizer.decode(tokens[scored])
                scored_bytes.append(len(answer) + 1)  # the first word's space counts as well
    assert seen == list(range(10))
    np.testing.assert_array_equal(windows.byte_counts, scored_bytes)
    assert windows.total_bytes == sum(scored_bytes)
    assert len(data.evaluation_windows("test")) == HELD_OUT_EXAMPLES


def test_training_never_sees_held_out_pairs(data):
    task = data.task
    windows = data.evaluation_windows("validation", max_windows=64)
    held = windows.rows(np.arange(64)).tokens[:, 1 : 1 + task.prompt_length - 1]
    batches = data.train_batches()
    trained = np.concatenate([next(batches)[1].tokens for _ in range(50)])[:, 1 : held.shape[1] + 1]
    assert not {r.tobytes() for r in held} & {r.tobytes() for r in np.ascontiguousarray(trained)}


def test_the_tokenizer_shows_words_and_survives_saving(data, tmp_path):
    tokenizer = data.tokenizer
    assert tokenizer.vocab_size == 20 and tokenizer.specials == (16, 17, 18, 19)
    ids = tokenizer.encode("k0 v3  k7\n")
    assert ids.tolist() == [0, 11, 7]
    assert tokenizer.decode(ids) == "k0 v3 k7" and tokenizer.lossy
    stream = tokenizer.streaming_decoder()
    assert "".join(stream.push(i) for i in ids) + stream.flush() == "k0 v3 k7"
    assert tokenizer.encode("<|bos|> k1", allow_special=True).tolist() == [16, 1]
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.kind == "symbols"
    assert loaded.encode("v7 k2").tolist() == [15, 2]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"symbols": ["k0", "k2", "k1"]}))
    with pytest.raises(DataError, match="corrupt or was replaced"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="corrupt: not a list of symbols"):
        load_tokenizer(tmp_path)


def test_unknown_words_are_named(data):
    with pytest.raises(DataError, match=r"no symbol 'k77' in this task; did you mean 'k7'\?"):
        data.tokenizer.encode("k0 k77")
    with pytest.raises(DataError, match="different symbols"):
        SymbolsTokenizer(["a", "a"])
    with pytest.raises(DataError, match="without white space"):
        SymbolsTokenizer(["a b"])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"tokenizer": {"name": "bpe"}}, r"task 'mqar' needs tokenizer: \{name: symbols\}, got"),
        ({"source": {"name": "corpus"}}, "tokenizer 'symbols' needs a synthetic task"),
        ({"context_length": 16}, "context_length=16 is too short .* num_pairs=4, .* 17 tokens"),
        ({"source": {**MQAR, "num_pairs": 9}}, "num_pairs=9 needs"),
        ({"source": {**MQAR, "num_pears": 3}}, "num_pears.*did you mean 'num_pairs'"),
        ({"source": {"name": "mquar"}}, "mqar"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as refused:
        config(**changes)
    assert "\n" not in str(refused.value)


def test_a_copy_that_does_not_fit_is_refused_when_built(data):
    with pytest.raises(ConfigError, match=r"^data: context_length=8 is too short"):
        build_data(data.config.model_copy(update={"context_length": 8}))
    with pytest.raises(ConfigError, match="belongs to a synthetic task"):
        SymbolsTokenizerConfig().build()


def test_what_needs_text_says_so(data):
    for ask in (lambda: data.train, lambda: data.test, lambda: data.documents("train")):
        with pytest.raises(ConfigError, match="task mqar has no documents"):
            ask()
    with pytest.raises(DataError, match="no split 'dev'"):
        data.store("dev")
    with pytest.raises(DataError, match="max_windows must be at least 1"):
        data.evaluation_windows("test", max_windows=0)
