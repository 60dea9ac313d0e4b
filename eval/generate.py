"""Text in, text out, with any model and any decoding."""

import dataclasses
import itertools
import math
from collections.abc import Generator as PythonGenerator
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..errors import CapacityError, ConfigError
from ..paradigms.decoding.loop import advance, finished
from ..paradigms.decoding.sampling import Sampling, make_sampling, with_allowed
from ..paradigms.decoding.state import DecodeState, Decoding, raise_failures
from ..paradigms.model import Model
from ..train.data.tokenizer import Tokenizer
from .constraints import Constraint, Grammar, RowMasks
from .text_stream import TextStream, check_stops

SMALLEST_BUCKET = 16  # tokens
STEPS_BETWEEN_STOP_CHECKS = 8
UNKNOWN = "·"  # stands for an unknown token of a canvas

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for beside the prompts. Checked where it is used, before any compute.

    Attributes:
        max_new: tokens to add at most; 0 adds none.
        temperature: 0 takes the most probable token each time.
        top_k: 0 for off.
        top_p: 1 for off.
        min_p: 0 for off.
        steps: model calls for the whole answer, for decodings that take that number; 0 means one
            per new token there, and must stay 0 for the others.
        seed: of the first prompt; prompt i takes seed + i.
        stop: strings that end the answer; they are not part of it.
        truncate_prompt: of a prompt that is too long keep BOS and the last tokens, instead of
            refusing it.
        constraint: what the answer has to look like, for decodings that draw one token per step;
            None for anything. An answer that `max_new` cut off may be an unfinished part of it.
    """

    max_new: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    steps: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    truncate_prompt: bool = False
    constraint: Constraint | None = None


class Generation(NamedTuple):
    """One answer.

    Attributes:
        text: the answer, without prompt, stop string and special tokens.
        ids: the answer's ids, up to and with the one that ended it (EOS, or the one that completed
            a stop string or all that a constraint allows). Token counts come from here.
        prompt_ids: what the model was given, BOS first where texts of its tokenizer begin so.
        finish_reason: "stop" for EOS, a stop string or a constraint's end, "length" for `max_new`.
        nfe: model calls made for the row, with those between a stop string and its discovery.
        token_evals: tokens pushed through the model for the row, likewise.
        dropped: tokens of the prompt that were cut off by `truncate_prompt`.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: Literal["stop", "length"]
    nfe: int
    token_evals: int
    dropped: int


class Snapshot(NamedTuple):
    """An answer in the making.

    Attributes:
        segments: the whole answer's places in order, as (text, known): runs of known tokens, and
            runs of unknown ones with one `UNKNOWN` for each.
        tokens: known tokens of the answer.
        nfe: model calls made so far.
        token_evals: tokens pushed through the model so far.
    """

    segments: tuple[tuple[str, bool], ...]
    tokens: int
    nfe: int
    token_evals: int

    @property
    def text(self) -> str:
        """All segments joined."""
        return "".join(text for text, _ in self.segments)


