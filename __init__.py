"""genlab: train, run and honestly compare the ways of generating text.

Importing the package is free of side effects: the heavy modules load on first use.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`genlab.load`, which needs JAX and everything else."""
    if name == "load":
        from .eval.loaded import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
