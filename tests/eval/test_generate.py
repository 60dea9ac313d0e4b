"""Text in, text out: stops, streaming, lengths and compiled programs."""

import json
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError, DataError, GenlabError
from genlab.eval import generate as module
from genlab.eval.generate import Generator, Options
from genlab.eval.text_stream import TextStream
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding import unmasking
from genlab.paradigms.decoding.loop import _advance
from genlab.paradigms.decoding.plain import Plain, _start
from genlab.paradigms.decoding.unmasking import Unmasking
from genlab.paradigms.model import build_model
from genlab.train.data.tokenizer import BytesTokenizer
from hypothesis import given
from hypothesis import strategies as st

SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]

BYTES = BytesTokenizer()
BOS, EOS, PAD, MASK = BYTES.specials
GREEDY = Options(temperature=0.0, max_new=24)


def speaker(*texts, end=EOS, length=24):
    """A generator whose prompt chr(r) is answered by the r-th text (bytes or str), then `end`."""
    scripts = np.full((len(texts), length), end, np.int32)
    for row, text in enumerate(texts):
        data = list(text if isinstance(text, bytes) else text.encode())
        scripts[row, : len(data)] = data
    return Generator(ScriptedModel(jnp.asarray(scripts), BYTES.vocab_size), Plain(), BYTES)


def streamed(generator, prompt, options):
    """The pieces and the result."""
    pieces, stream = [], generator.stream(prompt, options)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def with_stop(*stop, **values):
    """Greedy, with stop strings."""
    return Options(**vars(GREEDY) | {"stop": stop} | values)


def test_rows_end_at_their_own_eos():
    generator = speaker("a", "abcd", "abcdefgh", "x" * 24)
    results = generator.generate([chr(row) for row in range(4)], GREEDY)
    assert [r.text for r in results] == ["a", "abcd", "abcdefgh", "x" * 24]
    assert [len(r.ids) for r in results] == [2, 5, 9, 24]  # EOS is an id, but no text
    assert [r.finish_reason for r in results] == ["stop", "stop", "stop", "length"]
    assert [r.nfe for r in results] == [2, 5, 9, 24]
    assert [r.token_evals for r in results] == [3, 6, 10, 25]
    for row in range(4):
        assert generator.generate([chr(row)], GREEDY) == [results[row]]


def test_an_empty_prompt_is_bos_alone():
    result = speaker("hello").generate([""], GREEDY)[0]
    assert result.prompt_ids == [BOS]
    assert result.text == "hello"


def test_special_token_text_in_a_prompt_stays_text():
    result = speaker("hello").generate(["<|eos|>"], Options(max_new=1))[0]
    assert result.prompt_ids == [BOS, *b"<|eos|>"]


@pytest.mark.parametrize(("max_new", "text"), [(0, ""), (1, "h")])
def test_few_new_tokens(max_new, text, monkeypatch):
    if max_new == 0:
        monkeypatch.setattr(module, "advance", None)  # no call is made
    for results in (
        speaker("hello").generate([""], Options(max_new=max_new, temperature=0.0)),
        [streamed(speaker("hello"), "", Options(max_new=max_new, temperature=0.0))[1]],
    ):
        assert results[0].text == text
        assert len(results[0].ids) == max_new
        assert results[0].finish_reason == "length"
        assert results[0].nfe == results[0].token_evals == max_new


def test_eos_at_once_is_an_empty_answer():
    pieces, result = streamed(speaker(""), "", GREEDY)
    assert pieces == [] and result.text == ""
    assert result.ids == [EOS] and result.finish_reason == "stop" and result.nfe == 1


def test_stop_strings_end_rows_one_by_one():
    texts = ["one. two", "no end here", "a.b.c", "...."]
    results = speaker(*texts).generate([chr(row) for row in range(4)], with_stop(".", "end"))
    assert [r.text for r in results] == ["one", "no ", "a", ""]
    assert [len(r.ids) for r in results] == [4, 6, 2, 1]  # with the id that completed the stop
    assert [r.finish_reason for r in results] == ["stop"] * 4
    for row, result in enumerate(results):
        alone = speaker(*texts).generate([chr(row)], with_stop(".", "end"))[0]
        assert alone == result


def test_a_stop_over_many_tokens_is_never_shown():
    options = with_stop("beta gamma", max_new=40)
    generator = speaker("alpha beta gammb beta gamma delta", length=40)
    pieces, result = streamed(generator, "", options)
    assert "".join(pieces) == result.text == "alpha beta gammb "
    assert generator.generate([""], options)[0].text == result.text
    # What could have begun the stop came at once, when it could not any more.
    assert "beta gamm" in pieces


