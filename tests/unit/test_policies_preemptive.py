"""Preemptive orders and starvation rules, traced by hand.

A step takes 1000 ns, 10 ns a token and 1 ns a token of context. Blocks hold four tokens.
"""

import random
from types import SimpleNamespace

import pytest

from schedlab.policies import Policy, registry
from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.fastserve import FastServe
from schedlab.policies.preemption import everyone_fits
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.request import RequestState, Status
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.laws import arrival
from tests.policy_cases import PARAMS
from tests.traced import Recorder, batches, limits
from tests.unit.test_policies_ordering import rival_stream, served


def test_srtf_pauses_a_longer_request_that_keeps_its_memory_for_a_shorter_one():
    work = [
        arrival(0, 0, prompt=4, output=6, predicted_tokens=6.0),
        arrival(1, 500, prompt=3, output=2, predicted_tokens=2.0),
        arrival(2, 500, prompt=3, output=4, predicted_tokens=4.0),
    ]
    got, log = batches("srtf", work, limits(seats=1))
    assert got == [{0: 4}, {1: 3}, {1: 1}, {2: 3}, *3 * [{2: 1}], *5 * [{0: 1}]]
    assert log.requests()["num_preemptions"].sum() == 0
    assert log.steps()["num_running"].tolist()[:2] == [1, 2]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("srtf", {}), ("ltr", {}), ("fastserve", {"first_quantum_s": 2e-6})],
)
def test_paused_requests_are_moved_out_only_when_blocks_run_short(name, knobs):
    work = [
        arrival(i, 400 * i, prompt=4, output=20 - 3 * i, predicted_tokens=20.0 - 3 * i)
        for i in range(6)
    ]
    _, roomy = batches(name, work, limits(seats=2), **knobs)
    assert roomy.requests()["num_preemptions"].sum() == 0
    assert roomy.steps()["num_running"].max() > 2
    _, short = batches(name, work, limits(seats=2, num_blocks=8), **knobs)
    assert short.requests()["num_preemptions"].sum() > 0


def test_srtf_takes_the_seat_of_a_longer_request_for_a_shorter_one():
    work = [
        arrival(0, 0, prompt=4, output=6, predicted_tokens=6.0),
        arrival(1, 500, prompt=3, output=2, predicted_tokens=2.0),
        arrival(2, 500, prompt=3, output=4, predicted_tokens=4.0),
    ]
    got, _ = batches("srtf", work, limits(seats=1, max_num_resident=1))
    assert got == [
        {0: 4},  # one token out, 5 predicted to come
        ({1: 3}, [0]),  # 2 < 5
        {1: 1},
        {2: 3},  # 4 < 5: request 0 still has 5 to come
        *3 * [{2: 1}],
        {0: 5},  # prompt and the token it had
        *4 * [{0: 1}],
    ]


def test_srtf_does_not_preempt_for_a_request_that_would_not_fit_even_then():
    # 6 blocks. Request 0 is better ranked and holds 3; request 1 holds 1, and request 2 needs 4.
    work = [
        arrival(0, 0, prompt=12, output=4, predicted_tokens=4.0),
        arrival(1, 0, prompt=4, output=3, predicted_tokens=30.0),
        arrival(2, 500, prompt=13, output=1, predicted_tokens=20.0),
    ]
    got, log = batches("srtf", work, limits(num_blocks=6))
    assert got == [
        {0: 12, 1: 4},
        *2 * [{0: 1, 1: 1}],  # their fourth and second blocks: all 6 are taken
        {0: 1},
        {2: 13},
    ]
    assert log.requests()["num_preemptions"].sum() == 0


def test_srtf_does_not_preempt_for_a_request_that_shared_blocks_make_no_room_for():
    # 11 blocks of 4. All three hold the same 3, and 1 each: 5 are free. Request 3 needs 8, which
    # 2 of the worse ranked would not give, as request 0 goes on with the 3 that they share.
    shared = (1, 2, 3)
    work = [
        arrival(0, 0, prompt=14, output=8, predicted_tokens=8.0, prefix_hash_ids=shared),
        arrival(1, 1_500, prompt=13, output=3, predicted_tokens=30.0, prefix_hash_ids=shared),
        arrival(2, 1_500, prompt=13, output=3, predicted_tokens=30.0, prefix_hash_ids=shared),
        arrival(3, 2_500, prompt=30, output=1, predicted_tokens=20.0),
    ]
    whole = limits(num_blocks=11, enable_prefix_caching=True, scheduler_reserve_full_isl=True)
    got, log = batches("srtf", work, whole)
    assert log.requests()["num_preemptions"].sum() == 0, got


