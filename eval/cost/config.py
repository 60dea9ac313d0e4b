"""What the cost model measures, from YAML, and this machine's microbenchmarks kept for a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from ...paradigms.config import Config
from ...paradigms.decoding.state import Decoding
from ...paradigms.model import Model
from ..provenance import code_hash, stable_hash
from ..results_io import atomic_write
from .devices import DEVICES, load_devices
from .machine import measure_machine
from .measure import measure_cost
from .records import CostRecord, Machine


class CostConfig(Config):
    """The request whose cost is predicted and measured.

    Attributes:
        batch: rows.
        prompt_length: tokens of each prompt, BOS included.
        new_tokens: generated per row.
        repeats: timed requests after the warm-up.
        devices: table of device prices, relative to the current folder; null for the shipped one.
    """

    batch: int = Field(default=1, ge=1)
    prompt_length: int = Field(default=128, ge=1)
    new_tokens: int = Field(default=32, ge=2)
    repeats: int = Field(default=5, ge=1)
    devices: str | None = None


def cost_from_config(
    model: Model,
    decoding: Decoding,
    config: CostConfig,
    machine: Machine,
    *,
    prompts: NDArray[np.int32],
    forbidden_ids: Sequence[int],
) -> CostRecord:
    """Measures what the configuration asks for; see `measure_cost`."""
    path = DEVICES if config.devices is None else Path(config.devices)
    return measure_cost(
        model,
        decoding,
        machine,
        prompts=prompts,
        new_tokens=config.new_tokens,
        devices=load_devices(path),
        forbidden_ids=forbidden_ids,
        repeats=config.repeats,
    )


class Machines:
    """Microbenchmarks by dtype, measured when first asked for and kept in a folder."""

    def __init__(self, folder: Path, progress: Callable[[str, int, int], None]) -> None:
        """Measures nothing yet."""
        self.folder, self.progress = folder, progress
        self._known: dict[str, Machine] = {}

    def get(self, dtype: str) -> Machine:
        """The microbenchmarks in this dtype."""
        if dtype not in self._known:
            self._known[dtype] = self._read(dtype)
        return self._known[dtype]

    def _read(self, dtype: str) -> Machine:
        kind = jax.devices()[0].device_kind
        key = stable_hash(dtype, kind, jax.__version__, code_hash("eval"))
        path = self.folder / f"machine-{key}.json"
        if path.exists():
            try:
                return Machine.model_validate_json(path.read_bytes())
            except ValidationError:
                pass  # cut off or edited: measured again
        machine = measure_machine(
            dtype, progress=lambda done, total: self.progress("machine", done, total)
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, machine.model_dump_json(indent=1))
        return machine
