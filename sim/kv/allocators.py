"""The allocators by the names that a configuration gives them."""

from collections.abc import Callable

from schedlab.sim.config import EngineConfig
from schedlab.sim.kv.contiguous import ContiguousKVCache, Reservation
from schedlab.sim.kv.ledger import KVCacheManager
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import Request

_RESERVATIONS: dict[str, Reservation] = {
    "contiguous_max": "max",
    "contiguous_declared": "declared",
    "contiguous_pow2": "pow2",
    "contiguous_exact": "exact",
}


def make_kv_cache(config: EngineConfig, output_tokens: Callable[[Request], int]) -> KVCacheManager:
    """Return the allocator that a configuration names.

    Parameters
    ----------
    config : EngineConfig
        Limits and `kv_allocator`.
    output_tokens : callable
        How many tokens a request will generate, for reservations and for accounting.
    """
    blocks, size = config.num_blocks, config.block_size
    if config.enable_prefix_caching:
        return PrefixCachingKVCache(blocks, size, config.free_uncached_first)
    if config.kv_allocator == "paged":
        return PagedKVCache(blocks, size)
    reserve = _RESERVATIONS[config.kv_allocator]
    return ContiguousKVCache(blocks, size, reserve, config.max_model_len, output_tokens)
