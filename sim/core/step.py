"""A step: what its batch looks like to a cost model, and what the log keeps of it."""

from __future__ import annotations

from bisect import bisect_left

from mypy_extensions import mypyc_attr

from schedlab.sim.core.executor import Steps
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.population import Population
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.segment_row import SegmentRow


@mypyc_attr(free_list_len=1)
class Segment:
    """A run of steps of one batch: planned and under way, not yet committed.

    Attributes
    ----------
    plan : BatchPlan
        What is done in each of them.
    start_ns : int
        When the first one starts.
    steps : Steps
        How long they take, and who finishes in the last one.
    shape : BatchShape
        What the first of them costs by.
    row : SegmentRow
        What the log will say.
    first_step_blocks : int
        KV blocks that the decodes of the first step open; the plan has allocated them.
    end_ns : int
        When the last one ends.
    """

    __slots__ = ("end_ns", "first_step_blocks", "plan", "row", "shape", "start_ns", "steps")

    def __init__(
        self,
        plan: BatchPlan,
        start_ns: int,
        steps: Steps,
        shape: BatchShape,
        row: SegmentRow,
        first_step_blocks: int,
    ) -> None:
        self.plan = plan
        self.start_ns = start_ns
        self.steps = steps
        self.shape = shape
        self.row = row
        self.first_step_blocks = first_step_blocks
        self.end_ns = start_ns + steps.total_ns

    @property
    def num_steps(self) -> int:
        """Of how many steps it consists."""
        return self.steps.num_steps

    def retime(self, durations_ns: list[int]) -> None:
        """Let its steps take another time than the executor said."""
        self.steps.durations_ns = durations_ns
        self.end_ns = self.start_ns + self.steps.total_ns

    def cut(self, now_ns: int) -> bool:
        """Drop the steps that have not started before `now_ns`; False if there are none."""
        steps, start_ns = self.steps, self.start_ns
        if steps.times is not None:
            num_begun, took_ns = steps.times.begun_before(steps.num_steps, now_ns - start_ns)
            if num_begun == steps.num_steps:
                return False
            self._keep(num_begun, start_ns + took_ns)
            return True
        for i, duration in enumerate(steps.durations_ns):
            if i and start_ns >= now_ns:
                self._keep(i, start_ns)
                return True
            start_ns += duration
        return False

    def break_off(self, now_ns: int) -> bool:
        """Drop the steps that have not ended by `now_ns`, perhaps all; False if there are none."""
        durations, end_ns = self.steps.durations_ns, self.start_ns
        for i, duration in enumerate(durations):
            end_ns += duration
            if end_ns > now_ns:
                self._keep(i, end_ns - duration)
                return True
        return False

    def _keep(self, num_steps: int, end_ns: int) -> None:
        self.steps.keep(num_steps)
        self.end_ns = end_ns
        self.row.num_steps = num_steps


