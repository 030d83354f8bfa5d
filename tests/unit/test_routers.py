import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.routers import registry, step_times
from schedlab.policies.routers.block_index import BlockIndex
from schedlab.policies.routers.prefix_tree import PrefixTree
from schedlab.policies.routers.router import Router
from schedlab.policies.speculation.draft_length import DraftLength
from schedlab.sim.drive.offer import Offer, column, place_of_least
from schedlab.sim.drive.router import chosen, tell_gone
from schedlab.sim.errors import PolicyError, PolicyLied, SpecError
from schedlab.sim.request import Request, Slo
from schedlab.testing import LawBroken, check_router, fleet_cases
from tests.laws import arrival

CASES = list(fleet_cases(num_cases=2))
DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass
class Told:
    """What an engine tells of itself."""

    index: int = 0
    num_in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    predicted_tokens_in_flight: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    backlog_tokens: int = 0
    used_blocks: int = 0
    num_blocks: int = 100
    block_size: int = 16
    cached: int = 0
    first_waiting_blocks: int = 0
    waiting_blocks: int = 0
    num_urgent: int = 0

    def cached_tokens(self, request):
        return self.cached

    def estimate_step_ns(self, shape):
        # A millisecond a decode, and one for 100 tokens of prompts.
        return round(1e6 * (shape.num_decodes + sum(n for n, _ in shape.chunks) / 100))


def engines(**columns):
    rows = zip(*columns.values(), strict=True)
    return [Told(index=i, **dict(zip(columns, row, strict=True))) for i, row in enumerate(rows)]


def request(number=0, prompt=100, **keys):
    return arrival(number, 0, prompt, 10, **keys).request


def needs(name):
    return {"predicted_tokens": 10.0} if registry.router_class(name).needs_prediction else {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *registry.names(),
        pytest.param(lambda: registry.make("prefix_aware", precise=True), id="precise prefixes"),
        pytest.param(lambda: registry.make("llm_d", precise=True), id="precise llm-d"),
        pytest.param(lambda: registry.make("consistent_hashing", load_factor=None), id="hashing"),
    ],
)
def test_router_keeps_every_law(name):
    check_router(name, cases=CASES)


class Answers(Router):
    """Answers what a test gives it."""

    def __init__(self, answer):
        self.answer = answer

    def route(self, request, engines):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def engine_is_gone(self, index):
        raise self.answer


REQUEST = Request(7, 0, 1, max_tokens=2)
STATES = [SimpleNamespace(index=index) for index in (3, 5)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None, which is no whole number"),
        (True, "returned True, which is no whole number"),
        (1.0, r"returned 1\.0, which is no whole number"),
        (np.array([1]), r"returned array\(\[1\]\), which is no whole number"),
        (2, "returned 2, and there are engines 0 to 1"),
        (np.int64(-1), "returned -1, and there are engines 0 to 1"),
        (ValueError("boo"), r"raised ValueError: boo \(test_routers\.py:\d+\)"),
        (SystemExit(3), r"raised SystemExit: 3 \(test_routers\.py:\d+\)"),
    ],
    ids=repr,
)
def test_answer_of_a_router_that_names_no_engine_is_its_fault(answer, message):
    with pytest.raises(PolicyError, match=rf"router Answers, request 7: route\(\) {message}"):
        chosen(Answers(answer), REQUEST, STATES)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_router_may_name_an_engine_by_a_whole_number_of_any_kind(kind):
    assert chosen(Answers(kind(1)), REQUEST, STATES) == 5


@pytest.mark.parametrize("error", [ValueError("boo"), SystemExit(3)], ids=repr)
def test_router_that_fails_when_an_engine_dies_is_told_by_name_and_line(error):
    said = (
        rf"engine_is_gone\(\) of engine 4 raised {type(error).__name__}: .* \(test_routers\.py:\d"
    )
    with pytest.raises(PolicyError, match=f"router Answers: {said}"):
        tell_gone(Answers(error), 4)


class Writes(Router):
    def route(self, request, engines):
        request.prompt_tokens = 1
        return 0


class Writer(DraftLength):
    def choose(self, decoding):
        for state in decoding.requests:
            state.request.priority = 3
        return [1] * len(decoding.requests)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"cluster": {"count": 2, "router": f"{__name__}:Writes"}}, "prompt_tokens from 100 to 1"),
        (
            {
                "engine": {
                    "speculation": {
                        "method": "ngram",
                        "num_speculative_tokens": 2,
                        "acceptance": 0.5,
                        "draft_length": f"{__name__}:Writer",
                    }
                }
            },
            "priority from 0 to 3",
        ),
    ],
)
def test_class_that_writes_to_a_request_ends_the_run_by_name(parts, said):
    workload = {"trace": "fixed", "num_requests": 4, "prompt_tokens": 100}
    with pytest.raises(PolicyLied, match=rf"{__name__}:Write.: request 0 was changed: {said}"):
        run(make_spec({"workload": workload, **parts}))


class Forgetful(Router):
    def route(self, request, engines):
        return int(np.random.random() * len(engines))  # noqa: NPY002 - the fault


class Peeping(Router):
    looks_at_engines = False

    def route(self, request, engines):
        return self.least([engine.num_in_flight for engine in engines])


class Outside(Router):
    def route(self, request, engines):
        return engines[-1].index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "law"),
    [
        (Forgetful, "draws_from_its_stream_alone"),
        (Peeping, "looks_only_if_it_says_so"),
        (Outside, "minds_the_index_not_the_place"),
    ],
)
def test_router_that_breaks_a_law_is_caught(router, law):
    with pytest.raises(LawBroken) as caught:
        check_router(router)
    assert caught.value.law == law


