"""Continuous batching: vLLM V1's scheduling loop, with hooks."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from schedlab.policies.policy import Policy
from schedlab.policies.serving_loop import plan_step
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

_ADMISSION_HOOKS = ("candidates", "chunk", "hold", "order")


class ContinuousBatching(Policy):
    """Running requests first, then the waiting ones in the order of `key`.

    There is no prefill or decode phase: every request has tokens left to compute, and a step
    shares its token budget among them. Memory is only ever taken from running requests, never
    to admit, and a step that preempted admits nobody.

    Skip-ahead is honest: in a decode-only step nobody could be admitted, and with no event seats
    and budget stay the same and free blocks only fall, so nobody can be in the next one either.
    A step that preempted promises nothing, because the next one may admit. Where someone waits who
    could have a seat, the hooks decide, and the plan holds for their `horizon`: that of a class
    that overrides one of `hooks` is one step, unless it says more. Keys that drift
    (`static_keys`) promise nothing either.
    """

    source = "vLLM V1, vllm/v1/core/sched/scheduler.py, schedule()"
    hooks = (*Policy.hooks, *_ADMISSION_HOOKS)
    can_pipeline = True
    seats_loaded = True

    _is_plain: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Note whether the class leaves the hooks of admission, and the promise, as they are."""
        super().__init_subclass__()
        if "plan" in cls.__dict__ and "seats_loaded" not in cls.__dict__:
            cls.seats_loaded = False  # it does not, unless it says so
        base = ContinuousBatching
        cls._is_plain = cls._knows_its_hooks and all(
            getattr(cls, name) is getattr(base, name) for name in (*_ADMISSION_HOOKS, "promise")
        )

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Choose who loses its memory; `running` has the latest admission first (and is taken).

        With async scheduling some of them may have finished in the step under way.
        """
        return running[0]

    def hold(self, state: RequestState, view: EngineView) -> bool:
        """Whether to keep the head of the queue, and so all behind it, waiting on purpose."""
        return False

    def order(self, view: EngineView) -> Iterable[RequestState]:
        """Return the waiting requests in the order to admit; by default that of `key`."""
        return view.waiting

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield the waiting requests to admit, one after the other.

        It is resumed only when the last one was admitted, so it can account for it, or if the
        step defers that one (`PlanBuilder.defers`). The first that does not fit ends the
        admissions of the step.
        """
        for state in self.order(view):
            if self.hold(state, view):
                return
            yield state

    def chunk(self, state: RequestState, view: EngineView) -> int | None:
        """Return the most tokens of a newly admitted request to compute in this step."""
        return None

    def seating(self, loaded: list[RequestState], view: EngineView) -> list[RequestState]:
        """Order those who have been loaded: by `key`, if that says more than who came first."""
        if self.by_arrival:
            return loaded  # as vLLM, the first loaded first
        return sorted(loaded, key=lambda s: (self.key(s, view.now_ns), s.request.arrival_ns, s.id))

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Return for how long the hooks decide alike on those who wait, though nothing happens."""
        return FOREVER if self.static_keys else 1, FOREVER

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan one step as vLLM V1 does; to the last preemption with `preempt_in_order`."""
        own = self.__dict__
        is_plain = self._is_plain and (not own or own.keys().isdisjoint(self.hooks))
        return plan_step(self, view, builder, is_plain)
