"""Sessions in files, linked from traces, and drawn."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.running.run import _of_sessions, run
from schedlab.experiments.running.session_workload import with_think_times
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sessions import DurationsSpec
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError, TraceError
from schedlab.traces import read, write
from schedlab.traces.linking import NOBODY, linked
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.row_error import RowError
from schedlab.traces.session_blocks import SessionBlocks
from schedlab.traces.statistics import describe
from schedlab.traces.trace import Trace
from schedlab.traces.turns import Turns
from schedlab.traces.workload import workload as requests_of
from tests import laws
from tests.data_folder import data_folder
from tests.trace_samples import BAILIAN, BURSTGPT_8, MOONCAKE, SESSIONS, SHAREGPT
from tests.unit.test_sessions import exact_hits


@pytest.fixture
def file(tmp_path):
    def written(text, name="trace.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return written


FIRST = '{"session": "a", "arrival_s": 0, "turn": 1, "new_tokens": 5, "output_tokens": 2}\n'
MISTAKES = [
    ('"turn": 2, "parents": [2]', ":2: turn 2 of session a needs its own answer"),
    ('"turn": 2, "parents": [7]', r":2: session a has no turn 7; choose from 1"),
    ('"turn": 1', ":2: session a has a turn 1 already"),
    ('"turn": 2, "think_s": -1', ":2: think_s and tool_s must be >= 0, got -1"),
    ('"turn": 2, "think_s": 1, "tool_s": 1', ":2: give think_s or tool_s"),
    ('"turn": 2, "thinks_s": 1', ":2: unknown key 'thinks_s'; did you mean think_s"),
    ('"turn": 2, "arrival_s": 5', ":2: arrival_s is when a session starts"),
    ('"turn": 2, "shared": [["x", 4]]', ":2: shared is how a session begins"),
    ('"turn": 2, "parents": 1', ":2: parents must be a list of turns"),
    ('"turn": 2, "parents": [[1]]', ":2: parents must be a list of turns"),
    ('"turn": 2, "parents": [3]', ":2: turn 2 needs turn 3, which stands behind it.*cycle"),
]


@pytest.mark.parametrize(("keys", "message"), MISTAKES)
def test_mistake_in_a_session_is_named_with_its_line(keys, message, file):
    second = f'{{"session": "a", {keys}, "new_tokens": 5, "output_tokens": 2}}\n'
    third = FIRST.replace('"arrival_s": 0, "turn": 1', '"turn": 3, "parents": [1]')
    with pytest.raises(TraceError, match=message):
        read(file(FIRST + second + third))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10**18, 2), ":2: new_tokens must be <= 67108864 in sessions, got 1000000000000000000"),
        ((2**63 - 1, 2), ":2: new_tokens must be <= 67108864"),
        ((5, 10**18), ":2: output_tokens must be <= 67108864"),
        ((2**26 - 8, 2), ":2: a prompt of 67108863 tokens.*and its answer of 2"),
    ],
)
def test_session_too_long_to_name_its_blocks_is_refused_with_its_line(sizes, message, file):
    new, output = sizes
    second = f'{{"session": "a", "new_tokens": {new}, "output_tokens": {output}}}\n'
    with pytest.raises(TraceError, match=f"trace.txt{message}"):
        read(file(FIRST + second))


def test_session_that_goes_on_behind_another_is_refused(file):
    other = FIRST.replace('"a"', '"b"')
    with pytest.raises(TraceError, match=r":3: session a goes on behind another one"):
        read(file(FIRST + other + FIRST))


def test_sessions_are_cut_scaled_and_dropped_as_a_whole(file):
    trace = read(file(SESSIONS))
    assert trace.prompt_tokens.tolist() == [48, 60, 9, 14, 15, 22]
    assert trace.slice(1).session.tolist() == ["b"] * 4
    assert trace.scale(2).arrival_ns.tolist() == [250_000_000] * 2 + [10**9] * 4
    assert trace.head(4).turns.rows() == [([], 0), ([0], 1_500_000_000), ([], 0), ([2], 0)]
    # 15 + 6 tokens are too many: so is who joins that answer.
    kept = trace.fit(20, "drop")
    assert kept.prompt_tokens.tolist() == [9, 14]
    assert kept.report.rows_dropped == {"longer than 20 tokens, or later in the session of one": 4}
    with pytest.raises(TraceError, match="row 3 needs the answer of row 2, which is left out"):
        trace.take([3, 4])
    with pytest.raises(TraceError, match="clip_prompt"):
        trace.fit(20, "clip_prompt")


def test_sessions_cannot_be_written_as_a_table(file, tmp_path):
    with pytest.raises(TraceError, match="a table has no place"):
        write(read(file(SESSIONS)), tmp_path / "out.csv")


def test_bailian_chat_waits_for_its_parent_and_finds_its_answer(file):
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 20,
         "output_length": 14, "hash_ids": [10, 11]},
        {"chat_id": 2, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 16,
         "output_length": 1, "hash_ids": [12]},
        {"chat_id": 3, "parent_chat_id": 1, "timestamp": 5.0, "input_length": 50,
         "output_length": 2, "hash_ids": [10, 13, 14, 15]},
    ]  # fmt: skip
    path = file("".join(json.dumps(row | {"type": "text", "turn": 1}) + "\n" for row in rows))
    assert read(path).turns is None
    trace = read(path, sessions=True)
    assert trace.session.tolist() == ["1", "1", "2"]
    assert trace.turns.rows() == [([], 0), ([0], 5_000_000_000), ([], 0)]
    one, two, _ = requests_of(trace, max_model_len=100, hash_block_tokens=16)
    # 34 tokens fill two blocks, of which the second is the next prompt's second.
    assert one.turn.answer_hash_ids == two.request.prefix_hash_ids[1:2]
    assert two.request.prefix_hash_ids[:1] == one.request.prefix_hash_ids


QUOTED = [
    {"chat_id": i, "parent_chat_id": parent, "timestamp": float(i), "input_length": 16 * len(ids),
     "output_length": 15 + i, "hash_ids": ids}
    for i, parent, ids in (
        (1, -1, [10, 11]), (2, -1, [12]), (3, 1, [10, 11, 13, 14]), (4, 2, [12, 15, 16]),
        (5, 3, [10, 11, 13, 14, 17, 18]), (6, -1, [10, 11, 19]), (7, 4, [12, 15, 16, 20, 21]),
    )
]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("block_tokens", [None, 16, 32])
@pytest.mark.parametrize("kind", ["named", "sessions", "prefixes"])
def test_requests_are_the_same_however_many_rows_are_taken_at_once(
    monkeypatch, file, kind, chunk, block_tokens
):
    lines = "".join(json.dumps(row | {"type": "text", "turn": 1}) + "\n" for row in QUOTED)
    trace = read(file(SESSIONS if kind == "sessions" else lines), sessions=kind == "named" or None)
    taken = {"max_model_len": 4_000, "hash_block_tokens": block_tokens}
    whole = [repr(one) for one in requests_of(trace, **taken)]
    monkeypatch.setattr(sys.modules["schedlab.traces.workload"], "CHUNK_ROWS_WITH_PREFIXES", chunk)
    assert [repr(one) for one in requests_of(trace, **taken)] == whole
    assert len(whole) == len(trace) > 5


def test_bailian_answer_that_the_next_prompt_does_not_quote_has_no_names(file):
    # The next prompt is long enough, and begins otherwise than the one before it.
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 20,
         "output_length": 14, "hash_ids": [10, 11]},
        {"chat_id": 3, "parent_chat_id": 1, "timestamp": 5.0, "input_length": 50,
         "output_length": 2, "hash_ids": [12, 13, 14, 15]},
    ]  # fmt: skip
    lines = "".join(json.dumps(row | {"type": "text", "turn": 1}) + "\n" for row in rows)
    trace = read(file(lines), sessions=True)
    one, _ = requests_of(trace, max_model_len=100, hash_block_tokens=16)
    assert one.turn.answer_hash_ids == ()


def test_description_of_one_session_has_no_arrivals(file):
    found = describe(read(file("".join(SESSIONS.splitlines(keepends=True)[:2]))))
    assert found["num_requests"] == 2
    assert found["arrivals"] is None


def test_bailian_chat_whose_parent_comes_later_is_refused(file):
    with pytest.raises(TraceError, match="chat 7 has a later chat as its parent"):
        read(file(BAILIAN.replace('"parent_chat_id": -1', '"parent_chat_id": 9')), sessions=True)
    with pytest.raises(TraceError, match="chat 7 has itself as its parent"):
        read(file(BAILIAN.replace('"parent_chat_id": -1', '"parent_chat_id": 7')), sessions=True)


def test_burstgpt_requests_of_a_session_wait_for_each_other(file):
    rows = "5,s,1,GPT-4,90,10,100,API log\n7,t,1,GPT-4,9,1,10,API log\n9,s,1,GPT-4,120,5,125,API\n"
    trace = read(file(BURSTGPT_8.partition("\n")[0] + "\n" + rows), sessions=True)
    assert trace.session.tolist() == ["s", "s", "t"]
    assert trace.turns.rows() == [([], 0), ([0], 4_000_000_000), ([], 0)]
    assert trace.arrival_ns.tolist() == [0, 0, 2_000_000_000]
    more = rows + "15,s,1,GPT-4,130,5,135,API log\n"
    trace = read(file(BURSTGPT_8.partition("\n")[0] + "\n" + more), sessions=True)
    assert trace.turns.rows()[2] == ([1], 6_000_000_000), "from the one before, not from the first"


def test_linked_rows_go_behind_each_other_and_come_after_whom_they_need_or_the_first():
    """Session a has rows 0, 2, 4 and 5, of which 4 needs nobody; b has 1; row 3 is on its own."""
    times_ns = [10, 13, 17, 24, 38, 59]
    trace = Trace(
        prompt_tokens=np.array([1, 2, 3, 4, 5, 6]), output_tokens=np.array([7] * 6),
        arrival_ns=np.array(times_ns), session=np.array(["a", "b", "a", None, "a", "a"], object),
    )  # fmt: skip
    parent = np.array([NOBODY, NOBODY, 0, NOBODY, NOBODY, 2])
    found = linked(trace, parent)
    assert found.prompt_tokens.tolist() == [1, 3, 5, 6, 2, 4]
    assert found.session.tolist() == ["a"] * 4 + ["b", "row 3"]
    assert found.arrival_ns.tolist() == [10] * 4 + [13, 24]
    assert found.turns.rows() == [
        ([], 0), ([0], 17 - 10), ([], 38 - 10), ([1], 59 - 17), ([], 0), ([], 0),
    ]  # fmt: skip
    assert found.report.notes == (
        "requests wait for the answer before them; think times are those between requests",
    )
    bare = linked(replace(trace, arrival_ns=None), parent)
    assert bare.arrival_ns is None
    assert [delay_ns for _, delay_ns in bare.turns.rows()] == [0] * 6


def test_sessions_lose_whoever_needs_an_answer_that_is_too_long_and_no_one_else():
    """Row 1 is too long; row 2 needs it, 3 needs 2, 4 needs 0 alone, and 5 is another session."""
    trace = Trace(
        prompt_tokens=np.array([5, 9, 5, 5, 5, 5]), output_tokens=np.array([5] * 6),
        arrival_ns=np.array([1] * 5 + [2]), session=np.array([*"aaaaab"[:5], "b"], object),
        turns=Turns.from_rows([[], [0], [1], [2], [0], []], np.arange(6)),
    )  # fmt: skip
    kept = trace.fit(10, "drop")
    assert kept.prompt_tokens.tolist() == [5, 5, 5]
    assert kept.turns.rows() == [([], 0), ([0], 4), ([], 5)]
    assert kept.report.rows_dropped == {"longer than 10 tokens, or later in the session of one": 3}
    assert trace.fit(14, "drop") is trace
    with pytest.raises(TraceError, match="no request fits in 9 tokens"):
        trace.fit(9, "drop")


def test_sharegpt_conversations_are_sessions_only_when_asked(file):
    turns = [{"value": text} for text in ("a" * 42, "b" * 84, "c" * 21, "d" * 42)]
    path = file(json.dumps([{"conversations": turns}, *json.loads(SHAREGPT)]))
    assert read(path, tokenizer="estimate").turns is None
    trace = read(path, tokenizer="estimate", sessions=True)
    assert trace.prompt_tokens.tolist()[:2] == [10, 35]
    assert trace.turns.rows()[:3] == [([], 0), ([0], 0), ([], 0)]


@pytest.mark.parametrize("empty", [2, 3])
def test_sharegpt_conversation_ends_before_a_pair_of_which_a_turn_is_empty(empty, file):
    texts = ["a" * 42, "b" * 84, "c" * 21, "d" * 42, "e" * 42, "f" * 42]
    texts[empty] = ""
    path = file(json.dumps([{"conversations": [{"value": text} for text in texts]}]))
    trace = read(path, tokenizer="estimate", sessions=True)
    assert trace.output_tokens.tolist() == [20]


def test_format_without_sessions_says_which_have_some(file):
    with pytest.raises(TraceError, match=r"mooncake names no sessions; .*bailian, burstgpt"):
        read(file(MOONCAKE), sessions=True)


def test_sub_requests_are_named_by_their_tokens(file):
    ids = list(range(60))
    calls = [
        {"input_toks": 20, "output_toks": 15, "tool_duration_ns": 7, "input_tok_ids": ids[:20],
         "output_tok_ids": ids[20:35]},
        {"input_toks": 37, "output_toks": 5, "tool_duration_ns": 0, "input_tok_ids": ids[:37]},
    ]  # fmt: skip
    session = {"session_id": "t", "arrival_time_ns": 5, "sub_requests": calls}
    flat = {"arrival_time_ns": 9, **calls[0]}
    trace = read(file(json.dumps(session) + "\n" + json.dumps(flat)))
    assert trace.turns.rows() == [([], 0), ([0], 7), ([], 0)]
    assert trace.turns.tool.tolist() == ["tool", None, None]
    one, two, _ = requests_of(trace, max_model_len=100)
    whole = one.request.prefix_hash_ids + one.turn.answer_hash_ids
    assert whole == two.request.prefix_hash_ids
    assert len(whole) == 2


def test_description_counts_turns_times_and_reuse(file):
    found = describe(read(file(SESSIONS)))["sessions"]
    assert found["sessions"] == 2
    assert found["requests_per_session_max"] == 4
    assert (found["turns_max"], found["fan_out_max"], found["joins"]) == (3, 3, 1)
    assert (found["tool_p50_s"], found["think_p50_s"]) == (1.5, 0.0)
    # Of 168 prompt tokens the second prompt finds 48: three blocks of 16.
    assert found["reuse_with_answers"] == found["reuse_prompts_only"] == 48 / 168


def test_reuse_of_a_session_never_counts_the_last_token_of_a_prompt(file):
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 32,
         "output_length": 17, "hash_ids": [10, 11]},
        {"chat_id": 2, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 32,
         "output_length": 1, "hash_ids": [10, 11]},
        {"chat_id": 3, "parent_chat_id": 1, "timestamp": 5.0, "input_length": 49,
         "output_length": 1, "hash_ids": [10, 11, 12, 13]},
    ]  # fmt: skip
    path = file("".join(json.dumps(row | {"type": "text", "turn": 1}) + "\n" for row in rows))
    found = describe(read(path, sessions=True))["sessions"]
    # Chats 1, 3 and 2: the third finds two blocks of the first, and a third one that is its
    # answer's; the second one finds one block, for its last token is in the other.
    assert found["reuse_prompts_only"] == (32 + 16) / 113
    assert found["reuse_with_answers"] == (48 + 16) / 113


# -- drawn -------------------------------------------------------------------------------------

AGENTS = {
    "session_rate": 0.5,
    "sessions": {
        "count": 60,
        "turns": {"distribution": "uniform", "low": 1, "high": 3},
        "new_tokens": {"distribution": "uniform", "low": 5, "high": 60},
        "output_tokens": {"distribution": "uniform", "low": 1, "high": 40},
        "think_s": {"distribution": "exponential", "mean_s": 2.0},
        "tools": {"search": {"share": 0.4, "seconds": 0.25, "tokens": 33}},
        "fan_out": {"share": 0.2, "width": 3, "tokens": 7},
        "shared_prefix": {"tokens": 50, "groups": 2},
    },
}


def drawn(seed=0, **changes):
    sessions = {**AGENTS["sessions"], **changes.pop("sessions", {})}
    return make_spec(
        {"name": "s", "seed": seed, "workload": {**AGENTS, "sessions": sessions}} | changes
    )


@pytest.mark.slow
def test_drawn_sessions_are_as_the_specification_says():
    trace = load_workload(drawn(sessions={"count": 3000}), 8192)
    assert int((np.diff(trace.turns.offsets) == 0).sum()) == 3000
    tools = Counter(trace.turns.tool.tolist())
    calls = len(trace)
    # The last of 16 calls may call nothing, and joins and sub-agents answer: shares are of others.
    asked = calls - 4 * tools["sub_agents"]
    assert tools["search"] / asked == pytest.approx(0.4, abs=0.02)
    assert tools["sub_agents"] / asked == pytest.approx(0.2, abs=0.02)
    behind_search = [
        row
        for row in range(calls)
        if (n := trace.turns.needs(row)) and trace.turns.tool[n[-1]] == "search"
    ]
    assert set(trace.turns.delay_ns[behind_search].tolist()) == {250_000_000}
    row = behind_search[0]
    before = trace.turns.needs(row)[0]
    assert (
        trace.prompt_tokens[row] == trace.prompt_tokens[before] + trace.output_tokens[before] + 33
    )
    rate = 3000 / (trace.arrival_ns[-1] / 1e9)
    assert rate == pytest.approx(0.5, rel=0.06)


def test_fewer_sessions_of_a_seed_are_the_first_of_more():
    few, more = (load_workload(drawn(sessions={"count": n}), 8192) for n in (20, 60))
    n = len(few)
    assert few.turns.rows() == more.turns.rows()[:n]
    assert few.prompt_tokens.tolist() == more.prompt_tokens.tolist()[:n]
    other = load_workload(drawn(seed=1, sessions={"count": 20}), 8192)
    assert other.prompt_tokens.tolist() != few.prompt_tokens.tolist()


@pytest.mark.slow
def test_run_of_sessions_gives_the_same_bytes_and_finds_what_was_counted(tmp_path):
    spec = drawn(engine={"enable_prefix_caching": True}, sessions={"count": 40})
    results = [run(spec), run(spec)]
    for result, name in zip(results, "ab", strict=True):
        result.save(tmp_path / name)
    for table in ("requests", "sessions", "steps"):
        one, two = (tmp_path / name / f"{table}.parquet" for name in "ab")
        assert one.read_bytes() == two.read_bytes()
    # Sessions that come one after another find all there is.
    alone = drawn(engine={"enable_prefix_caching": True}, sessions={"count": 40})
    alone = make_spec(
        alone.to_data() | {"workload": alone.to_data()["workload"] | {"session_rate": 1e-3}}
    )
    result = run(alone)
    trace = load_workload(alone, 8192)
    hits = result.requests["prefix_hit_tokens"]
    exact = np.array(exact_hits(trace, 16))
    # Sub-agents start together: what they share is the spawning call, which all find.
    assert hits.tolist() == exact.tolist()
    reuse = describe(trace)["sessions"]["reuse_with_answers"]
    assert hits.sum() / trace.prompt_tokens.sum() == reuse


@pytest.mark.slow
def test_metrics_of_sessions_are_those_of_their_requests():
    result = run(drawn())
    metrics, requests = result.metrics(), result.requests
    by_session = {}
    for i, name in enumerate(requests["session"].tolist()):
        by_session.setdefault(name, []).append(i)
    times, away = [], []
    for rows in by_session.values():
        spans = sorted(
            (int(requests["arrival_ns"][i]), int(requests["finish_ns"][i])) for i in rows
        )
        until, gap = spans[0][1], 0
        for start, end in spans[1:]:
            gap += max(start - until, 0)
            until = max(until, end)
        times.append(until - spans[0][0])
        away.append(gap)
    assert metrics["num_sessions"] == metrics["completed_sessions"] == len(times) == 60
    assert metrics["mean_session_s"] == pytest.approx(np.mean(times) / 1e9)
    assert metrics["p99_session_s"] == pytest.approx(np.percentile(times, 99) / 1e9)
    assert metrics["mean_session_away_s"] == pytest.approx(np.mean(away) / 1e9)


REFUSED = [
    ({"workload": {"request_rate": 1.0}}, "request_rate"),
    ({"workload": {"session_rate": None}}, "session_rate or by arrivals"),
    ({"workload": {"sessions": {"tools": {"x": {"share": 0.9, "seconds": 1, "tokens": 1}}}}},
     "the shares of tools and fan_out add up to 1.1, more than 1"),
    ({"workload": {"sessions": {"think_s": {"distribution": "lognorml"}}}}, "mean lognormal"),
    ({"workload": {"sessions": {"think_s": {"distribution": "fixed", "seconds": -1}}}}, "seconds"),
    ({"workload": {"sessions": {"turn": 3}}}, "turns"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_specification_that_contradicts_sessions_is_refused(changes, message):
    data = {"name": "s", "workload": json.loads(json.dumps(AGENTS))}
    for key, value in changes["workload"].items():
        if isinstance(value, dict):
            data["workload"][key] |= value
        elif value is None:
            del data["workload"][key]
        else:
            data["workload"][key] = value
    with pytest.raises(SpecError, match=message):
        make_spec(data)


def test_what_needs_to_know_arrivals_beforehand_is_refused():
    for fleet in ({}, {"cluster": 2}):
        with pytest.raises(SpecError, match="frontend: not with sessions"):
            run(drawn(frontend={"latency_s": 0.1}, **fleet))
    plain = {"trace": "azure-conv", "num_requests": 9, "session_rate": 1.0}
    with pytest.raises(SpecError, match="session_rate: the workload has no sessions"):
        run(make_spec({"name": "s", "workload": plain}))


@pytest.mark.parametrize(
    ("keys", "is_asked", "message"),
    [
        ({}, False, None),
        ({"session_rate": 2.0}, False, "session_rate: the workload has no sessions"),
        ({"follow_sessions": True}, True, None),
        ({"follow_sessions": True, "session_rate": 2.0}, True, None),
    ],
)
def test_sessions_of_a_trace_are_followed_where_that_is_asked_for_and_not_by_their_rate(
    file, keys, is_asked, message
):
    workload = {"trace": str(file(BURSTGPT_8, "t.csv")), "format": "burstgpt"}
    spec = make_spec({"workload": {**workload, **keys}})
    if message is None:
        assert (load_workload(spec, 8192).turns is not None) is is_asked
    else:
        with pytest.raises(SpecError, match=message):
            load_workload(spec, 8192)


@pytest.mark.slow
def test_conversations_of_a_real_trace_find_exactly_what_was_said_before():
    path = data_folder() / "traces" / "mooncake" / "conversation_trace.jsonl"
    trace = read(path).head(400)
    size, ids = trace.prefix.block_tokens, trace.prefix.rows()
    prompt, output = trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    # A request goes on from the latest one whose full blocks it begins with, answer included.
    parents = []
    for row in range(len(trace)):
        before = [
            b
            for b in range(row)
            if prompt[b] >= 2 * size
            and prompt[row] >= prompt[b] + output[b]
            and ids[row][: prompt[b] // size] == ids[b][: prompt[b] // size]
        ]
        parents.append(before[-1] if before else NOBODY)
    session = []
    for row, parent in enumerate(parents):
        session.append(f"{row}" if parent == NOBODY else session[parent])
    named = replace(trace, session=np.array(session, dtype=object))
    linked_trace = linked(named, np.array(parents))
    found = describe(linked_trace)["sessions"]
    assert found["sessions"] < 390
    assert found["reuse_with_answers"] > found["reuse_prompts_only"] > 0.05
    config = EngineConfig(
        num_blocks=100_000,
        max_model_len=200_000,
        block_size=size,
        max_num_batched_tokens=200_000,
        enable_prefix_caching=True,
    )
    work = list(requests_of(linked_trace, max_model_len=200_000, hash_block_tokens=size))
    log = laws.run(registry.make("fcfs"), work, config, max_concurrency=1, prove=False)
    hits = log.requests()["prefix_hit_tokens"].sum()
    assert hits / linked_trace.prompt_tokens.sum() == found["reuse_with_answers"]


@pytest.mark.parametrize(("key", "value"), [("follow_sessions", True), ("think_s", 3)])
def test_lengths_that_are_drawn_have_no_sessions_to_follow(key, value):
    workload = {"num_requests": 3, "request_rate": 1, "prompt_tokens": 9, "output_tokens": 9}
    with pytest.raises(SpecError, match=f"workload.{key}: is of the sessions of a trace"):
        make_spec({"workload": {**workload, key: value}})


@pytest.mark.parametrize("needs", [[0, 2], [2, 0]])
def test_turn_follows_the_latest_that_it_needs_in_whatever_order_they_are_named(needs):
    turns = Turns.from_rows([[], [0], [1], needs, [], [4]], [0] * 6)
    assert turns.numbers().tolist() == [1, 2, 3, 4, 1, 2]


@dataclass
class Sent:
    """A trace, of which little is there."""

    turns: Turns
    report: SimpleNamespace | None
    session: np.ndarray | None = None

    def __len__(self):
        return len(self.turns)


def test_think_time_is_drawn_where_the_last_answer_needed_is_for_the_user():
    tool = np.array([None, "search", None, None, None], dtype=object)
    turns = Turns.from_rows([[], [0], [0, 1], [1, 2], []], [0, 11, 22, 33, 44], tool)
    trace = Sent(turns, SimpleNamespace(noted=lambda text: None))
    think = DurationsSpec(distribution="fixed", seconds=5.0)
    fresh = with_think_times(trace, think, seed=0).turns
    assert fresh.delay_ns.tolist() == [0, 5 * 10**9, 22, 5 * 10**9, 44], "22 ns are a tool's"
    fresh = with_think_times(replace(trace, turns=replace(turns, tool=None)), think, 0).turns
    assert fresh.delay_ns.tolist() == [0, 5 * 10**9, 5 * 10**9, 5 * 10**9, 44]


def test_session_is_predicted_to_be_as_long_as_all_its_requests_together():
    turns = Turns.from_rows([[], [0], [1], [], [], [4]], [0] * 6)
    trace = Sent(turns, None, np.array([4, 4, 4, 9, 2, 2]))
    drawn = SimpleNamespace(predicted_tokens=np.array([1.0, 5.0, 2.0, 7.0, 3.0, 3.0]))
    assert _of_sessions(trace, drawn).tolist() == [8.0, 8.0, 8.0, 7.0, 6.0, 6.0]
    assert _of_sessions(trace, None) is None
    assert _of_sessions(replace(trace, turns=None), drawn) is None


def test_rows_that_are_taken_need_those_they_needed_wherever_they_are_now():
    turns = Turns.from_rows([[], [0], [0], [0, 2], [3]], [0, 1, 2, 3, 4])
    rows = np.array([0, 2, 3, 4])
    some = turns.take(rows)
    assert [some.needs(i) for i in range(4)] == [[], [0], [0, 1], [2]]
    assert some.delay_ns.tolist() == [0, 2, 3, 4]
    with pytest.raises(TraceError, match="row 3 needs the answer of row 2, which is left out"):
        turns.take(np.array([0, 1, 3]))


# Two sessions: a of rows 0 to 2, b of 3 and 4.
@pytest.mark.parametrize(
    ("changes", "row", "problem"),
    [
        ({}, None, ""),
        ({"needs": [[], [0], [1], [], [4]]}, 4, "needs its own answer"),
        ({"needs": [[], [0], [3], [], [3]]}, 2, "needs the answer of a later request"),
        ({"needs": [[], [0], [1, 0], [], [-1]]}, 4, "a request that is not there"),
        ({"needs": [[-1], [0], [1], [], [3]]}, 0, "a request that is not there"),
        ({"needs": [[], [0], [1], [2], [3]]}, 3, "of a request of another session"),
        ({"delay_ns": [0, 3, 0, -2, -1]}, 3, "delay must be >= 0, got -2e-09 s"),
        ({"session": "aabba"}, 2, "of a request of another session"),
        ({"session": "aaaba", "needs": [[], [0], [1], [], []]}, 4, "session a goes on behind"),
        ({"arrival_ns": [1, 1, 1, 5, 6]}, 4, "the arrival time of its session's start"),
        ({"arrival_ns": [1, 2, 1, 5, 5]}, 1, "the arrival time of its session's start"),
    ],
)
def test_first_row_of_turns_that_cannot_be_is_named(changes, row, problem):
    given = {
        "needs": [[], [0], [1, 0], [], [3]], "delay_ns": [0, 3, 2, 0, 1], "session": "aaabb",
        "arrival_ns": [1, 1, 1, 5, 5],
    } | changes  # fmt: skip
    turns = Turns.from_rows(given["needs"], given["delay_ns"])
    session = np.array(list(given["session"]), dtype=object)
    if row is None:
        turns.check(session, np.array(given["arrival_ns"]), "t")
        return
    with pytest.raises(RowError, match=problem) as caught:
        turns.check(session, np.array(given["arrival_ns"]), "t")
    assert caught.value.row == row


def test_turns_of_some_rows_keep_all_that_they_say_of_them():
    turns = Turns.from_rows(
        [[], [0], [], [2], [2, 3]],
        [0, 5, 1, 7, 9],
        tool=np.array([None, "t", None, "u", None], dtype=object),
        shared=np.array([(("a", 3),), None, (("b", 4),), None, None], dtype=object),
        answers=PrefixHashes.from_rows([[1], [2, 3], [], [4], [5, 6]], 16),
    )
    some = turns.take(np.array([2, 3, 4]))
    assert [some.needs(row) for row in range(3)] == [[], [0], [0, 1]]
    assert some.delay_ns.tolist() == [1, 7, 9]
    assert some.tool.tolist() == [None, "u", None]
    assert some.shared.tolist() == [(("b", 4),), None, None]
    assert (some.answers.rows(), some.answers.block_tokens) == ([(), (4,), (5, 6)], 16)
    bare = Turns.from_rows([[], [0]], [0, 5]).take(np.array([0]))
    assert (bare.tool, bare.shared, bare.answers) == (None, None, None)
    with pytest.raises(TraceError, match="row 4 needs the answer of row 3, which is left out"):
        turns.take(np.array([2, 4]))


def test_blocks_of_a_part_that_is_shared_depend_on_all_parts_in_front_of_it():
    blocks = SessionBlocks(4)
    shared = [(("a", 6), ("x", 6)), (("b", 6), ("x", 6)), (("a", 6), ("x", 6), ("y", 4))]
    names = [blocks.name(i, f"{i}", None, (16, 0), parts) for i, parts in enumerate(shared)]
    # Of 16 tokens 12 are shared, three blocks, and of the third all 16.
    assert names == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 8)]


def test_blocks_of_a_session_go_on_from_who_is_needed_and_begin_with_what_is_shared():
    blocks = SessionBlocks(4)
    begins = (("system", 8),)
    assert blocks.name(0, "a", None, (10, 3), begins) == (0, 1, 2)  # two are shared
    assert blocks.name(1, "a", 0, (14, 3), None) == (0, 1, 2, 3)
    assert blocks.name(2, "a", 0, (12, 5), None) == (4, 5, 6, 7)  # too short: nobody knows
    assert blocks.name(3, "b", None, (9, 0), begins) == (0, 1)
    assert blocks.name(4, None, None, (9, 0), None) == (8, 9)
    assert blocks.name(5, None, None, (5, 0), begins) == (0,)
