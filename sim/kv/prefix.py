"""Paged KV memory that reuses the blocks of equal prefixes, as vLLM V1 does."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.sim.kv.free_queue import Block, FreeQueue
from schedlab.sim.kv.ledger import NO_HIT, Hit, Mark
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.request import RequestState


class PrefixCachingKVCache(PagedKVCache):
    """Paged blocks found again by the chained hash of their content.

    Free blocks wait in a queue, oldest first. A request that gives its memory up appends its
    blocks last to first, so that the end of a sequence is handed out before its beginning; a block
    that is handed out loses its content. A waiting request takes over the leading full blocks of
    its sequence that are still there, whether they are in use or free, but never all of its
    tokens: the last one has to be computed.

    Parameters
    ----------
    num_blocks, block_size : int
        Blocks in the pool, and tokens in a block; `Request.prefix_hash_ids` must be in blocks of
        this size.

    Notes
    -----
    A prompt block can be found from the step on that fills it, as in vLLM, which indexes blocks
    when it schedules them. Blocks with generated tokens have no public hash here: only the request
    itself finds them again, after a preemption, so a follow-up that quotes an answer does not hit
    it. Decoding costs nothing per block: blocks taken by decodes are counted, and the queue is
    brought up to date when somebody asks what it holds.

    Source: vLLM V1, vllm/v1/core/kv_cache_manager.py and block_pool.py.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._queue = FreeQueue(num_blocks, self._forget)
        # Equal prompts computed side by side fill several blocks with one content.
        self._named: dict[int, list[Block]] = {}
        self._held: dict[int, tuple[Block, ...]] = {}
        self._left_behind: dict[int, Block] = {}
        self._marked: Mark = self.mark()

    # -- ledger --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back."""
        self._queue.journal.clear()
        self._marked = self.mark()

    def rollback(self) -> None:
        """Undo every allocation and release since `begin`."""
        self.restore(self._marked)

    def mark(self) -> Mark:
        """Return a point in the open ledger for `restore`."""
        return Mark(self.free_blocks, len(self._queue.journal), self.shared_tokens)

    def restore(self, mark: Mark) -> None:
        """Undo what was done since `mark`."""
        self._queue.undo_to(mark.journal)
        self.free_blocks, self.shared_tokens = mark.free_blocks, mark.shared_tokens

    # -- requests ------------------------------------------------------------------------------

    def lookup(self, state: RequestState) -> Hit:
        """Return what the cache holds of a waiting request's sequence."""
        self._catch_up()
        most = (state.num_tokens - 1) // self.block_size
        named = self._named
        blocks: list[Block] = []
        ids = state.request.prefix_hash_ids
        for key in ids[:most]:
            found = named.get(key)
            if found is None:
                break
            blocks.append(found[0])
        left = self._left_behind.get(state.id)
        num_own = 0
        if left is not None and len(blocks) == len(ids):
            num_own = min(left.count, most - len(ids))
        if not blocks and not num_own:
            return NO_HIT
        return Hit(
            (len(blocks) + num_own) * self.block_size,
            sum(block.num_users > 0 for block in blocks),
            tuple(blocks),
            num_own,
        )

    def allocate(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take what `num_tokens` more tokens of the request need beyond `hit`, and the hit."""
        computed = state.num_computed_tokens or hit.tokens
        filled = computed + num_tokens
        if hit is NO_HIT:
            if not super().allocate(state, num_tokens, keep_free_blocks):
                return False
        else:
            need = -(-filled // self.block_size) - hit.blocks_in_use
            if need > self.free_blocks - keep_free_blocks:
                return False
            self._take_over(state, hit)
            self.free_blocks -= need - (len(hit.blocks) - hit.blocks_in_use) - hit.num_own
        ids = state.request.prefix_hash_ids
        held = self._held.get(state.id, ())
        if len(held) < len(ids) and (full := filled // self.block_size) > len(held):
            self._name(state, held, ids[len(held) : full])
        return True

    def release(self, state: RequestState, comes_back: bool = False) -> None:
        """Give back the blocks of the request's computed tokens, the last one first."""
        computed, ids = state.num_computed_tokens, state.request.prefix_hash_ids
        held = self._held.get(state.id, ())
        rest = -(-computed // self.block_size) - len(held)
        if rest:
            num_own = 0
            if comes_back and len(held) == len(ids):
                num_own = computed // self.block_size - len(held)
            if rest > num_own:
                self._queue.append(Block(count=rest - num_own))
            if num_own:
                own = Block(count=num_own, owner=state.id)
                self._queue.append(own)
                self._leave_behind(state.id, own)
            self.free_blocks += rest
        if held:
            self._set_held(state.id, ())
            for block in reversed(held):
                self._count_user(block, -1)
                if block.num_users:
                    self.shared_tokens -= self.block_size
                else:
                    self._queue.append(block)
                    self.free_blocks += 1

    def blocks_before_eviction(self) -> int:
        """Count the blocks that can be taken before a cached one has to be."""
        self._catch_up()
        return self._queue.blocks_before_cached(self.free_blocks)

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that queue, users and held blocks add up, or raise AssertionError."""
        self._catch_up()
        assert self._queue.num_blocks == self.free_blocks, "queue and count of free blocks differ"
        users: dict[Block, int] = {}
        nameless = tokens = 0
        ids = set()
        for state in resident:
            ids.add(state.id)
            held = self._held.get(state.id, ())
            tokens += state.num_computed_tokens
            nameless += -(-state.num_computed_tokens // self.block_size) - len(held)
            for block in held:
                users[block] = users.get(block, 0) + 1
        assert ids >= {i for i, held in self._held.items() if held}, "blocks held by nobody"
        assert all(block.num_users == count for block, count in users.items()), "users are off"
        shared = (sum(users.values()) - len(users)) * self.block_size
        assert self.shared_tokens == shared, f"{self.shared_tokens} shared tokens kept, {shared}"
        total = self.free_blocks + nameless + len(users)
        assert total == self.num_blocks, f"{total} blocks free or held of {self.num_blocks}"
        for key, blocks in self._named.items():
            assert blocks, "a name without blocks"
            assert all(block.key == key for block in blocks), "a name is off"

    # -- parts ---------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Hand out the blocks that were only counted so far."""
        behind = self._queue.num_blocks - self.free_blocks
        if behind:
            self._queue.pop(behind)

    def _take_over(self, state: RequestState, hit: Hit) -> None:
        for block in hit.blocks:
            if block.num_users:
                self.shared_tokens += self.block_size
            else:
                self._queue.remove(block)
                self.free_blocks -= 1
            self._count_user(block, 1)
        self._set_held(state.id, hit.blocks)
        if hit.num_own:
            own = self._left_behind[state.id]
            self._queue.shrink(own, hit.num_own)
            self.free_blocks -= hit.num_own
            self._leave_behind(state.id, None)

    def _name(self, state: RequestState, held: tuple[Block, ...], keys: tuple[int, ...]) -> None:
        new = tuple(Block(key, num_users=1) for key in keys)
        for key, block in zip(keys, new, strict=True):
            self._put(block, len(self._named.get(key, ())))
            self._queue.journal.append((self._drop, (block,)))
        self._set_held(state.id, held + new)

    def _forget(self, block: Block) -> None:
        self.num_evictions += 1
        if block.owner is not None:
            if not block.count and self._left_behind.get(block.owner) is block:
                self._leave_behind(block.owner, None)
            return
        assert block.key is not None
        place = self._named[block.key].index(block)
        self._drop(block)
        self._queue.journal.append((self._put, (block, place)))

    def _put(self, block: Block, place: int) -> None:
        assert block.key is not None
        self._named.setdefault(block.key, []).insert(place, block)

    def _drop(self, block: Block) -> None:
        assert block.key is not None
        blocks = self._named[block.key]
        blocks.remove(block)
        if not blocks:
            del self._named[block.key]

    def _count_user(self, block: Block, change: int) -> None:
        block.num_users += change
        self._queue.journal.append((self._uncount_user, (block, change)))

    @staticmethod
    def _uncount_user(block: Block, change: int) -> None:
        block.num_users -= change

    def _set_held(self, request_id: int, blocks: tuple[Block, ...]) -> None:
        before = self._held.pop(request_id, ())
        if blocks:
            self._held[request_id] = blocks
        self._queue.journal.append((self._unset_held, (request_id, before)))

    def _unset_held(self, request_id: int, blocks: tuple[Block, ...]) -> None:
        self._held.pop(request_id, None)
        if blocks:
            self._held[request_id] = blocks

    def _leave_behind(self, request_id: int, own: Block | None) -> None:
        before = self._left_behind.pop(request_id, None)
        if own is not None:
            self._left_behind[request_id] = own
        self._queue.journal.append((self._unleave_behind, (request_id, before)))

    def _unleave_behind(self, request_id: int, own: Block | None) -> None:
        self._left_behind.pop(request_id, None)
        if own is not None:
            self._left_behind[request_id] = own
