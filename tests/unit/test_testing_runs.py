"""The laws of runs on a log written by hand: one cell off, and a naive second reading agrees."""

from collections import Counter
from copy import deepcopy
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.testing import laws
from tests.hand_log import HandLog

LIMITS = {
    "max_num_seqs": 3, "max_num_batched_tokens": 7, "max_num_resident": 3, "block_size": 4,
    "num_blocks": 6, "pipeline_parallel_size": 1, "num_speculative_tokens": 0,
    "async_scheduling": False,
}  # fmt: skip
WORK = [  # not in the order of their numbers; the one that is cut off may say two tokens
    laws.arrival(7, 20, 4, 2), laws.arrival(2, 0, 5, 3), laws.arrival(3, 5, 90, 4),
    laws.arrival(5, 10, 6, 9, max_tokens=2),
]  # fmt: skip
WORLD = {
    "requests": {
        "id": [2, 3, 5, 7],
        "status": [0, 1, 3, 0],
        "arrival_ns": [0, 5, 10, 20],
        "queued_ns": [0, 5, 10, 20],
        "first_scheduled_ns": [0, -1, 10, 100],
        "first_token_ns": [100, -1, 200, 200],
        "last_token_ns": [300, -1, 300, 500],
        "finish_ns": [300, 200, 300, 500],
        "prompt_tokens": [5, 90, 6, 4],
        "output_tokens": [3, 4, 9, 2],
        "generated_tokens": [3, 1, 2, 2],
        "cached_tokens": [0, 0, 1, 2],
        "recomputed_tokens": [0, 2, 0, 4],
        "num_preemptions": [0, 1, 0, 1],
    },
    "steps": {
        "start_ns": [0, 100, 200, 300, 400],
        "end_ns": [100, 200, 300, 400, 500],
        "num_decodes": [0, 1, 2, 1, 2],
        "num_prefills": [1, 2, 1, 1, 0],
        "prefill_tokens": [5, 6, 3, 2, 0],
        "recomputed_tokens": [0, 0, 3, 2, 0],
        "num_preempted": [0, 0, 1, 1, 0],
        "num_running": [1, 2, 3, 3, 2],
        "kv_allocated_tokens": [8, 16, 24, 20, 12],
        "kv_tokens": [5, 0, 3, 1, 1],
        "kv_reserved_unused_tokens": [0, 4, 1, 3, 1],
        "kv_fragmentation_tokens": [2, 1, 0, 1, 3],
    },
    "preemptions": {"id": [3, 7], "evicted_ns": [200, 300], "resumed_ns": [-1, 300]},
    "times": {2: [100, 200, 300], 3: [], 5: [200, 300], 7: [200, 500]},
    "gaps": None,
    "counts": None,
    "reasons": {3: "too long"},
    "limits": LIMITS,
}
DRAFTED = {"draft_tokens": [0, 0, 1, 4, 3], "accepted_tokens": [0, 0, 1, 0, 1]}
"""Two of the tokens computed come from drafts that are accepted, not from prompts."""


def drafting():
    """Return the same run with drafts: two tokens fewer of prompts."""
    world = deepcopy(WORLD)
    world["steps"].update(DRAFTED, prefill_tokens=[5, 6, 3, 0, 0])
    world["limits"]["num_speculative_tokens"] = 3
    return world


