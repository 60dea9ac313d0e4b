"""What `make_fixtures.py` makes: classes of transformers and their configurations."""

VOCAB, MASK = 97, 4

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
    "falcon_h1": (
        "FalconH1",
        SMALL
        | {"mamba_d_ssm": 40, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6}
        | {"mamba_chunk_size": 4, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.7}
        | {"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "key_multiplier": 0.6}
        | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.5, "mlp_multipliers": [0.7, 0.6]}
        | {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]},
        {"gain": 1.0},
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
    "falcon_h1": (
        "FalconH1",
        WIDE
        | {"mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 10}
        | {"mamba_chunk_size": 8, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"tie_word_embeddings": True, "key_multiplier": 0.7, "mlp_bias": True}
        | {"ssm_in_multiplier": 0.9, "attention_in_multiplier": 1.1},
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
