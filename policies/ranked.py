"""Preemptive scheduling in the order of a rank over all requests."""

from typing import Any, ClassVar

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import Place, grant_everyone
from schedlab.policies.rank_loop import grant_by_rank
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class Ranked(Policy):
    """Serve running and waiting requests alike in the order of `key`, the best ranked first.

    The best ranked `max_num_seqs` make the step. A running request beyond them, beyond the token
    budget or without a free block is left out and keeps its memory until a better ranked one needs
    it: a change of places evicts only where blocks run short, or the seats if
    `max_num_resident` sets any. A waiting request that outranks running ones takes their memory,
    from the worst ranked upwards, if that makes enough room for all of it; otherwise nobody behind
    it is admitted. A block that others hold as well makes no room, and whoever waits for what is
    being loaded for another is passed over. Memory reserved in contiguous ranges is never taken for
    another request: then the rank orders admissions and tokens only.

    Where everybody fits, waiting requests included, the rank decides nothing and nobody is ranked.
    Any other decision sorts the running requests, O(n log n) in the batch; the queue is sorted.

    Skip-ahead is honest if the keys of decoding requests only get better and all others stay,
    which holds until `horizon`: then who decodes stays ahead of who does not, and the memory that
    could be made free for the first in the queue only falls. A subclass that overrides `key`
    promises nothing until it says its horizon.
    """

    hooks = (*Policy.hooks, "key")
    pauses = True
    can_pipeline = True
    lazy_ranks: ClassVar[bool] = False
    """Whether nothing but `key` looks at steps and time, or `on_tokens` makes up afterwards for all
    steps of a plan, so that ranks need not be looked at while everybody has a seat and gets a
    token, whatever the horizon."""
    asks_who_ran: ClassVar[bool] = True
    """Whether `on_tokens` asks every plan who decoded. If not, a plan that serves everybody does
    not list them, and those who took part and have not finished are all who run after it."""

    def settle(self) -> None:
        """Make up for what hooks put off while everybody was served: now ranks matter."""

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return for how many steps, and until when, no key gets worse though nothing happens."""
        return FOREVER, FOREVER

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Grant tokens by rank, preempting from the other end."""
        place = self._order(view.now_ns)
        # Of several batches in flight, who runs when one is back was not all in it.
        asks = self.asks_who_ran or view.config.pipeline_parallel_size > 1
        by_name = asks and self.on_tokens is not None
        fits = grant_everyone(view, builder, by_name, place)
        # Where KV is loaded beside the steps, who has a seat does not always get a token.
        lazy = fits and self.lazy_ranks and not view.config.kv_tiers
        if not lazy:
            self.settle()
        if not fits:
            grant_by_rank(view.running, view.waiting, builder, self.key, view.now_ns)
        return builder.build(*self.promise(view, hooks_matter=not lazy))

    def _order(self, now_ns: int) -> Place:
        key = self.key

        def place(state: RequestState) -> tuple[Any, int, int]:
            return key(state, now_ns), state.request.arrival_ns, state.id

        return place
