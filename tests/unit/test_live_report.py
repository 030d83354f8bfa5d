"""The page that is alive: its data, that nothing breaks out of it, what a browser makes of it."""

import csv
import html
import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import schedlab as sl
from schedlab.experiments.analysis.rate_curves import is_saturated
from schedlab.experiments.report.live import live, live_data, plotly_script
from schedlab.experiments.report.page import report_page, write_page
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.sim.metrics.registry import metric_named

BROWSER = next((shutil.which(name) for name in ("chromium", "google-chrome", "chrome")
                if shutil.which(name)), None)  # fmt: skip
# Without a word to any network, which a browser says of itself.
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip
STUB = "window.Plotly = {react: (div, traces) => { div.dataset.traces = JSON.stringify(traces); }};"
SWEPT = {
    "name": "<b>alive</b>",
    "workload": {"trace": "fixed", "num_requests": 12},
    "sweep": {"policy": ["fcfs", "static"], "workload.request_rate": [1, 4, 16]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("results") / "one"
    sl.run(SWEPT, folder=place)
    return place


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Leave out what takes longest to make; test_report_page looks at it."""
    monkeypatch.setattr("schedlab.experiments.report.page.drawings", lambda results: [])


@pytest.mark.slow
def test_page_without_plotly_has_no_script(folder):
    page = report_page(read_results(folder))
    assert "<script" not in page
    assert "schedlab[report]" in page


def test_data_has_every_setting_with_means_and_intervals(folder):
    results = read_results(folder)
    data = live_data(results.rows, results.name)
    assert data["keys"]["policy"] == ["fcfs", "static"]
    assert data["rate"] == "workload.request_rate"
    assert [row["label"] for row in data["rows"]] == [row.label for row in results.rows]
    for shown, row in zip(data["rows"], results.rows, strict=True):
        assert shown["metrics"]["p99_ttft_ms"] == [row.mean("p99_ttft_ms"), None]


def test_nothing_in_the_data_ends_its_script(folder):
    results = read_results(folder)
    found = live(results.rows, "</script><script>alert(1)</script>", "1</script>2")
    assert "<" not in found["data"]
    assert json.loads(found["data"])["name"] == "</script><script>alert(1)</script>"
    assert found["library"] == "1<\\/script>2"


def test_page_escapes_a_name_that_is_markup(folder):
    page = report_page(read_results(folder), STUB)
    assert "<b>alive</b>" not in page
    assert html.escape("<b>alive</b>") in page


@pytest.mark.slow
def test_folders_are_shown_side_by_side(folder, tmp_path):
    other = tmp_path / "two"
    sl.run({**SWEPT, "sweep": {"workload.request_rate": [1, 4]}}, folder=other)
    page = write_page(folder, tmp_path / "both.html", [other]).read_text()
    assert "two: request_rate=4" in page
    assert "one: static, request_rate=4" in page


def browsed(page, tmp_path, actions, width=800):
    """Return the page as a browser has it after it ran, and then `actions` (JavaScript)."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{actions}</script></body>"))
    ran = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
         "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_clicks_sort_the_table_and_choose_what_is_drawn(folder, tmp_path):
    actions = """
      const heading = [...document.querySelectorAll("#results ~ .scroll th")]
        .find((one) => one.textContent.includes("P99 TTFT"));
      heading.click(); heading.click();
      const only = document.getElementById("only-policy");
      only.value = "fcfs"; only.dispatchEvent(new Event("change"));
      const y = document.getElementById("y");
      y.value = "mean_e2el_ms"; y.dispatchEvent(new Event("change"));
      const rows = [...document.querySelectorAll("#results ~ .scroll table")][0].tBodies[0].rows;
      document.title = JSON.stringify([...rows].filter((row) => !row.hidden)
        .map((row) => row.dataset.row)) + "|" + schedlabCsv().split("\\n").length;
    """
    results = read_results(folder)
    dom = browsed(report_page(results, STUB), tmp_path, actions)
    shown, lines = html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]).split("|")
    fcfs = [i for i, row in enumerate(results.rows) if row.policy == "fcfs"]
    slowest_first = sorted(fcfs, key=lambda i: -results.rows[i].mean("p99_ttft_ms"))
    assert [int(i) for i in json.loads(shown)] == slowest_first
    assert int(lines) == 1 + len(fcfs) + 1
    traces = json.loads(html.unescape(re.search(r'data-traces="(.*?)"', dom)[1]))
    assert [trace["name"] for trace in traces] == ["fcfs"]
    rows = [results.rows[i] for i in fcfs]
    assert traces[0]["x"] == [1, 4, 16]
    assert traces[0]["y"] == pytest.approx([row.mean("mean_e2el_ms") for row in rows])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [800, 1280])