def test_srtf_starves_the_long_and_aged_sjf_does_not():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 3.0})
    assert served("srtf", work)[-1] == 1
    assert served("sjf", work)[-1] == 1
    # At 0.5 tokens a microsecond, who comes 4 us after the long one goes behind it: request 6,
    # at 4.5 us, is the first.
    assert served("aged", work, rate_per_s=5e5).index(1) == 5


def test_aged_orders_by_class_and_wait():
    work = [
        arrival(0, 0, priority=0),
        arrival(1, 0, priority=2),
        arrival(2, 1_000, priority=1),
        arrival(3, 1_010, priority=0),
    ]
    # At 1 class a microsecond: keys 2, 1 + 1.0 and 1.01; ties by arrival.
    assert served("aged", work, inner="priority", rate_per_s=1e6) == [0, 3, 1, 2]


def test_boosted_serves_first_who_has_waited_beyond_the_threshold():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 10.0})
    # The k-th answer ends at 1010 k; from 5 us on the long one goes first: at k = 5.
    assert served("boosted", work, threshold_s=5e-6)[:7] == [0, 2, 3, 4, 5, 1, 6]
    assert served("boosted", work, threshold_s=1.0)[-1] == 1
    assert served("boosted", work, threshold_s=0.0) == served("fcfs", work)


def test_boosted_counts_iterations_from_the_end_of_the_one_of_arrival():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 10.0})
    # The long one comes before the first iteration and is idle in the three that follow it.
    assert served("boosted", work, threshold_iterations=3)[:6] == [0, 2, 3, 4, 1, 5]


def test_boosted_with_everyone_waiting_too_long_is_first_come_first_served():
    work = [arrival(i, prompt=4, output=3, predicted_tokens=9.0 - i) for i in range(6)]
    assert served("boosted", work, threshold_s=2e-6) == [5, 0, 1, 2, 3, 4]
    assert served("boosted", work, threshold_s=2e-6, inner="fcfs") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("static", "must be an ordering such as sjf"),
        ("srtf", "must be an ordering such as sjf"),
        ("tensorrt_llm", "must be an ordering such as sjf"),
        ("boosted", "must be an ordering such as sjf"),
        ("sfj", "did you mean .?sjf"),
        ({"knob": 1}, "inner needs a name"),
        ({"name": "sjf", "knob": 1}, "no parameter 'knob'"),
    ],
)
def test_wrapper_of_what_is_no_ordering_says_why(inner, message):
    with pytest.raises(Exception, match=message):
        batches("boosted", [arrival(0)], limits(), inner=inner)


def test_boosted_wraps_an_aged_ordering():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 10.0})
    inner = {"name": "aged", "inner": "sjf", "rate_per_s": 0.0}
    assert served("boosted", work, inner=inner, threshold_s=1.0) == served("sjf", work)


def test_ltr_serves_by_score_and_keeps_it_while_the_answer_grows():
    # Request 0 would have 2 tokens left by length, but its score stays 6.
    work = [
        arrival(0, 0, prompt=4, output=6, predicted_tokens=6.0),
        arrival(1, 4_000, prompt=3, output=3, predicted_tokens=3.0),
    ]
    got, _ = batches("ltr", work, limits(seats=1, max_num_resident=1))
    assert got == [
        {0: 4},
        *3 * [{0: 1}],
        ({1: 3}, [0]),  # at 4075 ns
        *2 * [{1: 1}],
        {0: 8},
        {0: 1},
    ]


