"""What is constructed of what a user says: which parameter is wrong, and how it is called."""

import sched

import pytest

from schedlab.policies import ContinuousBatching
from schedlab.sim.construct import check_call, construct, import_class
from schedlab.sim.errors import SpecError, TraceError


class Knobs:
    def __init__(self, first, second, third=3, *, fourth=4):
        self.values = first, second, third, fourth


def made(given=(), cls=Knobs, **params):
    return construct("thing 'x'", cls, ["second", "third", "fourth"], params, *given)


def test_thing_is_constructed_of_what_it_is_given_and_its_defaults():
    assert made(["a"], second=2).values == ("a", 2, 3, 4)
    assert made(["a"], second=2, fourth=9, third=7).values == ("a", 2, 7, 9)


@pytest.mark.parametrize("params", [{}, {"third": 7}, {"third": 7, "fourth": 9}])
def test_thing_without_a_parameter_that_it_needs_says_so_whatever_else_is_given(params):
    with pytest.raises(SpecError, match=r"^thing 'x' needs a parameter 'second'$"):
        made(["a"], **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"secnd": 2}, r"^thing 'x' has no parameter 'secnd'; did you mean second\?$"),
        ({"second": 2, "colour": 3}, r"^thing 'x' has no parameter 'colour'; choose from "),
    ],
)
def test_thing_with_a_parameter_that_it_does_not_take_names_the_nearest(params, message):
    with pytest.raises(SpecError, match=message):
        made(["a"], **params)
    with pytest.raises(SpecError, match="has no parameter 'y'; it takes none"):
        construct("thing 'x'", Knobs, [], {"y": 1})


class Counts:
    def __init__(
        self, count: int, most: "int | None" = 3, share: float = 1.0, edges: list[int] = ()
    ):
        self.values = count, most, share, edges


@pytest.mark.parametrize("value", [2.5, float("inf"), float("nan"), "2", [2]])
@pytest.mark.parametrize("name", ["count", "most"])
def test_thing_that_takes_a_whole_number_is_given_no_other(name, value):
    with pytest.raises(SpecError) as caught:
        construct("thing 'x'", Counts, ["count", "most"], {"count": 1, name: value})
    assert str(caught.value) == f"thing 'x': {name} must be a whole number, got {value!r}"


def test_thing_that_takes_a_whole_number_may_be_given_it_as_yaml_writes_it():
    knobs = ["count", "most", "share", "edges"]
    given = {"count": 1e3, "most": None, "share": 2, "edges": [1.5]}
    values = construct("thing 'x'", Counts, knobs, given).values
    assert values == (1000, None, 2, [1.5])
    assert type(values[0]) is int


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("too large"), SpecError, "^thing 'x': too large$"),
        (TypeError("no number"), SpecError, "^thing 'x': no number$"),
        (TraceError("as it is"), TraceError, "^as it is$"),
        (KeyError("k"), SpecError, "^thing 'x': its constructor raised KeyError"),
        (SystemExit(3), SpecError, "^thing 'x': its constructor raised SystemExit"),
    ],
)
def test_thing_whose_constructor_raises_is_named_but_by_errors_of_our_own(raised, kind, message):
    def raises(second=1):
        raise raised

    with pytest.raises(kind, match=message):
        made(cls=raises)


def test_thing_stopped_by_the_user_stops():
    def stops(second=1):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(cls=stops)


class Methods:
    def none(self):
        """Take nothing."""

    def two(self, one, other):
        """Take both."""

    def many(self, *given):
        """Take all."""

    def three(self, one, other, more=0):
        """Take one more."""


@pytest.mark.parametrize(
    ("method", "fitting"),
    [
        (Methods.none, {0}),
        (Methods.two, {2}),
        (Methods.many, {0, 1, 2, 3}),
        (Methods.three, {2, 3}),
    ],
)
def test_method_is_refused_where_it_cannot_be_called_with_so_many(method, fitting):
    for count in range(4):
        if count in fitting:
            check_call("it", method, count)
        else:
            with pytest.raises(SpecError, match=rf"^it\(\) is called with {count} arguments, and"):
                check_call("it", method, count)
    with pytest.raises(SpecError, match=r"^it\(\) is called with a state, and takes \(self, one"):
        check_call("it", Methods.two, 1, "a state")


def test_class_of_a_module_is_found_or_the_nearest_named():
    assert import_class("policy", f"{__name__}:Own", ContinuousBatching) is Own
    with pytest.raises(SpecError, match=r"has no ContinuousBatching class 'Ow'; did you mean Own"):
        import_class("policy", f"{__name__}:Ow", ContinuousBatching)
    with pytest.raises(SpecError, match="has no ContinuousBatching class 'Knobs'"):
        import_class("policy", f"{__name__}:Knobs", ContinuousBatching)
    with pytest.raises(SpecError, match=r"policy 'no\.module:X': cannot import 'no\.module'"):
        import_class("policy", "no.module:X", ContinuousBatching)


class Own(ContinuousBatching):
    """First come, first served."""

    def key(self, state, now_ns):
        return state.id


def test_module_that_has_no_such_class_is_told_with_the_file_it_is_of():
    with pytest.raises(SpecError) as caught:
        import_class("policy", f"{__name__}:Ow", ContinuousBatching)
    assert f": {__name__} ({__file__}) has no ContinuousBatching class 'Ow'" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        import_class("policy", "sched:Mine", ContinuousBatching)
    said = "; Python's own go first, so give yours another name) has no ContinuousBatching class"
    assert f"policy 'sched:Mine': sched ({sched.__file__}{said} 'Mine'" in str(caught.value)
