"""A run becomes a checkpoint that transformers loads."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CheckpointError, ConfigError, suggest
from ...paradigms.backbone import ModelConfig
from ..checkpoint import flatten
from ..data.json_tokenizer import OWN
from ..data.tokenizer import Tokenizer
from ..files import write_text
from ..run_folder import SOURCE, Run
from .architecture import Architecture, Unfit, essence
from .hf_config import read_hf_config
from .registry import ARCHITECTURES, architecture_of
from .tensor_files import INDEX_SUFFIX, Spec, TensorWriter
from .tokenizer_files import KEPT, SETTINGS, VOCABULARY
from .weights import CHOICES, Progress, published_tensors, written_specs

SHARD_BYTES = 5 * 10**9  # as transformers splits


class Exported(NamedTuple):
    """What was written.

    Attributes:
        architecture: that the model was written as.
        files: of tensors.
        nbytes: of all tensors.
    """

    architecture: Architecture
    files: list[str]
    nbytes: int


def export_run(
    run: Run,
    out: str | Path,
    *,
    architecture: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Writes a checkpoint folder as `save_pretrained` would.

    A run that was imported gets its own `config.json` and tokenizer files back.

    Args:
        run: loaded.
        out: the folder to make; must not exist or be empty.
        architecture: to write it as; None for the one that it came from, else the first that can
            express it.
        dtype: of all tensors; None keeps the parameters'.
        shard_bytes: bytes of tensors per file.
        progress: called as progress(bytes done, bytes in all).

    Raises:
        ConfigError: no architecture, or not the one asked for, can express the model.
        CheckpointError: `out` is taken or not writable.
    """
    if dtype is not None and dtype not in CHOICES:
        raise ConfigError(f"dtype: got {dtype!r}, want {' or '.join(CHOICES)}")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: is taken; choose another folder")
    paradigm = run.config.paradigm.model_dump(mode="json")
    chosen, raw = choose(run.config.model, paradigm, run.path / SOURCE, architecture)
    if paradigm["name"] == "masked_diffusion":
        raw.setdefault("mask_token_id", run.tokenizer.specials.mask)
    rows = chosen.rows_of(run.config.model)
    params = flatten(run.model.params)
    specs = written_specs(rows, params, dtype)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.exporting")
    try:
        temporary.mkdir(parents=True)
        files = _write_tensors(
            temporary, specs, published_tensors(rows, params, specs), shard_bytes, progress
        )
        kind = next(iter(specs.values())).dtype.name
        raw |= _published_dtype(raw, kind)
        write_text(temporary / "config.json", json.dumps(raw, indent=2, sort_keys=True) + "\n")
        _write_tokenizer(run.tokenizer, run.path / SOURCE, temporary)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(chosen, files, sum(spec.nbytes for spec in specs.values()))


def choose(
    model: ModelConfig, paradigm: dict[str, Any], source: Path, name: str | None
) -> tuple[Architecture, dict[str, Any]]:
    """The architecture to write a model as, and its config.

    Args:
        model: ours.
        paradigm: plain values of its paradigm's config.
        source: where the files that it was imported from are kept, if it was.
        name: of the architecture; None for the first that fits.

    Raises:
        ConfigError: there is none; says why for the one that was asked for, or for each.
    """
    names = [one.name for one in ARCHITECTURES]
    if name is not None and name not in names:
        raise ConfigError(f"architecture: got {name!r}, no such architecture{suggest(name, names)}")
    if (source / "config.json").exists():
        config = read_hf_config(source)
        own = architecture_of(config)
        if name in (None, own.name) and essence(own.model_config(config)) == essence(model):
            return own, read_hf_config(source).raw
    reasons = []
    for one in ARCHITECTURES:
        if name in (None, one.name):
            try:
                raw = one.config_of(model, paradigm)
                one.rows_of(model)
                return one, raw
            except Unfit as reason:
                reasons.append(f"{one.name}: {reason}")
    raise ConfigError(f"the model cannot be exported: {'; '.join(reasons)}")


def _published_dtype(raw: Mapping[str, Any], kind: str) -> dict[str, str]:
    """The key that names the dtype, under the name that the config already uses."""
    return {"dtype" if "dtype" in raw and "torch_dtype" not in raw else "torch_dtype": kind}


def _write_tensors(
    folder: Path,
    specs: Mapping[str, Spec],
    tensors: Any,
    shard_bytes: int,
    progress: Progress | None,
) -> list[str]:
    """Writes one file, or several and their index; returns their names."""
    shards: list[dict[str, Spec]] = [{}]
    for name, spec in specs.items():
        if shards[-1] and sum(s.nbytes for s in shards[-1].values()) + spec.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = spec
    count = len(shards)
    names = [
        "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        for i in range(count)
    ]
    total = sum(spec.nbytes for spec in specs.values())
    writers, where, done = {}, {}, 0
    for file, shard in zip(names, shards, strict=True):
        writers[file] = TensorWriter(folder / file, shard)
        where |= dict.fromkeys(shard, file)
    for name, array in tensors:
        writers[where[name]].write(name, array)
        done += specs[name].nbytes
        if progress is not None:
            progress(done, total)
    for writer in writers.values():
        writer.close({"format": "pt"})
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(folder / f"model.safetensors{INDEX_SUFFIX}", text)
    return names


def _write_tokenizer(tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """The published files as they came; else the run's own, with a settings file beside it."""
    kept = [name for name in KEPT if name != "config.json" and (source / name).exists()]
    for name in kept:
        shutil.copyfile(source / name, out / name)
    if source.is_dir() or tokenizer.kind not in ("bpe", "file"):
        return
    data = json.loads(tokenizer.content)
    known = {token["content"]: token["id"] for token in data.get("added_tokens") or []}
    data.pop(OWN, None)
    data.setdefault("version", "1.0")
    write_text(out / VOCABULARY, json.dumps(data, ensure_ascii=False))
    roles = zip(("bos", "eos", "pad", "mask"), tokenizer.specials, strict=True)
    by_id = {index: name for name, index in known.items()}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, index in roles:
        if index in by_id:
            settings[f"{role}_token"] = by_id[index]
    write_text(out / SETTINGS, json.dumps(settings, indent=2) + "\n")
