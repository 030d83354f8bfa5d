"""By when `slai` has to schedule whom: times that are kept, and the bound before which none is."""

from random import Random
from types import SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies.last_moment import LastMoments
from schedlab.sim.core.plan import FOREVER

if core.running() != "python":
    pytest.skip("the compiled core takes no stand-ins", allow_module_level=True)

OWN = {"tight": 20}


def engine(*running, swaps=False):
    return SimpleNamespace(
        running=running, has_swapped=swaps, config=SimpleNamespace(kv_tiers=())
    )  # fmt: skip


def test_requests_get_their_own_times_and_nobody_is_due_before_the_first_of_them():
    moments, view = LastMoments(), engine("tight", "loose")
    moments.note_tokens("plan", ["tight", "loose"], view, 100, 50, OWN)
    assert moments.dates_ns == {"tight": 120, "loose": 150}
    assert moments.due_by(["tight", "loose"], 119) == []
    assert moments.none_before_ns == 120
    # Whoever got a token of a plan that was not for those due, the other one stays due by 120.
    moments.note_tokens("another", ["loose"], view, 119, 50, OWN)
    assert moments.dates_ns == {"tight": 120, "loose": 169}
    assert moments.none_before_ns == 120


def test_plan_for_those_due_leaves_the_others_and_any_other_plan_does_not():
    moments, view = LastMoments(), engine("tight", "loose")
    moments.note_tokens("plan", ["tight", "loose"], view, 100, 50, OWN)
    assert moments.due_by(["tight", "loose"], 120) == ["tight"]
    assert moments.none_before_ns == 0
    moments.serves_due("served")
    moments.note_tokens("served", ["tight"], view, 125, 50, OWN)
    assert moments.none_before_ns == 145  # of "tight" again; "loose" is due by 150
    moments.note_tokens("later", ["tight"], view, 140, 50, OWN)
    assert moments.none_before_ns == 145, "what a plan has served is said of that plan alone"


def test_own_times_are_set_where_all_decode_and_the_first_of_them_binds():
    moments, view = LastMoments(), engine("tight", "loose")
    moments.note_tokens("plan", None, view, 100, 50, OWN)
    assert moments.due_by(["tight", "loose"], 200) == ["tight", "loose"]
    moments.serves_due("served")
    moments.note_tokens("served", None, view, 210, 50, OWN)
    assert (moments.dates_ns, moments.none_before_ns) == ({"tight": 230, "loose": 260}, 230)
    moments.note_tokens("plan", None, view, 220, 50, OWN)
    assert (moments.dates_ns, moments.none_before_ns) == ({"tight": 240, "loose": 270}, 230)


def test_all_who_decode_have_one_time_until_somebody_is_left_out():
    moments, view = LastMoments(), engine("a", "b")
    moments.note_tokens("plan", ["a", "b"], view, 100, 50, {})
    moments.due_by(["a", "b"], 110)
    moments.note_tokens("plan", None, view, 120, 50, {})
    assert (moments.dates_ns, moments.others_ns, moments.none_before_ns) == ({}, 170, 170)
    moments.note_tokens("plan", ["a"], view, 140, 50, {})
    assert (moments.dates_ns, moments.none_before_ns) == ({"a": 190}, 170)
    assert moments.due_by(["a", "b"], 170) == ["b"]
    moments.is_due("a")
    assert moments.due_by(["a", "b"], 0) == ["a"]


@pytest.mark.parametrize("own", [OWN, {}])
def test_times_of_those_who_may_return_are_kept(own):
    moments, view = LastMoments(), engine("tight", swaps=True)
    moments.note_tokens("plan", ["loose"], view, 100, 50, own)
    moments.due_by(["loose"], 110)
    moments.note_tokens("plan", None, view, 120, 50, own)
    assert moments.dates_ns == {"loose": 150, "tight": 140 if own else 170}


def test_plan_that_leaves_nobody_to_be_due_says_so():
    moments = LastMoments()
    moments.note_tokens("plan", ["a"], engine("a"), 100, 50, {})
    assert moments.due_by(["a"], 150) == ["a"]
    assert moments._after_plan == (None, FOREVER)


def test_nobody_is_due_before_the_time_that_says_so_whatever_happened():
    draw = Random(4)
    states = ["a", "b", "c", "d"]
    for own in ({}, {"a": 20, "c": 90}):
        moments, now_ns, num_bounds = LastMoments(), 100, 0
        for _ in range(300):
            now_ns += draw.randrange(30)
            view, what = engine(*states, swaps=draw.random() < 0.3), draw.randrange(4)
            if what == 0:
                moments.is_due(draw.choice(states))
            elif what == 1:
                moments.due_by(states, now_ns)
            else:
                some = [state for state in states if draw.random() < 0.6]
                if what == 3 and set(moments.due_by(states, now_ns)) <= {*some}:
                    moments.serves_due(now_ns)
                decoded = None if len(some) == len(states) else some
                moments.note_tokens(now_ns, decoded, view, now_ns + 1, 50, own)
            least_ns = min(moments.dates_ns.get(state, moments.others_ns) for state in states)
            assert moments.none_before_ns <= least_ns
            num_bounds += moments.none_before_ns > now_ns
        assert num_bounds > 30
