"""Measures one trained entry: likelihood, sample quality, latency, state size."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..paradigms.decoding.loop import advance
from ..paradigms.decoding.sampling import make_sampling
from ..paradigms.decoding.state import DecodeState
from ..paradigms.interface import SpecialIds
from ..paradigms.model import Model
from ..train.data.pipeline import Data
from ..train.likelihood import WindowScores
from .compare_config import LatencyConfig, SamplesConfig
from .latency import measure_latency
from .ngram import NgramModel
from .results import CurvePoint, LatencyRecord, Likelihood
from .statistics import bootstrap_bits_per_byte, group_blocks, median
from .text_metrics import distinct_n, generative_perplexity, repetition, token_entropy, word_rate

SAMPLER_KNOBS = ("temperature", "top_k", "top_p", "min_p", "seed")
Progress = Callable[[str, int, int], None]


class Judge(NamedTuple):
    """What samples are compared with.

    Attributes:
        ngram: scores them; never a compared entry.
        words: the training text's words.
        reference: held-out ids, for the repetition flag.
    """

    ngram: NgramModel
    words: frozenset[str]
    reference: np.ndarray


def likelihood_record(scores: WindowScores, seed: int) -> tuple[Likelihood, Any]:
    """Returns the record of a likelihood measurement and its 95 % interval (or None)."""
    blocks = group_blocks(scores.nats, scores.num_bytes)
    estimator = "exact, chain rule"
    if scores.is_bound:
        estimator = "upper bound, count-based Monte Carlo"
    record = Likelihood(
        estimator=estimator,
        draws=max(scores.draws, 1),
        nats=float(scores.nats.sum()),
        tokens=scores.tokens,
        bytes=int(scores.num_bytes.sum()),
        standard_error_bits_per_byte=scores.standard_error_bits_per_byte,
        block_nats=[float(x) for x in blocks.nats],
        block_bytes=[int(x) for x in blocks.num_bytes],
    )
    return record, bootstrap_bits_per_byte(blocks, seed=seed)


def sample_prompts(data: Data, count: int, length: int) -> np.ndarray:
    """BOS and the first tokens of `count` evenly spaced test windows, int32 (count length)."""
    context = data.config.context_length
    windows = data.evaluation_windows("test", length=max(context, length))
    full = np.flatnonzero(windows.token_counts >= length - 1)
    chosen = full[(2 * np.arange(count) + 1) * len(full) // (2 * count)]
    return windows.rows(chosen).tokens[:, :length]


def forbidden_ids(specials: SpecialIds) -> tuple[int, ...]:
    """Ids that are never text. EOS too: samples of one length are compared."""
    return tuple(sorted({specials.bos, specials.eos, specials.pad, specials.mask}))


def run_decoding(
    model: Model,
    decoding: Any,
    prompts: np.ndarray,
    config: SamplesConfig,
    specials: SpecialIds,
    *,
    new_tokens: int,
    steps: int | None,
) -> DecodeState:
    """Continues every prompt by exactly `new_tokens`; row i draws with seed `config.seed + i`."""
    batch, prompt_length = prompts.shape
    sampling = make_sampling(
        batch,
        vocab_size=model.config.padded_vocab_size,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        steps=steps or 0,
        forbidden_ids=forbidden_ids(specials),
    )
    state = decoding.start(
        model,
        prompts,
        sampling=sampling,
        seeds=config.seed + np.arange(batch, dtype=np.int32),
        max_new=np.full(batch, new_tokens, np.int32),
        max_len=prompt_length + new_tokens,
    )
    return advance(model, decoding, state, prompt_length + new_tokens)


class Samples(NamedTuple):
    """Sample quality of one entry; fields as in `genlab.eval.results.Row`."""

    nfe: float
    token_evals: float
    gen_ppl: float
    entropy: float
    distinct_n: dict[str, float | None]
    word_rate: float | None
    repetitive: bool
    prompt: str
    sample: str
    curve: list[CurvePoint]
    sampler: dict[str, Any]


def measure_samples(
    model: Model,
    decoding: Any,
    data: Data,
    judge: Judge,
    config: SamplesConfig,
    progress: Progress,
) -> Samples:
    """Generates, scores, and draws the quality curve over steps or over lengths."""
    prompts = sample_prompts(data, config.count, config.prompt_length)
    specials = data.tokenizer.specials
    stepped = decoding.uses_steps
    headline = (config.steps or config.new_tokens) if stepped else None

    def generate(count: int, steps: int | None) -> tuple[np.ndarray, DecodeState]:
        state = run_decoding(
            model, decoding, prompts[:count], config, specials,
            new_tokens=config.new_tokens, steps=steps,
        )  # fmt: skip
        return np.asarray(state.tokens), state

    def wall_ms(steps: int | None) -> float:
        generate(1, steps)  # compiles and warms up
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            jax.block_until_ready(generate(1, steps)[1])
            times.append(1e3 * (time.perf_counter() - begin))
        return median(times)

    def quality(tokens: np.ndarray, length: int) -> tuple[float, float, float | None]:
        ids = [row[: config.prompt_length + length] for row in tokens]
        starts = [config.prompt_length] * len(ids)
        new = [row[config.prompt_length :] for row in ids]
        perplexity = generative_perplexity(judge.ngram, ids, score_from=starts)[0]
        return perplexity, token_entropy(new), distinct_n(new, 2)

    curve = []
    points = config.curve_steps if stepped else config.curve_lengths
    total = len(points) + 1
    progress("samples", 0, total)
    tokens, state = generate(config.count, headline)
    new = [row[config.prompt_length :] for row in tokens]
    texts = [data.tokenizer.decode(row) for row in new]
    request_ms = wall_ms(headline)
    for done, point in enumerate(points, start=1):
        progress("samples", done, total)
        if stepped:
            drawn, drawn_state = generate(config.count, point)
            perplexity, entropy, distinct = quality(drawn, config.new_tokens)
            curve.append(
                CurvePoint(
                    steps=point,
                    new_tokens=config.new_tokens,
                    nfe=float(np.mean(drawn_state.nfe)),
                    token_evals=float(np.mean(drawn_state.token_evals)),
                    gen_ppl=perplexity,
                    entropy=entropy,
                    distinct_2=distinct,
                    latency_ms=wall_ms(point),
                )
            )
        else:
            # The first tokens of a longer sample are the shorter sample: nothing to draw anew.
            perplexity, entropy, distinct = quality(tokens, point)
            calls = float(np.mean(state.nfe)) / config.new_tokens * point
            curve.append(
                CurvePoint(
                    steps=None,
                    new_tokens=point,
                    nfe=calls,
                    token_evals=config.prompt_length + point - 1.0,
                    gen_ppl=perplexity,
                    entropy=entropy,
                    distinct_2=distinct,
                    latency_ms=request_ms if point == config.new_tokens else None,
                )
            )
    perplexity, entropy, _ = quality(tokens, config.new_tokens)
    progress("samples", total, total)
    return Samples(
        nfe=float(np.mean(state.nfe)),
        token_evals=float(np.mean(state.token_evals)),
        gen_ppl=perplexity,
        entropy=entropy,
        distinct_n={str(n): distinct_n(new, n) for n in (1, 2, 3)},
        word_rate=word_rate(texts, judge.words),
        repetitive=repetition(new, judge.reference).repetitive,
        prompt=data.tokenizer.decode(prompts[0][1:]),
        sample=texts[0],
        curve=curve,
        sampler={
            **config.model_dump(mode="json", include=set(SAMPLER_KNOBS)),
            "steps": headline,
            "decoding": decoding.name,
            "decoding_options": decoding.options(),
            "noise_dtype": "float32, Gumbel mode high",
            "forbidden_ids": list(forbidden_ids(specials)),
            "count": config.count,
        },
    )


def measure_latencies(
    model: Model,
    decoding: Any,
    data: Data,
    config: LatencyConfig,
    steps_per_token: float,
    progress: Progress,
) -> list[LatencyRecord]:
    """Latency at every batch size and prompt length, headline first."""
    records = []
    cases = [(b, p) for b in config.batches for p in config.prompt_lengths]
    for done, (batch, prompt_length) in enumerate(cases):
        progress("latency", done, len(cases))
        steps = max(1, round(config.new_tokens * steps_per_token)) if decoding.uses_steps else 0
        record = measure_latency(
            model,
            decoding,
            prompts=sample_prompts(data, batch, prompt_length),
            new_tokens=config.new_tokens,
            steps=steps,
            forbidden_ids=forbidden_ids(data.tokenizer.specials),
            repeats=config.repeats,
        )
        records.append(record)
    progress("latency", len(cases), len(cases))
    return records
