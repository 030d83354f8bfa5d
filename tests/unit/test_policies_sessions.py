"""Policies that know the session of a request: who goes first, and whose memory is kept."""

import random
from dataclasses import replace
from statistics import correlation
from types import SimpleNamespace

import pytest

from schedlab.policies import registry
from schedlab.policies.attained_service import Past
from schedlab.policies.continuum import SessionsOver, best_ttl_ns
from schedlab.policies.retaining import Retaining
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import Arrival, Request, RequestState, Session, Turn
from tests import laws, sessions

CONFIG = EngineConfig(
    num_blocks=60, max_model_len=100, block_size=4, max_num_seqs=1, max_num_batched_tokens=64
)
COST = laws.LinearCost(base_ns=100, token_ns=0, context_ns=0)  # every step takes 100 ns
CACHED = replace(CONFIG, max_num_seqs=5, enable_prefix_caching=True)
KNOBS = {
    "plas": {"first_quantum_s": 2e-6, "starvation": 0.5},
    "atlas": {"first_quantum_s": 2e-6, "starvation": 3.0},
    "continuum": {"min_calls": 3},
    "continuum/preview": {"ttl": "preview", "fixed_ttl_s": 3e-5},
    "infercept": {},
    "program_fcfs": {},
    "program_srpt": {},
}


def made(case):
    return registry.make(case.partition("/")[0], **KNOBS[case])


def named(work, tool="search"):
    """Give every request the names of its blocks, and let two answers of three call a tool."""
    named, fresh = [], 10_000
    known = {}
    for arrival in work:
        request, turn = arrival.request, arrival.turn
        total = (request.prompt_tokens + arrival.output_tokens) // 4
        before = known[turn.parents[0]] if turn.parents else ()
        ids = before[: request.prompt_tokens // 4]
        ids += tuple(range(fresh, fresh + total - len(ids)))
        fresh += 128
        known[request.id] = ids
        full = request.prompt_tokens // 4
        named.append(
            replace(
                arrival,
                request=replace(request, prefix_hash_ids=ids[:full]),
                turn=turn._replace(
                    answer_hash_ids=ids[full:], tool=tool if request.id % 3 else None
                ),
            )
        )
    return named


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 26), (1, 40), (2, 200)])
def test_policy_of_sessions_skips_ahead_exactly_and_keeps_its_promises(name, seed, num_blocks):
    work = named(sessions.drawn(seed))
    config = replace(CACHED, num_blocks=num_blocks)
    fast = laws.run(made(name), work, config)
    slow = laws.run(made(name), work, laws.slow(config))
    assert laws.difference(slow, fast, ("by single steps", "ahead")) is None
    assert laws.signature(fast) == laws.signature(slow)
    laws.run(made(name), work, replace(config, check_horizon=True))
    sessions.check_order(fast, work)
    laws.check(fast, work, config, may_wait=True)


def started(name, work, config=CONFIG, **knobs):
    """Return the requests in the order in which they are first scheduled."""
    columns = laws.run(registry.make(name, **knobs), work, config, cost=COST).requests()
    order = columns["first_scheduled_ns"].argsort(kind="stable")
    return columns["id"][order].tolist()


def test_program_fcfs_serves_a_later_turn_before_a_session_that_began_later():
    # 0 ends at 300; its next turn (1) is sent at 350, when session b (2, 3) already waits.
    work = sessions.requests("a", 0, 0, [([], 0, 4, 3), ([0], 50, 4, 2)])
    work += sessions.requests("b", 2, 20, [([], 0, 4, 2), ([], 5, 4, 2)])
    assert started("fcfs", work) == [0, 2, 3, 1]
    assert started("program_fcfs", work) == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("name", "evicted"), [("fcfs", 1), ("program_fcfs", 2), ("infercept", 2), ("continuum", 2)]
)
@pytest.mark.parametrize("in_order", [False, True])
def test_memory_is_taken_from_the_session_that_began_last_though_the_other_was_admitted_after_it(
    name, evicted, in_order
):
    # b (2) is there before the second turn of a (1); both answers do not fit 24 blocks.
    work = sessions.requests("a", 0, 0, [([], 0, 8, 2), ([0], 20_000, 8, 60)])
    work += sessions.requests("b", 2, 5_000, [([], 0, 8, 60)])
    config = replace(
        CONFIG, num_blocks=24, max_model_len=80, max_num_seqs=4, preempt_in_order=in_order
    )
    columns = laws.run(registry.make(name), work, config).requests()
    assert columns["id"][columns["num_preemptions"] > 0].tolist() == [evicted]


def test_of_one_session_memory_is_taken_from_the_latest_request():
    work = sessions.requests("a", 0, 0, [([], 0, 8, 30), ([], 5_000, 8, 30), ([], 2_000, 8, 30)])
    config = replace(CONFIG, num_blocks=24, max_model_len=80, max_num_seqs=4)
    columns = laws.run(registry.make("program_fcfs"), work, config).requests()
    assert columns["id"][columns["num_preemptions"] > 0].tolist() == [1]


def test_plas_serves_the_session_that_had_less_first():
    # When 0 ends, a has had 300 ns and its next turn is sent at once; b and c have had nothing.
    work = sessions.requests("a", 0, 0, [([], 0, 4, 3), ([0], 0, 4, 2)])
    work += sessions.requests("b", 2, 310, [([], 0, 4, 2)])
    work += sessions.requests("c", 3, 320, [([], 0, 4, 2)])
    work[0] = replace(work[0], output_tokens=3)
    work[1] = replace(work[1], turn=work[1].turn._replace(delay_ns=5))
    first = dict(first_quantum_s=2e-7)
    assert started("fcfs", work) == [0, 1, 2, 3]
    work[1] = replace(work[1], turn=work[1].turn._replace(delay_ns=30))
    busy = sessions.requests("d", 4, 0, [([], 299, 4, 4)])
    order = started("plas", [*work[:2], *busy, *work[2:]], **first)
    assert order.index(2) < order.index(1)
    assert order.index(3) < order.index(1)


def coming(policy, number, came_ns, base_ns=0, waited_ns=0):
    """Let a request come to a session that has had some service, and has waited."""
    state = RequestState(laws.arrival(number).request)
    state.session = Session("one", 0)
    past = state.session.noted = Past()
    past.service_ns, past.waited_ns = base_ns, waited_ns
    policy.on_arrival(state, came_ns)
    return state


def served(policy, took_part, *durations_ns, running=None, until_ns=None):
    """Let requests take part in steps up to a time; returns the queues of all who are here."""
    view = SimpleNamespace(running=took_part if running is None else running, durations_ns=None)
    policy.on_start(view)
    view.durations_ns = list(durations_ns)
    end_ns = policy.now_ns + sum(durations_ns) if until_ns is None else until_ns
    decodes = None if running is None else tuple(took_part)
    policy.on_tokens(step(end_ns - sum(durations_ns), decodes), len(durations_ns), end_ns)
    policy.settle()
    policy.now_ns = end_ns
    return [call.place[0] for call in policy._calls.values()]


