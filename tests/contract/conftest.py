"""The contract suite's models and helpers, as fixtures.

    lab             tests/contract/models.py: ENTRIES, CAUSAL, run, verify, commit, head, ...
    comparator      tests/contract/comparator.py: assert_same_ids, compare_ids, top2_gap
    entry           each model of the suite in turn
    causal_entry    each model that runs causally with a state
    full_entry      each model that can look both ways; the others are shown to refuse

All of them pass every test, some among the slow ones: the named hybrids and heavy layouts all of
theirs, other variants all but those of test_interface.py. They take minutes to compile, and every
registered mixer, with MLPs and mixture of experts, passes every test among the quick ones.

    GENLAB_CONTRACT_ONLY=ema,hybrid     only these models (for a quick look at one)
"""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
LAB = SimpleNamespace(**runpy.run_path(str(HERE / "models.py")))
COMPARATOR = SimpleNamespace(**runpy.run_path(str(HERE / "comparator.py")))

HEAVY = {*LAB.HYBRIDS, "meta_mamba2", "block_parallel_heads", "block_postnorm"}
VARIANT = ("block_", "mlp_plain")
FIXTURES = {"entry": LAB.ENTRIES, "causal_entry": LAB.CAUSAL, "full_entry": LAB.ENTRIES}


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The models and the compiled functions."""
    return LAB


@pytest.fixture(scope="session")
def comparator() -> SimpleNamespace:
    """The rule for equal ids."""
    return COMPARATOR


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test once per model for the fixtures above."""
    only = os.environ.get("GENLAB_CONTRACT_ONLY")
    for fixture, entries in FIXTURES.items():
        if fixture not in metafunc.fixturenames:
            continue
        names = [n for n in entries if not only or n in only.split(",")]
        slow = HEAVY
        if metafunc.module.__name__.rpartition(".")[2] != "test_interface":
            slow = slow | {n for n in entries if n in LAB.VARIANTS or n.startswith(VARIANT)}
        models = [pytest.param(entries[n], marks=[pytest.mark.slow] * (n in slow)) for n in names]
        metafunc.parametrize(fixture, models, ids=names)
