"""Text in, batches out: tokenizers, sources, the token cache, packing and evaluation windows.

The usual way in is `build_data` (`pipeline.py`), which reads a `DataConfig`:

    data = build_data(DataConfig())
    for step, batch in data.train_batches(start_step=0):
        ...
    windows = data.evaluation_windows("test", length=256)
"""
