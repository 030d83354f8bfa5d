"""A step: what it costs by and what is logged of it, each number another; and steps cut short."""

from dataclasses import fields

import pytest

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import Steps
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.population import Population
from schedlab.sim.core.step import Segment, batch_shape, segment_row
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.cost.segment import StepTimes
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.kv.contiguous import ContiguousKVCache
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.record.segment_row import SEGMENT_COLUMNS, SegmentRow
from schedlab.sim.request import RequestState, Status
from tests.laws import arrival


def request(number, prompt=40, computed=0, generated=0):
    state = RequestState(arrival(number, prompt=prompt).request)
    state.status, state._computed, state._generated = Status.RUNNING, computed, generated
    return state


def plan_of(*chunks, padding_tokens=0, pad_finished=False):
    return BatchPlan(
        None, chunks, (), (), (), (), padding_tokens, "hold", pad_finished, 1, FOREVER, 0, tuple
    )


def population(**keys):
    """Have two decode on contexts of 50 and 70 tokens, and three who have finished held."""
    config = EngineConfig(num_blocks=99, max_model_len=99, block_size=4, **keys)
    found = Population(config, WaitingQueue(), PagedKVCache(99, 4))
    for number, context in ((0, 50), (1, 70)):
        state = request(number, 40, context, context - 39)
        found.running[number] = state
        found.decodes.join(state)
    found.held = {number: request(number) for number in (10, 11, 12)}
    found.held_tokens = 333
    found.is_plain = False
    for number in range(20, 25):
        found.waiting.add(RequestState(arrival(number).request), 0)
    found.running |= {number: request(number) for number in (30, 31)}
    found.step_swapped_bytes = 4_444
    return found


PROMPTS = ((request(30, 40, 8), 9), (request(31, 40, 30), 10))  # of which the second is done then


def shape_of(requests, plan, num_decodes):
    shape = batch_shape(requests, plan, num_decodes)
    return {f.name: getattr(shape, f.name) for f in fields(shape)}


def test_shape_of_a_step_has_its_decodes_and_its_prompts():
    assert shape_of(population(), plan_of(*PROMPTS, padding_tokens=7), 2) == {
        "num_decodes": 2, "decode_context_sum_tokens": 50 + 70, "decode_context_max_tokens": 70,
        "decode_context_min_tokens": 50, "chunks": ((9, 8), (10, 30)), "padding_tokens": 7,
        "padding_context_tokens": 0, "rows_sampled": 2 + 1, "swapped_bytes": 4_444,
        "num_running": 4, "num_waiting": 5, "gathered_tokens": 0, "padding_rows": 0,
        "draft_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reads_extremes", "chunks", "most", "least"),
    [(True, PROMPTS, 70, 50), (True, (), 70, 50), (False, PROMPTS, 70, 0), (False, (), 0, 0)],
)
def test_shape_of_a_step_has_extremes_of_contexts_where_they_are_read(
    reads_extremes, chunks, most, least
):
    requests = population()
    requests.reads_extremes = reads_extremes
    shape = shape_of(requests, plan_of(*chunks), 2)
    assert shape["decode_context_sum_tokens"] == 120
    assert shape["decode_context_max_tokens"] == most
    assert shape["decode_context_min_tokens"] == least


def test_shape_of_a_step_without_decodes_has_no_context_and_no_rows_of_who_is_held():
    shape = shape_of(population(), plan_of(*PROMPTS, pad_finished=True), 0)
    for name in ("num_decodes", "decode_context_sum_tokens", "decode_context_max_tokens",
                 "decode_context_min_tokens", "padding_rows", "padding_context_tokens",
                 "padding_tokens"):  # fmt: skip
        assert shape[name] == 0, name
    assert shape["rows_sampled"] == 1


def test_shape_of_a_step_pads_who_is_held_and_computes_who_has_ended():
    requests = population()
    padded = shape_of(requests, plan_of(*PROMPTS, padding_tokens=7, pad_finished=True), 2)
    assert (padded["padding_rows"], padded["padding_tokens"]) == (3, 7 + 3)
    assert (padded["padding_context_tokens"], padded["rows_sampled"]) == (333, 2 + 1 + 3)
    requests.step_overrun, requests.step_overrun_context_tokens = 6, 55
    both = shape_of(requests, plan_of(*PROMPTS, padding_tokens=7, pad_finished=True), 2)
    assert (both["padding_rows"], both["padding_tokens"]) == (3 + 6, 7 + 3 + 6)
    assert (both["padding_context_tokens"], both["rows_sampled"]) == (333 + 55, 2 + 1 + 3 + 6)
    alone = shape_of(requests, plan_of(), 2)
    assert (alone["padding_rows"], alone["padding_tokens"]) == (6, 6)
    assert (alone["padding_context_tokens"], alone["rows_sampled"]) == (55, 2 + 6)


@pytest.mark.parametrize(
    ("padding_tokens", "padded"),
    [(0, 24), (2, 24), (3, 24), (4, 40), (19, 40), (20, 20), (77, 77)],
)
def test_shape_of_a_step_is_padded_to_the_next_captured_size(padding_tokens, padded):
    # Two decodes and prompts of 19 tokens; 40 is the largest size that was captured.
    requests = population(cudagraph_capture_sizes=(8, 24, 40))
    shape = shape_of(requests, plan_of(*PROMPTS, padding_tokens=padding_tokens), 2)
    wanted = padded - 21 if padded in (24, 40) else padded
    assert shape["padding_tokens"] == wanted


