"""Continuum: a time-to-live for the memory of sessions that wait for a tool."""

from collections import deque

from schedlab.policies.registry import register
from schedlab.policies.retaining import Retaining
from schedlab.sim.request import RequestState

MOST_CALLS = 256
"""Of a tool, the latest calls that are remembered."""


@register("continuum")
class Continuum(Retaining):
    """Serve sessions first come, first served; keep memory for a time that the tool's past says.

    Optimises the completion of sessions whose answers call tools: their next turn finds its context
    and need not queue for memory. Of the times that calls of the same tool have taken, the one is
    chosen that gains the most: the share of calls that are back by then, times the time of
    computing the context again (or of loading it from a tier below, where that is sooner), less the
    mean time that memory is held for nothing but waiting, times `memory_price`. Until a tool was
    called `min_calls` times, memory is kept for `default_ttl_s`. A call's time is that from its
    answer to the request that needs this answer alone: where several are needed, who knows which
    tool took so long? Answers for a user are given up at once. What is given up may still be found
    in the prefix cache. Needs prefix caching (without it, or with async scheduling, nothing is
    kept), and the step time of prompts.

    The objective is ours, after the paper's words: it weighs the cost of recomputing, and the order
    kept, against the memory held. Its estimate of the queueing delay that keeping saves is not
    modelled.

    Needs to know which session a request belongs to. Nobody starves, but a long session holds up
    all that began behind it. See `Retaining` for what gives way. Skip-ahead is honest because the
    engine ends a segment where memory stops being kept, and free blocks only fall until then.

    Parameters
    ----------
    memory_price : float
        What a second of holding a context is worth, in seconds of computing it.
    default_ttl_s : float
        Of tools that were not called often enough.
    min_calls : int
        How often is often enough.
    """

    source = "Continuum, Li et al. 2025 (arXiv:2511.02230): time-to-live, program-level FCFS"

    def __init__(
        self, memory_price: float = 0.1, default_ttl_s: float = 2.0, min_calls: int = 20
    ) -> None:
        super().__init__()
        if not memory_price >= 0.0:
            raise ValueError(f"memory_price must be >= 0, got {memory_price}")
        if not 0.0 <= default_ttl_s <= 1e9:
            raise ValueError(f"default_ttl_s must be 0 to 1e9, got {default_ttl_s}")
        if min_calls < 1:
            raise ValueError(f"min_calls must be at least 1, got {min_calls}")
        self.memory_price = memory_price
        self.default_ttl_s = default_ttl_s
        self.min_calls = min_calls
        self._past_ns: dict[str, deque[int]] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Learn how long the tool took that the request waited for."""
        if state.awaited_call is not None:
            tool, took_ns = state.awaited_call
            self._past_ns.setdefault(tool, deque(maxlen=MOST_CALLS)).append(took_ns)

    def keeps_until(self, state: RequestState, now_ns: int) -> int:
        """Return the end of the time-to-live."""
        if state.tool is None:
            return now_ns
        past_ns = sorted(self._past_ns.get(state.tool, ()))
        if len(past_ns) < self.min_calls:
            return now_ns + round(self.default_ttl_s * 1e9)
        return now_ns + self._best_ttl_ns(past_ns, self.restore_ns(state))

    def _best_ttl_ns(self, past_ns: list[int], saved_ns: int) -> int:
        """Return the time from the past, or none, that gains the most."""
        best_ns, most, held_ns = 0, 0.0, 0
        for i, ttl_ns in enumerate(past_ns):
            held_ns += ttl_ns
            waited_ns = held_ns + (len(past_ns) - i - 1) * ttl_ns
            gain = (i + 1) * saved_ns - self.memory_price * waited_ns
            if gain > most:
                best_ns, most = ttl_ns + 1, gain
        return best_ns
