"""Scores on tasks: scripted answers get what they deserve; configs make the right runs."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError, GenlabError
from genlab.eval.tasks.answers import wilson, with_room
from genlab.eval.tasks.config import TaskScoreConfig, task_run
from genlab.eval.tasks.drift import default_distances, obeyed
from genlab.eval.tasks.records import TaskScore
from genlab.eval.tasks.score import score_task
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.state import check_request, fresh_state
from genlab.paradigms.interface import SpecialIds
from genlab.paradigms.model import Model, build_model
from genlab.train.config import RunConfig
from genlab.train.data.synthetic.constraint_drift import ConstraintDriftConfig
from genlab.train.data.synthetic.copying import CopyingConfig
from genlab.train.data.synthetic.reasoning import ChainArithmeticConfig
from genlab.train.data.synthetic.recall import MQARConfig
from genlab.train.data.synthetic.star_graph import StarGraphConfig
from genlab.train.yaml_loader import validate

ATTENTION = {
    "width": 16,
    "pattern": ["attention"],
    "layers": {
        "attention": {
            "mixer": {"name": "attention", "num_heads": 2, "num_kv_heads": 1},
            "mlp": {"name": "swiglu", "width": 16},
        }
    },
    "max_len": 8,
}


def specials_of(task) -> SpecialIds:
    count = len(task.symbols)
    return SpecialIds(count, count + 1, count + 2, count + 3)


def model_for(task) -> Model:
    return model_of(len(task.symbols) + 4)


@functools.cache
def model_of(vocab_size: int) -> Model:
    raw = {**ATTENTION, "vocab_size": vocab_size}
    return build_model(validate(ModelConfig, raw, "model"), seed=0)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Writes what a function of (prompts without BOS, new tokens, seeds) says; asks no model."""

    name: ClassVar[str] = "scripted"
    uses_steps: ClassVar[bool] = False
    write: Any
    ends: bool = True

    def start(self, model, prompt, *, sampling, seeds, max_new, max_len):
        request = check_request(
            model, prompt, valid=None, lengths=None, sampling=sampling, seeds=seeds,
            max_new=max_new, max_len=max_len,
        )  # fmt: skip
        assert (prompt[:, 0] == model.config.vocab_size - 4).all()
        state = fresh_state(request, max_len)
        written = self.write(prompt[:, 1:], int(max_new[0]), seeds)
        return state._replace(
            tokens=state.tokens.at[:, prompt.shape[1] :].set(jnp.asarray(written, jnp.int32)),
            done=jnp.full(len(prompt), self.ends),
            nfe=state.nfe + 3,
        )

    def step(self, model, state):
        return state

    def options(self):
        return {"by": "hand"}


def oracle(task):
    def write(prompts, new, seeds):
        return np.stack([task.solve(p) for p in prompts])

    return Scripted(write)


def uniform(task):
    def write(prompts, new, seeds):
        rows = [np.random.default_rng(s).choice(task.answer_symbols, new) for s in seeds]
        return np.stack(rows)

    return Scripted(write)


