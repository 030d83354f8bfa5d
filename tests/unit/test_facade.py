"""`import schedlab as sl`: what a notebook needs, in a line each."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import schedlab as sl
from schedlab.experiments.outcomes import Claims, _of_setting
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.experiments.sweeps.store import Store
from schedlab.policies import ContinuousBatching
from schedlab.policies.static import Static
from schedlab.sim.cost.cost_model import CostModel
from schedlab.sim.errors import SchedlabError, SpecError

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = {"trace": "azure-conv", "num_requests": 25}
SWEPT = {
    "name": "two policies",
    "workload": WORKLOAD,
    "slo": {"ttft_ms": 1000},
    "replications": 2,
    "sweep": {"policy": ["fcfs", "static"], "workload.request_rate": [2, 6]},
}


class LongestFirst(ContinuousBatching):
    """Serve the longest prompt first."""

    def __init__(self, weight=1.0):
        self.weight = weight

    def key(self, state, now_ns):
        return -self.weight * state.request.prompt_tokens


@pytest.fixture(scope="module")
def swept():
    return sl.run(SWEPT)


@pytest.mark.parametrize("does", [sl.spec, sl.claims])
def test_module_beside_the_file_of_an_experiment_is_found(tmp_path, monkeypatch, does):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_a_file.py").write_text(
        "from schedlab.policies import ContinuousBatching\n"
        "class Mine(ContinuousBatching):\n    def key(self, state, now_ns):\n        return 0\n"
    )
    (tmp_path / "e.yaml").write_text(
        json.dumps({**SWEPT, "sweep": {}, "policy": "beside_a_file:Mine"})
    )
    if does is sl.claims:
        with pytest.raises(SpecError, match=r"e\.yaml: claim"):
            does(tmp_path / "e.yaml")
    else:
        assert does(tmp_path / "e.yaml").policy.name == "beside_a_file:Mine"


@pytest.mark.parametrize(("best", "told"), [(None, ["a verdict"]), (["the cheapest"], None)])
def test_find_tells_the_cheapest_where_there_is_one_and_else_verdicts(monkeypatch, best, told):
    asked = {
        **SWEPT, "sweep": {"policy": ["fcfs", "static"]},
        "find": {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 1000}},
    }  # fmt: skip
    search = "schedlab.experiments.search"
    monkeypatch.setattr(f"{search}.find.find", lambda spec, runs: [spec.name])
    monkeypatch.setattr(f"{search}.find.verdicts", lambda find, found: ["a verdict"])
    monkeypatch.setattr(
        f"{search}.cheapest.cheapest",
        lambda spec, found, runs: best and SimpleNamespace(lines=tuple(best)),
    )
    monkeypatch.setattr(f"{search}.search_report.find_lines", lambda spec, found: ["asked", *found])
    monkeypatch.setattr(f"{search}.search_report.basis_lines", lambda *_: ["on this basis"])
    found = sl.find(asked)
    assert found.lines == ["asked", "two policies", *(told or best), "on this basis"]
    assert found.found == ["two policies"]


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("folder", [None, "kept"])
def test_find_keeps_tables_where_the_search_needs_them(monkeypatch, tmp_path, needs, folder):
    made = []

    def store(place, light):
        made.append((place, light))
        raise SchedlabError("no further")

    place = None if folder is None else tmp_path / folder
    monkeypatch.setattr("schedlab.experiments.search.constraints.needs_tables", lambda spec: needs)
    monkeypatch.setattr("schedlab.experiments.sweeps.store.Store", store)
    find = {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 1000}}
    asked = {**SWEPT, "sweep": {"policy": ["fcfs", "static"]}, "find": find}
    with pytest.raises(SchedlabError, match="no further"):
        sl.find(asked, **({} if place is None else {"folder": place}))
    ((used, light),) = made
    assert light is not needs
    assert used == place or place is None


@pytest.mark.parametrize("check", [None, True, False])
def test_measure_compares_what_is_asked_for_and_keeps_what_is_told_of_it(monkeypatch, check):
    comparing = "schedlab.experiments.comparing"
    monkeypatch.setattr(
        f"{comparing}.compare.compare", lambda spec, check=None: [spec.name, spec.seed, check]
    )
    monkeypatch.setattr(
        f"{comparing}.comparison_files.to_data", lambda found, spec: {"of": [*found, spec.seed]}
    )
    found = sl.measure(SWEPT, seed=7, **({} if check is None else {"check": check}))
    assert found.data == {"of": ["two policies", 7, check, 7]}


@pytest.mark.slow
def test_import_of_schedlab_is_light():
    code = (
        "import sys, schedlab as sl\n"
        "heavy = ('numpy', 'pydantic', 'yaml', 'matplotlib', 'pandas', 'typer')\n"
        "assert not [m for m in heavy if m in sys.modules], 'import'\n"
        "assert callable(sl.run) and 'sweep' in dir(sl)\n"
        "assert 'matplotlib' not in sys.modules, 'use'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (LongestFirst, "LongestFirst"),
        (LongestFirst(weight=2.0), "LongestFirst"),
        ({"name": LongestFirst, "weight": 2.0}, "LongestFirst"),
        ({"name": LongestFirst, "label": "longest"}, "longest"),
        (Static, "static"),
        (Static(max_batch_size=4), "static"),
        ("fcfs", "fcfs"),
    ],
)
def test_run_takes_a_policy_by_name_class_or_object(policy, label):
    results = sl.run({"workload": WORKLOAD}, policy=policy, workload={"request_rate": 4})
    assert results.rows[0].policy == label
    assert results.run.metrics()["completed"] == 25


def test_run_of_an_object_has_its_parameters():
    spec = sl.spec(
        {"workload": WORKLOAD}, policy=Static(max_batch_size=4), workload={"request_rate": 1}
    )
    assert spec.policy.knobs["max_batch_size"] == 4


@pytest.mark.slow
def test_run_sweeps_classes_beside_names():
    results = sl.run(SWEPT, sweep={"policy": [LongestFirst, "fcfs"], "workload.request_rate": [3]})
    assert [row.policy for row in results.rows] == ["LongestFirst", "fcfs"]


def test_run_refuses_a_class_that_no_name_finds():
    class Hidden(LongestFirst):
        pass

    with pytest.raises(SpecError, match="define it at the top"):
        sl.run({"workload": WORKLOAD}, policy=Hidden)


def test_spec_overrides_merge_into_sections_and_take_dotted_keys():
    spec = sl.spec("quickstart", engine={"max_num_seqs": 8}, **{"workload.num_requests": 7})
    assert (spec.engine.max_num_seqs, spec.engine.max_num_batched_tokens) == (8, 2048)
    assert spec.workload.num_requests == 7


@pytest.mark.parametrize("call", [sl.find, sl.sweep], ids=lambda call: call.__name__)
def test_folder_that_is_at_work_already_is_refused(tmp_path, call):
    asked = {"workload": WORKLOAD | {"request_rate": 4}}
    if call is sl.find:
        asked["find"] = "max workload.request_rate between 1 and 2 subject to p99_ttft_ms <= 1000"
    store = Store(tmp_path)
    with store.lock(""), pytest.raises(SpecError, match="another sweep is at work in"):
        call(asked, folder=tmp_path)
    assert store.is_empty()


@pytest.mark.parametrize("jobs", [0, -1, 1.5, 1e3, True, None, "2"])
def test_jobs_that_are_no_number_of_processes_are_refused(jobs):
    with pytest.raises(SpecError, match="jobs must be a whole number >= 1, got"):
        sl.run({"workload": WORKLOAD}, workload={"request_rate": 4}, jobs=jobs)


def test_several_jobs_in_a_worker_of_somebody_elses_are_refused(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(SchedlabError, match=r"is a worker itself .* give jobs=1 there"):
        sl.run({"workload": WORKLOAD}, jobs=2)
    assert len(sl.run({"workload": WORKLOAD}, jobs=1).runs) == 1


@pytest.mark.parametrize(
    "values",
    [np.arange(2, 4), range(2, 4), (n for n in (2, 3)), [np.int64(2), 3]],
    ids=lambda values: type(values).__name__,
)
def test_spec_takes_values_of_numpy_and_python(values):
    changed = sl.spec(
        "quickstart",
        sweep={"engine.max_num_seqs": values},
        workload={"num_requests": np.int64(20), "request_rate": np.float32(1.5)},
    )
    assert changed.sweep["engine.max_num_seqs"] == [2, 3]
    assert (changed.workload.num_requests, changed.workload.request_rate) == (20, 1.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"enigne": {}}, "did you mean engine"), ({"policy": "fcsf"}, "did you mean fcfs")],
)
def test_spec_of_a_wrong_override_names_the_nearest_choice(overrides, message):
    with pytest.raises(SpecError, match=message):
        sl.spec("quickstart", **overrides)


@pytest.mark.slow
def test_results_show_themselves_as_text_and_as_html(swept):
    assert "two policies" in repr(swept)
    assert "TTFT ms" in repr(swept)
    assert "UNCALIBRATED" in repr(swept)
    html = swept._repr_html_()
    assert html.count("<tr>") == 5
    assert "TTFT ms<br>P99" in html


@pytest.mark.slow
def test_results_as_frames(swept):
    pytest.importorskip("pandas")
    frame = swept.to_frame()
    assert frame["workload.request_rate"].tolist() == [2.0, 6.0, 2.0, 6.0]
    assert frame["p99_ttft_ms_ci95"].notna().all()
    assert len(swept.to_frame("runs")) == 8
    requests = swept.to_frame("requests")
    assert requests.index.tolist() == list(range(8 * 25))
    assert requests.columns[:4].tolist() == ["policy", "workload.request_rate", "replication", "id"]
    assert requests.groupby("policy")["id"].count().to_dict() == {"fcfs": 100, "static": 100}
    assert swept.to_frame("steps")["end_ns"].max() > 1e9
    with pytest.raises(SpecError, match="choose from settings"):
        swept.to_frame("request")


def test_frames_without_pandas_say_what_to_install(swept, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SchedlabError, match="pip install pandas"):
        swept.to_frame()


@pytest.mark.slow
def test_load_gives_what_run_kept(tmp_path, blank_figures):
    kept = sl.run(SWEPT, folder=tmp_path / "out")
    assert repr(sl.load(tmp_path / "out")) == repr(kept)
    assert kept.report() == tmp_path / "out" / "report.html"
    assert "two policies" in kept.report().read_text()


@pytest.mark.slow
def test_sweep_goes_on_where_it_was(tmp_path):
    first = sl.sweep(SWEPT, folder=tmp_path, workload={"num_requests": 10})
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = sl.sweep(SWEPT, folder=tmp_path, workload={"num_requests": 10})
    assert repr(first) == repr(again)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")} == times


@pytest.mark.slow
def test_compare_takes_the_name_of_one_metric(swept):
    one, listed = sl.compare(swept, "p99_ttft_ms"), sl.compare(swept, ["p99_ttft_ms"])
    assert str(one) == str(listed)


def test_find_and_compare_return_tables(swept):
    found = sl.find(
        {"workload": {**WORKLOAD, "request_rate": 1}},
        find="max workload.request_rate between 1 and 4 subject to p99_ttft_ms <= 10000",
    )
    assert "workload.request_rate" in repr(found)
    changes = sl.compare(swept, ["mean_ttft_ms"])
    assert [one.metric for one in changes] == ["mean_ttft_ms"] * 2
    assert "<table>" in changes._repr_html_()


@pytest.mark.parametrize(
    ("figure", "arguments"),
    [("latency_against_rate", {}), ("heat_map", {"rate": 2}), ("latency_cdf", {}), ("gantt", {})],
)
def test_plot_returns_figures(swept, figure, arguments):
    assert type(getattr(swept.plot, figure)(**arguments)).__name__ == "Figure"


def test_plot_of_a_rate_that_was_not_run_says_which_were(swept):
    with pytest.raises(SchedlabError, match="choose from 2, 6"):
        swept.plot.heat_map(rate=3)


@pytest.mark.slow
def test_policy_in_a_script_runs_but_is_not_swept_into_a_folder(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import schedlab as sl\n"
        "from schedlab.policies import ContinuousBatching\n\n"
        "class Mine(ContinuousBatching):\n"
        "    def key(self, state, now_ns):\n"
        "        return -state.request.prompt_tokens\n\n"
        f"small = dict(workload={WORKLOAD | {'request_rate': 4}!r})\n"
        "print(sl.run(small, policy=Mine, jobs=2).rows[0].label)\n"
        "try:\n    sl.sweep(small, policy=Mine, folder='out')\n"
        "except Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert "put it into a module" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        "results = sl.run(small, jobs=2, replications=2)",
        "from pathlib import Path\n"
        "from schedlab.experiments.sweeps.store import Store\n"
        "from schedlab.experiments.sweeps.sweep_all import sweep_all\n"
        "from schedlab.experiments.sweeps.workers import Processes\n"
        "with Processes(2) as two:\n"
        "    results = sweep_all(sl.spec(small, replications=2), Store(Path('out')), two).results",
    ],
)
def test_script_without_a_main_guard_runs_its_jobs_and_is_run_once(tmp_path, runs):
    script = tmp_path / "script.py"
    script.write_text(
        "import schedlab as sl\n"
        "print('begins')\n"
        f"small = dict(workload={WORKLOAD | {'request_rate': 4}!r})\n"
        f"{runs}\n"
        "print(len(results.runs), __name__)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("begins\n2 __main__\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [False, True])
def test_policy_that_a_script_registers_runs_by_its_name_in_that_very_process(tmp_path, is_guarded):
    script = tmp_path / "script.py"
    guard = "if __name__ == '__main__':\n    " if is_guarded else ""
    script.write_text(
        "import schedlab as sl\n"
        "from schedlab.policies import ContinuousBatching, register\n\n"
        "@register('mine')\n"
        "class Mine(ContinuousBatching):\n"
        "    def key(self, state, now_ns):\n"
        "        return -state.request.prompt_tokens\n\n"
        f"small = dict(workload={WORKLOAD | {'request_rate': 4}!r})\n"
        f"{guard}print(len(sl.run(small, policy='mine', jobs=2, replications=2).runs))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2\n", "")


class Ticks(CostModel):
    """A millisecond a step."""

    name = "ticks"

    def __init__(self, deployment, step_ms: int = 1):
        self.step_ms = step_ms

    def step_ns(self, shape, k=1):
        return [self.step_ms * 1_000_000] * k

    def describe(self):
        return {"name": self.name}


def test_cost_model_of_ones_own_is_passed_as_a_class():
    alone = {"num_requests": 1, "prompt_tokens": 1, "output_tokens": 5, "request_rate": "inf"}
    results = sl.run({"workload": alone}, cost_model={"name": Ticks, "step_ms": 3})
    assert results.rows[0].mean("mean_e2el_ms") == 15.0


@pytest.mark.slow
def test_claim_is_held_against_a_simulation_again():
    claims = sl.claims("aged", replications=2, **{"workload.num_requests": 20})
    assert claims.experiments[0]["claim"]["system"] == "Ageing"
    assert sum(claims.verdicts.values()) == len(claims.experiments[0]["figures"]) == 4
    assert "Ageing" in repr(claims)
    assert "mean latency, SJF without ageing" in claims._repr_html_()


POINT = {
    "label": "fcfs",
    "policy": "fcfs",
    "load": "2",
    "decisions": {"same_step_times": "identical"},
    "cost_error_by_step": {"mape": 0.02, "bias": -0.01},
    "metrics": [
        {"metric": "p99_ttft_ms", "error": 0.125},
        {"metric": "mean_ttft_ms", "error": None},
    ],
}


def test_measurement_is_read_from_its_folder(tmp_path):
    data = {"name": "cpu", "points": [POINT], "rank_agreement_kendall_tau": {"2": {"ttft": 1.0}}}
    (tmp_path / "comparison.json").write_text(json.dumps(data))
    found = sl.load_measurement(tmp_path)
    assert found.name == "cpu"
    assert found.ranking["2"] == {"ttft": 1.0}
    line = next(line for line in repr(found).splitlines() if line.startswith("fcfs"))
    assert line.split() == ["fcfs", "identical", "2.0%", "-1.0%", "-", "-", "+12.5%", "-", "-"]


def test_json_that_another_wrote_is_no_measurement(tmp_path):
    for points in ('{"points": 3}', '{"points": {"a": 1}}', "{}"):
        (tmp_path / "comparison.json").write_text(points)
        with pytest.raises(
            SpecError, match=r"was not written by schedlab measure: it has no list points$"
        ):
            sl.load_measurement(tmp_path)


def test_setting_of_several_runs_has_half_an_interval_beside_each_mean():
    metrics = {"completed": Estimate(8.0, 0.5), "duration_s": Estimate(3.0, None)}
    settings = {"policy": "fcfs", "workload.request_rate": "2"}
    several = _of_setting(Row("x", "fcfs", settings, 3, metrics))
    assert several == {
        "label": "x", "policy": "fcfs", "workload.request_rate": 2.0, "completed": 8.0,
        "completed_ci95": 0.5, "duration_s": 3.0, "duration_s_ci95": None,
    }  # fmt: skip
    assert "completed_ci95" not in _of_setting(Row("x", "fcfs", settings, 1, metrics))


def test_frontier_has_the_settings_that_no_other_beats():
    results = sl.run({"workload": {"trace": "fixed", "num_requests": 30, "request_rate": 2},
                      "sweep": {"engine.max_num_seqs": [1, 2]}})  # fmt: skip
    (best,) = results.frontier("mean_e2el_ms", "request_throughput")
    assert best.settings["engine.max_num_seqs"] == "2"
    with pytest.raises(SpecError, match="num_requests is neither better"):
        results.frontier("num_requests")


def test_synthesized_trace_is_a_workload(tmp_path):
    file = sl.synthesize(tmp_path / "drawn.csv", 7, preset="fixed", seed=3)
    assert sl.run({"workload": {"trace": str(file)}}).rows[0].mean("completed") == 7


def test_synthesized_trace_is_that_of_its_seed_and_rate(tmp_path):
    def drawn(name, **options):
        return sl.synthesize(tmp_path / name, 5, **options).read_bytes()

    first = drawn("a.csv", seed=3)
    assert drawn("b.csv", seed=3) == first
    assert drawn("c.csv", seed=4) != first
    assert drawn("d.csv", seed=3, rate=0.125) != first


def test_known_policies_are_classes_by_name():
    known = sl.known_policies()
    assert list(known) == sorted(known)
    assert known["sjf"].needs_prediction
    assert not known["fcfs"].needs_prediction


def test_figure_of_a_claim_is_shown_with_its_interval_and_a_dash_where_nothing_was_measured():
    def figure(name, estimate, interval):
        return {"name": name, "estimate": estimate, "interval": interval, "verdict": name}

    figures = [figure("none", None, None), figure("still", 0.0, [-1.5, None])]
    claims = Claims({"experiments": [{"claim": {"system": "Orca"}, "figures": figures}]})
    assert [row[2] for row in claims._table()[2]] == ["-", "0 [-1.50, -]"]
    assert "1 none, 1 still" in repr(claims)