def test_ltr_promotes_the_idle_for_a_quantum():
    # One seat. Request 1 has the worse score and comes with the first iteration; it is idle in
    # the three that follow, is promoted, decodes for 2 iterations, and is put back.
    work = [
        arrival(0, prompt=2, output=9, predicted_tokens=1.0),
        arrival(1, prompt=2, output=9, predicted_tokens=9.0),
    ]
    got, _ = batches(
        "ltr", work, limits(seats=1, max_num_resident=1), starvation_threshold=3, quantum=2
    )
    assert got[:8] == [
        {0: 2},
        *3 * [{0: 1}],
        ({1: 2}, [0]),
        *2 * [{1: 1}],
        ({0: 6}, [1]),  # request 0 was idle for three iterations as well
    ]
    got, _ = batches("ltr", work, limits(seats=1, max_num_resident=1), starvation_threshold=None)
    assert got == [{0: 2}, *8 * [{0: 1}], {1: 2}, *8 * [{1: 1}]]


def test_ltr_promises_one_step_to_who_came_while_nothing_ran():
    # It counts idle iterations from the next one that it is told of.
    policy = registry.make("ltr", starvation_threshold=5)
    policy.on_start(SimpleNamespace(running=()))
    assert policy.horizon(None) == (FOREVER, FOREVER)
    policy.on_arrival(RequestState(arrival(3, predicted_tokens=2.0).request), 0)
    assert policy.horizon(None) == (1, FOREVER)
    plan = BatchPlan((), (), (), (), (), (), 0, "leave", False, 1, FOREVER, 0, tuple)
    policy.on_tokens(plan, 2, 100)
    assert policy.horizon(None) == (5, FOREVER)
    policy.on_tokens(plan, 3, 200)
    assert policy.horizon(None) == (2, FOREVER)


def test_ltr_without_its_rule_starves_the_long_and_with_it_does_not():
    work = rival_stream({"predicted_tokens": 1.0}, {"predicted_tokens": 10.0})
    assert served("ltr", work, starvation_threshold=None)[-1] == 1
    assert served("ltr", work, starvation_threshold=10).index(1) == 11


def test_fastserve_joins_the_level_that_holds_its_prefill_and_drops_by_use():
    # Quanta are 2000, 4000, 8000 ns. Prefills of 4 tokens take 1040 ns: level 0. That of 110
    # tokens takes 2100 ns: level 1.
    work = [
        arrival(0, prompt=110, output=2),
        arrival(1, prompt=4, output=4),
        arrival(2, prompt=4, output=2),
    ]
    config = limits(seats=1, max_num_resident=1, budget=200, max_model_len=200)
    got, _ = batches("fastserve", work, config, first_quantum_s=2e-6)
    assert got == [
        {1: 4},  # level 0, first come
        {1: 1},  # 1040 ns used
        ({2: 4}, [1]),  # 2054 ns: to level 1, and to its front; request 2 is at level 0
        {2: 1},
        {1: 6},  # in front of request 0
        {1: 1},
        {0: 110},
        {0: 1},
    ]


@pytest.mark.parametrize(
    ("quantum_ns", "batches_then"), [(1010, [{0: 1}, {1: 1}]), (1011, [{0: 1}, {0: 1}, {1: 1}])]
)
def test_fastserve_quantum_is_used_up_at_its_very_end(quantum_ns, batches_then):
    # The prompt takes 1,010 ns.
    work = [arrival(i, 0, 1, 4) for i in range(2)]
    got, _ = batches("fastserve", work, limits(seats=1), first_quantum_s=quantum_ns * 1e-9)
    assert got[: len(batches_then)] == batches_then


def test_fastserve_promotes_who_has_not_run_for_long():
    # Requests come one after the other at level 0 and end within it; request 0 drops to level 1.
    work = [arrival(0, prompt=1, output=4)]
    work += [arrival(i, 500 * i, prompt=1, output=2) for i in range(1, 20)]
    knobs = {"first_quantum_s": 2e-6, "starvation_period": 4}
    _, log = batches(
        "fastserve", work, limits(seats=1, max_num_resident=1), starvation_s=1.0, **knobs
    )
    last = log.requests()["finish_ns"]
    assert last[0] == max(last)
    _, log = batches(
        "fastserve", work, limits(seats=1, max_num_resident=1), starvation_s=10e-6, **knobs
    )
    last = log.requests()["finish_ns"]
    assert last[0] < sorted(last)[9]


