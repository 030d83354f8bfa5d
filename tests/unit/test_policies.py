"""Each policy's rule, traced by hand: the exact batches of a few iterations."""

from collections import deque
from types import SimpleNamespace

import pytest

from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.request import RequestState
from tests import laws
from tests.laws import arrival
from tests.policy_cases import CASES, make
from tests.traced import Recorder, batches, limits


def test_fcfs_shares_the_token_budget_running_first_and_chunks_the_last_prompt():
    work = [
        arrival(0, prompt=10, output=3),
        arrival(1, prompt=14, output=2),
        arrival(2, prompt=3, output=2),
    ]
    got, _ = batches("fcfs", work, limits())
    assert got == [
        {0: 10, 1: 6},  # the budget of 16 cuts request 1; request 2 does not jump ahead
        {0: 1, 1: 8, 2: 3},  # decode, rest of the prompt, and now request 2
        {0: 1, 1: 1, 2: 1},
    ]


def test_fcfs_without_memory_preempts_the_latest_and_recomputes_it_first():
    # 5 blocks of 4. Prompts of 8 hold two blocks each and fill them; the first decode of each
    # needs one more, and only one is free.
    work = [
        arrival(0, prompt=8, output=6),
        arrival(1, prompt=8, output=3),
        arrival(2, prompt=4, output=1),
    ]
    got, log = batches("fcfs", work, limits(num_blocks=5))
    assert got == [
        {0: 8, 1: 8},  # request 2 would need the 17th token: out of budget
        ({0: 1}, [1]),  # request 1 goes; nobody is admitted in a step that preempted
        {0: 1},  # request 1 comes first now, but its 9 tokens need 3 blocks and 2 are free
        {0: 1},
        {0: 1},
        {0: 1},  # request 0 is done: 6 tokens out
        {1: 9, 2: 4},  # prompt and the token it had: recomputed in one go
        {1: 1},
    ]
    assert log.requests()["recomputed_tokens"].tolist() == [0, 8, 0]


def test_fcfs_with_swap_resumes_without_recomputing():
    # As above, but the 8 tokens of request 1 go to host memory: 2 blocks of 100 bytes out and in.
    work = [
        arrival(0, prompt=8, output=6),
        arrival(1, prompt=8, output=3),
        arrival(2, prompt=4, output=1),
    ]
    config = limits(num_blocks=5, preemption_mode="swap", swap_space_blocks=2, kv_block_bytes=100)
    got, log = batches("fcfs", work, config)
    assert got == [
        {0: 8, 1: 8},
        ({0: 1}, [1]),
        {0: 1},
        {0: 1},
        {0: 1},
        {0: 1},
        {1: 1, 2: 4},  # back with its tokens, it decodes at once
        {1: 1},
    ]
    steps = log.steps()
    assert steps["swapped_bytes"].tolist() == [0, 200, 0, 0, 0, 0, 200, 0]
    assert log.requests()["recomputed_tokens"].tolist() == [0, 0, 0]
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0]


def test_swap_without_room_in_host_memory_falls_back_to_recompute():
    work = [arrival(0, prompt=8, output=6), arrival(1, prompt=8, output=3)]
    config = limits(num_blocks=5, preemption_mode="swap", swap_space_blocks=1)
    got, log = batches("fcfs", work, config)
    assert {1: 9} in got
    assert log.requests()["recomputed_tokens"].tolist() == [0, 8]
    assert log.steps()["swapped_bytes"].sum() == 0


def test_prefill_first_brings_swapped_requests_back_before_any_prompt():
    # Request 1 is swapped out when both need a third block. Request 2 arrives meanwhile; its
    # prompt would fit, but V0 computes no prompt while someone waits in host memory.
    work = [
        arrival(0, prompt=8, output=4),
        arrival(1, prompt=8, output=3),
        arrival(2, at_ns=1_200, prompt=4, output=1),
    ]
    config = limits(num_blocks=5, preemption_mode="swap", swap_space_blocks=2)
    got, _ = batches("prefill_first", work, config)
    assert got == [{0: 8, 1: 8}, ({0: 1}, [1]), {0: 1}, {0: 1}, {1: 1}, {2: 4}, {1: 1}]


def test_fcfs_long_prefill_threshold_lets_others_in_beside_a_long_prompt():
    work = [arrival(0, prompt=12, output=1), arrival(1, prompt=9, output=1)]
    got, _ = batches("fcfs", work, limits(long_prefill_token_threshold=5))
    assert got == [{0: 5, 1: 5}, {0: 5, 1: 4}, {0: 2}]


