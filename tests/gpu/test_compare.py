"""The comparison of both backends, on a model so small that it takes seconds."""

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from schedlab.experiments.analysis.comparison import Compared, rank_agreement  # noqa: E402
from schedlab.experiments.comparing import compare as comparison_module  # noqa: E402
from schedlab.experiments.comparing import measured_runs  # noqa: E402
from schedlab.experiments.comparing.compare import compare  # noqa: E402
from schedlab.experiments.comparing.comparison_files import (  # noqa: E402
    agreement,
    markdown,
    runs_told,
    to_data,
    write,
)
from schedlab.experiments.comparing.measured_runs import (  # noqa: E402
    MeasuredRuns,
    measure,
    run_identity,
)
from schedlab.experiments.specification.loading import load_spec, make_spec  # noqa: E402
from schedlab.experiments.specification.sweep import points  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "name": "tiny",
    "model": "schedlab-tiny",
    "hardware": "cpu",
    "engine": {
        "dtype": "fp32", "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "max_model_len": 64, "num_gpu_blocks_override": 12,
    },
    "workload": {
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 40},
        "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
        "num_requests": 12,
        "request_rate": "inf",
    },
    "real": {"repeats": 2},
    "sweep": {"policy": ["fcfs", "prefill_first", {"name": "static", "max_batch_size": 3}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    keep = tmp_path_factory.mktemp("keep") / "runs"
    spec = make_spec(SPEC)
    told = []
    found = compare(spec, lambda *what: told.append(what), keep=keep)
    return spec, found, told, keep


@pytest.mark.slow
def test_compare_measures_forwards_then_backwards_and_decides_alike(compared):
    _, found, told, _ = compared
    measuring = [what for _, _, what in told if what.startswith("measuring")]
    assert [what.split()[1] for what in measuring] == [
        "fcfs", "prefill_first", "static", "static", "prefill_first", "fcfs",
    ]  # fmt: skip
    assert [done for done, _, _ in told] == list(range(12))
    assert {total for _, total, _ in told} == {12}
    for point in found:
        assert point.num_runs == 2
        assert point.is_checked
        assert point.modelled_difference is None
        assert point.steps["num_steps"] == len(point.measured_ns) > 0
        assert (point.measured_ns > 0).all()


@pytest.mark.slow
def test_compare_reports_error_spread_and_interval_of_every_metric(compared):
    _, found, _, _ = compared
    for point in found:
        rows = {row.metric: row for row in point.rows}
        assert len(rows) == 20
        mean = rows["mean_e2el_ms"]
        assert mean.low <= mean.measured <= mean.high
        assert mean.error == pytest.approx(mean.simulated / mean.measured - 1)
        assert mean.interval is not None
        assert mean.interval[0] <= mean.interval[1]
        # Memory decides who is preempted, not time: all at once, one order, the same count.
        assert rows["num_preemptions"].simulated == rows["num_preemptions"].measured


@pytest.mark.slow
def test_write_makes_tables_json_and_figures(compared, tmp_path):
    spec, found, _, _ = compared
    write(found, spec, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"comparison.json", "comparison.md", "steps.png", "latency_cdf.png",
            "throughput_p99.png"} <= names  # fmt: skip
    data = json.loads((tmp_path / "comparison.json").read_text())
    assert [point["policy"] for point in data["points"]] == ["fcfs", "prefill_first", "static"]
    assert data["points"][0]["decisions"]["same_step_times"] == "identical"
    assert data["runs"] == "2 measured runs a point"
    metric = data["points"][0]["metrics"][0]
    assert {"measured", "simulated", "error", "spread", "interval"} <= set(metric)
    text = markdown(found, spec)
    assert "Kendall tau" in text
    assert text.count("| request_throughput |") == 3
    assert agreement(found).keys() == {""}


def no_measuring(*_, **__):
    raise AssertionError("measured again")


@pytest.mark.slow
def test_compare_takes_up_the_runs_that_were_kept(compared, monkeypatch):
    spec, found, _, keep = compared
    monkeypatch.setattr(comparison_module, "measure", no_measuring)
    again = compare(spec, keep=keep)
    assert [point.rows for point in again] == [point.rows for point in found]
    assert [point.steps for point in again] == [point.steps for point in found]


def test_runs_are_known_by_their_point_whatever_else_the_sweep_holds(compared, monkeypatch):
    spec, found, _, keep = compared
    monkeypatch.setattr(comparison_module, "measure", no_measuring)
    fewer = make_spec(
        {**SPEC, "name": "renamed", "sweep": {"policy": ["prefill_first"]},
         "cost_model": {"name": "roofline", "compute_efficiency": 0.4}}
    )  # fmt: skip
    (again,) = compare(fewer, keep=keep, check=False)
    assert again.num_runs == 2
    assert [row.measured for row in again.rows] == [row.measured for row in found[1].rows]
    assert again.rows[0].simulated != found[1].rows[0].simulated
    assert spec.cost_model != fewer.cost_model


@pytest.mark.slow
def test_run_of_a_policy_that_asks_for_estimates_is_of_one_cost_model(tmp_path):
    fast = on_real({**SPEC, "policy": "qoserve", "slo": {"ttft_ms": 900, "tpot_ms": 90}})
    slow = on_real(
        {**SPEC, "policy": "qoserve", "slo": {"ttft_ms": 900, "tpot_ms": 90},
         "cost_model": {"name": "roofline", "compute_efficiency": 0.4}}
    )  # fmt: skip
    kept = MeasuredRuns(tmp_path)
    measured = measure(fast)
    assert measured.result.provenance["real"]["estimates"] > 0
    kept.keep(fast, 0, measured)
    assert kept.find(fast, 0) is not None
    assert kept.find(slow, 0) is None
    assert kept.find(fast, 1) is None


def on_real(data):
    rest = {key: value for key, value in data.items() if key != "sweep"}
    return make_spec({**rest, "backend": "real"})


@pytest.mark.slow
def test_run_that_is_kept_again_takes_the_place_of_the_old_one(compared, tmp_path):
    _, _, _, keep = compared
    kept, fcfs = MeasuredRuns(tmp_path), on_real({**SPEC, "policy": "fcfs"})
    measured = MeasuredRuns(keep).find(fcfs, 0)
    kept.keep(fcfs, 0, measured._replace(machine="old"))
    kept.keep(fcfs, 0, measured._replace(machine="new"))
    assert kept.find(fcfs, 0).machine == "new"
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_identity_of_a_run_is_of_all_that_it_depends_on():
    plain = run_identity(on_real(SPEC))
    for aside in ({"repeats": 7}, {"throughput_bar": 0.3}, {"latency_bar": 0.3}):
        assert run_identity(on_real({**SPEC, "real": aside})) == plain
    # A key that is written with its default value is one that an earlier version may not have had.
    assert run_identity(on_real({**SPEC, "real": {"threads": 1}, "replications": 1})) == plain
    assert run_identity(on_real({**SPEC, "seed": 7})) != plain
    assert run_identity(on_real({**SPEC, "real": {"threads": 2}})) != plain
    modelled = {"clock": "modelled"}
    other = {
        **SPEC,
        "real": modelled,
        "cost_model": {"name": "roofline", "compute_efficiency": 0.4},
    }
    assert run_identity(on_real({**SPEC, "real": modelled})) != run_identity(on_real(other))


@pytest.mark.slow
def test_compare_that_runs_out_of_time_compares_what_there_is(tmp_path, monkeypatch, blank_figures):
    spec = make_spec(
        {**SPEC, "sweep": {"policy": ["fcfs", "prefill_first"], "workload.num_requests": [6, 5]}}
    )
    now_s = [0.0]

    def ten_seconds(*about):
        now_s[0] += 10.0
        return measure(*about)

    monkeypatch.setattr(comparison_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(comparison_module, "measure", ten_seconds)
    found = compare(spec, keep=tmp_path / "runs", max_s=15.0)
    assert [(p.label, p.num_runs, p.is_checked) for p in found] == [
        ("fcfs, num_requests=6", 1, False)
    ]
    assert runs_told(found, spec) == (
        "1 of 8 runs are measured; not one of: fcfs, num_requests=5; "
        "prefill_first, num_requests=6; prefill_first, num_requests=5"
    )
    assert "measured 1 of 2 times" in (text := markdown(found, spec))
    assert "same step times: not checked" in text
    assert to_data(found, spec)["points"][0]["num_runs"] == 1
    write(found, spec, tmp_path / "written")
    found = compare(spec, keep=tmp_path / "runs", check=False)
    assert runs_told(found, spec) == "2 measured runs a point"
    # One load after the other, each forwards and backwards.
    order = []

    def told(done, total, what):
        order.append(what)

    compare(spec, told, keep=tmp_path / "runs", check=False)
    measuring = [what.split(" ", 1)[1] for what in order if what.startswith("measuring")]
    assert measuring == [
        "fcfs, num_requests=6 (1/2)", "prefill_first, num_requests=6 (1/2)",
        "prefill_first, num_requests=6 (2/2)", "fcfs, num_requests=6 (2/2)",
        "fcfs, num_requests=5 (1/2)", "prefill_first, num_requests=5 (1/2)",
        "prefill_first, num_requests=5 (2/2)", "fcfs, num_requests=5 (2/2)",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.json", "plan_log.jsonl.gz"])
def test_kept_run_that_is_torn_is_refused_by_its_folder(compared, tmp_path, name):
    _, _, _, keep = compared
    folder = shutil.copytree(keep, tmp_path / "kept")
    for path in folder.glob(f"*/{name}"):
        content = path.read_bytes()
        path.write_bytes(b"{}" if name == "run.json" else content[: len(content) // 2])
    with pytest.raises(SpecError, match=r"fcfs-.*: not a measured run"):
        MeasuredRuns(folder).find(on_real({**SPEC, "policy": "fcfs"}), 0)


@pytest.mark.slow
def test_comparing_kept_runs_where_none_are_makes_no_folder(tmp_path):
    with pytest.raises(SpecError, match="holds 0 measured runs"):
        compare(make_spec(SPEC), keep=tmp_path / "kept", write_only=True)
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_kept_runs_of_a_gpu_are_compared_on_a_machine_without_one(compared, tmp_path, monkeypatch):
    _, _, _, keep = compared
    data = {**SPEC, "hardware": "h200", "real": {"device": "cuda", "repeats": 1}}
    data["engine"] = {**SPEC["engine"], "dtype": "bf16"}
    spec = make_spec({**data, "sweep": {"policy": ["fcfs"]}})
    with pytest.raises(SpecError, match="or use device cpu"):
        compare(spec, keep=tmp_path)
    with pytest.raises(SpecError, match=r"holds 0 measured runs, none of them of this experiment"):
        compare(spec, keep=tmp_path, write_only=True)
    measured = MeasuredRuns(keep).find(on_real({**SPEC, "policy": "fcfs"}), 0)
    assert measured is not None
    MeasuredRuns(tmp_path).keep(
        on_real({**data, "policy": "fcfs"}), 0, measured._replace(machine="NVIDIA H200")
    )
    (point,) = compare(spec, keep=tmp_path, write_only=True)
    assert point.num_runs == 1
    assert not point.is_checked


@pytest.mark.slow
def test_kept_runs_of_another_machine_are_not_mixed_with_those_of_this_one(compared, tmp_path):
    spec, _, _, keep = compared
    kept = MeasuredRuns(tmp_path)
    fcfs = on_real({**SPEC, "policy": "fcfs"})
    kept.keep(fcfs, 0, MeasuredRuns(keep).find(fcfs, 0)._replace(machine="Z80"))
    with pytest.raises(SpecError, match=r"runs of .*Z80.* cannot be compared with each other"):
        compare(spec, keep=tmp_path, max_s=-1.0)


@pytest.mark.parametrize(
    ("num_frozen", "asked"),
    [(0, ["collect", "freeze", "run", "unfreeze"]), (9, ["collect", "run"])],
)
def test_run_is_not_interrupted_by_searches_and_nothing_that_the_caller_froze_is_thawed(
    monkeypatch, num_frozen, asked
):
    told = []
    calls = {
        name: lambda name=name: told.append(name) for name in ("collect", "freeze", "unfreeze")
    }
    collector = SimpleNamespace(get_freeze_count=lambda: num_frozen, **calls)
    monkeypatch.setattr(measured_runs, "gc", collector)
    monkeypatch.setattr(measured_runs, "run", lambda spec, record: told.append("run"))
    measure(on_real(SPEC))
    assert told == asked


def test_runs_kept_in_the_repository_are_those_of_their_experiment(monkeypatch):
    folder = ROOT / "docs" / "results" / "h200" / "measured"
    names = {path.parent.name for path in folder.glob("*/run.json")}
    texts = [(folder / name / "run.json").read_text() for name in names]
    (of_kernels,) = {json.loads(text)["kernels"] for text in texts}
    monkeypatch.setattr(measured_runs, "kernels", lambda *about: of_kernels)
    found = set()
    for point in comparison_module.points(load_spec(ROOT / "experiments" / "compare-h200.yaml")):
        spec = comparison_module._on(point.spec, "real")
        for repeat in range(point.spec.real.repeats):
            name = f"{spec.policy.name}-{run_identity(spec)[:16]}-repeat-{repeat}"
            if name in names and MeasuredRuns(folder).find(spec, repeat) is not None:
                found.add(name)
    assert len(names) > 1
    assert found == names


def test_measured_runs_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SpecError, match="something else"):
        MeasuredRuns(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def row(policy, measured, simulated):
    return Compared(
        policy, "p99_ttft_ms", measured, measured, measured, simulated,
        simulated / measured - 1, None, 1, math.nan, 0.1,
    )  # fmt: skip


def test_rank_agreement_is_one_for_the_same_order_and_minus_one_for_the_opposite():
    same = [row("a", 1.0, 10.0), row("b", 2.0, 20.0), row("c", 3.0, 30.0)]
    assert rank_agreement(same)["p99_ttft_ms"] == pytest.approx(1.0)
    opposite = [replace(r, simulated=-r.simulated) for r in same]
    assert rank_agreement(opposite)["p99_ttft_ms"] == pytest.approx(-1.0)


def test_compared_holds_within_the_bar_or_inside_the_spread():
    inside = replace(row("a", 100.0, 130.0), low=90.0, high=140.0)
    assert inside.holds
    assert not row("a", 100.0, 130.0).holds
    assert row("a", 100.0, 109.0).holds
    stricter = replace(row("a", 100.0, 105.1), bar=0.05)
    assert not stricter.holds
    assert replace(stricter, simulated=104.9, error=0.049).holds


@pytest.mark.parametrize(("of", "is_found"), [(None, True), ("ours", True), ("another", False)])
def test_kept_run_is_measured_anew_only_if_it_asked_another_cost_model(
    tmp_path, monkeypatch, of, is_found
):
    runs = MeasuredRuns(tmp_path / "kept")
    folder = tmp_path / "kept" / "one"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"cost_model": of, "machine": "here"}))
    with gzip.open(folder / "plan_log.jsonl.gz", "wt"):
        pass
    monkeypatch.setattr(runs, "_folder_of", lambda spec, repeat: folder)
    monkeypatch.setattr(measured_runs, "_cost_model_hash", lambda spec: "ours")
    monkeypatch.setattr(measured_runs.RunResult, "load", lambda folder: "the result")
    found = runs.find(None, 0)
    assert (found is not None) == is_found
    if is_found:
        assert found == ("the result", [], "here", [])


def test_runs_that_are_missing_are_counted_over_all_points():
    spec = make_spec({**SPEC, "real": {**SPEC["real"], "repeats": 3}})
    labels = [point.label for point in points(spec)]
    found = [SimpleNamespace(label=label, num_runs=3) for label in labels]
    assert runs_told(found, spec) == "3 measured runs a point"
    told = runs_told(found[:1], spec)
    assert told.startswith(f"3 of {3 * len(labels)} runs are measured; not one of: {labels[1]}")
    found[0].num_runs = 1
    assert runs_told(found, spec) == f"{3 * len(labels) - 2} of {3 * len(labels)} runs are measured"
