"""No key is accepted and ignored: each one, changed, changes what its run does."""

import json
import math
from typing import Any

import jax
import pytest
from genlab.paradigms.interface import Batch, SpecialIds
from genlab.paradigms.layers.ends import InputConfig, OutputConfig
from genlab.paradigms.mlps.moe import MoEConfig
from genlab.paradigms.model import abstract_model
from genlab.train.checkpoint import steps_in
from genlab.train.config import ProfileConfig, RunConfig, TrainingConfig, config_hash
from genlab.train.data.pipeline import build_data
from genlab.train.evaluate import validation_windows
from genlab.train.loop import train
from genlab.train.optimizer import AdamWConfig
from genlab.train.schedule import ConstantConfig, CosineConfig, WSDConfig
from genlab.train.sinks import WandbConfig
from genlab.train.step import abstract_state, make_optimizer, make_train_step, micro_batches
from genlab.train.yaml_loader import apply_overrides, validate

# What the update as a program shows: dotted key -> (value, what must hold for the key to matter).
PROGRAM = {
    "training.optimizer.learning_rate": ("0.02", ()),
    "training.optimizer.beta1": ("0.8", ()),
    "training.optimizer.beta2": ("0.9", ()),
    "training.optimizer.eps": ("1e-3", ()),
    "training.optimizer.weight_decay": ("0.2", ()),
    "training.optimizer.clip_norm": ("null", ()),
    "training.tokens": ("6400", ()),
    "training.schedule.warmup_fraction": ("0.5", ("training.schedule={name: constant}",)),
    "training.schedule.final_fraction": ("0.5", ("training.schedule={name: cosine}",)),
    "training.schedule.decay_fraction": ("0.5", ("training.schedule={name: wsd}",)),
    "training.schedule.name": ("wsd", ()),
    "training.accumulate": ("2", ()),
    "training.ema_decay": ("0.9", ()),
    "training.compute_dtype": ("bfloat16", ()),
    "training.remat": ("true", ()),
    "seed": ("1", ("model.dropout=0.1",)),
    "model.width": ("32", ()),
    "model.depth": ("2", ()),
    "model.pattern": ("[a, a]", ()),
    "model.layers": ("{a: {mlp: {width: 48}}}", ()),
    "model.share_layers": ("true", ("model.depth=2",)),
    "model.max_len": ("8", ("data.context_length=8", "training.tokens=64")),
    "model.vocab_size": ("260", None),
    "model.pad_vocab_to": ("64", ()),
    "model.tie_embeddings": ("false", ()),
    "model.dropout": ("0.1", ()),
    "model.norm": ("layer", ()),
    "model.norm_eps": ("1e-3", ()),
    "model.final_norm": ("false", ()),
    "model.inputs": ("{positions: 99}", ()),
    "model.output": ("{transform: relu}", ()),
    "model.meta_tokens": ("2", ()),
    "data.context_length": ("8", ()),
    "data.batch_size": ("2", ()),
    "paradigm": ("{name: masked_diffusion}", ()),
}

# The same for a mixture of experts as the layer's MLP.
MOE = "model.layers.a.mlp={name: moe, width: 8, num_experts: 4, top_k: 2}"
MOE_KEYS = {
    "width": "6",
    "num_experts": "3",
    "top_k": "3",
    "shared_experts": "1",
    "balance_weight": "0.0",
    "normalize_weights": "false",
    "router_z_weight": "0.1",
}

# The same for the parts at a model's ends: key -> (value, what must hold for it to matter).
ENDS = {
    "inputs.positions": ("1999", ("model.inputs={positions: 2000}",)),
    "inputs.first_position": ("1", ("model.inputs={positions: 2000}",)),
    "inputs.token_types": ("2", ()),
    "inputs.scale": ("2.0", ()),
    "inputs.norm": ("true", ()),
    "inputs.width": ("8", ("model.tie_embeddings=false",)),
    "output.transform": ("gelu", ("model.output={transform: relu}",)),
    "output.bias": ("true", ()),
    "output.scale": ("0.5", ()),
}

# What has its effect outside the update; the tests that show it.
ELSEWHERE = {
    "training.evaluate_every": "test_loop.test_evaluation_is_of_the_validation_split",
    "training.evaluate_windows": "test_evaluate_windows",
    "training.select_best": "test_loop.test_the_best_evaluated_state_is_the_result",
    "training.sample_every": "test_loop.test_everything_that_can_be_written_is_written",
    "training.checkpoint_every": "test_keep_and_checkpoint_every",
    "training.keep": "test_keep_and_checkpoint_every",
    "training.log_every": "test_loop.test_everything_that_can_be_written_is_written",
    "training.tensorboard": "test_loop.test_everything_that_can_be_written_is_written",
    "training.wandb.project": "test_sinks.test_the_same_run_goes_on_after_an_interruption",
    "training.wandb.name": "test_sinks.test_the_run_is_called_as_asked",
    "training.wandb.mode": "test_sinks.test_the_same_run_goes_on_after_an_interruption",
    "training.profile.start": "test_profile",
    "training.profile.updates": "test_profile",
    "data.source": "tests/data/test_sources.py",
    "data.tokenizer": "tests/data/test_tokenizer.py",
    "data.seed": "test_data_seed",
}


def keys_of(config: Any, prefix: str) -> set[str]:
    return {f"{prefix}{name}" for name in config.model_fields if name != "name"}


