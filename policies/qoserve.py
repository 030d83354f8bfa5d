"""QoServe (Niyama): prefill chunks as large as the tightest decode deadline allows."""

import math
from heapq import merge

from schedlab.policies.policy import Policy
from schedlab.policies.registry import register
from schedlab.policies.sarathi import latest_arrival
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RequestState, Slo

_NO_TARGETS = Slo()


class _Lengths:
    """Mean and deviation of the answers of an application."""

    def __init__(self) -> None:
        self._n = 0
        self._sum = 0
        self._squares = 0

    def add(self, tokens: int) -> None:
        self._n += 1
        self._sum += tokens
        self._squares += tokens * tokens

    def high(self) -> float:
        """Return mean + 2 standard deviations, 0 without any."""
        if not self._n:
            return 0.0
        mean = self._sum / self._n
        return mean + 2.0 * math.sqrt(max(self._squares / self._n - mean * mean, 0.0))


@register("qoserve")
class QoServe(Policy):
    """Run all decodes in every step, with as much prefill as their deadlines leave time for.

    Optimises the number of requests that meet their targets. Needs the targets (``slo``: to the
    first token and between tokens, or to the end; defaults below) and the calibrated step-time
    estimate; lengths are learned from the past, by application. Prompts are taken by deadline plus
    `alpha_ms_per_token` for each token of work left: 0 is earliest deadline first, large values
    approach shortest job first. Prompts that are late, or would be even if computed at once, are
    relegated behind all others, so they starve in overload; and a large alpha starves long ones.

    A chunk is the largest whose predicted step ends before the next deadline of every decode, but
    at least `min_chunk_size`, so that prompts go on where decodes are late already (an addition).
    Only prompts are ever paused; when memory runs out, the latest arrival is preempted. Hints of
    importance (the paper relegates low tiers first) are not modelled.

    A decision that computes prompts is linear in the running batch and in the relegated requests
    at the head of the queue. Skip-ahead is honest because a step that computes prompts, or in
    which somebody could be admitted, promises nothing.

    Parameters
    ----------
    ttft_s, tbt_s : float
        Targets of requests that state none.
    alpha_ms_per_token : float
        Weight of remaining work in the order of prompts: 8 under load, 1 without, in the paper.
    min_chunk_size : int
        Prefill tokens that a step may always have.
    """

    source = "QoServe, formerly Niyama (arXiv:2503.22562), sarathi-serve branch niyama_asplos2026"
    starves = True

    def __init__(
        self,
        ttft_s: float = 6.0,
        tbt_s: float = 0.05,
        alpha_ms_per_token: float = 8.0,
        min_chunk_size: int = 64,
    ) -> None:
        if not (0.0 < ttft_s < math.inf and 0.0 < tbt_s < math.inf):
            raise ValueError(f"ttft_s and tbt_s must be finite and > 0, got {ttft_s}, {tbt_s}")
        if not 0.0 <= alpha_ms_per_token < math.inf:
            raise ValueError(f"alpha_ms_per_token must be >= 0, got {alpha_ms_per_token}")
        if min_chunk_size < 1:
            raise ValueError(f"min_chunk_size must be at least 1, got {min_chunk_size}")
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self.alpha_ms_per_token = alpha_ms_per_token
        self.min_chunk_size = min_chunk_size
        self._lengths: dict[str | None, _Lengths] = {}
        self._expected_tokens: dict[int, float] = {}

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order prompts by deadline and remaining work."""
        work_tokens = state.num_uncomputed_tokens + self._expected_tokens[state.id]
        return self._deadline_ns(state) + self.alpha_ms_per_token * 1e6 * work_tokens

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note how long the answer may get, for requests that are due at their end."""
        known = self._lengths.setdefault(state.request.application, _Lengths())
        self._expected_tokens[state.id] = known.high() if self._end_ms(state) is not None else 0.0

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Learn the length of the answer."""
        self._lengths[state.request.application].add(state.num_output_tokens)
        del self._expected_tokens[state.id]

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan all decodes, then prompts by key up to the chunk, the relegated last."""
        while not builder.grant_decodes():
            builder.preempt(latest_arrival(builder))
        prefilling = [s for s in view.prefilling if s not in builder.preempted]
        could_admit = len(view.waiting) and builder.seats_left and not builder.preempted
        if builder.tokens_left and (prefilling or could_admit):
            self._prefill(prefilling, view, builder)
            if prefilling and len(prefilling) == len(view.running) and not builder.has_chunks:
                # Prompts under way block each other for memory.
                builder.preempt(latest_arrival(builder))
        may_prefill = prefilling or (could_admit and builder.tokens_left)
        return builder.build(max_steps=1 if may_prefill else FOREVER)

    def _prefill(
        self, prefilling: list[RequestState], view: EngineView, builder: PlanBuilder
    ) -> None:
        def place(state: RequestState) -> tuple[float, int, int]:
            return self.key(state, view.now_ns), state.request.arrival_ns, state.id

        under_way = sorted(prefilling, key=place)
        waiting = view.waiting if not builder.preempted else ()
        chunk, relegated = 0, []
        for state in merge(under_way, waiting, key=place):
            if self._is_late(state, view):
                relegated.append(state)
                continue
            chunk = chunk or self._chunk_tokens(state, view, builder)
            granted = builder.grant(state, chunk)
            chunk -= granted
            if not (granted and chunk and builder.tokens_left):
                return
        for state in relegated:
            chunk = chunk or self._chunk_tokens(state, view, builder)
            granted = builder.grant(state, chunk)
            chunk -= granted
            if not (granted and chunk and builder.tokens_left):
                return

    def _chunk_tokens(self, first: RequestState, view: EngineView, builder: PlanBuilder) -> int:
        """Return the largest chunk whose step ends before the next deadline of every decode."""
        decodes = [s for s in view.running if s.is_decoding and s not in builder.preempted]
        if not decodes:
            return builder.tokens_left
        slack_ns = min(self._deadline_ns(s) for s in decodes) - view.now_ns
        contexts = [s.num_computed_tokens for s in decodes]
        load = len(contexts), sum(contexts), max(contexts)
        fits, too_many = 0, builder.tokens_left + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            chunk = ((middle, first.num_computed_tokens),)
            shape = BatchShape(*load, chunk, rows_sampled=len(decodes) + 1)
            if view.estimate_step_ns(shape) <= slack_ns:
                fits = middle
            else:
                too_many = middle
        return min(max(fits, self.min_chunk_size), builder.tokens_left)

    def _is_late(self, state: RequestState, view: EngineView) -> bool:
        chunk = ((state.num_uncomputed_tokens, state.num_computed_tokens),)
        alone_ns = view.estimate_step_ns(BatchShape(0, 0, 0, chunk, rows_sampled=1))
        return view.now_ns + alone_ns > self._deadline_ns(state)

    def _end_ms(self, state: RequestState) -> float | None:
        slo = state.request.slo or _NO_TARGETS
        return slo.e2el_ms if slo.ttft_ms is None and slo.tpot_ms is None else None

    def _deadline_ns(self, state: RequestState) -> int:
        """Return when the next token is due."""
        slo, end_ms = state.request.slo or _NO_TARGETS, self._end_ms(state)
        if end_ms is not None:
            return state.request.arrival_ns + round(end_ms * 1e6)
        ttft_ms = self.ttft_s * 1e3 if slo.ttft_ms is None else slo.ttft_ms
        tbt_ms = self.tbt_s * 1e3 if slo.tpot_ms is None else slo.tpot_ms
        due_ms = ttft_ms + state.num_output_tokens * tbt_ms
        return state.request.arrival_ns + round(due_ms * 1e6)
