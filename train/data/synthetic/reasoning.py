"""Tasks that take one step after another: chains of arithmetic, parity."""

from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .draws import Bits, below, chance, permutations
from .task import SyntheticTask, numbered

Operation = Literal["+", "-", "*"]


class ChainArithmeticConfig(SyntheticTask):
    """`x4 = 3  x1 = x4 + 2  x7 = x1 * x4  x7 ?  1`: a chain of sums and products modulo m.

    Each statement uses the variable before it and a number or any earlier variable. Answered at
    once, it asks for `depth` dependent steps within one pass through the layers; with `trace` the
    values in between are written first.

    Attributes:
        depth: the level, statements after the first.
        modulus: m.
        num_variables: names to choose from; at least depth + 1.
        operations: which may occur.
        trace: the answer is the value of every statement after the first in order; only the last
            one is graded.
    """

    level_field: ClassVar[str] = "depth"
    name: Literal["chain_arithmetic"] = "chain_arithmetic"
    depth: int = Field(default=4, ge=1)
    modulus: int = Field(default=7, ge=2)
    num_variables: int = Field(default=10, ge=2)
    operations: tuple[Operation, ...] = Field(default=("+", "-", "*"), min_length=1)
    trace: bool = False

    @model_validator(mode="after")
    def _names_suffice(self) -> Self:
        if self.depth + 1 > self.num_variables:
            raise ValueError(
                f"depth={self.depth} needs {self.depth + 1} variables, num_variables is "
                f"{self.num_variables}"
            )
        if len(set(self.operations)) != len(self.operations):
            raise ValueError(f"operations: one is there twice: {list(self.operations)}")
        return self

    @property
    def symbols(self) -> tuple[str, ...]:
        """Numbers, variables, signs."""
        numbers = tuple(map(str, range(self.modulus)))
        return (*numbers, *numbered("x", self.num_variables), "+", "-", "*", "=", "?")

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The numbers."""
        return tuple(range(self.modulus))

    @property
    def prompt_length(self) -> int:
        """Three symbols of the first statement, five of each other one, two of the question."""
        return 3 + 5 * self.depth + 2

    @property
    def answer_length(self) -> int:
        """The last value, or every one."""
        return self.depth if self.trace else 1

    @property
    def graded(self) -> int:
        """The last value."""
        return 1

    @property
    def draws(self) -> int:
        """Names, the first value, and four numbers for each statement."""
        return self.num_variables + 1 + 4 * self.depth

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        names = permutations(bits[:, : self.num_variables])
        rest = bits[:, self.num_variables :]
        signs = self.modulus + self.num_variables
        equals, asks = np.full(len(bits), signs + 3), np.full(len(bits), signs + 4)
        values = [below(rest[:, 0], self.modulus)]
        columns = [self.modulus + names[:, 0], equals, values[0]]
        allowed = np.array(["+-*".index(sign) for sign in self.operations])
        for step in range(1, self.depth + 1):
            which, kind, number, variable = rest[:, 4 * step - 3 : 4 * step + 1].T
            sign = allowed[below(which, len(allowed))]
            earlier = below(variable, step)
            with_number = chance(kind, 0.5)
            number = below(number, self.modulus)
            of_earlier = np.choose(earlier, values) if step > 1 else values[0]
            right = np.where(with_number, number, of_earlier)
            last = values[-1]
            value = np.choose(sign, [last + right, last - right, last * right]) % self.modulus
            name = np.take_along_axis(names, earlier[:, None], axis=1)[:, 0]
            columns += [
                self.modulus + names[:, step], equals, self.modulus + names[:, step - 1],
                signs + sign, np.where(with_number, number, self.modulus + name),
            ]  # fmt: skip
            values.append(value)
        columns += [self.modulus + names[:, self.depth], asks]
        return np.stack([*columns, *values[-self.answer_length :]], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Executes the statements."""
        words = [self.symbols[symbol] for symbol in np.asarray(prompt).tolist()]
        known: dict[str, int] = {}
        trace = []

        def value_of(word: str) -> int:
            return known[word] if word in known else int(word)

        known[words[0]] = int(words[2])
        for start in range(3, len(words) - 2, 5):
            target, _, left, sign, right = words[start : start + 5]
            a, b = value_of(left), value_of(right)
            result = {"+": a + b, "-": a - b, "*": a * b}[sign] % self.modulus
            known[target] = result
            trace.append(result)
        answer = trace if self.trace else [known[words[-2]]]
        return np.array(answer, np.int32)


class ParityConfig(SyntheticTask):
    """`1 0 1 1 = 1`: whether the number of ones is odd.

    The smallest task that needs a state which every symbol may flip: linear recurrences with
    eigenvalues in [0, 1] fail beyond the lengths they trained on (arXiv 2411.12537).

    Attributes:
        length: the level, bits.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["parity"] = "parity"
    length: int = Field(default=40, ge=1)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Two bits and the equals sign."""
        return ("0", "1", "=")

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The bits."""
        return (0, 1)

    @property
    def prompt_length(self) -> int:
        """Bits and the equals sign."""
        return self.length + 1

    @property
    def answer_length(self) -> int:
        """One bit."""
        return 1

    @property
    def draws(self) -> int:
        """One for each bit."""
        return self.length

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        ones = below(bits, 2)
        equals = np.full((len(bits), 1), 2)
        return np.concatenate([ones, equals, ones.sum(axis=1, keepdims=True) % 2], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Flips one bit for every one."""
        odd = 0
        for symbol in np.asarray(prompt).tolist():
            odd ^= symbol == 1
        return np.array([odd], np.int32)
