"""The engine that has most of the prompt in its cache, as SGLang's router does it."""

from collections.abc import Sequence
from typing import Literal

from schedlab.policies.routers.prefix_tree import PrefixTree
from schedlab.policies.routers.registry import register
from schedlab.policies.routers.router import Router
from schedlab.sim.drive.engine_state import EngineState
from schedlab.sim.drive.offer import cached_tokens, column
from schedlab.sim.request import Request


@register("prefix_aware")
class PrefixAware(Router):
    """Send a request where its prefix is, as long as the engines are balanced.

    They are not if the most and the least loaded differ by more than `balance_abs` requests and by
    more than `balance_rel` times: then the least loaded takes it. Else, if more than
    `cache_threshold` of the prompt was sent to an engine before, the one that was sent the most of
    it takes it, of several the one that was sent it first, however much it has to do; else the
    engine that was sent the fewest distinct blocks so far.

    The router knows what it sent where (a tree of prefixes, of which each engine forgets the least
    recently used), not what the engines evicted. With `precise`, which is ours, it asks their
    caches instead, and the least loaded of several that hold as much takes it.

    Defaults are those of v0.4. Later ones are ``cache_threshold: 0.3, balance_abs: 64, balance_rel:
    1.5``, and the later gateway has ``low_match: least_loaded``. Of several engines the source
    takes the first in a hash table, in effect one that it sticks to; it counts characters, and
    forgets once a minute what exceeds the size of its tree.

    Parameters
    ----------
    cache_threshold : float
        Share of the prompt, in [0, 1].
    balance_abs : int
        Difference of requests in flight.
    balance_rel : float
        Ratio of requests in flight.
    precise : bool
        Whether the true content of the caches is known, as with events of the engines.
    max_tree_tokens : int or None
        Most tokens that the tree remembers of an engine, 2^24 characters at four a token; None =
        what its KV memory holds.
    low_match : {"smallest_tree", "least_loaded"}
        Who takes a prompt of which little was sent anywhere: who was sent the fewest distinct
        blocks, or who has the fewest requests in flight.
    """

    source = (
        "SGLang router, cache_aware policy (v0.4, December 2024): rust/src/router.rs and tree.rs; "
        "low_match least_loaded: sgl-model-gateway/src/policies/cache_aware.rs"
    )
    needs_prefixes = True

    def __init__(
        self,
        cache_threshold: float = 0.5,
        balance_abs: int = 32,
        balance_rel: float = 1.0001,
        precise: bool = False,
        max_tree_tokens: int | None = 2**22,
        low_match: Literal["smallest_tree", "least_loaded"] = "smallest_tree",
    ) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be in [0, 1], got {cache_threshold!r}")
        if not (balance_abs >= 0 and balance_rel >= 1):
            raise ValueError(
                f"balance_abs must be >= 0 and balance_rel >= 1, got {balance_abs!r} and "
                f"{balance_rel!r}"
            )
        if max_tree_tokens is not None and max_tree_tokens < 1:
            raise ValueError(f"max_tree_tokens must be >= 1, got {max_tree_tokens!r}")
        if low_match not in ("smallest_tree", "least_loaded"):
            raise ValueError(f"low_match must be smallest_tree or least_loaded, got {low_match!r}")
        self.cache_threshold = cache_threshold
        self.balance_abs = balance_abs
        self.balance_rel = balance_rel
        self.precise = precise
        self.max_tree_tokens = max_tree_tokens
        self.low_match = low_match
        self.looks_at_caches = precise
        self._tree = PrefixTree()

    def route(self, request: Request, engines: Sequence[EngineState]) -> int:
        """Choose by balance, then by prefix, then by the size of what is known."""
        loads = column(engines, "num_in_flight")
        least, most = min(loads), max(loads)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            place = loads.index(least)
        else:
            place = self._by_prefix(request, engines, loads)
        if not self.precise:
            chosen = engines[place]
            max_blocks = chosen.num_blocks
            if self.max_tree_tokens is not None:
                max_blocks = max(self.max_tree_tokens // chosen.block_size, 1)
            self._tree.add(chosen.index, request.prefix_hash_ids, max_blocks)
        return place

    def engine_is_gone(self, index: int) -> None:
        """Forget what it was sent."""
        self._tree.forget(index)

    def _by_prefix(
        self, request: Request, engines: Sequence[EngineState], loads: Sequence[int]
    ) -> int:
        names = column(engines, "index")
        if self.precise:
            tokens = cached_tokens(engines, request)
        else:
            tokens = self._tree.tokens(
                request.prefix_hash_ids, names, column(engines, "block_size")
            )
        longest = max(tokens)
        if longest > self.cache_threshold * request.prompt_tokens:
            places = _places(tokens, longest)
            if self.precise or len(places) == 1:
                return min(places, key=loads.__getitem__)
            first = self._tree.first_sent(request.prefix_hash_ids, [names[p] for p in places])
            return names.index(first)
        if self.low_match == "least_loaded":
            return loads.index(min(loads))
        sizes = column(engines, "used_blocks") if self.precise else self._tree.sizes(names)
        return min(_places(sizes, min(sizes)), key=loads.__getitem__)


def _places(values: Sequence[int], wanted: int) -> list[int]:
    return [place for place, value in enumerate(values) if value == wanted]
