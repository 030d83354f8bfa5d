"""Which drafted tokens are those that the model generates: drawn by request and place."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.core.track import Outcome
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Request


class DrawnAcceptance:
    """Each drafted token is accepted by chance, as long as all before it in its draft are.

    Parameters
    ----------
    rates : sequence of float
        Chance of the 1st, 2nd, .. token of a draft, given that those before it were accepted; the
        last one holds for all behind it.
    spread : float
        Standard deviation, from request to request, of what the rates are scaled with: each request
        draws its own rate once, of a Beta distribution with the mean of the first rate. 0 = all
        requests are alike.
    seed : int
        Of the experiment.

    Raises
    ------
    SpecError
        If a rate is no number in [0, 1], or the spread more than such rates can have.

    Notes
    -----
    The token at place i of an answer is accepted as the j-th of a draft if ``u_i < rate_j``, where
    u_i is the i-th number of a counter-based generator (Philox) with the key (seed, request). So it
    depends neither on the schedule, nor on how many tokens were drafted before, nor on who else
    runs. With one rate a for all, a verification of k tokens yields in the mean
    ``(1 - a^(k+1)) / (1 - a)`` (Leviathan et al., ICML 2023, equation 1).
    """

    def __init__(self, rates: Sequence[float], spread: float = 0.0, seed: int = 0) -> None:
        if not rates:
            raise SpecError("acceptance needs at least one rate")
        for rate in rates:
            if not 0 <= rate <= 1:
                raise SpecError(f"an acceptance rate must be in [0, 1], got {rate}")
        mean = rates[0]
        if not (math.isfinite(spread) and spread >= 0):
            raise SpecError(f"the spread of acceptance must be >= 0, got {spread}")
        if spread and spread**2 >= mean * (1 - mean):
            most = math.sqrt(mean * (1 - mean))
            raise SpecError(
                f"the spread of acceptance must be below {most:.3g}, the standard deviation of "
                f"requests that accept all or nothing with a mean of {mean}; got {spread}"
            )
        self._rates = [float(rate) for rate in rates]
        self._spread = spread
        key = (seed << 32 | zlib.crc32(b"acceptance")) & (1 << 64) - 1
        self._rng = np.random.Generator(np.random.Philox(key=np.array([key, 0], dtype=np.uint64)))
        self._fresh: dict[str, Any] = dict(self._rng.bit_generator.state)

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request with an answer of so many tokens."""
        rng, rates = self._rng, self._rates
        # To give a generator another key costs a fraction of making one.
        self._fresh["state"]["key"][1] = request.id
        rng.bit_generator.state = self._fresh
        if self._spread:
            mean = rates[0]
            weight = mean * (1 - mean) / self._spread**2 - 1
            scale = rng.beta(mean * weight, (1 - mean) * weight) / mean
            rates = [min(rate * scale, 1.0) for rate in rates]
        return _Drawn(rng.random(output_tokens), rates)


class _Drawn:
    """What becomes of the drafts of one request, by a number for each place of its answer."""

    __slots__ = ("_accepted", "_draws", "_rates")

    def __init__(self, draws: npt.NDArray[np.float64], rates: list[float]) -> None:
        self._draws = draws
        self._rates = rates
        self._accepted: dict[int, list[int]] = {}

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft `most` tokens; see `Outcome`. Tokens behind the end of the answer are rejected."""
        return most, self._at_each_place(most)[place]

    def verify_on(self, place: int, most: int, stop: int) -> tuple[list[int], list[int]]:
        """Draft `most` tokens time after time; see `Outcome`."""
        accepted = self._at_each_place(most)
        places: list[int] = []
        while place < stop:
            place += accepted[place] + 1
            places.append(place)
        return places, [most] * len(places)

    def _at_each_place(self, most: int) -> list[int]:
        """Count how many of `most` drafted tokens are accepted, by the place of the first."""
        found = self._accepted.get(most)
        if found is not None:
            return found
        draws, rates = self._draws, self._rates
        accepted = np.zeros(len(draws), dtype=np.int64)
        right = np.ones(len(draws), dtype=bool)
        for i in range(min(most, len(draws))):
            right = right[: len(draws) - i]
            right &= draws[i:] < rates[min(i, len(rates) - 1)]
            accepted[: len(right)] += right
        counts: list[int] = accepted.tolist()
        self._accepted[most] = counts
        return counts
