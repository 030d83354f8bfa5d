"""Nested WAIT: thresholds between segments of output length, without a prediction."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from operator import mul

from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.policies.segment_choice import choose, grant_chosen
from schedlab.policies.segments import Segments
from schedlab.policies.wait import check_types
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState
from schedlab.sim.sums import in_order


@register("nested_wait")
class NestedWait(Policy):
    """Let answers pass from one segment of lengths to the next only in groups.

    Optimises throughput in heavy traffic when lengths are unknown. Needs the distribution of
    output lengths over the segments (given as rates of the types that end in them, or counted
    from finished answers), and no prediction. Segment i covers the stages between output lengths
    ``edges[i-1]`` and ``edges[i]``. It may hold a share of `total_limit` proportional to its
    stages times the flow into it. A segment takes requests from its entry, new ones for the
    first, survivors of the one before for the others, when as many wait there as it may have at
    one stage; otherwise neither it nor any later segment runs. Long answers pause at entries and
    keep their memory; the GPU may idle, by design.

    Two additions keep it from waiting for ever: after `max_wait_s` of the first at an entry, the
    segment takes what is there; and with `drain`, an entry that nobody can reach any more does
    not wait (the authors' code drops these requests). Who waits for a first token can reach it if
    there is a seat and memory for all of it now. So nobody starves. When memory runs out,
    the latest admission is preempted.

    A decision looks at those who wait at entries, come, end or pass an edge: requests are followed
    from plan to plan (`Segments`), and only after preemptions, drafts and the like is it linear in
    the running batch. Skip-ahead is honest: a plan that takes everybody inside of its segments
    stays the same until one of them comes to the next entry, because all move on together, if two
    things hold. Nobody can be taken from an entry after those who are: they fill their segment, or
    nobody else stands there. And where fewer stand at an entry from then on than must, either
    nobody can come, or somebody who stays at an entry, there or behind, has waited for too long
    already, and waits on. Any other promises nothing.
    The next time-out is named.

    Parameters
    ----------
    output_edges : sequence of int
        Output lengths at which the segments end, ascending; longer answers stay in the last.
    request_rates : sequence of float, optional
        Relative arrival rates of the types that end in each segment; counted if not given.
    total_limit : int
        Requests under way, all segments together.
    max_wait_s : float
        Longest wait of a request at an entry for others.
    drain : bool
        See above.
    """

    source = "Ao, Luo, Simchi-Levi, Wang (arXiv:2504.11320), vidur_or, general_nested_booking_limit"

    def __init__(
        self,
        output_edges: Sequence[int] = (64, 128, 256, 512, 1024),
        request_rates: Sequence[float] | None = None,
        total_limit: int = 64,
        max_wait_s: float = 1.0,
        drain: bool = True,
    ) -> None:
        check_types(output_edges, request_rates, total_limit, max_wait_s)
        self.output_edges = output_edges
        self.request_rates = request_rates
        self.total_limit = total_limit
        self.max_wait_s = max_wait_s
        self._timeout_ns = round(max_wait_s * 1e9)
        self.drain = drain
        # Answers that came as far as each segment; one has ended in each to begin with, so that
        # every segment has a flow.
        self._num_came = [*range(len(output_edges), 0, -1)]
        self._inner_edges = output_edges[:-1]
        self._stages = [end - start for start, end in pairwise((0, *output_edges))]
        self._whole = sum(map(mul, self._stages, self._num_came))  # steps of all these answers
        self._limits: list[tuple[int, int]] = []
        self._set_limits()
        self._segments = Segments(output_edges)

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Let a request that ran on another engine wait at its entry from now on."""
        if state.status is RUNS:
            self._segments.came(state, now_ns)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Follow requests through the segments, and remember when they ran."""
        self._segments.move_on(plan, num_steps, now_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Count a complete answer in the segments through which it came."""
        self._segments.ended(state)
        if not state.is_complete:
            return
        num_came, last = self._num_came, bisect_left(self._inner_edges, state.num_output_tokens)
        for i in range(last + 1):
            num_came[i] += 1
        self._whole += self.output_edges[last]
        if self.request_rates is None:
            self._set_limits()

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Run the segments from the first up to the one whose entry still gathers."""
        segments = self._segments
        segments.find(view)
        chosen = choose(segments, self._limits, view, builder, self._timeout_ns, self.drain)
        all_granted = grant_chosen(segments, chosen, view, builder)
        steps = chosen.steps if all_granted else 1
        if view.config.num_speculative_tokens:  # drafts bring requests together at one stage
            steps = 1
        plan = builder.build(steps, chosen.until_ns)
        if all_granted:
            segments.run_by(plan, chosen)
        return plan

    def _set_limits(self) -> None:
        """Work out of each segment how many it may hold, and how many at one stage."""
        stages, rates, most = self._stages, self.request_rates, self.total_limit
        if rates is None:  # whole numbers, so that nothing is rounded before the end
            whole = self._whole
            self._limits = [
                (int(most * count * flow // whole) or 1, -int(most * flow // -whole))
                for count, flow in zip(stages, self._num_came, strict=True)
            ]
            return
        flows = [in_order(rates[i:]) for i in range(len(stages))]
        total = in_order(map(mul, stages, flows))
        shares = [most * count * flow / total for count, flow in zip(stages, flows, strict=True)]
        self._limits = [
            (int(share) or 1, ceil(share / count))
            for share, count in zip(shares, stages, strict=True)
        ]
