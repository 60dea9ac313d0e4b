"""Trains in a process of its own that sends itself a signal; started by test_resume.py."""

import os
import signal
import sys

from genlab.train.config import RunConfig
from genlab.train.loop import train
from genlab.train.signals import Interrupted


def main() -> int:
    config = RunConfig.model_validate_json(sys.argv[1])
    out, at, number = sys.argv[2], int(sys.argv[3]), signal.Signals[sys.argv[4]]

    def callback(progress):
        if progress.step == at:
            os.kill(os.getpid(), number)

    try:
        train(config, out, progress=callback)
    except Interrupted as stop:
        print(stop)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