def test_vllm_kv_among_equals_begins_one_further_with_each_request():
    router = registry.make("vllm_kv")
    three = engines(num_in_flight=(1, 1, 1))
    assert [router.route(request(i), three) for i in range(4)] == [0, 1, 2, 0]
    # Not behind the last that was chosen: the second was, and the third is looked at first.
    assert router.route(request(4), engines(num_in_flight=(1, 0, 1))) == 1
    assert router.route(request(5), three) == 2
    assert router.route(request(6), engines(num_in_flight=(0, 1, 1))) == 0
    assert router.route(request(7), three) == 1


@pytest.mark.parametrize(
    ("name", "columns", "chosen"),
    [
        ("least_outstanding_requests", {"num_in_flight": (3, 1, 2)}, 1),
        (
            "least_outstanding_tokens",
            {"prompt_tokens_in_flight": (90, 50, 40), "predicted_tokens_in_flight": (0, 0, 30)},
            1,
        ),
        ("least_kv", {"used_blocks": (50, 60, 30), "num_blocks": (100, 200, 50)}, 1),
        ("least_kv", {"used_blocks": (50, 50), "num_waiting": (2, 1)}, 1),
        ("jsq", {"num_waiting": (0, 2), "num_running": (3, 0)}, 1),
        ("vllm", {"num_waiting": (0, 2), "num_running": (5, 0)}, 0),
        ("vllm_kv", {"num_in_flight": (5, 4), "num_running": (5, 6)}, 0),
        ("vllm_kv", {"num_in_flight": (7, 5), "num_waiting": (4, 6), "num_running": (2, 0)}, 1),
        # Each third of the memory above a half lets those that wait weigh one more: 8 and 7 + 3.
        (
            "vllm_kv",
            {"num_in_flight": (8, 7), "num_waiting": (3, 3), "used_blocks": (50, 67)},
            0,
        ),
        (
            "vllm_kv",
            {"num_in_flight": (8, 7), "num_waiting": (3, 3), "used_blocks": (50, 55)},
            1,
        ),
        # Three quarters of both are used: 6 + 1.5 and 5 + 4 x 1.5.
        (
            "vllm_kv",
            {"num_in_flight": (6, 5), "num_waiting": (1, 4), "used_blocks": (75, 75)},
            0,
        ),
        ("vllm_kv", {"num_in_flight": (2, 1), "used_blocks": (0, 100)}, 1),  # nobody waits
        ("predicted_length", {"predicted_tokens_in_flight": (30.0, 20.0)}, 1),
        ("power_of_d", {"num_in_flight": (0, 0), "num_waiting": (0, 0)}, None),
        ("llm_d", {"num_waiting": (4, 0), "used_blocks": (0, 50)}, 1),  # 2 against 1
        ("llm_d", {"num_waiting": (0, 0), "used_blocks": (20, 10)}, 1),
        # 0, 1 and 2 of the span of 2 queues, though all are long: with 80, 40 and 0 of 100 blocks
        # and weights of 2 each it is 1.6, 1.8 and 2.
        ("llm_d", {"num_waiting": (90, 91, 92), "used_blocks": (80, 40, 0)}, 0),
    ],
)
def test_router_takes_the_least_of_what_it_goes_by(name, columns, chosen):
    got = registry.make(name).route(request(**needs(name)), engines(**columns))
    assert got in ({0, 1} if chosen is None else {chosen})


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        # A prompt of 100 tokens: 100 * 1 where nobody is, 36 * 2 and 36 * 3 where 64 are cached.
        ({"num_running": (0, 1), "cached": (0, 64)}, 1),
        ({"num_running": (0, 2), "cached": (0, 64)}, 0),
        ({"num_running": (0, 0), "cached": (48, 64)}, 1),
        ({"num_running": (1, 1), "cached": (0, 0), "backlog_tokens": (1, 0)}, 1),
        ({"num_running": (3, 0), "num_waiting": (0, 1), "backlog_tokens": (0, 110)}, 0),  # 400, 420
        ({"num_running": (0, 1), "cached": (0, 50)}, 1),  # 100 each: the most that is cached
    ],
)
def test_lmetric_multiplies_what_is_to_compute_by_requests_with_this_one(columns, chosen):
    assert registry.make("lmetric").route(request(), engines(**columns)) == chosen
    swapped = {name: values[::-1] for name, values in columns.items()}
    assert registry.make("lmetric").route(request(), engines(**swapped)) == 1 - chosen


@pytest.mark.parametrize(
    ("overlap_weight", "columns", "chosen"),
    [
        # A prompt of 6.25 blocks, of which 4 are cached: 6.25, and 2.25 and what is used there.
        (1, {"cached": (0, 64), "used_blocks": (0, 3)}, 1),
        (1, {"cached": (0, 64), "used_blocks": (0, 5)}, 0),
        (1, {"cached": (0, 64), "used_blocks": (1, 3), "waiting_blocks": (0, 3)}, 0),
        (2, {"cached": (0, 64), "used_blocks": (0, 7)}, 1),  # 12.5, and 4.5 + 7
        (0, {"cached": (0, 64), "used_blocks": (0, 1)}, 0),
        (1, {"backlog_tokens": (160, 0), "used_blocks": (0, 9)}, 1),  # 10 blocks more
        (1, {"backlog_tokens": (160, 0), "used_blocks": (0, 11)}, 0),
        (1, {"num_blocks": (100, 10), "used_blocks": (9, 8), "num_waiting": (0, 9)}, 1),
    ],
)
def test_dynamo_adds_blocks_of_prompts_and_of_decodes(overlap_weight, columns, chosen):
    router = registry.make("dynamo", overlap_weight=overlap_weight)
    assert router.route(request(), engines(**columns)) == chosen
    swapped = {name: values[::-1] for name, values in columns.items()}
    assert router.route(request(), engines(**swapped)) == 1 - chosen


