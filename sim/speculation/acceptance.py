"""Which drafted tokens are those that the model generates: drawn by request and place."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from librt.strings import BytesWriter
from mypy_extensions import i64

from schedlab.sim.core.track import Outcome
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Request

_Raw = npt.NDArray[np.uint64]


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
        self._below = [_raw(rate) for rate in self._rates]
        self._spread = spread
        key = (seed << 32 | zlib.crc32(b"acceptance")) & (1 << 64) - 1
        self._rng = np.random.Generator(np.random.Philox(key=np.array([key, 0], dtype=np.uint64)))
        self._random_raw: Callable[[int], _Raw] = self._rng.bit_generator.random_raw
        state: dict[str, Any] = dict(self._rng.bit_generator.state)
        self._key: list[int] = [key, 0]
        self._fresh = {
            **state,
            "state": {"counter": state["state"]["counter"].tolist(), "key": self._key},
            "buffer": state["buffer"].tolist(),
        }

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request with an answer of so many tokens."""
        rng, below = self._rng, self._below
        # To give a generator another key costs a fraction of making one, of lists still less.
        self._key[1] = request.id
        rng.bit_generator.state = self._fresh
        if self._spread:
            mean = self._rates[0]
            weight = mean * (1 - mean) / self._spread**2 - 1
            scale = rng.beta(mean * weight, (1 - mean) * weight) / mean
            below = [_raw(min(rate * scale, 1.0)) for rate in self._rates]
        draws = self._random_raw(output_tokens)
        return _OneRate(draws < below[0]) if len(below) == 1 else _Rates(draws, below)


def _raw(rate: float) -> _Raw:
    """Return the number of 64 bits below which a generator's are drawn at a rate.

    A number in [0, 1) is the highest 53 of such bits. To compare them as they are is sooner done
    than to make floating-point numbers of them first.
    """
    number = math.ceil(rate * 2**53) << 11
    return np.array(number, dtype=np.uint64 if number < 2**64 else object)


class _OneRate:
    """What becomes of the drafts of one request that are right as often at every place."""

    __slots__ = ("_right",)

    def __init__(self, right: npt.NDArray[np.bool_]) -> None:
        self._right = right

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft `most` tokens; see `Outcome`. Tokens behind the end of the answer are rejected."""
        bursts, _ = self.verify_on(place, most, place + 1)
        return most, bursts[0] - 1

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Draft `most` tokens time after time; see `Outcome`."""
        found, behind = _table(most)
        bursts = BytesWriter()
        # Eight places at once. Where there are none, behind the end, tokens are wrong.
        eights = np.packbits(self._right[place : stop + most]).tobytes()
        begun: i64 = 0
        i: i64
        for i in range(len(eights)):
            at: i64 = begun << 8 | eights[i]
            bursts.write(found[at])
            begun = behind[at]
        end = place + 8 * len(eights)
        if begun:
            bursts.append(begun + 1)
            end += 1
        came = bursts.getvalue()
        count = len(came)
        while count and end - came[count - 1] >= stop:
            count -= 1
            end -= came[count]
        return came[:count], bytes([most]) * count


@cache
def _table(most: int) -> tuple[list[bytes], bytes]:
    """Return what becomes of eight places where so many tokens are drafted.

    An index is the number of tokens that were right before those places in the same verification,
    and behind it a bit for each place, the first one highest: 1 where a token is right.

    Returns
    -------
    found : list of bytes
        Bursts that end within the places.
    behind : bytes
        Tokens of the one that goes on behind them.
    """
    found, behind = [], BytesWriter()
    for begun in range(most + 1):
        for eight in range(256):
            bursts, tokens = BytesWriter(), begun
            for bit in range(7, -1, -1):
                tokens += 1
                if tokens > most or not eight >> bit & 1:
                    bursts.append(tokens)
                    tokens = 0
            found.append(bursts.getvalue())
            behind.append(tokens)
    return found, behind.getvalue()


class _Rates:
    """What becomes of the drafts of one request, where a token's place in its draft matters."""

    __slots__ = ("_right",)

    def __init__(self, draws: _Raw, below: list[_Raw]) -> None:
        # Of each place, whether it is right as the 1st, 2nd, .. of a draft. Nothing is, behind the
        # end.
        self._right = [(draws < number).tobytes() + b"\0" for number in below]

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft `most` tokens; see `Outcome`. Tokens behind the end of the answer are rejected."""
        bursts, _ = self.verify_on(place, most, place + 1)
        return most, bursts[0] - 1

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Draft `most` tokens time after time; see `Outcome`."""
        right, last, longest = self._right, len(self._right) - 1, most + 1
        bursts = BytesWriter()
        while place < stop:
            tokens = 1
            while tokens < longest and right[min(tokens - 1, last)][place + tokens - 1]:
                tokens += 1
            place += tokens
            bursts.append(tokens)
        return bursts.getvalue(), bytes([most]) * len(bursts)
