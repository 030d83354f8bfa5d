import random

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.track import SpeculatingState, new_state
from schedlab.sim.kv.free_queue import Run
from schedlab.sim.kv.ledger import NO_HIT
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.kv.prefix_index import PrefixIndex
from schedlab.sim.kv.prompt import STRETCH_BLOCKS, Prompt
from schedlab.sim.request import RequestState
from tests import laws
from tests.laws import arrival

BLOCK = 4


def request(request_id, prompt, ids):
    return RequestState(arrival(request_id, prompt=prompt, prefix_hash_ids=ids).request)


def admit(kv, state, num_tokens=None):
    """Compute a waiting request's sequence (or some of it) as the engine would."""
    hit = kv.lookup(state)
    wanted = (num_tokens or state.num_tokens) - hit.tokens
    assert kv.allocate(state, wanted, hit=hit)
    state._computed = hit.tokens + wanted
    return hit


def finish(kv, state, comes_back=False):
    kv.release(state, comes_back)
    state._computed = 0


def test_cache_knows_the_names_of_its_full_blocks_and_no_others():
    kv = PrefixCachingKVCache(8, 4)
    state = request(0, 14, (3, 4, 5))
    admit(kv, state)
    assert [name for name in range(9) if kv.knows(name)] == [3, 4, 5]
    finish(kv, state)
    assert [name for name in range(9) if kv.knows(name)] == [3, 4, 5]
    admit(kv, request(1, 4 * 7, tuple(range(20, 27))))  # of all eight blocks one is left
    kv.blocks_before_eviction()  # lets go of what was only counted
    assert [name for name in range(30) if kv.knows(name)] == [3, *range(20, 27)]


def test_block_that_is_lost_or_held_twice_is_found_by_the_check():
    kv = PrefixCachingKVCache(8, 4)
    state = request(0, 14, (3, 4))
    admit(kv, state)
    kv.check([state])
    for other in (7, 9):
        kv.num_blocks = other
        with pytest.raises(AssertionError, match=rf"8 blocks free or held of {other}"):
            kv.check([state])
    kv.num_blocks = 8
    kv.shared_tokens += 4
    with pytest.raises(AssertionError, match="4 shared tokens kept, 0"):
        kv.check([state])


def test_second_request_shares_the_full_blocks_of_an_equal_prefix():
    kv = PrefixCachingKVCache(10, BLOCK)
    first, second = request(0, 10, (1, 2)), request(1, 11, (1, 3))
    admit(kv, first)
    assert kv.free_blocks == 7
    hit = admit(kv, second)
    assert (hit.tokens, hit.blocks_in_use) == (4, 1)
    assert kv.free_blocks == 5, "three blocks, one of them shared"
    assert kv.shared_tokens == 4
    kv.check([first, second])
    finish(kv, first)
    assert kv.free_blocks == 7, "the shared block is still in use"
    assert kv.shared_tokens == 0
    kv.check([second])


def test_prompt_that_is_all_cached_still_computes_its_last_block():
    kv = PrefixCachingKVCache(10, BLOCK)
    first = request(0, 8, (1, 2))
    admit(kv, first)
    assert kv.lookup(request(1, 8, (1, 2))).tokens == 4
    assert kv.lookup(request(1, 9, (1, 2))).tokens == 8


def test_end_of_a_sequence_is_handed_out_before_its_beginning():
    kv = PrefixCachingKVCache(4, BLOCK)
    first = request(0, 13, (1, 2, 3))
    admit(kv, first)
    finish(kv, first)  # queue: the partial block, 3, 2, 1
    admit(kv, request(1, 8, (8, 9)))  # takes two blocks
    assert kv.lookup(request(2, 13, (1, 2, 3))).tokens == 8


def test_blocks_used_last_are_evicted_last():
    kv = PrefixCachingKVCache(3, BLOCK)
    for i, key in enumerate((1, 2, 1)):
        state = request(i, 5, (key,))
        admit(kv, state, 4)
        finish(kv, state)
    admit(kv, request(3, 8, (7, 8)))  # takes the never used block and that of key 2
    assert kv.lookup(request(4, 5, (1,))).tokens == 4
    assert kv.lookup(request(4, 5, (2,))) is NO_HIT


def test_preempted_request_finds_its_generated_tokens_again():
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 6, (1,))
    state._generated = 9  # 15 tokens, the last one not computed: 14 in the cache, 3 full blocks
    admit(kv, state, 14)
    finish(kv, state, comes_back=True)
    assert kv.lookup(state).tokens == 12
    assert kv.lookup(request(1, 15, (1,))).tokens == 4, "nobody else can ask for them"
    hit = admit(kv, state)
    assert (hit.tokens, hit.num_own) == (12, 2)
    kv.check([state])


