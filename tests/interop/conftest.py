"""Fixture checkpoints, and what transformers computed with them."""

from pathlib import Path

import numpy as np
import pytest
from genlab.train.interop.import_run import import_checkpoint
from genlab.train.run_folder import load_run

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixture_names():
    return sorted(path.name for path in FIXTURES.iterdir())


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """name -> the run of that fixture, imported once."""
    runs = {}

    def get(name):
        if name not in runs:
            out = tmp_path_factory.mktemp("imported") / name
            import_checkpoint(FIXTURES / name, out)
            runs[name] = load_run(out)
        return runs[name]

    return get


@pytest.fixture(scope="session")
def expected():
    """name -> the arrays that transformers computed."""

    def get(name):
        with np.load(FIXTURES / name / "expected.npz") as file:
            return dict(file)

    return get
