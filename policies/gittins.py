"""An index policy on distributions of answer lengths, learned from the past."""

import math
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.policies.ranked import Ranked
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import Request, RequestState

_Floats = npt.NDArray[np.float64]

COSTS = ("tokens", "memory")


class Lengths(NamedTuple):
    """Lengths that answers can have, rising, and their chances; what these leave is longer.

    In tokens, or as multiples of what was predicted.
    """

    lengths: _Floats
    chances: _Floats
    ranks: dict[int, float]
    """Ranks by tokens done, where they are the same for all requests."""


class _Past:
    """What a group has shown of its lengths: its last ends, and the answers under way.

    The distribution is estimated at the first end, and anew whenever there are twice as many ends,
    or half of the window is new: requests ranked by estimates that differ by chance would overtake
    each other for nothing.
    """

    def __init__(self, window: int) -> None:
        self._ended: deque[float] = deque(maxlen=window)
        self._ends_until_estimate = 1
        self.under_way: dict[int, RequestState] = {}
        self.lengths: Lengths | None = None

    def __len__(self) -> int:
        return len(self._ended)

    def end(self, state: RequestState) -> None:
        """Learn the length of an answer, if it is complete."""
        del self.under_way[state.id]
        if not state.is_complete:
            return
        self._ended.append(_length(state))
        self._ends_until_estimate -= 1
        if not self._ends_until_estimate:
            assert self._ended.maxlen is not None
            self._ends_until_estimate = min(len(self), -(-self._ended.maxlen // 2))
            self.lengths = kaplan_meier(self._ended, [*map(_length, self.under_way.values())])


def kaplan_meier(ended: Collection[float], under_way: Collection[float]) -> Lengths:
    """Estimate the distribution of lengths from answers that ended and others that go on.

    Parameters
    ----------
    ended, under_way : collection of float
        Lengths of answers that have ended, and of answers that have not.

    Returns
    -------
    Lengths
        Kaplan and Meier 1958: the chance to end at a length is that of all which came so far.
        Without those under way the estimate would be of short answers wherever long ones wait.
    """
    lengths, ends = np.unique(np.fromiter(ended, np.float64, len(ended)), return_counts=True)
    ages = np.sort(np.fromiter(under_way, np.float64, len(under_way)))
    came_so_far = np.cumsum(ends[::-1])[::-1] + len(ages) - np.searchsorted(ages, lengths)
    goes_on = np.cumprod(1.0 - ends / came_so_far)
    return Lengths(lengths, -np.diff(goes_on, prepend=1.0), {})


def gittins_rank(costs: _Floats, chances: _Floats, spent: float, stops: _Floats) -> float:
    r"""Return the least expected cost to an end, per chance of an end: the inverse Gittins index.

    Parameters
    ----------
    costs, chances : ndarray of float64, shape (n,)
        What a whole request may cost, in rising order, and how likely; what the chances leave is
        a request that costs more.
    spent : float
        What this one has cost so far.
    stops : ndarray of float64, shape (m,)
        At which costs it could be given up for another one.

    Returns
    -------
    float
        :math:`\min_s E[\min(C, s) - a \mid C > a] / P(C \le s \mid C > a)` with cost C, a spent
        and stops s; smaller is served sooner. Infinite if no request ends by any stop.
    """
    first = int(np.searchsorted(costs, spent, side="right"))
    left, chance = costs[first:] - spent, chances[first:]
    by = np.searchsorted(costs, stops, side="right") - first
    stops, by = stops[by > 0], by[by > 0]
    if not len(by):
        return math.inf
    ends = np.cumsum(chance)[by - 1]
    goes_on = 1.0 - chances[:first].sum() - ends
    expected = np.cumsum(chance * left)[by - 1] + (stops - spent) * goes_on
    return float((expected / ends).min())


@register("gittins")
class Gittins(Ranked):
    """Serve who has the best chance to end for what it costs to wait for that.

    Optimises mean latency where lengths are known as distributions only: on a single server with
    free preemption no schedule without better knowledge has a lower mean. Needs no prediction of a
    single answer. The distribution is that of the request's application, as it stood when the
    request came: of the last `window` answers that ended and all that have not, by their length so
    far (Kaplan-Meier; ends alone would be short ones wherever long answers are put off). Where
    requests carry predictions of their length, it is the distribution of length over prediction, so
    that a predictor of any quality gives one. While an application has fewer than `min_samples`
    ends, all answers are one group; before any has ended all ranks are equal and the order is that
    of arrival. An answer longer than all that ended is expected to go on for as long as it has. It
    errs when the mix changes faster than the window.

    The rank is that of `Ranked`: an answer that outlives the quick ends of its kind is overtaken,
    and paused or, where memory is short, evicted for others. It is looked at again every
    `refresh_tokens` tokens, so those are the times at which an answer is thought to be given up.
    Ranks that agree to twelve digits, as what is equal but for rounding does, are in order of
    arrival.
    Long answers starve under sustained load. Where all requests are of one kind and lengths vary no
    more than evenly, there is little to gain, and the past of few answers loses more than that.

    SageSched finds distributions by similar prompts in place of applications. By notes on it, its
    cost is O^2/2 + I*O for I tokens in and O out, which is ``cost: memory``: the KV memory an
    answer holds, added up over its tokens. It ranks anew at multiples of 200 of that, in a unit
    that they do not name. Its code is not public.

    A decision is O(n log n) in the running batch, a rank and an end O(w log w) in the `window`.
    Skip-ahead is honest because ranks change only at multiples of `refresh_tokens`, which the plan
    names; see `Ranked`.

    Parameters
    ----------
    window : int
        How many finished answers of a group make up its past.
    min_samples : int
        How many a group must have to count on its own.
    refresh_tokens : int
        Tokens of an answer after which it is ranked anew.
    cost : {"tokens", "memory"}
        What an end costs: tokens still to generate, or tokens of KV memory times tokens.
    """

    source = (
        "Gittins 1979 for lengths that are distributions (Aalto, Ayesta, Righter 2009); SageSched, "
        "arXiv:2603.07917, abstract, and notes on it"
    )
    starves = True
    lazy_ranks = True

    def __init__(
        self,
        window: int = 1000,
        min_samples: int = 30,
        refresh_tokens: int = 32,
        cost: str = "tokens",
    ) -> None:
        if min(window, min_samples, refresh_tokens) < 1:
            raise ValueError(
                "window, min_samples and refresh_tokens must be at least 1, got "
                f"{window}, {min_samples}, {refresh_tokens}"
            )
        if cost not in COSTS:
            raise ValueError(f"cost must be one of {', '.join(COSTS)}; got {cost!r}")
        self.window = window
        self.min_samples = min_samples
        self.refresh_tokens = refresh_tokens
        self.cost = cost
        # By application, and of all.
        self._groups: dict[tuple[str | bool | None, ...], _Past] = {}
        # What was known of its kind when a request came, and its last rank.
        self._known: dict[int, Lengths | None] = {}
        self._ranks: dict[int, tuple[int, float]] = {}

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order by the rank at the last multiple of `refresh_tokens`."""
        done = state.num_output_tokens // self.refresh_tokens * self.refresh_tokens
        last = self._ranks.get(state.id)
        if last is None or last[0] != done:
            last = self._ranks[state.id] = done, self._rank(state.request, done)
        return last[1]

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return the steps until somebody is ranked anew."""
        every = self.refresh_tokens
        left = (every - state.num_output_tokens % every for state in view.running)
        return min(left, default=FOREVER), FOREVER

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note what is known of answers of its kind."""
        every, own = self._pasts(state.request)
        past = every if len(own) < self.min_samples else own
        self._known[state.id] = past.lengths
        every.under_way[state.id] = own.under_way[state.id] = state

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Learn the length of the answer."""
        for past in self._pasts(state.request):
            past.end(state)
        del self._known[state.id]
        self._ranks.pop(state.id, None)

    def _pasts(self, request: Request) -> list[_Past]:
        """Return the past of all answers, and of its application's."""
        predicted = request.predicted_tokens is not None
        kinds = ("all", predicted), ("of", request.application, predicted)
        return [self._groups.setdefault(kind, _Past(self.window)) for kind in kinds]

    def _rank(self, request: Request, done: int) -> float:
        lengths = self._known[request.id]
        if lengths is None:
            return 0.0
        depends = self.cost == "memory" or request.predicted_tokens is not None
        if not depends and done in lengths.ranks:
            return lengths.ranks[done]
        every, tokens = self.refresh_tokens, lengths.lengths * _unit_tokens(request)
        # Of the times between two lengths the first is the best: later ones cost more for nothing.
        first_stops = done + np.ceil((tokens - done) / every) * every
        stops = self._spent(request, np.maximum(first_stops, tokens))
        spent, twice = self._spent(request, np.array([done, 2.0 * done]))
        costs = self._spent(request, tokens)
        rank = gittins_rank(costs, lengths.chances, spent, stops)
        if math.isinf(rank):
            rank = float(twice - spent)
        rank = float(f"{rank:.12g}")
        if not depends:
            lengths.ranks[done] = rank
        return rank

    def _spent(self, request: Request, tokens: _Floats) -> _Floats:
        """Return what answers of so many tokens cost."""
        if self.cost == "tokens":
            return tokens
        return tokens * request.prompt_tokens + tokens * (tokens + 1.0) / 2.0


def _unit_tokens(request: Request) -> float:
    """Return in what its length is counted: what was predicted, or tokens."""
    predicted = request.predicted_tokens
    return 1.0 if predicted is None else min(max(predicted, 1.0), float(FOREVER))


def _length(state: RequestState) -> float:
    return state.num_output_tokens / _unit_tokens(state.request)
