"""What a figure depends on: hashes of code and configuration, and the environment it came from."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import jax

PACKAGE = Path(__file__).resolve().parent.parent
TRAINING_CODE = ("kernels", "paradigms", "train")


@cache
def code_hash(*folders: str) -> str:
    """Hash over the sources below the named folders of the package, names included."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(str(path.relative_to(PACKAGE)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def stable_hash(*parts: Any) -> str:
    """Twelve hex digits over JSON-able parts."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def training_hash(run_json: str, data_fingerprint: str) -> str:
    """Identity of a trained entry: configuration, data, tokenizer, code and JAX version."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")]
    return stable_hash(run_json, data_fingerprint, code_hash(*TRAINING_CODE), versions)


def environment() -> dict[str, Any]:
    """Machine, device and versions, as they go into `results.json`."""
    device = jax.devices()[0]
    packages = "jax jaxlib flax optax orbax-checkpoint grain numpy tokenizers".split()
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "device_count": jax.device_count(),
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
        "genlab": importlib.metadata.version("genlab") if _installed() else "source",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _installed() -> bool:
    try:
        importlib.metadata.version("genlab")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
