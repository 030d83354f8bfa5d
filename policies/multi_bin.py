"""Multi-bin batching: sealed batches of similar predicted length."""

import math
from bisect import bisect_right
from collections.abc import Sequence

from schedlab.policies.prompt_buckets import require_ascending
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.policies.static import Static
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("multi_bin")
class MultiBin(Static):
    """Collect requests in bins of predicted output length; a bin that is full becomes a batch.

    Optimises the throughput of sealed batches: members end together, so few slots idle. Needs a
    prediction of the output length. Batches are served in the order in which they became full. In
    the paper arrivals never end, so every bin fills at some time; here, where none is full and the
    oldest request has waited for `max_wait_s`, its bin is served as full as it is. A full bin never
    gives way to that, so a rare length starves while others keep the GPU busy. As the bins grow in
    number, batches get purer and waits longer.

    Skip-ahead is honest: between events a sealed batch does not change, and the one thing that
    happens by itself is the oldest request's limit, which the plan names.

    Parameters
    ----------
    bin_edges : sequence of float
        Edges between the bins in predicted output tokens, ascending; a length on an edge is of the
        upper bin. The paper takes the i/K quantiles of the lengths, so that bins have equal mass.
    max_wait_s : float
        Wait of the oldest request for its bin to fill, where the GPU is idle and no bin is full.
        Less serves low loads sooner; more makes batches purer where bins just fail to fill.
    max_batch_size, pad_prompts, pad_decodes, return_early
        As in `Static`; `max_batch_size` is the size of a full bin.
    """

    source = "Multi-Bin Batching, Guldogan et al. 2024 (arXiv:2412.04504)"
    needs_prediction = True
    starves = True

    def __init__(
        self,
        bin_edges: Sequence[float] = (64, 128, 256, 512),
        max_wait_s: float = 1.0,
        max_batch_size: int | None = None,
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
    ) -> None:
        super().__init__(max_batch_size, pad_prompts, pad_decodes, return_early)
        require_ascending("bin_edges", bin_edges)
        if not 0.0 <= max_wait_s < math.inf:
            raise ValueError(f"max_wait_s must be finite and >= 0, got {max_wait_s}")
        self.bin_edges = bin_edges
        self.max_wait_s = max_wait_s

    def dispatch_at_ns(self, view: EngineView) -> int:
        """Return now if a bin is full, else the end of the oldest request's wait."""
        return view.now_ns if self._first_full_bin(view) else self._overdue_ns(view)

    def _overdue_ns(self, view: EngineView) -> int:
        return view.waiting.head.request.arrival_ns + round(self.max_wait_s * 1e9)

    def _bin(self, state: RequestState) -> int:
        return bisect_right(self.bin_edges, predicted_tokens(state))

    def _first_full_bin(self, view: EngineView) -> list[RequestState]:
        size = min(self.max_batch_size or view.config.max_num_seqs, view.config.max_num_seqs)
        bins: list[list[RequestState]] = [[] for _ in range(len(self.bin_edges) + 1)]
        for state in view.waiting:
            members = bins[self._bin(state)]
            members.append(state)
            if len(members) == size:
                return members
        return []

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        full = self._first_full_bin(view)
        if full:
            return self._admit(full, builder)
        oldest = self._bin(view.waiting.head)
        return self._admit((s for s in view.waiting if self._bin(s) == oldest), builder)
