"""A realistic, invented comparison for the tests of results, plots and report.

No figure here was measured. `build()` returns the record, `build(**changes)` one with other
top-level values.
"""

import math

import numpy as np
from genlab.eval.results import Results, Row
from genlab.eval.statistics import Blocks, bootstrap_bits_per_byte

TEST_BYTES, TEST_TOKENS, BLOCKS = 466_854, 218_929, 215
CONTEXT, NEW_TOKENS = 256, 128

SAMPLE = (
    "It was a very proper wish, and she was not in the least inclined to be of the party; but the "
    'very idea of his being so soon in the house was a relief.\n\n"You are very good," said Anne, '
    '"but I have no doubt of its being a most agreeable evening to them all."'
)
GARBLED = "he the of and to was She in her <b>not</b> that had a as for it with & his be on at Mrs"

# name, family, bits per byte, params, learning rate, tokens/s training, step ms, ttft slope ms
ENTRIES = [
    ("transformer", "transformer", 2.448, 621_568, 6e-3, 15_100, 2.1, 0.055),
    ("mamba", "mamba", 2.612, 618_240, 6e-3, 7_050, 2.9, 0.14),
    ("mamba2", "mamba2", 2.537, 624_896, 6e-3, 11_400, 2.4, 0.08),
    ("masked_diffusion", "masked_diffusion", 3.034, 627_712, 6e-3, 13_900, 13.5, 0.0),
    ("hybrid", "hybrid", 2.455, 620_032, 6e-3, 9_800, 2.6, 0.10),
]
STATE = {
    "transformer": (0, 2048.0), "mamba": (143_360, 0.0), "mamba2": (270_336, 0.0),
    "masked_diffusion": (0, 0.0), "hybrid": (107_520, 512.0),
}  # fmt: skip


def _likelihood(rng, difficulty, sizes, level, bound):
    noise = 0.05 if bound else 0.02
    rates = level * difficulty * (1 + rng.normal(0, noise, BLOCKS))
    nats = rates * sizes * math.log(2)
    nats *= level * math.log(2) * TEST_BYTES / nats.sum()
    interval = bootstrap_bits_per_byte(Blocks(nats, sizes), seed=0)
    return {
        "estimator": "count-based upper bound" if bound else "exact, chain rule",
        "draws": 8 if bound else 1,
        "nats": float(nats.sum()),
        "tokens": TEST_TOKENS,
        "bytes": TEST_BYTES,
        "standard_error_bits_per_byte": 0.004 if bound else 0.0,
        "block_nats": nats.tolist(),
        "block_bytes": sizes.tolist(),
    }, tuple(interval)


def _training(level, speed, params, bound):
    points = []
    for index in range(1, 41):
        tokens = index * 22_528
        loss = (level + 2.2 * math.exp(-index / 7)) * math.log(2) * TEST_BYTES / TEST_TOKENS
        loss *= 1 + (0.05 if bound else 0.012) * math.sin(index * 2.3)
        points.append(
            {
                "step": index * 22,
                "tokens": tokens,
                "flops": 6.0 * params * tokens,
                "wall_s": tokens / speed,
                "loss": loss,
                "bits_per_byte_validation": level + 2.2 * math.exp(-index / 7)
                if index % 5 == 0
                else None,
            }
        )
    return points


def _latency(name, step, slope):
    records = []
    for batch in (1, 8):
        for prompt in (32, 128, 256):
            slower = 1 + 0.35 * (batch > 1)
            if name == "masked_diffusion":
                step_now = step * (1 + prompt / 400) * (1 + 1.2 * (batch > 1))
                total = 32 * step_now
                ttft, calls = total, 32
            else:
                grow = 1 + (prompt / 4000 if name in ("transformer", "hybrid") else 0)
                step_now = step * slower * grow
                ttft = (3 + slope * prompt) * (1 + 2 * (batch > 1))
                total, calls = ttft + (NEW_TOKENS - 1) * step_now, NEW_TOKENS
            records.append(
                {
                    "batch": batch,
                    "prompt_length": prompt,
                    "new_tokens": NEW_TOKENS,
                    "ttft_ms": ttft,
                    "step_ms_p50": step_now,
                    "step_ms_p90": step_now * 1.12,
                    "tokens_per_s": 1000 * batch * NEW_TOKENS / total,
                    "tokens_per_call": NEW_TOKENS / calls,
                    "compile_s": 3.1,
                }
            )
    return records


