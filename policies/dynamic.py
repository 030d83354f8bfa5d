"""Dynamic batching: sealed batches that wait a little to fill up."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from schedlab.policies.prompt_buckets import require_ascending
from schedlab.policies.registry import register
from schedlab.policies.static import Static
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

TIMEOUT_ACTIONS = ("reject", "delay")


@register("dynamic")
class Dynamic(Static):
    """Dispatch a batch when it has a preferred size, or when its oldest request has waited enough.

    Optimises the size of sealed batches against a bounded extra wait: the dynamic batcher of
    Triton Inference Server. Needs to know nothing. Its throughput ceiling is that of static
    batching, because nobody joins a batch under way. First come, first served, so nobody starves;
    with `use_priorities` less urgent requests do, and with a time-out that delays so do those whom
    it has met, while others keep coming.

    When the GPU is free, a batch of the largest preferred size that can be filled is dispatched;
    if there is none, or the oldest of those who would be in the batch has waited for
    `max_queue_delay_s`, as many as there are. Requests that have timed out are given up, or put
    behind the others of their priority, when the next batch is formed: Triton answers those it
    rejects at once. Its limit on the length of the queue, time-outs that requests state, and
    batches that grow until an instance takes them are not modelled.

    Skip-ahead is honest: between events a sealed batch does not change; what happens by itself are
    the end of the oldest request's delay and the next time-out, and the plan says when.

    Parameters
    ----------
    max_batch_size : int, optional
        Largest batch; `max_num_seqs` if not given.
    max_queue_delay_s : float
        Longest wait of the oldest request for others while the GPU is idle; 0 (Triton's
        default) takes whatever is queued.
    preferred_batch_sizes : sequence of int
        Sizes that are dispatched at once, ascending; the largest batch alone if none is given.
    use_priorities : bool
        Whether more urgent requests (lower `priority`) come first; Triton's priority levels.
    queue_timeout_s : float, optional
        Longest wait in the queue; without a limit if not given.
    timeout_action : {"reject", "delay"}
        What becomes of a request that has waited for longer.
    pad_prompts, pad_decodes, return_early : bool
        As in `Static`.
    """

    source = "NVIDIA Triton Inference Server, core, dynamic_batch_scheduler.cc, scheduler_utils.cc"

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float = 0.0,
        preferred_batch_sizes: Sequence[int] = (),
        use_priorities: bool = False,
        queue_timeout_s: float | None = None,
        timeout_action: str = "reject",
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
    ) -> None:
        super().__init__(max_batch_size, pad_prompts, pad_decodes, return_early)
        if not 0.0 <= max_queue_delay_s < math.inf:
            raise ValueError(f"max_queue_delay_s must be finite and >= 0, got {max_queue_delay_s}")
        require_ascending("preferred_batch_sizes", preferred_batch_sizes)
        if max_batch_size is not None and max(preferred_batch_sizes, default=0) > max_batch_size:
            raise ValueError(
                f"preferred_batch_sizes must not exceed max_batch_size {max_batch_size}, got "
                f"{list(preferred_batch_sizes)}"
            )
        if queue_timeout_s is not None and not 0.0 < queue_timeout_s < math.inf:
            raise ValueError(f"queue_timeout_s must be finite and > 0, got {queue_timeout_s}")
        if timeout_action not in TIMEOUT_ACTIONS:
            raise ValueError(
                f"timeout_action must be one of {', '.join(TIMEOUT_ACTIONS)}; "
                f"got {timeout_action!r}"
            )
        self.max_queue_delay_s = max_queue_delay_s
        self.preferred_batch_sizes = preferred_batch_sizes
        self.use_priorities = use_priorities
        self.queue_timeout_s = queue_timeout_s
        self.timeout_action = timeout_action

    def key(self, state: RequestState, now_ns: int) -> int:
        """Order by priority if it counts, then arrival."""
        return state.request.priority if self.use_priorities else 0

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Give up who has timed out when a batch can be formed, and go on as static batching."""
        if self.queue_timeout_s and self.timeout_action == "reject" and not view.running:
            for state in view.waiting:
                if self._timeout_ns(state) < view.now_ns:
                    builder.reject(state, "it timed out in the queue")
        return super().plan(view, builder)

    def dispatch_at_ns(self, view: EngineView) -> int:
        """Return now for a preferred size, else the end of the delay or the next time-out."""
        batch = self._largest_batch(view)
        if not batch:
            return FOREVER
        if self._preferred_size(len(batch), view):
            return view.now_ns
        at_ns = min(self._delayed_until_ns(batch), self._next_timeout_ns(view) + 1)
        return max(view.now_ns, at_ns)

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        batch = self._largest_batch(view)
        waited = self.max_queue_delay_s > 0.0 and self._delayed_until_ns(batch) <= view.now_ns
        size = 0 if waited else self._preferred_size(len(batch), view)
        return self._admit(batch[: size or len(batch)], builder)

    def _largest_batch(self, view: EngineView) -> list[RequestState]:
        """List as many as fit one batch of those who wait, in the order of the queue."""
        return list(islice(self._in_order(view), self._most(view)))

    def _most(self, view: EngineView) -> int:
        return min(self.max_batch_size or view.config.max_num_seqs, view.config.max_num_seqs)

    def _preferred_size(self, num_waiting: int, view: EngineView) -> int:
        sizes = self.preferred_batch_sizes or (self._most(view),)
        return max((size for size in sizes if size <= num_waiting), default=0)

    def _delayed_until_ns(self, batch: list[RequestState]) -> int:
        oldest_ns = min(state.request.arrival_ns for state in batch)
        return oldest_ns + round(self.max_queue_delay_s * 1e9)

    def _in_order(self, view: EngineView) -> Iterable[RequestState]:
        if self.queue_timeout_s is None:
            return view.waiting
        now_ns = view.now_ns
        if self.timeout_action == "reject":
            return (s for s in view.waiting if self._timeout_ns(s) >= now_ns)
        return sorted(
            view.waiting, key=lambda s: (self.key(s, now_ns), self._timeout_ns(s) < now_ns)
        )

    def _next_timeout_ns(self, view: EngineView) -> int:
        if self.queue_timeout_s is None:
            return FOREVER
        timeouts_ns = map(self._timeout_ns, view.waiting)
        return min((t for t in timeouts_ns if t >= view.now_ns), default=FOREVER)

    def _timeout_ns(self, state: RequestState) -> int:
        """Return the last instant at which it may be in the queue."""
        if self.queue_timeout_s is None or state.first_scheduled_ns >= 0:
            return FOREVER
        return state.request.arrival_ns + round(self.queue_timeout_s * 1e9)
