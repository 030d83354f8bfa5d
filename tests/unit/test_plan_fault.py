"""What is said of a plan that went wrong: which hook of the policy is to blame."""

from types import SimpleNamespace

import pytest

from schedlab.sim.core.plan_fault import plan_fault
from schedlab.sim.errors import InfeasiblePlan

HOOKS = ("key", "victim", "hold", "chunk", "seating", "horizon")


def yields(self):
    yield 1


def says(self):
    return 1


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_with_a_yield_in_it_is_named_whichever_it_is(hook):
    methods = {name: yields if name == hook else says for name in HOOKS}
    policy = type("Policy", (SimpleNamespace,), methods)()
    for error, what in (
        (TypeError("'<' not supported"), "plan() raised TypeError: '<' not supported"),
        (InfeasiblePlan("too much"), "too much"),
    ):
        said = plan_fault(error, policy, lambda: None)
        assert said == f"{what}; {hook}() has a yield in it, so it returns a generator"


def test_generator_that_the_loop_does_not_ask_for_is_not_blamed():
    policy = type("Policy", (SimpleNamespace,), {**dict.fromkeys(HOOKS, says), "order": yields})()
    assert "yield" not in plan_fault(ValueError("no"), policy, lambda: None)
