"""What claims, regression checks, searches and comparisons of backends say of results."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from schedlab.experiments.analysis.comparison import compare_runs, step_errors
from schedlab.experiments.claims import claims, page, quoted, report
from schedlab.experiments.claims.claims import Finding, MeasuredFigure, shipped
from schedlab.experiments.claims.readings import Reading, Readings
from schedlab.experiments.comparing import comparison_files
from schedlab.experiments.comparing.compare import PointComparison, _turns
from schedlab.experiments.comparing.compare_figures import (
    cdf_figure,
    frontier_figure,
    step_figure,
)
from schedlab.experiments.comparing.forced_replay import (
    ForcedReplay,
    _differences,
    _fit,
    _parts,
)
from schedlab.experiments.comparing.host_terms import _candidates
from schedlab.experiments.comparing.load_tests import (
    LoadTestValidation,
    StageErrors,
    _measured,
    _statistics,
)
from schedlab.experiments.comparing.recorded_replay import _Clock
from schedlab.experiments.comparing.validate import Validation
from schedlab.experiments.comparing.vllm_recording import Timeline
from schedlab.experiments.figures import agreement, plots
from schedlab.experiments.outcomes import Measurement
from schedlab.experiments.regression import report as regression
from schedlab.experiments.regression.baseline import (
    BASELINE,
    Baseline,
    MeasuredPoint,
    kept_baseline,
    version_change,
    write_baseline,
)
from schedlab.experiments.regression.check import Outcome, compare
from schedlab.experiments.regression.matrix import Matrix, MatrixPoint, Tolerance
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.search import find as finding
from schedlab.experiments.search import recommend as recommending
from schedlab.experiments.search.bracket import Bracket, Probe
from schedlab.experiments.search.constraints import constraints_of
from schedlab.experiments.search.find import _remarks, find, verdicts
from schedlab.experiments.search.recommend import Question, recommend, serve_line
from schedlab.experiments.search.recommend_report import (
    expected_rows,
    recommend_data,
    recommend_lines,
    tried_rows,
)
from schedlab.experiments.search.search_report import (
    find_data,
    find_lines,
    find_rows,
    tune_data,
    tune_lines,
    tune_rows,
)
from schedlab.experiments.search.tune import Trial, tune
from schedlab.experiments.specification.claim import Figure
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.experiments.sweeps.jobs import Done, Job
from schedlab.sim.cost.shape import BatchShape
from schedlab.traces.load_tests import Quantiles
from tests.golden import drawn
from tests.golden.rounding import json_digest, rounded
from tests.unit.test_claims import experiment

# -- claims ---------------------------------------------------------------------------------------

_BANDS = ((1.0, 2.0), (0.0, 0.5), (-0.5, 0.0), (2.0, 3.5), (-math.inf, 1.0), (0.5, math.inf),
          (1.0, 1.0), (0.125, 0.25))  # fmt: skip
_FOUND = ((1.5, 1.2, 1.8), (0.2, -0.1, 0.4), (0.26, 0.251, 0.3), (-0.2, -0.3, -0.1),
          (2.6, 2.0, 3.9), (0.9, 0.4, 0.99), (1.004, 0.9, 1.2), (math.nan, 0.0, 0.0))  # fmt: skip


def _figure(compare_by: str, accept: tuple[float, float], paper: Any) -> Figure:
    against = None if compare_by == "value" else {}
    return Figure(name="f", metric="mean_e2el_ms", compare=compare_by, against=against,
                  paper=paper, accept=accept)  # fmt: skip


def judged(compare_by: str) -> dict[str, Any]:
    """Judge estimates of every kind against bands of every kind."""
    found = {}
    for accept, paper in itertools.product(_BANDS, (None, *_BANDS)):
        figure = _figure(compare_by, accept, paper)
        found[f"{accept} {paper}"] = "".join(
            claims.verdict(figure, *estimate).replace("not ", "~")[:2] for estimate in _FOUND
        )
    shown = [_figure(compare_by, band, None) for band in _BANDS]
    return {
        **found,
        "bands": [report.band_text(figure, figure.accept) for figure in shown],
        "numbers": [
            report.figure_text(shown[0], value)
            for value in (0.0, -0.0004, 0.0523, 1.0, 12.345, -250.0, 123456.0, math.inf, math.nan)
        ],
        "cells": [
            report.cells(MeasuredFigure(shown[0], *estimate, (Reading(2.0, True),), (), "opposite"))
            for estimate in _FOUND
        ],
    }


class _Served:
    """Stands for `Runs`: metrics are a function of the settings, and no run is made."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self.asked: list[str] = []
        self.cost_models: list[Any] = []
        self.stage = self.asked.append

    def tried(self, wanted: Sequence[tuple[Any, str]]) -> list[PointMetrics | Done]:
        found: list[PointMetrics | Done] = []
        for spec, label in wanted:
            self.asked.append(label)
            metrics = self._metrics(spec)
            if metrics is None:
                found.append(Done(Job(spec, label, Path(), label), 0.0, "does not fit"))
                continue
            described = {"name": "told", "calibration": "measured", "model": spec.model,
                         "hardware": spec.hardware}  # fmt: skip
            found.append(
                PointMetrics(label, {}, 0, spec.policy.name, metrics, cost_model=described)
            )
        return found

    def points(self, wanted: Sequence[tuple[Any, str]]) -> list[PointMetrics]:
        return [one for one in self.tried(wanted) if isinstance(one, PointMetrics)]


