"""QoServe (Niyama): prefill chunks as large as the tightest decode deadline allows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import filterfalse
from typing import NamedTuple

from schedlab.policies.policy import Policy
from schedlab.policies.preemption import latest_arrival
from schedlab.policies.prompt_buckets import require_ascending
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.request import RUNS, RequestState, Slo

_NO_TARGETS = Slo()


class _Target(NamedTuple):
    """When the tokens of a request are due."""

    first_due_ns: int
    tbt_ms: float


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
    estimate; lengths are learned from the past, by application. An engine that computes prompts for
    others sees no answer end, and learns none: to it, answers take no time.

    *Deadlines.* An interactive request is due `ttft_s` after its arrival, and every `tbt_s` from
    then on. Where only the end has a target, the first token is due at that end less `batch_tbt_s`
    for each token of the answer, taken to be the mean plus two deviations of the application's
    answers, and the others every `batch_tbt_s`; an answer that is too long for its target at this
    pace is late from the start. After a first token that was late, the others are due from there.

    *Prompts* are taken by the deadline of the first token plus `alpha_ms_per_token` for each prompt
    token left: 0 is earliest deadline first, large values approach shortest job first. A prompt
    that is late, or would be even if computed at once, is relegated behind all others, for good
    once it has memory; one that got memory in time is not relegated any more. So relegated prompts
    starve in overload, and a large alpha starves long ones.

    *Chunks.* A step is the largest of `chunk_sizes` whose predicted time, `safety` times over, ends
    before the next deadline of every decode; the smallest where decodes are late already. While
    memory is scarce, `scarce_chunk_sizes` stand instead, so that prompts do not take what decodes
    will need. Only prompts are ever paused. When decodes run out of memory the latest arrival is
    preempted, when prompts block each other the last of them; the original preempts nobody. Use
    ``engine.scheduler_reserve_full_isl: true`` and ``watermark: 0.01``, which is how it admits.

    Paper and code differ; the rules are the code's, but for these. The paper learns lengths, the
    code has a constant (or is told them). The paper's second token is due one `tbt_s` after the
    first, the code's two. Whether a prompt can be in time is told by the step-time estimate of the
    prompt alone; the code divides by a running mean of prompt tokens a second. The paper relegates
    low tiers first, by a hint; the code has no hints, nor has this.

    A decision that computes prompts is linear in the running batch and in the relegated requests
    at the head of the queue. Skip-ahead is honest because a step that computes prompts, or in
    which somebody could be admitted, promises nothing, and others do not look at the clock.

    Parameters
    ----------
    ttft_s, tbt_s : float
        Targets of requests that state none.
    batch_tbt_s : float
        Time that a token may take in requests that are only due at their end.
    alpha_ms_per_token : float
        Weight of remaining prompt tokens in the order of prompts: 8 under load, 1 without, in the
        paper.
    safety : float
        Factor on the predicted time of a step.
    chunk_sizes : sequence of int
        Tokens that a step may have, decodes included, ascending.
    scarce_chunk_sizes : sequence of int
        The same while less than `scarce_tokens` of memory are free.
    scarce_tokens : int
        Free KV memory in tokens below which it is scarce: room for 32 steps of 1,000.
    """

    source = "QoServe, formerly Niyama (arXiv:2503.22562), sarathi-serve branch niyama_asplos2026"
    starves = True

    def __init__(
        self,
        ttft_s: float = 6.0,
        tbt_s: float = 0.05,
        batch_tbt_s: float = 0.4,
        alpha_ms_per_token: float = 8.0,
        safety: float = 1.2,
        chunk_sizes: Sequence[int] = (128, *range(256, 2049, 256), 2552),
        scarce_chunk_sizes: Sequence[int] = (128, 256, 384, 512),
        scarce_tokens: int = 32_000,
    ) -> None:
        paces = {"ttft_s": ttft_s, "tbt_s": tbt_s, "batch_tbt_s": batch_tbt_s, "safety": safety}
        for name, value in paces.items():
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        if not 0.0 <= alpha_ms_per_token < math.inf:
            raise ValueError(f"alpha_ms_per_token must be >= 0, got {alpha_ms_per_token}")
        _require_sizes("chunk_sizes", chunk_sizes)
        _require_sizes("scarce_chunk_sizes", scarce_chunk_sizes)
        if scarce_tokens < 0:
            raise ValueError(f"scarce_tokens must be >= 0, got {scarce_tokens}")
        self.ttft_s = ttft_s
        self.tbt_s = tbt_s
        self.batch_tbt_s = batch_tbt_s
        self.alpha_ms_per_token = alpha_ms_per_token
        self.safety = safety
        self.chunk_sizes = chunk_sizes
        self.scarce_chunk_sizes = scarce_chunk_sizes
        self.scarce_tokens = scarce_tokens
        self._lengths: dict[str | None, _Lengths] = {}
        self._targets: dict[int, _Target] = {}
        self._latest_starts_ns: dict[int, int] = {}

    def key(self, state: RequestState, now_ns: int) -> float:
        """Order prompts by the deadline of the first token and the prompt tokens left."""
        work_ns = self.alpha_ms_per_token * 1e6 * state.num_uncomputed_tokens
        return self._targets[state.id].first_due_ns + work_ns

    def on_arrival(self, state: RequestState, now_ns: int) -> None:
        """Note when its tokens are due; of who is due at its end, by how long it may get."""
        request = state.request
        slo = request.slo or _NO_TARGETS
        known = self._lengths.setdefault(request.application, _Lengths())
        if slo.e2el_ms is not None and slo.ttft_ms is None and slo.tpot_ms is None:
            due_ms = slo.e2el_ms - known.high() * self.batch_tbt_s * 1e3
            tbt_ms = self.batch_tbt_s * 1e3
        else:
            due_ms = self.ttft_s * 1e3 if slo.ttft_ms is None else slo.ttft_ms
            tbt_ms = self.tbt_s * 1e3 if slo.tpot_ms is None else slo.tpot_ms
        self._targets[state.id] = _Target(request.arrival_ns + round(due_ms * 1e6), tbt_ms)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Learn the length of the answer."""
        if state.is_complete:
            self._lengths[state.request.application].add(state.num_output_tokens)
        del self._targets[state.id]
        self._latest_starts_ns.pop(state.id, None)

    def plan(self, view: EngineView, builder: PlanBuilder) -> BatchPlan:
        """Plan all decodes, then prompts by key up to the chunk, the relegated last."""
        while not builder.grant_decodes():
            builder.preempt(latest_arrival(builder))
        prefilling = [s for s in view.prefilling if s not in builder.preempted]
        could_admit = view.waiting.size and builder.seats_left and not builder.preempted
        if builder.tokens_left and (prefilling or could_admit):
            self._prefill(prefilling, view, builder)
            if prefilling and len(prefilling) == len(view.running) and not builder.has_chunks:
                # Prompts under way block each other for memory: the last of them makes room, or
                # it would come before the others and block them again.
                *_, last = self._prompts(prefilling, (), view)
                builder.preempt(last)
        may_prefill = prefilling or (could_admit and builder.tokens_left)
        return builder.build(max_steps=1 if may_prefill else FOREVER)

    def _prefill(
        self, prefilling: list[RequestState], view: EngineView, builder: PlanBuilder
    ) -> None:
        chunk = None
        waiting = view.waiting if builder.residents_left and not builder.preempted else ()
        prompts = (
            self._prompts(prefilling, waiting, view)
            if len(prefilling) + len(waiting) > 1
            else iter((*prefilling, *waiting))
        )
        for state in builder.undeferred(prompts):
            if builder.residents_left < 1 and state.status is not RUNS:
                continue  # it can have no seat, and holds up no prompt under way
            if chunk is None:
                chunk = self._chunk_tokens(state, view, builder)
            granted = builder.grant(state, chunk) if chunk else 0
            chunk -= granted
            if not (granted and chunk and builder.tokens_left):
                return

    def _prompts(
        self, prefilling: list[RequestState], waiting: Iterable[RequestState], view: EngineView
    ) -> Iterator[RequestState]:
        """Yield prompts under way and waiting by key, the relegated last."""

        def place(state: RequestState) -> tuple[float, int, int]:
            return self.key(state, view.now_ns), state.request.arrival_ns, state.id

        now_ns, latest_starts_ns = view.now_ns, self._latest_starts_ns

        def is_relegated(state: RequestState) -> bool:
            # Too late for its first token, now or when it first got memory.
            latest_ns = latest_starts_ns.get(state.id)
            if latest_ns is None:
                latest_ns = self._note_latest_start(state, view)
            started_ns = state.first_scheduled_ns
            return (now_ns if started_ns < 0 else started_ns) > latest_ns

        under_way = sorted(prefilling, key=place)
        yield from merge(*(filterfalse(is_relegated, s) for s in (under_way, waiting)), key=place)
        yield from merge(*(filter(is_relegated, s) for s in (under_way, waiting)), key=place)

    def _chunk_tokens(self, first: RequestState, view: EngineView, builder: PlanBuilder) -> int:
        """Return the prompt tokens of the largest step that ends before every decode is due."""
        decodes = [s for s in view.decoding if s not in builder.preempted]
        scarce = view.free_tokens < self.scarce_tokens
        sizes = self.scarce_chunk_sizes if scarce else self.chunk_sizes
        size = self._largest_in_time(sizes, decodes, first, view) if decodes else sizes[-1]
        return min(max(size - len(decodes), 0), builder.tokens_left)

    def _largest_in_time(
        self,
        sizes: Sequence[int],
        decodes: list[RequestState],
        first: RequestState,
        view: EngineView,
    ) -> int:
        slack_ns = self._next_due_ns(decodes, view) - view.now_ns
        contexts = view.computed_tokens(decodes)
        load = len(contexts), sum(contexts), max(contexts)
        fits, too_many = 0, len(sizes)  # the smallest is taken whatever it takes
        # The largest is most often in time: asked for first, where none is slower than a larger.
        middle = too_many - 1 if view.prices_never_fall else too_many // 2
        while too_many - fits > 1:
            prompt_tokens = max(sizes[middle] - len(decodes), 0)
            chunk = ((prompt_tokens, first.num_computed_tokens),) if prompt_tokens else ()
            shape = BatchShape(*load, chunk, rows_sampled=len(decodes) + len(chunk))
            if view.estimate_step_ns(shape) * self.safety <= slack_ns:
                fits = middle
            else:
                too_many = middle
            middle = (fits + too_many) // 2
        return sizes[fits]

    def _note_latest_start(self, state: RequestState, view: EngineView) -> int:
        """Work out when a prompt must start to have its first token in time, alone."""
        shape = BatchShape(0, 0, 0, ((state.request.prompt_tokens, 0),), rows_sampled=1)
        latest_ns = self._targets[state.id].first_due_ns - view.estimate_step_ns(shape)
        self._latest_starts_ns[state.id] = latest_ns
        return latest_ns

    def _next_due_ns(self, decodes: list[RequestState], view: EngineView) -> int:
        """Return when the first of the next tokens of decodes is due."""
        targets, soonest_ns = self._targets, FOREVER
        for state, num_tokens in zip(decodes, view.output_tokens(decodes), strict=True):
            first_ns, tbt_ms = targets[state.id]
            if state.first_token_ns > first_ns:
                first_ns = state.first_token_ns
            due_ns = first_ns + round(num_tokens * tbt_ms * 1e6)
            if due_ns < soonest_ns:
                soonest_ns = due_ns
        return soonest_ns


def _require_sizes(name: str, sizes: Sequence[int]) -> None:
    require_ascending(name, sizes)
    if not sizes or any(size != int(size) for size in sizes):
        raise ValueError(f"{name} must be one or more whole numbers, got {list(sizes)}")
