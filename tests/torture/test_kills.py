"""Some of the kills of ``make torture``, and the sandbox that tells what they leave."""

import os
from itertools import islice

import pytest

from tests.torture.campaign import load
from tests.torture.kills import Disturbance, Victim, disturbed, victims

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="victims work in forks of the test")


def faults_of(names, every, most):
    load(calibrates="calibrate" in names)
    with victims() as found:
        ways = [islice(disturbed(v, 0), 2, most, every) for v in found if v.name in names]
        return [f"{name}: {fault}" for one in ways for name, tried in one for fault in tried()]


@pytest.mark.slow
def test_run_killed_anywhere_leaves_the_old_result_or_the_new_and_is_done_again():
    assert faults_of(["run again"], every=9, most=30) == []


@pytest.mark.slow
def test_sweep_killed_anywhere_goes_on_to_the_bytes_of_one_that_was_not():
    assert faults_of(["sweep"], every=37, most=120) == []


@pytest.mark.slow
def test_calibration_killed_anywhere_goes_on_to_the_same_result():
    assert faults_of(["calibrate"], every=1, most=6) == []


@pytest.mark.slow
def test_fetch_killed_anywhere_goes_on_to_the_whole_file():
    assert faults_of(["fetch"], every=1, most=6) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run again", "sweep", "calibrate", "fetch"])
@pytest.mark.parametrize("way", ["clock that jumps", "folder that is read-only", "disk full"])
def test_work_under_adverse_conditions_is_done_or_refused_and_can_be_done_again(name, way):
    load(calibrates=name == "calibrate")
    with victims() as found:
        (victim,) = [v for v in found if v.name == name]
        ways = islice(disturbed(victim, 0), 300)
        tried = next(tried for told, tried in ways if way in told)
        assert tried() == []


@pytest.mark.slow
def test_careless_victim_is_found_out():
    def careless():
        with open("out", "w") as file:
            file.write("half")
            file.flush()
            with open("other", "w"):
                pass
            file.write("whole")

    def nothing(folder):
        pass

    ways = islice(disturbed(Victim("careless", careless, nothing), 0), 4)
    found = {name: faults() for name, faults in ways}
    assert found[f"careless, {Disturbance(at_change=1)}"] == []
    assert found[f"careless, {Disturbance(at_change=2)}"][0].startswith("left a part")
