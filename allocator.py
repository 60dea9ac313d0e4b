"""How the command line has glibc keep the memory that compiled programs give back.

XLA's CPU client allocates a program's working memory in every call. glibc returns blocks of that
size to the system at once, so that each training step takes its hundreds of megabytes from the
kernel anew, page by page: a fifth to a third of a step's time (docs/performance.md). Kept, and in
large pages, they cost nothing after the first step. The price: a process never gets smaller.
"""

import os
import sys

VARIABLE = "GLIBC_TUNABLES"
# Read by glibc before a program begins, so that setting them takes a new process. One arena: the
# others are limited to 64 MiB, and what does not fit is mapped and unmapped in each call.
TUNABLES = (
    "glibc.malloc.arena_max=1",
    "glibc.malloc.mmap_threshold=1099511627776",
    "glibc.malloc.trim_threshold=1099511627776",
    "glibc.malloc.hugetlb=1",
)


def uses_glibc() -> bool:
    """True where this C library is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):  # Windows, macOS, musl
        return False


def keeps_memory() -> bool:
    """True when this process runs with `TUNABLES`."""
    return uses_glibc() and set(TUNABLES) <= set(os.environ.get(VARIABLE, "").split(":"))


def restart_keeping_memory() -> None:
    """Replaces this process by the same one under `TUNABLES`.

    Does nothing where that would change nothing, or where the user set malloc's tunables already.
    """
    given = os.environ.get(VARIABLE, "")
    if not uses_glibc() or "glibc.malloc." in given or not sys.executable:
        return
    value = ":".join(filter(None, [given, *TUNABLES]))
    # `orig_argv` has the interpreter's own options, too.
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, VARIABLE: value})
