"""Draws the pictures of these pages from the package's own code: python docs/paradigms/draw.py."""

from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np
from genlab.kernels.attention.mask import AttentionMask
from genlab.paradigms.layers.routing import expected_distinct
from genlab.paradigms.masks import BlockCausal, Causal, Full
from genlab.train.yaml_loader import load_yaml
from matplotlib import pyplot as plt
from matplotlib.patches import Patch, Rectangle

HERE = Path(__file__).parent
FAMILIES = HERE.parents[1] / "configs" / "families"
COLOURS = {"attention": "#0072B2", "mamba": "#E69F00", "mamba2": "#D55E00", "mlp": "#d1d5db",
           "moe": "#009E73"}  # fmt: skip


def visible(mask, length, window=None):
    """The rule of `kernels/attention/mask.py` for one row, bool (T S)."""
    order = jnp.arange(length, dtype=jnp.int32)[None]
    bounds, zeros = mask.bounds(order), jnp.zeros_like(order)
    low = bounds.q_lo if window is None else jnp.maximum(bounds.q_lo, order - window + 1)
    rule = AttentionMask(low, bounds.q_hi, order, zeros, zeros)
    return np.asarray(rule.dense()[0])


def matrix(ax, values, title):
    """One panel: queries down, keys across."""
    ax.imshow(values, cmap="Blues", vmin=0, vmax=1.25)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("token looked at")
    ax.set_xticks([])
    ax.set_yticks([])


def transformer():
    """Which tokens a token looks at under three settings of one rule."""
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained")
    matrix(axes[0], visible(Causal(), 16), "causal")
    matrix(axes[1], visible(Causal(), 16, window=4), "causal, window of 4")
    matrix(axes[2], visible(BlockCausal(4), 16), "blocks of 4")
    axes[0].set_ylabel("token that looks")
    return figure


def state_space():
    """How much of each earlier token is left, for three step sizes of a Mamba-2 head."""
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 3.0), layout="constrained")
    draw = np.random.default_rng(0)
    steps = {
        "small steps: remembers": np.full(16, 0.05),
        "large steps: forgets": np.full(16, 0.7),
        "steps that depend on the token": np.where(draw.random(16) < 0.25, 2.5, 0.03),
    }
    for ax, (title, dt) in zip(axes, steps.items(), strict=True):
        total = np.cumsum(dt)
        left = np.exp(-(total[:, None] - total[None, :]))
        matrix(ax, np.where(np.tril(np.ones((16, 16), bool)), left, 0), title)
    axes[0].set_ylabel("token that reads")
    return figure


def hybrid():
    """The layers of the shipped hybrids, bottom left."""
    names = ["jamba", "samba", "zamba", "zamba2", "hymba", "falcon_h1"]
    figure, ax = plt.subplots(figsize=(8.4, 3.4), layout="constrained")
    for row, name in enumerate(reversed(names)):
        model = load_yaml(FAMILIES / f"{name}.yaml")["model"]
        count = model.get("depth") or len(model["pattern"])
        for at in range(count):
            layer = model["layers"][model["pattern"][at % len(model["pattern"])]]
            mixers = layer.get("mixers") or [layer["mixer"]]
            parts = [mixer["name"] for mixer in mixers]
            if "mlp" in layer:
                parts.append("moe" if layer["mlp"]["name"] == "moe" else "mlp")
            for place, part in enumerate(parts):
                width = 0.9 / len(parts)
                ax.add_patch(Rectangle((at + place * width, row + 0.1), width - 0.03, 0.8,
                                       color=COLOURS[part]))  # fmt: skip
    ax.set_xlim(0, 8.2)
    ax.set_ylim(0, len(names))
    ax.set_yticks([i + 0.5 for i in range(len(names))], list(reversed(names)))
    ax.set_xticks([i + 0.45 for i in range(8)], [str(i + 1) for i in range(8)])
    ax.set_xlabel("layer")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=5, loc="outside upper left", frameon=False)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


def mixture_of_experts():
    """Distinct experts that a step reads against the tokens in it."""
    figure, ax = plt.subplots(figsize=(8.4, 3.0), layout="constrained")
    tokens = np.arange(1, 65)
    for experts, top_k in ((4, 2), (8, 2), (16, 2), (128, 8)):
        share = [expected_distinct(experts, top_k, int(t)) / experts for t in tokens]
        ax.plot(tokens, share, label=f"{experts} experts, {top_k} per token")
    ax.set_xlabel("tokens in the step (the batch, when decoding)")
    ax.set_ylabel("share of experts read")
    ax.set_ylim(0, 1.05)
    ax.legend(frameon=False)
    return figure


def masked_diffusion():
    """What a token looks at, and a canvas that is uncovered in eight steps."""
    figure, axes = plt.subplots(
        1, 2, figsize=(8.4, 3.0), layout="constrained", width_ratios=(1, 2)
    )
    matrix(axes[0], visible(Full(), 16), "all of the canvas")
    axes[0].set_ylabel("token that looks")
    order = np.random.default_rng(1).permutation(16)
    canvas = np.zeros((9, 16))
    for step in range(1, 9):
        canvas[step:, order[2 * step - 2 : 2 * step]] = 1
    axes[1].imshow(canvas, cmap="Blues", vmin=0, vmax=1.25, aspect="auto")
    axes[1].set_title("known tokens after each step, two per step", fontsize=10)
    axes[1].set_xlabel("place in the canvas")
    axes[1].set_ylabel("step")
    axes[1].set_xticks([])
    return figure


def main() -> None:
    """Writes one SVG per page."""
    matplotlib.rcParams["svg.hashsalt"] = "genlab"
    for draw in (transformer, state_space, hybrid, mixture_of_experts, masked_diffusion):
        path = HERE / f"{draw.__name__.replace('_', '-')}.svg"
        draw().savefig(path, metadata={"Date": None, "Creator": None})
        print(path)


if __name__ == "__main__":
    main()
