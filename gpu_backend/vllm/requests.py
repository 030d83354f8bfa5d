"""vLLM's requests, as a policy sees requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from schedlab.gpu_backend.vllm.blocks import Blocks
from schedlab.policies.policy import Policy
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.pipeline import Pipeline
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.request import Request, RequestState, Status


class Requests:
    """What a plan is drawn up from: in the place of an engine's `Population`.

    vLLM keeps its own lists and counters, and they are the truth; before each plan the progress of
    every running request is copied from there.

    Parameters
    ----------
    scheduler : vllm Scheduler
        Whose requests these are.
    config : EngineConfig
        The limits.
    policy : Policy
        Who is told.
    evict : callable
        Called with vLLM's request that loses its memory.
    """

    free_swap_blocks = 0
    is_plain = False  # who has a seat is vLLM's to say

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - vLLM's
        config: EngineConfig,
        policy: Policy,
        evict: Callable[[Any], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.kv = Blocks(self, scheduler.kv_cache_manager, config.block_size)
        self.waiting = WaitingQueue(policy.key)
        self.running: dict[int, RequestState] = {}
        self.prefilling: dict[int, RequestState] = {}
        self.paused: dict[int, RequestState] = {}
        self.held: dict[int, RequestState] = {}
        self.leaving: list[RequestState] = []
        self.fetching: dict[int, RequestState] = {}
        self.loading: dict[int, RequestState] = {}
        self.holding: dict[int, RequestState] = {}
        self.come: set[int] = set()
        self.in_pipeline = Pipeline()
        self.tiers = None
        self.kept: dict[int, RequestState] = {}
        self.decodes = _decoding([])
        self.admits_nobody = False
        self._scheduler = scheduler
        self._evict = evict
        self._seated: list[RequestState] = []
        self._states: dict[str, RequestState] = {}
        self._vllm: dict[int, Any] = {}

    # -- what plans ask ------------------------------------------------------------------------

    @property
    def num_seated(self) -> int:
        """Requests with a seat, those whose last token is on its way among them."""
        scheduler = self._scheduler
        return len(scheduler.running) + int(scheduler.num_waiting_for_streaming_input)

    @property
    def num_known(self) -> int:
        """Requests waiting or running."""
        return sum(self._scheduler.get_request_counts())

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return int(self._scheduler.get_request_counts()[1])

    def seated(self) -> list[RequestState]:
        """List the requests with a seat in the order of their admission."""
        return list(self._seated)

    def unnamed_tokens(self, state: RequestState, granted_tokens: int, now_ns: int) -> int:
        """Return 0: vLLM itself knows which blocks have a hash."""
        return 0

    def vllm_request(self, state: RequestState) -> Any:  # noqa: ANN401 - vLLM's
        """Return vLLM's request."""
        return self._vllm[state.id]

    def is_known(self, state: RequestState) -> bool:
        """Whether vLLM still has a request."""
        return state.id in self._vllm

    def id_of(self, request: Any) -> int:  # noqa: ANN401 - vLLM's
        """Return the number by which plans know vLLM's request."""
        return self._states[request.request_id].id

    # -- in and out ----------------------------------------------------------------------------

    def add(self, request: Any, seen: Request, now_ns: int) -> RequestState:  # noqa: ANN401
        """Learn of a request, and what a policy sees of it; it does not wait in its queue yet."""
        state = RequestState(seen)
        state.queued_ns = now_ns
        self._states[request.request_id] = state
        self._vllm[state.id] = request
        return state

    def state_of(self, vllm_id: str) -> RequestState:
        """Return the state of a request that was not forgotten."""
        return self._states[vllm_id]

    def enqueue(self, state: RequestState, now_ns: int) -> None:
        """Let a request wait for its first admission."""
        if self.policy.on_arrival is not None:
            self.policy.on_arrival(state, now_ns)
        self.waiting.add(state, now_ns)

    def forget_the_gone(self, now_ns: int) -> list[RequestState]:
        """Drop the requests that vLLM has finished or aborted, and return them."""
        known = self._scheduler.requests
        if len(known) == len(self._states):  # all that vLLM knows are known here: nobody is gone
            return []
        gone = [(vllm_id, s) for vllm_id, s in self._states.items() if vllm_id not in known]
        for vllm_id, state in gone:
            del self._states[vllm_id]
            request = self._vllm.pop(state.id)
            # Its last token came after the last look at those that run.
            state._generated = request.num_output_tokens
            if state.status is Status.WAITING and state in self.waiting:
                self.waiting.remove(state, now_ns)
        return [state for _, state in gone]

    # -- progress ------------------------------------------------------------------------------

    def look(self, now_ns: int) -> list[RequestState]:
        """Copy the progress of all running requests; return those that have finished now.

        A token in flight counts as generated, as it does in a simulation that plans ahead; so a
        request whose last token is in flight has finished, and only keeps seat and memory.
        """
        self.running, self.prefilling, self.leaving, self._seated = {}, {}, [], []
        finished: list[RequestState] = []
        for request in self._scheduler.running:
            state = self._states[request.request_id]
            in_flight = request.num_output_placeholders
            state._computed = request.num_computed_tokens
            state._generated = request.num_output_tokens + in_flight
            self._seated.append(state)
            if state._generated and state.first_token_ns < 0:
                state.first_token_ns = now_ns
            if in_flight and state._generated >= request.max_tokens:
                if state.status is not Status.FINISHED:
                    state.status = Status.FINISHED
                    finished.append(state)
                self.leaving.append(state)
                continue
            self.running[state.id] = state
            if not state.is_decoding:
                self.prefilling[state.id] = state
        self.decodes = _decoding([s for i, s in self.running.items() if i not in self.prefilling])
        return finished

    def evict(self, state: RequestState) -> None:
        """Take a request's memory, then and there."""
        self._evict(self._vllm[state.id])

    def apply(self, preempted: tuple[RequestState, ...], now_ns: int) -> None:
        """Queue the requests that a plan has preempted, unless they were finished."""
        for state in preempted:
            if state.status is Status.FINISHED:
                continue
            # A token in flight stays counted: vLLM delivers it before the next plan.
            state.num_preemptions += 1
            state.recomputed_tokens += state._computed
            state._computed = 0
            state.status = Status.WAITING
            del self.running[state.id]
            self.waiting.add(state, now_ns)

    def admit(self, state: RequestState, cached_tokens: int, now_ns: int) -> None:
        """Give a request its seat."""
        self.waiting.remove(state, now_ns)
        state.status = Status.RUNNING
        self.running[state.id] = state
        state._computed = cached_tokens
        state.cached_tokens += cached_tokens
        if state.first_scheduled_ns < 0:
            state.first_scheduled_ns = now_ns
            state.prefix_hit_tokens = cached_tokens


def _decoding(states: list[RequestState]) -> SimpleNamespace:
    """Return what plans ask of a `DecodeBatch`: how many decode, and their contexts."""
    contexts = [state.num_computed_tokens for state in states]
    return SimpleNamespace(
        steps=0,  # nobody is in it: its requests count their tokens themselves
        size=len(contexts),
        context_sum_tokens=sum(contexts),
        context_max_tokens=max(contexts, default=0),
        context_min_tokens=min(contexts, default=0),
    )
