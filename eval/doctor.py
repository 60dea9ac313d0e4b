"""Whether genlab can run here, and with what: versions, devices, disk, kernels, extras."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from ..allocator import asks_for_large_pages
from ..errors import GenlabError
from ..train.data.cache import default_cache_dir
from ..train.device import enable_compile_cache
from .formatting import byte_size
from .kernel_support import KernelSupport, kernel_support
from .record import Record

PACKAGE = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
OLDEST_PYTHON = (3, 11)
LITTLE_DISK = 1 << 30  # bytes: the embedded corpus, its tokens and compiled programs fit


class DeviceFacts(Record):
    """One device. `memory_bytes` is null where the backend tells none (a CPU uses the RAM)."""

    id: int
    platform: str
    kind: str
    memory_bytes: int | None


class Folder(Record):
    """A folder that genlab writes into.

    Attributes:
        path: where.
        free_bytes: on its disk.
        writable: by this user.
        used_bytes: by the files in it.
    """

    path: str
    free_bytes: int
    writable: bool
    used_bytes: int


class Extra(Record):
    """An extra: the requirements that are missing, and the line that installs them."""

    name: str
    missing: list[str]
    install: str


class Findings(Record):
    """Everything that `genlab doctor` finds.

    Attributes:
        genlab, python: versions.
        versions: of the packages that results depend on; null for one that is missing.
        devices: that JAX sees; the first is used.
        cores, cores_usable: of the machine, and those that this process may use.
        ram_bytes, ram_free_bytes: of the machine.
        large_pages: whether the allocator asks the system for them (`genlab.allocator`).
        cache: folder of corpora, tokenizers and tokens.
        compile_cache: folder of compiled programs.
        kernels: what each implementation of each op can run on the device.
        extras: optional parts.
        faults: what keeps genlab from running; empty if nothing does.
    """

    genlab: str
    python: str
    versions: dict[str, str | None]
    devices: list[DeviceFacts]
    cores: int
    cores_usable: int
    ram_bytes: int
    ram_free_bytes: int
    large_pages: bool
    cache: Folder
    compile_cache: Folder
    kernels: list[KernelSupport]
    extras: list[Extra]
    faults: list[str]


def examine() -> Findings:
    """Looks at everything; what fails becomes a fault, not an exception."""
    faults = [*_version_faults()]
    devices: list[DeviceFacts] = []
    kernels: list[KernelSupport] = []
    try:
        devices = [_device(device) for device in jax.devices()]
        if float(jnp.arange(4.0).sum()) != 6.0:
            faults.append(f"{devices[0].kind}: adds 0, 1, 2 and 3 up to another number than 6")
        kernels = kernel_support()
    except (RuntimeError, GenlabError) as error:
        faults.append(f"no device computes: {' '.join(str(error).split())}")
    enable_compile_cache()
    cache = _folder(default_cache_dir())
    compiled = _folder(Path(str(jax.config.jax_compilation_cache_dir)))
    for what, folder in (("cache", cache), ("compile cache", compiled)):
        if not folder.writable:
            faults.append(f"{what} {folder.path}: cannot be written; GENLAB_CACHE names another")
        elif folder.free_bytes < LITTLE_DISK:
            faults.append(
                f"{what} {folder.path}: {byte_size(folder.free_bytes)} free on its disk, want "
                f"{byte_size(LITTLE_DISK)}; GENLAB_CACHE names a folder on another"
            )
    for op in {one.op for one in kernels}:
        if not any(one.runs for one in kernels if one.op == op and one.name != "reference"):
            faults.append(f"kernel {op}: no implementation runs on this device")
    memory = psutil.virtual_memory()
    return Findings(
        genlab=_version("genlab") or "source",
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        devices=devices,
        cores=os.cpu_count() or 1,
        cores_usable=_usable_cores(),
        ram_bytes=memory.total,
        ram_free_bytes=memory.available,
        large_pages=asks_for_large_pages(),
        cache=cache,
        compile_cache=compiled,
        kernels=kernels,
        extras=[_extra(name, needs) for name, needs in declared_extras().items()],
        faults=faults,
    )


def report_lines(found: Findings) -> Iterator[str]:
    """The findings as text, a line at a time."""
    yield f"genlab {found.genlab}, Python {found.python}"
    yield ", ".join(f"{name} {version or 'missing'}" for name, version in found.versions.items())
    yield ""
    for device in found.devices:
        size = device.memory_bytes
        memory = "the machine's memory" if size is None else f"{byte_size(size)} of memory"
        yield f"device {device.id}: {device.platform}, {device.kind}, {memory}"
    yield f"cores: {found.cores}, of which {found.cores_usable} usable here"
    yield f"RAM: {byte_size(found.ram_bytes)}, {byte_size(found.ram_free_bytes)} free"
    yield f"large pages: {'asked for' if found.large_pages else 'not asked for'}"
    for what, folder in (("cache", found.cache), ("compiled programs", found.compile_cache)):
        state = "" if folder.writable else ", NOT WRITABLE"
        used, free = byte_size(folder.used_bytes), byte_size(folder.free_bytes)
        yield f"{what}: {folder.path}, {used} used, {free} free{state}"
    yield ""
    yield "kernels on this device"
    for one in found.kernels:
        reasons = "; ".join(f"not {case}: {reason}" for case, reason in one.refused.items())
        yield f"  {one.op} {one.name}: {reasons or 'runs'}"
    yield ""
    yield "extras"
    for extra in found.extras:
        lack = f"lacks {', '.join(extra.missing)}: {extra.install}" if extra.missing else "there"
        yield f"  {extra.name}: {lack}"
    yield ""
    yield "usable" if not found.faults else "NOT USABLE"


def declared_extras() -> dict[str, list[Requirement]]:
    """The extras and what they require: of the checkout, or of the installed package."""
    return {extra: needs for extra, needs in _declared().items() if extra}


def _declared() -> dict[str, list[Requirement]]:
    """Requirements by extra; those without an extra under the empty name."""
    project = PACKAGE / "pyproject.toml"
    if project.is_file():  # newer than the metadata of a checkout that is installed in place
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        groups = {"": table["dependencies"], **table["optional-dependencies"]}
        return {extra: [Requirement(one) for one in needs] for extra, needs in groups.items()}
    metadata = importlib.metadata.metadata("genlab")
    requirements = [Requirement(one) for one in importlib.metadata.requires("genlab") or []]
    declared: dict[str, list[Requirement]] = {"": []}
    for extra in metadata.get_all("Provides-Extra") or []:
        declared[extra] = []
    for one in requirements:
        holds = [e for e in declared if one.marker is None or one.marker.evaluate({"extra": e})]
        one.marker = None
        # What holds without an extra is the package's own.
        for extra in [""] if "" in holds else holds:
            declared[extra].append(one)
    return declared


def _version_faults() -> Iterator[str]:
    if sys.version_info < OLDEST_PYTHON:
        yield f"Python {platform.python_version()}: want 3.11 or newer"
    missing = _missing(_declared()[""])
    if missing:
        yield f"packages are missing or too old: {', '.join(missing)}; pip install genlab"
    if _version("jax") != _version("jaxlib"):
        yield (
            f"jax {_version('jax')} with jaxlib {_version('jaxlib')}: want equal versions; "
            "pip install --upgrade jax jaxlib"
        )


def _extra(name: str, needs: list[Requirement]) -> Extra:
    return Extra(name=name, missing=_missing(needs), install=f"pip install 'genlab[{name}]'")


def _missing(needs: list[Requirement], seen: frozenset[str] = frozenset()) -> list[str]:
    """What is not installed, or not in a version that is wanted; looks into extras."""
    missing = []
    for one in needs:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version = _version(one.name)
        if version is None or not one.specifier.contains(Version(version), prereleases=True):
            missing.append(str(one) if version is None else f"{one} (here {version})")
            continue
        if one.extras and str(one) not in seen:
            inner = [Requirement(r) for r in importlib.metadata.requires(one.name) or []]
            asked = [r for r in inner if r.marker is not None and _of_extra(r, one.extras)]
            for requirement in asked:
                requirement.marker = None
            missing += _missing(asked, seen | {str(one)})
    return missing


def _of_extra(requirement: Requirement, extras: set[str]) -> bool:
    """True when it is required by one of these extras and not without them."""
    marker = requirement.marker
    assert marker is not None
    asked = any(marker.evaluate({"extra": extra}) for extra in extras)
    return asked and not marker.evaluate({"extra": ""})


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(device: jax.Device) -> DeviceFacts:
    stats = device.memory_stats() or {}
    return DeviceFacts(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        memory_bytes=stats.get("bytes_limit"),
    )


def _folder(path: Path) -> Folder:
    """Facts of a folder, which need not exist: then of the one that it would be made in."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Folder(
        path=str(path),
        free_bytes=shutil.disk_usage(existing).free,
        writable=writable,
        used_bytes=_size(path),
    )


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue  # another process deleted it meanwhile
    return total


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
