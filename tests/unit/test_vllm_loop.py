"""What the scheduler inside vLLM and the replay around it decide, with a stand-in for vLLM."""

import importlib
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from schedlab import core
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import PolicyError, SchedlabError, SpecError, Stalled
from schedlab.sim.request import RequestState, Status
from schedlab.testing.laws import arrival

pytest.importorskip("torch")
if core.running() != "python":
    pytest.skip("policies run in vLLM with the Python core only", allow_module_level=True)
if find_spec("vllm") is not None:
    pytest.skip("vLLM is here: tests/vllm ask the real one", allow_module_level=True)

from schedlab.gpu_backend import vllm as adapter
from schedlab.gpu_backend.calibration_design import BatchPoint
from schedlab.gpu_backend.vllm import engine, opening

CONFIG = EngineConfig(num_blocks=8, max_model_len=30, block_size=4)
OURS = ("release", "step_output", "refusals", "scheduler", "replay", "step_timer")


class AsyncScheduler:
    """vLLM's scheduler, which takes requests in and has answers."""

    def add_request(self, request):
        self.requests[request.request_id] = request

    def update_from_output(self, scheduler_output, model_runner_output):
        return model_runner_output

    def finish_requests(self, request_id, status):
        self.requests.pop(request_id).status = status


class Outputs:
    """vLLM's answers for a client."""

    def __init__(self):
        self.outputs = []


STAND_INS = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
    "vllm.v1.core.sched.interface": {
        "PauseState": SimpleNamespace(PAUSED_ALL="all", PAUSED_NEW="new", UNPAUSED="no")
    },
    "vllm.v1.core.sched.output": {"SchedulerOutput": SimpleNamespace, "NewRequestData": None},
    "vllm.v1.engine": {"EngineCoreOutput": SimpleNamespace, "EngineCoreOutputs": Outputs},
    "vllm.v1.request": {
        "RequestStatus": SimpleNamespace(WAITING="waiting", RUNNING="runs", FINISHED_ERROR="error"),
        "Request": lambda *given, **more: SimpleNamespace(
            request_id=given[0], prompt=given[1], params=given[2], **more
        ),
    },
    "vllm.sampling_params": {"SamplingParams": SimpleNamespace},
}


@pytest.fixture(scope="module")
def ours():
    """Import the modules that need vLLM beside stand-ins, and forget them again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, content in STAND_INS.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield SimpleNamespace(
            **{name: importlib.import_module(f"{adapter.__name__}.{name}") for name in OURS}
        )
        for name in OURS:
            sys.modules.pop(f"{adapter.__name__}.{name}")
            delattr(adapter, name)


# -- the loop of a replay ----------------------------------------------------------------------


class Clock:
    """A clock that is told the time."""

    def __init__(self):
        self.now_ns, self.idled = 0, []

    def start(self):
        self.now_ns = 0

    def idle_until(self, instant_ns):
        self.idled.append(instant_ns)
        self.now_ns = max(self.now_ns, instant_ns)


class Loop:
    """vLLM's engine and a scheduler at once: a step takes 10 ns and answers one request."""

    batch_queue = None
    request_block_hasher = "hasher"
    vocab_size = 50

    def __init__(self, clock, waits_until_ns=-1, **switches):
        self.clock, self.engine, self.until_ns = clock, self, waits_until_ns
        config = replace(CONFIG, **switches)
        self.setup = SimpleNamespace(seed=0, config=config)
        self.engine_config = config
        self.log = SimpleNamespace(
            num_gone=0,
            close=lambda: setattr(self, "is_closed", True),
            seconds=lambda: {"model_s": 0.5, "update_s": 0.25},
        )
        self.there, self.sent, self.turned_away, self.served_ns = [], [], [], []
        self.waits_until_ns, self.on_gone, self.is_closed, self.posted = -1, None, False, []

    def new_scheduler(self, cls, policy, *arguments):
        return self

    def send(self, arrival, request, at_ns):
        self.there.append(arrival.request)
        self.sent.append((at_ns, request))

    def turn_away(self, state, output_tokens, reason):
        self.turned_away.append((state.id, state.queued_ns, output_tokens, reason))

    def has_requests(self):
        return bool(self.there)

    has_unfinished_requests = has_requests

    def step_fn(self):
        if self.clock.now_ns < self.until_ns:
            self.waits_until_ns = self.until_ns
            return None, False
        self.clock.now_ns += 10
        gone = self.there.pop(0)
        self.served_ns.append((gone.id, self.clock.now_ns))
        self.log.num_gone += 1
        if self.on_gone is not None:
            self.on_gone(RequestState(gone), self.clock.now_ns)
        return None, True

    def post_step(self, executed):
        self.posted.append(executed)


def replayed(ours, arrivals, max_concurrency=None, temperature=0.0, progress=None, **loop):
    clock = Clock()
    found = Loop(clock, **loop)
    replay = ours.replay.Replay(found, {"name": "fcfs"}, clock, lambda *_: 0, temperature, progress)
    replay.run(arrivals, max_concurrency)
    assert found.is_closed
    return found


def test_replay_sends_requests_at_their_times_and_is_idle_between_them(ours):
    told = []
    found = replayed(
        ours, [arrival(0, 100), arrival(1, 105), arrival(2, 500)], progress=told.append
    )
    assert found.served_ns == [(0, 110), (1, 120), (2, 510)]
    assert [at_ns for at_ns, _ in found.sent] == [100, 105, 500]
    assert found.clock.idled == [100, 500]
    assert (told, found.posted) == ([1, 2, 3], [True] * 3)


def test_replay_whose_requests_come_between_steps_sends_them_at_the_end_of_one(ours):
    work = [arrival(0, 100), arrival(1, 105)]
    found = replayed(ours, work, arrivals_between_steps=True)
    assert [at_ns for at_ns, _ in found.sent] == [100, 110]


class Reader:
    """A stopwatch that learns when nothing is measured."""

    def __init__(self):
        self.pauses = 0

    def __call__(self):
        return 0

    def between_steps(self):
        self.pauses += 1


def test_replay_answers_the_first_requests_by_fcfs_before_its_clock_starts(ours, monkeypatch):
    clock, made = Clock(), []
    clock.read_ns = Reader()

    def new_scheduler(self, cls, policy, *arguments):
        self.scheduler = self
        made.append((policy["name"], arguments[0]))
        return self

    monkeypatch.setattr(Loop, "new_scheduler", new_scheduler)
    found = Loop(clock)
    first = [arrival(0), arrival(1)]
    replay = ours.replay.Replay(found, {"name": "sjf"}, clock, lambda *_: 0, warm_up=first)
    found.scheduler = "that of the first requests"
    replay.run([arrival(7, 100)], None)
    assert found.scheduler is replay.scheduler
    assert replay.first_s == 0.75
    assert found.served_ns == [(0, 10), (1, 20), (7, 110)]
    assert [at_ns for at_ns, _ in found.sent] == [0, 0, 100]
    assert [name for name, _ in made] == ["sjf", "fcfs"]
    assert made[1][1].read_ns is clock.read_ns  # so that its sentinels are timed among steps
    assert clock.read_ns.pauses > 0
    with pytest.raises(SchedlabError, match="fcfs asks for no estimates"):
        ours.replay._unasked(BatchShape(1, 5, 5), 1)


