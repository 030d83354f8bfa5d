"""Switches of real engines, each traced by hand; the clock of `LinearCost` is simple."""

from dataclasses import replace

import pytest

from schedlab.policies import ContinuousBatching, registry
from schedlab.sim.config import EngineConfig, vllm_capture_sizes
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan_log import RecordingExecutor
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import InfeasiblePlan
from tests import laws
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(num_blocks=100, max_model_len=100, block_size=4, max_num_seqs=2)
COST = LinearCost(base_ns=100, token_ns=0, context_ns=0)  # every step takes 100 ns


def run(workload, config=CONFIG, policy="fcfs", **options):
    return laws.run(registry.make(policy), workload, config, cost=COST, **options)


def test_async_engine_schedules_an_arrival_one_step_later():
    workload = [arrival(0, 0, 1, 6), arrival(1, 150, 1, 1)]
    assert run(workload).requests()["first_scheduled_ns"][1] == 200
    config = replace(CONFIG, async_scheduling=True)
    # The step at 200 was planned at 100, before it came.
    assert run(workload, config).requests()["first_scheduled_ns"][1] == 300


def test_async_engine_knows_at_a_plan_who_came_before_the_start_of_the_last_of_growing_steps():
    # Of the steps skipped at once the first is the shortest, and the last takes 25 ns more.
    cost, config = LinearCost(100, 0, 5), replace(CONFIG, async_scheduling=True)
    starts = laws.run(
        registry.make("fcfs"), [arrival(0, 0, 1, 12)], laws.slow(config), cost
    ).steps()["start_ns"]
    for late_ns in (-1, 0, 1, 10, 24):
        workload = [arrival(0, 0, 1, 12), arrival(1, int(starts[7]) + late_ns, 1, 1)]
        log = laws.run(registry.make("fcfs"), workload, config, cost)
        first = log.requests()["first_scheduled_ns"][1]
        assert first == starts[9 if late_ns > 0 else 8], late_ns


def test_async_engine_when_idle_starts_at_once():
    config = replace(CONFIG, async_scheduling=True)
    log = run([arrival(0, 0, 1, 1), arrival(1, 150, 1, 1)], config)
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 150]


def test_async_engine_frees_a_seat_one_step_after_the_finish():
    config = replace(CONFIG, max_num_seqs=2)
    workload = [arrival(0, 0, 1, 2), arrival(1, 0, 1, 9), arrival(2, 0, 1, 1)]
    # Request 0 finishes at 200.
    assert run(workload, config).requests()["first_scheduled_ns"][2] == 200
    log = run(workload, replace(config, async_scheduling=True))
    assert log.requests()["first_scheduled_ns"][2] == 300
    assert log.steps()["num_running"].tolist()[:4] == [2, 2, 1, 2]


def test_async_engine_with_everybody_leaving_does_not_stall():
    config = replace(CONFIG, max_num_seqs=1, async_scheduling=True)
    log = run([arrival(i, 0, 1, 1) for i in range(3)], config)
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 100, 200]


def test_arrivals_between_steps_are_queued_when_the_step_ends():
    config = replace(CONFIG, arrivals_between_steps=True)
    workload = [arrival(0, 0, 1, 6), arrival(1, 150, 1, 1), arrival(2, 5000, 1, 1)]
    requests = run(workload, config).requests()
    assert requests["queued_ns"].tolist() == [0, 200, 5000]
    assert requests["arrival_ns"].tolist() == [0, 150, 5000]
    assert requests["first_scheduled_ns"].tolist() == [0, 200, 5000]


def test_async_arrivals_between_steps_wait_for_the_plan_after_their_intake():
    config = replace(CONFIG, arrivals_between_steps=True, async_scheduling=True)
    requests = run([arrival(0, 0, 1, 6), arrival(1, 150, 1, 1)], config).requests()
    assert requests["queued_ns"].tolist() == [0, 200]
    assert requests["first_scheduled_ns"].tolist() == [0, 300]


def test_without_switches_a_request_is_queued_when_it_arrives():
    assert run([arrival(0, 0, 1, 6), arrival(1, 150, 1, 1)]).requests()["queued_ns"][1] == 150


