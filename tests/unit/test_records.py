"""Records that the hot path makes by position name each argument as the field it is for."""

import ast
import inspect
from pathlib import Path

import pytest

import schedlab.sim
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.record.log import _RequestRow
from schedlab.sim.record.steps import SegmentRow

RECORDS = {
    "BatchPlan": tuple(inspect.signature(BatchPlan).parameters),
    "BatchShape": tuple(inspect.signature(BatchShape).parameters),
    # What packs the numbers of a row right away.
    "pack_segment": SegmentRow._fields,
    "_pack_request": _RequestRow._fields,
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
    assert list(misplaced(ast.parse("pack_segment(num_steps, start_ns)"))) == [
        (1, "start_ns"),
        (1, "num_steps"),
    ]
    assert list(misplaced(ast.parse("BatchShape(shape.num_decodes, _, 0)"))) == [
        (1, "decode_context_sum_tokens")
    ]
    assert list(misplaced(ast.parse("tuple.__new__(BatchPlan, (chunks, chunks))"))) == [
        (1, "decodes")
    ]
    right = "pack_segment(start_ns, row.num_steps, self._num_decodes)"
    assert not list(misplaced(ast.parse(right)))
