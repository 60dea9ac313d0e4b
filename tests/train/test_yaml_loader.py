"""Every fault of a configuration is one line that names its place and the cure."""

import json

import pytest
from genlab.errors import ConfigError
from genlab.train.config import RunConfig, plain
from genlab.train.schema import schema_of
from genlab.train.yaml_loader import (
    apply_overrides,
    dump_yaml,
    families,
    find_config,
    load_config,
    load_yaml,
    merge,
    parse_yaml,
    resolve,
    validate,
)


def refusal(raw, *overrides):
    """The message on `raw` with overrides; a single line."""
    with pytest.raises(ConfigError) as error:
        validate(RunConfig, apply_overrides(raw, list(overrides)), "run.yaml")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("run.yaml: ")
    return message.removeprefix("run.yaml: ")


def without(raw, *path):
    copy = json.loads(json.dumps(raw))
    node = copy
    for part in path[:-1]:
        node = node[part]
    del node[path[-1]]
    return copy


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.optimizer.learnig_rate=1e-3",
            "training.optimizer.learnig_rate: unknown key (got 0.001); "
            "did you mean 'learning_rate'?",
        ),
        (
            "training.learning_rate=1e-3",
            "training.learning_rate: unknown key (got 0.001); "
            "'learning_rate' belongs under training.optimizer",
        ),
        (
            "learnig_rate=1e-3",
            "learnig_rate: unknown key (got 0.001); "
            "'learning_rate' belongs under training.optimizer",
        ),
        (
            "training.ema-decay=0.9",
            "training.ema-decay: unknown key (got 0.9); keys have underscores: 'ema_decay'",
        ),
        (
            "model.layers.a.mixer.num_head=2",
            "model.layers.a.mixer.num_head: unknown key (got 2); did you mean 'num_heads'?",
        ),
        (
            "model.num_heads=2",
            "model.num_heads: unknown key (got 2); 'num_heads' belongs under model.layers.a.mixer",
        ),
        (
            "training.seed=1",
            "training.seed: unknown key (got 1); 'seed' belongs at the top",
        ),
        ("training.tokens=many", "training.tokens: got 'many', want a valid integer"),
        ("training.tokens=6.5e5", "training.tokens: got 650000.0, want a valid integer"),
        ("training.remat=off", "training.remat: got 'off', want a valid boolean"),
        (
            "training.optimizer.learning_rate=-1",
            "training.optimizer.learning_rate: got -1, want greater than 0",
        ),
        ("training=3", "training: got 3, want a mapping of keys to values"),
        (
            "model.layers.a.mixer.name=mamba3",
            "model.layers.a.mixer: no 'mamba3' here; did you mean 'mamba'?",
        ),
        (
            "training.compute_dtype=bf16",
            "training.compute_dtype: got 'bf16', want 'float32' or 'bfloat16'; "
            "did you mean 'bfloat16'?",
        ),
        (
            "training.schedule={warmup_fraction: 0.1}",
            "training.schedule: want a mapping with `name:`",
        ),
        (
            "model.layers.a.mixer.num_kv_heads=3",
            "model.layers.a.mixer: num_kv_heads=3 does not divide num_heads=2",
        ),
        ("data.context_length=64", "model.max_len=32 is less than data.context_length=64"),
        (
            "training.accumulate=3",
            "training.accumulate=3 does not divide data.batch_size=4",
        ),
        (
            "training.select_best=true",
            "training: select_best=true needs evaluate_every, which is null",
        ),
    ],
)
def test_a_fault_is_one_line_with_place_value_and_cure(raw, override, message):
    assert refusal(raw, override) == message


def test_what_is_missing_is_named(raw):
    assert refusal(without(raw, "training", "tokens")) == (
        "training.tokens: missing; there is no default"
    )


def test_a_misspelt_required_key_is_one_fault_not_two(raw):
    bad = without(raw, "training", "tokens")
    bad["training"]["token"] = 5
    assert refusal(bad) == "training.token: unknown key (got 5); did you mean 'tokens'?"


def test_two_faults_are_two_lines(raw):
    with pytest.raises(ConfigError) as error:
        validate(RunConfig, apply_overrides(raw, ["sed=1", "training.keep=0"]), "run.yaml")
    assert str(error.value).splitlines() == [
        "run.yaml: sed: unknown key (got 1); did you mean 'seed'?",
        "run.yaml: training.keep: got 0, want greater than or equal to 1",
    ]