def test_graph_padding_rounds_tokens_up_to_a_captured_size():
    config = replace(CONFIG, cudagraph_capture_sizes=(1, 2, 4), max_num_seqs=8)
    log = run([arrival(i, 0, 1, 2) for i in range(3)] + [arrival(3, 1000, 5, 1)], config)
    steps = log.steps()
    tokens = steps["num_decodes"] + steps["prefill_tokens"]
    assert tokens.tolist() == [3, 3, 5]
    assert steps["padding_tokens"].tolist() == [1, 1, 0], "beyond the largest graph no padding"


def test_default_capture_sizes_are_those_of_a_recorded_vllm_run():
    # cudagraph_capture_sizes of a vLLM 0.19 engine with max_num_seqs 256, as it logged them.
    sizes = vllm_capture_sizes(256)
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-3:] == (480, 496, 512)
    assert len(sizes) == 51
    assert vllm_capture_sizes(128)[-1] == 256


def test_host_terms_are_charged_to_the_steps_they_belong_to():
    overhead = SchedulingOverhead(per_prefill_step_s=50e-9, first_step_s=1000e-9)
    log = run([arrival(0, 0, 4, 3), arrival(1, 5000, 4, 1)], overhead=overhead)
    durations = log.steps()["end_ns"] - log.steps()["start_ns"]
    assert durations.tolist() == [100 + 50 + 1000, 100, 100, 100 + 50]


@pytest.mark.parametrize("seconds", [0.4e-9, 0.6e-9, *(ns * 1e-9 for ns in range(1, 100))])
def test_launch_of_the_first_step_is_charged_to_the_nearest_nanosecond(seconds):
    log = run([arrival(0, 0, 4, 2)], overhead=SchedulingOverhead(first_step_s=seconds))
    durations = log.steps()["end_ns"] - log.steps()["start_ns"]
    assert durations.tolist() == [100 + round(seconds * 1e9), 100]


def test_step_planned_during_the_first_launch_knows_who_came_until_it_was_over():
    switches = {"async_scheduling": True, "arrivals_between_steps": True, "max_num_seqs": 3}
    config = replace(CONFIG, **switches, first_launch_ns=1000)
    overhead = SchedulingOverhead(first_step_s=1000e-9)
    arrivals = [arrival(0, 0, 4, 9), arrival(1, 900, 4, 9), arrival(2, 1050, 4, 9)]
    requests = run(arrivals, config, overhead=overhead).requests()
    # The first step ends at 1100. Request 1 is in the second; request 2 must wait for the third.
    assert requests["queued_ns"].tolist() == [0, 1000, 1100]
    assert requests["first_scheduled_ns"].tolist() == [0, 1100, 1200]
    warm = run(arrivals, replace(config, first_launch_ns=0), overhead=overhead).requests()
    assert warm["first_scheduled_ns"].tolist() == [0, 1200, 1200]


def test_lone_request_is_spared_the_threshold_until_another_one_waits():
    limited = replace(CONFIG, long_prefill_token_threshold=10)
    spared = replace(limited, threshold_spares_lone_request=True)
    lone = [arrival(0, 0, 40, 1)]
    assert run(lone, limited).steps()["prefill_tokens"].tolist() == [10, 10, 10, 10]
    assert run(lone, spared).steps()["prefill_tokens"].tolist() == [40]
    both = [arrival(0, 0, 40, 1), arrival(1, 0, 5, 1)]
    assert run(both, spared).steps()["prefill_tokens"].tolist() == [15, 30]


def second_steps(workload, config, policy, count=1):
    """Return who computes in steps behind the first, and who is preempted for it."""
    executor = RecordingExecutor(SimExecutor(Pricing(COST)))
    simulate(Engine(config, registry.make(policy), executor), workload)
    return [(step.tokens, step.preempted) for step in executor.steps[1 : 1 + count]]


IN_ORDER = replace(CONFIG, max_model_len=16, max_num_seqs=4, preempt_in_order=True)


def test_victim_that_was_served_already_loses_its_place_in_the_step():
    # Both open a block of 4 in the third step, and one is free.
    workload = [arrival(0, 0, 7, 5, priority=2), arrival(1, 50, 8, 4)]
    config = replace(IN_ORDER, num_blocks=5)
    assert second_steps(workload, config, "priority", count=2)[1] == ({1: 1}, (0,))


