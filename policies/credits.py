"""Credits for steps: who decodes, at what pace, and who may run in the next step.

A class of its own, which the compiled core has: it looks at each running request.
"""

from __future__ import annotations

import math

from schedlab.policies.preemption import grant_or_preempt
from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RUNS, RequestState

_ROUNDING = 1e-9


class Credits:
    """Each step earns a decode its pace, the tightest target over its own, and costs it one.

    Parameters
    ----------
    target_s : float
        Time between tokens of requests that have none of their own.

    Attributes
    ----------
    default_target_s : float
        This time.
    own_targets_s : dict of RequestState to float
        Those of requests that have one.
    """

    __slots__ = (
        "_credits", "_is_uniform", "_least", "_may_have_come", "_num_of_target", "_tightest_s",
        "default_target_s", "own_targets_s",
    )  # fmt: skip

    def __init__(self, target_s: float) -> None:
        self.own_targets_s: dict[RequestState, float] = {}
        self.default_target_s = target_s
        self._credits: dict[RequestState, float] = {}
        self._least = 0.0  # of them, or below
        self._may_have_come = False
        # Of those who decode, when the last step ended; plans must not see it change within one.
        self._num_of_target: dict[float, int] = {}
        self._tightest_s = math.inf
        self._is_uniform = True

    def target_s(self, state: RequestState) -> float:
        """Return the time between tokens that a request is to have."""
        return self.own_targets_s.get(state, self.default_target_s)

    def pace(self, state: RequestState) -> float:
        """Return in what share of the steps a request is to run."""
        return min(1.0, self._tightest_s / self.target_s(state))

    def expect(self) -> None:
        """Say that a request has come from another engine that may decode already."""
        self._may_have_come = True

    def forget(self, state: RequestState) -> None:
        """Take out who is gone."""
        if self._credits.pop(state, None) is not None:
            target_s = self.target_s(state)
            left = self._num_of_target[target_s] - 1
            if left:
                self._num_of_target[target_s] = left
            else:
                del self._num_of_target[target_s]

    def forget_evicted(self) -> None:
        """Take out who was preempted in a plan that computed nothing: no step told of it."""
        gone = [state for state in self._credits if state.status is not RUNS]
        for state in gone:
            self.forget(state)
        self._note_targets()  # some may have gone to another engine, too, after the last step

    def note_step(self, plan: BatchPlan, num_steps: int, took_decodes: bool) -> None:
        """Book the credits of steps, and see who decodes from now on.

        Parameters
        ----------
        plan : BatchPlan
            What was executed; where it does not list its decodes, all took part.
        num_steps : int
            How many times.
        took_decodes : bool
            Whether its decodes earned anything: not where prompts have steps of their own.
        """
        credits, decodes = self._credits, plan.decodes
        if took_decodes:
            if not self._is_uniform:
                ran = set(credits if decodes is None else decodes)
                for state, credit in credits.items():
                    left = credit + num_steps * (self.pace(state) - (state in ran))
                    # In a pipeline a tighter target may have come since it was let run.
                    credits[state] = left if left >= -_ROUNDING else 0.0
                self._least = min(credits.values(), default=0.0)
            elif decodes is not None:  # everybody earns what a step costs
                for state in credits.keys() - set(decodes):
                    credits[state] += num_steps
        for state in plan.preempted:
            self.forget(state)
        new = [state for state, _ in plan.chunks]
        if decodes is not None or self._may_have_come:
            new += plan.decoding()
            self._may_have_come = decodes is not None
        else:
            new += plan.admitted
        for state in new:
            if state not in credits and state.is_decoding and state.status is RUNS:
                credits[state] = 0.0
                target_s = self.target_s(state)
                self._num_of_target[target_s] = self._num_of_target.get(target_s, 0) + 1
        self._note_targets()

    def _note_targets(self) -> None:
        self._tightest_s = min(self._num_of_target, default=math.inf)
        self._is_uniform = len(self._num_of_target) < 2

    def grant(
        self, view: EngineView, builder: PlanBuilder, decodes_are_first: bool
    ) -> tuple[bool, bool]:
        """Grant decodes with a credit; say whether one has none, and whether all run always.

        Memory is taken from the latest arrival.
        """
        credits = self._credits
        if decodes_are_first and self._is_uniform and self._least >= 0.0 and self._are_all(view):
            room = min(builder.tokens_left, builder.rows_left)
            if not builder.preempted and len(credits) <= room and builder.grant_decodes():
                return False, True
        decodes = view.decoding
        known = credits.keys() >= set(decodes)
        at_full_pace = known and self._is_uniform
        if not at_full_pace:
            at_full_pace = all([self.pace(state) == 1.0 for state in decodes])
        ready = decodes
        if self._least < 0.0 or not at_full_pace:
            ready = [s for s in decodes if credits.get(s, 0.0) + self.pace(s) >= 1.0 - _ROUNDING]
        if builder.preempted or not builder.grant_all(ready):
            victims = sorted(view.running, key=lambda s: (s.request.arrival_ns, s.id))
            for state in ready:
                if state not in builder.preempted:
                    grant_or_preempt(builder, state, victims)
        one_rests = False
        if len(ready) < len(decodes):
            one_rests = any([s not in builder.preempted for s in {*decodes} - {*ready}])
        # After this step the target of who has just come from another engine counts as well.
        return one_rests, at_full_pace and known

    def _are_all(self, view: EngineView) -> bool:
        """Whether those who have credits are those who decode, and are granted alike."""
        if view.config.num_speculative_tokens or view.in_pipeline:
            return False
        return len(self._credits) == view.num_decodes
