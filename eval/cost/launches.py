"""Counts the operations beside matrix products that a compiled program starts, from its HLO text.

A small model's step is hundreds of tiny operations, and starting one takes a microsecond whatever
it computes: without counting them no prediction of a small model's time holds.
"""

import re
from typing import NamedTuple

# Written down in the program, but nothing is started for them.
NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
# What starting a matrix product takes is in the measured speed of products of its size.
FREE = frozenset((*NOTHING, "partition-id", "opt-barrier", "dot"))
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?[\w.\-]+ = (?P<rest>.*)$")
_OPCODE = re.compile(r"(?:^|[\s})\]])(?P<op>[a-z][a-z0-9\-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Launches(NamedTuple):
    """Operations started.

    Attributes:
        once: by the program outside of loops of unknown length.
        each: by one turn of the longest loop whose number of turns is data; 0 without one.
    """

    once: float
    each: float


def count_launches(text: str) -> Launches:
    """Counts a compiled program's operations; loops of known length count all their turns.

    Args:
        text: `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, list[str]] = {}
    entry = current = None
    for line in text.splitlines():
        header = None if line.startswith(" ") else _HEADER.match(line)
        if header:
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            computations[current].append(line.strip())
    if entry is None:
        raise ValueError("no entry computation in the program's text")
    loops: list[float] = []

    def called(line: str, key: str) -> list[str]:
        found = re.search(key + r"=(?:\{([^}]*)\}|(%?[\w.\-]+))", line)
        if found is None:
            return []
        return [name.strip().lstrip("%") for name in (found[1] or found[2]).split(",")]

    def count(name: str) -> float:
        total = 0.0
        for line in computations.get(name, ()):
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            opcode = _OPCODE.search(_without_type(instruction["rest"]))
            op = "" if opcode is None else opcode["op"]
            if op in FREE:
                continue
            if op == "while":
                turn = sum(count(n) for key in ("body", "condition") for n in called(line, key))
                trips = _TRIPS.search(line)
                if trips is None:
                    loops.append(turn)
                else:
                    total += int(trips[1]) * turn
            elif op == "call":
                total += sum(count(n) for n in called(line, "to_apply"))
            elif op == "conditional":
                names = called(line, "branch_computations")
                names += called(line, "true_computation") + called(line, "false_computation")
                total += 1 + max((count(n) for n in names), default=0.0)
            else:
                total += 1
        return total

    once = count(entry)
    return Launches(once, max(loops, default=0.0))


def _without_type(rest: str) -> str:
    """Drops an instruction's leading type, which may be a tuple with parentheses of its own."""
    if not rest.startswith("("):
        return rest
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[index + 1 :]
    return rest