def test_replay_waits_with_the_policy_until_its_instant_or_the_next_request(ours):
    found = replayed(ours, [arrival(0, 100), arrival(1, 200)], waits_until_ns=300)
    assert found.clock.idled == [100, 200, 300]
    assert found.served_ns == [(0, 310), (1, 320)]


def test_replay_in_a_closed_loop_sends_the_next_request_when_one_is_answered(ours):
    found = replayed(ours, [arrival(i) for i in range(4)], max_concurrency=2)
    assert [at_ns for at_ns, _ in found.sent] == [0, 0, 10, 20]


class Hesitant(Loop):
    """Its policy waits a while before every step."""

    def step_fn(self):
        done = super().step_fn()
        if done[1]:
            self.until_ns = self.clock.now_ns + 5
        return done


def test_replay_counts_only_waits_in_a_row_towards_a_stall(ours, monkeypatch):
    monkeypatch.setattr(ours.replay, "MOST_WAITS", 1)
    clock = Clock()
    found = Hesitant(clock, waits_until_ns=5)
    replay = ours.replay.Replay(found, {"name": "fcfs"}, clock, lambda *_: 0, 0.0, None)
    replay.run([arrival(i) for i in range(4)], None)
    assert found.served_ns == [(0, 15), (1, 30), (2, 45), (3, 60)]
    assert clock.idled == [5, 20, 35, 50]


class Cleans(Loop):
    """After its last answer, which it has given, workers still have to be told who is gone."""

    is_told = True

    def has_requests(self):
        return bool(self.there) or not self.is_told

    def has_unfinished_requests(self):
        return bool(self.there)

    def step_fn(self):
        if self.there:
            self.is_told = False
            return super().step_fn()
        self.is_told, self.waits_until_ns = True, self.after_ns
        return None, False


@pytest.mark.parametrize("after_ns", [FOREVER, 400, -1])
def test_replay_steps_once_more_to_tell_who_is_gone_and_neither_waits_nor_stalls(ours, after_ns):
    clock = Clock()
    found = Cleans(clock)
    found.after_ns = after_ns
    replay = ours.replay.Replay(found, {"name": "fcfs"}, clock, lambda *_: 0, 0.0, None)
    replay.run([arrival(0, 100)], None)
    assert (found.served_ns, found.posted) == ([(0, 110)], [True, False])
    assert (clock.idled, clock.now_ns, found.is_closed) == ([100], 110, True)


def test_replay_whose_policy_waits_for_nothing_is_stalled(ours):
    with pytest.raises(Stalled, match=r"stalled at t = 0\.000000 s: the policy waits and nothing"):
        replayed(ours, [arrival(0)], waits_until_ns=FOREVER)


def test_replay_whose_policy_waits_for_the_beginning_for_ever_is_stalled(ours, monkeypatch):
    asked = []

    def waits(self):
        asked.append(self.clock.now_ns)
        self.waits_until_ns = 0
        return None, False

    monkeypatch.setattr(ours.replay, "MOST_WAITS", 3)
    monkeypatch.setattr(Loop, "step_fn", waits)
    with pytest.raises(Stalled):
        replayed(ours, [arrival(0)])
    assert asked == [0] * 4


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("no room"), SchedlabError, "vLLM failed: ValueError: no room"),
        (PolicyError("policy X: bad"), PolicyError, "^policy X: bad$"),
        (KeyboardInterrupt("key"), KeyboardInterrupt, "^key$"),
    ],
)
def test_failure_of_a_step_is_vllms_unless_it_is_ours(ours, monkeypatch, error, kind, message):
    def fails(self):
        raise error

    monkeypatch.setattr(Loop, "step_fn", fails)
    with pytest.raises(kind, match=message):
        replayed(ours, [arrival(0)])


def test_request_sent_to_vllm_asks_for_its_tokens_and_one_too_long_is_turned_away(ours):
    work = [
        arrival(0, 5, prompt=20, output=10), arrival(1, 6, prompt=20, output=11),
        arrival(2, 7, prompt=4, output=9, max_tokens=3, priority=2),
    ]  # fmt: skip
    found = replayed(ours, work)
    assert found.turned_away == [
        (1, 6, 11, "prompt and output take 31 tokens, max_model_len is 30")
    ]
    (_, first), (at_ns, last) = found.sent
    assert (first.request_id, len(first.prompt), first.params.max_tokens) == ("0", 20, 10)
    assert (at_ns, last.params.max_tokens, last.priority) == (7, 3, 2)
    assert last.arrival_time == 7e-9
    assert last.params.ignore_eos
    assert not last.params.detokenize
    assert last.params.seed is None
    (_, drawn) = replayed(ours, work[2:], temperature=0.5).sent[0]
    assert (drawn.params.temperature, drawn.params.seed) == (0.5, 2)


# -- the scheduler -----------------------------------------------------------------------------


def plan_of(chunks=(), finished="leave"):
    return BatchPlan(
        decodes=(), chunks=chunks, admitted=(), preempted=(), swapped=(), rejected=(),
        padding_tokens=0, finished=finished, pad_finished=False, max_steps=1, until_ns=FOREVER,
        start_ns=0, list_decodes=list,
    )  # fmt: skip


class Policy:
    """A policy that writes down what it hears."""

    needs_prediction = False
    static_keys = True
    rekeyed = None
    on_start = on_arrival = on_reject = None

    def __init__(self):
        self.heard = []

    def on_finish(self, state, now_ns):
        self.heard.append((state.id, now_ns))

    def on_tokens(self, plan, num_steps, now_ns):
        self.heard.append(("tokens", num_steps, now_ns))


class Population:
    """The requests that plans know."""

    def __init__(self):
        self.waiting, self.states, self.queued = [], {}, []
        self.admits_nobody = False
        self.finished, self.left = [], []

    def add(self, request, seen, now_ns):
        state = self.states[request.request_id] = RequestState(seen)
        return state

    def state_of(self, vllm_id):
        return self.states[vllm_id]

    def enqueue(self, state, now_ns):
        self.queued.append((state.id, now_ns))

    def is_known(self, state):
        return state in self.states.values()

    def look(self, now_ns):
        return self.finished

    def forget_the_gone(self, now_ns):
        return self.left


@pytest.fixture
def scheduler(ours):
    """A scheduler of our class at 70 ns that has not asked a server for anything."""
    found = object.__new__(ours.scheduler.PolicyScheduler)
    found.requests, found._policy, found.plan_requests = {}, Policy(), Population()
    found._blocked, found._rejected = [], []
    found._last_plan, found._pause_state = None, "no"
    found._engine, found._view = SimpleNamespace(now_ns=0), None
    found._builder = SimpleNamespace(reset=lambda now_ns: None, plan=None)
    found.now_ns = lambda: 70
    found.seen = lambda request: arrival(int(request.request_id)).request
    return found


def sent(number, status="waiting", client=0):
    return SimpleNamespace(
        request_id=str(number), status=status, client_index=client,
        get_finished_reason=lambda: "error", num_prompt_tokens=1, max_tokens=1, priority=0,
        block_hashes=[],
    )  # fmt: skip