def batch_shape(requests: Population, plan: BatchPlan, num_decodes: int) -> BatchShape:
    """Return what a step costs by.

    Parameters
    ----------
    requests : Population
        As they are when the step begins, the changes of the plan applied.
    plan : BatchPlan
        The step.
    num_decodes : int
        Requests of the decode batch that take part: all of them, or none.
    """
    batch = requests.decodes
    decode_context_sum_tokens = decode_context_max_tokens = decode_context_min_tokens = 0
    num_tokens = rows_sampled = num_decodes
    draft_tokens = 0
    if num_decodes:
        if requests.config.num_speculative_tokens:
            decode_context_sum_tokens = batch.context_sum_tokens
            draft_tokens = batch.drafts_next_step()
            num_tokens += draft_tokens
        else:  # as `context_sum_tokens`, written out
            decode_context_sum_tokens = batch._offset_sum + batch.size * batch.steps
        if requests.reads_extremes:
            decode_context_max_tokens = batch.context_max_tokens
            decode_context_min_tokens = batch.context_min_tokens
        elif plan.chunks:
            decode_context_max_tokens = batch.context_max_tokens
    chunks: tuple[tuple[int, int], ...] = ()
    if plan.chunks:
        priced: list[tuple[int, int]] = []
        for state, n in plan.chunks:  # none of them is in a batch: counters are absolute
            computed = state._computed
            priced.append((n, computed))
            num_tokens += n
            if state.request.prompt_tokens + state._generated - computed == n:
                rows_sampled += 1
        chunks = tuple(priced)
    padding_tokens = plan.padding_tokens
    padding_rows = padding_context_tokens = 0
    num_running, num_waiting = len(requests.running), requests.waiting.size
    if not requests.is_plain:
        num_running += requests.in_pipeline.size
        if plan.pad_finished and num_decodes:
            padding_rows, padding_context_tokens = len(requests.held), requests.held_tokens
        if requests.step_overrun:
            padding_rows += requests.step_overrun
            padding_context_tokens += requests.step_overrun_context_tokens
        padding_tokens += padding_rows
        rows_sampled += padding_rows
    sizes = requests.config.cudagraph_capture_sizes
    if sizes:
        padding_tokens += _graph_padding(sizes, num_tokens + padding_tokens)
    swapped_bytes = requests.step_swapped_bytes
    gathered_tokens = 0
    return BatchShape(
        num_decodes,
        decode_context_sum_tokens,
        decode_context_max_tokens,
        chunks,
        padding_tokens,
        padding_context_tokens,
        rows_sampled,
        swapped_bytes,
        num_running,
        num_waiting,
        decode_context_min_tokens,
        gathered_tokens,
        padding_rows,
        draft_tokens,
    )


def _graph_padding(sizes: tuple[int, ...], num_tokens: int) -> int:
    """Count the tokens up to the next captured batch size; 0 beyond the largest."""
    i = bisect_left(sizes, num_tokens)
    return sizes[i] - num_tokens if i < len(sizes) else 0


def segment_row(
    requests: Population, shape: BatchShape, steps: Steps, start_ns: int, first_step_blocks: int
) -> SegmentRow:
    """Return what the log keeps of steps; the counts since the last step start anew.

    Parameters
    ----------
    requests : Population
        As they are when the first step begins.
    shape : BatchShape
        The first step.
    steps : Steps
        All of them.
    start_ns : int
        When the first one starts.
    first_step_blocks : int
        KV blocks allocated for decodes of the first step, which the log counts when it ends.
    """
    kv = requests.kv
    num_steps = len(steps._durations_ns) if steps.times is None else steps.num_steps
    num_decodes, chunks = shape.num_decodes, shape.chunks
    num_prefills = len(chunks)
    prefill_tokens = 0
    for n, _ in chunks:
        prefill_tokens += n
    prefills_done = shape.rows_sampled - num_decodes - shape.padding_rows
    resident_tokens = requests.resident_tokens
    kv_tokens = resident_tokens - kv.shared_tokens
    kv_allocated_blocks = kv.num_blocks - kv.free_blocks - first_step_blocks
    kv_reserved_unused_tokens = 0 if kv.grows else kv.fragmentation(resident_tokens)[0]
    num_running, num_waiting = shape.num_running, shape.num_waiting
    if not requests.is_plain:  # whose KV is on its way costs no scheduling
        num_running += len(requests.fetching) + len(requests.loading)
        num_waiting += len(requests.holding)
    num_preempted, recomputed_tokens = requests.step_preempted, requests.step_recomputed_tokens
    requests.step_preempted = requests.step_recomputed_tokens = requests.step_swapped_bytes = 0
    requests.step_overrun = requests.step_overrun_context_tokens = 0
    # By position, which is faster; a test compares names with fields.
    return SegmentRow(
        start_ns,
        num_steps,
        num_decodes,
        shape.decode_context_sum_tokens,
        num_prefills,
        prefill_tokens,
        prefills_done,
        shape.padding_tokens,
        num_running,
        num_waiting,
        kv_tokens,
        kv_allocated_blocks,
        kv_reserved_unused_tokens,
        num_preempted,
        recomputed_tokens,
        steps.overhead_ns,
        shape.swapped_bytes,
    )
