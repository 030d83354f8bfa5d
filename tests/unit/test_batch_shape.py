"""What of a step reaches the cost model, traced by hand."""

from dataclasses import replace

import pytest

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan_log import RecordingExecutor
from schedlab.sim.cost.fitted import FittedCostModel
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.profile import Fit, FitError, Regime
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.cost.table import TableCostModel
from schedlab.sim.cost.table_profile import Curve, TableProfile
from schedlab.sim.drive.simulation import simulate
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(
    num_blocks=100, max_model_len=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=16
)
META = {"model": "llama-3-8b", "hardware": "a100", "dtype": "bf16", "tensor_parallel_size": 1}
NO_ERROR = FitError(mape=0.0, p90=0.0, max=0.0, bias=0.0, num_points=1)
# 1,000 ns a step, 100 ns a row that decodes, for whomever.
FITTED = FittedCostModel(
    Fit(
        Regime((1, 100), (1e-6, 1e-6), {"num_decodes": 100e-9}),
        None,
        {"new_tokens": (1.0, 100.0), "num_decodes": (1.0, 8.0)},
        train=NO_ERROR,
        held_out=NO_ERROR,
    ),
    META,
)
# Experts whose time is that of all tokens in the step, 1 us a token.
EXPERTS = TableCostModel(
    TableProfile(
        by_tokens=(
            Curve("dense", 1, (1.0, 100.0), (10.0, 10.0)),
            Curve("experts", 1, (1.0, 101.0), (1.0, 101.0), shared=True),
        ),
        by_requests=(Curve("head", 1, (1.0, 100.0), (10.0, 10.0)),),
        attention={
            "prefill_chunk": [0, 64, 64],
            "kv_prefill": [0, 0, 0],
            "num_decodes": [8, 0, 8],
            "kv_decode": [64, 0, 64],
            "us": [5.0, 5.0, 5.0],
        },
        attention_calls=1,
    ),
    META,
)


def recorded(workload, policy="fcfs", config=CONFIG, cost=None, **knobs):
    """Run step by step; return the steps with their shapes."""
    executor = RecordingExecutor(SimExecutor(Pricing(cost or LinearCost())))
    simulate(Engine(config, registry.make(policy, **knobs), executor), workload)
    return executor.steps


def shapes(*args, **options):
    return [step.shape for step in recorded(*args, **options)]


SEALED = [arrival(i, 0, 2, 2 if i else 4) for i in range(4)]


def test_rows_of_finished_requests_are_padding_and_nobody_elses_tokens():
    last = shapes(SEALED, "static")[-1]
    assert last == BatchShape(
        num_decodes=1,
        decode_context_sum_tokens=4,
        decode_context_max_tokens=4,
        decode_context_min_tokens=4,
        padding_tokens=3,
        padding_rows=3,
        padding_context_tokens=9,
        rows_sampled=4,
        num_running=1,
        gathered_tokens=0,
    )


def test_fitted_profile_charges_the_rows_of_finished_requests_as_decodes():
    steps = recorded(SEALED, "static", cost=FITTED)
    # Four rows are computed in every decode step, whoever still needs them.
    assert [step.duration_ns for step in steps] == [1000, 1400, 1400, 1400]


def test_experts_see_every_token_of_the_step_and_not_the_finished_rows_alone():
    steps = recorded(SEALED, "static", cost=EXPERTS)
    # 25 us, and 1 us for each of 8 prompt tokens, then of the 4 rows of each decode step.
    assert [step.duration_ns for step in steps] == [33_000, 29_000, 29_000, 29_000]


def test_shortest_and_longest_context_of_the_decodes_reach_the_cost_model():
    assert [
        (s.decode_context_min_tokens, s.decode_context_max_tokens, s.decode_context_sum_tokens)
        for s in shapes([arrival(0, 0, 9, 4), arrival(1, 0, 3, 3)])
    ] == [(0, 0, 0), (3, 9, 12), (4, 10, 14), (11, 11, 11)]


def test_finished_prefills_are_sampled_and_unfinished_ones_are_not():
    # Prompts of 4 and 20 with 16 tokens a step: the second one ends in the second step.
    steps = shapes([arrival(0, 0, 4, 3), arrival(1, 0, 20, 2)])
    assert [s.rows_sampled for s in steps] == [1, 2, 2]
    assert [s.chunks for s in steps] == [((4, 0), (12, 0)), ((8, 12),), ()]


def test_last_token_of_a_prompt_is_a_prefill_and_no_decode():
    steps = shapes([arrival(0, 0, 17, 2)])
    assert [s.chunks for s in steps] == [((16, 0),), ((1, 16),), ()]
    assert [s.num_decodes for s in steps] == [0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "padding"), [(1, 0), (2, 0), (3, 1), (4, 0), (5, 3), (8, 0), (9, 0)]
)
def test_graph_padding_of_a_captured_size_is_none(prompt, padding):
    config = replace(CONFIG, cudagraph_capture_sizes=(1, 2, 4, 8))
    assert shapes([arrival(0, 0, prompt, 1)], config=config)[0].padding_tokens == padding


@pytest.mark.parametrize(
    ("chunks", "decodes", "contexts", "left"),
    [
        (((1, 7), (5, 2), (1, 90)), 4, (97 + 60, 90, 7), ((5, 2),)),
        (((1, 25),), 3, (25 + 60, 40, 20), ()),
        (((2, 25),), 2, (60, 40, 20), ((2, 25),)),
        ((), 2, (60, 40, 20), ()),
    ],
)
def test_chunks_of_one_token_are_decode_rows_where_they_are_priced_as_such(
    chunks, decodes, contexts, left
):
    shape = BatchShape(2, 60, 40, chunks, 3, 9, 5, 11, 6, 8, 20, 1, 2, 0)
    total, longest, shortest = contexts
    assert shape.with_single_tokens_decoded() == BatchShape(
        decodes, total, longest, left, 3, 9, 5, 11, 6, 8, shortest, 1, 2, 0
    )


def test_chunk_of_one_token_is_the_only_decode_row_of_a_step_without_any():
    shape = BatchShape(0, 0, 0, ((1, 30),), rows_sampled=1).with_single_tokens_decoded()
    assert shape == BatchShape(1, 30, 30, rows_sampled=1, decode_context_min_tokens=30)
