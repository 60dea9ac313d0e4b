"""The loop: what it learns, watches, selects, writes and refuses."""

import json
import warnings

import jax
import numpy as np
import pytest
from genlab.errors import CheckpointError, ConfigError
from genlab.paradigms.interface import Batch
from genlab.train import loop
from genlab.train.checkpoint import steps_in
from genlab.train.data.pipeline import build_data
from genlab.train.data.tokenizer_config import save_tokenizer
from genlab.train.likelihood import score_windows
from genlab.train.loop import NonFiniteError, train
from genlab.train.run_folder import load_run


def test_what_follows_with_certainty_is_learnt(make, tmp_path):
    """abcabc...: the next token is certain. Rows are BOS and 24 letters, so BOS is followed by
    the same letter in all rows but those at the text's end."""
    (tmp_path / "abc.txt").write_text("abc" * 2000)
    (tmp_path / "held.txt").write_text("abc" * 20)
    config = make(
        f"data.source={{name: files, paths: [{tmp_path}/abc.txt, {tmp_path}/held.txt], "
        "holdout: [held], validation_fraction: 0}",
        "data.context_length=25",
        "training.tokens=24000",
        "training.optimizer={name: adamw, learning_rate: 0.03, weight_decay: 0}",
        "training.checkpoint_every=1000",
    )
    result = train(config, tmp_path / "run")
    assert result.history[-1]["loss"] < 0.01


def poisoned(update_with_nan, config, *rest):
    """The compiled update, whose gradient norm becomes NaN at one step."""
    update = loop_compile(config, *rest)

    class Poisoned:
        memory_analysis = update.memory_analysis

        def __call__(self, state, batch):
            step = int(state.step) + 1
            state, metrics = update(state, batch)
            return state, (metrics[0] * np.nan, metrics[1]) if step == update_with_nan else metrics

    return Poisoned()


loop_compile = loop.compile_step


def test_a_loss_that_is_not_finite_stops_the_run(make, data, tmp_path, monkeypatch):
    """Also when a checkpoint is due right after the bad update: it is not written."""
    monkeypatch.setattr(loop, "compile_step", lambda *a: poisoned(8, *a))
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError) as stopped:
        train(make(), folder, data=data)
    assert str(stopped.value) == (
        "update 8: loss nan, gradient norm nan; batch: rows 28 to 31; last good checkpoint: "
        f"{folder / 'checkpoints' / '4'}"
    )
    assert steps_in(folder / "checkpoints") == [4]
    assert not (folder / "result.json").exists()


def test_a_learning_rate_that_explodes_is_noticed(make, data, tmp_path):
    """Without any patch: an update that overflows float32."""
    config = make("training.optimizer.learning_rate=1e38")
    with pytest.raises(NonFiniteError, match=r"update \d+: .*there is no checkpoint yet"):
        train(config, tmp_path / "run", data=data)


def test_the_best_evaluated_state_is_the_result(make, data, tmp_path, monkeypatch):
    values = iter([3.0, 2.0, 2.5, 2.75])
    monkeypatch.setattr(loop, "validation_bits_per_byte", lambda *a: next(values))
    config = make(
        "training.evaluate_every=2", "training.select_best=true", "training.keep=1",
        "training.checkpoint_every=8",
    )  # fmt: skip
    result = train(config, tmp_path / "run", data=data)
    assert (result.step, result.best.bits_per_byte) == (4, 2.0)
    assert steps_in(tmp_path / "run" / "checkpoints") == [4, 8]
    assert [line["validation_bits_per_byte"] for line in result.history] == [
        None, 3.0, None, 2.0, None, 2.5, None, 2.75,
    ]  # fmt: skip
    last = load_run(tmp_path / "run", step=8)
    best = load_run(tmp_path / "run")
    assert best.step == 4 and last.step == 8
    different = [
        not np.array_equal(a, b)
        for a, b in zip(
            jax.tree.leaves(best.model.params), jax.tree.leaves(last.model.params), strict=True
        )
    ]
    assert all(different)
    assert result.curve()[3]["bits_per_byte_validation"] == 2.0


def test_evaluation_is_of_the_validation_split(make, data, tmp_path):
    """Its value is what `score_windows` says of the result's parameters."""
    config = make("training.evaluate_every=8", "training.ema_decay=0.5")
    result = train(config, tmp_path / "run", data=data)
    run = load_run(tmp_path / "run")
    scores = score_windows(
        run.model, run.paradigm, data.evaluation_windows("validation", max_windows=32), batch_size=4
    )
    logged = result.history[-1]["validation_bits_per_byte"]
    assert logged == pytest.approx(scores.bits_per_byte, rel=1e-5)
    assert logged < 8.0


