"""Measures the profile of a trained entry, piece by piece; finished pieces are reused by hash."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
from pydantic import TypeAdapter, ValidationError

from ...paradigms.decoding.registry import default_decoding
from ...train.config import RunConfig
from ...train.data.pipeline import Data, build_data
from ...train.loop import TrainResult, train
from ..measure import forbidden_ids, sample_prompts
from ..provenance import code_hash, stable_hash, training_hash
from ..results_io import atomic_write
from ..tasks.config import TaskScoreConfig, score_from_config
from ..tasks.records import TaskScore
from .config import ProfileConfig, entry_task
from .growth import measure_growth, measure_parallelism
from .long_context import measure_long_context
from .memory import measure_memory
from .records import Growth, LongContextPoint, Memory, Parallelism, Profile

T = TypeVar("T")


def measure_profile(
    entry: Any,
    config: ProfileConfig,
    data: Data,
    result: TrainResult,
    identity: str,
    folder: Path,
    view: Any,
) -> Profile:
    """Measures everything that the configuration asks for.

    Args:
        entry: an `EntryConfig`.
        config: what to measure.
        data: what the entry was trained on.
        result: the trained run.
        identity: hash of the trained model.
        folder: of the entry; pieces are kept below it.
        view: progress, a `View`.
    """
    run: RunConfig = entry.run
    paradigm = run.paradigm.build(data.tokenizer.specials)
    decoding = _decoding(entry, data)
    model = result.model.prepare(run.training.compute_dtype)
    seconds: dict[str, float] = {}
    pieces = folder / "profile"
    identity = stable_hash(identity, code_hash("eval"), entry.model_dump(mode="json"))

    def piece(name: str, kind: Any, settings: Any, compute: Callable[[], T]) -> T:
        begin = time.perf_counter()
        value = _reused(pieces / f"{name}.json", kind, stable_hash(identity, settings), compute)
        seconds[name] = time.perf_counter() - begin
        return value

    parallelism = growth = None
    if config.parallel_length is not None:
        parallelism = piece(
            "parallelism",
            Parallelism,
            config.parallel_length,
            lambda: measure_parallelism(
                model.with_max_len(max(config.parallel_length, model.config.max_len)),
                config.parallel_length,
                causal=run.paradigm.name == "autoregressive",
            ),
        )
    if config.growth is not None:
        growth = piece(
            "growth",
            Growth,
            config.growth.canonical_json,
            lambda: measure_growth(
                model,
                decoding,
                sample_prompts(data, 1, config.growth.prompt_length)[0],
                config.growth.lengths,
                forbidden_ids=forbidden_ids(data.tokenizer.specials),
                repeats=config.growth.repeats,
                budget_s=config.growth.budget_s,
                progress=lambda done, total: view.phase("growth", done, total),
            ),
        )
    long_context: list[LongContextPoint] = []
    if config.long_context is not None:
        long_context = piece(
            "long_context",
            list[LongContextPoint],
            config.long_context.canonical_json,
            lambda: measure_long_context(
                model,
                paradigm,
                data,
                config.long_context.multiples,
                count=config.long_context.stretches,
                seed=config.long_context.seed,
                progress=lambda done, total: view.phase("long context", done, total),
            ),
        )
    memory = None
    if config.memory_context is not None:
        memory = piece(
            "memory",
            Memory,
            config.memory_context,
            lambda: measure_memory(
                model, config.memory_context, keeps_state=decoding.keeps_state
            ),
        )
    tasks = {}
    for name, task in config.tasks.items():
        begin = time.perf_counter()
        own = entry.task_runs.get(name, {})
        changed, task_config = entry_task(run, task, own, f"tasks.{name}")
        tasks[name] = _task_score(name, entry, changed, task_config, folder / "tasks" / name, view)
        seconds[name] = time.perf_counter() - begin
    return Profile(
        parallelism=parallelism,
        growth=growth,
        long_context=long_context,
        memory=memory,
        tasks=tasks,
        seconds=seconds,
    )


def _task_score(
    name: str, entry: Any, task: TaskScoreConfig, run: RunConfig, folder: Path, view: Any
) -> TaskScore:
    # Every task compiles programs of its own; kept, they exhaust the memory maps of a process.
    jax.clear_caches()
    data = build_data(run.data, progress=view.phase)
    trained = training_hash(run.canonical_json, data.fingerprint)
    settings = task.model_dump(mode="json")
    about = stable_hash(trained, settings, code_hash("eval"), str(entry.decoding))

    def compute() -> TaskScore:
        result = train(
            run,
            folder / f"run-{trained}",
            data=data,
            progress=view.training,
            note=lambda line: view.note(f"{name}: {line}"),
        )
        model = result.model.prepare(run.training.compute_dtype)
        return score_from_config(
            model,
            _decoding(entry, data),
            data.tokenizer.specials,
            task,
            progress=lambda done, total: view.phase(f"grading {name}", done, total),
        )

    return _reused(folder / "score.json", TaskScore, about, compute)


def _decoding(entry: Any, data: Data) -> Any:
    specials = data.tokenizer.specials
    paradigm = entry.run.paradigm
    config = entry.decoding or default_decoding(paradigm.name)
    return config.build(specials, paradigm.build(specials))


def _reused(path: Path, kind: Any, identity: str, compute: Callable[[], T]) -> T:
    """The value kept at `path` if it is of this identity, else the computed one, which is kept."""
    adapter = TypeAdapter(dict[str, Any])
    value = TypeAdapter(kind)
    if path.exists():
        try:
            held = adapter.validate_json(path.read_bytes())
            if held.get("identity") == identity:
                return value.validate_json(adapter.dump_json(held["value"]))
        except (ValidationError, KeyError):
            pass  # an old version's piece is measured again
    made = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = adapter.dump_json({"identity": identity, "value": value.dump_python(made, mode="json")})
    atomic_write(path, text)
    return made
