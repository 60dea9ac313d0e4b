"""Plots: every file is made, entries keep their look, nothing unmeasured is drawn."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from genlab.eval import plot_figures, plots
from genlab.eval.plot_style import COLOURS, MARKERS, looks
from genlab.eval.results import MEASURED, Row

SYNTHETIC = runpy.run_path(str(Path(__file__).with_name("synthetic_results.py")))
build, change_row = SYNTHETIC["build"], SYNTHETIC["change_row"]


@pytest.fixture(scope="module")
def results():
    return build()


@pytest.fixture(scope="module")
def without_mamba(results):
    """The mamba entry stopped before anything was measured."""
    reason = {field: "stopped at step 120" for field in MEASURED}
    nulls = dict.fromkeys(MEASURED)
    return change_row(
        results, "mamba", **nulls, curve=[], training_curve=[], latency=[], reasons=reason
    )


def labelled_lines(figure):
    """Returns {label: [(x, y) of each line]} over the figure's axes."""
    found = {}
    for ax in figure.axes:
        for line in ax.get_lines():
            if not line.get_label().startswith("_"):
                found.setdefault(line.get_label(), []).append(line.get_xydata())
    return found


def all_text(figure):
    texts = [t.get_text() for ax in figure.axes for t in (*ax.texts, *ax.get_yticklabels())]
    legends = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    bottom = figure.get_supxlabel()
    return " ".join([*texts, *legends, bottom]).replace("\n", " ")


@pytest.fixture(scope="module")
def drawn(results):
    return plots.draw_plots(results)


def test_every_plot_is_png_and_svg_with_a_caption(drawn, tmp_path):
    files = plots.write_plots(drawn, tmp_path / "plots")
    assert list(files) == list(plots.PLOTS)
    for plot in drawn:
        png, svg = files[plot.name].png.read_bytes(), files[plot.name].svg.read_text()
        assert png.startswith(b"\x89PNG")
        assert int.from_bytes(png[16:20]) > 1200  # wide enough at 144 dpi
        assert svg.rstrip().endswith("</svg>")
        assert 'href="http' not in svg
        assert "url(http" not in svg
        assert len(plot.caption) > 60
    assert len(list((tmp_path / "plots").iterdir())) == 2 * len(files)


def test_equal_records_give_equal_files(results, drawn):
    again = plots.draw_plots(results)
    assert [plot.svg for plot in again] == [plot.svg for plot in drawn]
    assert [plot.png for plot in again] == [plot.png for plot in drawn]


def test_looks_are_unique_and_bounds_are_hollow_and_named(results):
    row = results.rows[0].model_dump()
    many = results.model_copy(
        update={"rows": [Row(**{**row, "name": f"e{i}"}) for i in range(2 * len(COLOURS))]}
    )
    pairs = [(look.colour, look.marker) for look in looks(many).values()]
    assert len(set(pairs)) == len(pairs)
    assert len(set(pairs[:8])) == len({p[0] for p in pairs[:8]}) == len(MARKERS)
    look = looks(results)["masked_diffusion"]
    assert look.line()["markerfacecolor"] == "white"
    assert look.label == "masked_diffusion (bound)"
    assert looks(results)["transformer"].line()["markerfacecolor"] == COLOURS[0]


def test_one_entry_has_one_colour_and_marker_in_every_plot(results):
    seen = {}
    for spec in plots.PLOTS.values():
        for ax in spec.draw(results).axes:
            for line in ax.get_lines():
                name = str(line.get_label()).removesuffix(" (bound)")
                if name in looks(results):
                    seen.setdefault(name, set()).add(line.get_color())
    assert {name: {look.colour} for name, look in looks(results).items()} == seen


def test_frontier_keeps_what_nothing_beats_in_both():
    points = [(2.0, 3.0), (1.0, 5.0), (3.0, 3.0), (2.5, 2.0), (1.0, 4.0), (9.0, 9.0)]
    assert plot_figures.frontier(points) == [(1.0, 4.0), (2.0, 3.0), (2.5, 2.0)]
    assert plot_figures.frontier([]) == []


def test_bits_per_byte_against_latency_shows_the_rows_own_figures(results):
    figure = plot_figures.quality_latency(results)
    lines = labelled_lines(figure)
    for row in results.rows:
        label = looks(results)[row.name].label
        np.testing.assert_allclose(lines[label][0], [[1000 / row.tokens_per_s, row.bits_per_byte]])
    assert "masked_diffusion (bound)" in all_text(figure)


