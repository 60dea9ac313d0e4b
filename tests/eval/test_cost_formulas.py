"""The cost model's closed formulas, its counting of operations, counters and prices."""

import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.eval.cost import energy
from genlab.eval.cost.arithmetic import (
    bandwidth_at,
    between,
    crossover_context,
    kv_bytes_per_token,
    matmul_rate,
    roofline_s,
    usd_per_million,
)
from genlab.eval.cost.devices import DEVICES, load_devices, prices
from genlab.eval.cost.energy import find_meter
from genlab.eval.cost.launches import count_launches
from genlab.eval.cost.measure import predict
from genlab.eval.cost.records import BandwidthPoint, KernelRate, Machine, MatmulPoint, Phase
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.interface import Cost
from genlab.paradigms.model import abstract_model


def machine(**changes):
    """A machine with round figures."""
    figures = {
        "device": "cpu: test", "jax": "0", "dtype": "float32", "peak_flops_per_s": 1e12,
        "bandwidth": [
            BandwidthPoint(working_set_bytes=1000, bytes_per_s=1e9),
            BandwidthPoint(working_set_bytes=100_000, bytes_per_s=1e7),
        ],
        "matmul": [
            MatmulPoint(rows=r, width=w, flops_per_s=r * 1e9, loop_flops_per_s=w * 1e8)
            for r in (1, 100) for w in (10, 1000)
        ],
        "kernels": {
            "Attention": KernelRate(
                flops_per_s=1e8, loop_flops_per_s=1e7, state_bytes_per_s=1e6
            ),
            "other": KernelRate(flops_per_s=1e5, loop_flops_per_s=1e4),
        },
        "loop_launch_s": 1e-6, "launch_s": 2e-6, "call_s": 5e-5,
    }  # fmt: skip
    return Machine(**(figures | changes))


@pytest.mark.parametrize(
    ("weights", "layers", "kv_heads", "head_dim", "tokens"),
    [(26e9, 40, 40, 128, 31.7e3), (14e9, 32, 32, 128, 26.7e3), (16e9, 32, 8, 128, 122e3)],
)
def test_the_published_crossovers(weights, layers, kv_heads, head_dim, tokens):
    per_token = kv_bytes_per_token(layers, kv_heads, head_dim, 2)
    found = crossover_context(weights, per_token)
    assert found == pytest.approx(tokens, rel=3e-3)
    assert crossover_context(weights, per_token, batch=8) == pytest.approx(found / 8)


def test_the_crossover_of_a_13b_model_follows_from_its_configuration():
    layer = {
        "mixer": {"name": "attention", "num_heads": 40},
        "mlp": {"name": "swiglu", "width": 13824},
    }
    config = {
        "width": 5120, "depth": 40, "pattern": ["a"], "layers": {"a": layer}, "max_len": 4096,
        "vocab_size": 32000,
    }  # fmt: skip
    model = abstract_model(ModelConfig.model_validate_json(json.dumps(config)))
    model = jax.eval_shape(lambda m: m.prepare(jnp.bfloat16), model)
    cost = model.cost(1, 1, 1000)
    assert model.num_params() == pytest.approx(13e9, rel=0.015)  # here the head is tied
    found = crossover_context(cost.weight_bytes, cost.state_bytes_per_token)
    assert found == pytest.approx(31.7e3, rel=0.02)
    # Reading is what overtakes: at that context the state that is read equals the weights.
    there = model.cost(1, 1, round(found))
    assert there.bytes_read == pytest.approx(there.weight_bytes, rel=1e-3)


def test_a_fixed_state_never_overtakes_and_a_large_one_always_has():
    assert crossover_context(1e6, 0.0, state_bytes_fixed=10) is None
    assert crossover_context(1e6, 10.0, state_bytes_fixed=2e6) == 0.0
    assert crossover_context(1e6, 10.0, batch=2, state_bytes_fixed=1e5) == 8e5 / 20


