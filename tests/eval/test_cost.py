"""The cost of small models: what is recorded, when it is measured, how it is shown."""

import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError
from genlab.eval.compare_config import load_comparison
from genlab.eval.cost import config as cost_config
from genlab.eval.cost import kernel_probes, launches
from genlab.eval.cost import machine as machine_module
from genlab.eval.cost.config import CostConfig, Machines, cost_from_config
from genlab.eval.cost.energy import Counter, EnergyMeter
from genlab.eval.cost.measure import measure_cost
from genlab.eval.cost.records import CostRecord, Machine
from genlab.eval.cost.tables import parts_table, phase_table, price_table, remarks
from genlab.eval.plots import draw_plots
from genlab.eval.report import render_report
from genlab.eval.results import Results
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.interface import SpecialIds
from genlab.paradigms.model import build_model
from genlab.paradigms.paradigm_registry import PARADIGMS

HERE = Path(__file__).parent
SPECIALS = SpecialIds(bos=0, eos=1, pad=2, mask=3)
PROMPTS = np.full((2, 5), 7, np.int32)


@pytest.fixture(scope="module")
def machine():
    """The figures of the formulas' tests."""
    made = runpy.run_path(str(HERE / "test_cost_formulas.py"))["machine"]
    return made(kernels=made().kernels | {"Mamba": made().kernels["Attention"]})


def tiny(pattern):
    """One layer of each mixer named."""
    layers = {
        "attention": {"mixer": {"name": "attention", "num_heads": 2}},
        "mamba": {"mixer": {"name": "mamba", "state_size": 4}},
    }
    config = {
        "width": 8, "pattern": pattern, "layers": {name: layers[name] for name in pattern},
        "max_len": 16, "vocab_size": 32,
    }  # fmt: skip
    return build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=0)


def decoding_of(paradigm):
    built = PARADIGMS[paradigm](name=paradigm).build(SPECIALS)
    return default_decoding(paradigm).build(SPECIALS, built)


