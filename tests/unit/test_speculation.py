"""Speculation as an experiment asks for it: what is refused, what it takes, what is kept."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from librt.strings import BytesWriter
from librt.vecs import vec
from mypy_extensions import i64

from schedlab.experiments.running import speculation as speculation_of
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.checks import check_names
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.policies.speculation import registry as registry_of_lengths
from schedlab.policies.speculation import slo as slo_lengths
from schedlab.policies.speculation.by_batch_size import ByBatchSize
from schedlab.policies.speculation.draft_length import acceptance_rate
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.draft_length import Decoding
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.speculative_executor import SpeculativeExecutor, estimate_with_drafts
from schedlab.sim.core.track import (
    SpeculatingState,
    look_ahead,
    one_ahead,
    verify_one_by_one,
)
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.errors import PolicyError, SpecError
from schedlab.sim.record import log as run_log
from schedlab.sim.request import Request, Slo
from schedlab.sim.result import RunResult
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import ModelDrafter, NgramDrafter
from schedlab.sim.speculation.recording import (
    RecordedAcceptance,
    _Recorded,
    read_drafts,
    write_drafts,
)
from tests import laws
from tests.traced import AsksOnce

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.7}


def spec_of(speculation, **keys):
    workload = {"trace": "azure-conv", "num_requests": 12, "request_rate": 4.0}
    engine = {"speculation": speculation, **keys.pop("engine", {})}
    return make_spec({"name": "drafts", "workload": workload, "engine": engine, **keys})


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({**NGRAM, "acceptance": 1.1}, r"speculation\.acceptance.*less than or equal to 1|<= 1"),
        ({**NGRAM, "acceptance": {"rate": 0.5, "rates": [0.5]}}, "give one of rate, rates and"),
        ({**NGRAM, "acceptance": {"rate": 0.9, "spread": 0.4}},
         r"engine\.speculation\.acceptance\.spread: the spread of acceptance must be"),
        ({**NGRAM, "acceptance": {"recording": "none.jsonl"}},
         r"engine\.speculation\.acceptance\.recording: .*none.jsonl: no such file"),
        ({**NGRAM, "draft_length": "by_batch_size"}, "needs a parameter 'schedule'"),
        ({**NGRAM, "draft_length": {"name": "by_batch_size", "schedule": [[1, float("nan")]]}},
         r"engine\.speculation\.draft_length: .*pairs of whole numbers"),
        ({**NGRAM, "num_speculative_tokens": 0}, r"num_speculative_tokens.*(>= 1|at least 1)"),
        ({**NGRAM, "num_layers": 2}, "num_layers is of eagle and mtp, not of ngram"),
        ({**NGRAM, "acceptance": None}, "does not know which drafts are accepted"),
        ({**NGRAM, "method": "ngrams"}, "ngram"),
        ({**NGRAM, "draft_length": "godput"}, "did you mean goodput"),
        ({**NGRAM, "draft_length": {"name": "by_batch_size", "schedule": [[4, 1], [2, 0]]}},
         "must ascend"),
        ({**NGRAM, "method": "draft_model"}, "draft_model needs a model"),
        ({**NGRAM, "method": "draft_model", "model": "llama-2-7b"},
         "llama-2-7b has a vocabulary of 32000 tokens, llama-3-8b one of 128256"),
        ({**NGRAM, "method": "draft_model", "model": "llama-3-70b"}, "the draft does not fit"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_wrong_speculation_is_refused_by_name(speculation, message):
    with pytest.raises(SpecError, match=message):
        run(spec_of(speculation))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"engine": {"async_scheduling": True}},
            r"engine\.async_scheduling: not with engine\.speculation\.method ngram.*to false$",
        ),
        (
            {"engine": {"profile": "vllm-0.32", "async_scheduling": True}},
            r"set it to false \(profile vllm-0\.32 switches it on",
        ),
        ({"engine": {"kv_allocator": "contiguous_max"}}, "speculation needs paged memory"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_engine_that_cannot_speculate_says_so(keys, message):
    with pytest.raises(SpecError, match=message):
        run(spec_of(NGRAM, **keys))


@pytest.mark.parametrize("backend", ["real", "vllm"])
def test_drafts_of_ngrams_planned_ahead_are_left_to_whoever_runs_them(backend):
    # Nor is it asked there which drafts are accepted: that is seen.
    def fail(key, message):
        raise AssertionError(f"{key}: {message}")

    measured = {**NGRAM, "acceptance": None}
    spec = spec_of(measured, backend=backend, engine={"async_scheduling": True})
    check_names(spec, fail)
    with pytest.raises(AssertionError, match=r"\('engine', 'async_scheduling'\): not with"):
        check_names(spec.model_copy(update={"backend": "sim"}), fail)


def test_real_backend_refuses_a_drafter_that_it_does_not_have():
    eagle = {"method": "eagle", "num_speculative_tokens": 2}
    with pytest.raises(SpecError, match=r"the real backend has no eagle; set method: ngram"):
        run(spec_of(eagle, backend="real", model="schedlab-tiny", hardware="cpu"))


def test_drafts_by_targets_that_nobody_has_are_refused_with_what_to_add(tmp_path):
    chosen = {**NGRAM, "draft_length": "slo"}
    message = r"engine\.speculation\.draft_length: slo decides by targets.*add slo\.tpot_ms$"
    with pytest.raises(SpecError, match=message):
        spec_of(chosen, slo={"ttft_ms": 100})
    assert spec_of(chosen, slo={"tpot_ms": 20}).slo.tpot_ms == 20
    for column in ("slo_tpot_ms", "deadline_s"):  # rows may bring targets, which is seen later
        path = tmp_path / "rows.csv"
        path.write_text(f"arrival_s,prompt_tokens,output_tokens,{column}\n0,9,4,20\n")
        spec = make_spec({"workload": {"trace": str(path)}, "engine": {"speculation": chosen}})
        if column == "slo_tpot_ms":
            assert len(run(spec).requests["id"]) == 1
        else:
            with pytest.raises(SpecError, match=message):
                run(spec)


def test_fixed_length_of_no_load_is_what_a_table_without_rows_below_says():
    fixed = run(spec_of(NGRAM))
    table = {"name": "by_batch_size", "schedule": [[1000, 0]]}
    same = run(spec_of({**NGRAM, "draft_length": table}))
    assert laws.signature(fixed.log) == laws.signature(same.log)


def test_draft_model_takes_memory_of_its_weights_and_of_its_cache():
    drafts = {**NGRAM, "method": "draft_model", "model": "llama-3.2-1b"}
    alone, beside = run(spec_of(None)), run(spec_of(drafts))

    def blocks(result):
        return result.provenance["engine"]["num_blocks"]

    per_token, draft = 131072, 32768  # bytes of KV: 2 * 32 * 8 * 128 * 2, and 2 * 16 * 8 * 64 * 2
    free = alone.provenance["memory"]["kv_bytes"] - 2 * 1_235_814_400  # parameters of Llama 3.2 1B
    assert blocks(beside) == free // ((per_token + draft) * 16)
    assert "num_speculative_tokens" not in alone.provenance["engine"]


def test_saved_run_keeps_bursts_and_columns(tmp_path):
    result = run(spec_of(NGRAM))
    result.save(tmp_path / "run")
    again = RunResult.load(tmp_path / "run")
    for name in ("draft_tokens", "accepted_tokens", "num_drafts", "kv_tokens"):
        assert np.array_equal(again.log.steps()[name], result.log.steps()[name])
    for number in range(12):
        assert np.array_equal(again.log.token_times(number), result.log.token_times(number))
    some = np.array([1, 5])
    assert again.log.token_counts(some)["count"].sum() == sum(
        len(result.log.token_times(i)) for i in some
    )


def most_in_a_second(result, times_ns):
    first_ns = result.requests["arrival_ns"].min()
    return np.bincount((np.concatenate(times_ns) - first_ns) // 10**9).max()


@pytest.mark.slow
def test_vllms_most_tokens_in_a_second_are_pieces_of_streams(tmp_path, monkeypatch):
    result = run(spec_of(NGRAM))
    times_ns = [result.log.token_times(i) for i in range(12)]
    pieces = most_in_a_second(result, [np.unique(times) for times in times_ns])
    tokens = most_in_a_second(result, times_ns)
    assert tokens > 1.5 * pieces
    result.save(tmp_path / "run")
    monkeypatch.setattr(run_log, "MOST_NUMBERS_IN_MEMORY", 300)
    spilled = run(spec_of(NGRAM))
    assert spilled.log._spools
    for one in (result, RunResult.load(tmp_path / "run"), spilled):
        assert one.metric("max_output_tokens_per_s") == pieces
        assert one.metric("most_output_tokens_per_s") == tokens
    alone = run(spec_of(None))
    assert alone.metric("max_output_tokens_per_s") == alone.metric("most_output_tokens_per_s")


def test_log_of_a_long_run_on_disk_has_the_same_bursts(monkeypatch):
    whole = run(spec_of(NGRAM)).log
    monkeypatch.setattr(run_log, "MOST_NUMBERS_IN_MEMORY", 300)
    spilled = run(spec_of(NGRAM)).log
    assert spilled._spools
    assert laws.signature(whole) == laws.signature(spilled)
    for table in ("token_counts", "token_gaps"):
        one, other = getattr(whole, table)(), getattr(spilled, table)()
        assert all(np.array_equal(one[name], other[name]) for name in one)


# -- recordings ----------------------------------------------------------------------------------


def run_recorded(tmp_path, drafts, workload, k=4, length=None):
    path = tmp_path / "drafts.jsonl"
    write_drafts(path, drafts)
    config = EngineConfig(num_blocks=200, max_model_len=400, num_speculative_tokens=k)
    return laws.run(
        registry.make("fcfs"), workload, config, draft_length=length,
        make_executor=lambda pricing: SpeculativeExecutor(
            pricing, config, RecordedAcceptance(path), NgramDrafter(0.0)
        ),
    )  # fmt: skip


class Priced:
    """Notes the steps that it prices."""

    def __init__(self):
        self.shapes = []

    def step_ns(self, shape):
        self.shapes.append(shape)
        return [100]


def test_passes_of_a_draft_model_read_what_those_before_them_wrote():
    drafter = ModelDrafter(Priced(), 0, 0, 0)
    shape = BatchShape(
        4, 1000, 400, ((7, 3),), rows_sampled=5, num_running=5, decode_context_min_tokens=100,
        draft_tokens=6, swapped_bytes=8,
    )  # fmt: skip
    assert drafter.step_ns(shape.verification(), 6, [4, 4, 2, 0]) == 300
    first, second, third = drafter.cost_model.shapes
    # All of the step, then a token a request: of all four, then of the two that draft two more.
    assert first == replace(shape, swapped_bytes=0, draft_tokens=0, padding_tokens=6)
    assert second == BatchShape(4, 1000 + 4, 401, rows_sampled=4, decode_context_min_tokens=101)
    assert third == BatchShape(2, 500 + 2 * 2, 402, rows_sampled=2, decode_context_min_tokens=102)
    assert drafter.step_ns(replace(shape, chunks=()), 0, [0, 0]) == 0


class Grown:
    """Contexts of which the longest and the shortest are known."""

    def extremes(self, num_steps):
        return [(400 + 10 * i, 100 + i) for i in range(num_steps)]


def test_passes_of_steps_whose_contexts_grow_unevenly_read_those_of_each():
    first = BatchShape(2, 500, 400, rows_sampled=2, decode_context_min_tokens=100)
    drafter = ModelDrafter(Priced(), 0, 0, 0)
    steps = UnevenSteps(first, vec[i64]([4, 6]), Grown())
    assert drafter.uneven_ns(steps, 0, [[2, 1], [0, 0], [2, 0]]) == [200, 0, 100]
    shapes = steps.shapes()
    assert [shape.decode_context_sum_tokens for shape in shapes] == [500, 504, 510]
    # One of two reads half of all tokens, and its own that the first pass wrote.
    second = BatchShape(1, 250 + 1, 401, rows_sampled=1, decode_context_min_tokens=101)
    assert drafter.cost_model.shapes == [shapes[0], second, shapes[2]]


def test_step_that_a_draft_length_asks_about_is_that_of_all_with_as_many_drafts_each():
    asked = []

    def estimate(shape):
        asked.append(shape)
        return 77

    requests = [SimpleNamespace(num_computed_tokens=n) for n in (30, 7, 12)]
    batch = SimpleNamespace(num_accepted=5, num_cut_short=3)
    told = Decoding(9, requests, 4, batch, estimate)
    assert (told.step_ns(4), told.step_ns(0)) == (77, 77)
    assert (told.now_ns, told.most, told.num_accepted, told.num_cut_short) == (9, 4, 5, 3)
    all_three = BatchShape(
        3, 49, 30, rows_sampled=3, num_running=3, decode_context_min_tokens=7, draft_tokens=12
    )
    assert asked == [all_three, replace(all_three, draft_tokens=0)]


@pytest.mark.parametrize(
    ("num_decodes", "draft_tokens", "rows"),
    [(3, 4, [3, 3]), (3, 3, [3]), (3, 6, [3, 3]), (3, 7, [3, 3, 3]), (0, 0, [])],
)
def test_estimate_drafts_as_often_as_the_longest_of_even_shares(num_decodes, draft_tokens, rows):
    class Noting:
        def step_ns(self, shape, num_drafted, rows_of_passes):
            noted.append((num_drafted, rows_of_passes))
            return 5

    noted = []
    shape = BatchShape(num_decodes, 0, 0, draft_tokens=draft_tokens)
    assert estimate_with_drafts(lambda shape, steps: 100 * steps, Noting(), shape, 2) == 205
    assert noted == [(draft_tokens, rows)]
    assert estimate_with_drafts(lambda shape, steps: 100 * steps, None, shape, 2) == 200


def decoding(tokens, targets_ms, now_ms, most=3):
    batch = SimpleNamespace(num_accepted=0, num_cut_short=0)
    requests = [
        SimpleNamespace(
            num_computed_tokens=100 + n, num_output_tokens=n, first_token_ns=0,
            request=SimpleNamespace(slo=None if target is None else Slo(tpot_ms=target)),
        )
        for n, target in zip(tokens, targets_ms, strict=True)
    ]  # fmt: skip
    return Decoding(round(now_ms * 1e6), requests, most, batch, lambda shape: 10_000_000)


@pytest.mark.parametrize(
    ("budget", "drafts"),
    [
        # At 110 ms the first has 6 tokens where 11 are due, the second 10: who lacks most is first.
        (5, [3, 0]),
        (6, [3, 1]),
        (8, [3, 3]),
        (3, [1, 0]),
        (2, [0, 0]),
    ],
)
def test_drafts_by_targets_go_first_to_who_is_owed_most(budget, drafts):
    length = registry_of_lengths.make("slo", budget_tokens=budget, prior_rate=0.5)
    assert length.choose(decoding([6, 10], [10.0, 10.0], 100)) == drafts
    assert length.choose(decoding([10, 6], [10.0, 10.0], 100)) == drafts[::-1]


@pytest.mark.parametrize(
    ("prior_tokens", "accepted", "cut_short", "drafts"),
    [
        # Rates of 0.5, (30 + 10) / (30 + 10 + 20) = 2/3 and 30.5 / 41: yields of one draft are 1.5,
        # 1.67 and 1.74, of two 1.75, 2.11 and 2.3; two are due, and 7 of the budget are left.
        (20.0, 0, 0, [3, 3]),
        (20.0, 30, 10, [2, 2]),
        (1.0, 30, 10, [2, 2]),
        (1.0, 0, 30, [3, 3]),
    ],
)
def test_drafts_by_targets_are_as_many_as_the_rate_so_far_asks(
    prior_tokens, accepted, cut_short, drafts
):
    length = registry_of_lengths.make("slo", prior_rate=0.5, prior_tokens=prior_tokens)
    asked = decoding([10, 10], [10.0, 10.0], 100)
    asked.requests[0].num_output_tokens = asked.requests[1].num_output_tokens = 10
    batch = SimpleNamespace(num_accepted=accepted, num_cut_short=cut_short)
    told = Decoding(asked.now_ns, asked.requests, 3, batch, lambda shape: 10_000_000)
    rate = (accepted + 0.5 * prior_tokens) / (accepted + cut_short + prior_tokens)
    assert acceptance_rate(told, 0.5, prior_tokens) == pytest.approx(rate)
    length.budget_tokens = 2 + sum(drafts)
    assert length.choose(told) == drafts


def test_drafts_beyond_what_targets_ask_are_spread_evenly():
    length = registry_of_lengths.make("slo", budget_tokens=7, prior_rate=0.5)
    assert length.choose(decoding([10, 10, 10], [None, None, 1e6], 100)) == [2, 1, 1]


@pytest.mark.parametrize(
    ("knobs", "drafts"),
    [
        # 12, 4, 4 and 1 tokens are due, and a draft yields less than one: three need all they get.
        # Of a budget of 12 tokens 8 are left for drafts, and 1.2 even shares are 3.6.
        ({"min_depth": 5}, [3, 3, 2, 0]),
        ({"min_depth": 5, "target_share": float("inf")}, [5, 3, 0, 0]),
        # Two shares of 3 are more than a draft may be long.
        ({"min_depth": 5, "target_share": 2.0}, [5, 3, 0, 0]),
        # One each for targets, or none; the rest evenly, to whom no more is due, too.
        ({"min_depth": 5, "target_share": 0.5}, [2, 2, 2, 2]),
        ({"min_depth": 5, "target_share": 0.0}, [2, 2, 2, 2]),
        # Equation 8 allows 12 / 4 - 1 = 2, and of 4 - 1 requests 3.
        ({"min_depth": 1}, [2, 2, 2, 2]),
        ({"min_depth": 1, "depth_offset": -1}, [3, 3, 2, 0]),
    ],
)
def test_drafts_for_a_target_are_no_more_than_somewhat_over_an_even_share(knobs, drafts):
    length = registry_of_lengths.make("slo", budget_tokens=12, prior_rate=0.5, **knobs)
    tokens, targets = [0, 8, 8, 11], [10.0] * 4
    assert length.choose(decoding(tokens, targets, 100, most=5)) == drafts


@pytest.mark.parametrize(
    ("knobs", "count", "drafts"),
    [
        # A budget of 24, at most 5 each: 24 / 2 - 1 = 11, 24 / 4 - 1 = 5, 24 / 5 - 1 = 3.8.
        ({}, 2, [5, 5]),
        ({}, 4, [5, 5, 5, 5]),
        ({}, 5, [3, 3, 3, 3, 3]),
        # 24 / 7 - 1 = 2.4: fewer than `min_depth`, so that what is left of the budget is spent.
        ({}, 7, [3, 3, 3, 2, 2, 2, 2]),
        ({"min_depth": 1}, 7, [2] * 7),
        ({"min_depth": 9}, 3, [5, 5, 5]),
        ({"min_depth": 0}, 20, [0] * 20),
        ({}, 20, [1] * 4 + [0] * 16),
        ({"depth_offset": 2}, 4, [3, 3, 3, 3]),
        ({"depth_offset": -3}, 5, [4, 4, 4, 4, 3]),
        ({"depth_offset": -5}, 5, [4, 4, 4, 4, 3]),
    ],
)
def test_longest_drafts_by_targets_are_the_shorter_the_more_decode(knobs, count, drafts):
    length = registry_of_lengths.make("slo", budget_tokens=24, prior_rate=0.5, **knobs)
    asked = decoding([10] * count, [None] * count, 100, most=5)
    assert length.choose(asked) == drafts


@pytest.mark.parametrize("knobs", [{"target_share": -0.1}, {"min_depth": -1}])
def test_knobs_of_drafts_by_targets_that_make_no_sense_are_refused(knobs):
    with pytest.raises(SpecError, match=f"{next(iter(knobs))} must not be negative"):
        registry_of_lengths.make("slo", **knobs)


def test_recorded_drafts_are_replayed_verification_by_verification(tmp_path):
    # Tokens: 1 of the prompt, then 2 + 1, 0 + 1, 1, 3 of 4 + 1.
    drafts = {0: [(4, 2), (3, 0), (0, 0), (4, 3)]}
    log = run_recorded(tmp_path, drafts, [laws.arrival(0, 0, 10, 10)])
    _, counts = np.unique(log.token_times(0), return_counts=True)
    assert counts.tolist() == [1, 3, 1, 1, 4]
    steps = log.steps()
    assert steps["draft_tokens"].tolist() == [0, 4, 3, 0, 4]
    assert steps["accepted_tokens"].tolist() == [0, 2, 0, 0, 3]
    assert steps["num_drafts"].tolist() == [0, 1, 1, 0, 1]


def test_length_is_chosen_by_all_drafts_so_far_and_how_many_were_cut_short(tmp_path):
    class Noting:
        def __init__(self):
            self.told = []

        def choose(self, decoding):
            states = [(state.id, state.num_output_tokens) for state in decoding.requests]
            self.told.append((states, decoding.num_accepted, decoding.num_cut_short))
            return [decoding.most] * len(decoding.requests)

    # 2 of 4, none of 3, nothing drafted, 3 of 4; then, when that is answered, 1 of 1 and 0 of 2.
    drafts = {0: [(4, 2), (3, 0), (0, 0), (4, 3)], 1: [(1, 1), (2, 0)], 2: [(1, 1)]}
    length = Noting()
    workload = [laws.arrival(0, 0, 10, 10), laws.arrival(1, 10**12, 10, 4),
                laws.arrival(2, 2 * 10**12, 10, 3)]  # fmt: skip
    run_recorded(tmp_path, drafts, workload, length=length)
    assert length.told == [([(0, 1)], 0, 0), ([(1, 1)], 5, 3), ([(2, 1)], 6, 4)]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_length_is_chosen_by_all_drafts_of_steps_that_were_skipped(fast_forward):
    told = []

    class Noting:
        def choose(self, decoding):
            told.append((decoding.num_accepted, decoding.num_cut_short))
            return [2] * len(decoding.requests)

    config = EngineConfig(
        num_blocks=200, max_model_len=400, num_speculative_tokens=2, fast_forward=fast_forward
    )
    # Every draft is right: three tokens a step, of the last of 25 there are three as well.
    workload = [laws.arrival(i, i * 10**12, 10, 25) for i in range(2)]
    hand_run(config, workload, length=Noting())
    assert told[-1][0] == 16


def test_shorter_drafts_than_recorded_continue_in_the_middle_of_one(tmp_path):
    log = run_recorded(tmp_path, {0: [(4, 4), (4, 0)]}, [laws.arrival(0, 0, 10, 7)], k=2)
    _, counts = np.unique(log.token_times(0), return_counts=True)
    assert counts.tolist() == [1, 3, 2, 1]  # 2 + 1, then what is left of the draft: 1 + 1
    assert log.steps()["draft_tokens"].tolist() == [0, 2, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: no JSON"),
        ('{"id": 0, "drafted": [1], "accepted": []}', "of one length"),
        ('{"id": 0, "drafted": [1], "accepted": [2]}', "2 tokens accepted of 1 drafted"),
        ('{"id": 0, "drafted": [-1], "accepted": [0]}', "whole numbers >= 0"),
        ('{"id": 0, "drafted": [1], "accepted": [true]}', "whole numbers >= 0"),
        ('{"id": 0, "drafted": [1.0], "accepted": [0]}', "whole numbers >= 0"),
        ('{"id": 0, "drafted": 1, "accepted": [0]}', '"drafted" must be a list'),
        ('{"id": 0, "drafted": [1]}', '"accepted" must be a list'),
        ('{"drafted": [1], "accepted": [0]}', '"id"'),
        ('{"id": "0", "drafted": [1], "accepted": [0]}', '"id", a whole number'),
        ('{"id": null, "drafted": [1], "accepted": [0]}', '"id", a whole number'),
        ('[{"id": 0, "drafted": [1], "accepted": [0]}]', "must be an object"),
    ],
)
def test_wrong_recording_names_the_line(tmp_path, line, message):
    path = tmp_path / "drafts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SpecError, match=message):
        read_drafts(path)


@pytest.mark.parametrize(
    ("drafts", "places"),
    [
        ([], [(0, 0), (0, 0)]),
        ([(4, 2)], [(0, 0), (4, 2), (3, 1), (2, 0), (0, 0)]),
        ([(3, 0), (2, 2)], [(0, 0), (3, 0), (2, 2), (1, 1), (0, 0), (0, 0)]),
    ],
)
def test_recorded_drafts_tell_at_each_place_what_was_left_of_them(drafts, places):
    recorded = _Recorded(drafts)
    assert [recorded.verify(place, 9) for place in range(len(places))] == places
    for most in range(4):
        cut = [(min(a, most), min(b, most)) for a, b in places]
        assert [recorded.verify(place, most) for place in range(len(places))] == cut


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "spread"), [(0.7, 0.1), (0.5, 0.2), (0.5, 0.4), (0.3, 0.0)])
def test_spread_of_acceptance_is_the_deviation_of_the_rates_of_requests(rate, spread):
    drawn, tokens = DrawnAcceptance([rate], spread, seed=3), 512
    shares = []
    for i in range(640):
        outcome = drawn.outcome(Request(i, 0, 1, max_tokens=tokens), tokens)
        shares.append(np.mean([outcome.verify(place, 1)[1] for place in range(0, tokens, 4)]))
    noise = rate * (1 - rate) / (tokens / 4)
    assert np.mean(shares) == pytest.approx(rate, abs=0.01 + 2 * spread / np.sqrt(640))
    assert np.std(shares) == pytest.approx(np.sqrt(spread**2 + noise), rel=0.1)


def test_rate_of_a_request_is_its_own_to_the_end_of_a_long_answer():
    drawn, tokens = DrawnAcceptance([0.5], 0.3, seed=3), 3 * 512
    shares = []
    for i in range(96):
        outcome = drawn.outcome(Request(i, 0, 1, max_tokens=tokens), tokens)
        right = [outcome.verify(place, 1)[1] for place in range(0, tokens, 8)]
        shares.append([np.mean(part) for part in np.array_split(right, 3)])
    first, second, last = np.array(shares).T
    noise = np.sqrt(2 * 0.5**2 / 64)  # of two parts of 64 tokens, were the rate one for all
    assert max(np.std(first - second), np.std(first - last), np.std(second - last)) < noise
    assert np.std(first) > 2 * noise


@pytest.mark.parametrize(
    ("rates", "spread", "message"),
    [
        ([], 0.0, "acceptance needs at least one rate"),
        ([0.5, 1.01], 0.0, r"an acceptance rate must be in \[0, 1\], got 1\.01"),
        ([-0.01], 0.0, r"an acceptance rate must be in \[0, 1\], got -0\.01"),
        ([float("nan")], 0.0, "an acceptance rate must be in"),
        ([0.5], -0.1, "the spread of acceptance must be >= 0, got -0.1"),
        ([0.5], float("inf"), "the spread of acceptance must be >= 0, got inf"),
        ([0.2, 0.9], 0.4, r"must be below 0\.4, the standard deviation"),  # of 0.2
        ([1.0], 1e-9, "must be below 0, the standard deviation"),
    ],
)
def test_acceptance_that_cannot_be_is_refused(rates, spread, message):
    with pytest.raises(SpecError, match=message):
        DrawnAcceptance(rates, spread)
    assert DrawnAcceptance([0.0, 1.0, 0.5]).outcome(Request(0, 0, 1, max_tokens=9), 9)
    assert DrawnAcceptance([0.2, 0.9], 0.399).outcome(Request(0, 0, 1, max_tokens=9), 9)


class Chooses:
    """Chooses the same lengths, whoever decodes."""

    def __init__(self, *chosen):
        self.chosen = chosen

    def choose(self, decoding):
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ((1,), r"draft length Chooses: choose\(\) returned 1 lengths for 2 requests"),
        ((1, 1, 1), r"draft length Chooses: choose\(\) returned 3 lengths for 2 requests"),
        ((2, 3), r"returned 3, which .* between 0 and num_speculative_tokens \(2\)"),
        ((-1, 2), r"returned -1, which .* between 0 and num_speculative_tokens \(2\)"),
        ((1.0, 1.0), r"returned 1\.0, which is no whole number of tokens"),
        ((None, None), "returned None, which is no whole number of tokens"),
        (("2", "2"), "returned '2', which is no whole number of tokens"),
    ],
)
def test_draft_lengths_that_cannot_be_are_refused_by_name(chosen, message):
    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=2)
    work = [laws.arrival(i, 0, 10, 6) for i in range(2)]
    with pytest.raises(PolicyError, match=message):
        hand_run(config, work, length=Chooses(*chosen))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"choose\(\) returned None, which is no list of lengths"),
        (2, r"choose\(\) returned 2, which is no list of lengths"),
        (KeyError("x"), r"choose\(\) raised KeyError: 'x' \(test_speculation\.py:\d+\)"),
        (SystemExit(3), r"choose\(\) raised SystemExit: 3 \(test_speculation\.py:\d+\)"),
    ],
    ids=repr,
)
def test_draft_length_that_fails_is_told_by_name_and_line(answer, message):
    class Fails:
        def choose(self, decoding):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=2)
    with pytest.raises(PolicyError, match=f"draft length Fails: {message}"):
        hand_run(config, [laws.arrival(0, 0, 10, 6)], length=Fails())


def test_draft_lengths_of_numpy_and_of_a_generator_are_those_of_a_list():
    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=2)
    work = [laws.arrival(i, 0, 10, 30) for i in range(2)]

    class Of:
        def __init__(self, kind):
            self.kind = kind

        def choose(self, decoding):
            return self.kind(1 for _ in decoding.requests)

    kinds = (list, iter, lambda values: np.array(list(values)))
    logs = [hand_run(config, work, length=Of(kind)) for kind in kinds]
    assert laws.signature(logs[0]) == laws.signature(logs[1]) == laws.signature(logs[2])


@pytest.mark.parametrize("chosen", [(2, 0), (0, 0), (1, 2)])
def test_draft_lengths_at_their_bounds_are_drafted(chosen):
    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=2)
    work = [laws.arrival(i, 0, 10, 30) for i in range(2)]

    class Once(Chooses):
        def choose(self, decoding):
            return self.chosen[: len(decoding.requests)]

    steps = hand_run(config, work, length=Once(*chosen), rates=(0.0, 0.0)).steps()
    drafted = steps["draft_tokens"][steps["num_decodes"] == 2]
    assert drafted.max() == sum(chosen)


def test_recording_that_tells_a_request_twice_names_its_line(tmp_path):
    path = tmp_path / "d.jsonl"
    lines = [{"id": i, "drafted": [1], "accepted": [0]} for i in (4, 5, 4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SpecError, match=r"d\.jsonl, line 3: request 4 is there twice"):
        read_drafts(path)


def test_request_that_was_not_recorded_is_named(tmp_path):
    with pytest.raises(SpecError, match="no drafts of request 1 were recorded"):
        run_recorded(tmp_path, {0: [(1, 1)]}, [laws.arrival(1, 0, 10, 3)])


def test_recording_that_was_written_reads_back(tmp_path):
    drafts = {3: [(4, 2), (0, 0)], 1: []}
    write_drafts(tmp_path / "d.jsonl", drafts)
    assert read_drafts(tmp_path / "d.jsonl") == drafts
    first = json.loads((tmp_path / "d.jsonl").read_text().splitlines()[0])
    assert first == {"id": 1, "drafted": [], "accepted": []}


# -- by hand -------------------------------------------------------------------------------------


def hand_run(config, workload, rates=(1.0,), length=None, policy=None):
    return laws.run(
        policy or registry.make("fcfs"), workload, config, draft_length=length,
        make_executor=lambda pricing: SpeculativeExecutor(
            pricing, config, DrawnAcceptance(rates), NgramDrafter(5e-9)
        ),
    )  # fmt: skip


def test_steps_of_one_request_cost_what_the_arithmetic_says():
    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=2)
    log = hand_run(config, [laws.arrival(0, 0, 10, 6)])
    # 1000 + 10 a token + 1 a token of context, 5 for the look-up: 10 prompt tokens; then 3 tokens
    # on a context of 10, of which 3 come out; then 3 on 13, of which 2 are still wanted.
    assert log.steps()["end_ns"].tolist() == [1100, 1100 + 1045, 1100 + 1045 + 1048]
    assert log.steps()["accepted_tokens"].tolist() == [0, 2, 1]
    assert log.steps()["kv_tokens"].tolist() == [10, 13, 15]


class GrantsAllAtOnce(AsksOnce):
    """Grants all decodes at once."""

    def answer(self, view, builder):
        granted = builder.grant_all(view.running)
        return f"granted {granted}, {builder.tokens_left} left"


@pytest.mark.parametrize(
    ("left", "told"),
    [(10, "granted True, 1"), (9, "granted True, 0"), (8, "granted False, 8"),
     (3, "granted False, 3"), (2, "granted False, 2")],
)  # fmt: skip
def test_decodes_are_granted_at_once_if_they_and_all_their_drafts_just_fit(left, told):
    config = EngineConfig(
        num_blocks=100, max_model_len=400, num_speculative_tokens=2, max_num_batched_tokens=40
    )
    with pytest.raises(PolicyError, match=told):  # three of a token and two drafts
        hand_run(
            config, [laws.arrival(i, 0, 10, 20) for i in range(3)], policy=GrantsAllAtOnce(left)
        )


class PreemptsOnce(Policy):
    """Preempts who decodes at one of its plans, before or after granting it, and begins anew."""

    def __init__(self, at_plan, grants_first):
        self.at_plan = at_plan
        self.grants_first = grants_first
        self.granted = []

    def plan(self, view, builder):
        granted = 0
        if len(self.granted) == self.at_plan:
            (state,) = view.running
            if self.grants_first:
                builder.grant(state)
            builder.preempt(state)
        else:
            for state in (*view.running, *view.waiting):
                granted = builder.grant(state)
        self.granted.append(granted)
        return builder.build()


@pytest.mark.parametrize("names_drafts", [False, True])
@pytest.mark.parametrize("grants_first", [False, True])
@pytest.mark.parametrize(("at_plan", "computed", "fresh"), [(1, 4, 0), (2, 7, 2), (3, 10, 2)])
def test_accepted_drafts_are_found_again_behind_a_preemption_only_where_they_were_named(
    names_drafts, grants_first, at_plan, computed, fresh
):
    # Blocks of a token: 4 of the prompt, then 3 a step, of which 2 were drafted. They get names
    # when their request is scheduled next, which it was if it is granted before it is preempted.
    config = EngineConfig(
        num_blocks=100, max_model_len=40, block_size=1, num_speculative_tokens=2,
        enable_prefix_caching=True, names_accepted_drafts=names_drafts,
    )  # fmt: skip
    policy = PreemptsOnce(at_plan, grants_first)
    hand_run(config, [laws.arrival(0, 0, 4, 16)], policy=policy)
    named = computed - (0 if names_drafts or grants_first else fresh)
    again = policy.granted[at_plan + 1]
    assert policy.granted[:at_plan] == [4, 3, 3][:at_plan]
    assert again == computed + 1 - named


@pytest.mark.parametrize("grants_first", [False, True])
@pytest.mark.parametrize("at_plan", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_engine_that_plans_ahead_finds_again_what_it_knew_when_it_preempted(
    rate, at_plan, grants_first
):
    config = EngineConfig(
        num_blocks=100, max_model_len=60, block_size=1, num_speculative_tokens=2,
        enable_prefix_caching=True, async_scheduling=True,
    )  # fmt: skip
    policy = PreemptsOnce(at_plan, grants_first)
    hand_run(config, [laws.arrival(0, 0, 4, 30)], policy=policy, rates=(rate,))
    # The token to compute is unknown, and so are drafts accepted with it; where the next step was
    # not planned yet, the last of those before it as well. Of a prompt all is known.
    again = 1 + (2 if rate else 0) + (not grants_first) if at_plan > 1 else 1
    assert policy.granted[at_plan + 1] == again


def test_short_budget_cuts_drafts_and_not_requests():
    config = EngineConfig(
        num_blocks=100, max_model_len=40, max_num_batched_tokens=40, num_speculative_tokens=15,
        max_num_seqs=4,
    )  # fmt: skip
    log = hand_run(config, [laws.arrival(i, 0, 10, 20) for i in range(3)], rates=(0.0,))
    steps = log.steps()
    full = steps["num_decodes"] == 3
    assert full.any()
    assert (steps["draft_tokens"] + steps["num_decodes"])[full].max() == 40


def test_drafts_do_not_reach_beyond_the_longest_sequence():
    config = EngineConfig(num_blocks=4, max_model_len=16, block_size=4, num_speculative_tokens=8)
    log = hand_run(config, [laws.arrival(0, 0, 10, 6)], rates=(0.0,))
    # The last token is never computed, so a context of c has room for 16 - 2 - c drafted ones.
    assert log.steps()["draft_tokens"].tolist() == [0, 4, 3, 2, 1, 0]


def test_slots_of_rejected_drafts_stay_with_their_request():
    config = EngineConfig(num_blocks=40, max_model_len=40, block_size=1, num_speculative_tokens=3)
    log = hand_run(config, [laws.arrival(0, 0, 10, 4)], rates=(0.0,))
    # 10 of the prompt; then context + 1 + 3 while one token of them stays.
    assert log.steps()["kv_allocated_tokens"].tolist() == [10, 14, 15, 16]
    assert log.steps()["kv_tokens"].tolist() == [10, 11, 12, 13]


def test_slots_for_a_drafter_are_held_behind_prompts_and_answers_alike():
    config = EngineConfig(
        num_blocks=40, max_model_len=16, block_size=1, num_speculative_tokens=3,
        num_lookahead_tokens=3, max_num_batched_tokens=6,
    )  # fmt: skip
    log = hand_run(config, [laws.arrival(0, 0, 10, 4)], rates=(0.0,))
    # 6 and 4 of the prompt, and 3 more; then context + 1 + drafts + 3, at most 16.
    assert log.steps()["kv_allocated_tokens"].tolist() == [9, 13, 16, 16, 16]
    assert log.steps()["draft_tokens"].tolist() == [0, 0, 3, 3, 2]


def test_slots_for_a_drafter_keep_a_prompt_out_that_fits_alone():
    config = EngineConfig(
        num_blocks=20, max_model_len=20, block_size=1, num_speculative_tokens=2,
        num_lookahead_tokens=2,
    )  # fmt: skip
    together = [laws.arrival(0, 0, 10, 2), laws.arrival(1, 0, 10, 2)]
    assert hand_run(config, together).steps()["num_prefills"].tolist()[:2] == [1, 0]
    without = replace(config, num_lookahead_tokens=0)
    assert hand_run(without, together).steps()["num_prefills"].tolist()[:1] == [2]


def test_memory_that_victims_could_give_counts_their_slots_for_a_drafter():
    config = EngineConfig(
        num_blocks=20, max_model_len=20, block_size=1, num_speculative_tokens=2,
        num_lookahead_tokens=2,
    )  # fmt: skip
    fit = []

    class Asks(registry.policy_class("fcfs")):
        def plan(self, view, builder):
            if view.waiting and view.running:
                # It needs 19 of 20 blocks, those that were taken for tokens to come among them.
                fit.append(builder.fits_without(view.running, view.waiting.head))
            return super().plan(view, builder)

    hand_run(config, [laws.arrival(0, 0, 2, 9), laws.arrival(1, 0, 19, 1)], policy=Asks())
    assert fit
    assert all(fit)


@pytest.mark.parametrize(("spares", "drafts"), [(False, [0] * 5 + [1, 1]), (True, [0, 3])])
def test_largest_piece_of_a_request_cuts_its_drafts_too(spares, drafts):
    config = EngineConfig(
        num_blocks=100, max_model_len=400, num_speculative_tokens=3,
        long_prefill_token_threshold=2, threshold_spares_lone_request=spares,
    )  # fmt: skip
    log = hand_run(config, [laws.arrival(0, 0, 10, 5)])
    assert log.steps()["draft_tokens"].tolist() == drafts


def test_accepted_drafts_are_found_again_only_once_the_request_was_scheduled_anew():
    state = SpeculatingState(Request(0, 0, 7, 30), drafts=3)
    config = EngineConfig(num_blocks=9, max_model_len=36, block_size=4, num_speculative_tokens=3)
    batch = SpeculativeBatch(config)
    state._computed, state._generated = 7, 1
    outcome = DrawnAcceptance([1.0]).outcome(state.request, 30)
    state.track = look_ahead(config, state, outcome, 30)
    batch.join(state)
    assert state.fresh_tokens == 0
    batch.advance(1)
    assert (state.num_computed_tokens, state.fresh_tokens) == (11, 3)
    batch.leave(state)
    assert (state.num_computed_tokens, state.fresh_tokens) == (11, 3)
    state.computed(2, 0)
    assert state.fresh_tokens == 0


def test_table_of_batch_sizes_switches_drafts_off_under_load():
    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=3)
    workload = [laws.arrival(i, 0, 10, 5 + 10 * i) for i in range(3)]
    log = hand_run(config, workload, (0.0,), ByBatchSize([[2, 1], [3, 0]]))
    each = log.steps()["draft_tokens"] / np.maximum(log.steps()["num_decodes"], 1)
    decodes = log.steps()["num_decodes"]
    assert set(each[decodes == 3]) == {0.0}
    assert set(each[decodes == 2]) == {1.0}
    assert set(each[decodes == 1]) == {3.0}


def test_every_token_comes_out_of_a_verification_however_long_answers_are():
    # Sums of the steps to come are kept for some 1,000 steps, and move up when there is no room.
    config = EngineConfig(
        num_blocks=10_000, max_model_len=4_096, max_num_seqs=3, num_speculative_tokens=2
    )
    answers, acceptance = [900, 1_100, 1_000], DrawnAcceptance([0.2, 0.5], 0.0, seed=1)
    work = [laws.arrival(i, i * 300_000, 8, output) for i, output in enumerate(answers)]
    log = laws.run(
        registry.make("fcfs"), work, config, laws.LinearCost(1000, 0, 0), prove=False,
        make_executor=lambda pricing: SpeculativeExecutor(
            pricing, config, acceptance, NgramDrafter(0.0)
        ),
    )  # fmt: skip
    steps = log.steps()
    tokens = steps["num_decodes"] + steps["accepted_tokens"]
    assert tokens.sum() == sum(answers) - len(answers), "the first of each comes with its prompt"
    seen = np.concatenate([log.token_times(i) for i in range(3)])
    ends, counts = np.unique(seen, return_counts=True)
    came = dict(zip(ends.tolist(), counts.tolist(), strict=True))
    for end_ns, num_tokens, prompts in zip(
        steps["end_ns"].tolist(), tokens.tolist(), steps["num_prefills"].tolist(), strict=True
    ):
        assert came[end_ns] == num_tokens + prompts


def test_slots_of_rejected_drafts_are_held_when_the_next_are_drafted():
    config = EngineConfig(max_model_len=400, num_blocks=40, num_speculative_tokens=3)
    state = SpeculatingState(Request(0, 0, 100, 50), drafts=3)
    state.computed(100, ahead_tokens=5)
    assert one_ahead(config, state, 2).held(0) == 105


def test_extremes_and_sums_of_a_batch_are_those_of_its_members_however_they_come_and_go():
    draw = random.Random(5)
    config = EngineConfig(
        num_blocks=9_000, max_model_len=9_000, num_speculative_tokens=3, num_lookahead_tokens=1
    )
    batch = SpeculativeBatch(config)
    acceptance = DrawnAcceptance([0.6])
    ends = {}
    for number in range(400):
        if number % 4 == 0:
            state = SpeculatingState(Request(number, 0, draw.randrange(1, 3_000), 900), drafts=3)
            state._computed, state._generated = state.request.prompt_tokens, 1
            state.draft_once = draw.choice((-1, 0, 2))
            length = draw.choice((20, 200, 800))
            outcome = acceptance.outcome(state.request, length)
            state.track = look_ahead(config, state, outcome, length)
            batch.join(state)
            ends[state] = batch.steps + len(state.track.bursts)
        going = [state for state in ends if draw.random() < 0.01]
        for state in going:  # some come back at once
            batch.leave(state)
            if draw.random() < 0.5:
                batch.join(state)
            else:
                del ends[state]
        if not ends:
            continue
        steps = min([draw.choice((1, 1, 3, 40)), *(end - batch.steps for end in ends.values())])
        shape = BatchShape(batch.size, batch.context_sum_tokens, 0)
        priced = batch.uneven(shape, steps).shapes()
        for i, one in enumerate(priced[:steps]):
            contexts = [state.num_computed_tokens for state in ends]
            assert batch.context_sum_tokens == sum(contexts) == one.decode_context_sum_tokens
            assert batch.context_max_tokens == max(contexts)
            assert batch.context_min_tokens == min(contexts)
            if i:  # the first is as it was given
                assert one.decode_context_max_tokens == max(contexts)
                assert one.decode_context_min_tokens == min(contexts)
            assert batch.drafts_next_step() == sum(state.decode_tokens - 1 for state in ends)
            assert batch.blocks_next_step() == sum(batch.blocks_of(state) for state in ends)
            batch.advance(1)
        for state in [state for state, end in ends.items() if end == batch.steps]:
            batch.leave(state)
            del ends[state]
    assert batch.steps > 500


@pytest.mark.parametrize("gone", [0, 3_000])
def test_batch_looks_as_far_ahead_as_the_longest_answer_goes(gone):
    # Sums of steps to come are kept in pieces; an answer may have more verifications than several.
    config = EngineConfig(num_blocks=2_000, max_model_len=20_000, num_speculative_tokens=2)
    batch, states, length = SpeculativeBatch(config), [], 9_000
    for number, waits in enumerate((0, gone)):
        batch.advance(waits) if states else None
        state = SpeculatingState(Request(number, 0, 5, length), drafts=2)
        state._computed, state._generated = 5, 1
        outcome = DrawnAcceptance([0.05], seed=7).outcome(state.request, length)
        state.track = look_ahead(config, state, outcome, length)
        batch.join(state)
        states.append(state)
    bursts = [state.track.bursts for state in states]
    steps = min(len(bursts[0]) - gone, len(bursts[1]))
    assert steps > 5_000
    for at in range(0, steps - 100, 97):
        came = sum(bursts[0][gone + at :][:97]) + sum(bursts[1][at:][:97])
        assert batch.advance(97) == came
        assert batch.context_sum_tokens == sum(state.num_computed_tokens for state in states)


def test_batch_told_of_drafts_when_they_are_verified_is_the_one_that_knew():
    draw = random.Random(3)
    config = EngineConfig(
        num_blocks=500, max_model_len=400, block_size=4, num_speculative_tokens=3,
        num_lookahead_tokens=2,
    )  # fmt: skip
    knew, told = SpeculativeBatch(config), SpeculativeBatch(config)
    knew.counts_cut_short = told.counts_cut_short = True
    pairs = []
    for number in range(6):
        prompt, length = draw.randrange(1, 300), 100
        drafts = [(n, draw.randint(0, n)) for n in (draw.randrange(4) for _ in range(length))]
        outcome = _Recorded(drafts)
        states = [SpeculatingState(Request(number, 0, prompt, 100), drafts=3) for _ in range(2)]
        for state in states:
            state._computed, state._generated = prompt, 1
        states[0].track = look_ahead(config, states[0], outcome, length)
        states[1].track = one_ahead(config, states[1], states[0].track.drafted[0])
        knew.join(states[0])
        told.join(states[1])
        pairs.append(states)
    while pairs:
        for ahead, behind in pairs:
            track, i = ahead.track, ahead._verification()
            came, accepted = track.bursts[i], track.drafted[i] - track.cut_short(i)
            if i < len(track.bursts) - 1:
                accepted, following = came - 1, track.drafted[i + 1]
            else:
                following = None
            told.settle(behind, came, accepted, following)
        assert written(told) == written(knew)
        assert told.blocks_next_step() == knew.blocks_next_step()
        assert told.drafting_rows(1) == knew.drafting_rows(1)
        for batch in (knew, told):
            batch.advance(1)
        assert told.num_cut_short == knew.num_cut_short
        for ahead, behind in list(pairs):
            assert behind.num_computed_tokens == ahead.num_computed_tokens
            if ahead._verification() == len(ahead.track.bursts):
                pairs.remove([ahead, behind])
                knew.leave(ahead)
                told.leave(behind)
                assert told.last_tokens == knew.last_tokens
                assert behind.spare_tokens == ahead.spare_tokens
    assert told.num_cut_short > 50
    assert told.size == told.drafts_next_step() == knew.drafts_next_step() == 0


def written(batch):
    """Return what a batch writes of its next step."""
    log = BytesWriter()
    batch.write_verifications(1, log)
    return log.getvalue()


@pytest.mark.parametrize(("lookahead", "plans_ahead"), [(2, False), (0, True), (2, True)])
def test_memory_bounds_the_steps_of_a_batch_to_those_that_fit(lookahead, plans_ahead):
    config = EngineConfig(
        num_blocks=100, max_model_len=400, block_size=4, num_speculative_tokens=3,
        num_lookahead_tokens=lookahead, async_scheduling=plans_ahead,
    )  # fmt: skip
    batch = SpeculativeBatch(config)
    for number in range(5):
        state = SpeculatingState(Request(number, 0, 7 + number, 300), drafts=3)
        state._computed, state._generated = 7 + number, 1
        outcome = DrawnAcceptance([0.5]).outcome(state.request, 300)
        state.track = look_ahead(config, state, outcome, 300)
        batch.join(state)
    blocks = batch.blocks_per_step(64)
    for free in range(sum(blocks) + 2):
        for at_most in (1, 7, 64, 1_000):
            fitting = [
                n for n in range(min(at_most, 64) + 1) if sum(blocks[:n]) <= free
            ]  # fmt: skip
            assert batch.steps_within(free, at_most) == fitting[-1]
    assert batch.steps_within(10**6, 1_000) == 64


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("most", [0, 1, 4])
@pytest.mark.parametrize("stop", [1, 2, 30, 57, 60])
def test_verifications_told_at_once_are_those_told_one_by_one(rate, most, stop):
    request = Request(4, 0, 1, 60)
    # Several rates, though alike, are gone through token by token.
    outcomes = [
        DrawnAcceptance(rates, seed=3).outcome(request, 60) for rates in ([rate], [rate] * 2)
    ]
    for place in (0, 1, 17):
        one_by_one = [verify_one_by_one(outcome, place, most, stop) for outcome in outcomes]
        at_once = [outcome.verify_on(place, most, stop) for outcome in outcomes]
        assert one_by_one[0] == one_by_one[1] == at_once[0] == at_once[1]


def test_more_drafts_than_a_byte_of_the_log_can_tell_are_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens must be <= 254, got 255"):
        EngineConfig(num_blocks=9, max_model_len=36, num_speculative_tokens=255)


def test_schedule_with_one_number_of_requests_twice_is_refused():
    with pytest.raises(ValueError, match="must ascend in its numbers of requests"):
        ByBatchSize([[2, 3], [2, 1]])


def test_promise_of_a_plan_that_drafts_less_is_of_one_step():
    promised = []

    class DraftsLess(ContinuousBatching):
        def plan(self, view, builder):
            for state in view.running:
                builder.grant(state, 2)
            for state in view.waiting:
                builder.grant(state)
            plan = builder.build(max_steps=FOREVER)
            promised.append((len(plan.trimmed), plan.max_steps))
            return plan

    config = EngineConfig(num_blocks=100, max_model_len=400, num_speculative_tokens=3)
    hand_run(config, [laws.arrival(0, 0, 5, 9)], rates=(0.5,), policy=DraftsLess())
    assert promised[0] == (0, FOREVER)
    assert len(promised) > 3
    assert (1, 1) in promised
    assert (1, FOREVER) not in promised


def test_what_was_accepted_last_is_no_more_when_memory_is_lost():
    state = SpeculatingState(Request(0, 0, 7, 30), drafts=3)
    state.computed(7, ahead_tokens=4)
    state._fresh = 2
    assert (state.spare_tokens, state.fresh_tokens) == (4, 2)
    state.lost_memory()
    assert (state.spare_tokens, state.fresh_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("keys", "rates", "spread"),
    [
        ({"rate": 0.0}, (0.0,), 0.0), ({"rate": 0.7, "spread": 0.1}, (0.7,), 0.1),
        ({"rates": [0.8, 0.0]}, (0.8, 0.0), 0.0),
    ],
)  # fmt: skip
def test_acceptance_is_drawn_by_the_rates_that_are_given_though_they_be_nothing(
    monkeypatch, keys, rates, spread
):
    monkeypatch.setattr(speculation_of, "_drawn", lambda *given: given)
    spec = make_spec({
        "workload": {"trace": "azure-conv", "num_requests": 3},
        "engine": {"async_scheduling": False, "speculation": NGRAM | {"acceptance": keys}},
    })  # fmt: skip
    assert speculation_of._acceptance(spec.engine.speculation, 9) == (rates, spread, 9)


def test_tokens_due_are_those_of_a_step_for_who_is_on_pace_and_one_more_for_each_behind():
    for got, since_ms, tpot_ms in ((1, 0, 20), (3, 40, 20), (3, 60, 20), (5, 40, 20), (2, 5, 10)):
        slo = Slo(tpot_ms=tpot_ms)
        state = SimpleNamespace(
            request=SimpleNamespace(slo=slo),
            first_token_ns=7_000_000,
            num_output_tokens=got,
        )
        behind = since_ms / tpot_ms - (got - 1)
        due = slo_lengths._tokens_due(state, 7_000_000 + since_ms * 1_000_000, 5.0)
        assert due == pytest.approx(behind + 5.0 / tpot_ms)
    state.first_token_ns = -1
    assert slo_lengths._tokens_due(state, 10**9, 5.0) == 1.0
    state.first_token_ns, state.request.slo = 0, Slo(ttft_ms=3)
    assert slo_lengths._tokens_due(state, 10**9, 5.0) == 1.0
    state.request.slo = None
    assert slo_lengths._tokens_due(state, 10**9, 5.0) == 1.0


def test_simulated_gpu_draws_acceptance_by_the_seed_of_the_run(monkeypatch):
    monkeypatch.setattr(speculation_of, "_acceptance", lambda *given: ("acceptance", *given))
    monkeypatch.setattr(speculation_of, "SpeculativeExecutor", lambda *given: given)
    drafts = SimpleNamespace(spec="spec", drafter="drafter")
    found = speculation_of.simulated_gpu("pricing", "config", drafts, 17)
    assert found == ("pricing", "config", ("acceptance", "spec", 17), "drafter")