def test_priority_serves_lower_numbers_first_and_evicts_the_highest():
    work = [
        arrival(0, prompt=8, output=3, priority=1),
        arrival(1, prompt=8, output=3, priority=5),
        arrival(2, prompt=8, output=3, priority=0),
    ]
    got, log = batches("priority", work, limits(num_blocks=7, budget=24))
    assert got == [
        {0: 8, 1: 8, 2: 8},  # all fit: 6 of 7 blocks
        ({0: 1, 2: 1}, [1]),  # three new blocks, one free: priority 5 goes
        {0: 1, 2: 1},
        {1: 9},
        {1: 1},
    ]
    assert log.requests()["num_preemptions"].tolist() == [0, 1, 0]


def test_sjf_admits_by_prediction_not_by_arrival():
    work = [
        arrival(0, prompt=4, output=1, predicted_tokens=30.0),
        arrival(1, prompt=4, output=1, predicted_tokens=10.0),
        arrival(2, prompt=4, output=1, predicted_tokens=20.0),
    ]
    got, _ = batches("sjf", work, limits(seats=1))
    assert got == [{1: 4}, {2: 4}, {0: 4}]


def test_sjf_without_a_prediction_says_what_is_missing():
    with pytest.raises(Exception, match="needs a predictor"):
        batches("sjf", [arrival(0)], limits())


def test_prefill_first_stalls_decodes_while_prompts_fit():
    # A step takes 1000 ns and more, so request 2 is there when the second step is planned.
    work = [
        arrival(0, prompt=6, output=3),
        arrival(1, prompt=12, output=2),
        arrival(2, at_ns=500, prompt=5, output=2),
    ]
    got, _ = batches("prefill_first", work, limits(seats=3))
    assert got == [
        {0: 6},  # request 1 would exceed the budget and prompts are not cut
        {1: 12},  # request 0 is stalled; request 2 does not fit beside
        {2: 5},
        {0: 1, 1: 1, 2: 1},
        {0: 1},
    ]


def test_prefill_first_computes_a_prompt_beyond_the_budget_in_steps_of_its_own():
    work = [arrival(0, prompt=2, output=2), arrival(1, prompt=20, output=1)]
    got, _ = batches("prefill_first", work, limits())
    assert got == [{0: 2}, {1: 16}, {1: 4}, {0: 1}]


def test_static_seals_a_batch_and_pads_it_to_the_longest():
    work = [
        arrival(0, prompt=4, output=1),
        arrival(1, prompt=6, output=3),
        arrival(2, prompt=2, output=1),
    ]
    got, log = batches("static", work, limits(seats=2))
    assert got == [
        ({0: 4, 1: 6}, 2),  # both at the length of the longer: two tokens for nobody
        {1: 1},  # request 0 is done, but nobody takes its seat
        {1: 1},
        {2: 2},
    ]
    requests, steps = log.requests(), log.steps()
    # Request 0 is answered when its batch ends, with request 1.
    assert requests["finish_ns"][0] == requests["finish_ns"][1] == steps["end_ns"][2]
    assert requests["last_token_ns"][0] == steps["end_ns"][0]
    assert steps["padding_tokens"].tolist() == [2, 1, 1, 0]  # the finished row is computed along


def test_static_returning_early_answers_at_once_but_keeps_the_seat():
    work = [arrival(0, prompt=4, output=1), arrival(1, prompt=4, output=3), arrival(2, prompt=2)]
    got, log = batches("static", work, limits(seats=2), return_early=True, pad_decodes=False)
    assert got == [{0: 4, 1: 4}, {1: 1}, {1: 1}, {2: 2}]
    requests = log.requests()
    assert (requests["finish_ns"] == requests["last_token_ns"]).all()
    assert log.steps()["padding_tokens"].tolist() == [0, 0, 0, 0]


def test_static_prefills_a_batch_beyond_the_budget_in_several_steps():
    work = [arrival(0, prompt=10, output=2), arrival(1, prompt=10, output=2)]
    got, _ = batches("static", work, limits())
    assert got == [{0: 10, 1: 6}, {1: 4}, {0: 1, 1: 1}]


def test_static_slot_utilisation_is_that_of_the_textbook_example():
    # Outputs 5, 200, 3, 150 in one batch: 358 of 800 slots do work.
    work = [arrival(i, prompt=1, output=n) for i, n in enumerate([5, 200, 3, 150])]
    config = EngineConfig(num_blocks=400, max_model_len=300, block_size=1, max_num_seqs=4)
    steps = laws.run(registry.make("static"), work, config).steps()
    useful = int((steps["num_decodes"] + steps["num_prefills"]).sum())
    slots = useful + int(steps["padding_tokens"].sum())
    assert (useful, slots) == (358, 800)


