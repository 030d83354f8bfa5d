import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.analysis import by_class
from schedlab.experiments.analysis.by_class import class_rows
from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces.lengths import fixed
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.synthetic import synthesize
from schedlab.traces.traffic_classes import PREFIX_BLOCK_TOKENS, TrafficClass, in_classes

BASE = {"trace": "azure-conv", "num_requests": 400, "request_rate": 5}


def spec(classes, **more):
    return make_spec({"workload": {**BASE, "classes": classes}, **more})


def test_requests_are_drawn_by_their_shares_and_keep_arrivals_and_lengths():
    trace = synthesize(4000, seed=1)
    mixed = in_classes(trace, {"a": TrafficClass(share=3), "b": TrafficClass(share=1)}, seed=1)
    assert np.mean(mixed.tenant == "a") == pytest.approx(0.75, abs=0.03)
    assert (mixed.arrival_ns == trace.arrival_ns).all()
    assert (mixed.prompt_tokens == trace.prompt_tokens).all()
    assert mixed.priority is None
    assert any("requests in classes: a " in line for line in mixed.report.lines())


def test_a_class_has_its_own_lengths_targets_and_priority():
    trace = synthesize(500, seed=2)
    classes = {
        "a": TrafficClass(prompt=fixed(7), output=fixed(3), priority=-1, ttft_ms=9, e2el_ms=2000),
        "b": TrafficClass(tpot_ms=40),
    }
    mixed = in_classes(trace, classes, seed=2)
    a = mixed.tenant == "a"
    assert set(mixed.prompt_tokens[a]) == {7}
    assert set(mixed.output_tokens[a]) == {3}
    assert (mixed.prompt_tokens[~a] == trace.prompt_tokens[~a]).all()
    assert set(mixed.priority[a]) == {-1}
    assert set(mixed.priority[~a]) == {0}
    assert set(mixed.slo_ttft_ms[a]) == {9}
    assert np.isnan(mixed.slo_ttft_ms[~a]).all()
    assert set(mixed.deadline_s[a]) == {2.0}
    assert set(mixed.slo_tpot_ms[~a]) == {40}


def test_requests_of_a_class_stay_when_another_class_changes():
    trace = synthesize(500, seed=3)
    other = {"a": TrafficClass(output=fixed(5), prefix_tokens=64, prefix_groups=4)}
    one = in_classes(trace, {**other, "b": TrafficClass()}, seed=3)
    two = in_classes(trace, {**other, "b": TrafficClass(prompt=fixed(9))}, seed=3)
    a = one.tenant == "a"
    assert (a == (two.tenant == "a")).all()
    rows = np.flatnonzero(a)
    assert one.prefix.take(rows).rows() == two.prefix.take(rows).rows()


