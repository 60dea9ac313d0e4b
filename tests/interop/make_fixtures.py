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
"""

import argparse
import copy
import inspect
from pathlib import Path

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
ROWS, LENGTH, NEW, VOCAB = 2, 13, 8, 97
LENGTHS = (5, 11)  # of the left-padded rows

SMALL = {
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(kind: str, **settings: object) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
SSM = {
    key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size", "eos_token_id")
}


ALL_HEADS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
MASK = 4
MASKED = {"mask_token_id": MASK}


# name -> (class in transformers without its ending, config, how it is saved)
CASES: dict[str, tuple[str, dict, dict]] = {
    "llama_linear": (
        "Llama",
        SMALL | {"num_attention_heads": 3, "num_key_value_heads": 3} | rope("linear", factor=3.0),
        {"max_shard_size": "40KB"},
    ),
    "llama3": (
        "Llama",
        SMALL
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        | LLAMA3,
        {},
    ),
    "llama_biases": (
        "Llama",
        SMALL
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "hidden_act": "gelu"}
        | {"max_position_embeddings": 9}
        | rope("dynamic", factor=2.0),
        # transformers takes the base of the longest row for all; ours goes by each row's length.
        {"lengths": (11, 11)},
    ),
    "llama_bfloat16": ("Llama", SMALL | {"num_key_value_heads": 3}, {"dtype": "bfloat16"}),
    "mistral": ("Mistral", SMALL | {"sliding_window": 5, "head_dim": 8} | rope("default"), {}),
    "qwen2": (
        "Qwen2",
        SMALL
        | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        | rope("yarn", factor=4.0, original_max_position_embeddings=16),
        {},
    ),
    "qwen3": (
        "Qwen3",
        SMALL
        | {"head_dim": 14, "tie_word_embeddings": True}
        | rope(
            "yarn",
            factor=2.0,
            original_max_position_embeddings=32,
            attention_factor=1.2,
            beta_fast=16.0,
            beta_slow=2.0,
        ),
        {},
    ),
    "gpt_neox": (
        "GPTNeoX",
        ALL_HEADS | {"num_attention_heads": 3, **rope("default", partial_rotary_factor=0.5)},
        {},
    ),
    "gpt_neox_sequential": (
        "GPTNeoX",
        ALL_HEADS
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "use_parallel_residual": False}
        | {"tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_fast"},
        {},
    ),
    "mixtral": (
        "Mixtral",
        SMALL | {"intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 3},
        {},
    ),
    "mamba": ("Mamba", SSM | {"state_size": 5, "time_step_rank": 3}, {}),
    "mamba2": (
        "Mamba2",
        SSM
        | {"state_size": 6, "head_dim": 12, "num_heads": 6, "n_groups": 2, "chunk_size": 4}
        | {"tie_word_embeddings": False},
        {},
    ),
    "bert": (
        "Bert",
        ALL_HEADS | MASKED | {"num_attention_heads": 3, "max_position_embeddings": 20},
        {},
    ),
    "roberta": (
        "Roberta",
        ALL_HEADS
        | MASKED
        | {"max_position_embeddings": 20, "pad_token_id": 1, "type_vocab_size": 1}
        | {"num_hidden_layers": 1, "hidden_act": "relu", "bos_token_id": 0},
        {},
    ),
    "albert": (
        "Albert",
        ALL_HEADS
        | MASKED
        | {"max_position_embeddings": 20, "embedding_size": 20, "pad_token_id": 0}
        | {"num_hidden_layers": 4, "num_hidden_groups": 2, "num_attention_heads": 3},
        {},
    ),
    "jamba": (
        "Jamba",
        SMALL
        | {"num_hidden_layers": 3, "intermediate_size": 20, "num_experts": 3}
        | {"attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 5, "mamba_dt_rank": 4, "mamba_d_conv": 3},
        {},
    ),
    "zamba2": (
        "Zamba2",
        ALL_HEADS
        | {"hidden_size": 28, "num_hidden_layers": 5, "num_attention_heads": 4, "adapter_rank": 3}
        | {"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]}
        | {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True}
        | {"intermediate_size": 20, "mamba_d_state": 6, "n_mamba_heads": 4, "mamba_ngroups": 2}
        | {"chunk_size": 4},
        {"gain": 1.0},
    ),
    "bamba": (
        "Bamba",
        SMALL
        | {"num_hidden_layers": 3, "attn_layer_indices": [1], "num_attention_heads": 3}
        | {"num_key_value_heads": 1, "mamba_n_heads": 6, "mamba_d_head": 12}
        | {"mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 4},
        # With 1.5 float32 itself is 7e-4 off, by comparison with float64.
        {"gain": 1.0},
    ),
}


# Other sizes for `--other`: name -> (class, config, how it is saved). All shapes differ.
WIDE = SMALL | {
    "hidden_size": 60,
    "intermediate_size": 68,
    "num_hidden_layers": 3,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}
WIDE_ALL_HEADS = {key: value for key, value in WIDE.items() if key != "num_key_value_heads"}
WIDE_SSM = {key: WIDE[key] for key in SSM}
OTHER_NEW = 64
# Deeper and wider recurrences with larger matrices would carry float32's own rounding to 1e-4.
CALM = {"gain": 1.0}
OTHER: dict[str, tuple[str, dict, dict]] = {
    "llama": ("Llama", WIDE | {"tie_word_embeddings": True} | rope("linear", factor=2.0), {}),
    "mistral": ("Mistral", WIDE | {"sliding_window": 7, "head_dim": 4}, {}),
    "qwen2": ("Qwen2", WIDE | {"use_sliding_window": False}, {"max_shard_size": "90KB"}),
    "qwen3": ("Qwen3", WIDE | {"head_dim": 10} | LLAMA3, {}),
    "gpt_neox": ("GPTNeoX", WIDE_ALL_HEADS | {"num_attention_heads": 5, "rotary_pct": 0.5}, {}),
    "mixtral": ("Mixtral", WIDE | {"num_local_experts": 4, "sliding_window": 9}, {}),
    "mamba": ("Mamba", WIDE_SSM | {"state_size": 7, "expand": 3, "conv_kernel": 3}, CALM),
    "mamba2": (
        "Mamba2",
        WIDE_SSM
        | {"state_size": 10, "head_dim": 20, "num_heads": 6, "n_groups": 3, "chunk_size": 8}
        | {"tie_word_embeddings": True},
        CALM,
    ),
    "bert": (
        "Bert",
        WIDE_ALL_HEADS | MASKED | {"num_attention_heads": 5, "hidden_act": "gelu_new"},
        {},
    ),
    "roberta": ("Roberta", WIDE_ALL_HEADS | MASKED | {"pad_token_id": 1, "bos_token_id": 0}, {}),
    "albert": (
        "Albert",
        WIDE_ALL_HEADS
        | MASKED
        | {"embedding_size": 28, "num_attention_heads": 5, "hidden_act": "gelu"}
        | {"pad_token_id": 0},
        {},
    ),
    "jamba": (
        "Jamba",
        WIDE
        | {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3}
        | {"attn_layer_offset": 2, "mamba_d_state": 7, "mamba_expand": 3},
        CALM,
    ),
    "zamba2": (
        "Zamba2",
        WIDE
        | {"num_hidden_layers": 4, "num_attention_heads": 10, "adapter_rank": 4}
        | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "chunk_size": 8}
        | {"mamba_d_state": 10, "n_mamba_heads": 6, "mamba_ngroups": 3, "intermediate_size": 36},
        CALM,
    ),
    "bamba": (
        "Bamba",
        WIDE
        | {"attn_layer_indices": [0, 2], "num_attention_heads": 5, "attention_bias": True}
        | {"num_key_value_heads": 1, "mamba_n_heads": 6, "mamba_d_head": 20}
        | {"mamba_n_groups": 3, "mamba_d_state": 10, "mamba_chunk_size": 8},
        CALM,
    ),
}


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
    cases, into, new = (CASES, FIXTURES, NEW)
    if chosen.other is not None:
        cases, into, new = OTHER, chosen.other, OTHER_NEW
    for name in chosen.names or cases:
        make(into / name, cases[name], new)


if __name__ == "__main__":
    main()
