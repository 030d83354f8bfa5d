"""Preble: to who holds most of the prompt, or to who has the least to do, in time of the GPU."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from schedlab.policies.routers.prefix_tree import PrefixTree
from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.policies.routers.step_times import decode_ms, first_token_ms, prefill_ms
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import column
from schedlab.sim.request import Request

_Prefix = tuple[int, int]
"""The last block of a prefix that several prompts have, and an engine that holds it."""


class _Sent(NamedTuple):
    """A request of the window."""

    time_ns: int
    engine: int
    load_ms: float
    ids: Sequence[int]
    prefix: _Prefix | None


@register("preble")
class Preble(Router):
    """Exploit a cache if it saves more than is left to compute, else explore (E2).

    Exploit: if the longest part of the prompt that an engine was sent before is longer than the
    rest, the engines that were sent it are candidates. Explore: else all are. Of the candidates the
    one of least cost takes the request. The cost is time on the GPU, as step times are estimated:

    ``L + M + P``

    L is what the requests that were sent there within `window_s` take: what was missing of their
    prompts, and for each token of their answers (predicted, or declared by `max_tokens`) an equal
    share of a step of the decodes there and this one. M is what it takes to compute again what has
    to be evicted for this request, the least recently used first, each part times the share of the
    window's requests there that had it. P is what is missing of this prompt.

    Rebalance: while L of the most loaded engine is above `balance_ratio` times that of the least
    loaded one, requests that would exploit the first go to the second. Copy: where a prefix is
    expected to wait for its first tokens twice as long in the later half of the window as in the
    earlier one, the least loaded engine becomes a candidate for it, too.

    Must know prefixes (``engine.enable_prefix_caching``), lengths of answers and step times; what
    engines evicted it only guesses. Does badly where answers are declared much longer than they
    are, which makes L a count of requests, and where prompts have less in common than of their own:
    then it balances load alone. A decision is linear in engines and blocks of the prompt.

    Followed are the paper's rules, as the authors' summary and two accounts of it tell them (its
    text was not at hand), with the constants of the code: three minutes, 1.5 times, no rebalancing
    before 50 requests an engine, twice as long. What differs: the code moves whole prefixes, the
    cheapest first, and splits the last one, by measured times; here requests are moved, and the
    wait for a first token is what the cost model says when a request is sent. The code charges a
    request whole steps while it decodes, and nothing after; it weighs what it evicts by number of
    requests and share of misses, and takes memory to be always full. Left
    out: that prompts without a cached prefix go to an engine that mostly decodes (more than 0.7 of
    its tokens hit; off in the authors' server).

    Parameters
    ----------
    window_s : float
        How far back load and frequency of prefixes are counted, > 0.
    balance_ratio : float
        Of the greatest over the least load from which requests are moved, >= 1.
    min_requests : int
        Requests sent, by the engine in the mean, before any is moved or copied, >= 0.
    """

    source = (
        "Preble, Srivatsa et al. 2024 (arXiv:2407.00023), E2, as others describe it; constants of "
        "WukLab/preble, global_scheduler_with_time.py"
    )
    needs_prefixes = True

    def __init__(
        self, window_s: float = 180.0, balance_ratio: float = 1.5, min_requests: int = 50
    ) -> None:
        if not 0.0 < window_s < inf:
            raise ValueError(f"window_s must be finite and > 0, got {window_s!r}")
        if not balance_ratio >= 1:
            raise ValueError(f"balance_ratio must be >= 1, got {balance_ratio!r}")
        if min_requests < 0:
            raise ValueError(f"min_requests must be >= 0, got {min_requests!r}")
        self.window_s = window_s
        self.balance_ratio = balance_ratio
        self.min_requests = min_requests
        self._tree = PrefixTree()
        self._window: deque[_Sent] = deque()
        self._now_ns = 0
        self._num_sent = 0
        # By engine: load in the window, requests in it, and how many of these have each block.
        self._loads_ms: dict[int, float] = {}
        self._counts: Counter[int] = Counter()
        self._blocks: dict[int, Counter[int]] = {}
        self._first_ms: dict[_Prefix, deque[tuple[int, float]]] = {}
        self._copies: dict[int, int] = {}  # by the last block of a prefix, the engine to hold it

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Exploit or explore, then move or copy if that made loads uneven."""
        # Who is sent again after a failure comes later than he arrived.
        self._now_ns = max(self._now_ns, request.arrival_ns)
        self._expire()
        ids, names = request.prefix_hash_ids, column(engines, "index")
        found = self._tree.match(ids)
        cached = [found.get(name, 0) for name in names]
        most = max(cached)
        longest_tokens = most * engines[cached.index(most)].block_size
        prefix: _Prefix | None = None
        if longest_tokens > request.prompt_tokens - longest_tokens:
            copy = self._copies.get(ids[most - 1])
            places = [p for p, n in enumerate(cached) if n == most or names[p] == copy]
            place = self._cheapest(request, engines, places, cached)
            prefix = (ids[most - 1], names[place])
            place = self._spread(engines, place, cached, prefix)
        else:
            place = self._cheapest(request, engines, range(len(names)), cached)
        self._send(request, engines[place], cached[place], prefix)
        return place

    def engine_is_gone(self, index: int) -> None:
        """Forget what it was sent."""
        self._tree.forget(index)
        self._window = deque(sent for sent in self._window if sent.engine != index)
        for known in (self._loads_ms, self._counts, self._blocks):
            known.pop(index, None)
        self._first_ms = {key: told for key, told in self._first_ms.items() if key[1] != index}
        self._copies = {block: name for block, name in self._copies.items() if name != index}

    def _cheapest(
        self,
        request: Request,
        engines: Sequence[EngineState],
        places: Iterable[int],
        cached: Sequence[int],
    ) -> int:
        """Return the place of the least cost; the first of equal ones."""
        return min(places, key=lambda place: self._cost_ms(request, engines[place], cached[place]))

    def _cost_ms(self, request: Request, engine: EngineState, cached: int) -> float:
        """Estimate the time on the GPU that goes into requests there, this one with them."""
        index, ids = engine.index, request.prefix_hash_ids
        cost_ms = self._loads_ms.get(index, 0.0) + _prompt_ms(request, engine, cached)
        num_evicted = self._tree.sizes([index])[0] + len(ids) - cached - engine.num_blocks
        if num_evicted > 0:
            size, blocks = engine.block_size, self._blocks.get(index, Counter())
            for prompt, start, end in self._tree.oldest(index, num_evicted, ids):
                num_requests = blocks[prompt[end - 1]]
                if num_requests:
                    again_ms = prefill_ms(engine, (end - start) * size, start * size)
                    cost_ms += again_ms * num_requests / self._counts[index]
        return cost_ms

    def _spread(
        self,
        engines: Sequence[EngineState],
        place: int,
        cached: Sequence[int],
        prefix: _Prefix,
    ) -> int:
        """Return where a request goes that would exploit an engine; have its prefix copied."""
        if len(engines) == 1 or self._num_sent < self.min_requests * len(engines):
            return place
        loads_ms = [self._loads_ms.get(engine.index, 0.0) for engine in engines]
        least = loads_ms.index(min(loads_ms))
        if self._waits_longer(prefix) and cached[least] < cached[place]:
            self._copies[prefix[0]] = engines[least].index
            del self._first_ms[prefix]
        most_ms = loads_ms[place]
        if most_ms == max(loads_ms) and most_ms > self.balance_ratio * loads_ms[least]:
            return least
        return place

    def _waits_longer(self, prefix: _Prefix) -> bool:
        """Whether first tokens take twice as long in the later half of the window."""
        middle_ns = self._now_ns - self._window_ns / 2
        told = self._first_ms.get(prefix, ())
        later = [first_ms for time_ns, first_ms in told if time_ns >= middle_ns]
        sooner = [first_ms for time_ns, first_ms in told if time_ns < middle_ns]
        if not later or not sooner:
            return False
        return sum(later) / len(later) >= 2 * sum(sooner) / len(sooner)

    def _send(
        self, request: Request, engine: EngineState, cached: int, prefix: _Prefix | None
    ) -> None:
        """Note a request, and what it adds to the load."""
        index, ids = engine.index, request.prefix_hash_ids
        predicted = request.predicted_tokens
        output_tokens = request.max_tokens if predicted is None else predicted
        load_ms = _prompt_ms(request, engine, cached)
        step_ms = decode_ms(engine, request.prompt_tokens)
        load_ms += output_tokens * step_ms / (engine.num_running + 1)
        if prefix is not None:
            prefix = (prefix[0], index)
            new_tokens = max(request.prompt_tokens - cached * engine.block_size, 1)
            told = self._first_ms.setdefault(prefix, deque())
            told.append((self._now_ns, first_token_ms(engine, new_tokens)))
            if self._copies.get(prefix[0]) == index:  # it holds the prefix from now on
                del self._copies[prefix[0]]
        self._window.append(_Sent(self._now_ns, index, load_ms, ids, prefix))
        self._loads_ms[index] = self._loads_ms.get(index, 0.0) + load_ms
        self._counts[index] += 1
        self._blocks.setdefault(index, Counter()).update(ids)
        self._tree.add(index, ids, engine.num_blocks)
        self._num_sent += 1

    def _expire(self) -> None:
        """Forget the requests that were sent before the window."""
        start_ns = self._now_ns - self._window_ns
        window = self._window
        while window and window[0].time_ns < start_ns:
            sent = window.popleft()
            self._counts[sent.engine] -= 1
            # Of an empty window nothing is left, whatever rounding has added up.
            is_empty = not self._counts[sent.engine]
            self._loads_ms[sent.engine] -= self._loads_ms[sent.engine] if is_empty else sent.load_ms
            blocks = self._blocks[sent.engine]
            for name in sent.ids:
                if blocks[name] > 1:
                    blocks[name] -= 1
                else:
                    del blocks[name]
            told = None if sent.prefix is None else self._first_ms.get(sent.prefix)
            if told is not None:
                while told and told[0][0] < start_ns:
                    told.popleft()
                if not told:
                    del self._first_ms[sent.prefix]  # type: ignore[arg-type]

    @property
    def _window_ns(self) -> int:
        return round(self.window_s * 1e9)


def _prompt_ms(request: Request, engine: EngineState, cached: int) -> float:
    """Estimate what is missing of a prompt of which an engine holds so many blocks."""
    cached_tokens = min(cached * engine.block_size, request.prompt_tokens - 1)
    return prefill_ms(engine, request.prompt_tokens - cached_tokens, cached_tokens)