@pytest.mark.parametrize("status", ["waiting", "grammar"])
def test_request_waits_with_the_policy_once_that_has_heard_of_the_last_step(scheduler, status):
    for _ in range(2):
        scheduler.add_request(sent(3, status))
        assert scheduler.plan_requests.queued == []
        assert [state.id for state in scheduler._blocked] == [3], "it is known"


def test_request_without_a_prediction_that_the_policy_needs_is_rejected_and_its_client_told(
    scheduler,
):
    scheduler._policy.needs_prediction = True
    scheduler.add_request(sent(1, client=4))
    assert scheduler.requests == {}
    assert scheduler.plan_requests.state_of("1").status is Status.REJECTED
    answered = {0: Outputs()}
    outputs = scheduler.update_from_output(None, answered)
    (told,) = outputs[4].outputs
    assert (told.request_id, told.new_token_ids, told.finish_reason) == ("1", [], "error")
    assert told.stop_reason.startswith("policy Policy orders by predicted output: give it a predi")
    assert outputs[0].outputs == []
    assert scheduler.update_from_output(None, {}) == {}, "it is told once"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SpecError("schedlab.slo must be a mapping"), "schedlab.slo must be a mapping"),
        (OverflowError("too large"), "OverflowError: too large"),
    ],
)
def test_request_that_carries_nonsense_is_rejected_alone_and_its_client_told(
    scheduler, error, said
):
    def seen(request):
        raise error

    scheduler.seen, scheduler._ids = seen, iter([5])
    scheduler.add_request(sent(1))
    assert scheduler.plan_requests.state_of("1").id == 5
    assert scheduler.plan_requests.queued == scheduler._blocked == []
    outputs = scheduler.update_from_output(None, {})
    assert outputs[0].outputs[0].stop_reason == said


def test_policy_hears_once_of_who_is_answered_or_aborted_and_not_of_the_rejected(scheduler):
    done, aborted, rejected, known = (RequestState(arrival(i).request) for i in range(4))
    rejected.status = Status.REJECTED
    known.last_token_ns = 60
    scheduler.plan_requests.finished = [done]
    unheard = RequestState(arrival(4).request)
    scheduler._blocked = [unheard]
    scheduler.plan_requests.left = [aborted, rejected, known, unheard]
    scheduler._last_plan = plan_of(chunks=((done, 2),))
    scheduler._tell(80)
    assert scheduler._policy.heard == [(0, 80), (1, 80), ("tokens", 1, 80)]
    assert (done.last_token_ns, aborted.last_token_ns, known.last_token_ns) == (80, 80, 60)
    scheduler.plan_requests.finished = scheduler.plan_requests.left = []
    scheduler._policy.heard.clear()
    scheduler._tell(90)
    scheduler._last_plan = plan_of()
    scheduler._tell(95)
    assert scheduler._policy.heard == [], "nothing was computed"


@pytest.mark.parametrize(
    ("of_builder", "returned", "message"),
    [
        (None, None, r"plan\(\) must return what builder.build\(\) gave"),
        ("plan", plan_of(), r"plan\(\) must return what builder.build\(\) gave"),
        ("hold", "hold", "vLLM keeps no finished request in its batch"),
        ("plan", KeyError("x"), "policy Policy: KeyError: 'x'"),
    ],
)
def test_plan_that_vllm_cannot_carry_out_is_the_policys_fault(
    scheduler, of_builder, returned, message
):
    plans = {"plan": plan_of(), "hold": plan_of(finished="hold")}
    scheduler._builder.plan = plans.get(of_builder)

    def plan(view, builder):
        if isinstance(returned, Exception):
            raise returned
        return plans.get(returned) if isinstance(returned, str) else returned

    scheduler._policy.plan = plan
    with pytest.raises(PolicyError, match=message):
        scheduler._make_plan()
    assert scheduler._last_plan is None


@pytest.mark.parametrize(("pause", "nobody"), [("no", False), ("new", True)])
def test_blocked_request_waits_once_it_is_ready_and_a_pause_admits_nobody(
    scheduler, monkeypatch, pause, nobody
):
    ready, later, gone = (RequestState(arrival(i).request) for i in range(3))
    scheduler._blocked, scheduler._pause_state = [ready, later, gone], pause
    scheduler.plan_requests.states = {"0": ready, "1": later}
    scheduler._is_ready = lambda state: state is ready
    scheduler._builder.plan = plan = plan_of()
    scheduler._policy.plan = lambda view, builder: plan
    assert scheduler._make_plan() is plan is scheduler._last_plan
    assert scheduler.plan_requests.queued == [(0, 70)]
    assert scheduler._blocked == [later]
    assert scheduler.plan_requests.admits_nobody == nobody


@pytest.mark.parametrize("is_v2", [False, True])
def test_plan_is_carried_out_in_what_vllm_knows_of_its_requests(scheduler, monkeypatch, is_v2):
    states = [RequestState(arrival(i).request) for i in range(6)]
    first, again, decodes, chunked, rejected, idle = states
    requests = {state.id: sent(state.id) for state in states}
    requests[again.id].status = "preempted"
    told, rejections = [], []
    known = scheduler.plan_requests
    known.vllm_request = lambda state: requests[state.id]
    known.id_of = lambda request: int(request.request_id)
    known.apply = lambda preempted, now_ns: told.append(("apply", preempted, now_ns))
    known.admit = lambda state, cached, now_ns: told.append(("admit", state.id, cached, now_ns))
    scheduler.waiting = SimpleNamespace(
        remove_request=lambda request: told.append(("leaves", request.request_id))
    )
    scheduler.running = [requests[one.id] for one in (chunked, idle, decodes)]
    scheduler.kv_cache_manager = SimpleNamespace(new_step_starts=lambda: told.append("starts"))
    scheduler.current_step, scheduler.use_v2_model_runner = 4, is_v2
    scheduler._builder.cached_tokens = {again.id: 12}
    scheduler._policy.on_reject = lambda state, now_ns: rejections.append((state.id, now_ns))
    monkeypatch.setattr(
        scheduler, "_reject", lambda request, why: rejections.append((request.request_id, why))
    )
    plan = SimpleNamespace(
        preempted=["p"], rejected=[(rejected, "too long")], admitted=[first, again],
        chunks=[(first, 7), (again, 3), (chunked, 5)], decoding=lambda: [decodes],
    )  # fmt: skip
    monkeypatch.setattr(scheduler, "_make_plan", lambda: plan)
    monkeypatch.setattr(
        scheduler, "_output",
        lambda *parts: [[r.request_id for r in part] for part in parts[:3]] + [parts[3]],
    )  # fmt: skip
    scheduler._engine.now_ns = 70
    new, resumed, running, tokens = scheduler.schedule()
    assert (new, resumed) == ((["0", "1"], []) if is_v2 else (["0"], ["1"]))
    assert running == ["3", "2"]
    assert tokens == {"0": 7, "1": 3, "3": 5, "2": 1}
    assert told == [
        "starts", ("apply", ["p"], 70), ("admit", 0, 0, 70), ("leaves", "0"),
        ("admit", 1, 12, 70), ("leaves", "1"),
    ]  # fmt: skip
    assert rejections == [("4", "too long"), (4, 70)]
    assert [r.request_id for r in scheduler.running] == ["3", "5", "2", "0", "1"]
    assert {requests[i].status for i in (0, 1)} == {"runs"}
    assert [requests[i].num_computed_tokens for i in (0, 1)] == [0, 12]
    assert scheduler.current_step == 5
    scheduler._pause_state = "all"
    monkeypatch.setattr(AsyncScheduler, "schedule", lambda _, throttle: throttle, raising=False)
    assert scheduler.schedule(True) is True
    assert scheduler.current_step == 5


