"""What the cost model puts on record; part of `results.json`."""

from pydantic import Field

from ..record import Record


class BandwidthPoint(Record):
    """Bytes per second at which a loop reads so many bytes of matrices, again and again."""

    working_set_bytes: int = Field(gt=0)
    bytes_per_s: float = Field(gt=0)


class MatmulPoint(Record):
    """Speed of a product of (rows, width) with (width, width) matrices.

    Attributes:
        rows, width: the shapes.
        flops_per_s: as one call, with all cores.
        loop_flops_per_s: inside a compiled loop, as decoding runs it.
    """

    rows: int = Field(gt=0)
    width: int = Field(gt=0)
    flops_per_s: float = Field(gt=0)
    loop_flops_per_s: float = Field(gt=0)


class KernelRate(Record):
    """Speed of what mixes time in one kind of layer, measured on one small shape.

    Attributes:
        flops_per_s: over many tokens as one call, by the FLOPs of the equation.
        loop_flops_per_s: the same inside a compiled loop.
        state_bytes_per_s: of the state that one new token reads, inside a compiled loop.
    """

    flops_per_s: float = Field(gt=0)
    loop_flops_per_s: float = Field(gt=0)
    state_bytes_per_s: float | None = Field(default=None, gt=0)


class Machine(Record):
    """What this machine does in microbenchmarks; nothing here knows a model.

    Attributes:
        device, jax, dtype: what was measured, with which release, in which type.
        peak_flops_per_s: the fastest matrix product.
        bandwidth: of reading in a loop, by working set, from cache to main memory.
        matmul: of matrix products by rows and width.
        kernels: by class name of the mixer.
        loop_launch_s: seconds per operation that does next to nothing, inside a loop.
        launch_s: the same in a plain call.
        call_s: seconds that a call takes beside its operations.
    """

    device: str
    jax: str
    dtype: str
    peak_flops_per_s: float = Field(gt=0)
    bandwidth: list[BandwidthPoint] = Field(min_length=1)
    matmul: list[MatmulPoint] = Field(min_length=1)
    kernels: dict[str, KernelRate]
    loop_launch_s: float = Field(ge=0)
    launch_s: float = Field(ge=0)
    call_s: float = Field(ge=0)


class Phase(Record):
    """One phase of a request: cost by the equations, predicted and measured time.

    Attributes:
        name: "prefill" (the prompt, as one call), "decode" (one new token per row) or "canvas" (one
            call on the whole canvas, as denoising makes it).
        batch, new_tokens, context: rows, tokens of the call, tokens of history.
        flops: of the call.
        weight_bytes, state_bytes: read, and of the state also what is written.
        intensity_flops_per_byte: FLOPs over all those bytes.
        launches: operations beside matrix products that the compiled program starts.
        parts_ms: predicted time by part.
        predicted_ms: their sum.
        measured_ms: median of the repeats.
        roofline_ms: the larger of FLOPs over the machine's peak and bytes over its bandwidth.
        roofline_fraction: of the roofline reached: `roofline_ms / measured_ms`.
        mfu: FLOPs per second over the peak (model FLOPs utilisation).
        idle_share: of the peak compute, unused: `1 - mfu`.
        energy_joules: per call; None where no counter can be read.
    """

    name: str
    batch: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    flops: float
    weight_bytes: float
    state_bytes: float
    intensity_flops_per_byte: float
    launches: float
    parts_ms: dict[str, float]
    predicted_ms: float
    measured_ms: float
    roofline_ms: float
    roofline_fraction: float
    mfu: float
    idle_share: float
    energy_joules: float | None = None


class Price(Record):
    """What text costs on a device at a price.

    Attributes:
        device: its name in the price table.
        basis: "measured here" or "roofline": the lower limit from published peaks.
        usd_per_million_input_tokens, usd_per_million_output_tokens: rates.
        usd_per_request: of the request measured.
    """

    device: str
    basis: str
    usd_per_million_input_tokens: float
    usd_per_million_output_tokens: float
    usd_per_request: float


class CostRecord(Record):
    """The cost of one entry.

    Attributes:
        prompt_length, new_tokens, batch: of the request.
        phases: of the request.
        crossover_tokens: context at which a decode step at batch 1 reads as many bytes of state as
            of weights; None where that never happens.
        crossover_reason: why there is none.
        energy_reason: why energies are missing, or which counter gave them.
        prices: one for each device that the table prices.
        unprobed: mixers without a microbenchmark, predicted at the speed of an elementwise one.
    """

    prompt_length: int
    new_tokens: int
    batch: int
    phases: list[Phase]
    crossover_tokens: float | None
    crossover_reason: str | None = None
    energy_reason: str
    prices: list[Price]
    unprobed: list[str]
