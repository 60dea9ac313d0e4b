"""Datasets of the Hub, with a module in the place of `datasets` that serves rows from a list."""

import json
import sys
import types

import pytest
from genlab.errors import ConfigError, DataError
from genlab.train.data import hub
from genlab.train.data.hub import HubConfig
from genlab.train.data.pipeline import DataConfig, build_data
from genlab.train.yaml_loader import validate

COMMIT = "0123456789abcdef" * 2 + "01234567"
ROWS = [{"id": i, "text": f"Story {i} of a fox and a hen. " * 3} for i in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def serve(monkeypatch):
    """serve(rows) puts a module in place; its `asked` lists what was loaded."""

    def put(rows):
        module = types.ModuleType("datasets")
        module.asked, module.read = [], 0

        def stream():
            for row in rows:
                module.read += 1
                if isinstance(row, Exception):
                    raise row
                yield row

        def load_dataset(dataset, **given):
            module.asked.append((dataset, given))
            return stream()

        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        return module

    return put


def config(**changes):
    return HubConfig(**{"dataset": "a/stories", "revision": COMMIT, **changes})


def texts(source):
    return [document.text for document in source.documents()]


def refusal(source):
    with pytest.raises(DataError) as error:
        texts(source)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_are_documents_and_are_fetched_once(serve, monkeypatch):
    module = serve(ROWS)
    source = config(config="small", split="validation").build()
    documents = list(source.documents())
    assert [d.text for d in documents] == [row["text"] for row in ROWS]
    assert (documents[3].id, documents[3].group) == ("a/stories/3", "a/stories")
    given = {"name": "small", "split": "validation", "revision": COMMIT, "streaming": True}
    assert module.asked == [("a/stories", given)]
    monkeypatch.setitem(sys.modules, "datasets", None)  # neither package nor network from now on
    again = config(config="small", split="validation").build()
    assert texts(again) == texts(source) and again.fingerprint == source.fingerprint


def test_any_text_survives(serve):
    odd = ["", "a\nb\r\n\u2028", "\x00\x1b", "日本 🦊", '{"text": 1}', "\ud800"]
    serve([{"text": text} for text in odd])
    documents = list(config().build().documents())
    assert [d.text for d in documents] == odd[1:]
    assert documents[0].id == "a/stories/1"  # numbers are the dataset's rows


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "main"}, {"dataset": "b/stories"}, {"config": "other"}, {"split": "test"},
        {"max_documents": 19}, {"split_seed": 1}, {"validation_fraction": 0.5},
    ],
)  # fmt: skip
def test_the_fingerprint_holds_the_revision_and_every_other_setting(serve, change):
    serve(ROWS)
    assert config().build().fingerprint != config(**change).build().fingerprint


def test_the_fingerprint_holds_the_texts(serve, cache, tmp_path, monkeypatch):
    serve(ROWS)
    before = config(revision="main").build().fingerprint
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "elsewhere"))
    assert config(revision="main").build().fingerprint == before
    serve([*ROWS, {"text": "one more"}])
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "later"))
    assert config(revision="main").build().fingerprint != before  # the branch has moved


def test_only_the_rows_that_are_asked_for_are_read(serve):
    module = serve(ROWS)
    assert len(texts(config(max_documents=3).build())) == 3
    assert module.read == 3


def test_another_column(serve):
    serve([{"body": "hello", "text": "not this"}])
    assert texts(config(text_column="body").build()) == ["hello"]


@pytest.mark.parametrize(
    ("rows", "change", "said"),
    [
        (ROWS, {"text_column": "txt"},
         "source.dataset 'a/stories', row 0: source.text_column: no column 'txt'; did you mean "
         "'text'?"),
        ([{"text": 3}], {}, "row 0: column 'text' must hold strings, got int"),
        ([{"text": "a"}, {"text": None}], {}, "row 1: column 'text' must hold strings, got None"),
        ([ConnectionError("Couldn't reach\nthe Hub")], {},
         "source.dataset 'a/stories': cannot be read after 0 rows: Couldn't reach the Hub"),
        ([*ROWS, TimeoutError()], {}, "cannot be read after 20 rows: TimeoutError"),
        ([], {}, "source.dataset: no text in a/stories, split 'train'"),
        ([{"text": ""}], {"split": "x"}, "no text in a/stories, split 'x'"),
    ],
)  # fmt: skip
def test_faults_are_one_line(serve, rows, change, said):
    serve(rows)
    assert said in refusal(config(**change).build())


def test_what_was_cut_off_leaves_nothing_behind(serve, cache):
    serve([*ROWS, ConnectionError("gone")])
    refusal(config().build())
    serve(ROWS)
    assert len(texts(config().build())) == len(ROWS)
    (folder,) = [p for p in (cache / "hub").iterdir() if p.is_dir()]
    assert json.loads((folder / hub.META_FILE).read_text())["documents"] == len(ROWS)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal(config().build()) == (
        "source 'hub': package datasets is missing: pip install 'genlab[hub]'"
    )


@pytest.mark.parametrize("name", [hub.CONTENT_FILE, hub.META_FILE])
def test_a_damaged_copy_is_refused(serve, name):
    serve(ROWS)
    source = config().build()
    path = source.folder / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"(is corrupt|cannot be read); delete "):
        _ = config().build().fingerprint


def test_from_yaml_to_batches(serve):
    serve(ROWS)
    raw = {
        "source": {"name": "hub", "dataset": "a/stories", "revision": COMMIT,
                   "holdout_fraction": 0.2},
        "tokenizer": {"name": "bytes"}, "context_length": 16, "batch_size": 2,
    }  # fmt: skip
    data = build_data(validate(DataConfig, raw, "test"))
    assert data.test.num_documents == 4 and data.train.num_documents == 15  # and one to validate
    _, batch = next(data.train_batches())
    assert batch.tokens.shape == (2, 16)


def test_the_revision_must_be_given():
    with pytest.raises(ConfigError, match=r"source.*revision"):
        validate(DataConfig, {"source": {"name": "hub", "dataset": "a/b"}}, "test")