@pytest.mark.parametrize(
    ("temperature", "used_blocks", "shares"),
    [
        (0.0, (4, 3, 3), (0, 0.5, 0.5)),
        (0.0, (3, 3, 3), (1 / 3, 1 / 3, 1 / 3)),
        (1.0, (3, 3, 3), (1 / 3, 1 / 3, 1 / 3)),
        (1.0, (3, 5, 7), (0.506, 0.307, 0.186)),  # 1, exp(-1/2) and exp(-1), over their sum
        (0.5, (3, 5, 7), (0.665, 0.245, 0.090)),
        (1.0, (30, 50, 70), (0.506, 0.307, 0.186)),  # the span does not matter
        (1.0, (10_007, 10_005, 10_003), (0.186, 0.307, 0.506)),  # nor what all of them have
        (0.1, (10_010, 10_000, 10_009), (0, 1, 0)),
        (0.001, (3, 5, 7), (1, 0, 0)),
    ],
)
def test_dynamo_draws_among_equals_and_by_temperature(temperature, used_blocks, shares):
    router = registry.make("dynamo", temperature=temperature)
    three = engines(used_blocks=used_blocks)
    chosen = [router.route(request(i), three) for i in range(3000)]
    assert [chosen.count(place) / 3000 for place in range(3)] == pytest.approx(shares, abs=0.03)


def test_round_robin_takes_turns():
    router = registry.make("round_robin")
    assert [router.route(request(i), engines(num_in_flight=(9, 0, 0))) for i in range(5)] == [
        0, 1, 2, 0, 1,
    ]  # fmt: skip


def test_two_choices_are_two_different_engines_and_the_lesser_one():
    router = registry.make("power_of_d", d=2)
    chosen = [router.route(request(i), engines(num_in_flight=(2, 1, 0))) for i in range(300)]
    assert chosen.count(0) == 0, "of two different ones the most loaded is never the lesser"
    assert 60 < chosen.count(1) < 140, "a third of the pairs"


def test_session_stays_where_it_was_and_new_ones_go_to_the_fewest():
    router = registry.make("session_affinity")
    first = router.route(request(session="a"), engines(num_in_flight=(1, 0)))
    assert first == 1
    busy = engines(num_in_flight=(0, 9))
    assert router.route(request(session="a"), busy) == 1
    assert router.route(request(session="b"), busy) == 0
    assert router.route(request(), busy) == 0
    assert router.route(request(session="a"), busy[:1]) == 0, "its engine is gone"
    router = registry.make("session_affinity")
    assert router.route(request(session="a"), engines(num_in_flight=(1, 9, 0))) == 2
    later = engines(num_in_flight=(1, 0, 9))[1:]
    assert router.route(request(session="a"), later) == 1, "an engine is more than its place"
    assert router.route(request(session="c"), later) == 0
    assert router.route(request(session="c"), engines(num_in_flight=(0, 9, 9))) == 1


def test_autellix_keeps_long_prompts_with_their_session_and_spreads_short_ones():
    router = registry.make("autellix")
    busy = engines(num_in_flight=(3, 2, 0))
    assert router.route(request(session="a", prompt=2048), busy) == 2
    moved = engines(num_in_flight=(0, 2, 5))
    long = request(session="a", prompt=2049)
    assert router.route(long, moved) == 0, "a short call gives its session no engine"
    assert router.route(long, busy) == 0, "the first long one does"
    assert router.route(request(session="a", prompt=2048), busy) == 2
    assert router.route(long, busy) == 0, "which a short one does not change"
    assert router.route(request(session="b", prompt=2049), busy) == 2
    assert router.route(request(prompt=2049), busy) == 2, "without a session"
    assert router.route(long, busy[1:]) == 1, "its engine is gone"
    assert router.route(long, moved) == 2, "and the new one is kept by number, not by place"


def test_autellix_with_no_prompt_short_is_sticky():
    router = registry.make("autellix", max_small_tokens=0)
    assert router.route(request(session="a", prompt=1), engines(num_in_flight=(1, 0))) == 1
    assert router.route(request(session="a", prompt=1), engines(num_in_flight=(0, 9))) == 1


def test_consistent_hashing_moves_few_keys_and_bounds_loads():
    router = registry.make("consistent_hashing", load_factor=None)
    five = [Told(index=i) for i in range(5)]
    keys = [f"user {i}" for i in range(500)]

    def places(offered):
        return [offered[router.route(request(session=k), offered)].index for k in keys]

    before, after = places(five), places(five[:4])
    counts = np.bincount(before, minlength=5)
    assert counts.min() > 50
    assert all(a == b for a, b in zip(before, after, strict=True) if a < 4)
    bounded = registry.make("consistent_hashing", load_factor=1.25)
    home = before[0]
    full = [Told(index=i, num_in_flight=3 if i == home else 1) for i in range(5)]
    # (7 + 1) / 5 * 1.25 = 2: its own engine has more.
    assert bounded.route(request(session=keys[0]), full) != home
    even = [Told(index=i, num_in_flight=1) for i in range(5)]
    assert bounded.route(request(session=keys[0]), even) == home


IDS = tuple(range(10))


def test_prefix_goes_where_it_was_sent_unless_little_of_it_is_known():
    router = registry.make("prefix_aware")
    two = engines(num_in_flight=(0, 0))
    long = request(prompt=160, prefix_hash_ids=IDS)
    assert router.route(long, two) == 0
    assert router.route(long, engines(num_in_flight=(9, 0))) == 0, "not unbalanced yet"
    little = request(prompt=160, prefix_hash_ids=(*IDS[:5], *range(50, 55)))
    assert router.route(little, two) == 1, "80 of 160 tokens are no more than half"
    more = request(prompt=160, prefix_hash_ids=(*IDS[:6], *range(70, 74)))
    assert router.route(more, two) == 0