def test_without_a_validation_split_evaluation_is_refused(make, tmp_path):
    config = make(
        "training.evaluate_every=2", "data.source.validation_fraction=0", "data.source.holdout=[d1]"
    )
    with pytest.raises(ConfigError, match=r"evaluate_every=2 needs a validation split"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_everything_that_can_be_written_is_written(make, data, tmp_path):
    config = make(
        "training.tensorboard=true", "training.sample_every=4",
        "training.profile={start: 2, updates: 2}", "training.log_every=4",
    )  # fmt: skip
    seen = []
    result = train(config, tmp_path / "run", data=data, progress=seen.append)
    folder = tmp_path / "run"
    assert [record.step for record in seen] == list(range(1, 9))
    assert seen[-1].steps == 8 and seen[-1].tokens == 512 and seen[-1].remaining_s == 0.0
    assert list((folder / "tensorboard").glob("events*"))
    assert list((folder / "profile").rglob("*.xplane.pb"))
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [4, 8]
    assert all(len(line["samples"]) == 2 for line in samples)
    assert [line["step"] for line in result.history] == [4, 8]
    assert result.tokens == 512 and result.flops > 0
    assert result.compile_s > 0 and result.train_s > 0 and result.tokens_per_s > 0
    assert result.peak_memory_bytes > 1000 and "XLA" in result.peak_memory_reason
    assert result.history[-1]["wall_s"] == pytest.approx(result.train_s)


def test_batches_follow_the_step_number(make, data, tmp_path, monkeypatch):
    """The update sees row after row of the data layer's order, also after a break."""
    seen = []
    monkeypatch.setattr(
        loop, "micro_batches", lambda batch, n: (seen.append(batch), split(batch, n))[1]
    )
    split = loop_split
    train(make("training.accumulate=2"), tmp_path / "run", data=data)
    expected = data.train_batches()
    for batch in seen:
        for got, want in zip(batch, next(expected)[1], strict=True):
            np.testing.assert_array_equal(got, want)
    assert len(seen) == 8 and isinstance(seen[0], Batch)


loop_split = loop.micro_batches


def test_one_program_per_run(make, data, tmp_path):
    """From update 4 on nothing is compiled, whatever the length of the last batch or the step."""
    compiled = []

    def listen(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    at_step = {}
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(
            make("training.tokens=1300", "training.checkpoint_every=100"),
            tmp_path / "run",
            data=data,
            progress=lambda record: at_step.update({record.step: len(compiled)}),
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(at_step) == 21
    assert at_step[3] > 0
    assert at_step[3] == at_step[21]


def test_a_damaged_newest_checkpoint_costs_only_time(make, data, tmp_path):
    config = make("training.checkpoint_every=2", "training.keep=2")
    whole = train(config, tmp_path / "whole", data=data)
    folder = tmp_path / "run"
    train(config, folder, data=data)
    (folder / "result.json").unlink()
    for file in (folder / "checkpoints" / "8" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:5])
    with pytest.warns(UserWarning, match=r"checkpoints/8 is corrupt .*using .*checkpoints/6"):
        result = train(config, folder, data=data)
    assert [r["loss"] for r in result.history] == [r["loss"] for r in whole.history]
    jax.tree.map(np.testing.assert_array_equal, result.model.params, whole.model.params)


def test_loading_a_run_that_is_none(make, data, tmp_path):
    with pytest.raises(CheckpointError, match="no such run folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"is no run folder: it has no config\.yaml"):
        load_run(tmp_path)
    folder = tmp_path / "run"
    train(make(), folder, data=data)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; there are 4, 8"):
        load_run(folder, step=3)
    (folder / "tokenizer" / "tokenizer_meta.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_meta"):
        load_run(folder)


def test_a_run_with_another_tokenizer_put_in_is_refused(make, data, tmp_path):
    folder = tmp_path / "run"
    train(make(), folder, data=data)
    other = build_data(make("data.tokenizer={name: bpe, vocab_size: 262}").data)
    save_tokenizer(other.tokenizer, folder / "tokenizer")
    with pytest.raises(CheckpointError, match="belongs to another tokenizer"):
        load_run(folder)


def test_loading_an_unfinished_run_takes_the_newest(make, data, tmp_path):
    class Stop(Exception):
        pass

    def callback(record):
        if record.step == 6:
            raise Stop

    with pytest.raises(Stop):
        train(make(), tmp_path / "run", data=data, progress=callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = load_run(tmp_path / "run")
    assert run.step == 4 and run.result is None


def test_data_of_another_configuration_is_refused(make, data, tmp_path):
    with pytest.raises(ConfigError, match="another configuration"):
        train(make("data.batch_size=2"), tmp_path / "run", data=data)


def test_a_vocabulary_size_that_is_not_the_tokenizers(make, data, tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size: got 300, but the tokenizer has 260"):
        train(make("model.vocab_size=300"), tmp_path / "run", data=data)
    config = make("model.pad_vocab_to=64", "training.tokens=64")
    assert train(config, tmp_path / "run", data=data).model.params["embedding"].shape == (320, 16)


def test_a_trace_after_the_end_is_refused(make, data, tmp_path):
    with pytest.raises(ConfigError, match=r"profile\.start=9 is after the last update, 8"):
        train(make("training.profile={start: 9}"), tmp_path / "run", data=data)
