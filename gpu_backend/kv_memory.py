"""The bytes behind the ledger of KV blocks: on the device, and in the tiers below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from schedlab.gpu_backend.block_pool import BlockPool
from schedlab.gpu_backend.clock import Clock
from schedlab.gpu_backend.copy_lane import Ticket
from schedlab.gpu_backend.file_tier import FileTier
from schedlab.gpu_backend.host_blocks import Int64
from schedlab.gpu_backend.host_tier import HostTier
from schedlab.gpu_backend.named_tokens import NamedTokens
from schedlab.gpu_backend.runner import ModelRunner
from schedlab.gpu_backend.sequences import Sequences
from schedlab.gpu_backend.shared_pool import SharedBlockPool
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.kv_bytes import Copy, CopyTime
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.errors import SchedlabError
from schedlab.sim.kv.ledger import KVCacheManager
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import RequestState

_TURN_S = 20e-6
"""So long each of several copies is waited for before the next one is looked at."""


class _UnderWay(NamedTuple):
    """A copy that nobody was told to be done."""

    ticket: Ticket
    issued_ns: int
    ordered_ns: int
    """The same by the machine's clock."""
    swapped_in: int | None
    """The request whose host blocks are free when it is done."""

    @property
    def start_ns(self) -> int:
        """When it began, as the engine's clock goes; only when it is done."""
        return self.issued_ns + max(self.ticket.times_ns()[0] - self.ordered_ns, 0)

    @property
    def done_ns(self) -> int:
        """When it ended."""
        return self.issued_ns + max(self.ticket.times_ns()[1] - self.ordered_ns, 0)


