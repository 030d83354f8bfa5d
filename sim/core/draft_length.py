"""How many tokens are drafted for whom: asked anew whenever other requests decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from schedlab.sim.core.lifecycle import Lifecycle
from schedlab.sim.core.speculative_batch import SpeculativeBatch
from schedlab.sim.core.track import SpeculatingState
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import PolicyError
from schedlab.sim.own_code import FAULTS, raised, short, whole
from schedlab.sim.request import RequestState


class Decoding:
    """What a draft length is chosen by: who decodes, and how drafts fared so far.

    Attributes
    ----------
    now_ns : int
        The time.
    requests : sequence of RequestState
        Those that decode, in the order of their joining.
    most : int
        Most tokens to draft for one of them.
    num_accepted, num_cut_short : int
        Drafted tokens that came out so far, and drafts that ended with a rejected token. The share
        of the first among both estimates the chance that a token is accepted.
    """

    def __init__(
        self,
        now_ns: int,
        requests: Sequence[RequestState],
        most: int,
        batch: SpeculativeBatch,
        estimate_ns: Callable[[BatchShape], int],
    ) -> None:
        self.now_ns = now_ns
        self.requests = requests
        self.most = most
        self.num_accepted = batch.num_accepted
        self.num_cut_short = batch.num_cut_short
        self._estimate_ns = estimate_ns

    def step_ns(self, drafts: int) -> int:
        """Estimate a step in which each of the requests verifies so many drafted tokens."""
        contexts = [state.num_computed_tokens for state in self.requests]
        count = len(contexts)
        return self._estimate_ns(
            BatchShape(
                num_decodes=count,
                decode_context_sum_tokens=sum(contexts),
                decode_context_max_tokens=max(contexts),
                rows_sampled=count,
                num_running=count,
                decode_context_min_tokens=min(contexts),
                draft_tokens=count * drafts,
            )
        )


class DraftLength(Protocol):
    """Chooses how many tokens to draft."""

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Return how many tokens to draft for each of `decoding.requests`, at least one of them."""


class Drafting:
    """Lets a `DraftLength` choose, and those drafts be made.

    The choice holds until another request decodes or one does no longer, so that steps in between
    are alike and can be taken at once.

    Parameters
    ----------
    requests : Lifecycle
        Who may decode.
    length : DraftLength
        Who chooses.
    estimate_ns : callable
        Estimates the time of a step.
    """

    def __init__(
        self, requests: Lifecycle, length: DraftLength, estimate_ns: Callable[[BatchShape], int]
    ) -> None:
        self._requests = requests
        self._length = length
        self._estimate_ns = estimate_ns
        self._chosen_at = 0
        batch = requests.decodes
        assert isinstance(batch, SpeculativeBatch)
        batch.counts_cut_short = True

    @property
    def is_due(self) -> bool:
        """Whether others decode than at the last choice."""
        return self._requests.num_turnovers != self._chosen_at

    def choose(self, now_ns: int) -> None:
        """Choose anew, if others decode than at the last choice.

        Raises
        ------
        PolicyError
            If what is chosen is no number of drafts for each.
        """
        requests = self._requests
        batch = requests.decodes
        assert isinstance(batch, SpeculativeBatch)
        if not self.is_due:
            return
        self._chosen_at = requests.num_turnovers
        members = [*batch.members.values(), *requests.paused.values()]
        if members:
            most = requests.config.num_speculative_tokens
            decoding = Decoding(now_ns, members, most, batch, self._estimate_ns)
            chosen = self._asked(decoding)
            for state, drafts in zip(members, chosen, strict=True):
                assert isinstance(state, SpeculatingState)
                if drafts != state.drafts:
                    state.drafts = drafts
                    requests.draft_anew(state, -1)

    def _asked(self, decoding: Decoding) -> list[int]:
        """Ask for the lengths, and check the answer."""
        name = f"draft length {type(self._length).__name__}: choose()"
        count, most = len(decoding.requests), decoding.most
        try:
            # What a class of the user's returns may be anything; a generator is run by listing it.
            answer: object = self._length.choose(decoding)
            given = list(answer) if isinstance(answer, Iterable) else None
        except FAULTS as error:
            raise PolicyError(f"{name} raised {raised(error, type(self._length))}") from error
        if given is None:
            raise PolicyError(f"{name} returned {short(answer)}, which is no list of lengths")
        if len(given) != count:
            raise PolicyError(f"{name} returned {len(given)} lengths for {count} requests")
        lengths = []
        for drafts in given:
            length = whole(drafts)
            if length is None or not 0 <= length <= most:
                raise PolicyError(
                    f"{name} returned {short(drafts)}, which is no whole number of tokens between "
                    f"0 and num_speculative_tokens ({most})"
                )
            lengths.append(length)
        return lengths