def queues(num_queues=4, starvation=None, first_quantum_s=100e-9):
    """Return PLAS with queues below 100, 200, 400 ns and beyond: quanta of 100, 100 and 200."""
    policy = registry.make(
        "plas", first_quantum_s=first_quantum_s, num_queues=num_queues, starvation=starvation
    )
    policy.on_start(SimpleNamespace(running=[], durations_ns=[]))
    policy.now_ns = 1_000
    return policy


def in_order(policy):
    """Return the numbers of the requests as they stand."""
    return [s.id for s in sorted(policy._calls, key=lambda s: policy.key(s, policy.now_ns))]


@pytest.mark.parametrize(
    ("base_ns", "queue", "quantum_ns"),
    [(0, 0, 100), (99, 0, 100), (100, 1, 100), (199, 1, 100), (200, 2, 200), (399, 2, 200),
     (400, 3, None), (10**15, 3, None)],
)  # fmt: skip
def test_plas_puts_a_request_in_the_queue_of_its_session_with_the_whole_quantum(
    base_ns, queue, quantum_ns
):
    policy = queues()
    state = coming(policy, 0, 1_000, base_ns)
    assert policy.key(state, 10**12)[0] == queue
    if quantum_ns is None:
        assert served(policy, [state], 10**15) == [queue]
    else:
        assert served(policy, [state], quantum_ns - 1) == [queue]
        assert served(policy, [state], 1) == [queue + 1]


def test_plas_gives_who_drops_the_whole_quantum_of_the_next_queue():
    policy = queues()
    state = coming(policy, 0, 1_000)
    assert served(policy, [state], 170) == [1]  # 70 too long, which it does not owe
    assert served(policy, [state], 99) == [1]
    assert served(policy, [state], 250) == [2]
    assert served(policy, [state], 199) == [2]
    assert served(policy, [state], 1) == [3]
    assert policy._calls[state].service_ns == 170 + 99 + 250 + 200


def test_plas_of_one_queue_never_drops_or_promotes_anybody():
    policy = queues(num_queues=1, starvation=0.1)
    state = coming(policy, 0, 1_000, 50, 10**6)
    assert served(policy, [state], 10**9) == [0]
    assert policy.horizon(SimpleNamespace(now_ns=5, running=[state])) == (FOREVER, FOREVER)


def test_plas_sends_who_drops_to_the_back_of_the_next_queue_in_their_order():
    policy = queues()
    first, second = coming(policy, 0, 1_000), coming(policy, 1, 1_001)
    there = coming(policy, 2, 1_050, 100)
    assert in_order(policy) == [0, 1, 2]
    # A third comes to the next queue just when the two drop into it: those who come go first.
    coming(policy, 3, 1_100, 150)
    assert served(policy, [second, first], 100, running=[first, second, there]) == [1, 1, 1, 1]
    coming(policy, 4, 1_101, 150)
    assert in_order(policy) == [2, 3, 0, 1, 4]
    # Where one is left out for a while, the other drops again before it.
    served(policy, [second], 100, running=[first, second, there])
    served(policy, [first], 100, running=[first, second, there])
    assert in_order(policy) == [2, 3, 4, 1, 0]


