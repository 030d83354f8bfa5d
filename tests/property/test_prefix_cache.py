"""A prefix cache of runs does what one of single blocks does, block by block."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.kv.prompt import STRETCH_BLOCKS, Prompt
from schedlab.sim.request import RequestState
from tests.laws import arrival

EDGE = STRETCH_BLOCKS


class Block:
    """One block: its name, who alone may find it again, how many hold it."""

    def __init__(self, key=None, owner=None, users=0):
        self.key, self.owner, self.users = key, owner, users


class BlockByBlock:
    """Free blocks in a list, oldest first; blocks by name in the order in which they were named."""

    def __init__(self, num_blocks):
        self.queue = [Block() for _ in range(num_blocks)]
        self.named = {}
        self.held = {}
        self.left_behind = {}

    def lookup(self, state):
        most = state.num_tokens - 1
        ids = state.request.prefix_hash_ids
        found = []
        for key in ids[:most]:
            if not self.named.get(key):
                break
            found.append(self.named[key][0])
        own = self.left_behind.get(state.id, []) if len(found) == len(ids) else []
        return found, own[: most - len(ids)]

    def allocate(self, state, num_tokens):
        found, own = self.lookup(state)
        held = self.held.setdefault(state.id, [])
        for block in (*found, *own):
            if block in self.queue:
                self.queue.remove(block)
            block.users += 1
            held.append(block)
        self.left_behind.pop(state.id, None)
        for _ in range(num_tokens - len(found) - len(own)):
            self.evict(self.queue.pop(0))
            held.append(Block(users=1))
        for key, block in zip(state.request.prefix_hash_ids, held, strict=False):
            if block.key is None:
                block.key = key
                self.named.setdefault(key, []).append(block)

    def evict(self, block):
        if block.key is not None:
            self.named[block.key].remove(block)
        own = self.left_behind.get(block.owner, [])
        if block in own:
            own.remove(block)

    def release(self, state, comes_back):
        num_prompt = len(state.request.prefix_hash_ids)
        held = self.held.pop(state.id)
        if comes_back:
            own = self.left_behind[state.id] = held[num_prompt:]
            for block in own:
                block.owner = state.id
        self.queue += reversed(held[num_prompt:])
        for block in reversed(held[:num_prompt]):
            block.users -= 1
            if not block.users:
                self.queue.append(block)


@st.composite
def sequences(draw):
    """Draw names of a prompt: the beginning of a document, cut anywhere, and what is its own."""
    document = draw(st.integers(0, 2)) * 1000
    edges = st.sampled_from([0, 1, EDGE - 1, EDGE, EDGE + 1, 2 * EDGE, 3 * EDGE])
    shared = draw(st.one_of(edges, st.integers(0, 3 * EDGE)))
    own = draw(st.integers(0, 40))
    other = draw(st.integers(3, 40)) * 1000
    return (*range(document, document + shared), *range(other + shared, other + shared + own))


@st.composite
def acts(draw):
    return draw(
        st.lists(
            st.tuples(st.integers(0, 3), sequences(), st.integers(1, 30), st.integers(0, 9)),
            max_size=40,
        )
    )


def state_of(request_id, ids, generated=0):
    request = arrival(request_id, prompt=max(len(ids), 1), prefix_hash_ids=ids).request
    state = RequestState(request)
    state._generated = generated
    return state


def require_same(acts, num_blocks):
    """Let both do the same, and compare them after each act."""
    runs, blocks = PrefixCachingKVCache(num_blocks, 1), BlockByBlock(num_blocks)
    resident, waiting = [], []
    for i, (what, ids, generated, which) in enumerate(acts):
        if what < 2 and resident:
            state = resident.pop(which % len(resident))
            runs.begin()
            runs.release(state, comes_back=what == 0)
            blocks.release(state, comes_back=what == 0)
            state._computed = 0
            if what == 0:
                waiting.append(state)
            continue
        come_back = what == 2 and waiting
        state = waiting.pop(which % len(waiting)) if come_back else state_of(i, ids, generated)
        runs.begin()
        hit = runs.lookup(state)
        found, own = blocks.lookup(state)
        assert hit.tokens == len(found) + len(own)
        assert hit.num_own == len(own)
        assert hit.blocks_in_use == sum(block.users > 0 for block in found)
        wanted = state.num_tokens
        if not runs.allocate(state, wanted - hit.tokens, hit=hit):
            assert wanted - hit.blocks_in_use > len(blocks.queue)
            waiting.append(state)
            continue
        if which == 0:  # it is planned otherwise
            runs.rollback()
            waiting.append(state)
        else:
            blocks.allocate(state, wanted)
            state._computed = wanted
            resident.append(state)
        runs.check(resident)
        assert runs.free_blocks == len(blocks.queue)
        named = Counter(key for keys in blocks.named.items() for key in [keys[0]] * len(keys[1]))
        of_runs = Counter(
            key
            for kept in runs._index._runs.values()
            for run in kept
            for key in range(run.key, run.key + run.count)
        )
        assert of_runs == named


@pytest.mark.parametrize("seed", range(20))
def test_request_fits_without_others_just_where_it_does_when_they_are_gone(seed):
    draw, cache = Random(seed), PrefixCachingKVCache(40, 1)
    answers, resident = Counter(), []
    for i in range(200):
        document, shared, own = 100 * draw.randrange(2), draw.randrange(12), draw.randrange(5)
        other = 1_000 * draw.randrange(3, 6) + shared
        ids = (*range(document, document + shared), *range(other, other + own))
        state = state_of(i, ids, draw.randrange(1, 6))
        cache.begin()
        victims = draw.sample(resident, draw.randint(0, len(resident)))
        keep = draw.randrange(3)
        fits = cache.fits_without(victims, state, keep)
        mark = cache.mark()
        for victim in victims:
            cache.release(victim, comes_back=True)
        hit = cache.lookup(state)
        assert cache.allocate(state, state.num_tokens - hit.tokens, keep, hit) is fits
        answers[fits, bool(victims)] += 1
        cache.restore(mark)
        cache.check(resident)
        hit = cache.lookup(state)
        if cache.allocate(state, state.num_tokens - hit.tokens, hit=hit):
            state._computed = state.num_tokens
            resident.append(state)
        elif resident:
            gone = resident.pop(draw.randrange(len(resident)))
            cache.release(gone)
            gone._computed = 0
    assert min(answers[fits, False] for fits in (True, False)) > 0
    assert min(answers[fits, True] for fits in (True, False)) > 0


@given(acts=acts(), num_blocks=st.integers(100, 300))
def test_cache_of_runs_does_what_a_cache_of_blocks_does(acts, num_blocks):
    require_same(acts, num_blocks)


@pytest.mark.parametrize("seed", range(12))
def test_cache_of_runs_that_is_short_of_blocks_does_what_a_cache_of_blocks_does(seed):
    # Short documents that are cut anywhere, of which a third is planned otherwise.
    draw, acts = Random(seed), []
    for _ in range(60):
        document, shared, own = 100 * draw.randrange(2), draw.randrange(12), draw.randrange(5)
        other = 1_000 * draw.randrange(3, 6) + shared
        ids = (*range(document, document + shared), *range(other, other + own))
        acts.append((draw.randrange(4), ids, draw.randrange(1, 6), draw.randrange(3)))
    require_same(acts, draw.randrange(20, 50))


@given(st.lists(st.one_of(sequences(), st.lists(st.integers(-99, 99)).map(tuple)), max_size=3))
def test_stretches_spell_the_names_of_a_prompt(parts):
    ids = tuple(key for part in parts for key in part)
    prompt = Prompt(ids)
    spelled = [key + j for key, count in prompt.stretches for j in range(count)]
    assert spelled == list(ids)
    assert all(
        key // EDGE == (key + count - 1) // EDGE and count > 0 for key, count in prompt.stretches
    )
    end = max(len(ids) - 3, 0)
    for first in range(0, len(ids), 7):
        part = prompt.part(first, end)
        assert [k + j for k, count in part for j in range(count)] == list(ids[first:end])
