"""How an op chooses its implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import GenlabError
from genlab.kernels import compat
from genlab.kernels.dispatch import (
    Implementation,
    KernelArgumentError,
    check_array,
    choose,
    refuse_platform,
    valid_mask,
)


def refuses(reason):
    return Implementation(lambda x: x, lambda x: reason)


TABLE = {
    "reference": Implementation(lambda x: x),
    "xla": Implementation(lambda x: x),
    "pallas_odd": Implementation(lambda x: x, lambda x: None if x % 2 else f"{x} is even"),
    "pallas_never": refuses("no such device"),
}


@pytest.mark.parametrize(
    ("preferred", "requested", "argument", "chosen"),
    [
        (("pallas_odd", "xla"), None, 3, "pallas_odd"),
        (("pallas_odd", "xla"), None, 2, "xla"),
        (("xla",), "reference", 2, "reference"),
        (("xla",), "pallas_odd", 1, "pallas_odd"),
        (("xla",), ["pallas_never", "pallas_odd", "reference"], 1, "pallas_odd"),
        (("xla",), ("pallas_never", "pallas_odd", "reference"), 2, "reference"),
    ],
)
def test_the_choice(preferred, requested, argument, chosen):
    assert choose("op", TABLE, preferred, requested, argument) == chosen


def test_a_name_that_cannot_run_says_why():
    with pytest.raises(KernelArgumentError, match=r"op: no implementation .*pallas_odd: 2 is even"):
        choose("op", TABLE, ("xla",), "pallas_odd", 2)


def test_one_error_carries_every_reason():
    with pytest.raises(KernelArgumentError) as told:
        choose("op", TABLE, ("xla",), ["pallas_odd", "pallas_never"], 2)
    assert "pallas_odd: 2 is even" in str(told.value)
    assert "pallas_never: no such device" in str(told.value)


@pytest.mark.parametrize("requested", ["pallas_od", ["xla", "pallas_od"]])
def test_an_unknown_name_gets_the_nearest_one_even_behind_a_good_one(requested):
    with pytest.raises(KernelArgumentError, match="'pallas_od'; did you mean 'pallas_odd'"):
        choose("op", TABLE, ("xla",), requested, 1)


@pytest.mark.parametrize("requested", [[], (), [3]])
def test_what_is_no_name_is_refused(requested):
    with pytest.raises(KernelArgumentError, match="implementation"):
        choose("op", TABLE, ("xla",), requested, 1)


def test_the_error_is_a_user_error_and_a_value_error():
    assert issubclass(KernelArgumentError, GenlabError)
    assert issubclass(KernelArgumentError, ValueError)


def test_every_op_prefers_something_other_than_the_reference():
    from genlab.kernels import causal_conv1d, selective_scan, ssd

    for op in (causal_conv1d, selective_scan, ssd):
        assert "reference" in op.IMPLEMENTATIONS
        assert len(op.IMPLEMENTATIONS) > 1


@pytest.mark.parametrize(
    ("value", "shape", "kind", "message"),
    [
        (3.0, "B T", "floating", "a is a float; want an array"),
        (np.zeros((2,)), "B T", "floating", r"a has shape \(2,\); want \[B T\]"),
        (np.zeros((2, 3)), (2, 4), "floating", r"a has shape \(2, 3\); want \(2, 4\)"),
        (np.zeros((2, 3), np.int64), (2, 3), "bool", "a has dtype int64; want bool"),
        (np.zeros((2, 3), np.bool_), (2, 3), "integer", "a has dtype bool; want integer"),
        (jnp.zeros((2,), jnp.bfloat16), (2,), "float32", "a has dtype bfloat16; want float32"),
    ],
)
def test_a_wrong_array_is_described(value, shape, kind, message):
    with pytest.raises(KernelArgumentError, match=f"op: {message}"):
        check_array("op", "a", value, shape, kind)


def test_right_arrays_pass():
    check_array("op", "a", jnp.zeros((2, 3), jnp.bfloat16), "B T")
    check_array("op", "a", np.zeros((2,), np.int8), (2,), "integer")
    check_array("op", "a", jax.ShapeDtypeStruct((2,), jnp.float32), (2,), "float32")


def test_valid_mask_counts_from_the_front():
    got = valid_mask(jnp.array([0, 2, 9], jnp.int16), 3)
    assert got.tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_the_target_is_the_default_device():
    assert compat.target_platform() == jax.default_backend()
    with jax.default_device(jax.devices("cpu")[0]):
        assert compat.target_platform() == "cpu"
    with jax.default_device("cpu"):
        assert compat.target_platform() == "cpu"


def test_an_assumed_platform_wins_and_is_traced_apart():
    asked = []

    @jax.jit
    def ask(x):
        asked.append(compat.target_platform())
        return x

    ask(1.0)
    with compat.assume_platform("tpu"), jax.default_device("cpu"):
        ask(1.0)
    ask(1.0)
    assert asked == [jax.default_backend(), "tpu"]
    with pytest.raises(ValueError, match="platform is 'cuda'; want one of cpu, gpu, tpu"):
        with compat.assume_platform("cuda"):
            pass


def test_a_kernel_is_refused_where_it_cannot_run(monkeypatch):
    assert refuse_platform("tpu") == "it needs a TPU; this program is for a CPU"
    with compat.assume_platform("tpu"):
        assert refuse_platform("tpu") is None
        assert refuse_platform("gpu", 9.0) == "it needs a GPU; this program is for a TPU"
    with compat.assume_platform("gpu"):
        assert refuse_platform("gpu", 9.0) is None
        assert refuse_platform("gpu", 10.0).endswith("capability 10.0; this one has 9.0")


@pytest.mark.parametrize(("capability", "found"), [("8.6", 8.6), ("gfx942", 0.0)])
def test_the_compute_capability_is_the_devices(monkeypatch, capability, found):
    class Device:
        compute_capability = capability

    assert compat.compute_capability() == 0.0
    monkeypatch.setattr(compat, "target_platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device()])
    assert compat.compute_capability() == found
