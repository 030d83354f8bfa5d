"""Engines that die, slow down or are cut off: at stated times, or at random."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simpy

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.drive.clock import COMES, FAILS
from schedlab.sim.rng import stream

if TYPE_CHECKING:
    from schedlab.sim.drive.fleet import Fleet
    from schedlab.sim.drive.links import Links
    from schedlab.sim.drive.members import Member


class Outage(NamedTuple):
    """Something of an engine is down."""

    engine: int
    at_ns: int
    for_ns: int = FOREVER
    """FOREVER: for good."""


class Slowdown(NamedTuple):
    """The steps of an engine that begin in a span of time take longer."""

    engine: int
    from_ns: int
    until_ns: int
    factor: float


@dataclass(frozen=True)
class Failures:
    """What goes wrong in a fleet, and what becomes of requests then.

    Attributes
    ----------
    outages : sequence of Outage
        Engines that die.
    mtbf_ns, mttr_ns : float
        Mean time an engine serves until it dies, and mean time until it can start again, both
        exponential; no engine dies at random if the first is infinite.
    slowdowns : sequence of Slowdown
        Stragglers.
    link_outages : sequence of Outage
        Engines whose links are down; what is on them is sent again.
    max_retries : int
        How often a request that loses its engine is sent again.
    deadline_ns : int
        How long after its arrival a request without an engine fails.
    seed : int
        Of what happens at random: each engine has a stream of its own, so that when it dies depends
        on nothing but the seed.
    """

    outages: Sequence[Outage] = ()
    mtbf_ns: float = float("inf")
    mttr_ns: float = 0.0
    slowdowns: Sequence[Slowdown] = ()
    link_outages: Sequence[Outage] = ()
    max_retries: int = FOREVER
    deadline_ns: int = FOREVER
    seed: int = 0


def start_failures(fleet: Fleet, links: Links | None, plan: Failures) -> None:
    """Let happen to a fleet what is planned."""
    fleet.retries.most = plan.max_retries
    fleet.retries.deadline_ns = plan.deadline_ns
    processes = fleet.processes
    for outage in plan.outages:
        processes.process(_die(fleet, outage))
    for slowdown in plan.slowdowns:
        processes.process(_slow(fleet, slowdown))
    if links is not None:
        for outage in plan.link_outages:
            processes.process(_cut_off(fleet, links, outage))
    if plan.mtbf_ns < float("inf"):

        def may_die(member: Member) -> None:
            processes.process(_die_at_random(fleet, member, plan))

        for member in fleet.members:
            may_die(member)
        fleet.on_added = may_die


Process = Generator[simpy.Event, None, None]


def _die(fleet: Fleet, outage: Outage) -> Process:
    yield fleet.processes.wait(outage.at_ns, FAILS)
    member = fleet.members[outage.engine]
    if fleet.has_work:
        fleet.fail(member, comes_back=outage.for_ns < FOREVER)
        if outage.for_ns < FOREVER:
            yield fleet.processes.wait(outage.for_ns, COMES)
            fleet.repair(member)


def _die_at_random(fleet: Fleet, member: Member, plan: Failures) -> Process:
    rng = stream(plan.seed, f"failures of engine {member.index}")
    start_up_ns = 0 if member.is_up else fleet.start_up_ns(member)
    while True:
        yield fleet.processes.wait(start_up_ns + _some_ns(rng, plan.mtbf_ns), FAILS)
        if not (fleet.has_work and member.is_there):
            return
        fleet.fail(member, comes_back=True)
        yield fleet.processes.wait(_some_ns(rng, plan.mttr_ns), COMES)
        fleet.repair(member)
        start_up_ns = fleet.start_up_ns(member)


def _some_ns(rng: np.random.Generator, mean_ns: float) -> int:
    return int(min(rng.exponential() * mean_ns, FOREVER // 4)) + 1


def _slow(fleet: Fleet, slowdown: Slowdown) -> Process:
    member = fleet.members[slowdown.engine]
    yield fleet.processes.wait(slowdown.from_ns, COMES)
    fleet.set_pace(member, [*member.slow_by, slowdown.factor])
    yield fleet.processes.wait(slowdown.until_ns - slowdown.from_ns, COMES)
    left = list(member.slow_by)
    left.remove(slowdown.factor)
    fleet.set_pace(member, left)


def _cut_off(fleet: Fleet, links: Links, outage: Outage) -> Process:
    yield fleet.processes.wait(outage.at_ns, COMES)
    links.fail(outage.engine)
    yield fleet.processes.wait(outage.for_ns, COMES)
    links.repair(outage.engine)
