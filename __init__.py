"""genlab: train, run and honestly compare the ways of generating text.

Importing the package is free of side effects: the heavy modules load on first use.
"""

__version__ = "0.1.0"
