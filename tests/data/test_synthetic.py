"""Synthetic tasks: what they draw, that solvers are right, and that splits never meet."""

import hashlib
import re

import numpy as np
import pytest
from genlab.errors import ConfigError, DataError
from genlab.train.data.splits import SPLITS
from genlab.train.data.synthetic import task as task_module
from genlab.train.data.synthetic.constraint_drift import ConstraintDriftConfig
from genlab.train.data.synthetic.copying import CopyingConfig, SelectiveCopyingConfig
from genlab.train.data.synthetic.reasoning import ChainArithmeticConfig, ParityConfig
from genlab.train.data.synthetic.recall import InductionConfig, MQARConfig, NeedleConfig
from genlab.train.data.synthetic.registry import TASKS
from genlab.train.data.synthetic.star_graph import StarGraphConfig
from genlab.train.data.synthetic.task import FORMAT
from pydantic import ValidationError

SMALL = {
    "mqar": MQARConfig(num_pairs=5, num_keys=7, num_values=6, min_level=2, queries=3),
    "induction": InductionConfig(length=9, alphabet=4, min_level=2),
    "needle": NeedleConfig(length=6, num_needles=3, num_keys=4, num_values=5, num_fillers=3),
    "copying": CopyingConfig(length=6, alphabet=3, min_level=3),
    "selective_copying": SelectiveCopyingConfig(length=9, num_tokens=3, alphabet=4),
    "chain_arithmetic": ChainArithmeticConfig(depth=5, modulus=5, num_variables=6, min_level=1),
    "parity": ParityConfig(length=9),
    "star_graph": StarGraphConfig(path_length=4, arms=3, num_nodes=11),
    "constraint_drift": ConstraintDriftConfig(length=30, num_rules=3, num_states=4),
}
ANSWERED = sorted(set(TASKS) - {"constraint_drift"})


def words(task, row):
    return [task.symbols[s] for s in np.asarray(row).tolist() if s >= 0]


def by_value(text, word, m):
    """The value of a variable, by recursion from its definition."""
    if word.isdigit():
        return int(word)
    at = next(i for i in range(len(text) - 1) if text[i] == word and text[i + 1] == "=")
    left = text[at + 2]
    if at + 3 >= len(text) or text[at + 3] not in "+-*":
        return by_value(text, left, m)
    a, b = by_value(text, left, m), by_value(text, text[at + 4], m)
    return eval(f"({a} {text[at + 3]} {b}) % {m}")


def paths(edges, start, goal):
    """All ways from start to goal, by walking forwards."""
    if start == goal:
        return [[goal]]
    return [
        [start, *rest] for a, b in edges if a == start for rest in paths(edges, b, goal)
    ]


def reference(task, text):
    """The answer by another way than the solver's, on words."""
    match task.name:
        case "mqar" | "needle":
            return [text[text.index(text[-1]) + 1]]
        case "induction":
            return [text[text.index("!") + 1]]
        case "copying":
            return text[: text.index("|")]
        case "selective_copying":
            return re.findall(r"a\d+", " ".join(text))
        case "chain_arithmetic":
            if not task.trace:
                return [str(by_value(text[:-2], text[-2], task.modulus))]
            defined = [text[i] for i in range(3, len(text) - 2, 5)]
            return [str(by_value(text[:-2], name, task.modulus)) for name in defined]
        case "parity":
            return [str(text.count("1") % 2)]
        case "star_graph":
            edges = [edge.split(">") for edge in text[:-2]]
            start, goal = text[-2:] if task.reverse else text[:-3:-1]
            (path,) = paths(edges, start, goal)
            return path[-2::-1] if task.reverse else path[1:]


VARIANTS = [
    *(SMALL[name] for name in ANSWERED),
    ChainArithmeticConfig(depth=3, trace=True),
    StarGraphConfig(reverse=True),
    NeedleConfig(length=8, depth=0.0),
]


@pytest.mark.parametrize("task", VARIANTS, ids=lambda t: t.name)
def test_solver_answer_and_brute_force_agree(task):
    drawn = task.examples(split="test", indices=np.arange(60), seed=3)
    assert drawn.prompts.shape == (60, task.as_examples().prompt_length)
    for prompt, answer in zip(drawn.prompts, drawn.answers, strict=True):
        assert words(task, answer) == reference(task, words(task, prompt))
        np.testing.assert_array_equal(task.solve(prompt), answer)
    assert set(np.unique(drawn.answers)) <= set(task.answer_symbols)


