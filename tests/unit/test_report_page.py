"""The HTML report: complete, self-contained, and looked at in a browser."""

import base64
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from schedlab.experiments.report import page as page_module
from schedlab.experiments.report.page import report_page, write_page
from schedlab.experiments.results.results_folder import check_replaceable, replacing_folder
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.sweep_all import run_into
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.sim.errors import SpecError

NASTY = 'tails <b>"under"</b> load & more'
pytestmark = pytest.mark.slow  # several runs, and all of their figures
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    spec = make_spec(
        {
            "name": NASTY,
            "slo": {"ttft_ms": 500},
            "replications": 5,
            "engine": {"max_model_len": 1500},
            "workload": {"trace": "azure-conv", "num_requests": 25},
            "sweep": {"policy": ["static", "fcfs"], "workload.request_rate": [2, 8]},
        }
    )
    folder = tmp_path_factory.mktemp("report") / "out"
    with replacing_folder(folder) as new:
        run_into(spec, new, InProcess())
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return report_page(read_results(folder))


@pytest.fixture
def no_figures(monkeypatch):
    """Leave out what takes longest to make."""
    monkeypatch.setattr("schedlab.experiments.report.page.drawings", lambda results: [])


class Reader(HTMLParser):
    """Collects text, tags and what a browser would load, and checks that tags close."""

    EMPTY = ("meta", "link", "img", "br", "hr")

    def __init__(self):
        super().__init__()
        self.text, self.open, self.loads, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


def test_page_loads_nothing_from_elsewhere(page):
    reader = read(page)
    assert all(place.startswith(("data:", "#")) for place in reader.loads)
    assert "script" not in reader.tags
    assert not re.search(r"url\(|@import", page)


def test_page_has_results_verdicts_figures_cost_model_and_provenance(page):
    reader = read(page)
    text = " ".join(reader.text)
    for section in ("Results", "Verdicts", "Figures", "Cost model", "Provenance", "All metrics"):
        assert section in reader.text
    assert reader.tags.count("figure") == 8
    assert "UNCALIBRATED" in text
    assert "Accuracy: not known" in text
    assert "requests rejected" in text, "warnings are shown"
    assert re.search(r"fcfs (beats|is worse than) static|between fcfs and static", text)
    assert "numpy" in text
    assert "max_num_seqs: 128" in text, "the experiment itself is there"


def test_page_escapes_names(page):
    assert "<b>" not in page
    assert NASTY in read(page).text


def test_page_numbers_are_those_of_the_summary(folder, page):
    row = read_results(folder).rows[0]
    exact = f"{row.mean('p99_e2el_ms'):.6g}"
    assert exact in read(page).text


def test_page_is_the_same_each_time_and_leaves_a_folder_that_can_be_replaced(
    folder, page, monkeypatch
):
    monkeypatch.setattr("schedlab.experiments.report.page.plotly_script", lambda: None)
    path = write_page(folder)
    assert path == folder / "report.html"
    assert path.read_text(encoding="utf-8") == page
    check_replaceable(folder)


def test_page_of_a_single_run_has_its_time_series_and_no_verdict(folder):
    first = min(path for path in folder.iterdir() if path.is_dir())
    reader = read(report_page(read_results(first)))
    assert "Verdicts" not in reader.text
    assert reader.tags.count("figure") == 4


def test_page_says_what_each_class_got_where_there_are_classes(tmp_path, page, no_figures):
    spec = make_spec(
        {
            "workload": {
                "trace": "azure-conv", "num_requests": 30, "request_rate": 4,
                "classes": {"paying": {"slo": {"ttft_ms": 500}}, "free": {}},
            },
            "sweep": {"policy": ["fcfs", "sarathi"]},
        }
    )  # fmt: skip
    with replacing_folder(tmp_path / "out") as new:
        run_into(spec, new, InProcess())
    told = report_page(read_results(tmp_path / "out"))
    assert 'id="by-class"' in told
    for name in ("paying", "free", "policy=sarathi"):
        assert f">{name}<" in told
    assert 'id="by-class"' not in page


