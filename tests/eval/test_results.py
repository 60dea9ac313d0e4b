"""The record: strict keys, reasons for nulls, atomic and finite files, faithful reading."""

import csv
import json
import math
import os
import runpy
from pathlib import Path

import pytest
from genlab.errors import DataError, GenlabError
from genlab.eval.results import MEASURED, Floor, Results, Row
from genlab.eval.results_io import csv_columns, load_results, write_results
from pydantic import ValidationError

SYNTHETIC = runpy.run_path(str(Path(__file__).with_name("synthetic_results.py")))
build, change_row = SYNTHETIC["build"], SYNTHETIC["change_row"]

INTERFACE = (
    "name config_hash bits_per_byte bits_per_byte_ci95 is_bound params params_active train_tokens "
    "train_flops train_tokens_per_s nfe token_evals ttft_ms step_ms_p50 step_ms_p90 tokens_per_s "
    "state_bytes_fixed state_bytes_per_token state_windows gen_ppl entropy sample"
).split()


@pytest.fixture(scope="module")
def results():
    return build()


def test_written_json_has_the_promised_keys_and_reads_back(results, tmp_path):
    json_path, csv_path = write_results(results, tmp_path / "new" / "folder")
    assert (json_path.name, csv_path.name) == ("results.json", "results.csv")
    raw = json.loads(json_path.read_text(encoding="utf-8"))
    assert {"environment", "phases_s", "rows", "floors", "judge", "data", "notes"} <= set(raw)
    for row in raw["rows"]:
        assert set(INTERFACE) <= set(row)
    assert load_results(json_path) == results
    assert load_results(json_path.parent) == results
    assert sorted(p.name for p in json_path.parent.iterdir()) == ["results.csv", "results.json"]


