"""TRAIL and predictions that are refined while an answer is generated.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. Blocks hold four tokens.
"""

import numpy as np
import pytest

from schedlab.policies import registry as policies
from schedlab.policies.predictors import registry as predictors
from schedlab.policies.predictors.predictor import PredictionInputs
from schedlab.sim.request import RUNS, WAITS, Refinement, Request, RequestState
from schedlab.sim.rng import stream
from schedlab.traces.trace import Trace
from schedlab.traces.workload import workload
from tests.laws import arrival
from tests.traced import batches, limits


def refined(every, *totals):
    return Refinement(every, totals)


def at(request, done):
    """Return the state of a request that has generated so many tokens."""
    state = RequestState(request)
    state._generated = done
    return state


def test_refinement_tells_what_was_said_last_and_nothing_of_later():
    request = Request(0, 0, 4, max_tokens=100, refinement=refined(4, 20.0, 15.0))
    said = [request.refinement.total_tokens(at(request, done)) for done in (0, 3, 4, 7, 8, 99)]
    assert said == [None, None, 20.0, 20.0, 15.0, 15.0]
    ask_again = [request.refinement.tokens_until_next(at(request, done)) for done in (0, 3, 4)]
    assert ask_again == [4, 1, 4]


def test_trail_serves_the_fewest_predicted_tokens_left_first():
    work = [
        arrival(0, prompt=4, output=3, predicted_tokens=9.0),
        arrival(1, prompt=4, output=3, predicted_tokens=2.0),
    ]
    got, _ = batches("trail", work, limits(seats=1))
    assert got == [{1: 4}, *2 * [{1: 1}], {0: 4}, *2 * [{0: 1}]]


def test_trail_takes_the_seat_of_a_longer_request_that_has_just_begun():
    # 10 tokens predicted: until it has generated 8 it gives way, here after its first.
    work = [
        arrival(0, 0, prompt=4, output=10, predicted_tokens=10.0),
        arrival(1, 500, prompt=3, output=1, predicted_tokens=5.0),
    ]
    got, log = batches("trail", work, limits(seats=1))
    assert got[:3] == [{0: 4}, ({1: 3}, [0]), {0: 5}]
    assert log.requests()["num_preemptions"].tolist() == [1, 0]


@pytest.mark.parametrize(("share", "preempted"), [(0.2, 0), (0.4, 1), (0.0, 0)])
def test_trail_preempts_only_within_the_share_of_the_first_prediction(share, preempted):
    # Request 1 comes when request 0 has three tokens of a predicted 10.
    work = [
        arrival(0, 0, prompt=4, output=10, predicted_tokens=10.0),
        arrival(1, 2100, prompt=3, output=1, predicted_tokens=2.0),
    ]
    got, log = batches("trail", work, limits(seats=1), preemptible_share=share)
    assert log.requests()["num_preemptions"].sum() == preempted
    assert got[3] == (({1: 3}, [0]) if preempted else {0: 1})


@pytest.mark.parametrize(("later", "left"), [(30.0, 26.0), (5.0, 1.0)])
def test_trail_preempts_by_the_share_of_the_first_prediction_whatever_is_said_later(later, left):
    policy = policies.make("trail", preemptible_share=0.4)
    for done, may_stay in ((3, False), (4, True)):  # a predicted 10: 4 may be preempted
        state = at(
            Request(0, 0, 4, max_tokens=100, predicted_tokens=10.0, refinement=refined(1, later)),
            done,
        )
        state.status = RUNS
        assert policy.key(state, 0) == (not may_stay, left + 4 - done)
        state.status = WAITS
        assert policy.key(state, 0)[0]


def test_trail_that_preempts_nobody_spares_prompts_under_way_too():
    work = [
        arrival(0, 0, prompt=30, output=2, predicted_tokens=10.0),
        arrival(1, 500, prompt=3, output=1, predicted_tokens=2.0),
    ]
    got, _ = batches("trail", work, limits(seats=1), preemptible_share=0.0)
    assert got[:2] == [{0: 16}, {0: 14}]


def test_trail_counts_down_until_a_prediction_is_refined():
    # Request 0 is said to have 12 tokens, then, with 4 generated, 6 in all: 2 are left. Request 1
    # (7 tokens) waits while 12 - 4 > 7 is thought, and stays behind when it is 2.
    late = {"prompt": 2, "output": 1, "predicted_tokens": 7.0}
    for refinement, first in ((None, 1), (refined(4, 6.0), 0)):
        work = [
            arrival(0, 0, prompt=4, output=6, predicted_tokens=12.0, refinement=refinement),
            arrival(1, 3200, **late),  # while request 0 computes its fourth token
        ]
        got, _ = batches("trail", work, limits(seats=1), preemptible_share=1.0)
        assert got[4] == (({1: 2}, [0]) if first else {0: 1})


