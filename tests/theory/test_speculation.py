"""Speculation against closed forms: tokens a step, speed-up, and where it stops paying."""

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.speculation.draft_length import expected_tokens
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from tests import laws

OUTPUT = 1000


class DraftTime:
    """A drafter that takes the same time for each token of a draft."""

    reads_contexts = False

    def __init__(self, ns):
        self.ns = ns

    def step_ns(self, verified, drafts, rows):
        return self.ns * len(rows)

    def uneven_ns(self, steps, drafts, rows):
        return [self.ns * len(of_step) for of_step in rows]


def run(rates, k, num_requests=40, spread=0.0, drafter=None, cost=None):
    config = EngineConfig(
        num_blocks=100_000, max_model_len=4096, max_num_seqs=num_requests,
        num_speculative_tokens=k,
    )  # fmt: skip
    workload = [laws.arrival(i, 0, 8, OUTPUT) for i in range(num_requests)]

    def make_executor(pricing):
        acceptance = DrawnAcceptance(rates, spread, seed=1)
        return SpeculativeExecutor(pricing, config, acceptance, drafter or DraftTime(0))

    log = laws.run(
        registry.make("fcfs"), workload, config, cost, make_executor=make_executor, prove=False
    )
    return log


def tokens_per_step(log):
    steps = log.steps()
    return 1 + steps["accepted_tokens"].sum() / steps["num_decodes"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_tokens_a_step_are_those_of_leviathan(rate, k):
    log = run([rate], k)
    expected = k + 1 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
    assert expected_tokens(rate, k) == pytest.approx(expected)
    # 40,000 tokens: the last step of an answer is cut short, and chance leaves about 0.4 %.
    assert tokens_per_step(log) == pytest.approx(expected, rel=0.015)


def test_rates_by_place_yield_the_sum_of_their_products():
    rates = [0.9, 0.6, 0.3]
    expected = 1 + sum(np.prod(rates[: i + 1]) for i in range(3))
    assert tokens_per_step(run(rates, 3)) == pytest.approx(expected, rel=0.015)


@pytest.mark.slow
def test_spread_of_rates_keeps_their_mean_and_spreads_requests():
    def rates_of(log):
        ends = [len(np.unique(log.token_times(i))) for i in range(400)]
        return (OUTPUT - np.array(ends)) / np.array(ends)  # one drafted token: accepted / steps

    alike, spread = rates_of(run([0.6], 1, 400)), rates_of(run([0.6], 1, 400, spread=0.2))
    assert alike.mean() == pytest.approx(0.6, abs=0.01)
    assert spread.mean() == pytest.approx(0.6, abs=0.03)
    assert alike.std() < 0.03
    assert spread.std() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(("rate", "k", "share"), [(0.8, 5, 0.05), (0.6, 2, 0.1), (0.5, 3, 0.4)])
def test_one_request_is_faster_by_theorem_3_8(rate, k, share):
    """Leviathan et al., theorem 3.8: (1 - a^(k+1)) / ((1 - a) (c k + 1)), or slower if below 1."""
    step_ns = 1_000_000
    cost = laws.LinearCost(step_ns, 0, 0)
    plain = run([0.0], 1, 1, cost=cost).requests()["finish_ns"][0]  # one token a step
    log = run([rate], k, 1, drafter=DraftTime(int(share * step_ns)), cost=cost)
    expected = expected_tokens(rate, k) / (share * k + 1)
    # A thousand tokens of one request leave about 3 % to chance.
    assert plain / log.requests()["finish_ns"][0] == pytest.approx(expected, rel=0.08)


@pytest.mark.slow
def test_speculation_stops_paying_where_arithmetic_costs_as_much_as_its_tokens_bring():
    """With c ns a token beside a base b, k = 3 pays iff E (b + n c) > b + 4 n c, for n requests."""
    rate, k, base_ns, token_ns = 0.7, 3, 100_000, 1_000
    gain = expected_tokens(rate, k)
    break_even = base_ns * (gain - 1) / (token_ns * (k + 1 - gain))

    def faster(num_requests):
        log = run([rate], k, num_requests, cost=laws.LinearCost(base_ns, token_ns, 0))
        plain_ns = (base_ns + num_requests * token_ns) * OUTPUT
        return plain_ns / log.requests()["finish_ns"].mean()

    assert faster(int(break_even * 0.7)) > 1.05
    assert faster(int(break_even * 1.4)) < 0.97
