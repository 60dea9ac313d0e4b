"""One prepared run for a GPU: kernels against the reference, then timings, as one table.

    python -m genlab.eval.benchmarks.gpu [--budget-s 480] [--json FILE] [--small]

Order: what the chip can do (bandwidth, matrix products), whether every kernel that runs here equals
the reference, how fast kernels are beside peers that are installed, and prefill and decode of whole
models with MFU, share of the bandwidth and the idle share of compute that follows. What the budget
leaves no time for is named at the end, never guessed.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...kernels.dispatch import KernelArgumentError
from ..cost.records import BandwidthPoint, KernelRate, Machine, MatmulPoint
from .alternate import take_turns
from .kernels import KERNELS, implementations_of, kernel_floor, make_call, prepare_kernel
from .model_shapes import shape_of
from .models import Case, floor_of, max_len_of, prepare
from .peer_process import PEERS, Peer, PeerRefused

# What users of these kernels run: a 7B-class model's attention, Mamba-2.8B, Mamba-2 2.7B's class.
SPEED = (
    ("attention", "7b_prefill"),
    ("attention", "8b_decode"),
    ("paged_attention", "8b_decode"),
    ("selective_scan", "mamba_2_8b"),
    ("ssd", "mamba2_140m"),
    ("grouped_matmul", "moe_134m_decode"),
    ("cross_entropy", "transformer_134m"),
)
MODELS = ("transformer_134m", "mamba2_140m", "mamba_115m", "transformer_1b", "mamba2_1b")
BATCHES = (1, 8, 64)
TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}  # of the largest value


class Clock:
    """How much of the budget is left, and what fell to its end."""

    def __init__(self, budget_s: float):
        """Starts now."""
        self.end, self.left_out = time.perf_counter() + budget_s, []

    def allows(self, what: str, needed_s: float) -> bool:
        """False, and a note, when so many seconds are not left."""
        if time.perf_counter() + needed_s < self.end:
            return True
        self.left_out.append(what)
        return False


def limits(dtype: str, small: bool) -> Machine:
    """Bandwidth of reading large arrays and speed of large products on the default device."""
    size, width = (1 << 22, 256) if small else (1 << 30, 8192)
    x = jnp.ones((size // jnp.dtype(dtype).itemsize,), dtype)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    bytes_per_s = x.nbytes / _least(lambda: total(x))
    a = jnp.ones((width, width), dtype)
    product = jax.jit(lambda a: a @ a)
    flops_per_s = 2 * width**3 / _least(lambda: product(a))
    device = jax.devices()[0]
    return Machine(
        device=f"{device.platform}: {device.device_kind}",
        jax=jax.__version__,
        dtype=dtype,
        peak_flops_per_s=flops_per_s,
        bandwidth=[BandwidthPoint(working_set_bytes=x.nbytes, bytes_per_s=bytes_per_s)],
        matmul=[
            MatmulPoint(
                rows=width, width=width, flops_per_s=flops_per_s, loop_flops_per_s=flops_per_s
            )
        ],
        kernels={"other": KernelRate(flops_per_s=flops_per_s, loop_flops_per_s=flops_per_s)},
        loop_launch_s=0.0,
        launch_s=0.0,
        call_s=0.0,
    )


def _least(call: Callable[[], Any], repeats: int = 10) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return min(times)


def check(op: str, dtype: str) -> list[dict]:
    """Every implementation against the reference: output and gradients, on the op's tiny shape.

    Returns:
        Records with `difference`, the largest over the largest value of the reference, and `right`.
    """
    shape = "tiny" if "tiny" in KERNELS[op].shapes else KERNELS[op].default[0]
    call = make_call(op, shape, dtype)

    def both(implementation: str) -> Any:
        def function(arrays: dict) -> Any:
            run = functools.partial(call.run, implementation=implementation)
            if "forward_backward" not in KERNELS[op].directions:
                return run(arrays)
            y, back = jax.vjp(run, arrays)
            cotangent = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return y, back(cotangent.astype(y.dtype))

        return jax.jit(function)(call.arrays)

    want = jax.tree.leaves(both("reference"))
    found = []
    for name in implementations_of(op):
        about = {"kind": "check", "op": op, "shape": shape, "dtype": dtype, "implementation": name}
        try:
            got = jax.tree.leaves(both(name))
        except KernelArgumentError as error:
            found.append(about | {"refused": str(error)})
            continue
        except Exception as error:  # a compiler's refusal must not end the whole run
            said = f"{type(error).__name__}: {error}"[:300]
            found.append(about | {"right": False, "failed": said})
            continue
        difference = max(_difference(g, w) for g, w in zip(got, want, strict=True))
        right = bool(difference <= TOLERANCE[dtype])
        found.append(about | {"difference": difference, "right": right})
    return found


def _difference(got: jax.Array, want: jax.Array) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))


def kernel_speed(
    op: str, shape: str, dtype: str, direction: str, machine: Machine, peers: Sequence[str]
) -> list[dict]:
    """All implementations and the peers of one kernel, in turns."""
    call = make_call(op, shape, dtype)
    subjects: list[Any] = []
    for name in implementations_of(op):
        try:
            subjects.append(prepare_kernel(call, name, direction, name).subject)
        except Exception as error:  # refusals, compilers' among them, are told by `check`
            if not isinstance(error, KernelArgumentError):
                print(f"{op} {shape} {name}: {type(error).__name__}", flush=True)
    sizes = KERNELS[op].shapes[shape]._asdict()
    running = []
    for peer in peers:
        case = {"op": op, "sizes": sizes, "dtype": dtype, "direction": direction}
        try:
            running.append(Peer(peer, case))
        except PeerRefused as error:
            print(f"{op} {shape}: {error}", flush=True)
    try:
        times = take_turns([*subjects, *running], 10)
    finally:
        for peer in running:
            peer.close()
    floor = kernel_floor(call, direction, machine)
    return [
        {
            "kind": "kernel", "op": f"{op}.{direction}", "shape": shape, "dtype": dtype,
            "implementation": name, "median_ms": own.median_ms, "p90_ms": own.p90_ms,
            "floor_ms": floor.ms, "floor_fraction": floor.ms / own.median_ms,
        }
        for name, own in times.items()
    ]  # fmt: skip


def model_speed(name: str, case: Case, machine: Machine) -> dict:
    """One model's step: time, MFU, share of the bandwidth, idle share of compute."""
    config = shape_of(name).config(max_len_of(case))
    ready = prepare(config, case)
    own = take_turns([ready.subject], 5)[ready.subject.name]
    floor = floor_of(config, case, machine)
    seconds = own.median_ms / 1e3
    mfu = floor.flops / seconds / floor.flops_per_s
    return {
        "kind": "model", "op": case.bench, "shape": name, "dtype": case.dtype, "batch": case.batch,
        "length": case.length, "implementation": "genlab", "median_ms": own.median_ms,
        "p90_ms": own.p90_ms, "floor_ms": floor.ms, "floor_fraction": floor.ms / own.median_ms,
        "tokens_per_s": ready.tokens / seconds, "mfu": mfu, "idle_share": 1 - mfu,
        "bandwidth_share": floor.bytes_moved / seconds / floor.bytes_per_s,
    }  # fmt: skip


