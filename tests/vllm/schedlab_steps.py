"""The steps that our engine takes on a workload."""

from __future__ import annotations

from typing import Any, NamedTuple

from schedlab.policies.fcfs import FirstComeFirstServed
from schedlab.policies.policy import Policy
from schedlab.policies.priority import Priority
from tests import laws
from tests.vllm.workloads import STEP_NS, Workload


class Step(NamedTuple):
    """Who computes how many tokens, and who was preempted since the last step, in order."""

    tokens: dict[int, int]
    preempted: tuple[int, ...]


def recorded(base: type[Policy], steps: list[Step]) -> Policy:
    """Return a policy that notes what it plans."""

    class Recorded(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._preempted: list[int] = []

        def plan(self, view: Any, builder: Any) -> Any:
            plan = super().plan(view, builder)
            self._preempted += [state.id for state in plan.preempted]
            tokens = plan.num_scheduled_tokens()
            if tokens:
                steps.append(Step(tokens, tuple(self._preempted)))
                self._preempted.clear()
            return plan

    return Recorded()


def steps_of(workload: Workload) -> list[Step]:
    """Simulate, every step taking the same time."""
    steps: list[Step] = []
    policy = recorded(Priority if workload.by_priority else FirstComeFirstServed, steps)
    cost = laws.LinearCost(base_ns=STEP_NS, token_ns=0, context_ns=0)
    laws.run(policy, workload.arrivals, workload.config, cost)
    return steps
