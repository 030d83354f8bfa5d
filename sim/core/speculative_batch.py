"""Requests that decode with drafts, advanced together at a cost that does not grow with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from schedlab.sim.config import EngineConfig
from schedlab.sim.core.decode_batch import DecodeBatch
from schedlab.sim.core.track import SpeculatingState
from schedlab.sim.request import RequestState

MOST_STEPS = 64
"""Steps looked at, and so run, at once."""


class Verifications(NamedTuple):
    """What some successive steps of the batch are, a value a step."""

    tokens: list[int]
    """Tokens that come out."""
    drafted: list[int]
    """Tokens drafted."""
    num_drafts: list[int]
    """Requests with drafts."""


class Verification(NamedTuple):
    """What one of its next steps costs by."""

    drafted: int
    """Tokens drafted."""
    longest: int
    """Largest context of a member before it; 0 for the first of the steps, as the two below."""
    shortest: int
    """Smallest one."""
    context_sum: int
    """Sum of them."""
    rows: list[int]
    """Members for which a 1st, 2nd, .. token is drafted."""


class SpeculativeBatch(DecodeBatch):
    """The running decodes where each step verifies drafts, so that it may yield several tokens.

    How many is drawn by request and place in the answer (`Track`), and known when a member joins:
    it adds what its verifications yield and need to the steps in which they will take place, and
    takes away what is left of it when it leaves. So a step of all members costs a column of sums.

    Attributes
    ----------
    last_tokens : list of int
        Tokens of each step of the member that left last.
    num_accepted, num_cut_short : int
        Drafted tokens that came out so far, and drafts that ended with a rejection.
    """

    __slots__ = (
        "_ahead", "_base", "_config", "_context_sum", "_contexts_at", "_joined", "_of_members",
        "last_tokens", "num_accepted", "num_cut_short",
    )  # fmt: skip

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.block_size)
        most = config.num_speculative_tokens
        self._config = config
        self.num_accepted = 0
        self.num_cut_short = 0
        self.last_tokens: list[int] = []
        self._context_sum = 0
        self._joined = 0
        self._contexts_at = -1, 0
        self._of_members: list[int] = []
        self._ahead: Any = np.zeros((4 + most, 1024), dtype=np.int64)
        self._base = 0  # the step of its first column

    def join(self, state: RequestState) -> None:
        """Add a request whose track is known."""
        assert isinstance(state, SpeculatingState)
        self._context_sum += state._computed
        state._stint_start = self.steps
        state._batch = self
        self.members[state.id] = state
        self.size += 1
        self._joined += 1
        self._add(state, 1)

    def leave(self, state: RequestState) -> None:
        """Take a member out; its counters become absolute again."""
        assert isinstance(state, SpeculatingState)
        self.last_tokens = state.left_batch(self.steps - state._stint_start)
        self._context_sum -= state._computed
        del self.members[state.id]
        self.size -= 1
        self._joined += 1
        self._add(state, -1)

    def _add(self, state: SpeculatingState, sign: int) -> None:
        """Count a request's verifications in, from the next step on, or out (-1)."""
        track = state.track
        assert track is not None
        count = len(track.drafted) - track.first
        if count:
            column = self._column(count)
            self._ahead[:, column : column + count] += sign * track.ahead[:, track.first :]

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
        i, column = len(track.drafted) - 1, self._column(2)
        assert i == state._verification(), "another verification is under way"
        cut_short = int(accepted < track.drafted[i])
        context = state.num_computed_tokens + came
        track.came[-1] += came - 1
        track.ahead[0, i] = came
        track.ahead[2, i] = cut_short
        self._ahead[0, column] += came - 1
        self._ahead[2, column] += cut_short
        if drafted is not None:
            track.append(self._config, context, drafted)
            self._ahead[:, column + 1] += track.ahead[:, -1]

    def _column(self, count: int) -> int:
        """Return the column of the next step, with room for `count` steps from there on."""
        column = self.steps - self._base
        if column + count > self._ahead.shape[1]:
            kept = self._ahead[:, column:]
            width = max(2 * (kept.shape[1] + count), 1024)
            self._ahead = np.zeros((len(kept), width), dtype=np.int64)
            self._ahead[:, : kept.shape[1]] = kept
            self._base = self.steps
            column = 0
        return column

    def advance(self, num_steps: int) -> int:
        """Take steps of all members; return the tokens that came out."""
        column = self._column(num_steps)
        ahead = self._ahead[:3, column : column + num_steps]
        tokens, _, cut_short = (ahead[:, 0] if num_steps == 1 else ahead.sum(axis=1)).tolist()
        self._context_sum += tokens
        self.num_accepted += tokens - self.size * num_steps
        self.num_cut_short += cut_short
        self.steps += num_steps
        return int(tokens)

    def verifications(self, num_steps: int) -> Verifications:
        """Return what the next steps are; `num_steps` is at most `MOST_STEPS`."""
        column = self._column(num_steps)
        tokens, _, _, drafted, num_drafts = self._ahead[:5, column : column + num_steps].tolist()
        return Verifications(tokens, drafted, num_drafts)

    def ahead(self, num_steps: int) -> list[Verification]:
        """Return what each of the next steps costs by; `num_steps` is at most `MOST_STEPS`."""
        column = self._column(num_steps)
        table: list[list[int]] = self._ahead[:, column : column + num_steps].T.tolist()
        found: list[Verification] = []
        if num_steps > 1:
            extremes = self._extremes(num_steps)
        context_sum = self._context_sum
        for i, step in enumerate(table):
            longest, shortest = extremes[i] if i else (0, 0)
            found.append(
                Verification(step[3], longest, shortest, context_sum if i else 0, step[4:])
            )
            context_sum += step[0]
        return found

    def _extremes(self, num_steps: int) -> list[tuple[int, int]]:
        """Return the largest and the smallest context of a member before each of the next steps.

        In a step a context grows by one token at least, and by one more than are drafted at most.
        So who is further behind than that can catch up is not looked at.
        """
        members, contexts = self.speculating(), self._contexts()
        catches_up = (num_steps - 1) * self._config.num_speculative_tokens
        least, most = max(contexts) - catches_up, min(contexts) + catches_up
        ahead = [
            s.contexts(num_steps) for s, c in zip(members, contexts, strict=True) if c >= least
        ]
        behind = [
            s.contexts(num_steps) for s, c in zip(members, contexts, strict=True) if c <= most
        ]
        return [
            (max(those), min(these))
            for those, these in zip(
                zip(*ahead, strict=True), zip(*behind, strict=True), strict=True
            )
        ]

    def speculating(self) -> list[SpeculatingState]:
        """List the members."""
        return [state for state in self.members.values() if isinstance(state, SpeculatingState)]

    def drafting_rows(self) -> list[int]:
        """Count the members for which a 1st, 2nd, .. token is drafted in the next step."""
        rows: list[int] = self._ahead[4:, self._column(1)].tolist()
        return rows

    @property
    def context_sum_tokens(self) -> int:
        """Sum of the members' tokens in the cache."""
        return self._context_sum

    @property
    def context_max_tokens(self) -> int:
        """Largest number of cached tokens of a member, 0 if there is none."""
        return max(self._contexts(), default=0)

    @property
    def context_min_tokens(self) -> int:
        """Smallest number of cached tokens of a member, 0 if there is none."""
        return min(self._contexts(), default=0)

    def _contexts(self) -> list[int]:
        """List the members' tokens in the cache; asked for twice a step, and the same then."""
        seen = self.steps, self._joined
        if self._contexts_at != seen:
            self._contexts_at = seen
            self._of_members = [s.num_computed_tokens for s in self.members.values()]
        return self._of_members

    def blocks_of(self, state: RequestState) -> int:
        """Count the new blocks that a decode of a request needs, a member or not."""
        assert isinstance(state, SpeculatingState)
        track = state.track
        assert track is not None
        return int(track.ahead[1, state._verification()])

    def tokens_next_step(self) -> int:
        """Count the tokens that the next step of all members computes."""
        return self.size + self.drafts_next_step()

    def drafts_next_step(self) -> int:
        """Count the drafted ones of them."""
        return int(self._ahead[3, self._column(1)])

    def blocks_next_step(self) -> int:
        """Count the new blocks that the next step of all members needs."""
        return int(self._ahead[1, self._column(1)])

    def blocks_per_step(self, k: int) -> list[int]:
        """Count the new blocks of each of the next `k` steps."""
        column = self._column(k)
        blocks: list[int] = self._ahead[1, column : column + k].tolist()
        return blocks

    def steps_within(self, free_blocks: int, at_most: int) -> int:
        """Return how many of the next steps `free_blocks` more blocks can carry.

        No more than `at_most`, than `MOST_STEPS`, and than compute as many tokens as the first: the
        token budget leaves the same room in each of them.
        """
        count = min(at_most, MOST_STEPS)
        column = self._column(count)
        ahead = self._ahead[:, column : column + count]
        drafted = ahead[3]
        others = drafted != drafted[0]
        alike = int(others.argmax()) or count  # the first one is no other
        return min(int(ahead[1].cumsum().searchsorted(free_blocks, side="right")), alike)
