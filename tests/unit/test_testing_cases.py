"""How laws are asked: in what order, on which cases, how far those shrink, and what is said."""

from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from random import Random

import pytest

from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError, Stalled
from schedlab.sim.request import Arrival, Request, Slo, Turn
from schedlab.testing import LawBroken, LinearCost, fleet_cases, random_cases
from schedlab.testing.cases import LONGEST_TOKENS, Case, _smaller, smallest
from schedlab.testing.check import Verdict, raise_first, verdicts
from tests.laws import arrival

LIMITS = EngineConfig(num_blocks=9, max_model_len=60, block_size=16)


def case_of(*lengths, **options):
    work = (arrival(i, 10 * i, prompt, output) for i, (prompt, output) in enumerate(lengths))
    return Case(tuple(work), LIMITS, **options)


def lengths_of(case):
    return [(a.request.prompt_tokens, a.output_tokens) for a in case.workload]


# -- who is asked, and what is said ------------------------------------------------------------


def noting(asked, fails=()):
    def law(subject, case):
        asked.append((subject, case))
        if any(case is one for one in fails):
            raise AssertionError("it fails")

    return law


@pytest.mark.parametrize(("only", "names"), [
    (None, ["b", "a", "c"]), ("a", ["a"]), (["c", "b"], ["c", "b"]), ((), []),
    (iter(["c", "a"]), ["c", "a"]), (["a", "a"], ["a", "a"]),
])  # fmt: skip
def test_laws_are_asked_in_their_order_or_that_which_is_given_of_every_case(only, names):
    asked = {name: [] for name in "bac"}
    laws = {name: noting(calls) for name, calls in asked.items()}
    cases = [case_of((1, 1)), case_of((2, 1)), case_of((3, 1))]
    found = verdicts("it", "the thing", laws, cases, only)
    assert [one.law for one in found] == names
    assert all(one.broken is None for one in found)
    for name, calls in asked.items():
        assert calls == [("the thing", case) for case in cases] * names.count(name)


def test_law_that_is_not_known_is_refused_before_any_is_asked():
    asked = []
    with pytest.raises(ValueError, match="there is no law 'aa'; "):
        verdicts(
            "it", None, {"a": noting(asked), "b": noting(asked)}, [case_of((1, 1))], ["a", "aa"]
        )
    assert asked == []


@pytest.mark.parametrize("first", range(3))
def test_first_case_that_fails_is_the_last_that_is_asked_but_for_smaller_ones(first):
    asked = []
    cases = [case_of((1, 1)) for _ in range(3)]
    found = verdicts("it", None, {"law": noting(asked, cases[first:])}, cases)
    assert found[0].broken.case is cases[first]
    assert [case for _, case in asked] == [*cases[: first + 1], cases[first]]


@pytest.mark.parametrize(("doc", "meaning"), [
    (None, ""), ("Hold.", "Hold"), ("Hold. And more.\n\n    Much.\n    ", "Hold. And more"),
    ("Hold", "Hold"), ("Hold...", "Hold"), ("First\n    second.", "First"),
])  # fmt: skip
def test_meaning_of_a_law_is_the_first_line_of_what_it_says_of_itself(doc, meaning):
    law = noting([])
    law.__doc__ = doc
    assert verdicts("it", None, {"law": law}, [])[0] == Verdict("law", meaning, None)


def test_broken_law_is_told_with_its_case_and_how_to_repeat_it():
    def law(subject, case):
        """Hold always."""
        if len(case.workload) > how:
            raise AssertionError(f"{len(case.workload)} are too many")

    case = case_of((1, 1), (1, 1), (1, 1))
    for how, requests in ((0, "1 request"), (1, "2 requests")):
        (found,) = verdicts("a thing", None, {"law": law}, [case])
        broken = found.broken
        assert (broken.law, broken.reason) == ("law", f"{how + 1} are too many")
        assert len(broken.case.workload) == how + 1
        assert str(broken) == (
            f"a thing breaks the law 'law' (Hold always):\n  {how + 1} are too many\n"
            f"smallest workload found, {requests}; repeat with only='law', cases=[case], where\n"
            f"case = {broken.case}"
        )
        assert str(broken.__cause__) == f"{how + 1} are too many", "of the smallest"
        with pytest.raises(LawBroken) as caught:
            raise_first([Verdict("fine", "", None), found, Verdict("later", "", LawBroken)])
        assert caught.value is broken
    bare = LawBroken("a thing", "law", "Hold", "it is so", None)
    assert str(bare) == "a thing breaks the law 'law' (Hold):\n  it is so"
    assert (bare.law, bare.reason, bare.case) == ("law", "it is so", None)
    assert isinstance(bare, AssertionError)
    raise_first([Verdict("fine", "", None)])
    raise_first([])


