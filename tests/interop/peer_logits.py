"""Run in a process of its own, outside the checkout: what transformers makes of folders.

    python peer_logits.py FOLDER...     writes FOLDER/logits.npy from FOLDER/tokens.npy
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, config.architectures[0])
        model, report = kind.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        wrong = {key: names for key, names in report.items() if names}
        assert not wrong, f"{folder}: {wrong}"
        with torch.no_grad():
            logits = model.eval()(torch.tensor(np.load(folder / "tokens.npy"))).logits
        np.save(folder / "logits.npy", logits.numpy())


main()
