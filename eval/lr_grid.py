"""Learning rates from a recorded grid: every entry is tried at the same rates, once, and noted.

A comparison reads the record; it never searches on its own. The choice is by the validation split,
so that the test text has no say in it.
"""

import io
from collections.abc import Callable
from pathlib import Path

from ruamel.yaml import YAML

from ..errors import ConfigError
from ..train.data.pipeline import build_data
from ..train.likelihood import score_windows
from ..train.loop import train
from .compare_config import Comparison
from .entry import View
from .provenance import environment, now
from .results_io import atomic_write


def tune(
    comparison: Comparison,
    rates: list[float],
    *,
    out: Path,
    record: Path,
    only: list[str] | None = None,
    view_of: Callable[[str, int, int], View],
) -> dict:
    """Trains every entry at every rate and writes the record.

    Args:
        comparison: whose entries and token budget to use.
        rates: learning rates, the same for all.
        out: folder for the runs; finished ones are reused.
        record: the YAML file to write; entries already in it are kept unless named.
        only: entries to tune.
        view_of: as for `genlab.eval.compare.compare`.

    Returns:
        The record.
    """
    if not rates or min(rates) <= 0:
        raise ConfigError(f"--rates: want positive learning rates, got {rates}")
    first = next(iter(comparison.entries.values()))
    data = build_data(first.run.data)
    yaml = YAML(typ="safe")
    found = yaml.load(record.read_text()) if record.exists() else {}
    entries = dict(found.get("entries", {}))
    names = [name for name in comparison.entries if not only or name in only]
    for number, name in enumerate(names, start=1):
        entry = comparison.entries[name]
        results = {}
        for rate in rates:
            view = view_of(f"{name} at {rate:g}", number, len(names))
            optimizer = entry.run.training.optimizer.model_copy(update={"learning_rate": rate})
            training = entry.run.training.model_copy(update={"optimizer": optimizer})
            run = entry.run.model_copy(update={"training": training})
            result = train(run, out / f"{name}-{rate:g}", data=data, progress=view.training)
            scores = score_windows(
                result.model,
                run.paradigm.build(data.tokenizer.specials),
                data.evaluation_windows("validation"),
                batch_size=comparison.config.likelihood.batch_size,
            )
            results[rate] = round(scores.bits_per_byte, 4)
            view.note(f"{name} at {rate:g}: {results[rate]} bits per byte on validation")
        entries[name] = {
            "chosen": min(results, key=results.get),
            "validation_bits_per_byte": {f"{rate:g}": value for rate, value in results.items()},
        }
        versions = environment()
        content = {
            "about": (
                f"Each entry at the rates {', '.join(f'{r:g}' for r in rates)}, "
                f"{first.run.training.tokens:,} tokens, seed {first.run.seed}, chosen by "
                f"validation bits per byte; {now()[:10]}, {versions['cpu_count']} CPU cores, "
                f"JAX {versions['versions']['jax']}."
            ),
            "entries": entries,
        }
        _write(record, comparison, rates, content)
    return content


def _write(record: Path, comparison: Comparison, rates: list[float], content: dict) -> None:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 96
    stream = io.StringIO()
    stream.write("# Recorded grid of learning rates. Written by:\n")
    listed = ",".join(f"{rate:g}" for rate in rates)
    stream.write(f"#   genlab tune {comparison.source} --rates {listed}\n")
    yaml.dump(content, stream)
    record.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(record, stream.getvalue())
