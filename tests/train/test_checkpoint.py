"""Checkpoints are complete or absent, and damage is found whatever file it hit."""

import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from genlab.errors import CheckpointError
from genlab.train.checkpoint import (
    Best,
    Corrupt,
    Identity,
    Writer,
    check_leaves,
    flatten,
    read,
    read_meta,
    read_newest,
    steps_in,
    unflatten,
)

OURS = Identity("config", "data", "tokenizer")
TREE = {
    "params": {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)},
    "step": np.int32(3),
}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    writer = Writer(tmp_path / "checkpoints", keep=3, identity=OURS)
    for step in (1, 2, 3):
        writer.save({**TREE, "step": np.int32(step)}, step, {"x": 0.1 * step}, None)
    writer.wait()
    writer.close()
    return tmp_path / "checkpoints"


def newest(folder, identity=OURS, wanted=None):
    wanted = flatten(TREE) if wanted is None else wanted
    return read_newest(folder, wanted, identity, set_aside=folder.parent / "damaged")


def test_what_is_saved_is_read(folder):
    arrays, meta = newest(folder)
    tree = unflatten(TREE, arrays)
    assert meta.step == tree["step"] == 3
    assert meta.progress == {"x": 0.1 * 3}
    np.testing.assert_array_equal(tree["params"]["a"], TREE["params"]["a"])
    only, _ = read(folder / "3", None, prefix="params.")
    assert sorted(only) == ["params.a", "params.b"]


def test_old_ones_go_the_best_stays(tmp_path):
    writer = Writer(tmp_path, keep=2, identity=OURS)
    for step in range(1, 6):
        writer.save(TREE, step, {}, Best(step=2, bits_per_byte=1.0) if step > 1 else None)
    writer.wait()
    writer.close()
    assert steps_in(tmp_path) == [2, 4, 5]


def test_an_old_one_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    writer = Writer(tmp_path, keep=1, identity=OURS)
    writer.save(TREE, 1, {}, None)
    writer.wait()
    seen = []
    wait = writer._orbax.wait_until_finished

    def watched():
        seen.append(steps_in(tmp_path))
        wait()
        seen.append(steps_in(tmp_path))

    monkeypatch.setattr(writer._orbax, "wait_until_finished", watched)
    writer.save(TREE, 2, {}, None)
    writer.wait()
    writer.close()
    assert seen[0] == [1] and all(seen), seen
    assert steps_in(tmp_path) == [2]


def test_the_state_may_change_while_it_is_written(tmp_path):
    array = np.zeros(8_000_000, np.float32)
    writer = Writer(tmp_path, keep=1, identity=OURS)
    writer.save({"a": array}, 1, {}, None)
    array += 1
    writer.wait()
    writer.close()
    assert not read(tmp_path / "1", None)[0]["a"].any()


def test_every_damage_is_found_or_harms_nothing(folder):
    """Each file deleted, cut short, emptied or altered: refused, or what is read is right."""
    path = folder / "3"
    found = set()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content = file.read_bytes()
        altered = bytearray(content)
        if content:
            altered[len(content) // 2] ^= 0xFF
        for damage in (None, content[: len(content) // 2], b"", bytes(altered)):
            if damage is None:
                file.unlink()
            else:
                file.write_bytes(damage)
            try:
                arrays, meta = read(path, flatten(TREE))
            except Corrupt:
                found.add(file.name)
            else:
                assert meta.step == 3 and arrays["step"] == 3
                np.testing.assert_array_equal(arrays["params.a"], TREE["params"]["a"])
            file.write_bytes(content)
    assert {"metadata", "_METADATA", "manifest.ocdbt"} <= found
    read(path, flatten(TREE))


def test_altered_digits_in_the_description_are_found(folder):
    file = folder / "3" / "meta" / "metadata"
    text = file.read_text()
    assert '"x": 0.30' in text
    file.write_text(text.replace('"x": 0.30', '"x": 0.31'))
    with pytest.raises(Corrupt, match="checksum"):
        read_meta(folder / "3")


def test_a_cut_newest_one_is_named_and_the_one_before_is_used(folder):
    for file in (folder / "3" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    with pytest.warns(UserWarning, match=r"checkpoints/3 is corrupt .*using .*checkpoints/2"):
        _, meta = newest(folder)
    assert meta.step == 2
    assert steps_in(folder) == [1, 2]
    assert (folder.parent / "damaged" / "3").is_dir()
    assert newest(folder)[1].step == 2


def test_all_damaged_is_an_error(folder):
    for step in (1, 2, 3):
        shutil.rmtree(folder / str(step) / "state")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="all 3 checkpoints"):
        newest(folder)


def test_what_a_kill_left_half_written_is_no_checkpoint(folder):
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    assert newest(folder)[1].step == 2
    Writer(folder, keep=3, identity=OURS).close()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_no_checkpoint_yet(tmp_path):
    assert newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Identity("other", "data", "tokenizer"), "config_hash is config, this run's is other"),
        (Identity("config", "other", "tokenizer"), "data_fingerprint is data"),
        (Identity("other", "other", "other"), "tokenizer_fingerprint is tokenizer"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(folder, other, message):
    with pytest.raises(CheckpointError, match=message):
        newest(folder, other)
    assert steps_in(folder) == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params.c": np.ones(3, np.float32)}, "has no leaf params.c, which this"),
        ({"params.b": None}, "has leaf params.b, which this configuration has not"),
        ({"params.b": np.ones(5, np.float32)}, r"params.b is float32\[4\], wanted float32\[5\]"),
        ({"params.b": np.ones(4, np.int32)}, r"params.b is float32\[4\], wanted int32\[4\]"),
    ],
)
def test_leaves_that_do_not_fit_are_named(folder, change, message):
    wanted = {**flatten(TREE), **change}
    wanted = {name: leaf for name, leaf in wanted.items() if leaf is not None}
    with pytest.raises(CheckpointError, match=message):
        newest(folder, wanted=wanted)
    with pytest.raises(CheckpointError, match=message):
        check_leaves(flatten(TREE), wanted, folder)


def test_a_failed_write_is_reported_and_the_last_complete_one_named(tmp_path):
    """A real failure in the background: files may not grow beyond 100 kB."""
    code = f"""
        import resource, signal
        import numpy as np
        from genlab.errors import CheckpointError
        from genlab.train.checkpoint import Identity, Writer
        from pathlib import Path
        folder = Path({str(tmp_path)!r})
        writer = Writer(folder, keep=1, identity=Identity("a", "b", "c"))
        writer.save({{"a": np.ones(3, np.float32)}}, 1, {{}}, None)
        writer.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        noise = np.random.default_rng(0).normal(size=(1000, 1000))
        try:
            writer.save({{"a": noise}}, 2, {{}}, None)
            writer.wait()
        except CheckpointError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200
    )
    line = done.stdout.strip()
    assert line.startswith(f"saving checkpoint {tmp_path / '2'} failed: "), done.stderr
    assert line.endswith(f"the newest complete is {tmp_path / '1'}") and "\n" not in line
    assert steps_in(tmp_path) == [1]
    read(tmp_path / "1", None)
