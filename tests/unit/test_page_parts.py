"""Tables of a page, each from rows and heads written by hand."""

import json
import math
from base64 import b64decode
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from schedlab.experiments.report import page as page_module
from schedlab.experiments.report import search_page
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.experiments.statistics import with_interval
from schedlab.sim.errors import SchedlabError
from schedlab.sim.text import number


def row(num_replications=1, policy="fcfs", half_width=None, **metrics):
    shown = {name: Estimate(float(value), half_width) for name, value in metrics.items()}
    return Row(policy, policy, {"workload.request_rate": "2"}, num_replications, shown)


@pytest.mark.parametrize(
    ("preempted", "rejected", "absent", "columns"),
    [
        ((0, 0), (0, 0), " No request was preempted or rejected.", []),
        ((0, 3), (0, 0), " No request was rejected.", ["num_preemptions"]),
        ((0, 0), (2, 0), " No request was preempted.", ["rejected"]),
        ((1, 0), (0, 1), "", ["num_preemptions", "rejected"]),
    ],
)
def test_results_table_leaves_out_counts_that_no_setting_has(preempted, rejected, absent, columns):
    rows = [
        row(num_with_slo=0, num_preemptions=p, rejected=r)
        for p, r in zip(preempted, rejected, strict=True)
    ]
    table = page_module._results_table(SimpleNamespace(rows=rows))
    ends = [page_module.metric_named(name).axis for name in columns]
    first = page_module.metric_named("p99_e2el_ms").axis
    assert list(table.header)[:2] == ["policy", "request rate"]
    assert list(table.header)[list(table.header).index(first) + 1 :] == ends
    assert table.note.endswith(f"gaps between the tokens of all requests.{absent}")


@pytest.mark.parametrize(
    ("counts", "explains"), [((1, 1), False), ((1, 2), True), ((3, 1), True), ((2, 2), True)]
)
def test_results_table_explains_intervals_once_a_setting_has_replications(counts, explains):
    rows = [row(n, num_with_slo=0, num_preemptions=0, rejected=0) for n in counts]
    table = page_module._results_table(SimpleNamespace(rows=rows))
    assert table.note.startswith("±") is explains


@pytest.mark.parametrize("num_with_slo", [(0, 0), (0, 4), (4, 0)])
def test_results_table_has_attainment_where_any_setting_has_targets(num_with_slo):
    rows = [row(num_with_slo=n, num_preemptions=0, rejected=0) for n in num_with_slo]
    header = page_module._results_table(SimpleNamespace(rows=rows)).header
    assert (page_module.metric_named("slo_attainment").axis in header) is any(num_with_slo)


@pytest.mark.parametrize(
    ("described", "outside", "told"),
    [
        ([{"name": "table", "validity": {}}], (1, 3), "4 of 40 steps (10.0%)"),
        ([{"name": "roofline"}, {"name": "table", "validity": {}}], (0, 1), "1 of 40 steps (2.5%)"),
        ([{"name": "roofline"}], (1, 3), ""),
        ([{"name": "table", "validity": {}}], (0, 0), "0 of 40 steps (0.0%)"),
    ],
)
def test_page_tells_of_all_runs_how_many_steps_lie_outside_what_was_measured(
    described, outside, told
):
    heads = [
        {"provenance": {"num_steps": n, "extrapolated_steps": more}}
        for n, more in zip((10, 30), outside, strict=True)
    ]
    found = page_module._cost_models(SimpleNamespace(cost_models=described), heads)
    assert found["outside"] == told


def test_page_of_measured_cost_models_and_no_steps_tells_no_share():
    heads = [{"provenance": {"num_steps": 0}}]
    results = SimpleNamespace(cost_models=[{"name": "table", "validity": {}}])
    assert page_module._cost_models(results, heads)["outside"] == ""
    assert page_module._cost_models(SimpleNamespace(cost_models=[]), heads) is None


def test_image_on_a_page_has_its_text_as_shapes_and_neither_date_nor_program(monkeypatch):
    figure = Figure(figsize=(2.5, 1))
    figure.text(0.5, 0.5, "told")
    drawn = page_module._rendered(figure, "svg")
    assert b"<text" not in drawn
    assert b"dc:date" not in drawn
    painted = page_module._rendered(figure, "png")
    assert painted.startswith(b"\x89PNG")
    assert b"Software" not in painted
    for largest, kind, data in (
        (len(drawn), "svg+xml", drawn),
        (len(drawn) - 1, "png", painted),
    ):
        monkeypatch.setattr(page_module, "_LARGEST_SVG_BYTES", largest)
        begin, _, base64 = page_module._image(figure)["source"].partition(",")
        assert begin == f"data:image/{kind};base64"
        assert b64decode(base64) == data
    drawing = SimpleNamespace(name="first_second", caption="What it is.", draw=lambda: figure)
    assert page_module.images([drawing]) == [
        {"caption": "What it is.", "alt": "first second", **page_module._image(figure)}
    ]
    assert page_module._image(figure)["width"] == 240


