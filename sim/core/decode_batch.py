"""Requests that decode in lockstep, advanced together at a cost that does not grow with them."""

from collections.abc import Collection
from typing import Final

from schedlab.sim.core.plan import FOREVER
from schedlab.sim.request import RequestState

# An extreme that is to be looked for: no offset is beyond it.
_UNKNOWN_MOST: Final = FOREVER
_UNKNOWN_LEAST: Final = -FOREVER


class DecodeBatch:
    """The running decodes, on a clock of their own.

    `steps` counts the decode steps taken since the start. A member stores its counters relative
    to it (virtual time, as in processor-sharing queues), so k steps for all members are
    ``steps += k``. Contexts add up to ``offsets + size * steps``, and the members that open a
    new KV block in the next step are those of one phase, ``(steps - computed) mod block_size``.
    `num_departures` counts who has left so far.
    """

    __slots__ = (
        "_least", "_most", "_offset_sum", "_phases", "block_size", "members", "num_departures",
        "numbered_from", "size", "steps",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.numbered_from = 0  # what the log calls its first step
        self.steps = 0
        self.size = 0
        self.num_departures = 0
        self.members: dict[int, RequestState] = {}
        self._offset_sum = 0
        self._phases = [0] * block_size
        # Offsets of the extreme contexts; unknown when one that had it has left.
        self._most = -FOREVER
        self._least = FOREVER

    def __contains__(self, state: RequestState) -> bool:
        return state._batch is self

    def join(self, state: RequestState) -> None:
        """Add a request whose next token is a decode."""
        # As `join_all`, written out: every request joins once at least, most of them alone.
        steps = self.steps
        offset = state._computed - steps
        state._computed = offset
        state._generated -= steps
        state._stint_start = steps
        state._batch = self
        if offset > self._most:
            self._most = offset
        if offset < self._least:
            self._least = offset
        self.members[state.id] = state
        self._offset_sum += offset
        self._phases[-offset % self.block_size] += 1
        self.size = len(self.members)

    def leave(self, state: RequestState) -> None:
        """Take a member out; its counters become absolute again."""
        self.num_departures += 1
        if self.size == 1:
            self._leave_empty()
            return
        # As `leave_all`, written out.
        offset, steps = state._computed, self.steps
        state._computed = offset + steps
        state._generated += steps
        state._batch = None
        del self.members[state.id]
        if offset == self._most:
            self._most = _UNKNOWN_MOST
        if offset == self._least:
            self._least = _UNKNOWN_LEAST
        self._offset_sum -= offset
        self._phases[-offset % self.block_size] -= 1
        self.size = len(self.members)

    def join_all(self, states: Collection[RequestState]) -> None:
        """Add requests whose next token is a decode; without drafts."""
        steps, members, phases, size = self.steps, self.members, self._phases, self.block_size
        most, least, added = self._most, self._least, 0
        for state in states:
            offset = state._computed - steps
            state._computed = offset
            state._generated -= steps
            state._stint_start = steps
            state._batch = self
            if offset > most:
                most = offset
            if offset < least:
                least = offset
            members[state.id] = state
            added += offset
            phases[-offset % size] += 1
        self._most, self._least = most, least
        self._offset_sum += added
        self.size = len(members)

    def leave_all(self, states: Collection[RequestState]) -> None:
        """Take members out, each once; their counters become absolute again. Without drafts."""
        self.num_departures += len(states)
        if len(states) == self.size:
            self._leave_empty()
            return
        steps, members, phases, size = self.steps, self.members, self._phases, self.block_size
        most, least, removed = self._most, self._least, 0
        for state in states:
            offset = state._computed
            state._computed = offset + steps
            state._generated += steps
            state._batch = None
            del members[state.id]
            if offset == most:
                most = _UNKNOWN_MOST
            if offset == least:
                least = _UNKNOWN_LEAST
            removed += offset
            phases[-offset % size] -= 1
        self._most, self._least = most, least
        self._offset_sum -= removed
        self.size = len(members)

    def _leave_empty(self) -> None:
        """Take all members out: what is counted of them begins anew."""
        steps = self.steps
        for state in self.members.values():
            state._computed += steps
            state._generated += steps
            state._batch = None
        self.members.clear()
        self._most, self._least = -FOREVER, FOREVER
        self._offset_sum = self.size = 0
        self._phases = [0] * self.block_size

    @property
    def context_sum_tokens(self) -> int:
        """Sum of the members' tokens in the cache."""
        return self._offset_sum + self.size * self.steps

    @property
    def context_max_tokens(self) -> int:
        """Largest number of cached tokens of a member, 0 if there is none."""
        if not self.size:
            return 0
        if self._most == _UNKNOWN_MOST:
            most = -FOREVER
            for state in self.members.values():
                if state._computed > most:
                    most = state._computed
            self._most = most
        return self._most + self.steps

    @property
    def context_min_tokens(self) -> int:
        """Smallest number of cached tokens of a member, 0 if there is none."""
        if not self.size:
            return 0
        if self._least == _UNKNOWN_LEAST:
            least = FOREVER
            for state in self.members.values():
                if state._computed < least:
                    least = state._computed
            self._least = least
        return self._least + self.steps

    def advance(self, num_steps: int) -> int:
        """Take steps of all members; return the tokens that came out."""
        self.steps += num_steps
        return self.size * num_steps

    def blocks_of(self, state: RequestState) -> int:
        """Count the new blocks that a decode of a request needs, a member or not."""
        return int(state.num_computed_tokens % self.block_size == 0)

    def blocks_of_all(self, states: Collection[RequestState]) -> int:
        """Count the new blocks that decodes of requests need, members or not."""
        steps, size, need = self.steps, self.block_size, 0
        for state in states:
            computed = state._computed if state._batch is None else state._computed + steps
            if computed % size == 0:
                need += 1
        return need

    def tokens_next_step(self) -> int:
        """Count the tokens that the next step of all members computes."""
        return self.size

    def drafts_next_step(self) -> int:
        """Count the drafted ones of them, none here."""
        return 0

    def blocks_next_step(self) -> int:
        """Count the new blocks that the next step of all members needs."""
        return self._phases[self.steps % self.block_size]

    def blocks_per_step(self, k: int) -> list[int]:
        """Count the new blocks of each of the next `k` steps."""
        if k == 1:
            return [self._phases[self.steps % self.block_size]]
        start = self.steps % self.block_size
        if start + k <= self.block_size:
            return self._phases[start : start + k]
        cycle = self._phases[start:] + self._phases[:start]
        return (cycle * (k // self.block_size + 1))[:k]

    def steps_within(self, free_blocks: int, at_most: int) -> int:
        """Return how many of the next `at_most` steps `free_blocks` more blocks can carry."""
        # A full cycle of block_size steps opens exactly one block per member.
        cycles = free_blocks // self.size
        if cycles > at_most // self.block_size:
            return at_most
        left = free_blocks - cycles * self.size
        done = cycles * self.block_size
        phase = self.steps % self.block_size
        for num_blocks in self._phases[phase:] + self._phases[:phase]:
            if num_blocks > left:
                break
            left -= num_blocks
            done += 1
        return min(done, at_most)