def test_held_text_comes_out_at_the_end():
    pieces, result = streamed(speaker("to be"), "", with_stop("be or"))
    assert "".join(pieces) == result.text == "to be"
    assert pieces[-1] == "be" and result.finish_reason == "stop"  # by EOS
    pieces, _ = streamed(speaker("to be"), "", with_stop("be or", max_new=4))
    assert "".join(pieces) == "to b"


def test_half_characters_wait():
    pieces, result = streamed(speaker("aé€😀"), "", GREEDY)
    assert pieces == ["a", "é", "€", "😀"]
    pieces, result = streamed(speaker(b"a\xe2\x82 b"), "", GREEDY)
    assert "".join(pieces) == result.text == "a\N{REPLACEMENT CHARACTER} b"
    pieces, result = streamed(speaker("a€"), "", Options(max_new=3, temperature=0.0))
    assert "".join(pieces) == result.text == "a\N{REPLACEMENT CHARACTER}"
    assert len(result.ids) == 3


def reference_text(data, stops):
    """The text before the stop that is complete first, by trying every prefix; and its length."""
    for count in range(1, len(data) + 1):
        final = count == len(data)
        text = data[:count].decode("utf-8", errors="replace" if final else "ignore")
        if not final and any(byte >= 0x80 for byte in data):
            text = BYTES.streaming_decoder().push(list(data[:count]))
        begins = [at for at in map(text.find, stops) if at >= 0]
        if begins:
            return text[: min(begins)], count
    return data.decode("utf-8", errors="replace"), len(data)


