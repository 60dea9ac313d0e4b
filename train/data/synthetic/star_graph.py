"""Path finding in a star graph: the task that teacher forcing gets wrong."""

from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .draws import Bits, permutations
from .task import Shortcut, SyntheticTask


class StarGraphConfig(SyntheticTask):
    """`3>7 0>3 0>5 5>1 1 0  5 1`: the way from a star's centre to the end of one arm.

    A centre has `arms` arms of path_length - 1 nodes each. Edges come in random order, one symbol
    for each, then the goal and the start; the answer is the path's nodes after the start. Left to
    right the first node takes the whole path to find, and every later one is a mere look-up in its
    edges: with teacher forcing a model learns the look-up and guesses the arm, 1 / arms (Bachmann
    and Nagarajan, arXiv 2403.06963). Reversed, every step is a look-up. Use a path_length of 4 or
    more: with 3 the first node is one edge from the goal.

    Attributes:
        path_length: the level, nodes of a path, start and goal included.
        arms: d.
        num_nodes: labels to choose from; at least 1 + arms (path_length - 1).
        reverse: the answer runs from the goal's predecessor back to the start.
    """

    level_field: ClassVar[str] = "path_length"
    name: Literal["star_graph"] = "star_graph"
    path_length: int = Field(default=4, ge=2)
    arms: int = Field(default=2, ge=2)
    num_nodes: int = Field(default=10, ge=3)
    reverse: bool = False

    @model_validator(mode="after")
    def _nodes_suffice(self) -> Self:
        if self.used > self.num_nodes:
            raise ValueError(
                f"arms={self.arms} and path_length={self.path_length} take {self.used} nodes, "
                f"num_nodes is {self.num_nodes}"
            )
        return self

    @property
    def used(self) -> int:
        """Nodes of one graph."""
        return 1 + self.arms * (self.path_length - 1)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Nodes, then edges."""
        n = self.num_nodes
        edges = (f"{a}>{b}" for a in range(n) for b in range(n) if a != b)
        return (*map(str, range(n)), *edges)

    @property
    def answer_symbols(self) -> tuple[int, ...]:
        """The nodes."""
        return tuple(range(self.num_nodes))

    @property
    def prompt_length(self) -> int:
        """The edges, and two nodes."""
        return self.used - 1 + 2

    @property
    def answer_length(self) -> int:
        """The path without the node that the prompt ends with."""
        return self.path_length - 1

    @property
    def shortcut(self) -> Shortcut | None:
        """Any arm from the start; there is nothing to choose from the goal."""
        return None if self.reverse else Shortcut("any arm", 1 / self.arms)

    @property
    def draws(self) -> int:
        """Labels and the order of the edges."""
        return self.num_nodes + self.used - 1

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """See `SyntheticTask.draw`."""
        rows, n = len(bits), self.num_nodes
        labels = permutations(bits[:, :n])[:, : self.used]
        start = labels[:, :1]
        arms = labels[:, 1:].reshape(rows, self.arms, -1)
        parents = np.concatenate(
            [np.broadcast_to(start[:, None], (rows, self.arms, 1)), arms[:, :, :-1]], axis=2
        )
        edges = n + parents * (n - 1) + arms - (arms > parents)
        order = permutations(bits[:, n:])
        edges = np.take_along_axis(edges.reshape(rows, -1), order, axis=1)
        path = arms[:, 0]  # labels are random, so which arm holds the goal does not matter
        goal = path[:, -1:]
        if not self.reverse:
            return np.concatenate([edges, goal, start, path], axis=1)
        return np.concatenate([edges, start, goal, path[:, -2::-1], start], axis=1)

    def solve(self, prompt: NDArray[np.integer]) -> NDArray[np.int32]:
        """Walks from the goal to the start by each node's only parent."""
        *edges, first, second = [self.symbols[s] for s in np.asarray(prompt).tolist()]
        start, goal = (first, second) if self.reverse else (second, first)
        parent = {child: node for node, child in (edge.split(">") for edge in edges)}
        back = [goal]
        while back[-1] != start:
            if back[-1] not in parent:
                raise ValueError(f"no way leads from {start} to {goal}")
            back.append(parent[back[-1]])
        path = back[1:] if self.reverse else back[-2::-1]
        return np.array([int(node) for node in path], np.int32)
