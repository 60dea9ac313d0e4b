"""Constrained answers: they always match, follow the renormalised law, and cost no new programs."""

import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError, DataError, GenlabError
from genlab.eval.constraints import Constraint, Grammar, one_constraint
from genlab.eval.generate import Generator, Options
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.loop import _advance
from genlab.paradigms.decoding.plain import Plain, _start
from genlab.paradigms.decoding.sampling import (
    Purpose,
    draw,
    log_probabilities,
    make_sampling,
    with_allowed,
)
from genlab.paradigms.decoding.state import row_keys
from genlab.paradigms.decoding.unmasking import Unmasking
from genlab.paradigms.model import build_model
from genlab.train.data.json_tokenizer import train_bpe
from genlab.train.data.tokenizer import BytesTokenizer

SCRIPTED = Path(__file__).parents[1] / "paradigms" / "decoding" / "scripted.py"
ScriptedModel = runpy.run_path(str(SCRIPTED))["ScriptedModel"]
BYTES = BytesTokenizer()
EOS = BYTES.eos_id
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["x", "yé"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def speaker(text, quiet=0.0):
    """Says `text`, then EOS; `quiet` is the logit of everything else (the script's is 60)."""
    script = np.full((1, 24), EOS, np.int32)
    script[0, : len(text.encode())] = list(text.encode())
    return Generator(ScriptedModel(jnp.asarray(script), 260, 64, quiet), Plain(), BYTES)


def regex(pattern, **values):
    return Options(**{"max_new": 24, "constraint": Constraint("regex", pattern)} | values)


def enumerated(a, b, end):
    """Probabilities of the answers of [ab]{1,2} where the three weigh so much at each step."""
    first = {"a": a / (a + b), "b": b / (a + b)}
    then = {"a": a / (a + b + end), "b": b / (a + b + end), "": end / (a + b + end)}
    return {one + two: first[one] * then[two] for one, two in itertools.product("ab", then)}


@pytest.fixture(scope="module")
def trained():
    """A tiny random transformer on a BPE vocabulary with pieces of several characters."""
    text = 'the cat sat on the mat. yes, no: {"name": "the", "age": 12, "kind": "x"} é 2026 ' * 20
    tokenizer = train_bpe([text], 296)
    config = ModelConfig.model_validate(
        {
            "width": 16,
            "depth": 1,
            "pattern": ("attention",),
            "layers": {
                "attention": {
                    "mixer": {"name": "attention", "num_heads": 2, "num_kv_heads": 1},
                    "mlp": {"name": "swiglu", "width": 16},
                }
            },
            "max_len": 128,
            "vocab_size": tokenizer.vocab_size,
        }
    )
    return Generator(build_model(config, seed=0), Plain(), tokenizer)


@pytest.mark.parametrize(
    "pattern", ["[0-9]{4}-[0-9]{2}", "(yes|no)(, the [a-e]{1,3})?", "[é日]{3}"]
)
def test_answers_match_the_regex(trained, pattern):
    results = trained.generate([""] * 32, regex(pattern, max_new=32))
    assert [r.text for r in results if not re.fullmatch(pattern, r.text)] == []
    assert {r.finish_reason for r in results} == {"stop"}
    assert len({r.text for r in results}) > 4  # the seeds differ, so do the answers


def test_answers_match_the_schema(trained):
    constraint = Constraint("json_schema", json.dumps(SCHEMA))
    for result in trained.generate([""] * 24, Options(max_new=100, constraint=constraint)):
        assert result.finish_reason == "stop"
        value = json.loads(result.text)
        assert list(value) == ["name", "age", "kind"]
        assert len(value["name"]) <= 3 and 0 <= value["age"] <= 120
        assert type(value["age"]) is int and value["kind"] in ("x", "yé")


def test_answers_are_one_of_the_choices(trained):
    choices = ("yes", "yes, no", "a.b|c*", "the €", "[", "\\")
    constraint = Constraint("choice", choices)
    results = trained.generate([""] * 48, Options(max_new=32, constraint=constraint))
    texts = {r.text for r in results}
    assert texts <= set(choices) and len(texts) >= 4


def test_a_row_depends_on_its_prompt_and_seed_alone(trained):
    options = regex("[a-z]{1,6}( [a-z]{1,6}){2}", seed=5)
    together = trained.generate(["the", "", "no"], options)
    for row, prompt in enumerate(["the", "", "no"]):
        own = regex("[a-z]{1,6}( [a-z]{1,6}){2}", seed=5 + row)
        assert trained.generate([prompt], own) == [together[row]]
        pieces, stream = [], trained.stream(prompt, own)
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                assert end.value == together[row] and "".join(pieces) == together[row].text
                break


def test_the_law_is_the_renormalised_one():
    """4,000 answers against enumeration: |observed - expected| within 4.5 standard errors."""
    weights = np.exp([2.0, 0.0, 0.0])  # "a" is scripted at logit 60, all else has 58
    want = enumerated(*weights)
    generator, count = speaker("a" * 24, quiet=58.0), 500
    seen = dict.fromkeys(want, 0)
    for seed in range(8):
        options = regex("[ab]{1,2}", seed=seed * count)
        for result in generator.generate([""] * count, options):
            seen[result.text] += 1
    total = 8 * count
    assert sum(seen.values()) == total and abs(sum(want.values()) - 1) < 1e-12
    for text, p in want.items():
        assert abs(seen[text] - total * p) < 4.5 * np.sqrt(total * p * (1 - p)), text


def test_other_filters_see_only_what_is_allowed():
    generator = speaker("zzzz")
    assert generator.generate([""], regex("[b-d]{3}", temperature=0.0))[0].text == "bbb"
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        text = generator.generate([""], regex("[b-d]{3}", **filters))[0].text
        assert re.fullmatch("[b-d]{3}", text)
    # What the model wants most decides where the grammar leaves a choice.
    assert generator.generate([""], regex("[x-z]{3}", temperature=0.0))[0].text == "zzz"


def test_the_first_token_is_constrained_too():
    assert speaker("zzzz").generate([""], regex("b", temperature=0.0))[0].text == "b"
    assert speaker("zzzz").generate([""], regex("b.*", max_new=1))[0].text == "b"


def test_eos_only_where_the_grammar_may_end():
    assert speaker("").generate([""], regex("[bc]{2,}", temperature=0.0))[0].text == "bb"
    at_once = speaker("").generate([""], regex("b*", temperature=0.0))[0]
    assert at_once.text == "" and at_once.ids == [EOS] and at_once.finish_reason == "stop"


def test_an_answer_ends_with_the_grammar_without_another_call():
    result = speaker("abcabc").generate([""], regex("abc", temperature=0.0))[0]
    assert result.text == "abc" and result.finish_reason == "stop"
    assert result.ids == [*b"abc"] and result.nfe == 3


def test_rows_end_one_by_one():
    options = Options(max_new=24, constraint=Constraint("choice", ("b", "cccccccccc")))
    results = speaker("zz").generate([""] * 16, options)
    assert {r.text for r in results} == {"b", "cccccccccc"}
    assert {(len(r.ids), r.nfe) for r in results} == {(1, 1), (10, 10)}


def test_stop_strings_and_max_new_still_hold():
    generator = speaker("a.b.c.d.")
    options = regex("([a-z][.])+", temperature=0.0, stop=(".c",))
    assert generator.generate([""], options)[0].text == "a.b"
    cut = generator.generate([""], regex("([a-z][.]){4}", temperature=0.0, max_new=5))[0]
    assert cut.text == "a.b.c" and cut.finish_reason == "length"
    assert generator.generate([""], regex("a", max_new=0))[0].text == ""


def test_half_characters_wait_for_their_other_half(trained):
    stream = speaker("é€").stream("", regex("é€", temperature=0.0))
    assert list(stream) == ["é", "€"]


def test_without_a_constraint_nothing_changes(trained):
    plain = Options(max_new=16, seed=3)
    before = trained.generate(["the"], plain)
    trained.generate(["the"], regex("[a-z]{8}"))
    assert trained.generate(["the"], plain) == before
    anything = regex("(?s:.*)", temperature=0.0)
    free = speaker("abc def").generate([""], Options(max_new=24, temperature=0.0))
    assert speaker("abc def").generate([""], anything) == free


def test_a_mask_that_allows_everything_draws_the_same():
    sampling = make_sampling(64, vocab_size=12, temperature=1.3, top_p=0.9, forbidden_ids=[3])
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 12)), jnp.float32)
    keys, places = row_keys(np.arange(64)), jnp.arange(64)
    limited = with_allowed(sampling, np.ones((64, 12), bool))
    one, other = (draw(logits, keys, places, Purpose.TOKEN, s) for s in (sampling, limited))
    assert (one == other).all() and len(set(one.tolist())) > 3


