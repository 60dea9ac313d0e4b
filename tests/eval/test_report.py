"""Report, summary and terminal table: self-contained, escaped, and true to the figures."""

import base64
import io
import runpy
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from genlab.errors import GenlabError
from genlab.eval import formatting
from genlab.eval.plots import draw_plots
from genlab.eval.report import ranked, render_report, terminal_table, write_report
from genlab.eval.results import MEASURED, Data
from genlab.eval.summary import compare, findings
from rich.console import Console

SYNTHETIC = runpy.run_path(str(Path(__file__).with_name("synthetic_results.py")))
build, change_row = SYNTHETIC["build"], SYNTHETIC["change_row"]

HOSTILE = "<script>alert(1)</script><img src=http://evil.example/x>&\"'[red]{{7*7}}"


class Page(HTMLParser):
    """Collects tags with attributes, text, and text per open tag."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._open, self.cells = [], "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self.cells:
            self.cells[-1] += data + " "


@pytest.fixture(scope="module")
def results():
    return build()


@pytest.fixture(scope="module")
def plots(results):
    return draw_plots(results)[:2]


@pytest.fixture(scope="module")
def html(results, plots):
    return render_report(results, plots)


def said(results, topic):
    return " ".join(f.text for f in findings(results) if f.topic == topic)


def test_the_file_needs_nothing_from_outside(html, plots):
    page = Page(html)
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags
    assert "link" not in tags
    for tag, attributes in page.tags:
        for key in ("src", "href", "action", "srcset", "style"):
            value = attributes.get(key) or ""
            assert value.startswith(("data:image/svg+xml;base64,", "#", "max-width")) or not value
        assert not any(key.startswith("on") for key in attributes), tag
    assert "url(" not in html
    assert "@import" not in html
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == len(plots)
    for image, plot in zip(images, plots, strict=True):
        assert base64.b64decode(image["src"].partition(",")[2]) == plot.svg
        assert image["alt"]


def test_table_comes_first_with_floors_by_value(html, results):
    assert html.index("<table") < html.index("<h2>What the figures say") < html.index("<img")
    order = [(line.row or line.floor).name for line in ranked(results)]
    assert order == [
        "5-gram", "xz given training text", "transformer", "hybrid", "xz", "mamba2", "mamba",
        "masked_diffusion", "unigram", "uniform tokens", "uniform bytes",
    ]  # fmt: skip
    rows = Page(html).cells[2 : 2 + len(order)]
    for cells, name in zip(rows, order, strict=True):
        assert name in cells
    diffusion = rows[order.index("masked_diffusion")]
    assert "≤ " in diffusion
    assert "upper bound ± 0.008" in diffusion
    assert "undertrained" in diffusion
    assert "exact" not in diffusion
    assert "2.448 [2.42, 2.48] exact" in " ".join(rows[order.index("transformer")].split())


def test_report_holds_samples_hashes_configs_phases_and_environment(html, results):
    text = Page(html).text
    for row in results.rows:
        assert row.config_hash in text
        assert row.sample in text
    assert '"weight_decay": 0.1' in text
    assert "Linux x86_64" in text
    assert "493.8" in text  # the sum of the phases
    assert "noise_dtype=float32" in text
    assert "count-based upper bound; 8 draws per window" in text
    assert "standard error 0.004 bits per byte" in text
    assert results.judge.detail in text
    assert "all entries: peak_memory_bytes" in text


def test_every_text_is_escaped(results):
    bad = build(
        title=HOSTILE, command=HOSTILE, notes=[HOSTILE], environment={HOSTILE: HOSTILE},
        phases_s={HOSTILE: 1.0},
        data=Data(**{**results.data.model_dump(), "name": HOSTILE, "tokenizer": HOSTILE,
                     "detail": HOSTILE, "fingerprint": HOSTILE, "documents": {HOSTILE: 1}}),
        judge={"kind": HOSTILE, "detail": HOSTILE, "bits_per_byte": None},
        floors=[{"name": HOSTILE, "bits_per_byte": 1.0, "ci95": None, "detail": HOSTILE}],
    )  # fmt: skip
    bad = change_row(
        bad, "mamba", name=HOSTILE, family=HOSTILE, paradigm=HOSTILE, config_hash=HOSTILE,
        dtype=HOSTILE, prompt=HOSTILE, sample=HOSTILE + "\x00\x1b[31m", recipe=[HOSTILE],
        undertrained=True, undertrained_reason=HOSTILE, sampler={HOSTILE: HOSTILE},
        resolved_config={HOSTILE: [HOSTILE]}, peak_memory_reason=HOSTILE, gen_ppl=None,
        reasons={"gen_ppl": HOSTILE}, phases_s={HOSTILE: 1.0},
    )  # fmt: skip
    plots = draw_plots(bad)
    html = render_report(bad, plots)
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert "script" not in tags
    assert [a["src"][:5] for tag, a in page.tags if tag == "img"] == ["data:"] * len(plots)
    assert page.text.count(HOSTILE) >= 25
    assert "49" not in page.text.replace(HOSTILE, "").partition("{{")[2]  # no template in template
    assert "\x00" not in html
    assert "\x1b" not in html
    assert "\\x00\\x1b[31m" in page.text


def test_written_whole_or_an_error(results, plots, tmp_path):
    path = write_report(results, plots, tmp_path / "report.html")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(GenlabError, match="cannot write"):
        write_report(results, plots, blocker / "report.html")


def test_summary_ranks_only_what_the_text_can_tell_apart(results):
    text = said(results, "Quality")
    assert "transformer has the lowest exact bits per byte: 2.448 [2.4" in text
    before, _, after = text.partition("Behind by more than the interval")
    assert "hybrid +0.007" in before
    assert "Not told apart" in before
    assert "mamba2 +0.089" in after
    assert "mamba +0.164" in after
    assert "masked_diffusion: 3.034" in text
    assert "is an upper bound (count-based upper bound, 8 draws per window" in text
    assert "at most 0.586 behind transformer" in text


def test_summary_without_blocks_falls_back_to_the_intervals(results):
    def strip(row):
        kept = row.likelihood.model_dump() | {"block_nats": [], "block_bytes": []}
        return row.model_validate(row.model_dump() | {"likelihood": kept})

    loose = results.model_copy(update={"rows": [strip(row) for row in results.rows]})
    paired = compare(results.rows[2], results.rows[0])
    assert paired.paired
    assert paired.separated
    found = compare(loose.rows[4], loose.rows[0])
    assert (found.paired, found.bounds, found.separated) == (False, None, False)
    assert compare(loose.rows[1], loose.rows[0]).separated
    bare = change_row(
        loose, "hybrid", bits_per_byte_ci95=None, reasons={"bits_per_byte_ci95": "short text"}
    )
    assert "cannot be judged: hybrid +0.007" in said(bare, "Quality")


def test_summary_of_a_winning_bound(results):
    row = results.rows[3]
    factor = 2.0 / row.bits_per_byte
    likelihood = row.likelihood.model_dump()
    likelihood["nats"] *= factor
    likelihood["block_nats"] = [n * factor for n in likelihood["block_nats"]]
    better = change_row(
        results, row.name, bits_per_byte=2.0, bits_per_byte_ci95=(1.98, 2.02), likelihood=likelihood
    )
    assert "Its bound already lies below transformer" in said(better, "Quality")


def test_summary_of_floors_uses_the_intervals(results):
    text = said(results, "Floors")
    assert "unigram (3.536): all 5 entries" in text
    assert "xz (2.470): no entry (level with it: transformer and hybrid)" in text
    assert "5-gram (1.816): no entry" in text
    assert "masked_diffusion: an upper bound above a floor does not show" in text


def test_summary_of_recipes_budgets_and_repetition(results):
    text = said(results, "Recipe")
    assert "Trained as published: transformer, mamba, mamba2 and hybrid." in text
    assert "shifted prediction: position i predicts token i+1" in text
    assert "masked_diffusion is undertrained: the held-out bound still falls" in text
    assert said(results, "Fairness") == ""
    uneven = change_row(results, "mamba", params=700_000, train_tokens=500_000, dtype="bfloat16")
    text = said(uneven, "Fairness")
    assert "Parameters differ by more than 2 %" in text
    assert "mamba 500k" in text
    assert "mamba bfloat16" in text
    assert "context lengths" not in text
    looped = change_row(results, "mamba", repetitive=True, gen_ppl=1.5, entropy=0.0)
    text = said(looped, "Samples")
    assert "The samples of mamba repeat themselves" in text
    assert "Lowest generative perplexity under the 5-gram judge: transformer" in text
    assert "repeats" in render_report(looped, [])


def test_summary_qualifies_low_perplexity_at_low_entropy(results):
    dull = change_row(results, "mamba", gen_ppl=20.0, entropy=3.2)
    text = said(dull, "Samples")
    assert "mamba 20.0 at entropy 3.20" in text
    assert "wrote more varied text, so part of that lead is mamba's sameness" in text
    assert "sameness" not in said(results, "Samples")


def test_summary_of_latency_does_not_rank_within_the_spread(results):
    assert "transformer 468; mamba2 412" in said(results, "Latency")
    records = [r.model_dump() for r in results.rows[0].latency]
    near = change_row(
        results, "mamba", latency=[r | {"tokens_per_s": 0.95 * r["tokens_per_s"]} for r in records],
        step_ms_p50=2.2,
    )  # fmt: skip
    text = said(near, "Latency")
    assert "transformer 468, mamba within 10 % of it (not told apart)" in text
    assert "transformer 2.12 ms (p90 2.37); mamba within that spread" in text


def test_summary_of_state_names_the_crossing(results):
    text = said(results, "State")
    assert "mamba 140 KiB" in text
    assert "more than mamba from 71 tokens on and mamba2 from 133 tokens on" in text
    transformer, mamba = results.rows[0], results.rows[1]
    assert transformer.state_bytes_at(70) <= mamba.state_bytes_at(70)
    assert transformer.state_bytes_at(71) > mamba.state_bytes_at(71)


def test_summary_says_when_the_scored_text_differs(results):
    row = results.rows[3]
    likelihood = row.likelihood.model_dump()
    likelihood |= {"bytes": likelihood["bytes"] // 2, "block_nats": [], "block_bytes": []}
    likelihood["nats"] /= 2
    value = likelihood["nats"] / (np.log(2) * likelihood["bytes"])
    part = change_row(results, row.name, likelihood=likelihood, bits_per_byte=float(value))
    assert "masked_diffusion 233,427" in said(part, "Fairness")


def test_missing_figures_are_dashes_with_reasons(results):
    gone = change_row(
        results, "mamba", **dict.fromkeys(MEASURED), curve=[], training_curve=[], latency=[],
        reasons=dict.fromkeys(MEASURED, "stopped at step 120"),
    )  # fmt: skip
    html = render_report(gone, [])
    text = Page(html).text
    assert "no sample: stopped at step 120" in text
    assert "mamba: every measurement" in text
    assert "None" not in text
    assert "nan" not in text.lower().split()
    assert "mamba has no bits per byte: stopped at step 120." in said(gone, "Quality")
    assert ranked(gone)[-1].row.name == "mamba"


def lines_of(results, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(terminal_table(results))
    return console.file.getvalue().splitlines()


def test_terminal_table_fits_and_is_complete(results):
    lines = lines_of(results)
    assert max(len(line.rstrip()) for line in lines) <= 100
    text = "\n".join(lines)
    assert "…" not in text
    for name in ("transformer", "masked_diffusion *", "xz given training text", "uniform bytes"):
        assert name in text
    row = next(line for line in lines if "masked_diffusion" in line).split()
    assert row[2:] == [
        "<=3.034", "2.99-3.08", "628k", "467", "14.6", "274", "32", "86.2", "3.99", "0B",
    ]  # fmt: skip
    assert "* undertrained" in text


def test_terminal_table_with_long_and_hostile_names(results):
    odd = change_row(results, "mamba", name="[bold]x[/bold]\x1b[2J" + "n" * 60, gen_ppl=123456.0)
    lines = lines_of(odd)
    assert max(len(line.rstrip()) for line in lines) <= 100
    text = "\n".join(lines)
    assert "[bold]x[/bold]" in text
    assert "\x1b" not in text


def test_terminal_table_of_missing_figures(results):
    gone = change_row(
        results, "mamba", **dict.fromkeys(MEASURED), curve=[], latency=[],
        reasons=dict.fromkeys(MEASURED, "stopped"),
    )  # fmt: skip
    row = next(line for line in lines_of(gone) if line.split()[:1] == ["mamba"])
    dash = formatting.MISSING
    assert row.split() == ["mamba", dash, "618k", *[dash] * 7]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, formatting.MISSING), (0, "0"), (0.00123456, "0.00123"), (0.5, "0.5"),
        (12.345, "12.3"),
        (999.6, "1.00k"), (1234, "1.23k"), (621_568, "622k"), (999_999, "1.00M"),
        (3.36e12, "3.36T"), (-1234, "-1.23k"), (1e-9, "1.0e-09"),
    ],
)  # fmt: skip
def test_short_figures(value, text):
    assert formatting.short(value) == text


def test_other_figures():
    assert formatting.byte_size(0) == "0 B"
    assert formatting.byte_size(1536) == "1.5 KiB"
    assert formatting.byte_size(143_360) == "140 KiB"
    assert formatting.seconds(59.94) == "59.9 s"
    assert formatting.seconds(119.99) == "120.0 s"
    assert formatting.seconds(125) == "2 min 05 s"
    assert formatting.seconds(3725) == "1 h 02 min"
    assert formatting.signed(-0.5) == "\u22120.500"
    assert formatting.listed(["a"]) == "a"
    assert formatting.listed(["a", "b", "c"]) == "a, b and c"
    assert formatting.significant(2048) == "2050"
    assert formatting.trimmed(32.0) == "32"
    assert formatting.trimmed(100.0) == "100"
    assert formatting.printable("a\tb\n\x07\x9b") == "a\tb\n\\x07\\x9b"
