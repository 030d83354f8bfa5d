"""What is written down of steps of vLLM's loop, and the clocks that time them, without vLLM."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab import core
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.model_shape import ModelShape
from schedlab.sim.request import Request, RequestState

if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)

from schedlab.gpu_backend.vllm.clock import MeasuredStepClock, ModelledStepClock, StepTimes
from schedlab.gpu_backend.vllm.model_folder import config_of
from schedlab.gpu_backend.vllm.prompts import prompt_ids
from schedlab.gpu_backend.vllm.recording import Batch, VllmLog, _segment
from schedlab.sim.hardware.models import model


def batch(tokens, decodes=(), chunks=(), sampled=0, **more):
    contexts = [more.pop("context", 9)] * len(decodes)
    shape = BatchShape(
        len(decodes), sum(contexts), max(contexts, default=0), chunks, rows_sampled=sampled,
        num_running=len(tokens), num_waiting=more.pop("waiting", 0),
    )  # fmt: skip
    given = {
        "preempted": (), "kv_blocks": 3, "kv_tokens": 20, "num_preempted": 0,
        "recomputed_tokens": 0, **more,
    }  # fmt: skip
    return Batch(tokens, dict.fromkeys(tokens, 4), frozenset(decodes), shape=shape, **given)


@pytest.fixture
def log():
    """Two requests: one whose prompt takes two steps, one that is preempted and comes back."""
    found = VllmLog(block_size=4)
    states = [RequestState(Request(i, 0, 6 + i, max_tokens=3)) for i in range(3)]
    for state, output in zip(states, (3, 5, 4), strict=True):
        state.queued_ns = state.first_scheduled_ns = 0
        found.sent(state, output)
    plan = [
        (batch({0: 4, 1: 7}, chunks=((4, 0), (7, 0)), sampled=1, waiting=2), [1]),
        (batch({0: 2, 1: 1}, decodes=[1], chunks=((2, 4),), sampled=2), [0, 1]),
        (batch({0: 1}, decodes=[0], sampled=1, preempted=(1,), num_preempted=1,
               recomputed_tokens=8), [0]),
        (batch({0: 1, 1: 9}, decodes=[0], chunks=((9, 0),), sampled=2), [0, 1]),
    ]  # fmt: skip
    start_ns = 100
    for i, (one, answered) in enumerate(plan):
        if i == 2:
            found.evicted(1, start_ns)
        if i == 3:
            found.resumed(1, start_ns, 9)
        end_ns = start_ns + 50 + 10 * i
        found.step(one, StepTimes(start_ns, end_ns, 7 + i, 2, 40, 3), answered)
        start_ns = end_ns
    found.finished(0, start_ns)
    found.finished(1, start_ns)
    found.turned_away(states[2], 4, "too long")
    found.close()
    return found


def test_tokens_of_any_order_of_steps_come_at_the_ends_of_those_that_answered():
    draw = Random(0)
    for _ in range(40):
        found = VllmLog(block_size=4)
        expected = {i: [] for i in range(3)}
        for i in expected:
            state = RequestState(Request(i, 0, 5, max_tokens=9))
            state.queued_ns = state.first_scheduled_ns = 0
            found.sent(state, 9)
        for step in range(9):
            answered, decodes = [], []
            for i, times in expected.items():
                what = draw.choice(("prompt", "decode", "decode", "decode", "nothing"))
                if what == "nothing":
                    continue
                answered.append(i)
                times.append(100 * step + 70)
                if what == "decode" and len(times) > 1:
                    decodes.append(i)
            chunks = tuple((5, 0) for i in answered if i not in decodes)
            one = batch(dict.fromkeys(answered, 1), decodes, chunks, len(answered))
            found.step(one, StepTimes(100 * step, 100 * step + 70, 0, 0, 40, 3), answered)
        for i in expected:
            found.finished(i, 900)
        found.close()
        assert {i: found.token_times(i).tolist() for i in expected} == expected


def test_log_of_vllm_has_the_tokens_of_every_request_at_the_ends_of_its_steps(log):
    ends = [150, 210, 280, 360]
    assert log.token_times(0).tolist() == [ends[1], ends[2], ends[3]]
    assert log.token_times(1).tolist() == [ends[0], ends[1], ends[3]]
    rows = log.requests()
    assert rows["id"].tolist() == [0, 1, 2]
    assert rows["first_token_ns"].tolist()[:2] == [ends[1], ends[0]]
    assert rows["last_token_ns"].tolist()[:2] == [ends[3], ends[3]]
    assert rows["generated_tokens"].tolist()[:2] == [3, 3]
    assert rows["status"].tolist() == [0, 3, 1], "1 of 5 tokens beyond max_tokens is cut off"
    assert log.reject_reasons == {2: "too long"}
    assert log.num_gone == 3
    gone = log.preemptions()
    assert [gone[name].tolist() for name in ("id", "evicted_ns", "resumed_ns")] == [
        [1], [210], [280],
    ]  # fmt: skip


def test_log_of_vllm_tells_what_every_step_computed_and_held(log):
    steps = log.steps()
    expected = {
        "start_ns": [100, 150, 210, 280], "end_ns": [150, 210, 280, 360],
        "num_decodes": [0, 1, 1, 1], "num_prefills": [2, 1, 0, 1], "prefill_tokens": [11, 2, 0, 9],
        "num_running": [2, 2, 1, 2], "num_waiting": [2, 0, 0, 0], "num_preempted": [0, 0, 1, 0],
        "recomputed_tokens": [0, 0, 8, 0], "overhead_ns": [7, 8, 9, 10],
        "schedule_ns": [2] * 4, "model_ns": [40] * 4, "update_ns": [3] * 4,
        "between_ns": [50 - 45, 60 - 45, 70 - 45, 80 - 45],
    }  # fmt: skip
    assert {name: steps[name].tolist() for name in expected} == expected
    assert steps["kv_allocated_tokens"].tolist() == [12] * 4
    assert steps["batch"].tolist()[1] == "0:2@4 1:1@4"
    assert steps["preempted"].tolist() == ["", "", "1", ""]
    assert log.seconds() == pytest.approx(
        {"schedule_s": 8e-9, "model_s": 160e-9, "update_s": 12e-9, "between_s": 80e-9}
    )
    recorded = log.recorded()
    assert [one.duration_ns for one in recorded] == [50, 60, 70, 80]
    assert [one.overhead_ns for one in recorded] == [7, 8, 9, 10]
    assert recorded[2].preempted == (1,)


def test_steps_of_vllm_end_prompts_where_a_token_is_sampled_of_them():
    one = batch({0: 4, 1: 7, 2: 1}, decodes=[2], chunks=((4, 0), (7, 0)), sampled=2)
    row = _segment(one, StepTimes(5, 9, 1, 1, 1, 1))
    assert (row.num_prefills, row.prefills_done, row.prefill_tokens) == (2, 1, 11)
    assert row.kv_tokens == 20 - 11 - 1, "before the step"


class Ticks:
    """A stopwatch read at stated times."""

    def __init__(self, *times):
        self.times, self.breaks = list(times), 0

    def __call__(self):
        return self.times.pop(0)

    def between_steps(self):
        self.breaks += 1


def test_measured_clock_charges_a_step_from_the_end_of_the_one_before_it():
    watch = Ticks(1000, 1040, 1050, 1100, 1230)
    clock = MeasuredStepClock(stopwatch=watch)
    clock.start()
    first = clock.planned(1010, BatchShape(1, 1, 1))  # planned from 10 to 40
    second = clock.planned(1042, BatchShape(1, 1, 1))  # while the first one runs, to 50
    assert first == (0, 30, 40, 0, 0), "nothing is foretold"
    assert clock.ended(first, 1090) == (0, 100, 50, 30, 50, 10)
    assert clock.now_ns == 100
    # Its model began when the first had ended, at 100, though it was launched at 50.
    assert clock.ended(second, 1220) == (100, 230, 10, 8, 120, 10)
    assert watch.breaks == 3


def test_virtual_clock_jumps_over_idle_time_and_never_back():
    clock = MeasuredStepClock(stopwatch=Ticks(1000, 1040, 1050, 1075))
    clock.start()
    clock.idle_until(500)
    assert clock.now_ns == 500
    clock.idle_until(300)
    assert clock.now_ns == 500
    # The origin moved with it: at 1050 it was 500, so at 1075 it is 525.
    assert clock.planned(1060, BatchShape(1, 1, 1)).launched_ns == 525


def test_modelled_clock_takes_the_prices_of_steps_one_behind_the_other():
    carried = []
    pricing = SimpleNamespace(
        carried_out=carried.append, estimate_ns=lambda shape: 100 * shape.num_decodes,
        overhead_ns=lambda shape: 7,
    )  # fmt: skip
    clock = ModelledStepClock(pricing)
    clock.read_ns = Ticks(10, 20, 30, 40, 60, 90)
    clock.start()
    first = clock.planned(4, BatchShape(2, 9, 5))
    assert first == (0, 6, 20, 200, 7)
    assert clock.planning_ns() == 200, "the next is planned for the end of this one"
    second = clock.planned(25, BatchShape(1, 9, 5))
    assert (second.start_ns, second.duration_ns) == (200, 100)
    assert clock.ended(first, 50) == (0, 200, 7, 6, 30, 10)
    assert clock.ended(second, 80)[:2] == (200, 300)
    empty = ModelledStepClock(pricing)
    empty.read_ns = Ticks(1, 2)
    assert empty.planned(0, BatchShape(0, 0, 0)).duration_ns == 0
    assert len(carried) == 2
    empty.idle_until(50)
    empty.idle_until(20)
    assert empty.now_ns == 50
    for used in (clock, empty):
        used.start()
        assert (used.now_ns, used.planning_ns()) == (0, 0), "nothing is left of what was before"


@pytest.mark.parametrize("make", [MeasuredStepClock, lambda: ModelledStepClock(None)])
def test_clock_that_was_not_started_stands_at_zero(make):
    clock = make()
    assert (clock.now_ns, clock.planning_ns()) == (0, 0)


def test_measured_clock_counts_from_its_stopwatch_until_it_is_started():
    clock = MeasuredStepClock(stopwatch=Ticks(40, 70))
    assert clock.planned(30, BatchShape(1, 1, 1)) == (0, 10, 40, 0, 0)


def test_prompts_of_the_same_named_blocks_begin_alike_and_go_on_apart():
    same = [Request(i, 0, 11, 5, prefix_hash_ids=(70, 71, 72)) for i in (1, 2)]
    one, other = (prompt_ids(request, 50, 3, 4) for request in same)
    assert len(one) == len(other) == 11
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    few = prompt_ids(Request(1, 0, 11, 5, prefix_hash_ids=(70,)), 50, 3, 4)
    assert len(few) == 11, "two blocks and a half have no names"
    assert few[:4] == one[:4]
    bare = prompt_ids(Request(1, 0, 11, 5), 50, 3, 4)
    assert len(bare) == 11
    assert bare[:3] == one[8:]
    assert all(0 <= token < 50 for token in one)


def test_folder_of_a_known_model_says_its_dimensions_to_vllm():
    shape = model("llama-3-8b")
    said = config_of(shape)
    expected = {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    }  # fmt: skip
    assert {key: said[key] for key in expected} == expected
    assert config_of(model("qwen3-8b"))["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_config_for_vllm_has_each_dimension_of_the_table_in_its_own_place(qk_norm):
    shape = ModelShape(
        name="mine", num_layers=3, hidden_size=40, num_heads=6, num_kv_heads=2, head_dim=16,
        intermediate_size=70, vocab_size=99, max_model_len=512, source="here",
        tied_embeddings=qk_norm, qk_norm=qk_norm,
    )  # fmt: skip
    assert config_of(shape) == {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "num_hidden_layers": 3,
        "hidden_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 70,
        "vocab_size": 99,
        "max_position_embeddings": 512,
        "tie_word_embeddings": qk_norm,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@pytest.mark.parametrize(
    ("changed", "has"),
    [
        ({"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 8},
         "a mixture of experts"),
        ({"mlp": "plain"}, "a plain MLP"),
        ({"num_position_embeddings": 1}, "learned positions"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"sliding_window": 64, "mlp": "plain"}, "a plain MLP, a sliding window"),
    ],
)  # fmt: skip
def test_model_that_vllm_cannot_be_told_of_by_dimensions_is_refused_with_every_reason(changed, has):
    with pytest.raises(SpecError) as caught:
        config_of(replace(model("llama-3-8b"), **changed))
    assert str(caught.value) == (
        "backend: vllm knows llama-3-8b by its dimensions only, and it has "
        f"{has}; give its config.json as model"
    )


def test_log_that_is_closed_again_writes_nobody_down_twice(log):
    log.close()
    assert log.requests()["id"].tolist() == [0, 1, 2]
    assert log.requests()["status"].tolist() == [0, 3, 1]
    assert log.num_gone == 3


def test_request_that_is_turned_away_late_keeps_the_tokens_it_had():
    found = VllmLog(block_size=4)
    state = RequestState(Request(0, 0, 6, max_tokens=9))
    state.queued_ns = state.first_scheduled_ns = 0
    found.sent(state, 9)
    for i, one in enumerate((batch({0: 6}, chunks=((6, 0),), sampled=1), batch({0: 1}, [0]))):
        found.step(one, StepTimes(100 * i, 100 * i + 40, 0, 0, 40, 3), [0])
    found.turned_away(state, 9, "no more")
    found.close()
    rows = found.requests()
    assert [rows[name].tolist() for name in ("generated_tokens", "first_token_ns")] == [[2], [40]]
    assert (rows["last_token_ns"].tolist(), rows["status"].tolist()) == ([140], [1])
    assert found.token_times(0).tolist() == [40, 140]
    assert (found.reject_reasons, found.num_gone) == ({0: "no more"}, 1)


def test_gaps_and_counts_of_tokens_are_of_those_who_are_asked_for(log):
    whole = log.token_times_of_all()
    for ids in (None, np.array([1]), np.array([0])):
        for found, expected in (
            (log.token_gaps(ids), whole.gaps(ids)),
            (log.token_counts(ids), log._log.token_counts(ids)),
        ):
            assert {name: column.tolist() for name, column in found.items()} == {
                name: column.tolist() for name, column in expected.items()
            }
    # Tokens of 0 come at 210, 280 and 360, those of 1 at 150, 210 and 360.
    counts = [log.token_counts(ids)["count"].tolist() for ids in (None, np.array([1]))]
    assert counts == [[1, 2, 1, 2], [1, 1, 1]]
    gaps = [len(next(iter(log.token_gaps(ids).values()))) for ids in (None, np.array([0]))]
    assert gaps == [4, 2]
