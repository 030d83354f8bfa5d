"""What the engine asks of a policy."""

from collections.abc import Callable, Collection
from typing import Protocol

from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.request_hooks import RequestHooks
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


class SchedulingPolicy(RequestHooks, Protocol):
    """What the engine asks of a policy; `policies.Policy` is the base class to derive from."""

    static_keys: bool
    """Whether `key` never changes while a request waits, but for those in `rekeyed`."""
    rekeyed: Collection[RequestState]
    """Requests whose key changed since the last plan, where keys are static otherwise."""

    pauses: bool
    """Whether requests that it leaves out keep their memory beside a whole step of others."""
    seats_loaded: bool
    """Whether it gives `EngineView.loaded` their seats."""

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Decide one step. Must not change the policy's own state."""

    on_start: Callable[[EngineView], None] | None
    """Called once, before anything else, with the view that `plan` will get."""
    on_tokens: Callable[[BatchPlan, int, int], None] | None
    """Called with a plan that was executed, for how many steps, and the time it ended."""