@pytest.mark.parametrize(
    ("knobs", "loads", "chosen"),
    [
        ({}, (32, 0), 0),
        ({}, (33, 0), 1),
        ({}, (400, 367), 1),  # 1.0001 times is next to nothing
        ({"balance_abs": 64, "balance_rel": 1.5}, (64, 0), 0),
        ({"balance_abs": 64, "balance_rel": 1.5}, (65, 0), 1),
        ({"balance_abs": 64, "balance_rel": 1.5}, (200, 134), 0),
        ({"balance_abs": 64, "balance_rel": 1.5}, (200, 130), 1),
    ],
)
def test_prefix_counts_only_while_engines_are_balanced(knobs, loads, chosen):
    router = registry.make("prefix_aware", **knobs)
    long = request(prompt=160, prefix_hash_ids=IDS)
    router.route(long, engines(num_in_flight=(0, 0)))
    assert router.route(long, engines(num_in_flight=loads)) == chosen


def test_prefix_that_several_were_sent_goes_to_the_first_of_them_however_loaded():
    router = registry.make("prefix_aware", balance_abs=9)
    ends = [(*IDS[:6], *range(n, n + 4)) for n in (50, 60)]
    asked = [request(prompt=160, prefix_hash_ids=ids) for ids in ends]
    whole, other = asked
    # The other end goes to engine 1 first, as 0 is overloaded; then the first one, as 2 and 1 are.
    assert router.route(whole, engines(num_in_flight=(10, 10, 0))) == 2
    assert router.route(other, engines(num_in_flight=(0, 9, 10))) == 0
    assert router.route(whole, engines(num_in_flight=(5, 0, 9))) == 2
    assert router.route(other, engines(num_in_flight=(9, 9, 0))) == 0
    assert router.route(whole, engines(num_in_flight=(0, 9, 10))) == 0, "it is overloaded"
    both = engines(num_in_flight=(0, 5, 9))
    assert router.route(whole, both) == 2, "both were sent it, 2 before"
    third = request(prompt=160, prefix_hash_ids=(*IDS[:6], *range(70, 74)))
    assert router.route(third, both) == 2, "the beginning as well"
    assert router.route(other, both) == 0, "of this only 0 knows the end"
    assert router.route(whole, both[:2]) == 0
    router.engine_is_gone(2)
    assert router.route(whole, both) == 0


@pytest.mark.parametrize(
    ("low_match", "sent", "loads", "chosen"),
    [
        ("smallest_tree", (0, 9), (0, 1), 1),
        ("least_loaded", (0, 9), (0, 1), 0),
        ("smallest_tree", (9, 0), (0, 1), 0),
        ("smallest_tree", (9, 0), (1, 0), 0),
        ("least_loaded", (9, 0), (1, 0), 1),
    ],
)
def test_prompt_that_nobody_knows_goes_by_the_rule_for_low_matches(low_match, sent, loads, chosen):
    router = registry.make("prefix_aware", low_match=low_match)
    router.route(request(prompt=160, prefix_hash_ids=IDS), engines(num_in_flight=sent))
    new = request(prompt=160, prefix_hash_ids=tuple(range(50, 60)))
    assert router.route(new, engines(num_in_flight=loads)) == chosen


def test_prefixes_that_were_sent_are_remembered_beyond_the_memory_of_an_engine():
    ids = (tuple(range(n, n + 10)) for n in (0, 20))
    first, second = (request(prompt=160, prefix_hash_ids=one) for one in ids)
    two = [Told(index=i, num_blocks=12) for i in range(2)]
    for max_tree_tokens, place in ((2**22, 0), (200, 1), (None, 1)):
        router = registry.make("prefix_aware", max_tree_tokens=max_tree_tokens)
        for sent in (first, second):
            router.route(sent, two[:1])
        # Of twelve blocks two are left for the first prompt.
        assert router.route(first, two) == place


@pytest.mark.parametrize("name", ["prefix_aware", "llm_d"])
def test_router_forgets_what_it_sent_to_an_engine_that_is_gone(name):
    router = registry.make(name)
    long = request(prompt=160, prefix_hash_ids=IDS)
    router.route(long, engines(num_in_flight=(1, 0), num_waiting=(9, 0)))
    assert router.route(long, engines(num_in_flight=(0, 1))) == 1, "its prefix is known there"
    router.engine_is_gone(0)
    assert router.route(long, engines(num_in_flight=(0, 1))) == 1, "another one was lost"
    router.engine_is_gone(1)
    assert router.route(long, engines(num_in_flight=(0, 1), num_waiting=(0, 1))) == 0


@pytest.mark.parametrize("name", ["prefix_aware", "llm_d"])
@pytest.mark.parametrize("precise", [False, True])
def test_router_by_prefixes_says_that_it_asks_caches_only_where_it_is_precise(name, precise):
    router = registry.make(name, precise=precise)
    assert router.looks_at_caches is precise
    asked = []

    class Asked(Told):
        def cached_tokens(self, request):
            asked.append(self.index)
            return 20 * self.index

    blocks = request(prompt=64, prefix_hash_ids=(1, 2, 3, 4))
    place = router.route(blocks, [Asked(index=i) for i in range(3)])
    assert sorted(set(asked)) == ([0, 1, 2] if precise else [])
    assert place == (2 if precise else 0)