@pytest.mark.parametrize("output", [None, "there.html"])
def test_page_of_a_search_is_of_its_first_file_and_shows_all_that_it_says(
    monkeypatch, tmp_path, output
):
    asked = []
    monkeypatch.setattr(search_page, "render", lambda **given: asked.append(given) or "page")
    monkeypatch.setattr(search_page, "images", lambda drawings: [drawings])
    monkeypatch.setattr(search_page, "search_drawings", lambda *given: given)
    assert not search_page.is_search(tmp_path)
    with pytest.raises(SchedlabError, match=r" is of no search$"):
        search_page.write_search_page(tmp_path)
    table = {"header": ["a", "b", "c"], "rows": [["x", "1", "2"]], "num_text": 2}
    told = {"name": "sought", "num_runs": 1234, "lines": ["one", "two"], "table": table}
    expected = {
        "p99_ttft_ms": {"mean": 250.0, "ci95": 12.5},
        "slo_attainment": {"mean": 0.75, "ci95": "nan"},
    }
    more = {"serve": "vllm serve x", "expected": expected, "at_rate": 1.25}
    (tmp_path / "recommend.json").write_text(json.dumps(told | more))
    into = None if output is None else tmp_path / output
    assert search_page.is_search(tmp_path)
    written = search_page.write_search_page(tmp_path, into)
    assert written == (into or tmp_path / "report.html")
    assert written.read_text() == "page"
    shown = {
        "name": "sought",
        "notes": ["one", "two"],
        "results": page_module.PageTable(["a", "b", "c"], [["x", "1", "2"]], 2),
        "figures": [(tmp_path,)],
    }
    ttft, attainment = (page_module.metric_named(name) for name in expected)
    rows = [
        (ttft.axis, with_interval(250.0, 12.5, ttft.scale)),
        (attainment.axis, with_interval(0.75, math.nan, attainment.scale)),
    ]
    assert asked[0] == shown | {
        "lead": "recommend: 1,234 runs",
        "command": "vllm serve x",
        "expected": page_module.PageTable(
            ("metric", "mean"), rows, note=f"At {number(1.25)} requests/s."
        ),
    }
    # What find wrote comes first, and says neither how to serve nor what to expect.
    (tmp_path / "find.json").write_text(json.dumps(told))
    search_page.write_search_page(tmp_path, into)
    assert asked[1] == shown | {"lead": "find: 1,234 runs", "command": "", "expected": None}
    (tmp_path / "find.json").write_text("{}")
    with pytest.raises(SchedlabError, match=r"find\.json: an earlier version wrote it"):
        search_page.write_search_page(tmp_path, into)


def test_fleet_on_a_page_has_its_table_and_figures_and_is_absent_where_there_is_none(monkeypatch):
    table = (("engine", "a"), [("0", "1")], 1, "a note")
    monkeypatch.setattr(page_module, "images", lambda found: [f"image of {one}" for one in found])
    monkeypatch.setattr(page_module, "fleet_table", lambda results: table if results else None)
    assert page_module._fleet(["some"], ["one", "two"]) == {
        "table": page_module.PageTable(*table), "figures": ["image of one", "image of two"],
    }  # fmt: skip
    assert page_module._fleet([], ["one"]) is None


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ({"published_error": "2 % on H100"}, "published error 2 % on H100."),
        ({"published_error": {"mape": 0.02}}, 'published error {"mape": 0.02}.'),
        ({"published_error": 0.0, "calibration": "UNCALIBRATED"}, "published error 0.0."),
        ({"calibration": "CALIBRATED"}, "the cost model states none."),
        ({}, "the cost model states none."),
        (
            {"calibration": "UNCALIBRATED"},
            "not known. The times are computed from a datasheet and were not held against this "
            "model on this device: compare settings by them, do not quote them.",
        ),
    ],
)
def test_accuracy_is_told_as_it_was_published_or_that_none_is_known(described, told):
    assert page_module._accuracy(described) == told


def test_page_begins_with_how_much_of_what_was_run():
    def lead(rows, *origins):
        heads = [{"provenance": one} for one in origins]
        return page_module._lead(SimpleNamespace(rows=rows), heads)

    one, two = row(1, num_requests=1200), row(1, num_requests=300)
    assert lead([one]) == "1,200 requests"
    assert lead([one, two]) == "2 settings · 300 to 1,200 requests"
    assert lead([two, two]) == "2 settings · 300 requests"
    assert lead([row(2, num_requests=5)]) == "2 replications each · 5 requests"
    several = [row(n, num_requests=5) for n in (3, 1, 3)]
    assert lead(several) == "3 settings · 1-3 replications each · 5 requests"
    model = {"model": "m", "hardware": "h"}
    assert lead([one], model, {**model, "backend": "sim"}) == "1,200 requests · m · h · sim"
    assert lead([one], model, {"model": "n"}) == "1,200 requests · m, n · h"


def test_verdicts_need_two_settings_of_a_load_and_two_seeds_of_every_setting():
    def verdicts(*settings):
        rows, runs = [], {}
        for policy, rate, seeds in settings:
            label = f"{policy} {rate}"
            rows.append(Row(label, policy, {"workload.request_rate": rate}, seeds, {}))
            metrics = [
                {name: 10.0 * len(policy) + k for name in page_module._JUDGED} for k in range(seeds)
            ]
            runs[label] = [
                SimpleNamespace(head=lambda told=told: {"metrics": told}) for told in metrics
            ]
        results = SimpleNamespace(rows=rows, of=lambda one: runs[one.label])
        return page_module._verdicts(results)

    assert verdicts(("a", "1", 2), ("bb", "2", 2)) is None, "no two at a load"
    assert verdicts(("a", "1", 2), ("bb", "1", 1)) is None, "a setting of one seed"
    assert verdicts(("a", "1", 2), ("bb", "1", 2)) is not None
    assert verdicts(("a", "1", 2), ("bb", "2", 2), ("ccc", "2", 2)) is not None
