"""A walk through the tree of cached prefixes, where most requests wait first."""

from collections import Counter
from collections.abc import Iterable

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("dfs_weight")
class DepthFirstByWeight(ContinuousBatching):
    """Admit requests in the order of a depth-first walk through what the prefix cache holds.

    Optimises what the cache saves: all who wait for one branch of the tree of prefixes come one
    after the other, before what they share is evicted. Of several branches that one is first below
    which most requests wait, and who needs a branch to its end comes before who leaves it earlier;
    last come those of whom nothing is cached. Equals are in the order of arrival. Needs
    ``engine.enable_prefix_caching``, without which it is `fcfs`, and knows nothing but the cache
    and the prompts. Requests of rare prefixes starve while such come that many share; where memory
    holds all prefixes there is nothing to gain.

    It is SGLang's order of the queue in the loop of `ContinuousBatching`; what `lpm` says is left
    out is left out here, too. What is counted is in whole blocks.

    A decision looks all waiting requests up and compares them block by block. Skip-ahead is honest
    because steps of decodes alone put nothing into the cache, and a block that is lost ends the
    promise of a plan that looked at it.
    """

    source = (
        "SGLang, python/sglang/srt/managers/schedule_policy.py, schedule_policy dfs-weight: Zheng "
        "et al. 2024 (arXiv:2312.07104), section 3, Algorithm 1"
    )
    starves = True
    needs_prefixes = True

    def order(self, view: EngineView) -> Iterable[RequestState]:
        """Walk through the tree of what is cached of those who wait."""
        waiting = view.waiting
        if not view.config.enable_prefix_caching or len(waiting) < 2:
            return waiting
        size = view.config.block_size
        # Names are chained: one stands for a block and all in front of it, so for a node.
        paths: dict[RequestState, list[int]] = {}
        ends_alone: set[RequestState] = set()
        weights: Counter[int] = Counter()
        first: dict[int, int] = {}
        for place, state in enumerate(waiting):
            num_blocks = view.cached_tokens(state) // size
            path = paths[state] = list(state.request.prefix_hash_ids[:num_blocks])
            if num_blocks > len(path):  # of its own answer, which nobody else has
                ends_alone.add(state)
            weights.update(path)
            for name in path:
                first.setdefault(name, place)
        keys: dict[RequestState, list[tuple[int, int]]] = {}
        for place, state in enumerate(waiting):
            key = [(-weights[name], first[name]) for name in paths[state]]
            if state in ends_alone:
                key.append((-1, place))
            key.append((1, place))  # behind all who go on from there
            keys[state] = key
        return sorted(keys, key=keys.__getitem__)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise what the loop does: what is cached changes with what ends its promises."""
        return FOREVER, FOREVER