def test_own_blocks_are_lost_from_their_end_when_others_take_them():
    kv = PrefixCachingKVCache(5, BLOCK)
    state = request(0, 2, ())
    state._generated = 17
    admit(kv, state, 18)  # 4 full blocks and a partial one
    finish(kv, state, comes_back=True)
    other = request(1, 12, ())
    admit(kv, other)  # takes the partial block and two full ones
    assert kv.lookup(state).tokens == 8
    assert kv.num_evictions == 1, "one run of blocks was cut short, once"


def test_equal_prompts_computed_side_by_side_fill_two_blocks_of_one_name():
    kv = PrefixCachingKVCache(10, BLOCK)
    first, second = request(0, 4, (1,)), request(1, 4, (1,))
    admit(kv, first)
    assert admit(kv, second) is NO_HIT, "its only block holds its last token"
    kv.check([first, second])
    finish(kv, first)
    finish(kv, second)
    admit(kv, request(2, 9 * BLOCK, ()))
    assert kv.lookup(request(3, 5, (1,))).tokens == 4, "one of the two is left"


def test_prefill_in_chunks_names_blocks_as_they_fill():
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 12, (1, 2, 3))
    assert kv.allocate(state, 6)
    state._computed = 6
    assert kv.lookup(request(1, 12, (1, 2, 3))).tokens == 4
    assert kv.allocate(state, 6)
    assert kv.lookup(request(1, 13, (1, 2, 3))).tokens == 12


def test_rollback_restores_order_contents_and_counts():
    rng = random.Random(1)
    kv = PrefixCachingKVCache(12, 1)
    states = []

    def snapshot():
        queue, run = [], kv._queue._end.behind
        while run is not kv._queue._end:
            queue.append((id(run), run.key, run.owner, run.count, set(run.holders)))
            run = run.behind
        named = {key: [id(b) for b in blocks] for key, blocks in kv._index._runs.items()}
        held = {i: tuple(id(b) for b in blocks) for i, blocks in kv._held.items()}
        left = {i: id(b) for i, b in kv._left_behind.items()}
        return queue, named, held, left, kv.free_blocks, kv.shared_tokens, kv._queue.num_blocks

    def act(next_id, tentative=True):
        if states and rng.random() < 0.5:
            state = states.pop(rng.randrange(len(states)))
            finish(kv, state, comes_back=tentative or rng.random() < 0.5)
            return
        length = rng.randint(1, 4)
        state = request(next_id, length + 1, tuple(rng.choice((10, 20)) + j for j in range(length)))
        hit = kv.lookup(state)
        if kv.allocate(state, length + 1 - hit.tokens, hit=hit):
            state._computed = length + 1
            states.append(state)

    for i in range(300):
        act(i, tentative=False)
        kv.check(states)
        kv.begin()
        before, kept = snapshot(), [(s, s._computed) for s in states]
        for j in range(rng.randint(0, 4)):
            act(1000 + 10 * i + j)
        kv.rollback()
        states[:] = [s for s, _ in kept]
        for state, computed in kept:
            state._computed = computed
        assert snapshot() == before
        kv.check(states)


def test_blocks_before_eviction_counts_up_to_the_first_cached_one():
    kv = PrefixCachingKVCache(6, BLOCK)
    state = request(0, 8, (1, 2))
    admit(kv, state)
    assert kv.blocks_before_eviction() == 4
    finish(kv, state)  # behind the four unused ones
    assert kv.blocks_before_eviction() == 4
    kv.free_blocks -= 4  # decodes take them
    assert kv.blocks_before_eviction() == 0


def test_request_that_does_not_fit_changes_nothing():
    kv = PrefixCachingKVCache(3, BLOCK)
    first = request(0, 8, (1, 2))
    admit(kv, first)
    second = request(1, 16, (1, 2))
    hit = kv.lookup(second)
    assert not kv.allocate(second, 8, hit=hit)
    assert kv.free_blocks == 1
    kv.check([first])


@pytest.mark.parametrize(
    ("who", "names", "most_blocks"),
    [
        ((), (9,), 3),  # what is free
        ((1,), (9,), 5),  # the shared beginning stays
        ((1, 2), (9,), 7),  # it stays with the third
        ((0, 1, 2), (9,), 12),  # counted once
        ((1, 2), (1, 2, 3), 10),  # three are with the third, and need not be free
        ((0, 1, 2), (1, 2, 3), 12),  # they have to be found room for like all others
    ],
)
def test_room_that_victims_make_is_of_blocks_that_nobody_else_holds(who, names, most_blocks):
    kv = PrefixCachingKVCache(12, BLOCK)
    holders = [request(i, 5 * BLOCK, (1, 2, 3, 10 * i + 10, 10 * i + 11)) for i in range(3)]
    for state in holders:
        admit(kv, state)
    victims = [holders[i] for i in who]
    fit = [
        kv.fits_without(victims, request(9, num_blocks * BLOCK, names), 0)
        for num_blocks in range(1, 14)
    ]
    assert fit == [num_blocks <= most_blocks for num_blocks in range(1, 14)]
    asked = request(8, most_blocks * BLOCK, names)
    assert not kv.fits_without(victims, asked, 1)


