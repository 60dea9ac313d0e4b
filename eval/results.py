"""The record of one comparison: `results.json` and `results.csv`.

The keys are an interface: other tools read them, so a key keeps its name, meaning and unit. Units
are in the names (`_ms`, `_s`, `_bytes`, bits per byte); entropies and negative log-likelihoods are
in nats. A value that could not be measured is null and its reason stands in the row's `reasons`; a
value is never zero, NaN or infinite for want of a measurement.
"""

import math
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from .cost.records import CostRecord, Machine
from .profile.records import Profile
from .record import Interval, Record

SCHEMA_VERSION = 1


class Likelihood(Record):
    """How `bits_per_byte` was estimated, in parts that reproduce it.

    Attributes:
        estimator: plain words, for example "exact, chain rule" or "count-based bound".
        draws: Monte-Carlo draws per window; 1 for an exact likelihood.
        nats: sum over all scored tokens (natural logarithm).
        tokens: scored tokens (BOS is never scored).
        bytes: UTF-8 bytes of the held-out text that those tokens spell.
        standard_error_bits_per_byte: Monte-Carlo standard error; 0.0 for an exact likelihood.
        block_nats: nats of each bootstrap block, in text order (empty: not kept).
        block_bytes: bytes of each block. Entries with equal `block_bytes` are compared in pairs.
    """

    estimator: str
    draws: int = Field(ge=1)
    nats: float
    tokens: int = Field(gt=0)
    bytes: int = Field(gt=0)
    standard_error_bits_per_byte: float = Field(ge=0)
    block_nats: list[float] = []
    block_bytes: list[int] = []

    @model_validator(mode="after")
    def _blocks_match(self) -> "Likelihood":
        if len(self.block_nats) != len(self.block_bytes):
            raise ValueError(
                f"block_nats has {len(self.block_nats)} values, block_bytes {len(self.block_bytes)}"
            )
        if self.block_bytes and sum(self.block_bytes) != self.bytes:
            raise ValueError(f"block_bytes sum to {sum(self.block_bytes)}, bytes is {self.bytes}")
        return self


class LatencyRecord(Record):
    """One latency measurement; compilation is apart, in `compile_s`.

    Attributes:
        batch: requests run together.
        prompt_length: prompt tokens per request.
        new_tokens: tokens generated per request.
        ttft_ms: request start to the first token that can no longer change, median.
        step_ms_p50: median time of one model call after the first token (decode or denoise step).
        step_ms_p90: 90th percentile of the same.
        tokens_per_s: `batch * new_tokens` over the whole time of the request, prefill included.
        tokens_per_call: new tokens of one row per model call.
        compile_s: compile time of the programs this shape needed.
    """

    batch: int = Field(ge=1)
    prompt_length: int = Field(ge=0)
    new_tokens: int = Field(ge=1)
    ttft_ms: float
    step_ms_p50: float | None
    step_ms_p90: float | None
    tokens_per_s: float
    tokens_per_call: float
    compile_s: float


class CurvePoint(Record):
    """Sample quality at one number of steps (diffusion) or one length (others: steps null)."""

    steps: int | None
    new_tokens: int
    nfe: float
    token_evals: float
    gen_ppl: float | None
    entropy: float | None
    distinct_2: float | None
    latency_ms: float | None


class TrainingPoint(Record):
    """One point of the training curve, cumulative. `loss` is in nats per scored token."""

    step: int
    tokens: int
    flops: float
    wall_s: float
    loss: float
    bits_per_byte_validation: float | None


# Row fields that may be null; each null needs a reason.
MEASURED = (
    "bits_per_byte", "bits_per_byte_ci95", "learning_rate", "train_tokens", "train_flops",
    "train_tokens_per_s", "train_s", "compile_s", "new_tokens", "nfe", "token_evals",
    "tokens_per_call", "ttft_ms", "step_ms_p50", "step_ms_p90", "tokens_per_s",
    "state_bytes_fixed", "state_bytes_per_token", "gen_ppl", "entropy", "distinct_n", "word_rate",
    "repetitive", "sample", "likelihood",
)  # fmt: skip


