"""The command line's process asks for large pages, unless the user set the allocator up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from genlab import allocator

glibc_only = pytest.mark.skipif(not allocator.uses_glibc(), reason="the setting is glibc's")
PROGRAM = """
import os, sys
from genlab import allocator
print(os.getpid(), sys.argv, sys.flags.dev_mode)
allocator.restart_with_large_pages()
print(os.environ["GLIBC_TUNABLES"], allocator.asks_for_large_pages())
"""


def run(tmp_path, **environment):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    inherited = {k: v for k, v in os.environ.items() if k != allocator.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-X", "dev", str(script), "a b"],
        env={**inherited, "PYTHONUNBUFFERED": "1", **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@glibc_only
def test_restarts_once_as_the_same_process(tmp_path):
    before, again, after = run(tmp_path)
    assert before == again  # pid, arguments, the interpreter's options
    assert after == f"{allocator.LARGE_PAGES} True"


@glibc_only
def test_other_tunables_stay(tmp_path):
    *_, after = run(tmp_path, GLIBC_TUNABLES="glibc.pthread.rseq=0")
    assert after == f"glibc.pthread.rseq=0:{allocator.LARGE_PAGES} True"


@glibc_only
def test_the_users_own_settings_win(tmp_path):
    _, after = run(tmp_path, GLIBC_TUNABLES="glibc.malloc.check=0")
    assert after == "glibc.malloc.check=0 False"


def _system_gives_large_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split() if allocator.uses_glibc() else []
    recent = bool(version) and tuple(map(int, version[1].split(".")[:2])) >= (2, 35)
    return recent and setting.is_file() and "[madvise]" in setting.read_text()


@pytest.mark.skipif(not _system_gives_large_pages(), reason="glibc 2.35, large pages on request")
def test_a_large_block_comes_in_large_pages():
    program = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "block = libc.malloc(ctypes.c_size_t(64 << 20))\n"
        "ctypes.memset(block, 1, 64 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )

    def faults(**environment):
        inherited = {k: v for k, v in os.environ.items() if k != allocator.VARIABLE}
        command = [sys.executable, "-c", program]
        env = {**inherited, **environment}
        return int(subprocess.run(command, env=env, capture_output=True, text=True).stdout)

    # Memory too fragmented for some of the 32 large pages still leaves most of them.
    assert 2 * faults(**{allocator.VARIABLE: allocator.LARGE_PAGES}) < faults()


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(allocator, "uses_glibc", lambda: False)
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("restarted"))
    allocator.restart_with_large_pages()
    assert not allocator.asks_for_large_pages()
