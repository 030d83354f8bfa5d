"""Closed-form queues that the engine must reproduce.

One seat and a constant time per token make the engine a single server whose service time is
(output tokens) x (time per token). That is shown in two steps, each sharper than a mean of the
engine's could be: its waits are to the nanosecond those of Lindley's recursion, on some hundred
requests; and the recursion's mean, which costs next to nothing, is that of theory on hundreds of
thousands. Theory must lie inside the 99.9 % confidence interval of the mean of independent
replications, and the interval must be narrow enough to mean something. Seeds are fixed, so a pass
is a pass for ever.
"""

import heapq
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
SERVICE_NS = MEAN_TOKENS * TOKEN_NS

SERIAL = laws.LinearCost(base_ns=TOKEN_NS, token_ns=0, context_ns=0)
SHARED = laws.LinearCost(base_ns=0, token_ns=TOKEN_NS, context_ns=0)
CONFIG = EngineConfig(num_blocks=10_000_000, max_model_len=1_000_000, max_num_seqs=1)


def exponential(rng, n):
    return np.maximum(1, np.rint(rng.exponential(MEAN_TOKENS, n)))


def constant(rng, n):
    return np.full(n, MEAN_TOKENS)


def lognormal(rng, n):
    return np.maximum(1, np.rint(rng.lognormal(math.log(MEAN_TOKENS) - 0.5, 1.0, n)))


def draws(draw, load, seed, shape):
    """Return services and times between Poisson arrivals at the given load, in ns."""
    services = draw(stream(seed, "lengths"), shape).astype(int) * TOKEN_NS
    gaps = stream(seed, "arrivals").exponential(SERVICE_NS / load, shape).astype(int)
    return services, gaps


def simulate(services, gaps, config=CONFIG, cost=SERIAL):
    """Run an engine on such work; return when each arrived and what became of it."""
    at_ns = np.cumsum(gaps)
    work = [
        arrival(i, at, 1, tokens)
        for i, (at, tokens) in enumerate(
            zip(at_ns.tolist(), (services // TOKEN_NS).tolist(), strict=True)
        )
    ]
    return at_ns, laws.run(registry.make("fcfs"), work, config, cost, prove=False).requests()


def waits(services, gaps):
    """Return the waits of one server by Lindley's recursion, along the first axis."""
    found = np.zeros_like(services)
    for i in range(1, len(found)):
        found[i] = np.maximum(0, found[i - 1] + services[i - 1] - gaps[i])
    return found


def assert_mean_is(samples, theory, narrow):
    """Assert that `theory` is in the 99.9 % interval of the mean, and that it is narrow."""
    samples = np.asarray(samples)
    half = stats.t.ppf(0.9995, len(samples) - 1) * samples.std(ddof=1) / math.sqrt(len(samples))
    assert half < narrow * theory, f"interval too wide to tell: +-{half:.1f} around {theory:.1f}"
    assert abs(samples.mean() - theory) <= half, (
        f"theory {theory:.2f}, simulated {samples.mean():.2f} +- {half:.2f}"
    )


@pytest.mark.parametrize("load", [0.3, 0.8])
@pytest.mark.parametrize("draw", [exponential, constant, lognormal])
def test_engine_with_one_seat_is_a_single_server(draw, load):
    services, gaps = draws(draw, load, 1, 200)
    at_ns, requests = simulate(services, gaps)
    begun = at_ns + waits(services, gaps)
    assert requests["first_scheduled_ns"].tolist() == begun.tolist()
    assert requests["finish_ns"].tolist() == (begun + services).tolist()


# M/M/1: W = rho / (1 - rho) * E[S]; rounding to whole tokens changes E[S] by < 0.01 %. M/D/1: half
# of it. M/G/1, Pollaczek-Khinchine: W = rho / (1 - rho) * E[S^2] / (2 E[S]); lognormal with sigma 1
# has E[S^2] = e E[S]^2.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "load", "in_services"),
    [
        (exponential, 0.3, 0.3 / 0.7),
        (exponential, 0.8, 0.8 / 0.2),
        (constant, 0.8, 0.8 / 0.2 / 2),
        (lognormal, 0.6, 0.6 / 0.4 * math.e / 2),
    ],
    ids=["mm1 0.3", "mm1 0.8", "md1 0.8", "mg1 0.6"],
)
def test_mean_wait_of_a_single_server_is_that_of_theory(draw, load, in_services):
    services, gaps = draws(draw, load, 1, (6_000, 400))
    means = waits(services, gaps)[1_000:].mean(axis=0)
    assert_mean_is(means, in_services * SERVICE_NS, narrow=0.04)


def shared_times(services, gaps):
    """Return times in a system that shares itself evenly at every moment.

    Each that is there is served at one pace, so whoever has least left by the work done for each
    goes first.
    """
    times, each, now_ns, left = np.zeros(len(services)), 0.0, 0, []
    at_ns = np.cumsum(gaps)

    def serve_until(end_ns):
        nonlocal each, now_ns
        while left and now_ns + (left[0][0] - each) * len(left) <= end_ns:
            now_ns += (left[0][0] - each) * len(left)
            each, i = heapq.heappop(left)
            times[i] = now_ns - at_ns[i]
        if left:
            each += (end_ns - now_ns) / len(left)
        now_ns = end_ns

    for i, at in enumerate(at_ns.tolist()):
        serve_until(at)
        heapq.heappush(left, (each + services[i], i))
    serve_until(math.inf)
    return times


@pytest.mark.slow
def test_engine_with_many_seats_and_shared_time_is_processor_sharing():
    # A step of B tokens takes B token times, so who comes waits for the step under way and ends
    # with one: off by the tokens of a few steps.
    config = EngineConfig(
        num_blocks=10_000_000, max_model_len=1_000_000, max_num_seqs=2_000,
        max_num_batched_tokens=4_000,
    )  # fmt: skip
    services, gaps = draws(lognormal, 0.6, 1, 400)
    at_ns, requests = simulate(services, gaps, config, SHARED)
    times, ideal = requests["finish_ns"] - at_ns, shared_times(services, gaps)
    assert times == pytest.approx(ideal, abs=20 * TOKEN_NS)
    assert times.mean() == pytest.approx(ideal.mean(), rel=0.002)


@pytest.mark.slow
def test_mean_time_of_processor_sharing_does_not_depend_on_the_distribution():
    # M/G/1-PS: T = E[S] / (1 - rho), heavy tails included.
    means = [shared_times(*draws(lognormal, 0.6, seed, 3_000))[300:].mean() for seed in range(40)]
    assert_mean_is(means, SERVICE_NS / 0.4, narrow=0.08)


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