def test_trail_gives_way_when_a_prediction_turns_out_longer():
    # With 4 tokens generated request 0 is said to have 30: request 1 (7 tokens) may go first.
    work = [
        arrival(0, 0, prompt=4, output=9, predicted_tokens=8.0, refinement=refined(4, 30.0, 9.0)),
        arrival(1, 500, prompt=2, output=1, predicted_tokens=7.5),
    ]
    got, _ = batches("trail", work, limits(seats=1), preemptible_share=1.0)
    assert got[4] == ({1: 2}, [0])


def test_trail_prediction_that_was_outlived_counts_as_none_left():
    work = [
        arrival(0, 0, prompt=4, output=9, predicted_tokens=2.0),
        arrival(1, 500, prompt=2, output=1, predicted_tokens=0.5),
    ]
    got, _ = batches("trail", work, limits(seats=1), preemptible_share=9.0)
    assert got[1] == ({1: 2}, [0]), "0.5 < 2 - 1"
    work[1] = arrival(1, 5000, prompt=2, output=1, predicted_tokens=0.0)
    got, _ = batches("trail", work, limits(seats=1), preemptible_share=9.0)
    assert got[-1] == {1: 2}, "nobody has fewer than none left, and request 0 came first"


def test_trail_with_a_negative_share_is_refused():
    with pytest.raises(Exception, match="preemptible_share"):
        batches("trail", [arrival(0, predicted_tokens=1.0)], limits(), preemptible_share=-0.1)


TRUE = np.maximum(1, stream(7, "lengths").integers(1, 400, 3_000))


def inputs(true=TRUE):
    return PredictionInputs(
        prompt_tokens=np.full(len(true), 10), output_tokens=true, rng=stream(0, "predictor")
    )


def test_refined_predictor_errs_by_the_given_mean():
    predictor = predictors.make("refined", first_mae_tokens=20.0, refined_mae_tokens=5.0)
    given = inputs(TRUE + 200)
    first = predictor.predict(given)
    assert np.abs(first - TRUE - 200).mean() == pytest.approx(20.0, rel=0.05)
    refinements = predictor.refine(given)
    request = [Request(i, 0, 1, 999, refinement=r) for i, r in enumerate(refinements)]
    at_16 = [r.refinement.total_tokens(at(r, 16)) for r in request]
    assert np.abs(np.array(at_16) - TRUE - 200).mean() == pytest.approx(5.0, rel=0.08)


def test_refined_predictor_never_says_fewer_tokens_than_there_are():
    predictor = predictors.make("refined", refined_mae_tokens=300.0, every_tokens=3)
    for true, each in zip(TRUE[:300], predictor.refine(inputs())[:300], strict=True):
        request = Request(0, 0, 1, 999, refinement=each)
        for done in range(3, int(true), 3):
            assert each.total_tokens(at(request, done)) >= done
    assert predictor.predict(inputs()).min() >= 1.0


def test_refined_predictor_without_errors_is_the_oracle_throughout():
    predictor = predictors.make("refined", first_mae_tokens=0.0, refined_mae_tokens=0.0)
    true = np.array([1, 8, 9, 40])
    assert predictor.predict(inputs(true)).tolist() == true.tolist()
    for length, each in zip(true.tolist(), predictor.refine(inputs(true)), strict=True):
        request = Request(0, 0, 1, 999, refinement=each)
        for done in range(8, length, 8):
            assert each.total_tokens(at(request, done)) == length


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"first_mae_tokens": -1.0}, "first_mae_tokens"),
        ({"refined_mae_tokens": float("inf")}, "refined_mae_tokens"),
        ({"every_tokens": 0}, "every_tokens"),
    ],
)
def test_refined_predictor_with_an_impossible_knob_is_refused(knobs, message):
    with pytest.raises(Exception, match=message):
        predictors.make("refined", **knobs)


def test_workload_hands_refinements_to_their_requests():
    trace = Trace(
        prompt_tokens=np.array([3, 4]),
        output_tokens=np.array([9, 9]),
        arrival_ns=np.array([0, 5]),
    )
    each = np.empty(2, dtype=object)
    each[:] = [refined(4, 1.0), refined(4, 2.0)]
    got = [a.request.refinement for a in workload(trace, max_model_len=50, refinements=each)]
    assert got == list(each)
    assert [a.request.refinement for a in workload(trace, max_model_len=50)] == [None, None]
