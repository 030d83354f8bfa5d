"""Which drafted tokens are those that the model generates: drawn by request and place."""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left
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
        state: dict[str, Any] = dict(self._rng.bit_generator.state)
        self._key: list[int] = [key, 0]
        self._fresh = {
            **state,
            "state": {"counter": state["state"]["counter"].tolist(), "key": self._key},
            "buffer": state["buffer"].tolist(),
        }

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request with an answer of so many tokens."""
        rng, rates = self._rng, self._rates
        # To give a generator another key costs a fraction of making one, of lists still less.
        self._key[1] = request.id
        rng.bit_generator.state = self._fresh
        if self._spread:
            mean = rates[0]
            weight = mean * (1 - mean) / self._spread**2 - 1
            scale = rng.beta(mean * weight, (1 - mean) * weight) / mean
            rates = [min(rate * scale, 1.0) for rate in rates]
        return _Drawn(rng.random(output_tokens), rates)


class _Drawn:
    """What becomes of the drafts of one request, by a number for each place of its answer."""

    __slots__ = ("_right", "_wrong")

    def __init__(self, draws: npt.NDArray[np.float64], rates: list[float]) -> None:
        # Places where a token is wrong, with one rate; else which are right as the 1st, 2nd, .. .
        self._wrong: list[int] = []
        self._right: list[bytes] = []
        if len(rates) == 1:
            self._wrong = (draws >= rates[0]).nonzero()[0].tolist()
            self._wrong.append(len(draws))  # nothing is right behind the end
        else:
            self._right = [(draws < rate).tobytes() + b"\0" for rate in rates]

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft `most` tokens; see `Outcome`. Tokens behind the end of the answer are rejected."""
        bursts, _ = self.verify_on(place, most, place + 1)
        return most, bursts[0] - 1

    def verify_on(self, place: int, most: int, stop: int) -> tuple[list[int], list[int]]:
        """Draft `most` tokens time after time; see `Outcome`."""
        right, last, longest = self._right, len(self._right) - 1, most + 1
        bursts: list[int] = []
        if not right:
            # As many at once as a draft can have, then those up to the one that is wrong.
            for wrong in self._wrong[bisect_left(self._wrong, place) :]:
                tokens = wrong + 1 - place
                while tokens > longest:
                    bursts.append(longest)
                    tokens -= longest
                bursts.append(tokens)
                place = wrong + 1
                if place >= stop:
                    break
            while bursts and place - bursts[-1] >= stop:
                place -= bursts.pop()
        while place < stop:
            tokens = 1
            while tokens < longest and right[min(tokens - 1, last)][place + tokens - 1]:
                tokens += 1
            place += tokens
            bursts.append(tokens)
        return bursts, [most] * len(bursts)
