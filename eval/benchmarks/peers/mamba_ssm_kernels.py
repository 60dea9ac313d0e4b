"""The CUDA and Triton kernels of mamba_ssm: the selective scan and SSD. Needs an NVIDIA GPU."""

from importlib.metadata import version

import torch
from torch_clock import timer


def build(case):
    """Makes the arrays; returns what to say about the kernel and a function that times one run."""
    sizes, dtype = case["sizes"], getattr(torch, case["dtype"])
    torch.manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    rows, length = sizes["batch"], sizes["length"]
    if case["op"] == "selective_scan":
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        inner, states = sizes["inner"], sizes["states"]
        x, z = normal(rows, inner, length), normal(rows, inner, length)
        dt = torch.nn.functional.softplus(torch.randn(rows, inner, length, device="cuda") - 4)
        dt = dt.to(dtype).requires_grad_()
        decay = -torch.arange(1.0, states + 1, device="cuda").repeat(inner, 1)
        B, C = normal(rows, states, length), normal(rows, states, length)

        def run():
            return selective_scan_fn(x, dt, decay.requires_grad_(), B, C, z=z)

        inputs = (x, dt, decay, B, C, z)
    elif case["op"] == "ssd":
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        heads, channels = sizes["heads"], sizes["channels"]
        groups, states = sizes["groups"], sizes["states"]
        x = normal(rows, length, heads, channels)
        dt = torch.nn.functional.softplus(torch.randn(rows, length, heads, device="cuda") - 4)
        dt = dt.requires_grad_()
        decay = (-torch.arange(1.0, heads + 1, device="cuda")).requires_grad_()
        B, C = normal(rows, length, groups, states), normal(rows, length, groups, states)

        def run():
            return mamba_chunk_scan_combined(x, dt, decay, B, C, chunk_size=256)

        inputs = (x, dt, decay, B, C)
    else:
        raise ValueError(f"mamba_ssm has no kernel for {case['op']}")
    about = f"mamba_ssm {version('mamba_ssm')}, torch {torch.__version__}"
    return about, timer(run, inputs, case["direction"])
