"""Longest prefix match: who has most in the prefix cache comes first."""

from collections.abc import Iterable

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("lpm")
class LongestPrefixMatch(ContinuousBatching):
    """Admit the request first of which the prefix cache holds the most tokens.

    Optimises what the cache saves: requests that begin alike are served one after the other, before
    what they share is evicted. Needs ``engine.enable_prefix_caching``, without which it is `fcfs`,
    and knows nothing but the cache and the prompts. Of those who wait with next to nothing cached
    and a beginning in common the first goes on, and the others come last: when they have their
    turn, it is there. Beyond `max_queue` waiting requests it is first come, first served, as
    comparing them all would take too long. Requests that share nothing with others starve while
    such come that do and the queue stays below that; where memory holds all prefixes there is
    nothing to gain, and nothing in the hits of requests that are far apart.

    It is SGLang's order of the queue in the loop of `ContinuousBatching`. Left out: SGLang's
    batches (prompts before decodes), its estimate of memory to come, and whom it retracts. What is
    counted is in whole blocks, and what lower tiers hold is not. Equals stay in the order of
    arrival; there they stay as the queue was last sorted, and first come, first served in a long
    queue means those who have come since.

    A decision looks the waiting requests up and sorts them, at most `max_queue` of them. Skip-ahead
    is honest because steps of decodes alone put nothing into the cache, and a block that is lost
    ends the promise of a plan that looked at it.

    Parameters
    ----------
    max_queue : int
        Most waiting requests that are put in order, >= 0.
    check_tokens : int
        Cached tokens up to which a request is compared with others who wait; -1 = nobody is.
    deprioritize_tokens : int
        Prompt tokens in common with one before it from which a request comes last, >= 1.
    """

    source = (
        "SGLang, python/sglang/srt/managers/schedule_policy.py, schedule_policy lpm: Zheng et al. "
        "2024 (arXiv:2312.07104), section 3"
    )
    starves = True
    needs_prefixes = True

    def __init__(
        self, max_queue: int = 128, check_tokens: int = 32, deprioritize_tokens: int = 32
    ) -> None:
        if max_queue < 0:
            raise ValueError(f"max_queue must be >= 0, got {max_queue!r}")
        if check_tokens < -1:
            raise ValueError(f"check_tokens must be >= -1, got {check_tokens!r}")
        if deprioritize_tokens < 1:
            raise ValueError(f"deprioritize_tokens must be >= 1, got {deprioritize_tokens!r}")
        self.max_queue = max_queue
        self.check_tokens = check_tokens
        self.deprioritize_tokens = deprioritize_tokens

    def order(self, view: EngineView) -> Iterable[RequestState]:
        """Sort by cached tokens, those last who had better wait for another."""
        waiting = view.waiting
        if not view.config.enable_prefix_caching or not 1 < len(waiting) <= self.max_queue:
            return waiting
        # Names are chained: who has the same last one of so many blocks has them all in common.
        last = -(-self.deprioritize_tokens // view.config.block_size) - 1
        begun: set[int] = set()
        places: dict[RequestState, int] = {}
        for state in waiting:
            tokens = view.cached_tokens(state)
            places[state] = -tokens
            names = state.request.prefix_hash_ids
            if tokens <= self.check_tokens and last < len(names):
                if names[last] in begun:
                    places[state] = 1
                begun.add(names[last])
        return sorted(places, key=places.__getitem__)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise what the loop does: what is cached changes with what ends its promises."""
        return FOREVER, FOREVER
