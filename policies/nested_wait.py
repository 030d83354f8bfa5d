"""Nested WAIT: thresholds between segments of output length, without a prediction."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import grant_or_preempt
from schedlab.policies.registry import register
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
        for state in (*plan.decoding(), *(state for state, _ in plan.chunks)):
            if state.status is Status.RUNNING:  # whose answer ended has been forgotten already
                self._ran_ns[state.id] = now_ns

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Count the answer in the segment where it ended."""
        length, last = state.num_output_tokens, len(self.output_edges) - 1
        segment = next((i for i, edge in enumerate(self.output_edges) if length <= edge), last)
        self._ended[segment] += 1
        self._set_limits()
        self._ran_ns.pop(state.id, None)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Run the segments from the first up to the one whose entry still gathers."""
        entries, inside, stages = self._stages(view)
        timeout_ns = round(self.max_wait_s * 1e9)
        chosen: list[RequestState] = []
        timed_out: list[int] = []
        num_new, until_ns, steps = 0, FOREVER, FOREVER
        for i, (limit, group) in enumerate(self._limits):
            gathered = len(entries[i]) if i else len(view.waiting)
            places = max(min(group, limit - len(inside[i])), 0)
            if gathered < places and self._may_gather(i, gathered, entries, inside):
                stalled = chain(*entries[i:], *inside[i:])
                since_ns = [self._since_ns(state) for state in stalled]
                if i == 0 and gathered:
                    since_ns.append(view.waiting.head.request.arrival_ns)
                gather_until_ns = min(since_ns, default=FOREVER) + timeout_ns
                if gather_until_ns > view.now_ns:
                    until_ns = gather_until_ns
                    break
                timed_out.append(i)
            if i == 0:
                num_new = places
            within = _at_most(group, inside[i], stages[i])
            chosen += within + entries[i][:places]
            if len(within) < len(inside[i]) or (places and entries[i]):
                steps = 1
            elif i + 1 < len(self.output_edges):  # all move on together to the end of the segment
                furthest = max(stages[i], default=-FOREVER)
                steps = min(steps, max(self.output_edges[i] - furthest, 1))
        if view.config.num_speculative_tokens:  # drafts bring requests together at one stage
            steps = 1
        if timed_out and steps > 1 and not self._stay_timed_out(timed_out[-1], entries, view):
            steps = 1
        all_granted = self._grant(chosen, num_new, view, builder)
        return builder.build(max_steps=steps if all_granted else 1, until_ns=until_ns)

    def _stay_timed_out(
        self, segment: int, entries: list[list[RequestState]], view: EngineView
    ) -> bool:
        """Whether a segment that runs on a time-out will also in the steps to come.

        Who runs waits anew; who stays at an entry has waited as long as before. What is so of a
        segment is so of those before it, which wait for the same requests and more.
        """
        waited_until_ns = view.now_ns - round(self.max_wait_s * 1e9)
        return any(self._since_ns(state) <= waited_until_ns for state in chain(*entries[segment:]))

    def _since_ns(self, state: RequestState) -> int:
        """Return when a request ran last; if it was only loaded so far, when it had its seat."""
        return self._ran_ns.get(state.id, state.first_scheduled_ns)

    def _stages(
        self, view: EngineView
    ) -> tuple[list[list[RequestState]], list[list[RequestState]], list[list[int]]]:
        """Sort running requests into those at the entry of a segment, and inside it.

        The lengths so far of those inside, in their order, are returned as well.
        """
        edges, last = self.output_edges, len(self.output_edges) - 1
        entries: list[list[RequestState]] = [[] for _ in edges]
        inside: list[list[RequestState]] = [[] for _ in edges]
        stages: list[list[int]] = [[] for _ in edges]
        prompts = {*view.prefilling}
        for state in view.running:
            generated = 0 if state in prompts else state.num_output_tokens
            segment = bisect_right(edges, generated)
            if segment > last:
                segment = last
            if segment and generated == edges[segment - 1]:
                entries[segment].append(state)
            else:
                inside[segment].append(state)
                stages[segment].append(generated)
        return entries, inside, stages

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

    def _may_gather(
        self,
        segment: int,
        gathered: int,
        entries: list[list[RequestState]],
        inside: list[list[RequestState]],
    ) -> bool:
        if not self.drain:
            return True
        return bool(gathered) if segment == 0 else any(entries[:segment] + inside[:segment])

    def _grant(
        self, chosen: list[RequestState], num_new: int, view: EngineView, builder: PlanBuilder
    ) -> bool:
        """Grant all of them what they need if it fits, then new ones; return whether it did."""
        # In order of admission: were a late one granted first, an early one could make room only by
        # giving up itself, and two that start over by turns would never finish.
        victims, turn = list(view.running), set(chosen)
        in_turn = [state for state in victims if state in turn]
        all_granted = not view.prefilling and builder.grant_all(in_turn)
        if not all_granted:
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


def _at_most(group: int, states: list[RequestState], stages: list[int]) -> list[RequestState]:
    """Return up to `group` of the requests at each stage; prompts are at stage 0 in any number."""
    at_stage = Counter(stages)
    del at_stage[0]
    if max(at_stage.values(), default=0) <= group:
        return states
    at_stage.clear()
    chosen = []
    for state, stage in zip(states, stages, strict=True):
        if at_stage[stage] < group or not stage:
            at_stage[stage] += 1
            chosen.append(state)
    return chosen
