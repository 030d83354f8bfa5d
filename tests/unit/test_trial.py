"""A policy from outside is tried on the first requests before its numbers are believed."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from schedlab.experiments.running import trial
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import ContinuousBatching, Policy, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.errors import PolicyError, PolicyLied, SpecError, Stalled
from tests import laws

HALF_A_SECOND = 500_000_000


class Honest(ContinuousBatching):
    """Short prompts first."""

    def key(self, state, now_ns):
        return state.request.prompt_tokens


class Liar(ContinuousBatching):
    """Lets newcomers wait for half a second while others run, and promises all."""

    def hold(self, state, view):
        return bool(view.running) and view.now_ns - state.request.arrival_ns < HALF_A_SECOND

    def horizon(self, view):
        return FOREVER, FOREVER


class LateLiar(Liar):
    """Lies about those only who come after the first 40."""

    def hold(self, state, view):
        return state.id >= 40 and super().hold(state, view)

    horizon = Liar.horizon


class Writer(ContinuousBatching):
    """Writes to what belongs to the trace."""

    def on_arrival(self, state, now_ns):
        state.request.priority = 7


class Counted(Honest):
    """Counts the plans of all its kind."""

    plans: ClassVar[list[int]] = []

    def plan(self, view, builder):
        self.plans.append(view.now_ns)
        return super().plan(view, builder)

    horizon = Liar.horizon


class Onlooker(ContinuousBatching):
    """Every promise holds, but its key looks at the progress of others when a request comes."""

    def __init__(self):
        self._states = []

    def on_arrival(self, state, now_ns):
        self._states.append(state)

    def key(self, state, now_ns):
        return sum(s.num_output_tokens for s in self._states) % 13


class Ageing(ContinuousBatching):
    """Its key moves with the time, and it does not say so."""

    def key(self, state, now_ns):
        return state.request.prompt_tokens - (now_ns - state.request.arrival_ns) / 1e6


class Unpredicted(ContinuousBatching):
    def key(self, state, now_ns):
        return state.request.predicted_tokens


class Mixed(ContinuousBatching):
    def key(self, state, now_ns):
        return (1, "x") if state.id % 2 else (1, 2.0)


class Arrays(ContinuousBatching):
    def key(self, state, now_ns):
        return np.array([1, 2])


class Dice(ContinuousBatching):
    def key(self, state, now_ns):
        return random.random()


class Misspelt(ContinuousBatching):
    def keys(self, state, now_ns):
        return -state.request.prompt_tokens


class Helped(ContinuousBatching):
    """A helper of its own may be called nearly as a hook is."""

    def keys(self, state):
        return -state.request.prompt_tokens

    def key(self, state, now_ns):
        return self.keys(state)


class Unchanged(ContinuousBatching):
    """Nothing but a name."""


class Gatherer(Policy):
    """Starts only when four requests wait, and never starts the rest."""

    def plan(self, view, builder):
        if view.running:
            builder.grant_running()
        elif len(view.waiting) >= 4:
            for state in view.waiting:
                builder.grant(state)
        return builder.build()


class Raiser(ContinuousBatching):
    """Divides by zero."""

    def key(self, state, now_ns):
        return 1 / (state.id - 5)


def spec(policy, num_requests=60, workload=(), **engine):
    return make_spec(
        {
            "name": "trial",
            "model": "llama-3-8b",
            "hardware": "a100-80gb",
            "engine": {"max_num_seqs": 12, **engine},
            "policy": policy if policy in registry.names() else f"{__name__}:{policy}",
            "workload": {
                "trace": "azure-conv",
                "num_requests": num_requests,
                "request_rate": 6.0,
                **dict(workload),
            },
        }
    )


def signature(result):
    return laws.signature(result.log)


def test_lie_of_a_policy_from_outside_is_an_error_that_names_it_the_step_and_the_difference():
    with pytest.raises(PolicyLied) as caught:
        run(spec("Liar"))
    text = str(caught.value)
    assert f"policy {__name__}:Liar, tried on the first 300 requests" in text
    assert "engine.trial_requests: 0" in text
    assert "step " in text
    assert "broke its skip-ahead promise: tokens: (" in text
    assert "times as fast" not in text


@pytest.mark.slow
def test_policy_that_looks_at_the_progress_of_others_is_caught_by_comparison(monkeypatch):
    monkeypatch.setattr(trial, "MAX_WATCHED", 0)  # its keys move, which is told first
    with pytest.raises(PolicyLied) as caught:
        run(spec("Onlooker", max_num_seqs=4))
    text = str(caught.value)
    assert "skipping ahead changes the run at step" in text
    assert "by single steps" in text


@pytest.mark.slow
def test_policy_that_writes_to_a_request_is_told_which_and_what():
    with pytest.raises(PolicyLied, match="request 0 was changed: priority from 0 to 7"):
        run(spec("Writer"))


@pytest.mark.slow
def test_trial_of_an_honest_policy_changes_no_bit():
    tried = signature(run(spec("Honest")))
    assert tried == signature(run(spec("Honest", trial_requests=0)))
    assert tried == signature(run(spec("Honest", check_horizon=True)))


@pytest.mark.parametrize("engine", [{}, {"fast_forward": False}, {"check_horizon": True}], ids=str)
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("Ageing", "policy Ageing at t = .* set static_keys to False"),
        ("Unpredicted", "the key of request 0 is None, .* give the policy a predictor"),
        ("Mixed", "cannot be compared"),
        ("Arrays", r"the key array\(\[1, 2\]\) of request 0 cannot be compared: ValueError"),
        ("Dice", r"two calls of key\(\) for request .* give"),
    ],
)
def test_policy_whose_keys_cannot_order_is_told_so(policy, words, engine):
    with pytest.raises(PolicyLied, match=words):
        run(spec(policy, max_num_seqs=4, **engine))


@pytest.mark.slow
def test_policy_that_says_its_keys_move_is_believed(monkeypatch):
    monkeypatch.setattr(Ageing, "static_keys", False)
    assert run(spec("Ageing", 60, max_num_seqs=4)).metrics()["completed"] == 60


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("Misspelt", r"nobody calls keys\(\); did you mean key\(\)"),
        ("Unchanged", "overrides nothing, so it is ContinuousBatching; define one of chunk, hold"),
    ],
)
def test_policy_that_changes_nothing_is_refused_before_anything_runs(policy, words):
    with pytest.raises(SpecError, match=words):
        spec(policy)


def test_policy_may_call_a_helper_nearly_as_a_hook_is_called():
    assert run(spec("Helped", 5)).metrics()["completed"] == 5


def count_trials(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "schedlab.experiments.running.run.try_policy", lambda *a, **k: calls.append(a)
    )
    return calls


@pytest.mark.parametrize(
    ("policy", "engine", "trials"),
    [
        ("Honest", {}, 1),
        ("Honest", {"trial_requests": 0}, 0),
        ("Honest", {"check_horizon": True}, 1),
        ("Honest", {"fast_forward": False}, 1),
        ("fcfs", {}, 0),
    ],
)
def test_trial_is_made_of_every_policy_of_a_stranger(monkeypatch, policy, engine, trials):
    calls = count_trials(monkeypatch)
    run(spec(policy, 4, **engine))
    assert len(calls) == trials


@pytest.mark.parametrize("clients", [None, 3])
def test_trial_is_told_the_policy_the_limits_and_the_clients_of_the_run(monkeypatch, clients):
    calls = count_trials(monkeypatch)
    loop = {} if clients is None else {"request_rate": "inf", "max_concurrency": clients}
    run(spec("Honest", 4, loop, trial_requests=17))
    ((name, make_policy, make_gpu, config, arrivals, num_requests, max_concurrency),) = calls
    assert (name, num_requests, max_concurrency) == (f"{__name__}:Honest", 17, clients)
    assert type(make_policy()) is Honest
    assert make_policy() is not make_policy()
    assert make_gpu() is not make_gpu()
    assert config.max_num_seqs == 12
    assert [arrival.request.id for arrival in arrivals()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fast_forward", "check_horizon", "num_runs"),
    [(True, False, 3), (False, False, 2), (True, True, 2)],
)
def test_trial_runs_once_by_single_steps_then_crowded_then_ahead(
    monkeypatch, fast_forward, check_horizon, num_runs
):
    """Clients wait for their answers in each run but the crowded one, which is of arrivals."""
    made = []

    def simulate(engine, sent, max_concurrency):
        limits = engine.config
        made.append(
            (
                [a.request.arrival_ns for a in sent],
                max_concurrency,
                limits.check_horizon,
                limits.fast_forward,
                limits.pipeline_parallel_size,
            )
        )
        return simulated(engine, sent, max_concurrency)

    simulated = trial.simulate
    monkeypatch.setattr(trial, "simulate", simulate)
    config = EngineConfig(
        num_blocks=100, max_model_len=200, pipeline_parallel_size=1 if check_horizon else 2,
        fast_forward=fast_forward, check_horizon=check_horizon,
    )  # fmt: skip
    trial.try_policy(
        "Honest", Honest, lambda: SimExecutor(Pricing(laws.LinearCost())), config,
        lambda: [laws.arrival(i, 3_000 * i) for i in range(5)], 4, 2,
    )  # fmt: skip
    slow, fast = [0, 3_000, 6_000, 9_000], [0, 3, 6, 9]
    assert (
        made
        == [
            (slow, 2, True, fast_forward, 1),
            (fast, None, True, fast_forward, 1),
            (slow, 2, False, True, 1),
        ][:num_runs]
    )


def test_trial_stops_after_its_requests():
    with pytest.raises(PolicyLied):
        run(spec("LateLiar", max_num_seqs=128))
    run(spec("LateLiar", max_num_seqs=128, trial_requests=20))


@pytest.mark.slow
def test_trial_stops_after_its_plans(monkeypatch):
    def num_plans(**engine):
        Counted.plans.clear()
        run(spec("Counted", 100, **engine))
        return len(Counted.plans)

    plain = num_plans(trial_requests=0)
    assert num_plans() > plain + 2_000
    monkeypatch.setattr(trial, "MAX_PLANS", 200)
    monkeypatch.setattr(trial, "_CROWDED_PLANS", 50)
    assert plain + 200 < num_plans() < plain + 2 * 200 + 50 + 10


@pytest.mark.slow
def test_trial_that_is_too_short_for_a_gathering_policy_does_not_stall_the_run():
    at_once = {"request_rate": "inf"}
    fours = {"max_num_seqs": 4, "max_num_batched_tokens": 65_536}
    result = run(spec("Gatherer", 8, at_once, **fours, trial_requests=6))
    assert result.metrics()["completed"] == 8
    with pytest.raises(Stalled):
        run(spec("Gatherer", 6, at_once, **fours))


def test_error_of_a_hook_comes_through_a_trial_as_it_is():
    with pytest.raises((PolicyError, ZeroDivisionError), match="division by zero"):
        run(spec("Raiser"))


def test_trial_is_no_part_of_what_an_experiment_asks():
    assert spec_hash(spec("Honest")) == spec_hash(spec("Honest", trial_requests=7))


@pytest.mark.slow
def test_trial_in_a_closed_loop_changes_no_bit():
    tried = run(spec("Honest", 30, {"request_rate": "inf", "max_concurrency": 5}))
    plain = spec("Honest", 30, {"request_rate": "inf", "max_concurrency": 5}, trial_requests=0)
    assert signature(tried) == signature(run(plain))


@pytest.mark.parametrize(("num_requests", "num_runs"), [(1, 2), (5, 3)])
def test_trial_sends_as_many_requests_as_it_says_to_fresh_policies(num_requests, num_runs):
    seen = []

    class Sees(ContinuousBatching):
        """First come, first served."""

        def __init__(self):
            seen.append([])

        def on_arrival(self, state, now_ns):
            seen[-1].append(state.id)

    trial.try_policy(
        "Sees", Sees, lambda: SimExecutor(Pricing(laws.LinearCost())),
        EngineConfig(num_blocks=100, max_model_len=200), lambda: map(laws.arrival, range(9)),
        num_requests,
    )  # fmt: skip
    assert seen == [list(range(num_requests))] * num_runs


class AgesUnsaid(ContinuousBatching):
    """Its keys grow apart while requests wait, and it does not say so."""

    def key(self, state, now_ns):
        return -(now_ns - state.request.arrival_ns) / state.request.prompt_tokens


@pytest.mark.slow
def test_key_that_moves_unsaid_is_found_where_nobody_waits():
    asked = {"workload": {"trace": "azure-conv", "num_requests": 30, "request_rate": 0.05}}
    with pytest.raises(PolicyLied, match=r"sent 1000 times as fast.* set static_keys to False"):
        run(make_spec(asked | {"policy": f"{__name__}:AgesUnsaid"}))
    assert run(make_spec(asked | {"policy": f"{__name__}:Honest"})).metrics()["completed"] == 30


@pytest.mark.parametrize(
    ("few", "num_sent", "is_worth_it"), [(1, 2, True), (0, 2, False), (1, 1, False)]
)
def test_crowd_is_tried_where_too_few_queues_were_seen_of_several_requests(
    few, num_sent, is_worth_it
):
    watch = SimpleNamespace(num_looked_at=trial._CROWDED_PLANS - few)
    sent = [laws.arrival(i) for i in range(num_sent)]
    assert trial._is_worth_a_crowd(watch, sent) is is_worth_it


def test_crowd_comes_as_many_times_as_fast_and_is_ready_as_long_after():
    sent = [laws.arrival(i, at_ns) for i, at_ns in enumerate((100, 107, 150))]
    sent[1] = replace(sent[1], ready_ns=110)
    crowd = trial._crowded(sent, 4)
    assert [a.request.arrival_ns for a in crowd] == [100, 101, 112]
    assert [a.ready_ns for a in crowd] == [100, 104, 112]
    assert trial._crowded(sent, 1) is sent
    assert trial._crowded([], 4) == []