def shape(**changes):
    values = {
        "num_decodes": 2, "decode_context_sum_tokens": 120, "decode_context_max_tokens": 70,
        "chunks": ((9, 8), (10, 30)), "padding_tokens": 13, "padding_context_tokens": 14,
        "rows_sampled": 8, "swapped_bytes": 15, "num_running": 16, "num_waiting": 17,
        "padding_rows": 5,
    }  # fmt: skip
    return BatchShape(**{**values, **changes})


@pytest.mark.parametrize("grows", [True, False])
def test_row_of_a_step_has_each_number_in_its_place_and_counts_begin_anew(grows):
    requests = population()
    if grows:
        requests.kv.free_blocks, requests.kv.shared_tokens = 60, 23
    else:
        requests.kv = ContiguousKVCache(99, 4, "exact", 99, lambda request: 30)
        state = request(0, 40, 0, 1)
        assert requests.kv.allocate(state, 40)  # 69 tokens reserved: 18 blocks
    requests.resident_tokens = 66 if not grows else 500
    requests.step_preempted, requests.step_recomputed_tokens = 31, 32
    requests.step_overrun, requests.step_overrun_context_tokens = 33, 34
    row = segment_row(requests, shape(), Steps([7, 8, 9], 35, []), 1_000, 3)
    found = {name: getattr(row, name) for name in SEGMENT_COLUMNS}
    expected = {
        "start_ns": 1_000, "num_steps": 3, "num_decodes": 2, "decode_context_sum_tokens": 120,
        "num_prefills": 2, "prefill_tokens": 19, "prefills_done": 8 - 2 - 5, "padding_tokens": 13,
        "num_running": 16, "num_waiting": 17, "num_preempted": 31, "recomputed_tokens": 32,
        "overhead_ns": 35, "swapped_bytes": 15,
    }  # fmt: skip
    if grows:
        expected |= {"kv_tokens": 500 - 23, "kv_allocated_blocks": 99 - 60 - 3,
                     "kv_reserved_unused_tokens": 0}  # fmt: skip
    else:
        expected |= {"kv_tokens": 66, "kv_allocated_blocks": 18 - 3,
                     "kv_reserved_unused_tokens": requests.kv.fragmentation(66)[0]}  # fmt: skip
        assert found["kv_reserved_unused_tokens"] == 69 - 66
    assert found == expected
    for name in ("step_preempted", "step_recomputed_tokens", "step_swapped_bytes", "step_overrun",
                 "step_overrun_context_tokens"):  # fmt: skip
        assert getattr(requests, name) == 0, name


def segment(*durations_ns, start_ns=100):
    row = SegmentRow(*range(17))
    finished = [request(0)]
    return Segment(plan_of(), start_ns, Steps(list(durations_ns), 0, finished), shape(), row, 4)


def unwritten_segment():
    """Return a segment of 10, 20, 30 and 40 ns that nobody has asked for one by one."""
    times = StepTimes(0.0, 0.0, 10.0, 0.0, 1, 1)
    steps = Steps([], 0, [request(0)], None, times, 4)
    return Segment(plan_of(), 100, steps, shape(), SegmentRow(*range(17)), 4)


def require_kept(one, kept):
    """Require that a segment of 10, 20, 30 and 40 ns has its first steps left; all if None."""
    if kept is None:
        assert (one.num_steps, one.end_ns, len(one.steps.finished)) == (4, 200, 1)
        return
    assert one.steps.durations_ns == [10, 20, 30, 40][:kept]
    assert one.end_ns == 100 + sum([10, 20, 30, 40][:kept])
    assert (one.num_steps, one.row.num_steps, one.steps.finished) == (kept, kept, [])


@pytest.mark.parametrize(
    ("now_ns", "kept"),
    [(0, 1), (100, 1), (109, 1), (110, 1), (111, 2), (130, 2), (131, 3), (160, 3), (161, None)],
)
def test_segment_that_is_cut_keeps_the_steps_that_have_started(now_ns, kept):
    for one in (segment(10, 20, 30, 40), unwritten_segment()):
        assert one.end_ns == 200  # they start at 100, 110, 130 and 160
        assert one.cut(now_ns) == (kept is not None)
        require_kept(one, kept)


@pytest.mark.parametrize(
    ("now_ns", "kept"),
    [(100, 0), (109, 0), (110, 1), (129, 1), (130, 2), (159, 2), (160, 3), (199, 3), (200, None)],
)
def test_segment_that_is_broken_off_keeps_the_steps_that_have_ended(now_ns, kept):
    for one in (segment(10, 20, 30, 40), unwritten_segment()):
        assert one.break_off(now_ns) == (kept is not None)
        require_kept(one, kept)


def test_segment_that_takes_another_time_ends_then():
    for one in (segment(10, 20), unwritten_segment()):
        one.retime([11, 25])
        assert (one.steps.durations_ns, one.end_ns, one.num_steps) == ([11, 25], 136, 2)


def test_steps_are_unwritten_until_somebody_asks_for_one():
    steps = unwritten_segment().steps
    assert (steps.num_steps, steps.total_ns, steps.times is None) == (4, 100, False)
    steps.keep(3)
    assert (steps.num_steps, steps.total_ns, steps.times is None) == (3, 60, False)
    assert steps.durations_ns == [10, 20, 30]
    assert steps.times is None
    steps.durations_ns.append(5)
    assert (steps.num_steps, steps.total_ns) == (4, 65)
