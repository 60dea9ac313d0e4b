"""Scores on synthetic tasks: every paradigm answers by generating, and is graded the same way.

    model, decoding                       of a run that was trained on the task
    score_task(model, decoding, task, specials, levels=(8, 16, 32))   -> TaskScore

`TaskScoreConfig` is the same from YAML; `task_run` makes the training run that goes with it.
"""
