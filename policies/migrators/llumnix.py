"""Requests move from the least free engine to the freest."""

from collections.abc import Sequence

from schedlab.policies.migrators.migrator import Migrator
from schedlab.policies.migrators.registry import register
from schedlab.policies.routers.llumnix import Rule, check, freeness
from schedlab.sim.drive.engine_state import Candidate


@register("llumnix")
class Llumnix(Migrator):
    """Pair engines of little freeness with free ones: the least free with the freest, and so on.

    An engine that drains has the least of all. This evens out load, makes room for requests that
    wait though memory is free elsewhere (de-fragmentation), keeps others away from urgent ones, and
    empties engines that are to leave. The least urgent requests move first, of these the shortest.

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
        "migrate_out_threshold 3"
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
        places = range(len(candidates))
        leave = [
            p for p in places if free[p] < self.leave_below and candidates[p].engine.num_running
        ]
        enter = [p for p in places if free[p] > self.enter_above]
        leave.sort(key=lambda place: (free[place], place))
        enter.sort(key=lambda place: (-free[place], place))
        return list(zip(leave, enter, strict=False))