def test_dynamic_dispatches_a_full_batch_at_once_and_a_partial_one_after_the_delay():
    work = [
        arrival(0, at_ns=0, prompt=2),
        arrival(1, at_ns=300, prompt=2),
        arrival(2, at_ns=50_000, prompt=2),
    ]
    _, log = batches("dynamic", work, limits(), max_batch_size=2, max_queue_delay_s=10e-6)
    started = log.requests()["first_scheduled_ns"].tolist()
    assert started == [300, 300, 60_000]


def test_dynamic_without_delay_takes_what_is_there():
    work = [arrival(0, prompt=2), arrival(1, at_ns=300, prompt=2)]
    _, log = batches("dynamic", work, limits())
    assert log.requests()["first_scheduled_ns"].tolist() == [0, 1020]


@pytest.mark.parametrize(
    ("num_waiting", "sizes"), [(1, [1]), (3, [2, 1]), (7, [4, 2, 1]), (9, [4, 4, 1])]
)
def test_dynamic_takes_the_largest_preferred_size_there_is(num_waiting, sizes):
    work = [arrival(i, prompt=1) for i in range(num_waiting)]
    got, _ = batches("dynamic", work, limits(), preferred_batch_sizes=[2, 4])
    assert [len(batch) for batch in got] == sizes


def test_dynamic_waits_for_a_preferred_size_no_longer_than_its_delay():
    knobs = {"preferred_batch_sizes": [3], "max_queue_delay_s": 10e-6}

    def started(*arrivals_ns):
        work = [arrival(i, at_ns, prompt=1) for i, at_ns in enumerate(arrivals_ns)]
        _, log = batches("dynamic", work, limits(), **knobs)
        return log.requests()["first_scheduled_ns"].tolist()

    assert started(0, 100, 5_000) == [5_000] * 3
    assert started(0, 100) == [10_000] * 2
    assert started(0, 100, 10_000, 10_000) == [10_000] * 4  # the delay is over: all there are


def test_dynamic_serves_more_urgent_requests_first_if_told_to():
    work = [arrival(i, prompt=1, priority=p) for i, p in enumerate([2, 1, 2, 0])]
    for use_priorities, order in ((False, [{0, 1}, {2, 3}]), (True, [{3, 1}, {0, 2}])):
        got, _ = batches("dynamic", work, limits(seats=2), use_priorities=use_priorities)
        assert [set(batch) for batch in got] == order


def test_dynamic_counts_the_delay_of_the_oldest_in_the_batch_whatever_its_priority():
    work = [arrival(0, 0, prompt=1, priority=1), arrival(1, 4_000, prompt=1)]
    knobs = {"use_priorities": True, "max_queue_delay_s": 10e-6}
    _, log = batches("dynamic", work, limits(), **knobs)
    assert log.requests()["first_scheduled_ns"].tolist() == [10_000] * 2


def test_dynamic_gives_up_who_times_out_while_a_batch_fills():
    # Request 0 may wait until 6 us; with it, request 1 would make a batch at 7 us.
    work = [arrival(i, at_ns, prompt=1) for i, at_ns in enumerate([0, 7_000, 8_000])]
    knobs = {"max_batch_size": 2, "max_queue_delay_s": 10e-6}
    got, log = batches("dynamic", work, limits(), queue_timeout_s=6e-6, **knobs)
    assert got == [{1: 1, 2: 1}]
    assert log.reject_reasons == {0: "it timed out in the queue"}
    got, log = batches("dynamic", work, limits(), queue_timeout_s=7e-6, **knobs)
    assert got == [{0: 1, 1: 1}]  # at its last instant; request 2 is alone until it times out
    assert list(log.reject_reasons) == [2]


def test_dynamic_puts_who_times_out_behind_the_others_of_its_priority():
    # While request 0 runs until 5 us or so, request 1 times out.
    work = [arrival(0, prompt=1, output=5)]
    work += [arrival(i, at_ns, prompt=1) for i, at_ns in ((1, 100), (2, 3_000))]
    work += [arrival(3, 3_000, prompt=1, priority=1)]
    knobs = {"queue_timeout_s": 3e-6, "timeout_action": "delay", "use_priorities": True}
    got, _ = batches("dynamic", work, limits(seats=1), **knobs)
    assert [next(iter(batch)) for batch in got[5:]] == [2, 1, 3]


# -- base class and registry -------------------------------------------------------------------


def test_policy_of_a_dozen_lines_runs_by_its_path():
    name = f"{__name__}:LongestPromptFirst"
    work = [arrival(0, prompt=2), arrival(1, prompt=8), arrival(2, prompt=5)]
    got, _ = batches(name, work, limits(seats=1))
    assert [list(b) for b in got] == [[1], [2], [0]]


class LongestPromptFirst(ContinuousBatching):
    """The longest prompt first."""

    def key(self, state, now_ns):
        return -state.request.prompt_tokens


