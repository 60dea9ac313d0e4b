"""Constraint drift: is an instruction given at the start still obeyed after n tokens?"""

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .draws import Bits, below, chance
from .task import SyntheticTask, numbered

STEP_ON = 0.5  # how often the chain moves to the next state rather than to any


class ConstraintDriftConfig(SyntheticTask):
    """`r2 s0 s1 ? m2 s2 s7 s0 ? m2 ...`: after every probe `?` comes the mark of the first symbol.

    Between probes runs a Markov chain: from s_i to s_(i+1) with probability 1/2, else to any state.
    Wherever no mark is due, a probe comes with probability `probe_rate`. The model writes the
    stream by itself, probes included, and is asked whether the mark n tokens after the instruction
    is still the right one: its own errors then stand in its context, as in a long answer.

    Attributes:
        length: the level, symbols of the stream after the instruction.
        num_rules: instructions, each with its mark.
        num_states: of the chain.
        probe_rate: probability of a probe where no mark is due.
    """

    level_field: ClassVar[str] = "length"
    name: Literal["constraint_drift"] = "constraint_drift"
    length: int = Field(default=64, ge=4)
    num_rules: int = Field(default=8, ge=2)
    num_states: int = Field(default=8, ge=2)
    probe_rate: float = Field(default=0.15, gt=0.0, lt=1.0)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Instructions, marks, states, the probe."""
        rules, marks = numbered("r", self.num_rules), numbered("m", self.num_rules)
        return (*rules, *marks, *numbered("s", self.num_states), "?")

    @property
    def first_state(self) -> int:
        """The symbol of state 0."""
        return 2 * self.num_rules

    @property
    def probe(self) -> int:
        """The symbol of the probe."""
        return 2 * self.num_rules + self.num_states

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The marks: `chance` is about what follows a probe."""
        return tuple(range(self.num_rules, 2 * self.num_rules))

    @property
    def prompt_length(self) -> int:
        """The instruction."""
        return 1

    @property
    def answer_length(self) -> int:
        """The stream."""
        return self.length

    @property
    def graded(self) -> int:
        """One mark."""
        return 1

    @property
    def identity(self) -> slice:
        """The whole row: there are only as many prompts as rules."""
        return slice(0, self.row_length)

    @property
    def draws(self) -> int:
        """The rule, and three numbers for each place."""
        return 1 + 3 * self.length

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        rows = np.empty((len(bits), self.row_length), np.int64)
        rule = below(bits[:, 0], self.num_rules)
        rows[:, 0] = rule
        state = below(bits[:, 1], self.num_states)
        after_probe = np.zeros(len(bits), bool)
        for place in range(self.length):
            probes, steps, jumps = bits[:, 1 + 3 * place : 4 + 3 * place].T
            if place:
                step_on = chance(steps, STEP_ON)
                following = np.where(step_on, state + 1, below(jumps, self.num_states))
                following %= self.num_states
                is_probe = ~after_probe & chance(probes, self.probe_rate)
            else:
                following, is_probe = state, np.zeros(len(bits), bool)
            is_state = ~after_probe & ~is_probe
            state = np.where(is_state, following, state)
            said = np.where(is_probe, self.probe, self.first_state + state)
            rows[:, 1 + place] = np.where(after_probe, self.num_rules + rule, said)
            after_probe = is_probe
        return rows

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """The mark that has to follow every probe, [1]."""
        rule = int(prompt[0])
        if not 0 <= rule < self.num_rules:
            raise ValueError(f"{self.symbols[rule]!r} is no instruction")
        return np.array([self.num_rules + rule], np.int32)