class Generator:
    """Generates text. Prompts of similar length share compiled programs.

    BOS begins every text (of imported models, those that were trained so), so an empty prompt is
    BOS alone. A prompt may also be ids, at least one, which are taken as they are. Prompts are
    padded up to a power of two; each such width and batch size compiles once, whatever the options.
    """

    def __init__(self, model: Model, decoding: Decoding, tokenizer: Tokenizer) -> None:
        """Takes a model ready to compute (see `Model.prepare`) and the tokenizer of its run.

        Raises:
            ConfigError: model and tokenizer differ in their number of ids.
        """
        if model.config.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                f"the model has {model.config.vocab_size} ids, the tokenizer has "
                f"{tokenizer.vocab_size}: they do not belong together"
            )
        self.model, self.decoding, self.tokenizer = model, decoding, tokenizer
        specials = tokenizer.specials
        self.forbidden = sorted(
            {specials.bos, specials.pad, specials.mask} - set(tokenizer.stop_ids)
            | set(tokenizer.unused_ids().tolist())
        )
        self._grammar: Grammar | None = None

    def grammar(self, constraint: Constraint) -> Grammar:
        """The constraint, read for this generator's tokenizer; the last one is kept.

        Raises:
            ConfigError: it cannot be read, or the decoding cannot follow it.
        """
        if not self.decoding.one_token:
            raise ConfigError(
                f"constraint: decoding {self.decoding.name!r} does not draw one token after "
                "another, which regex, JSON-schema and choice constraints need; use an "
                "autoregressive run"
            )
        if self._grammar is None or self._grammar.constraint != constraint:
            vocab_size = self.model.config.padded_vocab_size
            self._grammar = Grammar(constraint, self.tokenizer, vocab_size)
        return self._grammar

    def generate(
        self, prompts: Sequence[Prompt], options: Options = Options()
    ) -> list[Generation]:
        """Answers all prompts in one batch.

        Every answer is what its prompt and seed give alone, up to rounding.

        Raises:
            CapacityError: prompt and `max_new` exceed the model's length.
            ConfigError: an option is out of range, or the decoding has no use for it.
            DataError: a prompt is no text.
            GenlabError: the model gave non-finite logits, or no token fits the constraint.
        """
        job = _Job(self, prompts, options)
        n = STEPS_BETWEEN_STOP_CHECKS if options.stop else job.everything
        for _ in job.run(n):
            pass
        return job.results()

    def stream(
        self, prompt: Prompt, options: Options = Options()
    ) -> PythonGenerator[str, None, Generation]:
        """Answers one prompt, giving text as soon as it can no longer change.

        The pieces are whole characters, hold nothing of a stop string, and join to the text of the
        `Generation` that the generator returns (`result = yield from ...`). Options are checked
        when the first piece is asked for.

        Raises:
            see `generate`.
        """
        job = _Job(self, [prompt], options)
        for pieces in job.run(1):
            if pieces[0]:
                yield pieces[0]
        return job.results()[0]

    def canvas(
        self, prompt: Prompt, options: Options = Options()
    ) -> PythonGenerator[str, None, Generation]:
        """Answers one prompt, showing the whole answer after every step.

        Unknown tokens are `UNKNOWN`. What is shown may still change or be cut at a stop; the
        `Generation` that the generator returns is the answer.

        Raises:
            see `generate`.
        """
        snapshots = self.snapshots(prompt, options)
        while True:
            try:
                snapshot = next(snapshots)
            except StopIteration as end:
                return end.value
            yield snapshot.text

    def snapshots(
        self, prompt: Prompt, options: Options = Options()
    ) -> PythonGenerator[Snapshot, None, Generation]:
        """Answers one prompt, giving its `Snapshot` after every step; else like `canvas`.

        Raises:
            see `generate`.
        """
        job = _Job(self, [prompt], options)
        for _ in job.run(1):
            yield job.snapshot(0)
        return job.results()[0]