def test_precise_router_asks_the_caches():
    router = registry.make("prefix_aware", precise=True)
    assert router.route(request(), engines(cached=(0, 64))) == 1
    assert router.route(request(), engines(cached=(0, 48), used_blocks=(1, 2))) == 0
    assert router.route(request(), engines(cached=(64, 64), num_in_flight=(1, 0))) == 1


@pytest.mark.parametrize(
    ("max_prefix_blocks", "prompt", "num_blocks", "num_shared", "place"),
    [
        # One queue is longer, which is 2 of 7: the share of the prompt outweighs it from 2/3 on.
        (2, 160, 10, 2, 0),  # 2 of 2: what is behind is not looked at
        (4, 160, 10, 2, 1),  # 2 of 4
        (None, 160, 10, 2, 1),
        (256, 160, 10, 7, 0),
        (256, 160, 10, 6, 1),
        (None, 16 * 400, 400, 260, 1),
        (256, 16 * 400, 400, 260, 0),
        (256, 47, 2, 2, 1),  # 2 of 3, the last one not full: even, and in turn
        (256, 48, 3, 3, 0),
        (256, 20, 1, 1, 1),
        (256, 15, 0, 0, 1),  # no block
    ],
)
def test_llm_d_scores_the_share_of_the_leading_blocks_of_a_prompt(
    max_prefix_blocks, prompt, num_blocks, num_shared, place
):
    router = registry.make("llm_d", max_prefix_blocks=max_prefix_blocks)
    sent, large = tuple(range(num_blocks)), (500, 500)
    first = request(prompt=prompt, prefix_hash_ids=sent)
    assert router.route(first, engines(num_waiting=(0, 0), num_blocks=large)) == 0
    ids = (*sent[:num_shared], *range(1000, 1000 + num_blocks - num_shared))
    last = request(prompt=prompt, prefix_hash_ids=ids)
    assert router.route(last, engines(num_waiting=(1, 0), num_blocks=large)) == place


def test_llm_d_forgets_the_beginning_of_the_oldest_prompt_and_with_it_all_of_it():
    # An engine of 12 blocks is sent 10 and 4: the first two are forgotten, and the other 8 count
    # only where another engine was sent the first two.
    first, other = tuple(range(1, 11)), (20, 21, 22, 23)
    index = BlockIndex()
    index.add(0, first, 12)
    index.add(0, other, 12)
    assert index.tokens(first, [0, 1], [16, 16]) == [0, 0]
    assert index.tokens(other, [0, 1], [16, 16]) == [64, 0]
    index.add(1, first[:5], 12)
    assert index.tokens(first, [0, 1], [16, 4]) == [16 * 8, 4 * 5]
    index.add(0, first, 12)  # the last eight are used again, the first two come anew
    assert index.tokens(first, [0, 1], [16, 16]) == [160, 80]
    assert index.tokens(other, [0, 1], [16, 16]) == [0, 0]
    index.forget(0)
    assert index.tokens(first, [0, 1], [16, 16]) == [0, 80]


