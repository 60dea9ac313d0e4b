"""SSD by flash-linear-attention's gated linear attention with one decay per head (Triton)."""

from importlib.metadata import version

import torch
from fla.ops.simple_gla import chunk_simple_gla
from torch_clock import timer


def build(case):
    """Makes the arrays; returns what to say about the kernel and a function that times one run.

    With q = C, k = B, v = dt x and the log decay dt A it computes SSD; B and C repeated per head.
    """
    if case["op"] != "ssd":
        raise ValueError(f"flash-linear-attention has no kernel for {case['op']}")
    sizes, dtype = case["sizes"], getattr(torch, case["dtype"])
    rows, length, heads = sizes["batch"], sizes["length"], sizes["heads"]
    torch.manual_seed(0)

    def normal(width):
        shape = (rows, length, heads, width)
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    v, k, q = normal(sizes["channels"]), normal(sizes["states"]), normal(sizes["states"])
    dt = torch.nn.functional.softplus(torch.randn(rows, length, heads, device="cuda") - 4)
    decay = (-dt * torch.arange(1.0, heads + 1, device="cuda")).requires_grad_()

    def run():
        return chunk_simple_gla(q, k, v, decay, scale=1.0)[0]

    about = f"flash-linear-attention {version('flash-linear-attention')}, torch {torch.__version__}"
    return about, timer(run, (q, k, v, decay), case["direction"])