def _queue(spec: Any) -> dict[str, float]:
    """Return latencies of a queue whose servers depend on policy, seats, GPUs and seed."""
    rate = spec.workload.request_rate
    replicas = 1 if spec.cluster is None else spec.cluster.pools["mixed"].count if (
        "mixed" in spec.cluster.pools) else spec.cluster.count  # fmt: skip
    size = spec.engine.tensor_parallel_size
    seats = spec.engine.max_num_seqs
    budget = spec.engine.max_num_batched_tokens
    factor = {"fcfs": 1.0, "static": 0.6, "edf": 1.3, "priority": 0.99}.get(spec.policy.name, 1.1)
    capacity = replicas * size**0.8 * factor * (8 - (math.log2(seats) - 7) ** 2 / 3)
    capacity *= (1 - abs(math.log2(budget) - 12) / 40) * (1 + 0.01 * (spec.seed % 7))
    load = rate / capacity
    ttft_ms = 100.0 * max(0.1, load) ** 3 + (40.0 if 0.62 < load < 0.66 else 0.0)
    throughput = min(rate, capacity)
    return {
        "p99_ttft_ms": ttft_ms, "mean_queue_time_ms": 900 * load, "mean_e2el_ms": 1e3 * (1 + load),
        "slo_attainment": max(0.0, 1.05 - load**4 / 5), "output_throughput": 50 * throughput,
        "request_throughput": throughput, "offered_request_rate": rate, "num_preemptions": 0.0,
        "median_ttft_ms": ttft_ms / 3, "median_tpot_ms": 20.0, "p99_tpot_ms": 30.0,
        "median_e2el_ms": 800.0, "p99_e2el_ms": 3e3, "median_queue_time_ms": 450 * load,
        "duration_s": 10.0, "completed": 10 * throughput, "p99_itl_ms": 20 + seats / 10,
    }  # fmt: skip


_OF_FILES = ("file", "source_sha256", "spec_hash")


