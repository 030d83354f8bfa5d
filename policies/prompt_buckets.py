"""Sealed batches of prompts of similar length."""

from bisect import bisect_left
from collections.abc import Sequence

from schedlab.policies.registry import register
from schedlab.policies.static import Static
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState


@register("prompt_buckets")
class PromptBuckets(Static):
    """Form each sealed batch from one bucket of prompt lengths: the one with the oldest request.

    Optimises padding: prompts of a batch are computed at the length of its longest. Needs the
    prompt length only; what a batch lasts is decided by its longest answer, to which prompts say
    little. The bucket of the oldest request is served, so nobody starves. Without padding (an
    engine that packs prompts) it gains nothing.

    Skip-ahead is honest: between events the members of a sealed batch do not change.

    Parameters
    ----------
    bucket_edges : sequence of int
        Upper edges of the buckets in prompt tokens, ascending; longer prompts share one more.
    max_batch_size, pad_prompts, pad_decodes, return_early
        As in `Static`.
    """

    source = "length bucketing of sequence-to-sequence training and static serving"

    def __init__(
        self,
        bucket_edges: Sequence[int] = (128, 512, 2048, 8192),
        max_batch_size: int | None = None,
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
    ) -> None:
        super().__init__(max_batch_size, pad_prompts, pad_decodes, return_early)
        require_ascending("bucket_edges", bucket_edges)
        self.bucket_edges = bucket_edges

    def bucket(self, state: RequestState) -> int:
        """Return the index of the bucket that a request falls into."""
        return bisect_left(self.bucket_edges, state.request.prompt_tokens)

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        oldest = self.bucket(view.waiting.head)
        return self._admit((s for s in view.waiting if self.bucket(s) == oldest), builder)


def require_ascending(name: str, edges: Sequence[float]) -> None:
    """Refuse edges that are not positive and strictly ascending (ValueError)."""
    if any(b <= a for a, b in zip((0, *edges), edges, strict=False)):
        raise ValueError(f"{name} must be positive and strictly ascending, got {list(edges)}")