class _Job:
    """One batch on its way."""

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], options: Options) -> None:
        self.generator, self.options = generator, options
        if isinstance(prompts, str) or not prompts:
            raise ConfigError(f"prompts: got {prompts!r}, want a list of at least one string")
        for name in ("max_new", "seed"):
            value = getattr(options, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}: got {value!r}, want a whole number, at least 0")
        tokenizer = generator.tokenizer
        stops = check_stops(options.stop)
        encoded = [self._prompt_ids(prompt) for prompt in prompts]
        self.prompts = [ids for ids, _ in encoded]
        self.dropped = [dropped for _, dropped in encoded]
        self.streams = [
            TextStream(
                tokenizer,
                stops=stops,
                stop_ids=tokenizer.stop_ids,
                continuing=len(prompt) > 0,
            )
            for prompt in prompts
        ]
        self.read = [len(ids) for ids in self.prompts]
        batch, config = len(prompts), generator.model.config
        steps = options.steps
        if generator.decoding.uses_steps and steps == 0:
            steps = options.max_new
        beyond = range(tokenizer.vocab_size, config.padded_vocab_size)
        self.sampling = make_sampling(
            batch,
            vocab_size=config.padded_vocab_size,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            steps=steps,
            forbidden_ids=[*generator.forbidden, *beyond],
            stop_ids=list(tokenizer.stop_ids),
        )
        self.masks: RowMasks | None = None
        if options.constraint is not None:
            if tokenizer.drops_first_space and not all(len(prompt) for prompt in prompts):
                raise ConfigError(
                    "constraint: this tokenizer drops a space at the beginning of a text, so an "
                    "answer to an empty prompt cannot be constrained; give a prompt"
                )
            self.masks = generator.grammar(options.constraint).start(batch)
        self.state: DecodeState | None = None
        width = min(bucket(max(self.read)), config.max_len)
        self.max_len = min(bucket(width + options.max_new), config.max_len)
        self.everything = self.max_len + max(steps, 0)
        self.tokens = np.zeros((batch, width), np.int32)
        for row, ids in enumerate(self.prompts):
            self.tokens[row, : len(ids)] = ids

    def run(self, n: int) -> Iterator[list[str]]:
        """Advances n steps at a time; gives each row's new text after each time."""
        if self.options.max_new == 0:
            return
        generator, batch = self.generator, len(self.prompts)
        model, decoding = generator.model, generator.decoding
        n = n if self.masks is None else 1
        state = decoding.start(
            model,
            self.tokens,
            lengths=np.array(self.read, np.int32),
            sampling=self._limited(self.sampling, np.ones((batch,), bool)),
            seeds=self.options.seed + np.arange(batch),
            max_new=np.full((batch,), self.options.max_new, np.int32),
            max_len=self.max_len,
        )
        while True:
            self.state = state
            raise_failures(state)
            over = finished(state)
            pieces = self._read_settled(state)
            if over or all(stream.stopped for stream in self.streams):
                ends = [stream.finish() for stream in self.streams]
                yield [piece + end for piece, end in zip(pieces, ends, strict=True)]
                return
            yield pieces
            stopped = np.array([stream.stopped for stream in self.streams])
            if stopped.any():
                state = state._replace(done=jnp.asarray(np.asarray(state.done) | stopped))
            if self.masks is not None:
                live = ~np.asarray(state.done)
                state = state._replace(sampling=self._limited(state.sampling, live))
            state = advance(model, decoding, state, n)

    def results(self) -> list[Generation]:
        """The answers, once `run` has ended."""
        batch = len(self.prompts)
        nfe = np.zeros((batch,), int) if self.state is None else np.asarray(self.state.nfe)
        evals = np.zeros((batch,), int) if self.state is None else self.state.token_evals
        return [
            Generation(
                text=stream.text,
                ids=stream.ids,
                prompt_ids=self.prompts[row],
                finish_reason="stop" if stream.stopped else "length",
                nfe=int(nfe[row]),
                token_evals=int(evals[row]),
                dropped=self.dropped[row],
            )
            for row, stream in enumerate(self.streams)
        ]

    def snapshot(self, row: int) -> Snapshot:
        """The row's answer as it stands, settled or not; after a step of `run`."""
        assert self.state is not None
        begin = len(self.prompts[row])
        end = begin + self.options.max_new
        tokens = np.asarray(self.state.tokens)[row, begin:end]
        known = np.asarray(self.state.known)[row, begin:end]
        join = self.generator.tokenizer.join
        segments: list[tuple[str, bool]] = []
        for is_known, run in itertools.groupby(zip(known.tolist(), tokens, strict=True), _known):
            ids = [one for _, one in run]
            text = join(ids).decode("utf-8", errors="replace")
            segments.append((text, True) if is_known else (UNKNOWN * len(ids), False))
        return Snapshot(
            segments=tuple(segments),
            tokens=int(known.sum()),
            nfe=int(np.asarray(self.state.nfe)[row]),
            token_evals=int(np.asarray(self.state.token_evals)[row]),
        )

    def _limited(self, sampling: Sampling, live: np.ndarray) -> Sampling:
        """The settings with the constraint's masks for the next draw, if there is one."""
        if self.masks is None:
            return sampling
        forbidden = np.asarray(self.sampling.forbidden)
        return with_allowed(sampling, self.masks.allowed(live, forbidden))

    def _read_settled(self, state: DecodeState) -> list[str]:
        settled = np.minimum(np.asarray(self.generator.decoding.settled(state)), state.limit)
        tokens = np.asarray(state.tokens)
        pieces = []
        for row, stream in enumerate(self.streams):
            end = max(self.read[row], int(settled[row]))
            new = tokens[row, self.read[row] : end].tolist()
            piece = stream.push(new)
            if self.masks is not None and not stream.stopped:
                self.masks.take(row, new)
                if self.masks.ended(row):
                    piece += stream.finish()
                    stream.stopped = True
            pieces.append(piece)
            self.read[row] = end
        return pieces

    def _prompt_ids(self, prompt: Prompt) -> tuple[list[int], int]:
        """The ids of a prompt, and how many were cut off its beginning."""
        tokenizer, config = self.generator.tokenizer, self.generator.model.config
        begin: list[int] = []
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
            begin = [tokenizer.specials.bos] if tokenizer.adds_bos or not len(ids) else []
        else:
            ids = np.asarray(prompt)
            if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
                raise ConfigError(f"prompt: got {prompt!r}, want text or at least one id")
            if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
                raise ConfigError(
                    f"prompt: ids from {ids.min()} to {ids.max()}, want 0 to "
                    f"{tokenizer.vocab_size - 1}"
                )
        max_new, max_len = self.options.max_new, config.max_len
        room, added = max_len - max_new - len(begin), len(begin)
        if room + added < 1:
            raise CapacityError(
                f"max_new={max_new} leaves no room for BOS: the model holds {max_len} tokens"
            )
        dropped = max(0, len(ids) - room)
        if dropped and not self.options.truncate_prompt:
            raise CapacityError(
                f"a prompt of {len(ids) + added} tokens{' (BOS included)' if added else ''} and "
                f"max_new={max_new} need {len(ids) + added + max_new} places, but the model holds "
                f"{max_len} tokens; shorten one of them, or truncate the prompt"
            )
        return [*begin, *ids[dropped:].tolist()], dropped


def _known(place: tuple[bool, int]) -> bool:
    return place[0]


def bucket(length: int) -> int:
    """The next power of two, so that few widths exist."""
    return max(SMALLEST_BUCKET, 2 ** math.ceil(math.log2(max(1, length))))
