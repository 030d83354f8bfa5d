"""Requests from their submission to their last token: who waits, who runs, what is computed."""

from __future__ import annotations

from dataclasses import replace

from schedlab.sim.core.departures import Departures
from schedlab.sim.core.plan import BatchPlan, Parts
from schedlab.sim.core.track import SpeculatingState, new_state, slots_ahead
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.request import DONE, RUNS, WAITS, Arrival, Request, RequestState, seat_number

CANCELLED = "never sent: an earlier request of its session was rejected"


class Lifecycle(Departures):
    """What happens to requests: from one state to the next, and what they hold with them.

    A request is submitted, perhaps held back (`intake`), waits, is admitted to a seat, prefills
    and decodes, loses its memory and waits again if it is preempted, and leaves (`Departures`,
    which also says of what a lifecycle is made). One whose KV comes from another engine comes in
    by `schedlab.sim.core.reception`.
    """

    # -- in ------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival, now_ns: int) -> None:
        """Take a request in, or reject it with a reason if it can never run."""
        request, output_tokens = arrival.request, arrival.output_tokens
        self.num_events += 1
        if request.prompt_tokens + output_tokens > self.config.max_model_len:
            reason = too_long(request, output_tokens, self.config.max_model_len)
            if reason is not None:
                self.num_arrived += 1
                self._turn_away(RequestState(request), output_tokens, reason, now_ns)
                return
        state = new_state(request, self.config) if self._speculates else RequestState(request)
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
        self.executor.add(state.request, arrival.output_tokens)
        if arrival.turn is not None:
            self.turns[state.id] = arrival.turn
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
        if self.turns and state.session is None:  # another engine may have had it
            turn = self.turns.get(state.id)
            if turn is not None and state.request.session is not None:
                self.sessions.arrived(state, now_ns, turn.parents)
        if self._on_arrival is not None:
            self._on_arrival(state, now_ns)
        self.waiting.add(state, now_ns)

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
        if self.tiers is not None:
            for _, parts in plan.loading:
                self.tiers.keep(parts)
        for state in plan.preempted:
            self._evict(state, state in plan.swapped, now_ns)
        if self.tiers is not None:
            self.copy_lost()
        loading = dict(plan.loading) if plan.loading else {}
        if self.kv_bytes is not None:
            self._tell_reuse(plan, cached_tokens)
        for state in plan.admitted:
            if self.come and state.id in self.come:
                self._seat_loaded(state, now_ns)
            elif loading and state in loading:
                self._load(state, loading[state], cached_tokens.get(state.id, 0), now_ns)
            else:
                cached = cached_tokens.get(state.id, 0) if cached_tokens else 0
                self._admit(state, cached, now_ns)
        for state, reason in plan.rejected:
            self._reject(state, reason, now_ns)
        if self.held and not self.running:
            self._end_sealed_batch(now_ns)

    def _tell_reuse(self, plan: BatchPlan, cached_tokens: dict[int, int]) -> None:
        """Say who begins with blocks of the cache, if with any, before anybody takes others."""
        assert self.kv_bytes is not None
        size = self.config.block_size
        loaded = {s.id: sum([len(names) for _, names in parts]) for s, parts in plan.loading}
        for state in plan.admitted:
            if state.id in cached_tokens:
                num_tokens = cached_tokens[state.id] - loaded.get(state.id, 0) * size
                self.kv_bytes.reuse(state, num_tokens)

    def _evict(self, state: RequestState, swap: bool, now_ns: int) -> None:
        if state.status is DONE:  # answered already: only its memory is taken
            if self.kept.pop(state.id, None) is None:
                self.leaving.remove(state)
                self.turns.pop(state.id, None)
            else:
                del self.kept_until_ns[state.id]
            self._let_go(state)
            return
        if state.id in self.overrun:
            self.forget_overrun(state)
            self.turns.pop(state.id, None)
            self._let_go(state)
            return
        self.num_turnovers += 1
        if state in self.decodes:
            self._leave_decodes(state)
        self.paused.pop(state.id, None)
        self.prefilling.pop(state.id, None)
        in_flight_tokens, late = 0, None
        if self.in_pipeline.batches:
            in_flight_tokens, late = self.leave_pipeline(state)
        else:
            del self.running[state.id]
        state.served_ns += now_ns - state._seated_ns
        state.num_preemptions += 1
        self.step_preempted += 1
        self.log.add_eviction(state.id, now_ns)
        self.resident_tokens -= state._computed
        if swap:
            self.executor.swapped_out(state)
            self._count_swapped(state, -1)
            state.swapped = True
            self.executor.released(state)
        else:
            self.executor.released(state)
            if self.tiers is not None:
                if self.tiers.follows_connector:
                    self.tiers.flush(state)
                else:
                    self.tiers.released(state)
            lost_tokens = state._computed + in_flight_tokens
            if late is not None and late.is_last:
                late.spared_tokens = lost_tokens
            else:
                state.recomputed_tokens += lost_tokens
                self.step_recomputed_tokens += lost_tokens
            state._computed = 0
        state.status = WAITS
        if isinstance(state, SpeculatingState):
            state.lost_memory()
        if self._puts_back:  # vLLM prepends it, whoever began to run in another order than all came
            self._put_back[state.id] = -self.num_turnovers
        self.waiting.add(state, now_ns)

    def _admit(self, state: RequestState, cached_tokens: int, now_ns: int) -> None:
        self.waiting.remove(state, now_ns)
        state.status = RUNS
        state._seated_ns = now_ns
        if state.swapped:
            state.swapped = False
            self.resident_tokens += state._computed
            self._count_swapped(state, 1)
            self.executor.swapped_in(state)
        was_here = self._seat(state)
        if cached_tokens:
            if self.tiers is not None:
                self.tiers.reuse(state, cached_tokens)
            self._take_over(state, cached_tokens)
        self._note_scheduled(state, was_here, cached_tokens, now_ns)
        if self.kept:
            self._drop_kept_for(state)

    def _load(self, state: RequestState, parts: Parts, cached_tokens: int, now_ns: int) -> None:
        """Give a request memory, and a seat, unless it takes that when what is loaded is there."""
        assert self.tiers is not None
        self.waiting.remove(state, now_ns)
        if not (self.config.load_takes_seat or state.swapped):
            self.holding[state.id] = state
        else:
            state.status = RUNS
            state._seated_ns = now_ns
            self.loading[state.id] = state
        num_free, block_size = self.kv.free_blocks, self.config.block_size
        if state.swapped:
            state.swapped = False
            self.resident_tokens += state._computed
            self.free_swap_blocks += self._num_blocks(state)
            self.tiers.swap_in(state, self._num_blocks(state), num_free)
        else:
            local_tokens = cached_tokens - sum([len(names) for _, names in parts]) * block_size
            self.tiers.reuse(state, local_tokens)
            self._take_over(state, cached_tokens)
            self.tiers.load(state, parts, num_free)
        self._drop_kept_for(state)

    def settle(self, now_ns: int) -> None:
        """Let copies to and from lower tiers end that are done, and those run who waited."""
        assert self.tiers is not None
        size = self.config.block_size
        has_changed, loaded = self.tiers.settle(now_ns)
        self.num_events += has_changed
        for state in loaded:
            holds = state.id in self.holding
            if isinstance(self.kv, PrefixCachingKVCache):
                # What is loaded of a prompt are full blocks, though its last token is computed.
                there = state._computed
                self.kv.name_prompt(state, self._num_blocks(state) * size if holds else there)
            if self.kv_bytes is not None:
                self.kv_bytes.loaded(state)
            if holds:
                self.come.add(state.id)
                continue
            del self.loading[state.id]
            cached_tokens = state._computed if state.first_scheduled_ns < 0 else 0
            self._note_scheduled(state, self._seat(state), cached_tokens, now_ns)

    def _seat_loaded(self, state: RequestState, now_ns: int) -> None:
        """Give a request its seat whose memory it has, with what was loaded of it."""
        del self.holding[state.id]
        self.come.remove(state.id)
        state.status = RUNS
        state._seated_ns = now_ns
        cached_tokens = state._computed if state.first_scheduled_ns < 0 else 0
        self._note_scheduled(state, self._seat(state), cached_tokens, now_ns)

    def _take_over(self, state: RequestState, cached_tokens: int) -> None:
        state._computed = cached_tokens
        state.cached_tokens += cached_tokens
        self.resident_tokens += cached_tokens

    def _seat(self, state: RequestState) -> bool:
        """Let a request run that has its memory; return whether it ran before."""
        was_here = state._seat >= 0
        state._seat = self.num_seats_given
        self.num_seats_given += 1
        self.running[state.id] = state
        if not state._generated or not state.next_is_decode:
            self.prefilling[state.id] = state
            return was_here
        self.paused[state.id] = state
        if isinstance(state, SpeculatingState):
            self.num_turnovers += 1
            self.draft(state, 0)  # nobody has drafted for it yet
        return was_here

    def _note_scheduled(
        self, state: RequestState, was_here: bool, cached_tokens: int, now_ns: int
    ) -> None:
        if state.first_scheduled_ns < 0:
            state.first_scheduled_ns = now_ns
            state.prefix_hit_tokens = cached_tokens
        elif was_here:
            self.log.add_resumption(state.id, now_ns, state.num_uncomputed_tokens)

    def _drop_kept_for(self, state: RequestState) -> None:
        """Let go what was kept for who waits no more: what it can use of it, it holds itself."""
        if self.kept and state.id in self.turns:
            for request_id in self.turns[state.id].parents:
                if request_id in self.kept:
                    self._drop_kept(request_id)

    def _reject(self, state: RequestState, reason: str, now_ns: int) -> None:
        self.waiting.remove(state, now_ns)
        if state.swapped:
            self.free_swap_blocks += self._num_blocks(state)
            if self.tiers is not None:
                self.tiers.drop(state, self._num_blocks(state))
            state.recomputed_tokens += state._computed  # thrown away, though not by an eviction
        if self.in_pipeline.draining:
            state.recomputed_tokens += self.in_pipeline.forget(state)
        self._drop_kept_for(state)
        self._turn_away(state, self.executor.output_tokens(state.request), reason, now_ns)
        self.executor.remove(state)
        if self.hooks.on_reject is not None:
            self.hooks.on_reject(state, now_ns)

    def _count_swapped(self, state: RequestState, sign: int) -> None:
        """Count a request's blocks as moved to the host (-1) or back (+1)."""
        num_blocks = self._num_blocks(state)
        self.free_swap_blocks += sign * num_blocks
        if self.tiers is not None:
            self.tiers.swap_out(state, num_blocks)
            return
        self.step_swapped_bytes += num_blocks * self.config.kv_block_bytes

    def _num_blocks(self, state: RequestState) -> int:
        return -(-state._computed // self.config.block_size)

    # -- phases --------------------------------------------------------------------------------

    def choose_decodes(self, plan: BatchPlan) -> int:
        """Make the decode batch exactly the requests that a plan decodes, and count them.

        A plan that decodes nobody leaves the batch as it is: it waits for the next one.
        """
        batch, paused, left, joining = self.decodes, self.paused, plan.left, plan.joining
        if left is None or joining is None or self.step_overrun:
            chosen = plan.decodes if plan._members is not None else plan._decodes
            if chosen is None:
                if paused:
                    self._go_on(list(paused.values()))
                return batch.size
            if self.step_overrun:
                chosen = tuple([state for state in chosen if state.status is not DONE])
            num_decodes = len(chosen)
            left, joining = [], []
            if num_decodes and (paused or num_decodes < batch.size):
                turn = set(chosen)
                left = [state for state in batch.members.values() if state not in turn]
                if num_decodes > batch.size - len(left):
                    joining = [s for s in chosen if s._batch is not batch and s.id in paused]
        else:
            num_decodes = batch.size - len(left) + len(joining)
        if num_decodes:
            if left:
                self._pause(left)
            if joining:
                self._go_on(joining)
        elif batch.size and self.config.drafts_ahead:
            self._pause(list(batch.members.values()))  # what is under way of them ends before
        for state, drafts in plan.trimmed:
            if state.status is not DONE:
                self.draft_anew(state, drafts)
        return num_decodes

    def _pause(self, states: list[RequestState]) -> None:
        """Let members of the decode batch leave it and keep what they hold."""
        batch, log, paused = self.decodes, self.log, self.paused
        if self.config.num_speculative_tokens:
            for state in states:
                self._leave_decodes(state)
                paused[state.id] = state
                if self.config.drafts_ahead:
                    self._resolve(state)
            return
        log.add_stints(states, batch.numbered_from, batch.steps)
        batch.leave_all(states)
        for state in states:
            state._entry_ns = -1
            paused[state.id] = state

    def _resolve(self, state: RequestState) -> None:
        """Let a request that sits a step out begin the next behind what it then has."""
        assert isinstance(state, SpeculatingState)
        needs_less = state.unresolved_tokens > 0
        state.resolve()
        if needs_less:
            self.draft(state, -1)
            self.needs_less = True

    def _go_on(self, states: list[RequestState]) -> None:
        """Let paused decodes join the batch."""
        batch, executor, paused = self.decodes, self.executor, self.paused
        if self.config.num_speculative_tokens:
            for state in states:
                del paused[state.id]
                self._join_decodes(state)
            return
        if len(states) == len(paused):
            paused.clear()
        else:
            for state in states:
                del paused[state.id]
        executor.joined(states, batch)
        batch.join_all(states)

    def draft_anew(self, state: RequestState, drafts: int) -> None:
        """Draft another number of tokens for the next verification of a running request."""
        is_member = state in self.decodes
        if is_member:
            self._leave_decodes(state)
        self.draft(state, drafts)
        if is_member:
            self._join_decodes(state)

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
        if self._speculates and isinstance(state, SpeculatingState):
            end = state._computed + num_tokens
            state.computed(num_tokens, slots_ahead(self.config, end))
        else:
            state._computed += num_tokens
        self.resident_tokens += num_tokens
        left = state.request.prompt_tokens + state._generated - state._computed
        if left == 0:
            state._generated += 1
            state._entry_ns = end_ns
            if state.first_token_ns < 0:
                state.first_token_ns = end_ns
        elif left > 1 or not state._generated:
            return False
        # One token left after a recomputation is a decode like any other.
        del self.prefilling[state.id]
        if self.tiers is not None:
            full = state._computed // self.config.block_size
            self.tiers.store(state, state.request.prefix_hash_ids[:full])
        if not is_last:
            if self._speculates and isinstance(state, SpeculatingState):
                self.num_turnovers += 1
                self.draft(state, 0 if left else -1)
            batch = self.decodes
            self.executor.joined((state,), batch)
            batch.join(state)
        return left == 0

    def store_step(self, chunks: tuple[tuple[RequestState, int], ...]) -> None:
        """Let the first tier have what a step filled of prompts; those of before come first."""
        assert self.tiers is not None
        states = [state for state, _ in chunks]
        behind = self.tiers.behind
        if behind:
            here = [s for s in behind.values() if s in self.decodes and s not in states]
            states = sorted((*states, *here), key=seat_number)
        self.tiers.store_step(states)

    def _join_decodes(self, state: RequestState) -> None:
        batch = self.decodes
        self.executor.joined((state,), batch)
        batch.join(state)


def too_long(request: Request, output_tokens: int, max_model_len: int) -> str | None:
    """Return why a request can never run, or None if it can."""
    total = request.prompt_tokens + min(output_tokens, request.max_tokens)
    if total <= max_model_len:
        return None
    return f"prompt and output take {total} tokens, max_model_len is {max_model_len}"