def test_accuracy_of_a_calibrated_model_is_its_held_out_error(folder, no_figures):
    results = read_results(folder)
    results.cost_models[0] |= {
        "name": "fitted", "calibration": "CALIBRATED",
        "error": {"train": {"mape": 0.031}, "held_out": {"mape": 0.0625}},
        "validity": {"num_tokens": [1, 256]},
    }  # fmt: skip
    text = " ".join(read(report_page(results)).text)
    assert "held out" in text
    assert "6.25%" in text
    assert "lie outside the range it was measured in" in text


def test_page_escapes_whatever_results_hold(folder):
    results = read_results(folder)
    evil = """"'><script>alert(1)</script>"""
    rows = [replace(row, policy=evil, settings={"policy": evil}) for row in results.rows]
    described = results.cost_models[0] | {
        "name": evil, "simplifications": [evil], "error": {evil: {evil: evil}}
    }  # fmt: skip
    hurt = replace(results, rows=rows, warnings=[evil], predictors=[evil], cost_models=[described])
    reader = read(report_page(hurt))
    assert reader.text.count(evil) >= 8
    assert "script" not in reader.tags


def test_page_looks_right_in_a_browser(folder, tmp_path):
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = write_page(folder, tmp_path / "report.html")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        context = browser.new_context(offline=True)
        for width in (400, 1280):
            tab = context.new_page()
            tab.set_viewport_size({"width": width, "height": 900})
            asked, said = [], []
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.goto(path.as_uri())
            seen = tab.evaluate(
                """() => ({
                    width: document.documentElement.scrollWidth,
                    images: [...document.images].map(i => [i.naturalWidth, i.clientWidth]),
                    shown: [...document.querySelectorAll("h2")].map(h => h.offsetHeight > 0),
                })"""
            )
            assert seen["width"] <= width, "the page scrolls sideways"
            assert len(seen["images"]) == 8
            assert all(natural > 100 and 0 < client <= width for natural, client in seen["images"])
            assert len(seen["shown"]) == 6
            assert all(seen["shown"])
            assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
            assert said == []
            picture = tab.screenshot(full_page=True)
            assert base64.b64encode(picture).startswith(b"iVBOR")
            tab.get_by_text("The experiment, spec.yaml").click()
            assert tab.get_by_text("max_num_seqs: 128").is_visible()
        browser.close()


