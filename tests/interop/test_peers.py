"""Where transformers is installed: it loads what we export, and computes the same logits.

The checkpoints are the fixtures and, made on the spot, others of other sizes.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from genlab.paradigms.context import Context
from genlab.paradigms.masks import Causal, Full
from genlab.train.interop.export_run import export_run
from genlab.train.interop.import_run import import_checkpoint
from genlab.train.run_folder import load_run

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
NEAR = 1e-4  # of two logits between which rounding may choose
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def run_peer(script, *arguments, cwd):
    """Runs a script in a process of its own.

    Transformers probes for a package called `kernels` and would find ours in the checkout.
    """
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def check_exports(runs, tmp_path):
    """Exports runs and lets transformers compute their logits again.

    Once with the config that came, once with the one that we write ourselves, which leaves the
    lengths of chunks to transformers and so adds up in another order.

    Args:
        runs: name -> (run, arrays of its `expected.npz`).
        tmp_path: an empty folder.
    """
    wanted = {}
    for name, (run, want) in runs.items():
        for kind, path in (("kept", run.path), ("written", tmp_path / "no_source")):
            folder = tmp_path / f"{name}.{kind}"
            export_run(run._replace(path=path), folder)
            np.save(folder / "tokens.npy", want["tokens"].astype(np.int64))
            wanted[folder] = want["logits"]
    run_peer("peer_logits.py", *wanted, cwd=tmp_path)
    for folder, logits in wanted.items():
        found = np.load(folder / "logits.npy")
        near = {"rtol": 1e-5, "atol": 1e-5} if folder.suffix == ".kept" else TOLERANCE
        np.testing.assert_allclose(found, logits, err_msg=folder.name, **near)


@jax.jit
def whole(model, tokens, valid, mask):
    out, _ = model(tokens, ctx=Context(valid=valid, mask=mask))
    return model.head(out.hidden)


@jax.jit
def grow(model, state, tokens):
    out, state = model(tokens, state)
    return model.head(out.hidden[:, -1]), state


def check_greedy(model, tokens, theirs):
    """Each greedy token is theirs; at most one in 500 may be another whose logit is as high."""
    batch, length = tokens.shape
    state = model.init_state(batch, length + theirs.shape[1])
    logits, state = grow(model, state, jnp.asarray(tokens))
    excused = 0
    for at in range(theirs.shape[1]):
        last = np.asarray(logits)
        for row in range(batch):
            own, their = last[row].argmax(), theirs[row, at]
            if own != their:
                assert last[row, own] - last[row, their] < NEAR, (at, row, own, their)
                excused += 1
        logits, state = grow(model, state, jnp.asarray(theirs[:, at : at + 1]))
    assert excused <= theirs.size / 500


if all(importlib.util.find_spec(peer) for peer in ("torch", "transformers")):

    def test_transformers_loads_our_exports(imported, expected, tmp_path):
        names = sorted(path.name for path in FIXTURES.iterdir())
        check_exports({name: (imported(name), expected(name)) for name in names}, tmp_path)

    def test_checkpoints_of_other_sizes(tmp_path):
        """Logits of rows and of left-padded ones, 64 greedy tokens, and the way back."""
        run_peer("make_fixtures.py", "--other", tmp_path / "other", cwd=tmp_path)
        runs = {}
        for folder in sorted((tmp_path / "other").iterdir()):
            import_checkpoint(folder, tmp_path / "runs" / folder.name)
            run = load_run(tmp_path / "runs" / folder.name)
            want = dict(np.load(folder / "expected.npz"))
            model = run.model.prepare("float32")
            causal = run.config.paradigm.name == "autoregressive"
            for tokens, valid, logits in (
                (want["tokens"], np.ones(want["tokens"].shape, bool), want["logits"]),
                (want["padded"], want["valid"], want["padded_logits"]),
            ):
                found = np.asarray(whole(model, tokens, valid, Causal() if causal else Full()))
                np.testing.assert_allclose(
                    found[valid], logits[valid], err_msg=folder.name, **TOLERANCE
                )
            if causal:
                assert want["greedy"].shape[1] == 64
                check_greedy(model, want["tokens"], want["greedy"])
            runs[folder.name] = run, want
        check_exports(runs, tmp_path / "exports")
