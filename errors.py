"""Errors that a user can cause and repair.

Every one of them is raised before compute starts, names what was given and what was wanted, and is
printed by the command line as a single line with a non-zero exit status.
"""

import difflib
from collections.abc import Iterable


class GenlabError(Exception):
    """Base of all errors that are the input's fault, not the program's."""


class ConfigError(GenlabError):
    """A configuration file or an override is wrong."""


class DataError(GenlabError):
    """A corpus, a tokenizer or a token cache is missing, foreign, truncated or too short."""


class CheckpointError(GenlabError):
    """A run folder or a checkpoint is missing, corrupt or belongs to another configuration."""


class CapacityError(GenlabError):
    """More tokens were asked for than the model or the state can hold."""


def suggest(got: str, valid: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest valid name, else a list of all of them."""
    names = sorted(valid)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
