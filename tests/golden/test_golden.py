"""Simulated results are exact: any change of a bit must be meant.

Lengths and arrivals are drawn by numpy, and times are rounded from floating point; both are the
same on every platform with IEEE doubles, so the comparison has no tolerance.
"""

import re
from dataclasses import fields

import pytest

from schedlab import core
from schedlab.sim.config import EngineConfig
from schedlab.sim.metrics.registry import names
from tests import laws
from tests.golden import called, damaged, pinned, small_runs, told, whole, wild
from tests.golden.cases import cases, expected, result_of


@pytest.mark.parametrize(("policy", "workload"), cases())
def test_result_of_fixed_case_is_the_kept_one(policy, workload):
    assert result_of(policy, workload) == expected()[f"{policy} {workload}"]


def test_kept_results_are_those_of_the_matrix_and_say_something():
    kept = expected()
    assert set(kept) == {f"{policy} {workload}" for policy, workload in cases()}
    assert all(case["completed"] > 0 for case in kept.values())
    assert kept["fcfs tight"]["num_preemptions"] > 0
    assert kept["static chat"]["padding_share"] > 0


@pytest.mark.parametrize("case", small_runs.CASES)
def test_small_runs_of_a_policy_are_the_kept_ones(case):
    assert case in small_runs.kept(), "a new policy or variant: `make golden` keeps its results"
    digests = {limits: small_runs.digest(case, limits) for limits in small_runs.limits_of(case)}
    assert digests == small_runs.kept()[case]


def test_small_runs_are_of_every_case_and_meet_what_is_rare():
    assert set(small_runs.kept()) == set(small_runs.CASES)
    logs = {
        limits: laws.run(small_runs.make("fcfs"), small_runs.workload(limits), config)
        for limits, config in small_runs.LIMITS.items()
    }
    for limits in ("tight", "swap", "switches"):
        assert logs[limits].requests()["num_preemptions"].sum() > 2, limits
    assert logs["switches"].requests()["prefix_hit_tokens"].sum() > 0
    assert logs["swap"].requests()["recomputed_tokens"].sum() == 0
    for log in logs.values():
        assert log.steps()["num_waiting"].max() > 2


def test_wild_runs_do_what_no_shipped_policy_does():
    workload, limits = small_runs.workload("swap"), wild.LIMITS["mixed"]
    log = laws.run(wild.Wild(0), workload, limits)
    requests, steps = log.requests(), log.steps()
    assert {0, 1} == set(requests["status"].tolist())
    assert steps["swapped_bytes"].sum() > 0
    assert requests["recomputed_tokens"].sum() > 0
    assert (requests["finish_ns"] > requests["last_token_ns"]).any()


def test_told_runs_turn_every_switch_of_an_engine():
    # What no run turns, no digest looks at. The last two must not change a result.
    turned = {
        field.name
        for field in fields(EngineConfig)
        if len({getattr(limits, field.name) for limits in told.LIMITS.values()}) > 1
    }
    assert turned == {field.name for field in fields(EngineConfig)} - {
        "max_model_len", "fast_forward", "check_horizon",
    }  # fmt: skip


def test_drawn_experiments_are_seldom_refused_and_the_same_in_pieces():
    kept = pinned.kept()
    told = [row for name in whole.CASES for key, row in kept[name].items() if key != "facts"]
    assert sum(row.startswith("refused") for row in told) < len(told) / 8
    in_pieces = [row for row in told if "in pieces" in row]
    assert all("in pieces same" in row for row in in_pieces)
    assert len(in_pieces) > len(told) / 20


def test_objects_and_functions_give_answers_when_they_are_asked():
    # Were what is drawn refused everywhere, nothing would be looked at.
    if core.running() != "python":
        pytest.skip("compiled code does not tell what types it takes")
    for room, name in (("sim.drive.frontend", "Frontend"), ("sim.metrics.steps", "busy_share")):
        answers = [answer for _, answer in called.questions(room, name)]
        refused = [one for one in answers if isinstance(one, str) and one.endswith("Error")]
        assert len(answers) - len(refused) > 5


@pytest.mark.slow
def test_files_are_read_before_they_are_damaged():
    for kind in damaged.KINDS:
        _, _, outcome = next(damaged.outcomes(kind))
        assert not isinstance(outcome, str), f"{kind}: {outcome}"


# Tables that take more than a fifth of a second, many of them alone, or in hundreds.
SLOW = re.compile(
    "combined|whole|wild|metrics |figures? |recommendation|tuning|"
    "parts measured fleet|sittings|search|claim figures|commands [ot]|bench of [fhs]|"
    "fit|samples|overheads|self-check|ceilings|kernel benches|page|report|layouts|tables|"
    "asked by laws of [ceprc]|defaults of gpu|answers of (sim.cost.learning.[ep]|testing.[cepr])|"
    "answers of (experiments|traces)|edges knobs|backends|"
    "damaged|told of fleet|sitting (one hangs|all well)|live figure|"
    "told short drafts|tiles|compared|"
    "answers of sim.(metrics.targets|cost.learning.fit|record.perfetto|speculation.drafters)|"
    "answers of testing.laws|told (pipeline|connector)"
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if SLOW.match(name) else name
        for name in pinned.PINNED
    ],
)
def test_workloads_metrics_and_defaults_are_the_kept_ones(name):
    if name in called.CASES and core.running() != "python":
        pytest.skip("compiled code does not tell what types it takes")
    assert pinned.pinned(name) == pinned.kept()[name], pinned.how_to_look(name)


def test_kept_tables_are_those_computed_and_know_every_metric_of_its_own():
    kept = pinned.kept()
    assert set(kept) == {*pinned.PINNED, *pinned.NEED_MORE}
    measured = {
        name.partition("(")[0]
        for case in ("fleet", "sessions", "tiers", "pipeline")
        for name in kept[f"metrics {case}"]
    }
    assert measured == set(names())
    assert kept["metrics swap"]["swapped_bytes"] != "0"
    assert kept["metrics cached"]["prefix_hit_share"] != "0"
    assert kept["metrics tiers"]["loaded_bytes(tier=disk)"] != "0"
    assert kept["metrics engines"]["padding_share"] != "0"
