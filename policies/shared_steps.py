"""Steps that everybody who runs took part in, put off until somebody wants to know what they cost.

A class of its own, which the compiled core has: it is told of every plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.request import RequestState

_MOST_STEPS = 1024


class SharedSteps:
    """Successive steps of plans that served everybody, and who took part in which of them.

    Where everybody is served nobody asks who has had how much, so that who runs need not be looked
    at: they are charged for all steps at once before somebody is left out.

    Attributes
    ----------
    ends_ns : list of int
        When each step ended, from the start of the first one on.
    first_steps : dict of RequestState to int
        By request that still runs, the number of the first of these steps that it took part in; it
        took part in all that followed.
    prompts : dict of RequestState to int
        Whose prompts were computed in their first steps, numbered in the order of the plans.
    """

    __slots__ = ("_start_ns", "ends_ns", "first_steps", "prompts")

    def __init__(self) -> None:
        self.ends_ns: list[int] = []
        self.first_steps: dict[RequestState, int] = {}
        self.prompts: dict[RequestState, int] = {}
        self._start_ns = 0

    def add(
        self,
        plan: BatchPlan,
        running: Collection[RequestState],
        durations_ns: Sequence[int],
        now_ns: int,
    ) -> bool:
        """Put off the steps of a plan, unless it left somebody out; return whether they are.

        They are not either where they do not follow on the others without a gap, or are too many.

        Parameters
        ----------
        plan : BatchPlan
            Of the steps.
        running : collection of RequestState
            Who runs after them.
        durations_ns : sequence of int
            How long each step took.
        now_ns : int
            When the last one ended.
        """
        if plan.decodes is not None:
            return False
        ends_ns, first_steps = self.ends_ns, self.first_steps
        if not first_steps:
            self.clear()
            self._start_ns = plan.start_ns
        num_steps, passed_ns = len(ends_ns), plan.start_ns - self._start_ns
        if num_steps and (ends_ns[-1] != passed_ns or num_steps > _MOST_STEPS):
            return False
        if len(durations_ns) == 1:
            ends_ns.append(passed_ns + durations_ns[0])
        else:
            ends_ns += [passed_ns + ns for ns in accumulate(durations_ns)]
        if ends_ns[-1] != now_ns - self._start_ns:
            del ends_ns[num_steps:]
            return False
        if len(first_steps) != len(running):  # who runs no more has left
            for state in running:
                if state not in first_steps:
                    first_steps[state] = num_steps
        for state, _ in plan.chunks:
            self.prompts[state] = len(self.prompts)
        return True

    @property
    def end_ns(self) -> int:
        """When the last of the steps ended."""
        return self._start_ns + self.ends_ns[-1]

    def leave(self, state: RequestState) -> int:
        """Let a request out that runs no more; return how long the steps took that it had."""
        first_step, ends_ns = self.first_steps.pop(state, -1), self.ends_ns
        if first_step < 0:
            return 0
        return ends_ns[-1] - (ends_ns[first_step - 1] if first_step else 0)

    def taken(self) -> list[tuple[RequestState, int, int]]:
        """List who still runs, in which step first, and how long the steps took from it on."""
        starts_ns = [0, *self.ends_ns]
        end_ns = starts_ns[-1]
        return [(state, n, end_ns - starts_ns[n]) for state, n in self.first_steps.items()]

    def clear(self) -> None:
        """Forget all steps, which are charged."""
        self.ends_ns.clear()
        self.first_steps.clear()
        self.prompts.clear()
