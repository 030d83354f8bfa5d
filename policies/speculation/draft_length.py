"""What every draft length is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from schedlab.policies.knobs import Knobs
from schedlab.sim.core.draft_length import Decoding
from schedlab.sim.sums import in_order


class DraftLength(Knobs):
    """Chooses how many tokens are drafted for whom, whenever other requests decode than before.

    A subclass overrides `choose`. Its constructor only stores its parameters.
    """

    source: ClassVar[str] = ""
    """Paper section or code that it follows."""

    def choose(self, decoding: Decoding) -> Sequence[int]:
        """Return how many tokens to draft for each of `decoding.requests`, at least one of them.

        None of the numbers is larger than `decoding.most`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override choose()")


def expected_tokens(rate: float, drafts: int) -> float:
    """Return how many tokens a verification yields in the mean.

    Parameters
    ----------
    rate : float
        Chance that a drafted token is accepted if those before it were.
    drafts : int
        Tokens drafted.

    Notes
    -----
    ``1 + rate + ... + rate^drafts = (1 - rate^(drafts + 1)) / (1 - rate)``

    Source: Leviathan et al., ICML 2023, equation 1.

    Examples
    --------
    >>> expected_tokens(0.5, 2)
    1.75
    """
    return in_order([rate**i for i in range(drafts + 1)])


def acceptance_rate(decoding: Decoding, prior: float, weight: float) -> float:
    """Estimate the chance that a drafted token is accepted from how drafts fared so far.

    Parameters
    ----------
    decoding : Decoding
        How they fared.
    prior : float
        What is believed before any was verified.
    weight : float
        For how many tokens that counts.
    """
    accepted, cut_short = decoding.num_accepted, decoding.num_cut_short
    return (accepted + prior * weight) / (accepted + cut_short + weight)


def require_rate(name: str, rate: float) -> None:
    """Raise ValueError unless a number is in [0, 1]."""
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {rate}")