class KVMemory:
    """Prefix cache and tiers of a real engine; implements `schedlab.sim.core.kv_bytes.KVBytes`.

    Copies run in lanes beside the steps. A step waits, before it is launched, for those copies that
    read blocks which it writes, and for nothing else; what is loaded is read by nobody before the
    engine has learnt that it is there.

    Parameters
    ----------
    runner : ModelRunner
        Has the memory.
    config : EngineConfig
        The engine's limits.
    clock : Clock
        Says whether copies are timed, and what time it is.
    sequences : Sequences
        Tokens of those who are given blocks.
    contents : NamedTokens or None
        What names stand for; None where prompts come from somebody else, who then knows.
    shuffle_seed : int, optional
        Hand blocks out in random order.

    Attributes
    ----------
    pool : BlockPool
        Blocks of the device.
    times_copies : bool
        Whether copies take the time that they do, or what links say.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        clock: Clock,
        sequences: Sequences,
        contents: NamedTokens | None,
        shuffle_seed: int | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._sequences = sequences
        self._contents = contents
        self._host: HostTier | None = None
        self._files: list[FileTier] = []
        if config.kv_tiers:
            self._host = HostTier(runner.host, *runner.lanes[0])
            above: HostTier | FileTier = self._host
            for blocks, lanes in zip(runner.files, runner.lanes[1:], strict=True):
                above = FileTier(blocks, above, *lanes)
                self._files.append(above)
        kind = SharedBlockPool if config.enable_prefix_caching else BlockPool
        self.pool: BlockPool = kind(
            config.num_blocks, config.block_size, config.most_resident, config.max_model_len,
            shuffle_seed, () if self._host is None else self._host.reading,
        )  # fmt: skip
        self.times_copies = clock.times_copies
        self._reused: dict[int, tuple[RequestState, Sequence[int]]] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._waited_ns = 0

    # -- what the ledger says ------------------------------------------------------------------

    def open(self, kv: KVCacheManager) -> None:
        """Learn of the ledger, before anything happens."""
        if isinstance(kv, PrefixCachingKVCache):
            assert isinstance(self.pool, SharedBlockPool)
            self.pool.ledger = kv

    def reuse(self, state: RequestState, num_tokens: int) -> None:
        """Note with what a request begins: some of it may be filled only by the next step."""
        pool = self.pool
        assert isinstance(pool, SharedBlockPool)
        num_blocks = num_tokens // self._config.block_size
        names = state.request.prefix_hash_ids[:num_blocks]
        if num_blocks > len(names):
            pool.hold_own(state.id, num_blocks - len(names))
        self._reused[state.id] = state, names

    def lay_out(self, plan: BatchPlan) -> None:
        """Give those whom a plan computes the blocks that they share, in the plan's order."""
        pool = self.pool
        if not isinstance(pool, SharedBlockPool):
            return
        for state, _ in plan.chunks:
            if state.id in self._reused:
                self._begin(pool, *self._reused.pop(state.id))
            elif not pool.holds(state.id):
                self._begin(pool, state, ())
            self._name(pool, state)
        for begins in list(self._reused.values()):
            self._begin(pool, *begins)
        self._reused.clear()

    def _begin(self, pool: SharedBlockPool, state: RequestState, names: Sequence[int]) -> None:
        self._sequences.sit(state.request, pool.begin_with(state.id, names))

    def _name(self, pool: SharedBlockPool, state: RequestState) -> None:
        num_named = pool.ledger.num_named(state.id)
        pool.name(state.id, state.request.prefix_hash_ids[:num_named])

    def launched(self) -> None:
        """Learn that the step is launched: what it fills twice is kept once."""
        if isinstance(self.pool, SharedBlockPool):
            self.pool.merge_doubles()

    def loaded(self, state: RequestState) -> None:
        """Let what a request has loaded, or has copied back, be found by others."""
        pool = self.pool
        if isinstance(pool, SharedBlockPool):
            if state.id in self._reused:
                self._begin(pool, *self._reused.pop(state.id))
            self._name(pool, state)

    def answered(self, state: RequestState, names: Sequence[int]) -> None:
        """Let what a request has generated be found, under names that its next turn begins with.

        Raises
        ------
        SchedlabError
            If a name stands for something else already, or nobody here says what names stand for.
        """
        pool, size = self.pool, self._config.block_size
        if not names or not isinstance(pool, SharedBlockPool):
            return
        if self._contents is None:
            raise SchedlabError(
                "prompts that begin with answers must be made by schedlab.gpu_backend.named_tokens"
            )
        prompt = state.request.prefix_hash_ids
        tokens = self._sequences.tokens[pool.seat(state.id), len(prompt) * size :]
        self._contents.answered(names, tokens[: len(names) * size].astype(np.int64))
        pool.name(state.id, (*prompt, *names))

    def keep(self, state: RequestState) -> None:
        """Let the memory of a request that is gone take no seat, until that is released."""
        assert isinstance(self.pool, SharedBlockPool)
        self.pool.keep(state.id)

    # -- copies --------------------------------------------------------------------------------

    def copy(self, number: int, copy: Copy, now_ns: int) -> None:
        """Order a copy; see `KVBytes.copy`."""
        host = self._host
        assert host is not None
        tier = self._files[copy.place - 1] if copy.place else host
        tier.places.evict(copy.evicted)
        ordered_ns = time.perf_counter_ns()
        if copy.is_swap:
            ticket = self._swap(host, copy)
        elif copy.is_load:
            assert copy.state is not None
            assert isinstance(self.pool, SharedBlockPool)
            ticket = tier.load(copy.names, self.pool.set_aside(copy.state.id, copy.num_blocks))
        elif isinstance(tier, FileTier):
            ticket = tier.store(copy.names)
        else:
            assert isinstance(self.pool, SharedBlockPool)
            ticket = tier.store(copy.names, self.pool.blocks_of(copy.names))
        swapped_in = copy.state.id if copy.is_swap and copy.is_load and copy.state else None
        self._under_way[number] = _UnderWay(ticket, now_ns, ordered_ns, swapped_in)

    def _swap(self, host: HostTier, copy: Copy) -> Ticket:
        state, pool = copy.state, self.pool
        assert state is not None
        if copy.is_load:
            self._sequences.sit(state.request, pool.grow(state.id, state.num_computed_tokens))
            return host.swap_in(state.id, pool.blocks(state.id)[: copy.num_blocks])
        return host.swap_out(state.id, pool.blocks(state.id)[: copy.num_blocks])

    def forget(self, request_id: int) -> None:
        """Forget a request that does not come back."""
        if self._host is not None:
            self._host.forget(request_id)

    def finish(self, number: int) -> None:
        """Wait until a copy is done, as links say that it is."""
        copy = self._under_way.get(number)
        if copy is not None:
            copy.ticket.wait()
            self._end(number)

    def _end(self, number: int) -> None:
        copy = self._under_way.pop(number)
        if copy.swapped_in is not None:
            self.forget(copy.swapped_in)

    def done(self, now_ns: int) -> list[CopyTime]:
        """Return the copies that ended by now, in the order in which they were ordered."""
        found = []
        for number, copy in list(self._under_way.items()):
            # Where waiting takes no time, the engine may be ahead of what copies in real time.
            ahead_ns = now_ns - copy.issued_ns - (time.perf_counter_ns() - copy.ordered_ns)
            if ahead_ns > 0 and not copy.ticket.is_done():
                self._clock.let_pass(partial(copy.ticket.wait, ahead_ns / 1e9))
            if copy.ticket.is_done() and copy.done_ns <= now_ns:
                found.append(CopyTime(number, copy.start_ns, copy.done_ns))
                self._end(number)
        return found

    def wait_for_copy(self, now_ns: int) -> int:
        """Return until when an engine waits at the latest that can only wait for copies."""
        ends_ns = [copy.done_ns for copy in self._under_way.values() if copy.ticket.is_done()]
        if ends_ns:
            return max(min(ends_ns), now_ns + 1)
        return now_ns + max(self._clock.let_pass(self._wait_for_any), 1)

    def _wait_for_any(self) -> None:
        tickets = [copy.ticket for copy in self._under_way.values()]
        while not any([ticket.wait(_TURN_S) for ticket in tickets]):
            pass

    def wait_for_copies(self) -> None:
        """Wait for all copies under way, the work done: one that failed raises its error."""
        for copy in self._under_way.values():
            copy.ticket.wait()

    def before_step(self, slots: Int64) -> None:
        """Wait until nobody copies blocks away that a step is about to write to."""
        host = self._host
        if host is None or not host.reading:
            return
        host.settle()
        written = set((slots[slots >= 0] // self._config.block_size).tolist())
        tickets = [host.reading[block] for block in written & host.reading.keys()]
        if tickets:
            begun_ns = time.perf_counter_ns()
            for ticket in tickets:
                ticket.wait()
            self._waited_ns += time.perf_counter_ns() - begun_ns

    def take_wait_ns(self) -> int:
        """Return how long steps have waited for copies since this was asked last."""
        waited_ns, self._waited_ns = self._waited_ns, 0
        return waited_ns

    # -- proof ---------------------------------------------------------------------------------

    def check(self, engine: Engine) -> None:
        """Prove that blocks on the device and in each tier are those that the engine counts."""
        self.pool.check(engine)
        if self._host is not None:
            self._host.check(engine)
        for place, tier in enumerate(self._files, 1):
            tier.check(engine, place)
