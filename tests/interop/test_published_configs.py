"""Configurations as their publishers spell them are read, and nothing in them is passed over."""

import json
from pathlib import Path

import pytest
from genlab.errors import ConfigError
from genlab.paradigms.model import abstract_model
from genlab.train.interop.hf_config import HFConfig
from genlab.train.interop.registry import architecture_of

FIXTURES = Path(__file__).parent / "fixtures"

# name -> (config.json, parameters in all). Keys without influence on the model are among them as
# they are in the published files.
PUBLISHED = {
    "EleutherAI/pythia-70m": (
        {
            "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
            "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02,
            "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
            "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
            "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
            "use_parallel_residual": True, "vocab_size": 50304,
        },
        70_426_624,
    ),
    "state-spaces/mamba-130m-hf": (
        {
            "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4,
            "d_inner": 1536, "d_model": 768, "eos_token_id": 0, "expand": 2,
            "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768,
            "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05,
            "model_type": "mamba", "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0,
            "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False,
            "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16,
            "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
            "time_step_min": 0.001, "time_step_rank": 48, "time_step_scale": 1.0,
            "torch_dtype": "float32", "transformers_version": "4.39.0.dev0", "use_bias": False,
            "use_cache": True, "use_conv_bias": True, "vocab_size": 50280,
        },
        129_135_360,
    ),
    "google-bert/bert-base-uncased": (
        {
            "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
            "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
            "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
            "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
            "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
            "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
            "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
        },
        109_514_298,
    ),
    "FacebookAI/roberta-base": (
        {
            "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1,
            "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
            "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
            "model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12,
            "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265,
        },
        124_697_433,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "ai21labs/Jamba-v0.1": (
        {
            "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0,
            "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1, "eos_token_id": 2,
            "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
            "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True,
            "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 262144,
            "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
            "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0", "use_cache": True,
            "use_mamba_kernels": True, "vocab_size": 65536,
        },
        51_570_323_328,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    """With as many parameters as the published model has."""
    raw, parameters = PUBLISHED[name]
    config = HFConfig(raw, name)
    model = architecture_of(config).model_config(config)
    assert abstract_model(model).num_params() == parameters


# What changes the model and is not implemented: (kind, key, value) -> what the message says.
REFUSED = [
    ("EleutherAI/pythia-70m", "hidden_act", "quick_gelu", "hidden_act is 'quick_gelu'"),
    ("EleutherAI/pythia-70m", "rope_scaling", {"type": "longrope", "factor": 2.0}, "'longrope'"),
    ("EleutherAI/pythia-70m", "attention_bais", False, "did you mean 'attention_bias'"),
    ("state-spaces/mamba-130m-hf", "use_bias", True, "use_bias is True"),
    ("state-spaces/mamba-130m-hf", "ssm_cfg", {"layer": "Mamba3"}, "ssm_cfg is"),
    ("state-spaces/mamba-130m-hf", "intermediate_size", 1500, "intermediate_size is 1500"),
    ("google-bert/bert-base-uncased", "is_decoder", True, "is_decoder is True"),
    ("google-bert/bert-base-uncased", "position_embedding_type", "relative_key", "relative_key"),
    ("google-bert/bert-base-uncased", "tie_word_embeddings", False, "tie_word_embeddings is False"),
    ("google-bert/bert-base-uncased", "embedding_size", 128, "'embedding_size'"),
    ("FacebookAI/roberta-base", "pad_token_id", None, "pad_token_id is None, want int"),
    ("mistralai/Mixtral-8x7B-v0.1", "hidden_act", "gelu", "hidden_act is 'gelu'"),
    ("mistralai/Mixtral-8x7B-v0.1", "router_jitter_noise", 0.1, "router_jitter_noise is 0.1"),
    ("ai21labs/Jamba-v0.1", "mamba_proj_bias", True, "mamba_proj_bias is True"),
    ("ai21labs/Jamba-v0.1", "mamba_inner_layernorms", False, "mamba_inner_layernorms is False"),
    ("ai21labs/Jamba-v0.1", "sliding_window", 4096, "sliding_window is 4096"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED)
def test_what_is_not_implemented_is_named(name, key, value, message):
    config = HFConfig(PUBLISHED[name][0] | {key: value}, name)
    with pytest.raises(ConfigError, match=message) as error:
        architecture_of(config).model_config(config)
    assert "\n" not in str(error.value) and str(error.value).startswith(name)


# The same for the fixtures, whose configurations transformers wrote.
REFUSED_OF_FIXTURES = [
    ("mamba2", "use_conv_bias", False, "use_conv_bias is False"),
    ("mamba2", "time_step_limit", [0.0, 0.1], "time_step_limit is"),
    ("mamba2", "num_heads", 5, "num_heads is 5"),
    ("bamba", "mamba_d_head", 5, "mamba_d_head is 5"),
    ("zamba2", "use_long_context", True, "use_long_context is True"),
    ("zamba2", "add_bias_linear", True, "add_bias_linear is True"),
    ("zamba2", "rms_norm_eps", 1e-6, "rms_norm_eps is 1e-06"),
    ("zamba2", "layers_block_type", ["mamba", "hybrid"], "want mamba or hybrid for each of 5"),
    ("zamba2", "hybrid_layer_ids", [0], "hybrid_layer_ids is"),
    ("falcon_h1", "attention_bias", True, "attention_bias is True"),
    ("falcon_h1", "projectors_bias", True, "projectors_bias is True"),
    ("falcon_h1", "mamba_rms_norm", True, "mamba_norm_before_gate is True"),
    ("falcon_h1", "ssm_multipliers", [1.0, 1.0], "want 5 numbers"),
    ("falcon_h1", "mlp_multipliers", [1.0, True], "want 2 numbers"),
    ("albert", "inner_group_num", 2, "inner_group_num is 2"),
    ("albert", "num_hidden_groups", 5, "num_hidden_groups is 5, want 1 to 4"),
    ("albert", "num_memory_blocks", 1, "num_memory_blocks is 1"),
    ("gpt_neox", "num_key_value_heads", 1, "'num_key_value_heads'"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED_OF_FIXTURES)
def test_what_is_not_implemented_is_named_in_what_transformers_writes(name, key, value, message):
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    config = HFConfig(raw | {key: value}, name)
    with pytest.raises(ConfigError, match=message) as error:
        architecture_of(config).model_config(config)
    assert "\n" not in str(error.value) and str(error.value).startswith(name)
