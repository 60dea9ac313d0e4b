"""Stopped anywhere and run again, a run ends in the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import CheckpointError
from genlab.train.checkpoint import flatten, read, steps_in
from genlab.train.config import plain
from genlab.train.data.pipeline import build_data
from genlab.train.loop import train
from genlab.train.run_folder import load_run
from genlab.train.signals import Interrupted

CHILD = Path(__file__).with_name("train_child.py")
DROPOUT = ("model.dropout=0.1", "training.ema_decay=0.9", "training.evaluate_every=3")
MAMBA = ("model.layers.a.mixer={name: mamba, state_size: 4}", "model.dropout=0.1")


def final_state(folder):
    newest = folder / "checkpoints" / str(steps_in(folder / "checkpoints")[-1])
    return read(newest, None)[0]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "aux_loss", "grad_norm", "learning_rate", "validation_bits_per_byte")
    return [{key: line[key] for key in keys} for line in lines]


def assert_equal_runs(one, other):
    assert losses(one) == losses(other)
    a, b = final_state(one), final_state(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


class Stop(Exception):
    pass


def stop_at(step):
    """A progress callback that breaks off after an update, as a crash would."""

    def callback(progress):
        if progress.step == step:
            raise Stop

    return callback


def child(config, out, *, at, how):
    """Trains in another process that sends itself a signal after update `at`."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(CHILD), json.dumps(plain(config)), str(out), str(at), how.name],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


@pytest.fixture(scope="module")
def uninterrupted(make, data, tmp_path_factory):
    """A transformer with dropout and average, 8 updates without a break."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(make(*DROPOUT), folder, data=data)
    return folder


@pytest.mark.parametrize("at", [4, 5, 7, 8])
def test_going_on_equals_never_having_stopped(make, data, uninterrupted, tmp_path, at):
    config = make(*DROPOUT)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", data=data, progress=stop_at(at))
    result = train(config, tmp_path / "run", data=data)
    assert_equal_runs(tmp_path / "run", uninterrupted)
    assert [line["step"] for line in result.history] == list(range(1, 9))


def test_learning_rate_goes_on_where_it_was(make, data, tmp_path):
    """A break in the warm-up: the rates are those of the uninterrupted run."""
    config = make("training.schedule={name: constant, warmup_fraction: 0.75}")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", data=data, progress=stop_at(5))
    history = train(config, tmp_path / "run", data=data).history
    rates = [line["learning_rate"] for line in history]
    np.testing.assert_allclose(rates, [0.01 * min(1, (i + 1) / 6) for i in range(8)], rtol=1e-6)


def test_lines_of_several_updates_survive_a_break(make, data, tmp_path):
    """log_every=3, checkpoint_every=4: the sums of the unfinished line are part of the state."""
    config = make("training.log_every=3")
    whole = train(config, tmp_path / "whole", data=data).history
    with pytest.raises(Stop):
        train(config, tmp_path / "run", data=data, progress=stop_at(5))
    train(config, tmp_path / "run", data=data)
    assert [line["step"] for line in whole] == [3, 6, 8]
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


def kill_and_compare(config, folder, at):
    data = build_data(config.data)
    train(config, folder / "whole", data=data)
    for step in at:
        killed = child(config, folder / "run", at=step, how=signal.SIGKILL)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (folder / "run" / "result.json").exists()
    train(config, folder / "run", data=data)
    assert_equal_runs(folder / "run", folder / "whole")


def test_kill_transformer(make, tmp_path):
    kill_and_compare(make("model.dropout=0.1"), tmp_path, at=(6, 5))


@pytest.mark.slow
def test_kill_mamba(make, tmp_path):
    kill_and_compare(make(*MAMBA), tmp_path, at=(3, 5))


@pytest.mark.slow
def test_kill_masked_diffusion(make, tmp_path):
    config = make("paradigm={name: masked_diffusion}", "model.dropout=0.1")
    kill_and_compare(config, tmp_path, at=(2, 7))


def test_sigterm_saves_and_ends_well(make, data, uninterrupted, tmp_path):
    config, folder = make(*DROPOUT), tmp_path / "run"
    ended = child(config, folder, at=3, how=signal.SIGTERM)
    assert ended.returncode == 0, ended.stderr
    saved = steps_in(folder / "checkpoints")
    assert len(saved) == 1 and saved[0] in (3, 4)
    assert f"SIGTERM: saved {folder}/checkpoints/{saved[0]}" in ended.stdout
    train(config, folder, data=data)
    assert_equal_runs(folder, uninterrupted)


def test_ctrl_c_saves_and_is_a_keyboard_interrupt(make, data, tmp_path):
    def press(progress):
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(make(), tmp_path / "run", data=data, progress=press)
    assert isinstance(stopped.value, Interrupted)
    assert stopped.value.number == signal.SIGINT
    assert stopped.value.checkpoint.is_dir()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_is_returned_at_once(make, data, uninterrupted):
    def never(progress):
        raise AssertionError("it trained again")

    result = train(make(*DROPOUT), uninterrupted, data=data, progress=never)
    loaded = load_run(uninterrupted)
    state = final_state(uninterrupted)
    assert result.step == loaded.step == 8
    for name, leaf in flatten(result.model.params).items():
        assert np.asarray(leaf).tobytes() == state[f"ema.{name}"].tobytes()
    assert [point["step"] for point in result.curve()] == list(range(1, 9))


def test_killed_between_the_last_checkpoint_and_the_result(make, data, uninterrupted):
    """Everything is there but result.json: nothing is trained, the result is made."""
    before = (uninterrupted / "result.json").read_text()
    (uninterrupted / "result.json").unlink()

    def never(progress):
        raise AssertionError("it trained again")

    train(make(*DROPOUT), uninterrupted, data=data, progress=never)
    assert json.loads((uninterrupted / "result.json").read_text()) == json.loads(before)


def test_another_configuration_is_refused_by_its_first_key(make, data, uninterrupted):
    with pytest.raises(CheckpointError, match=r"model\.dropout is 0\.1 there and 0\.2 here"):
        train(make(*DROPOUT, "model.dropout=0.2"), uninterrupted, data=data)


def test_another_process_in_the_folder_is_refused(make, data, tmp_path):
    def second(progress):
        train(make(), tmp_path / "run", data=data)

    with pytest.raises(CheckpointError, match="another process is training in it"):
        train(make(), tmp_path / "run", data=data, progress=second)


def test_a_folder_of_something_else_is_left_alone(make, data, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"no run folder: it holds thesis\.txt"):
            train(make(), tmp_path, data=data, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_overwrite_begins_anew(make, data, tmp_path):
    folder = tmp_path / "run"
    train(make(), folder, data=data)
    (folder / "notes.txt").write_text("mine")
    result = train(make("training.tokens=128"), folder, data=data, overwrite=True)
    assert [line["step"] for line in result.history] == [1, 2]
    assert steps_in(folder / "checkpoints") == [2]
    assert (folder / "notes.txt").exists()
