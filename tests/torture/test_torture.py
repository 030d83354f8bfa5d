"""A part of the campaign of bad inputs; ``make torture`` runs all of it."""

import os
from itertools import islice

import pytest
from hypothesis import strategies as st

from tests.torture import random_workloads
from tests.torture.campaign import all_cases, torture
from tests.torture.combined_experiments import NUM_COMBINED, combined_cases
from tests.torture.hand_written import (
    command_cases,
    environment_cases,
    file_cases,
    policy_cases,
)
from tests.torture.mutated_files import mutated_file_cases
from tests.torture.odd_values import specification_cases
from tests.torture.sandbox import REFUSED, Case, run_case

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="cases run in forks of the test")


def faults_of(cases):
    return [f"{name}: {fault}" for name, faults in torture(cases, 120.0) for fault in faults]


@pytest.mark.slow
def test_policy_that_misbehaves_is_named_and_nothing_is_left():
    assert faults_of(policy_cases()) == []


@pytest.mark.slow
def test_file_that_is_no_experiment_is_refused_by_name():
    assert faults_of(file_cases()) == []


@pytest.mark.slow
def test_command_that_makes_no_sense_is_refused_and_leaves_no_folder():
    assert faults_of(command_cases()) == []


@pytest.mark.slow
def test_variable_that_means_nothing_is_refused_by_name():
    assert faults_of(environment_cases()) == []


@pytest.mark.slow
def test_odd_value_at_any_key_is_refused_in_one_line_or_taken():
    assert faults_of(list(specification_cases())[5::257]) == []


@pytest.mark.slow
def test_experiment_of_many_features_runs_or_is_refused_by_name():
    assert faults_of(combined_cases(range(7, NUM_COMBINED, 300))) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trace", "model", "profile table", "load test"])
def test_sound_file_with_one_change_is_refused_by_name_or_read(kind):
    cases = list(mutated_file_cases(kind))
    assert faults_of([cases[0], *cases[7 :: len(cases) // 3]]) == []


@pytest.mark.slow
def test_result_with_one_change_is_refused_by_name_or_reported():
    # Of a sweep, without making what a search leaves; figures are drawn for each that can be read.
    cases = [next(islice(mutated_file_cases("report"), at, None)) for at in (3, 60)]
    assert faults_of(cases) == []


@pytest.mark.slow
def test_sandbox_judges_what_goes_wrong(tmp_path):
    def faults(argv, **more):
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return run_case(Case(argv, **more), folder, limit_s=20.0).faults

    assert faults(["version"]) == []
    assert faults(["version"], ends=[REFUSED]) == ["exit code 0"]
    broken = "from schedlab.experiments.commands import cli\ncli.main = lambda: 1 / 0"
    assert faults(["version"], prepare=broken)[0].startswith("traceback: ZeroDivisionError")
    assert "message names none of s.yaml" in faults(["run", "t.yaml"], names=["s.yaml"])[0]
    hang = "import time\ntime.sleep(99)"
    folder = tmp_path / "hang"
    folder.mkdir()
    assert run_case(Case(["version"], prepare=hang), folder, limit_s=0.5).faults == ["hangs"]


@pytest.mark.slow
def test_campaign_has_thousands_of_cases_with_names_of_their_own():
    names = [name for name, _ in islice(all_cases(), 2500)]
    assert len(names) == 2500
    assert len(set(names)) > 0.9 * len(names)


def test_workload_that_breaks_a_law_or_does_not_end_is_told(monkeypatch):
    def check(number):
        assert number != 0, "zero is lawless"
        while number == 1:
            pass

    def tried(*numbers):
        kinds = {"numbers": (st.sampled_from(numbers), check)}
        monkeypatch.setattr(random_workloads, "_KINDS", kinds)
        return random_workloads.run_batch("numbers", 7, 20, limit_s=0.05)[1]

    assert tried(2, 3) is None
    assert "zero is lawless" in tried(0, 2)
    assert tried(1, 2).endswith("still at it after 0.05 s of CPU\n1")
