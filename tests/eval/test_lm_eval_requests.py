"""What requests of lm-evaluation-harness become: ids, options, answers."""

import importlib
import json
import runpy
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import CapacityError, ConfigError
from genlab.eval.generate import Options
from genlab.eval.lm_eval import __main__ as command_line
from genlab.eval.lm_eval.encoding import encode, encode_pair
from genlab.eval.lm_eval.generation import Writer, read_gen_kwargs
from genlab.paradigms.decoding.plain import Plain
from genlab.train.data.json_tokenizer import OWN, JsonTokenizer, train_bpe
from genlab.train.data.tokenizer import BytesTokenizer
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]
BYTES = BytesTokenizer()
BOS, EOS, PAD, _ = BYTES.specials


@pytest.fixture(scope="module")
def bpe():
    """Has " world" as one token, in which "ld" ends."""
    return train_bpe(["hello world hello wor hello world"] * 20, 270)


@pytest.fixture(scope="module")
def without_bos(bpe):
    """The same as an imported tokenizer whose texts do not begin with BOS."""
    data = json.loads(bpe.content)
    specials, size = list(bpe.specials), bpe.vocab_size
    data[OWN] = {
        "specials": specials, "stop_ids": [specials[1]], "vocab_size": size, "adds_bos": False,
    }  # fmt: skip
    return JsonTokenizer(json.dumps(data), kind="file", origin="x")


def byte_ids(text):
    return list(text.encode())


def test_bos_comes_once_and_names_of_special_tokens_are_ids(without_bos):
    assert encode(BYTES, "ab", bos=True) == [BOS, 97, 98]
    assert encode(BYTES, "ab", bos=False) == [97, 98]
    assert encode(BYTES, "<|bos|>ab<|eos|>", bos=True) == [BOS, 97, 98, EOS]
    assert encode(BYTES, "", bos=True) == [BOS]
    assert encode(without_bos, "hello", bos=True) == without_bos.encode("hello").tolist()


@pytest.mark.parametrize(
    ("context", "continuation", "before", "after"),
    [
        ("ab", "cd", "ab", "cd"),
        ("ab ", "cd", "ab", " cd"),
        ("ab \n", " cd", "ab", " \n cd"),
        ("", "cd", "", "cd"),
        ("", "<|bos|>cd", "", "cd"),
        ("ab", "", "ab", ""),
        ("", "", "", ""),
        ("  ", "cd", "", "  cd"),
    ],
)
def test_pairs(context, continuation, before, after):
    pair = encode_pair(BYTES, context, continuation)
    assert pair == ([BOS, *byte_ids(before)], byte_ids(after))


@given(st.text(max_size=8), st.text(max_size=8))
def test_bytes_are_scored_once(context, continuation):
    before, after = encode_pair(BYTES, context, continuation)
    assert before[0] == BOS and [*before[1:], *after] == byte_ids(context + continuation)
    assert byte_ids(continuation) == after[len(after) - len(byte_ids(continuation)) :]


def test_a_border_inside_a_token(bpe, without_bos):
    """As in running text where something is left to score; by itself where nothing is."""
    for tokenizer, begin in ((bpe, [bpe.bos_id]), (without_bos, [])):
        whole = tokenizer.encode("hello world").tolist()
        assert len(whole) == 2
        assert encode_pair(tokenizer, "hello", " world") == ([*begin, whole[0]], whole[1:])
        assert encode_pair(tokenizer, "hello ", "world") == ([*begin, whole[0]], whole[1:])
        context, continuation = encode_pair(tokenizer, "hello wor", "ld")
        assert context == [*begin, *tokenizer.encode("hello wor").tolist()]
        assert continuation == tokenizer.encode("ld").tolist()
    assert encode_pair(without_bos, " ", "hello")[0] == [without_bos.bos_id]


