"""Runs a peer in a process of its own: cases and run requests come in as lines of JSON.

    python serve.py PEER        (PEER names a file beside this one)

The first line is a case. The answer says what was built, or why not. Each further line asks for one
timed run; the answer is its milliseconds per step. Imports nothing of genlab, so that a peer is
measured as its users run it, and nothing of its libraries reaches our process.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Serves one case until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(**values) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    case = json.loads(sys.stdin.readline())
    path = Path(__file__).with_name(f"{sys.argv[1]}.py")
    sys.path.append(str(path.parent))  # for what peers share; nothing there hides a library
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        about, run = module.build(case)
    except Exception as error:
        answer(refused=f"{type(error).__name__}: {error}")
        return
    answer(about=about)
    for _ in sys.stdin:
        answer(ms=run())


if __name__ == "__main__":
    main()
