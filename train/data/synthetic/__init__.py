"""Synthetic tasks: what a model can do, apart from how well it knows a language.

Each task is a config (`registry.py` lists them) that draws examples as a pure function of (seed,
split, index), solves them exactly from the prompt alone, and knows its chance level in closed form.
In a run it takes the place of a source of documents:

    data:
      source: {name: mqar, num_pairs: 8}
      tokenizer: {name: symbols}

Adding one: a class derived from `SyntheticTask` (`task.py`) and a line in `registry.py`.
"""
