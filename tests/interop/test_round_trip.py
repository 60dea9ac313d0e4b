"""Import, export, import: the same bits, and files that transformers would have written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import CheckpointError, ConfigError
from genlab.paradigms.backbone import ModelConfig
from genlab.train.checkpoint import flatten
from genlab.train.interop.export_run import choose, export_run
from genlab.train.interop.hf_config import HFConfig
from genlab.train.interop.import_run import import_checkpoint, open_checkpoint
from genlab.train.interop.registry import ARCHITECTURES, architecture_of
from genlab.train.interop.tensor_files import Spec, TensorFile, TensorFolder, TensorWriter
from genlab.train.run_folder import load_run

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_bits_and_config_come_back(imported, tmp_path, name):
    run = imported(name)
    shard_bytes = 50_000 if name == "llama_linear" else 10**9
    exported = export_run(run, tmp_path / "hf", shard_bytes=shard_bytes)
    before, after = TensorFolder(FIXTURES / name), TensorFolder(tmp_path / "hf")
    assert (len(exported.files) > 1) == (name == "llama_linear")
    assert after.specs.keys() == before.specs.keys()
    for tensor in before.specs:
        assert after.specs[tensor] == before.specs[tensor]
        np.testing.assert_array_equal(after[tensor], before[tensor])
    read = [json.loads((f / "config.json").read_text()) for f in (FIXTURES / name, tmp_path / "hf")]
    assert read[0] == read[1]
    import_checkpoint(tmp_path / "hf", tmp_path / "again")
    mine, again = flatten(run.model.params), flatten(load_run(tmp_path / "again").model.params)
    assert mine.keys() == again.keys()
    for parameter in mine:
        assert mine[parameter].dtype == again[parameter].dtype
        np.testing.assert_array_equal(mine[parameter], again[parameter])


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_our_own_says_the_same(name):
    """Without the published file at hand, `write` makes one that reads back to the same model."""
    checkpoint = open_checkpoint(FIXTURES / name)
    raw = checkpoint.architecture.config_of(checkpoint.model, checkpoint.paradigm)
    again = HFConfig(raw)
    assert architecture_of(again) is checkpoint.architecture
    if name != "llama_biases":  # its class has both biases or none
        assert raw["model_type"] == checkpoint.raw.raw["model_type"]


def test_dtypes(tmp_path):
    import_checkpoint(FIXTURES / "mistral", tmp_path / "run", dtype="bfloat16")
    run = load_run(tmp_path / "run")
    assert run.config.training.compute_dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in flatten(run.model.params).values()} == {"bfloat16"}
    export_run(run, tmp_path / "hf", dtype="float32")
    found = TensorFolder(tmp_path / "hf")
    original = TensorFolder(FIXTURES / "mistral")
    for name in found.specs:
        assert found.specs[name].dtype == np.float32
        rounded = original[name].astype(run.model.params["embedding"].dtype).astype(np.float32)
        np.testing.assert_array_equal(found[name], rounded)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"


def test_early_files_and_those_with_more_in_them(imported, tmp_path):
    """BERT's first files: other names of norms, the head twice, and the other task's tensors."""
    shutil.copytree(FIXTURES / "bert", tmp_path / "hf")
    file = TensorFile(FIXTURES / "bert" / "model.safetensors")
    arrays = {}
    for name in file.specs:
        early = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        arrays[early.replace("LayerNorm.bias", "LayerNorm.beta")] = np.array(file[name])
    arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"]
    arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"]
    arrays["bert.pooler.dense.weight"] = np.ones((36, 36), np.float32)
    arrays["cls.seq_relationship.bias"] = np.ones(2, np.float32)
    arrays["bert.embeddings.position_ids"] = np.arange(20)[None]

    def write():
        specs = {name: Spec(array.dtype, array.shape) for name, array in arrays.items()}
        with TensorWriter(tmp_path / "hf" / "model.safetensors", specs) as writer:
            for name, array in arrays.items():
                writer.write(name, array)
            writer.close({"format": "pt"})

    write()
    import_checkpoint(tmp_path / "hf", tmp_path / "run")
    mine, same = (flatten(r.model.params) for r in (load_run(tmp_path / "run"), imported("bert")))
    assert mine.keys() == same.keys()
    for parameter in mine:
        np.testing.assert_array_equal(mine[parameter], same[parameter])
    arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"] + 1
    write()
    with pytest.raises(CheckpointError, match=r"decoder.bias differs from cls.predictions.bias"):
        open_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize(
    ("paradigm", "other", "reason"),
    [
        ({"name": "masked_diffusion"}, "llama", "paradigm.name='autoregressive'"),
        ({"name": "masked_diffusion", "shift": True}, "llada", "paradigm.shift=False"),
        ({"name": "autoregressive"}, "llada", "paradigm.name='masked_diffusion'"),
    ],
)
def test_an_export_keeps_the_way_of_running(imported, tmp_path, paradigm, other, reason):
    """A model of masked diffusion is no Llama, though its layers are."""
    model = imported("llama_bfloat16").config.model
    with pytest.raises(ConfigError, match=reason):
        choose(model, paradigm, tmp_path, other)
    if not paradigm.get("shift"):  # Dream has biases, which this model lacks
        own = {"masked_diffusion": "llada", "autoregressive": "llama"}[paradigm["name"]]
        assert choose(model, paradigm, tmp_path, None)[0].name == own


def test_export_refuses(imported, tmp_path):
    run = imported("mistral")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "x").touch()
    with pytest.raises(CheckpointError, match="is taken"):
        export_run(run, tmp_path / "hf")
    with pytest.raises(ConfigError, match="no such architecture"):
        export_run(run, tmp_path / "b", architecture="lama")
    with pytest.raises(ConfigError, match="want float32 or bfloat16"):
        export_run(run, tmp_path / "b", dtype="f32")


def test_a_model_that_nobody_publishes_is_refused_with_reasons(tmp_path):
    layer = {"mixer": {"name": "attention", "num_heads": 2, "soft_cap": 3.0},
             "mlp": {"name": "swiglu", "width": 8}}  # fmt: skip
    model = ModelConfig.model_validate_json(
        json.dumps({"width": 8, "pattern": ["a"], "layers": {"a": layer}, "max_len": 16,
                    "vocab_size": 9})
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        choose(model, {"name": "autoregressive"}, tmp_path, None)
    assert all(f"{one.name}: " in str(error.value) for one in ARCHITECTURES)