@pytest.mark.parametrize(("used_ns", "lasts_ns"), [(0, 2_000), (500, 1_500), (2_500, 1)])
def test_fastserve_counts_what_a_promoted_request_used_of_its_level_towards_the_first(
    used_ns, lasts_ns
):
    # Quanta are 2, 4 and 8 us; it has used some of the third.
    policy = registry.make(
        "fastserve", first_quantum_s=2e-6, starvation_s=5e-6, starvation_period=3
    )
    state = RequestState(arrival(0).request)
    view = SimpleNamespace(estimate_step_ns=lambda shape: 8_000, running=[state])
    policy._view = view
    policy.on_arrival(state, 0)

    def run(until_ns, *decodes):
        start_ns, policy.now_ns = policy.now_ns, until_ns
        plan = BatchPlan(
            decodes, (), (), (), (), (), 0, "leave", False, 1, FOREVER, start_ns, tuple
        )
        policy.on_tokens(plan, 1, until_ns)
        return policy._places[state].level

    policy.now_ns = 0
    assert run(used_ns, state) == 2
    assert run(used_ns + 4_999) == 2
    assert run(used_ns + 5_000) == 0
    view.now_ns = used_ns + 5_000
    assert policy.horizon(view) == (FOREVER, view.now_ns + lasts_ns)
    if lasts_ns > 1:
        assert run(view.now_ns + lasts_ns - 1, state) == 0
    assert run(view.now_ns + lasts_ns, state) == 1
    assert policy._places[state].left_ns == 4_000


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("aged", {"rate_per_s": -1.0}, "rate_per_s"),
        ("boosted", {"threshold_s": -1.0}, "threshold_s"),
        ("boosted", {"threshold_s": 1.0, "threshold_iterations": 3}, "not both"),
        ("boosted", {"threshold_iterations": 0}, "threshold_iterations"),
        ("ltr", {"starvation_threshold": 0}, "starvation_threshold"),
        ("ltr", {"quantum": 0}, "quantum"),
        ("fastserve", {"first_quantum_s": 0.0}, "first_quantum_s"),
        ("fastserve", {"starvation_s": float("nan")}, "starvation_s"),
        ("fastserve", {"starvation_period": 0}, "starvation_period"),
    ],
)
def test_preemptive_policy_with_an_impossible_knob_is_refused(name, knobs, message):
    with pytest.raises(Exception, match=message):
        batches(name, [arrival(0)], limits(), **knobs)


@pytest.mark.parametrize("name", ["srtf", "ltr", "aged", "boosted"])
def test_ranking_policy_without_predictions_says_so(name):
    with pytest.raises(Exception, match="needs a predictor"):
        batches(name, [arrival(0), arrival(1)], limits())


def test_srtf_a_request_that_ends_at_the_step_it_once_would_have_ends_once():
    # Ends are filed by the count of decode steps. Request 0, preempted for request 1, computes
    # its next token with its prompt, which is no decode step: its end moves ahead by one. Then
    # request 2 decodes twice in its place, and the end is back where it was filed first.
    work = [
        arrival(0, 0, prompt=2, output=12, predicted_tokens=90.0),
        arrival(1, 1_500, prompt=2, output=1, predicted_tokens=1.0),
        arrival(2, 6_000, prompt=2, output=3, predicted_tokens=1.0),
    ]
    got, log = batches("srtf", work, limits(seats=1, max_num_resident=1))
    assert log.requests()["num_preemptions"].tolist() == [2, 0, 0]
    assert log.requests()["generated_tokens"].tolist() == [12, 1, 3]
    assert got.count({2: 1}) == 2


def test_fastserve_prices_prompts_of_one_length_once():
    priced = []

    def estimate_step_ns(shape):
        priced.append(shape.chunks)
        return shape.chunks[0][0] * 1_000

    policy = registry.make("fastserve", first_quantum_s=1e-6)
    policy._view = SimpleNamespace(estimate_step_ns=estimate_step_ns, running=())
    states = [RequestState(arrival(i, prompt=n).request) for i, n in enumerate((4, 5, 4, 1, 5))]
    for state in states:
        policy.on_arrival(state, 0)
    assert [policy._places[state].level for state in states] == [2, 3, 2, 0, 3]
    assert priced == [((4, 0),), ((5, 0),), ((1, 0),)]