@pytest.mark.parametrize(("error", "words"), [
    (AssertionError("as it is"), "as it is"),
    (AssertionError("two\nlines"), "two\nlines"),
    (Stalled("nobody runs"), "Stalled: nobody runs"),
    (SpecError("a mistake"), "SpecError: a mistake"),
    (KeyError("a"), "KeyError: 'a' in law() (test_testing_cases.py:"),
    (ZeroDivisionError(), "ZeroDivisionError in law() (test_testing_cases.py:"),
    (SystemExit(3), "SystemExit: 3 in law() (test_testing_cases.py:"),
    (GeneratorExit(), "GeneratorExit in law() (test_testing_cases.py:"),
])  # fmt: skip
def test_fault_is_told_in_words_and_where_it_is_if_it_is_no_law_of_ours(error, words):
    def law(subject, case):
        raise error

    (found,) = verdicts("it", None, {"law": law}, [case_of((1, 1))])
    assert found.broken.reason.startswith(words)
    assert ("test_testing_cases" in found.broken.reason) == ("test_testing_cases" in words)
    assert found.broken.__cause__ is error


def test_only_the_user_and_commands_of_ours_end_a_check():
    def raising(name, error):
        told = {"__name__": name, "error": error}
        exec("def law(subject, case): raise error", told)
        return {"law": told["law"]}

    cases = [case_of((1, 1))]
    for name, error in (("mine", KeyboardInterrupt()), ("schedlab.experiments.x", SystemExit())):
        with pytest.raises(type(error)):
            verdicts("it", None, raising(name, error), cases)
    for name, error in (
        ("schedlab.experiments", SystemExit()), ("schedlab.experiments.x", KeyError()),
        ("my.schedlab.experiments.x", SystemExit()), ("schedlab.policies.x", SystemExit()),
        ("schedlab.experiments.x", GeneratorExit()),
    ):  # fmt: skip
        assert verdicts("it", None, raising(name, error), cases)[0].broken is not None


def test_fault_of_another_kind_in_the_smallest_case_does_not_hide_the_first():
    calls = []

    def law(subject, case):
        calls.append(case)
        if len(calls) == 1:
            raise AssertionError("once")

    (found,) = verdicts("it", None, {"law": law}, [case_of((1, 1))])
    assert found.broken.reason == "once", "though it does not come again"


# -- smaller cases -----------------------------------------------------------------------------


def test_smaller_cases_are_halves_then_one_fewer_then_shorter_ones():
    case = case_of((4, 6), (1, 3), (7, 1), (1, 1), (2, 2), cost=LinearCost(7))
    a, b, c, d, e = lengths_of(case)
    smaller = list(_smaller(case))
    assert [lengths_of(one) for one in smaller] == [
        [a, b], [c, d, e],
        [a, b, c, d], [a, b, c, e], [a, b, d, e], [a, c, d, e], [b, c, d, e],
        [(4, 3), b, c, d, e], [(2, 6), b, c, d, e], [a, (1, 1), c, d, e], [a, b, (3, 1), d, e],
        [a, b, c, d, (2, 1)], [a, b, c, d, (1, 2)],
    ]  # fmt: skip
    for one in smaller:
        assert [x.request.id for x in one.workload] == [*range(len(one.workload))]
        assert (one.limits, one.cost) == (LIMITS, case.cost)
        at_ns = [x.request.arrival_ns for x in one.workload]
        assert at_ns == [x.ready_ns for x in one.workload] == sorted(at_ns)
    times = [[x.request.arrival_ns for x in one.workload] for one in smaller]
    assert times[:4] == [[0, 10], [20, 30, 40], [0, 10, 20, 30], [0, 10, 20, 40]]


@pytest.mark.parametrize(("lengths", "smaller"), [
    ([(1, 1)], []), ([(1, 2)], [[(1, 1)]]), ([(2, 1)], [[(1, 1)]]),
    ([(3, 5)], [[(3, 2)], [(1, 5)]]),
    ([(1, 1), (1, 1)], [[(1, 1)]] * 4),
])  # fmt: skip
def test_smallest_cases_have_few_smaller_ones_and_none_without_a_request(lengths, smaller):
    assert [lengths_of(one) for one in _smaller(case_of(*lengths))] == smaller


