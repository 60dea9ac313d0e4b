"""The command line's process runs with glibc keeping freed memory, or as the user set it."""

import os
import subprocess
import sys

import pytest
from genlab import allocator

glibc_only = pytest.mark.skipif(not allocator.uses_glibc(), reason="the settings are glibc's")
PROGRAM = """
import os, sys
from genlab import allocator
print(os.getpid(), sys.argv, sys.flags.dev_mode)
allocator.restart_keeping_memory()
print(os.environ["GLIBC_TUNABLES"], allocator.keeps_memory())
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
    assert after == f"{':'.join(allocator.TUNABLES)} True"


@glibc_only
def test_other_tunables_stay(tmp_path):
    *_, after = run(tmp_path, GLIBC_TUNABLES="glibc.pthread.rseq=0")
    assert after == f"glibc.pthread.rseq=0:{':'.join(allocator.TUNABLES)} True"


@glibc_only
def test_the_users_own_settings_win(tmp_path):
    _, after = run(tmp_path, GLIBC_TUNABLES="glibc.malloc.check=0")
    assert after == "glibc.malloc.check=0 False"


@glibc_only
def test_freed_memory_stays(tmp_path):
    """What the settings are for: the second use of a large block takes no page from the kernel."""
    program = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    block = libc.malloc(ctypes.c_size_t(64 << 20))\n"
        "    ctypes.memset(block, 1, 64 << 20)\n"
        "    libc.free(ctypes.c_void_p(block))\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); print(faults())\n"
    )

    def second(**environment):
        inherited = {k: v for k, v in os.environ.items() if k != allocator.VARIABLE}
        command = [sys.executable, "-c", program]
        env = {**inherited, **environment}
        return int(subprocess.run(command, env=env, capture_output=True, text=True).stdout)

    settings = {allocator.VARIABLE: ":".join(allocator.TUNABLES)}
    assert second(**settings) < 16
    assert second() >= 32  # the pages of 64 MiB, also if they are large ones


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(allocator, "uses_glibc", lambda: False)
    monkeypatch.delenv(allocator.VARIABLE, raising=False)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("restarted"))
    allocator.restart_keeping_memory()
    assert not allocator.keeps_memory()