def test_the_list_is_complete():
    """A key that is added must be shown to have an effect."""
    assert ENDS.keys() == keys_of(InputConfig, "inputs.") | keys_of(OutputConfig, "output.")
    schedules = set().union(
        *(keys_of(c, "training.schedule.") for c in (ConstantConfig, CosineConfig, WSDConfig))
    )
    keys = keys_of(TrainingConfig, "training.") | keys_of(RunConfig, "")
    keys |= keys_of(AdamWConfig, "training.optimizer.") | schedules
    keys |= keys_of(ProfileConfig, "training.profile.") | keys_of(WandbConfig, "training.wandb.")
    keys |= keys_of(RunConfig.model_fields["model"].annotation, "model.")
    keys |= keys_of(RunConfig.model_fields["data"].annotation, "data.")
    sections = {"training", "model", "data", "training.optimizer", "training.schedule"}
    keys -= sections | {"training.profile", "training.wandb"}
    assert keys == (PROGRAM.keys() | ELSEWHERE.keys()) - {
        "training.schedule.name", "training.wandb.name",
    }  # fmt: skip


def program(config: RunConfig) -> str:
    """The update as JAX sees it: everything that it computes, constants and shapes included."""
    config = config.with_vocab_size(260)
    tx = make_optimizer(config)
    state, model = abstract_state(config, tx)
    paradigm = config.paradigm.build(SpecialIds(256, 257, 258, 259))
    rows = (config.data.batch_size, config.data.context_length)
    kinds = ("int32", "int32", "bool")
    batch = Batch(*(jax.ShapeDtypeStruct(rows, kind) for kind in kinds))
    batch = jax.eval_shape(lambda b: micro_batches(b, config.training.accumulate), batch)
    return str(jax.make_jaxpr(make_train_step(config, paradigm, tx, model))(state, batch))


@pytest.mark.parametrize("key", [key for key, (_, given) in PROGRAM.items() if given is not None])
def test_the_update_depends_on_the_key(make, key):
    value, given = PROGRAM[key]
    before, after = make(*given), make(*given, f"{key}={value}")
    assert before != after
    if key == "model.max_len":  # a limit: what is longer is refused
        assert abstract_model(after.with_vocab_size(260).model).config.max_len == 8
        return
    assert program(before) != program(after)


@pytest.mark.parametrize("key", ENDS)
def test_the_update_depends_on_the_key_of_an_end(make, key):
    value, given = ENDS[key]
    assert program(make(*given)) != program(make(*given, f"model.{key}={value}"))


@pytest.mark.parametrize("key", MOE_KEYS)
def test_the_update_depends_on_the_key_of_a_mixture_of_experts(make, key):
    after = make(MOE, f"model.layers.a.mlp.{key}={MOE_KEYS[key]}")
    assert program(make(MOE)) != program(after)


def test_the_list_of_a_mixture_of_experts_is_complete():
    assert keys_of(MoEConfig, "") == MOE_KEYS.keys()


def test_what_a_router_reports_reaches_the_metrics(make, data, tmp_path):
    config = make(MOE, "model.layers.a.mlp.balance_weight=0.5", "training.tokens=256")
    folder = tmp_path / "run"
    train(config, folder, data=data)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        stats = line["stats"]
        assert set(stats) == {
            f"layer_0.{n}" for n in ("router_entropy", "max_load", "unused_experts")
        }
        assert 0 < stats["layer_0.router_entropy"] <= math.log(4) + 1e-6
        # The largest share of the assignments, times 4; two experts cannot have all of each token.
        assert 1 <= stats["layer_0.max_load"] <= 2
        assert 0 <= stats["layer_0.unused_experts"] <= 2
        # Half the balance loss, which is about 1 when balanced and 2 at worst.
        assert 0.4 < line["aux_loss"] < 1
    assert lines[0]["stats"] != lines[-1]["stats"]


def test_model_vocab_size_is_checked(make):
    assert make("model.vocab_size=260").with_vocab_size(260).model.vocab_size == 260


def test_evaluate_windows(make, data):
    assert len(validation_windows(make("training.evaluate_every=1"), data)) > 2
    config = make("training.evaluate_every=1", "training.evaluate_windows=2")
    assert len(validation_windows(config, data)) == 2


def test_keep_and_checkpoint_every(make, data, tmp_path):
    config = make("training.checkpoint_every=1", "training.keep=3")
    train(config, tmp_path / "run", data=data)
    assert steps_in(tmp_path / "run" / "checkpoints") == [6, 7, 8]


def test_profile(make, data, tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    config = make("training.profile={start: 3, updates: 4}")

    def note(record):
        events.append(record.step)

    train(config, tmp_path / "run", data=data, progress=note)
    # Metrics are fetched one update late: update 2's come in while update 3 runs.
    assert events.index("start") == 1 and events.index("stop") == events.index(5) + 1
    events.clear()
    config = make("training.profile={start: 8, updates: 4}")
    train(config, tmp_path / "end", data=data, progress=note)
    assert events[-1] == "stop"


def test_data_seed(make, data):
    other = build_data(make("data.seed=1").data)
    mine, theirs = next(data.train_batches())[1], next(other.train_batches())[1]
    assert (mine.tokens != theirs.tokens).any()


def test_equal_configs_have_equal_hashes(raw):
    one = validate(RunConfig, raw, "x")
    spelt_out = validate(
        RunConfig, apply_overrides(raw, ["training.keep=2", "training.optimizer.beta1=0.9"]), "x"
    )
    assert one == spelt_out and config_hash(one) == config_hash(spelt_out)
    copy = one.model_copy(update={"seed": 7})
    assert config_hash(copy) != config_hash(one)
    assert config_hash(copy) == config_hash(validate(RunConfig, {**raw, "seed": 7}, "x"))
    assert json.loads(one.canonical_json)["training"]["keep"] == 2
