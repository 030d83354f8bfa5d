"""Requests that wait for answers: their order, their blocks, and what a driver does of them."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.drive.sessions import open_source
from schedlab.sim.record.sessions import has_sessions, session_columns
from schedlab.sim.request import RequestState
from schedlab.traces import read
from schedlab.traces.workload import workload as requests_of
from tests import laws, sessions
from tests.refusing import Refusing

CONFIG = EngineConfig(
    num_blocks=60, max_model_len=100, block_size=4, max_num_seqs=5, max_num_batched_tokens=64
)
COST = laws.LinearCost(base_ns=100, token_ns=0, context_ns=0)  # every step takes 100 ns


def test_next_turn_comes_its_delay_after_the_last_answer_it_needs():
    # A fan of two (3 and 5 tokens) behind a call of 2, and who joins them 50 ns later.
    rows = [([], 0, 4, 2), ([0], 10, 4, 3), ([0], 0, 4, 5), ([0, 1, 2], 50, 4, 1)]
    log = laws.run(registry.make("fcfs"), sessions.requests("a", 0, 7, rows), CONFIG, cost=COST)
    columns = log.requests()
    assert columns["arrival_ns"].tolist() == [7, 217, 207, 757]
    assert columns["finish_ns"].tolist() == [207, 607, 707, 857]


def test_requests_without_a_session_start_each_at_its_own_time():
    work = [
        sent for i in range(3) for sent in sessions.requests(None, i, 1000 * i, [([], 5, 4, 1)])
    ]
    log = laws.run(registry.make("fcfs"), work, CONFIG, cost=COST)
    assert log.requests()["arrival_ns"].tolist() == [5, 1005, 2005]


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "static", "fastserve"])
@pytest.mark.parametrize("seed", range(4))
def test_skipping_ahead_changes_nothing_and_turns_keep_their_order(policy, seed):
    work = sessions.drawn(seed)
    config = replace(CONFIG, num_blocks=28 + 100 * (seed % 2))
    fast = laws.run(registry.make(policy), work, config)
    slow = laws.run(registry.make(policy), work, laws.slow(config))
    assert laws.difference(slow, fast, ("by single steps", "ahead")) is None
    assert laws.signature(fast) == laws.signature(slow)
    sessions.check_order(fast, work)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["session_affinity", "round_robin", "prefix_aware"])
@pytest.mark.parametrize("joint", [None, lambda segments, idle: 1000 + 10 * len(segments)])
def test_cluster_serves_sessions_alike_ahead_and_step_by_step(router, joint):
    work = sessions.drawn(11, num_sessions=12)
    runs = [
        sessions.run_cluster("fcfs", work, config, router, joint)
        for config in (CONFIG, laws.slow(CONFIG))
    ]
    assert laws.signature(runs[0]) == laws.signature(runs[1])
    sessions.check_order(runs[0], work)


def test_session_affinity_keeps_every_session_on_one_engine():
    work = sessions.drawn(5, num_sessions=12)
    columns = sessions.run_cluster("fcfs", work, CONFIG).requests()
    engines = {}
    for arrival in work:
        row = int(np.flatnonzero(columns["id"] == arrival.request.id)[0])
        engines.setdefault(arrival.request.session, set()).add(int(columns["engine"][row]))
    assert all(len(one) == 1 for one in engines.values())
    assert len(set.union(*engines.values())) == 3


@pytest.mark.parametrize("places", [1, 3])
def test_closed_loop_lets_so_many_sessions_run(places):
    work = sessions.drawn(3, num_sessions=9)
    log = laws.run(registry.make("fcfs"), work, CONFIG, max_concurrency=places)
    slow = laws.run(registry.make("fcfs"), work, laws.slow(CONFIG), max_concurrency=places)
    assert laws.signature(log) == laws.signature(slow)
    columns = log.requests()
    session = np.array([arrival.request.session for arrival in work])
    spans = [
        (columns["arrival_ns"][session == one].min(), columns["finish_ns"][session == one].max())
        for one in dict.fromkeys(session.tolist())
    ]
    most = max(sum(a <= start < b for a, b in spans) for start, _ in spans)
    assert most == places


@pytest.mark.parametrize("places", [None, 1])
def test_rejected_turn_ends_its_session_and_no_other(places):
    rows = [([], 0, 4, 2), ([0], 0, 4, 2), ([0], 0, 4, 2), ([1, 2], 9, 4, 2), ([3], 0, 4, 2)]
    work = sessions.requests("a", 0, 0, rows) + sessions.requests("b", 5, 0, rows)
    work[1] = replace(work[1], request=replace(work[1].request, priority=1))
    log = laws.run(Refusing(), work, CONFIG, cost=COST, max_concurrency=places)
    assert log.reject_reasons == {
        1: "not today",
        3: "never sent: an earlier request of its session was rejected",
        4: "never sent: an earlier request of its session was rejected",
    }
    generated = log.requests()["generated_tokens"]
    assert generated.tolist() == [2, 0, 2, 0, 0, 2, 2, 2, 2, 2]


def test_turn_that_is_too_long_for_the_engine_ends_its_session():
    work = sessions.requests("a", 0, 0, [([], 0, 4, 2), ([0], 0, 99, 2), ([1], 0, 4, 2)])
    log = laws.run(registry.make("fcfs"), work, CONFIG, cost=COST)
    assert sorted(log.reject_reasons) == [1, 2]


def test_session_that_needs_a_later_request_is_refused():
    work = sessions.requests("a", 0, 0, [([], 0, 4, 2), ([2], 0, 4, 2), ([], 0, 4, 2)])
    with pytest.raises(ValueError, match="request 1 needs the answer of 2"):
        laws.run(registry.make("fcfs"), work, CONFIG)


# -- blocks ------------------------------------------------------------------------------------


def exact_hits(trace, block):
    """Write every prompt and answer down token by token, and count the exact hits of each prompt.

    Independent of the names: a token is who said it and where.
    """
    known, hits, said = set(), [], []
    for row in range(len(trace)):
        needs = trace.turns.needs(row)
        if needs:
            text = list(said[needs[0]])
        else:
            shared = trace.turns.shared[row] if trace.turns.shared is not None else None
            path, text = (), []
            for part in shared or ():
                path = (*path, part)
                text += [("shared", path, i) for i in range(part[1])]
        prompt = int(trace.prompt_tokens[row])
        text += [("new", row, i) for i in range(prompt - len(text))]
        text += [("answer", row, i) for i in range(int(trace.output_tokens[row]))]
        found = 0
        while (end := (found + 1) * block) < prompt and tuple(text[:end]) in known:
            found += 1
        hits.append(found * block)
        # The last token of an answer is never computed.
        known.update(tuple(text[:end]) for end in range(block, len(text), block))
        said.append(text)
    return hits


SESSIONS = (
    '{"session": "a", "arrival_s": 0, "shared": [["x", 10], ["y", 9]], "new_tokens": 5, '
    '"output_tokens": 8}\n'
    '{"session": "a", "think_s": 1, "new_tokens": 7, "output_tokens": 9}\n'
    '{"session": "a", "think_s": 1, "new_tokens": 1, "output_tokens": 1}\n'
    '{"session": "b", "arrival_s": 9, "turn": 1, "shared": [["x", 10], ["z", 9]], "new_tokens": 3,'
    ' "output_tokens": 6}\n'
    '{"session": "b", "turn": 2, "parents": [1], "tool_s": 1, "new_tokens": 4, "output_tokens": 3}'
    '\n{"session": "b", "turn": 3, "parents": [1], "tool_s": 2, "new_tokens": 4, '
    '"output_tokens": 5}\n'
    '{"session": "b", "turn": 4, "parents": [3, 2], "tool_s": 1, "new_tokens": 2, '
    '"output_tokens": 3}\n'
    '{"session": "c", "arrival_s": 20, "shared": [["x", 10], ["y", 9]], "new_tokens": 2, '
    '"output_tokens": 2}\n'
)


@pytest.mark.parametrize("block_size", [4, 2, 1])
def test_prefix_hits_with_answers_are_those_counted_token_by_token(tmp_path, block_size):
    path = tmp_path / "sessions.jsonl"
    path.write_text(SESSIONS)
    trace = read(path)
    config = replace(CONFIG, num_blocks=4096, block_size=block_size, enable_prefix_caching=True)
    work = list(requests_of(trace, max_model_len=100, hash_block_tokens=block_size))
    log = laws.run(registry.make("fcfs"), work, config)
    laws.check(log, work, config)
    columns = log.requests()
    assert (columns["finish_ns"] < 30e9).all()
    expected = exact_hits(trace, block_size)
    assert columns["prefix_hit_tokens"].tolist() == expected
    assert sum(expected) > 100


def test_row_of_a_session_adds_up_its_requests_and_the_time_when_none_is_in_flight():
    """One with two at once, of which the longer ends last; one that ends without an answer."""
    requests = {
        "session": np.array(["a", "a", "a", "a", "b", "b"]),
        "turn": np.array([0, 1, 1, 2, 0, 1]),
        "status": np.array([0, 0, 0, 3, 0, 1]),
        "arrival_ns": np.array([10, 60, 60, 200, 5, 80]),
        "first_scheduled_ns": np.array([15, 61, 70, 230, 6, -1]),
        "last_token_ns": np.array([40, 150, 90, 240, 30, -1]),
        "finish_ns": np.array([50, 170, 90, 250, 30, 90]),
        "prompt_tokens": np.array([1, 2, 4, 8, 16, 32]),
        "generated_tokens": np.array([3, 1, 1, 1, 5, 0]),
        "prefix_hit_tokens": np.array([0, 1, 0, 7, 0, 0]),
    }
    assert has_sessions(requests)
    for name in ("session", "turn"):
        assert not has_sessions({key: value for key, value in requests.items() if key != name})
    found = {name: column.tolist() for name, column in session_columns(requests).items()}
    assert found == {
        "session": ["a", "b"], "num_requests": [4, 2], "num_completed": [4, 1],
        "start_ns": [10, 5], "finish_ns": [250, -1],
        "away_ns": [10 + 30, 0],  # from 50 to 60 and, two at once until 170, to 200
        "queue_ns": [5 + 1 + 10 + 30, 1], "running_ns": [25 + 89 + 20 + 10, 24],
        "prompt_tokens": [15, 48], "generated_tokens": [6, 5], "prefix_hit_tokens": [8, 0],
    }  # fmt: skip


def test_time_away_of_any_sessions_is_what_counting_time_by_time_gives():
    draw = Random(2)
    for _ in range(40):
        rows = []
        for name in "abc"[: draw.randrange(1, 4)]:
            for _ in range(draw.randrange(1, 5)):
                at = draw.randrange(9)
                rows.append((name, at, at + draw.randrange(1, 5), draw.random() < 0.8))
        names, starts, ends, are_done = (list(column) for column in zip(*rows, strict=True))
        requests = {
            "session": np.array(names, dtype=object), "arrival_ns": np.array(starts),
            "finish_ns": np.where(are_done, ends, -1), "first_scheduled_ns": np.array(starts),
            "last_token_ns": np.array(ends), "status": np.where(are_done, 0, 1).astype(np.int8),
            **{name: np.ones(len(rows), dtype=np.int64)
               for name in ("prompt_tokens", "generated_tokens", "prefix_hit_tokens")},
        }  # fmt: skip
        found = session_columns(requests)
        for place, name in enumerate(dict.fromkeys(names)):
            there = [(start, end) for one, start, end, done in rows if one == name and done]
            busy = {t for start, end in there for t in range(start, end)}
            span = range(min(busy), max(busy)) if busy else range(0)
            assert found["away_ns"][place] == sum(t not in busy for t in span)


def test_session_knows_its_requests_by_when_they_were_known_and_not_by_when_they_were_sent():
    table = SessionTable()
    asks = [
        RequestState(replace(laws.arrival(i, sent_ns, 4, 2).request, session="s"))
        for i, sent_ns in enumerate((70, 450, 505, 900))
    ]
    for ask, queued_ns, served_ns in zip(asks, (90, 470, 510, 910), (11, 23, 0, 47), strict=True):
        ask.queued_ns, ask.served_ns = queued_ns, served_ns
    table.arrived(asks[0], 100)
    session = asks[0].session
    assert session is not None
    assert (session.name, session.start_ns) == ("s", 70)
    table.answered(asks[0], 300)
    table.arrived(asks[1], 500)  # 200 after the answer
    assert (session.last_gap_ns, session.num_in_flight, session.num_sent) == (200, 1, 2)
    table.arrived(asks[2], 520)  # another one is in flight: that is no pause
    assert (session.last_gap_ns, session.num_in_flight, session.num_sent) == (200, 2, 3)
    table.rejected(asks[2])
    table.answered(asks[1], 800)
    assert (session.num_answered, session.num_in_flight, session.last_answer_ns) == (2, 0, 800)
    table.arrived(asks[3], 1000)
    assert session.last_gap_ns == 200
    table.answered(asks[3], 1700)
    # Whoever was turned away has neither been served nor waited.
    assert session.attained_ns == 11 + 23 + 47
    assert session.waited_ns == (300 - 90 - 11) + (800 - 470 - 23) + (1700 - 910 - 47)
    table.forget(None)
    assert len(table) == 1
    table.forget("s")
    assert len(table) == 0


@pytest.mark.parametrize(
    ("parents", "awaited"),
    [
        ((0,), ("search", 400 - 100)),
        ((1,), ("shell", 400 - 250)),  # whatever was answered last
        ((2,), None),  # for the user
        ((3,), None),  # on its way
        ((0, 1), None),  # which of them took so long?
        ((), None),
        ((8,), None),  # another session's
    ],
)
def test_request_knows_the_call_that_it_waited_for_if_it_needs_that_answer_alone(parents, awaited):
    table = SessionTable()

    def ask(number, session="s"):
        return RequestState(replace(laws.arrival(number, 0, 4, 2).request, session=session))

    answers = ((0, "search", 100, "s"), (1, "shell", 250, "s"), (2, None, 300, "s"))
    for number, tool, answered_ns, session in (*answers, (8, "search", 310, "t")):
        state = ask(number, session)
        table.arrived(state, 10)
        state.tool = tool
        table.answered(state, answered_ns)
    table.arrived(ask(3), 20)
    last = ask(4)
    table.arrived(last, 400, parents)
    assert last.awaited_call == awaited


@pytest.mark.parametrize("places", [None, 2])
def test_first_turns_are_submitted_when_each_is_ready_whoever_waits_for_a_prediction(places):
    # A session starts at its time, or when a place is free; its clock then, and the prediction is
    # ready a while after. Those that start later may be ready sooner.
    for seed in range(12):
        draw, work, starts_ns = Random(seed), [], []
        for i in range(9):
            start_ns = (starts_ns[-1] if starts_ns else 0) + draw.choice((0, 10, 300))
            starts_ns.append(start_ns)
            rows = [([], draw.choice((0, 40)), 4, 1) for _ in range(draw.choice((1, 2)))]
            for arrival in sessions.requests(f"s{i}", len(work), start_ns, rows):
                late_ns = draw.choice((0, 5, 150, 900))
                work.append(replace(arrival, ready_ns=arrival.request.arrival_ns + late_ns))
        told = []

        def submit(arrival, now_ns, told=told):
            told.append((now_ns, arrival.request.id))

        source = open_source(work, submit, lambda *_: None, lambda *_: None, places)
        state_of = {one.request.id: RequestState(one.request) for one in work}
        while source.next_ns < FOREVER:
            now_ns = source.next_ns
            num_told = len(told)
            source.send_until(now_ns)
            for _, number in told[num_told:]:
                source.request_is_gone(state_of[number], now_ns)
        late_ns = {one.request.id: one.ready_ns - one.request.arrival_ns for one in work}
        if places is None:
            due = [
                (one.request.arrival_ns + one.turn.delay_ns + late_ns[one.request.id],
                 one.request.id)
                for one in work
            ]  # fmt: skip
            assert told == sorted(due)
        assert sorted(number for _, number in told) == list(range(len(work)))