def claimed(_: str) -> dict[str, Any]:
    """Measure claims, capacities among them, and write the pages."""
    spec = make_spec({**experiment(), "name": "small"})
    served = _Served(_queue)
    readings = Readings(spec, served)
    found = readings.read(spec.claim.figures)
    assert spec.claim is not None
    finding = claims.examine(shipped("claims")[0].with_name("small.yaml"), spec, _Served(_queue))
    bound = replace(
        finding, measured=tuple(replace(m, of=(Reading(3.0, True),)) for m in finding.measured)
    )
    cited = replace(finding, path=shipped("policies")[0].with_name("small.yaml"))
    claim = quoted.QuotedClaim(
        id="B2", quoted="q", source="s", test={"small": ["throughput"]},
        beside={"small": ["capacity"]}, reading="read",
    )  # fmt: skip
    part = claim.model_copy(update={"id": "C1", "only": "half"})
    by_name = {"small": finding}
    return {
        "readings": {" ".join(key): list(map(list, value)) for key, value in found.items()},
        "asked": served.asked,
        "figures": [[m.estimate, m.low, m.high, m.verdict, m.num_bounds] for m in finding.measured],
        "page": _body(report.markdown([bound, cited])),
        "claims": _body(page.markdown([claim, part], [finding])),
        "cited": _body(page.markdown([claim], [cited])),
        "data": _without(
            report.experiment_data(_on_disk(finding)), "source_sha256", "spec_hash", "file"
        ),
        "rows": report.row_texts([finding]),
        "claim rows": page.claim_rows([claim, part], [finding]),
        "verdicts": [
            quoted.verdict_of(
                one, [(replace(finding.measured[0], verdict=v), decides) for v, decides in pairs]
            )
            for one in (claim, part)
            for pairs in (
                (("reproduced", True), ("opposite", False)),
                (("reproduced", True), ("opposite", True)),
                (("direction only", True),),
                (("opposite", True), ("reproduced", False)),
                (("in our band", True), ("reproduced", True)),
            )
        ],
        "measured of": [decides for _, decides in quoted.measured_of(claim, by_name)],
        "wanted": {key: sorted(names) for key, names in quoted.wanted([claim, part]).items()},
    }


def _on_disk(finding: Finding) -> Finding:
    """Give it a file whose digest can be taken."""
    return replace(finding, path=shipped("claims")[0])