def test_duplicate_keys_name_both_lines(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  width: 3\n  depth: 1\n  width: 4\n")
    with pytest.raises(ConfigError) as error:
        load_yaml(path)
    assert str(error.value) == (
        f"{path}: model.width: duplicate key in line 4, first given in line 2"
    )


def test_yaml_is_version_1_2():
    text = "a: 1e-3\nb: off\nc: 010\nd: 1_000\ne: ~\nf: no\ng: 12:30:00\nh: true"
    assert parse_yaml(text, "x") == {
        "a": 1e-3, "b": "off", "c": 10, "d": 1000, "e": None, "f": "no", "g": "12:30:00",
        "h": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "x: line 1: not valid YAML"),
        ("a: 2020-01-01", "x: a: got 2020-01-01 (date), want text"),
        ("1: 2", "x: key 1 is no text"),
        ("a: {b: [.nan]}", "x: a.b[0]: got nan, want a finite number"),
        ("a: .inf", "x: a: got inf, want a finite number"),
        ("a: !!python/object:os.system x", "x: line 1: not valid YAML"),
    ],
)
def test_what_is_not_plain_yaml_is_refused(text, message):
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "x")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: no such file"),
        ("transfomer", "transfomer: no such file, and no family; did you mean 'transformer'?"),
    ],
)
def test_a_missing_file_is_named(name, message):
    with pytest.raises(ConfigError) as error:
        find_config(name)
    assert str(error.value) == message


def test_files_that_hold_no_mapping(tmp_path):
    for text, said in (("", "got nothing"), ("- 1", "got list"), ("5", "got int")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_yaml(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        find_config(tmp_path)


def test_merging_goes_key_by_key_and_replaces_lists():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 4}
    assert merge(base, {"a": {"c": [3]}, "e": None}) == {
        "a": {"b": 1, "c": [3]}, "d": 4, "e": None,
    }  # fmt: skip
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 4}


def test_another_choice_replaces_the_whole_mapping():
    base = {"s": {"name": "wsd", "decay_fraction": 0.2, "warmup_fraction": 0.1}}
    assert merge(base, {"s": {"name": "wsd", "decay_fraction": 0.3}})["s"] == {
        "name": "wsd", "decay_fraction": 0.3, "warmup_fraction": 0.1,
    }  # fmt: skip
    assert merge(base, {"s": {"name": "constant"}})["s"] == {"name": "constant"}
    assert apply_overrides(base, ["s.name=cosine", "s.final_fraction=0"])["s"] == {
        "name": "cosine", "final_fraction": 0,
    }  # fmt: skip


def test_extends_reaches_files_and_families(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nb: 3\n")
    (tmp_path / "sub" / "mid.yaml").write_text("extends: ../base.yaml\na: {x: 5}\n")
    got = resolve({"extends": "sub/mid.yaml", "b": 4}, tmp_path)
    assert got == {"a": {"x": 5, "y": 2}, "b": 4}
    assert resolve({"extends": "transformer"}, tmp_path) == load_yaml(families()["transformer"])


def test_a_wrong_extends_names_its_file(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: mambo\n")
    with pytest.raises(ConfigError, match=r"a\.yaml: extends: no family 'mambo'"):
        load_config(RunConfig, tmp_path / "a.yaml")


def test_extends_of_nothing_and_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: .*b\.yaml -> .*a\.yaml -> .*b\.yaml"):
        resolve(load_yaml(tmp_path / "a.yaml"), tmp_path)
    with pytest.raises(ConfigError, match=r"no such file in"):
        resolve({"extends": "c.yaml"}, tmp_path)
    with pytest.raises(ConfigError, match="no family 'mambo'; did you mean 'mamba'"):
        resolve({"extends": "mambo"}, tmp_path)
    with pytest.raises(ConfigError, match=r"want a family or a file, got \['a'\]"):
        resolve({"extends": ["a"]}, tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a", "want dotted.key=value"),
        ("=3", "want dotted.key=value"),
        ("a..b=3", "want dotted.key=value"),
        ("d.e=3", "d is 4, not a mapping"),
        ("a=[1", "not valid YAML"),
    ],
)
def test_bad_overrides(override, message):
    with pytest.raises(ConfigError) as error:
        apply_overrides({"a": {"b": 1}, "d": 4}, [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_last_override_wins_and_an_empty_one_is_null():
    got = apply_overrides({"a": {"b": 1}}, ["a.b=2", "a.b=3", "a.c="])
    assert got == {"a": {"b": 3, "c": None}}
    assert apply_overrides({}, ["a=b=c"]) == {"a": "b=c"}


@pytest.mark.parametrize("name", sorted(families()))
def test_every_family_loads_and_survives_being_written(name, tmp_path):
    config = load_config(RunConfig, name)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(plain(config)))
    assert load_config(RunConfig, path) == config
    assert families()[name].read_text().startswith(f"# genlab train {name}")


def test_tiny_configs_load():
    folder = families()["transformer"].parent.parent / "tiny"
    paths = sorted(folder.glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_config(RunConfig, path).updates <= 100


def test_texts_that_look_like_something_else_survive_being_written():
    value = {"a": "1e-3", "b": "off", "c": "null", "d": 1e-7, "e": "x: y", "f": [], "g": "0x1"}
    assert parse_yaml(dump_yaml(value), "x") == value
    assert list(parse_yaml(dump_yaml(value), "x")) == list(value)


def test_the_schema_knows_all_keys_and_extends():
    schema = schema_of(RunConfig)
    assert set(schema["properties"]) == {"extends", *RunConfig.model_fields}
    assert "required" not in schema
    assert schema["additionalProperties"] is False
    assert "learning_rate" in schema["$defs"]["AdamWConfig"]["properties"]
