"""Times a function of torch on a GPU, forward or with gradients."""

import time

import torch

CALLS = 10  # per timed run: a kernel may take less than the wait for it


def timer(run, inputs, direction):
    """A function that times one run; returns milliseconds per call."""
    cotangent = torch.randn_like(run())

    def call():
        if direction == "forward":
            with torch.inference_mode():
                run()
        else:
            torch.autograd.grad(run(), inputs, cotangent)

    def timed():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / CALLS

    return timed
