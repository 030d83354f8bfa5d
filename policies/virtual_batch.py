"""The virtual batch of requests of several paces, as a guard of the time between tokens prices it.

A class of its own, which the compiled core has: it looks at each running request.
"""

from __future__ import annotations

import math

from schedlab.policies.credits import Credits
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState
from schedlab.sim.sums import in_order

_ROUNDING = 1e-9
_SLACK = 0.99


class VirtualBatch:
    """As many rows as the paces of its members add up to, each of one length.

    That is the mean of what its members have now, prompts and answers so far, and half the answer
    that is predicted of who joined last: where it will be, in the middle of its answer, if the
    others stay as they are. So the authors' code has it, see Notes.

    Parameters
    ----------
    view : EngineView
        Whose requests with memory are its first members.
    credits : Credits
        Which knows their targets.

    Notes
    -----
    MisterBrookT/Scorpio, the scheduler of its vLLM, `_tpot_admission_control` and `_pred_tpot`.
    """

    __slots__ = ("_credits", "_half_answer", "_num_members", "_targets_s", "_tokens", "_view")

    def __init__(self, view: EngineView, credits: Credits) -> None:
        self._view = view
        self._credits = credits
        residents = view.residents
        self._targets_s: list[float] = []
        if credits.own_targets_s:
            self._targets_s = [credits.target_s(state) for state in residents]
        self._num_members = len(residents)
        self._tokens = sum([state.request.prompt_tokens for state in residents])
        self._tokens += sum(view.output_tokens(residents))
        self._half_answer = 0.0

    def add(self, state: RequestState) -> None:
        """Let a request be a member as well."""
        if self._credits.own_targets_s:
            self._targets_s.append(self._credits.target_s(state))
        self._num_members += 1
        self._tokens += state.num_tokens
        self._half_answer = (state.request.predicted_tokens or 0.0) / 2

    def is_in_time(self, safety: float) -> bool:
        """Whether its step, `safety` times over, meets the tightest target; one alone may."""
        num_members = self._num_members
        if num_members < 2:
            return True
        rows, tightest_s = num_members, self._credits.default_target_s
        if self._targets_s:
            tightest_s = min(self._targets_s)
            paces = in_order([tightest_s / target_s for target_s in self._targets_s])
            rows = math.ceil(paces - _ROUNDING)
        length = self._tokens / num_members + self._half_answer
        shape = BatchShape(rows, round(rows * length), round(length), rows_sampled=rows)
        step_s = self._view.estimate_step_ns(shape) / 1e9
        return step_s * safety < tightest_s * _SLACK