@pytest.mark.parametrize("starvation", [None, 0.4, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_plas_drops_and_promotes_after_many_steps_as_step_by_step(seed, starvation):
    draw = random.Random(seed)
    pasts = [(draw.randrange(300), draw.randrange(1_500)) for _ in range(7)]
    durations_ns = [draw.randrange(1, 60) for _ in range(40)]
    told = []
    for at_once in (True, False):
        policy = queues(num_queues=6, starvation=starvation)
        states = [coming(policy, i, 990 + i // 3, *past) for i, past in enumerate(pasts)]
        for steps_ns in [durations_ns] if at_once else [[one] for one in durations_ns]:
            served(policy, states, *steps_ns)
        calls = [policy._calls[state] for state in states]
        told.append(
            (in_order(policy), [(*call.place[:3], call.left_ns, call.service_ns) for call in calls])
        )
    assert told[0] == told[1]


def test_plas_moves_who_waited_beyond_its_share_to_the_first_queue_for_a_quantum():
    policy = queues(starvation=2.5)
    # It came at 1,000 and was served 90 ns, with 101 before: 478 ns is its share, rounded up, of
    # which its session had waited 30 before; it waits since it came, less those 90.
    starves_ns = 1_000 + 90 + 478 - 30
    state = coming(policy, 0, 1_000, 101, 30)
    served(policy, [state], 90)
    other = coming(policy, 1, starves_ns - 21)
    assert served(policy, [other], 20, running=[state, other], until_ns=starves_ns - 1) == [1, 0]
    view = SimpleNamespace(now_ns=policy.now_ns, running=[])
    assert policy.promise(view) == (FOREVER, starves_ns)
    assert served(policy, [other], 1, running=[state, other]) == [0, 0]
    assert policy.rekeyed == [state]
    assert in_order(policy) == [1, 0]  # at the back of it
    # It stays until the quantum is used up, though by the ratio it starves no more ...
    assert served(policy, [state, other], 79) == [0, 1]
    assert not policy.rekeyed
    assert served(policy, [state], 20, running=[state, other]) == [0, 1]
    assert served(policy, [state], 1, running=[state, other]) == [1, 1]
    # ... and waits anew: with its session's 101 ns it has had 201, and its session waited 30.
    starves_ns += 100 + 503 - 30
    assert served(policy, [], 1, running=[], until_ns=starves_ns - 1)[0] == 1
    assert served(policy, [], 1, running=[])[0] == 0
    # What it had before counts for the next request of its session.
    policy.on_finish(state, policy.now_ns)
    served(policy, [], 1, running=[])
    past = state.session.noted
    assert (past.service_ns, past.waited_ns) == (101 + 190, 30 + starves_ns - 1_000 - 190)


def test_plas_puts_a_request_of_a_session_that_starves_in_the_first_queue_at_once():
    policy = queues(starvation=2.0)
    coming(policy, 0, 1_000, 300, 599)
    coming(policy, 1, 1_000, 300, 600)
    coming(policy, 2, 1_000, 0, 600)  # who has had nothing is in the first queue anyway
    assert [policy.key(state, 1_000)[0] for state in policy._calls] == [2, 0, 0]


def test_plas_keeps_in_the_first_queue_who_still_starves_when_its_quantum_is_used_up():
    policy = queues(starvation=2.0)
    state = coming(policy, 0, 1_000, 300, 850)
    assert served(policy, [state], 99) == [0]
    # It counts anew each time, so that its session's 850 ns are set against 300 and a quantum.
    assert served(policy, [state], 1) == [0]
    for _ in range(4):
        assert served(policy, [state], 99) == [0]
        assert served(policy, [state], 1) == [0]
    assert served(policy, [state], 126) == [1]
    assert policy._calls[state].service_ns == 300 + 500 + 126


def test_plas_promotes_those_who_starve_at_once_in_the_order_in_which_they_stood():
    policy = queues(starvation=2.0)
    coming(policy, 0, 900, 400, 700)
    coming(policy, 1, 950, 100, 100)
    coming(policy, 2, 960, 300, 500)
    coming(policy, 3, 970, 100, 100)
    assert in_order(policy) == [1, 3, 2, 0]
    assert served(policy, [], 10, running=[], until_ns=1_200) == [0, 0, 0, 0]
    assert in_order(policy) == [1, 3, 2, 0]
    assert [state.id for state in policy.rekeyed] == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("now_ns", "running", "promise"),
    [
        (1_200, [], (FOREVER, 1_475)),  # 1,000 + 2.5 * 200 - 25: somebody starves
        (1_200, [0], (FOREVER, 1_200 + 60)),  # a quantum ends
        (1_200, [0, 1], (FOREVER, 1_200 + 60)),
        (1_200, [1], (FOREVER, 1_200 + 200)),
        (1_400, [1], (FOREVER, 1_475)),
        (1_475, [], (1, FOREVER)),  # it is looked for at the end of the next step
        (1_900, [0, 1], (1, FOREVER)),
    ],
)
def test_plas_plans_until_a_quantum_is_used_up_or_somebody_starves(now_ns, running, promise):
    policy = queues(starvation=2.5)
    states = [coming(policy, 0, 1_000), coming(policy, 1, 1_000, 200, 25)]
    served(policy, states[:1], 40, running=states)
    view = SimpleNamespace(now_ns=now_ns, running=[states[i] for i in running])
    assert policy.promise(view) == promise


def test_plas_in_its_last_queue_plans_for_ever():
    policy = queues(num_queues=2)
    state = coming(policy, 0, 0, 150)
    assert policy.horizon(SimpleNamespace(now_ns=5, running=[state])) == (FOREVER, FOREVER)


def test_who_starved_with_plas_is_not_sent_back_by_the_next_step():
    # One seat, quanta of 200 ns: 0 drops at 200, and 1, 2 and 3 come before it until 800. At 700
    # it has waited 2.5 times what it had; so it is ahead of 4, and stays there until 1,000.
    rows = [(0, 9), (100, 2), (300, 9), (550, 2), (790, 1)]
    work = [laws.arrival(i, came_ns, 4, output) for i, (came_ns, output) in enumerate(rows)]
    times = {}
    for skips in (True, False):
        config = replace(CONFIG, max_num_resident=5, fast_forward=skips)
        policy = registry.make("plas", first_quantum_s=2e-7, starvation=2.5)
        columns = laws.run(policy, work, config, cost=COST).requests()
        times[skips] = dict(zip(columns["id"], columns["finish_ns"], strict=True))
        assert columns["num_preemptions"].tolist() == [0] * 5
    assert times[True] == times[False]
    assert [times[True][i] for i in (1, 3, 4)] == [400, 800, 1_100]


def brought(name, work, config, **knobs):
    """Return service and waiting time that requests bring along, by their numbers."""
    seen = {}

    class Watching(registry.policy_class(name)):
        def on_arrival(self, state, now_ns):
            super().on_arrival(state, now_ns)
            call = self._calls[state]
            seen[state.id] = call.base_ns, call.waited_ns

        def horizon(self, view):
            return super().horizon(view)

    laws.run(Watching(**knobs), work, config, cost=COST)
    return [seen[i] for i in sorted(seen)]


@pytest.mark.parametrize(("name", "had_ns"), [("plas", 600), ("atlas", 300)])
@pytest.mark.parametrize("skips", [True, False])
def test_new_call_of_a_session_begins_with_what_that_had(name, had_ns, skips):
    # Two calls of 300 ns side by side, and one that needs both; another session has had nothing.
    rows = [([], 0, 4, 3), ([], 0, 4, 3), ([0, 1], 0, 4, 2)]
    work = sessions.requests("a", 0, 0, rows) + sessions.requests("b", 3, 310, [([], 0, 4, 2)])
    got = brought(name, work, replace(CONFIG, max_num_seqs=2, fast_forward=skips))
    assert got == [(0, 0), (0, 0), (had_ns, 0), (0, 0)]


@pytest.mark.parametrize("name", ["plas", "atlas"])
@pytest.mark.parametrize("skips", [True, False])
def test_a_call_that_is_left_out_with_its_seat_waits_and_is_not_served(name, skips):
    # a has 200 ns when b has come, which is served twice until it has had as much: 2 of 6 steps.
    work = sessions.requests("a", 0, 0, [([], 0, 4, 4), ([0], 0, 4, 1)])
    work += sessions.requests("b", 2, 150, [([], 0, 4, 2), ([0], 250, 4, 1)])
    config = replace(CONFIG, fast_forward=skips)
    got = brought(name, work, config, first_quantum_s=1e-7)
    assert got == [(0, 0), (400, 200), (0, 0), (200, 50)]


def test_atlas_brings_the_longest_chain_of_calls_that_waited_for_each_other():
    # A chain of 200 and 100 ns beside a call of 400, with a seat for each.
    rows = [([], 0, 4, 2), ([], 0, 4, 4), ([0], 0, 4, 1), ([1, 2], 0, 4, 1)]
    work = sessions.requests("a", 0, 0, rows)
    config = replace(CONFIG, max_num_seqs=2)
    assert [had for had, _ in brought("atlas", work, config)] == [0, 0, 200, 400]
    assert [had for had, _ in brought("plas", work, config)] == [0, 0, 200, 700]


def test_atlas_brings_the_longest_chain_though_a_short_call_ends_last():
    # 400 ns, and 200 ns that begin at 300.
    rows = [([], 0, 4, 4), ([], 250, 4, 2), ([0, 1], 0, 4, 1)]
    config = replace(CONFIG, max_num_seqs=2)
    got = brought("atlas", sessions.requests("a", 0, 0, rows), config)
    assert [had for had, _ in got] == [0, 0, 400]


def step(start_ns, decodes=None):
    """Return the plan of a step in which some, or all, decode."""
    return BatchPlan(decodes, (), (), (), (), (), 0, "leave", False, 1, FOREVER, start_ns, tuple)


@pytest.mark.parametrize("name", ["plas", "atlas"])
def test_a_session_brings_to_an_engine_what_it_had_on_another(name):
    policies = [registry.make(name) for _ in range(2)]
    session = Session("a", 0)
    for policy, came_ns, own_ns, had in zip(
        policies, (100, 900), (300, 40), ((0, 0), (300, 50)), strict=True
    ):
        state = RequestState(laws.arrival(came_ns).request)
        state.session = session
        policy.on_start(SimpleNamespace(running=[]))
        policy.on_arrival(state, came_ns)
        call = policy._calls[state]
        assert (call.base_ns, call.waited_ns) == had
        policy.on_finish(state, came_ns + own_ns + 50)
        policy.on_tokens(step(came_ns + 50), 1, came_ns + own_ns + 50)
        policy.on_tokens(step(came_ns + own_ns + 50), 1, came_ns + own_ns + 90)
    assert (session.noted.service_ns, session.noted.waited_ns) == (340, 100)


def test_plas_charges_no_step_to_a_call_that_went_away_before_it():
    policy, session = registry.make("plas"), Session("a", 0)
    state = RequestState(laws.arrival(0).request)
    state.session = session
    policy.on_start(SimpleNamespace(running=[]))
    policy.on_arrival(state, 0)
    policy.on_finish(state, 70)
    policy.on_tokens(step(70), 1, 100)
    assert (session.noted.service_ns, session.noted.waited_ns) == (0, 70)


def test_program_srpt_serves_the_session_with_the_least_to_come():
    def total(work, tokens):
        return [
            replace(
                one,
                request=replace(one.request, predicted_session_tokens=tokens, predicted_tokens=2.0),
            )
            for one in work
        ]

    first = total(sessions.requests("a", 0, 0, [([], 0, 4, 2)]), 2.0)
    long = total(sessions.requests("b", 1, 10, [([], 0, 4, 2), ([1 - 1], 0, 4, 2)]), 4.0)
    short = total(sessions.requests("c", 3, 20, [([], 0, 4, 2)]), 2.0)
    assert started("program_srpt", first + long + short) == [0, 3, 1, 2]


def test_continuum_keeps_memory_for_its_time_to_live_and_no_longer():
    # Request 0 ends at 500 with 24 tokens in 6 blocks; its tool takes 1000 ns.
    work = sessions.requests("a", 0, 0, [([], 0, 20, 5), ([0], 1000, 28, 2)])
    work += sessions.requests("b", 2, 600, [([], 0, 40, 30)])
    work = named(work)
    work[0] = replace(work[0], turn=work[0].turn._replace(tool="search"))
    held = {}
    for ttl_ns in (900, 1_100):
        policy = registry.make("continuum", ttl="preview", fixed_ttl_s=ttl_ns / 1e9)
        log = laws.run(policy, work, replace(CACHED, num_blocks=25), cost=COST)
        assert log.requests()["prefix_hit_tokens"].tolist()[1] == 24
        steps = log.steps()
        held[ttl_ns] = dict(zip(steps["start_ns"], steps["kv_allocated_tokens"], strict=True))
    assert held[900][1_300] == held[1_100][1_300]
    assert held[900][1_400] == held[1_100][1_400] - 24


@pytest.mark.parametrize(
    ("past_ns", "saved_ns", "kept_ns"),
    [
        # Gains are the share of calls back by then, of what is saved, less the time itself.
        ([10, 20, 90], 45, 21),  # 15 - 10, 30 - 20, 45 - 90: the second
        ([10, 20, 90], 300, 91),  # 100 - 10, 200 - 20, 300 - 90
        ([10, 20, 90], 30, 0),  # 10 - 10 and 20 - 20 are no gain
        ([10, 20, 90], -5, 0),
        ([10, 10, 10], 10, 0),
        ([10, 10, 10], 11, 11),
        ([0, 60], 100, 1),  # 50 - 0 and 100 - 60
    ],
)
def test_continuum_keeps_for_the_time_of_the_past_that_gains_most(past_ns, saved_ns, kept_ns):
    assert best_ttl_ns(past_ns, saved_ns) == kept_ns


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], 1.0),  # as if all were equally long
        ([1, 1], 1.0),
        ([5, 5, 5], 1.0),  # after k requests 5 - k are left
        # Served and left are 1 and 0; 1 and 2, 2 and 1, 3 and 0: both vary by 2.75, together by
        # 4 - 7 * 3 / 4 = -1.25.
        ([1, 3], 5 / 11),
        ([1] * 8 + [4], -1 / 11),  # who has had more has more to come
    ],
)
def test_memoryfulness_is_how_well_the_requests_served_foretell_those_to_come(lengths, expected):
    over = SessionsOver()
    for length in lengths:
        over.add(length)
    assert over.memoryfulness() == pytest.approx(expected)


