"""The ledger of a step over vLLM's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.errors import InfeasiblePlan
from schedlab.sim.request import RequestState

if TYPE_CHECKING:
    from schedlab.gpu_backend.vllm.requests import Requests


class VllmPlanBuilder(PlanBuilder):
    """The simulator's ledger, but for what it counts instead of listing.

    Parameters
    ----------
    requests : Requests
        vLLM's requests, in the place of an engine's `Population`.
    """

    def __init__(self, requests: Requests) -> None:
        self._vllm = requests
        super().__init__(requests)  # type: ignore[arg-type]

    def reset(self, now_ns: int) -> None:
        """Open the ledger of a step; a server that is paused admits nobody."""
        super().reset(now_ns)
        if self._vllm.admits_nobody:
            self.residents_left = 0

    def grant_running(self) -> bool:
        """Schedule every running request; see `PlanBuilder.grant_running`."""
        self._require_no_decodes("grant_running")
        return self._grant_each(self._vllm.running.values())

    def grant_decodes(self) -> bool:
        """Schedule one token of every decode; see `PlanBuilder.grant_decodes`."""
        self._require_no_decodes("grant_decodes")
        return self._grant_each(self._list_decodes())

    def grant_all(self, decodes: Collection[RequestState]) -> bool:
        """Schedule one token of each of some decodes; see `PlanBuilder.grant_all`."""
        self.plan = None
        blocks = self._vllm.kv
        fits = len(decodes) <= min(self.tokens_left, self.rows_left)
        if not fits or sum(blocks.new_blocks_of(s, 1) for s in decodes) > blocks.free_blocks:
            return False
        for state in decodes:
            if not self.grant(state, 1):
                raise InfeasiblePlan(f"vLLM has no memory for {state!r}, although it was counted")
        return True

    def grant_again(self, but: Collection[RequestState], also: Collection[RequestState]) -> bool:
        """Return False: vLLM is told of each, and keeps no batch of those who go on."""
        return False

    def _grant_each(self, states: Iterable[RequestState]) -> bool:
        wanted: list[tuple[RequestState, int]] = []
        left = self.tokens_left
        for state in states:
            if state in self.preempted:
                continue
            if left < 1 or len(wanted) == self.rows_left:
                break
            n = min(self._chunk_limit(state, None), left)
            wanted.append((state, n))
            left -= n
        blocks = self._vllm.kv
        if sum(blocks.new_blocks_of(state, n) for state, n in wanted) > blocks.free_blocks:
            return False
        for state, n in wanted:
            if not self.grant(state, n):
                raise InfeasiblePlan(f"vLLM has no memory for {state!r}, although it was counted")
        return True

    def admit(self, state: RequestState) -> NoReturn:
        """Refuse: vLLM keeps no memory for a request that it does not compute."""
        raise InfeasiblePlan("vLLM cannot set memory aside for a request (builder.admit)")

    def pad(self, num_tokens: SupportsIndex) -> NoReturn:
        """Refuse: vLLM computes no tokens for nobody."""
        raise InfeasiblePlan("vLLM computes no padding (builder.pad)")
