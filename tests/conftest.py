"""Settings of the whole suite, made before any test module is imported.

Nothing heavy is imported here: tests that need no JAX do not pay for it. Subprocesses that tests
start inherit the environment variables.

    JAX_PLATFORMS=...         another backend than the CPU
    GENLAB_TEST_CACHE=FOLDER  keep compiled programs there: reruns skip most of the compiling
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# The suite is a statement about the CPU unless the caller says otherwise.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
if cache := os.environ.get("GENLAB_TEST_CACHE"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(cache).absolute())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# A compile inside an example would count against its deadline. CI draws the same examples each run.
settings.register_profile("genlab", deadline=None, database=None)
settings.register_profile("genlab-ci", deadline=None, database=None, derandomize=True)
settings.load_profile("genlab-ci" if os.environ.get("CI") else "genlab")

# Parts whose arithmetic is all ours. Training is left out: Optax schedules mix int32 and float.
STRICT_PARTS = ("contract", "kernels", "paradigms")


@pytest.fixture(scope="module", autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns silent dtype promotion (bfloat16 to float32, say) into an error in our own arithmetic.

    Module scope: it is set before the module's other fixtures run, so that what they compile is not
    compiled a second time in the tests.
    """
    with contextlib.ExitStack() as stack:
        if request.path.relative_to(TESTS).parts[0] in STRICT_PARTS:
            import jax

            stack.enter_context(jax.numpy_dtype_promotion("strict"))
        yield


MAPS = Path("/proc/self/maps")  # Linux alone limits and lists them
MAPS_LIMIT = 32_000  # half of Linux's default; each compiled program takes several
_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Drops compiled programs before a worker runs out of memory maps, which ends it by a crash."""
    yield
    if next(_tests_run) % 10 or "jax" not in sys.modules or not MAPS.exists():
        return
    with MAPS.open("rb") as maps:
        count = sum(1 for _ in maps)
    if count > MAPS_LIMIT:
        sys.modules["jax"].clear_caches()