def test_drift_streams_obey_their_rule():
    task = SMALL["constraint_drift"]
    rows = task.rows(split="train", indices=np.arange(200), seed=0).symbols
    probes = 0
    for row in rows:
        text = " ".join(words(task, row))
        rule = words(task, task.solve(row[:1]))[0]
        assert rule == "m" + text[1]
        marks = re.findall(r"\? (\S+)", text)
        assert set(marks) <= {rule} and text.count(rule) == len(marks)
        probes += text.count("?")
    # Tokens that are probes: rate / (1 + rate), but for the first place and the last's border.
    assert probes / rows[:, 1:].size == pytest.approx(0.15 / 1.15, abs=0.012)


def test_queries_are_scored_and_nothing_else():
    task = SMALL["mqar"]
    rows = task.rows(split="train", indices=np.arange(50), seed=0)
    assert set(rows.levels) == {2, 3, 4, 5}
    for row, scored, level in zip(*rows, strict=True):
        text = words(task, row)
        table = dict(zip(text[0 : 2 * level : 2], text[1 : 2 * level : 2], strict=True))
        assert len(text) == 2 * (level + 3) and len(table) == level
        asked = text[2 * level :: 2]
        assert [text[i] for i in np.flatnonzero(scored)] == [table[key] for key in asked]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_rows_are_a_function_of_seed_split_and_index(name):
    task = SMALL[name]
    rows = task.rows(split="train", indices=np.arange(40), seed=1)
    shuffled = np.random.default_rng(0).permutation(40)
    for a, b in zip(
        task.rows(split="train", indices=shuffled, seed=1), rows, strict=True
    ):
        np.testing.assert_array_equal(a, b[shuffled])
    other = task.rows(split="train", indices=np.arange(40), seed=2)
    assert not np.array_equal(other.symbols, rows.symbols)


def test_rows_do_not_change_between_releases():
    """Runs are compared by their data's fingerprint, which holds FORMAT: change both together."""
    digest = hashlib.sha256()
    for name in sorted(SMALL):
        rows = SMALL[name].rows(split="validation", indices=np.arange(8), seed=5)
        digest.update(rows.symbols.astype("<i4").tobytes() + rows.scored.tobytes())
    assert (FORMAT, digest.hexdigest()[:16]) == ("genlab-task-1", "2937e02ba997b3d4")


@pytest.mark.parametrize("name", sorted(SMALL))
def test_splits_share_no_example(name):
    """Whatever the seeds; and they would share some if examples were not divided."""
    task = SMALL[name].as_examples()
    seen = {}
    for split in SPLITS:
        rows = [task.rows(split=split, indices=np.arange(150), seed=s).symbols for s in (0, 1)]
        seen[split] = {r.tobytes() for r in np.concatenate(rows)[:, task.identity]}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_every_example_of_a_small_space_is_in_exactly_one_split():
    task = ParityConfig(length=7)
    found = [
        {r.tobytes() for r in task.rows(split=s, indices=np.arange(n), seed=0).symbols[:, :7]}
        for s, n in zip(SPLITS, (3000, 300, 300), strict=True)
    ]
    assert sum(map(len, found)) == len(set.union(*found)) == 2**7


def test_a_space_without_a_held_out_example_is_reported(monkeypatch):
    monkeypatch.setattr(task_module, "MAX_ATTEMPTS", 20)
    with pytest.raises(DataError, match=r"parity with length=1 has too few different examples"):
        for split in ("validation", "test"):
            ParityConfig(length=1).rows(split=split, indices=np.arange(1), seed=0)


def test_training_levels_are_uniform():
    task = CopyingConfig(length=9, min_level=2)
    levels = task.rows(split="train", indices=np.arange(4000), seed=0).levels
    counts = np.bincount(levels, minlength=10)[2:]
    assert counts.min() > 500 - 5 * np.sqrt(500) and counts.max() < 500 + 5 * np.sqrt(500)