def test_report_command_writes_where_it_is_told_and_refuses_a_folder_without_results(
    folder, tmp_path, no_figures
):
    from typer.testing import CliRunner

    from schedlab.experiments.commands.app import app

    first = min(path for path in folder.iterdir() if path.is_dir())
    done = CliRunner().invoke(app, ["report", str(first), "-o", str(tmp_path / "one.html")])
    assert done.exit_code == 0
    assert (tmp_path / "one.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no results" in done.output


def origin(seed, versions=None, policy="fcfs", **more):
    return {"provenance": {
        "seed": seed, "versions": versions or {"schedlab": "1.0", "numpy": "2.1"},
        "git_commit": "abc", "spec_hash": f"hash of {seed}", "spec": {"policy": {"name": policy}},
        **more,
    }}  # fmt: skip


def test_page_tells_where_runs_come_from_each_thing_once(tmp_path):
    results = SimpleNamespace(folder=tmp_path)
    heads = [
        origin(3, policy_source="b.py", workload=["a trace", "drawn"]),
        origin(4, policy="ours", policy_source="a.py", workload=["a trace", "drawn"]),
        origin(4, workload=["another"]), origin(3, policy_source="b.py"),
    ]  # fmt: skip
    told = page_module._provenance(results, heads)
    facts = told.pop("facts")
    assert facts.lines == [
        ("runs with files", "4"), ("seeds", "3; 4"),
        ("schedlab and packages", "schedlab 1.0, numpy 2.1"), ("git commit", "abc"),
    ]  # fmt: skip
    assert told == {
        "several_versions": False, "policies": ["fcfs: b.py", "ours: a.py"],
        "workloads": ["a trace\ndrawn", "another"], "spec": "",
    }  # fmt: skip
    (tmp_path / "spec.yaml").write_text("name: x\n")
    for other in (origin(3, {"schedlab": "1.1"}), origin(3, git_commit="def")):
        told = page_module._provenance(results, [origin(3), other])
        assert told["several_versions"] is True
        assert told["spec"] == "name: x\n"
    alone = page_module._provenance(results, [origin(3)])
    assert alone["facts"].lines[-1] == ("spec hash", "hash of 3")
    assert alone["several_versions"] is False


def test_page_tells_of_a_cost_model_its_facts_errors_and_how_accurate_it_is():
    errors = {
        "held_out": {"mape": 0.01234, "worst": 7, "num_steps": 20},
        "other_part": {"bias": -0.5, "mape": 0.1},
    }
    table = page_module._error_table(errors)
    assert list(table.header) == [
        "error against measured steps", "mean absolute", "worst", "num steps", "bias of the sum",
    ]  # fmt: skip
    named = dict(zip(("part", "mape", "worst", "num_steps", "bias"), zip(*table.lines, strict=True),
                     strict=True))  # fmt: skip
    assert named["part"] == ("held out", "other part")
    assert named["mape"] == ("1.23%", "10.00%")
    assert named["num_steps"] == ("20", "None")
    assert named["bias"] == ("None", "-50.00%")
    accuracy = page_module._accuracy
    assert accuracy({"published_error": "3 %"}) == "published error 3 %."
    assert accuracy({"published_error": {"mape": 1}}) == 'published error {"mape": 1}.'
    assert accuracy({"calibration": "UNCALIBRATED"}).startswith("not known. The times are computed")
    assert accuracy({"calibration": "MEASURED"}) == "the cost model states none."


@pytest.mark.parametrize(
    ("value", "exact", "effect", "words"),
    [
        (0.12345678, "0.123457", "+0.1", "0.1235"), (-2.0, "-2", "-2.0", "-2"),
        (math.inf, "-", "constant", "inf"), (math.nan, "-", "-", "nan"),
    ],
)  # fmt: skip
def test_page_writes_numbers_as_they_are_meant(value, exact, effect, words):
    assert page_module._exact(value) == exact
    assert page_module._effect(value) == effect
    assert page_module._in_words(value) == words
    assert page_module._in_words({"a": value, "b": {"c": 3}}) == f"a {words}, b c 3"


@pytest.mark.parametrize("output", [None, "there.html"])
def test_page_of_several_folders_is_written_into_the_first_unless_told_where(
    monkeypatch, tmp_path, output
):
    marked = []
    for name, stand_in in {
        "merged": lambda several: "+".join(several), "read_results": lambda folder: folder.name,
        "plotly_script": lambda: "script", "report_page": lambda *given: " ".join(given),
    }.items():  # fmt: skip
        monkeypatch.setattr(page_module, name, stand_in)
    marker = "schedlab.experiments.results.results_folder.add_to_marker"
    monkeypatch.setattr(marker, lambda *given: marked.append(given))
    first, into = tmp_path / "first", None if output is None else tmp_path / output
    first.mkdir()
    written = write_page(first, into, [tmp_path / "second"])
    assert written == (into or first / "report.html")
    assert written.read_text() == "first+second script"
    assert marked == ([(first, ["report.html"])] if output is None else [])
    search = "schedlab.experiments.report.search_page"
    monkeypatch.setattr(f"{search}.is_search", lambda folder: True)
    monkeypatch.setattr(f"{search}.write_search_page", lambda *given: given)
    assert write_page(first, into) == (first, into)
    with pytest.raises(SpecError, match="is of a search: it is shown alone"):
        write_page(first, into, [tmp_path / "second"])
