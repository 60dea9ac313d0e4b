"""How the command line gets its memory in large pages.

XLA's CPU client allocates a program's working memory in every call, and glibc takes blocks of that
size from the system and gives them back each time. In pages of 4 KiB that costs a fifth to a third
of a training step; in pages of 2 MiB next to nothing (docs/performance.md, also on what keeping
the memory would bring beside).
"""

import os
import sys

VARIABLE = "GLIBC_TUNABLES"
# Since glibc 2.35; older ones ignore it. Read before a program begins: setting it takes a new one.
LARGE_PAGES = "glibc.malloc.hugetlb=1"


def uses_glibc() -> bool:
    """True where this C library is glibc."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):  # Windows, macOS, musl
        return False


def asks_for_large_pages() -> bool:
    """True when this process's allocator asks the system for large pages."""
    return uses_glibc() and LARGE_PAGES in os.environ.get(VARIABLE, "").split(":")


def restart_with_large_pages() -> None:
    """Replaces this process by the same one whose allocator asks for large pages.

    Does nothing where that would change nothing, or where the user set malloc's tunables already.
    """
    given = os.environ.get(VARIABLE, "")
    if not uses_glibc() or "glibc.malloc." in given or not sys.executable:
        return
    value = f"{given}:{LARGE_PAGES}".lstrip(":")
    # `orig_argv` has the interpreter's own options, too.
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, VARIABLE: value})
