"""A starvation booster around any ordering."""

import math
from collections.abc import Iterator

from schedlab.policies.registry import register
from schedlab.policies.wrapper import Inner, Wrapper
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("boosted")
class Boosted(Wrapper):
    """Put whoever has waited too long before all others; among these, first come, first served.

    Optimises what the inner ordering does while waits are short. Needs what the inner ordering
    needs. Nobody starves. Once queueing exceeds the threshold nearly everyone is boosted, and
    what is left is first come, first served: a threshold of 0.2 to 0.5 s is 5 to 20 iterations
    of a loaded server. It takes seats when they come free and preempts nobody.

    A decision costs the inner ordering's plus one look at each boosted request.

    Skip-ahead is honest because a step in which someone could be admitted promises nothing, and
    in others it does not matter who is boosted; where iterations count, the step at whose end they
    begin to be counted for somebody promises nothing else.

    Parameters
    ----------
    inner : str or mapping
        The ordering to wrap, e.g. ``sjf`` or ``{name: aged, rate_per_s: 50}``.
    threshold_s : float, optional
        Wait since arrival from which a request is boosted; 0.3 s if neither is given.
    threshold_iterations : int, optional
        The same in iterations of the engine, counted from the end of the one in which the
        request arrived: vllm-ltr's measure, whose default is 200.
    """

    source = "starvation prevention of vllm-ltr (Fu et al. 2024) and FastServe, without preemption"

    def __init__(
        self,
        inner: Inner = "sjf",
        threshold_s: float | None = None,
        threshold_iterations: int | None = None,
    ) -> None:
        super().__init__(inner)
        if threshold_s is not None and threshold_iterations is not None:
            raise ValueError("give threshold_s or threshold_iterations, not both")
        if threshold_s is not None and not 0.0 <= threshold_s < math.inf:
            raise ValueError(f"threshold_s must be finite and >= 0, got {threshold_s}")
        if threshold_iterations is not None and threshold_iterations < 1:
            raise ValueError(f"threshold_iterations must be >= 1, got {threshold_iterations}")
        self.threshold_s = threshold_s
        self.threshold_iterations = threshold_iterations
        self._threshold_ns = round((0.3 if threshold_s is None else threshold_s) * 1e9)
        self._iteration = 0
        # Requests in flight, by arrival if seconds count, else in the order in which they came,
        # with the iteration that ended next.
        self._since: dict[RequestState, int] = {}
        self._new: dict[RequestState, None] = {}

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Remember the request."""
        super().on_arrival(state, now_ns)
        if self.threshold_iterations is not None:
            self._new[state] = None
            return
        is_last = not self._since or _arrival(next(reversed(self._since))) < _arrival(state)
        self._since[state] = 0
        if not is_last:  # it was on another engine before
            self._since = {each: 0 for each in sorted(self._since, key=_arrival)}

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Count iterations."""
        super().on_tokens(plan, num_steps, now_ns)
        self._iteration += num_steps
        self._since.update(dict.fromkeys(self._new, self._iteration))
        self._new.clear()

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        super().on_finish(state, now_ns)
        self._since.pop(state, None)
        self._new.pop(state, None)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted: waits reach the threshold."""
        return 1, FOREVER

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Promise one step where somebody's iterations are counted from its end on."""
        if self._new:
            return 1, FOREVER
        return super().promise(view, hooks_matter)

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield boosted requests by arrival, then the others in the inner order."""
        boosted = set()
        for state, since in self._since.items():
            if not self._is_due(state, since, view.now_ns):
                break
            if view.waits(state):
                boosted.add(state)
                yield state
        for state in super().candidates(view, builder):
            if state not in boosted:
                yield state

    def _is_due(self, state: RequestState, since: int, now_ns: int) -> bool:
        if self.threshold_iterations is None:
            return now_ns - state.request.arrival_ns >= self._threshold_ns
        return self._iteration - since >= self.threshold_iterations


def _arrival(state: RequestState) -> tuple[int, int]:
    return state.request.arrival_ns, state.id
