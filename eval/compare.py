"""The comparison: shared data, floors and judge, then every entry, then the report."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..errors import ConfigError, suggest
from ..paradigms.model import abstract_model
from ..train.data.pipeline import Data, build_data
from .compare_config import CompareConfig, Comparison
from .compare_replay import REPLAY_FILE, comparison_replay
from .cost.config import Machines
from .entry import Shared, View, cached_row, entry_hashes, run_entry
from .floors import all_floors
from .measure import Judge
from .ngram import NgramModel
from .plots import draw_plots, write_plots
from .profile.document import write_document
from .provenance import code_hash, environment, now, stable_hash
from .report import write_report
from .results import Data as DataRecord
from .results import Floor, Results, Row
from .results import Judge as JudgeRecord
from .results_io import atomic_write, write_results
from .text_metrics import training_words

FLOORS = TypeAdapter(list[Floor])


def compare(
    comparison: Comparison,
    *,
    out: Path | None = None,
    only: list[str] | None = None,
    view_of: Callable[[str, int, int], View],
) -> tuple[Results, Path]:
    """Runs a comparison and writes its results.

    Args:
        comparison: loaded and validated.
        out: folder of the results; the configuration's own when None.
        only: names of entries to run; the others appear if they are finished.
        view_of: view_of(entry, number, entries) gives the progress view of an entry.

    Returns:
        The results and the folder that holds them.

    Raises:
        ConfigError: an unknown entry in `only`, or entries of unequal size.
    """
    config = comparison.config
    out = Path(config.out) if out is None else out
    for name in only or []:
        if name not in comparison.entries:
            raise ConfigError(f"--only {name!r}: no such entry{suggest(name, comparison.entries)}")
    phases: dict[str, float] = {}
    shared = view_of("all entries", 0, len(comparison.entries))

    begin = time.perf_counter()
    first = next(iter(comparison.entries.values()))
    data = build_data(first.run.data, progress=shared.phase)
    check_sizes(comparison, data)
    phases["data"] = time.perf_counter() - begin

    begin = time.perf_counter()
    judge = make_judge(config.samples.judge_order, data)
    floors = _cached_floors(config, data, judge, out, shared)
    phases["floors"] = time.perf_counter() - begin

    machines = Machines(out, shared.phase)
    common = Shared(config, data, judge, floors, machines.get)
    rows = []
    for number, (name, entry) in enumerate(comparison.entries.items(), start=1):
        folder = out / "entries" / name
        view = view_of(name, number, len(comparison.entries))
        if only and name not in only:
            row = cached_row(folder, entry_hashes(entry, config, data))
            if row is not None:
                rows.append(row)
            continue
        row = run_entry(name, entry, common, folder, view)
        rows.append(row)
        for phase, seconds in row.phases_s.items():
            phases[phase] = phases.get(phase, 0.0) + seconds

    begin = time.perf_counter()
    replay = comparison_replay(comparison, rows, out, shared)
    phases["replay"] = time.perf_counter() - begin

    begin = time.perf_counter()
    results = _results(comparison, data, judge, floors, rows, phases)
    if config.cost is not None:
        known = {row.dtype: machines.get(row.dtype) for row in rows if row.cost is not None}
        results = results.model_copy(update={"machines": known})
    if replay is not None:
        results = results.model_copy(update={"replay": REPLAY_FILE})
    out.mkdir(parents=True, exist_ok=True)
    plots = draw_plots(results)
    write_plots(plots, out / "plots")
    write_report(results, plots, out / "report.html", replay)
    phases["report"] = time.perf_counter() - begin
    results = results.model_copy(update={"phases_s": phases})
    write_results(results, out)
    if config.document is not None:
        write_document(results, plots, Path(config.document))
    return results, out


def check_sizes(comparison: Comparison, data: Data) -> None:
    """Refuses entries whose total parameters differ by more than the tolerance.

    Raises:
        ConfigError: names the smallest and the largest entry with their sizes.
    """
    sizes = {}
    for name, entry in comparison.entries.items():
        update = {"vocab_size": data.tokenizer.vocab_size}
        sizes[name] = abstract_model(entry.run.model.model_copy(update=update)).num_params()
    low, high = min(sizes, key=sizes.get), max(sizes, key=sizes.get)
    tolerance = comparison.config.params_tolerance
    if sizes[high] > sizes[low] * (1 + tolerance):
        raise ConfigError(
            f"{comparison.source}: {high} has {sizes[high]:,} parameters and {low} has "
            f"{sizes[low]:,}: more than params_tolerance={tolerance} apart"
        )


def make_judge(order: int, data: Data) -> Judge:
    """Counts the judge's n-grams over the training documents and collects their words."""
    store = data.train
    bos = data.tokenizer.specials.bos
    sequences = [[bos, *store.document(i)] for i in range(store.num_documents)]
    ngram = NgramModel.fit(
        sequences,
        vocab_size=data.tokenizer.vocab_size,
        bos_id=bos,
        order=order,
    )
    words = training_words(document.text for document in data.documents("train"))
    return Judge(ngram, words, data.test.tokens)


