"""`genlab.load`: a run or a published checkpoint, ready to be asked from Python."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import CapacityError, ConfigError
from ..paradigms.config import Config
from ..paradigms.context import Context
from ..paradigms.decoding.registry import default_decoding
from ..paradigms.interface import Batch, Likelihood, Paradigm, SpecialIds
from ..paradigms.masks import Causal, Full
from ..paradigms.model import Model, abstract_model
from ..paradigms.paradigm_registry import ParadigmConfig
from ..train.checkpoint import flatten, unflatten
from ..train.data.tokenizer import Tokenizer
from ..train.interop.import_run import load_params_of, open_checkpoint
from ..train.run_folder import CONFIG, load_run
from ..train.yaml_loader import validate
from .fill import Filled, fill
from .generate import Generation, Generator, Options, Prompt


class Loaded:
    """A model with its tokenizer and paradigm; unpacks into these three.

    Attributes:
        model: ready to compute.
        tokenizer: its own.
        paradigm: what was learnt.
        decoding: how it is run; the paradigm's default.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, paradigm: Paradigm, decoding: Config, name: str
    ):
        """Use `load`."""
        self.model, self.tokenizer, self.paradigm = model, tokenizer, paradigm
        self.decoding, self.name = decoding, name
        self._generator: Generator | None = None

    def __iter__(self) -> Any:
        """`model, tokenizer, paradigm = genlab.load(path)`."""
        return iter((self.model, self.tokenizer, self.paradigm))

    def __call__(self, tokens: Any) -> Array:
        """Logits, float32 (B T V), of ids (B T) or of one row (T), which gives (T V)."""
        array = jnp.asarray(tokens, jnp.int32)
        rows = array[None] if array.ndim == 1 else array
        logits = _logits(self.model, rows, causal=self.paradigm.name == "autoregressive")
        return logits[0] if array.ndim == 1 else logits

    def generate(
        self, prompt: Prompt | Sequence[str], **options: Any
    ) -> Generation | list[Generation]:
        """Continues a text or ids, or a list of texts.

        Args:
            prompt: a text, ids, or a list of texts.
            **options: see `genlab.eval.generate.Options`.

        Raises:
            ConfigError: no such option, or a wrong value.
            CapacityError: the prompt is too long.
        """
        generator = self._asked("generate", options)
        several = not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], str)
        prompts: Any = list(prompt) if several else [prompt]
        answers = generator.generate(prompts, Options(**options))
        return answers if several else answers[0]

    def fill(self, text: str | Sequence[str], **options: Any) -> Filled | list[Filled]:
        """Fills the masks of a text, or of several.

        Args:
            text: with the tokenizer's mask, such as `[MASK]`, at each blank.
            **options: see `genlab.eval.fill.fill`.

        Raises:
            ConfigError: a text has no blank, the model fills none, or an option is wrong.
            CapacityError: a text is too long.
        """
        generator = self._asked("fill", options)
        texts = [text] if isinstance(text, str) else list(text)
        filled = fill(generator, texts, Options(**options))
        return filled[0] if isinstance(text, str) else filled

    def _asked(self, verb: str, options: dict[str, Any]) -> Generator:
        """The generator, made once; refuses options that there are not."""
        unknown = sorted(set(options) - set(Options.__dataclass_fields__))
        if unknown:
            known = ", ".join(Options.__dataclass_fields__)
            raise ConfigError(f"{verb}: no option {unknown[0]!r}; there are {known}")
        if self._generator is None:
            decoding = self.decoding.build(self.tokenizer.specials, self.paradigm)
            self._generator = Generator(self.model, decoding, self.tokenizer)
        return self._generator

    def log_likelihood(self, text: str | Sequence[str], *, seed: int = 0) -> Likelihood:
        """Negative log-likelihood of texts in nats, all their tokens, each row begun with BOS.

        Args:
            text: one or several.
            seed: of the draws, where the paradigm has only a bound.

        Raises:
            CapacityError: a text is longer than the model's rows.
        """
        texts = [text] if isinstance(text, str) else list(text)
        encoded = self.tokenizer.encode_batch(texts)
        length = 1 + max(len(ids) for ids in encoded)
        if length > self.model.config.max_len:
            raise CapacityError(
                f"a text of {length} tokens (BOS included) is longer than the model's rows of "
                f"{self.model.config.max_len}"
            )
        width = min(self.model.config.max_len, max(16, 1 << (length - 1).bit_length()))
        tokens = np.full((len(texts), width), self.tokenizer.pad_id, np.int32)
        lengths = np.array([1 + len(ids) for ids in encoded])
        for row, ids in enumerate(encoded):
            tokens[row, 0], tokens[row, 1 : 1 + len(ids)] = self.tokenizer.bos_id, ids
        index = np.arange(width)
        batch = Batch(
            jnp.asarray(tokens),
            jnp.asarray(np.where(index < lengths[:, None], 0, -1).astype(np.int32)),
            jnp.asarray((index > 0) & (index < lengths[:, None])),
        )
        return _score(self.model, batch, jax.random.key(seed), paradigm=self.paradigm)

    def __repr__(self) -> str:
        """Size, and the tree of parameters with shapes, dtypes and bytes."""
        model = self.model
        head = (
            f"{self.name}: {self.paradigm.name}, {model.num_params():,} parameters, rows of up to "
            f"{model.config.max_len:,} tokens, {self.tokenizer.vocab_size:,} ids"
        )
        return f"{head}\n{params_tree(self.model.params)}"