def test_csv_is_flat_with_one_row_per_entry(results, tmp_path):
    nulled = change_row(results, "mamba", gen_ppl=None, reasons={"gen_ppl": "no judge"})
    _, path = write_results(nulled, tmp_path)
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == [row.name for row in results.rows]
    assert list(rows[0]) == csv_columns()
    assert len(set(csv_columns())) == len(csv_columns())
    first = results.rows[0]
    assert float(rows[0]["bits_per_byte"]) == first.bits_per_byte
    assert float(rows[0]["bits_per_byte_ci95_high"]) == first.bits_per_byte_ci95[1]
    assert float(rows[0]["distinct_2"]) == first.distinct_n["2"]
    assert rows[1]["gen_ppl"] == ""
    assert "shifted prediction" in rows[3]["recipe"]
    assert not any("{" in value or "[" in value for row in rows for value in row.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_by_row_and_key_and_nothing_is_written(
    results, tmp_path, value
):
    bad = change_row(results, "mamba2", gen_ppl=value)
    with pytest.raises(GenlabError, match=r"rows\[mamba2\]\.gen_ppl = (nan|-?inf)"):
        write_results(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_non_finite_values_are_found_at_any_depth(results, tmp_path):
    row = results.rows[0]
    curve = [point.model_dump() for point in row.training_curve]
    curve[3]["loss"] = math.nan
    bad = change_row(results, row.name, training_curve=curve)
    with pytest.raises(GenlabError, match=r"rows\[transformer\]\.training_curve\[3\]\.loss = nan"):
        write_results(bad, tmp_path)
    floor = Floor(name="xz", bits_per_byte=math.inf, ci95=None, detail="")
    with pytest.raises(GenlabError, match=r"floors\[xz\]\.bits_per_byte = inf"):
        write_results(results.model_copy(update={"floors": [floor]}), tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_litter(results, tmp_path, monkeypatch):
    write_results(results, tmp_path)
    before = (tmp_path / "results.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GenlabError, match=r"cannot write .*results.json: No space left on device"):
        write_results(results.model_copy(update={"title": "other"}), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.csv", "results.json"]


@pytest.mark.parametrize("field", MEASURED)
def test_every_null_needs_a_reason(results, field):
    row = results.rows[0].model_dump()
    with pytest.raises(ValidationError, match=f"{field} is null without a reason"):
        Row(**{**row, field: None})
    with pytest.raises(ValidationError, match=f"{field} is null without a reason"):
        Row(**{**row, field: None, "reasons": {field: "  "}})
    with pytest.raises(ValidationError, match="a value and a reason for none"):
        Row(**{**row, "reasons": {field: "not measured"}})
    assert getattr(Row(**{**row, field: None, "reasons": {field: "not run"}}), field) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reasons": {"params": "?"}}, "reasons for what cannot be null"),
        ({"peak_memory_reason": None}, "peak_memory_bytes is null without a reason"),
        ({"peak_memory_bytes": 0}, "0 is no measurement"),
        ({"undertrained": True}, "undertrained without undertrained_reason"),
        ({"params_active": 10**9}, "params_active"),
        ({"bits_per_byte_ci95": (2.6, 2.4)}, r"not \[low, high\]"),
        ({"bits_per_byte": 2.0}, r"is not nats/\(ln 2 \* bytes\)"),
        ({"bits_per_byte": "2.4"}, "valid number"),
        ({"perplexity": 1.0}, "Extra inputs"),
    ],
)
def test_inconsistent_rows_are_refused(results, changes, message):
    with pytest.raises(ValidationError, match=message):
        Row(**{**results.rows[0].model_dump(), **changes})


def test_blocks_must_cover_the_scored_bytes(results):
    likelihood = results.rows[0].likelihood.model_dump()
    likelihood["block_bytes"][0] += 1
    with pytest.raises(ValidationError, match="block_bytes sum to"):
        Row(**{**results.rows[0].model_dump(), "likelihood": likelihood})
    likelihood["block_bytes"].pop()
    with pytest.raises(ValidationError, match="block_nats has"):
        Row(**{**results.rows[0].model_dump(), "likelihood": likelihood})


def test_names_are_unique(results):
    with pytest.raises(ValidationError, match="row names must be unique; twice: mamba"):
        Results(**{**dict(results), "rows": [*results.rows, results.rows[1]]})


def test_state_bytes_at(results):
    transformer, mamba = results.rows[0], results.rows[1]
    assert transformer.state_bytes_at(100) == 204_800
    assert mamba.state_bytes_at(10) == mamba.state_bytes_at(10_000) == 143_360
    row = Row(
        **{
            **transformer.model_dump(),
            "state_bytes_fixed": None,
            "reasons": {"state_bytes_fixed": "no decoding state"},
        }
    )
    assert row.state_bytes_at(10) is None


def test_odd_text_survives(results, tmp_path):
    odd = "a\x00b\x1b[31m \u2028 é 猫 \U0001f600 </script>"
    path, _ = write_results(change_row(results, "mamba", sample=odd), tmp_path)
    assert load_results(path).rows[1].sample == odd
    with pytest.raises(GenlabError, match=r"rows\[mamba\]\.sample holds half of a surrogate pair"):
        write_results(change_row(results, "mamba", sample="a\ud800"), tmp_path)


def _edited(path, edit):
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw: raw["rows"][2].pop("entropy"), "rows.2.entropy: Field required"),
        (lambda raw: raw["rows"][0].update(speed=1), "rows.0.speed: Extra inputs"),
        (lambda raw: raw["rows"][0].update(params="many"), "rows.0.params"),
        (lambda raw: raw["rows"][0].update(gen_ppl=math.nan), "holds NaN"),
        (lambda raw: raw.update(schema_version=99), "schema_version 99 cannot be read"),
    ],
)
def test_loader_names_the_file_and_the_key(results, tmp_path, edit, message):
    path, _ = write_results(results, tmp_path)
    _edited(path, edit)
    with pytest.raises(DataError, match=message) as caught:
        load_results(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loader_refuses_missing_truncated_and_foreign_files(results, tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        load_results(tmp_path)
    path, _ = write_results(results, tmp_path)
    path.write_text(path.read_text()[:1000])
    with pytest.raises(DataError, match="not valid JSON"):
        load_results(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not valid JSON"):
        load_results(path)
    path.write_text("[1, 2]")
    with pytest.raises(DataError, match="top level"):
        load_results(path)
