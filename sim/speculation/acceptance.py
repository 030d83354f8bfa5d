"""Which drafted tokens are those that the model generates: drawn by request and place."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from librt.strings import BytesWriter
from mypy_extensions import i64

from schedlab.sim.core.track import Outcome, with_last
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Request

_Raw = npt.NDArray[np.unsignedinteger]

_REQUESTS: Final = 16
_PLACES: Final = 512
"""For so many requests with successive numbers, and so many places of their answers, numbers are
drawn at once: numpy is called so much less often that those nobody comes to are cheap."""

_BLOCK: Final = _PLACES // 8
"""Bytes that say of so many places whether a token is right."""

_LOTS_KEPT: Final = 256
_WARM_UP: Final = 16
"""Numbers dropped so that the keys of lots, which are alike, are mixed; its author takes 12."""


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
    u_i is a number of its own, of 32 bits, drawn by seed, request and place (SFC64, keyed by seed
    and lot). So it depends neither on the schedule, nor on how many tokens were drafted before, nor
    on who else runs. With one rate a for all, a verification of k tokens yields in the mean
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
        self._num_rates = len(rates)
        self._rates = np.array(rates, dtype=np.float64).reshape(-1, 1, 1)
        self._below = _below(self._rates)
        self._spread = spread
        # Of a lot of requests the blocks of places drawn so far: of each rate and request a bit for
        # each place, the first one lowest, 1 where a token is right.
        self._lots: dict[int, list[bytes]] = {}
        self._rng = np.random.Generator(np.random.SFC64(0))
        self._random_raw: Callable[[int], _Raw] = self._rng.bit_generator.random_raw
        key = (seed << 32 | zlib.crc32(b"acceptance")) & (1 << 64) - 1
        self._key = [key, 0, 0, 1]
        self._fresh = {**self._rng.bit_generator.state, "state": {"state": self._key}}

    def outcome(self, request: Request, output_tokens: int) -> Outcome:
        """Return what becomes of the drafts of a request with an answer of so many tokens."""
        lot, member = request.id // _REQUESTS, request.id % _REQUESTS
        blocks = self._lots.get(lot)
        if blocks is None:
            if len(self._lots) == _LOTS_KEPT:
                del self._lots[next(iter(self._lots))]
            blocks = self._lots[lot] = []
        while len(blocks) * _PLACES < output_tokens:
            blocks.append(self._draw(lot, len(blocks)))
        if self._num_rates == 1 and len(blocks) == 1:
            begin = member * _BLOCK
            return _OneRate(blocks[0][begin : begin + _BLOCK], output_tokens)
        right: list[bytes] = []
        for i in range(member, self._num_rates * _REQUESTS, _REQUESTS):
            of_blocks = [block[i * _BLOCK : (i + 1) * _BLOCK] for block in blocks]
            right.append(b"".join(of_blocks))
        if len(right) == 1:
            return _OneRate(right[0], output_tokens)
        return _Rates(right, output_tokens)

    def _draw(self, lot: int, block: int) -> bytes:
        """Draw which tokens are right at a block of places of a lot of requests."""
        below = self._below
        if self._spread:
            mean = float(self._rates[0, 0, 0])
            weight = mean * (1 - mean) / self._spread**2 - 1
            self._seek(lot, 0)
            self._random_raw(_WARM_UP)
            scale = self._rng.beta(mean * weight, (1 - mean) * weight, (_REQUESTS, 1)) / mean
            below = _below(np.minimum(self._rates * scale, 1.0))
        self._seek(lot, 1 + block)
        drawn = self._random_raw(_WARM_UP + _REQUESTS * _PLACES // 2)[_WARM_UP:]
        numbers = drawn.view(np.uint32).reshape(_REQUESTS, _PLACES)
        return np.packbits(numbers < below, bitorder="little").tobytes()

    def _seek(self, lot: int, what: int) -> None:
        """Let the generator go on where nothing else of the lot, and of others, is drawn.

        Its first `_WARM_UP` numbers are to be dropped.
        """
        self._key[1:3] = lot, what
        # To give it another state costs a fraction of making one, of a list still less.
        self._rng.bit_generator.state = self._fresh


def _below(rates: npt.NDArray[np.float64]) -> _Raw:
    """Return the numbers of 32 bits below which those drawn are at some rates."""
    numbers = np.ceil(rates * 2.0**32)
    return numbers.astype(np.uint32 if numbers.max() < 2**32 else np.uint64)


class _OneRate:
    """What becomes of the drafts of one request that are right as often at every place."""

    __slots__ = ("_num_places", "_right")

    def __init__(self, right: bytes, num_places: int) -> None:
        # A bit for each place, and some behind the end, which say nothing.
        self._right = right
        self._num_places = num_places

    def verify(self, place: int, most: int) -> tuple[int, int]:
        """Draft `most` tokens; see `Outcome`. Tokens behind the end of the answer are rejected."""
        bursts, _ = self.verify_on(place, most, place + 1)
        return most, bursts[0] - 1

    def verify_on(self, place: int, most: int, stop: int) -> tuple[bytes, bytes]:
        """Draft `most` tokens time after time; see `Outcome`."""
        if place >= stop:
            return b"", b""
        table = _TABLES.get(most)
        if table is None:
            table = _TABLES[most] = _Table(most)
        found, behind, right, bursts = table.found, table.behind, self._right, BytesWriter()
        # Eight places at once. Of the first, those before `place` count as wrong: bursts to drop.
        first, dropped = place // 8, place % 8
        last = (min(stop + most, self._num_places) + 7) // 8
        at: i64 = right[first] >> dropped << dropped
        bursts.write(found[at])
        begun: i64 = behind[at]
        next_one: i64 = first + 1
        behind_last: i64 = last
        i: i64
        for i in range(next_one, behind_last):
            at = begun << 8 | right[i]
            bursts.write(found[at])
            begun = behind[at]
        end: i64 = 8 * last
        if begun:
            bursts.append(begun + 1)
            end += 1
        came = bursts.getvalue()
        count: i64 = len(came)
        size: i64 = came[count - 1]
        while end - size >= stop:
            end -= size
            count -= 1
            size = came[count - 1]
        came = came[dropped:count]
        over: i64 = end - self._num_places - 1
        if over > 0:  # what is drafted behind the end is wrong
            came = with_last(came, size - over)
        return came, table.drafted * len(came)


class _Table:
    """What becomes of eight places where so many tokens are drafted.

    An index is the number of tokens that were right before those places in the same verification,
    and behind it a bit for each place, the first one lowest: 1 where a token is right.

    Attributes
    ----------
    found : list of bytes
        Bursts that end within the places.
    behind : bytes
        Tokens of the one that goes on behind them.
    drafted : bytes
        So many tokens, as a byte.
    """

    __slots__ = ("behind", "drafted", "found")

    def __init__(self, most: int) -> None:
        self.drafted = bytes([most])
        self.found: list[bytes] = []
        behind = BytesWriter()
        for begun in range(most + 1):
            for eight in range(256):
                bursts, tokens = BytesWriter(), begun
                for bit in range(8):
                    tokens += 1
                    if tokens > most or not eight >> bit & 1:
                        bursts.append(tokens)
                        tokens = 0
                self.found.append(bursts.getvalue())
                behind.append(tokens)
        self.behind = behind.getvalue()


_TABLES: Final[dict[int, _Table]] = {}
"""By the tokens drafted: worked out once."""


class _Rates:
    """What becomes of the drafts of one request, where a token's place in its draft matters."""

    __slots__ = ("_right",)

    def __init__(self, right: list[bytes], num_places: int) -> None:
        # Of each place, whether it is right as the 1st, 2nd, .. of a draft. Nothing is, behind the
        # end.
        there = (1 << num_places) - 1
        numbers = [int.from_bytes(bits, "little") & there for bits in right]
        self._right = [f"{bits:0{num_places + 1}b}"[::-1] for bits in numbers]

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
            while tokens < longest and right[min(tokens - 1, last)][place + tokens - 1] == "1":
                tokens += 1
            place += tokens
            bursts.append(tokens)
        return bursts.getvalue(), bytes([most]) * len(bursts)