TASKS = [
    MQARConfig(num_pairs=3, num_keys=6, num_values=4),
    CopyingConfig(length=3, alphabet=6),
    ChainArithmeticConfig(depth=3, modulus=3, num_variables=6, trace=True),
    StarGraphConfig(path_length=3, num_nodes=6),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_the_oracle_gets_all_and_chance_is_chance(task):
    model, specials = model_for(task), specials_of(task)
    best = score_task(model, oracle(task), task, specials, examples=50, batch_size=16).levels[0]
    assert (best.exact, best.token_accuracy, best.solver) == (1.0, 1.0, 1.0)
    assert best.exact_ci95[0] > 0.9 and best.exact_ci95[1] == 1.0
    assert best.examples == 50 and best.nfe == 3.0 and best.trained
    assert best.row_tokens == task.as_examples().context_length

    guess = score_task(model, uniform(task), task, specials, examples=600).levels[0]
    assert guess.chance == task.chance
    assert guess.exact_ci95[0] - 0.02 <= guess.chance <= guess.exact_ci95[1] + 0.02
    per_symbol = 1 / len(task.answer_symbols)
    assert guess.token_accuracy == pytest.approx(per_symbol, abs=4 * 0.5 / np.sqrt(600))


def test_one_wrong_symbol_makes_the_answer_wrong():
    task = CopyingConfig(length=4, alphabet=5)

    def write(prompts, new, seeds):
        answers = np.stack([task.solve(p) for p in prompts])
        odd = seeds % 2 == 1
        answers[odd, 0] = (answers[odd, 0] + 1) % 5
        return answers

    score = score_task(
        model_for(task), Scripted(write), task, specials_of(task), examples=20, batch_size=8
    )
    assert score.levels[0].exact == 0.5 and score.levels[0].token_accuracy == 0.875


def test_only_the_last_value_of_a_trace_is_graded():
    task = TASKS[2]

    def write(prompts, new, seeds):
        answers = np.stack([task.solve(p) for p in prompts])
        answers[:, 0] = (answers[:, 0] + 1) % 3
        return answers

    level = score_task(
        model_for(task), Scripted(write), task, specials_of(task), examples=10
    ).levels[0]
    assert level.exact == 1.0 and level.token_accuracy == pytest.approx(2 / 3)


def test_levels_beyond_training_and_beyond_max_len():
    task = CopyingConfig(length=3, alphabet=8, min_level=2)
    model = model_for(task)
    assert model.config.max_len == 8

    def write(prompts, new, seeds):
        return prompts[:, :-1]

    score = score_task(
        model, Scripted(write), task, specials_of(task), levels=(4, 3, 48), examples=8
    )
    assert [(s.level, s.row_tokens, s.trained, s.exact) for s in score.levels] == [
        (4, 10, False, 1.0), (3, 8, True, 1.0), (48, 98, False, 1.0),
    ]  # fmt: skip
    assert score.level_field == "length" and score.steps_per_token is None
    assert TaskScore.model_validate_json(score.model_dump_json()) == score
    longer = with_room(model, 98)
    assert longer.config.max_len == 98
    tokens = np.zeros((1, 5), np.int32)
    np.testing.assert_array_equal(longer(tokens)[0].hidden, model(tokens)[0].hidden)
    assert with_room(model, 8) is model


def test_wilson_interval():
    """Values of the closed form, roots of |p - q|^2 = z^2 q (1 - q) / n."""
    z2 = 1.959963984540054**2
    for hits, trials in ((0, 10), (3, 10), (10, 10), (128, 256)):
        p = hits / trials
        roots = np.roots([1 + z2 / trials, -(2 * p + z2 / trials), p * p]).real
        low, high = wilson(hits, trials)
        assert low == pytest.approx(min(roots), abs=1e-7)
        assert high == pytest.approx(max(roots), abs=1e-7)


DRIFT = ConstraintDriftConfig(length=16, num_rules=3, num_states=4, probe_rate=0.3)


def obedient_until(distance):
    """Streams of the task's law; behind `distance` every mark is the next rule's."""

    def write(prompts, new, seeds):
        task = DRIFT.at_level(new)
        law = task.rows(split="train", indices=np.asarray(seeds), seed=0).symbols
        streams = law[:, 1:].copy()
        marks = (streams >= 3) & (streams < 6)
        late = np.arange(1, new + 1) > distance
        wrong = (prompts[:, :1] + late) % 3
        return np.where(marks, 3 + wrong, streams)

    return Scripted(write)


def test_the_drift_curve_falls_where_obedience_ends():
    score = score_task(
        model_for(DRIFT), obedient_until(32), DRIFT, specials_of(DRIFT),
        levels=(8, 16, 32, 64, 128), examples=40, batch_size=16,
    )  # fmt: skip
    assert [s.exact for s in score.levels] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [s.trained for s in score.levels] == [True, True, False, False, False]
    assert [s.solver for s in score.levels] == [1.0] * 5
    # The interval counts 40 streams, however many probes there are.
    assert score.levels[4].examples > 200
    assert score.levels[4].exact_ci95[1] == pytest.approx(wilson(0, 40)[1])
    assert (score.temperature, score.level_field) == (1.0, "distance")
    assert score.levels[0].chance == 1 / 3
    details = score.details
    assert details["probes_per_token"] == pytest.approx(details["probes_per_token_law"], abs=0.02)
    assert details["next_state_rate"] == pytest.approx(details["next_state_rate_law"], abs=0.03)
    assert details["unasked_marks_per_token"] == 0.0


def test_streams_without_a_probe_have_no_score():
    task = DRIFT

    def write(prompts, new, seeds):
        return np.full((len(prompts), new), task.first_state)

    score = score_task(
        model_for(task), Scripted(write), task, specials_of(task), levels=(4, 8), examples=4
    )
    assert [(s.exact, s.exact_ci95, s.examples) for s in score.levels] == [(None, None, 0)] * 2
    assert score.details["probes_per_token"] == 0.0
    assert TaskScore.model_validate_json(score.model_dump_json()) == score


def test_obeyed_counts_the_symbol_behind_the_probe():
    probe, mark, other, state = DRIFT.probe, 4, 3, DRIFT.first_state
    streams = np.array([[mark, probe, mark, state, probe, other, probe, probe]])
    asked, right = obeyed(DRIFT, np.array([1]), streams)
    assert np.flatnonzero(asked[0]).tolist() == [2, 5, 7]
    assert np.flatnonzero(right[0]).tolist() == [2]
    assert default_distances(64) == (16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"examples": 0}, ConfigError, "examples: got 0"),
        ({"batch_size": 0}, ConfigError, "batch_size: got 0"),
        ({"steps_per_token": 0.0}, ConfigError, "steps_per_token: got 0.0"),
        ({"levels": (2, 7)}, ConfigError, "mqar with num_pairs=7: .* num_keys is 6"),
        ({"specials": SpecialIds(1, 2, 3, 4)}, ConfigError, "has 14 ids, the task 5"),
        ({"decoding": Scripted(lambda p, n, s: np.zeros((len(p), n)), ends=False)}, GenlabError,
         "'scripted' left answers unfinished"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(changes, error, message):
    task = TASKS[0]
    arguments = {"specials": specials_of(task), "decoding": oracle(task), "examples": 4} | changes
    specials, decoding = arguments.pop("specials"), arguments.pop("decoding")
    with pytest.raises(error, match=message):
        score_task(model_for(task), decoding, task, specials, **arguments)


def test_distances_must_increase():
    with pytest.raises(ConfigError, match=r"levels: got \[8, 4\], want increasing"):
        score_task(
            model_for(DRIFT), obedient_until(4), DRIFT, specials_of(DRIFT), levels=(8, 4),
            examples=2,
        )  # fmt: skip


RUN = {
    "model": ATTENTION,
    "paradigm": {"name": "autoregressive"},
    "data": {"tokenizer": {"name": "bytes"}, "context_length": 8, "batch_size": 2},
    "training": {"tokens": 100, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
}


def test_a_run_for_a_task():
    run = validate(RunConfig, RUN, "run").with_vocab_size(260)
    raw = {
        "source": {"name": "mqar", "num_pairs": 4, "num_keys": 6},
        "levels": [2, 4],
        "run": {"training": {"tokens": 64}, "data": {"batch_size": 3}},
    }
    score = validate(TaskScoreConfig, raw, "compare.yaml: tasks.recall")
    made = task_run(run, score)
    assert made.data.source == score.source and made.data.tokenizer.name == "symbols"
    assert made.data.context_length == made.model.max_len == 17
    assert made.model.vocab_size is None and made.model.width == run.model.width
    assert (made.training.tokens, made.data.batch_size) == (64, 3)
    assert made.training.optimizer == run.training.optimizer


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"run": {"data": {"source": {"name": "parity"}}}}, "task: run.data.source is set by"),
        ({"run": {"training": {"token": 3}}}, "task: run: training.token.*did you mean 'tokens'"),
        ({"run": {"data": {"context_length": 4}}}, "context_length=4 is too short for task mqar"),
    ],
)
def test_overrides_of_a_task_run_are_checked(changes, message):
    run = validate(RunConfig, RUN, "run")
    score = validate(TaskScoreConfig, {"source": {"name": "mqar"}, **changes}, "tasks")
    with pytest.raises(ConfigError, match=message):
        task_run(run, score)
    with pytest.raises(ConfigError, match="levels of at least 1"):
        validate(TaskScoreConfig, {"source": {"name": "mqar"}, "levels": [0]}, "tasks")
