"""Models of transformers on torch: training steps, prefill and decode steps.

Random weights unless the case names a checkpoint; time does not depend on them.
"""

import time

import torch
import transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHES = ("cache", "past_key_values", "cache_params")  # the argument's name by release and model


def build(case):
    """Makes the model; returns what to say about it and a function that times one run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[case["dtype"]]
    torch.manual_seed(0)
    if case.get("checkpoint"):
        model = transformers.AutoModelForCausalLM.from_pretrained(case["checkpoint"], dtype=dtype)
    else:
        values = dict(case["published"])
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device)
    rows, length = case["batch"], case["length"]
    tokens = torch.randint(4, model.config.vocab_size, (rows, length), device=device)
    make = {"train": _train, "prefill": _prefill, "decode": _decode}[case["bench"]]
    about = f"transformers {transformers.__version__}, torch {torch.__version__}, {device}"
    return about, make(model, tokens, case)


def _wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _train(model, tokens, case):
    del case
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def run():
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _wait()
        return 1e3 * (time.perf_counter() - begin)

    return run


def _prefill(model, tokens, case):
    del case
    model.eval()

    @torch.inference_mode()
    def run():
        begin = time.perf_counter()
        out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1)
        _wait()
        return 1e3 * (time.perf_counter() - begin)

    return run


def _decode(model, tokens, case):
    model.eval()

    @torch.inference_mode()
    def run():
        out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        name = next(n for n in CACHES if getattr(out, n, None) is not None)
        last, held = out.logits[:, -1:].argmax(-1), getattr(out, name)
        _wait()
        begin = time.perf_counter()
        for _ in range(case["new_tokens"]):
            out = model(input_ids=last, use_cache=True, **{name: held})
            last, held = out.logits[:, -1:].argmax(-1), getattr(out, name)
        _wait()
        return 1e3 * (time.perf_counter() - begin) / case["new_tokens"]

    return run
