"""A simulated pipeline of GPUs: stages and the links between them, each serving batch by batch."""

from __future__ import annotations

from collections.abc import Collection

from mypy_extensions import mypyc_attr

from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import SimExecutor, Steps, Work
from schedlab.sim.core.micro_batch import MicroBatch
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.request import RequestState


@mypyc_attr(allow_interpreted_subclasses=True)
class PipelineExecutor(SimExecutor):
    """GPUs that each have some of the layers; a batch passes them one after the other.

    Parameters
    ----------
    pricing : Pricing
        What steps take, and each station of them (`CostModel.stations_ns`).

    Notes
    -----
    Stages and links are stations in a row: each serves one batch at a time, in the order in which
    they come, and those that find it busy wait before it, in a queue that holds them all. So a
    batch leaves a station at ``max(when it came, when the one before it left) + its time there``,
    and nobody overtakes. Scheduling overhead is spent at the first stage, unless batches are
    planned ahead (`Work.ready_ns`): then the host spends it beside the stages, on one batch after
    the other, and a batch comes to the first stage when it is scheduled and the tokens are known
    that it computes, as with vLLM's V2 model runner, whose first stage waits on the GPU for what
    the last one sampled (vllm/v1/worker/gpu/pp_utils.py of 0.32, `get_prev_sampled_outputs`).
    """

    def __init__(self, pricing: Pricing) -> None:
        super().__init__(pricing)
        self._free_ns = [0] * (2 * pricing.cost_model.num_stages - 1)
        self._host_free_ns = 0

    def joined(self, states: Collection[RequestState], decodes: DecodeBatch) -> None:
        """Note when the first of them finishes, by the clock of those that they decode with."""
        assert isinstance(decodes, MicroBatch)
        for state in states:
            step = decodes.steps + self._tokens_left(state)
            if step < decodes.soonest_end:
                decodes.soonest_end = step

    def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
        """Send one batch through the stations; see `Executor.execute`."""
        shape = work.shape
        overhead_ns = self.pricing.overhead_ns(shape)
        priced = shape.with_single_tokens_decoded() if self.decodes_single_tokens else shape
        stations_ns = self.pricing.stations_ns(priced)
        at_ns = work.now_ns
        if work.ready_ns < 0:
            stations_ns[0] += overhead_ns
        else:
            if self._host_free_ns > at_ns:
                at_ns = self._host_free_ns
            at_ns = self._host_free_ns = at_ns + int(overhead_ns * self.slowness + 0.5)
            if work.ready_ns > at_ns:
                at_ns = work.ready_ns
        if self.slowness != 1.0:  # of its devices, not of what joins them
            slow_ns = [max(1, int(ns * self.slowness + 0.5)) for ns in stations_ns[::2]]
            stations_ns[::2] = slow_ns
        stations_ns[0] += self._first_step_ns
        self._first_step_ns = 0
        self._last_shape, self._last_num_steps = priced, 1
        self._num_steps += 1
        if self.pricing.can_be_outside:
            self._count_outside(priced, 1)
        free_ns = self._free_ns
        for i, took_ns in enumerate(stations_ns):
            if free_ns[i] > at_ns:
                at_ns = free_ns[i]
            at_ns += took_ns
            free_ns[i] = at_ns
        finished: list[RequestState] = []
        if shape.num_decodes:
            finished = self._ending(work.decodes)
        for state, n in work.plan.chunks:
            if state.num_uncomputed_tokens == n and self._tokens_left(state) <= 1:
                finished.append(state)
        return Steps([at_ns - work.now_ns], overhead_ns, finished, stations_ns[::2])

    def _ending(self, decodes: DecodeBatch) -> list[RequestState]:
        """List who finishes in the next step of those that decode together."""
        assert isinstance(decodes, MicroBatch)
        steps = decodes.steps
        if steps + 1 < decodes.soonest_end:
            return []
        finished, soonest_end = [], FOREVER
        for state in decodes.members.values():
            left = self._tokens_left(state)
            if left <= 1:
                finished.append(state)
            elif steps + left < soonest_end:
                soonest_end = steps + left
        decodes.soonest_end = soonest_end
        return finished
