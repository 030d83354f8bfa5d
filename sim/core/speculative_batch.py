"""Requests that decode with drafts, advanced together at a cost that does not grow with them."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Final

from librt.strings import BytesWriter, write_i64_le
from librt.vecs import extend, vec
from mypy_extensions import i64

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.track import SpeculatingState
from schedlab.sim.cost.shape import BatchShape, UnevenSteps
from schedlab.sim.request import RequestState

MOST_STEPS: Final = 64
"""Steps looked at, and so run, at once."""

_STEPS_KEPT: Final = 2048
"""Steps behind the next one, of which sums are forgotten once there are so many."""


class SpeculativeBatch(DecodeBatch):
    """The running decodes where each step verifies drafts, so that it may yield several tokens.

    How many is drawn by request and place in the answer (`Track`), and known when a member joins:
    it adds what its verifications yield and need to the steps in which they will take place, and
    takes away what is left of it when it leaves. So a step of all members costs a few sums. Who
    has come to the end of its track leaves before the next step.

    Attributes
    ----------
    last_tokens : bytes
        Tokens of each step of the member that left last.
    num_accepted, num_cut_short : int
        Drafted tokens that came out so far, and drafts that ended with a rejection; the second is
        counted only where `counts_cut_short` was set before anybody joined.
    """

    __slots__ = (
        "_base", "_blocks", "_context_sum", "_cut_short", "_drafts", "_fastest", "_leading",
        "_less_led", "_looked_at", "_more_trail", "_most_ahead", "_rows", "_shifts",
        "_tokens", "_trailing", "_zeros", "counts_cut_short", "last_tokens", "num_accepted",
        "num_cut_short",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.block_size)
        self.num_accepted = 0
        self.num_cut_short = 0
        self.counts_cut_short = False
        self.last_tokens = b""
        self._context_sum = 0
        # Of steps, from `_base` on: tokens that come out, blocks opened, drafts cut short.
        self._base = 0
        self._tokens: vec[i64] = vec[i64]()
        self._blocks: vec[i64] = vec[i64]()
        self._cut_short: list[int] = []
        self._zeros: vec[i64] = vec[i64]([0] * _STEPS_KEPT)
        # Members for which a 1st, 2nd, .. token is drafted in the next step, their sum, and by how
        # much they change before a step to come: seldom, since most draft the same all the time.
        self._rows = [0] * config.num_speculative_tokens
        self._drafts = 0
        self._shifts: dict[int, list[int]] = {}
        # Who may have the largest or the smallest context; see `_largest`.
        self._fastest = 1 + config.num_speculative_tokens
        self._most_ahead = config.num_lookahead_tokens
        if config.async_scheduling:
            self._most_ahead += config.num_speculative_tokens
        self._leading: dict[int, SpeculatingState] = {}
        self._trailing: dict[int, SpeculatingState] = {}
        self._looked_at = self._less_led = self._more_trail = 0
        self._make_room(0)

    # -- who is in it --------------------------------------------------------------------------

    def join(self, state: RequestState) -> None:
        """Add a request whose track is known."""
        assert isinstance(state, SpeculatingState)
        self._context_sum += state._computed
        state._stint_start = self.steps
        state._batch = self
        self.members[state.id] = state
        self.size += 1
        # Whoever is among those that cannot be the first need not be looked at; see `_largest`.
        passed = self.steps - self._looked_at
        if state._computed >= self._less_led + self._fastest * passed:
            self._leading[state.id] = state
        if state._computed <= self._more_trail + passed:
            self._trailing[state.id] = state
        self._count(state, 1)

    def leave(self, state: RequestState) -> None:
        """Take a member out; its counters become absolute again."""
        assert isinstance(state, SpeculatingState)
        self.num_departures += 1
        self.last_tokens = state.left_batch(self.steps - state._stint_start)
        self._context_sum -= state._computed
        del self.members[state.id]
        if state.id in self._leading:
            del self._leading[state.id]
        if state.id in self._trailing:
            del self._trailing[state.id]
        self.size -= 1
        self._count(state, -1)

    def _count(self, state: SpeculatingState, sign: int) -> None:
        """Count a request's verifications in, from the next step on, or out (-1)."""
        track, first = state.track, state._verification()
        assert track is not None
        bursts, drafted = track.bursts, track.drafted
        last = len(bursts) - 1
        self._draft(0, sign, drafted[min(first, last)])
        if first > last:
            return
        self._make_room(last + 1 - first)
        tokens, blocks = self._tokens, self._blocks
        at: i64 = self.steps - self._base - first
        one: i64 = sign
        i: i64 = at + first
        burst: i64
        to_come = bursts[first:] if first else bursts
        if sign > 0:
            for burst in to_come:
                tokens[i] += burst
                i += 1
        else:
            for burst in to_come:
                tokens[i] -= burst
                i += 1
        for i in reversed(track.openings):
            if i < first:
                break
            blocks[at + i] += one
        if self.counts_cut_short:
            for i in range(first, last + 1):
                self._cut_short[at + i] += sign * track.cut_short(i)
        for i in reversed(track.turns):
            if i <= first:
                break
            self._draft(i - first, -sign, drafted[i - 1])
            self._draft(i - first, sign, drafted[i])

    def _draft(self, ahead: int, sign: int, drafts: int) -> None:
        """Let one more member, or one less (-1), draft so many tokens, so many steps from now."""
        if ahead:
            step = self.steps + ahead
            rows = self._shifts.get(step)
            if rows is None:
                rows = self._shifts[step] = [0] * len(self._rows)
        else:
            rows = self._rows
            self._drafts += sign * drafts
        count: i64 = drafts
        i: i64
        for i in range(count):
            rows[i] = rows[i] + sign

    def settle(
        self, state: SpeculatingState, came: int, accepted: int, drafted: int | None
    ) -> None:
        """Say what the next verification of a member gives, which was the last of its track.

        Of an executor that verifies; before the batch advances.

        Parameters
        ----------
        state : SpeculatingState
            The member.
        came : int
            Tokens that come out.
        accepted : int
            Drafted tokens that were right.
        drafted : int or None
            Tokens drafted for the one after it; None if there is none.
        """
        track = state.track
        assert track is not None
        assert len(track.bursts) - 1 == state._verification(), "another verification is under way"
        self._count(state, -1)
        track.settle(came, accepted)
        if drafted is not None:
            track.extend(b"\1", bytes([drafted]))
        self._count(state, 1)

    # -- steps ---------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """Keep sums of so many steps from the next one on, and of `MOST_STEPS` in any case."""
        column = self.steps - self._base
        if column > _STEPS_KEPT:
            self._tokens, self._blocks = self._tokens[column:], self._blocks[column:]
            del self._cut_short[:column]
            self._base = self.steps
            column = 0
        missing = column + count + MOST_STEPS - len(self._tokens)
        while missing > 0:
            self._tokens = extend(self._tokens, self._zeros)
            self._blocks = extend(self._blocks, self._zeros)
            self._cut_short += [0] * _STEPS_KEPT
            missing -= _STEPS_KEPT

    def advance(self, num_steps: int) -> int:
        """Take steps of all members; return the tokens that came out."""
        tokens_of_steps = self._tokens
        column: i64 = self.steps - self._base
        end: i64 = column + num_steps
        tokens: i64 = 0
        i: i64
        for i in range(column, end):
            tokens += tokens_of_steps[i]
        self._context_sum += tokens
        self.num_accepted += tokens - self.size * num_steps
        if self.counts_cut_short:
            self.num_cut_short += sum(self._cut_short[column : column + num_steps])
        if self._shifts:
            self._rows = self._rows_ahead(num_steps + 1)[num_steps]
            self._drafts = sum(self._rows)
            for step in range(self.steps + 1, self.steps + num_steps + 1):
                self._shifts.pop(step, None)
        self.steps += num_steps
        if self.steps - self._base + MOST_STEPS > len(tokens_of_steps):
            self._make_room(0)
        return tokens

    def _rows_ahead(self, num_steps: int) -> list[list[int]]:
        """Count the members for which a 1st, 2nd, .. token is drafted in each of the next steps."""
        rows, found = self._rows, []
        for step in range(self.steps, self.steps + num_steps):
            shift = self._shifts.get(step)
            if shift is not None:
                rows = [count + more for count, more in zip(rows, shift, strict=True)]
            found.append(rows)
        return found

    def write_verifications(self, num_steps: int, log: BytesWriter) -> None:
        """Write `VERIFICATION_COLUMNS` of the next steps, as `RunLog` keeps them."""
        column: i64 = self.steps - self._base
        size: i64 = self.size
        tokens = self._tokens
        if self._shifts:
            for rows in self._rows_ahead(num_steps):
                write_i64_le(log, sum(rows))
                write_i64_le(log, tokens[column] - size)
                write_i64_le(log, rows[0])
                column += 1
            return
        drafts: i64 = self._drafts
        num_drafts: i64 = self._rows[0]
        end: i64 = column + num_steps
        i: i64
        for i in range(column, end):
            write_i64_le(log, drafts)
            write_i64_le(log, tokens[i] - size)
            write_i64_le(log, num_drafts)

    @property
    def rows_next_step(self) -> list[int]:
        """Members for which a 1st, 2nd, .. token is drafted in the next step."""
        return self._rows

    def drafts_alike(self) -> bool:
        """Whether as many members draft a 1st, 2nd, .. token in all steps to come."""
        return not self._shifts

    def drafting_rows(self, num_steps: int) -> list[list[int]]:
        """Count the members for which a 1st, 2nd, .. token is drafted in each of the next steps."""
        return self._rows_ahead(num_steps) if self._shifts else [self._rows] * num_steps

    def uneven(self, first: BatchShape, num_steps: int) -> UnevenSteps:
        """Return what the next steps cost by, which draft as many tokens each.

        Parameters
        ----------
        first : BatchShape
            The first of them, as it is priced (`BatchShape.verification`).
        num_steps : int
            At most `MOST_STEPS`.
        """
        column = self.steps - self._base
        return UnevenSteps(first, self._tokens[column : column + num_steps - 1], self)

    # -- contexts ------------------------------------------------------------------------------

    @property
    def context_sum_tokens(self) -> int:
        """Sum of the members' tokens in the cache."""
        return self._context_sum

    @property
    def context_max_tokens(self) -> int:
        """Largest number of cached tokens of a member, 0 if there is none."""
        return self._largest(self.steps) if self.size else 0

    @property
    def context_min_tokens(self) -> int:
        """Smallest number of cached tokens of a member, 0 if there is none."""
        return self._smallest(self.steps) if self.size else 0

    def extremes(self, num_steps: int) -> list[tuple[int, int]]:
        """Return the largest and the smallest context of a member before each of the next steps."""
        steps = range(self.steps, self.steps + num_steps)
        return [(self._largest(step), self._smallest(step)) for step in steps]

    # In a step a context grows by one token at least, and by one more than are drafted at most. So
    # who was far from the first when all were looked at cannot be the first a few steps later.

    def _largest(self, step: int) -> int:
        passed = step - self._looked_at
        others = self._less_led + self._fastest * passed  # are below that
        found = -1
        for state in self._leading.values():
            found = max(found, state.context_at(step))
        if found < others:
            self._look_at_contexts()
            found = max([state.context_at(step) for state in self._leading.values()])
        return found

    def _smallest(self, step: int) -> int:
        passed = step - self._looked_at
        others = self._more_trail + passed  # are above that
        found = others + 1
        for state in self._trailing.values():
            found = min(found, state.context_at(step))
        if found > others:
            self._look_at_contexts()
            found = min([state.context_at(step) for state in self._trailing.values()])
        return found

    def _look_at_contexts(self) -> None:
        """Find who may have the largest or the smallest context within `MOST_STEPS`."""
        members = [state for state in self.members.values() if isinstance(state, SpeculatingState)]
        contexts = [state.context_at(self.steps) for state in members]
        reach = MOST_STEPS * self._fastest
        self._looked_at = self.steps
        self._less_led = least = max(contexts) - reach
        self._more_trail = most = min(contexts) + reach
        both = list(zip(members, contexts, strict=True))
        self._leading = {state.id: state for state, context in both if context >= least}
        self._trailing = {state.id: state for state, context in both if context <= most}

    # -- needs ---------------------------------------------------------------------------------

    def blocks_of(self, state: RequestState) -> int:
        """Count the new blocks that a decode of a request needs, a member or not."""
        assert isinstance(state, SpeculatingState)
        track = state.track
        assert track is not None
        return track.openings.count(state._verification())

    def tokens_next_step(self) -> int:
        """Count the tokens that the next step of all members computes."""
        return self.size + self._drafts

    def drafts_next_step(self) -> int:
        """Count the drafted ones of them."""
        return self._drafts

    def blocks_next_step(self) -> int:
        """Count the new blocks that the next step of all members needs."""
        return self._blocks[self.steps - self._base]

    def blocks_per_step(self, k: int) -> list[int]:
        """Count the new blocks of each of the next `k` steps."""
        column, blocks = self.steps - self._base, self._blocks
        if k == 1:
            return [blocks[column]]
        return [blocks[i] for i in range(column, column + k)]

    def steps_within(self, free_blocks: int, at_most: int) -> int:
        """Return how many of the next steps `free_blocks` more blocks can carry.

        No more than `at_most`, than `MOST_STEPS`, and than compute as many tokens as the first: the
        token budget leaves the same room in each of them.
        """
        count = min(at_most, MOST_STEPS)
        if self._shifts:
            for i, rows in enumerate(self._rows_ahead(count)):
                if sum(rows) != self._drafts:
                    count = i
                    break
        most_tokens = count * self._fastest + self._most_ahead
        if free_blocks > self.size * (most_tokens // self.block_size + 1):  # which is most of them
            return count
        blocks = accumulate(self.blocks_per_step(count))
        return bisect_right(list(blocks), free_blocks)
