"""A published checkpoint becomes a run folder that every command takes."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import CheckpointError, ConfigError
from ...paradigms.backbone import ModelConfig
from ..checkpoint import Identity
from ..config import RunConfig, config_hash, plain
from ..data.cache import hash_key
from ..data.pipeline import DataConfig
from ..data.sources import CorpusConfig
from ..data.tokenizer_config import save_tokenizer
from ..files import write_text
from ..run_folder import CHECKPOINTS, CONFIG, IDENTITY, RESULT, SOURCE, TOKENIZER
from ..yaml_loader import dump_yaml, validate
from .architecture import Architecture
from .gguf_file import GGUFFile
from .gguf_llama import config_of, generation_of, settings_of, tensors_of, vocabulary_of
from .hf_config import HFConfig, read_hf_config
from .params_file import ParamsWriter
from .registry import architecture_of
from .tensor_files import RenamedTensors, TensorFolder, Tensors
from .tokenizer_files import (
    GENERATION,
    KEPT,
    SETTINGS,
    VOCABULARY,
    Imported,
    TokenizerFiles,
    import_tokenizer,
    read_files,
)
from .weights import CHOICES, Progress, check_tensors, param_specs, read_params

CONTEXT = 1024  # tokens per window when the run is evaluated


class Checkpoint(NamedTuple):
    """A published checkpoint, checked by names and shapes, no tensor read yet.

    Attributes:
        path: its folder.
        raw: the published config.
        architecture: what it is.
        model: what it describes.
        tokenizer: its own.
        tensors: opened.
        paradigm: plain values of the paradigm's config.
        files: what an export gives back beside the weights: name -> file, or content as JSON.
    """

    path: Path
    raw: HFConfig
    architecture: Architecture
    model: ModelConfig
    tokenizer: Imported
    tensors: Tensors
    paradigm: dict
    files: dict[str, Path | dict]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a folder as `save_pretrained` writes it, or a GGUF file; checks all but the values.

    Raises:
        CheckpointError: it is none, or a tensor is missing, unknown or of another shape.
        ConfigError: `config.json` has something that is not implemented.
        DataError: the tokenizer is damaged or does not fit the model.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        raise CheckpointError(f"{path}: want the folder of a checkpoint, or a .gguf file")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path}: has no config.json, so it is no checkpoint's folder")
    files = {name: path / name for name in KEPT if (path / name).exists()}
    return _checked(path, read_hf_config(path), TensorFolder(path), read_files(path), files)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    raw = config_of(file)
    settings, vocabulary = settings_of(file), vocabulary_of(file)
    generation = generation_of(file)
    written = {"config.json": raw, SETTINGS: settings}
    for name, content in ((GENERATION, generation), (VOCABULARY, vocabulary)):
        if content:
            written[name] = content
    tokenizer = TokenizerFiles(path, vocabulary, settings, generation)
    return _checked(path, HFConfig(raw, path), tensors_of(file, raw), tokenizer, written)


def _checked(
    path: Path, raw: HFConfig, tensors: Tensors, tokenizer: TokenizerFiles, files: dict
) -> Checkpoint:
    """Compares the parts with one another."""
    architecture = architecture_of(raw)
    model = architecture.model_config(raw)
    assert model.vocab_size is not None
    if architecture.old_endings:
        tensors = RenamedTensors(tensors, architecture.old_endings)
    check_tensors(architecture, model, tensors)
    paradigm = architecture.paradigm(raw)
    masked = paradigm["name"] == "masked_diffusion"
    imported = import_tokenizer(tokenizer, raw, model.vocab_size, masked=masked)
    return Checkpoint(path, raw, architecture, model, imported, tensors, paradigm, files)


def import_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Writes a run folder from a published checkpoint.

    Args:
        path: of the checkpoint.
        out: the run folder to make.
        dtype: of the parameters on disk and of computation; None keeps what was published (float16
            becomes float32, which holds it exactly) and computes in float32.
        overwrite: replace an imported run that is there.
        progress: called as progress(bytes done, bytes in all).

    Returns:
        What was imported.

    Raises:
        CheckpointError: see `open_checkpoint`; a value is not finite; or `out` is taken.
        ConfigError: see `open_checkpoint`; or no such dtype.
        DataError: see `open_checkpoint`.
    """
    if dtype is not None and dtype not in CHOICES:
        raise ConfigError(f"dtype: got {dtype!r}, want {' or '.join(CHOICES)}")
    out = Path(out)
    _refuse_taken(out, overwrite=overwrite)
    checkpoint = open_checkpoint(path)
    temporary = out.with_name(f"{out.name}.importing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(checkpoint, temporary, out, dtype, progress)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checkpoint


def is_imported(run: Path) -> bool:
    """True for a run folder that was imported."""
    return (run / SOURCE).is_dir()


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    final: Path,
    dtype: str | None,
    progress: Progress | None,
) -> None:
    """Fills the folder; `final` is where it will be."""
    tokenizer = checkpoint.tokenizer.tokenizer
    config = _run_config(checkpoint, final, dtype)
    fingerprint = hash_key(
        source=config.data.source.build().fingerprint, tokenizer=tokenizer.fingerprint
    )
    identity = Identity(config_hash(config), fingerprint, tokenizer.fingerprint)
    header = f"# Imported from a {checkpoint.architecture.name} checkpoint; nothing was trained.\n"
    write_text(folder / CONFIG, header + dump_yaml(plain(config)))
    about = {"data_fingerprint": fingerprint, "tokenizer_fingerprint": tokenizer.fingerprint}
    write_text(folder / IDENTITY, json.dumps(about, indent=2) + "\n")
    (folder / TOKENIZER).mkdir()
    save_tokenizer(tokenizer, folder / TOKENIZER)
    (folder / SOURCE).mkdir()
    for name, content in checkpoint.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / SOURCE / name)
        else:
            write_text(folder / SOURCE / name, json.dumps(content, indent=2, ensure_ascii=False))
    target = folder / CHECKPOINTS / "0"
    target.mkdir(parents=True)
    rows = checkpoint.architecture.rows_of(checkpoint.model)
    specs = param_specs(rows, checkpoint.model, checkpoint.tensors, dtype)
    with ParamsWriter(target, specs, identity) as writer:
        for name, array in read_params(rows, specs, checkpoint.tensors, progress):
            writer.write(name, array)
        writer.close()
    write_text(folder / RESULT, json.dumps(_result(), indent=2) + "\n")


