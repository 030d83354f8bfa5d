"""How much of the prompts a prefix cache could reuse."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.trace import Int64, Trace

LRU_BLOCKS = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)


def describe_prefixes(trace: Trace) -> dict[str, Any]:
    """Return how often prompt blocks come again, and the hit rates of prefix caches.

    A cache serves a request from its first block on, up to the first block it does not hold; the
    infinite cache holds every block of all earlier requests.

    Parameters
    ----------
    trace : Trace
        With prefix hashes.

    Returns
    -------
    dict
        ``block_tokens``; ``block_references``; ``distinct_blocks``; for the infinite cache
        ``block_hit_rate`` (hit blocks over references), ``token_hit_rate`` (prompt tokens in hit
        blocks over all prompt tokens), ``requests_with_1_hit``, ``requests_with_2_hits``,
        ``requests_all_hit`` (shares of requests) and ``mean_hit_blocks``; ``seen_before_share``
        (references to blocks seen before, prefix or not); ``used_once_share`` (of distinct
        blocks); ``max_uses``; ``reuse_gap_p50_s`` and ``_p90_s`` between successive uses of a
        block (`None` without times or reuse); ``lru`` (cache size in blocks -> hit rate).

    Raises
    ------
    TraceError
        If the trace has no prefix hashes, or all its rows are empty.
    """
    prefix = trace.prefix
    if prefix is None or len(prefix.ids) == 0:
        raise TraceError(f"{trace.report.path or 'the trace'}: no prefix hashes")
    num_blocks = np.diff(prefix.offsets)
    row = np.repeat(np.arange(len(prefix)), num_blocks)
    _, first, block, uses = np.unique(
        prefix.ids, return_index=True, return_inverse=True, return_counts=True
    )
    seen = row[first[block]] < row
    hits = _leading(seen, prefix)
    hit_tokens = np.minimum(hits * prefix.block_tokens, trace.prompt_tokens)
    gaps_s = _reuse_gaps_s(trace, block, row)
    return {
        "block_tokens": prefix.block_tokens,
        "block_references": len(prefix.ids),
        "distinct_blocks": len(uses),
        "block_hit_rate": float(hits.sum() / len(prefix.ids)),
        "token_hit_rate": float(hit_tokens.sum() / trace.prompt_tokens.sum()),
        "seen_before_share": float(seen.mean()),
        "requests_with_1_hit": float((hits >= 1).mean()),
        "requests_with_2_hits": float((hits >= 2).mean()),
        "requests_all_hit": float(((hits == num_blocks) & (num_blocks > 0)).mean()),
        "mean_hit_blocks": float(hits.mean()),
        "used_once_share": float((uses == 1).mean()),
        "max_uses": int(uses.max()),
        "reuse_gap_p50_s": float(np.percentile(gaps_s, 50)) if len(gaps_s) else None,
        "reuse_gap_p90_s": float(np.percentile(gaps_s, 90)) if len(gaps_s) else None,
        "lru": {size: lru_hit_rate(prefix, size) for size in LRU_BLOCKS},
    }


def lru_hit_rate(prefix: PrefixHashes, num_blocks: int) -> float:
    """Return the share of block references that an LRU cache of `num_blocks` blocks serves.

    A request is served up to its first missing block; then all its blocks count as used, last to
    first, so that the end of a prompt is evicted before its beginning (as in vLLM).
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prefix.rows():
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > num_blocks:
                cache.popitem(last=False)
    return hits / len(prefix.ids)


def _leading(seen: npt.NDArray[np.bool_], prefix: PrefixHashes) -> Int64:
    """Return for each row how many of its blocks are seen before its first unseen one."""
    num_blocks = np.diff(prefix.offsets)
    within = np.arange(len(seen)) - np.repeat(prefix.offsets[:-1], num_blocks)
    leading = num_blocks.copy()
    misses = np.flatnonzero(~seen)
    rows = np.repeat(np.arange(len(num_blocks)), num_blocks)[misses]
    np.minimum.at(leading, rows, within[misses])
    return leading


def _reuse_gaps_s(trace: Trace, block: Int64, row: Int64) -> npt.NDArray[np.float64]:
    """Return the seconds between successive uses of the same block."""
    if trace.arrival_ns is None:
        return np.zeros(0)
    order = np.argsort(block, kind="stable")
    times = trace.arrival_ns[row[order]]
    same = np.diff(block[order]) == 0
    gaps_s: npt.NDArray[np.float64] = np.diff(times)[same] / 1e9
    return gaps_s
