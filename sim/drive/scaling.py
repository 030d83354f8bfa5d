"""Engines that are added and drained while a fleet runs, as an autoscaler says."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import simpy

from schedlab.sim.drive.clock import REPORTS
from schedlab.sim.drive.pool_state import Answer, PoolState
from schedlab.sim.errors import PolicyError
from schedlab.sim.own_code import FAULTS, raised, short, whole

if TYPE_CHECKING:
    from schedlab.sim.drive.fleet import Fleet
    from schedlab.sim.drive.members import Member, Role
    from schedlab.sim.request import Request, RequestState


class Autoscaler(Protocol):
    """Says how many engines there should be."""

    def num_engines(self, pool: PoolState) -> int:
        """Return how many engines the pool should have; it is kept within its limits."""


@dataclass(frozen=True)
class PoolScaling:
    """How one pool grows and shrinks.

    Attributes
    ----------
    pool : int
        Which.
    autoscaler : Autoscaler
        Says how many engines there should be.
    every_ns : int
        How often it is asked.
    least, most : int
        Engines that there are at least and at most, >= 1.
    """

    pool: int
    autoscaler: Autoscaler
    every_ns: int
    least: int
    most: int


def start_scaling(fleet: Fleet, plans: Sequence[PoolScaling]) -> None:
    """Let pools of a fleet grow and shrink."""
    roles = {plan.pool: _role(fleet, plan.pool) for plan in plans}
    fleet.may_grow = lambda asked: any(role in asked for role in roles.values())
    for plan in plans:
        fleet.processes.process(_scale(fleet, plan, roles[plan.pool]))


def _role(fleet: Fleet, pool: int) -> Role:
    return next(member.role for member in fleet.members if member.pool == pool)


def _scale(fleet: Fleet, plan: PoolScaling, role: Role) -> Generator[simpy.Event, None, None]:
    came: list[Request] = []
    gone: list[tuple[RequestState, int]] = []
    fleet.heard_of_came.append(came)
    fleet.heard_of_gone.append(gone)
    while True:
        yield fleet.processes.wait(plan.every_ns, REPORTS)
        if not fleet.has_work:
            return
        engines = [
            member for member in fleet.members
            if member.pool == plan.pool and member.is_there and not member.is_draining
        ]  # fmt: skip
        state = PoolState(
            fleet.now_ns / 1e9,
            plan.every_ns / 1e9,
            role,
            len(engines),
            [member.live for member in engines if member.is_up],
            list(came),
            [_answer(state) for state, _ in gone if state.last_token_ns >= 0],
        )
        came.clear()
        gone.clear()
        wanted = min(max(_asked(plan.autoscaler, state), plan.least), plan.most)
        if wanted > len(engines):
            _grow(fleet, plan.pool, wanted - len(engines))
        for member in _to_spare(engines, len(engines) - wanted):
            fleet.drain(member)


def _asked(autoscaler: Autoscaler, state: PoolState) -> int:
    what = f"autoscaler {type(autoscaler).__name__} at t = {state.now_s:.6f} s"
    try:
        answer: object = autoscaler.num_engines(state)
    except FAULTS as error:
        raise PolicyError(
            f"{what}: num_engines() raised {raised(error, type(autoscaler))}"
        ) from error
    wanted = whole(answer)
    if wanted is None or wanted < 0:
        raise PolicyError(
            f"{what}: num_engines() returned {short(answer)}, which is no whole number >= 0"
        )
    return wanted


def _grow(fleet: Fleet, pool: int, count: int) -> None:
    """Keep engines that were to leave, the youngest first, then take devices for new ones."""
    draining = [
        member for member in fleet.members
        if member.pool == pool and member.is_up and member.is_draining
    ]  # fmt: skip
    for member in draining[::-1][:count]:
        fleet.keep(member)
    for _ in range(count - len(draining)):
        fleet.add(pool)


def _to_spare(engines: Sequence[Member], count: int) -> list[Member]:
    """Return whom to drain: first those that do not serve yet, then those with least to do."""

    def load(member: Member) -> tuple[bool, int, int]:
        return member.is_up, member.live.num_in_flight if member.is_up else 0, -member.index

    return sorted(engines, key=load)[: max(count, 0)]


def _answer(state: RequestState) -> Answer:
    request, tokens = state.request, state.num_output_tokens
    ttft_ms = (state.first_token_ns - request.arrival_ns) / 1e6
    tpot_ms = (state.last_token_ns - state.first_token_ns) / max(tokens - 1, 1) / 1e6
    slo = request.slo
    holds = slo is None or (
        (slo.ttft_ms is None or ttft_ms <= slo.ttft_ms)
        and (slo.tpot_ms is None or tpot_ms <= slo.tpot_ms)
        and (slo.e2el_ms is None or (state.last_token_ns - request.arrival_ns) / 1e6 <= slo.e2el_ms)
    )
    return Answer(request.prompt_tokens, tokens, ttft_ms, tpot_ms, holds)