class Row(Record):
    """One entry of the comparison.

    Attributes:
        name: the entry's name in the compare config; unique.
        family: registry name (`transformer`, `mamba`, ...). paradigm: what is learnt.
        config_hash: hash of config, data, tokenizer and code; equal hash means equal run.
        bits_per_byte: held-out nats / (ln 2 * bytes); an upper bound when `is_bound`.
        bits_per_byte_ci95: 95 % percentile interval of a bootstrap over blocks of at least 2 KB.
        params: parameters, embeddings included. params_active: those one token uses.
        train_tokens, train_flops, train_tokens_per_s, train_s, compile_s: the training run.
        new_tokens: length of the sample that nfe and token_evals describe.
        nfe: model calls for one sample. token_evals: tokens pushed through the model for it.
        ttft_ms, step_ms_p50, step_ms_p90, tokens_per_s: batch 1 at the first prompt length.
        state_bytes_fixed, state_bytes_per_token: decoding state of one request.
        state_windows: (tokens, bytes per token) of the windows that `state_bytes_fixed` counts
            full; a shorter request needs less.
        gen_ppl: generative perplexity under `Results.judge`. entropy: mean per-sample unigram
            entropy, nats. distinct_n: distinct n-grams over all n-grams, keys "1", "2", "3".
        word_rate: share of the samples' words that occur in the training text.
        repetitive: the samples repeat themselves, so `gen_ppl` must not be read as quality.
        sampler: every knob of the sampler, noise dtype included. prompt: of `sample`.
        peak_memory_reason: when the figure is null, why; when given, how it was obtained.
        profile: growth with length, long context and tasks, where the comparison asks for them.
        cost: bytes, FLOPs, predicted and measured times, prices, where the comparison asks for it.
        recipe: in plain words, what the entry was given beyond the family's published form.
        reasons: field name to the reason why it is null.
    """

    name: str = Field(min_length=1)
    family: str
    paradigm: str
    config_hash: str = Field(min_length=1)
    seed: int
    dtype: str
    context_length: int = Field(gt=0)
    learning_rate: float | None

    bits_per_byte: float | None
    bits_per_byte_ci95: Interval | None
    is_bound: bool
    likelihood: Likelihood | None

    params: int = Field(gt=0)
    params_active: int = Field(gt=0)
    train_tokens: int | None
    train_flops: float | None
    train_tokens_per_s: float | None
    train_s: float | None
    compile_s: float | None
    peak_memory_bytes: int | None
    peak_memory_reason: str | None = None

    new_tokens: int | None
    nfe: float | None
    token_evals: float | None
    tokens_per_call: float | None
    ttft_ms: float | None
    step_ms_p50: float | None
    step_ms_p90: float | None
    tokens_per_s: float | None
    state_bytes_fixed: int | None
    state_bytes_per_token: float | None
    state_windows: list[tuple[int, float]] = []
    latency: list[LatencyRecord] = []

    gen_ppl: float | None
    entropy: float | None
    distinct_n: dict[Literal["1", "2", "3"], float | None] | None
    word_rate: float | None
    repetitive: bool | None
    prompt: str = ""
    sample: str | None
    sampler: dict[str, JsonValue] = {}

    curve: list[CurvePoint] = []
    training_curve: list[TrainingPoint] = []
    profile: Profile | None = None
    cost: CostRecord | None = None
    recipe: list[str]
    undertrained: bool
    undertrained_reason: str | None = None
    resolved_config: dict[str, JsonValue]
    phases_s: dict[str, float] = {}
    reasons: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> "Row":
        for field in MEASURED:
            null, reason = getattr(self, field) is None, self.reasons.get(field, "").strip()
            if null and not reason:
                raise ValueError(f"row {self.name!r}: {field} is null without a reason in reasons")
            if not null and field in self.reasons:
                raise ValueError(f"row {self.name!r}: {field} has a value and a reason for none")
        unknown = sorted(set(self.reasons) - set(MEASURED))
        if unknown:
            raise ValueError(f"row {self.name!r}: reasons for what cannot be null: {unknown}")
        if self.peak_memory_bytes is None and not self.peak_memory_reason:
            raise ValueError(f"row {self.name!r}: peak_memory_bytes is null without a reason")
        if self.peak_memory_bytes == 0:
            raise ValueError(f"row {self.name!r}: peak_memory_bytes 0 is no measurement; use null")
        if self.undertrained and not self.undertrained_reason:
            raise ValueError(f"row {self.name!r}: undertrained without undertrained_reason")
        if self.params_active > self.params:
            raise ValueError(f"row {self.name!r}: params_active {self.params_active} > params")
        if self.bits_per_byte_ci95 and self.bits_per_byte_ci95[0] > self.bits_per_byte_ci95[1]:
            raise ValueError(f"row {self.name!r}: bits_per_byte_ci95 is not [low, high]")
        if self.likelihood is not None and self.bits_per_byte is not None:
            expected = self.likelihood.nats / (math.log(2) * self.likelihood.bytes)
            if not math.isclose(expected, self.bits_per_byte, rel_tol=1e-6):
                raise ValueError(
                    f"row {self.name!r}: bits_per_byte {self.bits_per_byte} is not "
                    f"nats/(ln 2 * bytes) = {expected}"
                )
        return self

    def state_bytes_at(self, context: int) -> float | None:
        """Returns the decoding state of one request at `context` tokens, or None if unmeasured."""
        if self.state_bytes_fixed is None or self.state_bytes_per_token is None:
            return None
        empty = sum(max(0, tokens - context) * size for tokens, size in self.state_windows)
        return self.state_bytes_fixed + self.state_bytes_per_token * context - empty


class Floor(Record):
    """A figure that needs no training of a network, for the same held-out text.

    Attributes:
        name: shown in the table. detail: how it was obtained.
        bits_per_byte: over the bytes of the held-out text. ci95: bootstrap interval, or null.
    """

    name: str
    bits_per_byte: float
    ci95: Interval | None
    detail: str


class Judge(Record):
    """What scored the samples, never a compared entry; `bits_per_byte` is its held-out score."""

    kind: str
    detail: str
    bits_per_byte: float | None


class Data(Record):
    """The text all entries saw. `documents` counts per split; `fingerprint` covers text and ids."""

    name: str
    tokenizer: str
    vocab_size: int
    fingerprint: str
    train_bytes: int
    train_tokens: int
    test_bytes: int
    test_tokens: int
    documents: dict[str, int]
    detail: str = ""


class Results(Record):
    """A whole comparison, as stored in `results.json`.

    Attributes:
        replay: file beside `results.json` that holds the replay of the report; null where no entry
            could be replayed.
        machines: this machine's microbenchmarks by dtype, where the cost model asked for them.
    """

    schema_version: int = SCHEMA_VERSION
    title: str
    created: str
    command: str = ""
    environment: dict[str, JsonValue]
    phases_s: dict[str, float]
    data: Data
    judge: Judge | None
    rows: list[Row]
    floors: list[Floor]
    replay: str | None = None
    machines: dict[str, Machine] = {}
    notes: list[str] = []

    @model_validator(mode="after")
    def _names_unique(self) -> "Results":
        for kind, names in (
            ("row", [row.name for row in self.rows]),
            ("floor", [floor.name for floor in self.floors]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} names must be unique; twice: {', '.join(twice)}")
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {self.schema_version} cannot be read; this is {SCHEMA_VERSION}"
            )
        return self
