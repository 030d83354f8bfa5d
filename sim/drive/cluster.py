"""The driver of several engines: a router in front, and every engine on one clock.

Engines run on their own, or every step together (in lockstep), as those must that share experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from schedlab.sim.core.audit import WAITS, stalled
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.failures import Failures, start_failures
from schedlab.sim.drive.fleet import Fleet
from schedlab.sim.drive.handover import Handover
from schedlab.sim.drive.links import Interconnect, Links
from schedlab.sim.drive.lockstep import JointStep
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import Migration, MigrationPlan
from schedlab.sim.drive.router import Router, chosen
from schedlab.sim.drive.scaling import PoolScaling, start_scaling
from schedlab.sim.drive.sessions import peeked
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import PolicyError
from schedlab.sim.record.cluster_log import ClusterLog, Place
from schedlab.sim.record.rows import CommonRows
from schedlab.sim.record.spool import SpoolFile
from schedlab.sim.request import Arrival


@dataclass(frozen=True)
class Changes:
    """What becomes of engines while a fleet runs.

    Attributes
    ----------
    supply : Supply
        Where fresh engines come from.
    failures : Failures, optional
        Which die, slow down or are cut off, and when.
    scaling : sequence of PoolScaling
        How pools grow and shrink.
    migration : MigrationPlan, optional
        Which requests move while they decode.
    """

    supply: Supply
    failures: Failures | None = None
    scaling: Sequence[PoolScaling] = ()
    migration: MigrationPlan | None = None


def simulate_cluster(
    engines: Sequence[Engine],
    router: Router,
    arrivals: Iterable[Arrival],
    max_concurrency: int | None = None,
    lockstep: JointStep | None = None,
    staleness_ns: int = 0,
    disaggregation: Disaggregation | None = None,
    interconnect: Interconnect | None = None,
    pools: Sequence[int] | None = None,
    changes: Changes | None = None,
) -> ClusterLog:
    """Run a workload to its end on several engines.

    Parameters
    ----------
    engines : sequence of Engine
        Fresh engines.
    router : Router
        Says which engine a request goes to when it arrives.
    arrivals : iterable of Arrival
        In order of `ready_ns`; read lazily, one ahead, but for a router that looks at no engine.
    max_concurrency : int, optional
        Closed loop: at most so many requests (or sessions) in flight on all engines together; see
        `simulate`.
    lockstep : callable, optional
        If given, the engines begin and end every step together, and it says how long the joint
        step takes (see `joint_steps_ns`). An engine without work waits for the others' step to end
        before it begins one.
    staleness_ns : int
        How often engines report to the router; 0 = it sees them as they are.
    disaggregation : Disaggregation, optional
        Which engines compute prompts alone, and which go on from there; those that compute prompts
        come first.
    interconnect : Interconnect, optional
        What KV is sent over, where it is.
    pools : sequence of int, optional
        Of which kind each engine is; each of its own, if not given.
    changes : Changes, optional
        What becomes of the engines meanwhile.

    Returns
    -------
    ClusterLog
        The logs of all engines as one.

    Raises
    ------
    Stalled
        If requests wait and nothing can ever happen.
    PolicyError
        If the router fails, names no engine that is up, or looks at engines and says it does not.
    ValueError
        If `arrivals` go back in time, or engines in lockstep hand requests over or change.

    Notes
    -----
    Engines on their own do not know when the next request comes to them. Each begins the steps
    that its plan holds for, and those not yet started are cut off when a request is routed to it
    (`Engine.cut`); the result is that of stepping one by one. A router that does not look at
    engines has chosen before anything runs: then each engine is run by itself, with its share,
    unless they have a tier of KV together.
    """
    has_sessions, arrivals = peeked(arrivals)
    is_closed = max_concurrency is not None or has_sessions
    tiers = engines[0].config.kv_tiers
    shares = bool(tiers) and tiers[-1].is_shared
    if not (
        router.looks_at_engines or is_closed or lockstep or disaggregation or changes or shares
    ):
        return _one_by_one(engines, router, arrivals)
    if lockstep is not None and (disaggregation is not None or changes is not None):
        raise ValueError("engines in lockstep do not hand requests over, and do not change")
    fleet = Fleet(
        engines,
        ["mixed"] * len(engines) if disaggregation is None else disaggregation.roles,
        router,
        is_closed,
        staleness_ns,
        lockstep,
        pools,
        None if changes is None else changes.supply,
        settles=disaggregation is not None or changes is not None,
    )
    links = None if interconnect is None else Links(fleet.clock, interconnect)
    handover = None
    if disaggregation is not None:
        assert links is not None
        handover = Handover(fleet, links, disaggregation)
        fleet.watchers.append(handover)
    migration = None
    if changes is not None and changes.migration is not None:
        assert links is not None
        migration = Migration(fleet, links, changes.migration)
        fleet.watchers.append(migration)
    if changes is not None and changes.failures is not None:
        start_failures(fleet, links, changes.failures)
    if changes is not None and changes.scaling:
        start_scaling(fleet, changes.scaling)
    fleet.run(arrivals, max_concurrency)
    for member in fleet.members:
        if member.is_up and member.engine.requests.num_in_flight:
            raise stalled(member.engine, WAITS)
        if member.served:  # else it left before its engine had started
            member.engine.requests.expire(FOREVER)  # nobody comes for what is kept
    if fleet.num_pending:
        raise stalled(fleet.members[0].engine, "requests wait for an engine that does not come")
    logs = sorted(fleet.logs, key=lambda log: log[0])  # the lives of an engine in order
    return ClusterLog(
        [log for _, log in logs],
        transfers=[] if handover is None else handover.transfers,
        moves=[] if migration is None else migration.moves,
        losses=fleet.retries.losses,
        engines=[index for index, _ in logs],
        places=[]
        if changes is None
        else [Place(m.pool, tuple(m.paid), tuple(m.served)) for m in fleet.members],
        queued_ns=fleet.retries.queued_ns,
        tells_prefill_ends=disaggregation is not None and disaggregation.first_token != "prefill",
    )


def _one_by_one(
    engines: Sequence[Engine], router: Router, arrivals: Iterable[Arrival]
) -> ClusterLog:
    """Run each engine with its share of the requests."""
    states = cast("list[EngineState]", [_Unseen(i) for i in range(len(engines))])
    shares: list[list[Arrival]] = [[] for _ in engines]
    rows = CommonRows(SpoolFile())
    for engine in engines:
        engine.log.write_to(rows)
    for arrival in arrivals:
        shares[chosen(router, arrival.request, states)].append(arrival)
    return ClusterLog([simulate(e, share) for e, share in zip(engines, shares, strict=True)])


class _Unseen:
    """An engine of which a router learns nothing but which it is: it has not run yet."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __getattr__(self, name: str) -> NoReturn:
        raise PolicyError(f"it asked an engine for {name}, and its looks_at_engines is False")