def test_memoryfulness_is_the_negative_correlation_over_all_requests():
    draw, over, served, left = random.Random(4), SessionsOver(), [], []
    for _ in range(300):
        length = draw.choice((1, 2, 9, 40))
        over.add(length)
        served += range(1, length + 1)
        left += range(length - 1, -1, -1)
    assert over.memoryfulness() == pytest.approx(-correlation(served, left))


def called(policy, tool, took_ns, now_ns=0, number=0):
    """Let a request come that needed a call alone; return a session's next that calls it again."""
    state = SimpleNamespace(id=number, awaited_call=(tool, took_ns), tool=tool, session=None)
    policy.on_arrival(state, now_ns)
    return state


def test_continuum_goes_by_the_tool_by_all_tools_or_by_calls_of_a_second_as_many_as_there_are():
    policy = registry.make("continuum", min_calls=3)
    policy.on_start(SimpleNamespace(kept=[]))
    policy.restore_ns = lambda state: 2_500_000_000
    for took_ns in (10, 20, 30):
        state = called(policy, "fast", took_ns)
    # Three calls of all are too few: exp(-t) * 2.5 s falls to 1 at t = ln(2.5).
    assert policy.keeps_until(state, 7) == 7 + 916_290_732
    slow = called(policy, "slow", 2_000_000_000)
    # Four of all; 2.5 - 2 s is less than 3 / 4 of 2.5 s, for 30 ns.
    assert policy.keeps_until(state, 7) == policy.keeps_until(slow, 7) == 7 + 31
    for _ in range(3):
        called(policy, "slow", 2_000_000_000)
    # Four of the slow one, and three still of the other: 3 / 7 of 2.5 s, and 2.5 - 2 s.
    assert policy.keeps_until(state, 7) == 7 + 31
    assert policy.keeps_until(slow, 7) == 7 + 2_000_000_001
    policy.restore_ns = lambda state: 2_000_000_000
    assert policy.keeps_until(slow, 7) == 7
    state.tool = None
    assert policy.keeps_until(state, 7) == 7


def test_continuum_keeps_for_no_time_at_first_where_a_second_is_not_saved():
    policy = registry.make("continuum")
    policy.restore_ns = lambda state: 600_000_000
    state = SimpleNamespace(tool="x")
    assert policy.keeps_until(state, 7) == 7
    policy._delays_ns.extend([500_000_000, 300_000_000])  # 0.4 s more, whatever sessions are like
    policy._over.add(1)
    policy._over.add(3)
    assert policy.keeps_until(state, 7) == 7
    policy._delays_ns.append(1_000_000_000)  # 0.6 s more
    assert policy.keeps_until(state, 7) == 7 + 182_321_557


def test_continuum_saves_the_delays_of_who_came_back_to_nothing_as_far_as_they_say_who_is_done():
    policy = registry.make("continuum", min_calls=0)
    policy.on_start(SimpleNamespace(kept=[]))
    policy.restore_ns = lambda state: 40
    for took_ns in (10, 20, 54, 55):
        state = called(policy, "x", took_ns)
    policy._delays_ns.extend([22, 44])
    policy._over.add(1)
    policy._over.add(3)
    # 40 + 33 * 5 / 11 = 55: gains are 55 / 4 - 10, 55 / 2 - 20, and less.
    assert policy.keeps_until(state, 0) == 21
    policy._over = SessionsOver()
    # 40 + 33 = 73: 73 / 4 - 10, 73 / 2 - 20, 73 * 3 / 4 - 54 and 73 - 55, which is the most.
    assert policy.keeps_until(state, 0) == 56


