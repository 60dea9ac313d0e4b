"""The benchmark of decoding with a mixture of experts: what it compares is what it says."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.eval.benchmarks import moe_decode
from genlab.eval.benchmarks.moe_decode import Sizes, build_stack, configs_of, decode, measure

TINY = Sizes(width=8, expert_width=4, experts=3, top_k=1, layers=2, tokens=2)
FLAGS = ["--width=8", "--expert-width=4", "--experts=3", "--top-k=1", "--layers=2", "--tokens=2"]
EXPERT, ROUTER = 3 * 8 * 4, 8 * 3


def test_rows_are_of_equal_total_and_active_size(capsys):
    moe_decode.main([*FLAGS, "--repeats=2", "--json"])
    rows = {row.pop("name"): row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["params"] for name, row in rows.items()} == {
        "moe": 2 * (3 * EXPERT + ROUTER),
        "dense_total": 2 * 3 * EXPERT,
        "dense_active": 2 * EXPERT,
    }
    assert rows["moe"]["read_bytes"] == 4 * 2 * (EXPERT + ROUTER)
    assert rows["dense_total"]["read_bytes"] == 4 * 2 * 3 * EXPERT
    assert all(row["ms_per_token"] > 0 and row["compile_s"] > 0 for row in rows.values())


def test_times_are_medians_per_token_and_compiling_is_apart():
    # Each reading is one second later: compiling takes 1 s, each call 1 s for its 2 tokens.
    ticks = itertools.count()
    rows = measure(TINY, repeats=2, clock=lambda: float(next(ticks)))
    assert [row.ms_per_token for row in rows] == [500.0] * 3
    assert [row.compile_s for row in rows] == [1.0] * 3
    assert next(ticks) == 2 * 3 + 2 * 2 * 3
    table = moe_decode.report(rows)
    assert table[-2].startswith("moe / dense_total: 1.00 of the time, 0.42 of the bytes")


def test_tokens_choose_their_own_experts():
    graph, params, _ = build_stack(configs_of(TINY)["moe"], TINY, "float32")
    x = jnp.ones((1, 1, TINY.width))

    def finite(expert, keys):
        """For which keys the tokens do without this expert of the first layer."""
        first = {
            path: jnp.full_like(leaf, jnp.nan) if path == (f"w_down_{expert}",) else leaf
            for path, leaf in params[0].items()
        }
        outs = (decode(graph, [first, params[1]], x, TINY.tokens, key) for key in keys)
        return [bool(np.isfinite(out).all()) for out in outs]

    keys = [jax.random.key(seed) for seed in range(8)]
    for expert in range(3):
        assert 0 < sum(finite(expert, keys)) < 8


@pytest.mark.parametrize(
    ("change", "message"),
    [({"top_k": 4}, "top_k=4: want 1 to experts=3"), ({"layers": 0}, "layers=0: want at least 1")],
)
def test_sizes_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        measure(TINY._replace(**change))


def test_repeats_are_checked_and_the_command_says_so_in_a_line(capsys):
    with pytest.raises(SystemExit) as ended:
        moe_decode.main([*FLAGS, "--repeats=0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: repeats=0: want at least 1\n")