def test_prefix_caching_with_contiguous_memory_is_refused():

    with pytest.raises(ValueError, match="paged memory"):
        EngineConfig(10, 16, kv_allocator="contiguous_max", enable_prefix_caching=True)


in_python = pytest.mark.skipif(
    core.running() != "python", reason="compiled code reads a dictionary without asking its class"
)


class Counted(dict):
    """The index of a cache, with a count of how often it is asked."""

    lookups = 0

    def get(self, key, default=None):
        self.lookups += 1
        return super().get(key, default)


@in_python
def test_waiting_request_is_not_looked_up_again_until_its_chain_changes():
    kv = PrefixCachingKVCache(200, 1)
    kv._index._runs = Counted()
    first = request(0, 70, tuple(range(70)))
    admit(kv, first)
    second = request(1, 80, (*range(66), *range(1000, 1010)))
    asked = kv._index._runs.lookups
    assert kv.lookup(second).tokens == 66
    assert kv._index._runs.lookups - asked == 2, "a stretch of the document, and one of its own"
    admit(kv, request(2, 9, tuple(range(3000, 3009))))  # nothing to do with it
    asked = kv._index._runs.lookups
    for _ in range(10):
        assert kv.lookup(second).tokens == 66
    assert kv._index._runs.lookups == asked
    third = request(3, 80, (*range(66), *range(1000, 1010)))
    admit(kv, third)  # fills what was missing
    assert kv.lookup(second).tokens == 76
    finish(kv, third)
    assert kv.lookup(second).blocks_in_use == 66, "the last ten are nobody's now"
    finish(kv, first)
    assert kv.lookup(second).blocks_in_use == 0
    admit(kv, request(4, 185, ()))  # takes all that are free but six
    assert kv.lookup(second).tokens == 6


@in_python
def test_index_is_asked_a_few_times_a_request_however_long_it_waits():
    config = EngineConfig(
        num_blocks=1_000, max_model_len=16_000, max_num_seqs=64, enable_prefix_caching=True
    )
    # 320 blocks of 16 tokens each, half of them shared by five documents; few fit at a time.
    workload = [
        arrival(
            i, 10 * i, 5_121, 50,
            prefix_hash_ids=(*range(320 * (i % 5), 320 * (i % 5) + 160),
                             *range(320 * (i + 9), 320 * (i + 9) + 160)),
        )
        for i in range(60)
    ]  # fmt: skip
    indices = []

    def watch(engine):
        if not indices:
            indices.append(Counted(engine.kv._index._runs))
            engine.kv._index._runs = indices[0]

    log = laws.run(registry.make("fcfs"), workload, config, observer=watch, prove=False)
    assert log.num_steps > 400
    # Three or four stretches to find and as many to name, of 320 blocks; again where those changed.
    assert 3 < indices[0].lookups / len(workload) < 12


@pytest.mark.parametrize(("uncached_first", "kept_tokens"), [(False, 0), (True, 4)])
def test_uncached_blocks_are_handed_out_first_where_the_engine_says_so(uncached_first, kept_tokens):
    kv = PrefixCachingKVCache(5, BLOCK, uncached_first)
    for state in (request(0, 4, (7,)), request(1, 11, (1, 2))):
        admit(kv, state)
        finish(kv, state)
    # Queue: a block never used, 7, the rest of the prompt, 2, 1; or that rest before all others.
    admit(kv, request(2, 8, (8, 9)))
    assert kv.lookup(request(3, 5, (7,))).tokens == kept_tokens
    assert kv.lookup(request(4, 12, (1, 2))).tokens == 8


def test_block_that_ends_in_an_unknown_token_is_not_found_again():
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 6, (1,))
    admit(kv, state)
    assert kv.allocate(state, 2)
    state._computed, state._generated = 8, 3
    kv.release(state, comes_back=True, unnamed_tokens=1)
    state._computed = 0
    assert kv.lookup(state).tokens == 4, "the prompt's block, but not the one behind it"


def test_release_gives_back_what_the_open_step_granted():
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 12, (1, 2, 3))
    admit(kv, state, 4)
    kv.begin()
    assert kv.allocate(state, 8)
    kv.release(state, comes_back=True, granted_tokens=8)
    assert kv.free_blocks == 10
    kv.rollback()
    assert kv.free_blocks == 9
    kv.check([state])


