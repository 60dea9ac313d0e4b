"""What the profile of an entry holds; part of `results.json`."""

from pydantic import Field

from ..record import Record
from ..tasks.records import TaskScore


class GrowthPoint(Record):
    """One length of a generation at batch 1.

    Attributes:
        new_tokens: length of the answer.
        time_ms: the whole request, prompt included, median.
        nfe: model calls.
        state_bytes: of the arrays that the decoding holds for a row of that length.
    """

    new_tokens: int = Field(ge=1)
    time_ms: float = Field(gt=0)
    nfe: float = Field(gt=0)
    state_bytes: int = Field(ge=0)


class Growth(Record):
    """How generation grows with length.

    Attributes:
        prompt_length: tokens of the prompt.
        points: by length.
        exponent: slope of log time over log length, least squares over all points.
        exponent_tail: the same over the last two points: where the longest answers are heading.
        calls_per_token: model calls per new token at the longest length.
        stopped: why longer lengths of the configuration were left out, None if none was.
    """

    prompt_length: int
    points: list[GrowthPoint] = Field(min_length=2)
    exponent: float
    exponent_tail: float
    calls_per_token: float
    stopped: str | None


class LongContextPoint(Record):
    """Held-out likelihood in windows of one length, always over the same text.

    Attributes:
        length: tokens per window, BOS included.
        multiple: of the length trained at.
        bits_per_byte: a bound where the entry's likelihood is one.
        bytes: of text scored.
    """

    length: int
    multiple: float
    bits_per_byte: float
    bytes: int


class Parallelism(Record):
    """How well a forward pass, as in training, works on all of a row's tokens at once.

    Attributes:
        length: T.
        together_ms: one call on T tokens, median.
        one_ms: one call on a single token, median.
        factor: T * one_ms / together_ms: how many times faster T tokens go together than singly.
    """

    length: int
    together_ms: float
    one_ms: float
    factor: float


class Memory(Record):
    """What one request at a long context takes, by the compiler's account; nothing was run.

    Attributes:
        context: tokens.
        weight_bytes: of the parameters.
        state_bytes: of what the decoding keeps between calls; 0 where it keeps nothing.
        working_bytes: of temporary arrays and results of one call; None where the compiler does
            not say.
        call: what one call works on.
    """

    context: int
    weight_bytes: int
    state_bytes: int
    working_bytes: int | None
    call: str

    @property
    def total_bytes(self) -> int:
        """All that is known of it."""
        return self.weight_bytes + self.state_bytes + (self.working_bytes or 0)


class Profile(Record):
    """The profile of an entry.

    Attributes:
        parallelism: of a forward pass.
        growth: of generation with length.
        long_context: likelihood at lengths beyond training.
        memory: of one request at a long context.
        tasks: scores of models of the family that were trained on a synthetic task, by name.
        seconds: what measuring took, by part.
    """

    parallelism: Parallelism | None = None
    growth: Growth | None = None
    long_context: list[LongContextPoint] = []
    memory: Memory | None = None
    tasks: dict[str, TaskScore] = {}
    seconds: dict[str, float] = {}
