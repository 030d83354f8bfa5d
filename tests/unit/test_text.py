"""Numbers, Markdown tables and JSON: one rule for each."""

import doctest
import json
import math
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from schedlab.sim import text
from schedlab.sim.text import json_text, json_value, markdown_table, number, percent


def test_examples_in_the_documentation_hold():
    assert doctest.testmod(text).failed == 0


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0"), (-0.0, "0"), (7.0, "7"), (12345.0, "12,345"), (1234.5, "1,234"),
        (0.99951, "1.00"), (99.96, "100"), (9.996, "10.0"), (-2.5, "-2.50"), (0.000123, "0.000123"),
        (1e-9, "0.000000"), (math.nan, "-"), (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_number_has_three_digits_and_no_exponent(value, written):
    assert number(value) == written


def test_number_padded_gives_whole_numbers_decimals():
    assert [number(v, padded=True) for v in (0.0, 1.0, 21.0, 333.0, 4444.0)] == [
        "0", "1.00", "21.0", "333", "4,444",
    ]  # fmt: skip


def test_percent_of_nothing_measured_is_a_dash():
    assert (percent(math.nan), percent(math.inf), percent(-0.051, signed=True)) == (
        "-", "-", "-5.1%",
    )  # fmt: skip


def test_markdown_cells_cannot_break_the_table():
    lines = markdown_table(["a", ""], [["x|y", "two\nlines"]], right=[1])
    assert lines == ["| a | |", "|---|---:|", "| x\\|y | two lines |"]


def test_json_holds_numpy_paths_and_what_is_not_finite():
    value = {
        "a": np.float32(0.5), "b": np.arange(3), "c": (1, np.int64(2)), "d": Path("x/y"),
        "e": [math.nan, math.inf, -math.inf, np.nan], 3: True, "f": None,
        "g": MappingProxyType({4: np.float64(0.25)}),
    }  # fmt: skip
    plain = json_value(value)
    assert plain == {
        "a": 0.5, "b": [0, 1, 2], "c": [1, 2], "d": "x/y",
        "e": [None, "inf", "-inf", None], "3": True, "f": None,
        "g": {"4": 0.25},
    }  # fmt: skip
    assert json.loads(json_text(value)) == plain


def test_json_rounds_to_significant_digits_where_asked():
    assert json_value([1 / 3, 12345678.9, 5], digits=7) == [0.3333333, 12345680.0, 5]
