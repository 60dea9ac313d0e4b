"""`genlab list`: the registries and the YAML headers, nothing else."""

import pytest
from genlab.errors import ConfigError
from genlab.eval.inventory import configs_folder, header_of, inventory, kinds
from genlab.paradigms.decoding.registry import DECODINGS
from genlab.paradigms.paradigm_registry import PARADIGMS
from genlab.paradigms.registry import BLOCKS, MIXERS, MLPS
from genlab.train.data.sources import SOURCES
from genlab.train.data.synthetic.registry import TASKS
from genlab.train.yaml_loader import families


def names(kind):
    return [offer.name for offer in inventory(kind)[kind]]


@pytest.mark.parametrize(
    ("kind", "registry"),
    [
        ("families", families()), ("mixers", MIXERS), ("blocks", BLOCKS), ("mlps", MLPS),
        ("paradigms", PARADIGMS), ("decodings", DECODINGS), ("tasks", TASKS),
        ("sources", SOURCES),
    ],
)  # fmt: skip
def test_every_registered_name_is_listed(kind, registry):
    assert names(kind) == list(registry)


def test_choices_without_a_table_are_read_from_the_configuration():
    assert {"bytes", "bpe", "file"} <= set(names("tokenizers"))
    assert {"cosine", "constant"} <= set(names("schedules")) and "adamw" in names("optimizers")


def test_every_shipped_yaml_is_listed_once():
    folder = configs_folder()
    listed = [f"families/{name}.yaml" for name in names("families")] + names("configs")
    there = [path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")]
    assert sorted(listed) == sorted(there)


def test_everything_has_one_line():
    for kind, offers in inventory().items():
        assert offers, kind
        for offer in offers:
            assert offer.about and "\n" not in offer.about, (kind, offer.name)
    about = {offer.name: offer.about for offer in inventory("mixers")["mixers"]}
    assert about["mamba"].startswith("Mamba mixer: a selective state space")


def test_a_name_is_described_by_its_own_class_where_a_module_holds_several():
    (tasks,) = inventory("tasks").values()
    abouts = [offer.about for offer in tasks]
    assert len(set(abouts)) == len(abouts)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("# genlab train x\n#\n# First, arXiv 2401.04088,\n# sec. 4.1. Second.\na: 1",
         ("genlab train x", "First, arXiv 2401.04088, sec. 4.1.")),
        ("# One. 0.65M parameters.\nx: 1\n# later", ("", "One.")),
        ("# genlab train x\nx: 1", ("genlab train x", "")),
        ("# no stop\n#\n# next paragraph", ("", "no stop")),
        ("x: 1\n# late", ("", "")),
        ("", ("", "")),
    ],
)  # fmt: skip
def test_the_header_of_a_file(text, want):
    assert header_of(text) == want


def test_a_wrong_kind_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^list 'famlies': .*; did you mean 'families'\?$"):
        inventory("famlies")
    with pytest.raises(ConfigError, match=r"valid: .*mixers"):
        inventory("qqq")
    assert list(inventory("mlps")) == ["mlps"] and list(inventory()) == list(kinds())
