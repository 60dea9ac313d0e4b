"""Whole programs lower for GPUs and TPUs with the Pallas kernels in them, on a host without either.

Training step, prefill, decode step and denoise step of every family that ships.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.paradigms.context import Context
from genlab.paradigms.decoding.plain import Plain
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.decoding.sampling import make_sampling
from genlab.paradigms.interface import Batch, SpecialIds
from genlab.paradigms.masks import Full
from genlab.paradigms.model import abstract_model
from genlab.train.config import RunConfig
from genlab.train.step import abstract_state, make_optimizer, make_train_step, micro_batches
from genlab.train.yaml_loader import load_config

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from lowering import kernels_in, lowered_text

SPECIALS = SpecialIds(bos=0, eos=1, pad=2, mask=3)
ROWS, LENGTH, MAX_LEN = 2, 128, 256
KERNELS = {"cuda": "pallas_mosaic_gpu", "tpu": "pallas_tpu"}
# Two layers, or one turn of the pattern; bfloat16 as models are trained on these devices.
FAMILIES = {
    "transformer": ["model.depth=2"],
    "mamba": ["model.depth=2"],
    "mamba2": ["model.depth=2", "model.layers.mamba2.mixer.head_dim=64"],
    "jamba": ["model.pattern=[mamba_moe,attention,mamba]"],
    "masked_diffusion": ["model.depth=2"],
}


@functools.cache
def run_of(family):
    overrides = [
        *FAMILIES[family], "training.compute_dtype=bfloat16", f"data.batch_size={ROWS}",
        f"data.context_length={LENGTH}", f"model.max_len={MAX_LEN}", "model.width=128",
    ]  # fmt: skip
    return load_config(RunConfig, family, overrides).with_vocab_size(512)


def prepared(run):
    dtype = run.training.compute_dtype
    return jax.eval_shape(lambda m: m.prepare(dtype), abstract_model(run.model))


def train_step(run):
    tx = make_optimizer(run)
    state, model = abstract_state(run, tx)
    step = make_train_step(run, run.paradigm.build(SPECIALS), tx, model)
    kinds = Batch(jnp.int32, jnp.int32, jnp.bool_)
    batch = Batch(*(jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for kind in kinds))
    return step, (state, jax.eval_shape(lambda b: micro_batches(b, 1), batch))


def prefill(run):
    def program(model, tokens):
        state = model.init_state(ROWS, MAX_LEN)
        out, state = model(tokens, state, ctx=Context(history=False))
        return model.head(out.hidden[:, -1]), state

    return program, (prepared(run), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))


def decode_step(run):
    model, decoding = prepared(run), Plain()

    def started(model):
        sampling = make_sampling(ROWS, vocab_size=model.config.padded_vocab_size)
        return decoding.start(
            model, np.full((ROWS, 4), 5), sampling=sampling, seeds=np.arange(ROWS),
            max_new=np.full((ROWS,), 8), max_len=MAX_LEN,
        )  # fmt: skip

    return decoding.step, (model, jax.eval_shape(started, model))


def denoise_step(run):
    model = prepared(run)
    decoding = default_decoding(run.paradigm.name).build(SPECIALS, run.paradigm.build(SPECIALS))

    def started(model):
        sampling = make_sampling(ROWS, vocab_size=model.config.padded_vocab_size, steps=4)
        return decoding.start(
            model, np.full((ROWS, 4), 5), sampling=sampling, seeds=np.arange(ROWS),
            max_new=np.full((ROWS,), LENGTH - 4), max_len=LENGTH,
        )  # fmt: skip

    return decoding.step, (model, jax.eval_shape(started, model))


def full_pass(run):
    def program(model, tokens):
        return model.head(model(tokens, ctx=Context(mask=Full()))[0].hidden)

    return program, (prepared(run), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))


AUTOREGRESSIVE = (train_step, prefill, decode_step)
DIFFUSION = (train_step, full_pass, denoise_step)
QUICK = {("transformer", prefill), ("mamba2", decode_step)}  # the others take a minute each
CASES = [
    pytest.param(
        family, program, platform,
        id=f"{family}-{program.__name__}-{platform}",
        marks=() if (family, program) in QUICK else pytest.mark.slow,
    )
    for family in FAMILIES
    for program in (DIFFUSION if family == "masked_diffusion" else AUTOREGRESSIVE)
    for platform in KERNELS
]  # fmt: skip


@pytest.mark.parametrize(("family", "program", "platform"), CASES)
def test_programs_lower_with_their_kernels(family, program, platform):
    function, arguments = program(run_of(family))
    found = kernels_in(lowered_text(platform, function, *arguments))
    if program is decode_step and family in ("mamba", "mamba2"):
        assert not found  # one step of a recurrence is a few products: no kernel is wanted
    else:
        assert found == {KERNELS[platform]}
