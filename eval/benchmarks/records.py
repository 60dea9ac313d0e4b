"""What `genlab bench` puts on record: one line per implementation and case."""

from collections.abc import Sequence

from pydantic import Field

from ..record import Record
from ..statistics import median, p90


class BenchRecord(Record):
    """One of our implementations on one case, and the peer that ran beside it.

    Attributes:
        bench: train, decode, prefill, or the op of a kernel and its direction.
        shape: name of the model or of the kernel's sizes.
        dtype: that we computed in.
        batch: rows.
        length: tokens of a row: trained on, taken in, or held before the first new one.
        implementation: which of ours.
        median_ms: of a training step, of a prefill, of one decode step, of one kernel call.
        p90_ms: likewise; of single steps where a run has several, that of the runs' means.
        compile_s: tracing and compiling, before the warm-up.
        tokens_per_s: all rows together; null for kernels.
        floor_ms: no program could be faster: bytes over measured bandwidth or FLOPs over measured
            peak, whichever takes longer.
        floor_bound: which of the two, "bytes" or "flops".
        floor_fraction: floor_ms / median_ms.
        peer: another project's implementation and its dtype, null without one.
        peer_median_ms: its median, in the same alternating run.
        ratio: peer_median_ms / median_ms; above 1 we are faster.
        runs: timed runs of each.
        device, jax: what it ran on.
    """

    bench: str
    shape: str
    dtype: str
    batch: int = Field(ge=1)
    length: int = Field(ge=1)
    implementation: str
    median_ms: float = Field(gt=0)
    p90_ms: float = Field(gt=0)
    compile_s: float = Field(ge=0)
    tokens_per_s: float | None = Field(default=None, gt=0)
    floor_ms: float = Field(ge=0)
    floor_bound: str
    floor_fraction: float = Field(ge=0)
    peer: str | None = None
    peer_median_ms: float | None = Field(default=None, gt=0)
    ratio: float | None = Field(default=None, gt=0)
    runs: int = Field(ge=1)
    device: str
    jax: str


class Floor(Record):
    """The least time of a call on this machine.

    Attributes:
        flops, bytes_moved: of the call.
        flops_per_s, bytes_per_s: measured on this machine.
    """

    flops: float
    bytes_moved: float
    flops_per_s: float
    bytes_per_s: float

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return 1e3 * max(self.flops / self.flops_per_s, self.bytes_moved / self.bytes_per_s)

    @property
    def bound(self) -> str:
        """What the time goes to."""
        by_bytes = self.bytes_moved / self.bytes_per_s >= self.flops / self.flops_per_s
        return "bytes" if by_bytes else "flops"


class Summary(Record):
    """Of the timed runs of one subject, in milliseconds."""

    median_ms: float
    p90_ms: float
    runs: int


def summarize(times_ms: Sequence[float]) -> Summary:
    """Median and 90th percentile."""
    return Summary(median_ms=median(times_ms), p90_ms=p90(times_ms), runs=len(times_ms))
