"""`genlab doctor`: true facts, a reason for each refusal, and a fault for what is in the way."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import jax
import pytest
import typer
from genlab import kernels
from genlab.eval import doctor, kernel_support
from genlab.eval.cli_info import doctor_command
from genlab.kernels.dispatch import Implementation
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GENLAB_CACHE", str(tmp_path_factory.mktemp("cache") / "new"))
        before = jax.config.jax_compilation_cache_dir
        yield doctor.examine()
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Leaves the kernels out, whose tracing takes long, and keeps to a cache of its own."""
    monkeypatch.setattr(doctor, "kernel_support", lambda: [])
    monkeypatch.setattr(doctor, "enable_compile_cache", lambda: None)
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "cache"))


def command(*arguments):
    app = typer.Typer()
    app.command()(doctor_command)
    return CliRunner().invoke(app, arguments, standalone_mode=False)


def test_the_facts_are_true(found):
    assert found.faults == []
    assert found.versions["jax"] == jax.__version__ and None not in found.versions.values()
    assert [d.platform for d in found.devices] == [d.platform for d in jax.devices()]
    assert 1 <= found.cores_usable <= found.cores
    assert 0 < found.ram_free_bytes < found.ram_bytes
    assert found.cache.path.endswith("/new") and found.cache.writable
    assert found.cache.used_bytes == 0 and found.cache.free_bytes > 0


def test_every_op_and_implementation_is_asked_in_every_case(found):
    asked = {(one.op, one.name) for one in found.kernels}
    assert asked == {(op, name) for op, table in kernel_support.ops().items() for name in table}
    folders = {path.parent.name for path in Path(kernels.__path__[0]).glob("*/api.py")}
    assert {op for op, _ in asked} == folders
    for one in found.kernels:
        assert len(one.runs) + len(one.refused) == 4
        if one.name in ("reference", "xla"):
            assert not one.refused


def test_a_refusal_comes_with_its_reason(monkeypatch):
    table = kernel_support.ops()["ssd"]

    def supports(x, *args, **options):
        return "want: bfloat16" if x.dtype == "float32" else None

    monkeypatch.setitem(table, "picky", Implementation(table["reference"].run, supports))
    one = kernel_support._ask("ssd", "picky")
    assert one.runs == ["prompt bfloat16", "decode bfloat16"]
    assert one.refused == dict.fromkeys(["prompt float32", "decode float32"], "want: bfloat16")


def test_an_op_that_nothing_runs_is_a_fault(quick, monkeypatch):
    one = kernel_support.KernelSupport(op="ssd", name="xla", runs=[], refused={"decode": "why"})
    monkeypatch.setattr(doctor, "kernel_support", lambda: [one])
    found = doctor.examine()
    assert found.faults == ["kernel ssd: no implementation runs on this device"]
    assert "  ssd xla: not decode: why" in list(doctor.report_lines(found))


def test_what_an_extra_lacks_and_how_to_get_it(quick):
    extras = {extra.name: extra for extra in doctor.examine().extras}
    assert extras["constraints"].missing == []
    assert extras["cuda"].missing and "jax" in extras["cuda"].missing[0]
    assert extras["cuda"].install == "pip install 'genlab[cuda]'"


def test_an_installed_package_tells_its_extras(monkeypatch, tmp_path):
    lines = ["numpy>=2", "tomli; python_version < '3.0'", "nosuchpackage>=1; extra == 'one'",
             "numpy>=999; extra == 'two'"]  # fmt: skip
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    fake = {"Provides-Extra": ["one", "two", "none"]}
    monkeypatch.setattr(
        importlib.metadata, "metadata", lambda name: type("M", (), {"get_all": fake.get})
    )
    declared = doctor._declared()
    assert {e: [str(r) for r in needs] for e, needs in declared.items()} == {
        "": ["numpy>=2"], "one": ["nosuchpackage>=1"], "two": ["numpy>=999"], "none": [],
    }  # fmt: skip
    assert doctor._missing(declared["one"]) == ["nosuchpackage>=1"]
    (old,) = doctor._missing(declared["two"])
    assert old.startswith("numpy>=999 (here ")


def test_usable_is_exit_0(quick):
    result = command()
    assert result.return_value == 0 and result.stdout.splitlines()[-1] == "usable"
    record = json.loads(command("--json").stdout)
    assert record["faults"] == [] and record["devices"][0]["platform"] == "cpu"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no device", "no device computes: backend failed to start"),
        ("file", "cannot be written; GENLAB_CACHE names another"),
        ("full", "free on its disk, want 1 GiB"),
        ("old jaxlib", "want equal versions"),
        ("missing", "packages are missing or too old: flax>=0.12"),
    ],
)
def test_a_fault_is_exit_1_and_one_line(quick, monkeypatch, tmp_path, change, said):
    if change == "no device":
        def refuse():
            raise RuntimeError("backend\nfailed to start")

        monkeypatch.setattr(jax, "devices", refuse)
    elif change == "file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "file" / "cache"))
    elif change == "full":
        usage = shutil.disk_usage(tmp_path)._replace(free=4096)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    else:
        name, version = ("jaxlib", "0.0.1") if change == "old jaxlib" else ("flax", None)
        real = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda n: version if n == name else real(n))
    result = command()
    assert result.return_value == 1 and result.stdout.splitlines()[-1] == "NOT USABLE"
    lines = [line for line in result.stderr.splitlines() if said in line]
    assert lines and all(line.startswith("genlab: ") for line in result.stderr.splitlines())