def test_smaller_case_keeps_all_else_of_its_requests():
    one = arrival(0, 5, 8, 6, max_tokens=9, priority=2, tenant="b", slo=Slo(1.0))
    late = Arrival(one.request, 6, 70)
    shorter, brief = _smaller(Case((late,), LIMITS))
    assert repr(shorter.workload) == repr((replace(late, output_tokens=3),))
    half = replace(one.request, prompt_tokens=4)
    assert repr(brief.workload) == repr((replace(late, request=half),))


def test_smaller_case_keeps_turns_and_the_names_of_the_blocks_that_are_left_of_a_prompt():
    one = arrival(0, 5, 70, 6, prefix_hash_ids=(4, 5, 6, 7), session="s")
    late = Arrival(one.request, 6, 70, Turn())
    shorter, brief = _smaller(Case((late,), LIMITS))
    assert repr(shorter.workload) == repr((replace(late, output_tokens=3),))
    half = replace(one.request, prompt_tokens=35, prefix_hash_ids=(4, 5))
    assert repr(brief.workload) == repr((replace(late, request=half),))


@pytest.mark.parametrize("seed", range(6))
def test_smallest_case_fails_and_none_of_its_smaller_ones_does(seed):
    draw = Random(seed)
    case = case_of(*((draw.randint(1, 6), draw.randint(1, 6)) for _ in range(5)))
    least = draw.randint(2, 12)

    def fails(one):
        return sum(prompt + output for prompt, output in lengths_of(one)) >= least

    found = smallest(case, fails)
    assert fails(found)
    assert not any(fails(one) for one in _smaller(found))


# -- what is drawn -----------------------------------------------------------------------------

CASES = list(random_cases(0, 400))


def values(of):
    return Counter(of(case) for case in CASES)


@pytest.mark.parametrize(("name", "drawn"), [
    ("block_size", {1, 4, 16}), ("max_num_seqs", {1, 2, 5, 16}),
    ("max_num_batched_tokens", {3, 17, 64, 500}), ("long_prefill_token_threshold", {0, 8}),
    ("watermark", {0.0, 0.05}), ("scheduler_reserve_full_isl", {False, True}),
    ("preemption_mode", {"recompute", "swap"}), ("swap_space_blocks", {0, 3, 500}),
    ("kv_block_bytes", {100}), ("max_num_resident", {None, 1, 3, 30}),
    ("max_model_len", {LONGEST_TOKENS}),
])  # fmt: skip
def test_limits_are_drawn_from_all_that_there_are_each_about_as_often(name, drawn):
    found = values(lambda case: getattr(case.limits, name))
    assert set(found) == drawn
    assert min(found.values()) > 400 // (3 * len(drawn))


def test_no_other_limit_than_these_is_changed():
    plain = EngineConfig(num_blocks=200, max_model_len=LONGEST_TOKENS)
    changed = {
        field.name
        for case in CASES
        for field in fields(EngineConfig)
        if getattr(case.limits, field.name) != getattr(plain, field.name)
    }
    assert changed == {
        "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "long_prefill_token_threshold", "watermark", "scheduler_reserve_full_isl",
        "preemption_mode", "swap_space_blocks", "kv_block_bytes", "max_num_resident",
    }  # fmt: skip


