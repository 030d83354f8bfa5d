"""KV blocks on their way between the GPU and lower tiers, beside the steps."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.kv_bytes import Copy, KVBytes
from schedlab.sim.core.plan import FOREVER, Parts
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.kv.ledger import Hit
from schedlab.sim.kv.tier import Link, SharedTier, Tier
from schedlab.sim.record.copies import Copies
from schedlab.sim.request import RequestState

Estimate = Callable[[BatchShape, int], int]


class Tiering:
    """What lies in lower tiers, what is copied there and back, and who waits for it.

    Every tier has a link of its own to the GPU, and those of its two directions share nothing
    (`schedlab.sim.kv.tier.Link`). The last tier may be one that other engines use, too (`share`).
    Copies end between steps as far as anybody can see: what is written can be loaded, and what is
    loaded can be computed on, from the next plan on.

    A block that the GPU gives up while it is copied away is free at once, but whoever is given it
    waits for the end of the copy: a step, or a load. Blocks that nobody copies are handed out
    first; they are counted, not told apart.

    Parameters
    ----------
    config : EngineConfig
        With at least one tier.
    estimate_step_ns : callable
        What computing takes.
    log : Copies
        What is copied.
    kv_bytes : KVBytes, optional
        Who copies the bytes, if there are any. Where they time copies, nobody knows when one will
        be done, and nobody here waits for it: they do.

    Attributes
    ----------
    now_ns : int
        The clock; the engine sets it.
    num_busy : int
        Free blocks of the GPU that are still being copied away.
    coming : set of int
        Names of blocks that are being loaded.
    follows_connector : bool
        Whether blocks are stored when vLLM's OffloadingConnector stores them (below).
    behind : dict of int to RequestState
        Then: requests with blocks of their prompt that found no room.

    Notes
    -----
    With `EngineConfig.offloading_connector` (vLLM 0.32, kv_transfer/kv_connector/v1/offloading/
    scheduler.py, and kv_offload/cpu/manager.py):

    * after every step the blocks of prompts that it filled are stored, or none of them; then they
      are tried again with the next step of the request (`_build_store_jobs`, `prepare_store`);
      answers are not (`offload_prompt_only`, which is the default);
    * who used which blocks counts when he has finished, the end of a sequence before its beginning,
      beside the order in which they were stored (`on_request_finished`);
    * who begins with a block that is still being stored waits for it (`HIT_PENDING`);
    * a prompt may be loaded to its end, of which the last token is computed again
      (`_update_waiting_for_remote_kv`);
    * the step waits for what is being stored of who is preempted, and of who has finished where
      somebody is given these blocks, or finds them in the cache (`jobs_to_flush`).
    """

    def __init__(
        self,
        config: EngineConfig,
        estimate_step_ns: Estimate,
        log: Copies,
        kv_bytes: KVBytes | None = None,
    ) -> None:
        self._config = config
        self._bytes = kv_bytes
        self._is_timed = kv_bytes is not None and kv_bytes.times_copies
        self._open: dict[int, tuple[int, Callable[[], None]]] = {}
        self._estimate_step_ns = estimate_step_ns
        self._log = log
        tiers = config.kv_tiers
        self._tiers = [Tier(tier) for tier in tiers]
        self._loads = [Link(tier.load_bytes_per_s, tier.load_latency_ns) for tier in tiers]
        self._stores = [Link(tier.store_bytes_per_s, tier.store_latency_ns) for tier in tiers]
        self._shared: SharedTier | None = None
        self._writer = 0
        self._reading: list[Sequence[int]] = []  # names of blocks of the shared tier
        self.writes_back = tiers[0].write == "back"
        self._finds = config.enable_prefix_caching
        self.now_ns = 0
        self.num_busy = 0
        self.coming: set[int] = set()
        self._busy: list[tuple[int, int]] = []  # until when, and how many
        self._copied: dict[int, tuple[int, int]] = {}  # the same of a request that has its memory
        self._swapped_ns: dict[int, int] = {}
        self._under_way: list[tuple[int, int, Callable[[], None]]] = []
        self._num_issued = 0
        self._changed_ns = 0
        self._loaded: list[RequestState] = []
        self._num_returning = 0
        self._step_ready_ns = 0
        self._asked: tuple[int, ...] = ()
        self._found: Parts = ()
        self._awaited = self._found_awaited = False
        self.follows_connector = config.offloading_connector
        self.behind: dict[int, RequestState] = {}
        self._storing: dict[int, list[tuple[int, list[int]]]] = {}
        self._fenced: dict[int, int] = {}  # names of blocks of who has finished, until when
        self._offered: dict[int, int] = {}  # blocks of a request's prompt offered so far
        self._used: dict[int, set[int]] = {}
        self._finished: list[RequestState] = []
        self._finished_ns = 0

    # -- with other engines --------------------------------------------------------------------

    def share(self, tier: SharedTier, writer: int) -> None:
        """Take a tier that others use as well for the last one, before anything happens.

        Parameters
        ----------
        tier : SharedTier
            It.
        writer : int
            The number of this engine.
        """
        self._tiers[-1] = self._shared = tier
        self._writer = writer

    def abandon(self, now_ns: int) -> None:
        """Give up what the engine was copying from and to a tier of others when it died."""
        if self._shared is not None:
            for names in self._reading:
                self._shared.unlock(names)
            self._shared.lose(self._writer, now_ns)

    @property
    def is_seen(self) -> bool:
        """Whether others see what is copied, so that it goes on also while nobody is here."""
        return self._shared is not None

    def changes_by_itself(self, num_waiting: int) -> bool:
        """Whether what can be found for so many who wait may be other at each step."""
        return bool(self.behind) or (self._shared is not None and num_waiting > 0)

    def minds_losses(self, num_waiting: int) -> bool:
        """Whether it matters when the GPU loses a block, with so many who wait.

        It is copied away then, or somebody would load what he found on the GPU before. Where
        nobody waits, and blocks were copied when they were filled, the next to ask comes later.
        """
        return self.writes_back or self.follows_connector or num_waiting > 0

    @property
    def stores_unseen(self) -> bool:
        """Whether only who waits, or is being loaded, knows that a copy is done.

        Not where more is copied then, somebody else looks, or the bytes say when.
        """
        is_alone = len(self._tiers) == 1 and self._shared is None and self._bytes is None
        return is_alone and not self.follows_connector

    # -- time ----------------------------------------------------------------------------------

    @property
    def next_done_ns(self) -> int:
        """When the next copy is done; FOREVER if none is under way."""
        return self._under_way[0][0] if self._under_way else FOREVER

    def settle(self, now_ns: int) -> tuple[bool, list[RequestState]]:
        """Let copies end that are done by now; say whether any did, and whose KV has come."""
        if self._finished and now_ns > self._finished_ns:
            self.close_finished()
        self.now_ns = now_ns
        if self._open:
            self._learn_done()
        if self._fenced:
            self._fenced = {name: ns for name, ns in self._fenced.items() if ns > now_ns}
        while self._busy and self._busy[0][0] <= now_ns:
            self.num_busy -= self._busy.pop(0)[1]
        if self.next_done_ns > now_ns:
            return False, []
        while self.next_done_ns <= now_ns:
            _, number, then = heappop(self._under_way)
            if self._bytes is not None:
                self._bytes.finish(number)
            then()
        self._changed_ns = now_ns
        loaded = self._loaded.copy()
        self._loaded.clear()
        return True, loaded

    def _learn_done(self) -> None:
        """Let those copies be under way no more of which the bytes say that they are done."""
        assert self._bytes is not None
        for number, start_ns, done_ns in self._bytes.done(self.now_ns):
            row, then = self._open.pop(number)
            self._log.took_place(row, start_ns, done_ns)
            heappush(self._under_way, (done_ns, number, then))

    def wait_for_copy(self) -> int:
        """Return until when an engine without a step waits at the latest for copies; or FOREVER."""
        if not self._open:
            return FOREVER
        assert self._bytes is not None
        return self._bytes.wait_for_copy(self.now_ns)

    def _issue(
        self, copy: Copy, ready_ns: int, whose: int, then: Callable[[], None],
        demoted: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Copy blocks; return when they are there, which is when something happens then.

        If nobody knows that now is returned: then whoever needs them waits for the bytes.
        What loses its place to them is demoted behind them. Its bytes leave first, so whoever
        holds them is told in the other order.
        """
        place, count = copy.place, copy.num_blocks
        self._num_issued += 1
        number = self._num_issued
        self._changed_ns = self.now_ns
        start_ns = done_ns = self.now_ns
        if not self._is_timed:
            link = self._loads[place] if copy.is_load else self._stores[place]
            start_ns, done_ns = link.send(count * self._config.kv_block_bytes, ready_ns)
            heappush(self._under_way, (done_ns, number, then))
        row = self._log.add(
            whose, place, copy.is_load, copy.is_swap, count, self.now_ns, start_ns, done_ns,
            self._tiers[place].used_blocks,
        )  # fmt: skip
        if self._is_timed:
            self._open[number] = row, then
        self._demote(place, demoted)
        if self._bytes is not None:
            self._bytes.copy(number, copy, self.now_ns)
        return done_ns

    # -- away ----------------------------------------------------------------------------------

    def store(self, state: RequestState, names: Sequence[int]) -> None:
        """Copy full blocks of a request that holds them to the first tier, if it writes through."""
        if self.writes_back or not self._finds or self.follows_connector:
            return
        self._note_stored(state, *self._put(0, names, state.id))

    def _note_stored(self, state: RequestState, done_ns: int, count: int) -> None:
        before_ns, before = self._copied.get(state.id, (0, 0))
        if before_ns > self.now_ns:
            count += before
        if count:
            self._copied[state.id] = max(done_ns, before_ns), count

    def store_step(self, states: Sequence[RequestState]) -> None:
        """Store what a step has filled of the prompts of those whom it computed.

        Then those who finished with the step before are done with what they used.
        """
        for state in states:
            self._store_prompt(state)
        self.close_finished()

    def _store_prompt(self, state: RequestState) -> None:
        if self.writes_back:
            return
        names, tier = state.request.prefix_hash_ids, self._tiers[0]
        first = self._offered.get(state.id, 0)
        end = min(state.num_computed_tokens // self._config.block_size, len(names))
        if first < end:
            part = names[first:end]
            self._used.setdefault(state.id, set()).update(
                [name for name in part if not tier.awaits(name)]
            )
            added = tier.add_all(part)
            if added is None:
                self.behind[state.id] = state
                return
            self._offered[state.id] = end
            new, evicted = added
            if new:
                then = partial(self._written, 0, new, state.id)
                copy = Copy(False, len(new), new, state, evicted=evicted)
                done_ns = self._issue(copy, self.now_ns, state.id, then, evicted)
                self._storing.setdefault(state.id, []).append((done_ns, new))
                self._note_stored(state, done_ns, len(new))
        self.behind.pop(state.id, None)

    def finished(self, state: RequestState) -> None:
        """Learn that a request is answered, or goes on elsewhere."""
        if self.follows_connector:
            self._finished.append(state)
            self._finished_ns = self.now_ns
            for done_ns, names in self._storing.pop(state.id, ()):
                if done_ns > self.now_ns:
                    self._fenced.update(dict.fromkeys(names, done_ns))

    def reuse(self, state: RequestState, num_tokens: int) -> None:
        """Learn that a request found the beginning of its prompt on the GPU."""
        if self._fenced:
            names = state.request.prefix_hash_ids[: num_tokens // self._config.block_size]
            self._wait_for(names)

    def _wait_for(self, names: Iterable[int]) -> None:
        found = [self._fenced.get(name, 0) for name in names]
        self._step_ready_ns = max(self._step_ready_ns, *found, 0)

    def close_finished(self) -> None:
        """Let those be done who finished with the last step; what they used is as of now."""
        for state in self._finished:
            if state.id in self.behind:
                self._store_prompt(state)
                self.behind.pop(state.id, None)
        for state in self._finished:
            self._offered.pop(state.id, None)
            used = self._used.pop(state.id, None)
            if used:
                names = state.request.prefix_hash_ids
                self._tiers[0].touch([name for name in names if name in used])
        self._finished.clear()

    def handed_out(self, names: Sequence[int]) -> None:
        """Learn of blocks that the GPU has just given to somebody else, who waits for copies."""
        if self._fenced:
            self._wait_for(names)
        if self.writes_back:
            self.lost(names)

    def lost(self, names: Sequence[int]) -> None:
        """Copy blocks away that the GPU has just handed out to somebody else, who waits for it."""
        done_ns, _ = self._put(0, names, -1)
        self._step_ready_ns = max(self._step_ready_ns, done_ns)

    def _put(self, place: int, names: Sequence[int], whose: int) -> tuple[int, int]:
        """Write blocks to a tier; return when they are there and how many were not before."""
        tier = self._tiers[place]
        if tier is self._shared:
            self._shared.settle(self.now_ns)
        new, evicted = tier.add(names)  # none for nothing
        done_ns = 0
        if new:
            then = partial(self._written, place, new, whose)
            copy = Copy(False, len(new), new, place=place, evicted=evicted)
            if tier is not self._shared:
                done_ns = self._issue(copy, self.now_ns, whose, then, evicted)
            else:
                done_ns = self._issue(copy, self.now_ns, whose, _nothing)
                self._shared.comes(new, done_ns, self._writer)
        return done_ns, len(new)

    def _written(self, place: int, names: Sequence[int], whose: int) -> None:
        self._tiers[place].written(names)
        below = place + 1
        if below < len(self._tiers) and self._tiers[below].write == "through":
            self._put(below, names, whose)

    def _demote(self, place: int, evicted: Sequence[int]) -> None:
        below = place + 1
        if evicted and below < len(self._tiers) and self._tiers[below].write == "back":
            self._put(below, evicted, -1)

    @property
    def room_for_swapping(self) -> int:
        """Blocks of the first tier that preempted requests may take."""
        return self._tiers[0].room_for_pins

    def swap_out(self, state: RequestState, count: int) -> None:
        """Copy a request's blocks away that it gives up."""
        tier = self._tiers[0]
        evicted = tier.pin(count)
        self._demote(0, evicted)
        copy = Copy(False, count, state=state, evicted=evicted)
        done_ns = self._issue(copy, self.now_ns, state.id, _nothing)
        self._swapped_ns[state.id] = done_ns
        self._copied.pop(state.id, None)  # they are among those
        self._make_busy(done_ns, count)

    def drop(self, state: RequestState, count: int) -> None:
        """Forget a swapped request that is given up."""
        del self._swapped_ns[state.id]
        self._tiers[0].unpin(count)
        self._changed_ns = self.now_ns

    def released(self, state: RequestState) -> None:
        """Learn that a request has given its blocks up."""
        done_ns, count = self._copied.pop(state.id, (0, 0))
        if done_ns > self.now_ns and not self.follows_connector:
            self._make_busy(done_ns, count)

    @property
    def ready_ns(self) -> int:
        """When the next step can begin that is given, or lacks, blocks that are being copied."""
        return self._step_ready_ns if self.follows_connector else 0

    def flush(self, state: RequestState) -> None:
        """Let the step wait for what is being stored of a request that is preempted."""
        done_ns, _ = self._copied.pop(state.id, (0, 0))
        self._storing.pop(state.id, None)
        self._step_ready_ns = max(self._step_ready_ns, done_ns)

    # -- back ----------------------------------------------------------------------------------

    def find(self, state: RequestState, hit: Hit, always: bool = False) -> Parts:
        """Return which blocks of a waiting request to load: those behind what the GPU holds.

        Loading pays where it takes less time than computing, each by itself: the copies issued
        before it as they were when anything last changed, its bytes and the latency, against
        prompt steps of nothing else.

        Parameters
        ----------
        state : RequestState
            Who.
        hit : Hit
            What the GPU holds of its sequence.
        always : bool
            Whether to load in any case.

        Returns
        -------
        tuple of (int, tuple of int)
            Which tier, and the names of blocks there.
        """
        size = self._config.block_size
        names = state.request.prefix_hash_ids
        first, end = hit.num_blocks, min(len(names), self._most_tokens(state) // size)
        self._awaited = False
        if first >= end or hit.num_own or not self._finds:
            return ()
        always = always or self._config.kv_load == "always"
        version = 0
        if self._shared is not None:
            self._shared.settle(self.now_ns)
            version = self._shared.version
        asked = (state.id, first, end, always, self._num_issued, self._changed_ns, version)
        if asked != self._asked:
            self._asked, self._found = asked, tuple(self._parts(names, first, end, always))
            self._found_awaited = self._awaited
        self._awaited = self._found_awaited
        return self._found

    @property
    def found_awaited(self) -> bool:
        """Whether what `find` was asked for last begins with a block that is being stored."""
        return self._awaited

    def _most_tokens(self, state: RequestState) -> int:
        if self.follows_connector and self._config.block_size > 1:
            return state.num_tokens  # the last of which is computed again, in a block of its own
        return state.num_tokens - 1

    def _parts(
        self, names: tuple[int, ...], first: int, end: int, always: bool
    ) -> list[tuple[int, tuple[int, ...]]]:
        parts: list[tuple[int, tuple[int, ...]]] = []
        while first < end:
            place = self._place_of(names[first])
            if place < 0:
                break
            stop = first + 1
            while stop < end and self._place_of(names[stop]) == place:
                stop += 1
            if self.follows_connector and any(map(self._tiers[place].awaits, names[first:stop])):
                self._awaited = True
                break
            if not (always or self.load_ns(place, stop - first) < self.compute_ns(first, stop)):
                break
            parts.append((place, names[first:stop]))
            first = stop
        return parts

    def _place_of(self, name: int) -> int:
        for place, tier in enumerate(self._tiers):
            if tier.has(name) or (self.follows_connector and tier.awaits(name)):
                return place
        return -1

    def load_ns(self, place: int, count: int) -> int:
        """Return how long loading blocks of a tier takes, with the wait for its link."""
        link = self._loads[place]
        wait_ns = max(link.free_ns - self._changed_ns, 0)
        return wait_ns + link.copy_ns(count * self._config.kv_block_bytes)

    def compute_ns(self, first: int, stop: int) -> int:
        """Estimate how long computing the blocks of a prompt takes, in steps of their own."""
        size, budget = self._config.block_size, self._config.max_num_batched_tokens
        total_ns = 0
        for start in range(first * size, stop * size, budget):
            chunks = ((min(budget, stop * size - start), start),)
            total_ns += self._estimate_step_ns(BatchShape(0, 0, 0, chunks, rows_sampled=0), 1)
        return total_ns

    def keep(self, parts: Parts) -> None:
        """Let nothing evict what is about to be loaded."""
        for place, names in parts:
            self._tiers[place].lock(names, is_use=not self.follows_connector)
            if self._tiers[place] is self._shared:
                self._reading.append(names)

    def load(self, state: RequestState, parts: Parts, num_free: int) -> None:
        """Copy what was found and kept to blocks of the GPU that the request holds.

        Parameters
        ----------
        state : RequestState
            Who.
        parts : tuple
            What `find` returned.
        num_free : int
            Blocks that are free beside them; fewer than are busy, and it waits for the last.
        """
        ready_ns = self._ready_ns(sum([len(names) for _, names in parts]), num_free)
        coming = _Coming(state, len(parts), self._loaded)
        first = sum([len(names) for _, names in parts])
        first = -(-state.num_computed_tokens // self._config.block_size) - first
        for place, names in parts:
            tier = self._tiers[place]
            self.coming.update(names)
            then = partial(self._has_come, tier, names, coming)
            copy = Copy(True, len(names), names, state, first, place)
            self._issue(copy, ready_ns, state.id, then)
            first += len(names)
            if self.follows_connector:
                self._used.setdefault(state.id, set()).update(names)
        if self.follows_connector:
            self._offered[state.id] = -(-state.num_computed_tokens // self._config.block_size)

    def _has_come(self, tier: Tier, names: Sequence[int], coming: _Coming) -> None:
        tier.unlock(names)
        if tier is self._shared:
            self._reading.remove(names)
        self.coming.difference_update(names)
        coming.part_is_there()

    def swap_in(self, state: RequestState, count: int, num_free: int) -> None:
        """Copy a request's blocks back that were swapped out; see `load`."""
        ready_ns = max(self._ready_ns(count, num_free), self._swapped_ns.pop(state.id))
        self._num_returning += count
        back = partial(self._returned, count, _Coming(state, 1, self._loaded))
        self._issue(Copy(True, count, state=state), ready_ns, state.id, back)

    def _returned(self, count: int, coming: _Coming) -> None:
        self._tiers[0].unpin(count)
        self._num_returning -= count
        coming.part_is_there()

    # -- free blocks that are still being read -------------------------------------------------

    def _make_busy(self, done_ns: int, count: int) -> None:
        insort(self._busy, (done_ns, count))
        self.num_busy += count

    def _claim(self, count: int, from_end: bool) -> int:
        """Hand out busy blocks; return when the last of them is not busy any more."""
        until_ns = 0
        while count > 0:
            at = -1 if from_end else 0
            done_ns, there = self._busy.pop(at)
            taken = min(count, there)
            if taken < there:
                insort(self._busy, (done_ns, there - taken))
            until_ns = max(until_ns, done_ns)
            self.num_busy -= taken
            count -= taken
        return until_ns

    def _ready_ns(self, count: int, num_free: int) -> int:
        """Return when blocks can be written that a load was given."""
        short = min(count, self.num_busy - num_free)
        return max(self.now_ns, self._step_ready_ns, self._claim(short, from_end=True))

    def wait_ns(self, num_free: int) -> int:
        """Return how long the step that would start now waits for blocks that it was given.

        Parameters
        ----------
        num_free : int
            Blocks that are free beside them.
        """
        ready_ns = max(self._step_ready_ns, self._claim(self.num_busy - num_free, from_end=False))
        self._step_ready_ns = 0
        wait_ns = max(ready_ns - self.now_ns, 0)
        if wait_ns:
            self._log.add_wait(self.now_ns, wait_ns)
        return wait_ns

    def check_held(self, place: int, names: Collection[int], num_swapped: int) -> None:
        """Prove that what a tier holds is what is counted, or raise AssertionError.

        Parameters
        ----------
        place : int
            Which tier.
        names : collection of int
            Blocks by name, those that are being written included.
        num_swapped : int
            Blocks of requests that were swapped out.
        """
        tier = self._tiers[place]
        assert set(names) == set(tier.names), f"{tier.name} holds other blocks than are counted"
        assert num_swapped == tier.num_pinned, f"{num_swapped} blocks, {tier.num_pinned} counted"

    def note_wait(self) -> None:
        """Write down how long the step just executed waited, if only who holds the bytes knows."""
        if self._is_timed and self._bytes is not None:
            wait_ns = self._bytes.take_wait_ns()
            if wait_ns:
                self._log.add_wait(self.now_ns, wait_ns)

    def check(self, num_pinned: int, num_free: int) -> None:
        """Prove that tables and counts add up, or raise AssertionError.

        Parameters
        ----------
        num_pinned : int
            Blocks of requests that are swapped out.
        num_free : int
            Free blocks of the GPU.
        """
        for tier in self._tiers:
            tier.check()
        pinned = self._tiers[0].num_pinned
        num_pinned += self._num_returning
        assert pinned == num_pinned, f"{pinned} blocks of swapped requests, {num_pinned} are"
        assert all(tier.num_pinned == 0 for tier in self._tiers[1:]), "swapped to a lower tier"
        assert self.num_busy == sum(count for _, count in self._busy), "busy blocks"


class _Coming:
    """A request whose KV is loaded, in one copy or several."""

    def __init__(self, state: RequestState, num_parts: int, loaded: list[RequestState]) -> None:
        self._state = state
        self._num_parts = num_parts
        self._loaded = loaded

    def part_is_there(self) -> None:
        """Count a copy that is done; with the last one the request is loaded."""
        self._num_parts -= 1
        if not self._num_parts:
            self._loaded.append(self._state)


def _nothing() -> None:
    """Do nothing: who swapped blocks are of waits for them, a shared tier knows the time itself."""
