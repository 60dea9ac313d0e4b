"""Growth, long context, memory and the page of paradigms: closed forms, small models, and words."""

import json
import math
import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from genlab.errors import ConfigError, DataError
from genlab.eval.answers import at_flops
from genlab.eval.compare_config import load_comparison
from genlab.eval.latency import state_bytes
from genlab.eval.plots import draw_plots
from genlab.eval.profile.config import GrowthConfig, LongContextConfig
from genlab.eval.profile.document import render_document, state_matches
from genlab.eval.profile.growth import fitted_exponent, measure_growth, measure_parallelism
from genlab.eval.profile.long_context import measure_long_context, regions, windows_of
from genlab.eval.profile.memory import measure_memory
from genlab.eval.profile.table import classic
from genlab.eval.report import render_report
from genlab.eval.results import Results
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.plain import Plain
from genlab.paradigms.interface import SpecialIds
from genlab.paradigms.model import build_model
from genlab.paradigms.paradigm_registry import PARADIGMS
from genlab.train.data.pipeline import DataConfig, build_data
from pydantic import ValidationError

MIXERS = {
    "attention": {"name": "attention", "num_heads": 2},
    "mamba": {"name": "mamba", "state_size": 4},
}


def model_of(mixer, vocab_size=260, max_len=32):
    """A one-layer model."""
    layers = {"x": {"mixer": MIXERS[mixer]}}
    config = {
        "width": 8, "pattern": ["x"], "layers": layers, "max_len": max_len,
        "vocab_size": vocab_size,
    }  # fmt: skip
    return build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=0)


@pytest.fixture(scope="module")
def data():
    """The novels as bytes, rows of 9 tokens."""
    plain = {"tokenizer": {"name": "bytes"}, "context_length": 9}
    return build_data(DataConfig.model_validate_json(json.dumps(plain)))


def test_the_exponent_of_a_power_law_is_found():
    sizes = [10, 20, 40, 80]
    for power in (0.5, 1.0, 2.0):
        assert fitted_exponent(sizes, [3 * n**power for n in sizes]) == pytest.approx(power)
    with pytest.raises(ValueError, match="at least two"):
        fitted_exponent([1], [1])
    with pytest.raises(ValueError, match="positive"):
        fitted_exponent([1, 2], [0.0, 1.0])


class Clock:
    """A clock under which each timed piece of work takes as long as it is told."""

    def __init__(self, durations):
        self.now, self.durations, self.open = 0.0, list(durations), False

    def __call__(self):
        if self.open:
            self.now += self.durations.pop(0)
        self.open = not self.open
        return self.now


@pytest.mark.parametrize("mixer", MIXERS)
def test_growth_counts_calls_and_bytes_and_fits_the_times(mixer):
    model, prompt = model_of(mixer), np.array([1, 2, 3], np.int32)
    seen = []
    growth = measure_growth(
        model, Plain(), prompt, [4, 8, 16], forbidden_ids=(0,), repeats=1, budget_s=1e9,
        progress=lambda done, total: seen.append((done, total)), clock=Clock([1.0, 2.0, 8.0]),
    )  # fmt: skip
    assert [p.new_tokens for p in growth.points] == [4, 8, 16]
    assert [p.nfe for p in growth.points] == [4, 8, 16] and growth.calls_per_token == 1
    assert [p.time_ms for p in growth.points] == [1e3, 2e3, 8e3]
    assert growth.exponent_tail == pytest.approx(2.0) and growth.exponent == pytest.approx(1.5)
    fixed, per_token, windows = state_bytes(model)
    assert not windows
    want = [fixed + per_token * (3 + n) for n in (4, 8, 16)]
    assert [p.state_bytes for p in growth.points] == want
    assert (per_token == 0) == (mixer == "mamba")
    assert growth.stopped is None and seen[-1] == (3, 3)


def test_lengths_beyond_the_budget_are_left_out_and_named():
    growth = measure_growth(
        model_of("attention"), Plain(), np.array([1], np.int32), [4, 8, 16], forbidden_ids=(),
        repeats=1, budget_s=3.9, progress=lambda done, total: None, clock=Clock([1.0, 2.0]),
    )  # fmt: skip
    assert [p.new_tokens for p in growth.points] == [4, 8]
    assert growth.stopped == "16 tokens would take about 4 s, more than 3.9 s"