def line(record: dict) -> str:
    """One line of the table."""
    head = " ".join(
        str(record[key])
        for key in ("kind", "op", "shape", "dtype", "batch", "length", "implementation")
        if key in record
    )
    figures = {k: v for k, v in record.items() if isinstance(v, float)}
    told = "  ".join(f"{key}={value:.4g}" for key, value in figures.items())
    said = record.get("refused") or record.get("failed") or ""
    return f"{head:80} {told}{'' if record.get('right', True) else '  WRONG'} {said}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 when a kernel was wrong."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds; default 480")
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--small", action="store_true", help="tiny sizes: tries the script itself")
    given = parser.parse_args(arguments)
    clock, records = Clock(given.budget_s), []

    def add(found: list[dict]) -> None:
        for record in found:
            print(line(record), flush=True)
        records.extend(found)
        if given.json is not None:
            text = json.dumps({"records": records, "left_out": clock.left_out}, indent=1)
            given.json.write_text(text + "\n")

    dtype = "bfloat16"
    machine = limits(dtype, given.small)
    print(
        f"{machine.device}, JAX {machine.jax}: {machine.peak_flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{machine.bandwidth[0].bytes_per_s / 1e9:.4g} GB/s in {dtype}",
        flush=True,
    )
    for op in KERNELS:
        for kind in ("float32", dtype):
            if clock.allows(f"check of {op} in {kind}", 20):
                add(check(op, kind))
    peers = [name for name, (_, benches) in PEERS.items() if "kernels" in benches]
    for op, shape in (("ssd", "tiny"),) if given.small else SPEED:
        for direction in KERNELS[op].directions:
            if shape.endswith("decode") and direction != "forward":
                continue
            if clock.allows(f"{op} {shape} {direction}", 30):
                add(kernel_speed(op, shape, dtype, direction, machine, peers))
    for name in ("mamba2_tiny",) if given.small else MODELS:
        for batch in (1,) if given.small else BATCHES:
            cases = (
                Case("decode", batch, 16 if given.small else 1024, dtype),
                Case("prefill", batch, 16 if given.small else 1024, dtype),
            )
            for case in cases:
                if clock.allows(f"{case.bench} of {name} at batch {batch}", 30):
                    add([model_speed(name, case, machine)])
    if clock.left_out:
        print("no time was left for: " + "; ".join(clock.left_out))
    add([])
    return int(any(record.get("right") is False for record in records))


if __name__ == "__main__":
    raise SystemExit(main())
