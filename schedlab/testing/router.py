"""What every router must keep, checked on small fleets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace

import numpy as np

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.routers import registry
from schedlab.policies.routers.router import Router
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.record.cluster_log import ClusterLog
from schedlab.sim.request import Request
from schedlab.testing.cases import Case, random_cases
from schedlab.testing.check import Law, raise_first, verdicts
from schedlab.testing.laws import require

_SIZES = (1, 2, 5)


def check_router(
    router: type[Router] | str | Callable[[], Router],
    *,
    only: str | Iterable[str] | None = None,
    cases: Sequence[Case] | None = None,
) -> None:
    """Check that a router keeps every law of `ROUTER_LAWS`.

    Parameters
    ----------
    router : type, str or callable
        The class, the registered name, or a function that gives a fresh one.
    only : str or iterable of str, optional
        Names of the laws to check; all by default.
    cases : sequence of Case, optional
        Workloads to check it on; ten random ones by default.

    Raises
    ------
    LawBroken
        With the law, what happened, and the smallest workload found that shows it.
    """
    name = router if isinstance(router, str) else getattr(router, "__name__", "router")

    def make() -> Router:
        if isinstance(router, str):
            return registry.make(router)
        made = router()
        made.rng = np.random.default_rng(0)
        return made

    if cases is None:
        cases = list(fleet_cases())
    raise_first(verdicts(f"router {name}", make, ROUTER_LAWS, cases, only))


def fleet_cases(seed: int = 0, num_cases: int = 10) -> Iterator[Case]:
    """Draw workloads and limits as `random_cases`, with sessions and with prefixes in common."""
    for case in random_cases(seed, num_cases):
        yield _with_prefixes(case)


def changes_no_request(make: Callable[[], Router], case: Case) -> None:
    """Write to no request: it belongs to the trace, and is what all others go by."""
    router = make()
    route = router.route

    def watched(request: Request, engines: Sequence[EngineState]) -> int:
        before = replace(request)
        place = route(request, engines)
        for field in fields(Request):
            was, now = getattr(before, field.name), getattr(request, field.name)
            require(
                was is now or was == now,
                f"route() changes {field.name} of request {before.id} from {was!r} to {now!r}",
            )
        return place

    router.route = watched  # type: ignore[method-assign]
    _run(router, case, 3)


def names_an_engine(make: Callable[[], Router], case: Case) -> None:
    """Send every request to one engine that there is, and let each be answered or rejected once."""
    for size in _SIZES:
        requests = _run(make(), case, size).requests()
        ids = [a.request.id for a in case.workload]
        require(requests["id"].tolist() == ids, "not every request left the fleet once")


def draws_from_its_stream_alone(make: Callable[[], Router], case: Case) -> None:
    """Choose the same engines again, made anew, on the same workload."""
    first, second = (_run(make(), case, 3).requests()["engine"] for _ in range(2))
    require(np.array_equal(first, second), f"{first.tolist()}, then {second.tolist()}")


def sees_what_is_there_step_by_step(make: Callable[[], Router], case: Case) -> None:
    """Choose the same engines whether or not engines skip ahead."""
    fast = _run(make(), case, 3).requests()
    slow = _run(make(), replace(case, limits=replace(case.limits, fast_forward=False)), 3)
    _require_same(fast, slow.requests(), "with fast_forward off")


def looks_only_if_it_says_so(make: Callable[[], Router], case: Case) -> None:
    """Ask engines for nothing but their index, unless `looks_at_engines`."""
    router = make()
    if not router.looks_at_engines:
        for arrival in case.workload:
            router.route(replace(arrival.request), [_Blank(i) for i in range(3)])  # type: ignore[misc]


def asks_caches_only_if_it_says_so(make: Callable[[], Router], case: Case) -> None:
    """Ask for `cached_tokens` only with `looks_at_caches`."""
    router = make()
    if router.looks_at_caches or not router.looks_at_engines:
        return
    route = router.route

    def watched(request: Request, engines: Sequence[EngineState]) -> int:
        return route(request, [_NoCache(engine) for engine in engines])  # type: ignore[misc]

    router.route = watched  # type: ignore[method-assign]
    _run(router, case, 2)


def minds_the_index_not_the_place(make: Callable[[], Router], case: Case) -> None:
    """Name a place in the list it is given, also if engines are missing from it."""
    router = make()

    class Second(Router):
        looks_at_caches = router.looks_at_caches

        def route(self, request: Request, engines: Sequence[EngineState]) -> int:
            place = router.route(request, engines[1:])
            require(0 <= place < len(engines) - 1, f"place {place} of {len(engines) - 1} engines")
            return place + 1

    engine = _run(Second(), case, 3).requests()["engine"]
    require(0 not in engine, "the engine that was not offered was sent requests")


ROUTER_LAWS: dict[str, Law[Callable[[], Router]]] = {
    law.__name__: law
    for law in (
        looks_only_if_it_says_so,
        changes_no_request,
        names_an_engine,
        draws_from_its_stream_alone,
        sees_what_is_there_step_by_step,
        asks_caches_only_if_it_says_so,
        minds_the_index_not_the_place,
    )
}
"""By name, in the order in which they are checked."""


class _Blank:
    """An engine that tells only which it is."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"it asked an engine for {name}, and looks_at_engines is False")


class _NoCache:
    """An engine that tells all but the content of its cache."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        require(name != "cached_tokens", "it asked for cached_tokens, and looks_at_caches is False")
        return getattr(self._engine, name)


def _run(router: Router, case: Case, size: int) -> ClusterLog:
    engines = [
        Engine(
            case.limits,
            ContinuousBatching(),
            SimExecutor(Pricing(case.cost)),
            check_conservation,
        )
        for _ in range(size)
    ]
    # Requests of its own: what a router writes to them is not there for the next law.
    sent = [replace(arrival, request=replace(arrival.request)) for arrival in case.workload]
    return simulate_cluster(engines, router, sent)


def _require_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], when: str) -> None:
    for column, values in one.items():
        same = np.array_equal(values, other[column], equal_nan=values.dtype.kind == "f")
        require(same, f"{column} differs {when}")


def _with_prefixes(case: Case) -> Case:
    """Give prompts names of blocks, three beginnings among them, and the engines prefix caches."""
    block, workload = case.limits.block_size, []
    for a in case.workload:
        count = a.request.prompt_tokens // block
        shared = min(count, 2)
        kind, own = 1000 * (a.request.id % 3), 100_000 * (a.request.id + 1)
        names = (*range(kind, kind + shared), *range(own, own + count - shared))
        session = f"session {a.request.id % 4}"
        request = replace(a.request, prefix_hash_ids=names, session=session)
        workload.append(replace(a, request=request))
    return replace(
        case, workload=tuple(workload), limits=replace(case.limits, enable_prefix_caching=True)
    )
