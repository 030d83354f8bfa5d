"""What an autoscaler knows of the engines that it adds and drains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from schedlab.sim.drive.engine_state import LiveState
    from schedlab.sim.drive.members import Role
    from schedlab.sim.request import Request


class Answer(NamedTuple):
    """A request that was answered lately."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    """Mean time between its tokens; 0 of an answer of one token."""
    holds_targets: bool
    """Whether it held all targets that it had."""


class PoolState(NamedTuple):
    """What an autoscaler knows of engines that are alike."""

    now_s: float
    interval_s: float
    """Since it was asked last."""
    role: Role
    num_engines: int
    """Engines that take requests or are starting; those that drain are not counted."""
    engines: Sequence[LiveState]
    """Those of them that are up."""
    came: Sequence[Request]
    """What came to the fleet since it was asked last."""
    answers: Sequence[Answer]
    """What the fleet answered since then."""