def test_a_mask_renormalises_the_law():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(32, 12)) * 2, jnp.float32)
    allowed = rng.random((32, 12)) < 0.5
    allowed[:, 0] = True
    sampling = make_sampling(32, vocab_size=12, temperature=0.7)
    law = np.exp(np.asarray(log_probabilities(logits, with_allowed(sampling, allowed))))
    weight = np.where(allowed, np.exp(np.asarray(logits, np.float64) / 0.7), 0.0)
    np.testing.assert_allclose(law, weight / weight.sum(1, keepdims=True), atol=2e-6)
    # The filters take what the mask left: the two best of the allowed ids.
    two = make_sampling(32, vocab_size=12, top_k=2)
    kept = np.asarray(log_probabilities(logits, with_allowed(two, allowed))) > -1e9
    order = np.argsort(np.where(allowed, -np.asarray(logits), np.inf), axis=1)
    want = np.zeros_like(kept)
    np.put_along_axis(want, order[:, :2], True, axis=1)
    np.testing.assert_array_equal(kept, want & allowed)


def test_masks_are_data():
    generator = speaker("abcdef")
    generator.generate([""], regex("[a-f]{5}"))
    before = _start._cache_size() + _advance._cache_size()
    generator.generate([""], regex("([b-z]|[0-9])+x?", max_new=9, seed=2))
    choice = Options(max_new=7, constraint=Constraint("choice", ("yes", "no")))
    generator.generate([""], choice)
    assert _start._cache_size() + _advance._cache_size() == before


