"""What queueing theory says of routers, for engines that are single servers (see test_queues)."""

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.rng import stream
from tests.laws import arrival
from tests.theory.test_queues import CONFIG, MEAN_TOKENS, SERIAL, TOKEN_NS, assert_mean_is

SERVICE_NS = MEAN_TOKENS * TOKEN_NS


class Watched:
    """A router that notes how many requests each engine has when one arrives."""

    looks_at_engines = True
    looks_at_caches = False

    def __init__(self, router):
        self.router = router
        self.seen = []

    def route(self, request, engines):
        self.seen.append([engine.num_in_flight for engine in engines])
        return self.router.route(request, engines)


def simulate(router, load, num_engines, num_requests, seed):
    """Return times in the system, in units of the mean service, after a warm-up."""
    tokens = np.maximum(1, np.rint(stream(seed, "lengths").exponential(MEAN_TOKENS, num_requests)))
    gaps = stream(seed, "arrivals").exponential(SERVICE_NS / load / num_engines, num_requests)
    at_ns = np.cumsum(gaps).astype(int).tolist()
    work = [arrival(i, at_ns[i], 1, int(n)) for i, n in enumerate(tokens)]
    engines = [
        Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(SERIAL)))
        for _ in range(num_engines)
    ]
    requests = simulate_cluster(engines, router, work).requests()
    times = (requests["finish_ns"] - requests["arrival_ns"]) / SERVICE_NS
    return times[num_requests // 5 :]


@pytest.mark.slow
def test_random_splitting_makes_every_engine_an_mm1():
    # Thinning a Poisson process gives independent ones: T = E[S] / (1 - rho), whoever the others.
    load = 0.6
    means = [simulate(routers.make("random", r), load, 3, 1_500, r).mean() for r in range(8)]
    assert_mean_is(means, 1 / (1 - load), narrow=0.35)


def fixed_point(load, d):
    """Return the mean time in the system of JSQ(d) with infinitely many engines.

    The share of engines with i requests or more is load ** ((d**i - 1) / (d - 1)); by Little's law
    the mean time is their sum over the load. Source: Vvedenskaya, Dobrushin & Karpelevich 1996;
    Mitzenmacher 2001, theorem 1.
    """
    return sum(load ** ((d**i - 1) / (d - 1)) for i in range(1, 20)) / load


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 5])
def test_time_and_tail_of_d_choices_are_those_of_the_mean_field(d):
    load, num_engines = 0.8, 50
    router = Watched(routers.make("power_of_d", d, d=d))
    times = simulate(router, load, num_engines, 6_000, seed=d)
    # The fixed point is of infinitely many engines, and a server idles up to a token.
    assert times.mean() == pytest.approx(fixed_point(load, d), rel=0.06)
    assert times.mean() < 0.6 / (1 - load), "far below random splitting"
    seen = np.array(router.seen[1_500:])
    busy = (seen >= 1).mean()
    assert busy == pytest.approx(load, rel=0.05)
    # Double-exponential: shares 0.51, 0.21 and 0.04 with two choices; random splitting: 0.41 at 4.
    # With five choices hardly any engine has two, and the few engines show.
    for i in range(2, 5) if d == 2 else ():
        assert (seen >= i).mean() == pytest.approx(busy ** (2**i - 1), rel=0.05 * i), i


@pytest.mark.slow
def test_shortest_queue_lies_between_one_queue_for_all_and_random_splitting():
    # M/M/k, Erlang C: nobody waits while a server idles. JSQ cannot do better, nor as well.
    load, k = 0.8, 4
    offered = load * k
    below = sum(offered**i / float(np.prod(range(1, i + 1))) for i in range(k))
    last = offered**k / float(np.prod(range(1, k + 1))) / (1 - load)
    erlang = 1 + last / (below + last) / (k * (1 - load))
    mean = np.mean([simulate(routers.make("jsq", r), load, k, 2_000, r).mean() for r in range(4)])
    assert erlang < mean < 1.35 * erlang < 1 / (1 - load)