def test_llm_d_forgets_first_what_was_sent_again_longest_ago():
    index, prompts = BlockIndex(), [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    for sent in (0, 1, 0, 2):  # of two prompts that fit the first is sent again before a third
        index.add(0, prompts[sent], 6)
    assert [index.tokens(prompt, [0], [16]) for prompt in prompts] == [[48], [0], [48]]


def test_llm_d_remembers_as_many_blocks_as_an_engine_has():
    prompt = request(prompt=160, prefix_hash_ids=tuple(range(10)))
    for num_blocks, place in ((13, 1), (14, 0)):
        router = registry.make("llm_d", queue=0.0, kv=0.0)
        two = [Told(index=i, num_blocks=num_blocks) for i in range(2)]
        router.route(prompt, two[:1])
        router.route(request(prompt=64, prefix_hash_ids=(50, 51, 52, 53)), two[:1])
        router.turn = 1  # of equals the second would take it
        assert router.route(prompt, two) == place


def test_tree_forgets_the_ends_of_the_oldest_prompts_of_each_engine():
    tree = PrefixTree()
    for engine in (0, 65):
        tree.add(engine, (1, 2, 3, 4), 6)
        tree.add(engine, (1, 2, 8, 9), 6)
    assert tree.match((1, 2, 3, 4)) == tree.match((1, 2, 8, 9)) == {0: 4, 65: 4}
    tree.add(0, (20, 21), 6)
    assert tree.match((1, 2, 3, 4)) == {0: 2, 65: 4}
    assert tree.match((1, 2, 8, 9)) == {0: 4, 65: 4}
    tree.forget(65)
    assert (tree.match((1, 2, 3, 4)), tree.match((7,)), tree.match(())) == ({0: 2}, {}, {})
    assert tree.sizes([7, 0]) == [0, 6]
    assert tree.tokens((1, 2, 3, 4), [7, 0], [16, 4]) == [0, 8]


def test_tree_remembers_what_a_list_of_blocks_by_last_use_does():
    draw = random.Random(0)
    for _ in range(30):
        tree, used, most = PrefixTree(), {0: [], 7: []}, draw.choice((1, 4, 12))
        texts = ["".join(draw.choices("ab", k=draw.randrange(7))) for _ in range(8)]
        for _ in range(40):
            engine, text = draw.choice((0, 7)), draw.choice(texts)
            names = [hash(text[: i + 1]) for i in range(len(text))]  # of all up to there
            if draw.random() < 0.05:
                tree.forget(engine)
                used[engine].clear()
            tree.add(engine, names, most)
            used[engine] = [n for n in used[engine] if n not in names] + names[::-1]
            used[engine] = used[engine][-most:]
            found = {e: sum(n in blocks for n in names) for e, blocks in used.items()}
            assert tree.match(names) == {e: n for e, n in found.items() if n}
            assert tree.sizes([0, 7]) == [len(used[0]), len(used[7])]


def test_tree_says_what_it_would_forget_before_it_does():
    draw = random.Random(1)
    for _ in range(30):
        tree, most = PrefixTree(), draw.choice((3, 6, 12))
        held = set()
        for _ in range(40):
            text = "".join(draw.choices("ab", k=draw.randrange(1, 7)))
            names = [hash(text[: i + 1]) for i in range(len(text))][:most]
            num_over = len(held | set(names)) - most
            pieces = tree.oldest(0, num_over, names)
            told = {name for ids, start, end in pieces for name in ids[start:end]}
            tree.add(0, names, most)
            assert told == {n for n in held if n not in names and not _knows(tree, n)}
            assert len(told) == max(num_over, 0)
            held = (held | set(names)) - told


def _knows(tree, name):
    nodes = [tree._root]
    for node in nodes:
        nodes += node.next.values()
    ends = ((node, node.last[0].end) for node in nodes if 0 in node.last)
    return any(name in node.ids[node.start : min(node.end, end)] for node, end in ends)


PREBLE_IDS = tuple(range(6))  # of 100 tokens 96


def preble_request(ids=PREBLE_IDS, second=0.0, prompt=100, max_tokens=10, **keys):
    return replace(
        request(prompt=prompt, prefix_hash_ids=ids, **keys),
        arrival_ns=round(second * 1e9),
        max_tokens=max_tokens,
    )


@pytest.mark.parametrize(
    ("num_shared", "prompt", "place"), [(4, 100, 0), (4, 127, 0), (4, 128, 1), (3, 100, 1)]
)
def test_preble_exploits_what_is_longer_than_the_rest_and_else_explores(num_shared, prompt, place):
    router = registry.make("preble")
    two = engines(num_running=(0, 0))
    assert router.route(preble_request(), two) == 0
    ids = (*PREBLE_IDS[:num_shared], *range(100, 106 - num_shared))
    assert router.route(preble_request(ids, prompt=prompt), two) == place


def test_preble_weighs_prompts_and_answers_of_its_window_and_this_prompt():
    two = engines(num_running=(0, 4))
    # A millisecond for 100 tokens of prompt or one of an answer, in a batch of any size.
    router = registry.make("preble")
    assert router.route(preble_request((), max_tokens=5), two) == 0  # 6 ms
    assert router.route(preble_request((), prompt=300, max_tokens=5), two) == 1  # 8 ms
    assert router.route(preble_request((), max_tokens=5), two) == 0  # 6 + 1 below 8 + 1, now 12 ms
    assert router.route(preble_request((), max_tokens=90, predicted_tokens=1), two) == 1  # 10 ms
    assert router.route(preble_request((), max_tokens=5), two) == 1  # 16 ms
    assert router.route(preble_request((), second=180), two) == 0
    # All but the last are out of the window: 11 ms there, nothing on the other.
    assert router.route(preble_request((), second=180.5), two) == 1
    short = registry.make("preble", window_s=1)
    assert [short.route(preble_request((), second=2 * i), two) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("num_blocks", "place"), [(12, 0), (8, 0), (7, 1), (6, 1)])
def test_preble_pays_for_what_it_evicts(num_blocks, place):
    router = registry.make("preble")
    two = engines(num_blocks=(num_blocks, 60))
    hot = preble_request(max_tokens=1)
    assert [router.route(hot, two) for _ in range(3)] == [0] * 3  # 3 ms, and 1.08 for prompts
    assert router.route(preble_request((), prompt=380, max_tokens=1), two) == 1  # 4.8 ms
    # What all three had is evicted for another: 4.08 ms and 0.16 a block, or 4.8.
    assert router.route(preble_request(tuple(range(50, 56))), two) == place


@pytest.mark.parametrize(("ids", "prompt", "place"), [((), 740, 0), (PREBLE_IDS, 836, 1)])
def test_preble_weighs_what_it_evicts_by_the_share_of_requests_that_had_it(ids, prompt, place):
    router = registry.make("preble")
    two = engines(num_blocks=(6, 60))
    assert router.route(preble_request(max_tokens=1), two) == 0  # 2 ms
    assert router.route(preble_request((), prompt=1000, max_tokens=1), two) == 1  # 11 ms
    assert router.route(preble_request(ids, prompt=prompt, max_tokens=1), two) == 0  # now 10.4
    # To compute again what is evicted takes 0.96 ms; one of two requests had it, or both.
    assert router.route(preble_request(tuple(range(50, 56))), two) == place


def test_preble_moves_requests_off_the_most_loaded_engine_once_it_has_seen_enough():
    two = engines(num_running=(0, 0))
    router = registry.make("preble", min_requests=2)
    for _ in range(4):
        assert router.route(preble_request(), two) == 0
    # The fifth: 4 times 10 ms on one, nothing on the other, which then has 11 and then 21.
    assert router.route(preble_request(), two) == 1
    assert router.route(preble_request(), two) == 1
    assert router.route(preble_request(), two) == 1, "the cheaper of two that hold it"
    patient = registry.make("preble", min_requests=2, balance_ratio=1e9)
    assert [patient.route(preble_request(), two) for _ in range(4)] == [0] * 4
    # Nothing at all is less than any share.
    assert [patient.route(preble_request(), two) for _ in range(2)] == [1, 1]


def test_preble_copies_a_prefix_whose_first_tokens_take_twice_as_long():
    def run(later_backlog_tokens, later=100):
        router = registry.make("preble", min_requests=0, balance_ratio=1e9)
        two = engines(backlog_tokens=(100, 100))
        other = preble_request((), second=1, max_tokens=1)
        router.route(preble_request(second=0, max_tokens=1), two)
        assert router.route(other, two) == 1  # so that nothing is moved for balance
        assert router.route(preble_request(second=2, max_tokens=1), two) == 0
        busy = engines(backlog_tokens=(later_backlog_tokens, 100))
        long = preble_request(second=later, max_tokens=1000)
        assert router.route(long, busy) == 0  # the later half of the window has one now
        assert router.route(preble_request(second=later + 1, max_tokens=1), busy) == 0
        return router.route(preble_request(second=later + 2, max_tokens=1), busy)

    # First tokens: (100 + 4) / 100 ms in the earlier half, and twice that in the later one.
    assert run(204) == 1
    assert run(203) == 0
    assert run(204, later=80) == 0, "all is in the later half"


def test_preble_forgets_an_engine_that_is_gone():
    router = registry.make("preble")
    two = engines(num_running=(0, 0))
    assert router.route(preble_request(), two) == 0
    router.engine_is_gone(0)
    assert router.route(preble_request(max_tokens=20), two) == 0, "no load, and no prefix"
    assert router.route(preble_request(), two) == 0, "which it has now"
    assert router.route(preble_request(()), two) == 1
    assert router.route(preble_request((), second=1000), two) == 0


def test_slo_aware_packs_where_targets_hold_and_else_takes_the_soonest():
    router = registry.make("slo_aware", margin=1.0)
    three = engines(backlog_tokens=(100, 500, 3000), num_in_flight=(1, 2, 3))
    assert router.route(request(slo=Slo(ttft_ms=10)), three) == 1
    assert router.route(request(slo=Slo(ttft_ms=6)), three) == 1, "a target that is just held"
    assert router.route(request(slo=Slo(ttft_ms=5.99)), three) == 0
    assert router.route(request(slo=Slo(ttft_ms=5)), three) == 0
    assert router.route(request(slo=Slo(ttft_ms=1)), three) == 0, "none holds it"
    decoding = engines(num_running=(4, 9), num_in_flight=(4, 9))
    assert router.route(request(slo=Slo(tpot_ms=9)), decoding) == 0
    assert router.route(request(slo=Slo(tpot_ms=10)), decoding) == 1
    assert router.route(request(), three) == 0


@pytest.mark.parametrize(
    ("num_waiting", "backlog", "num_prompts"),
    [(0, 0, 1), (1, 3_100, 2), (2, 3_100, 3), (30, 3_100, 31), (31, 3_100, 32), (40, 3_100, 32)],
)
def test_slo_aware_expects_a_first_token_behind_prompts_of_one_length(
    num_waiting, backlog, num_prompts
):
    asked = []

    class Asked(Told):
        def estimate_step_ns(self, shape):
            asked.append(shape)
            return super().estimate_step_ns(shape)

    engine = Asked(num_waiting=num_waiting, backlog_tokens=backlog, num_running=2)
    found_ms = step_times.first_token_ms(engine, 100)
    length = -(-(backlog + 100) // num_prompts)
    assert asked[0].chunks == ((length, 0),) * num_prompts
    assert (asked[0].num_decodes, asked[0].rows_sampled) == (2, 2 + num_prompts)
    assert found_ms == pytest.approx(2 + length * num_prompts / 100)


@pytest.mark.parametrize(
    ("headroom", "columns", "chosen"),
    [
        # 100 blocks each: free are 80 less the headroom of an urgent one, and 60.
        (0.5, {"used_blocks": (20, 40), "num_urgent": (1, 0)}, 1),
        (0.5, {"used_blocks": (20, 40), "num_urgent": (0, 0)}, 0),
        (0.1, {"used_blocks": (20, 40), "num_urgent": (3, 0)}, 0),
        (0.5, {"used_blocks": (20, 40), "first_waiting_blocks": (21, 0)}, 1),
        (0.5, {"used_blocks": (20, 40), "first_waiting_blocks": (19, 0)}, 0),
        (0.5, {"used_blocks": (20, 40), "num_running": (2, 1)}, 1),  # 40 for each, and 60
        (0.5, {"used_blocks": (20, 40), "num_running": (0, 1)}, 0),  # as of one
    ],
)
def test_llumnix_sends_to_the_engine_with_most_free_blocks_for_each_that_runs(
    headroom, columns, chosen
):
    router = registry.make("llumnix", headroom=headroom)
    assert router.route(request(), engines(**columns)) == chosen
    swapped = {name: values[::-1] for name, values in columns.items()}
    assert router.route(request(), engines(**swapped)) == 1 - chosen


def test_same_seed_draws_the_same_and_another_does_not():
    def drawn(seed):
        router = registry.make("random", seed)
        return [router.route(request(i), engines(num_in_flight=(0,) * 4)) for i in range(40)]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("power_of_d", {"d": 0}, "d must be"),
        ("vllm", {"waiting_weight": -1}, "waiting_weight must be"),
        ("session_affinity", {"key": "user"}, "key must be"),
        ("autellix", {"max_small_tokens": -1}, "max_small_tokens must be"),
        ("consistent_hashing", {"load_factor": 1.0}, "load_factor must be > 1"),
        ("prefix_aware", {"cache_threshold": 2}, "cache_threshold must be"),
        ("prefix_aware", {"low_match": "any"}, "low_match must be smallest_tree or"),
        ("llm_d", {"prefix": 0, "queue": 0, "kv": 0}, "not all 0"),
        ("llm_d", {"max_prefix_blocks": 0}, "max_prefix_blocks must be"),
        ("slo_aware", {"margin": 0}, "margin must be"),
        ("preble", {"window_s": 0}, "window_s must be finite and > 0"),
        ("preble", {"balance_ratio": 0.9}, "balance_ratio must be >= 1"),
        ("preble", {"min_requests": -1}, "min_requests must be >= 0"),
        ("dynamo", {"temperature": -1}, "overlap_weight and temperature must be"),
    ],
)
def test_impossible_knob_is_refused(name, knobs, message):
    with pytest.raises(SpecError, match=message):
        registry.make(name, **knobs)


