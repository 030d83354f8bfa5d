"""What a fleet costs beyond its engines: ``python -m schedlab.experiments.bench.fleet_bench``.

The requests of `make bench` at 6 a second for each engine. "Separate" are the same requests on the
same engines, each run by itself with those that the router sent it; both are run in turn in one
process, so that their ratio does not depend on the machine. A decision is a call of the router.

Two more ratios say where it goes. "Alone" are the same engines with the same requests, each as a
fleet of one: what the driver costs, where it has no others to go to between steps. "Given" is the
fleet behind a router that repeats the choices: all but the decisions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

from schedlab import core
from schedlab.experiments.bench.bench import workloads
from schedlab.experiments.running.fleet import resolve_fleet
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.core.engine import Engine
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.router import Router
from schedlab.sim.request import Arrival, Request
from schedlab.traces.workload import workload

FLEETS = (16, 64)
_NUM_REQUESTS = 6_400
_WITH_PREFIXES = ("prefix_aware", "llm_d")
ROUTERS = ("vllm", *_WITH_PREFIXES)


class Overhead(NamedTuple):
    """What one fleet costs."""

    router: str
    num_engines: int
    requests_per_cpu_s: float
    ratio: float
    """CPU seconds over those of separate engines: the median of neighbours in time."""
    alone_ratio: float
    """As `ratio`, of fleets of one engine each, one after the other."""
    given_ratio: float
    """As `ratio`, of the fleet behind a router that repeats choices."""
    decision_us: float
    """Median time of a decision."""


def measure(name: str, num_engines: int, rounds: int) -> Overhead:
    """Measure one router in front of so many engines.

    Parameters
    ----------
    name : str
        A registered router.
    num_engines : int
        Engines, each with 6 requests a second.
    rounds : int
        Runs of the fleet, of fleets of one and of given choices between two of separate engines.
    """
    spec, arrivals = _load(num_engines, with_prefixes=name in _WITH_PREFIXES)
    (kind,) = resolve_fleet(spec)

    def fresh() -> list[Engine]:
        return [
            Engine(kind.point.config, registry.make("fcfs"), kind.point.simulated_gpu(kind.pricing))
            for _ in range(num_engines)
        ]

    def cpu_s(router: Router) -> float:
        engines = fresh()
        start_s = time.process_time()
        simulate_cluster(engines, router, arrivals)
        return time.process_time() - start_s

    def alone_s() -> float:
        engines = fresh()
        start_s = time.process_time()
        for engine, share in zip(engines, shares, strict=True):
            simulate_cluster([engine], _Given([0], looks_at_engines=True), share)
        return time.process_time() - start_s

    watched = _Watched(routers.make(name, 0))
    cpu_s(watched)
    shares: list[list[Arrival]] = [[] for _ in range(num_engines)]
    for arrival, place in zip(arrivals, watched.places, strict=True):
        shares[place].append(arrival)
    separate = partial(cpu_s, _Given(watched.places))
    before_s = separate()
    ratios, alone, given, own_s = [], [], [], []
    for _ in range(rounds):
        seconds = cpu_s(routers.make(name, 0))
        given_s = cpu_s(_Given(watched.places, looks_at_engines=True))
        fleets_of_one_s = alone_s()
        after_s = separate()
        separate_s = (before_s + after_s) / 2
        ratios.append(seconds / separate_s)
        given.append(given_s / separate_s)
        alone.append(fleets_of_one_s / separate_s)
        own_s.append(seconds)
        before_s = after_s
    return Overhead(
        name,
        num_engines,
        len(arrivals) / min(own_s),
        median(ratios),
        median(alone),
        median(given),
        median(watched.decisions_ns) / 1e3,
    )


class _Watched:
    """A router whose choices, and the time each takes, are kept."""

    def __init__(self, router: Router) -> None:
        self.looks_at_engines = True
        self.looks_at_caches = router.looks_at_caches
        self.engine_is_gone = router.engine_is_gone
        self.places: list[int] = []
        self.decisions_ns: list[int] = []
        self._route: Callable[[Request, Sequence[EngineState]], int] = router.route

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        start_ns = time.perf_counter_ns()
        place = self._route(request, engines)
        self.decisions_ns.append(time.perf_counter_ns() - start_ns)
        self.places.append(place)
        return place


class _Given:
    """A router that repeats choices; each engine runs by itself, unless it says that it looks."""

    looks_at_caches = False

    def __init__(self, places: Sequence[int], looks_at_engines: bool = False) -> None:
        self.looks_at_engines = looks_at_engines
        self._places = places
        self._next = 0

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        place = self._places[self._next % len(self._places)]
        self._next += 1
        return place

    def engine_is_gone(self, index: int) -> None:
        """Not heed it: none goes."""


def _load(num_engines: int, *, with_prefixes: bool) -> tuple[ExperimentSpec, list[Arrival]]:
    """Return the fleet, and what is sent to it."""
    keys = workloads(None)["16 engines, 6 req/s each"]
    keys["workload"].update(num_requests=_NUM_REQUESTS, request_rate=6.0 * num_engines)
    keys["engine"]["enable_prefix_caching"] = with_prefixes
    keys["cluster"]["count"] = num_engines
    spec = make_spec(keys)
    config = resolve_fleet(spec)[0].point.config
    arrivals = workload(
        load_workload(spec, config.max_model_len), max_model_len=config.max_model_len
    )
    if with_prefixes:
        arrivals = _in_prefix_groups(arrivals, _NUM_REQUESTS // 4, config.block_size)
    return spec, list(arrivals)


def _in_prefix_groups(
    arrivals: Iterator[Arrival], num_groups: int, block_size: int
) -> Iterator[Arrival]:
    """Let prompts of a group be beginnings of one another."""
    for arrival in arrivals:
        request = arrival.request
        first = request.id % num_groups * 1_000
        names = tuple(range(first, first + request.prompt_tokens // block_size))
        yield replace(arrival, request=replace(request, prefix_hash_ids=names))


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a line a router and fleet."""
    parser = argparse.ArgumentParser(description="Measure what a fleet costs beyond its engines.")
    parser.add_argument("routers", nargs="*", help="vllm, prefix_aware and llm_d, if none is named")
    parser.add_argument("--engines", type=int, nargs="+", default=FLEETS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    report(options.routers or ROUTERS, options.engines, options.rounds)


def report(names: Sequence[str], fleets: Sequence[int], rounds: int) -> list[Overhead]:
    """Measure some routers in front of fleets of some sizes; print a line each."""
    print(f"core: {core.running()}; CPU seconds; prompts share prefixes where routers ask for them")
    print(
        f"{'router':28} {'engines':>7} {'requests/CPU-s':>14} {'x separate':>10}"
        f" {'alone':>6} {'given':>6} {'decision':>10}"
    )
    rows = []
    for num_engines in fleets:
        for name in names:
            found = measure(name, num_engines, rounds)
            rows.append(found)
            print(
                f"{name:28} {num_engines:7} {found.requests_per_cpu_s:14,.0f} {found.ratio:10.2f}"
                f" {found.alone_ratio:6.2f} {found.given_ratio:6.2f} {found.decision_us:7.1f} us",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