def test_parallelism_is_time_saved():
    clock = Clock([2.0, 2.0, 2.0, 0.5, 0.5, 0.5])
    found = measure_parallelism(model_of("attention"), 16, causal=True, repeats=3, clock=clock)
    assert (found.together_ms, found.one_ms, found.factor) == (2000, 500, 4.0)


def test_windows_of_every_length_hold_the_same_text(data):
    starts = regions(data, 32, 5)
    ids = [data.test.tokens[s : s + 32] for s in starts]
    for length in (9, 17, 33):
        rows, num_bytes = windows_of(data, starts, 32, length)
        assert rows.shape == (5 * 32 // (length - 1), length)
        assert (rows[:, 0] == data.tokenizer.specials.bos).all()
        np.testing.assert_array_equal(rows[:, 1:].ravel(), np.concatenate(ids))
        assert num_bytes == 5 * 32  # one byte per token
    offsets = data.test.offsets
    document = np.searchsorted(offsets, starts, side="right")
    assert (document == np.searchsorted(offsets, starts + 31, side="right")).all()
    assert len(set(starts.tolist())) == 5
    with pytest.raises(DataError, match=r"only .* stretches of 10000000 tokens"):
        regions(data, 10_000_000, 1)
    with pytest.raises(ValueError, match="do not divide"):
        windows_of(data, starts, 32, 8)


def test_a_uniform_model_scores_the_same_at_every_length(data):
    model = model_of("attention", max_len=9)
    flat = model.with_params(jax.tree.map(lambda a: 0 * a, model.params))
    specials = SpecialIds(*data.tokenizer.specials)
    points = measure_long_context(
        flat, PARADIGMS["autoregressive"]().build(specials), data, [1, 2, 4], count=3, seed=0,
        progress=lambda done, total: None,
    )  # fmt: skip
    assert [(p.length, p.multiple) for p in points] == [(9, 1), (17, 2), (33, 4)]
    for point in points:
        assert point.bits_per_byte == pytest.approx(math.log2(260), rel=1e-6)
        assert point.bytes == 3 * 32


def test_memory_is_accounted_for_without_running():
    context = 4096
    attention = measure_memory(model_of("attention"), context, keeps_state=True)
    fixed, per_token, _ = state_bytes(model_of("attention"))
    assert attention.state_bytes == fixed + per_token * context
    assert attention.weight_bytes == 4 * model_of("attention").num_params()
    recurrent = measure_memory(model_of("mamba"), context, keeps_state=True)
    assert recurrent.state_bytes == state_bytes(model_of("mamba"))[0]
    canvas = measure_memory(model_of("attention"), context, keeps_state=False)
    assert canvas.state_bytes == 0 and canvas.call == "the whole canvas"
    if canvas.working_bytes is not None:
        assert canvas.working_bytes > 10 * (recurrent.working_bytes or 0)


def test_the_curve_is_read_at_equal_flops():
    points = [(1e3, 4.0), (1e5, 2.0)]
    assert at_flops(points, 1e4) == pytest.approx(3.0)
    assert at_flops(points, 1e5) == 2.0
    assert at_flops(points, 1e2) is None and at_flops(points, 1e6) is None
    assert at_flops([], 1.0) is None


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GrowthConfig, {"lengths": [8, 4]}, "want increasing positive numbers"),
        (GrowthConfig, {"lengths": [8]}, "at least 2"),
        (LongContextConfig, {"multiples": [1, 3, 4]}, "3 is no divisor of the largest, 4"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(kind, settings, message):
    with pytest.raises(ValidationError, match=message):
        kind.model_validate_json(json.dumps(settings))


def test_the_shipped_comparison_loads_and_wrong_tasks_are_named():
    path = Path(__file__).parents[2] / "configs" / "compare" / "paradigms.yaml"
    comparison = load_comparison(path)
    profile = comparison.config.profile
    assert set(profile.tasks) == {
        "recall", "needle", "chain_arithmetic", "star_graph", "obedience",
    }  # fmt: skip
    for entry in comparison.entries.values():
        assert set(entry.task_runs) == set(profile.tasks)
    with pytest.raises(ConfigError, match=r"task_runs.recal: no such task.*recall"):
        load_comparison(path, ["entries.mamba.task_runs.recal={}"])
    with pytest.raises(ConfigError, match="document needs a profile"):
        load_comparison(path, ["profile=null"])
    with pytest.raises(ConfigError, match=r"entries.transformer on task recall: .*learnig_rate"):
        load_comparison(
            path, ["profile.tasks.recall.run.training.optimizer.learnig_rate=1e-3"]
        )


LEVELS = {"transformer": (0.98, 0.41), "mamba": (0.30, 0.11), "masked_diffusion": (0.99, 0.5)}


def score(name, task, shares):
    """A score at a level as trained and at one beyond."""
    levels = [
        {
            "level": level, "row_tokens": level + 2, "trained": level == 4, "examples": 100,
            "exact": share, "exact_ci95": (max(share - 0.1, 0.0), min(share + 0.1, 1.0)),
            "token_accuracy": None, "chance": 0.125, "shortcut": 0.5, "solver": 1.0, "nfe": 4.0,
        }
        for level, share in zip((4, 16), shares, strict=True)
    ]  # fmt: skip
    return {
        "task": task, "level_field": "length", "levels": levels, "shortcut_name": "any arm",
        "split": "test", "seed": 0, "temperature": 0.0, "decoding": "plain",
        "decoding_options": {}, "steps_per_token": None, "source": {},
    }  # fmt: skip


@pytest.fixture(scope="module")
def results():
    """An invented comparison of three rows with profiles."""
    build = runpy.run_path(str(Path(__file__).parent / "synthetic_results.py"))["build"]
    plain = build().model_dump(mode="json")
    rows = []
    for row in plain["rows"]:
        if row["name"] not in LEVELS:
            continue
        fixed, per_token = row["state_bytes_fixed"], row["state_bytes_per_token"]
        power = 2.0 if row["paradigm"] == "masked_diffusion" else 1.0
        points = [
            {"new_tokens": n, "time_ms": n**power, "nfe": float(n),
             "state_bytes": int(fixed + per_token * (32 + n))}
            for n in (64, 128, 256)
        ]  # fmt: skip
        row["profile"] = {
            "parallelism": {
                "length": 256, "together_ms": 10.0, "one_ms": 1.0, "factor": 25.6,
            },
            "growth": {
                "prompt_length": 32, "points": points, "exponent": power, "exponent_tail": power,
                "calls_per_token": 1.0, "stopped": None,
            },
            "long_context": [
                {"length": 256, "multiple": 1.0, "bits_per_byte": 2.5, "bytes": 100},
                {"length": 4081, "multiple": 16.0, "bits_per_byte": 3.5, "bytes": 100},
            ],
            "tasks": {
                "star_graph": score(row["name"], "star_graph", LEVELS[row["name"]]),
                "obedience": score(row["name"], "constraint_drift", LEVELS[row["name"]]),
            },
        }  # fmt: skip
        rows.append(row)
    return Results.model_validate_json(json.dumps(plain | {"rows": rows}))


def test_the_page_says_what_the_figures_say(results):
    page = render_document(results, {})
    assert "| time to write n tokens | n^1.00 | n^1.00 | n^2.00 |" in page
    assert "| star graph | 98 % → 41 % | 30 % → 11 % | 99 % → 50 % |" in page
    assert "| state | grows 2 KiB per token | fixed 140 KiB | none |" in page
    assert page.count("exactly the bytes of that formula") == 2
    assert "rises to 3.500 at 4,081 (16 times)" in page
    assert "obeyed by distance in tokens 4: 98 %, 16: 41 % (chance 12 %)" in page
    assert "It does better than every autoregressive entry in" not in page  # 99 against 98 is not
    assert "last in star graph" in page
    assert not re.search(r"{{|{%|None", page)


def test_another_state_than_the_formula_is_said_to_be_one(results):
    row = results.rows[0]
    assert state_matches(row)
    growth = row.profile.growth
    wrong = growth.points[0].model_copy(update={"state_bytes": 1})
    growth = growth.model_copy(update={"points": [wrong, *growth.points[1:]]})
    row = row.model_copy(update={"profile": row.profile.model_copy(update={"growth": growth})})
    assert state_matches(row) is False
    page = render_document(results.model_copy(update={"rows": [row, *results.rows[1:]]}), {})
    assert "do NOT have the bytes of that formula" in page


def test_profile_plots_and_answers_are_in_the_report(results):
    plots = draw_plots(results)
    names = [plot.name for plot in plots]
    assert names[-3:] == ["profile_growth", "profile_long_context", "profile_tasks"]
    report = render_report(results, plots)
    assert "Questions people ask" in report and "What is best per training FLOP?" in report
    assert len(classic(results).lines) == 3
