"""The cost model's tables, as text: for the report and for the terminal."""

from collections.abc import Mapping
from typing import NamedTuple

from ..formatting import MISSING, byte_size, short, significant
from .records import CostRecord


class TextTable(NamedTuple):
    """Headings and rows of cells."""

    columns: list[str]
    lines: list[list[str]]


def phase_table(costs: Mapping[str, CostRecord]) -> TextTable:
    """Cost by the equations, predicted and measured time of every phase."""
    columns = [
        "entry", "call", "tokens", "context", "FLOP", "weights read", "state moved",
        "FLOP per byte", "predicted ms", "measured ms", "ratio", "of roofline", "MFU",
        "idle", "joules",
    ]  # fmt: skip
    lines = []
    for name, cost in costs.items():
        for phase in cost.phases:
            lines.append(
                [
                    name,
                    phase.name,
                    str(phase.batch * phase.new_tokens),
                    str(phase.context),
                    short(phase.flops),
                    byte_size(phase.weight_bytes),
                    byte_size(phase.state_bytes),
                    significant(phase.intensity_flops_per_byte, 2),
                    significant(phase.predicted_ms),
                    significant(phase.measured_ms),
                    significant(phase.predicted_ms / phase.measured_ms, 2),
                    percent(phase.roofline_fraction),
                    percent(phase.mfu),
                    percent(phase.idle_share),
                    MISSING if phase.energy_joules is None else significant(phase.energy_joules),
                ]
            )
    return TextTable(columns, lines)


def parts_table(costs: Mapping[str, CostRecord]) -> TextTable:
    """Where the predicted time goes."""
    names = sorted({p for cost in costs.values() for phase in cost.phases for p in phase.parts_ms})
    lines = []
    for name, cost in costs.items():
        for phase in cost.phases:
            cells = [
                percent(phase.parts_ms[part] / phase.predicted_ms) if part in phase.parts_ms else ""
                for part in names
            ]
            lines.append([name, phase.name, *cells])
    return TextTable(["entry", "call", *names], lines)


def price_table(costs: Mapping[str, CostRecord]) -> TextTable:
    """Dollars per million input and output tokens and per thousand requests."""
    columns = [
        "entry", "device", "time", "$ per M input tokens", "$ per M output tokens",
        "$ per 1000 requests",
    ]  # fmt: skip
    lines = [
        [
            name,
            price.device,
            price.basis,
            _dollars(price.usd_per_million_input_tokens),
            _dollars(price.usd_per_million_output_tokens),
            _dollars(1000 * price.usd_per_request),
        ]
        for name, cost in costs.items()
        for price in cost.prices
    ]
    return TextTable(columns, lines)


def remarks(costs: Mapping[str, CostRecord]) -> list[str]:
    """Crossover contexts, where energy comes from, and what long answers cost, in sentences."""
    said = []
    for name, cost in costs.items():
        if cost.crossover_tokens is None:
            said.append(f"{name}: reading the state never overtakes reading the weights: "
                        f"{cost.crossover_reason}.")  # fmt: skip
        else:
            said.append(
                f"{name}: from {cost.crossover_tokens:,.0f} tokens of context a decode step at "
                "batch 1 reads more bytes of state than of weights; a batch of n divides that by n."
            )
    dear = []
    for name, cost in costs.items():
        price = cost.prices[0] if cost.prices else None
        if price is not None and price.usd_per_million_input_tokens > 0:
            ratio = price.usd_per_million_output_tokens / price.usd_per_million_input_tokens
            dear.append(f"{name} {significant(ratio, 2)}")
    if dear:
        said.append(
            "An output token costs so many times an input token on the first device: "
            + ", ".join(dear)
            + "."
        )
    for part in dict.fromkeys(part for cost in costs.values() for part in cost.unprobed):
        said.append(f"{part} has no microbenchmark of its own: predicted as an elementwise one.")
    for reason in dict.fromkeys(cost.energy_reason for cost in costs.values()):
        said.append(f"Energy: {reason}.")
    return said


def percent(share: float) -> str:
    """A share as a percentage of two figures, tiny ones as such."""
    if 0 < share < 0.001:
        return "under 0.1 %"
    return f"{significant(100 * share, 2)} %"


def _dollars(value: float) -> str:
    return "0" if value == 0 else significant(value, 2)
