"""Answers up to a stop, as the harness's tasks ask for them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...errors import CapacityError, ConfigError, suggest
from ...paradigms.decoding.state import Decoding
from ...paradigms.model import Model
from ...train.data.tokenizer import Tokenizer
from ..generate import Generation, Generator, Options
from ..text_stream import TextStream

DEFAULT_MAX_NEW = 256
# Names that the harness's models share for the same number; the first that is given counts.
MAX_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLER = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
# What transformers' `generate` takes and we do not have, with the values that change nothing.
NEUTRAL = {
    "num_beams": (1,),
    "repetition_penalty": (1, 1.0),
    "use_cache": (True, False),
    "num_return_sequences": (1,),
}


class Wanted(NamedTuple):
    """What a request asks for.

    Attributes:
        options: for the generator, without a seed.
        stop_names: stop strings that are the name of a special token.
    """

    options: Options
    stop_names: frozenset[str]


def read_gen_kwargs(kwargs: Any, tokenizer: Tokenizer, *, steps: int = 0) -> Wanted:
    """Reads a request's `generation_kwargs`.

    Sampling is off unless `do_sample` or a temperature above 0 asks for it, as everywhere in the
    harness.

    Args:
        kwargs: by name.
        tokenizer: the model's.
        steps: of diffusion; see `Options`.

    Raises:
        ConfigError: a name or a value that means nothing here.
    """
    if not isinstance(kwargs, dict):
        raise ConfigError(f"generation_kwargs: got {kwargs!r}, want names and values")
    known = {"until", "do_sample", *MAX_NEW, *SAMPLER, *NEUTRAL}
    for name, value in kwargs.items():
        if name not in known:
            raise ConfigError(f"generation_kwargs: no option {name!r}{suggest(name, known)}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ConfigError(
                f"generation_kwargs: {name} is {value!r}, but only {NEUTRAL[name][0]!r} is "
                "implemented"
            )
    until = kwargs.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    given = [kwargs[name] for name in MAX_NEW if kwargs.get(name) is not None]
    max_new = given[0] if given else DEFAULT_MAX_NEW
    if isinstance(max_new, bool) or not isinstance(max_new, int) or max_new < 1:
        raise ConfigError(f"generation_kwargs: max_gen_toks is {max_new!r}, want 1 or more")
    values = {
        name: _number(name, kwargs[name], kind)
        for name, kind in SAMPLER.items()
        if kwargs.get(name) is not None
    }
    sample = kwargs.get("do_sample")
    if sample not in (None, True, False):
        raise ConfigError(f"generation_kwargs: do_sample is {sample!r}, want true or false")
    # Without a temperature, sampling is at 1 (as in transformers), and nothing else samples.
    values.setdefault("temperature", 1.0 if sample else 0.0)
    if sample is False:
        values["temperature"] = 0.0
    options = Options(
        max_new=max_new, steps=steps, stop=tuple(text for text in until if text), **values
    )
    return Wanted(options, frozenset(set(until) & set(tokenizer.special_tokens)))


class Writer:
    """Answers prompts with one model."""

    def __init__(
        self, model: Model, decoding: Decoding, tokenizer: Tokenizer, *, max_len: int, seed: int
    ) -> None:
        """Takes a model ready to compute.

        Args:
            model: see `Model.prepare`.
            decoding: how it is run.
            tokenizer: its own.
            max_len: ids of prompt and answer together.
            seed: of the first request's draws; the next takes seed + 1.
        """
        self._generator = Generator(model, decoding, tokenizer)
        self._tokenizer, self._max_len, self._seed = tokenizer, max_len, seed

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Wanted,
        *,
        rows_per_batch: Callable[[int], int],
        progress: Callable[[int, str], None] | None = None,
    ) -> list[str]:
        """Answers prompts that ask for the same.

        A prompt that leaves no room for the answer loses its beginning. Draws depend on the seed
        and on the number of the prompt among these, not on the batch.

        Args:
            prompts: ids, at least one each.
            wanted: of all.
            rows_per_batch: rows of a batch, by its width.
            progress: called as progress(number of the prompt, its answer).

        Raises:
            CapacityError: the answer alone is longer than the model's rows.
            ConfigError: an option is out of range, or of no use to the decoding.
        """
        options, room = wanted.options, self._max_len - wanted.options.max_new
        if room < 1:
            raise CapacityError(
                f"generation_kwargs: max_gen_toks {options.max_new} leaves no room for a prompt: "
                f"the model holds {self._max_len} tokens; --gen_kwargs max_gen_toks="
                f"{max(1, self._max_len // 2)} would"
            )
        kept = [list(ids)[-room:] for ids in prompts]
        order = list(range(len(kept)))
        if options.temperature == 0:  # else the seeds of a batch follow one another
            order.sort(key=lambda number: -len(kept[number]))
        answers = [""] * len(kept)
        start = 0
        while start < len(order):
            longest = max(len(kept[number]) for number in order[start:])
            size = rows_per_batch(longest + options.max_new)
            batch = order[start : start + size]
            start += len(batch)
            # The rows after the last prompt only keep the shape.
            rows = [kept[number] for number in batch]
            rows += [rows[-1]] * (size - len(rows))
            own = dataclasses.replace(options, seed=self._seed + batch[0])
            for number, result in zip(batch, self._generator.generate(rows, own), strict=False):
                answers[number] = self._text(result, wanted)
                if progress is not None:
                    progress(number, answers[number])
        return answers

    def _text(self, result: Generation, wanted: Wanted) -> str:
        """The answer, cut at special tokens that the request names as stops.

        They are no text, so that the generator does not find them as stop strings.
        """
        ends = {self._tokenizer.special_tokens[name] for name in wanted.stop_names}
        if ends.isdisjoint(result.ids):
            return result.text
        stream = TextStream(
            self._tokenizer, stops=wanted.options.stop, stop_ids=sorted(ends), continuing=True
        )
        return stream.push(result.ids) + stream.finish()


def _number(name: str, value: Any, kind: type) -> Any:
    """Returns a number of the kind.

    Raises:
        ConfigError: it is none.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or (kind is int and value != int(value)):
        raise ConfigError(f"generation_kwargs: {name} is {value!r}, want a number")
    return kind(value)