def _curve(name, step):
    if name == "masked_diffusion":
        return [
            {
                "steps": steps,
                "new_tokens": NEW_TOKENS,
                "nfe": float(steps),
                "token_evals": float(steps * (NEW_TOKENS + 32)),
                "gen_ppl": 60 + 420 / steps**0.8,
                "entropy": 4.05 - 0.03 * math.log2(128 / steps),
                "distinct_2": 0.97,
                "latency_ms": steps * step * 1.08,
            }
            for steps in (4, 8, 16, 32, 64, 128)
        ]
    return [
        {
            "steps": None,
            "new_tokens": length,
            "nfe": float(length),
            "token_evals": float(length + 32),
            "gen_ppl": 31 + 300 / length + 4 * step,
            "entropy": min(math.log(length), 4.35) - 0.35,
            "distinct_2": 0.93,
            "latency_ms": 5 + length * step,
        }
        for length in (32, 64, 128, 256)
    ]


def build_row(rng, difficulty, sizes, entry) -> dict:
    """Returns one row as plain data."""
    name, family, level, params, rate, speed, step, slope = entry
    bound = name == "masked_diffusion"
    likelihood, interval = _likelihood(rng, difficulty, sizes, level, bound)
    training, latency = _training(level, speed, params, bound), _latency(name, step, slope)
    first, curve = latency[0], _curve(name, step)
    point = next(p for p in curve if (p["steps"] == 32 if bound else p["new_tokens"] == 128))
    fixed, per_token = STATE[name]
    return {
        "name": name,
        "family": family,
        "paradigm": "masked_diffusion" if bound else "autoregressive",
        "config_hash": f"{abs(hash(entry[2])):x}"[:12].rjust(12, "0"),
        "seed": 0,
        "dtype": "float32",
        "context_length": CONTEXT,
        "learning_rate": rate,
        "bits_per_byte": likelihood["nats"] / (math.log(2) * TEST_BYTES),
        "bits_per_byte_ci95": interval,
        "is_bound": bound,
        "likelihood": likelihood,
        "params": params,
        "params_active": params,
        "train_tokens": training[-1]["tokens"],
        "train_flops": training[-1]["flops"],
        "train_tokens_per_s": float(speed),
        "train_s": training[-1]["wall_s"],
        "compile_s": 11.5,
        "peak_memory_bytes": None,
        "peak_memory_reason": "the cpu backend keeps no memory counters",
        "new_tokens": NEW_TOKENS,
        "nfe": point["nfe"],
        "token_evals": point["token_evals"],
        "tokens_per_call": NEW_TOKENS / point["nfe"],
        "ttft_ms": first["ttft_ms"],
        "step_ms_p50": first["step_ms_p50"],
        "step_ms_p90": first["step_ms_p90"],
        "tokens_per_s": first["tokens_per_s"],
        "state_bytes_fixed": fixed,
        "state_bytes_per_token": per_token,
        "latency": latency,
        "gen_ppl": point["gen_ppl"],
        "entropy": point["entropy"],
        "distinct_n": {"1": 0.55, "2": point["distinct_2"], "3": 0.99},
        "word_rate": 0.71 if bound else 0.962,
        "repetitive": False,
        "prompt": "Anne ",
        "sample": GARBLED if bound else SAMPLE,
        "sampler": {"temperature": 1.0, "noise_dtype": "float32"}
        | ({"order": "confidence", "steps": 32} if bound else {}),
        "curve": curve,
        "training_curve": training,
        "recipe": [
            "shifted prediction: position i predicts token i+1",
            "a short symmetric depthwise convolution in each block",
        ]
        if bound
        else [],
        "undertrained": bound,
        "undertrained_reason": "the held-out bound still falls by 0.04 bits per byte over the last "
        "tenth of training"
        if bound
        else None,
        "resolved_config": {
            "name": family,
            "optimizer": {"learning_rate": rate, "weight_decay": 0.1},
            "model": {"width": 128, "depth": 4, "vocab_size": 516, "layers": ["mixer", "mlp"]},
        },
        "phases_s": {"train": training[-1]["wall_s"], "compile": 11.5, "evaluate": 17.0},
        "reasons": {},
    }


