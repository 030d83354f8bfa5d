"""Requests that lost their engine, or find none: they are sent again, wait, or fail."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.track import new_state
from schedlab.sim.drive.clock import FAILS, Event
from schedlab.sim.record.cluster_log import Loss
from schedlab.sim.request import RequestState, Status

if TYPE_CHECKING:
    from schedlab.sim.config import EngineConfig
    from schedlab.sim.drive.fleet import Fleet
    from schedlab.sim.drive.members import Member


class Retries:
    """What becomes of requests whose engine dies, and of those that find none.

    A request is sent again at once, as its router says, with the tokens that came out; their keys
    and values, and those of the prompt, are computed again. If no engine is up it waits for one.

    Parameters
    ----------
    fleet : Fleet
        Where they are sent.

    Attributes
    ----------
    most : int
        How often a request is sent again at most.
    deadline_ns : int
        How long after its arrival a request without an engine fails.
    losses : list of Loss
        What was lost so far.
    queued_ns : dict of int to int
        Request that was lost to when the engine took it in that scheduled it first.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._times_lost: dict[int, int] = {}
        self._lost_by: dict[int, int] = {}
        self._parked: deque[RequestState] = deque()
        self.most = FOREVER
        self.deadline_ns = FOREVER
        self.losses: list[Loss] = []
        self.queued_ns: dict[int, int] = {}

    @property
    def num_parked(self) -> int:
        """Requests that wait for an engine."""
        return len(self._parked)

    def lost(self, state: RequestState, member: Member) -> None:
        """Send a request again, unless it was lost too often or it is too late."""
        fleet = self._fleet
        times = self._times_lost[state.id] = self._times_lost.get(state.id, 0) + 1
        self._lost_by[state.id] = member.index
        self.losses.append(Loss(state.id, member.index, fleet.now_ns, state.num_computed_tokens))
        if state.first_scheduled_ns >= 0:
            self.queued_ns.setdefault(state.id, state.queued_ns)
        if times > self.most:
            self.fail(state, f"it lost its engine {times} times")
            return
        if self._is_too_late(state):
            self.fail(state, "it lost its engine after its deadline")
        elif not fleet.resume(state):
            self.park(state)

    def park(self, state: RequestState) -> None:
        """Let a request wait until an engine is up, or until its deadline."""
        if self._is_too_late(state):
            self.fail(state, "no engine took it before its deadline")
            return
        self._parked.append(state)
        if self.deadline_ns < FOREVER:
            wait_ns = state.request.arrival_ns + self.deadline_ns - self._fleet.now_ns
            self._fleet.clock.at(wait_ns, FAILS, partial(self._expire, state))
        self.give_up_if_nobody_comes()

    def send_parked(self) -> None:
        """Send those that wait, in the order in which they came to."""
        while self._parked and self._fleet.resume(self._parked[0]):
            self._parked.popleft()

    def give_up_if_nobody_comes(self) -> None:
        """Let those that wait fail if no engine will ever take them."""
        if self._parked and not self._fleet.expects("mixed", "prefill"):
            parked, self._parked = self._parked, deque()
            for state in parked:
                self.fail(state, "no engine is left")

    def _is_too_late(self, state: RequestState) -> bool:
        return self._fleet.now_ns - state.request.arrival_ns >= self.deadline_ns

    def _expire(self, state: RequestState, _: Event) -> None:
        if state in self._parked:
            self._parked.remove(state)
            self.fail(state, "no engine took it before its deadline")

    def fail(self, state: RequestState, reason: str, member: Member | None = None) -> None:
        """Turn a request away; it is listed with the engine that lost it last, or the first."""
        fleet = self._fleet
        place = self._lost_by.get(state.id, 0) if member is None else member.index
        log = next(log for index, log in reversed(fleet.logs) if index == place)
        state.status = Status.REJECTED
        fleet.sessions.rejected(state)
        log.reject(state, fleet.arrivals[state.id].output_tokens, reason)
        fleet.request_is_gone(state, fleet.now_ns)


def as_received(sent: RequestState, config: EngineConfig) -> RequestState:
    """Return a request as the next engine has it: with all that happened so far, without KV.

    Parameters
    ----------
    sent : RequestState
        As the last engine had it, or nobody yet.
    config : EngineConfig
        The limits of the next one.
    """
    state = new_state(sent.request, config)
    catch_up(state, sent)
    return state


def catch_up(state: RequestState, sent: RequestState) -> None:
    """Let a request as the next engine has it know all that happened so far."""
    state.queued_ns = sent.queued_ns
    state.first_scheduled_ns = sent.first_scheduled_ns
    state.first_token_ns = sent.first_token_ns
    state.num_preemptions = sent.num_preemptions
    state.recomputed_tokens = sent.recomputed_tokens
    state.cached_tokens = sent.cached_tokens
    state.prefix_hit_tokens = sent.prefix_hit_tokens
    state.session = sent.session
    state.awaited_call = sent.awaited_call
    state.critical_ns = sent.critical_ns
    state.served_ns = sent.served_ns
    state._generated = sent.num_output_tokens
