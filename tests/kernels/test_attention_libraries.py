"""Attention by cuDNN and tokamax: what lies around their kernels, which XLA stands in for here."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.kernels.attention import attention, libraries
from genlab.kernels.attention.mask import causal_mask
from genlab.kernels.compat import assume_platform
from genlab.kernels.dispatch import KernelArgumentError

B, T, N, K, H = 2, 6, 4, 2, 8
DTYPE = jnp.bfloat16


def inputs(dtype=DTYPE):
    draw = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H))
    return [jnp.asarray(draw.standard_normal(s, np.float32)).astype(dtype) for s in shapes]


def mask():
    """Causal, the first query of row 0 sees nothing, the last key was never written."""
    plain = causal_mask(B, T)
    return plain._replace(
        q_segment=plain.q_segment.at[0, 0].set(-1), k_order=plain.k_order.at[:, -1].set(-1)
    )


@pytest.fixture
def stand_in(monkeypatch):
    """XLA where a library would run; returns the arguments that it was called with."""
    plain, calls = jax.nn.dot_product_attention, []

    def attend(q, k, v, *, mask, scale, implementation, logits_soft_cap=None):
        calls.append((implementation, mask.shape, logits_soft_cap))
        q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
        out = plain(q32, k32, v32, mask=mask, scale=scale, implementation="xla")
        return out.astype(q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(libraries, "cudnn_found", lambda: True)
    module = types.ModuleType("tokamax")
    module.dot_product_attention = attend
    module.__spec__ = types.SimpleNamespace(name="tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return calls


@pytest.mark.parametrize(
    ("name", "wanted"), [("cudnn", "cudnn"), ("tokamax", ("mosaic", "triton"))]
)
def test_results_and_gradients_equal_the_reference(name, wanted, stand_in):
    q, k, v = inputs()
    unwritten = ~mask().key_is_written()[:, :, None, None]
    holes = [jnp.where(unwritten, jnp.asarray(jnp.nan, DTYPE), x) for x in (k, v)]

    def loss(name, *arrays):
        out, log_total = attention(*arrays, mask(), scale=0.4, implementation=name)
        finite = jnp.where(jnp.isfinite(log_total), log_total, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(finite)), (
            out,
            log_total,
        )

    def everything(name, *arrays):
        call = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
        (_, results), gradients = call(name, *arrays)
        return *results, *gradients

    with assume_platform("gpu"):
        got = everything(name, q, *holes)
    assert stand_in == [(wanted, (B, 1, T, T), None)]
    for a, b in zip(got, everything("reference", q, k, v), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        a, b = (np.where(np.isneginf(x), 0, x) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.03 * (1 + np.abs(b).max()))
    np.testing.assert_array_equal(np.asarray(got[0][0, 0], np.float32), 0)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "q is float32 and k float32; cuDNN takes bfloat16 or float16"),
        ({"head_dim": 12}, "H is 12; cuDNN takes multiples of 8 up to 128"),
        ({"keys": 5}, "T is 5 and S 5; with a mask cuDNN takes even ones"),
        ({"soft_cap": 2.0}, "cuDNN has no soft cap"),
    ],
)
def test_what_cudnn_does_not_take(change, reason):
    length, head_dim = change.get("keys", T), change.get("head_dim", H)
    x = jax.ShapeDtypeStruct((B, length, N, head_dim), change.get("dtype", DTYPE))
    with assume_platform("gpu"), pytest.raises(KernelArgumentError, match=f"cudnn: {reason}"):
        attention(
            x, x, x, causal_mask(B, length),
            soft_cap=change.get("soft_cap"), implementation="cudnn",
        )  # fmt: skip


def test_without_the_library_or_a_device_there_is_a_reason(stand_in, monkeypatch):
    arrays = (*inputs(), mask())
    with pytest.raises(KernelArgumentError, match="cudnn: it needs a GPU; this program is for a C"):
        attention(*arrays, implementation="cudnn")
    with pytest.raises(KernelArgumentError, match="tokamax: its kernels need a GPU or TPU"):
        attention(*arrays, implementation="tokamax")
    monkeypatch.setattr(libraries, "cudnn_found", lambda: False)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with assume_platform("gpu"):
        with pytest.raises(KernelArgumentError, match="cudnn: JAX finds no cuDNN here"):
            attention(*arrays, implementation="cudnn")
        with pytest.raises(KernelArgumentError, match="tokamax: tokamax is not installed"):
            attention(*arrays, implementation="tokamax")
    assert not stand_in


def test_what_tokamax_refuses_is_told(stand_in):
    def refuse(*_, **__):
        raise ExceptionGroup("all failed", [NotImplementedError("odd"), NotImplementedError("H")])

    sys.modules["tokamax"].dot_product_attention = refuse
    with assume_platform("gpu"), pytest.raises(KernelArgumentError, match="tokamax: odd; H"):
        attention(*inputs(), mask(), implementation="tokamax")


def test_cudnn_is_looked_for_where_it_cannot_be():
    assert libraries.cudnn_found() is False or jax.default_backend() == "gpu"