def wanted(**kwargs):
    return read_gen_kwargs(kwargs, BYTES).options


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({}, Options(max_new=256, temperature=0.0)),
        ({"until": "\n", "max_gen_toks": 9}, Options(max_new=9, temperature=0.0, stop=("\n",))),
        ({"until": ["a", ""], "max_tokens": 3, "max_new_tokens": 4},
         Options(max_new=4, temperature=0.0, stop=("a",))),
        ({"do_sample": True}, Options(max_new=256, temperature=1.0)),
        ({"do_sample": False, "temperature": 0.7}, Options(max_new=256, temperature=0.0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5.0, "num_beams": 1},
         Options(max_new=256, temperature=0.7, top_p=0.9, top_k=5)),
    ],
)  # fmt: skip
def test_generation_kwargs(kwargs, options):
    assert wanted(**kwargs) == options


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"top_kk": 1}, "generation_kwargs: no option 'top_kk'; did you mean 'top_k'?"),
        ({"num_beams": 4}, "num_beams is 4, but only 1 is implemented"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0, want 1 or more"),
        ({"temperature": "hot"}, "temperature is 'hot', want a number"),
        ({"top_k": 1.5}, "top_k is 1.5, want a number"),
        ({"do_sample": "yes"}, "do_sample is 'yes', want true or false"),
    ],
)
def test_faults_of_generation_kwargs(kwargs, said):
    with pytest.raises(ConfigError) as error:
        wanted(**kwargs)
    assert said in str(error.value)
    with pytest.raises(ConfigError, match="got 'x', want names and values"):
        read_gen_kwargs("x", BYTES)


def writer(*texts, max_len=64, seed=0, quiet=0.0):
    """Answers the prompt [BOS, r, ...] with the r-th text (or ids), then EOS."""
    scripts = np.full((3, 40), EOS, np.int32)
    for row, text in enumerate(texts):
        ids = byte_ids(text) if isinstance(text, str) else text
        scripts[row, : len(ids)] = ids
    model = ScriptedModel(jnp.asarray(scripts), BYTES.vocab_size, quiet=quiet)
    return Writer(model, Plain(), BYTES, max_len=max_len, seed=seed)


def answers(own, prompts, rows=2, **kwargs):
    seen = {}
    found = own.answer(
        prompts,
        read_gen_kwargs(kwargs, BYTES),
        rows_per_batch=lambda width: rows,
        progress=seen.__setitem__,
    )
    assert [seen[number] for number in range(len(prompts))] == found
    return found


def test_answers_keep_their_order_and_are_cut_at_stops():
    own = writer("one\ntwo", "three Q: four", "five")
    prompts = [[BOS, 0], [BOS, 1, 7, 7], [BOS, 2, 7]]
    for rows in (1, 2):
        assert answers(own, prompts, rows, until=["\n", "Q:"], max_gen_toks=16) == [
            "one", "three ", "five",
        ]  # fmt: skip
    assert answers(own, prompts, max_gen_toks=3) == ["one", "thr", "fiv"]


def test_draws_depend_on_the_number_of_the_request():
    prompts = [[BOS, 0], [BOS, 0, 5], [BOS, 0]]
    say = {"temperature": 1.0, "max_gen_toks": 6}
    loud = writer("a" * 40, quiet=58.0)  # anything may be drawn
    alone, together = (answers(loud, prompts, rows, **say) for rows in (1, 2))
    assert alone == together and alone[0] != alone[2]
    assert answers(writer("a" * 40, quiet=58.0, seed=1), prompts[:1], **say)[0] not in alone[::2]


def test_stops_that_are_special_tokens():
    """They are no text: without this the answer would go on behind them."""
    own = writer("x")
    named = read_gen_kwargs({"until": ["<|pad|>", "x"]}, BYTES)
    assert named.stop_names == {"<|pad|>"}
    result = type("Result", (), {"ids": [102, 103, PAD, 104], "text": "fgh"})()
    assert own._text(result, named) == "fg"
    assert own._text(result, read_gen_kwargs({"until": "x"}, BYTES)) == "fgh"


def test_long_prompts_lose_their_beginning():
    own = writer("zero", "one", max_len=24)
    long = [0] * 40 + [BOS, 1] + [9] * 17
    # 20 places are left to it, of which the second decides here what is said.
    assert answers(own, [long], max_gen_toks=5) == ["one"]
    with pytest.raises(CapacityError, match="max_gen_toks 24 leaves no room for a prompt"):
        answers(own, [long], max_gen_toks=24)


def test_the_harness_finds_the_model_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["genlab"].partition(":")
    found = getattr(importlib.import_module(module), name)
    # The harness compares this text with the class that registers itself.
    assert (found.__module__, found.__name__) == (module, name)


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("genlab: package 'lm_eval") and said.count("\n") == 1
    assert said.endswith("is missing: pip install 'genlab[lm_eval]'\n")
