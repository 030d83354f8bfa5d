"""Magnus: sealed batches of similar predicted cost, served by response ratio."""

from schedlab.policies.predictors.serving_time import ServingTime
from schedlab.policies.queued_batches import QueuedBatch, QueuedBatches
from schedlab.policies.registry import register
from schedlab.policies.sjf import predicted_tokens
from schedlab.policies.static import Static
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import WAITS, RequestState


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
    among observed batches. An arrival, and the decision to run a batch, are linear in the queued
    batches, and vectorised.

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
        self._queued = QueuedBatches()
        self._batch_of: dict[int, QueuedBatch] = {}
        # Batches of which somebody has had a seat, and the one that was chosen last: whether it is
        # one of them shows later, because not every plan is carried out.
        self._started: list[QueuedBatch] = []
        self._chosen: QueuedBatch | None = None

    def on_start(self, view: EngineView) -> None:
        """Keep the view, for the size of the memory and the estimate of step times."""
        self._view = view

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Join the queued batch with the least waste, or open one."""
        self._note_started()
        config = self._view.config
        most = min(self.max_batch_size or config.max_num_seqs, config.max_num_seqs)
        queued, capacity_tokens = self._queued, self._view.capacity_tokens
        batch = queued.least_waste(state, most, capacity_tokens, self.wma_threshold)
        if batch is None:
            batch = QueuedBatch(state)
            queued.open(batch)
        queued.add(batch, state)
        self._batch_of[state.id] = batch
        # Its prompt was computed elsewhere, or the engine that computed it died.
        if state.status is not WAITS or state.first_scheduled_ns >= 0:
            self._started.append(batch)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Forget the request."""
        del self._batch_of.pop(state.id).members[state.id]

    def _note_started(self) -> None:
        if self._chosen is not None and not self._chosen.is_whole:
            self._started.append(self._chosen)
            self._chosen = None
        for batch in self._started:
            if batch.is_open:
                self._queued.note_started(batch)

    def _form(self, view: EngineView, builder: PlanBuilder) -> list[RequestState]:
        self._note_started()
        self._started = [batch for batch in dict.fromkeys(self._started) if batch.members]
        split = [waiting for batch in self._started if (waiting := batch.waiting())]
        found = [(self._response_ratio(waiting), -waiting[0].id, waiting) for waiting in split]
        best = self._queued.highest_response_ratio(view.now_ns, self._serving_time_ns)
        if best is not None:
            ratio, self._chosen = best
            waiting = self._chosen.waiting()
            found.append((ratio, -waiting[0].id, waiting))
        return self._admit(max(found)[-1], builder)

    def _response_ratio(self, waiting: list[RequestState]) -> float:
        size = len(waiting)
        longest = max(state.request.prompt_tokens for state in waiting)
        last = max(0.0, *map(predicted_tokens, waiting))
        wait_ns = (size * self._view.now_ns - sum(s.request.arrival_ns for s in waiting)) / size
        return 1.0 + wait_ns / self._serving_time_ns(size, longest, last)

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
