"""Closed-form queues that the engine must reproduce.

One seat and a constant time per token make the engine a single server whose service time is
(output tokens) x (time per token). Each mean is estimated from independent replications; the
theory must lie inside the 99.9 % confidence interval of their mean, and the interval must be
narrow enough to mean something. Seeds are fixed, so a pass is a pass for ever.
"""

import math

import numpy as np
import pytest
from scipy import stats

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.rng import stream
from tests import laws
from tests.laws import arrival

TOKEN_NS = 1_000
MEAN_TOKENS = 100
REPLICATIONS = 10
REQUESTS = 1_000
MORE_REQUESTS = 2_000  # where means scatter more

SERIAL = laws.LinearCost(base_ns=TOKEN_NS, token_ns=0, context_ns=0)
SHARED = laws.LinearCost(base_ns=0, token_ns=TOKEN_NS, context_ns=0)
CONFIG = EngineConfig(num_blocks=10_000_000, max_model_len=1_000_000, max_num_seqs=1)


def exponential(rng, n):
    return np.maximum(1, np.rint(rng.exponential(MEAN_TOKENS, n)))


def constant(rng, n):
    return np.full(n, MEAN_TOKENS)


def lognormal(rng, n):
    return np.maximum(1, np.rint(rng.lognormal(math.log(MEAN_TOKENS) - 0.5, 1.0, n)))


def simulate(draw, load, replication, num_requests, config=CONFIG, cost=SERIAL, policy="fcfs"):
    """Run Poisson arrivals at the given load; times in units of the token time."""
    tokens = draw(stream(replication, "lengths"), num_requests).astype(int)
    gaps = stream(replication, "arrivals").exponential(MEAN_TOKENS * TOKEN_NS / load, num_requests)
    at_ns = np.cumsum(gaps).astype(int).tolist()
    work = [arrival(i, at_ns[i], 1, int(n)) for i, n in enumerate(tokens)]
    requests = laws.run(registry.make(policy), work, config, cost, prove=False).requests()
    warm_up = num_requests // 10
    return {name: column[warm_up:].astype(float) / TOKEN_NS for name, column in requests.items()}


def assert_mean_is(samples, theory, narrow):
    """Assert that `theory` is in the 99.9 % interval of the mean, and that it is narrow."""
    samples = np.asarray(samples)
    half = stats.t.ppf(0.9995, len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples))
    assert half < narrow * theory, f"interval too wide to tell: +-{half:.1f} around {theory:.1f}"
    assert abs(samples.mean() - theory) <= half, (
        f"theory {theory:.2f}, simulated {samples.mean():.2f} +- {half:.2f}"
    )


def waits(draw, load, num_requests=REQUESTS):
    """Return the mean wait of each replication; the server may also idle up to one token."""
    runs = [simulate(draw, load, r, num_requests) for r in range(REPLICATIONS)]
    return [np.mean(run["first_scheduled_ns"] - run["arrival_ns"]) for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(("load", "num_requests"), [(0.3, REQUESTS), (0.8, MORE_REQUESTS)])
def test_engine_with_exponential_service_is_mm1(load, num_requests):
    # M/M/1: W = rho / (1 - rho) * E[S]. Rounding to whole tokens changes E[S] by < 0.01 %.
    means = waits(exponential, load, num_requests)
    assert_mean_is(means, load / (1 - load) * MEAN_TOKENS, narrow=0.35)


@pytest.mark.slow
def test_engine_with_constant_service_is_md1():
    # M/D/1: half the wait of M/M/1.
    load = 0.8
    assert_mean_is(waits(constant, load), load / (2 * (1 - load)) * MEAN_TOKENS, narrow=0.25)


@pytest.mark.slow
def test_engine_with_lognormal_service_is_mg1():
    # Pollaczek-Khinchine: W = rho / (1 - rho) * E[S^2] / (2 E[S]); lognormal with sigma 1 has
    # E[S^2] = e E[S]^2.
    load = 0.6
    theory = load / (1 - load) * math.e / 2 * MEAN_TOKENS
    assert_mean_is(waits(lognormal, load, 1_500), theory, narrow=0.35)


@pytest.mark.slow
def test_engine_with_many_seats_and_shared_time_is_processor_sharing():
    # M/G/1-PS: T = E[S] / (1 - rho) whatever the distribution, heavy tails included. A step of B
    # tokens takes B token times, so a lone arrival waits for the step under way: a few of them.
    load = 0.6
    config = EngineConfig(
        num_blocks=10_000_000, max_model_len=1_000_000, max_num_seqs=2_000,
        max_num_batched_tokens=4_000,
    )  # fmt: skip
    runs = [simulate(lognormal, load, r, 1_500, config, SHARED) for r in range(REPLICATIONS)]
    times = [np.mean(run["finish_ns"] - run["arrival_ns"]) for run in runs]
    assert_mean_is(times, MEAN_TOKENS / (1 - load), narrow=0.18)


def test_littles_law_holds_exactly_on_a_whole_run():
    # Over a run that starts and ends empty, the area under the number in system is the sum of
    # times in system: L = lambda * W with no statistics at all.
    rng = stream(1, "little")
    at_ns = np.cumsum(rng.exponential(30_000, 300)).astype(int).tolist()
    lengths = rng.integers(1, 50, (300, 2)).tolist()
    work = [arrival(i, at_ns[i], *lengths[i]) for i in range(300)]
    config = EngineConfig(num_blocks=200, max_model_len=200, max_num_seqs=8)
    requests = laws.run(registry.make("fcfs"), work, config).requests()
    arrivals, finishes = requests["arrival_ns"], requests["finish_ns"]
    events = np.concatenate([arrivals, finishes])
    change = np.repeat([1, -1], len(arrivals))
    order = np.argsort(events, kind="stable")
    number = np.cumsum(change[order])
    area = int((number[:-1] * np.diff(events[order])).sum())
    assert number[-1] == 0
    assert area == int((finishes - arrivals).sum())
    assert area > 0


@pytest.mark.slow
def test_shortest_job_first_lowers_the_mean_wait_and_raises_the_longest():
    # Non-preemptive SJF beats FCFS in the mean on every sample path with a queue (Smith's rule).
    rng = stream(2, "sjf")
    tokens = exponential(rng, 500).astype(int)
    work = [arrival(i, 0, 1, int(n), predicted_tokens=float(n)) for i, n in enumerate(tokens)]
    wait = {
        name: laws.run(registry.make(name), work, CONFIG, SERIAL).requests()["first_scheduled_ns"]
        for name in ("fcfs", "sjf")
    }
    shortest_first = np.cumsum(np.sort(tokens))[:-1].sum() * TOKEN_NS
    assert wait["sjf"].sum() == shortest_first
    assert wait["sjf"].mean() < wait["fcfs"].mean()