def test_preempted_request_never_finds_all_of_its_tokens():
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 4, (1,))
    state._generated = 4
    admit(kv, state, 7)
    assert kv.allocate(state, 1)
    kv.release(state, comes_back=True, granted_tokens=1)
    state._computed = 0
    hit = kv.lookup(state)
    assert (hit.tokens, hit.num_own) == (4, 0), "its last token, in the second block, is to compute"


@pytest.mark.parametrize(
    ("names", "stretches"),
    [
        ((), ()),
        ((7,), ((7, 1),)),
        ((3, 4, 5, 9, 10, 2), ((3, 3), (9, 2), (2, 1))),
        (tuple(range(-2, 2)), ((-2, 2), (0, 2))),
        (
            tuple(range(STRETCH_BLOCKS - 1, 2 * STRETCH_BLOCKS + 1)),
            ((STRETCH_BLOCKS - 1, 1), (STRETCH_BLOCKS, STRETCH_BLOCKS), (2 * STRETCH_BLOCKS, 1)),
        ),
    ],
)
def test_prompt_names_that_jump_or_pass_a_stretch_are_cut_there(names, stretches):
    assert Prompt(names).stretches == stretches


def test_answer_is_named_without_the_blocks_that_the_last_drafts_filled():
    for drafted, named in ((0, 2), (3, 1)):
        kv = PrefixCachingKVCache(10, BLOCK)
        state = SpeculatingState(arrival(0, prompt=8, prefix_hash_ids=(1, 2)).request, drafts=3)
        admit(kv, state)
        assert kv.allocate(state, 8)
        state._computed, state._fresh = 16, drafted
        assert kv.name_answer(state, (3, 4)) == named


@pytest.mark.parametrize(("names", "ahead", "fresh"), [
    (False, False, 3), (True, False, 0), (True, True, 3),
])  # fmt: skip
def test_accepted_drafts_are_fresh_unless_they_are_named_when_they_are_verified(
    names, ahead, fresh
):
    config = EngineConfig(
        num_blocks=9, max_model_len=100, num_speculative_tokens=3, names_accepted_drafts=names,
        async_scheduling=ahead,
    )  # fmt: skip
    state = new_state(arrival(0, prompt=8).request, config)
    state._fresh = 3
    assert state.fresh_tokens == fresh


def test_preempted_request_whose_prompt_was_not_named_to_its_end_leaves_nothing_of_its_own():
    kv = PrefixCachingKVCache(5, BLOCK)
    state = request(0, 13, (1, 2, 3))
    assert kv.reserve(state, 12)  # room for what is loaded, which has not come
    state._computed = 12
    finish(kv, state, comes_back=True)
    assert kv.lookup(state) is NO_HIT
    assert kv.blocks_before_eviction() == 5, "no block holds what anybody could find"


@pytest.mark.parametrize(
    ("computed", "named"), [(7, 0), (8, 0), (11, 0), (12, 1), (15, 1), (16, 2)]
)
def test_answer_names_the_blocks_behind_its_prompt_that_it_fills(computed, named):
    kv = PrefixCachingKVCache(10, BLOCK)
    state = request(0, 8, (1, 2))
    admit(kv, state)
    assert kv.allocate(state, 8)
    state._computed = computed
    assert kv.name_answer(state, (3, 4, 5)) == named


def test_tokens_that_a_cache_has_of_any_prompt_are_those_that_it_would_give():
    # Of names that it holds or has lost, to prompts that end in a block, with it, or before it:
    # at least the last token is computed.
    draw = random.Random(8)
    for _ in range(20):
        kv = PrefixCachingKVCache(draw.randint(6, 14), BLOCK)
        known = []
        for number in range(6):
            names = tuple(range(10 * draw.randint(1, 2), 10 * draw.randint(1, 2) + 6))[:5]
            names = names or (1, 2)
            state = request(number, len(names) * BLOCK + 1, names)
            if kv.allocate(state, state.num_tokens):
                state._computed = state.num_tokens
                finish(kv, state)
                known.append(names)
        for names in known:
            for tokens in range(len(names) * BLOCK, len(names) * BLOCK + 3):
                asked = request(99, tokens, names)
                found = kv.lookup(asked).tokens
                held = 0
                while held < len(names) and kv.knows(names[held]):
                    held += 1
                assert found == min(held, (tokens - 1) // BLOCK) * BLOCK
                assert kv.cached_tokens(asked) == found


def test_index_with_a_run_of_no_blocks_is_told_when_it_is_checked():
    index, run = PrefixIndex(BLOCK), Run(2, key=5)
    index.put(run, 0)
    index.check()
    run.count = 0  # its blocks were handed out, and its name was not taken back
    with pytest.raises(AssertionError, match="an empty run has a name"):
        index.check()
