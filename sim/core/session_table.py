"""What a server knows of the sessions that it serves: their past, never their future."""

from __future__ import annotations

from collections.abc import Sequence

from schedlab.sim.request import RequestState, Session


class SessionTable:
    """The sessions of an engine, or of all engines of a fleet.

    It changes when a request comes and when one is answered or rejected, and at no other time:
    policies that look at it may skip ahead.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def arrived(self, state: RequestState, now_ns: int, parents: Sequence[int] = ()) -> None:
        """Note that a request has come that needs the answers of `parents`; give it its session."""
        name = state.request.session
        assert name is not None
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = Session(name, state.request.arrival_ns)
        if session.num_answered and not session.num_in_flight:
            session.last_gap_ns = now_ns - session.last_answer_ns
        session.num_sent += 1
        if len(parents) == 1 and parents[0] in session.calls:
            tool, answered_ns = session.calls[parents[0]]
            state.awaited_call = tool, now_ns - answered_ns
        state.critical_ns = session.critical_ns
        session.num_in_flight += 1
        state.session = session

    def answered(self, state: RequestState, now_ns: int) -> None:
        """Note that an answer is there."""
        session = state.session
        assert session is not None
        session.num_in_flight -= 1
        session.num_answered += 1
        session.last_answer_ns = now_ns
        session.tool = state.tool
        if state.tool is not None:
            session.calls[state.id] = state.tool, now_ns
        session.attained_ns += state.served_ns
        session.generated_tokens += state.num_output_tokens
        session.waited_ns += now_ns - state.queued_ns - state.served_ns
        session.critical_ns = max(session.critical_ns, state.critical_ns + state.served_ns)

    def rejected(self, state: RequestState) -> None:
        """Note that a request was turned away."""
        if state.session is not None:
            state.session.num_in_flight -= 1

    def forget(self, name: str | None) -> None:
        """Drop a session that is over."""
        if name is not None:
            self._sessions.pop(name, None)
