"""LLaDA and Dream, which transformers lacks: parity with their published programs, in NumPy.

The checkpoints are random and of the published layout. The references are written from the
published configurations and programs, in float64, over the published names of tensors.
"""

import json

import genlab
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError, DataError
from genlab.paradigms.context import Context
from genlab.paradigms.decoding.loop import advance
from genlab.paradigms.decoding.sampling import make_sampling
from genlab.paradigms.decoding.unmasking import Unmasking
from genlab.paradigms.interface import Batch
from genlab.paradigms.masks import Full
from genlab.train.checkpoint import flatten
from genlab.train.interop.export_run import export_run
from genlab.train.interop.hf_config import HFConfig
from genlab.train.interop.import_run import import_checkpoint, open_checkpoint
from genlab.train.interop.registry import architecture_of
from genlab.train.interop.tensor_files import Spec, TensorFolder, TensorWriter
from genlab.train.run_folder import load_run

VOCAB, MASK = 61, 57
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

# Every key of GSAI-ML/LLaDA-8B-Base's config.json, in small; grouped queries and biases beside.
LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0, "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True, "auto_map": {"AutoModel": "modeling_llada.LLaDA"},
    "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": 36,
    "embedding_dropout": 0.0, "embedding_size": VOCAB, "eos_token_id": 2,
    "flash_attention": False, "include_bias": False, "include_qkv_bias": True,
    "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "mask_token_id": MASK, "max_sequence_length": 64, "mlp_hidden_size": 44, "mlp_ratio": 4,
    "model_type": "llada", "multi_query_attention": None, "n_heads": 6, "n_kv_heads": 2,
    "n_layers": 2, "pad_token_id": 2, "precision": "amp_bf16", "residual_dropout": 0.0,
    "rms_norm_eps": 1e-5, "rope": True, "rope_full_precision": True, "rope_theta": 500.0,
    "scale_logits": False, "transformers_version": "4.46.3", "use_cache": False,
    "vocab_size": VOCAB - 3, "weight_tying": False,
}  # fmt: skip
# Likewise of Dream-org/Dream-v0-Base-7B.
DREAM = {
    "architectures": ["DreamModel"], "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"}, "bos_token_id": 1, "eos_token_id": 1,
    "hidden_act": "silu", "hidden_size": 36, "initializer_range": 0.02, "intermediate_size": 44,
    "mask_token_id": MASK, "max_position_embeddings": 64, "max_window_layers": 28,
    "model_type": "Dream", "num_attention_heads": 3, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "pad_token_id": 1, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 1e3, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformers_version": "4.46.2", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
CONFIGS = {"llada": LLADA, "dream": DREAM}


def shapes_of(name, config):
    """Published tensors: name -> shape as torch's Linear has it, (out, in)."""
    width, f = 36, 44
    if name == "llada":
        q, kv, biased = width, width // 6 * config["n_kv_heads"], config["include_qkv_bias"]
        top, layer = "model.transformer", "model.transformer.blocks.{}"
        names = {
            "attn_norm": (width,), "ff_norm": (width,), "q_proj": (q, width),
            "k_proj": (kv, width), "v_proj": (kv, width), "attn_out": (width, q),
            "ff_proj": (f, width), "up_proj": (f, width), "ff_out": (width, f),
        }  # fmt: skip
        ends = {f"{top}.wte": (VOCAB, width), f"{top}.ln_f": (width,)}
        if not config["weight_tying"]:
            ends[f"{top}.ff_out"] = (VOCAB, width)
    else:
        q, kv, biased, layer = width, width // 3, True, "model.layers.{}"
        names = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width), "self_attn.o_proj": (width, q),
            "mlp.gate_proj": (f, width), "mlp.up_proj": (f, width), "mlp.down_proj": (width, f),
        }  # fmt: skip
        ends = {
            "model.embed_tokens": (VOCAB, width), "model.norm": (width,), "lm_head": (VOCAB, width),
        }  # fmt: skip
    found = {f"{key}.weight": shape for key, shape in ends.items()}
    for i in range(2):
        for key, shape in names.items():
            found[f"{layer.format(i)}.{key}.weight"] = shape
            if biased and key.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"{layer.format(i)}.{key}.bias"] = shape[:1]
    return found


