"""The configuration of a comparison: shared settings, entries, and what is measured."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from ..errors import ConfigError, suggest
from ..paradigms.config import Config
from ..paradigms.decoding.registry import DecodingConfig
from ..train.config import RunConfig
from ..train.yaml_loader import apply_overrides, load_yaml, merge, resolve, validate
from .cost.config import CostConfig
from .cost.devices import load_devices
from .profile.config import ProfileConfig, entry_task


class LikelihoodConfig(Config):
    """How held-out likelihood is measured, the same for every entry.

    Attributes:
        max_windows: windows of the test split, evenly spaced; null for all (then the xz and n-gram
            floors are over exactly the same text).
        batch_size: windows per call.
        seed: of the Monte-Carlo draws of bounds.
    """

    max_windows: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=16, ge=1)
    seed: int = 0


class SamplesConfig(Config):
    """How sample quality is measured.

    Attributes:
        count: samples, continuing prompts taken evenly from the test split.
        prompt_length: tokens of each prompt, BOS included.
        new_tokens: tokens to generate.
        temperature, top_k, top_p, min_p: of the draws, the same for every entry.
        steps: model calls of the headline samples, for decodings with a step count; null means
            one per new token.
        curve_steps: step counts of the quality curve of such decodings.
        curve_lengths: lengths of the curve of the others.
        judge_order: order of the n-gram model that judges the samples.
        seed: of the first sample; sample i takes seed + i.
    """

    count: int = Field(default=16, ge=1)
    prompt_length: int = Field(default=32, ge=1)
    new_tokens: int = Field(default=96, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    steps: int | None = Field(default=None, ge=1)
    curve_steps: tuple[int, ...] = (8, 24, 96)
    curve_lengths: tuple[int, ...] = (24, 48, 96)
    judge_order: int = Field(default=5, ge=1)
    seed: int = 0

    @field_validator("curve_steps", "curve_lengths")
    @classmethod
    def _increasing(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)) or (value and value[0] < 1):
            raise ValueError(f"want increasing positive numbers, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _lengths_fit(self) -> "SamplesConfig":
        if self.curve_lengths and self.curve_lengths[-1] > self.new_tokens:
            raise ValueError(
                f"curve_lengths asks for {self.curve_lengths[-1]} tokens, new_tokens is "
                f"{self.new_tokens}"
            )
        return self


class LatencyConfig(Config):
    """What latency is measured at.

    Attributes:
        batches: batch sizes; the first is the headline.
        prompt_lengths: prompt tokens, BOS included; the first is the headline.
        new_tokens: tokens generated per request.
        repeats: timed requests after the warm-up.
    """

    batches: tuple[int, ...] = Field(default=(1, 8), min_length=1)
    prompt_lengths: tuple[int, ...] = Field(default=(32, 128), min_length=1)
    new_tokens: int = Field(default=32, ge=2)
    repeats: int = Field(default=5, ge=3)


class EntryConfig(Config):
    """One row of the comparison.

    Attributes:
        run: the full training configuration.
        family: shown in the table; the name of the preset that `run` extends when not set.
        decoding: how it generates; null means the paradigm's plain form.
        recipe: in plain words, what the entry was given beyond the family's published form.
        task_runs: changes of the runs on the profile's tasks, by task.
    """

    run: RunConfig
    family: str
    decoding: DecodingConfig | None = None
    recipe: tuple[str, ...] = ()
    task_runs: dict[str, dict[str, Any]] = Field(default_factory=dict)


class CompareConfig(Config):
    """A comparison.

    Attributes:
        title: of the report.
        out: folder of the results, relative to the current one.
        learning_rates: file with a recorded grid of learning rates (see `genlab tune`), relative
            to the config; null leaves each entry its own.
        params_tolerance: largest relative difference of total parameters between entries.
        defaults: keys of a run that all entries share; an entry's own keys win.
        entries: name -> entry.
        likelihood, samples, latency: what is measured.
        cost: the request that the cost model predicts and measures; null for none.
        profile: what is measured for the table of paradigms; null for nothing.
        document: Markdown page with that table to write, relative to the current folder; null for
            none.
    """

    title: str
    out: str
    learning_rates: str | None = None
    params_tolerance: float = Field(default=0.02, ge=0.0)
    defaults: dict[str, Any] = Field(default_factory=dict)
    entries: dict[str, Any] = Field(min_length=1)
    likelihood: LikelihoodConfig = LikelihoodConfig()
    samples: SamplesConfig = SamplesConfig()
    latency: LatencyConfig = LatencyConfig()
    cost: CostConfig | None = None
    profile: ProfileConfig | None = None
    document: str | None = None

    @model_validator(mode="after")
    def _document_has_a_profile(self) -> "CompareConfig":
        if self.document is not None and self.profile is None:
            raise ValueError("document needs a profile, which is null")
        return self


class Comparison(NamedTuple):
    """A loaded comparison.

    Attributes:
        config: the file's own keys.
        entries: every entry, resolved and validated, in the file's order.
        source: where it came from, for messages.
        grid: the recorded learning rates, or None.
    """

    config: CompareConfig
    entries: dict[str, EntryConfig]
    source: Path
    grid: dict[str, Any] | None


def load_comparison(
    path: str | Path, overrides: list[str] | None = None, *, use_grid: bool = True
) -> Comparison:
    """Reads a comparison and validates every entry before anything runs.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` changes of the file's keys.
        use_grid: take learning rates from the recorded grid that the file names.

    Raises:
        ConfigError: the first fault, with its path in the file.
    """
    path = Path(path)
    raw = apply_overrides(load_yaml(path), overrides or [])
    config = validate(CompareConfig, raw, str(path))
    grid = None
    if use_grid and config.learning_rates is not None:
        grid = load_yaml(path.parent / config.learning_rates)
    entries = {}
    for name, entry in config.entries.items():
        entries[name] = _entry(name, entry, config, path, grid)
    lengths = {entry.run.data.context_length for entry in entries.values()}
    if len(lengths) > 1:
        raise ConfigError(f"{path}: entries have context lengths {sorted(lengths)}, want one")
    datas = {entry.run.data.canonical_json for entry in entries.values()}
    if len(datas) > 1:
        raise ConfigError(f"{path}: entries differ in data; put `data` under defaults")
    budgets = {entry.run.training.tokens for entry in entries.values()}
    if len(budgets) > 1:
        raise ConfigError(f"{path}: entries have token budgets {sorted(budgets)}, want one")
    _check_lengths(config, entries, path)
    if config.cost is not None and config.cost.devices is not None:
        load_devices(Path(config.cost.devices))  # a faulty table is found before any training
    _check_tasks(config, entries, path)
    return Comparison(config, entries, path, grid)


def _entry(
    name: str, raw: Any, config: CompareConfig, path: Path, grid: dict[str, Any] | None
) -> EntryConfig:
    where = f"{path}: entries.{name}"
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: want a mapping with `run`, got {raw!r}")
    known = set(EntryConfig.model_fields)
    for key in raw:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown key{suggest(key, known)}")
    run = raw.get("run")
    if not isinstance(run, dict):
        raise ConfigError(f"{where}.run: want a mapping, got {run!r}")
    family = raw.get("family", Path(str(run.get("extends", name))).stem)
    # A preset is the weakest: the comparison's defaults change it, the entry's own keys win.
    preset = resolve({"extends": run["extends"]}, path.parent) if "extends" in run else {}
    own = {key: value for key, value in run.items() if key != "extends"}
    full = merge(merge(preset, config.defaults), own)
    if grid is not None:
        rates = grid.get("entries", {}).get(name)
        if rates is None:
            raise ConfigError(
                f"{where}: {config.learning_rates} has no learning rates for it"
                f"{suggest(name, grid.get('entries', {}))}"
            )
        best = rates["chosen"]
        full = merge(full, {"training": {"optimizer": {"learning_rate": best}}})
    return validate(EntryConfig, {**raw, "run": full, "family": family}, where)


def _check_lengths(config: CompareConfig, entries: dict[str, EntryConfig], path: Path) -> None:
    longest = {
        "samples": config.samples.prompt_length + config.samples.new_tokens,
        "latency": max(config.latency.prompt_lengths) + config.latency.new_tokens,
    }
    if config.cost is not None:
        longest["cost"] = config.cost.prompt_length + config.cost.new_tokens
    for name, entry in entries.items():
        for key, length in longest.items():
            if length > entry.run.model.max_len:
                raise ConfigError(
                    f"{path}: {key} needs prompt and new tokens of {length} together, but entry "
                    f"{name} has model.max_len={entry.run.model.max_len}"
                )


def _check_tasks(config: CompareConfig, entries: dict[str, EntryConfig], path: Path) -> None:
    tasks = {} if config.profile is None else config.profile.tasks
    for name, entry in entries.items():
        for task in entry.task_runs:
            if task not in tasks:
                raise ConfigError(
                    f"{path}: entries.{name}.task_runs.{task}: no such task in profile.tasks"
                    f"{suggest(task, tasks)}"
                )
        for task, task_config in tasks.items():
            place = f"{path}: entries.{name} on task {task}"
            entry_task(entry.run, task_config, entry.task_runs.get(task, {}), place)