def test_hooks_hold_and_chunk_shape_admission():
    class Patient(ContinuousBatching):
        """Admits nobody while someone runs, and computes prompts in pieces of three at first."""

        def hold(self, state, view):
            return bool(view.running)

        def chunk(self, state, view):
            return 3

    recorder = Recorder(Patient())
    work = [arrival(0, prompt=5, output=2), arrival(1, prompt=2)]
    laws.run(recorder, work, laws.slow(limits()))
    # The second prompt fits the first step, before anyone runs.
    assert [b for b in recorder.batches if b] == [{0: 3, 1: 2}, {0: 2}, {0: 1}]


@pytest.mark.parametrize("name", registry.names())
def test_policy_says_what_a_reader_must_know(name):
    cls = registry.policy_class(name)
    doc = " ".join((cls.__doc__ or "").split())
    assert cls.source, "source missing"
    for word in ("Optimises", "Needs", "starve", "Skip-ahead is honest"):
        assert word in doc, f"{name} does not say: {word}"


@pytest.mark.parametrize("name", registry.names())
def test_policy_constructor_only_stores_its_parameters(name):
    cls = registry.policy_class(name)
    policy = registry.make(name)
    defaults = {k: p.default for k, p in cls.knobs().items()}
    assert policy.get_params() == defaults


@pytest.mark.parametrize("case", CASES)
def test_policy_when_all_is_over_remembers_nobody(case):
    def held(num_requests):
        policy = make(case)
        work = [
            arrival(i, 3_000 * i, 5, 4, tenant="ab"[i % 2], predicted_tokens=4.0)
            for i in range(num_requests)
        ]
        work.append(arrival(num_requests, 10**6, 5, 30, tenant="a", predicted_tokens=30.0))
        laws.run(policy, work, limits(), prove=False)
        return {key: size(value) for key, value in vars(policy).items()}

    def size(value):
        if isinstance(value, dict):
            return len(value) + sum(map(size, value.values()))
        if isinstance(value, deque) and value.maxlen is not None:
            return value.maxlen  # a window
        if isinstance(value, (list, set, tuple, deque)):
            return len(value) + sum(map(size, value))
        return sum(map(size, vars(value).values())) if isinstance(value, Policy) else 0

    assert held(10) == held(30)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("fcsf", {}, r"unknown policy 'fcsf'; did you mean fcfs\?"),
        ("nonsense", {}, f"choose from {', '.join(registry.names())} "),
        ("static", {"batch_size": 3}, "no parameter 'batch_size'.*max_batch_size"),
        ("static", {"max_batch_size": 0}, "at least 1"),
        ("dynamic", {"max_queue_delay_s": float("nan")}, "finite"),
        ("dynamic", {"preferred_batch_sizes": [4, 2]}, "preferred_batch_sizes must be positive"),
        ("dynamic", {"preferred_batch_sizes": [9], "max_batch_size": 8}, "exceed max_batch_size 8"),
        ("dynamic", {"queue_timeout_s": 0.0}, "queue_timeout_s"),
        ("dynamic", {"timeout_action": "drop"}, "reject, delay"),
        ("no_such_module:X", {}, "cannot import 'no_such_module'"),
        ("tests.laws:LinearCost", {}, "no Policy class 'LinearCost'"),
    ],
)
def test_registry_on_a_bad_name_or_parameter_says_what_is_right(name, params, message):
    with pytest.raises(SpecError, match=message):
        registry.make(name, **params)


def test_registry_when_a_name_is_taken_refuses():
    with pytest.raises(ValueError, match="taken by FirstComeFirstServed"):

        @registry.register("fcfs")
        class Other(Policy):
            """Another one."""


def test_loaded_requests_are_seated_by_key_then_arrival_then_number():
    came = [(0, 50, 3.0), (1, 40, 3.0), (2, 40, 3.0), (3, 90, 1.0), (4, 10, 7.0)]
    states = {
        i: RequestState(arrival(i, at_ns, predicted_tokens=predicted).request)
        for i, at_ns, predicted in came
    }
    loaded = [states[i] for i in (0, 2, 4, 1, 3)]
    view = SimpleNamespace(now_ns=100)
    seated = registry.make("sjf").seating(list(loaded), view)
    assert [state.id for state in seated] == [3, 1, 2, 0, 4]
    assert registry.make("fcfs").seating(list(loaded), view) == loaded


def test_parameters_that_go_by_any_name_are_no_knobs():
    class Open(ContinuousBatching):
        def __init__(self, weight=1.0, *rest, **others):
            self.weight = weight

    assert [*Open.knobs()] == ["weight"]
    assert Open(2.0, other=3).get_params() == {"weight": 2.0}
