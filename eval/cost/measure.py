"""Predicts and measures the phases of a request with one model on this machine."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ...paradigms.context import Context
from ...paradigms.decoding.loop import _advance, advance
from ...paradigms.decoding.sampling import make_sampling
from ...paradigms.decoding.state import DecodeState, Decoding, raise_failures
from ...paradigms.interface import Cost
from ...paradigms.model import Model
from ..statistics import median
from .arithmetic import bandwidth_at, crossover_context, matmul_rate, roofline_s
from .devices import Device, prices
from .energy import EnergyMeter, find_meter
from .kernel_probes import OTHER
from .launches import count_launches
from .records import CostRecord, Machine, Phase


class Prediction(NamedTuple):
    """Predicted seconds of a call.

    Attributes:
        parts_s: by part of the model, and "launches".
        roofline_s: the lower limit from peak compute and bandwidth.
    """

    parts_s: dict[str, float]
    roofline_s: float

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts_s.values())


def predict(
    parts: dict[str, Cost],
    machine: Machine,
    *,
    tokens: int,
    width: int,
    launches: float,
    loop: bool,
) -> Prediction:
    """Predicts a call's time from its cost by the equations and the machine's microbenchmarks.

    Every part takes its matrix products at the speed of such shapes, or its weights at the
    bandwidth of the working set, whichever takes longer; then what mixes time, at its kernel's
    speed. One new token per row reads its state at the speed of its kernel's one-token form.

    Args:
        parts: from `Model.cost_parts`.
        machine: from `measure_machine`.
        tokens: of the call, all rows together.
        width: of the model.
        launches: operations that the program starts.
        loop: the call runs inside a compiled loop.
    """
    total = sum(parts.values(), Cost(0.0, 0.0, 0.0, 0.0))
    moved = total.weight_bytes + total.bytes_read + total.bytes_written
    bandwidth = bandwidth_at(machine, moved)
    rate = matmul_rate(machine, tokens, width, loop=loop)
    parts_s = {}
    for name, cost in parts.items():
        # A part's bandwidth is that of the whole: a step goes through all of it once.
        seconds = max((cost.flops - cost.mixing_flops) / rate, cost.weight_bytes / bandwidth)
        if cost.mixing_flops:
            kernel = machine.kernels.get(name, machine.kernels[OTHER])
            speed = kernel.loop_flops_per_s if loop else kernel.flops_per_s
            by_state = cost.bytes_read + cost.bytes_written
            if cost.bytes_read and kernel.state_bytes_per_s is not None:
                seconds += by_state / kernel.state_bytes_per_s
            else:
                seconds += cost.mixing_flops / speed
        parts_s[name] = seconds
    starting = machine.loop_launch_s if loop else machine.launch_s
    parts_s["launches"] = launches * starting + (0.0 if loop else machine.call_s)
    return Prediction(parts_s, roofline_s(total.flops, moved, machine.peak_flops_per_s, bandwidth))


def measure_cost(
    model: Model,
    decoding: Decoding,
    machine: Machine,
    *,
    prompts: NDArray[np.int32],
    new_tokens: int,
    devices: dict[str, Device],
    forbidden_ids: Sequence[int] = (),
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    meter: EnergyMeter | None = None,
) -> CostRecord:
    """Measures a request's phases and sets them beside what the equations predict.

    Args:
        model: ready to compute.
        decoding: how to run it.
        machine: from `measure_machine`, in the model's dtype.
        prompts: int32 (B T), BOS included.
        new_tokens: per row, at least 2.
        devices: the price table.
        forbidden_ids: never drawn.
        repeats: timed requests after the warm-up.
        clock: seconds.
        meter: of energy; the device's own when None.

    Raises:
        ValueError: fewer than two new tokens or one repeat.
    """
    if new_tokens < 2 or repeats < 1:
        raise ValueError(f"want new_tokens >= 2 and repeats >= 1, got {new_tokens}, {repeats}")
    meter = find_meter() if meter is None else meter
    batch, prompt_length = prompts.shape
    room = prompt_length + new_tokens
    steps = new_tokens if decoding.uses_steps else 0
    sampling = make_sampling(
        batch,
        vocab_size=model.config.padded_vocab_size,
        steps=steps,
        forbidden_ids=forbidden_ids,
    )

    def start() -> DecodeState:
        return jax.block_until_ready(
            decoding.start(
                model,
                prompts,
                sampling=sampling,
                seeds=np.arange(batch, dtype=np.int32),
                max_new=np.full((batch,), new_tokens, np.int32),
                max_len=room,
            )
        )

    turns = new_tokens - 1
    state = jax.block_until_ready(advance(model, decoding, start(), turns))
    raise_failures(state)
    prefill = _prefill(model, batch, prompt_length, room) if decoding.keeps_state else None
    if prefill is not None:
        jax.block_until_ready(prefill(model, prompts))
    prefills, steps_taken = [], []
    for _ in range(repeats):
        if prefill is not None:
            prefills.append(_timed(lambda: prefill(model, prompts), clock, meter))
        state = start()
        steps_taken.append(
            _timed(lambda state=state: advance(model, decoding, state, turns), clock, meter, turns)
        )
    text = _advance.lower(model, start(), np.int32(1), decoding=decoding).compile().as_text()
    each = count_launches(text).each

    def phase(
        name: str, tokens: int, context: int, logits: int, launches: float, runs: list[_Run]
    ) -> Phase:
        parts = model.cost_parts(batch, tokens, context, logits=logits)
        return _phase(model, machine, name, batch, tokens, context, parts, launches, runs)

    if prefill is not None:
        once = count_launches(prefill.as_text()).once
        phases = [
            phase("prefill", prompt_length, 0, 1, once, prefills),
            phase("decode", 1, prompt_length + new_tokens // 2, 1, each, steps_taken),
        ]
    else:
        phases = [phase("canvas", room, 0, room, each, steps_taken)]
    crossover, reason = None, "no state is kept: every call computes all tokens anew"
    if decoding.keeps_state:
        cost = model.cost(1, 1, 1)
        crossover = crossover_context(
            cost.weight_bytes, cost.state_bytes_per_token, 1, cost.state_bytes_fixed
        )
        reason = None if crossover is not None else "the state does not grow with the context"
    return CostRecord(
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        batch=batch,
        phases=phases,
        crossover_tokens=crossover,
        crossover_reason=reason,
        energy_reason=meter.reason,
        prices=prices(devices, phases, prompt_length, new_tokens),
        unprobed=[
            name
            for name, part in model.cost_parts(1, 1, 0, logits=1).items()
            if part.mixing_flops and name not in machine.kernels
        ],
    )


class _Run(NamedTuple):
    seconds: float
    joules: float | None


def _timed(
    call: Callable[[], Any], clock: Callable[[], float], meter: EnergyMeter, turns: int = 1
) -> _Run:
    energy, begin = meter.now(), clock()
    jax.block_until_ready(call())
    seconds = clock() - begin
    joules = meter.joules_since(energy)
    return _Run(seconds / turns, None if joules is None else joules / turns)


def _prefill(model: Model, batch: int, length: int, room: int) -> Any:
    """The compiled call that takes a prompt in and gives the logits after it."""

    def call(model: Model, tokens: jax.Array) -> Any:
        out, state = model(tokens, model.init_state(batch, room), ctx=Context(history=False))
        return model.head(out.hidden[:, -1]), state

    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    return jax.jit(call).lower(model, tokens).compile()


def _phase(
    model: Model,
    machine: Machine,
    name: str,
    batch: int,
    tokens: int,
    context: int,
    parts: dict[str, Cost],
    launches: float,
    runs: list[_Run],
) -> Phase:
    total = sum(parts.values(), Cost(0.0, 0.0, 0.0, 0.0))
    predicted = predict(
        parts,
        machine,
        tokens=batch * tokens,
        width=model.config.width,
        launches=launches,
        loop=name != "prefill",
    )
    seconds = median([run.seconds for run in runs])
    joules = [run.joules for run in runs if run.joules is not None]
    state_bytes = total.bytes_read + total.bytes_written
    mfu = total.flops / seconds / machine.peak_flops_per_s
    return Phase(
        name=name,
        batch=batch,
        new_tokens=tokens,
        context=context,
        flops=total.flops,
        weight_bytes=total.weight_bytes,
        state_bytes=state_bytes,
        intensity_flops_per_byte=total.flops / (total.weight_bytes + state_bytes),
        launches=launches,
        parts_ms={part: 1e3 * value for part, value in predicted.parts_s.items()},
        predicted_ms=1e3 * predicted.seconds,
        measured_ms=1e3 * seconds,
        roofline_ms=1e3 * predicted.roofline_s,
        roofline_fraction=predicted.roofline_s / seconds,
        mfu=mfu,
        idle_share=1.0 - mfu,
        energy_joules=median(joules) if len(joules) == len(runs) else None,
    )