@pytest.mark.parametrize(
    ("took_ns", "kept_ns"),
    [([], 2_000), ([1_000, 3_000], 2_000), ([1_000, 3_002], 0), ([2_001], 0)],
)
def test_continuum_as_previewed_keeps_for_a_fixed_time_unless_the_tool_takes_longer_in_the_mean(
    took_ns, kept_ns
):
    policy = registry.make("continuum", ttl="preview", fixed_ttl_s=2e-6)
    policy.on_start(SimpleNamespace(kept=[]))
    for one in took_ns:
        called(policy, "x", one)
    called(policy, "y", 90_000)
    assert policy.keeps_until(SimpleNamespace(tool="x"), 5) == 5 + kept_ns
    assert policy.keeps_until(SimpleNamespace(tool=None), 5) == 5


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"ttl": "fixed"}, "ttl must be one of paper, preview; got 'fixed'"),
        ({"min_calls": 256}, "min_calls must be 0 to 255, got 256"),
        ({"min_calls": -1}, "min_calls must be 0 to 255, got -1"),
        ({"fixed_ttl_s": -1.0}, "fixed_ttl_s must be 0 to 1e9, got -1"),
    ],
)
def test_continuum_refuses_knobs_that_mean_nothing(knobs, message):
    with pytest.raises(Exception, match=message):
        registry.make("continuum", **knobs)


@pytest.mark.parametrize(("fixed_ttl_s", "delays_ns"), [(0.0, [700]), (1e-5, [])])
def test_continuum_learns_the_delays_of_who_came_back_to_nothing_and_the_lengths_of_sessions(
    fixed_ttl_s, delays_ns
):
    # One seat. The tool of 0 takes 500 ns; b holds the seat from 200 to 1400, and 1 waits from 700
    # on. Its answer calls another, and that of 3 is for the user: a has had three requests.
    work = [
        sent(0, 0, 15, 2, "a", tool="x", names=(0, 1, 2)),
        sent(1, 0, 19, 2, "a", (0,), 500, tool="x", names=(0, 1, 2, 3)),
        sent(3, 0, 23, 2, "a", (1,), 5_000, names=(0, 1, 2, 3, 4)),
        sent(2, 150, 4, 12, "b"),
    ]
    policy = registry.make("continuum", ttl="preview", fixed_ttl_s=fixed_ttl_s)
    laws.run(policy, work, replace(CACHED, max_num_seqs=1), cost=COST)
    assert list(policy._all_ns) == [500, 5_000]
    assert list(policy._delays_ns) == delays_ns + [0] * bool(delays_ns)
    over = SessionsOver()
    over.add(1)
    over.add(3)
    assert vars(policy._over) == vars(over)
    assert not policy._evicted
    assert not policy._num_served


def test_continuum_learns_the_time_of_each_tool_though_they_work_side_by_side():
    # Two calls of each session begin alike and have a tool each; a last one needs both.
    root, work = tuple(range(4)), []
    left, right = root + tuple(range(10, 16)), root + tuple(range(20, 26))
    for i in range(5):
        a, b, c, d, e, f = range(6 * i, 6 * i + 6)
        start_ns, name = 1_000_000 * i, f"a{i}"
        work += [
            sent(a, start_ns, 16, 4, name, names=root),
            sent(b, start_ns, 40, 2, name, (a,), tool="fast", names=left),
            sent(c, start_ns, 40, 2, name, (a,), tool="slow", names=right),
            sent(d, start_ns, 44, 2, name, (b,), 5_000 + i, tool="fast", names=(*left, 30)),
            sent(e, start_ns, 44, 2, name, (c,), 400_000 + i, tool="slow", names=(*right, 31)),
            sent(f, start_ns, 50, 2, name, (d, e), 70, names=(*left, 30)),
        ]
    policy = registry.make("continuum")
    laws.run(policy, work, replace(CACHED, num_blocks=100))
    took_ns = {tool: list(past_ns) for tool, past_ns in policy._past_ns.items()}
    assert took_ns == {
        "fast": [5_000 + i for i in range(5)], "slow": [400_000 + i for i in range(5)],
    }  # fmt: skip


def with_tiers(*tiers):
    swap_space_blocks = tiers[0].num_blocks if tiers else 0
    return replace(CACHED, kv_tiers=tiers, kv_block_bytes=8, swap_space_blocks=swap_space_blocks)


@pytest.mark.parametrize(
    ("tiers", "kept_ns"),
    [
        # 25 tokens are recomputed in a step of 100 ns, for half of which they are in memory in the
        # mean; b has 30 + 4 in memory by then.
        ((), int(100 * (25 / 2 + 34) / 25)),
        # Six blocks of 8 bytes at a byte a nanosecond are loaded sooner.
        ((KVTier("cpu", 50, 1e9, 1e9, 7, 9),), 48 + 7),
        # Or not.
        ((KVTier("cpu", 50, 1e8, 1e9, 7, 9),), int(100 * (25 / 2 + 34) / 25)),
        # From the nearest tier, whatever lies below.
        ((KVTier("cpu", 50, 1e9, 1e9, 7, 9), KVTier("disk", 50, 1e8, 1e9, 70, 9)), 48 + 7),
        ((KVTier("cpu", 50, 1e9, 1e9, 9, 9), KVTier("disk", 50, 1e12, 1e9, 0, 9)), 48 + 9),
    ],
)
def test_infercept_keeps_until_having_it_back_would_have_wasted_as_much(tiers, kept_ns):
    policy = registry.make("infercept")
    until = {}
    keeps = policy.keeps_until

    def watched(state, now_ns):
        until[state.id] = keeps(state, now_ns) - now_ns
        return now_ns + until[state.id]

    policy.keeps_until = watched
    work = named(sessions.requests("a", 0, 0, [([], 0, 20, 5), ([0], 9, 28, 2)]))
    work += named(sessions.requests("b", 2, 0, [([], 0, 30, 20)]))
    work[0] = replace(work[0], turn=work[0].turn._replace(tool="search"))
    work[1] = replace(work[1], turn=work[1].turn._replace(tool=None))
    laws.run(policy, work, with_tiers(*tiers), cost=COST)
    assert until[0] == kept_ns
    assert until[1] == 0


def sent(number, start_ns, prompt, output, session, after=(), delay_ns=0, tool=None, names=()):
    """Return a request of a session, and what begins its prompt."""
    request = Request(number, start_ns, prompt, 1 << 20, session=session, prefix_hash_ids=names)
    return Arrival(request, output, start_ns, Turn(after, delay_ns, tool=tool, answer_hash_ids=()))


