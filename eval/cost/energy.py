"""Energy in joules from the counters that the machine has: RAPL on CPUs, NVML on NVIDIA GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

POWERCAP = Path("/sys/class/powercap")


class Counter(NamedTuple):
    """One energy counter.

    Attributes:
        read: returns joules since some beginning.
        wraps_at: joules at which it begins anew; None for never.
    """

    read: Callable[[], float]
    wraps_at: float | None


class EnergyMeter:
    """Adds up what all counters of the device say between two moments."""

    def __init__(self, counters: list[Counter], reason: str) -> None:
        """Takes counters; `reason` says which they are, or why there are none."""
        self.counters, self.reason = counters, reason

    def now(self) -> list[float]:
        """The counters' values."""
        return [counter.read() for counter in self.counters]

    def joules_since(self, before: list[float]) -> float | None:
        """Joules since `now` gave `before`; None without a counter."""
        if not self.counters:
            return None
        total = 0.0
        for counter, old, new in zip(self.counters, before, self.now(), strict=True):
            used = new - old
            # More than one turn of the counter in between cannot be told from one.
            total += used + counter.wraps_at if used < 0 and counter.wraps_at else used
        return total


def find_meter(*, powercap: Path = POWERCAP) -> EnergyMeter:
    """The meter of the default device. Asks, never raises."""
    if jax.devices()[0].platform == "gpu":
        return _nvml()
    if jax.devices()[0].platform == "cpu":
        return _rapl(powercap)
    return EnergyMeter([], f"no energy counter is known for {jax.devices()[0].platform}")


def _rapl(powercap: Path) -> EnergyMeter:
    counters, refused = [], None
    # Packages are intel-rapl:0, :1, ... (on AMD too); what has two colons is part of one.
    for folder in sorted(powercap.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:
            continue
        try:
            _microjoules(folder / "energy_uj")
            wraps_at = _microjoules(folder / "max_energy_range_uj")
        except (OSError, ValueError) as error:
            refused = f"{folder.name}: {error}"
            continue
        path = folder / "energy_uj"
        counters.append(Counter(lambda path=path: _microjoules(path), wraps_at))
    if counters:
        return EnergyMeter(counters, f"RAPL, {len(counters)} package(s), the whole machine")
    if refused is not None:
        return EnergyMeter([], f"RAPL cannot be read: {refused}")
    return EnergyMeter([], "this machine shows no RAPL counter (usual in virtual machines)")


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _nvml() -> EnergyMeter:
    try:
        import pynvml
    except ImportError:
        return EnergyMeter([], "NVML needs the package nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(jax.devices()[0].local_hardware_id or 0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return EnergyMeter([], f"NVML cannot be read: {error}")
    read = pynvml.nvmlDeviceGetTotalEnergyConsumption
    return EnergyMeter([Counter(lambda: read(handle) / 1e3, None)], "NVML, the GPU's own")