def faults(world):
    """Read every law off the plain lists, one row after the other, in the order of the check."""
    rows, steps, gone = world["requests"], world["steps"], world["preemptions"]
    limits = SimpleNamespace(**world["limits"])
    of, n = range(len(rows["id"])), len(steps["start_ns"])
    work = {one.request.id: one for one in WORK}
    if rows["id"] != sorted(work):
        yield "each request leaves the engine exactly once"
        return
    done = [i for i in of if rows["status"][i] in (0, 3)]
    rejected = [i for i in of if rows["status"][i] == 1]
    if len(done) + len(rejected) < len(of):
        yield "each request is finished or rejected"
    if sorted(world["reasons"]) != [rows["id"][i] for i in rejected]:
        yield "every rejection, and nothing else, has a reason"
    names = ("arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns",
             "finish_ns")  # fmt: skip
    for before, after in pairwise(names):
        if any(rows[before][i] > rows[after][i] for i in done):
            yield f"{before} > {after}"
    if any(steps["end_ns"][j] - steps["start_ns"][j] < 1 for j in range(n)):
        yield "every step takes time"
    depth = limits.pipeline_parallel_size
    depth += depth > 1 and limits.async_scheduling
    if any(steps["start_ns"][j] < steps["end_ns"][j - depth] for j in range(depth, n)):
        yield "no more steps overlap than batches may be in flight"
    if any(steps["end_ns"][j] <= steps["end_ns"][j - 1] for j in range(1, n)):
        yield "steps end in the order in which they began"
    may_say = [work[rows["id"][i]].request.max_tokens for i in of]
    answers = [min(rows["output_tokens"][i], may_say[i]) for i in of]
    if any(rows["generated_tokens"][i] != answers[i] for i in done):
        yield "each answer is as long as it is, or as it may be"
    if any((rows["status"][i] == 3) != (may_say[i] < rows["output_tokens"][i]) for i in done):
        yield "who may say no more, and nobody else, is cut off"
    accepted = steps.get("accepted_tokens", [0] * n)
    computed = sum(steps["num_decodes"]) + sum(steps["prefill_tokens"]) + sum(accepted)
    needed = sum(rows["prompt_tokens"][i] + rows["generated_tokens"][i] - 1 for i in done)
    if computed != needed + sum(rows["recomputed_tokens"]) - sum(rows["cached_tokens"]):
        yield "tokens computed are those needed, and those recomputed, less those reused"
    again, of_done = sum(steps["recomputed_tokens"]), [rows["recomputed_tokens"][i] for i in done]
    if again < sum(of_done) or again > sum(rows["recomputed_tokens"]):
        yield "recomputed tokens of requests and of steps are the same"
    if sum(rows["num_preemptions"]) != sum(steps["num_preempted"]):
        yield "preemptions of requests and of steps are the same"
    pairs = list(zip(gone["evicted_ns"], gone["resumed_ns"], strict=True))
    if any(0 <= back < out for out, back in pairs):
        yield "nobody resumes before being evicted"
    lost = [number for number, back in zip(gone["id"], gone["resumed_ns"], strict=True) if back < 0]
    if len(lost) > len(set(lost)) or any(rows["id"][i] in lost for i in done):
        yield "evictions are as many as resumptions, and requests rejected while they were evicted"
    if any(gone["id"].count(rows["id"][i]) != rows["num_preemptions"][i] for i in of):
        yield "every preemption has a row"
    for i in done:
        times = world["times"][rows["id"][i]]
        if len(times) != answers[i]:
            yield "each output token has a time"
            return
        if not limits.num_speculative_tokens and any(b <= a for a, b in pairwise(times)):
            yield "two tokens of a request at one instant"
        if times[0] != rows["first_token_ns"][i]:
            yield "the first token comes at first_token_ns"
        if times[-1] != rows["last_token_ns"][i]:
            yield "the last token comes at last_token_ns"
    if world["gaps"] is not None:
        gaps = [b - a for t in world["times"].values() for a, b in pairwise(sorted(set(t)))]
        if Counter(gaps) != Counter(world["gaps"]):
            yield "gaps between tokens are those of token times"
    elif any(len(set(t)) < len(t) or sorted(t) != t for t in world["times"].values()):
        yield "gaps between tokens are those of token times"
    if world["counts"] is not None and Counter(world["counts"]) != Counter(
        t for times in world["times"].values() for t in times
    ):
        yield "tokens by instant are those of token times"
    drafts = steps.get("draft_tokens", [0] * n) if limits.num_speculative_tokens else [0] * n
    if limits.num_speculative_tokens and any(accepted[j] > drafts[j] for j in range(n)):
        yield "no more is accepted than drafted"
    batch = [steps["num_decodes"][j] + steps["prefill_tokens"][j] + drafts[j] for j in range(n)]
    if max(batch) > limits.max_num_batched_tokens:
        yield "no step exceeds the token budget"
    if any(steps["num_decodes"][j] + steps["num_prefills"][j] > limits.max_num_seqs
           for j in range(n)):  # fmt: skip
        yield "no step computes more requests than rows"
    if limits.max_num_resident is not None and max(steps["num_running"]) > limits.max_num_resident:
        yield "nobody holds memory without a seat"
    if max(steps["kv_allocated_tokens"]) > limits.num_blocks * limits.block_size:
        yield "no step holds more memory than there is"
    for part in ("kv_tokens", "kv_reserved_unused_tokens", "kv_fragmentation_tokens"):
        if min(steps[part]) < 0:
            yield f"{part} is never negative"
    for j in range(n):
        idle_ns, until_ns = (steps["end_ns"][j - 1] if j else 0), steps["start_ns"][j]
        there = [
            i for i in of
            if i not in rejected and rows["arrival_ns"][i] < until_ns
            and rows["finish_ns"][i] > idle_ns
        ]  # fmt: skip
        if idle_ns < until_ns and there and not world.get("may_wait"):
            yield f"idle from {idle_ns} to {until_ns} with {len(there)} requests"