def kept_over_time(policy, work, config, cost=None):
    """Run it; return when requests are first scheduled, what they find, and who is kept, since."""
    seen = []

    def observe(engine):
        kept = dict(engine.requests.kept_until_ns)
        if kept != (seen[-1][1] if seen else {}):
            seen.append((engine.now_ns, kept))

    columns = laws.run(policy, work, config, cost=cost, observer=observe).requests()
    facts = [columns[name] for name in ("id", "first_scheduled_ns", "prefix_hit_tokens")]
    rows = zip(*[one.tolist() for one in facts], strict=True)
    found = {i: (first_ns, hit) for i, first_ns, hit in rows}
    return found, seen


@pytest.mark.parametrize("other", [None, "ends", "runs"])
def test_infercept_counts_as_others_who_run_none_that_end_in_the_same_step(other):
    # Two equal sessions end together; a third may end with them, or run on with 20 + 4 tokens.
    work = [
        sent(i, 0, 20, 5, f"s{i}", tool="search", names=tuple(range(9 * i, 9 * i + 5)))
        for i in (0, 1)
    ]
    if other is not None:
        work.append(sent(2, 0, 20, 5 if other == "ends" else 20, "s2"))
    _, kept = kept_over_time(registry.make("infercept"), work, replace(CACHED, num_blocks=200))
    (_, until_ns), ended_ns = kept[0], kept[0][0]
    others = 20 + 4 if other == "runs" else 0
    recomputing_ns = laws.LinearCost().step_ns(BatchShape(0, 0, 0, ((25, 0),), rows_sampled=0))[0]
    kept_ns = int(recomputing_ns * (25 / 2 + others) / 25)
    assert until_ns == {0: ended_ns + kept_ns, 1: ended_ns + kept_ns}


def test_memory_kept_comes_free_in_the_order_in_which_time_is_up():
    # Two answers end together, the first is kept for longer, and both are over when a third request
    # needs two of their blocks: the last two of the second, one of them full and found no more.
    policy = Keeping()
    policy.keeps_until = lambda state, now_ns: now_ns + (9000 if state.id == 0 else 5000)
    names = tuple(range(50, 55))
    work = [
        sent(0, 0, 20, 4, "a", tool="search", names=tuple(range(5))),
        sent(1, 0, 20, 4, "b", tool="search", names=names),
        sent(2, 0, 21, 1, "b", after=(1,), delay_ns=60_000, names=names),
        sent(3, 30_000, 24, 1, "c"),
    ]
    found, _ = kept_over_time(policy, work, replace(CACHED, num_blocks=16, max_model_len=64))
    assert found[2][1] == 16


@pytest.mark.parametrize("is_alone", [True, False])
def test_infercept_decides_anew_when_the_time_has_come_by_who_runs_then(is_alone):
    # b has 34 tokens in memory when 0 ends at 500, and 36 at 700: 186 and 194 ns. With 61 of c,
    # which comes at 450, it is 97 at 700, so 438 ns; at 1000 it is 103, and 462 have passed.
    work = [
        sent(0, 0, 20, 5, "a", tool="search", names=(0, 1, 2, 3, 4)),
        sent(1, 0, 24, 2, "a", (0,), 9_000, names=(0, 1, 2, 3, 4, 5)),
        sent(2, 0, 30, 20, "b"),
    ]
    if not is_alone:
        work.append(sent(3, 450, 60, 20, "c"))
    _, kept = kept_over_time(registry.make("infercept"), work, CACHED, cost=COST)
    expected = [(500, {0: 686}), (700, {}), (1_000, {})]
    if not is_alone:
        expected[1] = (700, {0: 938})
    assert [until for _, until in kept] == [u for _, u in expected if u] + [{}]


def test_memory_kept_for_one_branch_of_a_session_outlasts_the_admission_of_another():
    # Two calls begin alike and have a tool each. That of the first is soon done; then another
    # session fills the memory that is free, before that of the second is.
    root = tuple(range(4))
    left, right = root + tuple(range(10, 16)), root + tuple(range(20, 26))
    work = [
        sent(0, 0, 16, 4, "a", names=root),
        sent(1, 0, 40, 2, "a", (0,), tool="fast", names=left),
        sent(2, 0, 40, 2, "a", (0,), tool="slow", names=right),
        sent(3, 0, 44, 40, "a", (1,), 5_000, names=(*left, 30)),
        sent(4, 0, 44, 2, "a", (2,), 45_000, names=(*right, 31)),
        sent(5, 0, 48, 2, "a", (3, 4), 5_000, names=(*left, 30)),
        sent(6, 25_000, 60, 2, "b", names=tuple(range(50, 65))),
    ]
    policy = registry.make("continuum", ttl="preview", fixed_ttl_s=1e-3)
    found, kept = kept_over_time(policy, work, replace(CACHED, num_blocks=40))
    assert [found[i][1] for i in (3, 4)] == [40, 40]
    assert [list(now) for _, now in kept] == [[1, 2], [2], []]
    assert [ns for ns, _ in kept][1:] > [found[3][0], found[4][0]]  # the steps of these end then


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (1, [(1, 0)]),
        (16, [(16, 0)]),
        (17, [(16, 0), (1, 16)]),
        (39, [(16, 0), (16, 16), (7, 32)]),
    ],
)
def test_recomputing_is_priced_by_steps_of_the_budget_each_behind_those_before(prompt, chunks):
    asked = []

    def estimate_step_ns(shape):
        asked.append(shape)
        return 10 ** len(asked)

    policy = registry.make("infercept")
    config = SimpleNamespace(max_num_batched_tokens=16, kv_tiers=())
    policy.on_start(SimpleNamespace(config=config, estimate_step_ns=estimate_step_ns))
    state = RequestState(laws.arrival(0, prompt=prompt).request)
    took_ns = sum(10 ** (i + 1) for i in range(len(chunks)))
    assert policy.recompute_ns(state) == took_ns
    assert asked == [BatchShape(0, 0, 0, (chunk,), rows_sampled=0) for chunk in chunks]
    assert policy.reload_ns(state) == FOREVER
    asked.clear()
    assert policy.restore_ns(state) == took_ns


@pytest.mark.parametrize(("bytes_per_s", "saved_ns"), [(1e9, 55), (1e7, 100)])
def test_continuum_weighs_what_loading_takes_where_that_is_sooner(bytes_per_s, saved_ns):
    # A call of 54 ns saves the loading of six blocks, one of 99 the computing.
    work = named(sessions.requests("a", 0, 0, [([], 0, 20, 5), ([0], 9, 28, 2)]))
    tiers = (KVTier("cpu", 50, bytes_per_s, 1e9, 7, 9),)
    work[0] = replace(work[0], turn=work[0].turn._replace(tool="search"))
    work[1] = replace(work[1], turn=work[1].turn._replace(tool=None))
    for took_ns, kept_ns in ((saved_ns - 1, saved_ns), (saved_ns, 0)):
        policy = registry.make("continuum", min_calls=0)
        policy._past_ns["search"] = policy._all_ns
        policy._all_ns.append(took_ns)
        _, kept = kept_over_time(policy, work, with_tiers(*tiers), cost=COST)
        assert kept[:1] == ([(500, {0: 500 + kept_ns})] if kept_ns else [])


