"""No mixer, block or MLP can be registered without meeting the contracts, and none accepts junk."""

import json

import pytest
from genlab.paradigms import registry
from genlab.paradigms.masks import BlockCausal, Causal, Full
from pydantic import ValidationError


def parts(config, kind):
    """Names of the mixers, blocks or MLPs of a model's layers."""
    layers = config.layers.values()
    if kind == "mixer":
        return {mixer.name for layer in layers for mixer in layer.all_mixers}
    return {part.name for layer in layers if (part := getattr(layer, kind)) is not None}


@pytest.mark.parametrize("kind", ["mixer", "block", "mlp"])
def test_every_registered_name_occurs_in_a_model(lab, kind):
    names = set(getattr(registry, f"{kind.upper()}S" if kind != "mlp" else "MLPS"))
    seen = set().union(*(parts(e.config, kind) for e in lab.ENTRIES.values()))
    assert seen == names


def test_only_what_cannot_run_causally_is_exempt(lab):
    assert set(lab.ENTRIES) - set(lab.CAUSAL) == set(lab.BIDIRECTIONAL_ONLY)
    for name in lab.BIDIRECTIONAL_ONLY:
        entry = lab.ENTRIES[name]
        assert entry.refusal(Causal()) is not None
        assert entry.refusal(Full()) is None


def test_every_causal_model_runs_with_a_state(causal_entry):
    assert causal_entry.refusal(Causal()) is None
    assert causal_entry.refusal(Causal(), stateful=True) is None


def test_attention_looks_both_ways_and_state_spaces_refuse(entry):
    mixers = parts(entry.config, "mixer")
    recurrent = mixers & {"mamba", "mamba2"}
    for mask in (Full(), BlockCausal(4)):
        reason = entry.refusal(mask)
        if recurrent:
            assert "model.layer_" in reason and "causal mask" in reason
            assert any(name in reason for name in recurrent)
        elif mixers == {"attention"}:
            assert reason is None


def configs():
    """(registry, name) of everything that a YAML can name in a layer."""
    kinds = ("MIXERS", "BLOCKS", "MLPS")
    return [(kind, name) for kind in kinds for name in getattr(registry, kind)]


@pytest.mark.parametrize(("kind", "name"), configs())
def test_unknown_and_mistyped_keys_are_refused(lab, kind, name):
    config = getattr(registry, kind)[name]
    good = getattr(lab, kind).get(name, {}) | {"name": name}
    config.model_validate_json(json.dumps(good))
    with pytest.raises(ValidationError, match="bogus_key"):
        config.model_validate_json(json.dumps(good | {"bogus_key": 1}))
    with pytest.raises(ValidationError, match="name"):
        config.model_validate_json(json.dumps(good | {"name": f"{name}x"}))
    for field, value in config.model_fields.items():
        if field == "name":
            continue
        for junk in ({"a": 1}, "junk"):
            with pytest.raises(ValidationError, match=field):
                config.model_validate_json(json.dumps(good | {field: junk}))
        assert value.description is None  # documented in the class's docstring
        assert f"{field}:" in config.__doc__, f"{config.__name__} does not document {field}"


def test_a_misspelt_layer_is_named_with_the_nearest(lab):
    text = json.loads(lab.ENTRIES["hybrid"].config_json)
    model_config = type(lab.ENTRIES["hybrid"].config)
    text["pattern"] = ["m", "a", "ss"]
    with pytest.raises(ValidationError, match="pattern names layer 'ss'"):
        model_config.model_validate_json(json.dumps(text))