class Told(HandLog):
    """A run with a table of requests, and gaps and counts that may be other than they were."""

    def __init__(self, world):
        columns = {name: np.array(column) for name, column in world["steps"].items()}
        super().__init__(
            {i: np.array(t, dtype=np.int64) for i, t in world["times"].items()},
            columns, world["preemptions"],
        )  # fmt: skip
        self._rows, self._world = world["requests"], world
        self.reject_reasons, self.num_steps = world["reasons"], len(world["steps"]["start_ns"])

    def requests(self):
        return {name: np.array(column) for name, column in self._rows.items()}

    def _or(self, name, key, found):
        if self._world[name] is None:
            return found
        values, counts = np.unique(self._world[name], return_counts=True)
        return {key: values, "count": counts}

    def token_gaps(self, ids=None):
        return self._or("gaps", "gap_ns", super().token_gaps(ids))

    def token_counts(self, ids=None):
        return self._or("counts", "time_ns", super().token_counts(ids))


def judged(world):
    """Return the words of the law that the check finds broken first, if there is one."""
    limits, may_wait = SimpleNamespace(**world["limits"]), world.get("may_wait", False)
    try:
        laws.check(Told(world), WORK, limits, may_wait)
    except AssertionError as error:
        return str(error)
    return None


def agrees(world):
    """Compare what the check says with the naive reading; say what that was."""
    first = next(faults(world), None)
    assert judged(world) == first
    return first


def cells(world):
    """Return where every number of the tables is."""
    tables = ("requests", "steps", "preemptions", "times")
    found = [
        (table, column, row)
        for table in tables
        for column, values in world[table].items()
        for row in range(len(values))
    ]
    limits = [name for name in world["limits"] if name != "num_speculative_tokens"]
    return found + [("limits", name, None) for name in limits]


def moved(world, *moves):
    """Return another run, of which some numbers are a little other."""
    other = deepcopy(world)
    for (table, column, row), by in moves:
        if row is not None:
            other[table][column][row] += by
        elif other[table][column] is not None:
            other[table][column] = max(other[table][column] + by, int(column.startswith("pipe")))
    return other


@pytest.mark.slow
@pytest.mark.parametrize("world", [WORLD, drafting()], ids=["plain", "drafting"])
def test_run_written_by_hand_is_lawful_and_any_number_off_by_little_breaks_the_law_of_it(world):
    assert agrees(world) is None
    found = Counter()
    for cell in cells(world):
        for by in (-1, 1, -2, 2, -100, 100, 1000):
            if cell[:2] == ("preemptions", "id") and by < -2:
                continue  # no request has such a number
            found[agrees(moved(world, (cell, by)))] += 1
            found[agrees({**moved(world, (cell, by)), "may_wait": True})] += 1
    for row in range(4):
        for status in range(5):
            other = deepcopy(world)
            other["requests"]["status"][row] = status
            found[agrees(other)] += 1
    assert found[None] > 50
    assert len(found) > 22, found


@pytest.mark.parametrize("seed", range(12))
def test_two_or_three_numbers_off_at_once_break_what_a_naive_reading_says(seed):
    """Also by the same: what one column gains another may lose."""
    draw = Random(seed)
    for _ in range(60):
        world = (WORLD, drafting())[draw.randrange(2)]
        known = [cell for cell in cells(world) if cell[:2] != ("requests", "id")]
        one = draw.choice(known)
        beside = [cell for cell in known if cell[0] == one[0]]
        by = draw.choice((-1, 1, -100, 100))
        moves = [(one, by), (draw.choice(beside), draw.choice((-by, by)))]
        if draw.randrange(3) == 0:
            moves.append((draw.choice(known), draw.choice((-1, 1))))
        moves = [move for move in moves if move[0][:2] != ("preemptions", "id") or move[1] > -3]
        agrees({**moved(world, *moves), "may_wait": draw.random() < 0.5})


