"""Proof that a policy keeps its skip-ahead promises: it is asked again at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.errors import PolicyLied

if TYPE_CHECKING:
    from schedlab.sim.core.engine import Engine


class _Promise(NamedTuple):
    """A decision that is to be made again."""

    decision: tuple[object, ...]
    """See `BatchPlan.decision`."""
    steps_left: int
    until_ns: int
    num_events: int
    """Events before it was given; one more, and it is void."""
    decode_tokens: int
    """Tokens of the decodes, drafts among them; other ones leave another room, and it is void."""


class PromiseCheck:
    """Makes every plan twice, and compares it with what was promised before.

    Parameters
    ----------
    engine : Engine
        Whose policy is asked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._promise: _Promise | None = None

    def make_plan(self) -> BatchPlan:
        """Make a plan.

        Raises
        ------
        PolicyLied
            If the policy does not agree with itself, or with its promise.
        """
        engine = self._engine
        promise = self._open_promise()
        first = engine.make_plan().decision()
        engine.kv.rollback()
        evictions = engine.kv.num_evictions
        plan = engine.make_plan()
        decision = plan.decision()
        if decision != first:
            self._refuse("planned twice at one instant", first, decision)
        num_events = engine.requests.num_events
        if promise is not None:
            if decision != promise.decision:
                self._refuse("broke its skip-ahead promise", promise.decision, decision)
            self._promise = promise._replace(steps_left=promise.steps_left - 1)
        elif not (
            plan.chunks or plan.admitted or plan.preempted or plan.rejected
            or engine.chooses_drafts_next
            or (engine.view.looked_at_cache and engine.kv.num_evictions != evictions)
        ):  # fmt: skip
            tokens = engine.requests.decodes.tokens_next_step()
            self._promise = _Promise(
                decision, plan.max_steps - 1, plan.until_ns, num_events, tokens
            )
        return plan

    def _open_promise(self) -> _Promise | None:
        """Take the promise out that the step to plan falls under, if any."""
        promise, self._promise = self._promise, None
        requests, kv = self._engine.requests, self._engine.kv
        if promise is None:
            return None
        room_blocks = kv.free_blocks
        if self._engine.view.looked_at_cache:  # whoever lost a block of it decides anew
            room_blocks = min(room_blocks, kv.blocks_before_eviction())
        if (
            promise.num_events != requests.num_events
            or promise.steps_left < 1
            or promise.until_ns <= self._engine.now_ns
            or promise.decode_tokens != requests.decodes.tokens_next_step()
            or (kv.grows and requests.decodes.blocks_next_step() > room_blocks)
        ):
            return None  # running out of memory ends a promise as well
        return promise

    def _refuse(self, what: str, first: tuple[object, ...], second: tuple[object, ...]) -> None:
        raise PolicyLied(self._engine.blame(difference(what, first, second)))


def difference(what: str, first: tuple[object, ...], second: tuple[object, ...]) -> str:
    """Say in which parts two decisions (see `BatchPlan.decision`) differ."""
    names = (
        "tokens", "admitted", "preempted", "swapped", "rejected", "padding", "finished",
        "pad_finished", "loading",
    )  # fmt: skip
    pairs = zip(names, first, second, strict=True)
    changed = "; ".join(f"{name}: {a} then {b}" for name, a, b in pairs if a != b)
    return f"{what}: {changed}"