def test_nothing_left_is_an_error():
    grammar = Grammar(Constraint("regex", "[xy]"), BYTES, 260)
    forbidden = np.zeros((260,), bool)
    forbidden[[ord("x"), ord("y")]] = True
    with pytest.raises(GenlabError, match="cannot be followed in row 1: no token"):
        grammar.start(2).allowed([False, True], forbidden)
    masks = grammar.start(1)
    with pytest.raises(GenlabError, match="cannot be followed in row 0"):
        masks.take(0, [ord("z")])


def test_padded_and_special_ids_are_never_allowed():
    grammar = Grammar(Constraint("regex", "(?s:.*)"), BYTES, 264)
    allowed = grammar.start(1).allowed([True], np.zeros((264,), bool))[0]
    assert not allowed[[256, 258, 259, 260, 261, 262, 263]].any() and allowed[EOS]
    assert allowed[[ord("<"), ord("a"), 0xC3]].all() and not allowed[0xFF]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("regex", "a("), r"--regex 'a\(': unclosed group"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("json_schema", "{"), "--json-schema: no JSON"),
        (Constraint("json_schema", "[]"), "got list, want a schema that is an object"),
        (Constraint("json_schema", '{"type": "strng"}'), "Invalid type: strng"),
        (Constraint("json_schema", '{"enum": []}'), "Unsatisfiable"),
        (Constraint("json_schema", '{"not": {"type": "string"}}'), "Unimplemented keys"),
    ],
)
def test_a_faulty_constraint_is_one_line(constraint, message):
    with pytest.raises(ConfigError, match=message) as caught:
        speaker("a").generate([""], Options(max_new=4, constraint=constraint))
    assert "\n" not in str(caught.value)


def test_options_of_the_command(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert one_constraint(None, None, None) is None and one_constraint(None, None, []) is None
    assert one_constraint("a", None, None) == Constraint("regex", "a")
    assert one_constraint(None, file, None) == Constraint("json_schema", json.dumps(SCHEMA))
    assert one_constraint(None, None, ["a", "b"]) == Constraint("choice", ("a", "b"))
    for arguments, error, message in (
        (("a", file, None), ConfigError, "--regex and --json-schema exclude"),
        ((None, tmp_path / "none.json", None), DataError, "none.json: No such file"),
        ((None, None, ["a", ""]), ConfigError, "--choice '': want at least one"),
        ((None, None, ["a", "a"]), ConfigError, "--choice 'a': is given twice"),
    ):
        with pytest.raises(error, match=message):
            one_constraint(*arguments)


def test_the_package_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"need llguidance: pip install 'genlab\[constraints\]'"):
        speaker("a").generate([""], regex("a"))


def test_diffusion_refuses():
    generator = Generator(speaker("a").model, Unmasking(BYTES.mask_id), BYTES)
    with pytest.raises(ConfigError, match="'unmasking' does not draw one token after another"):
        generator.generate([""], regex("a"))
    sampling = make_sampling(1, vocab_size=260, steps=4)
    limited = with_allowed(sampling, np.ones((1, 260), bool))
    with pytest.raises(ConfigError, match="allowed: decoding 'unmasking'"):
        Unmasking(BYTES.mask_id).start(
            generator.model, [[BYTES.bos_id]], sampling=limited, seeds=[0], max_new=[4], max_len=8
        )


def test_a_mask_of_the_wrong_shape_is_refused():
    sampling = make_sampling(2, vocab_size=260)
    with pytest.raises(ConfigError, match=r"allowed: got bool \(2, 259\), want bool \(2, 260\)"):
        with_allowed(sampling, np.ones((2, 259), bool))
    with pytest.raises(ConfigError, match="allowed: got int"):
        with_allowed(sampling, np.ones((2, 260), int))
