"""Measures one run as the comparison would."""

from collections.abc import Callable

from ..errors import CheckpointError
from ..train.data.pipeline import build_data
from ..train.loop import load_result
from ..train.run_folder import Run
from .compare import make_floors, make_judge
from .compare_config import CompareConfig, EntryConfig
from .cost.machine import measure_machine
from .entry import Shared, View, entry_hashes, measure_entry
from .results import Row


def evaluate_run(
    run: Run, *, max_windows: int | None, view_of: Callable[[str, int, int], View]
) -> Row:
    """Scores a finished run's test split and measures its samples and latency.

    Args:
        run: loaded from its folder.
        max_windows: windows of the test split; None for all.
        view_of: as for `genlab.eval.compare.compare`.

    Raises:
        CheckpointError: the run is unfinished, or its corpus has changed since.
    """
    if run.result is None:
        raise CheckpointError(f"{run.path}: training is not finished; run the train command again")
    view = view_of(run.path.name, 1, 1)
    data = build_data(run.config.data, progress=view.phase)
    if data.fingerprint != run.data_fingerprint:
        raise CheckpointError(f"{run.path}: the corpus or tokenizer has changed since training")
    entry = EntryConfig(run=run.config, family=run.config.paradigm.name)
    settings = CompareConfig.model_validate(
        {"title": "", "out": "", "entries": {"run": {}}, "likelihood": {"max_windows": max_windows}}
    )
    judge = make_judge(settings.samples.judge_order, data)
    floors = make_floors(settings, data, judge)
    hashes = entry_hashes(entry, settings, data)
    shared = Shared(settings, data, judge, floors, measure_machine)
    return measure_entry(run.path.name, entry, shared, load_result(run.path), hashes, {}, view)