@given(
    st.one_of(st.text("ab€ é", max_size=14).map(str.encode), st.binary(max_size=10)),
    st.lists(st.text("ab€ é\N{REPLACEMENT CHARACTER}", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_streams_join_to_the_text_before_the_stop(data, stops, sizes):
    stream, pieces, at = TextStream(BYTES, stops=stops), [], 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        pieces.append(stream.push(data[at : at + size]))
        at += size
        shown = "".join(pieces)
        assert shown == stream.text and not any(stop in shown for stop in stops)
    pieces.append(stream.finish())
    want, count = reference_text(data, stops)
    assert "".join(pieces) == stream.text == want
    assert stream.ids == list(data[:count])


def test_what_follows_a_stop_is_ignored():
    stream = TextStream(BYTES, stops=["x"], stop_ids=[EOS])
    assert stream.push(b"ab") + stream.push([*b"cxd"]) + stream.push(b"e") == "abc"
    assert stream.finish() == "" and stream.ids == [*b"abcx"]
    stream = TextStream(BYTES, stop_ids=[EOS])
    assert stream.push([97, EOS, 98]) == "a" and stream.ids == [97, EOS]


def test_rows_with_seeds_of_their_own():
    model = ScriptedModel(jnp.full((1, 24), 100, jnp.int32), BYTES.vocab_size, 64, 58.0)
    generator = Generator(model, Plain(), BYTES)
    options = Options(max_new=12, seed=7)
    texts = [r.ids for r in generator.generate([""] * 4, options)]
    assert len({tuple(ids) for ids in texts}) == 4  # one seed, but prompts draw differently
    for row in range(4):
        alone = generator.generate([""], Options(max_new=12, seed=7 + row))[0]
        assert alone.ids == texts[row]
        assert streamed(generator, "", Options(max_new=12, seed=7 + row))[1] == alone


def test_special_and_padded_ids_are_never_drawn():
    model = ScriptedModel(jnp.full((1, 24), MASK, jnp.int32), BYTES.vocab_size)  # loudly MASK
    ids = Generator(model, Plain(), BYTES).generate([""] * 8, Options(max_new=20))
    drawn = {one for result in ids for one in result.ids}
    assert len(drawn) > 50 and not drawn & {BOS, PAD, MASK}


def test_twenty_prompts_compile_a_handful_of_programs():
    generator = speaker("hello", length=5)
    lengths = np.random.default_rng(0).integers(0, 40, 20)
    generator = Generator(
        ScriptedModel(generator.model.scripts, BYTES.vocab_size, 128), Plain(), BYTES
    )

    def all_of_them(**values):
        options = Options(max_new=20, **values)
        return [len(generator.generate(["x" * n], options)[0].ids) for n in lengths]

    before = _start._cache_size() + _advance._cache_size()
    all_of_them()
    programs = _start._cache_size() + _advance._cache_size() - before
    assert 0 < programs <= 6  # widths 16, 32 and 64, each to start and to go on
    before = _start._cache_size() + _advance._cache_size()
    all_of_them(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=5, stop=("zz",))
    assert _start._cache_size() + _advance._cache_size() == before


def test_too_long_a_prompt_is_refused_or_cut():
    generator = speaker("hello")  # holds 64
    with pytest.raises(CapacityError, match=r"prompt of 61 tokens \(BOS incl.* 65 .* holds 64"):
        generator.generate(["ok", "x" * 60], Options(max_new=4))
    prompt = "0123456789" * 10
    result = generator.generate([prompt], Options(max_new=4, truncate_prompt=True))[0]
    assert result.prompt_ids == [BOS, *prompt[-59:].encode()]
    assert result.dropped == 41 and len(result.ids) == 4
    fits = generator.generate(["x" * 59], Options(max_new=4, truncate_prompt=True))[0]
    assert fits.dropped == 0 and len(fits.ids) == 4
    with pytest.raises(CapacityError, match="max_new=64 leaves no room for BOS"):
        generator.generate([""], Options(max_new=64, truncate_prompt=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new": -1}, "max_new: got -1"),
        ({"max_new": 1.5}, "max_new: got 1.5"),
        ({"seed": -3}, "seed: got -3"),
        ({"temperature": -1.0}, "temperature: got -1, want 0"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_p": 0.0}, "top_p: got 0"),
        ({"min_p": 1.5}, "min_p: got 1.5"),
        ({"steps": 3}, "steps: got 3, but decoding 'plain'"),
        ({"stop": ("",)}, "stop: got ''"),
        ({"stop": "abc"}, "stop: got the string 'abc', want a list"),
    ],
)
def test_bad_options_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        speaker("hello").generate([""], Options(**{"max_new": 4} | values))


def test_bad_prompts_and_pairs_are_named():
    with pytest.raises(ConfigError, match="prompts: got 'hello', want a list"):
        speaker("hello").generate("hello")
    with pytest.raises(ConfigError, match=r"prompts: got \[\]"):
        speaker("hello").generate([])
    with pytest.raises(DataError, match="lone surrogate"):
        speaker("hello").generate(["\ud800"])
    with pytest.raises(ConfigError, match="model has 5 ids, the tokenizer has 260"):
        Generator(ScriptedModel(jnp.zeros((1, 4), jnp.int32), 5), Plain(), BYTES)


def test_broken_logits_are_an_error_not_a_text():
    generator = speaker("hello")
    broken = ScriptedModel(generator.model.scripts.at[0, 3].set(-1), BYTES.vocab_size)
    with pytest.raises(GenlabError, match="non-finite logits at position 4 of row 0"):
        Generator(broken, Plain(), BYTES).generate([""], GREEDY)


@pytest.fixture(scope="module")
def denoiser():
    """A small bidirectional model of bytes with fresh parameters."""
    config = {
        "width": 8,
        "pattern": ["a"],
        "layers": {"a": {"mixer": {"name": "attention", "num_heads": 2}}},
        "max_len": 64,
        "vocab_size": BYTES.vocab_size,
    }
    return build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=0)


@pytest.mark.parametrize("order", ["random", "left_to_right"])
def test_diffusion_streams_settled_text_and_shows_its_canvas(denoiser, order):
    generator = Generator(denoiser, Unmasking(MASK, order=order), BYTES)
    options = Options(max_new=12, steps=6, seed=3)
    result = generator.generate(["abc"], options)[0]
    assert len(result.ids) == 12 or result.ids[-1] == EOS
    assert result.nfe == 6 and result.token_evals == 6 * 16
    pieces, last = streamed(generator, "abc", options)
    assert last == result and "".join(pieces) == result.text
    shots, canvas = [], generator.canvas("abc", options)
    while True:
        try:
            shots.append(next(canvas))
        except StopIteration as end:
            assert end.value == result
            break
    unknown = [shot.count(module.UNKNOWN) for shot in shots]
    assert unknown[0] == 12 and unknown[-1] == 0 and len(shots) == 7
    assert unknown == sorted(unknown, reverse=True)
    if order == "left_to_right":
        assert all(shot.rstrip(module.UNKNOWN).count(module.UNKNOWN) == 0 for shot in shots)
    before = unmasking._canvas._cache_size()
    generator.generate(["abcd"], Options(max_new=9, steps=4))
    assert unmasking._canvas._cache_size() == before


def test_diffusion_takes_one_step_a_token_unless_told(denoiser):
    generator = Generator(denoiser, Unmasking(MASK), BYTES)
    results = generator.generate(["", "a longer prompt"], Options(max_new=10))
    assert [r.nfe for r in results] == [10, 10]
    assert [r.token_evals for r in results] == [10 * 11, 10 * 26]
