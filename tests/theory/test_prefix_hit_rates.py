"""The KV manager's prefix cache against published hit rates of the Mooncake traces.

The rates were counted independently of this program, over all blocks of a prompt (the partial last
one included), request after request.
"""

import pytest

from schedlab import traces
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import RequestState
from tests.data_folder import data_folder
from tests.laws import arrival

INFINITE = 400_000
RATES = {
    "conversation": {INFINITE: 0.3664, 1_000: 0.04453, 10_000: 0.2116, 50_000: 0.3546},
    "synthetic": {INFINITE: 0.6396, 1_000: 0.08412, 3_000: 0.1906, 10_000: 0.4239, 30_000: 0.6242},
}


def hit_rate(rows, num_blocks):
    """Serve prompts one after the other; blocks of one token make every block a full one."""
    kv = PrefixCachingKVCache(num_blocks, 1)
    hits = 0
    for i, ids in enumerate(rows):
        request = arrival(i, prompt=len(ids) + 1, prefix_hash_ids=ids).request
        state = RequestState(request)
        hit = kv.lookup(state)
        assert kv.allocate(state, len(ids) - hit.tokens, hit=hit)
        state._computed = len(ids)
        kv.release(state)
        kv.begin()
        hits += hit.tokens
    kv.check([])
    return hits / sum(len(ids) for ids in rows)


@pytest.fixture(scope="module", params=sorted(RATES))
def trace(request):
    path = data_folder() / "traces" / "mooncake" / f"{request.param}_trace.jsonl"
    return request.param, traces.read(path).prefix.rows()


@pytest.mark.slow
def test_prefix_cache_of_any_size_hits_what_was_published(trace):
    name, rows = trace
    rates = {size: hit_rate(rows, size) for size in RATES[name]}
    assert {size: float(f"{rate:.4g}") for size, rate in rates.items()} == RATES[name]
