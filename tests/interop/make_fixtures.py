"""Writes the small random checkpoints of `fixtures/` with transformers, and what it computes.

    pip install genlab[peers]
    PYTHONSAFEPATH=1 python tests/interop/make_fixtures.py [NAME ...]

Run it outside of the checkout's root: transformers probes for a package called `kernels`. With
`--other FOLDER` it writes checkpoints of other sizes there, whose rows are grown further. Each
folder gets the checkpoint as `save_pretrained` writes it and `expected.npz`:

    tokens, logits            (B T), (B T V): whole rows
    padded, valid, padded_logits   the same rows cut to different lengths, padded on the left
    greedy                    (B N): what `generate` adds to the rows without sampling; not there
                              for models that fill masks, of which the rows have some

What is made is listed in fixture_cases.py.
"""

import argparse
import copy
import inspect
import runpy
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
ROWS, LENGTH, NEW, OTHER_NEW = 2, 13, 8, 64
LENGTHS = (5, 11)  # of the left-padded rows
CONFIGS = runpy.run_path(str(Path(__file__).with_name("fixture_cases.py")))
VOCAB, MASK = CONFIGS["VOCAB"], CONFIGS["MASK"]


def randomise(model: torch.nn.Module, generator: torch.Generator, gain: float = 1.5) -> None:
    """Gives every parameter a size at which its role shows in the logits.

    Args:
        model: whose parameters to draw.
        generator: of the draws.
        gain: of the matrices: what a unit input's variance becomes, as a root.
    """
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            parameter.data += 0.3 * draw
        elif ("norm" in name.lower() and name.endswith("weight")) or name.endswith(".D"):
            parameter.data = 1 + 0.3 * draw
        elif parameter.ndim < 2:
            parameter.data = 0.5 * draw
        elif "embed" in name or "wte" in name:
            parameter.data = draw
        else:
            parameter.data = gain * draw / np.sqrt(parameter[0].numel())


def causal_rows(
    model: torch.nn.Module, tokens: np.ndarray, lengths: tuple[int, ...], new: int
) -> dict[str, np.ndarray]:
    """What a causal model makes of the rows, and `new` tokens that it adds to them.

    Each call has a copy of the model: dynamic rotary phases remember the longest call.
    """
    padded, valid = left_padded(tokens, lengths)
    mask = torch.tensor(valid)
    positions = torch.clamp(torch.cumsum(mask.long(), 1) - 1, min=0)
    given = {"attention_mask": mask.long()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = positions
    with torch.no_grad():
        logits = copy.deepcopy(model)(torch.tensor(tokens)).logits
        padded_logits = copy.deepcopy(model)(torch.tensor(padded), **given).logits
        grown = copy.deepcopy(model).generate(
            torch.tensor(tokens),
            attention_mask=torch.ones_like(torch.tensor(tokens)),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
    return {
        "tokens": tokens.astype(np.int32),
        "logits": logits.numpy(),
        "padded": padded.astype(np.int32),
        "valid": valid,
        "padded_logits": padded_logits.numpy(),
        "greedy": grown[:, tokens.shape[1] :].numpy().astype(np.int32),
    }


def masked_rows(
    model: torch.nn.Module, tokens: np.ndarray, lengths: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """What a model that looks both ways makes of the rows, some of whose tokens are masks."""
    tokens = tokens.copy()
    tokens[:, 2::4] = MASK
    padded, valid = left_padded(tokens, lengths)
    first = model.config.pad_token_id + 1 if model.config.model_type == "roberta" else 0
    positions = first + np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits
        padded_logits = model(
            torch.tensor(padded),
            attention_mask=torch.tensor(valid).long(),
            position_ids=torch.tensor(positions),
        ).logits
    return {
        "tokens": tokens.astype(np.int32),
        "logits": logits.numpy(),
        "padded": padded.astype(np.int32),
        "valid": valid,
        "padded_logits": padded_logits.numpy(),
    }


def left_padded(tokens: np.ndarray, lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The rows cut to lengths and moved to the right, and where they are."""
    valid = np.zeros(tokens.shape, bool)
    padded = np.zeros_like(tokens)
    for row, length in enumerate(lengths):
        padded[row, -length:] = tokens[row, :length]
        valid[row, -length:] = True
    return padded, valid


def make(folder: Path, case: tuple[str, dict, dict], new: int) -> None:
    """Writes one checkpoint."""
    kind, settings, how = case
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    masked = "mask_token_id" in settings
    model_class = getattr(transformers, f"{kind}For{'MaskedLM' if masked else 'CausalLM'}")
    model = model_class(config)
    if not masked:
        model.generation_config.eos_token_id = settings.get("eos_token_id")
    how = dict(how)
    randomise(model, torch.Generator().manual_seed(1), how.pop("gain", 1.5))
    model.eval()
    lengths = how.pop("lengths", LENGTHS)
    model = model.to(getattr(torch, how.pop("dtype", "float32")))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    model.save_pretrained(folder, **how)
    # Read again: `to` would have rounded tables of phases that are computed in float32 otherwise.
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, VOCAB, (ROWS, LENGTH))
    if masked:
        found = masked_rows(model, tokens, lengths)
    else:
        found = causal_rows(model, tokens, lengths, new)
    np.savez_compressed(folder / "expected.npz", **found)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size / 1000:.0f} kB, {sorted(file.name for file in folder.iterdir())}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--other", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    cases, into, new = CONFIGS["CASES"], FIXTURES, NEW
    if chosen.other is not None:
        cases, into, new = CONFIGS["OTHER"], chosen.other, OTHER_NEW
    for name in chosen.names or cases:
        make(into / name, cases[name], new)


if __name__ == "__main__":
    main()