def build(**changes) -> Results:
    """Returns the invented comparison; keyword arguments replace top-level keys."""
    rng = np.random.default_rng(0)
    sizes = np.full(BLOCKS, TEST_BYTES // BLOCKS)
    sizes[-1] += TEST_BYTES - sizes.sum()
    difficulty = rng.normal(1, 0.09, BLOCKS)
    payload = {
        "title": "quick",
        "created": "2026-01-02T03:04:05+00:00",
        "command": "genlab compare configs/compare/quick.yaml",
        "environment": {
            "genlab": "0.1.0", "python": "3.13.1", "jax": "0.12.0", "jaxlib": "0.12.0",
            "device": "cpu", "cpu_count": 2, "platform": "Linux x86_64", "git": "1f2e3d4",
        },
        "phases_s": {
            "data": 6.2, "compile": 57.4, "train": 298.0, "evaluate": 84.9, "latency": 41.3,
            "report": 6.0,
        },
        "data": {
            "name": "Jane Austen's novels, Persuasion held out",
            "tokenizer": "byte-level BPE, 512 pieces, trained on the training split",
            "vocab_size": 516,
            "fingerprint": "9c0ffee1d00d",
            "train_bytes": 3_558_175,
            "train_tokens": 1_658_584,
            "test_bytes": TEST_BYTES,
            "test_tokens": TEST_TOKENS,
            "documents": {"train": 245, "test": 24},
        },
        "judge": {
            "kind": "5-gram",
            "detail": "token 5-gram, interpolated modified Kneser-Ney over 516 ids",
            "bits_per_byte": 1.816,
        },
        "rows": [Row(**build_row(rng, difficulty, sizes, entry)) for entry in ENTRIES],
        "floors": [
            {"name": "uniform bytes", "bits_per_byte": 8.0, "ci95": None,
             "detail": "256 equally likely byte values"},
            {"name": "uniform tokens", "bits_per_byte": 4.226, "ci95": (4.213, 4.239),
             "detail": "516 equally likely ids"},
            {"name": "unigram", "bits_per_byte": 3.536, "ci95": (3.525, 3.548),
             "detail": "token unigram, interpolated modified Kneser-Ney over 516 ids"},
            {"name": "5-gram", "bits_per_byte": 1.816, "ci95": (1.803, 1.830),
             "detail": "token 5-gram, interpolated modified Kneser-Ney over 516 ids"},
            {"name": "xz", "bits_per_byte": 2.470, "ci95": None,
             "detail": "xz -9e of the held-out text alone"},
            {"name": "xz given training text", "bits_per_byte": 2.141, "ci95": None,
             "detail": "xz -9e: size(training + held-out) - size(training)"},
        ],
        "notes": ["Figures in this record are invented for tests."],
    }  # fmt: skip
    return Results(**{**payload, **changes})


def change_row(results: Results, name: str, /, **changes) -> Results:
    """Returns a copy in which the named row has other values, validated again."""
    rows = [
        Row(**{**row.model_dump(), **changes}) if row.name == name else row for row in results.rows
    ]
    return results.model_copy(update={"rows": rows})
