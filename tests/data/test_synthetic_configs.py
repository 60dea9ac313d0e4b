"""The shipped configurations of tasks: they load, fit, and say what to expect."""

from importlib import resources
from pathlib import Path

import pytest
from genlab.paradigms.model import abstract_model
from genlab.train.config import RunConfig
from genlab.train.data.pipeline import build_data
from genlab.train.data.synthetic.task import SyntheticTask
from genlab.train.yaml_loader import load_config

CONFIGS = sorted((Path(str(resources.files("genlab"))) / "configs" / "tasks").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_loads_and_its_rows_fit(path):
    config = load_config(RunConfig, path)
    data = build_data(config.data)
    assert isinstance(data.task, SyntheticTask) and data.task.name == path.stem
    # A row that is longer than need be is compute spent on padding.
    assert config.data.context_length - data.task.context_length <= 4
    config = config.with_vocab_size(data.tokenizer.vocab_size)
    assert abstract_model(config.model).num_params() < 250_000
    _, batch = next(data.train_batches())
    assert batch.loss_mask.any(axis=1).all()
    data.evaluation_windows("test", max_windows=8)
    assert f"genlab train configs/tasks/{path.name}" in path.read_text().splitlines()[0]


def test_there_are_configs():
    assert {"mqar", "chain_arithmetic", "star_graph", "needle", "constraint_drift"} <= {
        path.stem for path in CONFIGS
    }
