"""Searches find a known answer, notice what is odd, and keep their runs."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.commands.app import app
from schedlab.experiments.commands.running import PointsBar
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.search import cheapest as cheapest_of
from schedlab.experiments.search import find as finding
from schedlab.experiments.search import tune as tuning
from schedlab.experiments.search.bracket import Bracket, Probe, bracket
from schedlab.experiments.search.cheapest import cheapest
from schedlab.experiments.search.constraints import Constraint
from schedlab.experiments.search.find import (
    Found,
    _is_whole,
    _remarks,
    find,
    stays,
    suffices,
    told_way,
    verdicts,
)
from schedlab.experiments.search.integers import takes_integers
from schedlab.experiments.search.search_report import (
    find_data,
    find_lines,
    find_rows,
    find_table,
    tune_lines,
    tune_rows,
)
from schedlab.experiments.search.tune import Trial
from schedlab.experiments.specification import search as search_section
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.search import Find, Tune, check_search
from schedlab.experiments.specification.sweep import points
from schedlab.experiments.statistics import Estimate, with_interval
from schedlab.experiments.sweeps.jobs import Done, Job
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.policies import registry
from schedlab.sim.errors import PolicyError, SchedlabError, SpecError


def searched(
    excess, between=None, start=1.0, tolerance=0.02, whole=False, near=None, tried=None, least=False
):
    """Drive a search with a function in place of runs."""
    search = bracket(between, start, tolerance, whole, near, least=least)
    asked = next(search)
    try:
        while True:
            if tried is not None:
                tried += asked
            asked = search.send([Probe(value, (excess(value),)) for value in asked])
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("truth", [1.1, 3.7, 9.99, 36.0])
@pytest.mark.parametrize("between", [(1.0, 40.0), None])
def test_bracket_holds_the_truth_within_the_tolerance(truth, between):
    found = searched(lambda value: value - truth, between)
    assert found.value <= truth < found.breaks_at <= 1.02 * found.value
    assert found.bound == ""
    assert not found.holds_again


@pytest.mark.parametrize("start", [0.01, 1.0, 500.0])
def test_bracket_without_a_range_doubles_or_halves_from_the_start(start):
    found = searched(lambda value: value - 7.0, start=start)
    assert found.value <= 7.0 < found.breaks_at


@pytest.mark.parametrize("truth", [1, 2, 17, 63])
def test_bracket_of_integers_ends_at_neighbours(truth):
    found = searched(lambda value: value - truth, (1.0, 64.0), whole=True)
    assert (found.value, found.breaks_at) == (truth, truth + 1)


def test_bracket_tells_answers_beyond_the_range():
    high = searched(lambda value: -1.0, (1.0, 40.0))
    assert (high.value, high.breaks_at, high.bound) == (40.0, math.inf, "at least")
    low = searched(lambda value: 1.0, (1.0, 40.0))
    assert (low.value, low.bound) == (1.0, "below")


def test_bracket_tells_a_break_that_heals_and_answers_below_it():
    found = searched(lambda value: 1.0 if 2.0 < value < 10.0 else -1.0, (1.0, 40.0))
    assert found.value <= 2.0 < found.breaks_at
    assert found.holds_again
    assert found.falls(0)


def test_bracket_at_a_value_that_just_meets_its_bar_holds():
    # The scan of 1 to 100 tries 10, the middle of its logarithms.
    found = searched(lambda value: value - 10.0, (1.0, 100.0))
    assert 10.0 <= found.value < found.breaks_at <= 10.2
    level = searched(lambda value: -1.0, (1.0, 40.0))
    assert (level.value, level.breaks_at, level.bound) == (40.0, math.inf, "at least")
    assert level.falls(0) == []


@pytest.mark.parametrize(
    ("at_most", "value", "excess"),
    [(True, 7.0, 2.0), (True, 4.0, -1.0), (False, 7.0, -2.0), (False, 4.0, 1.0)],
)
def test_bar_is_broken_by_what_a_value_is_beyond_it(at_most, value, excess):
    constraint = Constraint("m", 5.0, at_most)
    assert constraint.excess({"m": value}) == excess
    assert constraint.excess({"m": math.nan}) == math.inf


def found(label, values, bound=""):
    brackets = tuple(Bracket(value, 2 * value, bound, ()) for value in values)
    return Found(label, brackets, (), ())


def test_verdict_is_given_only_between_answers_that_were_reached():
    asked = spec(find="max workload.request_rate subject to failed <= 0").find
    slow, fast = found("slow", [10.0, 20.0]), found("fast", [12.0, 23.9])
    (said,) = verdicts(asked, [slow, fast])
    assert said.startswith("no verdict on fast and slow in workload.request_rate from 2 seeds")
    slow, fast = found("slow", [10.0, 20.0] * 3), found("fast", [12.0, 23.9] * 3)
    (said,) = verdicts(asked, [slow, fast])
    assert said.startswith("fast beats slow in workload.request_rate by 19.7 %")
    beyond = found("beyond", [30.0, 40.0] * 3, "at least")
    assert verdicts(asked, [slow, beyond]) == verdicts(asked, [beyond, slow]) == []
    assert verdicts(asked, [found("one", [1.0]), found("two", [2.0])]) == []


def test_metric_that_ripples_by_less_than_a_per_cent_is_not_remarked_on():
    bracket = Bracket(2.0, 3.0, "", (Probe(1.0, (-1.0,)), Probe(2.0, (-1.99,))))
    metrics = [{"offered_request_rate": 1.0, "request_throughput": 1.0}]
    assert _remarks([Constraint("completed", 100.0, at_most=True)], [bracket], metrics, False) == []
    (remark,) = _remarks([Constraint("completed", 99.0, at_most=True)], [bracket], metrics, False)
    assert remark.endswith("most from 98 at 1 to 97.01 at 2")


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        # Of 9 at least there were 10 and then 12; of 9 at most 8 and then 6.
        (Constraint("completed", 9.0, at_most=False), "most from 10 at 1 to 12 at 2"),
        (Constraint("completed", 9.0, at_most=True), "most from 8 at 1 to 6 at 2"),
    ],
)
def test_remark_tells_the_metric_where_it_is_not_monotone(constraint, said):
    bracket = Bracket(2.0, 3.0, "", (Probe(1.0, (-1.0,)), Probe(2.0, (-3.0,))))
    metrics = [{"offered_request_rate": 1.0, "request_throughput": 1.0}]
    (remark,) = _remarks([constraint], [bracket], metrics, is_part=True)
    assert remark == f"completed is not monotone over what was tried: {said}"


@pytest.mark.parametrize("truth", [9.3, 9.96, 10.0, 10.4, 39.5, 1.01])
def test_bracket_near_the_truth_takes_few_runs_within_its_range(truth):
    tried = []
    near = min(max(truth, 1.0), 10.0) if truth < 11 else truth
    found = searched(lambda value: value - truth, (1.0, 40.0), near=near, tried=tried)
    assert found.value <= truth * (1 + 1e-12) < found.breaks_at <= found.value * 1.02
    assert len(tried) <= 5
    assert 1.0 <= min(tried) <= max(tried) <= 40.0


def test_bracket_takes_what_cannot_be_measured_as_a_break():
    found = searched(lambda value: math.inf if value > 5 else -1.0, (1.0, 40.0))
    assert found.value <= 5 < found.breaks_at


@pytest.mark.parametrize("near", [2.0, 30.0])
def test_bracket_near_a_value_strides_on_where_it_is_not_there(near):
    tried = []
    found = searched(lambda value: value - 7.0, (1.0, 40.0), near=near, tried=tried)
    assert found.value <= 7.0 < found.breaks_at <= 1.02 * found.value
    assert len(tried) < 15
    beyond = searched(lambda value: -1.0, (1.0, 40.0), near=near)
    assert (beyond.value, beyond.bound) == (40.0, "at least")
    below = searched(lambda value: 1.0, (1.0, 40.0), near=near)
    assert (below.value, below.bound) == (1.0, "below")


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("least", [True, False])
def test_strides_from_a_value_that_is_expected_grow_to_the_double_and_no_further(upwards, least):
    tried = []
    search = bracket(None, 1.0, 0.05, False, 100.0, least=least)
    (value,) = next(search)
    for _ in range(6):
        tried.append(value)
        (value,) = search.send([Probe(value, (-1.0 if upwards is not least else 1.0,))])
    first = 1.05**2.5
    strides = [first, first**2, first**4, 2.0, 2.0]
    expected = 100 * np.cumprod([1.0, *strides]) ** (1 if upwards else -1)
    assert tried == pytest.approx(expected)


@pytest.mark.parametrize("truth", [1, 3, 17])
def test_bracket_of_integers_near_a_value_ends_at_neighbours(truth):
    found = searched(lambda value: value - truth, (1.0, 40.0), whole=True, near=truth + 1.0)
    assert (found.value, found.breaks_at) == (truth, truth + 1)


# -- the section -------------------------------------------------------------------------------

WORKLOAD = {"trace": "fixed", "num_requests": 60, "request_rate": 4}


def spec(**keys):
    return make_spec({"name": "s", "workload": WORKLOAD, **keys})


def test_find_reads_a_sentence():
    said = "max workload.request_rate between 1 and 40 subject to p99_ttft_ms <= 500, completed>=9"
    assert spec(find=said).find == Find(
        maximize="workload.request_rate",
        between=(1.0, 40.0),
        at_most={"p99_ttft_ms": 500.0},
        at_least={"completed": 9.0},
    )


def test_find_sentence_with_a_metric_between_two_bounds_reads_both():
    said = "max workload.request_rate subject to completed >= 2 and completed <= 9"
    asked = spec(find=said).find
    assert (asked.at_least, asked.at_most) == ({"completed": 2.0}, {"completed": 9.0})


@pytest.mark.parametrize(
    ("find", "message"),
    [
        ("min workload.request_rate", "write it as a mapping, or as: max KEY"),
        ("max a.b subject to p99_ttft_ms < 5", "is no constraint"),
        ("max a.b subject to p99_ttft_ms <= fast", "'fast' is no number"),
        ("max a.b subject to p99_tft_ms <= 5", "did you mean p99_ttft_ms?"),
        ("max a.b subject to failed <= 5 and failed <= 9", "failed <= stands there twice"),
        ("max a.b subject to failed>=5, failed <= 9, failed >= 5", "failed >= stands there twice"),
        ({"maximize": "a.b"}, "without a constraint"),
        ({"maximize": "a.b", "between": [4, 1], "at_most": {"failed": 0}}, "must rise"),
    ],
)
def test_find_that_makes_no_sense_raises(find, message):
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        spec(find=find)


def test_find_of_a_swept_key_raises():
    with pytest.raises(SpecError, match="is swept as well"):
        spec(
            find="max workload.request_rate subject to failed <= 0",
            sweep={"workload.request_rate": [1, 2]},
        )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"find": "max workload.request_rate subject to slo_attainment >= 0.9"},
         "find.at_least.slo_attainment: slo_attainment is of targets, and no request has one; add "
         "slo.ttft_ms or slo.tpot_ms or slo.e2el_ms"),
        ({"find": "max workload.request_rate subject to tpot_slo_attainment >= 0.9",
          "slo": {"ttft_ms": 9}}, "no request has one; add slo.tpot_ms"),
        ({"tune": {"maximize": "request_goodput", "over": {"engine.max_num_seqs": [8, 64]}}},
         "tune.maximize: request_goodput is of targets, and no request has one"),
        ({"tune": {"minimize": "deadline_misses", "over": {"engine.max_num_seqs": [8, 64]}}},
         "tune.minimize: deadline_misses is of targets, and no request has one"),
    ],
)  # fmt: skip
def test_search_by_targets_that_no_request_has_is_refused_at_its_key(section, said):
    with pytest.raises(SpecError, match=f"^{re.escape(said)}|{re.escape(said)}$"):
        spec(**section)


@pytest.mark.parametrize(
    "section",
    [
        {"find": "max workload.request_rate subject to slo_attainment >= 0.9",
         "slo": {"e2el_ms": 9}},
        {"find": "min slo.ttft_ms subject to slo_attainment >= 0.9"},
        {"find": "max workload.request_rate subject to slo_attainment >= 0.9",
         "sweep": {"slo.ttft_ms": [9, 99]}},
        {"tune": {"maximize": "request_goodput", "over": {"slo.ttft_ms": [8, 64]}}},
    ],
)  # fmt: skip
def test_search_by_targets_that_something_gives_is_allowed(section):
    assert spec(**section)


class Gives(Runs):
    """Runs that all give the same metrics."""

    def __init__(self, folder, **metrics):
        super().__init__(Store(folder), InProcess())
        self.given = metrics

    def tried(self, wanted):
        return [PointMetrics(label, {}, 0, "", self.given) for _, label in wanted]


@pytest.mark.parametrize(
    ("metric", "num_rejected"),
    [
        ("p99_tpot_ms", 0.0),
        ("p99_tpot_ms", 3.0),
        ("of_class(metric=p99_ttft_ms, column=tenant, value=a)", 0.0),
    ],
)
def test_find_by_what_runs_do_not_have_is_an_error_and_no_answer(tmp_path, metric, num_rejected):
    asked = spec(find=f"max workload.request_rate between 1 and 8 subject to {metric} <= 100")
    said = f"request_rate=1, seed 0: {metric} is not a number, though 60 requests completed"
    runs = Gives(tmp_path, **{metric: math.nan}, completed=60.0, rejected=num_rejected)
    with pytest.raises(SchedlabError, match=re.escape(said)):
        find(asked, runs)


@pytest.mark.parametrize(
    ("metric", "others"),
    [
        ("p99_tpot_ms", {"completed": 0.0}),
        ("mean_session_s", {"completed": 9.0, "completed_sessions": 0.0}),
        (
            "of_class(metric=p99_ttft_ms, column=tenant, value=a)",
            {"completed": 9.0, "rejected": 3.0},
        ),
    ],
)
def test_find_takes_runs_in_which_nobody_was_served_as_a_break(tmp_path, metric, others):
    asked = spec(find=f"max workload.request_rate between 1 and 8 subject to {metric} <= 100")
    given = {metric: math.nan, "offered_request_rate": 1.0, "request_throughput": 0.0, **others}
    (one,) = find(asked, Gives(tmp_path, **given))
    assert one.bound == "below"


@pytest.mark.parametrize("name", ["p99_tpot_ms", "p99_itl_ms"])
def test_tune_by_what_runs_do_not_have_is_an_error_and_no_answer(tmp_path, name):
    asked = spec(tune={"minimize": "p99_tpot_ms", "at_most": {"p99_itl_ms": 9},
                       "over": {"engine.max_num_seqs": [8, 64]}})  # fmt: skip
    given = {"p99_tpot_ms": 1.0, "p99_itl_ms": 1.0, "completed": 60.0, name: math.nan}
    with pytest.raises(SpecError, match=f"{name} is not a number, though 60 requests completed"):
        tuning.tune(asked, Gives(tmp_path, **given))


def test_search_sections_do_not_change_what_a_point_is(tmp_path):
    plain = spec()
    asked = spec(find="max workload.request_rate subject to failed <= 0")
    assert [p.spec for p in find_points(asked)] == [p.spec for p in find_points(plain)]


def find_points(one):
    from schedlab.experiments.specification.sweep import points

    return points(one)


@pytest.mark.slow
def test_find_on_runs_brackets_the_bar_for_every_seed(tmp_path):
    asked = spec(
        find="max workload.request_rate between 2 and 100 subject to p99_ttft_ms <= 120",
        replications=2,
        workload={**WORKLOAD, "num_requests": 20},
    )
    runs = Runs(Store(tmp_path / "out"), InProcess())
    (found,) = find(asked, runs)
    assert len(found.brackets) == 2
    for one, metrics in zip(found.brackets, found.metrics, strict=True):
        assert metrics["p99_ttft_ms"] <= 120
        assert one.bound == ""
        assert one.breaks_at <= 1.02 * one.value
        (breaking,) = [probe for probe in one.probes if probe.value == one.breaks_at]
        assert breaking.excess[0] > 0
    assert len(list((tmp_path / "out").glob("*/result.json"))) == runs.num_asked


@pytest.mark.slow
def test_find_of_an_integer_key_answers_in_integers(tmp_path):
    asked = spec(
        find="max engine.max_num_seqs between 1 and 16 subject to p99_tpot_ms <= 40",
        policy="fcfs",
    )
    (found,) = find(asked, Runs(Store(tmp_path / "out"), InProcess()))
    assert found.values[0].is_integer()
    assert found.brackets[0].breaks_at - found.values[0] in (1.0, math.inf)


@pytest.mark.slow
def test_find_command_writes_what_was_tried_and_takes_it_up_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(
        "workload: {trace: fixed, num_requests: 12}\nreplications: 2\n"
        "find: {maximize: workload.request_rate, between: [2, 64], at_most: {mean_ttft_ms: 60},\n"
        "  tolerance: 0.3, settle: false}\n"
        "sweep: {policy: [fcfs, static]}\n"
    )
    from schedlab.experiments.commands import sweep as commands

    monkeypatch.setattr("schedlab.experiments.sweeps.workers.Processes", lambda n: InProcess())
    done = CliRunner().invoke(app, ["find", "s.yaml"])
    assert done.exit_code == 0, done.output
    assert commands.results_folder(make_spec({"name": "s", "workload": WORKLOAD}), "find").is_dir()
    data = json.loads(Path("results/s-find/find.json").read_text())
    assert [one["label"] for one in data["settings"]] == ["fcfs", "static"]
    assert data["settings"][1]["bound"] == "below"
    assert "a constraint breaks at the smallest value tried already" in done.output
    assert not list(Path("results").glob("*/*/*.parquet"))
    whole = CliRunner().invoke(app, ["find", "s.yaml", "--tables", "-o", "whole", "--json"])
    assert json.loads(whole.stdout)["settings"] == data["settings"]
    assert list(Path("whole").glob("*/*.parquet"))
    gaps = "find=max workload.request_rate subject to largest(latency=itl) <= 60"
    CliRunner().invoke(app, ["find", "s.yaml", gaps, "-o", "tables", "find.settle=false"])
    assert list(Path("tables").glob("*/*.parquet"))  # such a metric is computed from them
    before = {p: p.stat().st_mtime_ns for p in Path("results").glob("*/*/result.json")}
    again = CliRunner().invoke(app, ["find", "s.yaml", "--json"])
    assert json.loads(again.stdout) == data
    assert before == {p: p.stat().st_mtime_ns for p in Path("results").glob("*/*/result.json")}


# -- tuning ------------------------------------------------------------------------------------


class Surface:
    """Stands for runs: a known goal and constraint over two keys."""

    num_asked = 0

    def tried(self, wanted):
        self.num_asked += len(wanted)
        return [PointMetrics(label, {}, 0, "", self._metrics(one)) for one, label in wanted]

    def _metrics(self, one):
        seqs, tokens = one.engine.max_num_seqs, one.engine.max_num_batched_tokens
        peak = -(math.log(seqs / 60) ** 2)
        noise = 0.001 * ((7 * one.seed + seqs) % 5)
        return {
            "output_throughput": 100 + peak + math.log(tokens) + noise,
            "p99_itl_ms": tokens / 10,
        }


def tuned(**keys):
    section = {
        "settle": False,
        "maximize": "output_throughput",
        "over": {"engine.max_num_seqs": [8, 512], "engine.max_num_batched_tokens": [64, 8192]},
        "at_most": {"p99_itl_ms": 100},
        "tolerance": 0.05,
        **keys,
    }
    return tuning.tune(spec(tune=section, replications=3), Surface())


@pytest.mark.slow
def test_tune_finds_the_peak_within_the_bar():
    found = tuned(at_most={"p99_itl_ms": 100})
    assert found.best.values["engine.max_num_seqs"] == pytest.approx(60, rel=0.1)
    assert 0.9 * 1000 <= found.best.values["engine.max_num_batched_tokens"] <= 1000
    assert found.best.holds
    assert not found.given.holds  # 2048 tokens break the constraint
    assert "which breaks a constraint" in found.verdict
    assert len(found.trials) <= 100


@pytest.mark.parametrize(
    ("given", "seeds", "said"),
    [
        ((10.0, 11.0, 9.0, 10.5, 10.2), -0.1, "beats"),
        ((10.0, 11.0, 9.0, 10.5, 10.2), 0.2, "beats"),
        ((30.0, 31.0, 29.0, 30.5, 30.2), 0.2, "no"),
        ((10.0,), -0.1, "no verdict from one run"),
        ((10.0,), 0.2, "no verdict from one run"),
        (None, 0.0, "the experiment's own values are the best found"),
    ],
)
def test_tune_tells_the_winner_against_the_given_values_and_whether_those_hold(
    monkeypatch, given, seeds, said
):
    key = "engine.max_num_seqs"
    asked = spec(
        tune={"maximize": "output_throughput", "over": {key: [8, 128]},
              "at_most": {"p99_itl_ms": 100}},
    )  # fmt: skip
    own = asked.engine.max_num_seqs if given is not None else 16
    if given is None:
        asked = asked.model_copy(
            update={"engine": asked.engine.model_copy(update={"max_num_seqs": 16})}
        )
    goals = (30.0, 31.5, 29.2, 30.4, 30.1)[: len(given or [0] * 5)]
    best = Trial({key: 16}, goals, (-0.1,))
    others = [] if given is None else [Trial({key: own}, given, (seeds,))]
    monkeypatch.setattr(tuning, "_settled", lambda *_: ([best, *others], ""))
    search = SimpleNamespace(
        trials={(16,): best}, is_whole=lambda _: True, is_cut=False, left_out=Counter()
    )
    told = tuning._confirmed(asked, asked.tune, search, None)
    assert said in told.verdict
    assert told.verdict.endswith("(which breaks a constraint)") is (seeds > 0)
    assert told.given is (others[0] if others else None)
    assert told.remarks == ()


@pytest.mark.slow
def test_tune_leaves_out_combinations_that_are_not_allowed():
    assert tuned().num_invalid > 0  # max_num_batched_tokens < max_num_seqs


def test_tune_leaves_out_names_that_are_not_allowed_and_says_why():
    over = {"engine.max_num_seqs": [8, 512], "policy": ["fcfs", "sjf"]}
    found = tuned(over=over, tolerance=0.5)
    assert {trial.values["policy"] for trial in found.trials} == {"fcfs"}
    ((why, num),) = found.left_out.items()
    assert "sjf needs predictions" in why
    assert num == found.num_invalid > 0


def test_tune_without_any_setting_that_holds_says_so():
    found = tuned(at_most={"p99_itl_ms": 1})
    assert not found.best.holds
    assert "NO SETTING HOLDS ALL CONSTRAINTS" in found.remarks[0]
    assert found.best.values["engine.max_num_batched_tokens"] < 100  # least broken


@pytest.mark.slow
def test_tune_says_when_the_best_is_at_the_end_of_a_range():
    found = tuned(at_most={"p99_itl_ms": 1e9})
    assert "max_num_batched_tokens is best at the end of its range" in " ".join(found.remarks)


def test_tune_tries_nothing_outside_of_a_range_with_many_digits():
    low, high = 0.500012, 0.99996
    found = tuned(over={"engine.gpu_memory_utilization": [low, high]}, tolerance=0.5)
    tried = [trial.values["engine.gpu_memory_utilization"] for trial in found.trials]
    assert (min(tried), max(tried)) == (low, high)


def test_tune_stops_at_its_budget_and_says_so():
    found = tuned(max_settings=17)
    assert len(found.trials) == 17
    assert "stopped after 17 settings" in found.remarks[-1]


@pytest.mark.slow
def test_tune_confirms_the_winner_on_new_seeds(tmp_path):
    asked = spec(
        replications=2,
        tune={
            "maximize": "output_throughput",
            "over": {"engine.max_num_seqs": [2, 16]},
            "levels": 3,
            "tolerance": 1.0,
        },
    )
    store = Store(tmp_path / "out")
    found = tuning.tune(asked, Runs(store, InProcess()))
    seeds = {json.loads(p.read_text())["schedlab"]["provenance"]["seed"]
             for p in (tmp_path / "out").glob("*/result.json")}  # fmt: skip
    assert seeds == {0, 1, 2, 3}
    assert len(found.best.goals) == 2


@pytest.mark.slow
def test_tune_of_a_rate_searches_it_at_every_setting(tmp_path):
    asked = spec(
        replications=2,
        workload={**WORKLOAD, "num_requests": 20},
        tune={
            "maximize": "workload.request_rate",
            "between": [4, 64],
            "at_most": {"p99_ttft_ms": 150},
            "over": {"engine.max_num_seqs": [2, 64]},
            "levels": 2,
            "tolerance": 10.0,
            "settle": False,
        },
    )
    found = tuning.tune(asked, Runs(Store(tmp_path / "out"), InProcess()))
    assert found.best.values == {"engine.max_num_seqs": 64}
    assert found.best.goal.mean > 4


def test_tune_over_no_key_is_refused_with_the_nearest():
    over = {"engine.max_num_seq": [8, 64]}
    said = r"tune\.over\.engine\.max_num_seq: unknown key; did you mean max_num_seqs\?"
    with pytest.raises(SpecError, match=said):
        spec(tune={"maximize": "output_throughput", "over": over})


SHARE = {"slo": {"ttft_ms": 9}}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"find": "max workload.request_rate subject to slo_attainment >= 90", **SHARE},
         "find.at_least.slo_attainment: 90: a share, at most 1; 0.9?"),
        ({"find": "max workload.request_rate subject to slo_attainment >= 900", **SHARE},
         "find.at_least.slo_attainment: 900: a share, at most 1"),
        ({"find": "min cluster.count subject to preempted_share <= -0.1"},
         "find.at_most.preempted_share: -0.1: a share, at least 0"),
        ({"tune": {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [8, 64]},
                   "at_least": {"ttft_slo_attainment": 1.5}}, **SHARE},
         "tune.at_least.ttft_slo_attainment: 1.5: a share, at most 1; 0.015?"),
    ],
)  # fmt: skip
def test_share_that_no_run_can_reach_is_refused_at_its_key(section, said):
    with pytest.raises(SpecError, match=f"{re.escape(said)}$"):
        spec(**section)


def test_bounds_that_a_run_can_hold_are_taken():
    asked = "max workload.request_rate subject to slo_attainment >= 1 and preempted_share <= 0"
    assert spec(find=asked, **SHARE).find.at_least == {"slo_attainment": 1.0}
    asked = "max workload.request_rate subject to completed >= 90 and mean_ttft_ms <= -1"
    assert spec(find=asked).find.at_least == {"completed": 90.0}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"maximize": "throughput", "over": {"seed": [1, 2]}}, "no metric is called 'throughput'"),
        ({"maximize": "completed", "over": {"seed": [2, 1]}}, "must rise"),
        ({"maximize": "completed", "over": {"policy": ["fcfs", 3]}}, "or names to choose from"),
        ({"maximize": "workload.request_rate", "over": {"seed": [1, 2]}}, "needs a constraint"),
        ({"maximize": "completed", "over": {}}, "over"),
        ({"maximize": "completed", "between": [1, 2], "over": {"seed": [1, 2]}}, "between belongs"),
    ],
)
def test_tune_that_makes_no_sense_raises(section, message):
    with pytest.raises(SpecError, match=message):
        spec(tune=section)


NOT_SO_LONG = "workload.num_requests: 240 asked for, but trace.csv has 200 (resample: true draws)"


class Lengths:
    """Stands for runs: latency grows with rate and with the length of a run, and static fails.

    So do runs that are longer than the longest, as where the trace ends there.
    """

    cost_models = ()

    def stage(self, told):
        pass

    def __init__(self, grows=1.0, longest=10**9, why=NOT_SO_LONG):
        self.grows, self.longest, self.why = grows, longest, why
        self.lengths = []
        self.failed_lengths = set()

    def tried(self, wanted):
        return [self._one(*pair) for pair in wanted]

    def points(self, wanted):
        return self.tried(wanted)

    def _one(self, one, label):
        length = one.workload.num_requests
        self.lengths.append(length)
        job = Job(one, "", Path(), label)
        if one.policy.name == "static":
            self.failed_lengths.add(length)
            return Done(job, 0.0, "static does not run here")
        if length > self.longest:
            return Done(job, 0.0, self.why)
        rate = one.workload.request_rate
        p99_ms = 100 * rate * (1 + self.grows * math.log2(length / 60))
        metrics = {"p99_ttft_ms": p99_ms, "offered_request_rate": rate, "request_throughput": rate,
                   "median_e2el_ms": 0.0, "median_queue_time_ms": 0.0, "duration_s": 1.0,
                   "completed": 1e9, "output_throughput": p99_ms}  # fmt: skip
        return PointMetrics(label, {}, 0, "", metrics)


ONE_A_SECOND = {"num_requests": 60, "request_rate": 1.0}
LIMITED = {"find": "max workload.request_rate between 1 and 40 subject to p99_ttft_ms <= 1000"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grows", "lengths", "said"),
    [
        (0.0, [60, 120], "; settled: the last doubling moved it by +0.0%"),
        (
            0.3,
            [60, 120, 240, 480, 960],
            "; NOT SETTLED: the last doubling moved it by -1",
        ),
    ],
)
def test_find_doubles_its_runs_until_the_answer_stays(grows, lengths, said):
    runs = Lengths(grows)
    (one,) = find(spec(**LIMITED, replications=5), runs)
    assert sorted(set(runs.lengths)) == lengths
    assert one.num_requests == lengths[-1]
    assert said in one.remarks[0]
    assert one.settled is said.startswith("; settled")
    assert one.settled or "workload.num_requests=1920 goes on from there" in one.remarks[0]


def of_length(label, answer, length):
    """What a search came to: an answer of five seeds, a bound or an error."""
    if isinstance(answer, str):
        if answer in ("below", "at least"):
            return Found(label, (SimpleNamespace(value=1.0, bound=answer),) * 5, (), ("odd",))
        return Found(label, (), (), (), answer, length)
    brackets = (SimpleNamespace(value=answer, bound=""),) * 5
    return Found(label, brackets, (), ("odd",), "", length)


@pytest.mark.parametrize(
    ("answers", "lengths"),
    [
        # By label: answers with 10, 20, 40, 80 requests and on; the last one stays.
        ({"a": [10.0, 8.0, 8.0]}, [10, 20, 40]),  # held against the one before, not the first
        ({"a": [10.0, 9.0, 10.0, 10.0]}, [10, 20, 40, 80]),
        ({"a": [10.0, 10.0], "b": [5.0, 6.0, 6.0]}, [10, 20, 40]),  # until all stay
        ({"a": [10.0], "b": ["below"], "c": ["it broke"]}, [10, 20]),  # what has none, stays
        ({"a": ["below"], "b": ["it broke"]}, [10]),
        ({"a": [1.0, 2.0, 3.0, 3.0], "b": [5.0, "it broke"]}, [10, 20, 40, 80]),
        ({"a": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}, [10, 20, 40, 80, 160]),
        ({"a": [1.0, "it broke"]}, [10, 20]),
        ({"a": [1.0, 2.0, None]}, [10, 20]),  # there are no longer runs
        ({"a": [1.0, None]}, [10]),
    ],
)
def test_search_with_longer_runs_ends_where_each_answer_is_that_of_the_runs_before(
    monkeypatch, answers, lengths
):
    asked, rounds = [], []

    def find_each(todo, find_spec, runs, near=None):
        length, labels = todo[0].length, [one.label for one in todo]
        step = round(math.log2(length / 10))
        found = {label: answers[label][min(step, len(answers[label]) - 1)] for label in labels}
        if None in found.values():
            raise SchedlabError(NOT_SO_LONG)
        asked.append((length, labels, near))
        return [of_length(label, answer, length) for label, answer in found.items()], []

    monkeypatch.setattr(finding, "find_each", find_each)
    found = finding.settled(
        lambda length: [SimpleNamespace(label=label, length=length) for label in answers],
        10,
        SimpleNamespace(tolerance=0.02),
        SimpleNamespace(stage=rounds.append),
        "go on with {}",
    )
    assert [length for length, *_ in asked] == lengths
    begun = [
        f"round {number} of at most {1 + finding.MOST_DOUBLINGS}, {length:,} requests a run"
        for number, length in enumerate(lengths, 1)
    ]
    assert rounds[: len(begun)] == begun
    assert len(rounds) <= len(begun) + 1, "one more where no rows are left"
    assert [one.label for one in found] == list(answers)
    run = [
        [label for label, came in answers.items() if "it broke" not in came[:i]]
        for i in range(len(lengths))
    ]
    assert [labels for _, labels, _ in asked] == run
    assert asked[0][2] is None
    for one in found:
        came = answers[one.label]
        last = [a for a in came if a is not None][: len(lengths)][-1]
        num = came.index("it broke") if "it broke" in came else len(lengths)
        if 0 < num < len(lengths):  # it has the answer of the longest runs it could have
            assert (one.values, one.num_requests) == ([came[num - 1]] * 5, lengths[num - 1])
            failed = f"a run with {lengths[num]} fails: it broke"
            assert one.remarks[0].endswith(f"NOT SETTLED: {failed}")
            assert one.settled is False
        elif isinstance(last, str):
            assert (one.error or one.bound) == last
            assert one.settled is None
        elif len(lengths) == 1:
            assert (one.remarks, one.settled) == (("odd",), None)
        else:
            assert (one.values, one.num_requests) == ([last] * 5, lengths[-1])
            path = [came[min(i, len(came) - 1)] for i in range(len(lengths))]
            assert all(
                f"{a:g} with {n}" in one.remarks[0] for a, n in zip(path, lengths, strict=True)
            )
            assert one.remarks[1:] == ("odd",)
            assert one.settled is (path[-1] == path[-2])
            assert ("go on with" in one.remarks[0]) is not one.settled
            assert asked[-1][2][one.label] == [path[-2]] * 5, "near the answers before"


@pytest.mark.parametrize(
    ("length", "settle", "goals", "lengths"),
    [
        # Of the best, and of the one given, with 10, 20, 40 requests and on.
        (10, True, [(5.0, 3.0), (5.0, 3.0)], [10, 20]),
        (10, True, [(5.0, 3.0), (4.0, 3.0), (4.0, 3.0)], [10, 20, 40]),
        (10, True, [(5.0, 3.0), (5.0, 4.0), (5.0, 4.0)], [10, 20, 40]),  # both have to stay
        (10, True, [(float(n), 3.0) for n in range(1, 9)], [10, 20, 40, 80, 160]),
        (10, True, [(5.0, 3.0), (4.0, 3.0), NOT_SO_LONG], [10, 20]),
        (10, True, [(5.0, 3.0), SchedlabError(NOT_SO_LONG)], [10]),
        (10, False, [(5.0, 3.0)], [10]),
        (None, True, [(5.0, 3.0)], [None]),
    ],
)
def test_winner_is_run_ever_longer_until_it_and_the_one_given_stay(
    monkeypatch, length, settle, goals, lengths
):
    asked = []

    def evaluate(settings, asks, runs):
        assert (asks.goal, runs) == ("throughput", "runs")
        came = goals[len(asked)]
        if isinstance(came, SchedlabError):
            raise came
        if isinstance(came, str):
            return [Trial(settings[0][0], (1.0,) * 5, (0.0,)), came]
        asked.append(settings)
        return [
            Trial(values, (goal,) * 5, (0.0,))
            for (values, _), goal in zip(settings, came, strict=True)
        ]

    monkeypatch.setattr(tuning, "evaluate", evaluate)
    monkeypatch.setattr(tuning, "with_values", lambda spec, values: (spec, values))
    fresh = SimpleNamespace(workload=SimpleNamespace(num_requests=length))
    best, given = {"a": 4.0, "b": 0.5}, {"a": 2.0, "b": 0.5}
    asks = SimpleNamespace(settle=settle, goal="throughput")
    trials, told = tuning._settled(fresh, asks, [best, given], "runs")
    assert [trial.goals for trial in trials] == [(goal,) * 5 for goal in goals[len(lengths) - 1]]
    for n, settings in zip(lengths, asked, strict=True):
        spec = fresh if n is None else (fresh, {"workload.num_requests": n})
        assert settings == [(best, (spec, {"a": 4, "b": 0.5})), (given, spec)]
        assert type(settings[0][1][1]["a"]) is int
    if len(lengths) == 1:
        assert told == ""
    else:
        assert told.endswith(" (settings were tried with 10)")
        for n, (goal, _) in zip(lengths, goals, strict=False):
            assert f"{goal:g} with {n}" in told


def test_setting_is_told_by_its_first_failure_and_not_run_on():
    class Fails:
        """Stands for runs of which some fail."""

        cost_models = ()

        def stage(self, told):
            pass

        def __init__(self):
            self.asked = []

        def tried(self, wanted):
            self.asked.append([label for _, label in wanted])
            return [
                Done(Job(one, "", Path(), label), 0.0, f"run {i} broke")
                if one.policy.name == "static"
                else PointMetrics(label, {}, 0, "", {"p99_ttft_ms": one.workload.request_rate})
                for i, (one, label) in enumerate(wanted)
            ]

        def points(self, wanted):
            return self.tried(wanted)

    runs = Fails()
    asked = spec(
        find="max workload.request_rate between 1 and 40 subject to p99_ttft_ms <= 20",
        replications=2, sweep={"policy": ["fcfs", "static"]},
    )  # fmt: skip
    todo = points(asked)
    found, failed = finding._search_all(
        todo, asked.find, finding.constraints_of({"p99_ttft_ms": 20.0}, {}), runs, {}
    )
    first = next(i for i, label in enumerate(runs.asked[0]) if label.startswith("static"))
    ((setting, done),) = failed.items()
    assert setting == ("static", "static")
    assert done.error == f"run {first} broke"
    assert not any(label.startswith("static") for asked in runs.asked[1:] for label in asked)
    assert sorted(found) == [0, 1]
    assert all(19 <= bracket.value <= 20.5 for bracket in found.values())


@pytest.mark.parametrize(
    ("names", "told"),
    [(["x", "fcfs", "sjf"], "fcfs"), (["first come", "fcfs"], "first come"), (["sjf"], "fcfs")],
)
def test_value_of_a_key_is_called_by_the_first_name_that_stands_for_it(monkeypatch, names, told):
    monkeypatch.setattr(tuning, "_at", lambda spec, key: spec[key])
    means = {"first come": "fcfs"}

    def with_values(spec, values):
        ((key, name),) = values.items()
        if name == "x":
            raise SpecError("not allowed here")
        return spec | {key: means.get(name, name)}

    monkeypatch.setattr(tuning, "with_values", with_values)
    assert tuning._name({"policy": "fcfs", "other": 3}, "policy", names) == told


def test_setting_that_fails_at_first_is_an_error(monkeypatch):
    monkeypatch.setattr(tuning, "evaluate", lambda *_: ["it broke", "so did this"])
    monkeypatch.setattr(tuning, "with_values", lambda spec, values: spec)
    fresh = SimpleNamespace(workload=SimpleNamespace(num_requests=None))
    with pytest.raises(SchedlabError, match=r"^it broke$"):
        tuning._settled(fresh, None, [{}], None)


def test_find_without_any_answer_asks_for_no_longer_runs():
    runs = Lengths()
    (one,) = find(
        spec(find="max workload.request_rate between 1 and 40 subject to p99_ttft_ms <= 0.1"), runs
    )
    assert set(runs.lengths) == {60}
    assert not any(bracket.has_answer for bracket in one.brackets)


@pytest.mark.parametrize(("before", "after", "same"), [
    (0.0, 0.0, True), (0.0, 1.0, False), (1.0, 0.0, False), (1.0, 1.0, True),
])  # fmt: skip
def test_answer_of_nothing_stays_only_nothing(before, after, same):
    assert stays(Estimate(before, 0.0), Estimate(after, 0.0), 0.5) is same


def test_find_has_settled_when_the_answer_moves_by_less_than_its_interval():
    before, after = Estimate(10.0, 0.8), Estimate(9.6, 0.5)
    assert stays(before, after, 0.02)
    assert not stays(before, after._replace(half_width=0.3), 0.02)
    assert not stays(before, after._replace(half_width=None), 0.02)
    assert not stays(before, Estimate(9.0, 5.0), 0.02)  # a wide interval is no excuse
    assert stays(before, after._replace(half_width=None), 0.05)


def test_answer_whose_interval_is_wider_than_asked_for_has_not_settled_and_says_so():
    before, after = Estimate(10.0, 0.8), Estimate(9.9, 1.5)
    assert stays(before, after, 0.02)
    assert not suffices(before, after, 0.02, 5)
    told = told_way([(60, before), (120, after)], 0.02, 5, "--num-requests {}")
    assert "NOT SETTLED: the last doubling moved it by -1.0%" in told
    assert told.endswith(
        "its interval is 15.2% of it to either side; --num-requests 240 goes on from there"
    )


@pytest.mark.parametrize(
    ("num_seeds", "half_width", "said"),
    [
        (1, None, "but one seed has no interval"),
        (3, 1.7, "but of 3 seeds its interval is 17.2% of"),
    ],
)
def test_answer_of_too_few_seeds_has_not_settled_and_says_how_many_tell_more(
    num_seeds, half_width, said
):
    before, after = Estimate(10.0, half_width), Estimate(9.9, half_width)
    assert suffices(before, after, 0.02, num_seeds), "longer runs tell no more of few seeds"
    told = told_way([(60, before), (120, after)], 0.02, num_seeds)
    assert f"NOT SETTLED: the last doubling moved it by -1.0%, {said}" in told
    assert told.endswith("; replications=5 tells more")


def test_find_of_three_seeds_has_not_settled_however_little_it_moves():
    (one,) = find(spec(**LIMITED, replications=3), Lengths(0.0))
    assert one.settled is False


@pytest.mark.parametrize(
    ("grows", "longest", "path", "said"),
    [
        (0.0, 10**9, "100 with 60, 100 with 120", "settled: the last doubling moved it by +0.0%"),
        (
            0.3,
            10**9,
            "100 with 60, 130 with 120, 160 with 240, 190 with 480, 220 with 960",
            "NOT SETTLED: the last doubling moved it by +15.8%",
        ),
        (
            0.3,
            120,
            "100 with 60, 130 with 120",
            "NOT SETTLED: the last doubling moved it by +30.0%",
        ),
    ],
)
def test_tune_doubles_the_runs_of_its_winner_until_they_stay(grows, longest, path, said):
    section = {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [8, 16]}}
    found = tuning.tune(
        spec(
            tune={**section, "levels": 2, "tolerance": 5.0},
            workload={**WORKLOAD, **ONE_A_SECOND},
            replications=5,
        ),
        Lengths(grows, longest),
    )
    (told,) = [text for text in found.remarks if "by requests a run" in text]
    assert told.startswith(f"the best by requests a run: {path}; {said}")
    assert told.endswith("(settings were tried with 60)")


def test_find_of_a_short_trace_keeps_what_it_has():
    (one,) = find(spec(**LIMITED), Lengths(0.3, longest=120))
    assert one.num_requests == 120
    assert one.remarks[0].startswith("by requests a run: 9.886 with 60, 7.623 with 120; NOT")
    (one,) = find(spec(**LIMITED), Lengths(0.3, longest=60))
    assert (one.num_requests, one.settled) == (60, None)
    assert not [remark for remark in one.remarks if "by requests a run" in remark]


@pytest.mark.parametrize(
    ("longest", "path"), [(60, "9.886 with 60"), (120, "9.886 with 60, 7.623 with 120")]
)
@pytest.mark.parametrize("raising", [False, True])
def test_find_whose_longer_runs_fail_keeps_its_answer_and_says_that_it_has_not_settled(
    longest, path, raising
):
    class Raising(Lengths):
        """Stands for runs that end it all with their first error."""

        def tried(self, wanted):
            done = super().tried(wanted)
            for one in done:
                if isinstance(one, Done):
                    raise PolicyError(one.error)
            return done

    runs = (Raising if raising else Lengths)(0.3, longest, why="policy b broke")
    (one,) = find(spec(**LIMITED, replications=5), runs)
    assert (one.error, one.num_requests, one.settled) == ("", longest, False)
    why = f"a run with {2 * longest} fails: policy b broke"
    assert one.remarks[0] == f"by requests a run: {path}; NOT SETTLED: {why}"


def test_setting_whose_longer_runs_fail_does_not_keep_the_others_from_settling(monkeypatch):
    runs = Lengths(0.0)
    short = Lengths(0.0, 60, why="policy sjf broke")
    monkeypatch.setattr(
        runs, "_one", lambda one, label: (
            Lengths._one(short if one.policy.name == "shortest_prompt" else runs, one, label)
        ),
    )  # fmt: skip
    swept = {"policy": ["fcfs", "shortest_prompt"]}
    fine, failed = find(spec(**LIMITED, replications=5, sweep=swept), runs)
    assert (fine.num_requests, fine.settled, failed.num_requests) == (120, True, 60)
    assert failed.values == fine.values
    assert failed.remarks[0].endswith("NOT SETTLED: a run with 120 fails: policy sjf broke")
    (told,) = verdicts(Find(maximize="workload.request_rate", at_most={"x": 1}), [fine, failed])
    assert told.endswith(" (runs of 60 against 120 requests)")


@pytest.mark.parametrize(
    ("longest", "why", "said"),
    [
        (60, NOT_SO_LONG, None),
        (60, "it broke", "100 with 60; NOT SETTLED: a run with 120 fails: it broke"),
        (120, "it broke", "100 with 60, 130 with 120; NOT SETTLED: a run with 240 fails: it broke"),
    ],
)
def test_tune_whose_longer_runs_fail_says_so_unless_the_trace_is_short(longest, why, said):
    section = {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [8, 16]}}
    asked = spec(
        tune={**section, "levels": 2, "tolerance": 5.0},
        workload={**WORKLOAD, **ONE_A_SECOND},
        replications=5,
    )
    found = tuning.tune(asked, Lengths(0.3, longest, why))
    told = [text for text in found.remarks if "by requests a run" in text]
    way = f"the best by requests a run: {said} (settings were tried with 60)"
    assert told == ([] if said is None else [way])


def test_settings_by_a_key_that_all_fail_are_told_one_by_one():
    asked = tuning_of(maximize="workload.request_rate", at_most={"p99_ttft_ms": 900.0})
    runs = Lengths(longest=1, why="no room")
    assert tuning.evaluate(settings_of(8, 9), asked, runs) == ["no room", "no room"]


def test_find_that_is_not_to_settle_takes_the_first_answer():
    asked = {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 1000}, "settle": False}
    runs = Lengths(0.3)
    find(spec(find=asked), runs)
    assert set(runs.lengths) == {60}


@pytest.mark.slow
def test_setting_that_cannot_run_does_not_keep_the_others_from_their_answer():
    asked = spec(**LIMITED, sweep={"policy": ["static", "fcfs"]}, replications=5)
    failed, fine = find(asked, Lengths(0.0))
    assert failed.error == "cannot run: static does not run here"
    assert fine.value.mean == pytest.approx(10, rel=0.03)
    assert verdicts(asked.find, [failed, fine]) == []
    rows, lines = find_rows([failed, fine]), find_lines(asked, [failed, fine])
    assert rows[0] == ("static", "-", "-", "-")
    assert "static: cannot run: static does not run here" in lines
    (told, _) = find_data(asked, [failed, fine], [], 1)["settings"]
    assert told["error"]
    assert told["mean"] is None


@pytest.mark.parametrize(("replications", "said"), [(1, "one seed, "), (2, "mean ± 95 % ")])
def test_report_of_a_search_says_of_how_many_seeds_it_is_and_how_close(replications, said):
    asked = {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 9}, "tolerance": 0.03}
    _, line = find_lines(spec(find=asked, replications=replications), [])
    assert line.startswith(said)
    assert re.search(r"to within 3 %(:|$)", line)
    assert ("2 seeds" in line) == (replications > 1)


def test_setting_that_cannot_run_is_not_run_again_with_longer_runs():
    runs = Lengths(0.0)
    failed, fine = find(spec(**LIMITED, sweep={"policy": ["static", "fcfs"]}), runs)
    assert failed.error
    assert fine.num_requests == 120
    assert runs.failed_lengths == {60}


def test_search_of_which_no_setting_runs_is_an_error():
    with pytest.raises(SchedlabError, match="static does not run here"):
        find(spec(**LIMITED, policy="static"), Lengths())


def test_worse_trial_is_the_one_whose_worst_bar_is_broken_more():
    """Not the one that breaks more of them, nor the one whose are broken more together."""
    evenly, badly = Trial({}, (9.0,), (0.3, 0.3)), Trial({}, (9.0,), (0.5, -0.4))
    held, better = Trial({}, (1.0,), (0.0, -0.1)), Trial({}, (2.0,), (-0.1, -0.1))
    unknown = Trial({}, (math.nan,), (0.0, 0.0))
    ranked = sorted([badly, better, unknown, held, evenly], key=lambda one: one.rank)
    assert ranked == [badly, evenly, unknown, held, better]


# -- the least, and the cheapest fleet ---------------------------------------------------------


@pytest.mark.parametrize("truth", [1, 2, 17, 63])
@pytest.mark.parametrize("between", [(1.0, 64.0), None])
def test_least_integer_is_the_one_above_the_last_that_breaks(truth, between):
    found = searched(lambda value: truth - value, between, start=8.0, whole=True, least=True)
    assert (found.value, found.breaks_at) == (truth, truth - 1)
    assert found.bound == ""
    assert found.has_answer


def test_least_value_tells_answers_beyond_the_range():
    low = searched(lambda value: -1.0, (2.0, 40.0), least=True)
    assert (low.value, low.breaks_at, low.bound) == (2.0, 0.0, "at most")
    high = searched(lambda value: 1.0, (1.0, 40.0), least=True)
    assert (high.value, high.bound, high.has_answer) == (40.0, "above", False)


def test_least_value_is_above_a_break_that_heals_further_down():
    found = searched(lambda value: 1.0 if 2.0 < value < 10.0 else -1.0, (1.0, 40.0), least=True)
    assert found.breaks_at < 10.0 <= found.value
    assert found.holds_again
    assert all(value < found.breaks_at for value in found.holds_again)
    assert found.falls(0)


class Fleets:
    """Stands for runs: a fleet holds if it has enough engines, and costs what they cost."""

    num_asked = 0

    def stage(self, told):
        pass

    def tried(self, wanted):
        return [PointMetrics(label, {}, 0, "", self._metrics(one)) for one, label in wanted]

    points = tried

    def _metrics(self, one):
        needed, usd = {"a100-80gb": (7, 2.0), "h100-80gb": (3, 4.0)}[one.hardware]
        needed += one.seed == 1  # one day asks for more
        usd_per_hour = usd * one.cluster.count
        return {
            "slo_attainment": min(1.0, 0.9 * one.cluster.count / needed), "duration_s": 36.0,
            "cost_usd": usd_per_hour / 100, "usd_per_million_output_tokens": usd_per_hour,
            "offered_request_rate": 1.0, "request_throughput": 1.0,
        }  # fmt: skip


def fleet(**keys):
    return make_spec({
        "name": "f", "model": "llama-3-8b", "hardware": "h100-80gb", "cluster": 2,
        "replications": 5, "slo": {"ttft_ms": 500.0},
        "workload": {"trace": "azure-conv", "num_requests": 10, "request_rate": 5.0}, **keys,
    })  # fmt: skip


@pytest.mark.slow
def test_cheapest_fleet_is_as_large_as_the_worst_seed_asks_and_is_run_on_new_ones():
    asked = fleet(
        find="min cluster.count between 1 and 16 subject to slo_attainment >= 0.9",
        sweep={"hardware": ["a100-80gb", "h100-80gb"]},
    )
    found = find(asked, Fleets())
    assert [one.values for one in found] == [[7, 8, 7, 7, 7], [3, 4, 3, 3, 3]]
    best = cheapest(asked, found, Fleets())
    assert (best.label, best.value) == ("hardware=h100-80gb", 4)
    assert best.usd_per_hour.mean == 16.0
    assert best.measured["slo_attainment"].mean == 1.0
    assert best.holds
    assert best.lines[1].startswith("hardware=h100-80gb beats hardware=a100-80gb in USD an hour")
    header, rows = find_table(asked, found)
    assert header[-1] == "USD an hour"
    assert rows[1][-1].startswith("12.8")
    most = fleet(find="max cluster.count subject to failed <= 0")
    assert cheapest(most, found, Fleets()) is None
    assert find_table(most, found)[0] == ("setting", "cluster.count", "holds at", "breaks at")
    assert [len(row) for row in find_table(most, found)[1]] == [4, 4]

    # On new seeds it is measured at runs of the length that was asked for, and at the bar holds.
    class Noting(Fleets):
        def points(self, wanted):
            asked_of.extend(one.workload.num_requests for one, _ in wanted)
            return self.tried(wanted)

    asked_of = []
    for num_requests, length in ((None, 10), (77, 77)):
        longer = [replace(one, num_requests=num_requests) for one in found]
        assert cheapest(asked, longer, Noting()).holds
        assert set(asked_of) == {length}
        asked_of.clear()

    class JustHolding(Fleets):
        def points(self, wanted):
            rows = self.tried(wanted)
            return [replace(one, metrics={**one.metrics, "slo_attainment": 0.9}) for one in rows]

    assert cheapest(asked, found, JustHolding()).holds
    few = fleet(
        find="min cluster.count between 1 and 5 subject to slo_attainment >= 0.9",
        sweep={"hardware": ["a100-80gb", "h100-80gb"]},
    )
    found = find(few, Fleets())
    assert [row[-1][:4] for row in find_table(few, found)[1]] == ["-", "12.8"]  # five are too few
    assert cheapest(few, found, Fleets()).label == "hardware=h100-80gb"


@pytest.mark.parametrize("seeds", [1, 2])
def test_cheapest_fleet_is_told_with_its_price_on_new_seeds_beside_the_dearer(seeds):
    asked = fleet(
        find={
            "minimize": "cluster.count", "between": [1, 16], "at_least": {"slo_attainment": 0.9},
            "at_most": {"offered_request_rate": 0.5},
        },
        sweep={"hardware": ["a100-80gb", "h100-80gb"]}, replications=seeds, seed=3,
    )  # fmt: skip
    holding = asked.model_copy(
        update={"find": Find(**asked.find.model_dump() | {"at_most": {}})}
    )  # fmt: skip
    found = find(holding, Fleets())
    ran = []

    class Noting(Fleets):
        def points(self, wanted):
            ran.extend((one.seed, one.hardware, one.cluster.count, label) for one, label in wanted)
            return self.tried(wanted)

    best = cheapest(asked, found, Noting())
    label = "hardware=h100-80gb"
    assert ran == [(3 + seeds + i, "h100-80gb", 3, f"{label}, count=3") for i in range(seeds)]
    assert (best.label, best.value, best.usd_per_hour.mean, best.holds) == (label, 3, 12.0, False)
    assert {name: one.mean for name, one in best.measured.items()} == {
        "offered_request_rate": 1.0, "slo_attainment": 0.9,
    }  # fmt: skip
    assert best.lines[0] == (
        f"cheapest: {label} with cluster.count=3, $12.00 an hour; on {seeds} new seeds "
        "offered_request_rate 1, slo_attainment 0.900: A CONSTRAINT BREAKS"
    )
    assert len(best.lines) == (1 if seeds == 1 else 2)


def test_price_of_a_fleet_is_that_of_an_hour_where_one_is_known():
    assert cheapest_of.usd_per_hour({"cost_usd": 0.5, "duration_s": 36.0}) == 50.0
    # The same to nine digits, however long it ran.
    thirds = {"cost_usd": 1.0, "duration_s": 10_800.0}
    assert cheapest_of.usd_per_hour(thirds) == 0.333333333
    assert math.isnan(cheapest_of.usd_per_hour({"duration_s": 36.0}))

    def answers(*costs, has_answer=True):
        metrics = [{"cost_usd": cost, "duration_s": 3600.0} if cost else {} for cost in costs]
        brackets = [SimpleNamespace(has_answer=True)] * 2 + [SimpleNamespace(has_answer=has_answer)]
        return SimpleNamespace(brackets=brackets, metrics=metrics)

    assert cheapest_of.prices(answers(2.0, 4.0)).mean == 3.0
    assert cheapest_of.prices(answers(2.0, 4.0, has_answer=False)) is None
    assert cheapest_of.prices(answers(2.0, None)) is None
    assert cheapest_of.prices(answers()) is None


def test_tune_over_names_and_counts_finds_the_cheapest_that_holds():
    asked = fleet(
        tune={
            "minimize": "usd_per_million_output_tokens",
            "over": {"hardware": ["a100-80gb", "h100-80gb"], "cluster.count": [1, 16]},
            "at_least": {"slo_attainment": 0.89},
            "settle": False,
        }
    )
    tuned = tuning.tune(asked, Fleets())
    assert tuned.best.values == {"hardware": "h100-80gb", "cluster.count": 4}  # 3 break on a day
    assert tuned.given.values == {"hardware": "h100-80gb", "cluster.count": 2}
    assert not tuned.given.holds
    assert all(trial.rank <= tuned.trials[0].rank for trial in tuned.trials)
    assert "end of its range" not in " ".join(tuned.remarks)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"find": {"maximize": "a.b", "minimize": "c.d", "at_most": {"failed": 0}}}, "give either"),
        ({"find": "mean cluster.count subject to failed <= 0"}, "max KEY"),
        ({"tune": {"minimize": "a.b", "over": {"seed": [1, 2]}}}, "minimize takes a metric"),
        ({"tune": {"minimize": "costs", "over": {"seed": [1, 2]}}}, "no metric is called 'costs'"),
        ({"tune": {"minimize": "failed", "over": {"hardware": ["a", 3]}}}, "or names to choose"),
        ({"tune": {"minimize": "failed", "over": {"hardware": ["a", "a"]}}}, "a name twice"),
        ({"tune": {"minimize": "failed", "over": {"seed": [True, 2]}}}, r"over\.seed: takes the"),
        (
            {"tune": {"minimize": "failed", "over": {"seed": [1, math.inf]}}},
            r"over\.seed: takes the",
        ),
    ],
)
def test_search_for_the_least_that_is_asked_wrongly_is_refused_by_name(keys, message):
    with pytest.raises(SpecError, match=message):
        fleet(**keys)


def test_tune_over_a_name_that_is_unknown_is_refused_by_name():
    over = {"cluster.rooter": ["vllm", "jsq"]}
    with pytest.raises(SpecError, match=r"cluster\.rooter: unknown key; did you mean router"):
        fleet(tune={"minimize": "cost_usd", "over": over}, cluster=1)


def test_light_runs_of_a_fleet_keep_what_is_measured_of_it():
    from schedlab.experiments.commands.sweep import _refuse_more_than_is_kept

    _refuse_more_than_is_kept(["cost_usd", "usd_per_million_output_tokens"], fleet())
    with pytest.raises(SpecError, match="--light keeps no tables, and cost_usd"):
        _refuse_more_than_is_kept(["cost_usd"], spec())


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("seed", {"seed": 2**63}),
        ("levels", {"levels": 1001}),
        ("trial_requests", {"engine": {"trial_requests": 1e308}}),
    ],
)
def test_number_beyond_what_can_be_run_is_refused_at_its_key(key, changes):
    tuned = {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [1, 8]}}
    if "levels" in changes:
        tuned |= changes
        changes = {}
    with pytest.raises(SpecError, match=key):
        make_spec({
            "name": "a", "model": "llama-3-8b", "hardware": "a100-80gb", "policy": "fcfs",
            "workload": {"trace": "azure-conv", "num_requests": 9}, "tune": tuned, **changes,
        })  # fmt: skip


@pytest.mark.parametrize("key", ["request_rate", "session_rate"])
def test_rate_beyond_all_measure_is_refused_at_its_key_and_all_at_once_is_not(key):
    def spec(rate):
        workload = {"trace": "azure-conv", "num_requests": 9, key: rate}
        return make_spec({
            "name": "a", "model": "llama-3-8b", "hardware": "a100-80gb", "policy": "fcfs",
            "workload": workload,
        })  # fmt: skip

    with pytest.raises(SpecError, match=f"{key}.*must be at most 1e[+]15, got 1e[+]308"):
        spec(1e308)
    assert getattr(spec(math.inf).workload, key) == math.inf


@pytest.mark.slow
def test_search_that_no_setting_survives_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ours.py").write_text(
        "from schedlab.policies.policy import Policy\n"
        "class Ours(Policy):\n"
        "    def plan(self, engine, builder):\n"
        "        raise ValueError('never')\n"
    )
    Path("s.yaml").write_text(
        "{name: a, model: llama-3-8b, hardware: a100-80gb, policy: 'ours:Ours',\n"
        "workload: {trace: azure-conv, num_requests: 9, request_rate: 2},\n"
        "tune: {maximize: output_throughput, over: {engine.max_num_seqs: [4, 8]}}}\n"
    )
    done = CliRunner().invoke(app, ["tune", "s.yaml", "-q", "-o", "a/b"])
    assert done.exit_code == 2, done.output
    assert "no combination of values is allowed" in done.output
    assert not Path("a").exists()


@pytest.mark.parametrize("word", ["minimize", "maximize"])
def test_goal_that_is_no_metric_is_refused_at_its_own_key(word):
    tune = Tune(**{word: "p99_tft_ms", "over": {"engine.max_num_seqs": [8, 16]}})
    told = []
    check_search(None, tune, [], lambda path, text: told.append((path, text)))
    ((path, text),) = told
    assert path == ("tune", word)
    assert "did you mean p99_ttft_ms" in text


@pytest.mark.parametrize(
    ("key", "between", "is_whole"),
    [
        ("engine.max_num_seqs", None, True), ("engine.max_num_seqs", (0.5, 9.0), True),
        ("engine.max_num_seqs", (5.0, 9.0), True), ("workload.request_rate", None, False),
        ("engine.watermark", (0.25, 0.5), False), ("engine.watermark", None, False),
        ("engine.gpu_memory_utilization", None, False),
        ("engine.gpu_memory_utilization", (0.5, 1.0), False),
        ("workload.num_requests", None, True), ("policy.chunk_size", None, True),
    ],
)  # fmt: skip
def test_key_that_refuses_a_number_in_between_takes_integers(key, between, is_whole):
    asked = SimpleNamespace(key=key, between=between)
    given = {"policy": "sarathi", "workload": {"trace": "fixed", "num_requests": 5}}
    assert _is_whole(make_spec(given), asked) is is_whole


class OwnPolicy(registry.policy_class("fcfs")):
    """Knobs that say what they are by a default, or not at all."""

    def __init__(self, length=4, share=0.5, margin=None):
        super().__init__()
        self.length, self.share, self.margin = length, share, margin


@pytest.mark.parametrize(
    ("section", "knob", "is_whole"),
    [
        ({"policy": {"name": "qoserve", "tbt_s": 1}}, "policy.tbt_s", False),
        ({"policy": {"name": "tgi", "max_waiting_tokens": 4}}, "policy.max_waiting_tokens", True),
        ({"policy": {"name": "ltr", "predictor": {"name": "noisy", "sigma": 1}}},
         "policy.predictor.sigma", False),
        ({"cluster": {"count": 2, "router": {"name": "jsq", "staleness_ms": 5}}},
         "cluster.router.staleness_ms", False),
        ({"policy": {"name": f"{__name__}:OwnPolicy", "length": 8}}, "policy.length", True),
        ({"policy": {"name": f"{__name__}:OwnPolicy", "share": 1}}, "policy.share", False),
        ({"policy": {"name": f"{__name__}:OwnPolicy", "margin": 1}}, "policy.margin", False),
    ],
)  # fmt: skip
def test_knob_written_as_an_integer_takes_fractions_unless_it_is_one(section, knob, is_whole):
    given = make_spec({"workload": {"trace": "fixed", "num_requests": 5}, **section})
    assert takes_integers(given, knob, (1.0, 16.0)) is is_whole


def test_tune_of_a_share_written_as_an_integer_tries_what_lies_between():
    over = {"policy.tbt_s": [0.02, 1]}
    asked = spec(
        policy={"name": "qoserve", "tbt_s": 1}, slo={"ttft_ms": 500, "tpot_ms": 50},
        tune={"minimize": "mean_ttft_ms", "over": over, "settle": False},
    )  # fmt: skip
    assert not tuning._Search(asked, asked.tune, None).is_whole("policy.tbt_s")


def test_find_without_a_range_says_what_it_tried_where_that_is_refused():
    given = {"watermark": 0}
    asked = spec(engine=given, find="max engine.watermark subject to failed <= 0")
    with pytest.raises(SpecError, match=r"watermark.*got 1.*between"):
        find(asked, SimpleNamespace(tried=None, stage=str))


def test_what_else_is_wrong_with_a_key_is_told_and_not_taken_for_an_integers():
    asked = SimpleNamespace(key="engine.max_num_sqs", between=None)
    with pytest.raises(SpecError, match="max_num_seqs"):
        _is_whole(make_spec({"workload": {"trace": "fixed", "num_requests": 5}}), asked)


def test_goal_of_a_tuning_may_be_a_key_and_no_key_is_swept_as_well():
    tune = Tune(
        maximize="workload.request_rate", over={"engine.max_num_seqs": [8, 16]},
        at_most={"p99_ttft_ms": 9},
    )  # fmt: skip
    told = []
    for swept in ([], ["seed"], ["workload.request_rate", "engine.max_num_seqs"]):
        check_search(None, tune, swept, lambda path, text: told.append((path, text)))
    assert told == [
        (("tune",), f"{key} is swept as well; give it one value ({key}=1) to sweep it no more")
        for key in ("workload.request_rate", "engine.max_num_seqs")
    ]


def tuning_of(**keys):
    return Tune(over={"engine.max_num_seqs": [8, 16]}, **keys)


def settings_of(*seats):
    return [
        ({"engine.max_num_seqs": n}, fleet(engine={"max_num_seqs": n}, replications=2))
        for n in seats
    ]


def test_settings_are_tried_on_the_same_seeds_and_held_against_each_bar():
    asked = tuning_of(
        minimize="p99_ttft_ms", at_most={"mean_tpot_ms": 20.0}, at_least={"slo_attainment": 0.0}
    )
    ran = []

    def of(spec, label):
        seats, seed = spec.engine.max_num_seqs, spec.seed
        ran.append((seats, seed, label))
        if (seats, seed) == (9, 1):
            return Done(None, 1.0, "too few")
        metrics = {
            "p99_ttft_ms": 100.0 * seats + seed, "mean_tpot_ms": seats + 10.0 * seed,
            "slo_attainment": 0.25 + seed,
        }  # fmt: skip
        return PointMetrics(label, {}, 0, "", metrics)

    runs = SimpleNamespace(tried=lambda wanted: [of(*one) for one in wanted])
    first, failed, last = tuning.evaluate(settings_of(8, 9, 31), asked, runs)
    assert [row[:2] for row in ran] == [(n, seed) for n in (8, 9, 31) for seed in (0, 1)]
    assert len({label for *_, label in ran}) == 3
    assert failed == "too few"
    assert (first.values, first.goals, first.least) == (
        {"engine.max_num_seqs": 8}, (800.0, 801.0), True,
    )  # fmt: skip
    # Means of 8 and 18 against 20, as a share of it; of 0.25 and 1.25 against a bar of 0.
    assert first.excess == pytest.approx(((13 - 20) / 20, -0.75))
    assert last.excess == pytest.approx(((36 - 20) / 20, -0.75))
    assert (first.holds, last.holds) == (True, False)
    assert first.rank == (True, -800.5)
    assert last.rank == (False, pytest.approx(-0.8))
    assert tuning.evaluate([], asked, runs) == []


def test_settings_by_the_largest_value_of_a_key_are_searched_for_it(monkeypatch):
    asked = tuning_of(maximize="workload.request_rate", at_most={"p99_ttft_ms": 900.0})
    told = []

    def found(points, find, runs):
        told.append(([point.spec.seed for point in points], find, runs))
        answers = [
            SimpleNamespace(error="", values=[2.0, 3.0], bound=""),
            SimpleNamespace(error="", values=[0.5, 0.5], bound="below"),
            SimpleNamespace(error="", values=[9.0, 9.0], bound="above"),
            SimpleNamespace(error="cannot run: no room", values=[], bound=""),
            SimpleNamespace(error="", values=[4.0, 4.0], bound="at least"),
        ]
        return answers, []

    monkeypatch.setattr(tuning, "find_each", found)
    trials = tuning.evaluate(settings_of(8, 9, 10, 11, 12), asked, "runs")
    assert [(one.goals, one.excess, one.least) for one in trials[:3]] == [
        ((2.0, 3.0), (0.0,), False), ((0.5, 0.5), (1.0,), False), ((9.0, 9.0), (0.0,), False),
    ]  # fmt: skip
    assert trials[3] == "no room"
    assert [one.is_bound for one in (*trials[:3], trials[4])] == [False, False, False, True]
    ((seeds, find, runs),) = told
    assert (seeds, runs) == ([0, 1] * 5, "runs")
    assert (find.key, find.least, find.at_most) == (
        "workload.request_rate", False, {"p99_ttft_ms": 900.0},
    )  # fmt: skip


@pytest.mark.parametrize("is_bound", [False, True])
def test_tune_says_where_no_constraint_breaks_up_to_the_largest_value_tried(monkeypatch, is_bound):
    asked = spec(tune={
        "maximize": "workload.request_rate", "between": [1, 4],
        "over": {"engine.max_num_seqs": [8, 64]}, "at_most": {"p99_ttft_ms": 900},
    })  # fmt: skip

    def trial(seats, goal, beyond):
        return Trial({"engine.max_num_seqs": seats}, (goal,), (0.0,), is_bound=beyond)

    best = trial(16, 4.0, is_bound)
    tried = {(16,): best, (32,): trial(32, 4.0, is_bound), (9,): trial(9, 3.0, False)}
    monkeypatch.setattr(tuning, "_settled", lambda *_: ([best, trial(128, 3.0, False)], ""))
    search = SimpleNamespace(
        trials=tried, is_whole=lambda _: True, is_cut=False, left_out=Counter()
    )
    told = tuning._confirmed(asked, asked.tune, search, None)
    said = "no constraint breaks up to the largest workload.request_rate tried (tune.between)"
    assert told.remarks == ((f"{said}, here and at 1 other settings: what is best among them is "
                             "not told",) if is_bound else ())  # fmt: skip


TRIALS = (
    Trial({"engine.max_num_seqs": 8, "policy": "fcfs"}, (5.0, 7.0), (-0.25, -1.0)),
    Trial({"engine.max_num_seqs": 16, "policy": "sjf"}, (3.0,), (-1.0, 0.5)),
)


def test_tuned_settings_are_told_by_values_goal_and_what_breaks():
    asked = spec(tune={
        "maximize": "output_throughput", "over": {"engine.max_num_seqs": [1, 64]},
        "at_most": {"p99_ttft_ms": 900}, "at_least": {"output_throughput": 2.5},
    })  # fmt: skip
    found = tuning.Tuned(
        TRIALS, 4, TRIALS[0], TRIALS[1], "said", ("one", "two"), Counter(rare=1, often=3)
    )
    assert tune_rows(found) == [
        ("8", "fcfs", with_interval(6.0, TRIALS[0].goal.half_width), "hold"),
        ("16", "sjf", with_interval(3.0, TRIALS[1].goal.half_width), "broken by 50%"),
    ]
    first, *lines = tune_lines(asked, found)
    assert first.startswith(
        "2 settings tried, 4 left out; maximized: output_throughput within p99_ttft_ms <= 900 and "
        "output_throughput >= 2.5 ("
    )
    assert lines == [
        f"best: engine.max_num_seqs=8, policy=fcfs: {tune_rows(found)[0][2]}, constraints hold "
        "(on 2 new seeds)",
        f"given: engine.max_num_seqs=16, policy=sjf: {tune_rows(found)[1][2]}, A CONSTRAINT BREAKS "
        "(on 1 new seeds)",
        "3 left out: often", "1 left out: rare", "said", "one", "two",
    ]  # fmt: skip


@pytest.mark.parametrize("best", [None, "some"])
def test_found_values_are_written_down_with_all_that_was_tried(best):
    asked = spec(find={
        "maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 900},
        "at_least": {"output_throughput": 2.5},
    })  # fmt: skip
    probes = (Probe(2.0, (-5.0, -1.0)), Probe(4.0, (3.0, -0.5)))
    one = Found("a", (Bracket(2.0, 4.0, "", probes),), (), ("odd",), num_requests=30)
    data = find_data(
        asked, [one], ["told"], 7, best and SimpleNamespace(_asdict=lambda: {"usd": 3})
    )
    data.pop("spec_hash")
    assert data.pop("find")["at_least"] == {"output_throughput": 2.5}
    expected = {
        "name": asked.name, "num_runs": 7, "verdicts": ["told"],
        "settings": [{
            "label": "a", "error": None, "num_requests": 30, "settled": one.settled,
            "mean": one.value.mean, "ci95": one.value.half_width, "bound": one.bound or None,
            "remarks": ["odd"],
            "replications": [{"value": 2.0, "breaks_at": 4.0, "tried": [
                {"value": 2.0, "excess": {"p99_ttft_ms <= 900": -5.0,
                                          "output_throughput >= 2.5": -1.0}},
                {"value": 4.0, "excess": {"p99_ttft_ms <= 900": 3.0,
                                          "output_throughput >= 2.5": -0.5}},
            ]}],
        }],
        **({"cheapest": {"usd": 3}} if best else {}),
    }  # fmt: skip
    assert data == expected
    (first, *_) = find_lines(asked, [one])
    assert first.startswith(
        "largest workload.request_rate at which p99_ttft_ms <= 900 and output_throughput >= 2.5 ("
    )


def test_each_setting_that_was_searched_is_written_down_with_its_own_answer():
    asked = spec(find={"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 900}})

    def found(k, error=""):
        probes = (Probe(2.0 * k, (-5.0 * k,)), Probe(4.0 * k, (3.0 * k,)))
        bracket = Bracket(2.0 * k, 4.0 * k, "", probes)
        return Found(f"s{k}", (bracket,), (), (f"odd {k}",), num_requests=30 * k, error=error)

    some = [found(1), found(2), found(3, "too large")]
    data = find_data(asked, some, [], 7)["settings"]
    for k, one in enumerate(data, 1):
        expected = (f"s{k}", 30 * k, [f"odd {k}"], "too large" if k == 3 else None)
        assert tuple(one[key] for key in ("label", "num_requests", "remarks", "error")) == expected
        assert one["mean"] == (None if k == 3 else 2.0 * k)
        (seed,) = one["replications"]
        assert (seed["value"], seed["breaks_at"]) == (2.0 * k, 4.0 * k)
        excess = {probe["value"]: probe["excess"] for probe in seed["tried"]}
        at_most = "p99_ttft_ms <= 900"
        assert excess == {2.0 * k: {at_most: -5.0 * k}, 4.0 * k: {at_most: 3.0 * k}}
    said = find_lines(asked, some)
    assert [line for line in said if line[0] == "s"] == ["s1: odd 1", "s2: odd 2", "s3: too large"]


@pytest.mark.parametrize("best", ["maximize", "minimize"])
def test_what_is_optimized_is_written_down_with_the_one_key_that_says_so(best):
    key = "workload.request_rate" if best == "maximize" else "engine.max_num_seqs"
    asked = spec(find={best: key, "at_most": {"p99_ttft_ms": 900}})
    data = find_data(asked, [], [], 0)["find"]
    assert data[best] == key
    assert {"maximize", "minimize"} & data.keys() == {best}


def test_points_are_given_in_the_order_asked_and_those_that_fail_end_it():
    """Run by stand-ins: one is there already, one is new, one fails."""
    jobs = {
        name: SimpleNamespace(content_hash=f"hash {name}", label=f"label {name}",
                              spec=SimpleNamespace(seed=k))
        for k, name in enumerate("abc")
    }  # fmt: skip
    told = "steps outside what the cost model was measured in"
    points = {
        name: PointMetrics(name, {}, 0, "fcfs", {}, cost_model={"name": of}, warnings=said)
        for name, of, said in (("a", "m", ["odd"]), ("b", "n", ["fine", told]), ("c", "m", []))
    }  # fmt: skip

    class Shelf:
        def job(self, asked, label):
            assert label == f"label {asked}"
            return jobs[asked]

        def load(self, job):
            return points[job.label[-1]]

    runs = Runs(Shelf(), None)
    fails = Done(jobs["c"], 1.0, "it broke")
    failures = []
    runs.run = lambda asked: failures
    wanted = [(name, f"label {name}") for name in "bac"]
    assert runs.points(wanted) == [points[name] for name in "bac"]
    assert runs.cost_models == [{"name": "n"}, {"name": "m"}]
    assert runs.extrapolated == {"hash b": f"label b: {told}"}
    failures.append(fails)
    assert runs.tried(wanted) == [points["b"], points["a"], fails]
    with pytest.raises(SchedlabError, match=r"label c, seed 2: it broke$"):
        runs.points(wanted)


def test_ends_of_what_is_tuned_are_two_numbers_above_zero_or_names():
    for given, read in (
        ([1, 2.5], (1.0, 2.5)), ((3, 3), (3.0, 3.0)), ([1e-9, 1e15], (1e-9, 1e15)),
        (["a"], ("a",)), (["b", "a", "c"], ("b", "a", "c")), ("text", "text"), (7, 7),
    ):  # fmt: skip
        found = search_section._axis(given)
        assert (found, [*map(type, found)] if type(found) is tuple else ()) == (
            read, [*map(type, read)] if type(read) is tuple else ()
        )  # fmt: skip
    for wrong in (
        [0, 1], [1, 0], [-1, 2], [1, 1.001e15], [math.nan, 1], [1, 2, 3], [1], [], [True, 2],
        [1, "a"], ["a", ""],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="two numbers above 0, or names to choose from"):
            search_section._axis(wrong)


def test_value_at_a_key_is_what_stands_at_the_whole_of_it_or_none():
    asked = spec(engine={"max_num_seqs": 7})
    assert tuning._at(asked, "engine.max_num_seqs") == 7
    assert tuning._at(asked, "name") == asked.name
    for key in ("name.more", "engine.max_num_seqs.more", "engine.no_such_key", "none.at.all"):
        assert tuning._at(asked, key) is None


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"policy": ["fcfs", "static"]}, "tune takes one experiment without a sweep"),
        ({"engine.block_size": [16, 32], "policy": ["fcfs"]}, "one experiment without a sweep"),
        ({"engine.max_num_seqs": [8, 64]}, "engine.max_num_seqs is swept as well"),
        ({}, None),
    ],
)
def test_tune_of_an_experiment_with_a_sweep_of_whatever_key_is_refused(sweep, message):
    section = {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [8, 64]}}
    asked = spec(tune={**section, "tolerance": 0.5})
    swept = asked.model_copy(update={"sweep": sweep})
    if message is None:
        assert tuning.tune(swept, Surface()).trials
        return
    with pytest.raises(SpecError, match=message):
        tuning.tune(spec(tune=section, sweep=sweep), None)


def test_bar_says_which_round_its_points_are_of():
    drawn = []
    bar = PointsBar(lambda text, share: drawn.append((text, share)))
    timing = SimpleNamespace(text=lambda: "about 1 s left")
    bar.point_ended(1, 4, timing, None)
    bar.stage_began("round 2 of at most 5, 1,200 requests a run")
    bar.point_ended(2, 4, timing, None)
    assert drawn == [
        ("1 of 4 points, about 1 s left", 0.25),
        ("round 2 of at most 5, 1,200 requests a run: 2 of 4 points, about 1 s left for these",
         0.5),
    ]  # fmt: skip