@pytest.mark.parametrize("name", ["mqar", "needle"])
def test_the_law_of_guessing_a_value_of_the_prompt(name):
    task = SMALL[name].as_examples()
    drawn = task.examples(split="train", indices=np.arange(4000), seed=0)
    draw = np.random.default_rng(0)
    hits = [
        draw.choice(prompt[np.isin(prompt, task.answer_symbols)]) == answer[0]
        for prompt, answer in zip(drawn.prompts, drawn.answers, strict=True)
    ]
    assert np.mean(hits) == pytest.approx(task.shortcut.exact, abs=4 * 0.5 / np.sqrt(4000))


def test_the_law_of_guessing_an_arm():
    task = SMALL["star_graph"]
    drawn = task.examples(split="train", indices=np.arange(3000), seed=0)
    draw, hits = np.random.default_rng(0), 0
    for prompt, answer in zip(drawn.prompts, drawn.answers, strict=True):
        text = words(task, prompt)
        firsts = [edge.split(">")[1] for edge in text[:-2] if edge.split(">")[0] == text[-1]]
        assert len(firsts) == 3
        hits += draw.choice(firsts) == words(task, answer)[0]
    assert task.shortcut.exact == 1 / 3
    assert hits / 3000 == pytest.approx(1 / 3, abs=4 * 0.5 / np.sqrt(3000))


@pytest.mark.parametrize("task", VARIANTS, ids=lambda t: t.name)
def test_chance_is_that_of_random_answers(task):
    task = task.as_examples()
    drawn = task.examples(split="train", indices=np.arange(2000), seed=0)
    guessed = np.random.default_rng(1).choice(task.answer_symbols, drawn.answers.shape)
    hits = (guessed == drawn.answers)[:, -task.graded :].all(axis=1).mean()
    spread = np.sqrt(task.chance * (1 - task.chance) / 2000)
    assert abs(hits - task.chance) <= 4 * spread + 1 / 2000


@pytest.mark.parametrize("depth,place", [(0.0, 0), (0.5, 8), (1.0, 16)])
def test_the_asked_needle_lies_at_its_depth(depth, place):
    task = NeedleConfig(length=16, num_needles=2, depth=depth)
    for prompt in task.examples(split="train", indices=np.arange(20), seed=0).prompts:
        text = words(task, prompt)
        before = text[: text.index(text[-1])]
        assert sum(word.startswith("f") for word in before) == place


def test_levels_keep_the_vocabulary():
    for name, task in SMALL.items():
        other = task.at_level(task.level - 1)
        assert other.symbols == task.symbols, name
        assert other.level == task.level - 1 and other.min_level is None


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: MQARConfig(num_pairs=9, num_keys=8), "num_pairs=9 .* num_keys is 8"),
        (lambda: NeedleConfig(num_needles=9, num_keys=8), "num_needles=9 .* num_keys is 8"),
        (lambda: ChainArithmeticConfig(depth=10), "depth=10 needs 11 variables.* is 10"),
        (lambda: StarGraphConfig(path_length=6), "take 11 nodes, num_nodes is 10"),
        (lambda: SelectiveCopyingConfig(length=4, num_tokens=5), "num_tokens=5 do not fit"),
        (lambda: CopyingConfig(length=4, min_level=5), "min_level=5 is more than length=4"),
        (lambda: ChainArithmeticConfig(operations=("+", "+")), "one is there twice"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"^mqar with num_pairs=65: .* num_keys is 64$"):
        MQARConfig().at_level(65)
    with pytest.raises(DataError, match=r"no split 'dev'"):
        MQARConfig().rows(split="dev", indices=np.arange(1), seed=0)


def test_solvers_refuse_what_is_no_prompt():
    with pytest.raises(ValueError, match="key 'k1' is asked for, but never given"):
        MQARConfig(num_pairs=1).solve(np.array([0, 64, 1]))
    with pytest.raises(ValueError, match="no way leads from 2 to 1"):
        StarGraphConfig(path_length=2).solve(np.array([10, 1, 2]))
    with pytest.raises(ValueError, match="has not been seen"):
        InductionConfig(length=2).solve(np.array([0, 1, 16]))
    with pytest.raises(ValueError, match="'m0' is no instruction"):
        ConstraintDriftConfig().solve(np.array([8]))
