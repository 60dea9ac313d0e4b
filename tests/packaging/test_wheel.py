"""What `pip install genlab` brings: all of the package and nothing else."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def test_every_folder_with_files_is_a_listed_package(root: Path, modules: list[Path]) -> None:
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    wanted = {".".join(["genlab", *p.parent.parts]) for p in modules} | {"genlab.configs"}
    assert sorted(listed) == sorted(wanted), "edit [tool.setuptools] packages in pyproject.toml"


def test_every_folder_of_modules_has_an_init(root: Path, modules: list[Path]) -> None:
    assert [str(p.parent) for p in modules if not (root / p.parent / "__init__.py").is_file()] == []


def test_wheel_holds_every_file_of_the_package(wheel: Path, package_files: list[Path]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [str(p) for p in package_files if f"genlab/{p.as_posix()}" not in names]
    assert missing == [], "name them in [tool.setuptools] packages or package-data"


def test_wheel_holds_nothing_else(wheel: Path, package_files: list[Path]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    known = {f"genlab/{p.as_posix()}" for p in package_files}
    info = f"{wheel.name.split('-py3')[0]}.dist-info/"
    assert [n for n in names if n not in known and not n.startswith(info)] == []
    assert {f"{info}licenses/LICENSE", f"{info}licenses/NOTICE"} <= set(names)


def test_wheel_metadata(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    info = f"{wheel.name.split('-py3')[0]}.dist-info/"
    assert "genlab = genlab.cli:start" in files.read(info + "entry_points.txt").decode()
    lines = files.read(info + "METADATA").decode().splitlines()
    fields = [line.split(": ", 1) for line in lines[: lines.index("")]]
    assert [v for k, v in fields if k == "Requires-Python"] == [">=3.11"]
    required = [Requirement(v) for k, v in fields if k == "Requires-Dist"]
    default = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert [str(r) for r in default if r.extras] == []  # jax[cuda12] belongs to an extra of ours
    assert not {r.name for r in default} & {"torch", "transformers", "pytest"}
    (jax,) = (r for r in default if r.name == "jax")
    assert jax.specifier.contains(Version("0.10.2")) and not jax.specifier.contains("0.10.1")


def test_every_module_imports_from_the_wheel(wheel: Path, modules: list[Path], tmp_path) -> None:
    """No module needs the checkout, its working directory or an undeclared dependency."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    peers = Path("eval/benchmarks/peers")  # run by child processes that have torch
    modules = [p for p in modules if p.parent != peers or p.stem in ("__init__", "serve")]
    names = [".".join(["genlab", *p.with_suffix("").parts]) for p in modules]
    names = [n.removesuffix(".__init__") for n in names if not n.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print(sys.modules['genlab'].__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *names],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(site / "genlab" / "__init__.py")
