"""The index policy on distributions of lengths.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. Blocks hold four tokens.
"""

import itertools

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.gittins import _Past, gittins_rank, kaplan_meier
from schedlab.sim.request import RequestState
from schedlab.sim.rng import stream
from tests import laws
from tests.laws import arrival
from tests.traced import batches, limits
from tests.unit.test_policies_ordering import served


def equally_likely(*costs):
    """Return the costs in rising order and their chances."""
    values, counts = np.unique(costs, return_counts=True)
    return values.astype(float), counts / len(costs)


def rank_by_definition(costs, spent, stops):
    """Try every time to give up: expected cost until then, over the chance of an end by then."""
    left = [cost - spent for cost in costs if cost > spent]
    tries = [
        np.mean([min(each, stop - spent) for each in left])
        / np.mean([each <= stop - spent for each in left])
        for stop in stops
        if min(left) <= stop - spent
    ]
    return min(tries)


@pytest.mark.parametrize("every", [1, 7, 60])
def test_gittins_rank_is_the_best_of_all_times_to_give_up(every):
    rng = stream(0, "lengths")
    for n in (2, 7, 40):
        costs = rng.integers(1, 60, n)
        for spent in (0.0, costs.max() - 1.0):
            stops = np.arange(spent + every, 120.0, every)
            expected = rank_by_definition(costs, spent, stops)
            assert gittins_rank(*equally_likely(*costs), spent, stops) == pytest.approx(expected)


def rank(lengths, done, predicted_tokens=None, **knobs):
    """Return the rank of a request with so many tokens, of whose kind these lengths are known."""
    policy = registry.make("gittins", **knobs)
    request = arrival(0, prompt=3, predicted_tokens=predicted_tokens).request
    policy._known[0] = kaplan_meier(lengths, [])
    return policy._rank(request, done)


