"""A trained bidirectional Mamba: `pip install --no-deps typeseg onnxruntime`.

typeseg says of each byte of a text what kind of file it is from. Its package holds one network
twice, as arrays and as an ONNX graph; here genlab's operations take the arrays and have to give
what onnxruntime computes from the graph. It is Mamba-1 but for what `network` says.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.causal_conv1d.api import causal_conv1d
from genlab.kernels.selective_scan.api import IMPLEMENTATIONS, selective_scan

PACKAGE, RUNTIME = (importlib.util.find_spec(name) for name in ("typeseg", "onnxruntime"))
ROOT = Path(__file__).parents[2]
# Beginnings of real files: odd lengths in bytes, one no longer than a tap, one of several chunks.
TEXTS = {"LICENSE": 1, "README.md": 7, "pyproject.toml": 129, "cli.py": 511, "NOTICE": 1037}
LAYERS, RANK, STATES = 6, 16, 16
ON_CPU = [name for name in IMPLEMENTATIONS if not name.startswith("pallas")]


def read_ids():
    """Per text (T,) ids: a byte of ASCII is its own, every other byte is 128."""
    found = []
    for name, length in TEXTS.items():
        data = np.frombuffer((ROOT / name).read_bytes()[:length], np.uint8)
        assert len(data) == length
        found.append(np.minimum(data, 128).astype(np.int64))
    return found


def dense(weights, name, x):
    return x @ weights[f"{name}__kernel"] + weights[f"{name}__bias"]


def layer_norm(weights, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return x * weights[f"{name}__scale"] + weights[f"{name}__bias"]


def turned(x, lengths):
    """Each row's valid steps in reverse order, the others as they are; its own inverse."""
    steps = jnp.arange(x.shape[1])[None, :]
    source = jnp.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return jnp.take_along_axis(x, source[:, :, None], axis=1)


def network(weights, ids, lengths, implementation, convolution):
    """(B T) ids -> (B T 35) logits.

    Unlike Mamba it has LayerNorm, biases, a convolution that looks two steps ahead, step sizes of
    at least 1e-4, and scans both ways with the same weights.
    """
    valid = jnp.arange(ids.shape[1])[None, :, None] < lengths[:, None, None]
    x = weights["Embed_0__embedding"][ids]
    for layer in range(LAYERS):
        own = f"CheckpointMambaBlock1D_{layer}__"
        normed = layer_norm(weights, f"{own}LayerNorm_0", x)
        u, gate = jnp.split(dense(weights, f"{own}Dense_0", normed), 2, axis=-1)
        u = jnp.pad(jnp.where(valid, u, 0), ((0, 0), (0, 2), (0, 0)))
        u, _ = causal_conv1d(
            u, weights[f"{own}Conv_0__kernel"][:, 0], weights[f"{own}Conv_0__bias"],
            lengths=lengths + 2, activation="silu", implementation=convolution,
        )  # fmt: skip
        u = u[:, 2:]
        rank, B, C = jnp.split(dense(weights, f"{own}Dense_1", u), (RANK, RANK + STATES), axis=-1)
        dt = jax.nn.softplus(dense(weights, f"{own}Dense_2", rank)) + 1e-4
        y = 0
        for there in (lambda v: v, lambda v: turned(v, lengths)):
            out, _ = selective_scan(
                there(u), there(dt), -jnp.exp(weights[f"{own}A_log"]), there(B), there(C),
                D=weights[f"{own}D"], z=there(gate), lengths=lengths,
                implementation=implementation,
            )  # fmt: skip
            y = y + there(out)
        x = x + dense(weights, f"{own}Dense_3", y)
    return dense(weights, "Dense_0", layer_norm(weights, "LayerNorm_0", x))


if PACKAGE is not None and RUNTIME is not None:
    DATA = Path(PACKAGE.submodule_search_locations[0]) / "data"

    @pytest.fixture(scope="module")
    def wanted():
        """Per text (T, 35) logits of the published graph."""
        import onnxruntime

        session = onnxruntime.InferenceSession(
            DATA / "mamba_al.onnx", providers=["CPUExecutionProvider"]
        )
        return [session.run(None, {"ids": ids})[0] for ids in read_ids()]

    @pytest.mark.slow
    @pytest.mark.parametrize("implementation", [None, *ON_CPU])
    def test_scans_give_the_logits_of_the_published_graph(wanted, implementation):
        with np.load(DATA / "mamba_al.npz") as file:
            weights = {name: jnp.asarray(file[name]) for name in file.files}
        texts = read_ids()
        lengths = np.array([len(ids) for ids in texts], np.int32)
        ids = np.full((len(texts), lengths.max()), 129, np.int32)  # 129 is its padding
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        run = jax.jit(network, static_argnums=(3, 4))
        convolution = "reference" if implementation == "reference" else None
        got = np.asarray(run(weights, ids, lengths, implementation, convolution))
        for row, want in zip(got, wanted, strict=True):
            # Measured: 1.2e-5 at most, of logits to 8.5.
            np.testing.assert_allclose(row[: len(want)], want, rtol=0, atol=1e-4)
            assert (row[: len(want)].argmax(-1) == want.argmax(-1)).all()