def test_fleets_document_lists_every_router_and_knob():
    text = (DOCS / "fleets.md").read_text(encoding="utf-8")
    table = re.search(r"^\| `random` \|.*\n(?:\|.*\n)+", text, re.M)  # links have one as well
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", table[0], re.M))
    assert sorted(rows) == registry.names()
    for name in registry.names():
        cls = registry.router_class(name)
        assert cls.source, f"{name} says no source"
        for knob in cls.knobs():
            assert f"`{knob}`" in rows[name], f"docs/fleets.md does not name {knob} of {name}"


@pytest.mark.slow
def test_router_of_the_document_runs_and_keeps_the_laws():
    text = (DOCS / "fleets.md").read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "class" in c)
    space = {"__name__": "mine"}
    exec(compile(code, "fleets.md", "exec"), space)
    check_router(space["Emptiest"], cases=CASES)


def test_router_prices_a_row_for_every_prompt_and_every_decode():
    engine = SimpleNamespace(used_blocks=3, block_size=16)
    shape = step_times.step_shape(engine, 3, 10, ((50, 0), (50, 0)))
    assert (shape.rows_sampled, shape.num_decodes) == (5, 3)
    assert shape.decode_context_sum_tokens == 58
    assert shape.decode_context_max_tokens == shape.decode_context_min_tokens == 20


