"""The best schedule in hindsight, and how near MC-SF comes to it."""

from itertools import product

import numpy as np
import pytest

from schedlab.sim.errors import SchedlabError
from tests.theory.hindsight_optimum import (
    Instance,
    Job,
    least_total_latency,
    ratio,
    synthetic,
    total_latency,
)


def by_enumeration(instance, horizon):
    """Try all starts."""
    best = None
    for starts in product(*(range(j.arrival, horizon - j.output + 1) for j in instance.jobs)):
        held = np.zeros(horizon)
        for p, job in zip(starts, instance.jobs, strict=True):
            held[p : p + job.output] += job.prompt + np.arange(1, job.output + 1)
        if held.max() <= instance.memory:
            total = sum(
                p + j.output - j.arrival for p, j in zip(starts, instance.jobs, strict=True)
            )
            best = total if best is None else min(best, total)
    return best


def test_two_that_do_not_fit_at_their_ends_start_a_round_apart():
    # Each holds 2, 3, 4, 5 tokens: together 10 in the last round, a round apart 5 + 4.
    jobs = (Job(0, 1, 4), Job(0, 1, 4))
    assert least_total_latency(Instance(jobs, 10), 8) == 4 + 4
    assert least_total_latency(Instance(jobs, 9), 8) == 4 + 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_integer_program_finds_what_enumeration_finds(seed):
    rng = np.random.default_rng(seed)
    jobs = tuple(Job(*rng.integers([0, 1, 1], [3, 4, 5]).tolist()) for _ in range(4))
    instance = Instance(jobs, 9)
    assert least_total_latency(instance, 11) == by_enumeration(instance, 11)


def test_horizon_that_is_too_short_is_an_error():
    with pytest.raises(SchedlabError, match="no optimum within 4 rounds"):
        least_total_latency(Instance((Job(0, 1, 4), Job(0, 1, 4)), 9), 4)


@pytest.mark.parametrize("policy", ["mc_sf", "fcfs", "sjf"])
def test_engine_counts_rounds_as_the_model_does(policy):
    # Alone, a request that arrives in round 3 and has 4 tokens is done after round 6.
    assert total_latency(Instance((Job(3, 2, 4),), 10), policy) == (4, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_once", "bound"),
    # With arrivals the optimum knows who will come: the fewer the requests, the more that is worth.
    [(True, 1.10), (False, 1.25)],
)
def test_mc_sf_is_near_the_optimum_in_hindsight(at_once, bound):
    ratios = [ratio(seed, at_once, num_jobs=6) for seed in range(6)]
    assert min(ratios) >= 1.0
    assert np.mean(ratios) <= bound


def test_synthetic_instances_can_be_served():
    for seed in range(20):
        jobs, memory = synthetic(seed, False, 8)
        assert all(1 <= job.output <= memory - job.prompt for job in jobs)
        assert list(jobs) == sorted(jobs, key=lambda job: job.arrival)