def test_request_that_preempts_itself_ends_the_step_for_those_behind_it():
    # Requests 0 and 1 open a block in the third step, one is free, and request 2 needs none.
    workload = [arrival(0, 0, 7, 5), arrival(1, 0, 7, 5, priority=2), arrival(2, 50, 6, 4)]
    config = replace(IN_ORDER, num_blocks=7)
    assert second_steps(workload, config, "priority", count=2)[1] == ({0: 1}, (1,))
    for changes in ({"preempt_in_order": False}, {"serve_behind_preempted": True}):
        changed = replace(config, **changes)
        assert second_steps(workload, changed, "priority", count=2)[1] == ({0: 1, 2: 1}, (1,))


def test_request_behind_one_that_preempted_itself_may_preempt_in_turn():
    # In the third step all three open a block: request 0 takes the last one, request 1, the least
    # urgent, loses its two of which request 2 takes one.
    workload = [arrival(0, 0, 7, 5), arrival(1, 0, 7, 5, priority=2), arrival(2, 0, 7, 5)]
    config = replace(IN_ORDER, num_blocks=7, serve_behind_preempted=True)
    assert second_steps(workload, config, "priority", count=2)[1] == ({0: 1, 2: 1}, (1,))


def test_request_waiting_for_its_last_token_may_lose_its_memory_and_is_answered_all_the_same():
    # While request 1 computes its last token, the third step is planned, in which request 0
    # opens a block.
    workload = [arrival(0, 0, 3, 6), arrival(1, 0, 7, 2)]
    config = replace(IN_ORDER, num_blocks=3, max_model_len=12, async_scheduling=True)
    steps = second_steps(workload, config, "fcfs", count=2)
    assert steps == [({0: 1, 1: 1}, ()), ({0: 1}, (1,))]
    requests = run(workload, config).requests()
    assert requests["finish_ns"][1] == 200
    assert requests["num_preemptions"].tolist() == [0, 0]


OVERRUN = replace(CONFIG, async_scheduling=True, overrun_at_stop=True)


def test_answer_that_ends_before_its_limit_is_computed_once_more_and_answered_no_later():
    workload = [arrival(0, 0, 3, 2, max_tokens=9), arrival(1, 0, 1, 4, max_tokens=4)]
    log = run(workload, OVERRUN)
    assert log.requests()["finish_ns"].tolist() == [200, 400]
    assert log.requests()["generated_tokens"].tolist() == [2, 4]
    # Request 0 has 4 tokens in the cache as the third step begins, which computes its fifth.
    assert log.steps()["padding_tokens"].tolist() == [0, 0, 1, 0]
    assert log.steps()["num_running"].tolist() == [2, 2, 1, 1]
    limited = [arrival(0, 0, 3, 2, max_tokens=2), workload[1]]
    assert run(limited, OVERRUN).steps()["padding_tokens"].tolist() == [0, 0, 0, 0]


def test_answer_that_ends_early_keeps_the_engine_busy_for_a_step_with_nobody_else():
    workload = [arrival(0, 0, 1, 2, max_tokens=9), arrival(1, 250, 1, 1, max_tokens=1)]
    log = run(workload, OVERRUN)
    assert log.requests()["finish_ns"].tolist() == [200, 400]
    assert log.steps()["start_ns"].tolist() == [0, 100, 200, 300]
    assert log.steps()["padding_tokens"].tolist() == [0, 0, 1, 0]


def test_token_too_many_counts_with_its_context_and_who_is_left_out_with_none():
    class LeavesOut(ContinuousBatching):
        def plan(self, view, builder):
            for state in view.running:
                if state.id != 1 or state.num_output_tokens < 2:
                    builder.grant(state)
            for state in view.waiting:
                builder.grant(state)
            return builder.build()

    workload = [arrival(i, 0, prompt, 2, max_tokens=9) for i, prompt in enumerate((3, 5))]
    executor = RecordingExecutor(SimExecutor(Pricing(COST)))
    simulate(Engine(OVERRUN, LeavesOut(), executor), workload)
    shapes = [step.shape for step in executor.steps]
    # Request 0 has 4 tokens in the cache as the third step begins, and request 1 sits it out.
    assert [shape.padding_tokens for shape in shapes] == [0, 0, 1]
    assert [shape.padding_context_tokens for shape in shapes] == [0, 0, 4]


