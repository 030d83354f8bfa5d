"""Metrics by name: how they are written, which way they are better, where they can stand."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.results.metric_table import metric_tables
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.statistics import with_interval
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics import registry
from schedlab.sim.metrics.registry import every_run, metric_named, register


@pytest.mark.parametrize(
    ("metric", "label", "scale"),
    [
        ("p99_ttft_ms", "P99 TTFT (ms)", 1.0),
        ("median_itl_ms", "median ITL (ms)", 1.0),
        ("mean_queue_time_ms", "mean queue time (ms)", 1.0),
        ("tpot_slo_attainment", "TPOT attainment (%)", 100.0),
        ("kv_fragmentation_share", "KV fragmentation (%)", 100.0),
        ("num_preemptions", "preemptions", 1.0),
        ("duration_s", "duration (s)", 1.0),
    ],
)
def test_metric_is_written_with_its_unit(metric, label, scale):
    assert metric_named(metric).axis == label
    assert metric_named(metric).scale == scale


@pytest.mark.parametrize(
    ("name", "unit", "scale", "shown"),
    [
        ("idle_share", None, None, ("%", 100.0)), ("idle_share", None, 1.0, ("%", 1.0)),
        ("idle_share", "of 1", 1.0, ("of 1", 1.0)), ("idle_ms", None, None, ("ms", 1.0)),
        ("idle_ms", "us", 1000.0, ("us", 1000.0)),
    ],
)  # fmt: skip
def test_unit_and_scale_of_the_author_come_before_what_a_name_says(
    name, unit, scale, shown, monkeypatch
):
    monkeypatch.setattr(registry, "_METRICS", {})
    register(name, unit=unit, scale=scale)(lambda run: 0.0)
    (metric,) = registry._METRICS.values()
    assert (metric.unit, metric.scale) == shown


def test_every_metric_can_be_written():
    labels = [metric.axis for metric in every_run()]
    assert len(set(labels)) == len(labels), "two metrics look alike"


def test_unknown_metric_names_the_nearest():
    with pytest.raises(SpecError, match="did you mean p99_ttft_ms"):
        metric_named("p99_tft_ms")


@pytest.mark.parametrize(
    ("metric", "larger"),
    [
        ("request_goodput", True), ("output_throughput", True), ("ttft_slo_attainment", True),
        ("p99_itl_ms", False), ("num_preemptions", False), ("kv_fragmentation_share", False),
        ("num_requests", None),
    ],
)  # fmt: skip
def test_metric_has_a_better_side(metric, larger):
    assert metric_named(metric).larger_is_better is larger


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.5, 0.04, "0.500 ±0.040"),
        (0.5, 4.0, "0.5 ±4.0"),
        (3.0, 0.0, "3"),
        (0.0, None, "0"),
        (1e6, math.inf, "1,000,000"),
        (-2.5, None, "-2.50"),
    ],
)
def test_interval_has_as_many_digits_as_tell_something(mean, half_width, text):
    assert with_interval(mean, half_width) == text


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("largest(latency=itl)", "largest(latency=itl)"),
        (" largest ( latency = itl ) ", "largest(latency=itl)"),
        ("stall_free_goodput(stall_ms=2e3, ttft_ms=500)",
         "stall_free_goodput(ttft_ms=500, stall_ms=2000)"),
        ("of_class(metric=largest(latency=itl), column=priority, low=1)",
         "of_class(metric=largest(latency=itl), column=priority, low=1)"),
        ("p99_ttft_ms()", "p99_ttft_ms"),
        ("tests.own_metrics:tokens_per_request(at_least=3)",
         "tests.own_metrics:tokens_per_request(at_least=3)"),
    ],
)  # fmt: skip
def test_written_metric_is_read_and_its_name_reads_back(written, name):
    assert metric_named(written).name == name
    assert metric_named(name).name == name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("largest", "largest needs latency"),
        ("largest(latency=ttf)", "latency: no 'ttf'; did you mean ttft"),
        ("largest(latensy=ttft)", "no such parameter 'latensy'; did you mean latency"),
        ("largest(ttft)", "'ttft' is no parameter: write it as name=value"),
        ("finished_within(seconds=soon)", "seconds: must be a number, got 'soon'"),
        ("p99_ttft_ms(latency=ttft)", "takes no parameters"),
        ("p99 ttft", "is no metric: write NAME"),
        ("tests.own_metrics:tokens_per_requests", "did you mean tokens_per_request"),
        ("tests.own_metric:tokens_per_request", "cannot import 'tests.own_metric'"),
        ("tests.own_metrics:sideways", "better is 'sideways'"),
        (
            "tests.own_metrics:Served",
            "has no function 'Served'; choose from requests_served, sideways",
        ),
        (
            "tests.own_metrics:SERVED",
            "has no function 'SERVED'; choose from requests_served, sideways",
        ),
    ],
)
def test_wrongly_written_metric_says_what_is_wrong(written, message):
    with pytest.raises(SpecError, match=message):
        metric_named(written)


def test_own_metric_whose_module_fails_in_any_way_says_how(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    faults = ("1 / 0", "import nowhere_at_all", "def", "raise KeyError('x')", "unknown", "[][0]")
    for number, fault in enumerate(faults):
        (tmp_path / f"failing_metric_{number}.py").write_text(fault + "\n")
        try:
            exec(fault, {})
        except Exception as error:
            kind = type(error).__name__
        told = f"cannot import 'failing_metric_{number}': {kind}: "
        with pytest.raises(SpecError, match=told):
            metric_named(f"failing_metric_{number}:any")


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        ("1 / 0", " raised ZeroDivisionError: division by zero (odd_metric.py:3)"),
        ("None", " gives None, not a number"),
        ("'fast'", " gives 'fast', not a number"),
        ("[1.0]", " gives [1.0], not a number"),
        ("1j", " gives 1j, not a number"),
        ("10**400", " gives a number that is too large"),
        ("exit(3)", " raised SystemExit: 3 (odd_metric.py:3)"),
        ("np.array([1.0, 2.0])", " gives array([1., 2.]), not a number"),
        ("np.arange(999)", " gives array([ 0, 1, 2, 3,"),
    ],
)
def test_own_metric_that_gives_no_number_is_named(tmp_path, monkeypatch, gives, told):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_metric", raising=False)
    (tmp_path / "odd_metric.py").write_text(
        f"import numpy as np\ndef odd(run, power: int = 1):\n    return {gives}\n"
    )
    with pytest.raises(SpecError) as caught:
        metric_named("odd_metric:odd(power=2)").of(None)
    assert str(caught.value).startswith("metric 'odd_metric:odd'" + told)


@pytest.mark.parametrize("number", [3, 3.0, np.float32(3), np.int64(3), np.array(3.0)])
def test_own_metric_may_give_a_number_of_any_kind(monkeypatch, number):
    module = ModuleType("numbers_of_mine")
    module.mine = lambda run: number
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert metric_named("numbers_of_mine:mine").of(None) == 3.0


def test_own_metric_is_described_by_its_attributes_or_by_defaults():
    told = metric_named("tests.own_metrics:tokens_per_request")
    assert (told.axis, told.better) == ("tokens per request (tokens)", "neither")
    assert told.definition.startswith("the output tokens of a request")
    plain = metric_named("tests.own_metrics:requests_served")
    assert (plain.axis, plain.better, plain.scale) == ("requests served", "lower", 1.0)


def test_own_metric_is_shown_by_its_own_unit_label_and_scale(monkeypatch):
    module = ModuleType("of_their_own")

    def lost(run):
        return 0.5

    lost.unit, lost.label, lost.scale = "%", "what is lost", 100.0
    module.lost = lost
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told = metric_named("of_their_own:lost")
    assert (told.axis, told.scale) == ("what is lost (%)", 100.0)


def test_own_metric_whose_annotations_are_text_takes_numbers_where_it_says_so(monkeypatch):
    module = ModuleType("of_the_future")
    exec(  # what stands behind this import has its annotations as text
        "from __future__ import annotations\n"
        "def above(run, least: float = 1.0) -> float:\n    return least\n",
        module.__dict__,
    )
    module.above.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert metric_named("of_the_future:above(least=3)").of(None) == 3.0
    with pytest.raises(SpecError, match="least"):
        metric_named("of_the_future:above(least=wide)")


def test_own_metric_is_found_by_its_name_as_it_is_written(monkeypatch):
    module = ModuleType("written_as_it_is")

    def P99_of_Mine(run):  # noqa: N802 - a name with capitals
        return 7.0

    module.P99_of_Mine = P99_of_Mine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert metric_named("written_as_it_is:P99_of_Mine").of(None) == 7.0
    with pytest.raises(SpecError, match="no function 'p99_of_mine'"):
        metric_named("written_as_it_is:p99_of_mine")


def test_metric_of_another_module_that_is_called_alike_is_refused_and_its_own_is_not():
    def longest_wait(run):
        """Return nothing."""
        return 0.0

    theirs = metric_named("longest_wait").of
    with pytest.raises(ValueError, match=r"'longest_wait' is taken by .*fairness.longest_wait"):
        register()(longest_wait)
    assert metric_named("longest_wait").of is theirs


def test_two_metrics_of_one_name_raise():
    with pytest.raises(ValueError, match=r"'longest_wait' is taken by .*fairness.longest_wait"):
        register("longest_wait")(lambda run: 0.0)


def test_documented_metrics_are_those_registered():
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    # Regenerate with: schedlab metrics --markdown
    assert metric_tables() in page


@pytest.mark.slow
def test_order_of_metrics_does_not_depend_on_what_was_imported_first():
    code = "import schedlab.sim.metrics.steps, schedlab.sim.metrics.registry as r; print(r.names())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [name for name in registry.names() if registry.described(name).of.__module__ != __name__]
    assert done.stdout.strip() == str(here)


@pytest.fixture
def late_tokens():
    """Register a metric in this one place; its parameter and its label are known everywhere."""

    @register(unit="tokens", better="lower")
    def late_tokens(run, after_ms: float = 0.0):
        """Return the tokens of requests whose first one came later than that."""
        late = run.latencies.ttft > after_ms
        return float(run.requests["generated_tokens"][late].sum())

    yield late_tokens
    del registry._METRICS["late_tokens"]


SPEC = """\
workload: {trace: azure-conv, num_requests: 30, request_rate: 4}
policy: fcfs
sweep: {policy: [fcfs, shortest_prompt]}
replications: 2
"""


@pytest.mark.slow
def test_registered_metric_stands_in_the_table_by_class_comparison_and_search(
    late_tokens, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text(SPEC)
    asked = ["-m", "late_tokens(after_ms=20)"]
    done = CliRunner().invoke(app, ["run", "e.yaml", "-o", "out", *asked], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    results = read_results(Path("out"))
    runs = [point.load() for point in results.runs]
    values = [
        run.requests["generated_tokens"][run.observation().latencies.ttft > 20].sum()
        for run in runs
    ]  # fmt: skip
    assert all(value > 0 for value in values)
    row = results.rows[0]
    assert row.mean("late_tokens(after_ms=20)") == np.mean(values[:2])
    assert f"{np.mean(values[:2]):,.0f}" in done.stdout
    classes = CliRunner().invoke(app, ["by-class", "out", *asked], env={"COLUMNS": "300"})
    assert classes.exit_code == 0, classes.output
    assert "late_tokens(after_ms=20)" in classes.stdout
    compared = CliRunner().invoke(app, ["compare", "out", *asked, "--json"])
    assert compared.exit_code == 0, compared.output
    assert json.loads(compared.stdout)[0]["means"] == [np.mean(values[2:]), np.mean(values[:2])]
    found = CliRunner().invoke(
        app,
        ["find", "e.yaml", "sweep={}", "-o", "found", "--json",
         "find=max workload.request_rate between 1 and 64 subject to late_tokens(after_ms=20) <= 0",
         "replications=1"],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "late_tokens(after_ms=20)" in found.stdout


@pytest.mark.slow
def test_own_metric_of_a_module_beside_the_experiment_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine_of_a_test.py").write_text("def served(run):\n    return int(run.completed.sum())\n")
    Path("e.yaml").write_text(SPEC)
    done = CliRunner().invoke(
        app, ["run", "e.yaml", "-o", "out", "-m", "mine_of_a_test:served"], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 0, done.output
    assert read_results(Path("out")).rows[0].mean("mine_of_a_test:served") == 30
    wrong = CliRunner().invoke(app, ["run", "e.yaml", "-o", "out", "-m", "largest(latency=ttf)"])
    assert wrong.exit_code == 2
    assert "did you mean ttft" in wrong.output
