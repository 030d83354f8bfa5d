"""The only way to make a plan: a step's ledger, with what serves all running requests at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import SupportsIndex, get_args

from schedlab.sim.core.plan import FOREVER, BatchPlan, Finished, Parts
from schedlab.sim.core.population import Population
from schedlab.sim.core.step_ledger import StepLedger, require_one_of, whole_number
from schedlab.sim.errors import InfeasiblePlan
from schedlab.sim.kv.ledger import Mark
from schedlab.sim.request import RequestState, seat_number

_FINISHED: tuple[str, ...] = get_args(Finished)


class PlanBuilder(StepLedger):
    """Grants what seats, token budget and memory allow, and makes the plan of it."""

    def __init__(self, requests: Population) -> None:
        super().__init__(requests)
        self._list_decodes = self._decodes_in_order  # bound once, not for each plan

    def grant_running(self) -> bool:
        """Schedule every running request: each decode one token, each prefill what is left.

        Where the token budget or the rows of the step do not suffice, requests are served in the
        order of their admission and the rest is left out, as in vLLM V1.

        Returns
        -------
        bool
            False, with nothing granted, if memory does not suffice: preempt someone and ask
            again.

        Raises
        ------
        InfeasiblePlan
            If running requests were already granted tokens one by one in this step.

        Notes
        -----
        Costs O(1) for the decodes, whatever their number, unless the budget is short and somebody
        decodes who was admitted behind an unfinished prompt.
        """
        if self._has_entries or self._all_decodes or self._members is not None:
            self._require_no_decodes("grant_running")
        self.plan = None
        requests = self._requests
        prefills: Collection[RequestState] = requests.prefilling.values()
        num_decodes = self._batch.size + len(requests.paused)
        if self.preempted:
            prefills = [s for s in prefills if s not in self.preempted]
            num_decodes -= self._count_preempted_decodes()
        tokens = num_decodes
        if self._speculates:
            tokens = self._decode_tokens()
            if self._cuts_drafts:
                return self._grant_in_order(requests.running.values())
        if not prefills and num_decodes <= self.rows_left and tokens <= self.tokens_left:
            # Most steps.
            self._all_decodes = self._take_decodes(num_decodes, tokens)
            return self._all_decodes
        wanted = tokens + sum([self._chunk_limit(s, None) for s in prefills])
        if num_decodes + len(prefills) > self.rows_left or (
            wanted > self.tokens_left
            and not (tokens <= self.tokens_left and self._are_last(prefills))
        ):
            return self._grant_in_order(requests.running.values())
        mark, left = self._kv.mark(), (self.tokens_left, self.rows_left)
        if not self._take_decodes(num_decodes, tokens):
            return False
        granted: list[RequestState] = []
        for state in prefills:
            if not self.tokens_left:
                break
            if not self._grant_chunk(state, None):
                self._take_back(granted, mark, left)
                return False
            granted.append(state)
        self._all_decodes = True
        return True

    def _are_last(self, prefills: Collection[RequestState]) -> bool:
        """Whether all decodes were admitted before these, so that they come first."""
        left, prefilling = len(prefills), self._requests.prefilling
        for state in reversed(self._requests.running.values()):
            if state in self.preempted:
                continue
            if not left or state.id not in prefilling:
                break
            left -= 1
        return left == 0

    def grant_decodes(self) -> bool:
        """Schedule one token of every decode and no prefill; those are granted one by one.

        Where the token budget or the rows of the step do not suffice, decodes are served in the
        order of their admission.

        Returns
        -------
        bool
            False, with nothing granted, if memory does not suffice: preempt someone and ask
            again.

        Raises
        ------
        InfeasiblePlan
            If decodes were already granted in this step.

        Notes
        -----
        Costs O(1), whatever their number.
        """
        self._require_no_decodes("grant_decodes")
        num_decodes = self._batch.size + len(self._requests.paused)
        if self.preempted:
            num_decodes -= self._count_preempted_decodes()
        tokens = self._decode_tokens() if self._speculates else num_decodes
        if num_decodes > self.rows_left or tokens > self.tokens_left or self._cuts_drafts:
            return self._grant_in_order(self._decodes_in_order())
        if not self._take_decodes(num_decodes, tokens):
            return False
        self._all_decodes = num_decodes > 0
        return True

    def grant_all(self, decodes: Collection[RequestState]) -> bool:
        """Schedule one token of each of some decodes, in their order, if all of them fit.

        Parameters
        ----------
        decodes : collection of RequestState
            Running requests past their prefill, each of them once.

        Returns
        -------
        bool
            False, with nothing granted, if tokens, rows or memory do not suffice for all: `grant`
            them one by one.

        Raises
        ------
        InfeasiblePlan
            If one of them is no running decode, was preempted in this step, or would be granted
            tokens twice.

        Notes
        -----
        The same plan as granting them one by one, at a fraction of the cost.
        """
        self.plan = None
        self._has_entries = True
        num_decodes = len(decodes)
        if num_decodes > self.tokens_left or num_decodes > self.rows_left or self._cuts_drafts:
            return False
        tokens = num_decodes
        if self._speculates:
            tokens = sum([state.decode_tokens for state in decodes if state.is_decoding])
            if tokens > self.tokens_left:
                return False
        if self._members is not None:
            self._name_decodes()
        granted, batch = self._decodes, self._batch
        chosen = {state.id: state for state in decodes}
        if (
            self._all_decodes
            or len(chosen) != num_decodes
            or not (not granted or granted.keys().isdisjoint(chosen))
        ):
            raise InfeasiblePlan("grant_all() would grant a request tokens twice in one step")
        members = batch.members
        is_few = 2 * num_decodes < len(members)
        is_compared = not is_few
        need = 0 if is_few else batch.blocks_next_step()
        left: list[RequestState] = []
        others: Collection[RequestState] = ()
        if is_few or self.preempted or chosen.keys() != members.keys():
            if is_few:
                others = decodes
                if not any([state._batch is batch for state in decodes]):
                    left, is_compared = list(members.values()), True
            else:
                # From who decoded last on: plans change few of them, and a member decodes.
                left = [state for i, state in members.items() if i not in chosen]
                need -= self._blocks_of(left)
                if num_decodes > len(members) - len(left):
                    others = [state for state in decodes if state._batch is not batch]
            for state in others:
                if state._batch is not batch and state.id not in self._requests.paused:
                    raise InfeasiblePlan(f"{state!r} cannot be scheduled: it does not decode")
            need += self._blocks_of(others)
            for state in self.preempted:
                if state.id in chosen:
                    raise InfeasiblePlan(f"{state!r} cannot be scheduled: it does not decode")
        if self._kv.grows:
            if need > self._kv.free_blocks:
                return False
            self._kv.free_blocks -= need
        if granted:
            granted.update(chosen)
        else:
            self._decodes = chosen
            if is_compared:
                self._num_compared = num_decodes
                self._left, self._joining = left, list(others)
        self.tokens_left -= tokens
        self.rows_left -= num_decodes
        return True

    def grant_again(self, but: Collection[RequestState], also: Collection[RequestState]) -> bool:
        """Schedule one token of each who decoded last, but for some, and of some more.

        Who decoded last, or has completed a prompt since, is in the `DecodeBatch`.

        Parameters
        ----------
        but : collection of RequestState
            Whom not, each of them once; who did not decode last either may be among them.
        also : collection of RequestState
            Decodes to come to them, each of them once; who decoded last may be among them.

        Returns
        -------
        bool
            False, with nothing granted, if tokens, rows or memory do not suffice for all, with
            drafts, or where somebody was preempted in this step: name them all to `grant_all`.

        Raises
        ------
        InfeasiblePlan
            If one of `also` is no running decode, or decodes were granted already.

        Notes
        -----
        The same plan as `grant_all` makes, without a look at those who go on.
        """
        if self._has_entries or self._all_decodes or self._members is not None:
            self._require_no_decodes("grant_again")
        self.plan = None
        if self._speculates or self.preempted:
            return False
        batch, kv, paused = self._batch, self._kv, self._requests.paused
        steps, size, need = batch.steps, batch.block_size, batch.blocks_next_step()
        left: list[RequestState] = []
        joining: list[RequestState] = []
        for state in but:  # with `blocks_of_all`, written out: many come and go
            if state._batch is batch:
                left.append(state)
                if not (state._computed + steps) % size:
                    need -= 1
        for state in also:
            if state._batch is not batch:
                if state.id not in paused:
                    raise InfeasiblePlan(f"{state!r} cannot be scheduled: it does not decode")
                joining.append(state)
                if not state._computed % size:
                    need += 1
        num_decodes = batch.size - len(left) + len(joining)
        if num_decodes > self.tokens_left or num_decodes > self.rows_left:
            return False
        if kv.grows:
            if need > kv.free_blocks:
                return False
            kv.free_blocks -= need
        if num_decodes:
            self._members = tuple(batch.members.values())
        if len(joining) > 1:
            joining.sort(key=seat_number)
        self._num_compared = num_decodes
        self._left, self._joining = left, joining
        self.tokens_left -= num_decodes
        self.rows_left -= num_decodes
        return True

    def _blocks_of(self, decodes: Collection[RequestState]) -> int:
        """Count the new blocks that a token of each of some decodes needs."""
        batch = self._batch
        if self._speculates:
            return sum([batch.blocks_of(state) for state in decodes])
        return batch.blocks_of_all(decodes)

    @property
    def _cuts_drafts(self) -> bool:
        """Whether the largest piece of a request may be less than its token and drafts."""
        return 0 < self._threshold <= self._config.num_speculative_tokens

    def _require_no_decodes(self, caller: str) -> None:
        self.plan = None
        granted = self._all_decodes or self._members is not None
        if granted or (self._has_entries and self._decodes):
            raise InfeasiblePlan(f"{caller}() after decodes were already granted in this step")

    def _count_preempted_decodes(self) -> int:
        away = self._requests.in_pipeline
        return sum([s.is_decoding and s not in away for s in self.preempted])

    def _decode_tokens(self) -> int:
        """Count the tokens of all decodes, with those drafted for them."""
        batch, gone = self._batch, self.preempted
        tokens = batch.tokens_next_step()
        if gone:
            tokens -= sum([state.decode_tokens for state in gone if state in batch])
        for state in self._requests.paused.values():
            if state not in gone:
                tokens += state.decode_tokens
        return tokens

    def _take_decodes(self, num_decodes: int, num_tokens: int) -> bool:
        """Take tokens and blocks for one token of every decode; False if blocks do not suffice."""
        kv, batch, gone = self._kv, self._batch, self.preempted
        if kv.grows and num_decodes:
            need = batch.blocks_next_step()
            if gone:
                need -= sum([batch.blocks_of(s) for s in gone if s in batch])
            paused: Collection[RequestState] = self._requests.paused.values()
            if paused:
                need += self._blocks_of([s for s in paused if s not in gone] if gone else paused)
            if need > kv.free_blocks:
                return False
            kv.free_blocks -= need
        self.tokens_left -= num_tokens
        self.rows_left -= num_decodes
        return True

    def _grant_in_order(self, states: Iterable[RequestState]) -> bool:
        mark, left = self._kv.mark(), (self.tokens_left, self.rows_left)
        served: list[RequestState] = []
        for state in states:
            if state in self.preempted:
                continue
            if self.tokens_left == 0 or self.rows_left == 0:
                break
            if not self.grant(state):
                self._take_back(served, mark, left)
                return False
            served.append(state)
        return True

    def _take_back(self, granted: list[RequestState], mark: Mark, left: tuple[int, int]) -> None:
        self._kv.restore(mark)
        self.tokens_left, self.rows_left = left
        for state in granted:
            self._chunks.pop(state.id, None)
            self._decodes.pop(state.id, None)
            self._trimmed.pop(state, None)

    def running(self) -> Iterator[RequestState]:
        """Iterate over the running requests, latest admission first, less those preempted.

        Those whose batch is in the pipeline are among them: they can be preempted.
        """
        requests = self._requests
        everyone: Iterable[RequestState] = reversed(requests.running.values())
        if requests.in_pipeline.size:
            both = (*requests.running.values(), *requests.in_pipeline)
            everyone = sorted(both, key=seat_number, reverse=True)
        for state in everyone:
            if state not in self.preempted:
                yield state

    def serves(self, state: RequestState) -> bool:
        """Whether the plan so far gives a request tokens, or a seat."""
        if self._members is not None:
            self._name_decodes()
        i = state.id
        return (
            i in self._decodes
            or i in self._chunks
            or i in self._admitted
            or (self._all_decodes and state.is_decoding and not self._is_away(state))
        )

    def _is_away(self, state: RequestState) -> bool:
        return state in self._requests.in_pipeline

    @property
    def has_chunks(self) -> bool:
        """Whether the plan so far computes prompt tokens."""
        return bool(self._chunks)

    def build(
        self,
        max_steps: SupportsIndex = 1,
        until_ns: SupportsIndex = FOREVER,
        finished: Finished = "leave",
        pad_finished: bool = False,
    ) -> BatchPlan:
        """Close the ledger and return the plan; see `BatchPlan` for the promise.

        Raises
        ------
        InfeasiblePlan
            If `max_steps` or `until_ns` is no whole number, `max_steps` is below one, or there is
            no such way to finish.
        """
        if not isinstance(max_steps, int) or max_steps < 1:
            max_steps = whole_number(max_steps, 1, "max_steps needs", "steps")
        if not isinstance(until_ns, int) or until_ns < -FOREVER:
            until_ns = whole_number(until_ns, -FOREVER, "until_ns needs", "nanoseconds")
        if finished not in _FINISHED:
            require_one_of(finished, _FINISHED, "finished")
        decodes: tuple[RequestState, ...] | None = None
        left: list[RequestState] | None = None
        joining: list[RequestState] | None = None
        members = self._members
        if members is not None and not self._decodes:
            left, joining = self._left, self._joining
        elif not self._all_decodes:
            if members is not None:  # others were granted a token one by one
                self._name_decodes()
                members = None
            decodes = tuple(self._decodes.values()) if self._decodes else ()
            if len(decodes) == self._num_compared and not self.preempted:  # nobody else decodes
                left, joining = self._left, self._joining
        chunks: tuple[tuple[RequestState, int], ...] = ()
        admitted: tuple[RequestState, ...] = ()
        preempted: tuple[RequestState, ...] = ()
        swapped: tuple[RequestState, ...] = ()
        rejected: tuple[tuple[RequestState, str], ...] = ()
        trimmed: tuple[tuple[RequestState, int], ...] = ()
        loading: tuple[tuple[RequestState, Parts], ...] = ()
        if self._has_entries:
            # Most plans do little of this, and `()` costs a fraction of the tuple of an empty dict.
            if self._chunks:
                chunks = tuple(self._chunks.values())
            if self._admitted:
                admitted = tuple(self._admitted.values())
            if self.preempted:
                preempted = tuple(self.preempted)
                swapped = tuple([s for s, mode in self.preempted.items() if mode == "swap"])
            if self._rejected:
                rejected = tuple(self._rejected.items())
            if self._trimmed:
                trimmed = tuple(self._trimmed.items())
            if self._loading:
                loading = tuple(self._loading.values())
        if self._speculates and (trimmed or max_steps < FOREVER):
            max_steps = 1  # a promise of some steps counts tokens, one a step
        self.plan = plan = BatchPlan(
            decodes,
            chunks,
            admitted,
            preempted,
            swapped,
            rejected,
            self._padding_tokens,
            finished,
            pad_finished,
            max_steps,
            until_ns,
            self._start_ns,
            self._list_decodes,
            trimmed,
            loading,
            left,
            joining,
            members,
        )
        return plan

    def settle(self) -> None:
        """Give back what `admit` set aside beyond the tokens granted in this step."""
        self._kv.free_blocks += self.set_aside_blocks
        for state in self._set_aside:
            if state.id in self._chunks:
                n = self._chunks[state.id][1]
                self._kv.allocate(state, n, ahead_tokens=self._ahead(state, n))

    def _decodes_in_order(self) -> tuple[RequestState, ...]:
        return tuple(s for s in self._requests.running.values() if s.is_decoding)
