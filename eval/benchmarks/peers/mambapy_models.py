"""Mamba and Mamba-2 of mambapy on torch: training steps and forward passes."""

import time
from importlib.metadata import version

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(case):
    """Makes the model; returns what to say about it and a function that times one run."""
    published = case["published"]
    if case["bench"] == "decode":
        raise ValueError("mambapy's language models decode without a public step of many rows")
    if published["model_type"] != "mamba":
        raise ValueError(f"mambapy has no {published['model_type']} that runs without CUDA")
    from mambapy.lm import LM
    from mambapy.mamba import MambaConfig

    torch.manual_seed(0)
    config = MambaConfig(
        d_model=published["hidden_size"],
        n_layers=published["num_hidden_layers"],
        d_state=published["state_size"],
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LM(config, vocab_size=published["vocab_size"]).to(device, DTYPES[case["dtype"]])
    shape = (case["batch"], case["length"])
    tokens = torch.randint(4, published["vocab_size"], shape, device=device)
    about = f"mambapy {version('mambapy')}, torch {torch.__version__}, {device}"
    if case["bench"] == "prefill":
        model.eval()

        @torch.inference_mode()
        def forward():
            begin = time.perf_counter()
            model(tokens)[:, -1].argmax(-1)
            return 1e3 * (time.perf_counter() - begin)

        return about, forward

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return 1e3 * (time.perf_counter() - begin)

    return about, step
