"""What policies that wrap another ordering have in common."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from schedlab.policies import registry
from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

Inner = str | Mapping[str, Any]


def ordering(inner: Inner) -> ContinuousBatching:
    """Construct the policy to wrap: a name, or a mapping of a name and knobs.

    Raises
    ------
    ValueError
        If it is no pure ordering: only its order, victim and chunks can be wrapped.
    SpecError
        If there is no such policy or knob.
    """
    knobs = {"name": inner} if isinstance(inner, str) else dict(inner)
    if "name" not in knobs:
        raise ValueError(f"inner needs a name, for example {{name: sjf}}; got {knobs}")
    name = knobs.pop("name")
    policy = registry.make(name, **knobs)
    base = ContinuousBatching
    if (
        not isinstance(policy, base)
        or type(policy).plan is not base.plan
        or type(policy).candidates is not base.candidates
    ):
        raise ValueError(f"inner must be an ordering such as sjf or priority; {name} does more")
    return policy


class Wrapper(ContinuousBatching):
    """An ordering that defers to another one, and changes something about it.

    Whatever the inner policy defines is taken over: its hooks, its flags as they are at the time,
    and no more than its promise.
    """

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self._ordering = ordering(inner)
        self.needs_prediction = self._ordering.needs_prediction
        self.needs_prefixes = self._ordering.needs_prefixes

    @property
    def static_keys(self) -> bool:  # type: ignore[override]
        """Whether the inner keys have stayed; may change from step to step."""
        return self._ordering.static_keys

    @property
    def rekeyed(self) -> Collection[RequestState]:  # type: ignore[override]
        """Whose inner keys have changed."""
        return self._ordering.rekeyed

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        """Order as the inner policy does."""
        return self._ordering.key(state, now_ns)

    def order(self, view: EngineView) -> Iterable[RequestState]:
        """Order as the inner policy does."""
        return self._ordering.order(view)

    def victim(self, running: Sequence[RequestState], now_ns: int) -> RequestState:
        """Take from whom the inner policy takes."""
        return self._ordering.victim(running, now_ns)

    def hold(self, state: RequestState, view: EngineView) -> bool:
        """Hold whom the inner policy holds."""
        return self._ordering.hold(state, view)

    def chunk(self, state: RequestState, view: EngineView) -> int | None:
        """Cut prompts as the inner policy does."""
        return self._ordering.chunk(state, view)

    def seating(self, loaded: list[RequestState], view: EngineView) -> list[RequestState]:
        """Order as the inner policy does."""
        return self._ordering.seating(loaded, view)

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise all for what is forwarded; `promise` adds what the inner policy says."""
        return FOREVER, FOREVER

    def promise(self, view: EngineView, hooks_matter: bool = True) -> tuple[int, int]:
        """Promise no more than the inner policy does."""
        own_steps, own_until_ns = super().promise(view, hooks_matter)
        max_steps, until_ns = self._ordering.promise(view, hooks_matter)
        return min(own_steps, max_steps), min(own_until_ns, until_ns)

    def on_start(self, view: EngineView) -> None:
        """Pass it on."""
        if self._ordering.on_start is not None:
            self._ordering.on_start(view)

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Pass it on."""
        if self._ordering.on_arrival is not None:
            self._ordering.on_arrival(state, now_ns)

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Pass it on."""
        if self._ordering.on_tokens is not None:
            self._ordering.on_tokens(plan, num_steps, now_ns)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Pass it on."""
        if self._ordering.on_finish is not None:
            self._ordering.on_finish(state, now_ns)

    def keeps_until(self, state: RequestState, now_ns: int) -> int:
        """Keep what the inner policy keeps."""
        keeps = self._ordering.keeps_until
        return now_ns if keeps is None else keeps(state, now_ns)

    def keeps_longer(self, state: RequestState, now_ns: int, is_awaited: bool) -> int:
        """Keep on what the inner policy keeps on."""
        keeps = self._ordering.keeps_longer
        return now_ns if keeps is None else keeps(state, now_ns, is_awaited)

    def on_reject(self, state: RequestState, now_ns: int) -> None:
        """Pass it on."""
        if self._ordering.on_reject is not None:
            self._ordering.on_reject(state, now_ns)