def test_limits_that_plans_keep_are_those_of_the_server(scheduler):
    limits = SimpleNamespace(
        enable_chunked_prefill=False, long_prefill_token_threshold=3, watermark=0.25,
        async_scheduling=None,
    )  # fmt: skip
    vars(scheduler).update(
        scheduler_config=limits,
        block_size=4,
        max_model_len=30,
        max_num_running_reqs=5,
        max_num_scheduled_tokens=64,
        max_num_active_reqs=7,
        scheduler_reserve_full_isl=False,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=9)),
    )
    found = scheduler._engine_config()
    assert found == EngineConfig(
        num_blocks=8, null_blocks=1, max_model_len=30, block_size=4, max_num_seqs=5,
        max_num_resident=7, max_num_batched_tokens=64, enable_chunked_prefill=False,
        long_prefill_token_threshold=3, watermark=0.25, scheduler_reserve_full_isl=False,
        enable_prefix_caching=True, async_scheduling=False, preempt_in_order=True,
        free_uncached_first=True, threshold_spares_lone_request=True,
    )  # fmt: skip
    scheduler.max_model_len = 33
    assert scheduler._engine_config().max_model_len == 32, "no longer than its memory"


def test_request_came_as_long_ago_as_its_front_end_says(scheduler, ours, monkeypatch):
    monkeypatch.setattr(ours.scheduler, "time", SimpleNamespace(time=lambda: 12.5))
    assert scheduler.arrival_ns(SimpleNamespace(arrival_time=12.0)) == 70 - 500_000_000
    cls = ours.scheduler.PolicyScheduler
    scheduler._started_ns = 400
    clock = SimpleNamespace(monotonic_ns=lambda: 1_000)
    monkeypatch.setattr(ours.scheduler, "time", clock)
    assert cls.now_ns(scheduler) == 600


def test_memory_that_a_plan_takes_is_preempted_as_vllm_does_it(scheduler, ours, monkeypatch):
    monkeypatch.setattr(ours.scheduler, "time", SimpleNamespace(monotonic=lambda: 3.5))
    one, other = sent(1), sent(2)
    scheduler.running, scheduler._preempted, taken = [one, other], set(), []
    scheduler._preempt_request = lambda *given: taken.append(given)
    scheduler._take_memory(one)
    assert (scheduler.running, scheduler._preempted) == ([other], {"1"})
    assert taken == [(one, 3.5)]


@pytest.mark.parametrize(("status", "asks", "is_ready"), [
    ("waiting", False, True), ("grammar", False, False), ("grammar", True, True),
])  # fmt: skip
def test_blocked_request_is_ready_once_it_waits_or_vllm_says_so(scheduler, status, asks, is_ready):
    scheduler.plan_requests.vllm_request = lambda state: sent(1, status)
    scheduler._handle_blocked_waiting_request = lambda request: asks
    assert scheduler._is_ready(RequestState(arrival(1).request)) is is_ready


def test_step_that_is_told_has_the_blocks_of_who_comes_back_and_whom_it_took(
    scheduler, ours, monkeypatch
):
    asked = []
    monkeypatch.setattr(ours.scheduler, "step_output", lambda *given: asked.append(given))
    scheduler.plan_requests.kv = SimpleNamespace(new_blocks={"a": 1})
    scheduler.kv_cache_manager = SimpleNamespace(get_blocks=lambda name: f"blocks of {name}")
    scheduler._preempted = {"p"}
    scheduler._output(["n"], [sent(2)], ["r"], {"a": 1})
    ((_, new, (resumed,), running, tokens, blocks, preempted),) = asked
    assert (new, resumed.request_id, running, tokens) == (["n"], "2", ["r"], {"a": 1})
    assert (blocks, preempted) == ({"a": 1, "2": "blocks of 2"}, {"p"})
    assert scheduler._preempted == set()


@pytest.mark.parametrize("policy", ["sjf", {"name": "sjf"}])
def test_policy_of_a_server_is_named_alone_or_with_its_knobs(ours, policy):
    spec = ours.scheduler._policy_spec(ours.scheduler._given({"schedlab": {"policy": policy}}))
    made = ours.scheduler._make_policy(spec, False)
    assert isinstance(made, type(registry.make("sjf")))


@pytest.mark.parametrize("config", [None, {}, {"other": 3}, {"schedlab": {}}])
def test_server_without_a_policy_is_told_how_to_name_one(ours, config):
    with pytest.raises(SpecError, match="--additional-config names no policy; write"):
        ours.scheduler._policy_spec(ours.scheduler._given(config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (["fcfs"], "--additional-config must be a mapping, got ['fcfs']; write"),
        ({"Schedlab": {"policy": "fcfs"}}, "unknown key 'Schedlab'; did you mean schedlab?"),
        ({"schedlab": 3}, "schedlab must be a mapping, got 3"),
        (
            {"schedlab": {"policy": "fcfs", "cost_modle": "roofline"}},
            "schedlab: unknown key 'cost_modle'; did you mean cost_model",
        ),
        ({"schedlab": {"policy": {}}}, "schedlab.policy must be a name, or a mapping with one, "),
        ({"schedlab": {"policy": {"name": 3}}}, "schedlab.policy must be a name, or a mapping"),
        ({"schedlab": {"policy": ["fcfs"]}}, "schedlab.policy must be a name, or a mapping"),
    ],
)
def test_server_whose_configuration_is_mistaken_is_told_the_key(ours, config, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        ours.scheduler._policy_spec(ours.scheduler._given(config))


@pytest.mark.parametrize(("asks", "is_refused"), [(False, True), (True, False)])
def test_policy_that_asks_for_times_needs_a_cost_model(ours, asks, is_refused):
    if is_refused:
        with pytest.raises(SpecError, match="asks how long steps take"):
            ours.scheduler._make_policy({"name": "fastserve"}, asks)
    else:
        ours.scheduler._make_policy({"name": "fastserve"}, asks)


# -- the engine --------------------------------------------------------------------------------


def test_limits_that_differ_from_those_of_vllm_are_named_with_both_values():
    engine.require_same(CONFIG, replace(CONFIG))
    other = replace(CONFIG, block_size=8, async_scheduling=True)
    with pytest.raises(SpecError) as told:
        engine.require_same(CONFIG, other)
    assert "block_size is 8 in vLLM, 4 in the experiment" in str(told.value)
    assert "async_scheduling is True in vLLM, False in the experiment" in str(told.value)
    assert "num_blocks" not in str(told.value)
    with pytest.raises(SpecError, match="max_num_resident is 3 in vLLM"):
        engine.require_same(CONFIG, replace(CONFIG, max_num_resident=3))
    with pytest.raises(SpecError, match="it recomputes who is preempted"):
        engine.require_same(replace(CONFIG, kv_allocator="contiguous_max"), CONFIG)


def test_engine_is_opened_once_for_equal_setups_and_closed_before_another(monkeypatch):
    told = []

    def opened(setup):
        told.append(("open", setup))
        return SimpleNamespace(setup=setup, close=lambda: told.append(("close", setup)))

    monkeypatch.setattr(opening, "Core", opened)
    monkeypatch.setattr(opening, "warm_up", lambda core: told.append(("warm", core.setup)))
    monkeypatch.setattr(opening, "_opened", [])
    one, two = (engine.VllmSetup("schedlab-tiny", CONFIG, seed=seed) for seed in (1, 2))
    assert opening.open_core(one) is opening.open_core(replace(one))
    opening.open_core(replace(two, device="cuda"))  # it captures graphs of its own sizes
    assert [(what, setup.seed) for what, setup in told] == [
        ("open", 1), ("warm", 1), ("close", 1), ("open", 2),
    ]  # fmt: skip


def test_engine_gets_a_scheduler_of_the_policy_whose_limits_are_those_it_was_opened_with(
    monkeypatch,
):
    told, core = [], object.__new__(engine.Core)
    core.setup = SimpleNamespace(config="limits asked for")
    core.engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=None))
    made = SimpleNamespace(engine_config="limits there are")

    def plain(cls, *given):
        told.append((cls, given, core.engine.vllm_config.additional_config))
        return made

    core.new_plain_scheduler = plain
    monkeypatch.setattr(engine, "require_same", lambda *limits: told.append(limits))
    policy = {"name": "vtc", "weight": 2}
    assert core.new_scheduler(AsyncScheduler, policy, "clock", "estimate") is made
    assert told == [
        (AsyncScheduler, ("clock", "estimate"), {"schedlab": {"policy": policy}}),
        ("limits asked for", "limits there are"),
    ]


