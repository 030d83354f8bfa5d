"""What a class of the user's did or gave, as messages tell it."""

from functools import partial

import numpy as np
import pytest

from schedlab.policies import ContinuousBatching
from schedlab.sim import own_code
from schedlab.sim.own_code import FAULTS, last_own_line, modules_of, raised, short, whole


class Own(ContinuousBatching):
    def fails(self, error):
        raise error

    def asks(self, number):
        return int(number)


def last_line_of(function):
    """Return where a function of two lines ends."""
    return f"test_own_code.py:{function.__code__.co_firstlineno + 1}"


def caught(call):
    try:
        call()
    except FAULTS as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "ValueError: one two"),
        (SystemExit(3), "SystemExit: 3"),
        (AssertionError(), "AssertionError"),
    ],
    ids=repr,
)
def test_what_a_class_raises_is_told_with_its_last_line(error, said):
    at = last_line_of(Own.fails)
    assert raised(caught(partial(Own().fails, error)), Own) == f"{said} ({at})"


def test_line_is_the_last_one_of_the_classs_own_though_others_raised():
    error = caught(partial(Own().asks, "x"))
    assert last_own_line(error, Own) == ("asks", last_line_of(Own.asks))
    error = caught(partial(np.testing.assert_equal, 1, 2))
    assert last_own_line(error, np.ndarray) is None
    assert raised(error, ContinuousBatching).startswith("AssertionError: ")


def test_function_is_told_as_a_class_is():
    def fails():
        return 1 // 0

    assert raised(caught(fails), fails).endswith(f"zero ({last_line_of(fails)})")


def test_exit_of_this_package_is_no_fault_of_the_class(monkeypatch):
    error = caught(partial(Own().fails, SystemExit(143)))
    monkeypatch.setitem(globals(), "__name__", "schedlab.experiments.commands.cli")
    with pytest.raises(SystemExit) as passed_on:
        raised(error, Own)
    assert passed_on.value is error


def test_modules_of_a_class_are_those_of_its_bases_but_ours():
    assert modules_of(Own) == {__name__}
    assert modules_of(ContinuousBatching) == set()
    assert own_code.is_ours("schedlab.sim")
    assert not own_code.is_ours("schedlabs")


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)], ids=repr)
def test_whole_number_of_any_kind_is_an_int(value):
    assert (whole(value), type(whole(value))) == (3, int)


@pytest.mark.parametrize("value", [True, np.bool_(1), 3.0, np.float64(3), "3", None, np.array(3)])
def test_what_is_no_whole_number_is_none(value):
    assert whole(value) is None


def test_value_is_written_on_one_line_that_is_not_too_long():
    class Dumb:
        def __repr__(self):
            raise ValueError

    assert short("a\nb") == repr("a\nb")
    assert short(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert len(short(["x" * 99])) == 63
    assert short(Dumb()) == "a Dumb"
