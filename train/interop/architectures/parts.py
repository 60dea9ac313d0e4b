"""What several architectures share: tables of a mixer's or MLP's tensors, and their keys."""

from typing import Any, NamedTuple

from ..architecture import SAME, TRANSPOSED, Form, Lines, Row, Unfit, join, rows
from ..hf_config import HFConfig

NoneType = type(None)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
# The published name of each of ours; where there are several, the one that most files have.
ACTIVATION_NAMES = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu",
}  # fmt: skip

ATTENTION: Lines = (
    ("w_q", "q_proj.weight", TRANSPOSED),
    ("w_k", "k_proj.weight", TRANSPOSED),
    ("w_v", "v_proj.weight", TRANSPOSED),
    ("w_o", "o_proj.weight", TRANSPOSED),
    ("b_q", "q_proj.bias", SAME),
    ("b_k", "k_proj.bias", SAME),
    ("b_v", "v_proj.bias", SAME),
    ("b_o", "o_proj.bias", SAME),
    ("q_norm.scale", "q_norm.weight", SAME),
    ("k_norm.scale", "k_norm.weight", SAME),
)
SWIGLU: Lines = (
    ("w_gate", "gate_proj.weight", TRANSPOSED),
    ("w_up", "up_proj.weight", TRANSPOSED),
    ("w_down", "down_proj.weight", TRANSPOSED),
    ("b_gate", "gate_proj.bias", SAME),
    ("b_up", "up_proj.bias", SAME),
    ("b_down", "down_proj.bias", SAME),
)


def _taps(x: Any) -> tuple[Any]:
    return (x.reshape(x.shape[0], x.shape[-1]).T,)


def _torch_taps(x: Any) -> tuple[Any]:
    return (x.T.reshape(x.shape[1], 1, x.shape[0]),)


TAPS = Form(_taps, _torch_taps)  # torch's depthwise Conv1d holds (channels, 1, W), we hold (W, E)

CONV: Lines = (("conv", "conv1d.weight", TAPS), ("conv_bias", "conv1d.bias", SAME))
MAMBA: Lines = (
    *CONV,
    ("w_in", "in_proj.weight", TRANSPOSED),
    ("w_x", "x_proj.weight", TRANSPOSED),
    ("w_dt", "dt_proj.weight", TRANSPOSED),
    ("dt_bias", "dt_proj.bias", SAME),
    ("A_log", "A_log", SAME),
    ("D", "D", SAME),
    ("w_out", "out_proj.weight", TRANSPOSED),
    ("dt_norm.scale", "dt_layernorm.weight", SAME),
    ("B_norm.scale", "b_layernorm.weight", SAME),
    ("C_norm.scale", "c_layernorm.weight", SAME),
)
MAMBA2: Lines = (
    *CONV,
    ("w_in", "in_proj.weight", TRANSPOSED),
    ("dt_bias", "dt_bias", SAME),
    ("A_log", "A_log", SAME),
    ("D", "D", SAME),
    ("norm", "norm.weight", SAME),
    ("w_out", "out_proj.weight", TRANSPOSED),
)


def _beside(gate: Any, up: Any) -> tuple[Any]:
    return (join([gate.T, up.T], axis=1),)


def _apart(both: Any) -> tuple[Any, Any]:
    half = both.shape[1] // 2
    return both[:, :half].T, both[:, half:].T


GATE_AND_UP = Form(_beside, _apart)


def experts(count: int, *, router: str, expert: str, gate: str, up: str, down: str) -> Lines:
    """The table of a mixture of experts.

    Args:
        count: experts.
        router: name of the router's tensor.
        expert: name of an expert, with `{}` for its number.
        gate: name of its gate's tensor behind that, without `.weight`.
        up: likewise.
        down: likewise.
    """
    lines: list = [("w_router", router, TRANSPOSED)]
    for index in range(count):
        name = expert.format(index)
        both = (f"{name}.{gate}.weight", f"{name}.{up}.weight")
        lines.append((f"w_in_{index}", both, GATE_AND_UP))
        lines.append((f"w_down_{index}", f"{name}.{down}.weight", TRANSPOSED))
    return lines


LAYER_NORM: Lines = (("scale", "weight", SAME), ("bias", "bias", SAME))


def norm_rows(ours: str, theirs: str) -> list[Row]:
    """The rows of a layer norm."""
    return rows(f"{ours}.", f"{theirs}.", LAYER_NORM)


class Fused(NamedTuple):
    """Queries, keys and values in one tensor."""

    weight: Form
    bias: Form


def fused_by_head(heads: int) -> Fused:
    """Forms of a tensor of rows ordered by head, then query, key, value: (N 3 H), not (3 N H)."""

    def apart(both: Any) -> tuple[Any, ...]:
        by_head = both.reshape(heads, 3, -1, *both.shape[1:])
        return tuple(by_head[:, i].reshape(-1, *both.shape[1:]) for i in range(3))

    def together(*parts: Any) -> tuple[Any]:
        by_head = [part.reshape(heads, 1, -1, *part.shape[1:]) for part in parts]
        return (join(by_head, axis=1).reshape(-1, *parts[0].shape[1:]),)

    weight = Form(
        lambda both: tuple(part.T for part in apart(both)),
        lambda *parts: together(*(part.T for part in parts)),
    )
    return Fused(weight, Form(apart, together))


def read_attention(c: HFConfig, *, kv_heads: int | None) -> dict[str, Any]:
    """The keys that all attention has, without positions; `kv_heads` is the default."""
    heads = c.take("num_attention_heads", int)
    return {
        "name": "attention",
        "num_heads": heads,
        "num_kv_heads": c.take("num_key_value_heads", (int, NoneType), kv_heads),
    }


def unlimited_steps(c: HFConfig) -> None:
    """Step sizes of Mamba-2 must not be cut off; infinity has three spellings in JSON."""
    infinite = float("inf")
    c.must_be("time_step_limit", [0.0, infinite], [0.0, {"__float__": "Infinity"}], [0.0, "inf"])


def mixers_of(model: Any, *names: str) -> list[Any]:
    """Each layer's only mixer.

    Raises:
        Unfit: a layer has another kind, or several or none.
    """
    found = []
    for index, kind in enumerate(model.stack):
        layer = model.layers[kind]
        if layer.mixer is None or layer.mixer.name not in names:
            raise Unfit(f"layer {index} has no mixer {' or '.join(names)}")
        found.append(layer.mixer)
    return found


def mlps_of(model: Any, name: str) -> list[Any]:
    """Each layer's MLP.

    Raises:
        Unfit: a layer has another kind or none.
    """
    found = [model.layers[kind].mlp for kind in model.stack]
    for index, mlp in enumerate(found):
        if mlp is None or mlp.name != name:
            raise Unfit(f"layer {index} has no MLP {name}")
    return found


def of_kind(items: list[Any], name: str) -> Any:
    """The first of the configs with that name, None without."""
    return next((item for item in items if item is not None and item.name == name), None)
