"""Paged KV memory that reuses the blocks of equal prefixes, as vLLM V1 does."""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.sim.kv.free_queue import FreeQueue, Run
from schedlab.sim.kv.ledger import NO_HIT, Hit, Mark
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.kv.prefix_index import PrefixIndex
from schedlab.sim.kv.prompt import Prompt
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
    uncached_first : bool
        Blocks without findable content are put before all others when they are given back.

    Attributes
    ----------
    notes_lost : bool
        Whether somebody wants to know of blocks that lose their content.
    lost : list of (int, int)
        Names of those that did: the first one, and how many follow each other. Who wants to know
        empties it when a plan is final.

    Notes
    -----
    A prompt block can be found from the step on that fills it, as in vLLM, which indexes blocks
    when it schedules them. Blocks with generated tokens have a public hash only if `name_answer`
    gives it to them, when the request is done: then a follow-up that quotes the answer hits it, but
    for the last token, which was never computed. Until then, and without, only the request itself
    finds them again, after a preemption. Decoding costs nothing per block: blocks taken by decodes
    are counted, and the queue is brought up to date when somebody asks what it holds.

    Blocks are kept in runs: successive names (a trace's hash of 512 tokens becomes 32 of them for
    blocks of 16), computed together, held by the same requests. A run is split where a request
    takes over only a part of it.

    Source: vLLM V1, vllm/v1/core/kv_cache_manager.py and block_pool.py.
    """

    def __init__(self, num_blocks: int, block_size: int, uncached_first: bool = False) -> None:
        super().__init__(num_blocks, block_size)
        self._uncached_first = uncached_first
        self._queue = FreeQueue(num_blocks, self._forget)
        self._index = PrefixIndex(block_size)
        self._held: dict[int, tuple[Run, ...]] = {}
        self._left_behind: dict[int, Run] = {}
        self._marked: Mark = self.mark()
        self.lost: list[tuple[int, int]] = []
        self.notes_lost = False

    # -- ledger --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a ledger: what follows can be rolled back, until a final release closes it."""
        self._queue.open()
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
        prompt = self._prompt(state)
        left = self._left_behind.get(state.id)
        if left is None and prompt.hit is not None and prompt.most_blocks == most:
            return prompt.hit
        hit, met = self._index.find(prompt, most)
        if left is None:
            prompt.hit, prompt.most_blocks = hit, most
            self._index.remember(state.id, prompt, met)
        elif hit.num_blocks == prompt.num_blocks:
            num_own = min(left.count, most - hit.num_blocks)
            if num_own:
                tokens = (hit.num_blocks + num_own) * self.block_size
                return hit._replace(tokens=tokens, num_own=num_own)
        return hit

    def cached_tokens(self, state: RequestState) -> int:
        """Count the tokens that `lookup` finds, of a request that may go to another cache."""
        return self.find(state).tokens

    def find(self, state: RequestState) -> Hit:
        """Return what `lookup` does, of a request that may go to another cache."""
        if state.id in self._left_behind:
            return self.lookup(state)
        self._catch_up()
        prompt = self._prompt(state)
        if not self._index.may_hold(prompt):  # as most engines of a fleet do not
            return NO_HIT
        most = (state.num_tokens - 1) // self.block_size
        return self._index.find(prompt, most)[0]

    def allocate(
        self,
        state: RequestState,
        num_tokens: int,
        keep_free_blocks: int = 0,
        hit: Hit = NO_HIT,
        ahead_tokens: int = 0,
    ) -> bool:
        """Take what `num_tokens` more tokens of the request need beyond `hit`, and the hit."""
        if not self.reserve(state, num_tokens + ahead_tokens, keep_free_blocks, hit):
            return False
        self._name_prompt(state, (state.num_computed_tokens or hit.tokens) + num_tokens)
        return True

    def reserve(
        self, state: RequestState, num_tokens: int, keep_free_blocks: int = 0, hit: Hit = NO_HIT
    ) -> bool:
        """Take the same as `allocate`; nobody else finds what is new of it."""
        filled = (state.num_computed_tokens or hit.tokens) + num_tokens
        if hit is NO_HIT:
            if not super().allocate(state, num_tokens, keep_free_blocks):
                return False
        else:
            need = -(-filled // self.block_size) - hit.blocks_in_use
            if need > self.free_blocks - keep_free_blocks:
                return False
            self._take_over(state, hit)
            self.free_blocks -= need - (hit.num_blocks - hit.blocks_in_use) - hit.num_own
        return True

    def name_prompt(self, state: RequestState, num_tokens: int) -> None:
        """Let the full blocks of so much of a prompt be found: reserved before, and there now."""
        self._queue.close()
        self._name_prompt(state, num_tokens)

    def _name_prompt(self, state: RequestState, filled: int) -> None:
        prompt = self._prompt(state)
        held = self._held.get(state.id, ())
        num_held = sum([run.count for run in held])
        full = min(filled // self.block_size, prompt.num_blocks)
        if full > num_held:
            self._name(state, held, prompt.part(num_held, full))

    def name_answer(self, state: RequestState, hash_ids: tuple[int, ...]) -> int:
        """Let the full blocks behind a finished request's prompt be found by their hashes.

        Parameters
        ----------
        state : RequestState
            It still holds its memory, and is about to give it up for good.
        hash_ids : tuple of int
            Of its blocks from the first that is not of the prompt alone.

        Returns
        -------
        int
            How many of them its memory fills.
        """
        self._queue.close()
        prompt = self._prompt(state)
        held = self._held.get(state.id, ())
        num_held = sum([run.count for run in held])
        full = (state.num_computed_tokens - state.fresh_tokens) // self.block_size
        if num_held == prompt.num_blocks and full > num_held:
            answer = Prompt(hash_ids[: full - num_held])
            self._name(state, held, answer.stretches)
            return answer.num_blocks
        return 0

    def release(
        self,
        state: RequestState,
        comes_back: bool = False,
        granted_tokens: int = 0,
        unnamed_tokens: int = 0,
    ) -> None:
        """Give back the blocks of the request's tokens, the last one first.

        If it does not come back, that is final: the ledger of the last plan is closed.
        """
        if not comes_back:
            self._queue.close()
        filled = state.num_computed_tokens + granted_tokens
        held = self._held.get(state.id, ())
        num_held = sum([run.count for run in held])
        rest = -(-filled // self.block_size) - num_held
        if rest:
            # Full blocks behind the prompt have content that nobody else asks for.
            num_full = (filled - unnamed_tokens) // self.block_size - num_held
            finds_own = comes_back and num_held == self._prompt(state).num_blocks
            num_own = num_full if finds_own else 0
            num_uncached = rest - (num_full if self._uncached_first else num_own)
            if num_uncached:
                self._give_uncached(num_uncached)
            if rest > num_uncached + num_own:
                self._queue.append(Run(rest - num_uncached - num_own))
            if num_own:
                own = Run(num_own, owner=state.id)
                self._queue.append(own)
                self._leave_behind(state.id, own)
            self.free_blocks += rest
        if held:
            self._set_held(state.id, ())
            for run in reversed(held):
                self._drop_holder(run, state.id)
                self._queue.note(self._add_holder, run, state.id)
                if run.holders:
                    self.shared_tokens -= run.count * self.block_size
                else:
                    self._queue.append(run)
                    self.free_blocks += run.count

    def fits_without(
        self, victims: Iterable[RequestState], state: RequestState, keep_free_blocks: int
    ) -> bool:
        """Whether all of a waiting request would fit, were `victims` to give up what they hold.

        A block becomes free if all who hold it are among them; those that others hold of what the
        request begins with need not be.
        """
        size, room, ids = self.block_size, self.free_blocks - keep_free_blocks, set()
        for victim in victims:
            room += -(-(victim.num_computed_tokens + victim.spare_tokens) // size)
            ids.add(victim.id)
        need = -(-state.num_tokens // size)
        hit = NO_HIT if state.swapped else self.lookup(state)
        if hit.blocks_in_use:
            need -= sum([count for run, _, count in hit.parts if not run.holders <= ids])
        if need > room or not self.shared_tokens:
            return need <= room
        runs = {run for i in ids for run in self._held.get(i, ())}
        room -= sum([self.num_named(i) for i in ids])
        return need <= room + sum([run.count for run in runs if run.holders <= ids])

    def blocks_before_eviction(self) -> int:
        """Count the blocks that can be taken before a cached one has to be."""
        self._catch_up()
        return self._queue.blocks_before_cached(self.free_blocks)

    def check(self, resident: Iterable[RequestState]) -> None:
        """Prove that queue, holders and held blocks add up, or raise AssertionError."""
        self._catch_up()
        assert self._queue.num_blocks == self.free_blocks, "queue and count of free blocks differ"
        holders: dict[Run, set[int]] = {}
        nameless = held_blocks = 0
        ids = set()
        for state in resident:
            ids.add(state.id)
            held = self._held.get(state.id, ())
            num_held = sum(run.count for run in held)
            held_blocks += num_held
            tokens = state.num_computed_tokens + state.spare_tokens
            nameless += -(-tokens // self.block_size) - num_held
            for run in held:
                holders.setdefault(run, set()).add(state.id)
        assert ids >= {i for i, held in self._held.items() if held}, "blocks held by nobody"
        assert all(run.holders == by for run, by in holders.items()), "holders are off"
        distinct = sum(run.count for run in holders)
        shared = (held_blocks - distinct) * self.block_size
        assert self.shared_tokens == shared, f"{self.shared_tokens} shared tokens kept, {shared}"
        total = self.free_blocks + nameless + distinct
        assert total == self.num_blocks, f"{total} blocks free or held of {self.num_blocks}"
        self._index.check()

    # -- looking -------------------------------------------------------------------------------

    def num_named(self, request_id: int) -> int:
        """Count the first blocks of a request, of those it holds, that others can find."""
        return sum([run.count for run in self._held.get(request_id, ())])

    def num_left_behind(self, request_id: int) -> int:
        """Count the free blocks that only a request that was preempted can find."""
        left = self._left_behind.get(request_id)
        return 0 if left is None else left.count

    def knows(self, name: int) -> bool:
        """Whether a block with this content is there, held or free."""
        return self._index.knows(name)

    def _prompt(self, state: RequestState) -> Prompt:
        prompt = state.prompt
        if prompt is None:
            prompt = state.prompt = Prompt(state.request.prefix_hash_ids)
        return prompt

    # -- parts ---------------------------------------------------------------------------------

    def _give_uncached(self, count: int) -> None:
        if self._uncached_first:
            self._catch_up()  # what was counted before came from the old front
            self._queue.prepend(Run(count))
        else:
            self._queue.append(Run(count))

    def _catch_up(self) -> None:
        """Hand out the blocks that were only counted so far."""
        behind = self._queue.num_blocks - self.free_blocks
        if behind:
            self._queue.pop(behind)

    def _take_over(self, state: RequestState, hit: Hit) -> None:
        queue = self._queue
        held: list[Run] = []
        for run, key, count in hit.parts:
            part = self._cut_out(run, key, count)
            if part.holders:
                self.shared_tokens += count * self.block_size
            else:
                queue.remove(part)
                self.free_blocks -= count
            self._add_holder(part, state.id)
            queue.note(self._drop_holder, part, state.id)
            held.append(part)
        self._set_held(state.id, tuple(held))
        if hit.num_own:
            own = self._left_behind[state.id]
            queue.shrink(own, hit.num_own)
            self.free_blocks -= hit.num_own
            self._leave_behind(state.id, None)

    def _cut_out(self, run: Run, key: int, count: int) -> Run:
        """Return the part of a run that has just these names, split off if it is more."""
        assert run.key is not None
        if key > run.key:
            run = self._split(run, key - run.key)
        if count < run.count:
            self._split(run, count)
        return run

    def _split(self, run: Run, lower: int) -> Run:
        """Split a run behind its first `lower` blocks; return the rest."""
        assert run.key is not None
        upper = Run(run.count - lower, run.key + lower, set(run.holders))
        self._index.split(run, upper)
        if not run.holders:
            self._queue.split(run, upper)
        else:
            run.count = lower
        for holder in run.holders:
            held = self._held[holder]
            i = held.index(run) + 1
            self._held[holder] = (*held[:i], upper, *held[i:])
        self._queue.note(self._merge, run, upper)
        return upper

    def _merge(self, run: Run, upper: Run) -> None:
        """Undo a split."""
        self._index.drop(upper)
        if not run.holders:
            self._queue.merge(run, upper)
        else:
            run.count += upper.count
        for holder in run.holders:
            self._held[holder] = tuple(
                [other for other in self._held[holder] if other is not upper]
            )

    def _name(
        self, state: RequestState, held: tuple[Run, ...], stretches: Iterable[tuple[int, int]]
    ) -> None:
        new = [Run(count, key, {state.id}) for key, count in stretches]
        for run in new:
            self._index.add(run)
            self._queue.note(self._index.drop, run)
        self._set_held(state.id, (*held, *new))

    def _forget(self, run: Run, count: int) -> None:
        """Learn that the last `count` blocks of a free run are handed out."""
        if run.owner is not None:
            self.num_evictions += 1
            if not run.count and self._left_behind.get(run.owner) is run:
                self._leave_behind(run.owner, None)
            return
        self.num_evictions += count
        if self.notes_lost and run.key is not None:
            self.lost.append((run.key + run.count, count))
            self._queue.note(self.lost.pop)
        if run.count:
            self._index.has_changed(run)
        else:
            place = self._index.drop(run)
            self._queue.note(self._index.put, run, place)

    def _add_holder(self, run: Run, request_id: int) -> None:
        run.holders.add(request_id)
        self._index.has_changed(run)

    def _drop_holder(self, run: Run, request_id: int) -> None:
        run.holders.remove(request_id)
        self._index.has_changed(run)

    def _set_held(self, request_id: int, runs: tuple[Run, ...]) -> None:
        before = self._held.pop(request_id, ())
        if runs:
            self._held[request_id] = runs
        self._queue.note(self._unset_held, request_id, before)

    def _unset_held(self, request_id: int, runs: tuple[Run, ...]) -> None:
        self._held.pop(request_id, None)
        if runs:
            self._held[request_id] = runs

    def _leave_behind(self, request_id: int, own: Run | None) -> None:
        before = self._left_behind.pop(request_id, None)
        if own is not None:
            self._left_behind[request_id] = own
        self._queue.note(self._unleave_behind, request_id, before)

    def _unleave_behind(self, request_id: int, own: Run | None) -> None:
        self._left_behind.pop(request_id, None)
        if own is not None:
            self._left_behind[request_id] = own