def test_prompts_of_a_group_share_whole_blocks_and_classes_share_none():
    trace = synthesize(600, seed=4)
    classes = {
        "a": TrafficClass(prefix_tokens=70, prefix_groups=2, prompt=fixed(100)),
        "b": TrafficClass(prefix_tokens=70, prompt=fixed(33)),
        "c": TrafficClass(),
    }
    mixed = in_classes(trace, classes, seed=4)
    rows = mixed.prefix.rows()
    seen = {
        name: {r for r, t in zip(rows, mixed.tenant, strict=True) if t == name} for name in "abc"
    }
    assert len(seen["a"]) == 2
    assert all(len(ids) == 70 // PREFIX_BLOCK_TOKENS for ids in seen["a"])
    (short,) = seen["b"]
    assert len(short) == 32 // PREFIX_BLOCK_TOKENS, "the last token is computed anyway"
    assert seen["c"] == {()}
    blocks = [block for name in "ab" for ids in seen[name] for block in ids]
    assert len(blocks) == len(set(blocks))


def test_a_class_needs_a_share():
    with pytest.raises(TraceError, match="shares > 0"):
        in_classes(synthesize(3), {})
    with pytest.raises(TraceError, match="shares > 0"):
        in_classes(synthesize(3), {"a": TrafficClass(share=0)})


@pytest.mark.slow
def test_experiment_with_classes_reports_each_of_them(tmp_path):
    one = spec(
        {
            "paying": {"priority": 0, "slo": {"ttft_ms": 300}},
            "free": {"share": 2, "priority": 1, "trace": "azure-code"},
        },
        slo={"ttft_ms": 4000},
    )
    result = run(one)
    result.save(tmp_path)
    rows = {row.name: row.metrics for row in class_rows(tmp_path)}
    assert list(rows) == ["free", "paying", "all"]
    assert rows["free"]["num_requests"].mean + rows["paying"]["num_requests"].mean == 400
    by_priority = {row.name: row.metrics for row in class_rows(tmp_path, "priority")}
    assert by_priority["1"]["p99_ttft_ms"] == rows["free"]["p99_ttft_ms"]


@pytest.mark.slow
def test_by_class_shows_what_each_class_found_in_the_cache(tmp_path):
    shared = {"prompt_tokens": 800, "shared_prefix": {"tokens": 640}}
    run(spec({"agent": shared, "chat": {}}, engine={"enable_prefix_caching": True})).save(tmp_path)
    found = {row.name: row.metrics["prefix_hit_share"].mean for row in class_rows(tmp_path)}
    assert found["agent"] == pytest.approx(640 / 800, abs=0.05)
    assert np.isnan(found["chat"])
    assert 0 < found["all"] < found["agent"]


@pytest.mark.slow
def test_shared_prefix_is_computed_once_with_prefix_caching():
    shared = {"prompt_tokens": 800, "shared_prefix": {"tokens": 640, "groups": 2}}
    classes = {"agent": shared, "chat": {"share": 1}}

    def hits(cached):
        result = run(spec(classes, engine={"enable_prefix_caching": cached}))
        return np.asarray(result.requests["prefix_hit_tokens"]), result.requests["tenant"]

    tokens, tenant = hits(True)
    agents = tokens[tenant == "agent"]
    assert np.count_nonzero(agents == 640) >= len(agents) - 20
    assert not tokens[tenant == "chat"].any()
    assert not hits(False)[0].any()


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        ({"a": {"shar": 1}}, "classes.a.shar: unknown key; did you mean share"),
        ({"a": {"share": 0}}, "classes.a.share: must be > 0"),
        ({"a": {"trace": "azure-cove"}}, "classes.a.trace: unknown preset 'azure-cove'"),
        ({"a": {"prompt_tokens": "unifrm"}}, "classes.a.prompt_tokens.distribution: unknown"),
        ({"a": {"shared_prefix": {"groups": 2}}}, "classes.a.shared_prefix.tokens: is required"),
        ({"a": {"slo": {"ttft": 2}}}, "classes.a.slo.ttft: unknown key"),
        ({"a.b": {}}, "'a.b' is no name"),
    ],
)
def test_mistake_in_a_class_is_named(classes, told):
    with pytest.raises(SpecError, match=told):
        spec(classes)


def test_share_of_a_class_can_be_swept(tmp_path):
    swept = spec({"a": {}, "b": {}}, sweep={"workload.classes.a.share": [1, 3]})
    counts = [
        np.count_nonzero(load_workload(point.spec, 8192).tenant == "a") for point in points(swept)
    ]
    assert counts[0] < 240 < 260 < counts[1]


def test_experiment_without_classes_keeps_its_identity():
    plain = make_spec({"workload": BASE})
    assert "classes" not in plain.to_data()["workload"]
    assert spec_hash(plain) != spec_hash(spec({"a": {}}))
    assert load_workload(plain, 8192).tenant is None


def test_classes_with_arrivals_of_their_own_share_the_first_requests():
    flood = {"arrivals": {"process": "on_off", "rate": 6, "mean_on_s": 5, "mean_off_s": 15}}
    classes = {"steady": {"request_rate": 2}, "flood": flood}
    one = make_spec({"workload": {"trace": "azure-conv", "num_requests": 600, "classes": classes}})
    trace = load_workload(one, 8192)
    steady = trace.arrival_ns[trace.tenant == "steady"]
    assert len(trace) == 600
    assert 2 * steady[-1] / 1e9 == pytest.approx(len(steady), rel=0.2)
    # The other class changes, the steady one does not.
    classes["flood"] = {"request_rate": 50}
    other = load_workload(
        make_spec({"workload": one.to_data()["workload"] | {"classes": classes}}), 8192
    )
    again = other.arrival_ns[other.tenant == "steady"]
    assert (again == steady[: len(again)]).all()


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        ({"classes": {"a": {"request_rate": 1}, "b": {}}}, "a has arrivals of its own, so b needs"),
        ({"request_rate": 3, "classes": {"a": {"request_rate": 1}}}, "request_rate: the classes"),
        ({"classes": {"a": {"request_rate": 1, "share": 2}}}, "share divides the workload's"),
        ({"classes": {"a": {"arrivals": "all_at_once"}}}, "of a whole workload, not of a class"),
        ({"classes": {"a": {"arrivals": "poison"}}}, "'poison' is not a choice"),
        ({"classes": {"a": {"arrivals": {"process": "poisson", "rat": 2}}}}, "rat"),
    ],
)
def test_contradiction_among_arrivals_is_named(workload, told):
    with pytest.raises(SpecError, match=told):
        make_spec({"workload": {"trace": "azure-conv", "num_requests": 5, **workload}})