def test_fastserve_demotes_who_has_used_up_a_quantum_exactly_prompts_before_decodes():
    policy = registry.make("fastserve", first_quantum_s=1e-6)
    policy._view = SimpleNamespace(estimate_step_ns=lambda shape: 1, running=())
    states = [RequestState(arrival(i).request) for i in range(6)]
    for state in states:
        policy.on_arrival(state, 0)
    places = [policy._places[state] for state in states]
    for place, used_ns in zip(places, (599, 600, 601, 600, 599, 600), strict=True):
        place.left_ns -= used_ns
    # A step of 400 ns: decodes 0 to 2, then prompts, of which 5 still owes its first token.
    for state in states[3:5]:
        state._generated = 1
    chunks = tuple((state, 1) for state in states[3:])
    decodes = tuple(states[:3])
    plan = BatchPlan(
        decodes, chunks, (), (), (), (), 0, "leave", False, 1, FOREVER, 1_000, lambda: decodes
    )
    policy.on_tokens(plan, 1, 1_400)
    assert [place.level for place in places] == [0, 1, 1, 1, 0, 0]
    assert [place.left_ns for place in places] == [1, 2_000, 2_000, 2_000, 1, 0]
    assert [place.owes_token for place in places] == [False] * 5 + [True]
    order = sorted((1, 2, 3), key=lambda i: places[i].position)
    assert order == [1, 2, 3], "who ranked first before still does"


def test_fastserve_knows_a_prompt_under_way_of_who_had_tokens_from_another_engine():
    # It lost that engine: prompt and three tokens are computed again, in two chunks.
    policy = registry.make("fastserve", first_quantum_s=1e-6)
    policy._view = SimpleNamespace(estimate_step_ns=lambda shape: 1, running=())
    state = RequestState(arrival(0, prompt=4, output=9).request)
    state._generated = 3
    policy.on_arrival(state, 0)
    owes = []
    for start_ns, generated in ((0, 3), (400, 4)):
        state._generated = generated
        plan = BatchPlan(
            (), ((state, 4),), (), (), (), (), 0, "leave", False, 1, FOREVER, start_ns, tuple
        )
        policy.on_tokens(plan, 1, start_ns + 400)
        owes.append(policy._places[state].owes_token)
    assert owes == [True, False]


@pytest.mark.parametrize("seed", range(5))
def test_fastserve_drops_after_many_steps_whom_it_drops_step_by_step(seed):
    draw = random.Random(seed)
    states = [RequestState(arrival(i).request) for i in range(8)]
    durations_ns = [draw.randrange(1, 400) for _ in range(30)]
    waiting = states[6:]  # who drops in front of whom is not all: they are compared with others
    view = SimpleNamespace(
        estimate_step_ns=lambda shape: 1, running=states[:6], durations_ns=durations_ns
    )
    policies = []
    for at_once in (True, False):
        policy = registry.make("fastserve", first_quantum_s=2e-7)
        policy._view = view
        for i, state in enumerate(states):
            policy.on_arrival(state, 0)
            policy._places[state].left_ns -= 40 * (i % 4)
            policy._places[state].owes_token = i == 3
        now_ns = 0
        for steps_ns in [durations_ns] if at_once else [[one] for one in durations_ns]:
            plan = BatchPlan(
                None, (), (), (), (), (), 0, "leave", False, 1, FOREVER, now_ns, lambda: ()
            )
            now_ns += sum(steps_ns)
            policy.on_tokens(plan, len(steps_ns), now_ns)
        policy.settle()
        policies.append(policy)
    places = [[policy._places[state] for state in states] for policy in policies]
    told = [
        [(p.level, p.position, p.left_ns, p.output_tokens, p.last_ran_ns) for p in of_all]
        for of_all in places
    ]
    assert told[0] == told[1]
    assert min(p.level for p in places[0][:6]) >= 3
    assert [p.level for p in places[0][6:]] == [0] * len(waiting)


