"""One entry of a comparison: train it (or reuse it by hash), measure it, make its row."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from ..paradigms.decoding.registry import default_decoding
from ..train.data.pipeline import Data
from ..train.likelihood import score_windows
from ..train.loop import TrainResult, train
from .compare_config import CompareConfig, EntryConfig
from .cost.config import cost_from_config
from .cost.records import Machine
from .latency import state_bytes
from .measure import (
    Judge,
    forbidden_ids,
    likelihood_record,
    measure_latencies,
    measure_samples,
    sample_prompts,
)
from .profile.measure import measure_profile
from .provenance import code_hash, stable_hash, training_hash
from .results import Floor, Row, TrainingPoint
from .results_io import atomic_write

HASH_FILE, ROW_FILE = "training_hash", "row.json"
MEASURED_KEYS = {"likelihood", "samples", "latency", "cost", "profile"}
TOKENS_PER_PARAMETER = 20  # compute-optimal training, Hoffmann et al. 2022 (arXiv 2203.15556)


class View(NamedTuple):
    """How an entry's work is shown.

    Attributes:
        phase: called as phase(name, done, total) for measurements.
        training: called with the trainer's own progress records.
        note: called with one line that the user should read.
    """

    phase: Callable[[str, int, int], None]
    training: Callable[[Any], None]
    note: Callable[[str], None]


class Shared(NamedTuple):
    """What all entries of a comparison share.

    Attributes:
        config: the comparison's settings.
        data: text and tokenizer.
        judge: scores samples.
        floors: for the plain words on training.
        machine: machine(dtype) gives this machine's microbenchmarks; asked only for the cost model.
    """

    config: CompareConfig
    data: Data
    judge: Judge
    floors: list[Floor]
    machine: Callable[[str], Machine]


class EntryHashes(NamedTuple):
    """Identities of the trained model and of the row measured from it."""

    training: str
    row: str


def entry_hashes(entry: EntryConfig, compare: CompareConfig, data: Data) -> EntryHashes:
    """Hashes everything that the training, and then the measurement, depend on."""
    trained = training_hash(entry.run.canonical_json, data.fingerprint)
    measured = compare.model_dump(mode="json", include=MEASURED_KEYS)
    about = entry.model_dump(mode="json", exclude={"run"})
    return EntryHashes(trained, stable_hash(trained, measured, about, code_hash("eval")))


def cached_row(folder: Path, hashes: EntryHashes) -> Row | None:
    """The row measured before, if everything it depends on is the same; else None."""
    path = folder / ROW_FILE
    if not path.exists():
        return None
    try:
        row = Row.model_validate_json(path.read_text())
    except (ValidationError, UnicodeDecodeError):
        return None  # an old version's row is measured again
    return row if row.config_hash == hashes.row else None


def run_entry(name: str, entry: EntryConfig, shared: Shared, folder: Path, view: View) -> Row:
    """Trains and measures one entry; whatever is finished already is reused.

    Args:
        name: of the entry.
        entry: its configuration.
        shared: what all entries share.
        folder: of this entry; holds the training run and the row.
        view: progress.
    """
    compare, data = shared.config, shared.data
    hashes = entry_hashes(entry, compare, data)
    row = cached_row(folder, hashes)
    if row is not None:
        view.note(f"{name}: reused, nothing it depends on has changed (hash {hashes.row})")
        return row
    run_folder = _fresh_folder(name, folder, hashes, view)
    phases: dict[str, float] = {}
    begin = time.perf_counter()
    result = train(
        entry.run,
        run_folder,
        data=data,
        progress=view.training,
        note=lambda line: view.note(f"{name}: {line}"),
    )
    phases["training"] = result.train_s
    phases["compile"] = result.compile_s
    rest = time.perf_counter() - begin - result.train_s - result.compile_s
    phases["training_other"] = max(0.0, rest)
    row = measure_entry(name, entry, shared, result, hashes, phases, view)
    if compare.profile is not None:
        begin = time.perf_counter()
        profile = measure_profile(
            entry, compare.profile, data, result, hashes.training, folder, view
        )
        spent = row.phases_s | {"profile": time.perf_counter() - begin}
        row = row.model_copy(update={"profile": profile, "phases_s": spent})
    atomic_write(folder / ROW_FILE, row.model_dump_json())
    return row


def _fresh_folder(name: str, folder: Path, hashes: EntryHashes, view: View) -> Path:
    run_folder, hash_file = folder / "run", folder / HASH_FILE
    if hash_file.exists() and hash_file.read_text() != hashes.training and run_folder.exists():
        view.note(f"{name}: configuration, data or code has changed: training it anew")
        shutil.rmtree(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(hash_file, hashes.training)
    return run_folder


def measure_entry(
    name: str,
    entry: EntryConfig,
    shared: Shared,
    result: TrainResult,
    hashes: EntryHashes,
    phases: dict[str, float],
    view: View,
) -> Row:
    """Measures a trained entry: likelihood, samples, latency, state size, cost.

    Args:
        name: of the entry.
        entry: its configuration.
        shared: what all entries share.
        result: the trained run.
        hashes: the entry's identities.
        phases: seconds spent so far; what is spent here is added.
        view: progress.
    """
    compare, data, judge, floors = shared.config, shared.data, shared.judge, shared.floors
    config = entry.run
    specials = data.tokenizer.specials
    paradigm = config.paradigm.build(specials)
    decoding = (entry.decoding or default_decoding(config.paradigm.name)).build(specials, paradigm)
    # What generates computes in the dtype that the row names; likelihood casts for itself.
    dtype = config.training.compute_dtype
    model = result.model.prepare(dtype)

    begin = time.perf_counter()
    windows = data.evaluation_windows("test", max_windows=compare.likelihood.max_windows)
    scores = score_windows(
        result.model,
        paradigm,
        windows,
        batch_size=compare.likelihood.batch_size,
        seed=compare.likelihood.seed,
        dtype=dtype,
        progress=lambda done, total: view.phase("likelihood", done, total),
    )
    likelihood, interval = likelihood_record(scores, compare.likelihood.seed)
    phases["likelihood"], begin = time.perf_counter() - begin, time.perf_counter()
    samples = measure_samples(model, decoding, data, judge, compare.samples, view.phase)
    phases["samples"], begin = time.perf_counter() - begin, time.perf_counter()
    new_tokens = compare.samples.new_tokens
    steps_per_token = (compare.samples.steps or new_tokens) / new_tokens
    latency = measure_latencies(
        model, decoding, data, compare.latency, steps_per_token, view.phase
    )
    phases["latency"], begin = time.perf_counter() - begin, time.perf_counter()
    cost = None
    if compare.cost is not None:
        view.phase("cost", 0, 1)
        cost = cost_from_config(
            model,
            decoding,
            compare.cost,
            shared.machine(dtype),
            prompts=sample_prompts(data, compare.cost.batch, compare.cost.prompt_length),
            forbidden_ids=forbidden_ids(specials),
        )
        phases["cost"] = time.perf_counter() - begin
    fixed, per_token, windows = state_bytes(model) if decoding.keeps_state else (0, 0.0, [])
    headline = latency[0]
    reasons = {}
    if headline.step_ms_p50 is None:
        reasons["step_ms_p50"] = reasons["step_ms_p90"] = "one model call makes the whole answer"
    if interval is None:
        reasons["bits_per_byte_ci95"] = "too few blocks of held-out text for an interval"
    if samples.word_rate is None:
        reasons["word_rate"] = "the samples hold no words"
    undertrained = undertrained_reason(
        scores.bits_per_byte, result.tokens, model.num_params(), floors
    )
    return Row(
        name=name,
        family=entry.family,
        paradigm=config.paradigm.name,
        config_hash=hashes.row,
        seed=config.seed,
        dtype=dtype,
        context_length=config.data.context_length,
        learning_rate=config.training.optimizer.learning_rate,
        bits_per_byte=scores.bits_per_byte,
        bits_per_byte_ci95=None if interval is None else (float(interval[0]), float(interval[1])),
        is_bound=scores.is_bound,
        likelihood=likelihood,
        params=model.num_params(),
        params_active=model.num_active_params(),
        train_tokens=result.tokens,
        train_flops=result.flops,
        train_tokens_per_s=result.tokens_per_s,
        train_s=result.train_s,
        compile_s=result.compile_s,
        peak_memory_bytes=result.peak_memory_bytes,
        peak_memory_reason=result.peak_memory_reason,
        new_tokens=new_tokens,
        nfe=samples.nfe,
        token_evals=samples.token_evals,
        tokens_per_call=new_tokens / samples.nfe,
        ttft_ms=headline.ttft_ms,
        step_ms_p50=headline.step_ms_p50,
        step_ms_p90=headline.step_ms_p90,
        tokens_per_s=headline.tokens_per_s,
        state_bytes_fixed=fixed,
        state_bytes_per_token=per_token,
        state_windows=windows,
        latency=latency,
        gen_ppl=samples.gen_ppl,
        entropy=samples.entropy,
        distinct_n=samples.distinct_n,
        word_rate=samples.word_rate,
        repetitive=samples.repetitive,
        prompt=samples.prompt,
        sample=samples.sample,
        sampler=samples.sampler,
        curve=samples.curve,
        training_curve=[TrainingPoint(**point) for point in result.curve()],
        cost=cost,
        recipe=list(entry.recipe),
        undertrained=undertrained is not None,
        undertrained_reason=undertrained,
        resolved_config=entry.model_dump(mode="json"),
        phases_s=phases,
        reasons=reasons,
    )


def undertrained_reason(
    bits_per_byte: float, tokens: int, params: int, floors: list[Floor]
) -> str | None:
    """Says in figures why an entry must not be read as its family's best, or None."""
    said = []
    if tokens < TOKENS_PER_PARAMETER * params:
        said.append(
            f"{tokens / params:.1f} training tokens per parameter, where compute-optimal training "
            f"takes about {TOKENS_PER_PARAMETER}"
        )
    better = [floor for floor in floors if floor.bits_per_byte < bits_per_byte]
    if better and said:
        best = min(better, key=lambda floor: floor.bits_per_byte)
        said.append(f"{best.name} still does better ({best.bits_per_byte:.2f} bits per byte)")
    return "; ".join(said) or None
