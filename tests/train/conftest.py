"""A small corpus, small configurations, and a cache of compiled programs for this folder."""

import os
from pathlib import Path

import jax
import pytest
from genlab.train.config import RunConfig
from genlab.train.data.pipeline import Data, build_data
from genlab.train.yaml_loader import apply_overrides, validate
from jax.experimental.compilation_cache import compilation_cache

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. "
)
ATTENTION = {"mixer": {"name": "attention", "num_heads": 2}, "mlp": {"name": "swiglu", "width": 32}}


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Equal programs compile once, in child processes too. What is bit-equal is so with it."""
    folder = str(tmp_path_factory.mktemp("xla"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    cached = before[names[0]] or folder
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cached,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        jax.config.update(names[0], cached)
        jax.config.update(names[1], 0.0)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Twelve files of a few sentences; one is held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        (folder / f"d{number}.txt").write_text(f"Chapter {number}. " + TEXT * (3 + number % 4))
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """Where tokenised corpora go."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["GENLAB_CACHE"] = str(folder)
    yield folder
    del os.environ["GENLAB_CACHE"]


@pytest.fixture(scope="session")
def raw(corpus, cache_dir):
    """The plain values of a transformer's run of 8 updates."""
    return {
        "model": {
            "width": 16,
            "pattern": ["a"],
            "layers": {"a": ATTENTION},
            "max_len": 32,
        },
        "paradigm": {"name": "autoregressive"},
        "data": {
            "source": {
                "name": "files",
                "paths": [str(corpus / "*.txt")],
                "holdout": ["d11"],
                "validation_fraction": 0.2,
            },
            "tokenizer": {"name": "bytes"},
            "context_length": 16,
            "batch_size": 4,
        },
        "training": {
            "tokens": 8 * 64,
            "optimizer": {"name": "adamw", "learning_rate": 0.01},
            "checkpoint_every": 4,
            "log_every": 1,
            "tensorboard": False,
        },
    }


@pytest.fixture(scope="session")
def make(raw):
    """make("training.seed=1", ...) -> RunConfig."""

    def build(*overrides: str) -> RunConfig:
        return validate(RunConfig, apply_overrides(raw, list(overrides)), "test")

    return build


@pytest.fixture(scope="session")
def data(make) -> Data:
    """The corpus, tokenised."""
    return build_data(make().data)
