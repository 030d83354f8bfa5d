"""Continuum: a time-to-live for the memory of sessions that wait for a tool."""

from collections import deque
from collections.abc import Collection
from math import log, sqrt

from schedlab.policies.registry import register
from schedlab.policies.retaining import Retaining
from schedlab.sim.request import RequestState

MOST_CALLS = 256
"""Of a tool, of all tools together and of delays in the queue, the latest that are remembered."""
RULES = ("paper", "preview")


@register("continuum")
class Continuum(Retaining):
    """Serve sessions first come, first served; keep memory for a time that the tool's past says.

    Optimises the completion of sessions whose answers call tools: their next turn finds its context
    and need not queue for memory. Of the times that calls of the same tool have taken, the one is
    chosen that gains the most: the share of calls that were back by then, times what is saved if
    this one is, less the time itself. Saved is the time of computing the context again (or of
    loading it from a tier below, where that is sooner), and the mean delay in the queue of those
    who came back to memory given up, times the memoryfulness of sessions: how well, of those that
    are over, the number of requests served foretold how few were to come (1: all are equally long;
    0: nothing is known of the rest). Memory is not kept where no time gains anything.

    With `min_calls` calls of a tool or fewer, those of all tools count; with so few of all, calls
    are taken to last a second in the mean, exponentially, and sessions to be equally long. A call's
    time is that from its answer to the request that needs this answer alone: where several are
    needed, who knows which tool took so long? What is given up may still be found in the prefix
    cache. Needs prefix caching (without it, or with async scheduling, nothing is kept), and the
    step time of prompts.

    What the paper leaves open: records are the latest `MOST_CALLS` of a kind; a delay counts when
    its answer is there, and as one after memory was given up if none was kept when the request
    came, for one call alone. What nobody can know here: whether a session is over, so an answer for
    a user ends one, and its memory is given up at once. The authors' preview code has no such
    model, but the rule of `ttl: preview`; it does not put the preempted before all others, and
    preempts no last request of a session where another runs.

    Needs to know which session a request belongs to. Nobody starves, but a long session holds up
    all that began behind it. See `Retaining` for the order and for what gives way. Skip-ahead is
    honest because the engine ends a segment where memory stops being kept, and free blocks only
    fall until then.

    Parameters
    ----------
    ttl : {"paper", "preview"}
        How long: as above, or as the authors' preview code has it: `fixed_ttl_s`, and not at all
        for a tool whose calls take longer in the mean.
    min_calls : int
        How many calls are too few to go by.
    fixed_ttl_s : float
        With `ttl: preview`.
    """

    source = "Continuum, Li et al. 2025 (arXiv:2511.02230v6), algorithm 1, sections 4.1 to 4.3"

    def __init__(self, ttl: str = "paper", min_calls: int = 100, fixed_ttl_s: float = 2.0) -> None:
        super().__init__()
        if ttl not in RULES:
            raise ValueError(f"ttl must be one of {', '.join(RULES)}; got {ttl!r}")
        if not 0 <= min_calls < MOST_CALLS:
            raise ValueError(f"min_calls must be 0 to {MOST_CALLS - 1}, got {min_calls}")
        if not 0.0 <= fixed_ttl_s <= 1e9:
            raise ValueError(f"fixed_ttl_s must be 0 to 1e9, got {fixed_ttl_s}")
        self.ttl = ttl
        self.min_calls = min_calls
        self.fixed_ttl_s = fixed_ttl_s
        self._past_ns: dict[str, deque[int]] = {}
        self._all_ns: deque[int] = deque(maxlen=MOST_CALLS)
        self._delays_ns: deque[int] = deque(maxlen=MOST_CALLS)
        self._evicted: set[int] = set()
        self._num_served: dict[str, int] = {}
        self._over = SessionsOver()

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Learn how long the tool took that the request waited for; note if no memory was kept."""
        if state.awaited_call is None:
            return
        tool, took_ns = state.awaited_call
        self._past_ns.setdefault(tool, deque(maxlen=MOST_CALLS)).append(took_ns)
        self._all_ns.append(took_ns)
        assert self._view is not None
        if not any([kept.session is state.session for kept in self._view.kept]):
            self._evicted.add(state.id)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Learn how long who came back to nothing had queued, and how long sessions are."""
        if state.session is None:
            return
        if state.id in self._evicted:
            self._evicted.remove(state.id)
            self._delays_ns.append(state.first_scheduled_ns - state.queued_ns)
        if not state.is_complete:
            return
        name = state.session.name
        num_served = self._num_served.pop(name, 0) + 1
        if state.tool is None:
            self._over.add(num_served)
        else:
            self._num_served[name] = num_served

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Forget who never had an answer."""
        self._evicted.discard(state.id)

    def keeps_until(self, state: RequestState, now_ns: int) -> int:
        """Return the end of the time-to-live."""
        if state.tool is None:
            return now_ns
        past_ns: Collection[int] = self._past_ns.get(state.tool, ())
        if self.ttl == "preview":
            fixed_ns = round(self.fixed_ttl_s * 1e9)
            return now_ns + (fixed_ns if sum(past_ns) <= fixed_ns * len(past_ns) else 0)
        delay_ns = sum(self._delays_ns) / len(self._delays_ns) if self._delays_ns else 0.0
        restore_ns = self.restore_ns(state)
        if len(self._all_ns) <= self.min_calls:
            saved_s = (delay_ns + restore_ns) / 1e9
            # The best time where calls end at a rate of 1/s: share' = exp(-ttl) = 1 / saved.
            return now_ns + (round(log(saved_s) * 1e9) if saved_s > 1.0 else 0)
        if len(past_ns) <= self.min_calls:
            past_ns = self._all_ns
        saved_ns = restore_ns + round(delay_ns * self._over.memoryfulness())
        return now_ns + best_ttl_ns(sorted(past_ns), saved_ns)


class SessionsOver:
    """How well, of sessions that are over, the requests served foretold those to come."""

    def __init__(self) -> None:
        # Over all requests: how many; served, left; their squares, and their product.
        self._count = self._served = self._left = 0
        self._served2 = self._left2 = self._both = 0

    def add(self, length: int) -> None:
        """Add a session with so many requests: after its k-th, k are served and the rest left."""
        self._count += length
        self._served += length * (length + 1) // 2
        self._left += length * (length - 1) // 2
        squares = length * (length + 1) * (2 * length + 1) // 6
        self._served2 += squares
        self._left2 += squares - length * length
        self._both += length * length * (length + 1) // 2 - squares

    def memoryfulness(self) -> float:
        """Return the negative correlation of served and left; 1 if there is none yet."""
        n = self._count
        product = (n * self._served2 - self._served**2) * (n * self._left2 - self._left**2)
        if product == 0:
            return 1.0
        return (self._served * self._left - n * self._both) / sqrt(product)


def best_ttl_ns(past_ns: list[int], saved_ns: int) -> int:
    """Return the time from the past, in ascending order, or none, that gains the most."""
    best_ns, most = 0, 0
    for i, ttl_ns in enumerate(past_ns):
        if ttl_ns >= saved_ns:
            break
        gain = (i + 1) * saved_ns - len(past_ns) * ttl_ns
        if gain > most:
            best_ns, most = ttl_ns + 1, gain  # who is back at the very end finds it
    return best_ns
