"""What a policy does to a run is told as its own fault, wherever its class was written."""

import pytest

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