def test_quality_against_steps_is_per_new_token(results):
    lines = labelled_lines(plot_figures.quality_steps(results))
    points = results.rows[3].curve
    expected = sorted((p.nfe / p.new_tokens, p.gen_ppl) for p in points)
    np.testing.assert_allclose(lines["masked_diffusion"][0], expected)
    np.testing.assert_allclose(lines["mamba"][0], [[1, results.rows[1].gen_ppl]])


def test_state_against_context_is_fixed_plus_per_token(results):
    figure = plot_figures.state_context(results)
    lines = labelled_lines(figure)
    for x, y in lines["hybrid"][0]:
        assert y == 107_520 + 512 * x
    assert len(set(lines["mamba"][0][:, 1])) == 1
    assert "masked_diffusion" not in lines
    assert "masked_diffusion: keeps no state" in all_text(figure)


def test_latency_uses_batch_one(results):
    lines = labelled_lines(plot_figures.latency_context(results))
    first = [r for r in results.rows[0].latency if r.batch == 1]
    np.testing.assert_allclose(
        lines["transformer"][0], [(r.prompt_length, r.ttft_ms) for r in first]
    )
    np.testing.assert_allclose(
        lines["transformer"][1], [(r.prompt_length, r.step_ms_p50) for r in first]
    )


def test_training_curves_over_tokens_flops_and_seconds(results):
    points = [p for p in results.rows[2].training_curve if p.bits_per_byte_validation is not None]
    lines = labelled_lines(plot_figures.training_validation(results))["mamba2"]
    for line, axis in zip(lines, ("tokens", "flops", "wall_s"), strict=True):
        np.testing.assert_allclose(
            line, [(getattr(p, axis), p.bits_per_byte_validation) for p in points]
        )
    assert len(points) == 8  # null validations are skipped, not drawn as zero


def test_running_mean_keeps_a_constant_and_the_ends():
    assert plot_figures._smooth([2.0] * 100) == pytest.approx([2.0] * 100)
    assert plot_figures._smooth([1.0, 5.0]) == pytest.approx([1.0, 5.0])
    smooth = plot_figures._smooth(list(range(100)))
    assert smooth[50] == pytest.approx(50)


def test_odd_names_stay_text(results):
    names = ["_hidden", "$x_1$ costs $5", "line\nbreak\x1b", "<b>&amp;", "$\\nonsense{$"]
    odd = results
    for row, name in zip(results.rows, names, strict=True):
        odd = change_row(odd, row.name, name=name)
    drawn = plots.draw_plots(odd)  # neither mathematics nor markup, and no control characters
    assert len(drawn) == len(plots.PLOTS)
    lines = labelled_lines(plot_figures.quality_steps(odd))
    for name in names:
        shown = looks(odd)[name].name
        assert not shown.startswith("_")
        assert shown.isprintable()
        assert shown in lines


@pytest.mark.parametrize("name", list(plots.PLOTS))
def test_what_is_missing_is_named_and_not_drawn(without_mamba, name):
    figure = plots.PLOTS[name].draw(without_mamba)
    labels = {label.removesuffix(" (bound)") for label in labelled_lines(figure)}
    assert "mamba" not in labels
    assert "mamba: " in all_text(figure).partition("not shown:")[2]
    if name in ("overview", "quality_steps", "quality_latency", "state_context"):
        assert "mamba: stopped at step 120" in all_text(figure)


def test_empty_comparison_says_no_data(without_mamba):
    only = without_mamba.model_copy(update={"rows": [without_mamba.rows[1]], "floors": []})
    for plot, spec in plots.PLOTS.items():
        figure = spec.draw(only)
        assert "no data" in all_text(figure), plot
        assert not labelled_lines(figure)
    assert all(plot.png for plot in plots.draw_plots(only))


def test_far_floors_are_named_instead_of_squeezing_the_scale(results):
    figure = plot_figures.overview(results)
    assert "uniform bytes 8.000 (beyond the scale)" in all_text(figure)
    assert figure.axes[0].get_xlim()[1] < 4.5
    assert "≤ 3.034" in all_text(figure)


def test_quality_curve_without_a_figure_is_skipped(results):
    points = [p.model_dump() for p in results.rows[3].curve]
    points[2]["gen_ppl"] = None
    changed = change_row(results, "masked_diffusion", curve=points)
    lines = labelled_lines(plot_figures.quality_steps(changed))["masked_diffusion"]
    assert [len(line) for line in lines] == [5, 6]