class Keeping(Retaining):
    """Keeps memory for a tool for ten microseconds."""

    def keeps_until(self, state, now_ns):
        """Return the time in ten microseconds, or now."""
        return now_ns + (10_000 if state.tool is not None else 0)


def kept_work(*others):
    """Return two sessions whose memory is kept from 100 and 300 on, four blocks each, and more."""
    first = sent(0, 0, 15, 1, "first", tool="x", names=(0, 1, 2))
    second = sent(1, 200, 15, 1, "second", tool="x", names=(10, 11, 12))
    return [first, second, *others]


def kept_at_the_end_of_the_step_at(ns, work, config):
    """Run it; return who is first scheduled then, and whose memory is kept at the end of it."""
    kept = []

    def observe(engine):
        if engine.now_ns > ns and not kept:
            kept.append(list(engine.requests.kept))

    columns = laws.run(Keeping(), work, config, cost=COST, observer=observe).requests()
    return columns["id"][columns["first_scheduled_ns"] == ns].tolist(), kept[0]


def test_kept_memory_does_not_end_while_a_request_that_needs_it_waits():
    # One seat, which b has from 3000 to 11,000. 1 comes at 5100; what it needs is kept until
    # 10,100, and what 5 needs, which is not there yet, until 10,200.
    work = [
        sent(0, 0, 15, 1, "a", tool="x", names=(0, 1, 2)),
        sent(1, 0, 19, 1, "a", (0,), 5_000, names=(0, 1, 2, 3)),
        sent(4, 100, 15, 1, "c", tool="x", names=(10, 11, 12)),
        sent(5, 100, 19, 1, "c", (4,), 30_000, names=(10, 11, 12, 13)),
        sent(2, 3_000, 4, 80, "b"),
    ]
    config = replace(CACHED, max_num_seqs=1)
    found, kept = kept_over_time(Keeping(), work, config, cost=COST)
    assert found[1] == (11_000, 12)
    ended = [until for _, until in kept]
    assert ended == [
        {0: 10_100}, {0: 10_100, 4: 10_200}, {0: FOREVER, 4: 10_200}, {0: FOREVER}, {},
    ]  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_memory_kept_for_a_request_of_two_answers_ends_for_both_when_it_is_admitted(order):
    work = [
        sent(0, 0, 15, 1, "a", tool="x", names=(0, 1, 2)),
        sent(1, 0, 15, 1, "a", tool="x", names=(10, 11, 12)),
        sent(2, 0, 19, 1, "a", order, 5_000, names=(0, 1, 2, 3)),
    ]
    found, kept = kept_over_time(Keeping(), work, CACHED, cost=COST)
    assert [sorted(now) for _, now in kept] == [[0, 1], []]
    assert found[2][0] < kept[-1][0] < 10_000 < min(kept[0][1].values())


def test_kept_memory_ends_when_the_request_that_needs_it_is_rejected():
    class Rejecting(Keeping):
        """Rejects request 1 from 12,000 on."""

        def plan(self, view, builder):
            for state in view.waiting if view.now_ns >= 12_000 else ():
                if state.id == 1:
                    builder.reject(state, "enough")
                    return builder.build()
            return super().plan(view, builder)

    work = [
        sent(0, 0, 15, 1, "a", tool="x", names=(0, 1, 2)),
        sent(1, 0, 19, 1, "a", (0,), 5_000, names=(0, 1, 2, 3)),
        sent(2, 3_000, 4, 90, "b"),
        sent(3, 12_050, 4, 9, "c"),
    ]
    config = replace(CACHED, max_num_seqs=1)
    _, kept = kept_over_time(Rejecting(), work, config, cost=COST)
    assert [until for _, until in kept] == [{0: 10_100}, {0: FOREVER}, {}]


def test_a_session_with_memory_kept_is_served_before_one_that_began_earlier():
    # One seat, which r has from 900 to 5900. Of those who come meanwhile, 1 is of the session that
    # began first, and 3 of one whose memory is kept.
    work = [
        sent(0, 0, 4, 1, "a"),
        sent(1, 0, 8, 1, "a", (0,), 1_400),
        sent(2, 150, 15, 1, "b", tool="x", names=(0, 1, 2)),
        sent(3, 150, 19, 1, "b", (2,), 1_800, names=(0, 1, 2, 3)),
        sent(4, 900, 4, 50, "r"),
    ]
    config = replace(CACHED, max_num_seqs=1)
    found, _ = kept_over_time(Keeping(), work, config, cost=COST)
    assert (found[3][0], found[1][0]) == (5_900, 6_000)


def test_preempted_requests_come_before_those_whose_memory_is_kept_and_these_before_the_rest():
    policy, kept, other = Keeping(), Session("kept", 20), Session("other", 10)
    kept.num_in_flight = 1
    states = []
    for number, (session, num_preemptions) in enumerate(
        ((other, 0), (kept, 0), (kept, 1), (other, 1), (None, 1), (None, 0))
    ):
        state = RequestState(laws.arrival(number, at_ns=5).request)
        state.session, state.num_preemptions = session, num_preemptions
        states.append(state)
    states.sort(key=lambda state: policy.key(state, 99))
    assert [state.id for state in states] == [4, 3, 2, 5, 0, 1]
    view, answered = SimpleNamespace(waiting=states), RequestState(laws.arrival(9).request)
    answered.session = kept
    assert [state.id for state in policy._in_turn(view, [answered])] == [4, 3, 2, 1, 5, 0]
    kept.num_in_flight = 0
    assert policy._in_turn(view, [answered]) is states


@pytest.mark.parametrize(
    ("num_running", "kept", "evicted"),
    [(1, [0], []), (2, [0, 1], [3]), (4, [0, 1], [4, 5]), (5, [0, 1], [4, 5, 6])],
)
@pytest.mark.parametrize("in_order", [False, True])
def test_kept_memory_gives_way_to_who_runs_alone_from_the_last_session(
    num_running, kept, evicted, in_order
):
    # Each of those who run has a block of its own from 400 on, and needs another at 500. Of several
    # the last give way, whose blocks serve the others.
    work = kept_work(*[sent(2 + i, 400, 4, 3, f"s{i}") for i in range(num_running)])
    config = replace(CACHED, num_blocks=8 + num_running, max_model_len=16, max_num_seqs=9)
    config = replace(config, preempt_in_order=in_order)
    seen = []

    def observe(engine):
        if engine.now_ns >= 600 and not seen:
            seen.append(list(engine.requests.kept))

    columns = laws.run(Keeping(), work, config, cost=COST, observer=observe).requests()
    assert seen == [kept]
    assert columns["id"][columns["num_preemptions"] > 0].tolist() == evicted


