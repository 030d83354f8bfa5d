"""Records that the hot path makes by position name each argument as the field it is for."""

import ast
import inspect
import random
from pathlib import Path

import numpy as np
import pytest
from librt.strings import BytesWriter

import schedlab.sim
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.log import REQUEST_COLUMNS, RunLog
from schedlab.sim.record.rows import CommonRows
from schedlab.sim.record.segment_row import SEGMENT_COLUMNS, SegmentRow
from schedlab.sim.record.spool import SpoolFile
from schedlab.sim.request import Request, RequestState, Slo

RECORDS = {
    "BatchPlan": tuple(inspect.signature(BatchPlan).parameters),
    "BatchShape": tuple(inspect.signature(BatchShape).parameters),
    "SegmentRow": tuple(inspect.signature(SegmentRow).parameters),
}
SIM = Path(schedlab.sim.__file__).parent


def calls(tree):
    """Yield which record is made and of what: `Record(a, b)`, `tuple.__new__(Record, (a, b))`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if getattr(node.func, "attr", None) == "__new__" and isinstance(node.args[-1], ast.Tuple):
            yield node.args[0].id, node.args[1].elts
        elif getattr(node.func, "id", None) in RECORDS:
            yield node.func.id, node.args


def name_of(argument):
    """Return the name that an argument goes by, `x` of `x`, `a.x` and `a._x`."""
    return getattr(argument, "id", None) or getattr(argument, "attr", "").lstrip("_")


def misplaced(tree):
    for name, arguments in calls(tree):
        for field, argument in zip(RECORDS[name], arguments, strict=False):
            if isinstance(argument, ast.Starred):  # the rest of such a record, as it was
                break
            if not isinstance(argument, ast.Constant) and name_of(argument) != field:
                yield argument.lineno, field


@pytest.mark.slow
def test_positional_records_name_their_fields():
    texts = {path: path.read_text() for path in SIM.rglob("*.py")}
    trees = {
        path: ast.parse(text)
        for path, text in texts.items()
        if any(f"{name}(" in text or f"{name}," in text for name in RECORDS)
    }
    found = {name: list(misplaced(tree)) for name, tree in trees.items()}
    assert not {name: lines for name, lines in found.items() if lines}
    made = {name for tree in trees.values() for name, _ in calls(tree)}
    assert made == set(RECORDS)


def test_swapped_arguments_are_noticed():
    assert list(misplaced(ast.parse("SegmentRow(num_steps, start_ns)"))) == [
        (1, "start_ns"),
        (1, "num_steps"),
    ]
    assert list(misplaced(ast.parse("BatchShape(shape.num_decodes, _, 0)"))) == [
        (1, "decode_context_sum_tokens")
    ]
    assert list(misplaced(ast.parse("tuple.__new__(BatchPlan, (chunks, chunks))"))) == [
        (1, "decodes")
    ]
    right = "SegmentRow(start_ns, row.num_steps, self._num_decodes)"
    assert not list(misplaced(ast.parse(right)))


def test_segment_rows_are_written_in_the_order_of_their_columns():
    numbers = range(1_000, 1_000 + len(SEGMENT_COLUMNS))
    row = SegmentRow(**dict(zip(SEGMENT_COLUMNS, numbers, strict=True)))
    assert {name: getattr(row, name) for name in SEGMENT_COLUMNS} == dict(
        zip(SEGMENT_COLUMNS, numbers, strict=True)
    )
    table = BytesWriter()
    row.write(table)
    assert np.frombuffer(table.getvalue(), dtype=np.int64).tolist() == list(numbers)


def test_request_rows_are_written_in_the_order_of_their_columns():
    request = Request(1, 2, 3, 4, priority=12, slo=Slo(17.5, None, 19.5), predicted_tokens=16.5)
    state = RequestState(request)
    numbers = {"generated_tokens": 5, "first_scheduled_ns": 6, "first_token_ns": 7}
    numbers |= {"last_token_ns": 8, "num_preemptions": 10, "recomputed_tokens": 11}
    numbers |= {"queued_ns": 14, "cached_tokens": 15, "prefix_hit_tokens": 16}
    for name, number in numbers.items():
        setattr(state, "_generated" if name == "generated_tokens" else name, number)
    log = RunLog(16, grows=True)
    log.add_request(state, 4, 9, 13)
    told = {name: column[0] for name, column in log.requests().items()}
    expected = {"id": 1, "arrival_ns": 2, "prompt_tokens": 3, "output_tokens": 4, "finish_ns": 9}
    expected |= {"priority": 12, "status": 13, "predicted_tokens": 16.5, "slo_ttft_ms": 17.5}
    expected |= {"slo_e2el_ms": 19.5, **numbers}
    assert np.isnan(told.pop("slo_tpot_ms"))
    assert told == expected
    assert tuple(log.requests()) == REQUEST_COLUMNS


def test_common_rows_dealt_to_their_logs_are_what_each_would_write_alone():
    common = CommonRows(SpoolFile())
    alone, together = ([RunLog(16, grows=True) for _ in range(3)] for _ in range(2))
    for log in together:
        log.write_to(common)
    draw = random.Random(7)
    for number in range(40):
        place = draw.randrange(2)  # the third writes nothing
        num_steps = draw.randint(1, 3)
        durations_ns = [draw.randint(1, 9) for _ in range(num_steps)]
        new_blocks = [draw.randint(0, 9) for _ in range(num_steps)]
        state = RequestState(Request(number, number, 3, 4))
        for log in (alone[place], together[place]):
            row = [number, num_steps, *[number + i for i in range(15)]]
            log.add_segment(SegmentRow(*row), durations_ns, new_blocks)
            log.add_stint(number, 5, log.num_steps - num_steps, log.num_steps)
            if number % 3:
                log.add_request(state, 4, number, 0)
        if number == 20:  # what is read meanwhile is not read twice
            together[1].requests()
    for one, other in zip(alone, together, strict=True):
        assert one.num_steps == other.num_steps
        for of_one, of_other in ((one.requests(), other.requests()), (one.steps(), other.steps())):
            for name in of_one:
                np.testing.assert_array_equal(of_other[name], of_one[name])
        for number in range(40):
            np.testing.assert_array_equal(other.token_times(number), one.token_times(number))
