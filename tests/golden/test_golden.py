"""Simulated results are exact: any change of a bit must be meant.

Lengths and arrivals are drawn by numpy, and times are rounded from floating point; both are the
same on every platform with IEEE doubles, so the comparison has no tolerance.
"""

import pytest

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
