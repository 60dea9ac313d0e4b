"""Ctrl-C and SIGTERM end training between two updates, after a checkpoint."""

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop and has saved where it is.

    A KeyboardInterrupt, so that whoever does not know training treats it as Ctrl-C.

    Attributes:
        number: the signal.
        checkpoint: what was saved.
        step: updates done.
    """

    def __init__(self, number: int, checkpoint: Path, step: int):
        """Says in one line what was saved and how to go on."""
        self.number, self.checkpoint, self.step = number, checkpoint, step
        name = signal.Signals(number).name
        super().__init__(
            f"{name}: saved {checkpoint} after update {step}; the same command goes on from there"
        )


class Signals:
    """A context in which SIGTERM and SIGINT are noted; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        """Installs nothing yet."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Installs the handlers, in the main thread only: others have no signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Puts the former handlers back."""
        for number, handler in self._before.items():
            if handler is not None:  # None: installed by something that is not Python
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
