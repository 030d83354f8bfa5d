"""How far the steps of a run scatter about what they are priced at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.rng import uniforms

_DRAWN = 1024
"""So many factors are drawn at a time."""


@dataclass(frozen=True, slots=True)
class StepSpread:
    """How many times as long steps take as their price says, as was measured in runs.

    A profile says what a step takes on the whole. Single steps take less or more: the machine does
    other things beside, caches hold this or that. In the mean that is nothing, in a queue it is
    waiting time.

    Attributes
    ----------
    decode_steps : tuple of float
        Factors of steps without prompt tokens, ascending, each the mean over an equal share of
        their time; together they have the mean one.
    prompt_steps : tuple of float
        Those of the others.
    num_alike : int
        So many steps in a row are fast or slow together.
    """

    decode_steps: tuple[float, ...]
    prompt_steps: tuple[float, ...]
    num_alike: int = 1

    def __post_init__(self) -> None:
        for key in ("decode_steps", "prompt_steps"):
            factors = getattr(self, key)
            if not factors or not all(math.isfinite(f) and f > 0 for f in factors):
                raise SpecError(f"step_spread.{key}: give numbers > 0, got {factors!r}")
            if abs(math.fsum(factors) / len(factors) - 1) > 1e-3:
                raise SpecError(f"step_spread.{key}: the mean must be 1")
        if self.num_alike < 1:
            raise SpecError(f"step_spread.num_alike must be at least 1, got {self.num_alike!r}")


class Scatter:
    """Draws how long the steps of one engine take.

    Parameters
    ----------
    spread : StepSpread
        What was measured.
    seed : int
        Of the experiment.
    draw, engine : int
        Tell one run, and one engine, from another.

    Notes
    -----
    The factor of a step depends on these and on its number alone, so that skipping ahead changes
    nothing, and neither does who asks first. A stretch of `num_alike` steps draws one number, which
    stands for a place among the factors of either kind: a slow moment is slow for both.
    """

    def __init__(self, spread: StepSpread, seed: int, draw: int, engine: int) -> None:
        self._spread = spread
        self._key = seed, draw, engine
        self._first = 0
        self._places: list[float] = []

    def scattered(self, durations_ns: list[int], first: int, has_prompts: bool) -> list[int]:
        """Return what successive steps take, of which the first has the number `first`."""
        factors = self._spread.prompt_steps if has_prompts else self._spread.decode_steps
        num = len(factors)
        return [
            max(1, int(d * factors[int(self._place(first + i) * num)] + 0.5))
            for i, d in enumerate(durations_ns)
        ]

    def _place(self, step: int) -> float:
        at = step // self._spread.num_alike - self._first
        if not 0 <= at < len(self._places):
            self._first += at
            at = 0
            seed, draw, engine = self._key
            stretches = np.arange(self._first, self._first + _DRAWN)
            which = (np.full(_DRAWN, number) for number in (draw, engine))
            self._places = uniforms(seed, "step times", *which, stretches).tolist()
        return self._places[at]