def _run_config(checkpoint: Checkpoint, out: Path, dtype: str | None) -> RunConfig:
    """The run's configuration. Of its training section only the compute dtype means something."""
    tokenizer_file = (out / TOKENIZER / "tokenizer.json").absolute()
    data = DataConfig(
        source=CorpusConfig(), context_length=min(CONTEXT, checkpoint.model.max_len)
    )
    raw = {
        "model": plain(checkpoint.model),
        "paradigm": checkpoint.paradigm,
        "data": plain(data) | {"tokenizer": {"name": "file", "path": str(tokenizer_file)}},
        "training": {
            "tokens": 1,
            "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            "compute_dtype": dtype or "float32",
        },
    }
    return validate(RunConfig, raw, checkpoint.raw.source)


def _result() -> dict:
    """What `result.json` says: nothing was trained here."""
    return {
        "step": 0, "tokens": 0, "flops": 0.0, "train_s": 0.0, "compile_s": 0.0,
        "tokens_per_s": 0.0, "peak_memory_bytes": None,
        "peak_memory_reason": "imported, not trained here", "best": None, "imported": True,
    }  # fmt: skip


def _refuse_taken(out: Path, *, overwrite: bool) -> None:
    """Refuses a folder that holds something else, or an imported run without `overwrite`."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise CheckpointError(f"{out}: is a file, want a folder for the run")
    if not is_imported(out):
        raise CheckpointError(f"{out}: is taken by something else; choose another folder")
    if not overwrite:
        raise CheckpointError(f"{out}: holds an imported run already; --overwrite replaces it")


def load_params_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """All parameters in memory, without a run folder."""
    rows = checkpoint.architecture.rows_of(checkpoint.model)
    specs = param_specs(rows, checkpoint.model, checkpoint.tensors, None)
    return dict(read_params(rows, specs, checkpoint.tensors))
