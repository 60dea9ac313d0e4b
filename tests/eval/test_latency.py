"""Latency records: what is counted, on a clock that the test moves."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError, GenlabError
from genlab.eval import latency as module
from genlab.eval.latency import measure_latency, state_bytes
from genlab.eval.results import Row
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.plain import Plain
from genlab.paradigms.decoding.unmasking import Unmasking
from genlab.paradigms.model import abstract_model, build_model

SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]
START_S, STEP_S, COMPILE_S = 0.5, 0.01, 3.0


class Clock:
    """Time that passes only when a decoding starts or steps."""

    def __init__(self, monkeypatch):
        self.now, self.compiled = 0.0, False
        real = module.advance

        def advance(model, decoding, state, n):
            before = int(jnp.max(state.nfe))
            state = real(model, decoding, state, n)
            self.now += STEP_S * (int(jnp.max(state.nfe)) - before)
            return state

        monkeypatch.setattr(module, "advance", advance)

    def __call__(self):
        return self.now

    def on(self, decoding):
        """The decoding, with a start that takes time."""
        clock = self

        class Slow:
            def __getattr__(self, name):
                return getattr(decoding, name)

            def start(self, *args, **kwargs):
                clock.now += START_S + (0.0 if clock.compiled else COMPILE_S)
                clock.compiled = True
                return decoding.start(*args, **kwargs)

            # Static in jit, like the decoding itself.
            def __hash__(self):
                return hash(decoding)

            def __eq__(self, other):
                return type(other) is type(self)

        return Slow()


PROMPTS = np.array([[9, 0, 1], [9, 1, 2]], np.int32)


def test_autoregression_is_timed_in_parts(monkeypatch):
    clock = Clock(monkeypatch)
    model = ScriptedModel(jnp.full((2, 12), 4, jnp.int32), 10)
    record = measure_latency(
        model, clock.on(Plain()), prompts=PROMPTS, new_tokens=8, repeats=3, clock=clock
    )
    assert (record.batch, record.prompt_length, record.new_tokens) == (2, 3, 8)
    assert record.ttft_ms == pytest.approx(1e3 * START_S)
    # The first token belongs to start: seven steps, and no step has the time of the start.
    assert record.step_ms_p50 == record.step_ms_p90 == pytest.approx(1e3 * STEP_S)
    assert record.tokens_per_s == pytest.approx(2 * 8 / (START_S + 7 * STEP_S))
    assert record.tokens_per_call == 1.0
    assert record.compile_s == pytest.approx(COMPILE_S)


def test_one_token_has_no_step(monkeypatch):
    clock = Clock(monkeypatch)
    model = ScriptedModel(jnp.full((2, 12), 4, jnp.int32), 10)
    record = measure_latency(
        model, clock.on(Plain()), prompts=PROMPTS, new_tokens=1, repeats=1, clock=clock
    )
    assert record.step_ms_p50 is None and record.step_ms_p90 is None
    assert record.tokens_per_s == pytest.approx(2 / START_S)


@pytest.fixture(scope="module")
def denoiser():
    """A small bidirectional model."""
    config = {
        "width": 8,
        "pattern": ["a"],
        "layers": {"a": {"mixer": {"name": "attention", "num_heads": 2}}},
        "max_len": 64,
        "vocab_size": 10,
    }
    return build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=0)


@pytest.mark.parametrize(
    ("order", "block_length", "calls_to_first"),
    [("random", None, 4), ("left_to_right", None, 1), ("random", 4, 2), ("confidence", 8, 4)],
)
def test_the_first_output_of_a_canvas(monkeypatch, denoiser, order, block_length, calls_to_first):
    clock = Clock(monkeypatch)
    decoding = Unmasking(8, order=order, block_length=block_length)
    record = measure_latency(
        denoiser,
        clock.on(decoding),
        prompts=np.zeros((2, 3), np.int32),
        new_tokens=8,
        steps=4,
        forbidden_ids=(8, 9),
        repeats=2,
        clock=clock,
    )
    assert record.ttft_ms == pytest.approx(1e3 * (START_S + calls_to_first * STEP_S))
    assert record.step_ms_p50 == pytest.approx(1e3 * STEP_S)
    assert record.tokens_per_s == pytest.approx(2 * 8 / (START_S + 4 * STEP_S))
    assert record.tokens_per_call == 2.0


def test_real_time_passes(denoiser):
    record = measure_latency(
        denoiser, Plain(), prompts=np.zeros((1, 4), np.int32), new_tokens=4, repeats=2
    )
    assert 0 < record.ttft_ms and 0 < record.step_ms_p50 <= record.step_ms_p90
    assert record.compile_s > 0


def test_bad_requests_are_refused(denoiser):
    prompts = np.zeros((1, 60), np.int32)
    with pytest.raises(CapacityError, match="60 tokens and max_new=5 need 65"):
        measure_latency(denoiser, Plain(), prompts=prompts, new_tokens=5)
    with pytest.raises(ConfigError, match="steps: got 3"):
        measure_latency(denoiser, Plain(), prompts=prompts, new_tokens=4, steps=3)
    with pytest.raises(ValueError, match="repeats: got 0"):
        measure_latency(denoiser, Plain(), prompts=prompts, new_tokens=4, repeats=0)
    broken = ScriptedModel(jnp.full((2, 12), -1, jnp.int32), 10)
    with pytest.raises(GenlabError, match="non-finite"):
        measure_latency(broken, Plain(), prompts=PROMPTS, new_tokens=4)


LAYERS = {
    "a": {"mixer": {"name": "attention", "num_heads": 4, "num_kv_heads": 2}},
    "w": {"mixer": {"name": "attention", "num_heads": 4, "window": 6}},
    "m": {"mixer": {"name": "mamba", "state_size": 4}},
}
KV = 2 * 2 * 4 * 4 + 2 * 4  # keys and values of 2 heads of 4, float32; order and document


@pytest.mark.parametrize(
    ("pattern", "per_token"), [("a", KV), ("aa", 2 * KV), ("w", 0), ("m", 0), ("awm", KV)]
)
def test_state_bytes_are_those_of_the_arrays(pattern, per_token):
    config = {
        "width": 16,
        "pattern": list(pattern),
        "layers": {name: LAYERS[name] for name in set(pattern)},
        "max_len": 64,
        "vocab_size": 10,
    }
    model = abstract_model(ModelConfig.model_validate_json(json.dumps(config)))
    fixed, slope, windows = state_bytes(model)
    assert slope == per_token
    row = Row.model_construct(
        state_bytes_fixed=fixed, state_bytes_per_token=slope, state_windows=windows
    )
    for max_len in (2, 10, 33):
        state = model.init_state(1, max_len)
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert held == row.state_bytes_at(max_len) == model.cost(1, 1, 0).state_bytes_at(max_len)
    assert fixed >= 12 + (0 if pattern.startswith("a") else 4)