def test_scheduler_of_any_class_gets_vllms_own_arguments_behind_those_of_its_class(monkeypatch):
    module, asked, core = ModuleType("kv_cache_utils"), [], object.__new__(engine.Core)
    module.resolve_kv_cache_block_sizes = lambda *given: asked.append(given) or (16, 64)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", module)
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    core.engine = SimpleNamespace(
        vllm_config="config", structured_output_manager="grammar", scheduler="the one before"
    )
    core._kv_cache_config = "cache"
    made = core.new_plain_scheduler(lambda *given, **more: (given, more), "clock", "estimate")
    assert asked == [("cache", "config")]
    assert core.engine.scheduler is made
    assert made == (
        ("clock", "estimate"),
        {
            "vllm_config": "config",
            "kv_cache_config": "cache",
            "structured_output_manager": "grammar",
            "include_finished_set": False,
            "log_stats": False,
            "block_size": 16,
            "hash_block_size": 64,
        },
    )


def test_engine_is_warmed_up_by_a_step_of_every_size(ours, monkeypatch):
    ran = []

    class Timer:
        def __init__(self, core):
            self.core = core

        def run(self, point):
            ran.append((self.core, point))

    monkeypatch.setattr(ours.step_timer, "VllmStepTimer", Timer)
    monkeypatch.setattr(opening, "every_size", lambda config: [f"{config} {i}" for i in range(3)])
    core = SimpleNamespace(setup=SimpleNamespace(config="point"))
    opening.warm_up(core)
    assert ran == [(core, f"point {i}") for i in range(3)]


def test_every_size_is_each_number_of_tokens_and_of_rows_that_fits():
    config = replace(
        CONFIG, num_blocks=100, max_model_len=10, max_num_batched_tokens=25, max_num_seqs=3
    )
    sizes = opening.every_size(config)
    prompts = [sum(n for n, _ in point.chunks) for point in sizes if point.chunks]
    assert prompts == list(range(1, 26))
    assert max(n for point in sizes for n, _ in point.chunks) == 10
    assert [len(point.decodes) for point in sizes if point.decodes] == [1, 2, 3]


def test_weights_and_cache_with_its_null_block_have_to_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "open_device", lambda device: device)
    monkeypatch.setattr(engine, "require_memory", lambda *given: asked.append(given))
    config = replace(CONFIG, null_blocks=1)
    engine.require_room(engine.VllmSetup("schedlab-tiny", config, dtype="fp16"))
    shape = engine.model("schedlab-tiny")
    ((num_bytes, device, what),) = asked
    kv_bytes = (8 + 1) * 4 * shape.kv_bytes_per_token("fp16")
    assert num_bytes == shape.weight_bytes("fp16") + kv_bytes
    assert device == "cpu"
    assert "36 tokens of KV cache" in what


def test_graphs_are_of_the_captured_sizes_and_none_in_eager_mode():
    found = object.__new__(engine.Core)
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 1, 4]),
    )
    found.engine = SimpleNamespace(vllm_config=config)
    assert found.graph_buckets == (1, 4, 8)
    config.model_config.enforce_eager = True
    assert found.graph_buckets == ()


# -- what differs between releases ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "rules", "is_tested"),
    [
        ("0.9.1", "in order, uncached first", False), ("0.24.0", "in order, uncached first", True),
        ("0.31.2", "in order, uncached first", False), ("0.32.1rc1", "spared", True),
        ("0.33.0", "all", True), ("1.0.0", "all", False),
    ],
)  # fmt: skip
def test_release_schedules_by_the_rules_of_the_last_one_tested_before(
    ours, monkeypatch, recwarn, version, rules, is_tested
):
    monkeypatch.setattr(ours.release.vllm, "__version__", version)
    found = ours.release.with_switches(CONFIG)
    switched = replace(CONFIG, preempt_in_order=True, free_uncached_first=True)
    if rules != "in order, uncached first":
        switched = replace(switched, threshold_spares_lone_request=True)
    if rules == "all":
        switched = replace(switched, serve_behind_preempted=True)
    assert found == switched
    assert [str(one.message) for one in recwarn] == ([] if is_tested else [
        f"schedlab was not tested with vLLM {version}, only with 0.24, 0.32, 0.33"])  # fmt: skip


def test_scheduler_of_either_release_is_asked_by_the_names_it_has(ours, monkeypatch):
    release = ours.release
    new = SimpleNamespace(
        _handle_blocked_waiting_request=lambda one: one == "ready", max_num_active_reqs=9,
        max_num_running_reqs=4, reset_preempted_req_ids={"reset"},
        _get_new_block_ids_to_zero=lambda: [7], adaptive_long_prefill_threshold=True,
        scheduler_config=SimpleNamespace(prefill_schedule_interval=2), use_v2_model_runner=True,
    )  # fmt: skip
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],))
    memory = SimpleNamespace(
        take_new_block_ids=lambda: [], get_blocks={"r": blocks}.__getitem__
    )  # fmt: skip
    old = SimpleNamespace(
        _try_promote_blocked_waiting_request=lambda one: one == "other", max_num_running_reqs=4,
        needs_kv_cache_zeroing=False, kv_cache_manager=memory, use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(prefill_schedule_interval=1),
    )  # fmt: skip
    ready = [release.is_ready(one, "ready") for one in (new, old)]
    assert (ready, release.is_ready(old, "other")) == ([True, False], True)
    assert [release.most_resident(one) for one in (new, old)] == [9, 4]
    assert [release.preempted_ids(one, {"plan"}) for one in (new, old)] == [{"reset"}, {"plan"}]
    assert [release.blocks_to_zero(one) for one in (new, old)] == [[7], None]
    old.needs_kv_cache_zeroing = True
    assert release.blocks_to_zero(old) is None
    memory.take_new_block_ids = lambda: [3]
    assert release.blocks_to_zero(old) == [3]
    assert [list(release.features(one).values()) for one in (new, old)] == [[True] * 2, [False] * 2]
    old.scheduler_config.prefill_schedule_interval = None
    assert not any(release.features(old).values())
    assert [release.resumed_are_new(one) for one in (new, old)] == [True, False]
    told = SimpleNamespace(from_request=lambda *given: given)
    monkeypatch.setattr(release, "NewRequestData", told)
    new.kv_cache_manager = memory
    request = SimpleNamespace(request_id="r", _all_token_ids=[5, 6])
    assert release.new_request_data(new, request) == (request, ([1, 2],), [5, 6])
    assert release.new_request_data(old, request) == (request, ([1, 2],))