@pytest.mark.parametrize("config", [replace(CONFIG, async_scheduling=True), OVERRUN])
def test_request_that_has_ended_unknown_to_the_next_plan_keeps_when_it_joined_the_decodes(config):
    # By that it is told, should it be preempted, whether its last token was known.
    joined_ns = {}

    def observe(engine):
        requests = engine.requests
        for state in (*requests.leaving, *requests.overrun.values()):
            joined_ns[state.id] = state._entry_ns, state.first_token_ns

    work = [arrival(i, 50 * i, 3 + i, 1 + i, max_tokens=9) for i in range(4)]
    run(work, config, observer=observe)
    assert len(joined_ns) == 4
    assert all(entry_ns == first_ns for entry_ns, first_ns in joined_ns.values())


def test_answer_that_fills_the_model_is_not_computed_once_more():
    full = [arrival(0, 0, 90, 10, max_tokens=20)]
    assert run(full, OVERRUN).steps()["padding_tokens"].sum() == 0


def test_answer_that_ends_early_takes_a_block_from_others_for_the_token_too_many():
    # The third step is planned as if request 0 went on: it opens its second block of 4, and
    # request 1 loses its memory.
    workload = [arrival(0, 0, 3, 2, max_tokens=9), arrival(1, 0, 3, 5, max_tokens=5)]
    config = replace(OVERRUN, num_blocks=3, max_model_len=12, preempt_in_order=True)
    assert second_steps(workload, config, "fcfs", count=2)[1] == ({0: 1}, (1,))
    assert run(workload, config).requests()["num_preemptions"].tolist() == [0, 1]


def test_victim_that_had_ended_is_answered_all_the_same():
    workload = [arrival(0, 0, 2, 6, max_tokens=6), arrival(1, 0, 3, 2, max_tokens=9)]
    config = replace(OVERRUN, num_blocks=3, max_model_len=12, preempt_in_order=True)
    requests = run(workload, config).requests()
    assert requests["finish_ns"].tolist() == [600, 200]
    assert requests["num_preemptions"].tolist() == [0, 0]


def test_victim_that_had_ended_before_its_limit_gives_its_memory_back_once():
    class PreemptsTheLast(ContinuousBatching):
        def plan(self, view, builder):
            for state in list(view.running):
                if state.id == 1 and view.now_ns >= 200:
                    assert state.num_output_tokens == 2, "it has ended, which nobody knows yet"
                    builder.preempt(state)
            builder.grant_running()
            for state in view.waiting:
                builder.grant(state)
            return builder.build()

    workload = [arrival(0, 0, 2, 6, max_tokens=6), arrival(1, 0, 3, 2, max_tokens=9)]
    requests = laws.run(PreemptsTheLast(), workload, OVERRUN, COST).requests()
    assert requests["finish_ns"].tolist() == [600, 200]
    assert requests["num_preemptions"].tolist() == [0, 0]


@pytest.mark.parametrize("finished", ["hold", "hold_answer"])
def test_sealed_batch_whose_last_answer_ends_early_is_over_with_it(finished):
    class HoldsTheFirst(ContinuousBatching):
        def plan(self, view, builder):
            builder.grant_running()
            for state in view.waiting:
                builder.grant(state)
            return builder.build(finished=finished if len(view.running) != 1 else "leave")

    work = [arrival(0, 0, 5, 3), arrival(1, 0, 5, 6)]
    log = laws.run(HoldsTheFirst(), work, OVERRUN)
    requests = log.requests()
    assert requests["generated_tokens"].tolist() == [3, 6]
    first_ns = requests["last_token_ns" if finished == "hold" else "finish_ns"][0]
    ends_ns = log.steps()["end_ns"]
    assert first_ns == ends_ns[2 if finished == "hold" else 5]


def test_overrun_needs_an_engine_that_plans_ahead():
    with pytest.raises(ValueError, match="overrun_at_stop needs async_scheduling: true"):
        replace(CONFIG, overrun_at_stop=True)


