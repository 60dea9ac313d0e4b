"""A published `config.json`, read key by key: what nobody reads is an error."""

import difflib
import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ConfigError

REQUIRED: Any = object()

# Keys without influence on what a trained model computes: they say how it was made, how to train
# it further, or how a program should present it. Token ids are read with the tokenizer.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_implementation auto_map begin_suppress_tokens bos_token_id chunk_size_feed_forward
    classifier_dropout cls_token_id custom_pipelines decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
    id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty
    mask_token_id max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()
)


class HFConfig:
    """The keys of a `config.json`.

    Attributes:
        source: the file, for messages.
        raw: all keys.
    """

    def __init__(self, raw: dict[str, Any], source: Path | str = "config.json"):
        """Takes the parsed JSON."""
        self.raw, self.source = dict(raw), source
        self._known = set(HARMLESS)

    def take(self, key: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Returns a key's value.

        Args:
            key: its name.
            kind: what it must be: a class or several; int passes for float, bool for none but bool.
            default: what an absent key means.

        Raises:
            ConfigError: absent without default, or of another kind.
        """
        self._known.add(key)
        if key not in self.raw:
            if default is REQUIRED:
                near = difflib.get_close_matches(key, self.raw, n=1)
                hint = f"; did {near[0]!r} mean it?" if near else ""
                raise ConfigError(f"{self.source}: {key} is missing{hint}")
            return default
        value = self.raw[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        flag = isinstance(value, bool) and not {bool, object}.intersection(kinds)
        if not isinstance(value, kinds) or flag:
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(f"{self.source}: {key} is {value!r}, want {wanted}")
        return value

    def ignore(self, *keys: str) -> None:
        """Accepts keys with any value: they do not change what the model computes."""
        self._known.update(keys)

    def choose(self, key: str, choices: dict[Any, Any], default: Any = REQUIRED) -> Any:
        """Returns what the choices give for a key's value.

        Raises:
            ConfigError: absent without default, or none of the choices.
        """
        value = self.take(key, object, default)
        try:
            return choices[value]
        except (KeyError, TypeError):
            wanted = ", ".join(map(repr, choices))
            raise ConfigError(
                f"{self.source}: {key} is {value!r}, which genlab does not implement; want {wanted}"
            ) from None

    def must_be(self, key: str, *allowed: Any) -> None:
        """Accepts a key only with these values; absent is fine.

        Raises:
            ConfigError: it has another value, which is not implemented.
        """
        self._known.add(key)
        if key in self.raw and not any(_same(self.raw[key], value) for value in allowed):
            wanted = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"{self.source}: {key} is {self.raw[key]!r}, which genlab does not implement; want "
                f"{wanted}"
            )

    def finish(self, architecture: str) -> None:
        """Refuses keys that nobody has read.

        Raises:
            ConfigError: names the first of them.
        """
        for key in self.raw:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known - HARMLESS, n=1, cutoff=0.75)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{self.source}: key {key!r} ({self.raw[key]!r}) is not implemented for "
                    f"{architecture}{hint}"
                )


def read_hf_config(folder: Path) -> HFConfig:
    """Reads a checkpoint folder's `config.json`.

    Raises:
        CheckpointError: missing, unreadable or no JSON object.
    """
    path = folder / "config.json"
    return HFConfig(read_json(path), path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: missing, unreadable or no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: want a JSON object, got {type(value).__name__}")
    return value


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