def test_table_of_long_numbers_with_intervals_is_seen_whole(width, folder, tmp_path):
    results = read_results(folder)
    long = {name: Estimate(48_888.0, 12_345.0) for name in results.rows[0].metrics if "_ms" in name}
    rows = [replace(row, metrics={**row.metrics, **long}) for row in results.rows]
    actions = """
      const results = document.querySelector("#results ~ .scroll");
      document.title = results.scrollWidth + "/" + results.clientWidth;
    """
    dom = browsed(report_page(replace(results, rows=rows)), tmp_path, actions, width)
    wide, seen = re.search(r"<title>(\d+)/(\d+)", dom).groups()
    assert int(wide) <= int(seen)
    assert "48,888" in dom


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_real_plotly_draws_in_the_page(folder, tmp_path):
    library = plotly_script()
    if library is None:
        pytest.skip("Plotly is not installed")
    dom = browsed(report_page(read_results(folder), library), tmp_path, "")
    assert "main-svg" in dom
    assert 'id="explore" hidden' not in dom


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_buttons_download_the_chart_and_the_settings_shown(folder, tmp_path):
    library = plotly_script()
    if library is None:
        pytest.skip("Plotly is not installed")
    results = read_results(folder)
    click = """addEventListener("load", () => {
      const only = document.getElementById("only-policy");
      only.value = "fcfs"; only.dispatchEvent(new Event("change"));
      for (const button of document.querySelectorAll("#axes button")) button.click();
    });"""
    page = report_page(results, library).replace("</body>", f"<script>{click}</script></body>")
    table, chart = downloaded(page, tmp_path, (".csv", ".svg"))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    shown = [row for row in results.rows if row.policy == "fcfs"]
    assert [row["label"] for row in rows] == [row.label for row in shown]
    measured = [float(row["p99_ttft_ms"]) for row in rows]
    assert measured == pytest.approx([row.mean("p99_ttft_ms") for row in shown])
    words = " ".join(ElementTree.fromstring(chart.read_text()).itertext())
    assert "fcfs" in words
    assert "static" not in words


def downloaded(page, tmp_path, endings):
    """Return the files, one for each ending, that a browser with the page has downloaded."""
    folder, profile = tmp_path / "downloads", tmp_path / "profile"
    folder.mkdir()
    (profile / "Default").mkdir(parents=True)
    settings = {
        "download": {"default_directory": str(folder), "prompt_for_download": False},
        "profile": {"default_content_setting_values": {"automatic_downloads": 1}},
    }
    (profile / "Default/Preferences").write_text(json.dumps(settings))
    path = tmp_path / "page.html"
    path.write_text(page)
    given = [*FLAGS, f"--user-data-dir={profile}", path.as_uri()]
    browser = subprocess.Popen(
        [BROWSER, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            found = [next(folder.glob(f"*{ending}"), None) for ending in endings]
            if all(found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"no download after a minute: {list(folder.iterdir())}")
    finally:
        browser.terminate()
        browser.wait(30)


@pytest.mark.parametrize(("rates", "key"), [([1, 4], "workload.request_rate"), ([4], None)])
def test_rate_is_an_axis_only_if_it_takes_several_values(rates, key):
    rows = [
        Row("x", policy, {"workload.request_rate": str(rate)}, 1, {"completed": Estimate(1, None)})
        for policy in ("a", "b")
        for rate in rates
    ]
    assert live_data(rows, "x")["rate"] == key


def test_data_of_a_page_that_is_alive_are_all_settings_with_all_metrics_any_of_them_has():
    def row(policy, rate, **metrics):
        return Row(
            f"{policy} at {rate}", policy, {"policy": policy, "workload.request_rate": rate}, 2,
            {name: Estimate(*value) for name, value in metrics.items()},
        )  # fmt: skip

    rows = [
        row("a", "1", p99_ttft_ms=(10.0, 1.0), completed=(math.nan, None), kv_utilization=(0.5, 0)),
        row("b", "2", p99_ttft_ms=(20.0, math.inf), request_throughput=(3.0, None)),
    ]
    data = live_data(rows, "n")
    data.pop("colors")
    nothing = [None, None]
    ttft, share, throughput = (
        metric_named(name) for name in ("p99_ttft_ms", "kv_utilization", "request_throughput")
    )
    assert data == {
        "name": "n",
        "keys": {"policy": ["a", "b"], "workload.request_rate": ["1", "2"]},
        "rate": "workload.request_rate",
        "metrics": {
            "p99_ttft_ms": {"title": ttft.axis, "scale": 1.0},
            "kv_utilization": {"title": share.axis, "scale": 100.0},
            "request_throughput": {"title": throughput.axis, "scale": 1.0},
        },
        "rows": [
            {"label": "a at 1", "policy": "a", "saturated": is_saturated(rows[0]),
             "settings": {"policy": "a", "workload.request_rate": "1"},
             "metrics": {"p99_ttft_ms": [10.0, 1.0], "kv_utilization": [0.5, 0],
                         "request_throughput": nothing}},
            {"label": "b at 2", "policy": "b", "saturated": is_saturated(rows[1]),
             "settings": {"policy": "b", "workload.request_rate": "2"},
             "metrics": {"p99_ttft_ms": [20.0, None], "kv_utilization": nothing,
                         "request_throughput": [3.0, None]}},
        ],
    }  # fmt: skip
    one = live_data([replace(rows[0], settings={"engine.max_num_seqs": "8"})], "n")
    assert one["keys"] == {"policy": ["a"], "engine.max_num_seqs": ["8"]}
    assert one["rate"] is None
    assert one["rows"][0]["settings"] == {"policy": "a", "engine.max_num_seqs": "8"}
