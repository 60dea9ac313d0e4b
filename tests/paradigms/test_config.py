"""The base of configurations: hashing, copies, and choices."""

import pytest
from genlab.paradigms.config import Config, choice_of


class Inner(Config):
    name: str = "inner"
    value: int = 1


class Outer(Config):
    inner: Inner = Inner()
    table: dict[str, int] = {"a": 1}  # noqa: RUF012


def test_a_copy_has_its_own_json_and_hash():
    first = Outer()
    before = first.canonical_json, hash(first)
    copy = first.model_copy(update={"inner": Inner(value=2)})
    assert copy.canonical_json != before[0]
    assert hash(copy) != before[1]
    assert '"value":2' in copy.canonical_json


def test_equal_configs_hash_alike_and_dicts_are_no_obstacle():
    assert hash(Outer()) == hash(Outer.model_validate_json('{"inner": {"value": 1}}'))


def test_a_registry_refuses_a_class_under_another_name():
    with pytest.raises(TypeError, match="'other', not as 'inner'"):
        choice_of({"other": Inner})