@pytest.mark.parametrize(("in_order", "first_token_ns"), [(False, 750), (True, 850)])
def test_running_requests_preempt_as_if_nothing_were_kept(in_order, first_token_ns):
    # At 650 request 3 wants what is left of its prompt, of 22 tokens: 14 are computed beside 2, a
    # budget of eight a step. It needs two blocks, and 2 gives way, though one is kept. In order it
    # has asked for the seven tokens that 2 left, and they stay seven.
    work = [
        sent(0, 0, 4, 1, "first"),
        sent(3, 0, 22, 2, "first", (0,), 300),
        sent(1, 0, 4, 1, "kept", tool="x", names=(0,)),
        sent(2, 150, 3, 20, "last"),
    ]
    config = replace(
        CACHED, num_blocks=7, max_model_len=28, max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False, preempt_in_order=in_order,
    )  # fmt: skip
    columns = laws.run(Keeping(), work, config, cost=COST).requests()
    assert columns["id"][columns["num_preemptions"] > 0].tolist() == [2]
    assert columns["first_token_ns"][columns["id"] == 3].tolist() == [first_token_ns]


def test_kept_memory_gives_way_to_the_last_who_runs_where_all_others_have():
    # At 300 request 1 needs two blocks for the last six tokens of its prompt. Request 2 gives way,
    # who has one; then nobody else runs, so the block that is kept is the second.
    work = [
        sent(0, 0, 4, 1, "kept", tool="x", names=(0,)),
        sent(1, 100, 22, 2, "first"),
        sent(2, 100, 2, 20, "last"),
    ]
    config = replace(
        CACHED, num_blocks=6, max_model_len=24, long_prefill_token_threshold=8,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    columns = laws.run(Keeping(), work, config, cost=COST).requests()
    assert columns["num_preemptions"].tolist() == [0, 0, 1]
    assert columns["first_token_ns"].tolist() == [100, 400, 200]


@pytest.mark.parametrize(
    ("runs", "free_blocks", "seats", "granted", "kept"),
    [
        # What is kept goes from the last on, four blocks each, and for the first who waits alone.
        (False, 15, 9, [2, 3, 4], [0, 1]),
        (False, 10, 9, [2, 3], [0, 1]),
        (False, 9, 9, [2], [0, 1]),
        (False, 6, 1, [2], [0, 1]),
        (False, 5, 9, [2], [0]),
        (False, 2, 9, [2], [0]),
        (False, 1, 9, [2], []),
        (True, 6, 9, [2], [0, 1]),  # somebody runs, so what is kept stays
        (True, 5, 9, [], [0, 1]),
    ],
)
def test_kept_memory_gives_way_to_the_head_of_the_queue_where_nobody_runs(
    runs, free_blocks, seats, granted, kept
):
    # Those who wait want six, four and five blocks; who runs has eleven.
    waiting = [sent(i, 5_000, p, 3, f"s{i}") for i, p in ((2, 21), (3, 13), (4, 17))]
    running = [sent(9, 4_000, 33, 11, "runs")] if runs else []
    config = replace(
        CACHED, num_blocks=8 + 11 * runs + free_blocks, max_model_len=32 + 12 * runs,
        max_num_seqs=seats,
    )  # fmt: skip
    work = kept_work(*running, *waiting)
    assert kept_at_the_end_of_the_step_at(5_000, work, config) == (granted, kept)


@pytest.mark.parametrize(("free_blocks", "kept"), [(3, [0]), (2, []), (1, [])])
def test_kept_memory_of_its_own_session_is_the_last_to_give_way(free_blocks, kept):
    # The next turn of the second session finds three blocks of six, and ends what is kept for it.
    work = kept_work(sent(2, 200, 21, 3, "second", (1,), 4_700, names=(10, 11, 12)))
    config = replace(CACHED, num_blocks=8 + free_blocks, max_model_len=32)
    found, _ = kept_over_time(Keeping(), work, config)
    assert found[2][1] == 12
    assert kept_at_the_end_of_the_step_at(5_000, work, config) == ([2], kept)


def test_kept_memory_of_another_branch_of_its_session_does_not_let_the_engine_stand_still():
    work = kept_work(sent(2, 200, 31, 1, "second", (), 4_800))
    config = replace(CACHED, num_blocks=8, max_model_len=32)
    assert kept_at_the_end_of_the_step_at(5_000, work, config) == ([2], [])


@pytest.mark.parametrize("later_ns", [0, 1])
@pytest.mark.parametrize("tool", ["x", None])
def test_who_waits_for_blocks_that_another_loads_neither_takes_what_is_kept_nor_holds_others_up(
    later_ns, tool
):
    # What 0 began with has gone to the host when 5 and 6 come, which begin so, too: 5 loads it in
    # 100,000 ns, and 6 waits for that. 7 waits for nothing; memory for all is free, whether that of
    # 3 is kept or not.
    start, other = tuple(range(10)), tuple(range(200, 224))
    work = [
        sent(0, 0, 44, 2, "a", names=(*start, 99)),
        sent(1, 100_000, 96, 4, "b", names=other),
        sent(2, 120_000, 96, 4, "c", names=tuple(range(600, 624))),
        sent(3, 200_000, 16, 2, "d", tool=tool, names=tuple(range(300, 304))),
        sent(4, 200_000, 20, 2, "d", (3,), 900_000, names=tuple(range(300, 304))),
        sent(5, 300_000, 44, 2, "e", names=(*start, 400)),
        sent(6, 300_000 + later_ns, 44, 2, "f", names=(*start, 401)),
        sent(7, 300_000 + 2 * later_ns, 8, 2, "g"),
    ]
    tier = KVTier("cpu", 500, 1e8, 1e12, 0, 0, "through")
    config = replace(
        with_tiers(tier), num_blocks=45, max_num_batched_tokens=128, max_num_seqs=8,
        kv_load="always", kv_block_bytes=1_000,
    )  # fmt: skip
    found, kept = kept_over_time(
        registry.make("continuum", ttl="preview", fixed_ttl_s=1e-3), work, config
    )
    assert found[5] == found[6] == (400_000, 40)
    assert found[7][0] == 300_000 + 2 * later_ns
    if tool is not None:
        (_, until), (let_go_ns, nobody) = kept
        assert list(until) == [3]
        assert nobody == {}
        assert found[4] == (until[3] - 1_000_000 + 900_000, 16)
        assert found[4][0] < let_go_ns < until[3]  # at the end of the step that admits 4


def test_program_srpt_goes_by_what_the_session_still_generates_and_without_one_by_the_request():
    policy = registry.make("program_srpt")
    for number, (total, session, predicted, now) in enumerate((
        (50.0, 8, 7.0, 0), (50.0, 8, 7.0, 3), (50.0, 0, 7.0, 0), (None, 8, 7.0, 2),
        (50.0, None, 7.0, 0),
    )):  # fmt: skip
        state = SimpleNamespace(
            id=number,
            num_output_tokens=now,
            request=SimpleNamespace(predicted_session_tokens=total, predicted_tokens=predicted),
            session=None if session is None else SimpleNamespace(generated_tokens=session),
        )
        policy.on_arrival(state, 0)
        left = predicted if None in (total, session) else total - session
        assert policy.key(state, 9) == left - now
