"""Answers that must match a regular expression, a JSON schema or one of several texts.

llguidance (the extra `genlab[constraints]`) reads the grammar and says after each token which may
come next. Those masks limit the draw, so an answer follows the model's own law, renormalised over
the allowed tokens at each step. EOS is allowed only where the grammar may end.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError, DataError, GenlabError
from ..train.data.tokenizer import Tokenizer

INSTALL = "pip install 'genlab[constraints]'"
# Optional white space would let a model that has not learnt JSON write blanks without end.
JSON_OPTIONS = {"whitespace_flexible": False}


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer has to look like, from its first character to its last.

    Attributes:
        kind: how `value` is to be read.
        value: a regular expression (Rust's syntax, anchored at both ends; no look-around), or the
            text of a JSON schema, or the choices.
    """

    kind: Literal["regex", "json_schema", "choice"]
    value: str | tuple[str, ...]


def one_constraint(
    regex: str | None, json_schema: Path | None, choice: Sequence[str] | None
) -> Constraint | None:
    """The constraint that the options of a command ask for, or None.

    Raises:
        ConfigError: more than one is given, or a choice is empty or given twice.
        DataError: the schema's file cannot be read.
    """
    given = [
        name
        for name, value in (
            ("--regex", regex), ("--json-schema", json_schema), ("--choice", choice or None)
        )
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude one another: give one of them")
    if regex is not None:
        return Constraint("regex", regex)
    if json_schema is not None:
        try:
            return Constraint("json_schema", json_schema.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"--json-schema {json_schema}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            message = f"--json-schema {json_schema}: no UTF-8 at byte {error.start}"
            raise DataError(message) from None
    if choice:
        for text in choice:
            if not text:
                raise ConfigError("--choice '': want at least one character")
            if list(choice).count(text) > 1:
                raise ConfigError(f"--choice {text!r}: is given twice")
        return Constraint("choice", tuple(choice))
    return None


def library() -> ModuleType:
    """Returns llguidance.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import llguidance
        import llguidance.numpy
    except ImportError:
        raise ConfigError(
            f"regex, JSON-schema and choice constraints need llguidance: {INSTALL}"
        ) from None
    return llguidance


class Grammar:
    """A constraint, read for one tokenizer. Rows of a batch are followed by `start`."""

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Reads the constraint.

        Args:
            constraint: what answers have to look like.
            tokenizer: whose ids are masked.
            vocab_size: V of the masks; ids beyond the tokenizer's are never allowed.

        Raises:
            ConfigError: llguidance is missing, or the constraint cannot be read.
        """
        llguidance = library()
        self._guide = llguidance
        self.constraint, self.vocab_size = constraint, vocab_size
        self.eos = int(tokenizer.specials.eos)
        table = _TokenTable(tokenizer)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(table), n_vocab=tokenizer.vocab_size
        )
        self._grammar = self._written()
        failed, remarks = llguidance.LLMatcher.validate_grammar_with_warnings(
            self._grammar, self._tokens
        )
        # A warning says that part of the constraint is not kept, which nobody asked for.
        if failed or remarks:
            raise ConfigError(f"{self._label()}: {_reason(remarks[0])}")

    def start(self, batch: int) -> "RowMasks":
        """Returns the masks of `batch` answers that begin."""
        return RowMasks(self, batch)

    def matcher(self) -> Any:
        """A matcher at the beginning of an answer."""
        return self._guide.LLMatcher(self._tokens, self._grammar, log_level=0)

    def bits(self, matcher: Any) -> np.ndarray:
        """Returns bool (V), the ids that may come next."""
        words = self._guide.numpy.allocate_token_bitmask(1, self._tokens.vocab_size)
        self._guide.numpy.fill_next_token_bitmask(matcher, words, 0)
        flags = np.unpackbits(words.view(np.uint8)[0], bitorder="little").astype(bool)
        allowed = np.zeros((self.vocab_size,), bool)
        count = self._tokens.vocab_size
        allowed[:count] = flags[:count]
        return allowed

    def _label(self) -> str:
        value = self.constraint.value
        shown = repr(value) if self.constraint.kind == "regex" else ""
        return f"--{self.constraint.kind.replace('_', '-')} {shown}".strip()

    def _written(self) -> str:
        matcher, value = self._guide.LLMatcher, self.constraint.value
        if self.constraint.kind == "regex":
            return matcher.grammar_from_regex(value)
        if self.constraint.kind == "choice":
            return matcher.grammar_from_regex("|".join(map(_literally, value)))
        try:
            schema = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{self._label()}: no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise ConfigError(
                f"{self._label()}: got {type(schema).__name__}, want a schema that is an object"
            )
        return matcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)


class RowMasks:
    """Where the rows of a batch stand in the grammar."""

    def __init__(self, grammar: Grammar, batch: int) -> None:
        """Use `Grammar.start`."""
        self._grammar = grammar
        self._matchers = [grammar.matcher() for _ in range(batch)]

    def take(self, row: int, ids: Sequence[int]) -> None:
        """Reads what was drawn for a row; EOS ends it.

        Raises:
            GenlabError: the grammar does not go on so, or became too complex to follow.
        """
        matcher = self._matchers[row]
        for one in ids:
            if not matcher.consume_token(int(one)):
                reason = _reason(matcher.get_error())
                raise GenlabError(f"the constraint cannot be followed in row {row}: {reason}")

    def ended(self, row: int) -> bool:
        """True when nothing but EOS may follow: the answer is complete."""
        matcher = self._matchers[row]
        return bool(matcher.is_stopped() and matcher.is_accepting())

    def allowed(self, live: Sequence[bool], forbidden: np.ndarray) -> np.ndarray:
        """Returns bool (B V), what each row may draw next; everything for rows that are not live.

        Args:
            live: which rows will draw.
            forbidden: bool (V), ids that are never drawn whatever the grammar says.

        Raises:
            GenlabError: no token is left for a row.
        """
        allowed = np.ones((len(self._matchers), self._grammar.vocab_size), bool)
        for row, matcher in enumerate(self._matchers):
            if not live[row]:
                continue
            allowed[row] = self._grammar.bits(matcher) & ~forbidden
            if matcher.is_error() or not allowed[row].any():
                reason = _reason(matcher.get_error()) or "no token of the vocabulary fits"
                raise GenlabError(f"the constraint cannot be followed in row {row}: {reason}")
        return allowed


class _TokenTable:
    """A tokenizer as llguidance wants it: the bytes of every id, and text to ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        specials = {int(one) for one in tokenizer.specials}
        specials |= {int(one) for one in tokenizer.special_tokens.values()}
        unused = set(tokenizer.unused_ids().tolist())
        self._tokenizer = tokenizer
        self.eos_token_id = int(tokenizer.specials.eos)
        self.bos_token_id = int(tokenizer.specials.bos)
        # Names of special and unused ids only tell them apart; no text is ever made of them.
        self.tokens = [
            f"<|{one}|>".encode() if one in specials | unused else tokenizer.join([one])
            for one in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = sorted(specials | unused)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text).tolist()


def _literally(text: str) -> str:
    """A regular expression that matches the text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _reason(message: str) -> str:
    """The part of a message of many lines that says why."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    why = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (why or lines or [""])[0]
