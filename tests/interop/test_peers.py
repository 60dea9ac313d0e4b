"""Where transformers is installed: it loads what we export, and computes the same logits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from genlab.train.interop.export_run import export_run

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"

if all(importlib.util.find_spec(peer) for peer in ("torch", "transformers")):

    def test_transformers_loads_our_exports(imported, expected, tmp_path):
        """Once with the config that came, once with the one that we write ourselves."""
        wanted = {}
        for name in sorted(path.name for path in FIXTURES.iterdir()):
            run = imported(name)
            for kind, path in (("kept", run.path), ("written", tmp_path / "no_source")):
                folder = tmp_path / f"{name}.{kind}"
                export_run(run._replace(path=path), folder)
                np.save(folder / "tokens.npy", expected(name)["tokens"].astype(np.int64))
                wanted[folder] = expected(name)["logits"]
        # Transformers probes for a package called `kernels` and would find ours in the checkout.
        done = subprocess.run(
            [sys.executable, HERE / "peer_logits.py", *wanted],
            cwd=tmp_path,
            env={**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        for folder, logits in wanted.items():
            np.testing.assert_allclose(np.load(folder / "logits.npy"), logits, rtol=1e-5, atol=1e-5)
