"""Sessions first come, first served, with memory kept while tools work."""

from collections.abc import Collection, Iterable
from math import ceil

from schedlab.policies.program_fcfs import ProgramFirstComeFirstServed, start_ns
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState


class Retaining(ProgramFirstComeFirstServed):
    """Serve the session that began first, and keep the memory of some that wait for a tool.

    Of those who wait, first come the preempted ones, then those whose sessions have memory kept,
    then all others; among equals the session that began first. What is kept gives way, the session
    that began last first, to a running request that needs a block where no other runs, or all
    others have given way (not with `preempt_in_order`), and to the head of the queue where nobody
    runs or is being loaded; what is kept for its own session then goes last. It does not end while
    a request that needs it waits.

    Skip-ahead is honest because the engine ends a segment where memory stops being kept, and
    because free blocks only fall until then.
    """

    can_pipeline = False

    def __init__(self) -> None:
        self._view: EngineView | None = None

    def on_start(self, view: EngineView) -> None:
        """Keep the view, to estimate what recomputing takes."""
        self._view = view

    def recompute_ns(self, state: RequestState) -> int:
        """Estimate how long computing all tokens of a request takes, in steps of the budget."""
        assert self._view is not None
        size = self._view.config.max_num_batched_tokens
        whole, rest = divmod(state.num_tokens, size)
        total_ns = 0
        for i, tokens in enumerate([size] * whole + [rest] * (rest > 0)):
            shape = BatchShape(0, 0, 0, ((tokens, i * size),), rows_sampled=0)
            total_ns += self._view.estimate_step_ns(shape)
        return total_ns

    def restore_ns(self, state: RequestState) -> int:
        """Estimate how long a request takes to have its tokens back: computed, or loaded sooner."""
        return min(self.recompute_ns(state), self.reload_ns(state))

    def reload_ns(self, state: RequestState) -> int:
        """Estimate how long loading its full blocks takes from the nearest tier below; or FOREVER.

        ``bytes / bandwidth + latency`` on a free link.
        """
        assert self._view is not None
        config = self._view.config
        if not config.kv_tiers:
            return FOREVER
        nearest = config.kv_tiers[0]
        num_bytes = state.num_tokens // config.block_size * config.kv_block_bytes
        return ceil(num_bytes * 1e9 / nearest.load_bytes_per_s) + nearest.load_latency_ns

    def keeps_longer(self, state: RequestState, now_ns: int, is_awaited: bool) -> int:
        """Keep what a request that waits may begin with."""
        return FOREVER if is_awaited else now_ns

    def key(self, state: RequestState, now_ns: int) -> tuple[bool, int]:
        """Order by whether it was preempted, and by the start of the session."""
        return state.num_preemptions == 0, start_ns(state)

    def _kept(self, view: EngineView) -> list[RequestState]:
        """Return whose memory is kept, the last to give way first."""
        return sorted(view.kept, key=lambda state: (start_ns(state), state.id))

    def _in_turn(self, view: EngineView, kept: Collection[RequestState]) -> Iterable[RequestState]:
        """Return who waits, with those before the rest whose sessions have memory kept."""
        back = {s.session for s in kept if s.session is not None and s.session.num_in_flight}
        if not back:
            return view.waiting
        return sorted(view.waiting, key=lambda s: s.num_preemptions == 0 and s.session not in back)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan as `ContinuousBatching`, but for the order, and for what is kept to give way."""
        if not view.kept:
            return super().plan(view, builder)
        kept = self._kept(view)
        if view.running and not builder.grant_running():
            if len(view.running) > 1 and view.config.preempt_in_order:
                return super().plan(view, builder)  # as if nothing were kept
            while not builder.grant_running():
                running = tuple(builder.running())
                is_alone = len(running) == 1 and kept
                builder.preempt(kept.pop() if is_alone else self.victim(running, view.now_ns))
            return builder.build()
        could_admit = bool(len(view.waiting) and builder.seats_left and builder.tokens_left)
        is_first = True
        for state in builder.undeferred(self._in_turn(view, kept) if could_admit else ()):
            if builder.seats_left < 1 or builder.tokens_left < 1:
                break
            granted = builder.grant(state)
            if not granted and is_first and not view.residents:
                # Its own session's last: its prompt may begin with that.
                kept.sort(key=lambda other: other.session is not state.session)
                while kept and not granted:
                    builder.preempt(kept.pop())
                    granted = builder.grant(state)
            if not granted:
                break
            is_first = False
        return builder.build(*self.promise(view, hooks_matter=could_admit))

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all: a session's start never changes."""
        return FOREVER, FOREVER