def test_between_measured_points_lines_are_straight_in_logarithms():
    points = [(100.0, 10.0), (1.0, 1000.0)]
    assert [between(points, x) for x in (0.1, 1, 10, 100, 1e6)] == pytest.approx(
        [1000, 1000, 100, 10, 10]
    )
    assert bandwidth_at(machine(), 10_000) == pytest.approx(1e8)
    assert matmul_rate(machine(), 10, 100, loop=False) == pytest.approx(1e10)
    assert matmul_rate(machine(), 10, 100, loop=True) == pytest.approx(1e10)
    assert matmul_rate(machine(), 10, 10, loop=True) == pytest.approx(1e9)


def test_the_roofline_is_the_slower_of_the_two():
    assert roofline_s(100, 10, 10, 10) == 10
    assert roofline_s(10, 100, 10, 10) == 10


def test_a_prediction_is_the_sum_of_what_the_equations_ask_for():
    parts = {
        "Attention": Cost(3e6, 4e4, 0.0, 0.0, 2e4, mixing_flops=1e6, bytes_written=1e4),
        "Unheard": Cost(5e5, 0.0, 0.0, 0.0, 1e3, mixing_flops=5e5),
        "head": Cost(1e3, 0.0, 0.0, 0.0, 3e4),
    }
    known = machine()
    moved = 2e4 + 1e3 + 3e4 + 4e4 + 1e4
    speed, rate = bandwidth_at(known, moved), matmul_rate(known, 8, 64, loop=True)
    step = predict(parts, known, tokens=8, width=64, launches=7, loop=True)
    assert step.parts_s == pytest.approx(
        {
            "Attention": max(2e6 / rate, 2e4 / speed) + 5e4 / 1e6,
            "Unheard": 1e3 / speed + 5e5 / 1e4,
            "head": 3e4 / speed,
            "launches": 7e-6,
        }
    )
    assert step.seconds == pytest.approx(sum(step.parts_s.values()))
    assert step.roofline_s == pytest.approx(max((3e6 + 5e5 + 1e3) / 1e12, moved / speed))
    prompt = {"Attention": parts["Attention"]._replace(bytes_read=0.0)}
    call = predict(prompt, known, tokens=8, width=64, launches=7, loop=False)
    rate = matmul_rate(known, 8, 64, loop=False)
    first = max(2e6 / rate, 2e4 / bandwidth_at(known, 3e4)) + 1e6 / 1e8
    assert call.parts_s == pytest.approx({"Attention": first, "launches": 14e-6 + 5e-5})


