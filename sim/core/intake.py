"""Requests on their way into the engine: what a scheduler that plans ahead does not know yet."""

from __future__ import annotations

from schedlab.sim.config import EngineConfig
from schedlab.sim.request import RequestState


class Intake:
    """Holds arrivals back until the engine could know of them.

    An engine that takes requests in between steps queues them when the step under way ends. One
    that plans a step ahead knows, when a step begins, only of requests queued before the step
    ahead of it began.

    Parameters
    ----------
    config : EngineConfig
        `async_scheduling`, `arrivals_between_steps` and `first_launch_ns`; without either of the
        switches nothing is held back.

    Attributes
    ----------
    holds_back : bool
        Whether any request ever is.
    requests : list of RequestState
        Those that are now.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.holds_back = config.async_scheduling or config.arrivals_between_steps
        # A batch of a pipeline is planned when it is asked for, not when it begins.
        self._plans_ahead = config.async_scheduling and not config.pipelines_ahead
        self._between_steps = config.arrivals_between_steps
        self._launch_ns = config.first_launch_ns
        self.requests: list[RequestState] = []
        self._last_start_ns = -1
        self._last_end_ns = -1

    def add(self, state: RequestState) -> None:
        """Hold a request back."""
        self.requests.append(state)

    def step_done(self, start_ns: int, end_ns: int) -> None:
        """Learn when the last step ran."""
        if self._last_end_ns >= 0:
            self._launch_ns = 0  # that was the launch of the first step
        self._last_start_ns, self._last_end_ns = start_ns, end_ns

    def is_idle(self, now_ns: int) -> bool:
        """Whether no step ended at this instant, so that none was planned ahead."""
        return self._last_end_ns != now_ns

    def take(self, now_ns: int, wait: bool = True) -> list[RequestState]:
        """Return the requests that the plan made now knows of, and hold the others back.

        Parameters
        ----------
        now_ns : int
            Start of the step to plan.
        wait : bool
            False if there was nothing to plan ahead: then everyone is known.
        """
        known_ns = now_ns
        if wait and self._plans_ahead and not self.is_idle(now_ns):
            known_ns = min(self._last_start_ns + self._launch_ns, now_ns)
        known: list[RequestState] = []
        late: list[RequestState] = []
        for state in self.requests:
            if self._between_steps and state.queued_ns > self._last_start_ns:
                # It came during the step that just ended, or while nothing ran.
                state.queued_ns = known_ns if state.queued_ns <= known_ns else now_ns
            (known if state.queued_ns <= known_ns or not wait else late).append(state)
        self.requests = late
        return known
