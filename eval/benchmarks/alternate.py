"""Runs implementations in turns, so that a busy moment of the machine meets all of them alike."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .records import Summary, summarize


class Subject(Protocol):
    """Something that can be timed.

    Attributes:
        name: implementation and dtype, unique among those that take turns.
    """

    name: str

    def run(self) -> float:
        """One timed run; waits for its end. Returns milliseconds of one step of it."""
        ...


class Timed(NamedTuple):
    """A subject made of a function that waits for its own end.

    Attributes:
        name: see `Subject`.
        call: what is timed; returns the number of equal steps that it took.
        prepare: before every run, not timed; its result is given to `call`.
        clock: seconds.
    """

    name: str
    call: Callable[..., int]
    prepare: Callable[[], tuple] = tuple
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> float:
        """Milliseconds per step."""
        given = self.prepare()
        begin = self.clock()
        steps = self.call(*given)
        return 1e3 * (self.clock() - begin) / steps


def take_turns(
    subjects: Sequence[Subject],
    repeats: int,
    *,
    warm_up: int = 1,
    budget_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Summary]:
    """Times every subject `repeats` times, a round of all of them after the other.

    Each round begins with another subject, so that none always follows the same one.

    Args:
        subjects: of different names.
        repeats: timed runs of each.
        warm_up: runs of each before, not counted.
        budget_s: a subject that has used this much time and has three timed runs rests; None for no
            limit. A subject whose warm-up alone takes longer has one timed run.
        progress: called with finished and all runs.
        clock: seconds.
    """
    used = dict.fromkeys((s.name for s in subjects), 0.0)
    times: dict[str, list[float]] = {s.name: [] for s in subjects}
    total, done = len(subjects) * (warm_up + repeats), 0

    def timed(subject: Subject) -> float:
        nonlocal done
        begin = clock()
        value = subject.run()
        used[subject.name] += clock() - begin
        done += 1
        progress(done, total)
        return value

    for _ in range(warm_up):
        for subject in subjects:
            timed(subject)
    slow = {n for n, s in used.items() if budget_s is not None and s > budget_s}
    for turn in range(repeats):
        first = turn % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            own = times[subject.name]
            spent = budget_s is not None and used[subject.name] > budget_s
            if spent and len(own) >= (1 if subject.name in slow else 3):
                done += 1
                continue
            own.append(timed(subject))
    return {name: summarize(own) for name, own in times.items()}