PROGRAM = """HloModule test

%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %a = f32[4]{0} get-tuple-element(%p), index=1
  %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%fused
  %c = f32[4]{0} copy(%b)
  ROOT %t = (s32[], f32[4]{0}) tuple(%a, %c)
}

%inner_condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %l = pred[] compare(%p, %p), direction=LT
}

%left (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

%right (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %m = f32[4]{0} negate(%p)
  ROOT %n = f32[4]{0} negate(%m)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %w = (s32[], f32[4]{0}) while(%p), condition=%inner_condition, body=%inner, TRIPS
  %x = f32[4]{0} get-tuple-element(%w), index=1
  %d = f32[4]{0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %k = f32[4]{0} conditional(%d, %x, %x), branch_computations={%left, %right}
  %z = f32[4]{0} call(%k), to_apply=%left
  ROOT %t = (s32[], f32[4]{0}) tuple(%z, %z)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %s = f32[4]{0} sine(%x)
  %w = (s32[], f32[4]{0}) while(%s), condition=%inner_condition, body=%body
  ROOT %r = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def test_operations_are_counted_with_the_turns_of_their_loops():
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    found = count_launches(PROGRAM.replace("TRIPS", trips))
    assert found.once == 1
    # Five turns of a fusion, a copy and a comparison; the conditional and its longer branch; the
    # call's one; the loop's own comparison. The product counts with its own speed.
    assert found.each == 5 * 3 + (1 + 2) + 1 + 1


def test_a_compiled_loop_counts_what_its_turn_starts():
    def chain(x, n):
        def body(_, x):
            return x - jnp.max(x * 2)

        return jax.lax.fori_loop(0, n, body, x)

    text = jax.jit(chain).lower(jnp.ones(16), np.int32(3)).compile().as_text()
    assert 1 <= count_launches(text).each <= 8
    with pytest.raises(ValueError, match="entry"):
        count_launches("nothing")


def write_counter(folder, name, value, limit=1_000_000_000):
    (folder / name).mkdir()
    (folder / name / "energy_uj").write_text(f"{value}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{limit}\n")


def test_energy_comes_from_the_packages_and_survives_the_counters_end(tmp_path):
    write_counter(tmp_path, "intel-rapl:0", 999_000_000)
    write_counter(tmp_path, "intel-rapl:0:0", 5)  # a part of package 0
    write_counter(tmp_path, "intel-rapl:1", 1_000_000)
    meter = find_meter(powercap=tmp_path)
    before = meter.now()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("2000000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("1500000")
    assert meter.joules_since(before) == pytest.approx(1 + 2 + 0.5)
    assert "RAPL, 2 package(s)" in meter.reason


def test_no_counter_is_no_energy_with_a_reason(tmp_path):
    meter = find_meter(powercap=tmp_path)
    assert meter.joules_since(meter.now()) is None and "no RAPL counter" in meter.reason
    (tmp_path / "intel-rapl:0").mkdir()
    assert "cannot be read" in find_meter(powercap=tmp_path).reason


def test_nvml_counts_the_gpu_and_its_absence_is_said(monkeypatch):
    device = types.SimpleNamespace(platform="gpu", local_hardware_id=0)
    monkeypatch.setattr(energy.jax, "devices", lambda: [device])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in find_meter().reason
    used = iter([0, 1000, 4500])
    fake = types.SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(used),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    meter = find_meter()
    assert meter.joules_since(meter.now()) == 3.5


def phase(name, milliseconds, **changes):
    figures = dict.fromkeys(Phase.model_fields, 1.0) | {
        "name": name, "batch": 1, "new_tokens": 1, "context": 0, "parts_ms": {},
        "measured_ms": milliseconds, "energy_joules": None,
    }  # fmt: skip
    return Phase(**(figures | changes))


def test_prices_follow_from_seconds():
    table = load_devices(DEVICES)
    assert all(device.about for device in table.values())
    phases = [
        phase("prefill", 200.0, batch=2, flops=989e9, weight_bytes=0.0, state_bytes=0.0),
        phase("decode", 50.0, batch=2, flops=0.0, weight_bytes=3.35e9, state_bytes=3.35e9),
    ]
    found = {p.device: p for p in prices(table, phases, prompt_length=10, new_tokens=30)}
    here, there = found["cpu-2-cores"], found["h100-80gb"]
    hourly = table["cpu-2-cores"].price_usd_per_hour
    assert here.basis == "measured here" and there.basis == "roofline"
    assert here.usd_per_million_input_tokens == pytest.approx(1e6 * 0.2 / 20 * hourly / 3600)
    assert here.usd_per_million_output_tokens == pytest.approx(1e6 * 0.05 / 2 * hourly / 3600)
    assert here.usd_per_request == pytest.approx((0.2 + 30 * 0.05) / 2 * hourly / 3600)
    assert there.usd_per_million_output_tokens == pytest.approx(usd_per_million(2e-3 / 2, 2.69))
    assert there.usd_per_million_input_tokens == pytest.approx(usd_per_million(1e-3 / 20, 2.69))
    assert math.isclose(usd_per_million(1.0, 3600.0), 1e6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: {price_usd_per_hour: 1, about: a, flops: 1}", "flops"),
        ("x: {price_usd_per_hour: 1, about: a, flops_per_s: 1}", "belong together"),
        ("x: {price_usd_per_hour: -1, about: a}", "price_usd_per_hour"),
        ("x: {about: a}", "price_usd_per_hour"),
    ],
)
def test_a_faulty_price_table_names_its_place(tmp_path, text, said):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as fault:
        load_devices(path)
    assert "prices.yaml: x" in str(fault.value)