def _cached_floors(
    config: CompareConfig, data: Data, judge: Judge, out: Path, view: View
) -> list[Floor]:
    key = stable_hash(
        data.fingerprint,
        config.samples.judge_order,
        config.likelihood.max_windows,
        code_hash("eval"),
    )
    path = out / f"floors-{key}.json"
    if path.exists():
        return FLOORS.validate_json(path.read_bytes())
    view.phase("floors", 0, 1)
    floors = make_floors(config, data, judge)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(path, FLOORS.dump_json(floors))
    view.phase("floors", 1, 1)
    return floors


def make_floors(config: CompareConfig, data: Data, judge: Judge) -> list[Floor]:
    """What needs no network, over exactly the windows that the entries score."""
    store = data.train
    specials = data.tokenizer.specials
    windows = data.evaluation_windows("test", max_windows=config.likelihood.max_windows)
    sequences = []
    for _, batch in windows.batches(64):
        for row, segments in zip(batch.tokens, batch.segment_ids, strict=True):
            if segments[0] >= 0:
                sequences.append(row[segments >= 0])
    pieces = [data.tokenizer.decode_bytes(ids[1:]) for ids in sequences]
    return all_floors(
        train_sequences=[[specials.bos, *store.document(i)] for i in range(store.num_documents)],
        windows=sequences,
        window_bytes=windows.byte_counts,
        train_documents=[d.text.encode() for d in data.documents("train")],
        test=b"".join(pieces),
        vocab_size=data.tokenizer.vocab_size,
        bos_id=specials.bos,
        ngram=judge.ngram,
    )


def _results(
    comparison: Comparison,
    data: Data,
    judge: Judge,
    floors: list[Floor],
    rows: list[Row],
    phases: dict[str, float],
) -> Results:
    config = comparison.config
    source = data.config.source
    ngram_floor = min(
        (f for f in floors if "gram" in f.name and "unigram" not in f.name),
        key=lambda f: f.bits_per_byte,
        default=None,
    )
    splits = ("train", "validation", "test")
    documents = {split: data.store(split).num_documents for split in splits}
    return Results(
        title=config.title,
        created=now(),
        command=" ".join(["genlab", *sys.argv[1:]]),
        environment=environment(),
        phases_s=phases,
        data=DataRecord(
            name=getattr(source, "corpus", source.name),
            tokenizer=data.tokenizer.kind,
            vocab_size=data.tokenizer.vocab_size,
            fingerprint=data.fingerprint,
            train_bytes=data.train.num_bytes,
            train_tokens=data.train.num_tokens,
            test_bytes=data.test.num_bytes,
            test_tokens=data.test.num_tokens,
            documents=documents,
            detail=source.canonical_json,
        ),
        judge=JudgeRecord(
            kind=f"{judge.ngram.order}-gram, interpolated",
            detail=judge.ngram.describe(),
            bits_per_byte=None if ngram_floor is None else ngram_floor.bits_per_byte,
        ),
        rows=rows,
        floors=floors,
        notes=_notes(comparison, data),
    )


def _notes(comparison: Comparison, data: Data) -> list[str]:
    notes: list[str] = []
    if comparison.grid is not None:
        about: Any = comparison.grid.get("about", "")
        notes.append(f"Learning rates come from a recorded grid. {about}".strip())
    if data.tokenizer.lossy:
        notes.append(f"The tokenizer is lossy: {data.tokenizer.lossy_reason}")
    return notes
