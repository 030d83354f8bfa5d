"""The decision of one step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import filterfalse
from typing import Final, Literal

from mypy_extensions import mypyc_attr

from schedlab.sim.request import RequestState

FOREVER: Final = (1 << 62) - 1
"""`max_steps` or `until_ns` of a promise without a limit: the largest integer that compiled code
keeps in a register."""

Finished = Literal["leave", "hold", "hold_answer"]
Parts = tuple[tuple[int, tuple[int, ...]], ...]
"""KV blocks to load: the number of a tier, and names of blocks there."""


@mypyc_attr(free_list_len=1)
class BatchPlan:
    """What one step does. An empty plan means "wait".

    The promise: with no event (arrival, finish, KV shortage) the policy would return this same
    plan at each of the next `max_steps` step starts that lie before `until_ns`. The default
    promises nothing, which is exact and only slower; so does, whatever it says, a plan that
    computes a chunk, admits, preempts or rejects, because it cannot be the same twice.

    Attributes
    ----------
    decodes : tuple of RequestState or None
        Requests that decode one token; `None` stands for every decoding request. Those who go on
        decoding, but for `left`, and `joining` are listed when somebody asks for the first time.
    chunks : tuple of (RequestState, int)
        Prompts (or recomputed sequences) and how many of their tokens to compute.
    admitted : tuple of RequestState
        Requests that leave the queue and take a seat in this step.
    preempted : tuple of RequestState
        Running requests that lose their KV memory and go back to the queue.
    swapped : tuple of RequestState
        Those of them whose KV is kept in host memory; the others are recomputed.
    rejected : tuple of (RequestState, str)
        Requests given up, and why.
    padding_tokens : int
        Tokens computed for nobody.
    finished : {"leave", "hold", "hold_answer"}
        What becomes of requests that finish: they leave; they keep seat and memory until no
        unfinished request runs; or their answer waits until then as well.
    pad_finished : bool
        Whether the rows of held requests are computed along.
    max_steps, until_ns : int
        The promise.
    start_ns : int
        When its first step starts.
    list_decodes : callable
        Lists every decoding request, where `decodes` is `None`.
    trimmed : tuple of (RequestState, int)
        Requests with fewer drafts than they have elsewhere, for want of budget, and how many.
    loading : tuple of (RequestState, Parts)
        Those of the admitted whose KV is loaded from lower tiers before they are computed: what
        the prefix cache lacks, or, of those that were swapped out and so have no parts, all.
    left, joining : list of RequestState, or None
        Who of those in the `DecodeBatch` does not decode, and who is not in it and does, in the
        order of `decodes`; `None` where the builder did not come to know. Whoever carries the plan
        out need not look for them then.
    """

    __slots__ = (
        "_decodes", "_members", "admitted", "chunks", "finished", "joining", "left",
        "list_decodes", "loading", "max_steps", "pad_finished", "padding_tokens", "preempted",
        "rejected", "start_ns", "swapped", "trimmed", "until_ns",
    )  # fmt: skip

    def __init__(
        self,
        decodes: tuple[RequestState, ...] | None,
        chunks: tuple[tuple[RequestState, int], ...],
        admitted: tuple[RequestState, ...],
        preempted: tuple[RequestState, ...],
        swapped: tuple[RequestState, ...],
        rejected: tuple[tuple[RequestState, str], ...],
        padding_tokens: int,
        finished: Finished,
        pad_finished: bool,
        max_steps: int,
        until_ns: int,
        start_ns: int,
        list_decodes: Callable[[], tuple[RequestState, ...]],
        trimmed: tuple[tuple[RequestState, int], ...] = (),
        loading: tuple[tuple[RequestState, Parts], ...] = (),
        left: list[RequestState] | None = None,
        joining: list[RequestState] | None = None,
        members: tuple[RequestState, ...] | None = None,
    ) -> None:
        self._decodes = decodes
        self._members = members  # who decodes are but for `left`, before `joining`, if not listed
        self.chunks = chunks
        self.admitted = admitted
        self.preempted = preempted
        self.swapped = swapped
        self.rejected = rejected
        self.padding_tokens = padding_tokens
        self.finished: Finished = finished
        self.pad_finished = pad_finished
        self.max_steps = max_steps
        self.until_ns = until_ns
        self.start_ns = start_ns
        self.list_decodes = list_decodes
        self.trimmed = trimmed
        self.loading = loading
        self.left = left
        self.joining = joining

    @property
    def decodes(self) -> tuple[RequestState, ...] | None:
        """Return who decodes one token, or `None` for all; see above."""
        if self._members is not None:
            gone = set(self.left or ())
            self._decodes = (*filterfalse(gone.__contains__, self._members), *(self.joining or ()))
            self._members = None
        return self._decodes

    @decodes.setter
    def decodes(self, states: tuple[RequestState, ...] | None) -> None:
        self._decodes, self._members = states, None

    @property
    def num_decodes(self) -> int:
        """How many `decodes` are, without listing them; -1 for `None`."""
        if self._members is not None:
            return len(self._members) - len(self.left or ()) + len(self.joining or ())
        return -1 if self._decodes is None else len(self._decodes)

    def num_scheduled_tokens(self) -> dict[int, int]:
        """Write the plan out as vLLM does: {request id: tokens}. O(batch), so only on demand."""
        tokens = {state.id: state.decode_tokens for state in self.decoding()}
        tokens.update((state.id, 1 + drafts) for state, drafts in self.trimmed)
        loading = [state for state, _ in self.loading]
        tokens.update(
            (s.id, 1) for s in self.admitted if (s.swapped or s.next_is_decode) and s not in loading
        )
        tokens.update((state.id, n) for state, n in self.chunks)
        return tokens

    def decoding(self) -> tuple[RequestState, ...]:
        """List the requests that decode; valid until the step is done."""
        decodes = self.decodes
        if decodes is not None:
            return decodes
        return tuple(s for s in self.list_decodes() if s not in self.preempted)

    def decision(self) -> tuple[object, ...]:
        """Return what two plans must agree on to be the same decision."""
        return (
            tuple(sorted(self.num_scheduled_tokens().items())),
            tuple(s.id for s in self.admitted),
            tuple(s.id for s in self.preempted),
            tuple(s.id for s in self.swapped),
            tuple((s.id, why) for s, why in self.rejected),
            self.padding_tokens,
            self.finished,
            self.pad_finished,
            tuple((s.id, sum(len(names) for _, names in parts)) for s, parts in self.loading),
        )
