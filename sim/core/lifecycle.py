"""Requests from their submission to their answer, and the seats and memory they take meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.plan import BatchPlan, Finished
from schedlab.sim.core.population import Population, seat_number
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.track import SpeculatingState
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.kv.allocators import make_kv_cache
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.record.columns import FINISHED, TRUNCATED
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import Arrival, Request, RequestState, Status, Turn

CANCELLED = "never sent: an earlier request of its session was rejected"


class RequestHooks(Protocol):
    """What a policy is told of requests that come and go, and how it orders those that wait."""

    def key(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - anything that sorts
        """Return the place of a request in the waiting queue, smaller = sooner."""

    on_arrival: Callable[[RequestState, int], None] | None
    """Called with a request about to enter the queue for the first time, and the time."""
    on_finish: Callable[[RequestState, int], None] | None
    """Called with a request whose answer is complete, and the time."""
    on_reject: Callable[[RequestState, int], None] | None
    """Called with a request that a plan rejected, and the time."""
    keeps_until: Callable[[RequestState, int], int] | None
    """Called with a request of a session that has its last token, and the time; returns until when
    its memory is kept for the next requests of the session. The time itself: not at all."""


class Lifecycle(Population):
    """What happens to requests: from one state to the next, and what they hold with them.

    A request is submitted, perhaps held back (`intake`), waits, is admitted to a seat, prefills
    and decodes, loses its memory and waits again if it is preempted, and finishes. A finished
    request is answered; it may keep its seat and memory, and even its answer may wait, until
    no unfinished request of its sealed batch runs.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    hooks : RequestHooks
        Who is told.
    executor : Executor
        The GPU; it alone knows true lengths.

    Attributes
    ----------
    log : RunLog
        What happened.
    on_gone : callable, optional
        Set by who drives the engine: called with a request that is answered or rejected, and the
        time. It must not call the engine, which is in the middle of something.
    hands_over : callable, optional
        Set by who drives the engine: called, under the same condition, with a request whose last
        token here came out, and the time. If it returns True the request goes on elsewhere, and its
        KV is held until `delivered`.
    """

    def __init__(self, config: EngineConfig, hooks: RequestHooks, executor: Executor) -> None:
        super().__init__(
            config, WaitingQueue(hooks.key), make_kv_cache(config, self._num_answer_tokens)
        )
        self._hooks = hooks
        self._executor = executor
        self.log = RunLog(config.block_size, self.kv.grows, config.num_speculative_tokens > 0)
        self.on_gone: Callable[[RequestState, int], None] | None = None
        self.hands_over: Callable[[RequestState, int], bool] | None = None
        self._num_seats_given = 0
        self._turns: dict[int, Turn] = {}
        self.sessions = SessionTable()

    # -- in ------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        """Take a request in, or reject it with a reason if it can never run."""
        request, output_tokens = arrival.request, arrival.output_tokens
        self.num_events += 1
        reason = too_long(request, output_tokens, self.config.max_model_len)
        if reason is not None:
            self.num_arrived += 1
            self._turn_away(RequestState(request), output_tokens, reason, now_ns)
            return
        num_drafts = self.config.num_speculative_tokens
        state = SpeculatingState(request, num_drafts) if num_drafts else RequestState(request)
        state.queued_ns = now_ns
        self._take(state, arrival, now_ns)

    def resume(self, state: RequestState, arrival: Arrival, now_ns: int) -> None:
        """Take in a request that another engine began: what that had computed is computed again.

        Parameters
        ----------
        state : RequestState
            New here, with the tokens of its answer that came out elsewhere.
        arrival : Arrival
            The request, with its true output length.
        now_ns : int
            The time.
        """
        self.num_events += 1
        reason = too_long(state.request, arrival.output_tokens, self.config.max_model_len)
        if reason is not None:
            self.num_arrived += 1
            self._turn_away(state, arrival.output_tokens, reason, now_ns)
            return
        if state.first_scheduled_ns < 0:
            state.queued_ns = now_ns
        self._take(state, arrival, now_ns)

    def _take(self, state: RequestState, arrival: Arrival, now_ns: int) -> None:
        self._executor.add(state.request, arrival.output_tokens)
        if arrival.turn is not None:
            self._turns[state.id] = arrival.turn
        if self.intake.holds_back:
            self.intake.add(state)
        else:
            self._enqueue(state, now_ns)
        self.num_arrived += 1

    def cancel(self, arrival: Arrival, now_ns: int) -> None:
        """Record a request that is never sent: it needs the answer of one that was rejected."""
        request = replace(arrival.request, arrival_ns=now_ns)
        self.num_arrived += 1
        self.num_rejected += 1
        self.log.reject(RequestState(request), arrival.output_tokens, CANCELLED)

    def take_in(self, now_ns: int, wait: bool = True) -> None:
        """Queue the held-back requests that a plan made now knows of; see `Intake.take`."""
        for state in self.intake.take(now_ns, wait):
            self.num_events += 1
            self._enqueue(state, now_ns)

    def _enqueue(self, state: RequestState, now_ns: int) -> None:
        is_new = state.session is None  # another engine may have had it
        if is_new and state.id in self._turns and state.request.session is not None:
            self.sessions.arrived(state, now_ns)
        if self._hooks.on_arrival is not None:
            self._hooks.on_arrival(state, now_ns)
        self.waiting.add(state, now_ns)

    # -- from and to other engines -------------------------------------------------------------

    def reserve(self, state: RequestState, arrival: Arrival, num_tokens: int, now_ns: int) -> None:
        """Give a seat, and memory that is there, to a request whose KV comes from elsewhere.

        Parameters
        ----------
        state : RequestState
            New here; tokens of its answer came out elsewhere.
        arrival : Arrival
            The request, with its true output length.
        num_tokens : int
            How much of it is computed.
        now_ns : int
            The time.
        """
        has_room = self.kv.allocate(state, num_tokens)
        assert has_room, "memory is reserved only where it is free"
        self._executor.add(state.request, arrival.output_tokens)
        if arrival.turn is not None:
            self._turns[state.id] = arrival.turn
        state.status = Status.RUNNING
        state._seated_ns = now_ns
        state._computed = num_tokens
        self.resident_tokens += num_tokens
        self.fetching[state.id] = state
        self.num_arrived += 1
        self.num_events += 1

    def extend(self, state: RequestState, num_tokens: int) -> None:
        """Take memory that is there for more KV of a request that `reserve` let in."""
        has_room = self.kv.allocate(state, num_tokens)
        assert has_room, "memory is reserved only where it is free"
        state._computed += num_tokens
        self.resident_tokens += num_tokens
        self.num_events += 1

    def withdraw(self, state: RequestState, now_ns: int) -> None:
        """Stop a request that decodes, between two steps: it goes on elsewhere.

        It gives its seat up; its KV is held until `delivered`.
        """
        if state in self.decodes:
            self._leave_decodes(state)
        self.paused.pop(state.id, None)
        del self.running[state.id]
        state.served_ns += now_ns - state._seated_ns
        self.num_events += 1
        self._hand_over(state, now_ns)
        if self.held and not self.running:
            self._end_sealed_batch(now_ns)

    def call_off(self, state: RequestState) -> None:
        """Take back `reserve`: the KV does not come."""
        del self.fetching[state.id]
        state.status = Status.FINISHED
        self.num_handed_over += 1
        self.num_events += 1
        self._release(state)
        self._executor.remove(state)

    def arrive(self, state: RequestState, now_ns: int) -> None:
        """Let a request run whose KV has come, from the next plan on."""
        self.arrived.append(state)
        self.num_events += 1
        if self._hooks.on_arrival is not None:
            self._hooks.on_arrival(state, now_ns)

    def seat_arrived(self) -> None:
        """Let those run whose KV has come."""
        for state in self.arrived:
            del self.fetching[state.id]
            state._seat = self._num_seats_given
            self._num_seats_given += 1
            self.running[state.id] = state
            self.paused[state.id] = state
        self.arrived.clear()

    def delivered(self, request_id: int) -> None:
        """Release the memory of a request that was handed over: its KV is where it goes on."""
        self._release(self.handed_over.pop(request_id))
        self.num_events += 1

    def _hand_over(self, state: RequestState, end_ns: int) -> None:
        state.status = Status.FINISHED
        self.handed_over[state.id] = state
        self.num_handed_over += 1
        self._executor.remove(state)
        if self._hooks.on_finish is not None:
            self._hooks.on_finish(state, end_ns)

    def abandon(self, now_ns: int) -> list[RequestState]:
        """Give up everyone at once, with all that is in memory; see `Engine.die`.

        Who has its whole answer, and only waits to be told, is answered.
        """
        for state in list(self.decodes.members.values()):
            self._leave_decodes(state)
        for state in self.unanswered:
            self._answer(state, now_ns)
        self.unanswered.clear()
        for state in self.running.values():
            state.served_ns += now_ns - state._seated_ns
        left = [*self.waiting, *self.intake.requests, *self.running.values(), *self.arrived]
        left.sort(key=lambda state: (state.request.arrival_ns, state.id))
        return left

    # -- a plan's changes ----------------------------------------------------------------------

    def apply(self, plan: BatchPlan, cached_tokens: dict[int, int], now_ns: int) -> None:
        """Preempt, admit and reject as a plan says.

        Parameters
        ----------
        plan : BatchPlan
            The decision; its memory is allocated and released already.
        cached_tokens : dict of int to int
            Request id to tokens found in the prefix cache, of those admitted with a hit.
        now_ns : int
            The time.
        """
        for state in plan.preempted:
            self._evict(state, state in plan.swapped, now_ns)
        for state in plan.admitted:
            self._admit(state, cached_tokens.get(state.id, 0), now_ns)
        for state, reason in plan.rejected:
            self._reject(state, reason, now_ns)
        if self.held and not self.running:
            self._end_sealed_batch(now_ns)

    def _evict(self, state: RequestState, swap: bool, now_ns: int) -> None:
        if state.status is Status.FINISHED:  # answered already: only its memory is taken
            if self.kept.pop(state.id, None) is None:
                self.leaving.remove(state)
                self._turns.pop(state.id, None)
            else:
                del self.kept_until_ns[state.id]
            self._let_go(state)
            return
        self.num_turnovers += 1
        if state in self.decodes:
            self._leave_decodes(state)
        self.paused.pop(state.id, None)
        self.prefilling.pop(state.id, None)
        del self.running[state.id]
        state.served_ns += now_ns - state._seated_ns
        state.num_preemptions += 1
        self.step_preempted += 1
        self.log.add_eviction(state.id, now_ns)
        self.resident_tokens -= state._computed
        if swap:
            self._executor.swapped_out(state)
            self._count_swapped(state, -1)
            state.swapped = True
        else:
            state.recomputed_tokens += state._computed
            self.step_recomputed_tokens += state._computed
            state._computed = 0
        state.status = Status.WAITING
        if isinstance(state, SpeculatingState):
            state.lost_memory()
        self._executor.released(state)
        self.waiting.add(state, now_ns)

    def _admit(self, state: RequestState, cached_tokens: int, now_ns: int) -> None:
        self.waiting.remove(state, now_ns)
        state.status = Status.RUNNING
        was_here = state._seat >= 0
        state._seat = self._num_seats_given
        self._num_seats_given += 1
        self.running[state.id] = state
        state._seated_ns = now_ns
        if state.swapped:
            state.swapped = False
            self.resident_tokens += state._computed
            self._count_swapped(state, 1)
            self._executor.swapped_in(state)
        (self.paused if state.is_decoding else self.prefilling)[state.id] = state
        if isinstance(state, SpeculatingState) and state.is_decoding:
            self.num_turnovers += 1
            self._draft(state, 0)  # nobody has drafted for it yet
        if cached_tokens:
            state._computed = cached_tokens
            state.cached_tokens += cached_tokens
            self.resident_tokens += cached_tokens
        if state.first_scheduled_ns < 0:
            state.first_scheduled_ns = now_ns
            state.prefix_hit_tokens = cached_tokens
        elif was_here:
            self.log.add_resumption(state.id, now_ns, state.num_uncomputed_tokens)
        if self.kept and state.session is not None:  # what it can use of it, it holds now itself
            own = [i for i, other in self.kept.items() if other.session is state.session]
            for request_id in own:
                self._drop_kept(request_id)

    def _reject(self, state: RequestState, reason: str, now_ns: int) -> None:
        self.waiting.remove(state, now_ns)
        if state.swapped:
            self.free_swap_blocks += self._num_blocks(state)
            state.recomputed_tokens += state._computed  # thrown away, though not by an eviction
        self._turn_away(state, self._executor.output_tokens(state.request), reason, now_ns)
        self._executor.remove(state)
        if self._hooks.on_reject is not None:
            self._hooks.on_reject(state, now_ns)

    def _turn_away(self, state: RequestState, output_tokens: int, reason: str, now_ns: int) -> None:
        state.status = Status.REJECTED
        self._turns.pop(state.id, None)
        self.sessions.rejected(state)
        self.num_rejected += 1
        self.log.reject(state, output_tokens, reason)
        if self.on_gone is not None:
            self.on_gone(state, now_ns)

    def _count_swapped(self, state: RequestState, sign: int) -> None:
        """Count a request's blocks as moved to the host (-1) or back (+1)."""
        num_blocks = self._num_blocks(state)
        self.free_swap_blocks += sign * num_blocks
        self.step_swapped_bytes += num_blocks * self.config.kv_block_bytes

    def _num_blocks(self, state: RequestState) -> int:
        return -(-state._computed // self.config.block_size)

    # -- phases --------------------------------------------------------------------------------

    def choose_decodes(self, plan: BatchPlan) -> int:
        """Make the decode batch exactly the requests that a plan decodes, and count them.

        A plan that decodes nobody leaves the batch as it is: it waits for the next one.
        """
        chosen, batch = plan.decodes, self.decodes
        if chosen is None:
            if self.paused:
                for state in self.paused.values():
                    self._join_decodes(state)
                self.paused.clear()
            return batch.size
        if chosen and (self.paused or len(chosen) < batch.size):
            ids = {state.id for state in chosen}
            for state in [s for s in batch.members.values() if s.id not in ids]:
                self._leave_decodes(state)
                self.paused[state.id] = state
            for state in chosen:
                if self.paused.pop(state.id, None) is not None:
                    self._join_decodes(state)
        for state, drafts in plan.trimmed:
            self.draft_anew(state, drafts)
        return len(chosen)

    def draft_anew(self, state: RequestState, drafts: int) -> None:
        """Draft another number of tokens for the next verification of a running request."""
        is_member = state in self.decodes
        if is_member:
            self._leave_decodes(state)
        self._draft(state, drafts)
        if is_member:
            self._join_decodes(state)

    def _draft(self, state: RequestState, drafts: int) -> None:
        """Draft for the next verification of a request that is in no batch."""
        assert isinstance(state, SpeculatingState)
        state.draft_once = drafts
        self._executor.look_ahead(state)

    def advance_prefill(
        self, state: RequestState, num_tokens: int, end_ns: int, is_last: bool
    ) -> bool:
        """Account for a chunk that was computed.

        Parameters
        ----------
        state : RequestState
            Whose.
        num_tokens : int
            How many of its tokens.
        end_ns : int
            When the step ended.
        is_last : bool
            Whether the request finishes with the token that comes out.

        Returns
        -------
        bool
            Whether a token came out.
        """
        state._computed += num_tokens
        self.resident_tokens += num_tokens
        left = state.num_uncomputed_tokens
        if left == 0:
            state._generated += 1
            state._entry_ns = end_ns
            if state.first_token_ns < 0:
                state.first_token_ns = end_ns
        elif left > 1 or not state._generated:
            return False
        # One token left after a recomputation is a decode like any other.
        del self.prefilling[state.id]
        if not is_last:
            if isinstance(state, SpeculatingState):
                self.num_turnovers += 1
                self._draft(state, 0 if left else -1)
            self._join_decodes(state)
        return left == 0

    def _join_decodes(self, state: RequestState) -> None:
        self._executor.joined(state, self.decodes)
        self.decodes.join(state)

    def _leave_decodes(self, state: RequestState) -> None:
        batch = self.decodes
        batch.leave(state)
        self.log.add_stint(state.id, state._entry_ns, state._stint_start, batch.steps)
        if isinstance(batch, SpeculativeBatch):
            self.log.add_bursts(batch.last_tokens)
        state._entry_ns = -1

    # -- out -----------------------------------------------------------------------------------

    def finish(self, states: Iterable[RequestState], how: Finished, end_ns: int) -> None:
        """Let requests finish whose last token came out.

        Parameters
        ----------
        states : iterable of RequestState
            Who.
        how : {"leave", "hold", "hold_answer"}
            What becomes of them; see `BatchPlan.finished`.
        end_ns : int
            When the step ended.
        """
        self.num_events += 1
        if self.config.enable_prefix_caching:
            states = sorted(states, key=seat_number)  # blocks come free in this order
        self.num_turnovers += 1
        for state in states:
            if state in self.decodes:
                self._leave_decodes(state)
            else:  # its last token came out of a prefill
                steps = self.decodes.steps
                self.log.add_stint(state.id, state._entry_ns, steps, steps)
            del self.running[state.id]
            state.served_ns += end_ns - state._seated_ns
            if self.hands_over is not None and self.hands_over(state, end_ns):
                self._hand_over(state, end_ns)
                continue
            state.last_token_ns = end_ns
            if state.session is not None:
                state.tool = self._turns[state.id].tool
            if how != "leave":
                state.status = Status.HELD
                self.held[state.id] = state
                self.held_tokens += state._computed
            elif self.config.async_scheduling:
                state.status = Status.FINISHED
                self.leaving.append(state)
            else:
                state.status = Status.FINISHED
                if not self._keep(state, end_ns):
                    self._release(state)
            if how == "hold_answer":
                self.unanswered.append(state)
            else:
                self._answer(state, end_ns)
        if self.held and not self.running:
            self._end_sealed_batch(end_ns)

    def _keep(self, state: RequestState, now_ns: int) -> bool:
        """Keep the memory of a request for the next ones of its session, if the policy wants."""
        if self._hooks.keeps_until is None or state.session is None:
            return False
        if not isinstance(self.kv, PrefixCachingKVCache):
            return False  # nobody would find it
        until_ns = self._hooks.keeps_until(state, now_ns)
        if until_ns <= now_ns:
            return False
        self.kv.name_answer(state, self._turns.pop(state.id).answer_hash_ids)
        self.kept[state.id] = state
        self.kept_until_ns[state.id] = until_ns
        return True

    def expire(self, now_ns: int) -> None:
        """Release the memory that was to be kept until now."""
        for request_id in [i for i, until in self.kept_until_ns.items() if until <= now_ns]:
            self._drop_kept(request_id)

    def _drop_kept(self, request_id: int) -> None:
        del self.kept_until_ns[request_id]
        self._release(self.kept.pop(request_id))
        self.num_events += 1

    def let_go(self) -> None:
        """Release what finished before the step that the last plan was made in."""
        for state in self.leaving:
            self._release(state)
        self.leaving.clear()
        self.num_events += 1

    def _end_sealed_batch(self, now_ns: int) -> None:
        for state in self.held.values():
            self._release(state)
            state.status = Status.FINISHED
        self.held.clear()
        self.held_tokens = 0
        for state in self.unanswered:
            self._answer(state, now_ns)
        self.unanswered.clear()

    def _release(self, state: RequestState) -> None:
        turn = self._turns.pop(state.id, None)
        if turn is not None and isinstance(self.kv, PrefixCachingKVCache):
            self.kv.name_answer(state, turn.answer_hash_ids)
        spare = state.spare_tokens
        self.kv.release(state, False, spare, spare)
        self._let_go(state)

    def _let_go(self, state: RequestState) -> None:
        self._executor.released(state)
        self.resident_tokens -= state._computed

    def _answer(self, state: RequestState, now_ns: int) -> None:
        request = state.request
        output_tokens = self._executor.output_tokens(request)
        status = TRUNCATED if output_tokens > request.max_tokens else FINISHED
        self.log.add_request(state, output_tokens, now_ns, status)
        self._executor.remove(state)
        self.num_finished += 1
        self.sessions.answered(state, now_ns)
        if self._hooks.on_finish is not None:
            self._hooks.on_finish(state, now_ns)
        if self.on_gone is not None:
            self.on_gone(state, now_ns)

    def _num_answer_tokens(self, request: Request) -> int:
        """Count the tokens that a request will generate: an oracle, for allocators that reserve."""
        return min(self._executor.output_tokens(request), request.max_tokens)


def too_long(request: Request, output_tokens: int, max_model_len: int) -> str | None:
    """Return why a request can never run, or None if it can."""
    total = request.prompt_tokens + min(output_tokens, request.max_tokens)
    if total <= max_model_len:
        return None
    return f"prompt and output take {total} tokens, max_model_len is {max_model_len}"
