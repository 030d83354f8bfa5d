"""Who is told of the requests of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from schedlab.sim.request import RequestState


class RequestHooks(Protocol):
    """What a policy is told of requests that come and go, and how it orders those that wait."""

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        """Return the place of a request in the waiting queue, smaller = sooner."""

    by_arrival: bool
    """Whether that is the time of its arrival, for all."""
    on_arrival: Callable[[RequestState, int], None] | None
    """Called with a request about to enter the queue for the first time, and the time."""
    on_finish: Callable[[RequestState, int], None] | None
    """Called with a request that is complete or goes on in another engine, and the time."""
    on_reject: Callable[[RequestState, int], None] | None
    """Called with a request that a plan rejected, and the time."""
    keeps_until: Callable[[RequestState, int], int] | None
    """Called with a request of a session that has its last token, and the time; returns until when
    its memory is kept for the next requests of the session. The time itself: not at all."""
    keeps_longer: Callable[[RequestState, int, bool], int] | None
    """Called when that time has come, with the request, the time and whether one waits that needs
    its answer; returns until when its memory is kept from then on. The time itself: no longer."""