TOKENS = [  # of request 7 the last, of request 2 the first and the middle one, as all tables say
    ([("times", 7, 1), ("requests", "last_token_ns", 3), ("requests", "finish_ns", 3)], None),
    ([("times", 7, 1), ("requests", "last_token_ns", 3)], "last_token_ns > finish_ns"),
    ([("times", 2, 0), ("requests", "first_token_ns", 0)], None),
    ([("times", 2, 0)], "the first token comes at first_token_ns"),
    ([("times", 5, 1)], "the last token comes at last_token_ns"),
    ([("times", 2, 1)], None),
]  # fmt: skip


@pytest.mark.parametrize(("where", "law"), TOKENS)
def test_token_may_come_a_nanosecond_later_if_all_tables_say_so(where, law):
    assert agrees(moved(WORLD, *((cell, 1) for cell in where))) == law


@pytest.mark.parametrize("place", range(2))
def test_two_tokens_of_one_instant_are_lawful_with_drafts_alone_wherever_they_are(place):
    for world, law in ((WORLD, "two tokens of a request at one instant"), (drafting(), None)):
        other = deepcopy(world)
        times = other["times"][2] = [100, 300, 300] if place else [100, 100, 300]
        other["gaps"] = [b - a for t in other["times"].values() for a, b in pairwise(t) if b > a]
        assert agrees(other) == law, times


@pytest.mark.parametrize(("table", "values", "law"), [
    ("gaps", [100, 100, 100, 300], None),
    ("gaps", [100, 100, 300], "gaps between tokens are those of token times"),
    ("gaps", [100, 100, 100, 301], "gaps between tokens are those of token times"),
    ("gaps", [100, 100, 100, 100, 300], "gaps between tokens are those of token times"),
    ("counts", [100, 200, 200, 200, 300, 300, 500], None),
    ("counts", [100, 200, 200, 300, 300, 500], "tokens by instant are those of token times"),
    ("counts", [100, 200, 200, 200, 300, 300, 501], "tokens by instant are those of token times"),
    ("counts", [100, 200, 200, 200, 300, 300, 500, 500],
     "tokens by instant are those of token times"),
])  # fmt: skip
def test_gaps_and_counts_are_those_of_the_times_to_the_last(table, values, law):
    assert agrees({**WORLD, table: values}) == law


@pytest.mark.parametrize("reasons", [{}, {2: ""}, {3: "", 2: ""}, {3: "", 7: ""}, {4: ""}, {3: ""}])
def test_reasons_are_of_those_that_were_rejected_and_of_nobody_else(reasons):
    agrees({**WORLD, "reasons": reasons})


@pytest.mark.parametrize("status", [0, 3])
def test_who_is_evicted_twice_and_never_resumes_is_refused(status):
    world = deepcopy(WORLD)
    world["requests"]["num_preemptions"][1] += 1
    world["steps"]["num_preempted"][0] += 1
    for name, value in (("id", 3), ("evicted_ns", 250), ("resumed_ns", -1)):
        world["preemptions"][name].append(value)
    assert agrees(world).startswith("evictions are as many as resumptions")
    world["preemptions"]["resumed_ns"][0] = 200
    assert agrees(world) is None
    world["preemptions"]["resumed_ns"][2] = 250
    assert agrees(world) is None
    world["preemptions"]["resumed_ns"][1] = -1
    world["requests"]["status"][3] = status
    assert agrees(world) is not None


def test_workload_with_one_request_more_or_fewer_is_not_that_of_the_run():
    rows = {key: column[:-1] for key, column in WORLD["requests"].items()}
    assert judged({**WORLD, "requests": rows}) == "each request leaves the engine exactly once"
    twice = {key: [*column, column[-1]] for key, column in WORLD["requests"].items()}
    assert judged({**WORLD, "requests": twice}) == "each request leaves the engine exactly once"


