"""Records that the hot path makes by position name each argument as the field it is for."""

import ast
from pathlib import Path

import schedlab.sim
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.log import _RequestRow
from schedlab.sim.record.steps import SegmentRow

RECORDS = {record.__name__: record for record in (BatchPlan, BatchShape, SegmentRow, _RequestRow)}
SIM = Path(schedlab.sim.__file__).parent


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in RECORDS:
            yield node


def name_of(argument):
    """Return the name that an argument goes by, `x` of `x`, `a.x` and `a._x`."""
    return getattr(argument, "id", None) or getattr(argument, "attr", "").lstrip("_")


def misplaced(tree):
    for call in calls(tree):
        for field, argument in zip(RECORDS[call.func.id]._fields, call.args, strict=False):
            if not isinstance(argument, ast.Constant) and name_of(argument) != field:
                yield call.lineno, field


def test_positional_records_name_their_fields():
    texts = {path: path.read_text() for path in SIM.rglob("*.py")}
    trees = {
        path: ast.parse(text)
        for path, text in texts.items()
        if any(f"{name}(" in text for name in RECORDS)
    }
    found = {name: list(misplaced(tree)) for name, tree in trees.items()}
    assert not {name: lines for name, lines in found.items() if lines}
    made = {call.func.id for tree in trees.values() for call in calls(tree)}
    assert made == set(RECORDS)


def test_swapped_arguments_are_noticed():
    assert list(misplaced(ast.parse("SegmentRow(num_steps, start_ns)"))) == [
        (1, "start_ns"),
        (1, "num_steps"),
    ]
    assert list(misplaced(ast.parse("BatchShape(shape.num_decodes, _, 0)"))) == [
        (1, "decode_context_sum_tokens")
    ]
    assert not list(misplaced(ast.parse("SegmentRow(start_ns, row.num_steps, self._num_decodes)")))