@pytest.mark.parametrize("is_v2", [False, True])
def test_step_is_told_to_workers_with_all_that_a_plan_says(ours, monkeypatch, is_v2):
    monkeypatch.setattr(
        ours.step_output, "SchedulerOutput", SimpleNamespace(make_empty=lambda: SimpleNamespace())
    )
    monkeypatch.setattr(ours.release, "new_request_data", lambda _, one: f"new {one}")
    counted = []
    scheduler = SimpleNamespace(
        _make_cached_request_data=lambda *given: given, finished_req_ids={"f"},
        _get_new_block_ids_to_zero=lambda: None, use_v2_model_runner=is_v2,
        prev_step_scheduled_req_ids={"before"}, _update_after_schedule=counted.append,
    )  # fmt: skip
    tokens = {"a": 3, "b": 1, "c": 9}
    told = ours.step_output.step_output(
        scheduler, ["a"], ["b"], ["c"], tokens, {"b": "blocks"}, {"p"}
    )
    assert vars(told) == {
        "scheduled_new_reqs": ["new a"],
        "scheduled_cached_reqs": (["c"], ["b"], tokens, {}, {"b": "blocks"}),
        "num_scheduled_tokens": tokens, "total_num_scheduled_tokens": 13,
        "preempted_req_ids": {"p"}, "finished_req_ids": {"f"}, "new_block_ids_to_zero": None,
    }  # fmt: skip
    assert counted == [told]
    assert scheduler.prev_step_scheduled_req_ids == ({"before"} if is_v2 else set(tokens))


def _server(**on):
    """Return vLLM's scheduler of a plain server, some of its features on."""
    model = {"runner_type": "generate", "is_diffusion": False, "supports_multimodal_inputs": False}
    config = dict.fromkeys(
        ("speculative_config", "kv_transfer_config", "ec_transfer_config", "lora_config")
    )
    own = {
        "use_pp": False, "dcp_world_size": 1, "pcp_world_size": 1, "is_encoder_decoder": False,
        "has_mamba_layers": False, "kv_groups": [1], "interval": 1, "adaptive": False,
    }  # fmt: skip
    for name, value in on.items():
        next(facts for facts in (model, config, own) if name in facts)[name] = value
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(**model), **config),
        kv_cache_config=SimpleNamespace(kv_cache_groups=own["kv_groups"]),
        scheduler_config=SimpleNamespace(prefill_schedule_interval=own["interval"]),
        adaptive_long_prefill_threshold=own["adaptive"], **own,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "feature"),
    [
        ("speculative_config", "ngram", "speculative decoding"),
        ("kv_transfer_config", "x", "a KV connector"), ("lora_config", "x", "LoRA"),
        ("ec_transfer_config", "x", "an encoder connector"), ("use_pp", True, "pipeline"),
        ("dcp_world_size", 2, "context parallelism"), ("pcp_world_size", 2, "context parallelism"),
        ("runner_type", "pooling", "a pooling model"), ("is_diffusion", True, "a diffusion model"),
        ("is_encoder_decoder", True, "an encoder-decoder model"),
        ("supports_multimodal_inputs", True, "a multimodal model"),
        ("kv_groups", [1, 2], "several groups"), ("kv_groups", [], "several groups"),
        ("has_mamba_layers", True, "Mamba layers"), ("interval", 2, "prefills in turns"),
        ("adaptive", True, "an adaptive long_prefill_token_threshold"),
    ],
)  # fmt: skip
def test_server_with_what_a_plan_does_not_know_is_refused_by_its_name(ours, name, value, feature):
    ours.refusals.refuse_server(_server())
    with pytest.raises(SpecError, match=f"policies do not run in vLLM with {feature}"):
        ours.refusals.refuse_server(_server(**{name: value}))


