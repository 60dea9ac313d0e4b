"""The replay of a comparison: every entry on the prompt of its samples, step by step."""

from pathlib import Path

from pydantic import ValidationError

from ..errors import GenlabError
from ..paradigms.decoding.registry import default_decoding
from ..train.run_folder import load_run
from .compare_config import Comparison, EntryConfig, SamplesConfig
from .entry import View
from .generate import Generator, Options
from .provenance import code_hash, stable_hash
from .record import Record
from .replay import Replay, ReplayEntry, record_replay
from .results import Row
from .results_io import atomic_write

REPLAY_FILE = "replay.json"


class Recorded(Record):
    """What the file holds.

    Attributes:
        key: of everything that the replay depends on; another key, and it is recorded anew.
        replay: the record.
    """

    key: str
    replay: Replay


def comparison_replay(
    comparison: Comparison, rows: list[Row], out: Path, view: View
) -> Replay | None:
    """Records the trained entries on one prompt, or reads what was recorded of them before.

    One entry's model is in memory at a time. An entry that cannot be replayed, because its run
    folder is gone or damaged, is left out with a note: the figures do not depend on it.

    Args:
        comparison: loaded and validated.
        rows: the measured entries, in the order to show them.
        out: folder of the results; holds the entries' runs and gets `replay.json`.
        view: progress.

    Returns:
        The replay; None where no entry can be replayed.
    """
    hashes = [(row.name, row.config_hash) for row in rows]
    samples = comparison.config.samples
    key = stable_hash(hashes, samples.model_dump(mode="json"), code_hash("eval"))
    path = out / REPLAY_FILE
    known = _read(path, key)
    if known is not None:
        return known
    prompt = rows[0].prompt.rstrip("\N{REPLACEMENT CHARACTER}") if rows else ""
    entries: list[ReplayEntry] = []
    for done, row in enumerate(rows):
        view.phase("replay", done, len(rows))
        run = out / "entries" / row.name / "run"
        try:
            entries.append(_entry(row.name, comparison.entries[row.name], run, prompt, samples))
        except GenlabError as error:
            view.note(f"{row.name}: no replay: {error}")
    view.phase("replay", len(rows), len(rows))
    if not entries:
        return None
    replay = Replay(prompt=prompt, entries=tuple(entries))
    key = key if len(entries) == len(rows) else ""  # the next call tries again
    atomic_write(path, Recorded(key=key, replay=replay).model_dump_json())
    return replay


def _entry(
    name: str, entry: EntryConfig, folder: Path, prompt: str, samples: SamplesConfig
) -> ReplayEntry:
    run = load_run(folder)
    decoding = entry.decoding or default_decoding(run.config.paradigm.name)
    generator = Generator(
        run.model.prepare(run.config.training.compute_dtype),
        decoding.build(run.tokenizer.specials, run.paradigm),
        run.tokenizer,
    )
    # A prompt that was cut between tokens may take more of them when its text is read again.
    (prompt_ids,) = run.tokenizer.encode_batch([prompt])
    max_new = min(samples.new_tokens, run.config.model.max_len - len(prompt_ids) - 1)
    steps = (samples.steps or 0) if generator.decoding.uses_steps else 0
    options = Options(
        max_new=max(max_new, 0),
        temperature=samples.temperature,
        top_k=samples.top_k,
        top_p=samples.top_p,
        min_p=samples.min_p,
        steps=steps,
        seed=samples.seed,
    )
    return record_replay({name: generator}, prompt, options).entries[0]


def _read(path: Path, key: str) -> Replay | None:
    try:
        recorded = Recorded.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, UnicodeDecodeError):
        return None  # nothing yet, or an old version's: recorded anew
    return recorded.replay if recorded.key == key else None