def test_block_that_a_resumed_request_filled_is_found_again_though_it_decodes_next():
    # Of the five tokens that request 1 computes anew the budget leaves one for the step after,
    # which finds no block for it: the three that are full are found again, no token was in flight.
    config = replace(
        CONFIG, num_blocks=5, max_model_len=20, max_num_batched_tokens=5, async_scheduling=True,
        enable_prefix_caching=True, preempt_in_order=True,
    )  # fmt: skip
    log = run([arrival(0, 0, 6, 5), arrival(1, 0, 7, 3)], config)
    assert log.requests()["cached_tokens"].tolist() == [0, 12]
    assert log.steps()["prefill_tokens"].tolist() == [5, 5, 3, 0, 0, 4, 1]


def test_watermark_is_kept_beside_those_admitted_in_the_same_step():
    config = replace(CONFIG, num_blocks=20, max_model_len=80, watermark=0.5)
    workload = [arrival(0, 0, 24, 1), arrival(1, 0, 24, 1)]
    # Request 0 finds nobody and takes 6 of 20 blocks; 14 less 10 are too few for another 6.
    assert run(workload, config).requests()["first_scheduled_ns"].tolist() == [0, 100]


def test_null_block_counts_for_the_watermark():
    assert replace(CONFIG, num_blocks=99, watermark=0.1).watermark_blocks == 9
    assert replace(CONFIG, num_blocks=99, null_blocks=1, watermark=0.1).watermark_blocks == 10


def test_prefix_hit_is_counted_and_not_computed():
    config = replace(CONFIG, enable_prefix_caching=True)
    log = run(
        [
            arrival(0, 0, 9, 1, prefix_hash_ids=(1, 2)),
            arrival(1, 500, 9, 1, prefix_hash_ids=(1, 2)),
        ],
        config,
    )
    assert log.requests()["prefix_hit_tokens"].tolist() == [0, 8]
    assert log.steps()["prefill_tokens"].tolist() == [9, 1]


def test_resumed_request_computes_only_what_was_evicted():
    config = EngineConfig(
        num_blocks=6, max_model_len=24, block_size=4, max_num_seqs=2, enable_prefix_caching=True
    )
    log = run([arrival(0, 0, 8, 12), arrival(1, 0, 8, 12)], config)
    gone, requests = log.preemptions(), log.requests()
    assert gone["id"].tolist() == [1]
    # It had computed 12 tokens, 3 full blocks; the other took the last two of them to finish.
    assert requests["recomputed_tokens"][1] == 12
    assert requests["cached_tokens"].tolist() == [0, 4]
    assert requests["prefix_hit_tokens"].tolist() == [0, 0], "nothing at the first admission"
    assert gone["resumed_tokens"].tolist() == [13 - 4]


def test_setting_memory_aside_with_prefix_caching_is_refused():
    with pytest.raises(InfeasiblePlan, match="prefix caching"):
        run([arrival(0, 0, 8, 4)], replace(CONFIG, enable_prefix_caching=True), policy="static")


def test_number_of_iterations_does_not_depend_on_the_cost_model():
    """All at once, 128 seats, 2048 tokens, no preemption: decisions follow from lengths alone."""
    config = EngineConfig(
        num_blocks=100_000, max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=2048
    )
    # 256 prompts of 512 tokens, answers of 100: a step takes 4 prompts less what decodes use up.
    workload = [arrival(i, 0, 512, 100) for i in range(256)]
    counts = set()
    for cost in (COST, LinearCost(1, 1, 1), LinearCost(10_000, 0, 7)):
        log = laws.run(registry.make("fcfs"), workload, config, cost=cost, prove=False)
        counts.add(log.num_steps)
        assert log.requests()["num_preemptions"].sum() == 0
    assert len(counts) == 1


def test_number_of_iterations_is_the_one_counted_by_hand():
    config = EngineConfig(
        num_blocks=1000, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=10
    )
    workload = [arrival(0, 0, 10, 3), arrival(1, 0, 4, 2), arrival(2, 0, 12, 2)]
    # 1: prompt 0 (10). 2: decode 0, prompt 1 (4). 3: decodes of 0 and 1, which both finish.
    # 4: 10 of prompt 2. 5: its last 2. 6: its second token.
    assert run(workload, config).num_steps == 6
