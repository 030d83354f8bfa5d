"""Magnus: sealed batches of similar predicted cost, served by response ratio."""

from schedlab.policies.predictors.serving_time import ServingTime
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.policies.static import Static
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState, Status


class QueuedBatch:
    """A batch that is still being formed, by its sums: what it wastes costs O(1) to tell."""

    def __init__(self, first: RequestState) -> None:
        self._first = first
        self.size = 0
        self._longest = 0
        self._last = 0.0
        self._products = 0.0
        self._triangles = 0.0

    @property
    def is_queued(self) -> bool:
        """Whether nobody in it has had a seat yet."""
        return self._first.status is Status.WAITING and self._first.first_scheduled_ns < 0

    def add(self, state: RequestState) -> None:
        """Take a request in."""
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        self.size += 1
        self._longest = max(self._longest, prompt)
        self._last = max(self._last, output)
        self._products += output * prompt
        self._triangles += output * (output - 1.0) / 2.0

    def peak_tokens(self, state: RequestState) -> float:
        """Return the memory it would take at its end, with one more request."""
        longest = max(self._longest, state.request.prompt_tokens)
        return (self.size + 1) * (longest + max(self._last, predicted_tokens(state)))

    def wasted_tokens(self, state: RequestState) -> float:
        r"""Return the tokens it would read for nothing, with one more request.

        Every row reads from its prompt, padded to the longest, to the batch's last step:
        :math:`n (G L + G(G-1)/2)` tokens with the largest G and L. Useful are
        :math:`\sum_i G_i L_i + G_i (G_i - 1) / 2`.
        """
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        longest, last = max(self._longest, prompt), max(self._last, output)
        read = (self.size + 1) * last * (longest + (last - 1.0) / 2.0)
        useful = self._products + self._triangles
        return read - useful - output * (prompt + (output - 1.0) / 2.0)


@register("magnus")
class Magnus(Static):
    """Add each arrival to the queued batch it wastes least memory access in; serve batches by HRRN.

    Optimises the throughput and response time of sealed batches. Needs a prediction of the output
    in tokens and the calibrated step-time estimate. Members of similar lengths waste little on
    waiting for the longest; but batches are still sealed, so iteration-level engines are to be
    expected to do better. While the server keeps up nobody starves, for the response ratio of a
    waiting batch grows; in a lasting overload long batches can starve.

    Wasted memory access of a batch with prompts L and predicted outputs G: each member reads
    ``G * (Lmax - L)`` tokens of padding, and after its end ``sum of g + Lmax for G <= g < Gmax``.
    An arrival joins the queued batch with the least waste if that stays below `wma_threshold` and
    the batch's peak, ``size * (Lmax + Gmax)`` tokens, within memory; else it opens a new one.
    When the GPU is free, the batch with the largest ``1 + wait / time`` is run, by the mean wait
    of its members and the estimated time for prompts and ``Gmax`` steps. Members preempted for
    lack of memory form a batch of their own, where the original splits the batch in two.

    Times are those of the cost model, or, with `serving_time`, the paper's: nearest neighbours
    among observed batches. The decision to run a batch is linear in the queue.

    Skip-ahead is honest: between events the members of a sealed batch do not change.

    Parameters
    ----------
    wma_threshold : float
        Largest waste of a batch in tokens read; a natural scale is some times the product of
        mean prompt and mean output. The paper tunes it.
    max_batch_size, pad_prompts, pad_decodes, return_early
        As in `Static`.
    serving_time : str, optional
        Folder of an estimator trained by ``schedlab predictor train RUN --kind knn``.
    """

    source = "Magnus, Cheng et al. 2024 (arXiv:2406.04785); waste summed over the batch"
    needs_prediction = True
    starves = True

    def __init__(
        self,
        wma_threshold: float = 1e6,
        max_batch_size: int | None = None,
        pad_prompts: bool = True,
        pad_decodes: bool = True,
        return_early: bool = False,
        serving_time: str | None = None,
    ) -> None:
        super().__init__(max_batch_size, pad_prompts, pad_decodes, return_early)
        if not wma_threshold >= 0.0:
            raise ValueError(f"wma_threshold must be >= 0, got {wma_threshold}")
        self.wma_threshold = wma_threshold
        self.serving_time = serving_time
        # Loaded here, a wrong folder is an error of the specification and not of the run.
        self._estimator = None if serving_time is None else ServingTime.load(serving_time)
        self._queued: list[QueuedBatch] = []
        self._batch_of: dict[int, QueuedBatch] = {}
        self._serving_times_ns: dict[tuple[int, int, float], float] = {}

    def on_start(self, view: EngineView) -> None:
        """Keep the view, for the size of the memory and the estimate of step times."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Join the queued batch with the least waste, or open one."""
        # A batch is queued until its first member gets a seat.
        self._queued = [batch for batch in self._queued if batch.is_queued]
        config = self._view.config
        size = min(self.max_batch_size or config.max_num_seqs, config.max_num_seqs)
        capacity_tokens = self._view.capacity_tokens
        best, least = None, self.wma_threshold
        for batch in self._queued:
            if batch.size < size and batch.peak_tokens(state) <= capacity_tokens:
                waste = batch.wasted_tokens(state)
                if waste < least:
                    best, least = batch, waste
        if best is None:
            best = QueuedBatch(state)
            self._queued.append(best)
        best.add(state)
        self._batch_of[state.id] = best

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        del self._batch_of[state.id]

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        batches: dict[int, list[RequestState]] = {}
        for state in view.waiting:
            batches.setdefault(id(self._batch_of[state.id]), []).append(state)
        best = max(batches.values(), key=lambda b: (self._response_ratio(b), -b[0].id))
        return self._admit(best, builder)

    def _response_ratio(self, batch: list[RequestState]) -> float:
        size, longest, last, arrivals_ns = len(batch), 0, 0.0, 0
        for state in batch:
            request = state.request
            arrivals_ns += request.arrival_ns
            longest = max(longest, request.prompt_tokens)
            last = max(last, predicted_tokens(state))
        wait_ns = (size * self._view.now_ns - arrivals_ns) / size
        known_ns = self._serving_times_ns.get((size, longest, last))
        if known_ns is None:
            known_ns = self._serving_time_ns(size, longest, last)
            self._serving_times_ns[size, longest, last] = known_ns
        return 1.0 + wait_ns / known_ns

    def _serving_time_ns(self, size: int, longest: int, last: float) -> float:
        view = self._view
        if self._estimator is not None:
            return self._estimator.estimate_s(size, longest, last) * 1e9
        prompts = ((longest, 0),) * size
        context = round(longest + last / 2)
        time_ns = view.estimate_step_ns(BatchShape(0, 0, 0, prompts, rows_sampled=size))
        step_ns = view.estimate_step_ns(
            BatchShape(size, size * context, context, rows_sampled=size)
        )
        return time_ns + last * step_ns
