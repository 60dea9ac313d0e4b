"""What is wrong with a checkpoint is named in one line, before anything is computed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import CheckpointError, ConfigError, DataError, GenlabError
from genlab.train.interop.import_run import import_checkpoint, open_checkpoint
from genlab.train.interop.tensor_files import Spec, TensorFile, TensorWriter
from genlab.train.run_folder import load_run

FIXTURES = Path(__file__).parent / "fixtures"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def broken(tmp_path):
    """A copy of a checkpoint, to break."""
    shutil.copytree(FIXTURES / "mistral", tmp_path / "hf")
    return tmp_path / "hf"


def edit_config(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    file = TensorFile(path)
    arrays = {name: np.array(file[name]) for name in file.specs}
    change(arrays)
    specs = {name: Spec(array.dtype, array.shape) for name, array in arrays.items()}
    with TensorWriter(path, specs) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
        writer.close({"format": "pt"})


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


CONFIG_FAULTS = {
    "unknown key": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "misspelt key": ({"sliding_windows": 3}, "did you mean 'sliding_window'"),
    "missing key": ({"hidden_size": ...}, "hidden_size is missing"),
    "wrong kind": ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', want int"),
    "a flag for a number": ({"num_hidden_layers": True}, "num_hidden_layers is True, want int"),
    "other activation": ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
    "other scaling": (
        {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
        "rope_type is 'longrope'",
    ),
    "key of a scaling": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
        "rope_scaling.beta",
    ),
    "scaling without factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "other architecture": ({"model_type": "mistrall"}, "did you mean 'mistral'"),
    "heads do not divide": ({"num_key_value_heads": 4}, "num_kv_heads=4 does not divide"),
    "other vocabulary": ({"vocab_size": 96}, "want shape [96, 36]"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_config(broken, name):
    changes, words = CONFIG_FAULTS[name]
    edit_config(broken, **changes)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        open_checkpoint(broken)
    assert words in one_line(error)


def pop(arrays):
    del arrays[UP]


def extra(arrays):
    arrays["model.layers.1.mlp.up_proj.bias"] = np.zeros((44,), np.float32)


def misshapen(arrays):
    arrays[UP] = arrays[UP].T.copy()


def integers(arrays):
    arrays[UP] = arrays[UP].astype(np.int8)


def not_a_number(arrays):
    arrays[UP][3, 5] = np.nan


def infinite(arrays):
    arrays[UP][3, 5] = np.inf


TENSOR_FAULTS = {
    pop: f"tensor {UP} is missing, which llama needs with shape [44, 36]",
    extra: "tensor model.layers.1.mlp.up_proj.bias is not implemented",
    misshapen: f"tensor {UP} is float32[36, 44], want shape [44, 36]",
    integers: f"tensor {UP} is int8[44, 36]; want a floating dtype",
    not_a_number: f"tensor {UP} holds nan at [3, 5]",
    infinite: f"tensor {UP} holds inf at [3, 5]",
}


@pytest.mark.parametrize("change", TENSOR_FAULTS, ids=lambda change: change.__name__)
def test_tensors(broken, tmp_path, change):
    edit_tensors(broken, change)
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(broken, tmp_path / "run")
    assert TENSOR_FAULTS[change] in one_line(error)
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("*.importing"))


@pytest.mark.parametrize("left", [0, 7, 100, 5_000, 90_000])
def test_truncated(broken, left):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(broken)
    assert "truncated" in one_line(error) or "damaged" in one_line(error)


def test_a_shard_is_missing(tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(FIXTURES / "llama_linear", folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: No such file"):
        open_checkpoint(folder)


def test_files(broken, tmp_path):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle"):
        open_checkpoint(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        open_checkpoint(broken)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no config.json"):
        open_checkpoint(tmp_path)


def test_the_target_is_taken(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="taken by something else"):
        import_checkpoint(FIXTURES / "mistral", out, overwrite=True)
    (out / "thesis.tex").unlink()
    import_checkpoint(FIXTURES / "mistral", out)
    with pytest.raises(CheckpointError, match="--overwrite replaces it"):
        import_checkpoint(FIXTURES / "mistral", out)
    import_checkpoint(FIXTURES / "qwen3", out, overwrite=True)
    assert load_run(out).model.config.width == 36
    with pytest.raises(ConfigError, match="dtype: got 'int8'"):
        import_checkpoint(FIXTURES / "mistral", tmp_path / "b", dtype="int8")


def test_a_changed_byte_is_noticed(tmp_path):
    out = tmp_path / "run"
    import_checkpoint(FIXTURES / "mistral", out)
    path = out / "checkpoints" / "0" / "params.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"is corrupt: parameter .* \(checksum\)"):
        load_run(out)


def test_tokenizer_of_another_model(broken):
    vocab = {f"t{index}": index for index in range(98)}
    data = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}}
    (broken / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(DataError) as error:
        open_checkpoint(broken)
    assert "wrong vocabulary: token 't97' has id 97, but the model has 97 ids" in one_line(error)


def test_settings_that_name_no_token(broken):
    vocab = {f"t{index}": index for index in range(90)}
    data = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}}
    (broken / "tokenizer.json").write_text(json.dumps(data))
    (broken / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(GenlabError) as error:
        open_checkpoint(broken)
    assert "bos_token '<s>' is not in tokenizer.json" in one_line(error)
