"""What a policy does to a run is told as its own fault, wherever its class was written."""

import signal
from types import SimpleNamespace

import pytest

from schedlab.experiments.running import fence
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import ContinuousBatching, registry
from schedlab.sim.errors import PolicyError

SPEC = {"workload": {"trace": "fixed", "num_requests": 5, "request_rate": 5}}


def typed(monkeypatch, body):
    """Register a policy as if its class had been typed into a notebook or an interpreter."""
    source = (
        f"class Typed(ContinuousBatching):\n    def key(self, state, now_ns):\n        {body}\n"
    )
    names = {"ContinuousBatching": ContinuousBatching, "__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), names)
    monkeypatch.setitem(registry._POLICIES.found, "typed", names["Typed"])
    monkeypatch.delattr("__main__.__file__", raising=False)
    return make_spec({**SPEC, "policy": "typed"})


def test_fence_around_a_class_without_a_source_file_lets_it_run(monkeypatch):
    spec = typed(monkeypatch, "return -state.request.prompt_tokens")
    assert run(spec).metrics()["completed"] == 5


def test_fence_around_a_class_without_a_source_file_names_the_line_that_raised(monkeypatch):
    spec = typed(monkeypatch, "raise RuntimeError('boom')")
    with pytest.raises(PolicyError, match=r"key\(\) raised RuntimeError: boom \(<cell 1>:3\)"):
        run(spec)


def test_fence_names_the_innermost_line_of_the_policy_that_led_to_an_error(monkeypatch):
    body = "return self.rank(state)\n    def rank(self, state):\n        return int('x')"
    with pytest.raises(PolicyError, match=r"rank\(\) raised ValueError: .* \(<cell 1>:5\)"):
        run(typed(monkeypatch, body))


@pytest.mark.parametrize(
    ("error", "said"), [("SystemExit(0)", "SystemExit: 0"), ("GeneratorExit", "GeneratorExit")]
)
def test_fence_tells_of_a_policy_that_would_end_the_process(monkeypatch, error, said):
    spec = typed(monkeypatch, f"raise {error}")
    with pytest.raises(PolicyError, match=rf"policy Typed: key\(\) raised {said} \(<cell 1>:3\)"):
        run(spec)


def test_fence_around_a_generator_that_is_closed_says_nothing():
    def fenced_steps():
        with fence.fenced({"policy": ContinuousBatching}):
            yield 1

    steps = fenced_steps()
    assert next(steps) == 1
    steps.close()


def frame(file, back=None):
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=back)


def test_call_of_a_policy_is_too_long_if_it_is_seen_three_times_in_a_row(monkeypatch):
    timers, handlers = [], []
    monkeypatch.setattr(
        fence.signal, "setitimer", lambda *given: timers.append(given[1:]) or (0.0, 0.0)
    )
    monkeypatch.setattr(
        fence.signal, "signal", lambda _, handler: handlers.append(handler) or "before"
    )
    monkeypatch.setattr(fence.sys, "gettrace", lambda: None)
    caller = frame("ours.py", frame("policy.py"))
    with fence._watched({"policy.py"}, caller, 4.0):
        (look,) = handlers
        first, second = frame("policy.py", caller), frame("policy.py", frame("x.py", caller))
        for seen in (first, frame("y.py", first), second, second, caller, second, second):
            look(0, seen)
        for _ in range(4):
            look(0, caller), look(0, None)
        look(0, frame("policy.py", frame("z.py", first)))
        look(0, first)
        with pytest.raises(fence._TooLong, match=r"for more than 4 s; SCHEDLAB_PLAN_LIMIT_S"):
            look(0, first)
    assert timers == [(2.0, 2.0), (0,)] or timers == [(2.0, 2.0), (0, 0)]
    assert handlers == [look, "before"]


@pytest.mark.parametrize(("limit_s", "trace"), [(0.0, None), (1.0, print)])
def test_calls_are_not_watched_without_a_limit_or_while_somebody_debugs(
    monkeypatch, limit_s, trace
):
    monkeypatch.setattr(fence.signal, "signal", lambda *_: 1 / 0)
    monkeypatch.setattr(fence.sys, "gettrace", lambda: trace)
    with fence._watched(set(), None, limit_s):
        pass


OWN = """
from schedlab.policies import ContinuousBatching
from schedlab.policies.routers.router import Router

class Hang(ContinuousBatching):
    optimises = knows = fails = source = "hangs"

    def key(self, state, now_ns):
        while True:
            pass

class Slow(Router):
    optimises = knows = fails = source = "hangs"

    def route(self, request, engines):
        while True:
            pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (
            {"pools": {"a": {"policy": "own_hang:Hang"}, "b": {"policy": "fcfs"}}},
            r"policy Hang: key",
        ),
        (
            {"pools": {"a": {"policy": "fcfs"}, "b": {"policy": "own_hang:Hang"}}},
            r"policy Hang: key",
        ),
        ({"count": 2, "router": "own_hang:Slow"}, r"own_hang:Slow: route"),
    ],
)
def test_code_of_any_pool_and_of_a_router_that_never_ends_is_ended_by_name(
    tmp_path, monkeypatch, cluster, told
):
    (tmp_path / "own_hang.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SCHEDLAB_PLAN_LIMIT_S", "0.1")
    spec = make_spec({**SPEC, "cluster": cluster})
    with pytest.raises(PolicyError, match=rf"{told}\(\) has run for more than 0.1 s; .*own_hang"):
        run(spec)


def test_timer_of_the_caller_goes_on_when_a_fence_is_left():
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 7.0)
    try:
        with fence._watched(set(), None, 4.0):
            assert signal.getitimer(signal.ITIMER_REAL)[1] == 2.0
        left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < left_s <= 1000
        assert every_s == 7.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
