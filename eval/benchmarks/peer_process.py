"""A peer in a child process, which takes its turn when it is asked."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...errors import GenlabError

SERVE = Path(__file__).parent / "peers" / "serve.py"
# By the name of `--peer`: the file in `peers`, and the benches that it takes part in.
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("transformers_models", ("train", "prefill", "decode")),
    "mambapy": ("mambapy_models", ("train", "prefill")),
    "mamba_ssm": ("mamba_ssm_kernels", ("kernels",)),
    "fla": ("fla_kernels", ("kernels",)),
}
INSIDE = ("cudnn", "tokamax")  # implementations of our own table, which run in our process


class PeerRefused(GenlabError):
    """A peer is not installed or cannot run a case; the message says why."""


class Peer:
    """One case in a child process; a `Subject`.

    It runs outside the checkout with PYTHONSAFEPATH=1: transformers looks for a package called
    `kernels` and would find ours.
    """

    def __init__(self, peer: str, case: dict[str, Any], python: str | None = None):
        """Starts the child and has the case built.

        Args:
            peer: a key of `PEERS`.
            case: what the peer's `build` takes; `dtype` among it.
            python: the interpreter that has the peer; ours when None.

        Raises:
            PeerRefused: the peer is missing, or cannot run the case.
        """
        self.name = f"{peer} {case['dtype']}"
        self._folder = tempfile.TemporaryDirectory()
        # Threads that spin while they wait for work would take the cores from us in our turn.
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TOKENIZERS_PARALLELISM": "0"}
        self._errors = tempfile.TemporaryFile()
        self._child = subprocess.Popen(
            [python or sys.executable, str(SERVE), PEERS[peer][0]],
            cwd=self._folder.name,
            env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            answer = self._ask(case)
            if "refused" in answer:
                raise PeerRefused(f"{self.name}: {answer['refused']}")
        except BaseException:
            self.close()
            raise
        self.about: str = answer["about"]

    def run(self) -> float:
        """Milliseconds per step of one timed run."""
        return float(self._ask({})["ms"])

    def close(self) -> None:
        """Ends the child."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> "Peer":
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the child."""
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            tail = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise PeerRefused(f"{self.name}: its process ended: {' '.join(tail) or 'no message'}")
        return json.loads(line)
