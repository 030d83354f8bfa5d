"""Past-Future: admission by the future peak of memory, from lengths seen in the past."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.registry import register
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.core.plan_builder import PlanBuilder
from schedlab.sim.core.view import EngineView
from schedlab.sim.request import RequestState

_MIN_SAMPLES = 200
_Floats = npt.NDArray[np.float64]


@register("past_future")
class PastFuture(ContinuousBatching):
    """Admit the head of the queue if memory will suffice until all running requests end.

    Optimises the batch size without evictions: between the conservative reservation of declared
    ends and the aggressive admission of what fits now. Needs no prediction of a single request,
    only that lengths to come are distributed like the last `window` ones; it errs when the mix
    changes. First come, first served, so nobody starves.

    In each step the end of every running request is drawn from the past lengths above what it has
    generated, interpolated between those beside the draw, and that of a candidate from all past
    lengths; no draw exceeds what the request declares. The largest peak of up to `samples` such
    futures counts (fewer where many run: 200 draws in all are enough). At first the past is half a
    window of answers of `initial_tokens`, which makes a cold start careful. Should memory run out
    all the same, the latest admission is preempted. The unused end of a request's last block counts
    as used. LightLLM computes prompts in steps of their own; here they share steps, as in vLLM V1.
    It looks at the queue once in 10 decode steps, as a prefill stops the batch there; here it is
    looked at in every step by default (`max_waiting_tokens`).

    While someone waits who could have a seat, a decision costs O(n log n) in the running batch.
    Skip-ahead is honest because such a step promises nothing, or the steps until the next look at
    the queue; draws are those of the step's number, so that a step planned twice draws the same.

    Parameters
    ----------
    window : int
        How many finished requests make up the past.
    reserved : float
        Share of the memory that admission keeps free of the plan, in [0, 1).
    samples : int
        Most futures drawn in a step.
    initial_tokens : int
        Length of the answers that stand for a past at the start.
    seed : int
        Of the draws; they share no random numbers with anything else.
    max_waiting_tokens : int
        Decode steps before the next look at the queue, after one that let nobody in as well, unless
        nobody runs; 0 to look in every step, 10 in LightLLM. First tokens wait for that.
    """

    can_pipeline = False
    source = "Past-Future, Gong et al., ASPLOS 2025 (arXiv:2507.10150), LightLLM FuturePastReqQueue"

    def __init__(
        self,
        window: int = 200,
        reserved: float = 0.05,
        samples: int = 5,
        initial_tokens: int = 1024,
        seed: int = 0,
        max_waiting_tokens: int = 0,
    ) -> None:
        if min(window, samples, initial_tokens) < 1:
            raise ValueError(
                f"window, samples and initial_tokens must be at least 1, got {window}, {samples}, "
                f"{initial_tokens}"
            )
        if not 0.0 <= reserved < 1.0:
            raise ValueError(f"reserved must be in [0, 1), got {reserved}")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        if max_waiting_tokens < 0:
            raise ValueError(f"max_waiting_tokens must be >= 0, got {max_waiting_tokens}")
        self.window = window
        self.reserved = reserved
        self.samples = samples
        self.initial_tokens = initial_tokens
        self.seed = seed
        self.max_waiting_tokens = max_waiting_tokens
        self._decode_steps = 0  # since the last prompt or eviction
        self._past = deque([initial_tokens] * (window // 2), maxlen=window)
        self._sorted_past: _Floats | None = None
        self._step = 0

    def on_tokens(self, plan: BatchPlan, num_steps: int, now_ns: int) -> None:
        """Count steps: each has draws of its own, and looks at the queue are some decodes apart."""
        self._step += num_steps
        if plan.chunks or plan.admitted:
            self._decode_steps = 0
        else:
            self._decode_steps = num_steps + (0 if plan.preempted else self._decode_steps)

    def on_finish(self, state: RequestState, now_ns: int) -> None:
        """Add the length of a complete answer to the past."""
        if state.is_complete:
            self._past.append(state.num_output_tokens)
            self._sorted_past = None

    def horizon(self, view: EngineView) -> tuple[int, int]:
        """Promise nothing where someone could be admitted, draws change, but to the next look."""
        every = self.max_waiting_tokens
        return every - self._decode_steps % every if every and view.running else 1, FOREVER

    def candidates(self, view: EngineView, builder: PlanBuilder) -> Iterator[RequestState]:
        """Yield in order of arrival while the future peak stays within memory."""
        if self.max_waiting_tokens and view.running:
            decodes, every = self._decode_steps, self.max_waiting_tokens
            if not decodes or decodes % every:
                return
        residents = list(view.residents)
        capacity = view.capacity_tokens * (1.0 - self.reserved)
        # However long answers get, a request never holds more than this.
        most_tokens = view.config.max_model_len + view.config.block_size
        if (len(residents) + len(view.waiting)) * most_tokens <= capacity:
            yield from view.waiting
            return
        held = [self._used_tokens(state, view) for state in residents]
        head = next(iter(builder.undeferred(view.waiting)), None)
        if head is None:
            return
        # Each of them will gain a token at least: no draw is needed to see that it is too much.
        if residents and sum(held) + self._used_tokens(head, view) + len(held) + 1 > capacity:
            return
        draw = np.random.default_rng([self.seed, self._step])
        if self._sorted_past is None:
            self._sorted_past = np.sort(np.array(self._past, dtype=np.float64))
        past = self._sorted_past
        futures = min(self.samples, _MIN_SAMPLES // len(residents) + 1) if residents else 1
        used = np.array([*held, 0.0])
        remaining = np.empty((futures, len(used)))
        at = draw.random((futures, len(residents)))
        remaining[:, :-1] = self._draw_remaining(residents, view, past, at)
        for state in builder.undeferred(view.waiting):
            most = _most_tokens(state, view)
            ends = np.minimum(draw.choice(past, futures), most) if len(past) else most
            remaining[:, -1] = np.maximum(ends - state.num_output_tokens, 1.0)
            used[-1] = self._used_tokens(state, view)
            if len(used) > 1 and _peak_tokens(used, remaining) > capacity:
                return
            yield state
            used = np.append(used, 0.0)
            remaining = np.column_stack((remaining, remaining[:, -1]))

    def _draw_remaining(
        self, states: Sequence[RequestState], view: EngineView, past: _Floats, at: _Floats
    ) -> _Floats:
        """Turn draws in [0, 1), shape (futures, n), into tokens to come."""
        done = np.array([s.num_output_tokens for s in states], dtype=np.float64)
        most = np.array([_most_tokens(s, view) for s in states], dtype=np.float64)
        first_longer = np.searchsorted(past, done, side="right")
        num_longer = len(past) - first_longer
        # The values to draw between: what is done, the longer answers, and the declared end.
        padded = np.append(past, np.inf)
        below_most = padded[len(past) - 1] < most if len(past) else np.ones(len(states), bool)
        place = at * (num_longer + (below_most | (num_longer == 0)))
        below = place.astype(np.int64)
        left = np.where(below == 0, done, padded[np.maximum(first_longer + below - 1, 0)])
        right = np.where(below < num_longer, padded[first_longer + below], most)
        ends = np.rint(left + (right - left) * (place - below))
        remaining: _Floats = np.maximum(np.minimum(ends, most) - done, 1.0)
        return remaining

    def _used_tokens(self, state: RequestState, view: EngineView) -> int:
        return state.num_tokens + view.config.block_size - 1


def _most_tokens(state: RequestState, view: EngineView) -> int:
    request = state.request
    return min(request.max_tokens, view.config.max_model_len - request.prompt_tokens)


def _peak_tokens(used: _Floats, remaining: _Floats) -> Any:  # noqa: ANN401 - a scalar of numpy
    """Return the largest memory of several futures; see `FuturePeak` for the formula.

    Parameters
    ----------
    used : ndarray, shape (n,)
        Tokens that each request holds.
    remaining : ndarray, shape (futures, n)
        Tokens that each will gain in each future.
    """
    soonest_last = -remaining
    held = used[soonest_last.argsort(axis=1, kind="stable")].cumsum(axis=1)
    soonest_last.sort(axis=1)
    return (held - soonest_last * np.arange(1, len(used) + 1)).max()