@pytest.mark.parametrize("name", ["fastserve", "plas"])
@pytest.mark.parametrize("seed", range(8))
def test_steps_that_served_everybody_are_charged_later_as_at_once(name, seed):
    draw = random.Random(seed)
    view = SimpleNamespace(
        estimate_step_ns=lambda shape: 1, running=[], durations_ns=[], now_ns=0,
        config=SimpleNamespace(kv_tiers=(), num_speculative_tokens=0),
    )  # fmt: skip
    later, at_once = (registry.make(name, first_quantum_s=2e-7) for _ in range(2))
    for policy in (later, at_once):
        policy.on_start(view)
    running, now_ns, num_settled = [], 0, 0
    for number in range(60):
        new = [RequestState(arrival(10 * number + i).request) for i in range(draw.randrange(3))]
        for state in new:
            state._generated = 1
        for policy in (later, at_once):
            for state in new:
                policy.on_arrival(state, now_ns)
        gone = [state for state in running if draw.random() < 0.05]
        decodes = tuple(running)
        running = [*(state for state in running if state not in gone), *new]
        durations_ns = [draw.randrange(1, 300) for _ in range(1 if new else draw.randrange(1, 5))]
        start_ns = now_ns + (draw.random() < 0.1)
        now_ns = start_ns + sum(durations_ns)
        view.running, view.durations_ns = running, durations_ns
        chunks = tuple((state, 1) for state in draw.sample(new, len(new)))
        is_served = draw.random() < 0.9
        took_part = decodes if is_served else decodes[::2]
        for policy, listed in ((later, None if is_served else took_part), (at_once, took_part)):
            for state in gone:
                policy.on_finish(state, now_ns)
            policy.on_tokens(
                BatchPlan(
                    listed, chunks, (), (), (), (), 0, "leave", False, 1, FOREVER, start_ns, tuple
                ),
                len(durations_ns), now_ns,
            )  # fmt: skip
        if not is_served:
            later.settle()
            num_settled += 1
            orders = [sorted(running, key=lambda s: p.key(s, 0)) for p in (later, at_once)]
            assert orders[0] == orders[1]
    later.settle()
    kept = "_places" if name == "fastserve" else "_calls"
    left_ns = [[getattr(p, kept)[s].left_ns for s in running] for p in (later, at_once)]
    assert left_ns[0] == left_ns[1]
    assert num_settled > 2


PLAS = {"first_quantum_s": 3e-6}
FASTSERVE = {"first_quantum_s": 2e-6, "starvation_s": 3e-6, "starvation_period": 7}
LTR = {"starvation_threshold": 5, "quantum": 2}


@pytest.mark.parametrize(
    ("name", "knobs", "stages"),
    [("plas", PLAS, 1), ("plas", PLAS, 2), ("fastserve", FASTSERVE, 1), ("ltr", LTR, 1),
     ("ltr", LTR, 2)],
)  # fmt: skip
def test_policy_that_is_not_told_who_ran_decides_as_if_it_were(name, knobs, stages):
    work = [
        arrival(i, 700 * i, prompt=2 + 7 * (i % 3), output=3 + 5 * (i % 4), predicted_tokens=i % 4)
        for i in range(24)
    ]
    config = limits(num_blocks=40, seats=5, budget=18, pipeline_parallel_size=stages)
    runs = []
    for asks in (False, True):
        policy = registry.make(name, **knobs)
        policy.asks_who_ran = asks
        told = []
        on_tokens = policy.on_tokens

        def note(plan, num_steps, now_ns, told=told, on_tokens=on_tokens):
            told.append(plan.decodes is None)
            on_tokens(plan, num_steps, now_ns)

        recorder = Recorder(policy)
        recorder.on_tokens = note
        table = laws.run(recorder, work, config).requests()
        columns = ("first_scheduled_ns", "finish_ns", "num_preemptions")
        runs.append([table[column].tolist() for column in columns])
        assert any(told) == (stages == 1 and not asks)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("most", [1, 2])
