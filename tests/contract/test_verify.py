"""Looking at tokens promises nothing; keeping some equals never having seen the rest."""

import jax
import numpy as np
import pytest
from genlab.paradigms.context import Context

ROWS, ROOM, PROMPT, LOOKED = 7, 40, 9, 7
PROMPTS = np.array([9, 9, 9, 9, 4, 2, 0], np.int32)  # the last row has no history at all
# Two roots; node 0 has children 2 and 3, node 1 has 4, and 2 has 5 and 6.
PARENTS = np.array([-1, -1, 0, 0, 1, 2, 2], np.int32)
PATHS = [[0], [1], [0, 2], [0, 3], [1, 4], [0, 2, 5], [0, 2, 6]]
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def close(got, want, message=""):
    """Equal to rounding, leaf by leaf."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE, err_msg=message), got, want
    )


def junk_state(model):
    """An empty state with NaN in memory that nobody has written."""
    return jax.tree.map(
        lambda a: np.full(a.shape, np.nan, a.dtype) if a.dtype.kind == "f" else np.asarray(a),
        model.init_state(ROWS, ROOM),
    )


@pytest.fixture(scope="module")
def prompted(lab):
    """Each model's prompt tokens, drafted tokens and the state after the prompt."""
    made = {}

    def of(entry):
        if entry.name not in made:
            prompt = lab.random_tokens(11, ROWS, PROMPT + LOOKED)
            state = lab.run(
                entry.model, prompt, junk_state(entry.model), Context(lengths=PROMPTS)
            )[1]
            made[entry.name] = prompt, lab.random_tokens(12, ROWS, LOOKED), state
        return made[entry.name]

    return of


def fresh_run(lab, model, prompt, drafts):
    """A run from nothing over each row's prompt and the drafted tokens (a list per row)."""
    tokens, lengths = np.array(prompt), np.array(PROMPTS)
    for row, draft in enumerate(drafts):
        tokens[row, lengths[row] : lengths[row] + len(draft)] = draft
        lengths[row] += len(draft)
    out, state = lab.run(model, tokens, junk_state(model), Context(lengths=lengths))
    return np.asarray(out.hidden), state


def follow(lab, model, state):
    """Hidden states of two more tokens on top of a state: what anybody can see of it."""
    one = lab.random_tokens(13, ROWS, 1)
    first, state = lab.run(model, one, state)
    second, _ = lab.run(model, one, state)
    return np.asarray(first.hidden), np.asarray(second.hidden)


@pytest.mark.parametrize("accepted", [[0, 1, 2, 7, 3, 4, 5], [7, 6, 5, 0, 0, 1, 0]])
def test_keeping_some_of_a_chain_equals_a_fresh_run(lab, prompted, causal_entry, accepted):
    model = causal_entry.model
    prompt, draft, state = prompted(causal_entry)
    accepted = np.array(accepted, np.int32)
    out, pending = lab.verify(model, draft, state)
    path = np.tile(np.arange(LOOKED, dtype=np.int32), (ROWS, 1))
    path[:, 5] = np.where(accepted < 6, -1, 5)  # what is not kept may be anything
    kept = lab.commit(model, state, pending, path, accepted)
    rows = [draft[row, :n] for row, n in enumerate(accepted)]
    hidden, want = fresh_run(lab, model, prompt, rows)
    for row, n in enumerate(accepted):
        at = PROMPTS[row]
        close(np.asarray(out.hidden)[row, :n], hidden[row, at : at + n], f"row {row}")
    close(kept.length, want.length)
    close(follow(lab, model, kept), follow(lab, model, want))


def test_looking_changes_no_bit_of_the_state(lab, prompted, causal_entry):
    model = causal_entry.model
    _, draft, state = prompted(causal_entry)
    before = jax.tree.map(np.array, state)
    _, pending = lab.verify(model, draft, state)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    path = np.tile(np.arange(LOOKED, dtype=np.int32), (ROWS, 1))
    kept = lab.commit(model, state, pending, path, np.zeros(ROWS, np.int32))
    held = PROMPTS > 0  # a row without history may have anything in its memory
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a)[held], b[held]), kept, before
    )


def test_a_tree_node_equals_its_path_alone(lab, prompted, causal_entry):
    model = causal_entry.model
    prompt, draft, state = prompted(causal_entry)
    ctx = Context(parents=np.tile(PARENTS, (ROWS, 1)))
    hidden = np.asarray(lab.verify(model, draft, state, ctx)[0].hidden)
    for node, path in enumerate(PATHS):
        want, _ = fresh_run(lab, model, prompt, [draft[row, path] for row in range(ROWS)])
        last = PROMPTS + len(path) - 1
        close(hidden[:, node], want[np.arange(ROWS), last], f"node {node}")


def test_other_branches_change_no_bit(lab, prompted, causal_entry):
    model = causal_entry.model
    _, draft, state = prompted(causal_entry)
    ctx = Context(parents=np.tile(PARENTS, (ROWS, 1)))
    want = np.asarray(lab.verify(model, draft, state, ctx)[0].hidden)
    for node in range(LOOKED):
        changed = draft.copy()
        changed[:, node] = (changed[:, node] + 5) % lab.VOCAB
        got = np.asarray(lab.verify(model, changed, state, ctx)[0].hidden)
        below = [node in path for path in PATHS]
        np.testing.assert_array_equal(got[:, ~np.array(below)], want[:, ~np.array(below)])
        assert (np.abs(got - want).max(axis=-1)[:, below] > 0).all()


@pytest.mark.parametrize("leaves", [[4, 5, 6, 3, 6, 5, 4], [6, 4, 3, 5, 4, 6, 5]])
def test_keeping_a_path_of_a_tree_equals_a_fresh_run(lab, prompted, causal_entry, leaves):
    model = causal_entry.model
    prompt, draft, state = prompted(causal_entry)
    ctx = Context(parents=np.tile(PARENTS, (ROWS, 1)))
    _, pending = lab.verify(model, draft, state, ctx)
    path = np.zeros((ROWS, LOOKED), np.int32)
    accepted = np.array([2, 3, 1, 2, 0, 3, 2], np.int32)
    accepted = np.minimum(accepted, [len(PATHS[leaf]) for leaf in leaves]).astype(np.int32)
    for row, leaf in enumerate(leaves):
        path[row, : len(PATHS[leaf])] = PATHS[leaf]
    kept = lab.commit(model, state, pending, path, accepted)
    rows = [draft[row, path[row, : accepted[row]]] for row in range(ROWS)]
    _, want = fresh_run(lab, model, prompt, rows)
    close(kept.length, want.length)
    close(follow(lab, model, kept), follow(lab, model, want))


def test_the_state_itself_equals_that_of_a_fresh_run(lab, prompted, causal_entry):
    model = causal_entry.model
    prompt, draft, state = prompted(causal_entry)
    _, pending = lab.verify(model, draft, state)
    path = np.tile(np.arange(LOOKED, dtype=np.int32), (ROWS, 1))
    accepted = np.array([1, 2, 3, 4, 5, 6, 7], np.int32)  # some of every row: all is written
    kept = lab.commit(model, state, pending, path, accepted)
    rows = [draft[row, :n] for row, n in enumerate(accepted)]
    close(kept, fresh_run(lab, model, prompt, rows)[1])