def test_policy_that_asks_for_times_or_seals_batches_is_refused_by_its_name(ours):
    for name in ("scorpio", "hygen", "fair_batching", "qoserve", "fastserve"):
        policy = registry.make(name)
        with pytest.raises(SpecError, match=f"policy '{name}' asks how long steps take"):
            ours.refusals.refuse_policy(policy, name)
        ours.refusals.refuse_policy(policy, name, True)
    ours.refusals.refuse_policy(registry.make("fcfs"), "fcfs")
    for has_cost_model in (False, True):
        with pytest.raises(SpecError, match="policy 'static' seals batches"):
            ours.refusals.refuse_policy(registry.make("static"), "static", has_cost_model)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engine_is_opened_with_the_limits_of_the_experiment(monkeypatch, tmp_path, device):
    config = replace(
        CONFIG, null_blocks=1, max_num_seqs=3, max_num_batched_tokens=37, watermark=0.25,
        long_prefill_token_threshold=11, enable_prefix_caching=True, async_scheduling=True,
    )  # fmt: skip
    asked = []

    class Args:
        def __init__(self, **options):
            asked.append(options)

        def create_engine_config(self):
            return "config"

    opened = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config="cache"))
    contents = {
        "vllm.engine.arg_utils": {"EngineArgs": Args},
        "vllm.v1.engine.core": {
            "EngineCore": lambda *given, **more: asked.append((given, more)) or opened
        },
        "vllm.v1.executor": {"Executor": SimpleNamespace(get_class=lambda one: f"of {one}")},
    }
    for name in ("vllm", "vllm.engine", "vllm.v1", "vllm.v1.engine", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr(engine, "require_room", lambda setup: None)
    monkeypatch.setattr(engine, "model_folder", lambda name, at: at / name)
    more = {} if device == "cpu" else {"attention_backend": "TRITON_ATTN", "weights": str(tmp_path)}
    core = engine.Core(
        engine.VllmSetup("schedlab-tiny", config, device, "fp32", seed=5, threads=2, **more)
    )
    options, of_core = asked
    block_bytes = 4 * engine.model("schedlab-tiny").kv_bytes_per_token("fp32")
    on_cpu = device == "cpu"
    expected = {
        "load_format": "dummy" if on_cpu else "auto", "dtype": "float32", "seed": 5,
        "max_model_len": 30, "block_size": 4, "num_gpu_blocks_override": 9,
        "kv_cache_memory_bytes": 9 * block_bytes if on_cpu else None,
        "gpu_memory_utilization": 0.9, "max_num_seqs": 3, "max_num_batched_tokens": 37,
        "enable_chunked_prefill": True, "enable_prefix_caching": True,
        "long_prefill_token_threshold": 11, "watermark": 0.25,
        "scheduler_reserve_full_isl": config.scheduler_reserve_full_isl, "async_scheduling": True,
        "enforce_eager": on_cpu, "distributed_executor_backend": "uni", "disable_log_stats": True,
        "skip_tokenizer_init": True, "model": options["model"],
    }  # fmt: skip
    if not on_cpu:
        expected["attention_config"] = {"backend": "TRITON_ATTN"}
    assert options == expected
    assert (
        options["model"].endswith("schedlab-tiny") if on_cpu else options["model"] == str(tmp_path)
    )
    assert of_core == (("config", "of config"), {"log_stats": False})
    assert threads == ([2] if on_cpu else [])
    assert core._kv_cache_config == "cache"
    assert core.vocab_size == engine.model("schedlab-tiny").vocab_size


# -- what a replay writes down -----------------------------------------------------------------


class Written:
    """A log that keeps what it is told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *given: self.told.append((name, *given))


class Times:
    """A clock of a replay: 5 ns later whenever it is read."""

    now_ns = 900

    def __init__(self):
        self.read, self.shapes = 0, []

    def read_ns(self):
        self.read += 5
        return self.read

    def planning_ns(self):
        return 300

    def planned(self, begun_ns, shape):
        self.shapes.append(shape)
        return ("planned", begun_ns, len(self.shapes))

    def ended(self, step, ready_ns):
        return SimpleNamespace(end_ns=1000 + ready_ns, of=step)


def state_of(number, prompt, computed, generated=0, preempted=0):
    state = RequestState(arrival(number, prompt=prompt).request)
    state._computed, state._generated, state.num_preemptions = computed, generated, preempted
    return state


@pytest.fixture
def writer(ours, scheduler):
    """A scheduler of a replay at 300 ns, with 9 of 30 blocks of 4 tokens held."""
    found = object.__new__(ours.replay.ReplayScheduler)
    vars(found).update(vars(scheduler))
    found.clock, found.at_ns, found.log, found.on_gone = Times(), 300, Written(), None
    found.num_plans = found.num_estimates = 0
    found._num_preempted = found._recomputed_tokens = 0
    found._coming, found._output_tokens, found._under_way, found._batch = {}, {}, [], None
    found.engine_config = replace(CONFIG, num_blocks=30)
    found.plan_requests.kv = SimpleNamespace(free_blocks=21)
    found.plan_requests.running, found.plan_requests.leaving = {}, []
    return found


def test_step_of_a_replay_is_written_down_before_its_tokens_count(writer):
    long, short = state_of(0, 6, 7, generated=2), state_of(1, 2, 2, generated=1)
    part, whole = state_of(2, 9, 4, preempted=1), state_of(3, 5, 2)
    leaving, gone = state_of(4, 5, 6, generated=2), state_of(5, 8, 5)
    requests = writer.plan_requests
    requests.running = {s.id: s for s in (long, short, part, whole)}
    requests.leaving, requests.waiting = [leaving], [gone] * 3
    plan = plan_of(chunks=((part, 3), (whole, 3)))
    plan.decodes, plan.admitted, plan.preempted = (long, short), (part, whole), (gone,)
    writer._last_plan, writer._num_preempted, writer._recomputed_tokens = plan, 1, 5
    batch = writer._note()
    # Only who was evicted before is resumed: 5 of its 9 tokens are to be computed.
    assert writer.log.told == [("resumed", 2, 300, 5)]
    assert batch.tokens == {0: 1, 1: 1, 2: 3, 3: 3}
    assert batch.computed == {0: 7, 1: 2, 2: 4, 3: 2}
    assert (batch.decodes, batch.preempted) == ({0, 1}, (5,))
    # 8 + 3 + 7 + 5 + 6 tokens in 2 + 1 + 2 + 2 + 2 blocks.
    assert (batch.kv_blocks, batch.kv_tokens) == (9, 29)
    assert (batch.num_preempted, batch.recomputed_tokens) == (1, 5)
    assert batch.shape == BatchShape(
        num_decodes=2, decode_context_sum_tokens=9, decode_context_max_tokens=7,
        decode_context_min_tokens=2, chunks=((3, 4), (3, 2)), rows_sampled=3, num_running=4,
        num_waiting=3,
    )  # fmt: skip
    assert batch.told() == "0:1@7 1:1@2 2:3@4 3:3@2"
    assert (writer._num_preempted, writer._recomputed_tokens) == (0, 0), "told once"


def test_step_of_a_replay_that_computes_nothing_has_no_batch(ours, writer, monkeypatch):
    shape, notes = BatchShape(2, 9, 7), [True, False]

    def schedule(self, throttle_prefills=False):
        assert self.at_ns == 400
        if notes.pop(0):
            self._batch = SimpleNamespace(shape=shape)
        return "output"

    monkeypatch.setattr(ours.replay.ReplayScheduler.__mro__[1], "schedule", schedule)
    writer.clock.read_ns, writer.clock.planning_ns = lambda: 350, lambda: 400
    assert [writer.schedule(), writer.schedule()] == ["output"] * 2
    assert [batch is None for batch, _ in writer._under_way] == [False, True]
    assert writer.clock.shapes == [shape, BatchShape(0, 0, 0)]
    assert writer._under_way[0][1] == ("planned", 350, 1)


def test_plan_of_a_replay_counts_who_loses_computed_tokens_and_until_when_it_waits(writer):
    lost, done = state_of(1, 8, 5), state_of(2, 8, 7)
    done.status = Status.FINISHED
    writer._builder.plan = plan = plan_of()
    plan.until_ns = 470
    writer._policy.plan = lambda view, builder: plan
    assert writer._make_plan() is plan
    assert (writer.num_plans, writer.waits_until_ns) == (1, 470)
    plan.decodes, plan.preempted = (), (lost, done)
    writer._make_plan()
    writer._make_plan()
    assert (writer._num_preempted, writer._recomputed_tokens) == (2, 10)
    assert writer.log.told == [("evicted", 1, 300)] * 2
    assert (writer.num_plans, writer.waits_until_ns) == (3, -1)


@pytest.mark.parametrize("what", ["admitted", "chunks", "decodes", "rejected"])
def test_plan_of_a_replay_that_does_anything_waits_for_nothing(writer, what):
    writer._builder.plan = plan = plan_of()
    one = state_of(1, 8, 5)
    setattr(plan, what, ((one, 2),) if what == "chunks" else (one,))
    if what == "rejected":
        plan.rejected = ((one, "no room"),)
    writer._policy.plan = lambda view, builder: plan
    writer._make_plan()
    assert writer.waits_until_ns == -1


def test_step_of_a_replay_ends_with_tokens_of_the_first_under_way_and_answers(writer):
    batch, gone = SimpleNamespace(name="first"), []
    writer._under_way = [(batch, "a"), (None, "b")]
    writer.on_gone = lambda state, at_ns: gone.append((state.id, at_ns))
    writer.plan_requests.states = {str(i): state_of(i, 4, 4) for i in range(3)}

    def told(number, tokens, reason=None):
        return SimpleNamespace(request_id=str(number), new_token_ids=tokens, finish_reason=reason)

    first, second = Outputs(), Outputs()
    first.outputs, second.outputs = [told(0, [9]), told(1, [])], [told(2, [7], "length")]
    outputs = {0: first, 1: second}
    assert writer.update_from_output(None, outputs) is outputs
    (name, written, times, answered), *more = writer.log.told
    assert (name, written, times.of, times.end_ns) == ("step", batch, "a", 1005)
    assert answered == [0, 2]
    assert more == [("finished", 2, 1005)]
    assert gone == [(2, 1005)]
    writer.log.told.clear()
    assert writer.update_from_output(None, outputs) is outputs
    assert (writer.log.told, writer._under_way) == ([], []), "nothing ran in the second"


def test_request_of_a_replay_is_known_with_its_answer_when_it_is_sent(writer):
    one = arrival(3, 40, prompt=4, output=6)
    del writer.now_ns, writer.seen
    writer.send(one, sent(3), 80)
    assert (writer.at_ns, writer.now_ns()) == (80, 80)
    ((name, state, output_tokens),) = writer.log.told
    assert (name, state.request, output_tokens) == ("sent", one.request, 6)
    assert [waits.id for waits in writer._blocked] == [3]


def test_request_that_a_replay_turns_away_is_written_down_and_makes_room(writer):
    gone = []
    writer.on_gone = lambda state, at_ns: gone.append((state.id, at_ns))
    writer._policy.needs_prediction = True
    del writer.now_ns, writer.seen
    writer.send(arrival(3, 40, output=6), sent(3), 80)
    ((name, state, output_tokens, reason),) = writer.log.told
    assert (name, state.id, output_tokens) == ("turned_away", 3, 6)
    assert reason.startswith("policy Policy orders by predicted output")
    assert gone == [(3, 900)]


def test_first_requests_come_all_at_once():
    some = opening.first_requests(replace(CONFIG, max_num_batched_tokens=20))
    assert {(one.ready_ns, one.request.arrival_ns) for one in some} == {(0, 0)}
    assert {one.request.prompt_tokens for one in some} == {5}
    assert [one.request.id for one in some] == list(range(len(some)))
    assert [one.output_tokens for one in some[:14]] == [*range(1, 13), 1, 2]
    assert {one.request.max_tokens for one in some} == {12}
    few = opening.first_requests(replace(CONFIG, max_model_len=8, max_num_batched_tokens=60))
    assert {(one.request.prompt_tokens, one.request.max_tokens) for one in few} == {(4, 4)}
    assert {one.output_tokens for one in few} == {1, 2, 3, 4}


# -- single steps ------------------------------------------------------------------------------


class Ticks:
    """A stopwatch that is 100 ns later at each reading, 1 us behind what is between steps."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        self.now_ns += 100
        return self.now_ns

    def between_steps(self):
        self.now_ns += 1_000


class DesignedCore:
    """vLLM's engine: a step schedules, runs the model, and accounts for it."""

    vocab_size = 50

    def __init__(self, device):
        self.setup, self.engine, self.hooks = SimpleNamespace(device=device), self, []
        self.request_block_hasher = "hasher"
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(
            worker=SimpleNamespace(get_model=lambda: SimpleNamespace(
                register_forward_pre_hook=self.hooks.append, register_forward_hook=self.hooks.append
            ))
        ))  # fmt: skip
        self.told = []

    def new_plain_scheduler(self, cls, stopwatch):
        scheduler = self.scheduler = cls(stopwatch)
        scheduler.current_step, scheduler.requests, scheduler.running = 0, {}, []
        scheduler.kv_cache_manager = SimpleNamespace(
            new_step_starts=lambda: self.told.append("starts"),
            allocate_slots=lambda request, n, num_external_computed_tokens: (
                f"{request.request_id}: {n} + {num_external_computed_tokens}"
            ),
        )
        scheduler.waiting = SimpleNamespace(remove_request=lambda request: None)
        scheduler.finish_requests = lambda ids, status: self.told.append([*ids, status])
        return scheduler

    def step(self):
        output = self.scheduler.schedule()
        begin, end = self.hooks
        for _ in range(2):
            begin()
            end()
        self.scheduler.update_from_output(output, None)


