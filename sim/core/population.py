"""The requests of an engine by state, and what they hold."""

from __future__ import annotations

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.intake import Intake
from schedlab.sim.core.micro_batch import MicroBatch
from schedlab.sim.core.pipeline import Pipeline
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.kv.ledger import KVCacheManager
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import DONE, RequestState, seat_number


class Population:
    """The requests of an engine by state, and what they hold.

    It is kept by `Lifecycle`; plans are drawn up from it.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    waiting : WaitingQueue
        The queue, empty.
    kv : KVCacheManager
        The memory, free.

    Attributes
    ----------
    is_plain : bool
        Whether everyone has only waited in the queue, run and left at once so far. Then nobody is,
        or was, in `intake`, `held`, `leaving`, `overrun`, `untold`, `fetching`, `arrived`,
        `loading`, `holding`, `in_pipeline` or `kept`, and nobody need look there: so many places
        that are empty lie far apart, and a plan of an engine among many finds none of them in the
        caches of the processor.
    intake : Intake
        Requests that the scheduler does not know of yet.
    waiting : WaitingQueue
        Requests without a seat, in the order of the policy's key.
    running, prefilling, paused : dict of int to RequestState
        Unfinished requests with a seat, in order of admission; of these, in prefill; of these,
        decoding but left out of the last plan that picked. The others are in `decodes`.
    decodes : DecodeBatch
        Requests that decode in lockstep.
    held : dict of int to RequestState
        Finished requests that keep their seat until their sealed batch ends.
    unanswered : list of RequestState
        Those of them whose answer waits as well.
    leaving : list of RequestState
        Finished requests whose seat and memory the next plan still counts (async scheduling).
    overrun : dict of int to RequestState
        Answered requests that the next plan still finds running, and decoding: they are in
        `running` and `paused` as well (`overrun_at_stop`; drafts that are planned ahead).
    untold : list of RequestState
        Those that left since, of which the policy hears when the step that was so planned ends.
    ended : list of RequestState
        Requests with a whole answer in a batch of a pipeline that is in flight still, though what
        follows it is planned: they are answered when it is back.
    fetching : dict of int to RequestState
        Requests with seat and memory whose KV is on its way from another engine, or has come since
        the last plan: then they are in `arrived` as well.
    arrived : list of RequestState
        Those of them whose KV has come: the next plan finds them running.
    loading : dict of int to RequestState
        Requests with seat and memory whose KV is on its way from a lower tier.
    holding : dict of int to RequestState
        Requests with memory and no seat, in the order in which they were given it: their KV is on
        its way from a lower tier, or has come (vLLM's WAITING_FOR_REMOTE_KVS, and after it).
    come : set of int
        Those of them whose KV has come: they may have a seat.
    in_pipeline : Pipeline
        Requests with seat and memory whose batch is in the pipeline. They run again when it is
        back.
    tiers : Tiering or None
        What lies in lower tiers, if there are any.
    handed_over : dict of int to RequestState
        Requests that go on elsewhere, and whose KV is held until it is there. They have no seat.
    kept : dict of int to RequestState
        Answered requests whose memory is kept for the next ones of their sessions. They have no
        seat.
    kept_until_ns : dict of int to int
        Until when.
    kv : KVCacheManager
        Who holds which memory.
    resident_tokens, held_tokens : int
        Tokens in the KV cache of all requests, those that share a block counting each; and of the
        held ones.
    free_swap_blocks : int
        Host memory for swapped requests that is free, in KV blocks.
    num_arrived, num_finished, num_rejected, num_handed_over : int
        Requests submitted; answered; turned away; gone on to another engine.
    num_events : int
        Arrivals, finishes and releases so far: what ends the promise of a plan.
    num_turnovers : int
        How often a request began to decode or ceased to; being paused is neither.
    num_seats_given : int
        Admissions so far: the place of the next one in their order.
    reads_extremes : bool
        See `Executor`.
    step_decoded : bool
        Whether the decode batch took part in the last step.
    step_preempted, step_recomputed_tokens, step_swapped_bytes : int
        What happened since the last step began.
    step_overrun, step_overrun_context_tokens : int
        Tokens that the next step computes of requests that had ended, whom it was planned with, and
        what they have in the cache.
    needs_less : bool
        Whether somebody who is paused now will need less memory than the plan thought that paused
        him, which could not know what becomes of drafts under way.
    """

    def __init__(self, config: EngineConfig, waiting: WaitingQueue, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.intake = Intake(config)
        self.is_plain = not (
            self.intake.holds_back
            or config.kv_tiers
            or config.overrun_at_stop
            or config.pipeline_parallel_size > 1
        )
        self.waiting = waiting
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.paused: dict[int, RequestState] = {}
        self.decodes: DecodeBatch = (
            SpeculativeBatch(config)
            if config.num_speculative_tokens
            else MicroBatch(config.block_size, 0)
            if config.pipeline_parallel_size > 1
            else DecodeBatch(config.block_size)
        )
        self.held: dict[int, RequestState] = {}
        self.unanswered: list[RequestState] = []
        self.leaving: list[RequestState] = []
        self.overrun: dict[int, RequestState] = {}
        self.untold: list[RequestState] = []
        self.ended: list[RequestState] = []
        self.fetching: dict[int, RequestState] = {}
        self.arrived: list[RequestState] = []
        self.loading: dict[int, RequestState] = {}
        self.holding: dict[int, RequestState] = {}
        self.come: set[int] = set()
        self.in_pipeline = Pipeline()
        self.tiers: Tiering | None = None
        self.handed_over: dict[int, RequestState] = {}
        self.kept: dict[int, RequestState] = {}
        self.kept_until_ns: dict[int, int] = {}
        self.resident_tokens = 0
        self.held_tokens = 0
        self.free_swap_blocks = config.swap_space_blocks
        self.num_arrived = 0
        self.num_finished = 0
        self.num_rejected = 0
        self.num_handed_over = 0
        self.num_events = 0
        self.num_turnovers = 0
        self.num_seats_given = 0
        self.reads_extremes = True
        self.step_decoded = False
        self.step_preempted = 0
        self.step_recomputed_tokens = 0
        self.step_swapped_bytes = 0
        self.step_overrun = 0
        self.step_overrun_context_tokens = 0
        self.needs_less = False

    @property
    def next_event_ns(self) -> int:
        """When memory stops being kept or a copy to or from a lower tier is done; or FOREVER."""
        next_ns = self._first_kept_until_ns
        return next_ns if self.tiers is None else min(next_ns, self.tiers.next_done_ns)

    @property
    def next_seen_ns(self) -> int:
        """When the next of these events is that a plan may know of; or FOREVER."""
        tiers = self.tiers
        if tiers is None or self.num_waiting or self.loading or not tiers.stores_unseen:
            return self.next_event_ns
        return self._first_kept_until_ns

    @property
    def _first_kept_until_ns(self) -> int:
        return min(self.kept_until_ns.values()) if self.kept_until_ns else FOREVER

    def copy_lost(self) -> None:
        """Copy away what a plan made the prefix cache lose, where somebody wants it."""
        kv = self.kv
        if self.tiers is None or not isinstance(kv, PrefixCachingKVCache):
            return
        kv.blocks_before_eviction()  # which lets go of what was only counted
        if kv.lost:
            for name, count in kv.lost:
                self.tiers.handed_out(range(name, name + count))
            kv.lost.clear()
            self.num_events += 1

    @property
    def num_in_flight(self) -> int:
        """Requests submitted that were neither answered nor rejected, and did not go on."""
        gone = self.num_finished + self.num_rejected + self.num_handed_over
        return self.num_arrived - gone

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, those that the scheduler does not know of yet among them."""
        if self.is_plain:
            return len(self.waiting)
        return len(self.waiting) + len(self.intake.requests) + len(self.holding)

    @property
    def num_running(self) -> int:
        """Unfinished requests with a seat: also those in the pipeline or whose KV is on its way."""
        if self.is_plain:
            return len(self.running)
        away = len(self.fetching) + len(self.loading) + self.in_pipeline.size
        return len(self.running) + away

    @property
    def num_known(self) -> int:
        """Requests that the scheduler has: waiting in the queue, or with a seat."""
        return len(self.waiting) + len(self.holding) + self.num_seated

    @property
    def num_seated(self) -> int:
        """Requests with a seat, finished or not."""
        if self.is_plain:
            return len(self.running)
        return self.num_running + len(self.held) + len(self.leaving)

    def seated(self) -> list[RequestState]:
        """List who runs, leaves or is in the pipeline in the order of their admission."""
        if not (self.leaving or self.in_pipeline.size):
            return list(self.running.values())
        both = (*self.running.values(), *self.leaving, *self.in_pipeline)
        return sorted(both, key=seat_number)

    def unnamed_tokens(self, state: RequestState, granted_tokens: int, now_ns: int) -> int:
        """Count the tokens of a request that were allocated before their content was known.

        An engine that plans ahead schedules a decode while the token to compute is still in
        flight, and names no block for it before that token has arrived. `now_ns` is the time of
        the plan, and `granted_tokens` are those that it grants.
        """
        if not self.config.async_scheduling:
            return 0
        if self.config.pipelines_ahead:
            return self.in_pipeline.unnamed_tokens(state, granted_tokens)
        if state._entry_ns == now_ns:  # its newest token came out of a prefill of the last step
            return min(granted_tokens, 1)
        batch = self.decodes
        num_steps = batch.steps - state._stint_start
        has_ended = state.status is DONE or state.id in self.overrun
        if not (has_ended or (self.step_decoded and state in batch and num_steps)):
            return 0  # who joined the batch after the last step has no token in flight
        if num_steps == 1 and state._entry_ns < 0:
            return min(granted_tokens, 1)  # recomputed, or paused before: the last step's was known
        return 1
