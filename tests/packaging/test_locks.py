"""The pinned versions: complete, without CUDA or torch, and in step with pyproject.toml."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("constraints-py*.txt"))
MACHINES = {
    "linux-x86_64": {"sys_platform": "linux", "platform_machine": "x86_64"},
    "linux-aarch64": {"sys_platform": "linux", "platform_machine": "aarch64"},
    "macos-arm64": {
        "sys_platform": "darwin",
        "platform_machine": "arm64",
        "platform_system": "Darwin",
    },
}


def python_of(lock: Path) -> str:
    digits = re.fullmatch(r"constraints-py3(\d+)\.txt", lock.name)
    assert digits is not None
    return f"3.{digits[1]}"


def pins_of(lock: Path, machine: str) -> dict[str, Version]:
    """The pinned versions that hold for one kind of machine."""
    python = python_of(lock)
    environment = {"python_version": python, "python_full_version": f"{python}.5"}
    environment |= {"os_name": "posix"} | MACHINES[machine]
    pins: dict[str, Version] = {}
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(environment):
                (specifier,) = pin.specifier
                name = canonicalize_name(pin.name)
                assert specifier.operator == "==" and pin.url is None and not pin.extras, line
                assert name not in pins, f"{name} is pinned twice"
                pins[name] = Version(specifier.version)
    return pins


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_a_lock_for_each_python_that_make_tries() -> None:
    line = re.search(r'^versions="([\d. ]+)"$', (ROOT / ".ci" / "venv.sh").read_text(), re.M)
    assert line is not None
    assert sorted(line[1].split()) == sorted(map(python_of, LOCKS))
    assert {"3.11", "3.12", "3.13"} <= set(line[1].split())


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_lock_meets_the_declared_requirements(lock: Path, machine: str, project: dict) -> None:
    pins = pins_of(lock, machine)
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, declared):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} is not pinned in {lock.name}"
        assert requirement.specifier.contains(pin), f"{requirement} but {lock.name} has {pin}"
    # jaxlib and jax are released together, and a mixed pair fails at import.
    assert pins["jax"] == pins["jaxlib"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_lock_holds_no_accelerator_and_no_torch(lock: Path) -> None:
    heavy = re.compile(r"^(nvidia|torch|triton|jax-cuda|jax-rocm|libtpu|transformers|tensorflow\b)")
    names = [line.split("==")[0] for line in lock.read_text().splitlines()]
    assert [n for n in names if heavy.match(n)] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_lock_names_no_index(lock: Path) -> None:
    assert [x for x in lock.read_text().splitlines() if "://" in x or x.startswith("-")] == []


def test_lock_is_transitively_complete(project: dict) -> None:
    """Walks the installed metadata from the declared requirements: each package met is pinned."""
    python = "{}.{}".format(*default_environment()["python_version"].split(".")[:2])
    (lock,) = (p for p in LOCKS if python_of(p) == python)
    pinned = {canonicalize_name(x.split("==")[0]) for x in lock.read_text().splitlines()}
    declared = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    queue, seen = list(map(Requirement, declared)), set()
    while queue:
        requirement = queue.pop()
        extras = {"", *requirement.extras}
        marker = requirement.marker
        entry = (canonicalize_name(requirement.name), frozenset(extras))
        if entry in seen or (marker and not marker.evaluate({"extra": ""})):
            continue
        seen.add(entry)
        for text in metadata.requires(requirement.name) or []:
            child = Requirement(text)
            if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras):
                child.marker = None
                queue.append(child)
    met = {name for name, _ in seen}
    assert {"jaxlib", "tensorstore", "pydantic-core"} <= met  # the walk went below the surface
    assert sorted(met - pinned) == []
