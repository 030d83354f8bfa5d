"""What queueing theory says of routers, for engines that are single servers (see test_queues).

Here, too, in two steps: a fleet of engines serves whom and when servers without engines do that the
same router is shown, to the nanosecond; and such servers, which cost next to nothing, do as theory
says.
"""

import heapq
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from tests.laws import arrival
from tests.theory.test_queues import (
    CONFIG,
    SERIAL,
    SERVICE_NS,
    TOKEN_NS,
    assert_mean_is,
    draws,
    exponential,
)


def serve(router, services, gaps, num_servers):
    """Return who went where and ended when, and how many each server had before each arrival."""
    servers = [SimpleNamespace(num_in_flight=0, num_running=0) for _ in range(num_servers)]
    free_ns, ends = [0] * num_servers, []
    places, finish_ns, seen = [], [], []
    for at_ns, service_ns in zip(np.cumsum(gaps).tolist(), services.tolist(), strict=True):
        while ends and ends[0][0] <= at_ns:
            servers[heapq.heappop(ends)[1]].num_in_flight -= 1
        for one in servers:
            one.num_waiting = one.num_in_flight
        seen.append([one.num_in_flight for one in servers])
        place = router.route(None, servers)
        free_ns[place] = max(free_ns[place], at_ns) + service_ns
        servers[place].num_in_flight += 1
        heapq.heappush(ends, (free_ns[place], place))
        places.append(place)
        finish_ns.append(free_ns[place])
    return np.array(places), np.array(finish_ns), np.array(seen)


def drawn(router, load, num_servers, num_requests, seed):
    """Return times in the system, in units of the mean service, and what was seen, warmed up."""
    services, gaps = draws(exponential, load * num_servers, seed, num_requests)
    _, finish_ns, seen = serve(router, services, gaps, num_servers)
    warm = num_requests // 5
    return ((finish_ns - np.cumsum(gaps)) / SERVICE_NS)[warm:], seen[warm:]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("random", {}), ("power_of_d", {"d": 2}), ("power_of_d", {"d": 5}), ("jsq", {})],
)
def test_fleet_of_engines_with_one_seat_is_as_many_single_servers(name, knobs):
    services, gaps = draws(exponential, 0.8 * 6, 1, 200)
    places, finish_ns, _ = serve(routers.make(name, 1, **knobs), services, gaps, 6)
    engines = [
        Engine(CONFIG, registry.make("fcfs"), SimExecutor(Pricing(SERIAL))) for _ in range(6)
    ]
    work = [
        arrival(i, at, 1, tokens)
        for i, (at, tokens) in enumerate(
            zip(np.cumsum(gaps).tolist(), (services // TOKEN_NS).tolist(), strict=True)
        )
    ]
    requests = simulate_cluster(engines, routers.make(name, 1, **knobs), work).requests()
    assert requests["engine"].tolist() == places.tolist()
    assert requests["finish_ns"].tolist() == finish_ns.tolist()


@pytest.mark.slow
def test_random_splitting_makes_every_server_an_mm1():
    # Thinning a Poisson process gives independent ones: T = E[S] / (1 - rho), whoever the others.
    load = 0.6
    means = [drawn(routers.make("random", r), load, 3, 2_500, r)[0].mean() for r in range(16)]
    assert_mean_is(means, 1 / (1 - load), narrow=0.09)


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
    load, num_servers = 0.8, 50
    times, seen = drawn(routers.make("power_of_d", d, d=d), load, num_servers, 15_000, seed=d)
    # The fixed point is of infinitely many engines.
    assert times.mean() == pytest.approx(fixed_point(load, d), rel=0.03)
    assert times.mean() < 0.6 / (1 - load), "far below random splitting"
    busy = (seen >= 1).mean()
    assert busy == pytest.approx(load, rel=0.03)
    # Double-exponential: shares 0.51, 0.21 and 0.04 with two choices; random splitting: 0.41 at 4.
    # With five choices hardly any engine has two, and the few engines show.
    for i in range(2, 5) if d == 2 else ():
        assert (seen >= i).mean() == pytest.approx(busy ** (2**i - 1), rel=0.05 * i), i


def test_shortest_queue_lies_between_one_queue_for_all_and_random_splitting():
    # M/M/k, Erlang C: nobody waits while a server idles. JSQ cannot do better, nor as well.
    load, k = 0.8, 4
    offered = load * k
    below = sum(offered**i / float(np.prod(range(1, i + 1))) for i in range(k))
    last = offered**k / float(np.prod(range(1, k + 1))) / (1 - load)
    erlang = 1 + last / (below + last) / (k * (1 - load))
    mean = np.mean([drawn(routers.make("jsq", r), load, k, 4_000, r)[0].mean() for r in range(6)])
    assert erlang < mean < 1.35 * erlang < 1 / (1 - load)