def test_fastserve_with_drafts_knows_whose_prompt_is_computed_again(most):
    # Several tokens come out of a step, and memory is short: answers are recomputed in pieces.
    seen = []

    class Watched(FastServe):
        def on_tokens(self, plan, num_steps, now_ns):
            super().on_tokens(plan, num_steps, now_ns)
            prefilling = {state.id for state in self._view.prefilling}
            for state, _ in plan.chunks:
                if state.id in prefilling and state.num_output_tokens:
                    seen.append(self._places[state].owes_token)

    config = EngineConfig(
        num_blocks=14, max_model_len=56, block_size=4, max_num_seqs=4, max_num_batched_tokens=12,
        num_speculative_tokens=most,
    )  # fmt: skip
    gpu = SpeculativeExecutor(
        Pricing(laws.LinearCost(1000, 10, 1)), config, DrawnAcceptance([1.0], 0.0, seed=0),
        NgramDrafter(0.0),
    )  # fmt: skip
    engine = Engine(config, Watched(**PARAMS["fastserve"]), gpu)
    simulate(engine, [laws.arrival(i, 0, 6, 40) for i in range(3)])
    assert seen
    assert all(seen)


def standing(level, position, last_ran_ns=0):
    return SimpleNamespace(level=level, position=position, last_ran_ns=last_ran_ns)


def test_fastserve_expects_a_request_after_all_above_have_come_down_or_when_it_starves():
    policy = registry.make("fastserve", first_quantum_s=0.001, starvation_s=0.05)
    places = {
        "a": standing(0, 5), "b": standing(0, 4), "c": standing(1, 9),
        "d": standing(3, 2, 990_000_000), "e": standing(3, 1, 954_000_000), "f": standing(3, 3),
    }  # fmt: skip
    policy._places.update(places)
    view = SimpleNamespace(now_ns=1_000_000_000, config=SimpleNamespace(max_num_seqs=4))
    # Two come from 1 to 8 ms, one from 2 to 8: 20 ms over four seats; or in 4 ms the promotion.
    assert policy._next_starts(list("cdef"), view) == [
        ((0.0, 1, 9), "c"), ((5e6, 3, 2), "d"), ((4e6, 3, 1), "e"), ((0.0, 3, 3), "f"),
    ]  # fmt: skip
    places["c"].last_ran_ns = view.now_ns
    assert policy._next_starts(["c"], view) == [((2 * 1e6 / 4, 1, 9), "c")]


@pytest.mark.parametrize(
    ("free_blocks", "rows_left", "num_idle", "steps"),
    [
        # Two rows of four run, blocks have 16 tokens, and three are kept free.
        (3, 2, 1, 1), (4, 2, 1, 1), (5, 2, 1, 17), (8, 2, 1, 33), (8, 1, 1, 17),
        (2, 2, 1, FOREVER), (8, 4, 1, FOREVER), (8, 2, 0, FOREVER),
    ],
)  # fmt: skip
def test_fastserve_looks_again_when_memory_could_reach_the_reserve(
    free_blocks, rows_left, num_idle, steps
):
    policy = registry.make("fastserve", reserve_blocks=3)
    view = SimpleNamespace(
        free_blocks=free_blocks, config=SimpleNamespace(max_num_seqs=4, block_size=16)
    )  # fmt: skip
    builder = SimpleNamespace(rows_left=rows_left)
    assert policy._steps_above_reserve(["idle"] * num_idle, view, builder) == steps


