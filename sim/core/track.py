"""What comes of a request's drafts: its verifications to come, one by one, and its state then."""

from __future__ import annotations

from typing import Protocol

from librt.strings import BytesWriter
from mypy_extensions import i64

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

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Verify again and again, until a place is reached.

        Parameters
        ----------
        place, most : int
            As for the first of them; every one drafts so many tokens at most.
        stop : int
            None begins there or behind.

        Returns
        -------
        bursts, drafted : bytes
            Tokens that come out of each of them, and tokens that it drafted.
        """


def verify_one_by_one(outcome: Outcome, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
    """Return what `Outcome.verify_on` does, by `Outcome.verify`."""
    bursts, drafted = BytesWriter(), BytesWriter()
    while place < stop:
        found, accepted = outcome.verify(place, most)
        place += accepted + 1
        bursts.append(accepted + 1)
        drafted.append(found)
    return bursts.getvalue(), drafted.getvalue()


def with_last(bursts: bytes, tokens: int) -> bytes:
    """Return bursts of which the last one has so many tokens."""
    changed = BytesWriter()
    changed.write(bursts)
    changed[-1] = tokens
    return changed.getvalue()


class Track:
    """The verifications of a request, from where it stands to the end of its answer.

    Parameters
    ----------
    config : EngineConfig
        The limits.
    context_tokens, spare_tokens : int
        Tokens in the cache at its beginning, and slots held beyond them.
    unresolved_tokens : int
        Slots beyond them that the step under way may fill for all that is known when the first one
        is planned: of drafts that will be rejected. An engine that plans ahead puts what it plans
        behind these.

    Attributes
    ----------
    first, passed_tokens : int
        The next one, and the tokens that have come out before it; the others are counted from the
        same place, 0-based.
    bursts, drafted : bytes
        Tokens that come out of each of them, and tokens drafted for it: a byte each, since there
        are many.
    cut_off : int
        Tokens that the last one would yield beyond the end of the answer.
    openings : list of int
        For every KV block that is opened, the one that opens it: ascending, and twice in it where
        two blocks are.
    turns : list of int
        Those that draft another number than the one before.
    plans_ahead : bool
        Whether each is planned while the one before it runs.
    """

    __slots__ = (
        "_capacity", "_counted", "_counted_tokens", "_least_held", "_longest", "_num_tokens",
        "_slots", "_unresolved", "_window", "block_size", "bursts", "cut_off", "drafted", "first",
        "openings", "passed_tokens", "plans_ahead", "turns",
    )  # fmt: skip

    def __init__(
        self,
        config: EngineConfig,
        context_tokens: int,
        spare_tokens: int,
        unresolved_tokens: int = 0,
    ) -> None:
        size = config.block_size
        self.first = 0
        self.passed_tokens = 0
        self.bursts = b""
        self.drafted = b""
        self.cut_off = 0
        self.openings: list[int] = []
        self.turns: list[int] = []
        self.block_size = size
        self._longest = config.max_model_len
        self.plans_ahead = config.async_scheduling
        self._unresolved = unresolved_tokens
        self._window = config.num_speculative_tokens * (2 if self.plans_ahead else 1)
        # A verification is given slots up to here, beyond what has come out and what is drafted.
        self._slots = context_tokens + 1 + config.num_lookahead_tokens
        self._least_held = context_tokens + spare_tokens
        self._capacity = -(-self._least_held // size) * size
        self._num_tokens = 0
        # What was asked for last, since the next question is mostly about what follows.
        self._counted = 0
        self._counted_tokens = 0

    def extend(self, bursts: bytes, drafted: bytes) -> None:
        """Add verifications: tokens that come out of them, and tokens drafted."""
        if drafted == drafted[:1] * len(drafted):
            self._extend_alike(bursts, drafted)
        else:
            for i in range(len(drafted)):
                self._extend_alike(bursts[i : i + 1], drafted[i : i + 1])

    def _extend_alike(self, bursts: bytes, drafted: bytes) -> None:
        """Add verifications for which as many tokens are drafted each, at least one of them."""
        first = len(self.bursts)
        if first and drafted[0] != self.drafted[-1]:
            self.turns.append(first)
        if self.plans_ahead:
            self._open_ahead(bursts, drafted[0])
        else:
            after: i64 = self._num_tokens
            ahead: i64 = drafted[0] + self._slots
            capacity: i64 = self._capacity
            longest: i64 = self._longest
            fits = capacity - ahead
            place: i64 = first
            burst: i64
            for burst in bursts:
                if after > fits:
                    end: i64 = after + ahead
                    if end > longest:
                        end = longest
                    while end > capacity:
                        self.openings.append(place)
                        capacity += self.block_size
                    fits = capacity - ahead
                after += burst
                place += 1
            self._num_tokens = after
            self._capacity = capacity
        if first:
            bursts, drafted = self.bursts + bursts, self.drafted + drafted
        self.bursts, self.drafted = bursts, drafted

    def _open_ahead(self, bursts: bytes, drafts: i64) -> None:
        """Note what some verifications open, each planned as if all drafts before it were right."""
        after: i64 = self._num_tokens
        place: i64 = len(self.bursts)
        start: i64 = after + self.unresolved_before(place)
        ahead: i64 = drafts + self._slots
        capacity: i64 = self._capacity
        burst: i64
        for burst in bursts:
            end = min(start + ahead, self._longest)
            while end > capacity:
                self.openings.append(place)
                capacity += self.block_size
            start = after + drafts + 1
            after += burst
            place += 1
        self._num_tokens = after
        self._capacity = capacity

    def unresolved_before(self, i: int) -> int:
        """Count the drafts of the one before a verification that do not come out.

        Where that is under way when this one is planned: 0 if the engine does not plan ahead.
        """
        if not self.plans_ahead:
            return 0
        if not i:
            return self._unresolved
        return self.drafted[i - 1] + 1 - self.bursts[i - 1]

    @property
    def num_tokens(self) -> int:
        """Tokens that come out of all of them."""
        return self._num_tokens

    def cut(self, num_tokens: int) -> None:
        """Let so many tokens less come out of the last one, which the answer does not need."""
        self.cut_off = num_tokens
        self._set_last(self.bursts[-1] - num_tokens)

    def settle(self, came: int, accepted: int) -> None:
        """Say what the last verification gives: tokens that come out, and drafted ones accepted."""
        self._set_last(came)
        self.cut_off = accepted + 1 - came

    def _set_last(self, tokens: int) -> None:
        """Let another number of tokens come out of the last one."""
        self._num_tokens += tokens - self.bursts[-1]
        self.bursts = with_last(self.bursts, tokens)

    def tokens_before(self, i: int) -> int:
        """Count the tokens that have come out before a verification, or after the last."""
        bursts = self.bursts
        if i == len(bursts):
            return self._num_tokens
        counted: i64 = self._counted
        asked: i64 = i
        tokens: i64 = self._counted_tokens
        if asked == counted:
            return tokens
        j: i64
        if asked > counted:
            tokens += sum(bursts[counted:asked])
        else:
            for j in range(asked, counted):
                tokens -= bursts[j]
        self._counted, self._counted_tokens = asked, tokens
        return tokens

    def held(self, i: int) -> int:
        """Count the tokens that its blocks were allocated for before a verification.

        Its context, slots of drafts that were rejected, and slots for a drafter's cache. Who
        drafted longer ago than so many verifications has passed the end of that draft.
        """
        bursts, drafted = self.bursts, self.drafted
        most: i64 = self._least_held
        came: i64 = self.tokens_before(i)
        slots: i64 = self._slots
        longest: i64 = self._longest
        plans_ahead = self.plans_ahead
        before: i64 = i
        j: i64
        for j in range(before - 1, max(i - 2 - self._window, -1), -1):
            came -= bursts[j]
            end: i64 = came + drafted[j] + slots
            if plans_ahead:
                end += self.unresolved_before(j)
            if end > most:
                most = end if end < longest else longest
        return most

    def cut_short(self, i: int) -> bool:
        """Whether a rejection ended the draft of a verification."""
        beyond = self.cut_off if i == len(self.bursts) - 1 else 0
        return self.bursts[i] + beyond <= self.drafted[i]


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

    __slots__ = (
        "_fresh", "_in_flight", "_names_accepted", "_spare", "_unresolved", "_was_blind",
        "draft_once", "drafts", "track",
    )  # fmt: skip

    def __init__(self, request: Request, drafts: int, names_accepted: bool = False) -> None:
        super().__init__(request)
        self._names_accepted = names_accepted
        self.drafts = drafts
        self.draft_once = -1
        self.track: Track | None = None
        self._spare = 0
        self._fresh = 0
        self._unresolved = 0
        self._in_flight = False
        self._was_blind = False

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
        return track.held(self._verification()) - self._computed - self._came()

    @property
    def fresh_tokens(self) -> int:
        """Drafted tokens that its last verification accepted, if that alone names no block.

        vLLM names blocks when it schedules, up to the tokens that are known then: the one to
        compute, and not those drafted. From 0.33 on it also does when it has verified them.
        """
        if self._names_accepted:
            return 0
        if self._batch is None:
            return self._fresh
        track, i = self.track, self._verification()
        assert track is not None
        return track.bursts[i - 1] - 1 if i > track.first else self._fresh

    @property
    def unresolved_tokens(self) -> int:
        """Slots that its next verification leaves to the one under way when it is planned."""
        if self._batch is None:
            return self._unresolved
        track = self.track
        assert track is not None
        return track.unresolved_before(self._verification())

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
        return track.tokens_before(self._verification()) - track.passed_tokens

    def context_at(self, step: int) -> int:
        """Return its tokens in the cache at a step of its batch, before the end of its track."""
        track = self.track
        assert track is not None
        came = track.tokens_before(track.first + step - self._stint_start)
        return self._computed + came - track.passed_tokens

    def left_batch(self, steps: int) -> bytes:
        """Make the counters absolute after some steps of a batch; return the tokens of each."""
        track = self.track
        assert track is not None
        first, last = track.first, track.first + steps
        came = track.tokens_before(last) - track.passed_tokens
        if steps:
            self._fresh = track.bursts[last - 1] - 1
        if track.plans_ahead:
            if steps:
                self._was_blind = self._is_blind(steps)
                self._in_flight = True
            elif self._entry_ns >= 0:  # the end of its prompt is under way
                self._was_blind = False
                self._in_flight = True
            self._unresolved = track.unresolved_before(last)
        self._computed += came
        self._generated += came
        self._spare = track.held(last) - self._computed
        self._batch = None
        track.first = last
        track.passed_tokens += came
        return track.bursts[first:last]

    def computed(self, num_tokens: int, ahead_tokens: int) -> None:
        """Count tokens of its prompt as computed, and so many slots behind them as held."""
        self._computed += num_tokens
        self._spare = max(self._spare - num_tokens, ahead_tokens)
        self.resolve()

    def resolve(self) -> None:
        """Learn that nothing of it is under way, or no draft: what it has computed is known."""
        self._fresh = 0
        self._unresolved = 0
        self._in_flight = False

    def _is_blind(self, steps: int) -> bool:
        """Whether the last of so many steps of its batch was planned while one of it ran."""
        return steps > 1 or self._in_flight or self._entry_ns >= 0

    def known_ahead(self, is_granted: bool, now_ns: int) -> int:
        """Count its tokens whose content an engine that plans ahead knows, beyond those computed.

        Less than 0 if it does not know all of these. vLLM names blocks up to there: when it
        schedules a request, and when it learns what came out of the step before the one under way.

        Parameters
        ----------
        is_granted : bool
            Whether the plan that is being made computes its next token.
        now_ns : int
            The time of that plan.
        """
        if self._entry_ns == now_ns:  # the step under way computes the end of its prompt
            return 0
        batch = self._batch
        steps = 0 if batch is None else batch.steps - self._stint_start
        if not (steps or self._in_flight):
            return int(is_granted)
        blind = self._is_blind(steps) if steps else self._was_blind
        return -self.fresh_tokens - int(blind and not is_granted)

    def lost_memory(self) -> None:
        """Forget what it held: its KV is recomputed, or comes back from the host."""
        self._spare = 0
        self.resolve()
        self.track = None


def new_state(request: Request, config: EngineConfig) -> RequestState:
    """Return a request as an engine with these limits takes it in."""
    num_drafts = config.num_speculative_tokens
    if not num_drafts:
        return RequestState(request)
    # Who plans ahead names what came out of a step when it is known, in all releases.
    names_accepted = config.names_accepted_drafts and not config.async_scheduling
    return SpeculatingState(request, num_drafts, names_accepted)


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
    track = Track(config, state.num_computed_tokens, state.spare_tokens, state.unresolved_tokens)
    track.extend(b"\1", bytes([drafted]))
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
    start, context = state.num_output_tokens, state.num_computed_tokens
    place = start
    longest = config.max_model_len - 2 - context + start  # for how many tokens there is room
    track = Track(config, context, state.spare_tokens, state._unresolved)
    once, most = state.draft_once, state.drafts
    state.draft_once = -1
    unresolved = most if config.async_scheduling else 0  # at most, from the second one on
    while place < length:
        before = track.unresolved_before(len(track.bursts)) if track.plans_ahead else 0
        room = longest - max(unresolved, before)
        if once < 0 and place + most <= room:
            bursts, drafted = outcome.verify_on(place, most, min(length, room - most + 1))
        else:
            wanted = most if once < 0 else once
            room = longest - before - place
            found, accepted = outcome.verify(place, max(0, min(wanted, room)))
            bursts, drafted = bytes([accepted + 1]), bytes([found])
        track.extend(bursts, drafted)
        place = start + track.num_tokens
        once = -1
    if place > length:  # what comes out is cut off at the end
        track.cut(place - length)
    return track
