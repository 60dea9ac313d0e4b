"""Programs that measure one part against another: `python -m genlab.eval.benchmarks.NAME`."""
