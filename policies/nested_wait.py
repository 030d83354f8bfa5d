"""Nested WAIT: thresholds between segments of output length, without a prediction."""

import math
from collections.abc import Sequence
from itertools import pairwise

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.registry import register
from schedlab.policies.segments import (
    Segment,
    in_order_of_admission,
    note_ran,
    since_ns,
    sort_by_segment,
)
from schedlab.policies.wait import check_types
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState, Status
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
    not wait (the authors' code drops these requests). So nobody starves. When memory runs out,
    the latest admission is preempted.

    A decision is linear in the running batch. Skip-ahead is honest: a plan that takes everybody
    inside of its segments, nobody from an entry and nobody on a time-out stays the same until one
    of them comes to the next entry, because all move on together; any other promises nothing. The
    next time-out is named.

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
        self.drain = drain
        # One of each to begin with, so that every segment has a flow.
        self._ended = [1] * len(output_edges)
        self._limits: list[tuple[int, int]] = []
        self._set_limits()
        self._ran_ns: dict[int, int] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Let a request that ran on another engine wait at its entry from now on."""
        if state.status is Status.RUNNING:
            self._ran_ns[state.id] = now_ns

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Remember when requests ran, to know how long they wait at an entry."""
        note_ran(plan.decoding(), now_ns, self._ran_ns)
        note_ran([state for state, _ in plan.chunks], now_ns, self._ran_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Count the answer in the segment where it ended."""
        length, last = state.num_output_tokens, len(self.output_edges) - 1
        segment = next((i for i, edge in enumerate(self.output_edges) if length <= edge), last)
        self._ended[segment] += 1
        self._set_limits()
        self._ran_ns.pop(state.id, None)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Run the segments from the first up to the one whose entry still gathers."""
        segments = sort_by_segment(view.running, view.prefilling, self.output_edges)
        timeout_ns = round(self.max_wait_s * 1e9)
        chosen: list[RequestState] = []
        timed_out: list[int] = []
        num_new, until_ns, steps = 0, FOREVER, FOREVER
        for i, (limit, group) in enumerate(self._limits):
            segment = segments[i]
            gathered = len(segment.entry) if i else len(view.waiting)
            places = max(min(group, limit - len(segment.inside)), 0)
            if gathered < places and self._may_gather(i, gathered, segments):
                stalled_ns = [self._least_since_ns(behind) for behind in segments[i:]]
                if i == 0 and gathered:
                    stalled_ns.append(view.waiting.head.request.arrival_ns)
                gather_until_ns = min(stalled_ns) + timeout_ns
                if gather_until_ns > view.now_ns:
                    until_ns = gather_until_ns
                    break
                timed_out.append(i)
            if i == 0:
                num_new = places
            within = segment.at_most(group)
            chosen += within + segment.entry[:places]
            if len(within) < len(segment.inside) or (places and segment.entry):
                steps = 1
            elif i + 1 < len(self.output_edges):  # all move on together to the end of the segment
                furthest = max(segment.stages, default=-FOREVER)
                steps = min(steps, max(self.output_edges[i] - furthest, 1))
        if view.config.num_speculative_tokens:  # drafts bring requests together at one stage
            steps = 1
        if timed_out and steps > 1 and not self._stay_timed_out(segments[timed_out[-1] :], view):
            steps = 1
        all_granted = self._grant(chosen, num_new, view, builder)
        return builder.build(max_steps=steps if all_granted else 1, until_ns=until_ns)

    def _stay_timed_out(self, segments: Sequence[Segment], view: EngineView) -> bool:
        """Whether the first of these, which runs on a time-out, will also in the steps to come.

        Who runs waits anew; who stays at an entry has waited as long as before. What is so of a
        segment is so of those before it, which wait for the same requests and more.
        """
        waited_until_ns = view.now_ns - round(self.max_wait_s * 1e9)
        waiting = (since_ns(segment.entry, self._ran_ns) for segment in segments)
        return min(min(ns, default=FOREVER) for ns in waiting) <= waited_until_ns

    def _least_since_ns(self, segment: Segment) -> int:
        """Return since when the first of a segment waits; if nobody is there, for ever."""
        ran_ns = self._ran_ns
        at_entry, inside = since_ns(segment.entry, ran_ns), since_ns(segment.inside, ran_ns)
        return min(min(at_entry, default=FOREVER), min(inside, default=FOREVER))

    def _set_limits(self) -> None:
        """Work out of each segment how many it may hold, and how many at one stage."""
        edges, rates = self.output_edges, self.request_rates or self._ended
        stages = [end - start for start, end in pairwise((0, *edges))]
        flows = [in_order(rates[i:]) for i in range(len(edges))]
        total = in_order(n * flow for n, flow in zip(stages, flows, strict=True))
        self._limits = []
        for num_stages, flow in zip(stages, flows, strict=True):
            share = self.total_limit * num_stages * flow / total
            self._limits.append((max(int(share), 1), math.ceil(share / num_stages)))

    def _may_gather(self, number: int, gathered: int, segments: Sequence[Segment]) -> bool:
        if not self.drain:
            return True
        if number == 0:
            return bool(gathered)
        return any(segment.entry or segment.inside for segment in segments[:number])

    def _grant(
        self, chosen: list[RequestState], num_new: int, view: EngineView, builder: PlanBuilder
    ) -> bool:
        """Grant all of them what they need if it fits, then new ones; return whether it did."""
        # In order of admission: were a late one granted first, an early one could make room only by
        # giving up itself, and two that start over by turns would never finish.
        in_turn = in_order_of_admission(view.running, chosen)
        all_granted = not view.prefilling and builder.grant_all(in_turn)
        if not all_granted:
            victims = list(view.running)
            for state in in_turn:
                if state not in builder.preempted and builder.tokens_left:
                    grant_or_preempt(builder, state, victims)
        if builder.preempted:
            return False
        for state in view.waiting:
            if num_new < 1 or not builder.grant(state):
                break
            num_new -= 1
        return all_granted
