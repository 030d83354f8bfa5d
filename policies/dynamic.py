"""Dynamic batching: sealed batches that wait a little to fill up."""

from schedlab.policies.registry import register
from schedlab.policies.static import Static
from schedlab.sim.core.view import EngineView


@register("dynamic")
class Dynamic(Static):
    """Dispatch a batch when it is full, or when its oldest request has waited long enough.

    Optimises the size of sealed batches against a bounded extra wait: the dynamic batcher of
    Triton Inference Server. Needs to know nothing. Its throughput ceiling is that of static
    batching, because nobody joins a batch under way. First come, first served, so nobody starves.

    Skip-ahead is honest: the one thing that happens by itself is the oldest request's time-out,
    and the plan says when.

    Parameters
    ----------
    max_batch_size : int, optional
        Batch that is dispatched at once, and the largest; `max_num_seqs` if not given.
    max_queue_delay_s : float
        Longest wait of the oldest request for others while the GPU is idle; 0 (Triton's
        default) takes whatever is queued.
    pad_prompts, pad_decodes, return_early : bool
        As in `Static`.
    """

    source = "NVIDIA Triton Inference Server, model configuration, dynamic batcher"

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float = 0.0,
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
    ) -> None:
        super().__init__(max_batch_size, pad_prompts, pad_decodes, return_early)
        if not 0.0 <= max_queue_delay_s < float("inf"):
            raise ValueError(f"max_queue_delay_s must be finite and >= 0, got {max_queue_delay_s}")
        self.max_queue_delay_s = max_queue_delay_s

    def dispatch_at_ns(self, view: EngineView) -> int:
        """Return now for a full batch, else the end of the oldest request's wait."""
        if len(view.waiting) >= (self.max_batch_size or view.config.max_num_seqs):
            return view.now_ns
        oldest_ns = view.waiting.head.request.arrival_ns
        return max(view.now_ns, oldest_ns + round(self.max_queue_delay_s * 1e9))