@pytest.mark.parametrize("every", [1, 7, 60])
@pytest.mark.parametrize("cost", ["tokens", "memory"])
def test_gittins_weighs_every_time_at_which_an_answer_is_looked_at(every, cost):
    def spent(tokens):
        return tokens if cost == "tokens" else 3 * tokens + tokens * (tokens + 1) / 2

    rng = stream(1, "lengths")
    for n in (1, 5, 30):
        lengths = rng.integers(1, 90, n)
        for done in {0, int(lengths.max() - 1) // every * every}:
            stops = [spent(stop) for stop in range(done + every, 200, every)]
            expected = rank_by_definition([spent(n) for n in lengths], spent(done), stops)
            got = rank(lengths, done, refresh_tokens=every, cost=cost)
            assert got == pytest.approx(expected)


def test_gittins_with_predictions_beyond_all_reason_looks_at_known_lengths_alone():
    # Half of the answers are half as long as was said; looking at it every 32 tokens.
    assert rank([0.5, 1.0], 0, 1e12) == (5e11 + 1e12) / 2
    assert np.isfinite(rank([0.5, 1.0], 0, 1e300, cost="memory"))


def test_gittins_ranks_that_are_equal_but_for_rounding_are_equal():
    # Of 1, 3 and 6 tokens: a third of a chance for a token, or three to go for sure.
    assert [rank([1, 3, 6], done, refresh_tokens=1) for done in (0, 1, 3)] == [3.0, 3.5, 3.0]


EVERY = np.arange(1.0, 200.0)


def test_gittins_rank_of_known_lengths_is_what_is_left():
    known = equally_likely(50)
    assert [gittins_rank(*known, spent, EVERY) for spent in (0.0, 20.0)] == [50.0, 30.0]


def test_gittins_rank_bets_on_a_quick_end_and_gets_worse_when_it_does_not_come():
    # Nine of ten end after 10 tokens, one after 100.
    known = equally_likely(*[10] * 9, 100)
    assert gittins_rank(*known, 0.0, EVERY) == pytest.approx(10.0 / 0.9)  # the mean would be 19
    assert gittins_rank(*known, 10.0, EVERY) == pytest.approx(90.0)
    # Given up no sooner than at 15: 9 of 10 cost 10, the other one 15.
    assert gittins_rank(*known, 0.0, np.array([15.0, 100.0])) == pytest.approx(10.5 / 0.9)


def test_gittins_rank_counts_answers_that_are_longer_than_all_known():
    # A quarter end after 8; the others cost 8 as well until one gives up.
    assert gittins_rank(np.array([8.0]), np.array([0.25]), 0.0, EVERY) == 32.0


def test_gittins_rank_without_an_end_by_any_stop_is_infinite():
    known = equally_likely(10)
    assert gittins_rank(*known, 10.0, EVERY[EVERY > 10.0]) == np.inf
    assert gittins_rank(*known, 0.0, np.array([9.0])) == np.inf


def test_kaplan_meier_without_answers_under_way_is_the_share_of_each_length():
    got = kaplan_meier([4, 2, 4, 9], [])
    assert got.lengths.tolist() == [2.0, 4.0, 9.0]
    assert got.chances == pytest.approx([0.25, 0.5, 0.25])


def test_kaplan_meier_lets_answers_under_way_speak_for_longer_ones():
    # Of four that came to 2 one ended; two of them are known to 4 and one of these ended there;
    # the answer under way with 3 tokens says nothing of 4, that with 7 says it goes on.
    got = kaplan_meier([2, 4], [3, 7, 1])
    assert got.chances == pytest.approx([1 / 4, 3 / 4 * 1 / 2])


@pytest.mark.slow
def test_gittins_learns_from_answers_that_are_put_off():
    # Answers of 1 and 30 tokens come in turn. If only ends counted, all would be of 1 token.
    policy = registry.make("gittins", min_samples=1, refresh_tokens=1)
    work = [arrival(i, 400 * i, prompt=1, output=30 if i % 2 else 1) for i in range(40)]
    half = []

    def watch(engine):
        if engine.requests.num_finished == 10:
            half.append(policy._groups["all", False].lengths)

    laws.run(policy, work, laws.slow(limits(seats=1)), observer=watch)
    assert half[0].chances[half[0].lengths <= 1].sum() < 0.8


def lessons(lengths, start=0, **fields):
    """Return requests that teach lengths one after the other, and when the last has ended."""
    at_ns, work = 0, []
    for i, (length, application) in enumerate(lengths, start):
        work.append(arrival(i, at_ns, output=length, application=application, **fields))
        at_ns += 1100 * length
    return work, at_ns


def test_gittins_knows_applications_apart():
    taught, now_ns = lessons([(9, "long"), (2, "short")])
    work = [
        *taught,
        arrival(2, now_ns, prompt=4, output=3, application="long"),
        arrival(3, now_ns, prompt=4, output=3, application="short"),
    ]
    assert served("gittins", work, min_samples=1) == [0, 1, 3, 2]
    # With too few of each all are one group: first come, first served.
    assert served("gittins", work, min_samples=2) == [0, 1, 2, 3]


def test_gittins_learns_how_predictions_err():
    # Those of a were three times too short, those of b right.
    taught, now_ns = lessons([(9, "a")], predicted_tokens=3.0)
    work = [
        *taught,
        arrival(1, now_ns, output=5, application="b", predicted_tokens=5.0),
        arrival(2, now_ns + 6000, prompt=4, application="a", predicted_tokens=2.0),
        arrival(3, now_ns + 6000, prompt=4, application="b", predicted_tokens=4.0),
    ]
    assert served("gittins", work, min_samples=1) == [0, 1, 3, 2]
    assert served("gittins", work, min_samples=9) == [0, 1, 2, 3], "all together err alike"


def test_gittins_forgets_lengths_behind_the_window():
    taught, now_ns = lessons([(1, "a"), (9, "a"), (4, "b")])
    work = [
        *taught,
        arrival(3, now_ns, prompt=4, application="b"),
        arrival(4, now_ns, prompt=4, application="a"),
    ]
    # An end after 1 in half of the cases has rank 1 / 0.5 = 2 < 4; without it the rank is 9.
    knobs = {"min_samples": 1, "refresh_tokens": 1}
    assert served("gittins", work, window=2, **knobs)[3:] == [4, 3]
    assert served("gittins", work, window=1, **knobs)[3:] == [3, 4]


def test_gittins_overtakes_an_answer_that_outlived_the_quick_ends_of_its_kind():
    # Ends at 2 and 20: rank 2 / 0.5 = 4 at first, and 18 with 2 tokens.
    taught, now_ns = lessons([(2, "mixed"), (20, "mixed"), (6, "known")])
    work = [
        *taught,
        arrival(3, now_ns, prompt=4, output=9, application="mixed"),
        arrival(4, now_ns, prompt=4, output=6, application="known"),
    ]
    got, log = batches("gittins", work, limits(seats=1), min_samples=1, refresh_tokens=1)
    order = [next(iter(step)) for step in got]
    assert [i for i, _ in itertools.groupby(order)] == [0, 1, 2, 3, 4, 3]
    assert order.index(4) - order.index(3) == 2
    assert log.requests()["num_preemptions"].sum() == 0, "it pauses, and keeps its memory"
    # Looked at every four tokens only, it is overtaken with four.
    got, _ = batches("gittins", work, limits(seats=1), min_samples=1, refresh_tokens=4)
    order = [next(iter(step)) for step in got]
    assert order.index(4) - order.index(3) == 4


def test_gittins_expects_an_answer_beyond_its_past_to_double():
    taught, now_ns = lessons([(2, "a"), (5, "b")])
    work = [
        *taught,
        arrival(2, now_ns, prompt=4, output=20, application="a"),
        arrival(3, now_ns, prompt=4, output=1, application="b"),
    ]
    got, _ = batches("gittins", work, limits(seats=1), min_samples=1, refresh_tokens=1)
    order = [next(iter(step)) for step in got]
    # b has rank 5: with 2 to 5 tokens generated, a is thought to have as many to come.
    assert order.index(3) - order.index(2) == 6


def test_gittins_by_memory_weighs_the_prompt():
    # Of as many tokens to come, those behind the longer prompt hold more memory.
    taught, now_ns = lessons([(6, "a"), (5, "b")])
    work = [
        *taught,
        arrival(2, now_ns, prompt=4, application="a"),
        arrival(3, now_ns, prompt=12, application="b"),
    ]
    assert served("gittins", work, min_samples=1)[2:] == [3, 2]
    # 6 * 4 + 21 = 45 against 5 * 12 + 15 = 75.
    assert served("gittins", work, min_samples=1, cost="memory")[2:] == [2, 3]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"window": 0}, "window"),
        ({"min_samples": 0}, "min_samples"),
        ({"refresh_tokens": 0}, "refresh_tokens"),
        ({"cost": "time"}, "tokens, memory"),
    ],
)
def test_gittins_with_an_impossible_knob_is_refused(knobs, message):
    with pytest.raises(Exception, match=message):
        batches("gittins", [arrival(0)], limits(), **knobs)


def test_lengths_are_estimated_anew_at_twice_the_ends_and_then_by_half_windows():
    past, anew, known = _Past(5), [], None
    for number in range(1, 12):
        state = RequestState(arrival(number, 0, 4, 9).request)
        state._generated, state.last_token_ns = number, 0
        past.under_way[number] = state
        past.end(state)
        if past.lengths is not known:
            anew.append(number)
            known = past.lengths
    assert anew == [1, 2, 4, 7, 10]
