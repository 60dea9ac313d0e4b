"""The comparison as a whole, on a corpus of two small files."""

import json
from pathlib import Path

import pytest
from genlab.errors import ConfigError
from genlab.eval import compare_replay as replay_module
from genlab.eval import entry as entry_module
from genlab.eval.compare import compare
from genlab.eval.compare_config import load_comparison
from genlab.eval.compare_replay import Recorded, comparison_replay
from genlab.eval.entry import View
from genlab.eval.report import render_report
from genlab.eval.results_io import load_results

LAYER = "{mixer: {name: attention, num_heads: 2}, mlp: {name: swiglu, width: 32}}"
CONFIG = """
title: two tiny entries
out: OUT
defaults:
  model: {width: 16, pattern: [a], layers: {a: LAYER}, max_len: 64}
  data:
    source: {name: files, paths: [FOLDER/*.txt], documents: paragraph, holdout_fraction: 0.3,
             validation_fraction: 0.1}
    tokenizer: {name: bytes}
    context_length: 32
    batch_size: 4
  training:
    tokens: 1280
    optimizer: {name: adamw, learning_rate: 3.0e-3}
    tensorboard: false
    evaluate_every: 5
entries:
  causal:
    run: {paradigm: {name: autoregressive}}
    family: transformer
  diffusion:
    run: {paradigm: {name: masked_diffusion, draws: 2}}
    family: masked_diffusion
    recipe: [none]
likelihood: {batch_size: 8}
samples: {count: 2, prompt_length: 8, new_tokens: 8, curve_steps: [2, 8], curve_lengths: [4, 8],
          judge_order: 3}
latency: {batches: [1], prompt_lengths: [8], new_tokens: 8, repeats: 3}
"""


def silent(name, number, total):
    return View(lambda *_: None, lambda _: None, NOTES.append)


NOTES: list[str] = []


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("one", "two"):
        paragraphs = [f"{name} {i}: the quick brown fox number {i * i} jumps." for i in range(60)]
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs))
    text = CONFIG.replace("LAYER", LAYER).replace("FOLDER", str(folder))
    path = folder / "compare.yaml"
    path.write_text(text.replace("OUT", str(folder / "out")))
    return path


@pytest.fixture(scope="module")
def finished(config_file, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GENLAB_CACHE", str(cache))
        results, folder = compare(load_comparison(config_file), view_of=silent)
        yield results, folder


def test_every_file_is_written_and_the_json_is_the_interface(finished):
    results, folder = finished
    for name in ("results.json", "results.csv", "report.html", "plots"):
        assert (folder / name).exists()
    assert load_results(folder) == results
    raw = json.loads((folder / "results.json").read_text())
    assert {"environment", "phases_s", "rows"} <= raw.keys()
    assert [row["name"] for row in raw["rows"]] == ["causal", "diffusion"]


def test_rows_say_bound_or_exact_and_cover_the_same_bytes(finished):
    causal, diffusion = finished[0].rows
    assert not causal.is_bound and diffusion.is_bound
    assert causal.likelihood.bytes == diffusion.likelihood.bytes
    assert causal.likelihood.bytes == finished[0].data.test_bytes
    assert causal.likelihood.block_bytes == diffusion.likelihood.block_bytes
    assert diffusion.likelihood.standard_error_bits_per_byte > 0
    assert diffusion.likelihood.draws == 2


def test_calls_and_tokens_are_counted(finished):
    causal, diffusion = finished[0].rows
    assert causal.nfe == 8 and causal.token_evals == 8 + 7
    assert diffusion.nfe == 8 and diffusion.token_evals == 8 * 16
    assert [point.nfe for point in diffusion.curve] == [2, 8]
    assert [point.new_tokens for point in causal.curve] == [4, 8]
    assert diffusion.state_bytes_per_token == 0 and causal.state_bytes_per_token > 0


def test_training_is_counted_and_equal(finished):
    causal, diffusion = finished[0].rows
    assert causal.train_tokens == diffusion.train_tokens == 1280
    assert causal.params == diffusion.params
    assert causal.train_flops > 6 * 1280 * 0.5 * causal.params


def test_the_report_replays_all_entries_on_the_samples_prompt(finished):
    results, folder = finished
    recorded = Recorded.model_validate_json((folder / results.replay).read_bytes())
    replay = recorded.replay
    assert [entry.name for entry in replay.entries] == ["causal", "diffusion"]
    assert replay.prompt == results.rows[0].prompt
    causal, diffusion = (entry.frames for entry in replay.entries)
    assert causal[-1].tokens <= 8 and causal[-1].nfe == causal[-1].tokens
    assert [frame.nfe for frame in diffusion] == [*range(len(diffusion))]  # an empty canvas first
    page = (folder / "report.html").read_text()
    assert page.count('id="replay-data"') == 1 and page.count("<h2>Replay") == 1
    assert "Could not be replayed" not in page


def test_finished_entries_are_reused_by_hash(finished, config_file, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(entry_module, "train", refuse)
    monkeypatch.setattr(replay_module, "load_run", refuse)
    again, _ = compare(load_comparison(config_file), view_of=silent)
    assert again.rows == finished[0].rows
    assert any("reused" in note for note in NOTES)
    changed = load_comparison(config_file, ["defaults.training.tokens=1408"])
    with pytest.raises(AssertionError, match="trained again"):
        compare(changed, only=["causal"], view_of=silent)
    assert any("training it anew" in note for note in NOTES)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("entries.causal.run.training.tokens=99", "token budgets"),
        ("entries.causal.run.training.tokns=99", "did you mean 'tokens'"),
        ("entries.causal.runn=1", "did you mean 'run'"),
        ("samples.new_tokens=60", "model.max_len=64"),
        ("samples.temprature=1", "did you mean 'temperature'"),
        ("latency.repeats=0", "latency.repeats"),
        ("entries.causal.run.data.seed=3", "differ in data"),
        ("samples.curve_steps=[4,2]", "increasing"),
    ],
)
def test_wrong_configurations_are_named_before_anything_runs(config_file, override, said):
    with pytest.raises(ConfigError) as error:
        load_comparison(config_file, [override])
    assert said in str(error.value)


def test_an_entry_without_its_run_is_left_out_of_the_replay(finished, config_file, tmp_path):
    comparison, (results, folder) = load_comparison(config_file), finished
    kept = tmp_path / "entries" / "diffusion"
    kept.mkdir(parents=True)
    (kept / "run").symlink_to(folder / "entries" / "diffusion" / "run")
    NOTES.clear()
    view = silent("", 0, 0)
    replay = comparison_replay(comparison, results.rows, tmp_path, view)
    assert [entry.name for entry in replay.entries] == ["diffusion"]
    assert [note.partition(": ")[0] for note in NOTES] == ["causal"] and "no such run" in NOTES[0]
    assert "Could not be replayed: causal." in render_report(results, [], replay)
    (kept / "run").unlink()
    assert comparison_replay(comparison, results.rows, tmp_path, view) is None
    assert "<script" not in render_report(results, [])


def test_entries_of_unequal_size_are_refused(finished, config_file):
    unequal = load_comparison(config_file, ["entries.causal.run.model.width=32"])
    with pytest.raises(ConfigError, match="params_tolerance"):
        compare(unequal, view_of=silent)


def test_an_unknown_entry_is_named(config_file):
    with pytest.raises(ConfigError, match="did you mean 'causal'"):
        compare(load_comparison(config_file), only=["casual"], view_of=silent)


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file"):
        load_comparison(tmp_path / "none.yaml")
