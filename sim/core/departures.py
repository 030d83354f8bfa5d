"""How requests leave an engine, and how long they hold seats and memory after their last token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.executor import Executor
from schedlab.sim.core.pipeline import LateRequest
from schedlab.sim.core.plan import BatchPlan, Finished
from schedlab.sim.core.population import Population
from schedlab.sim.core.request_hooks import RequestHooks
from schedlab.sim.core.session_table import SessionTable
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.core.track import SpeculatingState, most_drafts, one_ahead, slots_ahead
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.kv.allocators import make_kv_cache
from schedlab.sim.kv.prefix import PrefixCachingKVCache
from schedlab.sim.record.columns import FINISHED, TRUNCATED
from schedlab.sim.record.log import RunLog
from schedlab.sim.request import DONE, Request, RequestState, Status, Turn, seat_number


class Departures(Population):
    """How requests leave: answered, turned away, or to go on in another engine.

    A finished request is answered; it may keep its seat and memory, and even its answer may wait,
    until no unfinished request of its sealed batch runs. Its memory alone may be kept for the next
    requests of its session.

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
    sessions : SessionTable
        The sessions that they belong to.
    turns : dict of int to Turn
        What the client knows of a request of a session, by id, while it is needed here.
    on_gone : callable, optional
        Set by who drives the engine: called with a request that is answered or rejected, and the
        time. It must not call the engine, which is in the middle of something.
    hands_over : callable, optional
        Set by who drives the engine: called, under the same condition, with a request whose last
        token here came out, and the time. If it returns True the request goes on elsewhere, and its
        KV is held until `delivered`.
    drops_token : callable, optional
        Set with it: says, before, of whom nobody is told of that token here: it is told, or
        computed again, where the request goes on.
    """

    def __init__(self, config: EngineConfig, hooks: RequestHooks, executor: Executor) -> None:
        puts_back = hooks.by_arrival and (
            config.pipeline_parallel_size > 1
            or (bool(config.kv_tiers) and config.offloading_connector)
        )
        key = self._place if puts_back else None if hooks.by_arrival else hooks.key
        super().__init__(config, WaitingQueue(key), make_kv_cache(config, self._num_answer_tokens))
        self._puts_back = puts_back
        self._put_back: dict[int, int] = {}
        self.hooks = hooks
        self._on_arrival = hooks.on_arrival
        self._on_finish = hooks.on_finish
        self.executor = executor
        self.kv_bytes = executor.kv_bytes
        if self.kv_bytes is not None:
            self.kv_bytes.open(self.kv)
        self.reads_extremes = executor.reads_extremes
        self.log = RunLog(
            config.block_size,
            self.kv.grows,
            config.num_speculative_tokens > 0,
            config.pipeline_parallel_size,
        )
        if config.kv_tiers:
            self.tiers = Tiering(config, executor.estimate_step_ns, self.log.copies, self.kv_bytes)
            if isinstance(self.kv, PrefixCachingKVCache):
                self.kv.notes_lost = self.tiers.writes_back or self.tiers.follows_connector
        self.on_gone: Callable[[RequestState, int], None] | None = None
        self.hands_over: Callable[[RequestState, int], bool] | None = None
        self.drops_token: Callable[[RequestState], bool] | None = None
        self.turns: dict[int, Turn] = {}
        self.sessions = SessionTable()
        self._may_overrun = config.overrun_at_stop or config.drafts_ahead
        self._pipelines_ahead = config.pipelines_ahead
        self._speculates = config.num_speculative_tokens > 0

    def _place(self, state: RequestState, now_ns: int) -> Any:  # noqa: ANN401 - as `key`
        """Return a request's place in the queue: before all others, if it was put back there."""
        return self._put_back.get(state.id, state.request.arrival_ns)

    # -- with an answer, or without ------------------------------------------------------------

    def finish(self, states: Collection[RequestState], how: Finished, end_ns: int) -> None:
        """Let requests finish whose last token came out.

        Parameters
        ----------
        states : collection of RequestState
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
        batch, running, may_overrun = self.decodes, self.running, self._may_overrun
        for state in states:  # none of them runs any more when a policy is asked about the first
            if not may_overrun or how != "leave" or not self._overruns(state):
                del running[state.id]
        for state in states:
            entry_ns = state._entry_ns
            if self.drops_token is not None and self.drops_token(state):
                self._drop_token(state)
            elif state._batch is batch:
                self.leave_batch(batch, state)
            else:  # its last token came out of a prefill
                steps = batch.numbered_from + batch.steps
                self.log.add_stint(state.id, state._entry_ns, steps, steps)
            overruns = may_overrun and state.id in running
            if overruns and isinstance(state, SpeculatingState):
                self._draft_beyond_end(state)
            state.served_ns += end_ns - state._seated_ns
            if self.hands_over is not None and self.hands_over(state, end_ns):
                self._hand_over(state, end_ns)
                continue
            state.last_token_ns = end_ns
            if state.session is not None:
                state.tool = self.turns[state.id].tool
            if how != "leave":
                state.status = Status.HELD
                self.is_plain = False
                self.held[state.id] = state
                self.held_tokens += state._computed
            elif overruns:
                state._entry_ns = entry_ns  # whether its last token was known: `unnamed_tokens`
                self.overrun[state.id] = self.paused[state.id] = state
            elif self.config.async_scheduling:
                state._entry_ns = entry_ns
                state.status = DONE
                self.leaving.append(state)
            else:
                state.status = DONE
                if state.session is None or not self._keep(state, end_ns):
                    self.release(state)
            if how == "hold_answer":
                self.unanswered.append(state)
            elif self._pipelines_ahead:
                self._tell_end(state, end_ns)
                self.ended.append(state)
            else:
                self._answer(state, end_ns)
        if self.held and not self.running:
            self._end_sealed_batch(end_ns)

    def answer_ended(self, end_ns: int) -> None:
        """Answer those whose last token was under way when what follows was planned.

        Policies know of it since then, like all that they plan with.
        """
        for state in self.ended:
            self._write_answer(state, end_ns)
            if self.on_gone is not None:
                self.on_gone(state, end_ns)
        self.ended.clear()

    def _drop_token(self, state: RequestState) -> None:
        """Take a request out, and the token back that came out last: the only one since it came."""
        if state._batch is not None:
            state._batch.leave(state)
        state._entry_ns = -1
        state._generated -= 1
        if not state._generated:
            state.first_token_ns = -1

    def _overruns(self, state: RequestState) -> bool:
        """Whether the engine learns too late that it ends: a step with it is planned already."""
        config = self.config
        if not self._may_overrun or self.hands_over is not None:
            return False
        # How many drafts are right is not known, that one token at least comes out is.
        fresh = state.fresh_tokens
        end = state.request.max_tokens if config.overrun_at_stop else state.num_output_tokens
        left = config.max_model_len - state.num_tokens + fresh
        return state.num_output_tokens - fresh < end and left > 0

    def _draft_beyond_end(self, state: SpeculatingState) -> None:
        """Let a request verify once more that has ended: nobody who plans knows of it yet."""
        place = state.num_computed_tokens + state.unresolved_tokens
        state.track = one_ahead(self.config, state, most_drafts(self.config, state, place))

    def _answer(self, state: RequestState, now_ns: int) -> None:
        self._write_answer(state, now_ns)
        if state.session is not None or self._on_finish is not None:
            self._tell_end(state, now_ns)
        if self.on_gone is not None:
            self.on_gone(state, now_ns)

    def _write_answer(self, state: RequestState, now_ns: int) -> None:
        """Write a request down that is answered, and count it."""
        request = state.request
        output_tokens = self.executor.output_tokens(request)
        status = TRUNCATED if output_tokens > request.max_tokens else FINISHED
        self.log.add_request(state, output_tokens, now_ns, status)
        self.executor.remove(state)
        self.num_finished += 1

    def _tell_end(self, state: RequestState, now_ns: int) -> None:
        """Let its session and the policy know that a request has ended."""
        if state.session is not None:
            self.sessions.answered(state, now_ns)
        if self._on_finish is not None and state.id not in self.overrun:
            self._on_finish(state, now_ns)

    def _turn_away(self, state: RequestState, output_tokens: int, reason: str, now_ns: int) -> None:
        state.status = Status.REJECTED
        self.turns.pop(state.id, None)
        self.sessions.rejected(state)
        self.num_rejected += 1
        self.log.reject(state, output_tokens, reason)
        if self.on_gone is not None:
            self.on_gone(state, now_ns)

    def _num_answer_tokens(self, request: Request) -> int:
        """Count the tokens that a request will generate: an oracle, for allocators that reserve."""
        return min(self.executor.output_tokens(request), request.max_tokens)

    # -- what they hold ------------------------------------------------------------------------

    def _leave_decodes(self, state: RequestState) -> None:
        self.leave_batch(self.decodes, state)

    def leave_batch(self, batch: DecodeBatch, state: RequestState) -> None:
        """Take a request out of those that it decodes with."""
        batch.leave(state)
        start = batch.numbered_from
        first, last = start + state._stint_start, start + batch.steps
        self.log.add_stint(state.id, state._entry_ns, first, last)
        if self._speculates and isinstance(batch, SpeculativeBatch):
            self.log.add_bursts(batch.last_tokens)
        state._entry_ns = -1

    def leave_pipeline(self, state: RequestState) -> tuple[int, LateRequest | None]:
        """Let a request wait that runs, or whose batch is in the pipeline.

        Returns
        -------
        tuple of int and (LateRequest or None)
            How many tokens that batch computes of it, and what becomes of what comes out; 0 and
            None if it runs.
        """
        batch = self.in_pipeline.take_out(state)
        if batch is None:
            del self.running[state.id]
            return 0, None
        if batch.decodes is not None and state in batch.decodes:
            self.leave_batch(batch.decodes, state)
        late = batch.late[state.id]
        if self.hands_over is not None:  # its KV is lost, and nobody could go on without
            late.gets_token = late.is_last = False
        return batch.chunks.get(state.id, 1), late

    def deliver_late(self, late: LateRequest, end_ns: int) -> None:
        """Give a request the token that came out after it was preempted."""
        state = late.state
        state._generated += 1
        if state.first_token_ns < 0:
            state.first_token_ns = end_ns
        if not late.is_last:
            self.waiting.rekey((state,), end_ns)
            return
        self.num_events += 1
        self.waiting.remove(state, end_ns)
        self.log.add_resumption(state.id, end_ns, 0)
        state.last_token_ns = end_ns
        if state.session is not None:
            state.tool = self.turns[state.id].tool
        state.status = DONE
        self.turns.pop(state.id, None)
        self._put_back.pop(state.id, None)
        self._answer(state, end_ns)

    def _end_sealed_batch(self, now_ns: int) -> None:
        for state in self.held.values():
            self.release(state)
            state.status = DONE
        self.held.clear()
        self.held_tokens = 0
        for state in self.unanswered:
            self._answer(state, now_ns)
        self.unanswered.clear()

    def let_go(self, plan: BatchPlan | None, now_ns: int) -> None:
        """Release what finished before the step that the last plan was made in.

        Parameters
        ----------
        plan : BatchPlan or None
            The plan that did not know of it yet; None if there is none.
        now_ns : int
            The time.
        """
        self.num_events += 1
        if not self.overrun:
            for state in self.leaving:
                self.release(state)
            self.leaving.clear()
            return
        granted = plan.num_scheduled_tokens() if plan is not None else {}
        gone = sorted((*self.leaving, *self.overrun.values()), key=seat_number)
        for state in gone:  # blocks come free in this order
            tokens = 0
            if state.id in self.overrun:
                tokens = granted.get(state.id, 0)
                if tokens:
                    self.step_overrun += tokens
                    self.step_overrun_context_tokens += state._computed
                self.forget_overrun(state)
            self.release(state, tokens)
        self.leaving.clear()
        if self.held and not self.running:  # only who had ended kept their batch sealed
            self._end_sealed_batch(now_ns)

    def forget_overrun(self, state: RequestState) -> None:
        """Let a request run no more that had ended."""
        del self.overrun[state.id], self.running[state.id], self.paused[state.id]
        state.status = DONE
        self.num_turnovers += 1
        self.untold.append(state)

    def tell_overrun(self, now_ns: int) -> None:
        """Let the policy know who ended before the step that was planned with them."""
        if self._on_finish is not None:
            for state in self.untold:
                self._on_finish(state, now_ns)
        self.untold.clear()

    def _keep(self, state: RequestState, now_ns: int) -> bool:
        """Keep the memory of a request for the next ones of its session, if the policy wants."""
        if state.session is None or self.hooks.keeps_until is None:
            return False
        if not isinstance(self.kv, PrefixCachingKVCache):
            return False  # nobody would find it
        until_ns = self.hooks.keeps_until(state, now_ns)
        if until_ns <= now_ns:
            return False
        self._name_answer(state, self.turns.pop(state.id))
        self.is_plain = False
        self.kept[state.id] = state
        self.kept_until_ns[state.id] = until_ns
        return True

    def expire(self, now_ns: int) -> None:
        """Release the memory that was to be kept until now, unless it is kept on."""
        keeps_longer = self.hooks.keeps_longer
        due = [(until, i) for i, until in self.kept_until_ns.items() if until <= now_ns]
        due.sort(key=itemgetter(0))
        for _, request_id in due:
            until_ns = now_ns
            if keeps_longer is not None:
                is_awaited = self._is_awaited(request_id)
                until_ns = keeps_longer(self.kept[request_id], now_ns, is_awaited)
            if until_ns > now_ns:
                self.kept_until_ns[request_id] = until_ns
            else:
                self._drop_kept(request_id)

    def _is_awaited(self, request_id: int) -> bool:
        """Whether a request waits that needs the answer of one whose memory is kept."""
        session = self.kept[request_id].session
        if session is None or not session.num_in_flight:
            return False
        turns = self.turns
        return any([s.id in turns and request_id in turns[s.id].parents for s in self.waiting])

    def _drop_kept(self, request_id: int) -> None:
        del self.kept_until_ns[request_id]
        self.release(self.kept.pop(request_id))
        self.num_events += 1

    def release(self, state: RequestState, overrun_tokens: int = 0) -> None:
        """Give a request's memory back, and name what the next ones of its session may find."""
        spare, fresh = overrun_tokens, 0
        if self._speculates and isinstance(state, SpeculatingState):
            spare += state.spare_tokens
            if self.config.drafts_ahead:
                if overrun_tokens:
                    end = state._computed + state.unresolved_tokens + overrun_tokens
                    end = min(end + slots_ahead(self.config, end), self.config.max_model_len)
                    spare = max(state.spare_tokens, end - state._computed)
                state.resolve()  # its memory is released when all that came out is known
            fresh = state.fresh_tokens
        turn = self.turns.pop(state.id, None) if self.turns else None
        if turn is not None:
            self._name_answer(state, turn)
        self.kv.release(state, False, spare, spare + fresh)
        self._let_go(state)

    def _name_answer(self, state: RequestState, turn: Turn) -> None:
        if isinstance(self.kv, PrefixCachingKVCache):
            names = turn.answer_hash_ids[: self.kv.name_answer(state, turn.answer_hash_ids)]
            if self.kv_bytes is not None:
                self.kv_bytes.answered(state, names)
            if self.tiers is not None:
                self.tiers.store(state, names)

    def _let_go(self, state: RequestState) -> None:
        self.executor.released(state)
        if self.tiers is not None:
            self.tiers.released(state)
            self.tiers.finished(state)
        if self._puts_back:
            self._put_back.pop(state.id, None)
        self.resident_tokens -= state._computed

    # -- from and to other engines -------------------------------------------------------------

    def draft(self, state: RequestState, drafts: int) -> None:
        """Draft so many tokens for the next verification of a request that is in no batch."""
        assert isinstance(state, SpeculatingState)
        if state.id in self.overrun:  # nothing comes out of it
            self._draft_beyond_end(state)
            return
        state.draft_once = drafts
        self.executor.look_ahead(state)

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
        self.num_turnovers += 1
        self._hand_over(state, now_ns)
        if self.held and not self.running:
            self._end_sealed_batch(now_ns)

    def _hand_over(self, state: RequestState, end_ns: int) -> None:
        state.status = DONE
        self.handed_over[state.id] = state
        self.num_handed_over += 1
        self.executor.remove(state)
        if self._on_finish is not None:
            self._on_finish(state, end_ns)

    def delivered(self, request_id: int) -> None:
        """Release the memory of a request that was handed over: its KV is where it goes on."""
        self.release(self.handed_over.pop(request_id))
        self.num_events += 1

    def abandon(self, now_ns: int) -> list[RequestState]:
        """Give up everyone at once, with all that is in memory; see `Engine.die`.

        Who has its whole answer, and only waits to be told, is answered.
        """
        if self.overrun:
            self.let_go(None, now_ns)
            self.tell_overrun(now_ns)
        for state in list(self.decodes.members.values()):
            self._leave_decodes(state)
        for state in self.in_pipeline:
            self.leave_pipeline(state)
            self.running[state.id] = state
        self.in_pipeline.clear()
        for state in self.unanswered:
            self._answer(state, now_ns)
        self.unanswered.clear()
        if self.tiers is not None:
            self.tiers.abandon(now_ns)
        for state in self.running.values():
            state.served_ns += now_ns - state._seated_ns
        left = [*self.waiting, *self.intake.requests, *self.running.values(), *self.arrived]
        left += [*self.loading.values(), *self.holding.values()]
        left.sort(key=lambda state: (state.request.arrival_ns, state.id))
        return left
