"""YAML is read with line numbers, strictly, and with the scalars users expect."""

import math

import pytest

from schedlab.sim import yaml_lines
from schedlab.sim.errors import SpecError
from schedlab.sim.yaml_lines import dotted, dump_yaml, parse_yaml


def parse(text):
    return parse_yaml(text, "file.yaml", numbered=True)


def test_yaml_scalars_are_those_of_yaml_1_2():
    text = "[1e3, .5, -3, 1_000, .inf, -.inf, true, on, yes, 1:30, 2020-01-01, null, 010]"
    assert parse(text).data == [
        1000.0, 0.5, -3, 1000, math.inf, -math.inf, True, "on", "yes", "1:30", "2020-01-01", None,
        10.0,
    ]  # fmt: skip


def test_yaml_places_name_the_line_of_every_key_and_item():
    located = parse("a: 1\nb:\n  c: 2\n  d:\n    - 3\n    - 4\n")
    assert located.place(("b", "c")) == "file.yaml:3"
    assert located.place(("b", "d", 1)) == "file.yaml:6"
    assert located.place(("b", "d", 1, "deeper")) == "file.yaml:6"
    assert located.place(("absent",)) == "file.yaml"
    # What is given on a command line has no lines.
    short = parse_yaml("a: 1\nb: [2]\n", "--set")
    assert set(short.places.values()) == {"--set"}
    assert set(parse_yaml("a: 1\nb: [2]\n", "x", numbered=True).places.values()) == {
        "x", "x:1", "x:2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"^file.yaml:3: a: key given twice \(first at file.yaml:1\)$"),
        ("x:\n  a: 1\n  a: 3\n", r"^file.yaml:3: x.a: key given twice"),
        ("a: 1\nb: [1, 2\n", r"^file.yaml:3: not valid YAML"),
        ("a: &x [*x]\n", r"^file.yaml:1: a YAML alias that contains itself$"),
        ("[1, 2]: 3\n", r"^file.yaml:1: a key must be a plain word$"),
        ("a: 1\n---\nb: 2\n", r"not valid YAML"),
        ("a: !!python/object:os.system x\n", r"^file.yaml:1: not valid YAML"),
        ("a: \x00", r"^file.yaml: not valid YAML"),
        ("a: \ud800", r"^file.yaml: not valid YAML"),
        ("a: 1\nb: *c\n", r"^file.yaml:2: not valid YAML: found undefined alias 'c'$"),
        ("a: @x\n", r"^file.yaml:1: not valid YAML: found character '@'"),
        ("[" * 101 + "]" * 101, r"^file.yaml: nested deeper than 100 levels$"),
        ("[\n" * 20_000, r"^file.yaml: nested deeper than 100 levels$"),
    ],
)
def test_yaml_malformed_raises_naming_the_line(text, message):
    with pytest.raises(SpecError, match=message):
        parse(text)


def test_yaml_of_a_hundred_levels_is_read():
    assert str(parse("{a: " + "[" * 99 + "]" * 99 + "}").data["a"]) == "[" * 99 + "]" * 99


def test_yaml_empty_file_is_an_empty_mapping():
    assert parse("# nothing\n").data == {}


def test_dump_yaml_reads_back_equal():
    data = {
        "a": [
            1.0,
            math.inf,
            -math.inf,
            "1e3",
            "on",
            1e-7,
            "1:30",
            None,
            "null",
            "",
            "true",
            True,
            0,
            -2,
        ],
        "b": {"c": {}, "d": [], "e": "x: y # z", "f": "010"},
    }
    assert parse(dump_yaml(data)).data == data


def test_dotted_path_reads_as_users_write_it():
    assert dotted(("workload", "slice", 0)) == "workload.slice[0]"


def test_as_many_values_as_may_be_are_read_and_one_more_is_not(monkeypatch):
    monkeypatch.setattr(yaml_lines, "_MOST_VALUES", 4)
    # The list is one as well, and so is what an alias stands for.
    assert parse("[1, 2, 3]").data == [1, 2, 3]
    assert parse("[&a 1, 2, *a]").data == [1, 2, 1]
    for text in ("[1, 2, 3, 4]", "[&a 1, 2, 3, *a]"):
        with pytest.raises(SpecError, match="more than 4 values"):
            parse(text)
