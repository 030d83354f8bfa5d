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
    """As many rows as the paces of its members add up to, each of their mean length.

    Parameters
    ----------
    view : EngineView
        Whose requests with memory are its first members.
    credits : Credits
        Which knows their targets.
    """

    __slots__ = ("_credits", "_lengths", "_lengths_sum", "_longest", "_targets_s", "_view")

    def __init__(self, view: EngineView, credits: Credits) -> None:
        self._view = view
        self._credits = credits
        residents = view.residents
        self._targets_s: list[float] = []
        if credits.own_targets_s:
            self._targets_s = [credits.target_s(state) for state in residents]
        self._lengths = [
            expected_tokens(state, generated)
            for state, generated in zip(residents, view.output_tokens(residents), strict=True)
        ]
        self._lengths_sum = in_order(self._lengths)
        self._longest = max(self._lengths, default=0.0)

    def add(self, state: RequestState) -> None:
        """Let a request be a member as well."""
        if self._credits.own_targets_s:
            self._targets_s.append(self._credits.target_s(state))
        length = expected_tokens(state, state.num_output_tokens)
        self._lengths.append(length)
        self._lengths_sum += length
        self._longest = max(self._longest, length)

    def is_in_time(self, safety: float) -> bool:
        """Whether its step, `safety` times over, meets the tightest target; one alone may."""
        num_members = len(self._lengths)
        if num_members < 2:
            return True
        rows, tightest_s = num_members, self._credits.default_target_s
        if self._targets_s:
            tightest_s = min(self._targets_s)
            paces = in_order([tightest_s / target_s for target_s in self._targets_s])
            rows = math.ceil(paces - _ROUNDING)
        mean = self._lengths_sum / num_members
        shape = BatchShape(rows, round(rows * mean), round(self._longest), rows_sampled=rows)
        step_s = self._view.estimate_step_ns(shape) / 1e9
        return step_s * safety < tightest_s * _SLACK


def expected_tokens(state: RequestState, generated: int) -> float:
    """Return the mean length of a request over the rest of its life, with so much of an answer."""
    predicted = state.request.predicted_tokens
    if predicted is None:
        return float(state.request.prompt_tokens + generated)
    return state.request.prompt_tokens + max(float(generated), (generated + predicted) / 2)