def write_checkpoint(folder, name, **changes):
    """A random checkpoint of the published layout; returns its tensors in float64."""
    config = CONFIGS[name] | changes
    draw = np.random.default_rng(0)
    arrays = {}
    for key, shape in shapes_of(name, config).items():
        values = draw.standard_normal(shape)
        if "norm" in key or "ln_f" in key:
            values = 1 + 0.3 * values
        elif len(shape) > 1 and not key.endswith(("wte.weight", "embed_tokens.weight")):
            values = 1.5 * values / np.sqrt(shape[1])
        arrays[key] = values.astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    specs = {key: Spec(array.dtype, array.shape) for key, array in arrays.items()}
    with TensorWriter(folder / "model.safetensors", specs) as writer:
        for key, array in arrays.items():
            writer.write(key, array)
        writer.close({"format": "pt"})
    return {key: array.astype(np.float64) for key, array in arrays.items()}


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x, base):
    """Rotary phases on (T N H): the halves of a head are the pairs."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / base ** (np.arange(half) / half)
    cos, sin = (f(angle)[:, None] for f in (np.cos, np.sin))
    one, two = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attend(q, k, v, base):
    """All tokens see all: (T N H), (T K H)."""
    groups = q.shape[1] // k.shape[1]
    q, k = turned(q, base), turned(k, base)
    k, v = (np.repeat(one, groups, axis=1) for one in (k, v))
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    law = np.exp(scores - scores.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", law, v).reshape(len(q), -1)


def silu(x):
    return x / (1 + np.exp(-x))


def llada(p, ids, config):
    """Logits of one row by LLaDA's `modeling_llada.py`: each position about itself."""
    eps, heads, base = config["rms_norm_eps"], config["n_heads"], config["rope_theta"]
    top = "model.transformer"
    x = p[f"{top}.wte.weight"][ids]

    def linear(at, h):
        return h @ p[f"{at}.weight"].T + p.get(f"{at}.bias", 0)

    for i in range(config["n_layers"]):
        at = f"{top}.blocks.{i}"
        h = rms(x, p[f"{at}.attn_norm.weight"], eps)
        q, k, v = (linear(f"{at}.{n}_proj", h).reshape(len(ids), -1, 36 // heads) for n in "qkv")
        x = x + linear(f"{at}.attn_out", attend(q, k, v, base))
        h = rms(x, p[f"{at}.ff_norm.weight"], eps)
        x = x + linear(
            f"{at}.ff_out", silu(linear(f"{at}.ff_proj", h)) * linear(f"{at}.up_proj", h)
        )
    x = rms(x, p[f"{top}.ln_f.weight"], eps)
    return x @ p[f"{top}.{'wte' if config['weight_tying'] else 'ff_out'}.weight"].T


def dream(p, ids, config):
    """Logits of one row by Dream's `modeling_dream.py`: position i is about token i + 1."""
    eps, heads, base = config["rms_norm_eps"], config["num_attention_heads"], config["rope_theta"]
    x = p["model.embed_tokens.weight"][ids]

    def linear(at, h):
        return h @ p[f"{at}.weight"].T + p.get(f"{at}.bias", 0)

    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        h = rms(x, p[f"{at}.input_layernorm.weight"], eps)
        q, k, v = (
            linear(f"{at}.self_attn.{n}_proj", h).reshape(len(ids), -1, 36 // heads) for n in "qkv"
        )
        x = x + linear(f"{at}.self_attn.o_proj", attend(q, k, v, base))
        h = rms(x, p[f"{at}.post_attention_layernorm.weight"], eps)
        gate, up = linear(f"{at}.mlp.gate_proj", h), linear(f"{at}.mlp.up_proj", h)
        x = x + linear(f"{at}.mlp.down_proj", silu(gate) * up)
    return rms(x, p["model.norm.weight"], eps) @ p["lm_head.weight"].T


REFERENCES = {"llada": llada, "dream": dream}


def about_own_token(name, logits):
    """The logits that are about each position's own token, as the published samplers take them.

    Dream's: `logits = cat([logits[:, :1], logits[:, :-1]], dim=1)`.
    """
    return np.concatenate([logits[:1], logits[:-1]]) if name == "dream" else logits


@pytest.fixture(scope="module", params=list(CONFIGS))
def made(request, tmp_path_factory):
    """(name, published tensors, folder, run)."""
    folder = tmp_path_factory.mktemp(request.param)
    tensors = write_checkpoint(folder / "hf", request.param)
    import_checkpoint(folder / "hf", folder / "run")
    return request.param, tensors, folder / "hf", load_run(folder / "run")


@jax.jit
def whole(model, tokens, valid):
    return model.head(model(tokens, ctx=Context(valid=valid, mask=Full()))[0].hidden)


def test_logits(made):
    name, tensors, folder, run = made
    tokens = np.random.default_rng(1).integers(3, VOCAB, (2, 13), dtype=np.int32)
    tokens[:, 2::4] = MASK
    want = np.stack([REFERENCES[name](tensors, row, CONFIGS[name]) for row in tokens])
    logits = whole(run.model.prepare("float32"), tokens, np.ones_like(tokens, bool))
    np.testing.assert_allclose(logits, want, **TOLERANCE)
    np.testing.assert_allclose(genlab.load(folder)(tokens), want, **TOLERANCE)

    valid = np.arange(13) >= np.array([[8], [0]])
    padded = np.where(valid, tokens, 0)
    got = whole(run.model.prepare("float32"), padded, valid)
    short = REFERENCES[name](tensors, tokens[0, 8:], CONFIGS[name])
    np.testing.assert_allclose(got[0, 8:], short, **TOLERANCE)
    np.testing.assert_allclose(got[1], want[1], **TOLERANCE)


def test_tied_head_and_default_width(tmp_path):
    changes = {"weight_tying": True, "include_qkv_bias": False, "multi_query_attention": False}
    tensors = write_checkpoint(tmp_path / "hf", "llada", **changes)
    tokens = np.random.default_rng(2).integers(3, VOCAB, (13,), dtype=np.int32)
    want = llada(tensors, tokens, LLADA | changes)
    np.testing.assert_allclose(genlab.load(tmp_path / "hf")(tokens), want, **TOLERANCE)


def test_the_paradigm_scores_and_fills_as_published(made):
    """Loss and sampler take the logits about a hidden token from where the program has them."""
    name, tensors, _, run = made
    model = run.model.prepare("float32")
    ids = np.random.default_rng(3).integers(3, MASK, (13,), dtype=np.int32)
    hidden = np.zeros(13, bool)
    hidden[[3, 4, 9]] = True
    noisy = np.where(hidden, MASK, ids)
    logits = about_own_token(name, REFERENCES[name](tensors, noisy, CONFIGS[name]))
    logits[:, MASK] = -1e30  # never drawn
    top = logits.max(-1, keepdims=True)
    want = top[:, 0] + np.log(np.exp(logits - top).sum(-1)) - logits[np.arange(13), ids]

    batch = Batch(ids[None], np.zeros((1, 13), np.int32), np.ones((1, 13), bool))
    batch = jax.tree.map(jnp.asarray, batch)
    nll = jax.jit(run.paradigm.hidden_nll)(model, batch, jnp.asarray(hidden[None]))[0]
    np.testing.assert_allclose(nll, np.where(hidden, want, 0), rtol=2e-4, atol=2e-4)

    # One call uncovers everything: the most probable token of each place.
    decoding = Unmasking(run.tokenizer.specials.mask, run.paradigm.shift)
    sampling = make_sampling(1, vocab_size=VOCAB, temperature=0.0, steps=1)
    state = decoding.start_canvas(
        model, ids[None], ~hidden[None], sampling=sampling, seeds=np.zeros(1, np.int32)
    )
    filled = np.asarray(advance(model, decoding, state, 1).tokens)[0]
    ranked = np.sort(logits, -1)
    assert (ranked[hidden, -1] - ranked[hidden, -2] > 1e-3).all()
    np.testing.assert_array_equal(filled, np.where(hidden, logits.argmax(-1), ids))


def test_round_trip(made, tmp_path):
    name, _, folder, run = made
    for kind, path in (("kept", run.path), ("written", tmp_path / "no_source")):
        exported = export_run(run._replace(path=path), tmp_path / kind)
        assert exported.architecture.name == name
        before, after = TensorFolder(folder), TensorFolder(tmp_path / kind)
        assert after.specs == before.specs
        for tensor in before.specs:
            np.testing.assert_array_equal(after[tensor], before[tensor])
        import_checkpoint(tmp_path / kind, tmp_path / f"{kind}.again")
        again = load_run(tmp_path / f"{kind}.again")
        assert again.tokenizer.specials.mask == MASK
        assert again.config.paradigm == run.config.paradigm
        mine, theirs = flatten(run.model.params), flatten(again.model.params)
        assert mine.keys() == theirs.keys()
        for parameter in mine:
            np.testing.assert_array_equal(mine[parameter], theirs[parameter])
    kept = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert CONFIGS[name].items() <= (kept | {"torch_dtype": "float32"}).items()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llada", {"alibi": True}, "alibi is True"),
        ("llada", {"block_type": "sequential"}, "block_type is 'sequential'"),
        ("llada", {"activation_type": "swiglu"}, "activation_type is 'swiglu'"),
        ("llada", {"scale_logits": True}, "scale_logits is True"),
        ("llada", {"input_emb_norm": True}, "input_emb_norm is True"),
        ("llada", {"attention_layer_norm": True}, "attention_layer_norm is True"),
        ("llada", {"embedding_size": 3}, "embedding_size is 3, want at least vocab_size, 58"),
        ("llada", {"sliding_window": 3}, "'sliding_window'"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("dream", {"use_mrope": True}, "use_mrope is True"),
        ("dream", {"attention_bias": False}, "attention_bias is False"),
    ],
)
def test_what_is_not_implemented_is_named(name, changes, message):
    config = HFConfig(CONFIGS[name] | changes)
    with pytest.raises(ConfigError, match=message) as error:
        architecture_of(config).model_config(config)
    assert "\n" not in str(error.value)


def test_a_mask_is_needed(tmp_path):
    write_checkpoint(tmp_path / "hf", "dream")
    config = {key: value for key, value in DREAM.items() if key != "mask_token_id"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="no file says which token is the mask"):
        open_checkpoint(tmp_path / "hf")
