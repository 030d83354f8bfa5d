"""What steps take, overhead included, and which of those that ran were extrapolated."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import ContinuousBatching, registry
from schedlab.policies.step_load import StepLoad
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import ExtrapolationWarning, Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(num_blocks=100, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64)
OVERHEAD = SchedulingOverhead(
    base_s=100e-9, per_running_s=10e-9, per_waiting_s=1e-9, per_prefill_step_s=1000e-9
)
PROFILE = next((Path(__file__).parents[2] / "profiles" / "cpu").rglob("fit.json")).parent


class Bounded(LinearCost):
    """Measured up to a context of 20 tokens, and up to three rows."""

    def outside(self, shape, k=1):
        contexts = [j for j in range(k) if shape.decode_context_max_tokens + j > 20]
        rows = list(range(k)) if shape.num_decodes > 3 else []
        found = {"context": contexts, "rows": rows}
        return {feature: steps for feature, steps in found.items() if steps}


@pytest.mark.parametrize(("chunks", "more_ns"), [((), 0), (((8, 0),), 1000)])
def test_estimate_is_the_cost_models_step_and_the_overhead_of_its_batch(chunks, more_ns):
    shape = BatchShape(2, 30, 20, chunks, num_running=5, num_waiting=7)
    pricing = Pricing(LinearCost(), OVERHEAD)
    kernels_ns = LinearCost().step_ns(shape)[0]
    assert pricing.overhead_ns(shape) == 100 + 5 * 10 + 7 * 1 + more_ns
    assert pricing.estimate_ns(shape) == kernels_ns + 100 + 5 * 10 + 7 * 1 + more_ns
    assert SimExecutor(pricing).estimate_step_ns(shape) == pricing.estimate_ns(shape)


TERMS = (
    "base_s", "per_running_s", "per_waiting_s", "per_prefill_step_s", "first_step_s",
    "per_queued_step_s",
)  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("value", [-1e-12, 1e9 + 1, float("nan"), float("inf")])
def test_overhead_with_one_term_that_cannot_be_is_refused_by_its_name(term, value):
    with pytest.raises(SpecError, match=rf"overhead: {term} must be finite and >= 0"):
        SchedulingOverhead(**{term: value})
    assert getattr(SchedulingOverhead(**{term: 1e9}), term) == 1e9


@pytest.mark.parametrize(
    ("term", "without", "with_prefills"),
    [("base_s", 7, 7), ("per_running_s", 7 * 3, 7 * 3), ("per_waiting_s", 7 * 5, 7 * 5),
     ("per_prefill_step_s", 0, 7), ("first_step_s", 0, 0), ("per_queued_step_s", 7, 7)],
)  # fmt: skip
def test_each_term_of_overhead_counts_what_its_name_says(term, without, with_prefills):
    overhead = SchedulingOverhead(**{term: 7.4e-9})
    rounded = [round(ns * 7.4 / 7) for ns in (without, with_prefills)]
    assert [overhead.ns(3, 5), overhead.ns(3, 5, has_prefills=True)] == rounded


def test_overhead_of_a_queue_is_none_while_nobody_waits():
    overhead = SchedulingOverhead(base_s=2e-9, per_queued_step_s=7e-9)
    assert [overhead.ns(3, waiting) for waiting in (0, 1, 2)] == [2, 9, 9]


def test_estimate_of_steps_is_the_longest_of_them():
    pricing = Pricing(LinearCost(), OVERHEAD)
    last = BatchShape(2, 30 + 2 * 4, 20 + 4, num_running=5)
    first = BatchShape(2, 30, 20, num_running=5)
    assert SimExecutor(pricing).estimate_step_ns(first, 5) == pricing.estimate_ns(last)


class NeverFalling(LinearCost):
    """As it is, said aloud; notes for how many steps it was asked."""

    never_falls = True

    def __init__(self):
        super().__init__()
        self.asked = []

    def step_ns(self, shape, k=1):
        self.asked.append(k)
        return super().step_ns(shape, k)


def test_estimate_of_steps_that_never_fall_asks_for_the_last_alone():
    cost = NeverFalling()
    shape = BatchShape(2, 30, 20, num_running=5, decode_context_min_tokens=10)
    expected_ns = Pricing(LinearCost(), OVERHEAD).estimate_ns(shape, 9)
    assert Pricing(cost, OVERHEAD).estimate_ns(shape, 9) == expected_ns
    assert cost.asked == [1]


@pytest.mark.parametrize("chunks", [(), ((7, 0),)])
def test_estimate_by_a_chunk_is_that_of_the_step_with_it_overhead_included(chunks):
    pricing = Pricing(LinearCost(), OVERHEAD)
    shape = BatchShape(2, 30, 20, chunks, rows_sampled=3, num_running=5, num_waiting=7)
    price_ns = pricing.chunk_pricer(shape, 16)
    for tokens in (1, 40):
        assert price_ns(tokens) == pricing.estimate_ns(shape.with_chunk(tokens, 16))
    with_chunk = replace(shape, chunks=(*chunks, (40, 16)), rows_sampled=4)
    assert shape.with_chunk(40, 16) == with_chunk


@pytest.mark.parametrize("guess", [0, 1, 2, 20, 59, 60, 99])
@pytest.mark.parametrize("says", [True, False])
def test_search_for_a_chunk_finds_the_same_whatever_is_guessed_or_said_of_prices(says, guess):
    cost = LinearCost()
    cost.never_falls = says
    found = set()

    class Searches(ContinuousBatching):
        def plan(self, view, builder):
            for state in view.waiting:
                for budget_ns in range(0, 9000, 97):
                    load = StepLoad(view)
                    most = load.chunk_within(state, 60, budget_ns, guess)
                    shape = BatchShape(0, 0, 0)
                    took_ns = [
                        view.estimate_step_ns(shape.with_chunk(n, 0)) for n in (most, most + 1) if n
                    ]
                    assert took_ns[0] <= budget_ns or not most
                    assert most == 60 or took_ns[-1] > budget_ns
                    found.add(most)
            return super().plan(view, builder)

    work = [arrival(0, prompt=60, output=2)]
    simulate(Engine(CONFIG, Searches(), SimExecutor(Pricing(cost))), work)
    assert {0, 60} < found


class Attending(LinearCost):
    """A prompt reads what is computed of it."""

    def step_ns(self, shape, k=1):
        more_ns = 7 * sum(context for _, context in shape.chunks)
        return [ns + more_ns for ns in super().step_ns(shape, k)]


def test_chunk_of_a_prompt_is_priced_behind_what_is_computed_of_it():
    found = set()

    class Searches(ContinuousBatching):
        def plan(self, view, builder):
            for state in view.prefilling:
                assert (state.num_computed_tokens, state.num_uncomputed_tokens) == (64, 36)
                price_ns = view.chunk_pricer(BatchShape(0, 0, 0), 64)
                for tokens in (1, 20, 35):
                    most = StepLoad(view).chunk_within(state, 36, price_ns(tokens))
                    found.add((tokens, most))
            return super().plan(view, builder)

    work = [arrival(0, prompt=100, output=2)]
    simulate(Engine(CONFIG, Searches(), SimExecutor(Pricing(Attending()))), work)
    assert found == {(1, 1), (20, 20), (35, 35)}


def test_policy_is_told_what_its_step_then_takes_overhead_included():
    estimates = []

    class Asking(ContinuousBatching):
        """First come, first served, and asks what a decode will take."""

        def plan(self, view, builder):
            for state in view.running:
                context = state.num_computed_tokens
                shape = BatchShape(1, context, context, num_running=1)
                estimates.append(view.estimate_step_ns(shape))
            return super().plan(view, builder)

    config = replace(CONFIG, fast_forward=False)
    engine = Engine(config, Asking(), SimExecutor(Pricing(LinearCost(), OVERHEAD)))
    steps = simulate(engine, [arrival(0, prompt=5, output=4)]).steps()
    assert estimates == (steps["end_ns"] - steps["start_ns"])[1:].tolist()
    assert len(estimates) == 3


@pytest.mark.filterwarnings("ignore::schedlab.sim.cost.pricing.ExtrapolationWarning")
def test_only_steps_that_are_carried_out_count_each_once():
    pricing = Pricing(Bounded())
    far = BatchShape(4, 60, 19)  # context 19, 20 inside; 21, 22, 23 outside; the rows always
    pricing.estimate_ns(far)
    assert (pricing.extrapolated_steps, pricing.extrapolated_by_feature) == (0, {})
    pricing.carried_out(BatchShape(3, 30, 10), 11)
    assert pricing.extrapolated_steps == 0
    pricing.carried_out(BatchShape(3, 30, 10), 12)
    pricing.carried_out(far, 5)
    assert pricing.extrapolated_steps == 1 + 5
    assert pricing.extrapolated_by_feature == {"context": 1 + 3, "rows": 5}
    pricing.cut(far, 5, 3)
    assert pricing.extrapolated_steps == 1 + 3
    assert pricing.extrapolated_by_feature == {"context": 1 + 1, "rows": 3}


def test_first_step_outside_is_warned_of_and_no_other():
    pricing = Pricing(Bounded())
    with pytest.warns(ExtrapolationWarning, match=r"cost model linear: .*\(context\)"):
        pricing.carried_out(BatchShape(1, 21, 21))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pricing.carried_out(BatchShape(4, 84, 21))


@pytest.mark.filterwarnings("ignore::schedlab.sim.cost.pricing.ExtrapolationWarning")
@pytest.mark.parametrize("lookahead", [True, False])
def test_count_is_the_same_whether_steps_are_taken_at_once_cut_off_or_taken_one_by_one(lookahead):
    # Arrivals in the middle of long runs of decodes: without lookahead each cuts one off.
    work = [arrival(i, 9_000 * i, prompt=6, output=25) for i in range(5)]

    def counted(config, lookahead):
        pricing = Pricing(Bounded())
        engine = Engine(config, registry.make("fcfs"), SimExecutor(pricing))
        coming, now_ns = list(work), 0
        while coming or engine.requests.num_in_flight:
            while coming and coming[0].ready_ns <= now_ns:
                engine.submit(coming.pop(0), now_ns)
            next_ns = coming[0].ready_ns if coming else FOREVER
            if engine.begin(now_ns, next_ns if lookahead else FOREVER) is None:
                now_ns = next_ns
                continue
            if not lookahead:
                engine.cut(next_ns)
            engine.commit()
            now_ns = engine.now_ns
        return pricing.extrapolated_steps, pricing.extrapolated_by_feature, engine.log.num_steps

    one_by_one = counted(replace(CONFIG, fast_forward=False), lookahead=True)
    assert counted(CONFIG, lookahead) == one_by_one
    assert 0 < one_by_one[0] < one_by_one[2]


@pytest.mark.filterwarnings("ignore::schedlab.sim.cost.pricing.ExtrapolationWarning")
@pytest.mark.parametrize("policy", ["fcfs", {"name": "qoserve", "ttft_s": 1.0, "tbt_s": 0.05}])
@pytest.mark.parametrize(
    ("data_parallel_size", "pools"),
    [(1, None), (2, None), (1, {"pools": {"a": {}, "b": {}}, "router": "round_robin"})],
)
def test_run_does_not_report_more_extrapolated_steps_than_steps(policy, data_parallel_size, pools):
    spec = make_spec(
        {
            "model": "schedlab-tiny",
            "hardware": "cpu",
            "cost_model": {"profile": str(PROFILE), "allow_mismatch": True},
            "policy": policy,
            "cluster": pools,
            "engine": {"data_parallel_size": data_parallel_size, "num_gpu_blocks_override": 2000},
            "workload": {
                "num_requests": 20, "prompt_tokens": 1500, "output_tokens": 8, "request_rate": 50,
            },
        }
    )  # fmt: skip
    result = run(spec)
    provenance = result.provenance
    assert 0 < provenance["extrapolated_steps"] <= provenance["num_steps"]
    if pools is not None:  # counted in all of them
        of_pool = np.bincount(result.log.steps()["engine"])
        assert provenance["extrapolated_steps"] > of_pool.max()
    assert max(provenance["extrapolated_by_feature"].values()) <= provenance["extrapolated_steps"]
    assert "extrapolated_steps" not in provenance["cost_model"]


class Dearer(LinearCost):
    """A decode takes so much longer, and a prompt."""

    never_falls = True

    def __init__(self, decode_ns, prompt_ns):
        super().__init__()
        self.more_ns = decode_ns, prompt_ns

    def step_ns(self, shape, k=1):
        decode_ns, prompt_ns = self.more_ns
        more_ns = decode_ns * shape.num_decodes + prompt_ns * len(shape.chunks)
        return [ns + more_ns for ns in super().step_ns(shape, k)]


@pytest.mark.parametrize(
    ("decode_ns", "prompt_ns", "full_ns", "room_ns"),
    [(0, 0, 1009, 1010), (9, 0, 1009, 1010), (0, 9, 1009, 1010), (9, 30, 1018, 1019)],
)
def test_step_is_full_where_neither_a_decode_nor_a_token_of_a_prompt_ends_in_time(
    decode_ns, prompt_ns, full_ns, room_ns
):
    seen = []

    class Asks(ContinuousBatching):
        def plan(self, view, builder):
            load = StepLoad(view)
            if len(view.waiting):
                seen.append(load.is_full(0))  # the first of a step is taken whatever its time
                load.add(view.waiting.head, 20)
                seen.extend(load.is_full(200 + prompt_ns + ns) for ns in (full_ns, room_ns))
            return super().plan(view, builder)

    cost = Dearer(decode_ns, prompt_ns)
    for never_falls in (True, False):
        cost.never_falls = never_falls
        engine = Engine(CONFIG, Asks(), SimExecutor(Pricing(cost)))
        simulate(engine, [arrival(0, prompt=30, output=1)])
    assert seen == [False, True, False, False, False, False]
