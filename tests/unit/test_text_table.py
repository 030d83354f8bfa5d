"""Tables in plain text: at no width is a number cut."""

import doctest
import re

import pytest

from schedlab.experiments.results import text_table as module
from schedlab.experiments.results.text_table import text_table

HEADER = ("policy", "rate", "req/s", "TTFT ms\nmean", "TTFT ms\nP99", "verdict")
ROWS = [
    ("static", "8", "1.86 ±0.02", "118,831 ±1,204", "240,040 ±12,345", "worse by 12.5 % [3, 22]"),
    ("longest_first:LongestPromptFirst", "16", "-", "inf", "0.000123", "beats fcfs " * 12),
]


def test_examples_in_the_documentation_hold():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("width", [10, 40, 60, 80, 100, 120, 180, None])
def test_text_table_at_any_width_shows_every_number_whole(width):
    shown = text_table("a title", HEADER, ROWS, width, num_keys=2)
    for row in ROWS:
        for cell in row[1:5]:
            assert re.search(rf"(?<!\S){re.escape(cell)}(?!\S)", shown), (cell, shown)
    assert "…" not in shown
    if width is None or width >= 60:
        assert max(map(len, shown.split("\n"))) <= (width or 180)


def test_text_table_too_wide_repeats_its_keys_and_keeps_columns_of_one_name_together():
    shown = text_table("", HEADER[:5], [row[:5] for row in ROWS], 78, num_keys=2)
    first, second = shown.split("\n\n")
    assert [block.count("static") for block in (first, second)] == [1, 1]
    assert "TTFT" not in first
    assert second.count("TTFT") == 2


def test_text_table_as_wide_as_the_line_keeps_its_keys_in_one_line():
    header, rows = ("policy", "req/s"), [("the longest prompt of all goes first", "1.86")]
    shown = text_table("", header, rows)
    width = max(map(len, shown.split("\n")))
    assert text_table("", header, rows, width) == shown
    assert text_table("", header, rows, width - 1) != shown


def test_text_table_wraps_texts_before_it_breaks_up():
    rows = [("a", "1", "many words " * 20)]
    shown = text_table("", ("name", "n", "what"), rows, 60)
    assert max(map(len, shown.split("\n"))) <= 60
    assert shown.count("name") == 1
    assert " ".join(shown.split()).count("many words") == 20


@pytest.mark.parametrize("width", [40, 50, 60, 70])
def test_text_table_wraps_a_sentence_around_its_numbers(width):
    told = "sjf is worse than fcfs in p99_ttft_ms by 17.6 % [2.6, 49.7]"
    shown = text_table("", ("setting", "verdict", "n"), [("rate=4", told, "5")], width)
    assert "17.6 % [2.6, 49.7]" in shown


def test_text_table_puts_numbers_to_the_right_and_whatever_has_a_word_to_the_left():
    rows = [("a", "1", "1"), ("b", "22.5", "none")]
    assert text_table("", ("name", "n", "what"), rows).split("\n")[2:] == [
        "a        1  1", "b     22.5  none",
    ]  # fmt: skip


def test_text_table_without_rows_is_its_header():
    assert text_table("", ("name", "n"), []) == "name  n\n────  ─"


def test_title_is_wrapped_to_the_width():
    table = text_table("one two three four five", ("a",), [("1",)], 12)
    assert table.split("\n")[:2] == ["one two", "  three four"]
    assert text_table("one two three four five", ("a",), [("1",)]).startswith("one two three four")


def test_text_table_with_a_column_that_holds_nothing_shows_the_others():
    table = text_table("", ("policy", "req/s", ""), [("fcfs", "1.5", ""), ("sjf", "2.0", "")])
    assert [line.split() for line in table.splitlines()][2:] == [["fcfs", "1.5"], ["sjf", "2.0"]]
