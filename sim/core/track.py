"""What comes of a request's drafts: its verifications to come, one by one, and its state then."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Request, RequestState


class Outcome(Protocol):
    """What becomes of the drafts of one request."""

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft the answer from a place on, and verify that.

        Parameters
        ----------
        place : int
            Tokens of the answer that are there.
        most : int
            Most tokens to draft, >= 0.

        Returns
        -------
        drafted, accepted : int
            Tokens drafted, and how many of the first of them are those that the model generates.
        """

    def verify_on(self, place: int, most: int, stop: int) -> tuple[list[int], list[int]]:
        """Verify again and again, until a place is reached.

        Parameters
        ----------
        place, most : int
            As for the first of them; every one drafts so many tokens at most.
        stop : int
            None begins there or behind.

        Returns
        -------
        places, drafted : list of int
            Tokens of the answer that are there after each of them, and tokens that it drafted.
        """


def verify_one_by_one(
    outcome: Outcome, place: int, most: int, stop: int
) -> tuple[list[int], list[int]]:
    """Return what `Outcome.verify_on` does, by `Outcome.verify`."""
    places: list[int] = []
    drafted: list[int] = []
    while place < stop:
        found, accepted = outcome.verify(place, most)
        place += accepted + 1
        places.append(place)
        drafted.append(found)
    return places, drafted


