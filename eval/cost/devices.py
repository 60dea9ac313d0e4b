"""The table of device prices: `configs/devices.yaml`, or one of the user's own."""

from pathlib import Path

from pydantic import Field, model_validator

from ...paradigms.config import Config
from ...train.yaml_loader import load_yaml, validate
from .arithmetic import roofline_s, usd_per_million
from .records import Phase, Price

DEVICES = Path(__file__).parents[2] / "configs" / "devices.yaml"


class Device(Config):
    """A device that can be rented.

    Attributes:
        price_usd_per_hour: of the whole device.
        about: what it is, whose price and of when.
        flops_per_s, bytes_per_s: published peaks; both or none. None prices what is measured here.
    """

    price_usd_per_hour: float = Field(gt=0)
    about: str
    flops_per_s: float | None = Field(default=None, gt=0)
    bytes_per_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _both_peaks(self) -> "Device":
        if (self.flops_per_s is None) != (self.bytes_per_s is None):
            raise ValueError("flops_per_s and bytes_per_s belong together: give both or none")
        return self


def load_devices(path: Path = DEVICES) -> dict[str, Device]:
    """Reads a table of devices.

    Raises:
        ConfigError: the first fault, with its place.
    """
    raw = load_yaml(path)
    return {str(name): validate(Device, raw[name], f"{path}: {name}") for name in raw}


def prices(
    devices: dict[str, Device], phases: list[Phase], prompt_length: int, new_tokens: int
) -> list[Price]:
    """Prices the request that `phases` describe.

    Output tokens take the decode steps; a canvas takes `new_tokens` calls at most and has no prompt
    phase, so that its input tokens cost nothing by themselves.

    Args:
        devices: by name.
        phases: of one request; times are per call.
        prompt_length: tokens of each row's prompt.
        new_tokens: of each row.
    """
    listed = []
    for name, device in devices.items():
        seconds = {phase.name: _seconds(device, phase) for phase in phases}
        batch = phases[0].batch
        read = seconds.get("prefill", 0.0)
        step = seconds.get("decode", seconds.get("canvas", 0.0))
        rate = device.price_usd_per_hour / 3600.0
        listed.append(
            Price(
                device=name,
                basis="measured here" if device.flops_per_s is None else "roofline",
                usd_per_million_input_tokens=usd_per_million(
                    read / (batch * prompt_length), device.price_usd_per_hour
                ),
                usd_per_million_output_tokens=usd_per_million(
                    step / batch, device.price_usd_per_hour
                ),
                usd_per_request=rate * (read + step * new_tokens) / batch,
            )
        )
    return listed


def _seconds(device: Device, phase: Phase) -> float:
    if device.flops_per_s is None or device.bytes_per_s is None:
        return phase.measured_ms / 1e3
    moved = phase.weight_bytes + phase.state_bytes
    return roofline_s(phase.flops, moved, device.flops_per_s, device.bytes_per_s)
