"""Policies whose targets are about as long as steps: ahead as step by step, and as they were."""

import pytest

from tests import laws
from tests.golden import paced

# All tests of a case follow each other: they look at the same runs.
EVERY_CASE = pytest.mark.parametrize("case", paced.NAMES, scope="module")


@pytest.mark.slow
@EVERY_CASE
def test_steps_planned_ahead_beside_tight_targets_are_those_planned_one_by_one(case):
    for limits in paced.LIMITS:
        for turn in paced.TURNS:
            ahead, plans = paced.run(case, limits, turn)
            single, more = paced.run(case, limits, turn, ahead=False)
            assert plans <= more
            assert laws.difference(single, ahead, ("one by one", "ahead")) is None, (limits, turn)


@EVERY_CASE
def test_runs_that_begin_later_are_those_that_begin_at_zero(case):
    # At zero what was never is easily taken for what was at once.
    for limits in ("full", "swapping", "roomy"):
        at_once, _ = paced.run(case, limits, 0)
        later, _ = paced.run(case, limits, 0, later_ns=70_000)
        assert paced.since(later, 70_000) == paced.since(at_once, 0), limits


@pytest.mark.slow
@EVERY_CASE
def test_runs_beside_tight_targets_are_the_kept_ones(case):
    assert paced.digests(case) == paced.kept()[case]


def test_runs_beside_tight_targets_are_of_every_case_and_meet_their_limits():
    assert set(paced.kept()) == set(paced.NAMES)
    logs = {limits: paced.run("fcfs", limits, 0)[0] for limits in paced.LIMITS}
    for limits in ("full", "swapping"):
        assert logs[limits].requests()["num_preemptions"].sum() > 0
    for limits in ("roomy", "rising"):
        assert logs[limits].requests()["num_preemptions"].sum() == 0
    assert logs["swapping"].steps()["swapped_bytes"].sum() > 0
    assert logs["narrow"].steps()["num_decodes"].max() == 4
