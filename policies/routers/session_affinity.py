"""The engine that had the session before."""

from collections.abc import Sequence
from typing import Literal

from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request


@register("session_affinity")
class SessionAffinity(Router):
    """Requests of a session stay on the engine that its first request went to.

    Keeps what an engine's prefix cache holds of a conversation within reach. A new session, and a
    request without one, goes where the fewest requests are. Nothing evens out sessions that turn
    out long.

    Parameters
    ----------
    key : {"session", "tenant", "application"}
        What of a request is its session.
    """

    source = "NVIDIA Triton and Kubernetes gateways: sticky sessions"

    def __init__(self, key: Literal["session", "tenant", "application"] = "session") -> None:
        if key not in ("session", "tenant", "application"):
            raise ValueError(f"key must be session, tenant or application, got {key!r}")
        self.key = key
        self._engine: dict[str, int] = {}

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Look up, or choose the one with the fewest."""
        session: str | None = getattr(request, self.key)
        if session is not None and session in self._engine:
            chosen = self._engine[session]
            for place, engine in enumerate(engines):
                if engine.index == chosen:
                    return place
        place = self.least(column(engines, "num_in_flight"))
        if session is not None:  # new, or its engine is down
            self._engine[session] = engines[place].index
        return place