class Track:
    """The verifications of a request, from where it stands to the end of its answer.

    Attributes
    ----------
    first : int
        The next one; the others are counted from the same place, 0-based.
    came : list of int
        Tokens that have come out before each of them, and after the last.
    held : list of int
        Tokens that its KV blocks were allocated for before each of them, and after the last: its
        context, and slots of drafts that were rejected.
    drafted : list of int
        Tokens drafted for each of them.
    ahead : ndarray of int64, shape (4 + num_speculative_tokens, len(drafted))
        What each adds to a step: tokens that come out, KV blocks opened, drafts cut short by a
        rejection, tokens drafted, and, from row 4 on, verifications of at least 1, 2, .. of them.
    """

    __slots__ = ("ahead", "came", "drafted", "first", "held")

    def __init__(
        self,
        came: list[int],
        held: list[int],
        drafted: list[int],
        ahead: Any,  # noqa: ANN401
    ) -> None:
        self.first = 0
        self.came = came
        self.held = held
        self.drafted = drafted
        self.ahead = ahead

    def append(self, config: EngineConfig, context_tokens: int, drafted: int) -> None:
        """Add a verification of so many drafted tokens; until told better, one token comes out.

        Parameters
        ----------
        config : EngineConfig
            The limits.
        context_tokens : int
            Tokens in the cache before it.
        drafted : int
            Tokens drafted for it.
        """
        size, held = config.block_size, self.held[-1]
        end = context_tokens + 1 + drafted
        holds = max(held, end + slots_ahead(config, end))
        column: Any = np.zeros((4 + config.num_speculative_tokens, 1), dtype=np.int64)
        column[0] = 1
        column[1] = -(-holds // size) + (-held // size)
        column[3] = drafted
        column[4 : 4 + drafted] = 1
        self.came.append(self.came[-1] + 1)
        self.held.append(holds)
        self.drafted.append(drafted)
        self.ahead = np.concatenate((self.ahead, column), axis=1)


class SpeculatingState(RequestState):
    """A request with drafts; while it decodes with the others, its counters are those at joining.

    Attributes
    ----------
    drafts : int
        Tokens to draft for each verification.
    draft_once : int
        Tokens to draft for the next one only; -1 = as for all.
    track : Track or None
        Its verifications; None before its first token, and while it lacks its KV.
    """

    __slots__ = ("_fresh", "_spare", "draft_once", "drafts", "track")

    def __init__(self, request: Request, drafts: int) -> None:
        super().__init__(request)
        self.drafts = drafts
        self.draft_once = -1
        self.track: Track | None = None
        self._spare = 0
        self._fresh = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache, those of rejected drafts not counted."""
        return self._computed if self._batch is None else self._computed + self._came()

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._generated if self._batch is None else self._generated + self._came()

    @property
    def spare_tokens(self) -> int:
        """Slots beyond its context that its blocks were allocated for: of rejected drafts."""
        if self._batch is None:
            return self._spare
        track = self.track
        assert track is not None
        return track.held[self._verification()] - self._computed - self._came()

    @property
    def fresh_tokens(self) -> int:
        """Drafted tokens that its last verification accepted.

        vLLM names blocks when it schedules, up to the tokens that are known then: the one to
        compute, and not those drafted.
        """
        if self._batch is None:
            return self._fresh
        track, i = self.track, self._verification()
        assert track is not None
        return track.came[i] - track.came[i - 1] - 1 if i > track.first else self._fresh

    @property
    def decode_tokens(self) -> int:
        """Tokens that it computes when it decodes next: one, and those drafted."""
        track = self.track
        return 1 if track is None else 1 + track.drafted[self._verification()]

    def _verification(self) -> int:
        track, batch = self.track, self._batch
        assert track is not None
        return track.first if batch is None else track.first + batch.steps - self._stint_start

    def _came(self) -> int:
        track = self.track
        assert track is not None
        return track.came[self._verification()] - track.came[track.first]

    def contexts(self, num_steps: int) -> list[int]:
        """Return the context before each of the next steps; at the end of the track the last."""
        track = self.track
        assert track is not None
        start = self._verification()
        base = self._computed - track.came[track.first]
        came = [base + tokens for tokens in track.came[start : start + num_steps]]
        return came + came[-1:] * (num_steps - len(came))

    def left_batch(self, steps: int) -> list[int]:
        """Make the counters absolute after some steps of a batch; return the tokens of each."""
        track = self.track
        assert track is not None
        first, last = track.first, track.first + steps
        came = track.came[last] - track.came[first]
        if steps:
            self._fresh = track.came[last] - track.came[last - 1] - 1
        self._computed += came
        self._generated += came
        self._spare = track.held[last] - self._computed
        self._batch = None
        track.first = last
        return [after - before for before, after in pairwise(track.came[first : last + 1])]

    def computed(self, num_tokens: int, ahead_tokens: int) -> None:
        """Count tokens of its prompt as computed, and so many slots behind them as held."""
        self._computed += num_tokens
        self._spare = max(self._spare - num_tokens, ahead_tokens)
        self._fresh = 0

    def lost_memory(self) -> None:
        """Forget what it held: its KV is recomputed, or comes back from the host."""
        self._spare = 0
        self._fresh = 0
        self.track = None


def slots_ahead(config: EngineConfig, end_tokens: int) -> int:
    """Count the KV slots that a request is given beyond what a step computes, up to `end_tokens`.

    For drafts that are made with a cache of their own (vLLM's lookahead), whether it decodes or is
    in its prompt; none beyond the longest sequence.
    """
    return min(config.num_lookahead_tokens, config.max_model_len - end_tokens)


def most_drafts(config: EngineConfig, state: SpeculatingState, context_tokens: int) -> int:
    """Return how many tokens may be drafted for a verification with so many in the cache.

    As in vLLM, drafts may reach beyond the end of an answer, but not beyond `max_model_len`.
    """
    most = state.drafts if state.draft_once < 0 else state.draft_once
    return max(0, min(most, config.max_model_len - 2 - context_tokens))


def one_ahead(config: EngineConfig, state: SpeculatingState, drafted: int) -> Track:
    """Return a track of one verification, of a request that is in no batch.

    For drafts of which nobody knows what becomes of them until they are verified; see
    `SpeculativeBatch.settle`.
    """
    context = state.num_computed_tokens
    nothing: Any = np.zeros((4 + config.num_speculative_tokens, 0), dtype=np.int64)
    track = Track([0], [context + state.spare_tokens], [], nothing)
    track.append(config, context, drafted)
    return track


def look_ahead(
    config: EngineConfig, state: SpeculatingState, outcome: Outcome, length: int
) -> Track:
    """Work out the verifications of a request that is in no batch, up to the end of its answer.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    state : SpeculatingState
        Past its prompt. `draft_once` is spent.
    outcome : Outcome
        What becomes of its drafts.
    length : int
        Tokens that it will have generated at its end.

    Notes
    -----
    As in vLLM, drafts may reach beyond the end of the answer, but not beyond `max_model_len`; what
    comes out is cut off at the end.
    """
    place, context = state.num_output_tokens, state.num_computed_tokens
    longest = config.max_model_len - 2 - context + place  # for how many tokens there is room
    places, drafted = [place], []
    once, most = state.draft_once, state.drafts
    state.draft_once = -1
    while places[-1] < length:
        at = places[-1]
        wanted = most if once < 0 else once
        if once < 0 and at + most <= longest:
            more, drafts = outcome.verify_on(at, most, min(length, longest - most + 1))
            places += more
            drafted += drafts
        else:
            found, accepted = outcome.verify(at, max(0, min(wanted, longest - at)))
            places.append(at + accepted + 1)
            drafted.append(found)
        once = -1
    came: Any = np.array(places, dtype=np.int64) - place
    ahead: Any = np.zeros((4 + config.num_speculative_tokens, len(drafted)), dtype=np.int64)
    ahead[3] = drafted
    np.less_equal(came[1:] - came[:-1], ahead[3], out=ahead[2], casting="unsafe")
    if drafted and places[-1] > length:  # what comes out is cut off at the end
        came[-1] = length - place
    held = np.empty_like(came)
    held[0] = context + state.spare_tokens
    ends = came[:-1] + ahead[3] + (context + 1 + config.num_lookahead_tokens)
    np.minimum(ends, config.max_model_len, out=held[1:])  # as `slots_ahead` counts them
    np.maximum.accumulate(held, out=held)
    blocks = -(-held // config.block_size)
    np.subtract(came[1:], came[:-1], out=ahead[0])
    np.subtract(blocks[1:], blocks[:-1], out=ahead[1])
    for row in range(config.num_speculative_tokens):
        np.greater(ahead[3], row, out=ahead[4 + row], casting="unsafe")
    return Track(came.tolist(), held.tolist(), drafted, ahead)