class Ticks:
    """A clock and an energy counter that advance by one whenever they are read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def measured(model, paradigm, machine, **changes):
    arguments = {
        "prompts": PROMPTS, "new_tokens": 5, "devices": {}, "forbidden_ids": (0, 2, 3),
        "repeats": 1, "clock": Ticks(), "meter": EnergyMeter([], "none here"),
    }  # fmt: skip
    return measure_cost(model, decoding_of(paradigm), machine, **(arguments | changes))


def test_an_autoregressive_request_has_a_prefill_and_decode_steps(machine):
    model = tiny(["attention", "mamba"])
    record = measured(model, "autoregressive", machine)
    prefill, decode = record.phases
    assert (prefill.name, prefill.new_tokens, prefill.context) == ("prefill", 5, 0)
    assert (decode.name, decode.new_tokens, decode.context) == ("decode", 1, 5 + 5 // 2)
    # Each is timed once, a second long; four turns share the second.
    assert (prefill.measured_ms, decode.measured_ms) == (1e3, 1e3 / 4)
    whole = model.cost(2, 1, 7)
    assert decode.flops == whole.flops and decode.weight_bytes == whole.weight_bytes
    assert decode.state_bytes == whole.bytes_read + whole.bytes_written
    # A prompt's head works on its last token alone.
    head = 2 * 2 * 4 * model.config.width * model.config.padded_vocab_size
    assert prefill.flops == model.cost(2, 5, 0).flops - head
    for phase in record.phases:
        assert phase.predicted_ms == pytest.approx(sum(phase.parts_ms.values()))
        assert {"Attention", "Mamba", "head", "launches"} <= set(phase.parts_ms)
        assert phase.launches >= 1
        rate = phase.flops / (phase.measured_ms / 1e3)
        assert phase.mfu == pytest.approx(rate / machine.peak_flops_per_s)
        assert phase.mfu + phase.idle_share == pytest.approx(1.0)
        assert phase.roofline_fraction == pytest.approx(phase.roofline_ms / phase.measured_ms)
        assert phase.energy_joules is None
    assert record.energy_reason == "none here"
    one = model.cost(1, 1, 1)
    want = (one.weight_bytes - one.state_bytes_fixed) / one.state_bytes_per_token
    assert record.crossover_tokens == pytest.approx(max(0.0, want)) and not record.crossover_reason


def test_the_bytes_of_a_step_are_those_of_the_state_it_reads(machine):
    """Attention reads what its context wrote, a recurrence reads and writes all it has."""
    decode = measured(tiny(["mamba"]), "autoregressive", machine).phases[1]
    model = tiny(["mamba"])
    state = jax.tree.leaves(model.init_state(2, 16))
    counters = 3 * 4 * 2
    assert decode.state_bytes == 2 * (sum(a.nbytes for a in state) - counters)


def test_a_canvas_is_computed_whole_and_has_no_crossover(machine):
    record = measured(tiny(["attention"]), "masked_diffusion", machine)
    (canvas,) = record.phases
    assert (canvas.name, canvas.new_tokens, canvas.context) == ("canvas", 10, 0)
    assert record.crossover_tokens is None and "no state is kept" in record.crossover_reason


def test_energy_is_per_call(machine):
    meter = EnergyMeter([Counter(Ticks(), None)], "a counter")
    prefill, decode = measured(tiny(["mamba"]), "autoregressive", machine, meter=meter).phases
    assert (prefill.energy_joules, decode.energy_joules) == (1.0, 1 / 4)


def test_too_small_a_request_is_refused(machine):
    with pytest.raises(ValueError, match="new_tokens >= 2"):
        measured(tiny(["mamba"]), "autoregressive", machine, new_tokens=1)


@pytest.fixture
def small(monkeypatch):
    """Microbenchmarks of a few milliseconds."""
    monkeypatch.setattr(machine_module, "WIDTHS", (16,))
    monkeypatch.setattr(machine_module, "ROWS", (2,))
    monkeypatch.setattr(machine_module, "REPEATS", 1)
    monkeypatch.setattr(machine_module, "TURNS_S", 1e-4)
    probes = {name: kernel_probes.PROBES[name] for name in ("Attention", "other")}
    monkeypatch.setattr(machine_module, "PROBES", probes)


def test_a_machine_is_measured_in_any_dtype(small):
    seen = []
    found = machine_module.measure_machine(
        "bfloat16", largest_bytes=1 << 18, progress=lambda done, total: seen.append((done, total))
    )
    assert found.dtype == "bfloat16" and found.jax == jax.__version__
    assert set(found.kernels) == {"Attention", "other"}
    assert [p.working_set_bytes for p in found.bandwidth] == [1 << 18]
    assert seen[-1][0] == seen[-1][1]
    assert found.peak_flops_per_s > 0 and found.loop_launch_s >= 0


def test_probes_are_not_computed_before_their_loop():
    """What the loop repeats is the operation, not a copy of a value made once."""
    probe = kernel_probes.PROBES["Mamba"](np.float32).many
    once = jax.jit(probe.run).lower(probe.x, probe.held).compile().as_text()

    def loop(x, held, turns):
        def body(_, x):
            x, own = jax.lax.optimization_barrier((x, held))
            return probe.run(x, own)

        return jax.lax.fori_loop(0, turns, body, x)

    looped = jax.jit(loop).lower(probe.x, probe.held, np.int32(2)).compile().as_text()
    assert launches.count_launches(looped).each >= 0.8 * launches.count_launches(once).once


def test_the_machine_is_measured_once_a_folder(tmp_path, monkeypatch, machine):
    calls = []

    def measure(dtype, *, progress):
        calls.append(dtype)
        progress(1, 1)
        return machine

    monkeypatch.setattr(cost_config, "measure_machine", measure)
    seen = []
    first = Machines(tmp_path, lambda *progress: seen.append(progress))
    assert first.get("float32") == first.get("float32") == machine
    assert Machines(tmp_path, print).get("float32") == machine and calls == ["float32"]
    assert seen == [("machine", 1, 1)]
    (kept,) = tmp_path.glob("machine-*.json")
    kept.write_text("{}")
    assert Machines(tmp_path, print).get("float32") == machine and len(calls) == 2


def comparison_with(tmp_path, cost):
    text = json.dumps(
        {
            "title": "t", "out": "o", "cost": cost,
            "entries": {"transformer": {"run": {"extends": "transformer"}}},
            "latency": {"prompt_lengths": [32], "batches": [1]},
        }
    )  # fmt: skip
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_comparison(path)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ({"prompt_length": 400}, "cost needs prompt and new tokens of 432 together"),
        ({"new_token": 4}, "new_tokens"),
        ({"devices": "nowhere.yaml"}, "nowhere.yaml"),
        ({"new_tokens": 1}, "new_tokens"),
    ],
)
def test_a_cost_that_cannot_be_measured_is_refused_before_training(tmp_path, cost, said):
    with pytest.raises(ConfigError, match=said):
        comparison_with(tmp_path, cost)
    assert comparison_with(tmp_path, {"repeats": 2}).config.cost == CostConfig(repeats=2)


@pytest.fixture(scope="module")
def record(machine):
    """A record of real calls with the shipped prices."""
    config = CostConfig(prompt_length=5, new_tokens=3, batch=2, repeats=1)
    return cost_from_config(
        tiny(["attention"]), decoding_of("autoregressive"), config, machine,
        prompts=PROMPTS, forbidden_ids=(0, 2, 3),
    )  # fmt: skip


def test_the_report_shows_costs_where_there_are_some(record, machine):
    build = runpy.run_path(str(HERE / "synthetic_results.py"))["build"]
    results = build()
    assert 'id="cost"' not in render_report(results, [])
    rows = [row.model_copy(update={"cost": record}) for row in results.rows[:2]]
    results = results.model_copy(update={"rows": rows, "machines": {"float32": machine}})
    assert Results.model_validate_json(results.model_dump_json()) == results
    plots = [plot for plot in draw_plots(results) if plot.name == "cost_predicted"]
    assert len(plots) == 1 and plots[0].png.startswith(b"\x89PNG")
    text = render_report(results, plots)
    assert 'id="cost"' in text and "Predicted against measured" in text
    for cell in phase_table({"transformer": record}).lines[0]:
        assert cell in text
    for cell in price_table({"transformer": record}).lines[0]:
        assert cell in text
    for line in remarks({row.name: record for row in rows}):
        assert line in text
    shares = parts_table({"transformer": record})
    assert shares.columns[:2] == ["entry", "call"] and len(shares.lines) == 2


def test_the_record_survives_json(record):
    assert CostRecord.model_validate_json(record.model_dump_json()) == record
    names = {price.device for price in record.prices}
    assert {"cpu-2-cores", "h100-80gb"} <= names
    with pytest.raises(ValueError, match="flops_per_s"):
        Machine.model_validate_json("{}")


def test_the_command_plans_and_measures(genlab_cost, tmp_path, machine, monkeypatch):
    said = genlab_cost("transformer", "mamba", "masked_diffusion", "--plan", "--prompt", "64")
    for words in ("crossover tokens", "FLOP per call", "transformer", "masked_diffusion"):
        assert words in said
    monkeypatch.setattr(Machines, "get", lambda self, dtype: machine)
    out = tmp_path / "cost.json"
    small = ["model.width=16", "model.depth=1"]
    layers = 'model.layers={"mamba":{"mixer":{"name":"mamba","state_size":4}}}'
    said = genlab_cost(
        "mamba", *small, layers, "--prompt", "4", "--new", "3", "--repeats", "1", "--out", str(out)
    )
    assert "predicted ms" in said and "$ per M" in said
    held = json.loads(out.read_text())
    assert CostRecord.model_validate_json(json.dumps(held["mamba"])).phases[0].name == "prefill"


def test_a_mixer_without_microbenchmark_is_named(machine):
    bare = machine.model_copy(update={"kernels": {"other": machine.kernels["other"]}})
    record = measured(tiny(["mamba"]), "autoregressive", bare)
    assert record.unprobed == ["Mamba"]
    assert "Mamba has no microbenchmark" in " ".join(remarks({"x": record}))
    assert measured(tiny(["mamba"]), "autoregressive", machine).unprobed == []


def test_the_command_refuses_what_cannot_be(genlab_cost, tmp_path):
    with pytest.raises(ConfigError, match="--repeats is of measuring"):
        genlab_cost("transformer", "--plan", "--repeats", "3")
    twin = tmp_path / "transformer.yaml"
    twin.write_text("extends: transformer\n")
    with pytest.raises(ConfigError, match="two configurations are called 'transformer'"):
        genlab_cost("transformer", str(twin), "--plan")
    with pytest.raises(CapacityError, match=r"model\.max_len=632"):
        genlab_cost("transformer", "--prompt", "600")
    with pytest.raises(ConfigError, match="at least one configuration"):
        genlab_cost("model.width=8")
    with pytest.raises(ConfigError, match="transformer"):
        genlab_cost("transfomer")


@pytest.fixture
def genlab_cost():
    """Runs `genlab cost` in this process; returns what it prints."""
    import typer
    from genlab.eval.cli_cost import cost_command
    from typer.testing import CliRunner

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("cost")(cost_command)
    app.command("other")(lambda: None)

    def run(*words):
        result = CliRunner().invoke(app, ["cost", *words], env={"COLUMNS": "160"})
        if result.exception is not None:
            raise result.exception
        return result.output

    return run
