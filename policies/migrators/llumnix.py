"""Requests move from the least free engine to the freest."""

from collections.abc import Sequence
from math import inf

from schedlab.policies.migrators.migrator import Migrator
from schedlab.policies.migrators.registry import register
from schedlab.policies.routers.llumnix import Rule, check, freeness
from schedlab.sim.drive.engine_state import Candidate, LiveState


@register("llumnix")
class Llumnix(Migrator):
    """Pair engines of little freeness with free ones: the least free with the freest, and so on.

    An engine that drains has the least of all. This evens out load, makes room for requests that
    wait though memory is free elsewhere (de-fragmentation), keeps others away from urgent ones, and
    empties engines that are to leave. The least urgent requests move first, of these the shortest.

    The authors' code (``rule: code``) also leaves engines where somebody waits who was preempted,
    and goes to none of them; and of the pairs it drops those in which the engine that is gone to
    would end below `leave_below`, or as free as the one that is left or less, or the two would be
    no more alike than before. What they would be it tells from the request that was admitted last,
    on each side from its own; here that one is of the mean size there. Engines that drain, which
    it does not have, are emptied whatever that does.

    Parameters
    ----------
    leave_below : float
        An engine of less freeness (blocks a running request) is left.
    enter_above : float
        An engine of more freeness is gone to, >= `leave_below`.
    headroom : float
        As of the router of this name, in [0, 1].
    rule : {"paper", "code"}
        As of the router of this name.
    """

    source = (
        "Llumnix, Sun et al., OSDI 2024, sections 4.4.2 and 4.4.3; thresholds: AlibabaPAI/llumnix, "
        "migrate_out_threshold 3; rule code: migration_scheduler.py, FilterConstrained and Balanced"
    )

    def __init__(
        self,
        leave_below: float = 3.0,
        enter_above: float = 3.0,
        headroom: float = 0.5,
        rule: Rule = "paper",
    ) -> None:
        if not leave_below <= enter_above:
            raise ValueError(
                f"leave_below must be at most enter_above, got {leave_below!r} and {enter_above!r}"
            )
        check(headroom, rule)
        self.leave_below = leave_below
        self.enter_above = enter_above
        self.headroom = headroom
        self.rule = rule

    def pairs(self, candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
        """Sort both sides by freeness, and pair them off."""
        free = [
            float("-inf") if c.is_draining else freeness(c.engine, self.headroom, self.rule)
            for c in candidates
        ]
        is_code = self.rule == "code"
        # Not asked for where the paper decides, which does not look at it.
        preempted = [is_code and c.engine.num_preempted > 0 for c in candidates]
        places = range(len(candidates))
        leave = [
            p
            for p in places
            if (free[p] < self.leave_below or preempted[p]) and candidates[p].engine.num_running
        ]
        enter = [p for p in places if free[p] > self.enter_above and not preempted[p]]
        leave.sort(key=lambda place: (free[place], place))
        enter.sort(key=lambda place: (-free[place], place))
        pairs = list(zip(leave, enter, strict=False))
        if not is_code:
            return pairs
        return [
            (source, target)
            for source, target in pairs
            if candidates[source].is_draining
            or self._evens_out(candidates[source].engine, candidates[target].engine)
        ]

    def _evens_out(self, source: LiveState, target: LiveState) -> bool:
        """Whether the code would let a request go from one engine to the other."""
        before = freeness(target, 0.0, "code")
        entered = _freeness_with(target, 1)
        if entered < self.leave_below:
            return False
        difference = entered - _freeness_with(source, -1)
        return before == inf or 0 < difference < before - freeness(source, 0.0, "code")


def _freeness_with(engine: LiveState, more: int) -> float:
    """Return the freeness, as the code has it, with a request of the mean size more, or less."""
    num_requests = engine.num_running + more + engine.num_waiting
    if not num_requests:
        return inf
    mean_blocks = engine.used_blocks / engine.num_running if engine.num_running else 0.0
    usage = engine.used_blocks + more * mean_blocks + engine.waiting_blocks
    return (engine.num_blocks - usage) / num_requests