@partial(jax.jit, static_argnames=("causal",))
def _logits(model: Model, tokens: Array, *, causal: bool) -> Array:
    out, _ = model(tokens, ctx=Context(mask=Causal() if causal else Full()))
    return model.head(out.hidden)


@partial(jax.jit, static_argnames=("paradigm",))
def _score(model: Model, batch: Batch, key: Array, *, paradigm: Any) -> Likelihood:
    return paradigm.log_likelihood(model, batch, key=key)


def load(path: str | Path, *, dtype: str | None = None) -> Loaded:
    """Loads a run folder, or a published checkpoint as it was downloaded.

    Args:
        path: of the folder.
        dtype: to compute in; None for the run's, float32 for a published checkpoint.

    Raises:
        CheckpointError: no such folder, or it is damaged.
        ConfigError: a checkpoint that is not implemented, or no such dtype.
        DataError: its tokenizer is damaged.
    """
    path = Path(path)
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"dtype: got {dtype!r}, want float32 or bfloat16")
    if (path / CONFIG).exists() or not (path / "config.json").exists():
        run = load_run(path)
        model, tokenizer, paradigm = run.model, run.tokenizer, run.paradigm
        dtype = dtype or run.config.training.compute_dtype
        name = run.config.paradigm.name
    else:
        checkpoint = open_checkpoint(path)
        model = abstract_model(checkpoint.model)
        arrays = load_params_of(checkpoint)
        assert arrays.keys() == flatten(model.params).keys()
        model = model.with_params(jax.device_put(unflatten(model.params, arrays)))
        tokenizer = checkpoint.tokenizer.tokenizer
        config = validate(_Choice, {"paradigm": checkpoint.paradigm}, checkpoint.raw.source)
        paradigm = config.paradigm.build(SpecialIds(*tokenizer.specials))
        name = config.paradigm.name
    model = model.prepare(dtype or "float32")
    return Loaded(model, tokenizer, paradigm, default_decoding(name), path.name or str(path))


class _Choice(Config):
    """Reads a paradigm's values."""

    paradigm: ParadigmConfig  # type: ignore[valid-type]


def params_tree(params: dict) -> str:
    """The parameters as an indented tree: shapes, dtypes and bytes, layers that are alike once."""
    lines: list[str] = []

    def visit(node: dict, depth: int) -> None:
        groups: list[tuple[list[str], Any]] = []
        for name, child in node.items():
            if groups and isinstance(child, dict) and _alike(groups[-1][1], child):
                groups[-1][0].append(name)
            else:
                groups.append(([name], child))
        for names, child in groups:
            label = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            indent = "  " * depth
            if isinstance(child, dict):
                size = _bytes(child) * len(names)
                lines.append(f"{indent}{label}: {_size(size)}")
                visit(child, depth + 1)
            else:
                kind = f"{jnp.dtype(child.dtype).name}{list(child.shape)}"
                lines.append(f"{indent}{label}: {kind}, {_size(_bytes(child))}")

    ordered = dict(sorted(params.items(), key=lambda item: _natural(item[0])))
    visit(ordered, 1)
    return "\n".join(lines)


def _natural(name: str) -> tuple:
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, dict) or isinstance(other, dict):
        return False
    return one.shape == other.shape and one.dtype == other.dtype


def _bytes(node: Any) -> int:
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(node))


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
