"""`genlab generate --fill`: blanks get the tokens that the model finds most probable."""

import json
import shutil
from pathlib import Path

import genlab
import numpy as np
import pytest
import typer
from genlab.errors import CapacityError, ConfigError
from genlab.eval.cli_generate import generate_command
from genlab.eval.fill import blanked_ids, mask_name
from genlab.train.interop.import_run import import_checkpoint
from typer.testing import CliRunner

FIXTURES = Path(__file__).parents[1] / "interop" / "fixtures"
NAMES = {"[CLS]": 1, "[SEP]": 2, "[MASK]": 4}
WORDS = [index for index in range(97) if index not in NAMES.values()]


def tokenizer_json(*, lstrip=False, template=True):
    """A word for each id; three of them are special, and stand around a whole text."""
    vocab = {f"t{index}": index for index in WORDS} | NAMES
    added = [
        {
            "id": index, "content": name, "special": True, "single_word": False, "rstrip": False,
            "lstrip": lstrip and name == "[MASK]", "normalized": False,
        }
        for name, index in NAMES.items()
    ]  # fmt: skip
    pieces = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
              {"Sequence": {"id": "A", "type_id": 0}},
              {"SpecialToken": {"id": "[SEP]", "type_id": 0}}]  # fmt: skip
    specials = {
        name: {"id": name, "ids": [NAMES[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
    }
    processor = {
        "type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": specials,
    }  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": processor if template else None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The BERT fixture with a tokenizer, whose config does not say which token is the mask."""
    folder = tmp_path_factory.mktemp("bert") / "hf"
    shutil.copytree(FIXTURES / "bert", folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    raw = json.loads((folder / "config.json").read_text())
    for key in ("mask_token_id", "bos_token_id", "eos_token_id"):
        raw.pop(key, None)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return genlab.load(folder)


def test_blanks_get_the_most_probable_words(loaded):
    filled = loaded.fill("t10 [MASK] t12 t13", temperature=0.0)
    logits = np.array(loaded([1, 10, 4, 12, 13, 2]))[2]
    best = WORDS[int(logits[WORDS].argmax())]
    assert filled.ids == [1, 10, best, 12, 13, 2]
    assert filled.blanks == [2] and filled.pieces[0].strip() == f"t{best}"
    assert filled.text.split() == ["t10", f"t{best}", "t12", "t13"]
    assert (filled.nfe, filled.token_evals) == (1, 6)


def test_several_texts_are_filled_each_by_itself(loaded):
    texts = ["t10 [MASK] t12", "[MASK] t20 [MASK] t21 t22 t23 [MASK]"]
    together = loaded.fill(texts, temperature=0.0)
    assert [one.nfe for one in together] == [1, 3]
    for row, (text, one) in enumerate(zip(texts, together, strict=True)):
        alone = loaded.fill(text, temperature=0.0, seed=row)
        assert alone.ids == one.ids and not set(one.ids[1:-1]) & set(NAMES.values())
    quick = loaded.fill(texts[1], temperature=0.0, steps=1)
    assert quick.nfe == 1


def test_the_mask_takes_the_space_before_it_where_the_tokenizer_says_so(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "hf")
    for lstrip in (False, True):
        data = tokenizer_json(lstrip=lstrip, template=False)
        data["pre_tokenizer"] = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = genlab.load(tmp_path / "hf").tokenizer
        assert mask_name(tokenizer) == "[MASK]"
        assert not tokenizer.adds_bos and not tokenizer.adds_eos
        # A lone space is a word that the vocabulary lacks.
        want = [10, 4, 0, 12] if lstrip else [10, 0, 4, 0, 12]
        assert blanked_ids(tokenizer, "t10 [MASK] t12").tolist() == want


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("t10 t12", {}, r"has no blank; write \[MASK\] where one is"),
        ("[MASK]", {"max_new": 3}, "max_new is of answers"),
        ("[MASK]", {"stop": ("t3",)}, "stop is of answers"),
        ("[MASK]", {"order": "random"}, "fill: no option 'order'"),
        ([], {}, "want a list of at least one text"),
    ],
)
def test_what_cannot_be_filled(loaded, text, options, message):
    with pytest.raises(ConfigError, match=message):
        loaded.fill(text, **options)


def test_other_faults(loaded):
    with pytest.raises(CapacityError, match="a text of 23 tokens is longer than the model's rows"):
        loaded.fill("[MASK] " * 21)
    causal = genlab.load(FIXTURES / "mistral")
    with pytest.raises(ConfigError, match="cannot fill blanks in it; use a masked_diffusion run"):
        causal.fill("5 <|mask|>")


def test_the_command(folder, loaded, tmp_path):
    import_checkpoint(folder, tmp_path / "run")
    app = typer.Typer()
    app.command()(generate_command)

    def ask(*arguments):
        return CliRunner().invoke(app, [str(tmp_path / "run"), *arguments])

    given = ("--fill", "--temperature", "0", "--prompt", "t10 [MASK] t12")
    answer = ask(*given)
    want = loaded.fill("t10 [MASK] t12", temperature=0.0)
    assert answer.stdout == f"{want.text}\n"
    (record,) = json.loads(ask(*given, "--json").stdout)
    assert record == want._asdict()
    refused = ask("--fill", "--max-new", "3", "--prompt", "[MASK]")
    assert isinstance(refused.exception, ConfigError)
    assert "--fill: does not go with --max-new" in str(refused.exception)