def test_memory_is_that_of_the_longest_request_and_a_little_or_much_more():
    spare = values(lambda case: case.limits.num_blocks - -(-100 // case.limits.block_size))
    assert set(spare) == {0, 1, 3, 20, 400}
    assert min(spare.values()) > 40


def test_every_second_case_is_ten_thousand_times_slower():
    for i, case in enumerate(CASES):
        slower = 10_000 if i % 2 else 1
        assert repr(case.cost) == repr(LinearCost(1000 * slower, 10 * slower, slower))
        targets = {a.request.slo for a in case.workload} - {None}
        assert targets <= {Slo(0.02 * slower), Slo(None, 0.004 * slower)}


def test_requests_are_of_all_lengths_that_matter_and_come_in_all_gaps_that_matter():
    requests = [a.request for case in CASES for a in case.workload]
    answers = [a.output_tokens for case in CASES for a in case.workload]
    assert {len(case.workload) for case in CASES} == set(range(1, 25))
    assert (min(r.prompt_tokens for r in requests), min(answers)) == (1, 1)
    assert max(r.prompt_tokens for r in requests) in range(60, 66)
    assert max(answers) == 39
    assert {r.priority for r in requests} == {0, 1, 2}
    assert {r.tenant for r in requests} == set("abc")
    assert {r.application for r in requests} == {"chat", "code", None}
    beyond = Counter(r.max_tokens - n for r, n in zip(requests, answers, strict=True))
    assert beyond[0] > 1000
    assert beyond[5] > 1000
    assert sum(r.max_tokens == 1 << 20 for r in requests) > 1000
    shares = [r.predicted_tokens / n for r, n in zip(requests, answers, strict=True)]
    assert (min(shares) >= 0.3, max(shares) <= 3.0, shares.count(1.0) > 1000) == (True,) * 3
    assert min(shares) < 0.4
    assert max(shares) > 2.9
    for case in CASES:
        edges = {0, 1, 700, 3_000, 40_000}
        scale = case.cost.context_ns
        for one, other in pairwise(case.workload):
            gap_ns = other.request.arrival_ns - one.request.arrival_ns
            alone_ns = case.cost.base_ns + case.cost.token_ns * one.request.prompt_tokens
            assert gap_ns in {edge * scale for edge in edges} | {alone_ns}
        assert [a.request.id for a in case.workload] == [*range(len(case.workload))]
        assert all(a.ready_ns == a.request.arrival_ns for a in case.workload)
    at_edges = Counter(
        (a.request.prompt_tokens + 1) % 16 for case in CASES for a in case.workload
        if case.limits.block_size == 16
    )  # fmt: skip
    others = max(at_edges[rest] for rest in range(3, 16))
    assert all(at_edges[rest] > 2 * others for rest in (0, 1, 2)), "beside edges of blocks, too"


def test_cases_depend_on_seed_and_place_alone():
    assert [str(case) for case in random_cases(0, 5)] == [str(case) for case in CASES[:5]]
    assert len(list(random_cases())) == 20
    assert len({str(case) for seed in range(3) for case in random_cases(seed, 10)}) == 30


# -- how a case is written down ----------------------------------------------------------------


@pytest.mark.parametrize(("options", "text"), [
    ({}, ""), ({"max_tokens": 1 << 20}, ""), ({"priority": 0}, ""),
    ({"priority": 1}, ", priority=1"),
    ({"max_tokens": 3}, ", max_tokens=3"), ({"tenant": "b"}, ", tenant='b'"),
    ({"application": "chat"}, ", application='chat'"),
    ({"slo": Slo(0.5)}, f", slo={Slo(0.5)!r}"),
    ({"predicted_tokens": 2.5}, ", predicted_tokens=2.5"),
    ({"predicted_tokens": 1, "max_tokens": 4, "priority": 2},
     ", max_tokens=4, priority=2, predicted_tokens=1"),
])  # fmt: skip
def test_request_is_written_down_with_what_is_not_as_usual(options, text):
    case = Case((arrival(0, 5, 6, 7, **options),), LIMITS)
    line = str(case).splitlines()[2]
    assert line == f"        arrival(0, 5, 6, 7{text}),"
    late = replace(case, workload=(replace(case.workload[0], ready_ns=8),))
    line = str(late).splitlines()[2]
    assert line == f"        replace(arrival(0, 5, 6, 7{text}), ready_ns=8),"


def test_case_is_written_down_in_lines_of_requests_limits_and_cost():
    limits = replace(LIMITS, max_num_seqs=2, watermark=0.05)
    case = replace(case_of((1, 2), (3, 4), cost=LinearCost(7, 8, 9)), limits=limits)
    assert str(case).splitlines() == [
        "Case(", "    (", "        arrival(0, 0, 1, 2),", "        arrival(1, 10, 3, 4),", "    ),",
        "    EngineConfig(num_blocks=9, max_model_len=60, max_num_seqs=2, watermark=0.05),",
        "    LinearCost(7, 8, 9),", ")",
    ]  # fmt: skip
    assert {field.name for field in fields(Request)} > {"max_tokens", "priority", "tenant"}


def test_case_is_written_down_with_sessions_and_prefixes_turns_and_when_requests_are_ready():
    names = {"Case": Case, "EngineConfig": EngineConfig, "LinearCost": LinearCost, "Slo": Slo,
             "Turn": Turn, "arrival": arrival, "replace": replace}  # fmt: skip
    others = {"session": "", "prefix_hash_ids": (3,), "predicted_session_tokens": 0.0}
    one = arrival(0, 5, 40, 2, **others)
    late = replace(one, ready_ns=9), replace(one, turn=Turn((2,), 7)), Arrival(one.request, 2, 0)
    for case in (*fleet_cases(0, 8), *(Case((each,), LIMITS) for each in (one, *late))):
        again = eval(str(case), names)
        assert repr(again) == repr(case)