@pytest.mark.parametrize(("device", "warm_ups"), [("cpu", 0), ("cuda", 2)])
def test_batch_is_timed_in_vllms_loop_from_launch_to_tokens_and_inside_the_model(
    ours, monkeypatch, device, warm_ups
):
    core = DesignedCore(device)
    outputs = []
    monkeypatch.setattr(
        ours.step_timer,
        "step_output",
        lambda scheduler, new, resumed, running, tokens, blocks, preempted: outputs.append(
            ([one.request_id for one in new], [one.request_id for one in running], tokens, blocks)
        ),
    )
    monkeypatch.setattr(ours.step_timer.RequestStatus, "FINISHED_ABORTED", "gone", raising=False)
    core_request = ours.step_timer.VllmRequest
    monkeypatch.setattr(
        ours.step_timer,
        "VllmRequest",
        lambda *given, **more: (
            vars(request := core_request(*given, **more)).update(status="waiting") or request
        ),
    )
    timer = ours.step_timer.VllmStepTimer(core, Ticks())
    point = BatchPoint("mixed", (9, 1), ((3, 4),))
    host, forward = timer.time(point, 2)
    assert host == (500e-9,) * 2, "four readings in the model, and one at the end"
    assert forward == (200e-9,) * 2
    assert timer._stopwatch.now_ns == 1_000 + 600 * (4 + warm_ups)
    first, *steps, last = outputs
    # Decodes have room to grow, and are not new when they are timed.
    room = warm_ups + 2 + 1
    cached = max(9 - room, 0)
    assert first == (
        ["design-0", "design-1"], [], {"design-0": 1, "design-1": 1},
        {"design-0": f"design-0: 1 + {cached}", "design-1": "design-1: 1 + 0"},
    )  # fmt: skip
    assert last == ([], [], {}, {})
    assert len(steps) == 2 + warm_ups
    for i, (new, running, tokens, blocks) in enumerate(steps, 2):
        assert (new, running) == ([f"design-{i}"], ["design-0", "design-1"])
        assert tokens == {"design-0": 1, "design-1": 1, f"design-{i}": 3}
        assert blocks[f"design-{i}"] == f"design-{i}: 3 + 4"
        assert blocks["design-0"] == "design-0: 1 + 0"
    assert core.told.count("starts") == core.scheduler.current_step == len(outputs)
    gone = [one for one in core.told if one != "starts"]
    assert gone[-1] == ["design-0", "design-1", "gone"]
    assert gone[0] == ["design-2", "gone"]
    timer.time(point, 1)
    assert len(outputs) == 4 + warm_ups + 3, "it is warm"
    (request,) = [one for name, one in core.scheduler.requests.items() if name == "design-2"]
    assert len(request.prompt) == 7
    assert request.params.ignore_eos
    assert not request.params.detokenize
    assert request.block_hasher == "hasher"
    timer.run(BatchPoint("decode", (5,), ()))
    assert len(outputs) == 4 + warm_ups + 3 + 3