class Swapped(SimpleNamespace):
    """A request, each equal to itself alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_fastserve_swaps_out_who_runs_last_until_the_reserve_is_free_and_in_who_fits():
    policy = registry.make("fastserve", reserve_blocks=3, first_quantum_s=0.001, starvation_s=99.0)
    states = {
        name: Swapped(name=name, swapped=name in "bcd", num_computed_tokens=tokens)
        for name, tokens in (("a", 1), ("b", 33), ("c", 32), ("d", 999), ("e", 1))
    }
    for at, state in enumerate(states.values()):
        policy._places[state] = standing(at, at)
    view = SimpleNamespace(
        now_ns=0, free_blocks=0, waiting=[states[name] for name in "bcd"],
        config=SimpleNamespace(max_num_seqs=3, block_size=16),
    )  # fmt: skip
    told = []

    def offload(state):
        told.append(("out", state.name))
        view.free_blocks += 2

    def prefetch(state):
        told.append(("in", state.name))
        view.free_blocks -= -(-state.num_computed_tokens // 16)

    builder = SimpleNamespace(offload=offload, prefetch=prefetch, serves=lambda state: False)
    idle = [states["a"], states["e"]]
    for free_blocks, expected in ((0, ["e", "a"]), (1, ["e"]), (2, ["e"]), (3, [])):
        view.free_blocks = free_blocks
        policy._swap_out(idle, view, builder)
        assert told == [("out", name) for name in expected], free_blocks
        told.clear()
    # Of the three that are next two are swapped, with 3 and 2 blocks; what is free stays above 3.
    for free_blocks, expected in ((8, ["b", "c"]), (7, ["b"]), (6, ["b"]), (5, ["c"]), (4, [])):
        view.free_blocks = free_blocks
        policy._swap_in(idle[:1], lambda one: policy._places[one].position, view, builder)
        assert told == [("in", name) for name in expected], free_blocks
        told.clear()


class TakesFromTheFirst(ContinuousBatching):
    """Takes memory from who was admitted first."""

    def victim(self, running, now_ns):
        return running[-1]


def test_victim_who_had_his_turn_makes_nobody_behind_lose_his():
    # Of four blocks each holds one; the third fills his, and takes that of the first.
    work = [arrival(i, 0, 4 if i == 2 else 2, 3) for i in range(4)]
    recorder = Recorder(TakesFromTheFirst())
    laws.run(recorder, work, laws.slow(limits(num_blocks=4, preempt_in_order=True)))
    assert recorder.batches[:3] == [
        {0: 2, 1: 2, 2: 4, 3: 2},
        ({1: 1, 2: 1, 3: 1}, [0]),
        {1: 1, 2: 1, 3: 1},
    ]


@pytest.mark.parametrize("status", [Status.RUNNING, Status.WAITING])
@pytest.mark.parametrize("owes_token", [True, False])
def test_fastserve_puts_prompts_first_that_run_and_have_no_token_yet(status, owes_token):
    policy, state = registry.make("fastserve"), RequestState(arrival(0).request)
    state.status = status
    policy._places[state] = SimpleNamespace(owes_token=owes_token, level=3, position=-7)
    goes_first = status is Status.RUNNING and owes_token
    assert policy.key(state, 0) == (not goes_first, 3, -7)


class AsksWhetherAllFit(Policy):
    """Grants everybody all there is, decodes first, and notes whether it had been promised."""

    def __init__(self):
        self.promised, self.kept = 0, 0

    def plan(self, view, builder):
        is_promised = everyone_fits(view, builder)
        everybody = [*view.decoding, *view.prefilling, *view.waiting]
        wanted = {
            state: state.decode_tokens if state in view.decoding else state.num_uncomputed_tokens
            for state in everybody
        }
        granted = {state: builder.grant(state) for state in everybody}
        self.promised += is_promised and len(everybody) > 1
        self.kept += granted == wanted and len(everybody) > 1
        if is_promised:
            assert granted == wanted
        if view.running and not any(granted.values()):
            builder.preempt(list(builder.running())[-1])
        return builder.build()


def test_everyone_fits_only_where_everybody_is_granted_all_there_is():
    promised = kept = 0
    for seed in range(12):
        draw = random.Random(seed)
        drafts, block_size = draw.choice((0, 1, 3)), draw.choice((1, 4))
        config = limits(
            draw.choice((32, 60, 200)) // block_size, seats=draw.choice((2, 4, 8)),
            budget=draw.choice((9, 16, 40)), block_size=block_size, max_model_len=32,
            num_speculative_tokens=drafts, num_lookahead_tokens=draw.choice((0, 2)) * (drafts > 0),
        )  # fmt: skip
        gap_ns = draw.choice((0, 300, 2_000))
        work = [
            arrival(i, gap_ns * (i // 2), draw.randint(1, 9), draw.randint(2, 9)) for i in range(10)
        ]
        policy = AsksWhetherAllFit()

        def executor(pricing, config=config):
            if not config.num_speculative_tokens:
                return SimExecutor(pricing)
            return SpeculativeExecutor(pricing, config, DrawnAcceptance([0.5]), NgramDrafter(0.0))

        laws.run(policy, work, config, make_executor=executor)
        promised += policy.promised
        kept += policy.kept
    assert kept >= promised > 30
