"""genlab's models for EleutherAI's lm-evaluation-harness (`lm_eval`, the extra `lm_eval`).

Only `adapter` and `__main__` need the harness; the rest is ours and works without it.
"""