def _body(text: str) -> list[str]:
    """Return the lines behind what stands before all results."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("* ")) :]


def _without(data: Any, *keys: str) -> Any:
    return {key: value for key, value in data.items() if key not in keys}


def claim_figure(_: str) -> dict[str, Any]:
    """Draw a claim, and measured against simulated."""
    spec = make_spec({**experiment(), "name": "small"})
    finding = claims.examine(shipped("claims")[0], spec, _Served(_queue))
    data = json.loads(json.dumps(report.experiment_data(finding), default=str))
    found, compared = _points()
    both = json.loads(json.dumps(comparison_files.to_data(found, compared), default=str))
    return {
        "claim": drawn.seen(plots.claim(data)),
        "agreement": drawn.seen(agreement.measured_against_simulated(both, "title")),
    }


# -- regression -----------------------------------------------------------------------------------

_TOLERANCES = {
    "mean_ttft_ms": Tolerance(better="lower", relative=0.1),
    "request_throughput": Tolerance(better="higher", absolute=0.5, relative=0.01),
    "slo_attainment": Tolerance(better="higher"),
}
_CHANGES: dict[str, tuple[Any, Any]] = {
    "equal": ((100.0, 5.0, 0.5), (100.0, 5.0, 0.5)),
    "within": ((100.0, 5.0, 0.5), (109.0, 4.6, 0.5)),
    "worse": ((100.0, 5.0, 0.5), (125.0, 4.0, 0.5)),
    "better": ((100.0, 5.0, 0.5), (80.0, 5.7, 0.5)),
    "mixed": ((100.0, 5.0, 0.5), (80.0, 4.0, 0.499)),
    "nothing": ((100.0, 0.0, math.nan), (100.0, 2.0, math.nan)),
    "lost": ((100.0, 5.0, 0.5), (100.0, 5.0, math.nan)),
    "tiny": ((1e6, 5.0, 0.5), (1e6, 5.0, 0.500001)),
}


def regressed(version: str) -> dict[str, Any]:
    """Compare results with kept ones: by the last bit, or by tolerance."""
    points, kept, now = [], {}, {}
    for policy, pair in _CHANGES.items():
        for seed in (1, 2):
            point = MatrixPoint("w", policy, seed, None, "q")
            points.append(point)
            for where, values, sha in ((kept, pair[0], "s"), (now, pair[1], "s")):
                named = dict(zip(_TOLERANCES, values, strict=True))
                if seed == 2 and where is now:
                    named["mean_ttft_ms"] *= 1.02
                where[point.key] = MeasuredPoint("q", "v", named, sha)
    kept["w/gone/3"] = kept["w/gone/4"] = kept["w/equal/1"]
    if version == "other sources":
        now = {key: replace(one, version="v2") for key, one in now.items()}
    others = (("new", 1), ("broken", 1), ("asked", 1), ("asked", 2))
    points += [MatrixPoint("w", policy, seed, None, "q") for policy, seed in others]
    now["w/new/1"] = now["w/asked/1"] = now["w/asked/2"] = now["w/equal/1"]
    kept["w/asked/1"] = kept["w/equal/1"]
    kept["w/asked/2"] = replace(kept["w/equal/1"], question="another")
    outcome = Outcome(now, {"w/broken/1": "it broke"}, {point.key: 1.25 for point in points})
    cases = compare(Matrix(points, _TOLERANCES), Baseline("c", {"numpy": "1"}, kept), outcome)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        regression.write_junit(cases, path)
        junit = path.read_text(encoding="utf-8").splitlines()
    return {
        "cases": [[c.policy, c.status, c.exact, c.num_within, c.detail, c.seconds,
                   [[m.metric, m.before, m.now, m.allowed, m.better, m.seed] for m in c.moves]]
                  for c in cases],
        "rows": regression.rows(cases),
        "lines": regression.summary_lines(cases, "the sources"),
        "better": regression.summary_lines([c for c in cases if c.status == "better"], "x"),
        "markdown": regression.markdown(cases, "the sources").splitlines()[:6],
        "junit": junit,
    }  # fmt: skip


# -- searches -------------------------------------------------------------------------------------


def searched(_: str) -> dict[str, Any]:
    """Search two settings with seeds under two constraints, and say so."""
    spec = make_spec({
        "name": "asked", "replications": 5, "model": "llama-3-8b", "hardware": "h100",
        "engine": {"max_model_len": 4000}, "slo": {"ttft_ms": 60.0},
        "workload": {"trace": "fixed", "num_requests": 100, "request_rate": 2.0},
        "sweep": {"policy": ["fcfs", {"name": "static", "max_batch_size": 8}]},
        "find": {"maximize": "workload.request_rate", "tolerance": 0.05,
                 "at_most": {"p99_ttft_ms": 60.0, "mean_queue_time_ms": 2000.0},
                 "at_least": {"slo_attainment": 0.6}},
    })  # fmt: skip
    served = _Served(_queue)
    found = find(spec, served)
    told = verdicts(spec.find, found)
    broken = replace(found[0], label="z", error="cannot run: x", brackets=(), metrics=())
    below = replace(found[0], label="b", brackets=tuple(
        one._replace(bound="below") for one in found[0].brackets))  # fmt: skip
    return {
        "asked": json_digest(served.asked),
        "values": [[one.label, one.values, one.num_requests, one.bound] for one in found],
        "rows": find_rows([*found, broken, below]),
        "lines": find_lines(spec, [*found, broken]),
        "verdicts": told,
        "data": json_digest(rounded(_without(find_data(spec, found, told, 3), "spec_hash"))),
        "remarks": [
            _remarks(constraints, brackets, metrics, is_part)
            for constraints, brackets, metrics in _odd_searches()
            for is_part in (False, True)
        ],
    }


def _odd_searches() -> Any:
    constraints = constraints_of({"p99_ttft_ms": 100.0}, {"slo_attainment": 0.9})
    calm = dict.fromkeys(("median_e2el_ms", "median_queue_time_ms"), 0.0)
    slow = {**calm, "offered_request_rate": 10.0, "request_throughput": 9.0, "duration_s": 11.0,
            "completed": 99.0}  # fmt: skip
    fine = {**slow, "request_throughput": 9.9, "completed": 110.0}

    def bracket(*probes: tuple[float, float, float], above: float, bound: str = "") -> Bracket:
        tried = tuple(Probe(value, (a, b)) for value, a, b in probes)
        return Bracket(tried[0].value, above, bound, tried)

    heals = bracket((1, -5, -0.1), (2, 9, -0.1), (3, -7, -0.1), (4, 3, 0.2), above=2.0)
    falls = bracket((1, -5, -0.1), (2, -40, -0.05), (3, -38, -0.08), (5, 40, -0.2), above=5.0)
    yield constraints, [heals, heals._replace(breaks_at=1.5)], [fine, fine]
    yield constraints, [falls], [slow]
    yield (
        constraints,
        [falls._replace(bound="at least"), heals._replace(bound="below")],
        [fine, slow],
    )


def tuned(maximize: str) -> dict[str, Any]:
    """Tune two limits over a known surface, by a metric or by a largest rate."""
    spec = make_spec({
        "name": "tuned", "replications": 2, "model": "llama-3-8b", "hardware": "h100",
        "engine": {"max_model_len": 2000},
        "workload": {"trace": "fixed", "num_requests": 100, "request_rate": 5.0},
        "tune": {"maximize": maximize, "at_most": {"p99_itl_ms": 60.0, "p99_ttft_ms": 300.0},
                 "over": {"engine.max_num_seqs": [16, 1024],
                          "engine.max_num_batched_tokens": [1024, 16384]},
                 "levels": 2, "tolerance": 0.9},
    })  # fmt: skip
    served = _Served(_queue)
    found = tune(spec, served)
    odd = replace(found, given=None, num_invalid=0, trials=(
        Trial({"a": 1.0}, (1.0, 2.0), (0.5, 0.2)),
        Trial({"a": 2.0}, (3.0,), (-1.0, 0.0)),
    ))  # fmt: skip
    ranked = [Trial({"a": i}, goals, excess) for i, (goals, excess) in enumerate((
        ((1.0, 3.0), (0.0, -1.0)), ((5.0,), (0.1, 0.1)), ((9.0,), (-1.0, 0.15)),
        ((math.nan,), (-1.0, 0.0)), ((2.5,), (-0.1,)), ((1.0,), (0.15, 0.01))))]  # fmt: skip
    return {
        "ranks": [one.values["a"] for one in sorted(ranked, key=lambda one: one.rank)],
        "asked": [len(served.asked), json_digest(served.asked)],
        "best": [found.best.values, found.best.goals, found.verdict, *found.remarks],
        "rows": tune_rows(found),
        "lines": tune_lines(spec, found),
        "odd": [tune_rows(odd), tune_lines(spec, odd)[:2]],
        "left out": tune_lines(
            spec, replace(found, left_out={f"why {i}": 3 * i % 8 for i in range(7)})
        )[3:-2],
        "data": json_digest(rounded(_without(tune_data(spec, found, 7), "spec_hash"))),
    }


def recommended(case: str) -> dict[str, Any]:
    """Recommend for a rate or for as much as can be, and say so."""
    asked = Question(
        model="llama-3-8b", hardware="h100", num_gpus=4 if case else 2,
        slo={"ttft_ms": 100.0, "tpot_ms": 50.0},
        workload={"trace": "fixed", "num_requests": 100}, attainment=0.8,
        policies=("fcfs", "edf"),
        rate=float(case) if case else None, usd_per_hour=2.5 if case else None,
    )  # fmt: skip
    served = _Served(_queue)
    fewer = {"_MOST_SEQS": (128, 1024), "_MOST_TOKENS": (4096, 8192)}
    with (
        mock.patch.multiple(recommending, **fewer),
        mock.patch.object(finding, "MOST_DOUBLINGS", 1),
    ):
        found = recommend(asked, served)
    described = [{"name": "roofline", "calibration": "UNCALIBRATED"}]
    cut = replace(found, is_cut=True, max_model_len=70_000, usd_per_million_tokens=math.nan,
                  change=None)  # fmt: skip
    return {
        "asked": [len(served.asked), json_digest(served.asked)],
        "tried": tried_rows(found),
        "expected": expected_rows(found),
        "lines": recommend_lines(found, described),
        "serve": serve_line(found).splitlines(),
        "cut": [*serve_line(cut).splitlines(), *recommend_lines(cut, [])],
        "data": json_digest(rounded(recommend_data(found, described, 7))),
        "best": found.best.candidate,
        "default": found.default.candidate,
        "excluded": found.excluded,
    }


# -- both backends --------------------------------------------------------------------------------


def _points() -> tuple[list[PointComparison], Any]:
    """Return comparisons of runs of the small sweep, as if some had been measured."""
    whole = drawn.results()
    spec = make_spec({
        "name": "both", "hardware": "cpu", "model": "schedlab-tiny",
        "cost_model": drawn._SWEEP["cost_model"],
        "real": {"repeats": 2}, "engine": {"max_model_len": 900},
        "workload": {"trace": "fixed", "num_requests": 14, "request_rate": 2},
        "sweep": {"policy": ["static", "vtc", "fcfs"], "workload.request_rate": [0.5, 6]},
    })  # fmt: skip
    found = []
    for i, row in enumerate(whole.rows):
        runs = [run.load() for run in whole.of(row)]
        real = {"device": "cpu", "clock": "virtual", "estimates": False}
        origin = {**runs[2].provenance, "versions": {}, "git_commit": "", "engine": {}}
        runs = [replace(run, provenance={**origin, "real": real}) for run in runs]
        measured = np.array([2_000_000, 4_000_000, 9_000_000, 3_000_000]) + i * 70_000
        predicted = np.array([2_100_000, 3_500_000, 9_900_000, 3_000_000])
        found.append(PointComparison(
            row.label, row.policy, f"request_rate={row.settings['workload.request_rate']}",
            compare_runs(row.label, runs[:2], [runs[2]], 1), 1 + i % 2, i != 2,
            "step 3 differs" if i == 1 else None, None if i else "step 5",
            step_errors(predicted, measured), predicted, measured, runs[0], runs[2],
        ))  # fmt: skip
    return found, spec


def backends(_: str) -> dict[str, Any]:
    """Write down how measured and simulated runs agree."""
    found, spec = _points()
    data = _without(comparison_files.to_data(found, spec), "spec", "spec_hash", "provenance")
    shown = json.loads(json.dumps(data, default=str))
    validation = Validation(
        {"TTFT Mean": 100.0, "E2E P99": 2000.0}, {"TTFT Mean": 95.0, "E2E P99": 2300.0},
        {"num_steps": 12345, "preemptions": 2}, ["note"], 1.5,
    )  # fmt: skip
    stages = tuple(
        StageErrors({"TTFT mean": ms, "E2E P99": 5e3}, {"TTFT mean": other, "E2E P99": 4e3},
                    "run", "model", i, 2.5 * i)
        for i, (ms, other) in enumerate([(100.0, 90.0), (1200.0, 1500.0)])
    )  # fmt: skip
    load_tests = LoadTestValidation(stages, ("note",), 2.0)
    return {
        "markdown": comparison_files.markdown(found, spec).splitlines(),
        "told": [comparison_files.runs_told(some, spec) for some in (found, found[:2])],
        "data": json_digest(rounded(shown)),
        "agreement": comparison_files.agreement(found),
        "steps": drawn.seen(step_figure(found, "title")),
        "latencies": drawn.seen(cdf_figure(found, "title")),
        "frontier": drawn.seen(frontier_figure(found, "title")),
        "measurement": repr(Measurement(shown)).splitlines(),
        "validation": [*validation.rows(), *validation.lines(), rounded(validation.to_data()),
                       validation.root_mean_square_error],
        "load tests": [load_tests.header(), *load_tests.rows(), *load_tests.lines(),
                       rounded(load_tests.to_data())],
    }  # fmt: skip


def replayed(_: str) -> dict[str, Any]:
    """Time steps by recorded tokens, and find what a cost model leaves out of them."""
    times_s = np.array([0.010, 0.0101, 0.050, 0.0900, 0.2])
    recording = Timeline(np.full(5, 9), np.full(5, 3), np.array([5.0, 5, 5.02, 5.03, 5.031]),
                         5 + times_s, 5 + times_s + 0.1)  # fmt: skip
    clock = _Clock(recording, lambda shape: 0.5 * shape.num_decodes)
    decodes, prompts = BatchShape(2, 20, 10), BatchShape(1, 9, 9, ((30, 0), (5, 2)))
    now_ns, ends = 0, []
    for predicted_ns, shape, ended in (
        (9_000_000, prompts, [(0, 10_000_000), (1, 10_100_000)]),
        (12_000_000, decodes, []), (9_000_000, decodes, []),
        (15_000_000, prompts, [(2, 50_000_000), (3, 50_400_000), (4, 51_000_000)]),
        (9_000_000, decodes, []), (9_000_000, decodes, [(3, 90_000_000)]),
        (9_000_000, BatchShape(5, 50, 20), [(4, 98_000_000), (1, 103_000_000)]),
    ):  # fmt: skip
        now_ns += clock.duration_ns(now_ns, predicted_ns, shape, ended)
        ends.append(now_ns)
    steps = clock.steps
    parts = np.array([_parts(step.shape) for step in steps])
    mean_ms, error_ms, counts = _fit(steps, parts)
    found = ForcedReplay(
        steps, clock.contradictions, _differences(steps, parts, mean_ms, error_ms, counts), 2
    )
    return {
        "ends": ends,
        "steps": [[one.start_ns, one.duration_ns, one.num_times] for one in steps],
        "contradictions": [list(one) for one in clock.contradictions],
        "stretches": found.stretches().tolist(),
        "rows": found.rows(),
        "lines": found.lines(),
        "data": found.to_data()["differences"],
        "latencies": recording.latencies_ms(),
        "kinds": [int(np.argmax(_parts(BatchShape(n, n, 1)))) for n in (1, 4, 5, 8, 512, 513)],
        "quantiles": [_statistics("x", np.array([1.0, 2.0, 4.0, 9.0])),
                      _measured("x", Quantiles(2.0, (0.0, 0.5, 1.0), (0.001, 0.002, 0.1)))],
        "terms": [str(one) for one in list(_candidates())[::29]],
        "turns": [list(turn) for turn in _turns(_points_of_two_loads(), 3, True)],
    }  # fmt: skip


def _points_of_two_loads() -> list[Any]:
    return points(make_spec({
        "name": "turns", "workload": {"trace": "fixed", "num_requests": 5, "request_rate": 2},
        "sweep": {"policy": ["static", "vtc"], "workload.request_rate": [0.5, 6]},
    }))  # fmt: skip


def kept(_: str) -> dict[str, Any]:
    """Write a baseline and read it back; say what has changed since."""
    points_of = {
        f"w/p/{seed}": MeasuredPoint("q", "v", {"b": 2.5, "a": math.nan}, "s") for seed in (2, 10)
    }
    with TemporaryDirectory() as folder:
        write_baseline(Path(folder), points_of)
        lines = (Path(folder) / BASELINE).read_text(encoding="utf-8").splitlines()
        read = kept_baseline(Path(folder))
    return {
        "lines": [line for line in lines if "/" in line],
        "read": sorted(read.points),
        "same": version_change(read).replace("defaults of keys", "keys"),
        "changed": version_change(replace(read, code="x", versions={**read.versions, "zzz": "1"})),
        "tolerances": [
            Tolerance(relative=relative, absolute=absolute).allowed(value)
            for relative, absolute in ((0.1, 0.0), (0.1, 2.0), (0.0, 2.0))
            for value in (10.0, -50.0)
        ],
    }


CASES = {
    "replay": (replayed, ""),
    "kept baseline": (kept, ""),
    **{f"claims of a {name}": (judged, name)
       for name in ("value", "ratio", "increase", "reduction", "difference")},
    "claims": (claimed, ""),
    "claim figures": (claim_figure, ""),
    **{f"regression, {name}": (regressed, name) for name in ("same sources", "other sources")},
    "search": (searched, ""),
    **{f"tuning for {name}": (tuned, name)
       for name in ("output_throughput", "workload.request_rate")},
    **{f"recommendation for {name or 'most'}": (recommended, name) for name in ("", "14")},
    "backends": (backends, ""),
}  # fmt: skip