def test_class_is_measured_over_all_seeds_and_over_those_that_know_the_metric(monkeypatch):
    measured = [{"a": {"x": 1.0}}, {"a": {"x": 3.0}, "b": {"x": 7.0}}]
    points = [SimpleNamespace(settings={"k": "v"}, load=lambda i=i: i) for i in range(2)]
    monkeypatch.setattr(by_class, "read_points", lambda folder: points)
    monkeypatch.setattr(by_class, "_classes", lambda result, column, asked: measured[result])
    rows = class_rows(None, metrics=())
    assert [(row.setting, row.name, row.metrics["x"].mean) for row in rows] == [
        ("k=v", "a", 2.0), ("k=v", "b", 7.0),
    ]  # fmt: skip
    assert rows[0].metrics["x"].half_width > 1.0
    assert [(row.num_runs, row.num_without) for row in rows] == [(2, 0), (1, 1)]
    names = [line[1] for line in by_class.class_table(Path(), metrics=())[1]]
    assert names == ["a", "b (1 of 2 runs)"]


def test_share_from_the_cache_that_one_seed_lacks_counts_as_none_of_it(monkeypatch):
    measured = [{"a": {"prefix_hit_share": 0.0}}, {"a": {"prefix_hit_share": 0.5}}]
    points = [SimpleNamespace(settings={}, load=lambda i=i: i) for i in range(2)]
    monkeypatch.setattr(by_class, "read_points", lambda folder: points)
    monkeypatch.setattr(by_class, "_classes", lambda result, column, asked: measured[result])
    assert class_rows(Path(), metrics=())[0].metrics["prefix_hit_share"].mean == 0.25
    measured[1] = measured[0]
    assert math.isnan(class_rows(Path(), metrics=())[0].metrics["prefix_hit_share"].mean)


@pytest.mark.parametrize(
    ("column", "values", "names"),
    [
        ("tenant", ["all", "b", "b"], ["all", "b", "all requests"]),
        ("priority", [1_000_000, 1_000_001, 1_000_001], ["1000000", "1000001", "all"]),
        ("slo_ttft_ms", [0.5, 2000001.0, 2000001.0], ["0.5", "2000001", "all"]),
    ],
)
def test_each_class_has_a_row_of_its_own_beside_that_of_all(monkeypatch, column, values, names):
    workload = {"prompt_tokens": 9, "output_tokens": 2, "num_requests": 3, "request_rate": 9}
    done = run(make_spec({"workload": workload}))
    done = replace(done, requests={**done.requests, column: np.array(values)})
    point = SimpleNamespace(settings={}, load=lambda: done)
    monkeypatch.setattr(by_class, "read_points", lambda folder: [point])
    rows = class_rows(Path(), column, ["num_requests"])
    assert [row.name for row in rows] == names
    assert [row.metrics["num_requests"].mean for row in rows] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("told", ["prefix", "prompt"])
def test_hashes_or_texts_that_a_class_draws_anew_are_told_of(told):
    trace = synthesize(4, seed=1)
    if told == "prefix":
        trace = replace(trace, prefix=PrefixHashes.from_rows([[]] * 4, 16))
    else:
        trace = replace(trace, prompt=np.array(["text"] * 4, dtype=object))
    mixed = in_classes(trace, {"a": TrafficClass(prompt=fixed(7))})
    assert mixed.prefix is None
    assert mixed.prompt is None
    assert any("prefix hashes of the trace left out" in line for line in mixed.report.lines())


def test_by_class_refuses_a_metric_of_the_engine_wherever_it_stands_among_those_asked_for():
    for names in (("num_steps",), ("p99_ttft_ms", "num_steps"), ("busy_s", "mean_e2el_ms")):
        engine = "busy_s" if "busy_s" in names else "num_steps"
        with pytest.raises(SpecError, match=f"^{engine} is of the engine, which serves all"):
            class_rows(Path("nowhere"), metrics=names)