@pytest.mark.skipif(core.running() != "python", reason="compiled code takes no stand-ins")
@pytest.mark.parametrize("weight", [0.0, 0.5, 4.0, float("inf")])
def test_least_of_an_offer_is_that_of_its_engines_one_by_one(weight):
    class Standing(Told):
        def stand_on(self, board, place):
            self.board, self.place = board, place

    told = [Standing(index=i) for i in range(6)]
    offer, draw = Offer(told), random.Random(3)
    for _ in range(200):
        one = draw.choice(told)
        one.num_waiting, one.num_running = draw.randrange(3), draw.randrange(5)
        one.board.has_changed(one.place, one.num_waiting, one.num_running)
        start = draw.randrange(6)
        found = place_of_least(offer, weight, 1.0, start)
        assert found == place_of_least(told, weight, 1.0, start)
        loads = [weight * t.num_waiting + t.num_running for t in told]
        if weight < 9:
            assert found == min(range(6), key=lambda i: (loads[i], (i - start) % 6))


def test_round_robin_goes_on_behind_the_last_when_engines_come_and_go():
    router = registry.make("round_robin")
    three, four, two = (engines(num_running=range(n)) for n in (3, 4, 2))
    asked = [three, three, three, three, four, four, four, two, two, four]
    assert [router.route(None, those) for those in asked] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.skipif(core.running() != "python", reason="compiled code takes no stand-ins")
def test_columns_of_an_offer_are_what_each_of_its_engines_says():
    names = (
        "index", "num_blocks", "block_size", "num_in_flight", "num_waiting", "num_running",
        "used_blocks",
    )  # fmt: skip
    told = [
        SimpleNamespace(
            stand_on=lambda board, place: None,
            **{name: 100 * number + place for number, name in enumerate(names)},
        )
        for place in range(4)
    ]
    for number, name in enumerate(names):
        expected = [100 * number + place for place in range(4)]
        assert column(Offer(told), name) == column(told, name) == expected


NUMBERED_OTHERWISE = [
    *((name, {}) for name in registry.names() if name != "consistent_hashing"),
    ("prefix_aware", {"precise": True}), ("prefix_aware", {"max_tree_tokens": 64}),
    ("prefix_aware", {"cache_threshold": 0.0, "balance_abs": 2, "balance_rel": 1.5}),
    ("llm_d", {"precise": True}), ("dynamo", {"temperature": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "knobs"), NUMBERED_OTHERWISE)
def test_router_chooses_the_same_places_however_the_engines_are_numbered(name, knobs):
    """A name of an engine is no place in the list, and what is known is kept by name."""

    def places(numbers):
        router, draw = registry.make(name, 5, **knobs), random.Random(f"{name} {knobs}")
        chosen = []
        for i in range(120):
            here = sorted(draw.sample(range(4), draw.choice((2, 3, 4))))
            offer = [
                Told(
                    index=numbers[one],
                    num_in_flight=draw.randrange(6),
                    prompt_tokens_in_flight=draw.randrange(300),
                    predicted_tokens_in_flight=float(draw.randrange(90)),
                    num_waiting=draw.randrange(3),
                    num_running=draw.randrange(5),
                    backlog_tokens=draw.randrange(200),
                    used_blocks=draw.randrange(100),
                    cached=16 * draw.randrange(8),
                )
                for one in here
            ]
            kind = draw.randrange(5)
            ids = tuple(range(100 * kind, 100 * kind + draw.randrange(1, 9)))
            asked = request(
                i, 160, prefix_hash_ids=ids, session=f"s{kind}", tenant=f"t{kind}",
                application=f"a{kind}", slo=Slo(ttft_ms=draw.choice((2.0, 9.0))), **needs(name),
            )  # fmt: skip
            chosen.append(router.route(asked, offer))
            if draw.random() < 0.1:
                router.engine_is_gone(numbers[draw.randrange(4)])
        return chosen

    assert places((0, 1, 2, 3)) == places((4, 7, 8, 15))
