"""WAIT and nested WAIT, traced by hand.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import chain
from math import ceil, floor
from operator import mul

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.policies.fluid import fluid_equilibrium
from schedlab.policies.nested_wait import NestedWait
from schedlab.policies.segments import Segment, Segments
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import RequestState, Status
from schedlab.sim.rng import stream
from tests import laws
from tests.laws import LinearCost, arrival
from tests.traced import batches, limits


@pytest.mark.parametrize(("a_token_s", "exists"), [(2**-8, True), (2**-7, False), (2**-6, False)])
def test_fluid_equilibrium_needs_some_time_left(a_token_s, exists):
    args = [2.0, 0.5], [14.5, 7.5], [3.0, 1.0]  # 2 * 4 * 16 + 0.5 * 2 * 8 = 136
    if exists:
        fluid = fluid_equilibrium(*args, step_base_s=1.0, step_s_per_token=a_token_s)
        step_s = 1.0 / (1 - 136 * a_token_s)
        assert fluid.step_s == pytest.approx(step_s)
        assert fluid.admitted == pytest.approx((2 * step_s, 0.5 * step_s))
    else:
        with pytest.raises(ValueError, match="no equilibrium"):
            fluid_equilibrium(*args, step_base_s=1.0, step_s_per_token=a_token_s)
    with pytest.raises(ValueError, match="no equilibrium"):  # just all of the time
        fluid_equilibrium([1.0], [15.0], [1.0], step_base_s=1.0, step_s_per_token=1 / 31)


def test_fluid_equilibrium_balances_arrivals_and_steps():
    # 2 requests a second, each 11 stages and 15 tokens in memory on average: 330 tokens in
    # memory a second of step time, at 1 ms each a third of the time.
    fluid = fluid_equilibrium([2.0], [10.0], [10.0], step_base_s=0.01, step_s_per_token=0.001)
    assert fluid.step_s == pytest.approx(0.01 / 0.67)
    assert fluid.admitted == pytest.approx((0.02 / 0.67,))
    assert fluid.memory_tokens == pytest.approx(3.3 / 0.67)
    assert fluid.num_running == pytest.approx(0.22 / 0.67)
    # The step lasts as long as its load makes it.
    assert fluid.step_s == pytest.approx(0.01 + 0.001 * fluid.memory_tokens)


def test_fluid_equilibrium_beyond_capacity_is_refused():
    with pytest.raises(ValueError, match="no equilibrium"):
        fluid_equilibrium([10.0], [10.0], [10.0], step_base_s=0.01, step_s_per_token=0.001)


# One type of 3 output tokens and 8 places: int(8 / (3 + 1)) = 2 new requests a step.
WAIT = {"output_edges": [3], "total_limit": 8, "max_wait_s": 1e-3}


def answer(i, at_ns, output=3):
    return arrival(i, at_ns, prompt=2, output=output, predicted_tokens=float(output))


def test_wait_holds_everything_until_enough_of_a_type_have_come():
    work = [answer(0, 0), answer(1, 5_000), answer(2, 5_500), answer(3, 9_000)]
    got, log = batches("wait", work, limits(), **WAIT)
    assert got == [
        {0: 2, 1: 2},  # at 5000
        {0: 1, 1: 1, 2: 2, 3: 2},  # decodes have waited from 6040 to 9000 for request 3
        {0: 1, 1: 1, 2: 1, 3: 1},  # nobody waits: those under way are served
        {2: 1, 3: 1},
    ]
    assert log.steps()["start_ns"][:2].tolist() == [5_000, 9_000]


def test_wait_after_its_longest_wait_runs_with_what_there_is():
    got, log = batches("wait", [answer(0, 0)], limits(), **{**WAIT, "max_wait_s": 7e-6})
    assert got == [{0: 2}, {0: 1}, {0: 1}]
    assert log.steps()["start_ns"].tolist() == [7_000, 8_020, 9_032]


def test_wait_as_in_theory_lets_requests_under_way_wait_for_arrivals():
    knobs = {**WAIT, "max_wait_s": 7e-6, "drain": False}
    _, log = batches("wait", [answer(0, 0)], limits(), **knobs)
    assert log.steps()["start_ns"].tolist() == [7_000, 15_020, 23_032]


def test_wait_as_a_cap_limits_places_and_never_waits():
    work = [answer(i, 0) for i in range(3)]
    got, _ = batches("wait", work, limits(), output_edges=[3], total_limit=2, only_cap=True)
    assert got[:3] == [{0: 2, 1: 2}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    assert got[3] == {2: 2}


def test_wait_shares_places_by_rate_and_length():
    # Weights 1 * (1 + 1) and 1 * (5 + 1): of 8 places, 2 and 6, one new request of each a step.
    work = [answer(i, 0, output=1) for i in range(2)] + [answer(i, 0, output=5) for i in (2, 3)]
    knobs = {"output_edges": [1, 5], "request_rates": [1.0, 1.0], "total_limit": 8}
    got, _ = batches("wait", work, limits(), **knobs)
    assert got[:2] == [{0: 2, 2: 2}, {1: 2, 2: 1, 3: 2}]


def test_wait_counts_rates_by_type_where_none_are_given():
    # 3 arrivals of up to 1 token, 1 of up to 5: weights 3 * 2 and 1 * 6. Of 8 places 4 each; of the
    # first type 4 / 2 may start in a step.
    work = [answer(i, 0, output=5 if i == 2 else 1) for i in range(4)]
    got, _ = batches("wait", work, limits(), output_edges=[1, 5], total_limit=8)
    assert got[:2] == [{0: 2, 1: 2, 2: 2}, {2: 1, 3: 2}]


@pytest.mark.parametrize(
    ("rates", "first"), [([2.0, 1.0], [0, 1, 2, 3, 5, 6]), ([1.0, 1.0], [0, 1, 5, 6, 7])]
)
def test_wait_gives_a_type_places_by_its_rate_times_a_token_more_than_its_length(rates, first):
    # Weights 2 * 2 and 1 * 6: of 10 places 4 and 6. Then 1 * 2 and 1 * 6: of 10 places 2 and 7.
    work = [answer(i, 0, output=1 if i < 5 else 5) for i in range(8)]
    knobs = {"output_edges": [1, 5], "request_rates": rates, "total_limit": 10, "only_cap": True}
    got, _ = batches("wait", work, limits(seats=20, budget=12), **knobs)
    assert list(got[0]) == first


def test_wait_runs_as_soon_as_one_type_is_complete():
    knobs = {"output_edges": [1, 5], "request_rates": [1.0, 1.0], "total_limit": 8}
    _, log = batches("wait", [answer(0, 300, output=1)], limits(), **knobs)
    assert log.requests()["first_scheduled_ns"].tolist() == [300]


def test_wait_does_not_count_those_who_have_left():
    work = [answer(0, 0, output=1), answer(1, 0, output=1), answer(2, 20_000, output=1)]
    _, log = batches("wait", work, limits(), **{**WAIT, "max_wait_s": 5e-6})
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 0, 25_000]


@pytest.mark.parametrize(("max_wait_ns", "first"), [(540, 3), (541, 2)])
def test_wait_fills_every_place_once_the_oldest_is_overdue_and_its_threshold_before(
    max_wait_ns, first
):
    # The step of requests 0 and 1 ends at 1,040 ns; the others have waited since 500.
    work = [answer(i, 0 if i < 2 else 500) for i in range(5)]
    got, _ = batches("wait", work, limits(), **{**WAIT, "max_wait_s": max_wait_ns * 1e-9})
    assert sum(tokens == 2 for tokens in got[1].values()) == first


def test_wait_takes_a_prediction_beyond_the_last_edge_for_the_last_type():
    got, _ = batches("wait", [answer(0, 0, output=9)], limits(), **{**WAIT, "max_wait_s": 0.0})
    assert got == [{0: 2}, *8 * [{0: 1}]]


def test_wait_with_a_single_place_serves_one_after_the_other():
    knobs = {"output_edges": [3], "total_limit": 1, "max_wait_s": 0.0}
    got, _ = batches("wait", [answer(0, 0), answer(1, 0)], limits(), **knobs)
    assert got == [{0: 2}, *2 * [{0: 1}], {1: 2}, *2 * [{1: 1}]]


def test_wait_out_of_memory_preempts_the_latest_admission():
    work = [arrival(i, prompt=4, output=6, predicted_tokens=6.0) for i in range(2)]
    knobs = {"output_edges": [6], "total_limit": 14, "only_cap": True}
    _, log = batches("wait", work, limits(num_blocks=4), **knobs)
    assert log.requests()["num_preemptions"].tolist() == [0, 1]


# Segments of 2 and 2 stages with flows 2 and 1: of 12 places 8 and 4, 4 and 2 at a stage.
NESTED = {"output_edges": [2, 4], "request_rates": [1.0, 1.0], "total_limit": 12}


def test_nested_wait_passes_requests_on_in_groups():
    work = [arrival(i, prompt=2, output=4) for i in range(4)]
    got, _ = batches("nested_wait", work, limits(), **NESTED)
    assert got == [
        {0: 2, 1: 2, 2: 2, 3: 2},
        {0: 1, 1: 1, 2: 1, 3: 1},  # all at the entry of the second segment now
        {0: 1, 1: 1},  # two at a stage
        {0: 1, 1: 1, 2: 1, 3: 1},
        {2: 1, 3: 1},
    ]


def test_nested_wait_lets_a_long_answer_wait_for_company():
    outputs = [4, 2, 2, 2, 4, 2, 2, 2]
    work = [arrival(i, 0 if i < 4 else 500, prompt=2, output=n) for i, n in enumerate(outputs)]
    got, _ = batches("nested_wait", work, limits(), **NESTED)
    assert got == [
        {0: 2, 1: 2, 2: 2, 3: 2},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2},
        {4: 1, 5: 1, 6: 1, 7: 1},  # request 0 waits at the entry of the second segment
        {0: 1, 4: 1},
        {0: 1, 4: 1},
    ]


def test_nested_wait_with_drain_waits_for_who_is_only_now_admitted():
    outputs = [4, 2, 2, 2, 4, 2, 2, 2]
    work = [arrival(i, 0 if i < 4 else 1_500, prompt=2, output=n) for i, n in enumerate(outputs)]
    got, _ = batches("nested_wait", work, limits(), **NESTED)
    assert got == [
        {0: 2, 1: 2, 2: 2, 3: 2},
        {0: 1, 1: 1, 2: 1, 3: 1},  # nobody is left in the first segment
        {4: 2, 5: 2, 6: 2, 7: 2},  # whom request 0 waits for at its entry
        {4: 1, 5: 1, 6: 1, 7: 1},
        {0: 1, 4: 1},
        {0: 1, 4: 1},
    ]


@pytest.mark.parametrize(
    ("num_requests", "total_limit", "num_plans"),
    [
        # Waits for a group; prompts; a step to the entry; all 28 from there, which nobody follows.
        (2, 60, 4),
        # Three at a stage: they wait at the entry for the last prompt, and for its first token.
        (4, 60, 6),
        # One at a stage: each is taken once the one before it has left the first segment.
        (3, 15, 9),
    ],
)
def test_nested_wait_plans_once_for_the_steps_after_an_entry_that_nobody_follows(
    num_requests, total_limit, num_plans
):
    work = [arrival(i, prompt=2, output=30) for i in range(num_requests)]
    knobs = {"output_edges": [2, 40], "request_rates": [1.0, 1.0], "total_limit": total_limit}
    engine = Engine(
        limits(), registry.make("nested_wait", **knobs), SimExecutor(Pricing(LinearCost()))
    )
    simulate(engine, work)
    assert engine.num_plans == num_plans + 1  # and one when all is done


def test_nested_wait_plans_on_where_somebody_stays_who_has_waited_too_long():
    # Segments whose group is one: who is taken fills its segment, while another who has waited for
    # too long stays at an entry behind; what runs since then goes on running.
    came = [140, 1_399, 4_834, 5_394, 5_551, 8_308, 16_435, 18_411, 18_714]
    outputs = [30, 20, 9, 3, 9, 20, 3, 20, 30]
    work = [
        arrival(i, at_ns, prompt=2, output=output)
        for i, (at_ns, output) in enumerate(zip(came, outputs, strict=True))
    ]
    knobs = {"output_edges": [3, 6, 12, 40], "request_rates": 4 * [1.0], "total_limit": 4}
    engines = [
        Engine(
            config,
            registry.make("nested_wait", **knobs, max_wait_s=2e-6),
            SimExecutor(Pricing(LinearCost())),
        )
        for config in (limits(), replace(limits(), fast_forward=False))
    ]
    skipping, by_step = [laws.signature(simulate(engine, work)) for engine in engines]
    assert skipping == by_step
    assert engines[0].num_plans == 32


def test_nested_wait_shares_places_by_how_many_answers_came_as_far():
    edges, total_limit = (2, 4, 9), 12
    policy = registry.make("nested_wait", output_edges=edges, total_limit=total_limit)
    state = RequestState(arrival(0).request)
    ended = [1, 1, 1]  # one in each segment to begin with
    for length, segment in ((2, 0), (3, 1), (1, 0), (4, 1), (40, 2), (5, 2), (2, 0)):
        state._generated, state.last_token_ns = length, 0
        policy.on_finish(state, 0)
        ended[segment] += 1
        stages, flows = (2, 2, 5), [sum(ended[i:]) for i in range(3)]
        total = sum(map(mul, stages, flows))
        at_stage = [Fraction(total_limit * flow, total) for flow in flows]
        assert policy._limits == [
            (max(1, floor(count * most)), ceil(most))
            for count, most in zip(stages, at_stage, strict=True)
        ]


def test_a_segment_tells_stages_and_times_of_who_is_held_back_and_who_runs():
    states = [RequestState(arrival(i).request) for i in range(3)]
    for state, length in zip(states, (5, 5, 4), strict=True):
        state._generated, state._seat = length, state.id
    segment = Segment(9)
    segment.put([states[0], states[1]], 5)
    segment.put([states[2]], 4)
    assert segment.beyond(1) == [states[1]]
    segment.hold([states[1]], 1, now_ns=70)
    segment.num_steps, segment.since_ns = 1, 30
    assert segment.at_stage == {5: [states[0]], 4: [states[1], states[2]]}  # stages 6 and 5
    assert (segment.passes_at, segment.most_at_stage) == (4, 2)
    ran_ns = {states[1]: 30}
    segment.note_runs(ran_ns)
    assert ran_ns == {states[0]: 70, states[1]: 30, states[2]: 70}


@pytest.mark.parametrize("first", [[0, 2], [1, 3], [3], [0, 1, 2]])
def test_a_segment_has_those_at_a_stage_in_order_of_admission_whoever_came_first(first):
    states = [RequestState(arrival(i).request) for i in range(4)]
    for state in states:
        state._seat = state.id
    segment = Segment(9)
    segment.put([states[i] for i in first], 5)
    segment.put([state for state in states if state.id not in first], 5)
    assert segment.at_stage == {5: states}
    assert (segment.num_inside, segment.most_at_stage) == (4, 4)
    assert segment.beyond(2) == states[2:]
    # Others took two steps: who comes now stands with those who are there.
    segment.num_steps = 2
    other = RequestState(arrival(9).request)
    other._seat = -1
    segment.put([other], 7)
    assert segment.at_stage == {5: [other, *states]}


def test_nested_wait_holds_new_requests_until_they_are_a_group_or_have_waited():
    work = [arrival(0, 0, prompt=2, output=1), arrival(1, 3_000, prompt=2, output=1)]
    _, log = batches("nested_wait", work, limits(), max_wait_s=9e-6, **NESTED)
    assert log.requests()["first_scheduled_ns"].tolist() == [9_000, 9_000]


def test_a_segment_knows_whether_more_stand_at_a_stage_than_may_as_they_come_and_go():
    states = [RequestState(arrival(i).request) for i in range(4)]
    segment = Segment(9)
    segment.put(states[:2], 5)
    assert not segment.beyond(2)
    segment.put([states[2]], 5)
    assert segment.beyond(2) == [states[2]]
    segment.put([states[3]], 4)
    assert segment.remove(states[0], 5)
    assert not segment.beyond(2)
    assert not segment.remove(states[0], 5)
    assert segment.beyond(1) == [states[2]]
    segment.num_steps = 2
    assert segment.passes_at == 4  # at stage 9 after two more steps
    assert segment.pass_from(7) == states[1:3]
    assert not segment.beyond(1)
    assert (segment.inside(), segment.passes_at, segment.num_inside) == ([states[3]], 5, 1)


def test_nested_wait_out_of_memory_preempts_the_latest_admission_though_its_segment_comes_first():
    # 8 blocks of a token, prompts computed token by token, nobody waits for company.
    work = [arrival(i, prompt=2, output=6) for i in range(2)]
    config = limits(num_blocks=8, block_size=1, long_prefill_token_threshold=1)
    got, _ = batches("nested_wait", work, config, **{**NESTED, "max_wait_s": 0.0})
    assert got == [
        *4 * [{0: 1, 1: 1}],  # all 8 blocks are taken, 3 tokens are out
        ({0: 1}, [1]),
        {0: 1, 1: 1},  # request 1 starts over, in the first segment; request 0 is in the second
        ({0: 1}, [1]),  # one block was left; the last token of request 0
        *7 * [{1: 1}],  # 5 tokens again, two more answers' tokens
    ]


@pytest.mark.parametrize(("num_blocks", "gone"), [(9, [3]), (12, [])])
def test_nested_wait_makes_room_for_a_prompt_only_where_decodes_leave_it_none(num_blocks, gone):
    # The first tokens of three answers open a block each; the prompt lacks four of its five. It
    # gives up what it has where five are free, as it was admitted last.
    work = [*(arrival(i, prompt=4, output=6) for i in range(3)), arrival(3, prompt=20, output=1)]
    config = limits(num_blocks=num_blocks, block_size=4, budget=16, max_model_len=36)
    knobs = {"output_edges": [9], "total_limit": 80, "max_wait_s": 0.0}
    got, _ = batches("nested_wait", work, config, **knobs)
    assert got[0] == {0: 4, 1: 4, 2: 4, 3: 4}
    assert got[1] == (({0: 1, 1: 1, 2: 1}, gone) if gone else {0: 1, 1: 1, 2: 1, 3: 13})


@pytest.mark.parametrize("name", ["wait", "nested_wait"])
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"output_edges": []}, "at least one type"),
        ({"output_edges": [8, 4]}, "strictly ascending"),
        ({"output_edges": [4, 8], "request_rates": [1.0]}, "request_rates must be 2"),
        ({"output_edges": [4], "request_rates": [0.0]}, "numbers > 0"),
        ({"output_edges": [4, 8], "request_rates": [1.0, 0.0]}, "numbers > 0"),
        ({"total_limit": 0}, "total_limit"),
        ({"max_wait_s": float("nan")}, "max_wait_s"),
        ({"max_wait_s": float("inf")}, "max_wait_s"),
    ],
)
def test_wait_with_an_impossible_knob_is_refused(name, knobs, message):
    with pytest.raises(Exception, match=message):
        batches(name, [answer(0, 0)], limits(), **knobs)


def test_wait_without_predictions_says_so():
    with pytest.raises(Exception, match="needs a predictor"):
        batches("wait", [arrival(0)], limits())


class SortsAnew(NestedWait):
    """Finds those who were followed where sorting them anew puts them, as groups grow and shrink.

    A smaller group holds back whom it does not run, of a segment that runs.
    """

    num_followed = num_held = 0

    def plan(self, view, builder):
        followed = self._segments
        followed.find(view)
        if followed.is_kept:
            self.num_followed += 1
            self.num_held += bool(followed.holding)
            anew = Segments(self.output_edges)
            anew.ran_ns.update(followed.ran_ns)
            for segment in followed.each:
                segment.note_runs(anew.ran_ns)
            anew.find(view)
            for i, (one, other) in enumerate(zip(followed.each, anew.each, strict=True)):
                assert self.told(one) == self.told(other)
                assert followed.least_since_ns(i) == anew.least_since_ns(i)
        group = 1 + self.num_followed // 5 % 3
        self._limits = [(9, group)] * len(self.output_edges)
        return super().plan(view, builder)

    def on_finish(self, state, now_ns):
        self._segments.ended(state)

    @staticmethod
    def told(segment):
        stages = [(at + segment.num_steps, there) for at, there in segment.at_stage.items()]
        passes_in = min(segment.passes_at - segment.num_steps, 1_000)
        return segment.entry, stages, segment.num_inside, passes_in


@pytest.mark.parametrize(("seed", "max_wait_s"), [(0, 0.0), (1, 1e-5), (2, 1e-4)])
def test_nested_wait_follows_all_who_run_to_where_sorting_them_anew_puts_them(seed, max_wait_s):
    rng = stream(seed, "nested wait")
    at_ns = np.cumsum(rng.integers(0, 600, 60)).tolist()
    work = [
        arrival(i, at, prompt=int(rng.integers(1, 30)), output=int(rng.choice([1, 2, 3, 5, 9, 30])))
        for i, at in enumerate(at_ns)
    ]
    edges = [1, 3, 6, 12, 40] if seed else [2, 4, 9, 40]
    policy = SortsAnew(output_edges=edges, max_wait_s=max_wait_s, drain=seed == 1)
    config = limits(num_blocks=300, seats=20, budget=24)
    simulate(Engine(config, policy, SimExecutor(Pricing(LinearCost()))), work)
    assert policy.num_followed > 40
    assert policy.num_held > 3


@pytest.mark.parametrize("generated", [0, 1, 5])
def test_nested_wait_lets_who_runs_from_another_engine_wait_from_when_it_came(generated):
    came, waits = (RequestState(arrival(i).request) for i in range(2))
    came.status, came._generated, came.first_scheduled_ns = Status.RUNNING, generated, 20
    policy = NestedWait()
    policy._segments.is_kept = True
    policy.on_arrival(waits, 300)
    assert policy._segments.is_kept
    policy.on_arrival(came, 700)
    assert not policy._segments.is_kept  # it is sorted in before the next plan
    assert policy._segments.ran_ns == {came: 700}
    policy._segments.ended(came)
    assert policy._segments.ran_ns == {}


class ChosenAnew(NestedWait):
    """Looks at each plan whether those run whom its description names, worked out from nothing."""

    num_full = num_waits = num_timed_out = 0

    def __init__(self, **knobs):
        super().__init__(**knobs)
        self.ran_ns = {}

    def on_tokens(self, plan, num_steps, now_ns):
        ran = [*plan.decoding(), *(state for state, _ in plan.chunks)]
        self.ran_ns.update(dict.fromkeys(ran, now_ns))
        super().on_tokens(plan, num_steps, now_ns)

    def plan(self, view, builder):
        run, until_ns = self.chosen(view)
        plan = super().plan(view, builder)
        assert sorted(plan.num_scheduled_tokens()) == sorted(state.id for state in run)
        assert plan.until_ns == until_ns
        return plan

    def chosen(self, view):
        edges, now_ns, waiting = list(self.output_edges), view.now_ns, list(view.waiting)
        entries, inside = [[] for _ in edges], [{} for _ in edges]
        for state in view.running:
            stage = 0 if state in view.prefilling else state.num_output_tokens
            i = sum(stage >= edge for edge in edges[:-1])
            if i and stage == edges[i - 1]:
                entries[i].append(state)
            else:
                inside[i].setdefault(stage, []).append(state)
        there = [
            [*entry, *chain.from_iterable(stages.values())]
            for entry, stages in zip(entries, inside, strict=True)
        ]

        def overdue_ns(i):
            states = chain.from_iterable(there[i:])
            times = [self.ran_ns.get(state, state.first_scheduled_ns) for state in states]
            times += [waiting[0].request.arrival_ns] if waiting and not i else []
            return min(times, default=FOREVER) + self._timeout_ns

        (limit, group), busy = self._limits[0], -1
        num_new = min(limit - len(there[0]), group)
        if len(waiting) < num_new and (waiting or not self.drain) and overdue_ns(0) > now_ns:
            return [], overdue_ns(0)
        if self.drain:
            reached = [states or (waiting and not i) for i, states in enumerate(there)]
            busy = next((i for i, states in enumerate(reached) if states), len(edges))
        run, until_ns = [], FOREVER
        for i, ((limit, group), entry) in enumerate(zip(self._limits, entries, strict=True)):
            room = limit - (len(there[i]) - len(entry))
            if i and room > 0:
                places = min(room, group)
                self.num_full += room < group and len(entry) > room
                if len(entry) < places and i > busy:
                    self.num_timed_out += overdue_ns(i) <= now_ns
                    if overdue_ns(i) > now_ns:
                        until_ns = overdue_ns(i)
                        self.num_waits += 1
                        break
                run += entry[:places]
            for stage, states in inside[i].items():
                run += states[:group] if stage else states
        return run + waiting[: max(num_new, 0)], until_ns


def test_nested_wait_runs_whom_limits_groups_and_time_outs_let_run_in_drawn_workloads():
    full = waits = timed_out = 0
    for seed in range(6):
        rng = stream(seed, "chosen anew")
        at_ns = np.cumsum(rng.integers(0, 200, 40)).tolist()
        work = [
            arrival(i, at, prompt=2, output=int(rng.choice([1, 2, 3, 5, 9, 30])))
            for i, at in enumerate(at_ns)
        ]
        policy = ChosenAnew(
            output_edges=[[1, 3, 6, 12, 40], [2, 4, 9, 40]][seed % 2],
            total_limit=[9, 12, 15][seed % 3],
            max_wait_s=[0.0, 2e-6, 2e-5][seed // 2],
            drain=seed in (1, 2, 4),
        )
        config = limits(num_blocks=500, seats=40, budget=200)
        simulate(Engine(config, policy, SimExecutor(Pricing(LinearCost()))), work)
        full += policy.num_full
        waits += policy.num_waits
        timed_out += policy.num_timed_out
    assert min(full, waits, timed_out) > 10
