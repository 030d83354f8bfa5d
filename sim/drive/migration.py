"""Requests that go from engine to engine while they decode."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Protocol

import simpy

from schedlab.sim.core import reception
from schedlab.sim.core.track import slots_ahead
from schedlab.sim.drive.clock import REPORTS
from schedlab.sim.drive.engine_state import Candidate
from schedlab.sim.drive.handover import has_room
from schedlab.sim.drive.links import Links, Moving
from schedlab.sim.drive.members import Member
from schedlab.sim.drive.retries import as_received
from schedlab.sim.errors import PolicyError
from schedlab.sim.own_code import FAULTS, raised, short, whole
from schedlab.sim.record.cluster_log import Move
from schedlab.sim.request import RUNS, RequestState

if TYPE_CHECKING:
    from schedlab.sim.drive.fleet import Fleet


class Migrator(Protocol):
    """Chooses who moves, and where."""

    def pairs(self, candidates: Sequence[Candidate]) -> Sequence[tuple[int, int]]:
        """Return from which of some engines a request should move to which, by their places."""

    def victim(self, decoding: Sequence[RequestState]) -> int | None:
        """Return the place of the request that moves, None if none is to."""


@dataclass(frozen=True)
class MigrationPlan:
    """Who moves, and how.

    Attributes
    ----------
    migrator : Migrator
        Chooses who moves.
    every_ns : int
        How often it is asked.
    last_stage_blocks : int
        A request stops when no more KV blocks than these are left to send.
    max_stages : int
        After so many stages a move that is not in its last one is given up.
    """

    migrator: Migrator
    every_ns: int
    last_stage_blocks: int = 16
    max_stages: int = 3


class _Phase(Enum):
    WAITS = 0  # for a step to end, so that somebody can be chosen
    COPIES = 1
    COPIED = 2  # a stage is done: the next begins when a step ends
    STOPPED = 3  # the last stage


@dataclass(eq=False)
class _Move:
    """One move, from when a pair of engines is chosen."""

    source: Member
    target: Member
    phase: _Phase = _Phase.WAITS
    state: RequestState | None = None
    """The request where it leaves."""
    received: RequestState | None = None
    """And where it goes."""
    num_preemptions: int = 0
    sent_tokens: int = 0
    sent_bytes: int = 0
    num_stages: int = 0
    start_ns: int = -1
    stop_ns: int = -1
    moving: Moving | None = None


class Migration:
    """Live migration: KV is copied in stages while its request decodes.

    In each stage the KV is sent that was computed since the stage before; memory for it is taken
    where it goes. When little is left the request stops between two steps, the rest is sent, and it
    goes on there. A move is given up if its request ends or is preempted, if there is no room, or
    if it does not come to an end. An engine sends one request at a time, and receives one. Who has
    got no token since the last move stays: a policy that lets newcomers wait for longer than the
    migrator lets them stay would never serve them.

    Parameters
    ----------
    fleet : Fleet
        All engines.
    links : Links
        What joins them.
    plan : MigrationPlan
        Who moves.

    Attributes
    ----------
    moves : list of Move
        Those that came to their end.

    Notes
    -----
    Llumnix, Sun et al., OSDI 2024, section 4.2. That copying slows no step is a measurement of
    theirs and an assumption here.
    """

    def __init__(self, fleet: Fleet, links: Links, plan: MigrationPlan) -> None:
        self._fleet = fleet
        self._links = links
        self._plan = plan
        self._leaving: dict[int, _Move] = {}
        self._entering: dict[int, _Move] = {}
        self.moves: list[Move] = []
        self._had_tokens: dict[int, int] = {}
        """How many tokens of its answer a request had when it last moved, by id."""
        fleet.processes.process(self._look())

    @property
    def is_moving(self) -> bool:
        """Whether KV is on its way."""
        return any(move.moving is not None for move in self._leaving.values())

    def started(self, member: Member) -> None:
        """Do nothing: a fresh engine has nobody to move."""

    def _look(self) -> Generator[simpy.Event, None, None]:
        """Ask the migrator every so often for pairs of engines."""
        fleet = self._fleet
        while True:
            yield fleet.processes.wait(self._plan.every_ns, REPORTS)
            if not fleet.has_work:
                return
            for role in ("mixed", "decode"):
                members = [m for m in fleet.members if m.is_up and m.role == role]
                if len(members) > 1:
                    self._pair(members)

    def _pair(self, members: Sequence[Member]) -> None:
        places = [Candidate(member.live, member.is_draining) for member in members]
        for from_place, to_place in self._asked(places):
            source, target = members[from_place], members[to_place]
            if source.index in self._leaving or target.index in self._entering:
                continue
            move = _Move(source, target)
            self._leaving[source.index] = self._entering[target.index] = move
            source.server.interrupt()
            self._fleet.settle_soon(source)

    def _asked(self, places: Sequence[Candidate]) -> Sequence[tuple[int, int]]:
        migrator = self._plan.migrator
        what = f"migrator {type(migrator).__name__}: pairs()"
        try:
            # What a migrator returns may be anything; a generator is run by listing it.
            answer: object = migrator.pairs(places)
            named = list(answer) if isinstance(answer, Iterable) else None
        except FAULTS as error:
            raise PolicyError(f"{what} raised {raised(error, type(migrator))}") from error
        if named is None:
            raise PolicyError(f"{what} returned {short(answer)}, which is no list of pairs")
        pairs = []
        for pair in named:
            is_pair = isinstance(pair, tuple) and len(pair) == 2
            source, target = map(whole, pair) if is_pair else (None, None)
            if (
                source is None
                or target is None
                or source == target
                or not {source, target} <= set(range(len(places)))
            ):
                raise PolicyError(
                    f"{what} named {short(pair)}, which is no pair of different places 0 to "
                    f"{len(places) - 1}"
                )
            if places[target].is_draining:
                raise PolicyError(f"{what} named place {target} to go to, which drains")
            pairs.append((source, target))
        return pairs

    def _victim(self, decoding: Sequence[RequestState]) -> RequestState | None:
        """Ask who moves, and check the answer; None if nobody is to."""
        migrator = self._plan.migrator
        what = f"migrator {type(migrator).__name__}: victim()"
        try:
            answer: object = migrator.victim(decoding)
        except FAULTS as error:
            raise PolicyError(f"{what} raised {raised(error, type(migrator))}") from error
        if answer is None:
            return None
        place = whole(answer)
        if place is None or not 0 <= place < len(decoding):
            raise PolicyError(
                f"{what} returned {short(answer)}, which is neither None nor a place 0 to "
                f"{len(decoding) - 1}"
            )
        return decoding[place]

    # -- stages ------------------------------------------------------------------------------------

    def settle(self, changed: set[int]) -> None:
        """Begin the next stage of those whose engine is between two steps."""
        for index in sorted(changed & self._leaving.keys()):
            move = self._leaving[index]
            if move.source.is_stepping:
                continue
            if move.state in move.source.engine.requests.in_pipeline:
                continue  # it stops between two of its own steps
            if move.phase is _Phase.WAITS:
                self._choose(move)
            elif move.phase is _Phase.COPIED:
                self._go_on(move)

    def _choose(self, move: _Move) -> None:
        """Choose a request, and send what is there of it."""
        source, target = move.source, move.target
        had = self._had_tokens
        decoding = [
            s
            for s in source.engine.requests.running.values()
            if s.is_decoding and s.num_output_tokens > had.get(s.id, -1)
        ]
        if not decoding and source.engine.requests.in_pipeline:
            return  # some are back when the oldest batch is
        state = self._victim(decoding) if decoding else None
        if state is None:
            self._drop(move)
            return
        tokens = state.num_computed_tokens
        if not target.is_up or target.is_draining or not has_room(target, tokens):
            self._drop(move)
            return
        move.state, move.num_preemptions = state, state.num_preemptions
        move.received = as_received(state, target.engine.config)
        move.start_ns = self._fleet.now_ns
        target.server.interrupt()
        arrival, now_ns = self._fleet.arrivals[state.id], self._fleet.now_ns
        reception.reserve(target.engine.requests, move.received, arrival, tokens, now_ns)
        self._send(move, tokens, _Phase.COPIES)

    def _go_on(self, move: _Move) -> None:
        """Send what was computed since the last stage; the request stops if that is little."""
        state, received, target = move.state, move.received, move.target
        assert state is not None
        assert received is not None
        is_there = state.status is RUNS and state.is_decoding
        tokens = state.num_computed_tokens - move.sent_tokens
        block_size = target.engine.config.block_size
        is_last = tokens <= self._plan.last_stage_blocks * block_size
        if (
            not is_there
            or state.num_preemptions != move.num_preemptions
            or not (is_last or move.num_stages < self._plan.max_stages)
            or not _can_grow(target, move.sent_tokens, tokens)
        ):
            self._call_off(move)
            return
        target.server.interrupt()
        reception.extend(target.engine.requests, received, tokens)
        if is_last:
            received._generated = state.num_output_tokens
            now_ns = move.stop_ns = self._fleet.now_ns
            move.source.engine.requests.withdraw(state, now_ns)
            received.served_ns, received._seated_ns = state.served_ns, now_ns
            move.source.server.wake()
            self._fleet.settle_soon(move.source)  # its seat is free for who waits to come there
        self._send(move, tokens, _Phase.STOPPED if is_last else _Phase.COPIES)

    def _send(self, move: _Move, tokens: int, phase: _Phase) -> None:
        move.phase = phase
        move.sent_tokens += tokens
        move.num_stages += 1
        done = self._arrives if phase is _Phase.STOPPED else self._is_copied
        move.moving = self._links.send_kv(move.source, move.target, tokens, partial(done, move))
        move.sent_bytes += move.moving.num_bytes

    def _is_copied(self, move: _Move) -> None:
        move.phase, move.moving = _Phase.COPIED, None
        move.source.server.interrupt()
        self._fleet.settle_soon(move.source)

    def _arrives(self, move: _Move) -> None:
        """Let the request go on where all its KV is."""
        source, target, received = move.source, move.target, move.received
        assert received is not None
        self._drop(move)
        self._had_tokens[received.id] = received.num_output_tokens
        for member in (source, target):
            member.server.interrupt()
        source.engine.requests.delivered(received.id)
        reception.arrive(target.engine.requests, received, self._fleet.now_ns)
        source.live.count(received.request, -1)
        target.live.count(received.request, 1)
        for member in (source, target):
            member.server.wake()
        self._fleet.settle_soon(source)
        self.moves.append(
            Move(
                received.id, source.index, target.index, move.start_ns, move.stop_ns,
                self._fleet.now_ns, move.sent_bytes, move.num_stages,
            )
        )  # fmt: skip

    # -- what becomes of engines -------------------------------------------------------------------

    def died(self, member: Member) -> list[RequestState]:
        """End the moves of a dead engine; return who had stopped for the last of their KV."""
        lost = []
        going = {
            id(m): m
            for m in (self._leaving.get(member.index), self._entering.get(member.index))
            if m
        }
        for move in going.values():
            has_stopped = move.phase is _Phase.STOPPED
            if move.source is member:
                self._call_off(move)
            else:
                if move.moving is not None:
                    self._links.cancel(move.moving)
                self._drop(move)
                if has_stopped:
                    assert move.state is not None
                    move.source.server.interrupt()
                    move.source.engine.requests.delivered(move.state.id)
                    move.source.live.count(move.state.request, -1)
                    move.source.server.wake()
                    self._fleet.settle_soon(move.source)
            if has_stopped:
                assert move.state is not None
                lost.append(move.state)
        return lost

    def _call_off(self, move: _Move) -> None:
        """Give a move up, and the memory where it was to go."""
        if move.moving is not None:
            self._links.cancel(move.moving)
        if move.received is not None:
            target = move.target
            target.server.interrupt()
            reception.call_off(target.engine.requests, move.received)
            target.server.wake()
            self._fleet.settle_soon(target)
        self._drop(move)

    def _drop(self, move: _Move) -> None:
        del self._leaving[move.source.index]
        del self._entering[move.target.index]


def _can_grow(target: Member, has_tokens: int, tokens: int) -> bool:
    """Whether there is memory for more KV, and for the next token."""
    config = target.engine.config
    size, end = config.block_size, has_tokens + tokens + 1
    need = -(-(end + slots_ahead(config, end)) // size) - -(-has_tokens // size)
    return need <= config.num_blocks - target.live.used_blocks