# -- where two runs differ ---------------------------------------------------------------------


def pair_of_logs(draw):
    """Return what two runs told: the same, but for a few numbers, or for how many they are."""

    def table(names, rows, first):
        return {
            name: [draw.choice((1.0, 2.0, float("nan"))) if name == "rate" else draw.randrange(9)
                   for _ in range(rows)]
            for name in names
        } | {first: list(range(3, 3 + rows))}  # fmt: skip

    one = {
        "steps": table(("end_ns", "rate", "num_waiting"), 4, "num_running"),
        "requests": table(("status", "rate", "finish_ns"), 4, "id"),
        "copies": table(("tier", "done_ns"), 3, "issued_ns"),
    }
    other = deepcopy(one)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        name = draw.choice(tuple(one))
        column = draw.choice([key for key in one[name] if key != "id"])
        other[name][column][draw.randrange(len(other[name][column]))] = draw.choice((9, 11))
    for log in (one, other):
        for name in log:
            if draw.randrange(4) == 0:
                at = draw.randrange(2)
                log[name] = {
                    key: column[1:] if at and name == "requests" else column[:-1]
                    for key, column in log[name].items()
                }
    return one, other


def as_log(told):
    columns = {
        name: {key: np.array(column) for key, column in table.items()}
        for name, table in told.items()
    }
    return SimpleNamespace(
        steps=lambda: columns["steps"], requests=lambda: columns["requests"],
        copies=SimpleNamespace(columns=lambda: columns["copies"]),
        num_steps=len(told["steps"]["end_ns"]),
    )  # fmt: skip


def differs(a, b):
    return a != b and not (a != a and b != b)


def said(value, column):
    return f"{np.array(column)[:1].dtype.type(value)}"


def first_difference(one, other):
    steps, others = one["steps"], other["steps"]
    for i, _ in enumerate(zip(steps["end_ns"], others["end_ns"], strict=False)):
        if any(differs(steps[name][i], others[name][i]) for name in steps):
            return f"step {i}: " + "; ".join(
                f"{name} {said(steps[name][i], steps[name])} here, "
                f"{said(others[name][i], others[name])} there"
                for name in steps
                if steps[name][i] != others[name][i]
            )
    if len(steps["end_ns"]) > len(others["end_ns"]):
        return f"step {len(others['end_ns'])}, which comes only here"
    rows, others = one["requests"], other["requests"]
    for name in rows:
        for i, number in enumerate(rows["id"]):
            if number in others["id"]:
                j = others["id"].index(number)
                if differs(rows[name][i], others[name][j]):
                    return (
                        f"request {number}: {name} {said(rows[name][i], rows[name])} here, "
                        f"{said(others[name][j], others[name])} there"
                    )
    mine, theirs = one["copies"], other["copies"]
    n = min(len(mine["tier"]), len(theirs["tier"]))
    for name in mine:
        for i in range(n):
            if mine[name][i] != theirs[name][i]:
                return f"copy {i}: {name} {mine[name][i]} here, {theirs[name][i]} there"
    return f"copy {n}, which comes only here" if len(mine["tier"]) > n else None


@pytest.mark.parametrize("seed", range(60))
def test_first_difference_of_two_runs_is_that_of_a_naive_reading(seed):
    for again in range(8):
        one, other = pair_of_logs(Random(f"{seed} {again}"))
        found = laws.difference(as_log(one), as_log(other), ("here", "there"))
        assert found == first_difference(one, other)


def test_every_number_of_a_run_is_in_its_signature():
    signed = laws.signature(Told(WORLD))
    assert signed == laws.signature(Told(deepcopy(WORLD)))
    for table, column, row in cells(WORLD):
        if table in ("requests", "steps", "times") and (table, column) != ("requests", "id"):
            assert laws.signature(Told(moved(WORLD, ((table, column, row), 1)))) != signed, column
    renamed = deepcopy(WORLD)
    renamed["requests"]["id"][0], renamed["times"][1] = 1, renamed["times"][2]
    assert laws.signature(Told(renamed)) != signed
    turned = {**WORLD, "requests": dict(reversed(WORLD["requests"].items()))}
    turned["steps"] = dict(reversed(WORLD["steps"].items()))
    assert laws.signature(Told(turned)) == signed, "in whatever order the columns are"
