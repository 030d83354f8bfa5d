"""Shortest remaining work of the session first, by prediction."""

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("program_srpt")
class ShortestRemainingProgramFirst(Ranked):
    """Serve the session first that is predicted to generate the fewest tokens from here on.

    Optimises the mean completion time of sessions, given exact predictions and free preemption.
    Needs a prediction of the output of every request of a session, of those to come, too: their sum
    says how much the session will generate (`Request.predicted_session_tokens`), what it has
    generated is taken off. That tells a server how many turns there will be, which none knows: a
    bound for others to be held against. Without sessions it is `srtf`. Long sessions starve under
    sustained load.

    What a session has generated is counted when a request of it comes; requests of a session that
    run side by side do not see each other's tokens.

    A decision is O(n log n) in the running batch. Skip-ahead is honest because what is left falls
    for those who decode and stays for all others.
    """

    source = "Schrage 1968, of whole sessions; compare Autellix (arXiv:2502.13965), section 4.2"
    needs_prediction = True
    starves = True

    def __init__(self) -> None:
        self._left: dict[int, float] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note what the session will generate from here on."""
        total, session = state.request.predicted_session_tokens, state.session
        if total is None or session is None:
            self._left[state.id] = predicted_tokens(state)
        else:
            self._left[state.id] = total - session.generated_tokens

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        del self._left[state.id]

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        self._left.pop(state.id, None)

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by predicted tokens of the session that are not generated yet."""
        return self._left[state.id] - state.num_output_tokens

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all: no key gets worse by itself."""
        return FOREVER, FOREVER
