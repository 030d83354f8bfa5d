"""The steps that our engine takes on a workload."""

from __future__ import annotations

from typing import Any, NamedTuple

from schedlab.policies import registry
from schedlab.policies.policy import Policy
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.staged_cost import StagedCost
from tests.vllm.workloads import STEP_NS, Workload


class Step(NamedTuple):
    """Who computes how many tokens, and who was preempted since the last step, in order."""

    tokens: dict[int, int]
    preempted: tuple[int, ...]


def recorded(name: str, steps: list[Step], **knobs: object) -> Policy:
    """Return a policy that notes what it plans."""
    base = registry.policy_class(name)
    preempted: list[int] = []

    class Recorded(base):
        def plan(self, view: Any, builder: Any) -> Any:
            plan = super().plan(view, builder)
            preempted.extend([state.id for state in plan.preempted])
            tokens = plan.num_scheduled_tokens()
            if tokens:
                steps.append(Step(tokens, tuple(preempted)))
                preempted.clear()
            return plan

    return Recorded(**knobs)


def steps_of(workload: Workload) -> list[Step]:
    """Simulate, every step taking the same time."""
    steps: list[Step] = []
    policy = recorded(workload.policy, steps)
    cost = laws.LinearCost(base_ns=STEP_NS, token_ns=0, context_ns=0)
    config, drafts = laws.slow(workload.config), workload.drafts
    if len(workload.shares) > 1:
        staged = StagedCost(workload.shares, base_ns=STEP_NS, token_ns=0, context_ns=0)
        laws.run(policy, workload.arrivals, config, staged)
        return steps

    def make_executor(pricing: Pricing) -> SimExecutor:
        if drafts is None:
            return SimExecutor(pricing)
        return SpeculativeExecutor(pricing, config, drafts, NgramDrafter(request_s=0.0))

    laws.run(policy, workload.arrivals, config, cost, make_executor=make_executor)
    return steps
